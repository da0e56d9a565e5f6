//! Disks with replicas, of a guest that is sent to another host: each is written without its replica from when the guest is about to be sent
//! until it goes on, there or here. Then all of it is copied (docs/decisions/325).
//!
//! ```text
//!  served with replicas ─ put ─► filter ended ─► maps removed ─► served without ─► sent ─► handed over ─► received: maps removed, served without
//!       ^                                                           │ given up                                      │
//!       └────────────── the filter is replaced, all is copied ──────┴───────────────────────────────────────────────┘
//! ```
//! What keeps a replica is not exchanged while it serves (docs/decisions/226), and a guest is handed over by such an exchange. A disk that has
//! no map is one that was left without its replica, so an agent that dies in between leaves to the next one what is to be done.

use tokio::task::spawn_blocking;
use vmseal_api::host::Power;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Owner, State};
use crate::rules;
use crate::storage::replica;
use crate::vm::internal;
use crate::vm::serve::{self, Plan};

impl Owner {
    /// Whether the guest is being sent to another host, or is handed over to it: its disks are served without their replicas.
    pub(super) fn is_sent(&self) -> bool {
        match &self.state {
            State::Running(running) | State::Stopping { running, .. } => {
                running.sending.is_some() || running.live.handed_over.is_some()
            }
            State::Off | State::Starting { .. } => false,
        }
    }

    /// Has the disks of a guest that is about to be sent be served without their replicas. The guest sees a pause, if it has such disks.
    ///
    /// # Errors
    /// As [`Owner::until_served`] and [`Owner::may_replace_filter`], and `wrong-state` for a guest that is paused or a replica that hangs: the
    /// filter goes on. Those of a filter's start: another one is started.
    pub(super) async fn serve_without_replicas(&mut self) -> Result<(), Problem> {
        let Some(disk) = self.spec.disks().find(|disk| disk.replica.is_some()) else {
            return Ok(());
        };
        if self.power() == Power::Paused {
            let what = format!(
                "is paused, and has a replica of its disk '{}': its filter is replaced before it is sent, and QEMU could not send all of its guest then. Unpause it first",
                disk.name
            );
            return Err(rules::wrong_state(&self.spec, &what));
        }
        // One that has died is replaced first.
        self.until_served().await?;
        self.require_replicas_answer().await?;
        self.may_replace_filter().await?;
        let plan = Plan { without_replicas: true, ..self.plan()? };
        self.may_lack_replicas = true;
        self.end_filter_to_replace().await?;
        if let Err(problem) = self.start_filter_of(plan).await {
            // The guest waits.
            self.serve_again();
            return Err(problem);
        }
        // It may have begun while the guest stood still for a moment.
        self.until_served().await
    }

    /// Refuses while the datastore of a replica hangs: a filter that writes there could not end, and another one would begin late. One that is
    /// not there does not matter.
    async fn require_replicas_answer(&self) -> Result<(), Problem> {
        for disk in self.spec.disks() {
            if let Err(problem) = replica::examine(disk).await
                && problem.code == ErrorCode::TimedOut
            {
                let what = format!(
                    "has a replica of its disk '{}' that hangs, and its filter is not replaced meanwhile: {}",
                    disk.name, problem.detail
                );
                return Err(rules::wrong_state(&self.spec, &what));
            }
        }
        Ok(())
    }

    /// Has the disks served with their replicas again, where the guest goes on that was sent: here, or where it was received. The guest sees a
    /// pause. What is not possible now is tried again at the next check.
    pub(super) async fn serve_with_replicas_again(&mut self) {
        if !self.may_lack_replicas || self.is_sent() {
            return;
        }
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return };
        // One that is paused writes nothing, and may be suspended or sent only with the filter that it has.
        let waits = running.live.paused || running.stands_still();
        // One that does not answer is replaced in any case.
        let Ok(status) = running.control.status().await else { return };
        let lacks = spawn_blocking(move || serve::lacks_replicas(&spec, &status)).await;
        match lacks.map_err(internal).flatten() {
            Ok(true) if waits => return,
            Ok(true) => {}
            Ok(false) => {
                self.may_lack_replicas = false;
                return;
            }
            Err(problem) => {
                tracing::info!(vm = %self.spec.vm, %problem, "whether its disks lack their replicas is not known");
                return;
            }
        }
        let may_be_replaced = match self.require_replicas_answer().await {
            Ok(()) => self.may_replace_filter().await,
            hangs => hangs,
        };
        if let Err(problem) = may_be_replaced {
            tracing::info!(vm = %self.spec.vm, %problem, "its disks are served without their replicas yet");
            return;
        }
        tracing::info!(vm = %self.spec.vm, "all of its disks is copied to their replicas");
        self.may_lack_replicas = false;
        self.replace_filter_or_retry().await;
    }
}
