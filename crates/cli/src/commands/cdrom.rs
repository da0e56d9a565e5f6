//! `vmseal vm cdrom`: what is in the CD-ROM drive of a VM.

use vmseal_api::boot::Cdrom;
use vmseal_api::client::ServerClient;
use vmseal_api::model::Vm;
use vmseal_api::request::SetVm;

use crate::arguments::{self, Output};
use crate::exit::{Ended, Exit};
use crate::print::{self, plan};

pub async fn run(
    server: &ServerClient,
    output: Output,
    verb: arguments::Cdrom,
) -> anyhow::Result<()> {
    let (name, medium, dry_run) = match verb {
        arguments::Cdrom::Insert { name, iso, dry_run } => (name, Some(iso), dry_run),
        arguments::Cdrom::Eject { name, dry_run } => (name, None, dry_run),
    };
    let path = format!("vms/{name}");
    if medium.is_none() {
        let vm: Vm = server.get(&path).await?;
        if vm.hardware.cdrom.is_none() {
            let message = format!("VM '{}' has no CD-ROM drive", vm.name);
            return Err(Ended::new(Exit::Conflict, message).into());
        }
    }
    let request = SetVm { cdrom: Some(Cdrom { medium }), ..SetVm::default() };
    if dry_run.dry_run {
        return plan::show(output, &server.try_patch(&path, &request).await?);
    }
    let vm: Vm = server.patch(&path, &request).await?;
    print::one(output, &vm, &print::vm_details(&vm))
}
