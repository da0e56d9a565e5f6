//! How a starting agent handles the VMs of its predecessor: running ones are adopted; half-started and dead
//! ones are swept and reported. A running VM that cannot be adopted is left running
//! ([`super::left_running`]): a guest is never ended because of doubt.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use jiff::Timestamp;
use tokio::time::sleep;
use vmseal_api::host::{StopReason, Stopped, VmSpec};
use vmseal_api::id::VmId;

use super::left_running::{LeftRunning, Why, unknown_spec};
use super::reconnect::{Reconnected, clear_away, reconnect};
use super::{Initial, Shared, Vm, tpm};
use crate::hypervisor::qemu;
use crate::process::Process;
use crate::process::died::DiedVm;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::{Phase, Record, Unreadable};
use crate::storage::lease;
use crate::storage::tpm_place;

/// The period in which connecting to a VM with live processes is retried; later attempts are made in the
/// background.
const ATTEMPTS_WITHIN: Duration = Duration::from_secs(5);

/// The pause between attempts.
const ATTEMPTS_PAUSE: Duration = Duration::from_millis(100);

/// Goes through the run directory. Returns the VMs found, also those that died under an earlier agent and
/// have not run since. Imports are swept, as their disks are made again. The failure of one VM or import is
/// logged and does not prevent the adoption of others.
///
/// # Errors
/// Those of listing the run directory: the agent must not start without it, as nothing would be known.
pub async fn adopt(shared: &Arc<Shared>) -> io::Result<Vec<(VmId, Vm)>> {
    for import in shared.run_dir.imports()? {
        if let Err(error) = import.sweep().await {
            tracing::error!(disk = import.name(), %error, "cannot remove the remains of an import");
        }
    }
    let died = shared.died.all()?;
    // Concurrently: one that does not answer delays no other.
    let found =
        shared.run_dir.vms()?.into_iter().map(|directory| adopt_one(shared, directory, &died));
    let mut found: BTreeMap<VmId, Vm> = join_all(found).await.into_iter().flatten().collect();
    for (vm, death) in died {
        found.entry(vm).or_insert_with(|| {
            Vm::own(shared.clone(), death.spec, Initial::Stopped(death.stopped))
        });
    }
    Ok(found.into_iter().collect())
}

async fn adopt_one(
    shared: &Arc<Shared>,
    directory: ProcessDir,
    died: &BTreeMap<VmId, DiedVm>,
) -> Option<(VmId, Vm)> {
    let Ok(vm) = directory.name().parse::<VmId>() else {
        tracing::warn!(
            name = directory.name(),
            "a directory in the run directory is not named after a VM"
        );
        return None;
    };
    let record = match directory.read() {
        Ok(record) if record.spec.vm == vm => record,
        Ok(record) => {
            let why = Unreadable::Damaged(format!("it is of VM {}", record.spec.vm));
            return unreadable(shared, directory, vm, why, died.get(&vm)).await;
        }
        Err(why) => return unreadable(shared, directory, vm, why, died.get(&vm)).await,
    };
    if super::is_suspended(&record.spec).await == Some(true) {
        // Its guest does not run: an agent ended before it had ended the processes, or before it let the guest go on.
        if let Err(error) = directory.sweep().await {
            tracing::error!(%vm, %error, "cannot remove the remains of a suspended VM");
        }
        tracing::info!(%vm, "found a VM suspended");
        return Some((vm, Vm::own(shared.clone(), record.spec, Initial::Suspended)));
    }
    if record.phase == Phase::Receiving && !has_arrived(&record).await {
        // Its guest has not run here: it is where it came from.
        if let Err(error) = clear_away(&directory).await {
            tracing::error!(%vm, %error, "cannot remove the remains of a VM that was received");
        }
        tracing::info!(%vm, "a VM that was on its way to this host is not here");
        return None;
    }
    if record.phase == Phase::Receiving {
        settle_tpm(&record.spec).await;
    }
    let initial = match look(shared, &directory, &record).await {
        Reconnected::Alive(running) => {
            tracing::info!(%vm, qemu = running.qemu.pid(), "adopted a running VM");
            Initial::Alive(running)
        }
        Reconnected::Silent(qemu, problem) => {
            let why = Why::Processes(Box::new(record.clone()), problem);
            let left = LeftRunning::new(shared.clone(), directory, vm, why, qemu);
            Initial::LeftRunning(Box::new(left))
        }
        Reconnected::Dead(why) => {
            tracing::warn!(%vm, %why, "found a VM dead");
            // The earlier agent may have seen it die and ended before it removed the remains.
            let seen = died.get(&vm).filter(|_| record.phase == Phase::Running);
            Initial::Stopped(found_dead(shared, &directory, &record.spec, why, seen).await)
        }
    };
    Some((vm, Vm::own(shared.clone(), record.spec, initial)))
}

/// Does what an agent that ended before could not do any more of what the TPM of a VM keeps that has arrived.
async fn settle_tpm(spec: &VmSpec) {
    let Some(disk) = tpm::disk_of(spec).cloned() else { return };
    let (vm, spec) = (spec.vm, spec.clone());
    let settle = move || tpm_place::settle_arrived(&spec, &disk);
    let settled = tokio::task::spawn_blocking(settle).await;
    if let Err(problem) = settled.unwrap_or_else(|error| Err(super::internal(error))) {
        // It is found where it is. The VM's next start or migration does this.
        tracing::error!(%vm, %problem, "what the VM's TPM keeps does not have its name yet");
    }
}

/// Whether the guest of a VM on record as received runs here, or is about to: its placement here has the lease of its disks.
async fn has_arrived(record: &Record) -> bool {
    let (spec, received) = (record.spec.clone(), record.live.received);
    let look = move || received.is_some() && lease::read(&spec).ok() == received;
    tokio::task::spawn_blocking(look).await.unwrap_or(false)
}

/// A VM whose record cannot be read: left running if its QEMU lives or may live.
async fn unreadable(
    shared: &Arc<Shared>,
    directory: ProcessDir,
    vm: VmId,
    why: Unreadable,
    seen: Option<&DiedVm>,
) -> Option<(VmId, Vm)> {
    let spec = unknown_spec(vm);
    let initial = match (Process::adopt(&directory.process(qemu::NAME)), &why) {
        (Ok(None), Unreadable::Missing) => {
            // The directory was made, but the agent ended before it wrote the record: nothing of it has run.
            if let Err(error) = clear_away(&directory).await {
                tracing::error!(%vm, %error, "cannot remove the remains of a VM");
            }
            return None;
        }
        (Ok(None), _) => {
            let why = format!(
                "VM {vm} stopped while no agent was there to see why, and its record {why}. If it should run, start it again"
            );
            tracing::warn!(%vm, %why, "found a VM dead");
            let spec = seen.map_or(&spec, |seen| &seen.spec);
            Initial::Stopped(found_dead(shared, &directory, spec, why, seen).await)
        }
        (Ok(qemu), _) => left_running(shared, directory, vm, why, qemu),
        (Err(error), _) => {
            tracing::error!(%vm, %error, "cannot determine whether a VM runs");
            left_running(shared, directory, vm, why, None)
        }
    };
    let spec = seen.map_or(spec, |seen| seen.spec.clone());
    Some((vm, Vm::own(shared.clone(), spec, initial)))
}

fn left_running(
    shared: &Arc<Shared>,
    directory: ProcessDir,
    vm: VmId,
    why: Unreadable,
    qemu: Option<Process>,
) -> Initial {
    let why = Why::Record(why);
    Initial::LeftRunning(Box::new(LeftRunning::new(shared.clone(), directory, vm, why, qemu)))
}

/// Records the death, unless an earlier agent has, and removes the remains.
async fn found_dead(
    shared: &Shared,
    directory: &ProcessDir,
    spec: &VmSpec,
    why: String,
    seen: Option<&DiedVm>,
) -> Stopped {
    let vm = spec.vm;
    let stopped = match seen {
        Some(death) => death.stopped.clone(),
        None => {
            let (at, reason) = (Timestamp::now(), StopReason::FoundDead);
            let stopped = Stopped { at, reason, detail: why };
            if let Err(error) = shared.died.record(spec, &stopped) {
                tracing::error!(%vm, %error, "cannot record the death of a VM");
            }
            stopped
        }
    };
    if let Err(error) = clear_away(directory).await {
        tracing::error!(%vm, %error, "cannot remove the remains of a VM");
    }
    stopped
}

/// Connects to a VM's processes, if any may live.
async fn look(shared: &Shared, directory: &ProcessDir, record: &Record) -> Reconnected {
    let name = &record.spec.name;
    let again = format!("start it again (vmseal vm start {name})");
    if !record.is_of_this_boot() {
        let cut = super::remedy(name);
        let why = format!("VM '{name}' ended with its host, which was restarted. {cut}");
        return Reconnected::Dead(why);
    }
    if record.phase == Phase::Starting {
        let why = format!("the agent ended while it was starting VM '{name}': {again}");
        return Reconnected::Dead(why);
    }
    let slot = Arc::new(shared.users.take_again(record.slot));
    let begin = Instant::now();
    loop {
        match reconnect(directory, record, slot.clone()).await {
            Reconnected::Silent(_, problem) if begin.elapsed() < ATTEMPTS_WITHIN => {
                tracing::warn!(vm = %record.spec.vm, %problem, "cannot connect to a VM yet");
                sleep(ATTEMPTS_PAUSE).await;
            }
            result => return result,
        }
    }
}
