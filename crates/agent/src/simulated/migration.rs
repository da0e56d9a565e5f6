//! Guests that are sent to other hosts, and received. Two simulated hosts share nothing: each has what the other would send.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use vmseal_api::host::{
    ArrivingCopies, Departure, DisksSent, JobSpec, KeyState, MigrationProgress, Power, ReceiveJob,
    SealingWork, SendJob, StopReason, VmSpec,
};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::calls::Later;
use super::running::RunningGuest;
use super::{Inside, Known, SimulatedHost, Work};
use crate::rules;
use crate::storage::memory::NOT_COUNTED;

/// How often the memory of a guest is gone through.
const PASSES: u64 = 3;

/// How long a guest stands still, and is expected to before, in milliseconds.
const DOWNTIME: u64 = 20;
const DOWNTIME_EXPECTED: u64 = 300;

/// How long disks, and all of the memory, are sent, in milliseconds.
const DISKS_TAKE: u64 = 500;
const MEMORY_TAKES: u64 = 400;

impl SimulatedHost {
    /// Sets where it waits for VMs.
    pub fn set_migration_address(&self, address: SocketAddr) {
        self.inside().migration_address = address;
    }

    /// It cannot connect to this port of another host any more.
    pub fn cut_off_from(&self, port: SocketAddr) {
        self.inside().cut_off.insert(port);
    }

    /// All of a guest that is sent from now on was sent so long before this host has noticed it.
    pub fn set_stood_still(&self, before: Duration) {
        self.inside().stood_still = before;
    }

    /// How a task sends a VM from here.
    #[must_use]
    pub fn departure(&self, vm: VmId, task: TaskId) -> Option<Departure> {
        let inside = self.inside();
        match inside.agent.vms.get(&vm)?.jobs.spec(task) {
            Some(JobSpec::Send(SendJob { begin, .. })) => begin.as_deref().cloned(),
            _ => None,
        }
    }

    /// A VM is not sent from here, or received, for this reason.
    pub fn fail_migration(&self, vm: VmId, task: TaskId, problem: Problem) {
        let mut inside = self.inside();
        if let Ok(known) = inside.known(vm) {
            known.work.remove(&Work::Job(task));
            known.jobs.migrated(task, Err(problem));
        }
        inside.agent.publish(vm);
    }

    /// Whether a guest runs here, or is about to: not one that is handed over.
    #[must_use]
    pub fn runs(&self, vm: VmId) -> bool {
        self.inside().persisted.guests.get(&vm).is_some_and(|guest| !guest.handed_over)
    }
}

/// How far a guest is that begins to be sent: a quarter of its memory.
fn begun(vm: &VmSpec) -> MigrationProgress {
    let memory = vm.memory;
    MigrationProgress {
        passes: 1,
        remaining: memory - memory / 4,
        sent: memory / 4,
        dirty_rate: 8 << 20,
        rate: 1 << 30,
        downtime_milliseconds: DOWNTIME_EXPECTED,
        throttle: 0,
        all_sent: false,
        sealing: Some(SealingWork { cpu_milliseconds: 10, cpu_percent: 40 }),
        memory_milliseconds: Some(MEMORY_TAKES / 4),
        disks: None,
        placed: None,
    }
}

/// How far a VM that is off is when its disks are sent.
fn disks_sent(vm: &VmSpec) -> MigrationProgress {
    MigrationProgress {
        sent: vm.disks().map(|disk| disk.size).sum(),
        ..MigrationProgress::default()
    }
}

/// How far one is that stands still.
fn all_sent(vm: &VmSpec) -> MigrationProgress {
    MigrationProgress {
        passes: PASSES,
        remaining: 0,
        sent: vm.memory,
        downtime_milliseconds: DOWNTIME,
        all_sent: true,
        sealing: Some(SealingWork { cpu_milliseconds: 40, cpu_percent: 40 }),
        memory_milliseconds: Some(MEMORY_TAKES),
        ..begun(vm)
    }
}

/// What is sent of the disks that the other host gets copies of; none where there are none.
fn sent_of_copies(vm: &VmSpec, job: Option<&JobSpec>) -> Option<DisksSent> {
    let Some(JobSpec::Send(SendJob { copies, .. })) = job else { return None };
    let copied = vm.disks().filter(|disk| copies.contains(&disk.disk));
    let bytes = copied.map(|disk| disk.size).sum();
    let sent = DisksSent { bytes, milliseconds: DISKS_TAKE, later_bytes: 0 };
    (!copies.is_empty()).then_some(sent)
}

/// The copies that a job makes of a VM's disks.
fn copies_of(job: Option<&JobSpec>) -> Option<&ArrivingCopies> {
    match job {
        Some(JobSpec::Receive(ReceiveJob { copies, .. })) => copies.as_ref(),
        _ => None,
    }
}

impl Known {
    /// The guest has ended, and its sending with it. One that was handed over before has been sent.
    pub fn ended_while_sent(&mut self, why: &str) {
        let Some(task) = self.jobs.sender() else { return };
        if self.jobs.is_ready_to_commit(task) || self.jobs.sends_at_rest() {
            return;
        }
        self.work.remove(&Work::Job(task));
        self.jobs.migrated(task, Err(rules::ended_while_sent(&self.spec, why)));
    }
}

impl Inside {
    /// Whether it can connect to a port of another host.
    pub fn reaches(&self, port: SocketAddr) -> Result<(), Problem> {
        match self.cut_off.contains(&port) {
            true => Err(Problem::new(ErrorCode::WrongState, "it is cut off")),
            false => Ok(()),
        }
    }

    /// Waits for a VM that is not known here.
    pub fn receive(&mut self, vm: VmId, task: TaskId, job: &ReceiveJob) -> Result<Later, Problem> {
        let spec = JobSpec::Receive(job.clone());
        let Some(arrival) = job.begin.as_deref() else {
            return Err(Problem::invalid("begin", "is needed to begin"));
        };
        rules::check_spec(&arrival.vm)?;
        rules::check_session(&arrival.session)?;
        let mut known = Known::new(arrival.vm.clone());
        if let (Some(reference), Some(sealed)) = (&arrival.vm.key, &arrival.key) {
            known.kek = Some(self.agent.key_box.open(vm, reference, sealed)?);
            known.key_held = true;
        }
        if rules::key_state(&known.spec, known.key_held) == KeyState::Missing {
            return Err(rules::locked(&known.spec));
        }
        known.power = Power::Migrating;
        known.receiving = true;
        known.jobs.begin(task, spec);
        self.agent.vms.insert(vm, known);
        self.persisted.bitmaps.remove(&vm);
        self.numbered(vm, Work::Job(task), self.work)
    }

    /// Begins to send the guest, or the disks of a VM that is off.
    pub fn begin_send(&mut self, vm: VmId, task: TaskId) -> Result<(), Problem> {
        let known = self.known(vm)?;
        let progress = match known.jobs.is_at_rest(task) {
            true => MigrationProgress::default(),
            false => begun(&known.spec),
        };
        let disks = sent_of_copies(&known.spec, known.jobs.spec(task));
        known.jobs.migrates(task, MigrationProgress { disks, ..progress });
        Ok(())
    }

    /// The guest has panicked, and is not sent any more.
    pub fn panicked_while_sent(&mut self, vm: VmId) {
        let Ok(known) = self.known(vm) else { return };
        let Some(task) = known.jobs.sender() else { return };
        known.work.remove(&Work::Job(task));
        let problem = rules::panicked_while_sent(&known.spec);
        known.jobs.migrated(task, Err(problem));
    }

    /// All of the guest is sent: it stands still.
    pub fn hand_over(&mut self, vm: VmId) {
        if let Some(guest) = self.persisted.guests.get_mut(&vm) {
            guest.handed_over = true;
        }
        if let Ok(known) = self.known(vm) {
            known.power = Power::Migrating;
        }
    }

    /// Makes the copies that a host gets of disks.
    fn make_copies(&mut self, vm: VmId, task: TaskId) -> Result<(), Problem> {
        let Some(JobSpec::Receive(job)) = self.known(vm)?.jobs.spec(task).cloned() else {
            return Ok(());
        };
        for copy in job.copies.into_iter().flat_map(|copies| copies.disks) {
            let facts = self.make_disk(vm, copy.disk)?;
            self.receive_snapshots(copy.disk);
            self.known(vm)?.made.insert(copy.disk, facts);
        }
        Ok(())
    }

    /// The other host has the guest.
    pub fn commit_send(&mut self, vm: VmId, task: TaskId) -> Result<(), Problem> {
        let known = self.known(vm)?;
        match known.power {
            Power::Off | Power::Suspended => {
                // That of a VM which was off is done; an agent that has restarted has none.
                known.jobs.committed(task);
                return Ok(());
            }
            Power::Migrating => {}
            _ => return Err(rules::wrong_state(&known.spec, rules::NOT_READY_TO_COMMIT)),
        }
        known.stop(StopReason::Migrated, "it runs on another host now");
        known.jobs.committed(task);
        self.persisted.guests.remove(&vm);
        self.agent.publish(vm);
        Ok(())
    }

    /// The guest goes on here.
    pub fn cancel_send(&mut self, vm: VmId, task: TaskId) -> Result<(), Problem> {
        let known = self.known(vm)?;
        known.jobs.cancel(task);
        known.work.remove(&Work::Job(task));
        if let Some(guest) = self.persisted.guests.get_mut(&vm) {
            guest.handed_over = false;
            let power = guest.power();
            self.known(vm)?.power = power;
        }
        self.agent.publish(vm);
        Ok(())
    }

    /// The guest goes on here, with the memory that was received.
    pub fn commit_receive(&mut self, vm: VmId, task: TaskId) -> Result<(), Problem> {
        let known = self.known(vm)?;
        if !known.receiving {
            return Ok(());
        }
        if !known.jobs.is_ready_to_commit(task) {
            return Err(rules::wrong_state(&known.spec, rules::NOT_READY_TO_COMMIT));
        }
        known.receiving = false;
        let copies = copies_of(known.jobs.spec(task));
        let taken = copies.map(|copies| copies.generation);
        let at_rest = copies.filter(|copies| copies.at_rest).map(|copies| copies.suspended);
        if let Some(suspended) = at_rest {
            known.power = if suspended { Power::Suspended } else { Power::Off };
            known.jobs.committed(task);
            if suspended {
                let guest = RunningGuest::new(known.spec.clone());
                let generation = self.persisted.coming_memories.get(&vm).copied();
                let generation = generation.unwrap_or(NOT_COUNTED);
                self.persisted.suspended.insert(vm, RunningGuest { generation, ..guest });
            }
            self.take_lease(vm, taken);
            self.agent.publish(vm);
            return Ok(());
        }
        known.power = Power::Running;
        known.in_use = known.spec.disks().map(|disk| disk.disk).collect();
        known.jobs.committed(task);
        known.jobs.went_on(task, Some(Instant::now()));
        let guest = RunningGuest::new(known.spec.clone());
        self.persisted.guests.insert(vm, guest);
        self.take_lease(vm, taken);
        self.agent.publish(vm);
        Ok(())
    }

    /// Writes the lease of a VM that has come, beside the copies of its disks. It tells an agent that knows nothing else of the VM that the VM
    /// was here.
    fn take_lease(&mut self, vm: VmId, generation: Option<u64>) {
        if let Some(generation) = generation {
            self.persisted.leases.insert(vm, generation);
        }
    }

    /// The guest does not come.
    pub fn cancel_receive(
        &mut self,
        vm: VmId,
        task: TaskId,
        job: &ReceiveJob,
    ) -> Result<(), Problem> {
        let copies = job.copies.iter().flat_map(|copies| &copies.disks);
        let copies: Vec<_> = copies.map(|copy| copy.disk).collect();
        if !self.agent.vms.contains_key(&vm) && !copies.is_empty() {
            let generation = job.copies.as_ref().map_or(0, |copies| copies.generation);
            if self.persisted.leases.get(&vm).is_some_and(|taken| *taken >= generation) {
                let what = format!("VM {vm} is on this host with its copied disks");
                return Err(Problem::new(ErrorCode::WrongState, what));
            }
            // An earlier agent has made them.
            copies.iter().for_each(|disk| self.remove_copy(*disk));
            return Ok(());
        }
        let known = self.known(vm)?;
        if !known.receiving {
            let what = "runs on this host: its migration cannot be cancelled any more";
            return Err(rules::wrong_state(&known.spec, what));
        }
        known.jobs.cancel(task);
        known.work.remove(&Work::Job(task));
        known.power = Power::Off;
        known.made.clear();
        copies.iter().for_each(|disk| self.remove_copy(*disk));
        self.agent.publish(vm);
        Ok(())
    }

    fn remove_copy(&mut self, disk: DiskId) {
        self.persisted.disks.remove(&disk);
        self.forget_snapshots(disk);
    }

    /// The work of a migration's job ends.
    pub fn migrated(&mut self, vm: VmId, task: TaskId, sent: bool) {
        let at_rest = self.known(vm).is_ok_and(|known| known.jobs.is_at_rest(task));
        if sent && at_rest {
            // Nothing stands still.
        } else if sent {
            self.hand_over(vm);
        } else if let Err(problem) = self.make_copies(vm, task) {
            if let Ok(known) = self.known(vm) {
                known.jobs.migrated(task, Err(problem));
            }
            self.agent.publish(vm);
            return;
        }
        let all_sent_at = Instant::now().checked_sub(self.stood_still);
        if let Ok(known) = self.known(vm) {
            if sent && !at_rest {
                known.jobs.all_sent(task, all_sent_at);
            }
            let placed = Some(known.spec.memory).filter(|_| !at_rest);
            let disks = sent_of_copies(&known.spec, known.jobs.spec(task));
            let progress = match sent {
                true if at_rest => disks_sent(&known.spec),
                true => all_sent(&known.spec),
                false => MigrationProgress { placed, ..MigrationProgress::default() },
            };
            known.jobs.migrates(task, MigrationProgress { disks, ..progress });
            known.jobs.migrated(task, Ok(()));
        }
        self.agent.publish(vm);
    }
}
