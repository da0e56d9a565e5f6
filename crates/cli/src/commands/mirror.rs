//! VMs that are encrypted, decrypted, recrypted or moved as they are, several at a time.

use std::io::IsTerminal;

use serde::Serialize;
use vmseal_api::client::ServerClient;
use vmseal_api::request::{DecryptVm, EncryptVm, MoveVm, RecryptVm};

use super::task;
use crate::arguments::{DryRun, Output, Wait};
use crate::exit::{Ended, Exit};
use crate::stream::{printable, say};

/// What is promised of disks that were encrypted in their own files, and what is not. Of former images the task says it.
const OVERWRITTEN: &str = "The data was overwritten in its own files. On flash, journaled or copy-on-write storage, and in snapshots and backups of the datastore, older copies of it may remain.";

/// Encrypts VMs.
pub async fn encrypt(
    server: &ServerClient,
    output: Output,
    vms: &[String],
    request: &EncryptVm,
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    begin(server, output, vms, "encrypt", request, dry_run, wait).await?;
    if request.in_place && !dry_run.dry_run && !wait.no_wait {
        say(OVERWRITTEN);
    }
    Ok(())
}

/// Decrypts VMs, once that is confirmed.
pub async fn decrypt(
    server: &ServerClient,
    output: Output,
    vms: &[String],
    request: &DecryptVm,
    yes: bool,
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    if !yes && !dry_run.dry_run {
        if !std::io::stdin().is_terminal() {
            let message = "there is no terminal to confirm it: give --yes";
            return Err(Ended::new(Exit::Usage, message).into());
        }
        // What would be refused is not asked about.
        for vm in vms {
            server.try_post(&path(vm, "decrypt"), request).await?;
        }
        confirm(vms, &request.disks)?;
    }
    begin(server, output, vms, "decrypt", request, dry_run, wait).await
}

/// Gives VMs new keys.
pub async fn recrypt(
    server: &ServerClient,
    output: Output,
    vms: &[String],
    request: &RecryptVm,
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    begin(server, output, vms, "recrypt", request, dry_run, wait).await
}

/// Moves disks of VMs.
pub async fn move_disks(
    server: &ServerClient,
    output: Output,
    vms: &[String],
    request: &MoveVm,
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    begin(server, output, vms, "move", request, dry_run, wait).await
}

fn path(vm: &str, verb: &str) -> String {
    format!("vms/{vm}/{verb}")
}

/// Begins a task for each VM. Of several, none is begun where the server would refuse one.
async fn begin(
    server: &ServerClient,
    output: Output,
    vms: &[String],
    verb: &str,
    request: &(impl Serialize + Sync),
    dry_run: &DryRun,
    wait: &Wait,
) -> anyhow::Result<()> {
    if let [vm] = vms {
        return task::begin(server, output, &path(vm, verb), request, dry_run, wait).await;
    }
    let paths: Vec<String> = vms.iter().map(|vm| path(vm, verb)).collect();
    task::begin_all(server, output, &paths, request, dry_run, wait).await
}

/// Asks whether VMs, or disks of theirs, are to be decrypted.
fn confirm(vms: &[String], disks: &[String]) -> anyhow::Result<()> {
    let vms = printable(&vms.join(", "));
    let asked = match disks {
        [] => format!(
            "The data of {vms} will be on the datastore in the clear, and the key is destroyed"
        ),
        disks => {
            let disks = printable(&disks.join(", "));
            format!("The data of disks {disks} of {vms} will be on the datastore in the clear")
        }
    };
    if !super::confirm::says_yes(&format!("{asked}. Go on"))? {
        return Err(Ended::new(Exit::Failed, "nothing was decrypted").into());
    }
    Ok(())
}
