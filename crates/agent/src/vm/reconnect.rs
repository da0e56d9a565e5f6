//! Connecting to the processes of a VM that an earlier agent started, and removing the remains of one.

use std::io;
use std::sync::Arc;

use vmseal_api::problem::Problem;

use super::internal;
use super::running::Running;
use super::start::{self, NotConnected};
use crate::filter::{self, Control};
use crate::hypervisor::qemu;
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::Record;
use crate::process::users::Slot;

/// The result of connecting to a VM on record.
pub enum Reconnected {
    /// It runs, and this agent is connected to it.
    Alive(Box<Running>),
    /// Its QEMU lives or may live, and cannot be connected to.
    Silent(Option<Process>, Problem),
    /// It no longer runs, or has never run: the reason and the remedy.
    Dead(String),
}

/// Connects to the VM's live processes.
pub async fn reconnect(directory: &ProcessDir, record: &Record, slot: Arc<Slot>) -> Reconnected {
    let name = &record.spec.name;
    let process = |name: &str| Process::adopt(&directory.process(name)).map_err(internal);
    let qemu = match process(qemu::NAME) {
        Ok(Some(qemu)) => qemu,
        Ok(None) => {
            return Reconnected::Dead(format!(
                "VM '{name}' stopped while no agent was there to see why: its guest may have shut down, or QEMU died. If it should run, start it again (vmseal vm start {name})"
            ));
        }
        Err(problem) => return Reconnected::Silent(None, problem),
    };
    // The filter may have died while no agent was there: the guest waits for another one.
    let connected = match process(filter::NAME) {
        Ok(filter) => start::reconnect(directory, record, qemu, filter, slot).await,
        Err(problem) => return Reconnected::Silent(Some(qemu), problem),
    };
    match connected {
        Ok(running) => Reconnected::Alive(Box::new(running)),
        Err(NotConnected::NeverRan(problem)) => Reconnected::Dead(format!(
            "VM '{name}' was being started when the agent ended, and its disks cannot be connected: {problem}. Start it again (vmseal vm start {name})"
        )),
        Err(NotConnected::Failed(problem)) => match process(qemu::NAME) {
            Ok(None) => Reconnected::Dead(format!(
                "VM '{name}' stopped while the agent was connecting to it. If it should run, start it again (vmseal vm start {name})"
            )),
            other => Reconnected::Silent(other.ok().flatten(), problem),
        },
    }
}

/// Ends what is left of a VM. A filter whose QEMU has ended gets the chance to flush.
pub async fn clear_away(directory: &ProcessDir) -> io::Result<()> {
    let process = |name: &str| Process::adopt(&directory.process(name));
    if let (None, Some(filter)) = (process(qemu::NAME)?, process(filter::NAME)?)
        && Control::of(directory).shut_down().await.is_ok()
    {
        filter.end_within(filter::SHUTDOWN_TIMEOUT).await;
    }
    directory.sweep().await
}
