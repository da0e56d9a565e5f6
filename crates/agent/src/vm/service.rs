//! The filter of a running guest's disks or, when it has died, the next one. The guest sees a pause: QEMU
//! keeps the record of the requests in flight and gives it to the next filter, which executes them again
//! (docs/decisions/016 and 020).
//!
//! ```text
//!    Served ──the filter ended──► Down, waits ──key here or not needed──► Down, attempt under way
//!      ▲                            │                                       │            │
//!      └────────────────────────────┼──────────── disks served ─────────────┘            │
//!                                   ▼                                                    ▼
//!               ended with the VM (QEMU ended, forced off)             given up: the VM is stopped
//! ```
//! The wait for a key has no limit: a waiting guest has lost nothing, a stopped one has. Nor has the wait for a guest that is paused: a filter
//! begins when that goes on ([`queues`]).

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use vmseal_api::filter::DiskActivity;
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::Shared;
use super::queues;
use super::serve::{self, Plan};
use crate::filter::Control;
use crate::hypervisor::qmp::{Qmp, QmpError};
use crate::hypervisor::{plug, qemu};
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::process::{Exit, Process};

/// How long starting another filter is retried, unless a test says otherwise. The kernel may take a while to finish
/// the requests of the dead one on a slow disk, and holds the image's lock until then.
pub const FILTER_RESTART_TIMEOUT: Duration = Duration::from_secs(60);

/// The pause after the first failed attempt; it doubles after each.
const FIRST_PAUSE: Duration = Duration::from_millis(50);

/// The longest pause between attempts.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// See the module.
pub enum Service {
    Served(Process),
    Down(Option<Attempt>),
}

/// An event of the service.
#[derive(Debug)]
pub enum ServiceEvent {
    /// The filter has ended.
    FilterEnded(Exit),
    /// Another one serves the disks, or none can.
    ServedAgain(Result<Again, Problem>),
}

/// A filter that serves in place of another one.
#[derive(Debug)]
pub struct Again {
    pub filter: Process,
    /// Whether the guest ran when QEMU had taken it ([`super::queues`]).
    pub guest_ran: bool,
}

/// An attempt to start another filter.
pub struct Attempt {
    task: JoinHandle<Result<Again, Problem>>,
    cancel: oneshot::Sender<()>,
}

impl Attempt {
    /// Begins an attempt.
    pub fn begin(
        shared: Arc<Shared>,
        directory: ProcessDir,
        slot: Arc<Slot>,
        qmp: Arc<Qmp>,
        plan: Plan,
    ) -> Self {
        let (cancel, cancelled) = oneshot::channel();
        let task = tokio::spawn(async move {
            tokio::select! {
                served = serve_again(&shared, &directory, Arc::new(plan), &slot, &qmp) => served,
                _ = cancelled => Err(Problem::new(ErrorCode::Cancelled, "the VM is being stopped")),
            }
        });
        Self { task, cancel }
    }

    /// Cancels the attempt; a filter that it has started is on record in the VM's directory.
    pub async fn end(self) {
        let _ = self.cancel.send(());
        let _ = self.task.await;
    }
}

impl Service {
    /// Whether another filter is needed and not yet being started.
    pub fn waits(&self) -> bool {
        matches!(self, Self::Down(None))
    }

    /// The next event.
    pub async fn next(&mut self) -> ServiceEvent {
        match self {
            Self::Served(filter) => ServiceEvent::FilterEnded(filter.ended().await),
            Self::Down(Some(attempt)) => {
                let result = (&mut attempt.task).await;
                *self = Self::Down(None);
                let failed = |error: tokio::task::JoinError| Err(super::internal(error));
                ServiceEvent::ServedAgain(result.unwrap_or_else(failed))
            }
            Self::Down(None) => std::future::pending().await,
        }
    }
}

/// Starts a filter for a guest that waits; retries for the host's `filter_restart_timeout`.
async fn serve_again(
    shared: &Shared,
    directory: &ProcessDir,
    plan: Arc<Plan>,
    slot: &Slot,
    qmp: &Qmp,
) -> Result<Again, Problem> {
    let give_up = Instant::now() + shared.filter_restart_timeout;
    let mut pause = FIRST_PAUSE;
    loop {
        match serve_once(shared, directory, plan.clone(), slot, qmp).await {
            Ok(filter) => {
                let control = Control::of(directory);
                let guest_ran = queues::taken(&control, &plan.spec, &plan.live, qmp).await;
                return Ok(Again { filter, guest_ran });
            }
            Err(NotServed::MayRetry(problem)) if Instant::now() < give_up => {
                tracing::info!(vm = %plan.spec.vm, %problem, "the disks are not served yet");
                sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
            Err(NotServed::MayRetry(problem) | NotServed::RefusedForGood(problem)) => {
                return Err(problem);
            }
        }
    }
}

/// Why a filter does not serve a guest.
#[derive(Debug)]
pub enum NotServed {
    /// Another attempt may succeed.
    MayRetry(Problem),
    /// QEMU takes no other filter for a disk (docs/decisions/020), or another host has got the VM.
    RefusedForGood(Problem),
}

impl From<Problem> for NotServed {
    fn from(problem: Problem) -> Self {
        Self::MayRetry(problem)
    }
}

impl NotServed {
    pub fn into_problem(self) -> Problem {
        match self {
            Self::MayRetry(problem) | Self::RefusedForGood(problem) => problem,
        }
    }
}

/// Starts a filter for a guest that waits, once.
pub async fn serve_once(
    shared: &Shared,
    directory: &ProcessDir,
    plan: Arc<Plan>,
    slot: &Slot,
    qmp: &Qmp,
) -> Result<Process, NotServed> {
    let served = serve::filter(shared, directory, &plan, slot, None).await;
    let (filter, _) = served.map_err(|problem| match problem.code {
        // Its guest has run elsewhere.
        ErrorCode::Conflict => NotServed::RefusedForGood(problem),
        _ => problem.into(),
    })?;
    connected(directory, &plan, filter, qmp).await
}

/// Waits until QEMU has connected to the filter; ends a filter with which that fails. One that QEMU may be connecting to
/// lives on: QEMU before 9.0 would not take another (docs/decisions/020).
async fn connected(
    directory: &ProcessDir,
    plan: &Plan,
    filter: Process,
    qmp: &Qmp,
) -> Result<Process, NotServed> {
    // QEMU handles a filter's connections in one go and answers its monitor afterwards.
    if let Err(error) = answers(qmp).await {
        tracing::warn!(vm = %plan.spec.vm, %error, "QEMU is busy and may connect to its disks later");
        return Ok(filter);
    }
    let Err(not_served) = agreed(&Control::of(directory), plan, qmp).await else {
        return Ok(filter);
    };
    if let Err(error) = answers(qmp).await {
        tracing::warn!(vm = %plan.spec.vm, %error, "QEMU is busy and may connect to its disks later");
        return Ok(filter);
    }
    filter.kill();
    filter.ended().await;
    Err(not_served)
}

async fn agreed(control: &Control, plan: &Plan, qmp: &Qmp) -> Result<(), NotServed> {
    let devices = plug::devices(qmp).await.map_err(super::internal)?;
    // One that is being plugged in gets its device when it is served, and one that was unplugged has none.
    let has_device = |disk: DiskId| {
        let built_in = plan.live.disk(disk).is_some_and(|disk| disk.port.is_none());
        built_in || devices.contains(&qemu::disk_device(disk))
    };
    let waited = serve::wait_connected(control, &plan.spec, has_device).await;
    answers(qmp).await.map_err(super::internal)?;
    let Err(problem) = waited else {
        return Ok(serve::wait_connected(control, &plan.spec, has_device).await?);
    };
    let status = control.status().await.map_err(super::internal)?;
    let idle = status.disks.iter().filter(|disk| disk.state == DiskActivity::Idle);
    let idle = idle.filter(|disk| has_device(disk.disk));
    for disk in idle.filter_map(|disk| plan.live.disk(disk.disk)) {
        if plug::has_connection(qmp, disk.socket).await.map_err(super::internal)? {
            let name = plan.spec.disk(disk.disk).map_or("", |disk| disk.name.as_str());
            return Err(NotServed::RefusedForGood(Problem::new(
                ErrorCode::Internal,
                format!(
                    "QEMU accepts another filter for disk '{name}' and never speaks to it, as QEMU before 9.0 does when a filter has died while the guest was not using the disk"
                ),
            )));
        }
    }
    Err(problem.into())
}

/// Whether QEMU has handled what was there when it was asked.
///
/// # Errors
/// Its monitor's, also when that does not answer in time.
pub async fn answers(qmp: &Qmp) -> Result<(), QmpError> {
    qmp.execute("query-status", Value::Null).await.map(drop)
}
