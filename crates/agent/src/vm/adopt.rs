//! What a starting agent does with the VMs of its predecessor: those that run are adopted, those that
//! were half-started or have died are swept and reported.

use std::io;
use std::sync::Arc;

use jiff::Timestamp;
use vmseal_api::host::{StopReason, Stopped};
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;

use super::{Beginning, Running, Shared, Vm, internal, start};
use crate::filter::{self, Control};
use crate::process::Process;
use crate::qemu;
use crate::run_dir::{Phase, ProcessDir, Record};

/// Goes through the run directory. Gives the VMs found; imports are swept, as their disks are made anew.
///
/// # Errors
/// As reading the run directory: without it nothing is known, and the agent must not start.
pub async fn adopt(shared: &Arc<Shared>) -> io::Result<Vec<(VmId, Vm)>> {
    for import in shared.run_dir.imports()? {
        import.sweep().await?;
    }
    let mut found = Vec::new();
    for directory in shared.run_dir.vms()? {
        let Some(record) = directory.read().unwrap_or_else(|error| {
            tracing::warn!(vm = directory.name(), %error, "a VM's record is damaged; it is swept");
            None
        }) else {
            directory.sweep().await?;
            continue;
        };
        let vm = record.spec.vm;
        let beginning = match alive(shared, &directory, &record).await {
            Ok(running) => {
                tracing::info!(%vm, qemu = running.qemu.pid(), "adopted a running VM");
                Beginning::Alive(Box::new(running))
            }
            Err(why) => {
                tracing::warn!(%vm, %why, "found a VM dead");
                bury(&directory).await?;
                let detail = why.detail;
                let reason = StopReason::FoundDead;
                Beginning::Dead(Stopped { at: Timestamp::now(), reason, detail })
            }
        };
        found.push((vm, Vm::own(shared.clone(), record.spec, beginning)));
    }
    Ok(found)
}

/// Connects to a VM's processes; an error says why it is dead.
async fn alive(
    shared: &Shared,
    directory: &ProcessDir,
    record: &Record,
) -> Result<Running, Problem> {
    if !record.is_of_this_boot() {
        return Err(internal("the host was restarted while the VM ran"));
    }
    if record.phase == Phase::Starting {
        return Err(internal("the agent ended while the VM was being started; start it again"));
    }
    let process = |name: &str| Process::adopt(&directory.process(name)).map_err(internal);
    match (process(qemu::NAME)?, process(filter::NAME)?) {
        (Some(qemu), Some(filter)) => {
            start::reconnect(shared, directory, record.slot, qemu, filter).await
        }
        (None, _) => Err(internal("the VM stopped while no agent was there to see why")),
        (Some(_), None) => {
            Err(internal("the filter process died while no agent was there; the VM was stopped"))
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
