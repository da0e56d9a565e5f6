//! Virtual disks.

use vmseal_api::client::ServerClient;
use vmseal_api::host::{SealedKey, export_info};
use vmseal_api::model::{Disk, Host, Vm};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{AddDisk, ExportDisk, ResizeDisk};
use vmseal_api::transfer::ExportFormat;

use super::{bitmap, expose, list, replica, task};
use crate::arguments::{self, Output, Passphrase};
use crate::disk_option;
use crate::exit::{Ended, Exit};
use crate::passphrase::{self, Prompt};
use crate::rows::VmDisk;

pub async fn run(
    server: ServerClient,
    output: Output,
    verb: arguments::Disk,
) -> anyhow::Result<()> {
    if let arguments::Disk::Expose(options) = &verb {
        let (vm, disk) = find(&server, &options.vm, &options.disk).await?;
        return expose::run(server, &vm, &disk, options).await;
    }
    let server = &server;
    match verb {
        arguments::Disk::Expose(_) => unreachable!("carried out above"),
        arguments::Disk::Bitmap(verb) => bitmap::run(server, output, verb).await,
        arguments::Disk::List { vm, how } => {
            list::parts_of_vms(server, output, &how, vm.as_deref(), disks_of).await
        }
        arguments::Disk::Show { vm, disk, watch } => {
            let read = async || {
                let (vm, disk) = find(server, &vm, &disk).await?;
                Ok(VmDisk { vm: vm.name, disk })
            };
            list::one_with(server, output, watch, |_| Vec::new(), "vm", read).await
        }
        arguments::Disk::Replica { vm, disk, watch } => {
            let (vm, disk) = find(server, &vm, &disk).await?;
            replica::run(server, output, &vm, disk, watch).await
        }
        arguments::Disk::Add { vm, disk, force, dry_run, wait } => {
            let request = AddDisk { force, ..disk_option::parse_named(&disk)? };
            let path = format!("vms/{vm}/disks");
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        arguments::Disk::Remove { vm, disk, dry_run, wait } => {
            task::begin_deletion(server, output, &format!("vms/{vm}/disks/{disk}"), &dry_run, &wait)
                .await
        }
        arguments::Disk::Resize { vm, disk, size, dry_run, wait } => {
            let (path, request) = (format!("vms/{vm}/disks/{disk}/resize"), ResizeDisk { size });
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        arguments::Disk::Export {
            vm,
            disk,
            to,
            format,
            snapshot,
            plaintext,
            passphrase,
            rate,
            dry_run,
            wait,
        } => {
            let format = match format {
                arguments::ExportFormat::Raw => ExportFormat::Raw,
                arguments::ExportFormat::Qcow2 => ExportFormat::Qcow2,
                arguments::ExportFormat::Luks2 => ExportFormat::Luks2,
                arguments::ExportFormat::Sealed => ExportFormat::Sealed,
            };
            check(format, plaintext, &passphrase)?;
            let (vm, disk) = find(server, &vm, &disk).await?;
            let passphrase = match format {
                ExportFormat::Luks2 => Some(sealed(server, &vm, &disk, &passphrase).await?),
                ExportFormat::Raw | ExportFormat::Qcow2 | ExportFormat::Sealed => None,
            };
            let request =
                ExportDisk { to, format, plaintext, passphrase, snapshot, rate: rate.rate };
            let path = format!("vms/{}/disks/{}/export", vm.id, disk.id);
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
    }
}

fn disks_of(vm: Vm) -> impl Iterator<Item = VmDisk> {
    let name = vm.name;
    vm.disks.into_iter().map(move |disk| VmDisk { vm: name.clone(), disk })
}

fn wrong(message: impl Into<String>) -> anyhow::Error {
    Ended::new(Exit::Usage, message).into()
}

fn check(format: ExportFormat, plaintext: bool, passphrase: &Passphrase) -> anyhow::Result<()> {
    let name = format.name();
    let wrong = |message: String| Err(wrong(message));
    match (format.is_plain(), plaintext) {
        (true, false) => wrong(format!(
            "a {name} file is plaintext: allow it with --plaintext, or use --format luks2"
        )),
        (false, true) => wrong(format!("a {name} file is not plaintext: leave out --plaintext")),
        _ if !format.has_passphrase() && passphrase.passphrase_file.is_some() => {
            wrong(format!("a {name} file has no passphrase of its own"))
        }
        _ => Ok(()),
    }
}

async fn find(server: &ServerClient, vm: &str, disk: &str) -> Result<(Vm, Disk), Problem> {
    let mut vm: Vm = server.get(&format!("vms/{vm}")).await?;
    let found = vm.disks.iter().position(|it| it.name == disk || it.id.to_string() == disk);
    let index = found.ok_or_else(|| {
        Problem::new(ErrorCode::NotFound, format!("VM '{}' has no disk '{disk}'", vm.name))
    })?;
    let disk = vm.disks.swap_remove(index);
    Ok((vm, disk))
}

/// The passphrase of the file, sealed for the host's agent: the server cannot read it.
async fn sealed(
    server: &ServerClient,
    vm: &Vm,
    disk: &Disk,
    options: &Passphrase,
) -> anyhow::Result<SealedKey> {
    let passphrase = passphrase::obtain(options, "Passphrase of the file", Prompt::Twice)?;
    let host: Host = server.get(&format!("hosts/{}", vm.host)).await?;
    let described = host.description;
    let silent = || {
        Ended::new(
            Exit::NoAnswer,
            format!("host '{}' is unreachable; check that its agent is running", vm.host),
        )
    };
    let described = described.ok_or_else(silent)?;
    let info = export_info(vm.id, disk.id);
    let sealed = passphrase::seal_to(&passphrase, &info, &described.key_box)?;
    Ok(SealedKey { key_box: described.key_box, sealed })
}
