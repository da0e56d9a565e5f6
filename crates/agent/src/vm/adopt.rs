//! What a starting agent does with the VMs of its predecessor: those that run are adopted, those that
//! were half-started or have died are swept and reported.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use futures_util::future::try_join_all;
use jiff::Timestamp;
use vmseal_api::host::{StopReason, Stopped};
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;

use super::{Beginning, Running, Shared, Vm, internal, start};
use crate::deaths::Death;
use crate::filter::{self, Control};
use crate::process::Process;
use crate::qemu;
use crate::run_dir::{Phase, ProcessDir, Record};

/// How often it is tried to connect to a VM whose processes live.
const ATTEMPTS: u32 = 3;

/// Goes through the run directory. Gives the VMs found, with those that died under an earlier agent and
/// have not run since; imports are swept, as their disks are made anew.
///
/// # Errors
/// As reading the run directory: without it nothing is known, and the agent must not start.
pub async fn adopt(shared: &Arc<Shared>) -> io::Result<Vec<(VmId, Vm)>> {
    for import in shared.run_dir.imports()? {
        import.sweep().await?;
    }
    let deaths = shared.deaths.all()?;
    // Beside each other: one that does not answer holds up no other.
    let found =
        shared.run_dir.vms()?.into_iter().map(|directory| adopt_one(shared, directory, &deaths));
    let mut found: BTreeMap<VmId, Vm> = try_join_all(found).await?.into_iter().flatten().collect();
    for (vm, death) in deaths {
        found
            .entry(vm)
            .or_insert_with(|| Vm::own(shared.clone(), death.spec, Beginning::Dead(death.stopped)));
    }
    Ok(found.into_iter().collect())
}

async fn adopt_one(
    shared: &Arc<Shared>,
    directory: ProcessDir,
    deaths: &BTreeMap<VmId, Death>,
) -> io::Result<Option<(VmId, Vm)>> {
    let record = directory.read().unwrap_or_else(|error| {
        tracing::warn!(vm = directory.name(), %error, "a VM's record is damaged; it is swept");
        None
    });
    let Some(record) = record else {
        directory.sweep().await?;
        return Ok(None);
    };
    let vm = record.spec.vm;
    let beginning = match alive(shared, &directory, &record).await {
        Ok(running) => {
            tracing::info!(%vm, qemu = running.qemu.pid(), "adopted a running VM");
            Beginning::Alive(Box::new(running))
        }
        Err(why) => {
            tracing::warn!(%vm, %why, "found a VM dead");
            let stopped = match deaths.get(&vm) {
                // The earlier agent saw it die, and was only kept from clearing it away.
                Some(death) if record.phase == Phase::Running => death.stopped.clone(),
                _ => {
                    let (reason, detail) = (StopReason::FoundDead, why.detail);
                    let stopped = Stopped { at: Timestamp::now(), reason, detail };
                    shared.deaths.record(&record.spec, &stopped)?;
                    stopped
                }
            };
            bury(&directory).await?;
            Beginning::Dead(stopped)
        }
    };
    Ok(Some((vm, Vm::own(shared.clone(), record.spec, beginning))))
}

/// Connects to a VM's processes; an error says why it is dead.
async fn alive(
    shared: &Shared,
    directory: &ProcessDir,
    record: &Record,
) -> Result<Running, Problem> {
    let name = &record.spec.name;
    let dead = |what: String| Err(internal(what));
    let cut = || super::remedy(name);
    let again = format!("start it again (vmseal vm start {name})");
    if !record.is_of_this_boot() {
        return dead(format!("VM '{name}' ended with its host, which was restarted. {}", cut()));
    }
    if record.phase == Phase::Starting {
        return dead(format!("the agent ended while it was starting VM '{name}': {again}"));
    }
    let process = |name: &str| Process::adopt(&directory.process(name)).map_err(internal);
    if process(qemu::NAME)?.is_none() {
        return dead(format!(
            "VM '{name}' stopped while no agent was there to see why: its guest may have shut down, or QEMU died. If it is to run, {again}"
        ));
    }
    match reconnect(shared, directory, record).await {
        Err(why) => dead(format!(
            "VM '{name}' was stopped, as the restarted agent could not take it over: {why}. {}",
            cut()
        )),
        running => running,
    }
}

/// Connects again to processes that live. A guest is not given up for one answer that is late.
async fn reconnect(
    shared: &Shared,
    directory: &ProcessDir,
    record: &Record,
) -> Result<Running, Problem> {
    let mut attempt = 1;
    loop {
        let process = |name: &str| Process::adopt(&directory.process(name)).map_err(internal);
        let Some(qemu) = process(qemu::NAME)? else {
            return Err(internal("the VM stopped while the agent was connecting to it"));
        };
        // It may have died while no agent was there: the guest waits for another one.
        let filter = process(filter::NAME)?;
        match start::reconnect(shared, directory, record, qemu, filter).await {
            Err(problem) if attempt < ATTEMPTS => {
                tracing::warn!(vm = %record.spec.vm, %problem, attempt, "cannot connect to a VM yet");
                attempt += 1;
            }
            result => return result,
        }
    }
}

/// Ends what is left of a VM. A filter whose QEMU has ended gets the chance to flush.
async fn bury(directory: &ProcessDir) -> io::Result<()> {
    let process = |name: &str| Process::adopt(&directory.process(name));
    if let (None, Some(filter)) = (process(qemu::NAME)?, process(filter::NAME)?)
        && Control::of(directory).shut_down().await.is_ok()
    {
        filter.end_within(filter::SHUTDOWN_TIMEOUT).await;
    }
    directory.sweep().await
}
