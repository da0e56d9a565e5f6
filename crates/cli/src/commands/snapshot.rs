//! Snapshots of VMs.

use vmseal_api::client::ServerClient;
use vmseal_api::model;
use vmseal_api::request::{RevertSnapshot, TakeSnapshot};

use super::{list, task};
use crate::arguments::{Output, Snapshot};

pub async fn run(server: &ServerClient, output: Output, verb: Snapshot) -> anyhow::Result<()> {
    match verb {
        Snapshot::List { vm, how } => list::run(server, output, &how, &path(&vm)).await,
        Snapshot::Show { vm, snapshot, watch } => {
            let path = one(&vm, &snapshot);
            list::one_with(server, output, watch, details, "vm", async || server.get(&path).await)
                .await
        }
        Snapshot::Create { vm, name, description, no_quiesce, memory, dry_run, wait } => {
            let request = TakeSnapshot { name, description, quiesce: !no_quiesce, memory };
            task::begin(server, output, &path(&vm), &request, &dry_run, &wait).await
        }
        Snapshot::Revert { vm, snapshot, running, discard_memory, dry_run, wait } => {
            let path = format!("{}/revert", one(&vm, &snapshot));
            // A server of an earlier version takes no body.
            if !running && !discard_memory {
                return task::begin(server, output, &path, &(), &dry_run, &wait).await;
            }
            let request = RevertSnapshot { running, discard_memory };
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        Snapshot::Delete { vm, snapshot, dry_run, wait } => {
            task::begin_deletion(server, output, &one(&vm, &snapshot), &dry_run, &wait).await
        }
    }
}

fn details(snapshot: &model::Snapshot) -> Vec<(&'static str, String)> {
    let mut details = vec![("disks", snapshot.disks.join(", "))];
    if !snapshot.description.is_empty() {
        details.push(("description", snapshot.description.clone()));
    }
    details
}

fn path(vm: &str) -> String {
    format!("vms/{vm}/snapshots")
}

fn one(vm: &str, snapshot: &str) -> String {
    format!("{}/{snapshot}", path(vm))
}
