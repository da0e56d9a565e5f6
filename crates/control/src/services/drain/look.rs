//! A look at a host that is emptied: what can be done next with each of its VMs.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use sqlx::Connection as _;
use vmseal_api::drain::{DrainState, OnDrain};
use vmseal_api::host::Power;
use vmseal_api::id::VmId;
use vmseal_api::model::{Connection, TaskState};
use vmseal_api::problem::Problem;

use super::destination::{self, Refused, Until, largest_first};
use crate::hosts::HostView;
use crate::operation::{Claim, Operation};
use crate::services::Services;
use crate::services::migrate::{Fit, Promised, Tried};
use crate::services::vms::word;
use crate::store::StoreError;
use crate::store::drains::{self, Drain, DrainedVm};
use crate::store::hosts::{self, Host};
use crate::store::tasks::{self, Task};
use crate::store::vms::{self, Vm};

/// How often a VM is moved, or shut down, before an operator has to do something: what is short of a defect passes by then.
pub(super) const ATTEMPTS: u32 = 3;

/// How long to wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    /// After the first failure of a task, before it is tried again; after each further one twice as long.
    pub(super) before_retry: Duration,
    /// Before a VM is shut down that no host can take: one that restarts may take it then.
    pub(super) before_stop: Duration,
}

/// What is next for a VM.
pub(super) enum Next {
    /// It is not to be mentioned: it did not run here.
    Nothing,
    /// It is so, and nothing is begun.
    Is(DrainState, String),
    /// It moves to this host.
    Send(Box<Fit>),
    /// Its guest is shut down, for this reason.
    Stop(String),
}

/// Whether a VM gets another task after its last one.
enum Again {
    Now,
    Later(String),
    Never(String),
}

/// What is known at one time.
pub(super) struct Look<'a> {
    services: &'a Services,
    drain: &'a Drain,
    pace: Pace,
    host: Host,
    view: HostView,
    /// The VMs that are on the host, the largest first.
    here: Vec<Vm>,
    /// What was noted of VMs before.
    noted: HashMap<VmId, DrainedVm>,
    /// The last task of each VM for this drain, if that has ended.
    last: HashMap<VmId, Task>,
    /// The tasks that have VMs.
    holding: HashMap<VmId, Task>,
    /// How many VMs are being sent away.
    sending: usize,
    promised: Promised,
    tried: Tried,
}

impl<'a> Look<'a> {
    pub(super) async fn begin(
        services: &'a Services,
        drain: &'a Drain,
        pace: Pace,
    ) -> Result<Self, Problem> {
        let mut read = services.store.read().await?;
        let found = hosts::find(&mut read, &drain.host.to_string()).await?;
        let host = found.ok_or_else(|| Problem::not_found("host", drain.host))?;
        // One snapshot of the inventory: a VM that leaves meanwhile is either here or there.
        let mut read = read.begin().await.map_err(StoreError::from)?;
        let mut holding = HashMap::new();
        for task in tasks::open(&mut read).await? {
            for claim in task.operation.claims() {
                if let Claim::Vm(vm) = claim {
                    holding.insert(vm, task.clone());
                }
            }
        }
        let mut here = vms::on_host(&mut read, drain.host).await?;
        largest_first(&mut here);
        let (mut noted, mut last) = (HashMap::new(), HashMap::new());
        for line in drains::vms_of(&mut read, drain.host).await? {
            if let Some(task) = line.task
                && let Some(task) = tasks::get(&mut read, &task.to_string()).await?
                && task.ended.is_some()
            {
                last.insert(line.vm, task);
            }
            noted.insert(line.vm, line);
        }
        let promised = Promised::read(&mut read).await?;
        drop(read);
        // After the tasks: what those have done that are not open any more is in it.
        let view = services.hosts.view(drain.host);
        let mut this = Self {
            services,
            drain,
            pace,
            host,
            view,
            here,
            noted,
            last,
            holding,
            sending: 0,
            promised,
            tried: Tried::default(),
        };
        this.sending = this.holding.values().filter(|it| this.sends(&it.operation)).count();
        Ok(this)
    }

    pub(super) fn drain(&self) -> &'a Drain {
        self.drain
    }

    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    /// The VMs that are on the host, the largest first.
    pub(super) fn vms(&self) -> Vec<Vm> {
        self.here.clone()
    }

    /// What is to be noted of a VM.
    pub(super) fn line(&self, vm: &Vm, state: DrainState, detail: String) -> DrainedVm {
        let before = self.noted.get(&vm.id);
        DrainedVm {
            vm: vm.id,
            name: vm.name.clone(),
            state,
            attempts: before.map_or(0, |before| before.attempts),
            task: before.and_then(|before| before.task),
            detail,
        }
    }

    /// The same of one that gets another task.
    pub(super) fn attempt(&self, vm: &Vm, operation: &Operation, detail: String) -> DrainedVm {
        let line = self.line(vm, DrainState::UnderWay, detail);
        let same = |last: &&Task| {
            last.operation.kind() == operation.kind() && last.state != TaskState::Done
        };
        let before = self.last.get(&vm.id).filter(same).map_or(0, |_| line.attempts);
        DrainedVm { attempts: before.saturating_add(1), ..line }
    }

    /// Whether something else was noted before.
    pub(super) fn is_news(&self, line: &DrainedVm) -> bool {
        self.noted.get(&line.vm) != Some(line)
    }

    /// Takes into account what has been begun since.
    pub(super) fn has_begun(&mut self, operation: &Operation, vm: &Vm) {
        if let Operation::MigrateVm { to, .. } = operation {
            self.sending += 1;
            self.promised.add(*to, vm.memory);
        }
    }

    fn sends(&self, operation: &Operation) -> bool {
        matches!(operation, Operation::MigrateVm { from, .. } if *from == self.host.id)
    }

    fn brings(&self, operation: &Operation) -> bool {
        matches!(operation, Operation::MigrateVm { to, .. } if *to == self.host.id)
    }

    /// What is to be noted of VMs that are on other hosts: those that were here, and those that are on their way to here.
    pub(super) async fn others(&self) -> Result<Vec<DrainedVm>, Problem> {
        let mut read = self.services.store.read().await?;
        let (mut lines, mut known) = (Vec::new(), HashSet::new());
        for id in self.noted.keys().chain(self.holding.keys()) {
            if !known.insert(*id) || self.here.iter().any(|vm| vm.id == *id) {
                continue;
            }
            let Some(vm) = vms::get(&mut read, *id).await? else { continue };
            let (state, detail) = match self.holding.get(id) {
                Some(task) if self.brings(&task.operation) => {
                    let detail =
                        format!("it comes from host '{}' as task {}", vm.host_name, task.id);
                    (DrainState::Waiting, detail)
                }
                Some(task) if self.sends(&task.operation) => {
                    let detail =
                        format!("it is on host '{}', and its processes here end", vm.host_name);
                    (DrainState::UnderWay, detail)
                }
                _ if self.noted.contains_key(id) => {
                    (DrainState::Done, format!("it is on host '{}'", vm.host_name))
                }
                _ => continue,
            };
            lines.push(self.line(&vm, state, detail));
        }
        Ok(lines)
    }

    /// What is next for a VM that is on the host. `refused` has since when no host can take which VM.
    pub(super) async fn next(&self, vm: &Vm, refused: &mut HashMap<VmId, Instant>) -> Next {
        let noted = self.noted.get(&vm.id);
        let seen = self.view.vm(vm.id).map(|seen| seen.power);
        let waits = |why: String| Next::Is(DrainState::Waiting, why);
        let done = |why: &str| match noted {
            Some(_) => Next::Is(DrainState::Done, why.to_owned()),
            None => Next::Nothing,
        };
        if vm.on_drain == OnDrain::Leave {
            return done("on-drain leave: it is left as it is");
        }
        if let Some(task) = self.holding.get(&vm.id) {
            let is_for_this = noted.is_some_and(|noted| noted.task == Some(task.id));
            return match (noted, is_for_this) {
                (Some(noted), true) => Next::Is(DrainState::UnderWay, noted.detail.clone()),
                _ => waits(format!("{} has it as task {}", task.operation.kind(), task.id)),
            };
        }
        if self.view.connection == Connection::Disconnected {
            return match super::runs(&self.view, vm) || noted.is_some() {
                true => waits("its host does not answer".to_owned()),
                false => Next::Nothing,
            };
        }
        match seen {
            None if noted.is_none() && !super::runs(&self.view, vm) => Next::Nothing,
            None => waits("its host does not say whether it runs".to_owned()),
            Some(Power::Off) => done("it is off"),
            Some(Power::Suspended) => done("it is suspended"),
            Some(now @ (Power::Running | Power::Paused)) => match self.is_to_be_stopped(vm) {
                true => self.next_of_stopped(vm, now).await,
                false => self.next_of_sent(vm, refused).await,
            },
            Some(other) => waits(format!("it is {}", word(other))),
        }
    }

    /// Whether it is shut down: it asks for that, or that has been begun because it cannot be moved.
    fn is_to_be_stopped(&self, vm: &Vm) -> bool {
        let begun = |last: &Task| matches!(last.operation, Operation::StopVm { .. });
        vm.on_drain == OnDrain::Stop
            || self.drain.stop_others && self.last.get(&vm.id).is_some_and(begun)
    }

    async fn next_of_stopped(&self, vm: &Vm, now: Power) -> Next {
        if now == Power::Paused {
            let why = "it is paused, so its guest cannot shut down";
            return Next::Is(DrainState::Stays, why.to_owned());
        }
        match self.again(vm) {
            Again::Now if vm.on_drain == OnDrain::Stop => Next::Stop("on-drain stop".to_owned()),
            Again::Now => self.stop(vm, "it cannot be moved".to_owned()).await,
            Again::Later(why) => Next::Is(DrainState::Waiting, why),
            Again::Never(why) => Next::Is(DrainState::Stays, why),
        }
    }

    async fn next_of_sent(&self, vm: &Vm, refused: &mut HashMap<VmId, Instant>) -> Next {
        match self.again(vm) {
            Again::Now => {}
            Again::Later(why) => return Next::Is(DrainState::Waiting, why),
            Again::Never(why) => {
                let until = if self.lacked_key(vm) { Until::Key } else { Until::Changed };
                return self.cannot(vm, Refused { why, until }, refused).await;
            }
        }
        if self.sending >= usize::try_from(self.drain.parallel).unwrap_or(usize::MAX) {
            return Next::Is(DrainState::Waiting, "it waits for others".to_owned());
        }
        let failed = self.last.get(&vm.id).and_then(|last| match last.operation {
            Operation::MigrateVm { to, .. } if last.state != TaskState::Done => Some(to),
            _ => None,
        });
        let (services, known) = (self.services, (&self.promised, &self.tried));
        match destination::of(services, self.drain, vm, known, failed).await {
            Ok(to) => {
                refused.remove(&vm.id);
                Next::Send(Box::new(to))
            }
            Err(why) => self.cannot(vm, why, refused).await,
        }
    }

    /// Whether the last task of a VM failed for want of its key, although that was given when the task was begun.
    fn lacked_key(&self, vm: &Vm) -> bool {
        let problem = self.last.get(&vm.id).and_then(|last| last.problem.as_ref());
        problem.is_some_and(destination::is_for_key)
    }

    /// Has a VM shut down that cannot be moved, for this reason, unless it could not be started again.
    async fn stop(&self, vm: &Vm, why: String) -> Next {
        match destination::why_not_stopped(self.services, vm, &why).await {
            Some(why) => Next::Is(DrainState::Stays, why),
            None => Next::Stop(why),
        }
    }

    /// What is next for a VM that cannot be moved.
    async fn cannot(
        &self,
        vm: &Vm,
        refusal: Refused,
        refused: &mut HashMap<VmId, Instant>,
    ) -> Next {
        let cancelled = self.last.get(&vm.id).is_some_and(|last| last.cancelled);
        if refusal.until == Until::Key {
            // Where no host can take it afterwards, it has not been so for long.
            refused.remove(&vm.id);
            return Next::Is(DrainState::Stays, refusal.why);
        }
        if !self.drain.stop_others || cancelled {
            return Next::Is(DrainState::Stays, refusal.why);
        }
        let since = *refused.entry(vm.id).or_insert_with(Instant::now);
        // One that fails leaves room behind for this one.
        let for_long = self.sending == 0 && since.elapsed() >= self.pace.before_stop;
        if refusal.until == Until::Changed || for_long {
            return self.stop(vm, refusal.why).await;
        }
        let why = format!("{}; it is shut down if that stays so", refusal.why);
        Next::Is(DrainState::Waiting, why)
    }

    /// Whether a VM gets another task. What somebody has cancelled is not begun again.
    fn again(&self, vm: &Vm) -> Again {
        let Some(last) = self.last.get(&vm.id) else { return Again::Now };
        let attempts = self.noted.get(&vm.id).map_or(0, |noted| noted.attempts);
        let kind = last.operation.kind();
        let why = last.problem.as_ref().map(ToString::to_string).unwrap_or_default();
        if last.state == TaskState::Done {
            return Again::Now;
        }
        if last.cancelled {
            return Again::Never(format!("{kind} was cancelled (task {})", last.id));
        }
        if attempts >= ATTEMPTS {
            return Again::Never(format!("{kind} failed {attempts} times, the last time: {why}"));
        }
        let pause = self.pace.before_retry.saturating_mul(1 << attempts.saturating_sub(1).min(8));
        let passed = last.ended.map(|ended| Timestamp::now().duration_since(ended).unsigned_abs());
        match passed.is_none_or(|passed| passed >= pause) {
            true => Again::Now,
            false => Again::Later(format!("{kind} is tried again; it failed: {why}")),
        }
    }
}
