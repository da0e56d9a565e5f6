//! Goes on with the drains of hosts: a look at a host begins what can begin, and notes how far each VM is.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmseal_api::drain::DrainState;
use vmseal_api::id::VmId;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id;

use super::look::{Look, Next, Pace};
use crate::operation::Operation;
use crate::services::{Services, migrate};
use crate::store::drains::{self, Drain, DrainedVm};
use crate::store::events::NewEvent;
use crate::store::hosts::Host;
use crate::store::placements;
use crate::store::tasks::{self, Task};
use crate::store::vms::{self, Vm};
use crate::tasks::Engine;

/// How often to look again where nothing has changed: a pause before another attempt may be over.
const LOOK_AGAIN: Duration = Duration::from_secs(10);

/// The shortest time between two looks: much changes at once while VMs move.
const BETWEEN_LOOKS: Duration = Duration::from_millis(500);

/// Long enough for a host whose agent restarts to be back.
const PACE: Pace =
    Pace { before_retry: Duration::from_secs(10), before_stop: Duration::from_secs(60) };

/// Goes on with drains, until it is dropped.
pub async fn run(services: Arc<Services>) {
    let mut changes = services.store.changes();
    let mut drainer = Drainer::new(services, PACE);
    loop {
        changes.mark_unchanged();
        if let Err(problem) = drainer.look().await {
            tracing::error!(%problem, "the drains of hosts do not go on for the moment");
        }
        tokio::time::sleep(BETWEEN_LOOKS).await;
        tokio::select! {
            () = tokio::time::sleep(LOOK_AGAIN) => {}
            Ok(()) = changes.changed() => {}
        }
    }
}

/// Goes on with drains.
pub(super) struct Drainer {
    services: Arc<Services>,
    pace: Pace,
    /// Since when no host can take a VM. Not kept when the server ends: hosts that are not connected yet then take none.
    refused: HashMap<VmId, Instant>,
}

impl Drainer {
    pub(super) fn new(services: Arc<Services>, pace: Pace) -> Self {
        Self { services, pace, refused: HashMap::new() }
    }

    /// Looks once at each host that is emptied.
    pub(super) async fn look(&mut self) -> Result<(), Problem> {
        let going_on = drains::going_on(&mut *self.services.store.read().await?).await?;
        if going_on.is_empty() {
            self.refused.clear();
        }
        for drain in going_on {
            // One host does not hold up another.
            if let Err(problem) = self.look_at(&drain).await {
                tracing::error!(host = %drain.host, %problem, "its drain does not go on for the moment");
            }
        }
        Ok(())
    }

    async fn look_at(&mut self, drain: &Drain) -> Result<(), Problem> {
        let services = Arc::clone(&self.services);
        let mut look = Look::begin(&services, drain, self.pace).await?;
        let mut lines = look.others().await?;
        for vm in look.vms() {
            let line = match look.next(&vm, &mut self.refused).await {
                Next::Nothing => continue,
                Next::Is(state, detail) => look.line(&vm, state, detail),
                Next::Send(to) => {
                    let what = format!("it moves to host '{}'", to.host.name);
                    let operation = migrate::operation(&vm, &to);
                    self.begin(&mut look, &vm, operation, what, Some(&to.host)).await?
                }
                Next::Stop(why) => {
                    let what = format!("its guest shuts down: {why}");
                    self.begin(&mut look, &vm, stop(vm.id), what, None).await?
                }
            };
            lines.push(line);
        }
        self.note(&look, drain, &lines).await
    }

    /// Begins to move a VM to a host, or to stop it; says how far it is then.
    async fn begin(
        &self,
        look: &mut Look<'_>,
        vm: &Vm,
        operation: Operation,
        what: String,
        to: Option<&Host>,
    ) -> Result<DrainedVm, Problem> {
        let (drain, line) = (look.drain(), look.attempt(vm, &operation, what));
        let recorded = self.record(drain, vm, operation.clone(), line, to);
        match request_id::during(drain.request_id.clone(), recorded).await {
            Ok(line) => {
                look.has_begun(&operation, vm);
                Ok(line)
            }
            // Another task has the VM now, or the host is full or is emptied, too: that is looked at again.
            Err(problem) if problem.code == ErrorCode::WrongState => {
                Ok(look.line(vm, DrainState::Waiting, problem.detail))
            }
            Err(problem) => Err(problem),
        }
    }

    /// Records the task and what the drain says of the VM in one transaction: a server that ends here has begun both or neither.
    async fn record(
        &self,
        drain: &Drain,
        vm: &Vm,
        operation: Operation,
        line: DrainedVm,
        to: Option<&Host>,
    ) -> Result<DrainedVm, Problem> {
        let services = &self.services;
        let mut write = services.store.write().await?;
        if drains::of_host(&mut write, drain.host).await?.as_ref() != Some(drain) {
            return Err(Problem::new(ErrorCode::WrongState, "the drain has been changed"));
        }
        if placements::owner(&mut write, vm.id).await? != Some(drain.host) {
            return Err(Problem::new(ErrorCode::WrongState, "the VM has another host now"));
        }
        match to {
            Some(to) => {
                migrate::require_room(services, &mut write, vm, to).await?;
                // This look at the host may have taken long.
                migrate::require_medium_kept(&mut write, vm).await?;
            }
            // A start that is due because its host has rebooted would undo it.
            None => vms::set_start_done(&mut write, vm.id).await?,
        }
        let task = Engine::record(&mut write, operation, &vm.name, &drain.actor).await?;
        let pace =
            CopyPace { bytes_per_second: drain.rate.filter(|_| to.is_some()), paused: false };
        let task = Task { pace, ..task };
        if !pace.is_free() {
            tasks::set_pace(&mut write, &task).await?;
        }
        let line = DrainedVm { task: Some(task.id), ..line };
        drains::set_vm(&mut write, drain.host, &line).await?;
        let detail = format!("{} as task {}: {}", task.operation.kind(), task.id, line.detail);
        let (actor, target) = (drain.actor.as_str(), vm.name.as_str());
        write.event(NewEvent { kind: "vm.draining", actor, target, detail: &detail }).await?;
        write.commit().await?;
        services.engine.begin(task);
        Ok(line)
    }

    /// Notes how far the VMs are, where that has changed, and that the host is empty, if it is.
    async fn note(
        &self,
        look: &Look<'_>,
        drain: &Drain,
        lines: &[DrainedVm],
    ) -> Result<(), Problem> {
        let news: Vec<_> = lines.iter().filter(|line| look.is_news(line)).collect();
        let empty = lines.iter().all(|line| line.state == DrainState::Done);
        if news.is_empty() && !empty {
            return Ok(());
        }
        let work = async {
            let mut write = self.services.store.write().await?;
            // Undrained, or asked again, since this look began.
            if drains::of_host(&mut write, drain.host).await?.as_ref() != Some(drain) {
                return Ok(());
            }
            for line in news {
                // A VM that was deleted since is no news.
                if vms::get(&mut write, line.vm).await?.is_some() {
                    drains::set_vm(&mut write, drain.host, line).await?;
                }
            }
            if empty {
                drains::set_drained(&mut write, drain.host).await?;
                let (actor, target) = (drain.actor.as_str(), look.host().name.as_str());
                write.event(NewEvent { kind: "host.drained", actor, target, detail: "" }).await?;
            }
            write.commit().await?;
            Ok(())
        };
        request_id::during(drain.request_id.clone(), work).await
    }
}

/// The task that shuts a guest down.
fn stop(vm: VmId) -> Operation {
    let timeout_seconds = crate::services::vms::SHUTDOWN_DEFAULT;
    Operation::StopVm { vm, force: false, timeout_seconds }
}
