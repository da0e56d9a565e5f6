//! Backups of VMs.

use vmseal_api::client::ServerClient;
use vmseal_api::host::backup::{BackupPart, WITHOUT_MEMORY};
use vmseal_api::host::{DiskRole, Power};
use vmseal_api::model;
use vmseal_api::request::{CreateBackup, RestoreBackup};
use vmseal_api::size::Size;

use super::{list, task};
use crate::arguments::{Backup, Output};
use crate::print;
use crate::rows::backup::is_plain;

pub async fn run(server: &ServerClient, output: Output, verb: Backup) -> anyhow::Result<()> {
    match verb {
        Backup::List { vm: Some(vm), how } => list::run(server, output, &how, &path(&vm)).await,
        Backup::List { vm: None, how } => list::run(server, output, &how, "backups").await,
        Backup::Show { vm, backup, watch } => {
            let path = one(&vm, &backup);
            list::one_with(server, output, watch, details, "vm", async || server.get(&path).await)
                .await
        }
        Backup::Create { vm, name, to, full, no_quiesce, rate, dry_run, wait } => {
            let (directory, quiesce) = (to, !no_quiesce);
            let request = CreateBackup { name, directory, full, quiesce, rate: rate.rate };
            // The plan of a dry run says it itself.
            let suspended = !dry_run.dry_run && is_suspended(server, &vm).await;
            task::begin(server, output, &path(&vm), &request, &dry_run, &wait).await?;
            if suspended {
                print::say(format_args!("warning: VM '{vm}' is suspended: {WITHOUT_MEMORY}"));
            }
            Ok(())
        }
        Backup::Verify { vm, backup, dry_run, wait } => {
            let path = format!("{}/verify", one(&vm, &backup));
            task::begin(server, output, &path, &(), &dry_run, &wait).await
        }
        Backup::Restore { vm, backup, new_vm, name, host, datastore, policy, dry_run, wait } => {
            let path = format!("{}/restore", one(&vm, &backup));
            let request = RestoreBackup { name, new_vm, host, datastore, policy };
            task::begin(server, output, &path, &request, &dry_run, &wait).await
        }
        Backup::Delete { vm, backup, dry_run, wait } => {
            task::begin_deletion(server, output, &one(&vm, &backup), &dry_run, &wait).await
        }
    }
}

/// Whether a VM is suspended. One that is not there is refused when it is to be backed up.
async fn is_suspended(server: &ServerClient, vm: &str) -> bool {
    let found = server.get::<model::Vm>(&format!("vms/{vm}")).await;
    found.is_ok_and(|vm| vm.power == Some(Power::Suspended))
}

fn details(backup: &model::VmBackup) -> Vec<(&'static str, String)> {
    let files =
        backup.bytes.map_or_else(|| "are being written".to_owned(), |it| Size(it).to_string());
    let path = backup.directory.join(backup.vm_id.to_string()).join(backup.id.to_string());
    let key = backup.key.as_ref().map_or_else(
        || "none: the backup is IN THE CLEAR".to_owned(),
        |key| format!("'{}' of provider {}", key.key_id, key.provider),
    );
    let mut rows =
        vec![("files", files), ("path", path.display().to_string()), ("opens with key", key)];
    if let Some(contents) = &backup.contents {
        rows.push(("contains", parts(&contents.disks, contents.tpm_later)));
        if !contents.lacks.is_empty() {
            rows.push(("LACKS", parts(&contents.lacks, false)));
        }
        if contents.suspended {
            rows.push(("memory", format!("the VM was suspended: {WITHOUT_MEMORY}")));
        }
    }
    rows
}

/// The names of disks, and which are in the clear; with that of a TPM is what it kept.
fn parts(parts: &[BackupPart], tpm_later: bool) -> String {
    let name = |part: &BackupPart| match (part.role, tpm_later) {
        (DiskRole::Tpm, false) => format!("{} (what the TPM keeps)", part.name),
        (DiskRole::Tpm, true) => {
            format!("{} (what the TPM keeps, of a later instant than the disks)", part.name)
        }
        _ if is_plain(part) => format!("{} (IN THE CLEAR)", part.name),
        _ => part.name.clone(),
    };
    parts.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn path(vm: &str) -> String {
    format!("vms/{vm}/backups")
}

fn one(vm: &str, backup: &str) -> String {
    format!("{}/{backup}", path(vm))
}
