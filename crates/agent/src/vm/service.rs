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
//! The wait for a key has no limit: a waiting guest has lost nothing, a stopped one has.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use vmseal_api::host::VmSpec;
use vmseal_api::problem::{ErrorCode, Problem};

use super::Shared;
use super::serve::{self, Plan};
use crate::filter::Control;
use crate::hypervisor::qmp::Qmp;
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
    ServedAgain(Result<Process, Problem>),
}

/// An attempt to start another filter.
pub struct Attempt {
    task: JoinHandle<Result<Process, Problem>>,
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
) -> Result<Process, Problem> {
    let give_up = Instant::now() + shared.filter_restart_timeout;
    let mut pause = FIRST_PAUSE;
    loop {
        let served = match serve::filter(shared, directory, &plan, slot).await {
            Ok((filter, _)) => connected(directory, &plan.spec, filter, qmp).await,
            Err(problem) => Err(problem),
        };
        match served {
            Ok(filter) => return Ok(filter),
            Err(problem) if Instant::now() < give_up => {
                tracing::info!(vm = %plan.spec.vm, %problem, "the disks are not served yet");
                sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
            Err(problem) => return Err(problem),
        }
    }
}

/// Waits until QEMU has connected to the filter; kills a filter with which that fails.
async fn connected(
    directory: &ProcessDir,
    spec: &VmSpec,
    filter: Process,
    qmp: &Qmp,
) -> Result<Process, Problem> {
    let control = Control::of(directory);
    let agreed = async {
        serve::wait_connected(&control, spec).await?;
        // QEMU handles a filter's connection in one go and answers its monitor afterwards.
        qmp.execute("query-status", Value::Null).await.map_err(super::internal)?;
        serve::wait_connected(&control, spec).await
    };
    let result = agreed.await;
    if result.is_err() {
        filter.kill();
        filter.ended().await;
    }
    result.map(|()| filter)
}
