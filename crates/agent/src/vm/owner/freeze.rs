//! Freezes the file systems of a guest for a snapshot, and thaws them (docs/decisions/309).
//!
//! ```text
//!  reserved ─► nothing frozen? ─► on record ─► frozen ─► layers put ─► thawed ─► off the record ─► operators freeze again
//!              │                              │                       │
//!              └── frozen by an operator,     └── no answer,          └── no answer ─► tried again, and a notice
//!                  or no answer: not frozen       refused: not frozen,
//!                                                 and thawed beside
//! ```
//! An agent that starts thaws what is on record. Once the guest says that nothing is frozen, the record is removed.
//!
//! The owner waits for the freeze, and does nothing else meanwhile than to replace a filter that dies: without one the guest could not
//! flush, and would not answer.

use std::pin::pin;

use jiff::Timestamp;
use vmseal_api::host::{Notice, Power};
use vmseal_api::problem::Problem;

use super::set_running::write_or;
use super::{Event, Owner, State};
use crate::hypervisor::guest_agent::GuestAgent;
use crate::hypervisor::plug;
use crate::vm::running::ProcessEvent;

/// What came of the thaw after a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Thaw {
    /// The guest has thawed what was frozen until then.
    Thawed,
    /// Nothing was frozen any more.
    WereThawed,
    /// The guest does not say. It is tried again.
    Unknown,
}

impl Owner {
    /// Freezes the guest's file systems, if its agent answers. That of a paused guest does not.
    pub(super) async fn freeze(&mut self) -> bool {
        if self.power() == Power::Paused {
            return false;
        }
        let Ok(agent) = self.guest_agent() else { return false };
        // A guest without an agent would only be waited for.
        let Some(running) = self.running() else { return false };
        if !plug::guest_agent_listens(&running.qmp).await {
            return false;
        }
        agent.reserve_freezing(true);
        let frozen = self.freeze_reserved(&agent).await;
        if let Some(running) = self.running() {
            running.guest.reserve_freezing(running.live.frozen.is_some());
        }
        frozen
    }

    async fn freeze_reserved(&mut self, agent: &GuestAgent) -> bool {
        let vm = self.spec.vm;
        // What an earlier snapshot has left ends first: the file systems are to be flushed now.
        if self.running().is_some_and(|running| running.live.frozen.is_some())
            && self.thaw().await == Thaw::Unknown
        {
            return false;
        }
        match self.beside_service(agent.is_frozen()).await {
            Some(Ok(false)) => {}
            Some(Ok(true)) => {
                tracing::info!(%vm, "the guest's file systems are frozen already, and stay so");
                return false;
            }
            Some(Err(problem)) => {
                tracing::info!(%vm, %problem, "the guest's file systems are not frozen");
                return false;
            }
            None => return false,
        }
        if let Err(problem) = self.note_freeze() {
            tracing::warn!(%vm, %problem, "the guest's file systems are not frozen");
            return false;
        }
        match self.beside_service(agent.freeze()).await {
            Some(Ok(())) => true,
            Some(Err(problem)) => {
                tracing::info!(%vm, %problem, "the guest's file systems are not frozen");
                // One that has not answered may freeze them yet.
                self.go_on_thawing();
                false
            }
            None => false,
        }
    }

    /// Thaws what was frozen for a snapshot.
    pub(super) async fn thaw(&mut self) -> Thaw {
        let name = self.spec.name.clone();
        let Some(running) = self.running() else { return Thaw::Unknown };
        running.thawing.stop();
        let agent = running.guest.clone().called(&name);
        match self.beside_service(agent.thaw()).await {
            Some(Ok(were_frozen)) => {
                self.thawed();
                if were_frozen { Thaw::Thawed } else { Thaw::WereThawed }
            }
            Some(Err(problem)) => {
                self.thaw_ended(Err(problem));
                Thaw::Unknown
            }
            None => Thaw::Unknown,
        }
    }

    /// Begins to thaw what was frozen for a snapshot and is not known to be thawed, where it is time to; what comes of it is an event.
    pub(super) fn go_on_thawing(&mut self) {
        // A guest that stands still does not answer.
        let answers = matches!(self.power(), Power::Running | Power::Stopping);
        let name = self.spec.name.clone();
        let Some(running) = self.running() else { return };
        if running.live.frozen.is_none() {
            return;
        }
        running.guest.reserve_freezing(true);
        if answers && !running.panicked && running.thawing.is_due() {
            running.thawing.thaw(running.guest.clone().called(&name), running.qmp.clone());
        }
    }

    /// An attempt to thaw has ended.
    pub(super) fn thaw_ended(&mut self, thawed: Result<(), Problem>) {
        let vm = self.spec.vm;
        match thawed {
            Ok(()) => {
                tracing::info!(%vm, "the guest's file systems are thawed");
                self.thawed();
            }
            Err(problem) => {
                tracing::warn!(%vm, %problem, "the guest's file systems may still be frozen");
                if let Some(running) = self.running() {
                    running.thawing.failed(&problem);
                }
            }
        }
    }

    /// Notes that nothing is frozen for a snapshot any more.
    pub(super) fn thawed(&mut self) {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return };
        if running.live.frozen.is_none() {
            return;
        }
        running.forget_freeze();
        if let Err(problem) = running.write(&spec) {
            // An agent that starts asks the guest once more.
            tracing::warn!(vm = %spec.vm, %problem, "the thaw of the guest is not on record");
        }
    }

    /// What operators should know of a guest that could not be thawed.
    pub(super) fn notice_of_freeze(&self) -> Option<Notice> {
        match &self.state {
            State::Running(running) | State::Stopping { running, .. } => {
                running.thawing.notice(&self.spec, running.live.frozen?)
            }
            State::Off | State::Starting { .. } => None,
        }
    }

    /// Puts on record that the guest's file systems may be frozen from now on.
    fn note_freeze(&mut self) -> Result<(), Problem> {
        let spec = self.spec.clone();
        let Some(running) = self.running() else { return Ok(()) };
        let before = running.live.clone();
        running.live.frozen = Some(Timestamp::now());
        write_or(running, &spec, before)
    }

    /// Waits for an answer of the guest; a filter that dies meanwhile is replaced. None where the VM is off before it comes.
    async fn beside_service<T>(&mut self, answer: impl Future<Output = T>) -> Option<T> {
        let mut answer = pin!(answer);
        loop {
            let running = self.running()?;
            let event = tokio::select! {
                answer = &mut answer => return Some(answer),
                event = running.service.next() => event,
            };
            Box::pin(self.apply(Event::Process(ProcessEvent::Service(event)))).await;
            self.publish();
        }
    }
}
