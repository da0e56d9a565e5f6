//! Adopting the VMs of a datastore.

use vmseal_api::adopt::{AdoptStatus, AdoptVms, Adoption};
use vmseal_api::client::ServerClient;

use super::task;
use crate::arguments::{Adopt, Output};
use crate::exit::{Ended, Exit};
use crate::print::{self, adoption};

pub async fn run(server: &ServerClient, output: Output, adopt: Adopt) -> anyhow::Result<()> {
    let Adopt { name, vms, rename, policy, vcpus, memory, .. } = adopt;
    let Adopt { unauthenticated, discard_newer, wait, dry_run, .. } = adopt;
    let request = AdoptVms { vms, rename, policy, vcpus, memory, unauthenticated, discard_newer };
    let tried = if dry_run.dry_run { "?dry_run=true" } else { "" };
    let found: Adoption = server.post(&format!("datastores/{name}/adopt{tried}"), &request).await?;
    adoption::show(output, &found)?;
    if dry_run.dry_run {
        print::say("dry run: nothing was changed");
    }
    let tasks: Vec<_> =
        found.vms.iter().filter_map(|vm| vm.task).map(|id| id.to_string()).collect();
    if !wait.no_wait {
        task::until_ended(server, &tasks, wait.timeout).await?;
    }
    let refused = found.vms.iter().filter(|vm| vm.status == AdoptStatus::Refused).count();
    match refused {
        0 => Ok(()),
        _ => {
            let message = format!("VMs that cannot be adopted as things are: {refused}");
            Err(Ended::new(Exit::Conflict, message).into())
        }
    }
}
