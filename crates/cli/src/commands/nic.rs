//! Network cards.

use vmseal_api::client::ServerClient;
use vmseal_api::model::Vm;
use vmseal_api::nic::NicLink;
use vmseal_api::request::SetNic;

use super::{list, task};
use crate::arguments::{self, Output};
use crate::nic_option;
use crate::print::{self, plan};
use crate::rows::VmNic;

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Nic,
) -> anyhow::Result<()> {
    match verb {
        arguments::Nic::List { vm, how } => {
            list::parts_of_vms(server, output, &how, vm.as_deref(), nics_of).await
        }
        arguments::Nic::Add { vm, nic, dry_run, wait } => {
            let request = nic_option::parse(&nic)?;
            let path = format!("vms/{vm}/nics");
            if !dry_run.dry_run {
                // Only a plan says with which card a VM that is off could not start.
                plan::warn(&server.try_post(&path, &request).await?);
            }
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        arguments::Nic::Remove { vm, nic, dry_run, wait } => {
            task::begin_deletion(server, output, &format!("vms/{vm}/nics/{nic}"), &dry_run, &wait)
                .await
        }
        arguments::Nic::Set { vm, nic, link, dry_run } => {
            let link = match link {
                arguments::Link::Up => NicLink::Up,
                arguments::Link::Down => NicLink::Down,
            };
            let (path, request) = (format!("vms/{vm}/nics/{nic}"), SetNic { link });
            if dry_run.dry_run {
                return plan::show(output, &server.try_patch(&path, &request).await?);
            }
            let vm: Vm = server.patch(&path, &request).await?;
            let named = |it: &VmNic| it.nic.name == nic || it.nic.id.to_string() == nic;
            match nics_of(vm).find(named) {
                Some(nic) => print::one(output, &nic, &[]),
                None => Ok(()),
            }
        }
    }
}

fn nics_of(vm: Vm) -> impl Iterator<Item = VmNic> {
    let name = vm.name;
    vm.nics.into_iter().map(move |nic| VmNic { vm: name.clone(), nic })
}
