//! The task that owns a VM. See the diagram in [`super`].

mod backup_tracking;
mod backups;
mod bitmaps;
mod convert;
mod delete_disk;
mod described;
mod dumps;
mod examine;
mod exposures;
mod filter_restarts;
mod freeze;
mod grow;
mod guest;
mod jobs;
mod key_change;
mod lost_tpm;
mod memory_snapshots;
mod merge_served;
mod mirror;
mod mirror_replicas;
mod mirror_served;
mod mirror_tpm;
mod pace;
mod panics;
mod power_off;
mod power_on;
mod proofs;
mod qemu_events;
mod replicas;
mod send;
mod send_at_rest;
mod sent_replicas;
mod set_running;
mod sharing;
mod snapshots;
mod stacks;
mod suspended;
mod trees;
mod wakeup;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use jiff::Timestamp;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use vmseal_api::host::{
    Attachment, ConsoleClaim, ConsoleStream, DiskFacts, DiskState, KeyState, NicState, Notice,
    Power, SealedKey, StopReason, Stopped, VmSpec, VmState,
};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id::{self, RequestId};
use vmseal_secret::SecretBytes;

use self::key_change::{KeyChange, changed};
use super::exposed::ExposedDisk;
use super::report::Report;
use super::running::{Ending, ProcessEvent, Running};
use super::serve::{Memory, Plan};
use super::service::ServiceEvent;
use super::stalled::Stalled;
use super::workers::Workers;
use super::{Call, Initial, Request, Shared, convergence::Convergence, images, internal};
use crate::filter::metrics;
use crate::hypervisor::console::ConsoleError;
use crate::jobs::Jobs;
use crate::process::Exit;
use crate::process::live::Live;
use crate::process::restarts::{Restarts, Waits};
use crate::rules;
use crate::rules::exclusion::{Action, Activity, Situation};

/// How often running processes are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);

type StartResult = Result<(Running, Vec<Notice>), Problem>;

enum State {
    Off,
    Starting { task: JoinHandle<StartResult>, cancel: oneshot::Sender<()> },
    Running(Box<Running>),
    Stopping { running: Box<Running>, until: Instant },
}

/// An event of the owner.
enum Event {
    Call(Option<Request>),
    Started(Box<StartResult>),
    Process(ProcessEvent),
    ShutdownTimedOut,
    Disk(DiskId, Report),
    KeysChanged(Result<(), Problem>),
    Described,
    Care,
}

pub struct Owner {
    shared: Arc<Shared>,
    spec: VmSpec,
    /// What it is registered as, where a part of that takes effect only at its next start.
    next: Option<VmSpec>,
    state: State,
    kek: Option<SecretBytes>,
    stopped: Option<Stopped>,
    /// The last death, which is also on record.
    died: Option<Stopped>,
    /// The disks that this agent has made or found made.
    made: BTreeMap<DiskId, DiskFacts>,
    jobs: Jobs,
    workers: Workers,
    /// The disks that were lent to linked clones: others may have their data keys.
    shared_out: BTreeSet<DiskId>,
    /// The disks whose layers are merged.
    merges: BTreeMap<DiskId, Convergence>,
    /// What the TPM kept when the last snapshot was taken that a backup is of.
    kept_tpm: backups::KeptTpm,
    /// The tasks of disks that are exposed, or were: these end by themselves.
    exposed: BTreeMap<DiskId, ExposedDisk>,
    /// The errors of disks while they were exposed; kept until the disks are used again.
    exposed_errors: BTreeMap<DiskId, Vec<Notice>>,
    changing_keys: Option<KeyChange>,
    /// The request that last started or stopped the VM.
    request: Option<RequestId>,
    /// Notices from opening the disks; kept until the next start.
    header_notices: Vec<Notice>,
    /// Notices from the filter, while it runs.
    troubles: Vec<Notice>,
    /// The disks whose storage ends nothing, as of the last check.
    stalled: Stalled,
    /// Images whose names do not lead to the files that the VM uses or used; kept until the next start.
    exchanged: Vec<Notice>,
    /// The filters that have died under the running guest.
    restarts: Restarts,
    /// Whether the filter was started by this agent: it serves the sizes that are on record.
    serves_sizes: bool,
    /// Whether the filter may serve disks without their replicas, as it does for a guest that is sent ([`sent_replicas`]).
    may_lack_replicas: bool,
    /// The network cards of the guest that runs, or ran last: ports that were chosen are chosen again.
    nics_before: Vec<NicState>,
    /// The writing of its descriptors.
    describing: Option<JoinHandle<()>>,
    /// Why its descriptors are left as they are: its disks have another key than it is registered with.
    other_key: watch::Receiver<Option<String>>,
    tell_other_key: watch::Sender<Option<String>>,
    /// Whether the memory of its guest is saved, while it is off.
    suspended: bool,
    /// Why the last attempt to suspend it failed.
    not_suspended: Option<String>,
    /// Changes the rate at which the VM is sent while it is off.
    rate_at_rest: Option<watch::Sender<Option<u64>>>,
    /// The snapshot for which the memory is being saved.
    keeping: Option<memory_snapshots::Keeping>,
    panics: panics::Known,
    /// Whether a guest runs, for work beside it that rests then.
    guest_runs: Arc<AtomicBool>,
}

impl Owner {
    pub fn new(shared: Arc<Shared>, mut spec: VmSpec, initial: Initial) -> Self {
        let suspended = matches!(initial, Initial::Suspended);
        let (state, stopped) = match initial {
            // A VM that is left running gets its owner when that has ended.
            // One that is received gets it when it runs here.
            Initial::New | Initial::Suspended | Initial::LeftRunning(_) | Initial::Receiving(_) => {
                (State::Off, None)
            }
            Initial::Stopped(stopped) => (State::Off, Some(stopped)),
            Initial::Alive(running) => (State::Running(running), None),
        };
        let died = stopped.clone().filter(|stopped| stopped.reason.is_death());
        let mut restarts = Restarts::default();
        if let State::Running(running) = &state
            && running.service.waits()
        {
            // An earlier agent may have died together with the filter, or not have noticed its death. On record from
            // the first report on: a guest that waits is never reported without the reason.
            let why = "the filter process died while no agent was there".to_owned();
            restarts.died(why, Instant::now().into_std());
        }
        let nics_before = match &state {
            State::Running(running) => {
                // What was on record and never came to be.
                spec.devices.retain(|device| running.live.has(device));
                running.live.nics.clone()
            }
            _ => Vec::new(),
        };
        let has_replica = spec.disks().any(|disk| disk.replica.is_some());
        let may_lack_replicas = has_replica && matches!(state, State::Running(_));
        let guest_runs = Arc::new(AtomicBool::new(matches!(state, State::Running(_))));
        let (tell_other_key, other_key) = watch::channel(None);
        Self {
            shared,
            spec,
            next: None,
            state,
            kek: None,
            stopped,
            died,
            made: BTreeMap::new(),
            jobs: Jobs::default(),
            workers: Workers::new(),
            shared_out: BTreeSet::new(),
            merges: BTreeMap::new(),
            kept_tpm: None,
            exposed: BTreeMap::new(),
            exposed_errors: BTreeMap::new(),
            changing_keys: None,
            request: None,
            header_notices: Vec::new(),
            troubles: Vec::new(),
            stalled: Stalled::default(),
            exchanged: Vec::new(),
            restarts,
            serves_sizes: false,
            may_lack_replicas,
            nics_before,
            describing: None,
            other_key,
            tell_other_key,
            suspended,
            not_suspended: None,
            rate_at_rest: None,
            keeping: None,
            panics: panics::Known::default(),
            guest_runs,
        }
    }

    /// Adds a key that was accepted before the VM had an owner.
    pub fn with_key(self, kek: Option<SecretBytes>) -> Self {
        Self { kek, ..self }
    }

    pub async fn run(mut self, mut calls: mpsc::Receiver<Request>) {
        self.serve_again();
        self.sweep_memory().await;
        self.find_panics().await;
        self.tell_received();
        // Before the first call, so that freezing is reserved: else an operator's freeze would be thawed.
        self.go_on_thawing();
        self.publish();
        let mut care = tokio::time::interval(CHECK_INTERVAL);
        care.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let event = tokio::select! {
                call = calls.recv() => Event::Call(call),
                event = next(&mut self.state) => event,
                (disk, report) = self.workers.next() => Event::Disk(disk, report),
                result = changed(&mut self.changing_keys) => Event::KeysChanged(result),
                Ok(()) = self.other_key.changed() => Event::Described,
                _ = care.tick() => Event::Care,
            };
            match event {
                Event::Call(None) => return,
                Event::Call(Some((_, Call::Unregister(reply)))) => {
                    let result = self.unregister().await;
                    let done = result.is_ok();
                    if done {
                        self.shared.states.publish(self.spec.vm, None);
                    }
                    let _ = reply.send(result);
                    if done {
                        return;
                    }
                }
                Event::Call(Some((request, call))) => {
                    request_id::during(request, self.answer(call)).await;
                }
                event => {
                    self.apply(event).await;
                    self.publish();
                }
            }
        }
    }

    fn power(&self) -> Power {
        match self.state {
            State::Off if self.suspended => Power::Suspended,
            State::Off => Power::Off,
            State::Starting { .. } => Power::Starting,
            State::Running(ref running) if running.saving.is_some() => Power::Suspending,
            State::Running(ref running) if running.live.handed_over.is_some() => Power::Migrating,
            State::Running(ref running) if running.live.paused => Power::Paused,
            State::Running(_) => Power::Running,
            State::Stopping { .. } => Power::Stopping,
        }
    }

    fn key(&self) -> KeyState {
        rules::key_state(&self.spec, self.kek.is_some())
    }

    /// Publishes the VM's state.
    pub fn publish(&self) {
        let disk = |(disk, facts): (&DiskId, &DiskFacts)| DiskState {
            disk: *disk,
            facts: facts.clone(),
            datastore: self.spec.disk(*disk).map(|disk| disk.datastore.datastore),
        };
        let state = VmState {
            vm: self.spec.vm,
            power: self.power(),
            key: self.key(),
            stopped: self.stopped.clone(),
            died: self.died.clone(),
            disks: self.made.iter().map(disk).collect(),
            notices: self.notices(),
            jobs: self.jobs.statuses(),
            nics: self.nics().to_vec(),
            started_with: self.started_with(),
            suspended_to_ram: self.is_asleep(),
            not_suspended: self.not_suspended.clone(),
            panics: self.panics.past.clone(),
            panic_dumps: self.panics.dumps.clone(),
            request_id: self.request.as_ref().map(ToString::to_string),
        };
        self.shared.states.publish(self.spec.vm, Some(state));
    }

    /// Its network cards, while it runs.
    fn nics(&self) -> &[NicState] {
        match &self.state {
            State::Running(running) | State::Stopping { running, .. } => &running.live.nics,
            State::Off | State::Starting { .. } => &[],
        }
    }

    fn notices(&self) -> Vec<Notice> {
        let waits = match &self.state {
            State::Running(running) | State::Stopping { running, .. }
                if running.service.waits() =>
            {
                if running.stands_still() {
                    Waits::ForTheGuest
                } else {
                    Waits::ForKey
                }
            }
            _ => Waits::Not,
        };
        let restarted = self.restarts.notice(&self.spec, waits);
        let exposed = self.exposed_errors.values().flatten();
        let images = self.exchanged.iter().chain(exposed);
        let known = self.header_notices.iter().chain(&self.troubles).chain(images);
        let tpm = match &self.state {
            State::Running(running) | State::Stopping { running, .. } => {
                running.tpm.notice(&self.spec)
            }
            State::Off | State::Starting { .. } => None,
        };
        let known = known.cloned().chain(restarted).chain(tpm).chain(self.notice_of_panics());
        known.chain(self.notice_of_freeze()).chain(self.notice_of_key()).collect()
    }

    /// Executes a call. The state is published before the answer is sent, so that a caller that has the
    /// answer and reads the state sees the result. The caller may have gone; the result stays.
    async fn answer(&mut self, call: Call) {
        macro_rules! reply {
            ($reply:expr, $result:expr) => {{
                let result = $result;
                self.publish();
                let _ = $reply.send(result);
            }};
        }
        match call {
            Call::Register(spec, to) => reply!(to, self.register(spec).await),
            Call::OfferKey(key, to) => {
                let offered = self.offer_key(&key);
                self.dump_waiting_panic().await;
                reply!(to, offered)
            }
            Call::ChangeKeys(key, change, to) => {
                let shared = change.shared();
                match self.change_keys(&key, *change) {
                    Ok(task) => {
                        self.changing_keys = Some(KeyChange { task, shared, reply: to });
                    }
                    refused => reply!(to, refused.map(drop)),
                }
            }
            Call::DeleteDisk(disk, to) => reply!(to, self.delete_disk(disk).await),
            Call::ExamineJob(spec, to) => reply!(to, self.examine_job(spec).await),
            Call::ExamineChange(change, to) => reply!(to, self.examine_change(change).await),
            Call::PutJob(task, spec, lent, to) => {
                reply!(to, self.put_job(task, spec, lent).await)
            }
            Call::Lend(of, to) => reply!(to, self.lend(of).await),
            Call::Job(task, to) => reply!(to, self.jobs.status(task)),
            Call::SetPace(task, pace, to) => reply!(to, self.set_work_pace(task, pace)),
            Call::CommitJob(task, spec, to) => reply!(to, self.commit_job(task, spec).await),
            Call::CancelJob(task, spec, to) => reply!(to, self.cancel_job(task, spec).await),
            Call::PowerOn(first, generation, to) => {
                reply!(to, self.power_on(first, generation).await)
            }
            Call::Suspend(generation, to) => reply!(to, self.suspend(generation).await),
            Call::DiscardMemory(to) => reply!(to, self.discard_memory().await),
            Call::DiscardDump(dump, to) => reply!(to, self.discard_dump(dump).await),
            Call::PowerOff(how, to) => reply!(to, self.power_off(how).await),
            Call::ControlGuest(what, to) => reply!(to, self.control_guest(what).await),
            Call::GrowDisk(disk, size, to) => reply!(to, self.grow_disk(disk, size).await),
            Call::Screen(to) => reply!(to, self.screen().await),
            Call::Guest(to) => reply!(to, self.guest_agent()),
            Call::Console(claim, to) => reply!(to, self.console(claim).await),
            // The task that serves the disk answers, as its filter has to start first.
            Call::Expose(disk, what, to) => self.expose(disk, what, to).await,
            Call::Bitmaps(disk, change, to) => self.bitmaps(disk, change, to),
            Call::Replica(disk, to) => self.replica(disk, to),
            Call::Unregister(_) => {}
        }
    }

    async fn apply(&mut self, event: Event) {
        match event {
            Event::Started(result) => {
                request_id::during(self.request.clone(), self.started(*result)).await;
            }
            Event::Process(ProcessEvent::Reported(event)) => self.qemu_reported(event).await,
            Event::Process(ProcessEvent::Service(ServiceEvent::FilterEnded(exit))) => {
                self.filter_ended(exit).await
            }
            Event::Process(ProcessEvent::Service(ServiceEvent::ServedAgain(Ok(again)))) => {
                self.served_again(again)
            }
            Event::Process(ProcessEvent::Service(ServiceEvent::ServedAgain(Err(problem)))) => {
                if !self.panicked_unserved(&problem) {
                    let why = format!(
                        "its filter process died and no other can serve its disks: {problem}"
                    );
                    self.end_unserved(&why).await;
                }
            }
            Event::Process(ProcessEvent::TpmEnded(exit)) => {
                if let Some(running) = self.running() {
                    running.tpm.note_end(exit, &running.directory);
                    tracing::error!(vm = %self.spec.vm, %exit, "the TPM ended, and the guest goes on");
                }
            }
            Event::Process(ProcessEvent::MemorySaved(saved)) => {
                request_id::during(self.request.clone(), self.memory_saved(saved)).await;
            }
            Event::Process(ProcessEvent::Sending(event)) => {
                request_id::during(self.request.clone(), self.sending(event)).await;
            }
            Event::Process(ProcessEvent::PanicDumped(dumped)) => self.panic_dumped(dumped).await,
            Event::Process(ProcessEvent::Addresses) => self.note_addresses(),
            Event::Process(ProcessEvent::Thawed(thawed)) => self.thaw_ended(thawed),
            Event::Process(ProcessEvent::QemuEnded(exit)) => self.qemu_ended(Some(exit)).await,
            Event::Process(ProcessEvent::MonitorLost) => self.qemu_ended(None).await,
            Event::ShutdownTimedOut => {
                if let Some(running) = self.take_running() {
                    tracing::info!(vm = %self.spec.vm, "the guest has not shut down in the time that it was given");
                    self.state = State::Running(Box::new(running));
                }
            }
            Event::Disk(disk, report) => self.reported(disk, report).await,
            Event::KeysChanged(result) => {
                if let Some(change) = self.changing_keys.take() {
                    let result = match result {
                        Ok(()) => self.serve_as_shared(&change.shared).await,
                        failed => failed,
                    };
                    let _ = change.reply.send(result);
                }
                self.dump_waiting_panic().await;
            }
            Event::Care => {
                // First: what is told of a filter is not of one that is about to be replaced.
                self.serve_with_replicas_again().await;
                if let State::Running(running) | State::Stopping { running, .. } = &mut self.state {
                    let stalled = (&mut self.stalled, self.shared.disk_stall);
                    let left = self.may_lack_replicas;
                    self.troubles = running.look_after(&self.spec, stalled, left).await;
                    self.exchanged = images::exchanged(&self.spec, &running.directory).await;
                }
                self.ask_for_addresses();
                self.go_on_thawing();
                self.restarts.forget(Instant::now().into_std());
                self.describe_if_left();
                self.serve_again();
                self.look_whether_taken().await;
                self.note_missing_devices().await;
                self.let_go_of_copies().await;
                if let Err(problem) = self.let_go_of_disks().await {
                    tracing::info!(vm = %self.spec.vm, %problem, "its filter serves a disk too many");
                }
                self.tell_of_growth().await;
                self.go_on_with_merges().await;
                self.dump_waiting_panic().await;
            }
            // Nothing but its notice is new.
            Event::Described | Event::Call(_) => {}
        }
    }

    fn take_running(&mut self) -> Option<Running> {
        match std::mem::replace(&mut self.state, State::Off) {
            State::Running(running) | State::Stopping { running, .. } => Some(*running),
            other => {
                self.state = other;
                None
            }
        }
    }

    fn running(&mut self) -> Option<&mut Running> {
        match &mut self.state {
            State::Running(running) | State::Stopping { running, .. } => Some(running),
            State::Off | State::Starting { .. } => None,
        }
    }

    async fn qemu_ended(&mut self, exit: Option<Exit>) {
        let of_itself = matches!(self.state, State::Running(_));
        if let Some(running) = self.take_running() {
            if of_itself {
                self.request = None;
            }
            let ending = running.end_after_qemu(&self.spec.name, exit).await;
            request_id::during(self.request.clone(), self.went_off(ending)).await;
        }
    }

    /// No process is left: writes the record if it died, and only then removes the remains.
    async fn went_off(&mut self, (reason, detail): Ending) {
        let vm = self.spec.vm;
        tracing::info!(%vm, ?reason, detail, "the VM is off");
        metrics::vm_ended(reason);
        self.state = State::Off;
        self.guest_runs.store(false, Ordering::Relaxed);
        if reason != StopReason::Migrated {
            self.keep_bitmaps().await;
        }
        self.fail_keeping().await;
        self.ended_while_sent(&detail);
        if let Some(next) = self.next.take() {
            self.spec = next;
        }
        self.troubles.clear();
        self.stalled = Stalled::default();
        self.restarts = Restarts::default();
        // Their filter is gone, or what a snapshot keeps would keep the guest from starting again.
        // Each end of its connections goes last: without it the client would not be told why.
        for (disk, _connections) in std::mem::take(&mut self.exposed) {
            self.workers.cancel(disk).await;
        }
        let stopped = Stopped { at: Timestamp::now(), reason, detail };
        if reason.is_death() {
            self.died = Some(stopped.clone());
        }
        self.stopped = Some(stopped);
        // A start that failed may have got far enough to remove the record of the last death.
        if let Some(died) = &self.died
            && let Err(error) = self.shared.died.record(&self.spec, died)
        {
            tracing::warn!(%vm, %error, "cannot record the death of a VM");
        }
        if let Err(error) = self.shared.run_dir.vm(vm).sweep().await {
            tracing::warn!(%vm, %error, "cannot remove the run directory of a VM");
        }
        // Beside disks that another host has got, what is half may be of that host.
        if reason != StopReason::Migrated {
            self.sweep_panic_dumps().await;
            // One may have become whole as its QEMU ended.
            self.list_panic_dumps().await;
        }
        self.look_for_memory().await;
        self.go_on_copying().await;
        self.go_on_with_merges().await;
    }

    async fn started(&mut self, result: StartResult) {
        match result {
            Ok((running, notices)) => {
                tracing::info!(vm = %self.spec.vm, qemu = running.qemu.pid(), "the VM runs");
                self.died = None;
                self.suspended = false;
                self.not_suspended = None;
                self.panics.past.clone_from(&running.live.panics.past);
                self.header_notices = notices;
                self.nics_before.clone_from(&running.live.nics);
                self.state = State::Running(Box::new(running));
                self.guest_runs.store(true, Ordering::Relaxed);
                self.serves_sizes = true;
                self.may_lack_replicas = false;
                self.go_on_thawing();
                self.go_on_copying().await;
                self.go_on_with_merges().await;
            }
            Err(problem) => self.went_off((StopReason::FailedToStart, problem.detail)).await,
        }
    }

    async fn register(&mut self, spec: VmSpec) -> Result<(), Problem> {
        // Repeating the same is always allowed.
        let is_done = !self.has_guest() || self.links_not_set(&spec).is_empty();
        if self.registered() == &spec && is_done {
            return Ok(());
        }
        self.may_register(&spec)?;
        if self.spec.key.is_some() && spec.key.is_none() {
            self.require_nothing_sealed().await?;
            if self.running().is_some_and(|running| running.dumping.is_some()) {
                let what = "has a core dump written under its key: try again when that is done";
                let detail = format!("VM '{}' {what}", self.spec.name);
                return Err(Problem::new(ErrorCode::TimedOut, detail));
            }
        }
        if self.has_guest() {
            return self.set_running(spec).await;
        }
        if self.spec.key != spec.key {
            self.kek = None;
        }
        self.made.retain(|disk, _| spec.disk(*disk).is_some());
        self.jobs.keep_disks_of(&spec);
        self.spec = spec;
        self.describe();
        Ok(())
    }

    /// What it is registered as.
    fn registered(&self) -> &VmSpec {
        self.next.as_ref().unwrap_or(&self.spec)
    }

    /// Whether to register it anew is to change what its guest has.
    fn has_guest(&self) -> bool {
        matches!(self.power(), Power::Running | Power::Paused | Power::Stopping)
    }

    /// Checks that it may be registered anew; what its guest can have is another question.
    fn may_register(&self, new: &VmSpec) -> Result<(), Problem> {
        if !self.has_guest() {
            self.situation().may(Action::Register, None)?;
            return if self.suspended {
                rules::check_devices_stay(&self.spec, new)
            } else {
                Ok(())
            };
        }
        if self.jobs.sender().is_none() {
            return Ok(());
        }
        let what = "is being sent to another host: it cannot be changed meanwhile. Wait, or cancel the task";
        Err(Problem::new(ErrorCode::InUse, format!("VM '{}' {what}", self.spec.name)))
    }

    /// The state of the VM, and the work in progress on it.
    fn situation(&self) -> Situation<'_> {
        let exposed = self.exposed.keys().map(|disk| (*disk, Activity::Exposed));
        Situation {
            spec: &self.spec,
            power: self.power(),
            changing_keys: self.changing_keys.is_some(),
            disks: self.jobs.activities().chain(exposed).collect(),
            unused: self.unused(),
        }
    }

    async fn unregister(&mut self) -> Result<(), Problem> {
        self.situation().may(Action::Unregister, None)?;
        for disk in self.jobs.activities().map(|(disk, _)| disk).collect::<Vec<_>>() {
            self.workers.cancel(disk).await;
        }
        self.until_described().await?;
        self.spec.disks().for_each(|disk| self.shared.bitmaps.forget(disk.disk));
        self.shared.died.forget(self.spec.vm).map_err(internal)
    }

    fn offer_key(&mut self, offered: &SealedKey) -> Result<(), Problem> {
        let Some(reference) = &self.spec.key else {
            return Err(rules::wrong_state(&self.spec, "has no key"));
        };
        let opened = self.shared.key_box.open(self.spec.vm, reference, offered);
        if opened.is_ok() { &metrics::KEYS_TAKEN } else { &metrics::KEYS_REFUSED }.add();
        self.kek = Some(opened?);
        self.describe();
        self.serve_again();
        Ok(())
    }

    fn clone_kek(&self) -> Result<Option<SecretBytes>, Problem> {
        self.kek.as_ref().map(SecretBytes::try_clone).transpose().map_err(internal)
    }

    /// What to start; the rules have checked that all disks are made.
    fn plan(&self) -> Result<Plan, Problem> {
        self.plan_with(match &self.state {
            State::Running(running) | State::Stopping { running, .. } => running.live.clone(),
            State::Off | State::Starting { .. } => Live::at_start(&self.spec),
        })
    }

    fn plan_with(&self, live: Live) -> Result<Plan, Problem> {
        let disks = self.spec.disks().filter(|disk| live.disk(disk.disk).is_some());
        let disks = disks.filter_map(|disk| Some((disk.clone(), self.facts(disk)?)));
        let (tpm, disks): (Vec<_>, _) =
            disks.partition(|(disk, _)| disk.role.attachment() == Attachment::Tpm);
        let (spec, nics_before) = (self.spec.clone(), self.nics_before.clone());
        let (tpm, kek) = (tpm.into_iter().next(), self.clone_kek()?);
        let shared_out = self.shared_out.clone();
        let (boot_once, memory) = (None, Memory::New);
        let without_replicas = self.is_sent();
        Ok(Plan {
            spec,
            disks,
            kek,
            shared_out,
            nics_before,
            live,
            tpm,
            boot_once,
            memory,
            without_replicas,
        })
    }

    async fn console(&mut self, claim: ConsoleClaim) -> Result<ConsoleStream, Problem> {
        self.situation().may(Action::Console, None)?;
        let attached = match &self.state {
            State::Running(running) | State::Stopping { running, .. } => {
                running.console.attach(claim).await
            }
            State::Off | State::Starting { .. } => Err(ConsoleError::Gone),
        };
        attached.map_err(|refused| match refused {
            ConsoleError::Gone => {
                let what = "does not run: it has no console. Start it first";
                rules::wrong_state(&self.spec, what)
            }
            ConsoleError::InUse => rules::console_in_use(&self.spec),
        })
    }
}

/// The next event that the state itself produces.
async fn next(state: &mut State) -> Event {
    match state {
        State::Off => std::future::pending().await,
        State::Starting { task, .. } => {
            Event::Started(Box::new(task.await.unwrap_or_else(|error| Err(internal(error)))))
        }
        State::Running(running) => Event::Process(running.next().await),
        State::Stopping { running, until } => tokio::select! {
            event = running.next() => Event::Process(event),
            () = sleep_until(*until) => Event::ShutdownTimedOut,
        },
    }
}
