//! What a starting agent does with the VMs of its predecessor: those that run are adopted, those that
//! were half-started or have died are swept and reported. One that runs and cannot be adopted is left running
//! ([`super::left_running`]): no doubt about a VM ends its guest.

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
use super::{Initial, Shared, Vm};
use crate::hypervisor::qemu;
use crate::process::Process;
use crate::process::deaths::Death;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::{Phase, Record, Unreadable};

/// How long more attempts are begun to connect to a VM whose processes live; later ones come in the background.
const ATTEMPTS_WITHIN: Duration = Duration::from_secs(5);

/// The pause between them.
const ATTEMPTS_PAUSE: Duration = Duration::from_millis(100);

/// Goes through the run directory. Gives the VMs found, with those that died under an earlier agent and
/// have not run since; imports are swept, as their disks are made anew. The trouble of one VM or import is
/// told and keeps no other from being adopted.
///
/// # Errors
/// As listing the run directory: without it nothing is known, and the agent must not start.
pub async fn adopt(shared: &Arc<Shared>) -> io::Result<Vec<(VmId, Vm)>> {
    for import in shared.run_dir.imports()? {
        if let Err(error) = import.sweep().await {
            tracing::error!(disk = import.name(), %error, "what an import left cannot be cleared away");
        }
    }
    let deaths = shared.deaths.all()?;
    // Beside each other: one that does not answer holds up no other.
    let found =
        shared.run_dir.vms()?.into_iter().map(|directory| adopt_one(shared, directory, &deaths));
    let mut found: BTreeMap<VmId, Vm> = join_all(found).await.into_iter().flatten().collect();
    for (vm, death) in deaths {
        found.entry(vm).or_insert_with(|| {
            Vm::own(shared.clone(), death.spec, Initial::Stopped(death.stopped))
        });
    }
    Ok(found.into_iter().collect())
}

async fn adopt_one(
    shared: &Arc<Shared>,
    directory: ProcessDir,
    deaths: &BTreeMap<VmId, Death>,
) -> Option<(VmId, Vm)> {
    let Ok(vm) = directory.name().parse::<VmId>() else {
        tracing::warn!(name = directory.name(), "no VM has this directory in the run directory");
        return None;
    };
    let record = match directory.read() {
        Ok(record) if record.spec.vm == vm => record,
        Ok(record) => {
            let why = Unreadable::Damaged(format!("it is of VM {}", record.spec.vm));
            return unreadable(shared, directory, vm, why, deaths.get(&vm)).await;
        }
        Err(why) => return unreadable(shared, directory, vm, why, deaths.get(&vm)).await,
    };
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
            // The earlier agent may have seen it die, and only been kept from clearing it away.
            let seen = deaths.get(&vm).filter(|_| record.phase == Phase::Running);
            Initial::Stopped(found_dead(shared, &directory, &record.spec, why, seen).await)
        }
    };
    Some((vm, Vm::own(shared.clone(), record.spec, initial)))
}

/// A VM whose record cannot be read: left running while its QEMU lives, or may.
async fn unreadable(
    shared: &Arc<Shared>,
    directory: ProcessDir,
    vm: VmId,
    why: Unreadable,
    seen: Option<&Death>,
) -> Option<(VmId, Vm)> {
    let spec = unknown_spec(vm);
    let initial = match (Process::adopt(&directory.process(qemu::NAME)), &why) {
        (Ok(None), Unreadable::Missing) => {
            // Made, and not put on record before the agent ended: nothing of it has run.
            if let Err(error) = clear_away(&directory).await {
                tracing::error!(%vm, %error, "what is left of a VM cannot be cleared away");
            }
            return None;
        }
        (Ok(None), _) => {
            let why = format!(
                "VM {vm} stopped while no agent was there to see why, and its record {why}. If it is to run, start it again"
            );
            tracing::warn!(%vm, %why, "found a VM dead");
            let spec = seen.map_or(&spec, |seen| &seen.spec);
            Initial::Stopped(found_dead(shared, &directory, spec, why, seen).await)
        }
        (Ok(qemu), _) => left_running(shared, directory, vm, why, qemu),
        (Err(error), _) => {
            tracing::error!(%vm, %error, "it cannot be found out whether a VM runs");
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

/// Puts a death on record, unless it was seen by an earlier agent, and clears away.
async fn found_dead(
    shared: &Shared,
    directory: &ProcessDir,
    spec: &VmSpec,
    why: String,
    seen: Option<&Death>,
) -> Stopped {
    let vm = spec.vm;
    let stopped = match seen {
        Some(death) => death.stopped.clone(),
        None => {
            let (at, reason) = (Timestamp::now(), StopReason::FoundDead);
            let stopped = Stopped { at, reason, detail: why };
            if let Err(error) = shared.deaths.record(spec, &stopped) {
                tracing::error!(%vm, %error, "the death of a VM cannot be put on record");
            }
            stopped
        }
    };
    if let Err(error) = clear_away(directory).await {
        tracing::error!(%vm, %error, "what is left of a VM cannot be cleared away");
    }
    stopped
}

/// Connects to a VM's processes, where any can live.
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
