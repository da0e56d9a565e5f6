//! A VM that comes from another host. One task owns it until it runs here; then its owner does ([`super::owner`]).
//!
//! ```text
//!            the source connects           memory loaded            commit
//!   Coming ─────────────────────► Coming ────────────────► Loaded ─────────► (the VM's owner)
//!      │  Machine; disks copied; QEMU starts, with placeholders for disks
//!      └──────────────── an error, cancel, QEMU ends ──────────┴───► Ended: no process is left
//!
//!   commit:  copied disks named; disks opened, locked ─► drained ─► replaced ─► resumed ─► lease taken ─► on record as running ─► cont
//! ```
//! Of a VM that is off the disks come, and no guest: it is then ready as one whose memory is loaded ([`at_rest`]).
//!
//! The lease is the point from which the guest runs here whatever dies: an agent that starts and finds the VM on record as
//! received goes on with it if the lease is this placement's, and removes what is left of it otherwise.

mod at_rest;

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking};
use vmseal_api::host::{
    ArrivingCopies, Attachment, DiskFacts, DiskSpec, JobSpec, KeyState, MigrationProgress, Notice,
    Power, VmSpec, VmState,
};
use vmseal_api::id::{DiskId, MigrationId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use self::at_rest::Copied;
use super::arriving::Arriving;
use super::arriving_disks::{self, ArrivingDisks};
use super::arriving_keys::ArrivingKeys;
use super::migration::{
    Link, Message, SentBefore, copy_secret, end_timeout, lost, memory_transit, refused, session_of,
    unexpected,
};
use super::owner::Owner;
use super::running::{ProcessEvent, Running};
use super::serve::{self, Memory, Plan};
use super::start::boot;
use super::{Call, Initial, Request, Shared, internal, suspend, tpm};
use crate::hypervisor::network::announce::announce;
use crate::jobs::Jobs;
use crate::migration::figures;
use crate::migration::placement::Placed;
use crate::migration::transport::Expected as Pending;
use crate::process::live::Live;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::Record;
use crate::process::users::Slot;
use crate::rules;
use crate::storage::arriving::{self, ArrivingDisk};
use crate::storage::builder;
use crate::storage::lease;
use crate::storage::memory_transit::MemoryTransit;
use crate::storage::tpm_place;

/// How long the source may take to connect: the control plane tells it as soon as this host waits.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(60);

/// How long disks may be copied: what ends it is that the connection fails.
const COPY_TIMEOUT: Duration = Duration::from_secs(30 * 24 * 3600);

/// How long the source may take to say what its guest runs as.
const MACHINE_TIMEOUT: Duration = Duration::from_secs(30);

/// What the server says of the VM.
pub struct Expected {
    pub task: TaskId,
    pub job: JobSpec,
    pub vm: VmSpec,
    pub kek: Option<SecretBytes>,
    /// What the keys of the copies are told under.
    pub told_under: Option<SecretBytes>,
    /// What the memory of snapshots comes sealed under, where the source has another key of the VM.
    pub transit: Option<Arc<MemoryTransit>>,
    pub generation: u64,
    pub migration: MigrationId,
    /// Whether it is off.
    pub at_rest: bool,
    pub pending: Pending,
}

/// A VM whose memory is loaded.
struct Loaded {
    running: Running,
    plan: Arc<Plan>,
    notices: Vec<Notice>,
    /// The copied disks that have no names yet.
    disks: Vec<ArrivingDisk>,
    /// What of its memory this agent has placed; none where QEMU has loaded it.
    placed: Option<Placed>,
    /// When its guest went on; none where it has not, or is paused.
    went_on: Option<Instant>,
}

/// What has come.
enum Came {
    Guest(Box<Loaded>),
    /// The disks of a VM that is off.
    Disks(Box<Copied>),
}

enum Stage {
    Coming(JoinHandle<Result<Came, Problem>>),
    Loaded(Box<Loaded>),
    Copied(Box<Copied>),
    Ended,
}

/// See the module.
pub struct Receiving {
    shared: Arc<Shared>,
    spec: VmSpec,
    kek: Option<SecretBytes>,
    task: TaskId,
    job: JobSpec,
    generation: u64,
    migration: MigrationId,
    jobs: Jobs,
    stage: Stage,
}

/// How the time as a VM that comes ends.
enum End {
    /// Its guest runs here.
    Runs(Box<Loaded>),
    /// It is here, and off, with what is pinned of its disks.
    IsHere(Box<VmSpec>),
    /// It is not expected any more.
    Forgotten,
    /// The agent is ending.
    Agent,
}

/// Something that happens to a VM that comes.
enum Event {
    Call(Option<Request>),
    Came(Result<Came, Problem>),
    Process(ProcessEvent),
}

impl Receiving {
    /// Begins to wait for its source.
    ///
    /// # Errors
    /// `invalid-request`, `locked`, `wrong-state`: it cannot be received.
    pub fn new(shared: Arc<Shared>, expected: Expected) -> Result<Self, Problem> {
        let Expected { task, job, vm, kek, told_under, transit, generation, migration, .. } =
            expected;
        let (at_rest, pending) = (expected.at_rest, expected.pending);
        let mut jobs = Jobs::default();
        jobs.begin(task, job.clone());
        let slot = Arc::new(shared.users.take().ok_or_else(builder::too_many)?);
        let directory = shared.run_dir.vm(vm.vm);
        let clone = kek.as_ref().map(SecretBytes::try_clone).transpose().map_err(internal)?;
        let coming = Coming {
            shared: shared.clone(),
            directory,
            vm: vm.clone(),
            kek: clone,
            told_under,
            transit,
            copies: copies_of(&job).map_or_else(Vec::new, |copies| {
                copies.disks.iter().map(|copy| copy.disk).collect()
            }),
            suspended: copies_of(&job).is_some_and(|copies| copies.suspended),
            generation,
            migration,
            slot,
        };
        let work = coming.work(pending, at_rest);
        let stage = Stage::Coming(tokio::spawn(vmseal_api::request_id::inherit(work)));
        Ok(Self { shared, spec: vm, kek, task, job, generation, migration, jobs, stage })
    }

    /// Publishes its state.
    pub fn publish(&self) {
        let power = match self.stage {
            Stage::Ended => Power::Off,
            Stage::Coming(_) | Stage::Loaded(_) | Stage::Copied(_) => Power::Migrating,
        };
        let key = rules::key_state(&self.spec, self.kek.is_some());
        let jobs = self.jobs.statuses();
        let disks = match &self.stage {
            Stage::Copied(copied) => copied.states(),
            _ => Vec::new(),
        };
        let state = VmState { jobs, disks, ..VmState::new(self.spec.vm, power, key) };
        self.shared.states.publish(self.spec.vm, Some(state));
    }

    /// Answers calls until the VM runs here, then becomes its owner; or until it is forgotten.
    pub async fn run(mut self, mut calls: mpsc::Receiver<Request>) {
        match self.until_end(&mut calls).await {
            End::Agent => {}
            End::Forgotten => self.shared.states.publish(self.spec.vm, None),
            End::Runs(loaded) => {
                let Loaded { running, plan, notices, went_on, .. } = *loaded;
                let initial = Initial::Alive(Box::new(running));
                let owner = Owner::new(self.shared, plan.spec.clone(), initial);
                let owner = owner.with_key(self.kek);
                let owner = owner.received((self.task, self.job), notices, went_on);
                owner.publish();
                owner.run(calls).await;
            }
            End::IsHere(spec) => {
                let initial = match suspend::is_suspended(&spec).await {
                    Some(true) => Initial::Suspended,
                    Some(false) | None => Initial::New,
                };
                let owner = Owner::new(self.shared, *spec, initial).with_key(self.kek);
                let owner = owner.received_at_rest(self.task, self.job);
                owner.publish();
                owner.run(calls).await;
            }
        }
    }

    async fn until_end(&mut self, calls: &mut mpsc::Receiver<Request>) -> End {
        loop {
            let event = tokio::select! {
                call = calls.recv() => Event::Call(call),
                event = next(&mut self.stage) => event,
            };
            let ended = match event {
                Event::Call(None) => return End::Agent,
                Event::Call(Some((request, call))) => {
                    vmseal_api::request_id::during(request, self.answer(call)).await
                }
                Event::Came(came) => {
                    match came {
                        Ok(Came::Guest(loaded)) => {
                            self.report(loaded.placed);
                            self.stage = Stage::Loaded(loaded);
                            self.jobs.migrated(self.task, Ok(()));
                        }
                        Ok(Came::Disks(copied)) => {
                            tracing::info!(vm = %self.spec.vm, "the disks of the VM are here");
                            self.stage = Stage::Copied(copied);
                            self.jobs.migrated(self.task, Ok(()));
                        }
                        Err(problem) => self.fail(problem),
                    }
                    None
                }
                Event::Process(ProcessEvent::QemuEnded(_) | ProcessEvent::MonitorLost) => {
                    self.end().await;
                    self.give_up(internal("QEMU has ended before its guest could run here"));
                    None
                }
                Event::Process(ProcessEvent::Service(_)) => {
                    self.end().await;
                    self.give_up(internal("the filter has ended before the guest could run here"));
                    None
                }
                Event::Process(ProcessEvent::TpmEnded(exit)) => {
                    self.end().await;
                    let what = format!("its TPM (swtpm) {exit} before the guest could run here");
                    self.give_up(internal(what));
                    None
                }
                Event::Process(_) => None,
            };
            if let Some(end) = ended {
                return end;
            }
            self.publish();
        }
    }

    /// Says how its memory was loaded.
    fn report(&mut self, placed: Option<Placed>) {
        let by = if placed.is_some() { "this agent" } else { "QEMU" };
        let Placed { bytes, holes } = placed.unwrap_or_default();
        tracing::info!(vm = %self.spec.vm, by, placed = bytes, holes, "the VM's memory is here");
        let placed = placed.map(|placed| placed.bytes);
        self.jobs.migrates(self.task, MigrationProgress { placed, ..Default::default() });
    }

    fn fail(&mut self, problem: Problem) {
        tracing::warn!(vm = %self.spec.vm, %problem, "the VM is not received");
        self.stage = Stage::Ended;
        self.jobs.migrated(self.task, Err(problem));
    }

    /// Its memory was here, and is lost.
    fn give_up(&mut self, problem: Problem) {
        tracing::warn!(vm = %self.spec.vm, %problem, "the VM that was received is lost");
        self.fail_job(problem);
    }

    /// Has its job, which may have been ready to commit, say that it has failed.
    fn fail_job(&mut self, problem: Problem) {
        self.jobs.cancel(self.task);
        self.jobs.begin(self.task, self.job.clone());
        self.jobs.migrated(self.task, Err(problem));
    }

    /// Ends its processes.
    async fn end(&mut self) {
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Coming(coming) => {
                coming.abort();
                let _ = coming.await;
            }
            Stage::Loaded(loaded) => {
                loaded.running.force_off().await;
            }
            // Its disks are let go.
            Stage::Copied(_) | Stage::Ended => {}
        }
        // Also what a start that was aborted has left: every process is on record before it runs.
        if let Err(error) = self.shared.run_dir.vm(self.spec.vm).sweep().await {
            tracing::warn!(vm = %self.spec.vm, %error, "cannot remove the run directory of a VM");
        }
    }

    async fn answer(&mut self, call: Call) -> Option<End> {
        // The caller may have gone.
        macro_rules! refuse {
            ($($to:expr),*) => {{ $(drop($to.send(Err(self.refusal())));)* None }};
        }
        match call {
            Call::PutJob(task, job, _, to) => {
                let same = task == self.task && job.is_same_work(&self.job);
                drop(to.send(if same { Ok(()) } else { Err(self.refusal()) }));
                None
            }
            Call::Job(task, to) => {
                drop(to.send(self.jobs.status(task)));
                None
            }
            Call::CommitJob(task, JobSpec::Receive(_), to) if task == self.task => {
                match self.commit_what_came().await {
                    Ok(end) => {
                        // The owner has it from here on; it answers what comes next.
                        let _ = to.send(Ok(()));
                        Some(end)
                    }
                    Err(problem) => {
                        self.publish();
                        drop(to.send(Err(problem)));
                        None
                    }
                }
            }
            Call::CancelJob(task, JobSpec::Receive(_), to) if task == self.task => {
                self.end().await;
                let given_up = self.give_up_copies().await;
                self.jobs.cancel(self.task);
                self.publish();
                drop(to.send(given_up));
                None
            }
            Call::Unregister(to) => {
                self.end().await;
                if let Err(problem) = self.give_up_copies().await {
                    tracing::warn!(vm = %self.spec.vm, %problem, "a copy of a disk is left");
                }
                drop(to.send(Ok(())));
                Some(End::Forgotten)
            }
            Call::Register(_, to)
            | Call::OfferKey(_, to)
            | Call::ChangeKeys(_, _, to)
            | Call::DeleteDisk(_, to)
            | Call::ExamineJob(_, to)
            | Call::ExamineChange(_, to)
            | Call::SetPace(_, _, to)
            | Call::CommitJob(_, _, to)
            | Call::CancelJob(_, _, to)
            | Call::PowerOn(_, _, to)
            | Call::Suspend(_, to)
            | Call::DiscardMemory(to)
            | Call::DiscardDump(_, to)
            | Call::PowerOff(_, to)
            | Call::ControlGuest(_, to)
            | Call::GrowDisk(_, _, to) => refuse!(to),
            Call::Console(_, to) | Call::Screen(to) | Call::Expose(_, _, to) => refuse!(to),
            Call::Guest(to) => refuse!(to),
            Call::Lend(_, to) => refuse!(to),
            Call::Bitmaps(_, _, to) => refuse!(to),
            Call::Replica(_, to) => refuse!(to),
        }
    }

    /// Removes the copies of disks, and what was made for a TPM. Its processes have ended.
    async fn give_up_copies(&self) -> Result<(), Problem> {
        if let Some(disk) = shared_tpm(&self.spec, copies_of(&self.job)).cloned() {
            let (spec, migration) = (self.spec.clone(), self.migration);
            let give_up = move || tpm_place::give_up(&spec, &disk, migration);
            // The source's agent removes it, too.
            if let Err(problem) = spawn_blocking(give_up).await.map_err(internal)? {
                tracing::warn!(vm = %self.spec.vm, %problem, "what was made for a TPM is left");
            }
        }
        match copies_of(&self.job) {
            Some(copies) => arriving_disks::give_up(&self.shared, self.spec.vm, copies).await,
            None => Ok(()),
        }
    }

    fn refusal(&self) -> Problem {
        let what = "is on its way to this host. Wait until its migration has ended";
        rules::wrong_state(&self.spec, what)
    }

    /// Has the guest run here, or the VM that is off be here.
    async fn commit_what_came(&mut self) -> Result<End, Problem> {
        if matches!(self.stage, Stage::Copied(_)) {
            return self.keep().await.map(|spec| End::IsHere(Box::new(spec)));
        }
        self.commit().await.map(End::Runs)
    }

    /// Has the guest run here.
    async fn commit(&mut self) -> Result<Box<Loaded>, Problem> {
        let Stage::Loaded(loaded) = &mut self.stage else {
            return Err(rules::wrong_state(&self.spec, rules::NOT_READY_TO_COMMIT));
        };
        let (plan, directory) = (loaded.plan.clone(), loaded.running.directory.clone());
        let (control, generation) = (loaded.running.control.clone(), self.generation);
        let migration = self.migration;
        let (disks, copies) = (std::mem::take(&mut loaded.disks), copies_of(&self.job).cloned());
        let take = move || {
            // A failure here ends the VM's way to this host: what is named stays on record until it is given up.
            arriving::name(&plan.spec, &disks, generation)?;
            // With their locks.
            drop(disks);
            serve::take_over(&directory, &control, &plan)?;
            match shared_tpm(&plan.spec, copies.as_ref()) {
                Some(disk) => tpm_place::take(&plan.spec, disk, generation, migration)?,
                None => lease::take(&plan.spec, generation)?,
            }
            if let Some(copies) = copies
                && let Err(problem) = arriving::settle(&plan.spec, &copies)
            {
                tracing::warn!(vm = %plan.spec.vm, %problem, "a note of copied disks is left");
            }
            Ok::<_, Problem>(())
        };
        spawn_blocking(take).await.map_err(internal)??;
        // From here on it runs here, whatever dies.
        if let Err(problem) = go(&self.shared, loaded).await {
            tracing::error!(vm = %self.spec.vm, %problem, "the guest that was received does not go on yet");
        }
        match std::mem::replace(&mut self.stage, Stage::Ended) {
            Stage::Loaded(loaded) => Ok(loaded),
            other => {
                self.stage = other;
                Err(internal("the VM is not loaded"))
            }
        }
    }
}

/// Puts the VM on record as running, and lets its guest go.
async fn go(shared: &Shared, loaded: &mut Loaded) -> Result<(), Problem> {
    let Loaded { running, plan, went_on, .. } = loaded;
    let recorded = shared.died.forget(plan.spec.vm).map_err(internal);
    let recorded = recorded.and_then(|()| running.write(&plan.spec));
    if !running.live.paused {
        running.qmp.execute("cont", Value::Null).await.map_err(internal)?;
        *went_on = Some(Instant::now());
        announce(&running.qmp, plan.spec.vm).await;
    }
    recorded
}

/// The next event of a stage.
async fn next(stage: &mut Stage) -> Event {
    match stage {
        Stage::Coming(coming) => {
            Event::Came(coming.await.unwrap_or_else(|error| Err(internal(error))))
        }
        Stage::Loaded(loaded) => Event::Process(loaded.running.next().await),
        Stage::Copied(_) | Stage::Ended => std::future::pending().await,
    }
}

/// The copies that a job makes.
fn copies_of(job: &JobSpec) -> Option<&ArrivingCopies> {
    match job {
        JobSpec::Receive(job) => job.copies.as_ref(),
        _ => None,
    }
}

/// The disk of the TPM of a VM that comes, where both hosts have it and no copy is made.
fn shared_tpm<'a>(spec: &'a VmSpec, copies: Option<&ArrivingCopies>) -> Option<&'a DiskSpec> {
    let is_copied =
        |disk: DiskId| copies.is_some_and(|copies| copies.disks.iter().any(|it| it.disk == disk));
    tpm::disk_of(spec).filter(|disk| !is_copied(disk.disk))
}

/// The work of receiving a VM.
struct Coming {
    shared: Arc<Shared>,
    directory: ProcessDir,
    vm: VmSpec,
    kek: Option<SecretBytes>,
    told_under: Option<SecretBytes>,
    transit: Option<Arc<MemoryTransit>>,
    copies: Vec<DiskId>,
    /// Whether the memory of a suspended VM is to come with them.
    suspended: bool,
    generation: u64,
    migration: MigrationId,
    slot: Arc<Slot>,
}

impl Coming {
    /// Waits for the source, and takes what it sends.
    async fn work(self, pending: Pending, at_rest: bool) -> Result<Came, Problem> {
        if at_rest {
            return self.copy(pending).await.map(|copied| Came::Disks(Box::new(copied)));
        }
        self.come(pending).await.map(|loaded| Came::Guest(Box::new(loaded)))
    }

    /// Waits for the source, and has QEMU load what it sends.
    async fn come(self, pending: Pending) -> Result<Loaded, Problem> {
        let _counted = figures::IN.begin();
        let mut link = Link::of(pending.session(CONNECT_TIMEOUT).await.map_err(lost)?)?;
        let (machine, record, (copies, before), end_within) =
            match link.receive(MACHINE_TIMEOUT).await? {
                Message::Machine { machine, record, copies, before, downtime_milliseconds } => {
                    (machine, record, (copies, before), end_timeout(downtime_milliseconds))
                }
                Message::Refused { why } => return Err(refused(&why)),
                _ => return Err(unexpected()),
            };
        if copies != self.copies {
            return Err(unexpected());
        }
        let prepared = self.prepare(&record, &before, &mut link).await;
        let plan = match prepared {
            Ok((plan, disks)) => {
                let of = (machine, self.migration);
                let memory = Memory::Arriving(Arriving::new(of, link, disks, end_within));
                Arc::new(Plan { memory, ..plan })
            }
            Err(problem) => {
                let why = problem.detail.clone();
                let _ = link.send(&Message::Refused { why }).await;
                return Err(problem);
            }
        };
        let booted = self.boot(&plan).await;
        if booted.is_err()
            && let Err(error) = self.directory.sweep().await
        {
            tracing::warn!(%error, "cannot remove a run directory");
        }
        booted
    }

    /// Makes the disks that are copied, waits until the copies lack little, and plans what is to be started.
    async fn prepare(
        &self,
        record: &RawValue,
        before: &[SentBefore],
        link: &mut Link,
    ) -> Result<(Plan, Option<ArrivingDisks>), Problem> {
        let record = Record::parse(record.get().as_bytes())
            .map_err(|why| internal(format!("what the guest runs as {why}")))?;
        let clone = |kek: &SecretBytes| kek.try_clone().map_err(internal);
        let (mut vm, kek) = (self.vm.clone(), self.kek.as_ref().map(clone).transpose()?);
        if self.copies.is_empty() {
            return Ok((plan(&vm, record, kek, self.generation)?, None));
        }
        let (told_under, migration) = (self.told_under.as_ref(), self.migration);
        let transit = self.transit.as_ref();
        let under = ArrivingKeys { kek: kek.as_ref(), told_under, transit, migration };
        let (of, copies) = ((&self.shared, &vm), self.copies.as_slice());
        let mut disks = ArrivingDisks::prepare(of, copies, under, before, link).await?;
        for disk in vm.disks_mut() {
            let made = disks.disks().iter().find(|arriving| arriving.disk.disk == disk.disk);
            disk.facts = made.map_or(disk.facts.take(), |made| Some(made.facts.clone()));
        }
        let keys = disks.keys(self.told_under.as_ref(), self.migration)?;
        let plan = plan(&vm, record, kek, self.generation)?;
        disks.carry(link)?;
        link.send(&Message::Prepared { keys }).await?;
        match link.receive(COPY_TIMEOUT).await? {
            Message::Copied => Ok((plan, Some(disks))),
            _ => Err(unexpected()),
        }
    }

    /// Starts the guest's processes, which load its memory; then its disks are whole.
    async fn boot(&self, plan: &Arc<Plan>) -> Result<Loaded, Problem> {
        let booted = boot(&self.shared, &self.directory, plan.clone(), self.slot.clone()).await;
        let Memory::Arriving(arriving) = &plan.memory else {
            return Err(internal("a guest that comes has no memory"));
        };
        match booted {
            Ok((running, notices)) => match arriving.end().await {
                Ok(disks) => {
                    let placed = arriving.placed();
                    let (plan, went_on) = (plan.clone(), None);
                    Ok(Loaded { running, plan, notices, disks, placed, went_on })
                }
                Err(problem) => {
                    running.force_off().await;
                    Err(problem)
                }
            },
            Err(problem) => {
                arriving.refuse(&problem).await;
                Err(problem)
            }
        }
    }
}

/// What is to be started here for a guest that runs so elsewhere.
fn plan(
    vm: &VmSpec,
    record: Record,
    kek: Option<SecretBytes>,
    generation: u64,
) -> Result<Plan, Problem> {
    if record.spec.vm != vm.vm {
        return Err(internal("the source sends another VM"));
    }
    let (spec, live) = suspend::same_machine(vm, record)?;
    let live = Live {
        received: Some(generation),
        handed_over: None,
        // It is taken before the guest runs here.
        lease: Some(generation),
        ..live
    };
    let facts = |disk: &DiskSpec| -> Result<DiskFacts, Problem> {
        disk.facts.clone().ok_or_else(|| {
            let what = format!("its disk '{}' is not made", disk.name);
            Problem::new(ErrorCode::WrongState, what)
        })
    };
    let there = spec.disks().filter(|disk| live.disk(disk.disk).is_some());
    let there =
        there.map(|disk| Ok((disk.clone(), facts(disk)?))).collect::<Result<Vec<_>, Problem>>()?;
    let (tpm, disks): (Vec<_>, Vec<_>) =
        there.into_iter().partition(|(disk, _)| disk.role.attachment() == Attachment::Tpm);
    Ok(Plan {
        disks,
        kek,
        shared_out: Default::default(),
        nics_before: Vec::new(),
        live,
        tpm: tpm.into_iter().next(),
        boot_once: None,
        memory: Memory::New,
        without_replicas: false,
        spec,
    })
}

/// Takes what the server says of a VM that comes.
///
/// # Errors
/// `key-mismatch`, `wrong-state`, `invalid-request`, `locked`.
pub fn expect(shared: &Shared, task: TaskId, job: JobSpec) -> Result<Expected, Problem> {
    let JobSpec::Receive(receive) = &job else { return Err(internal("it receives nothing")) };
    let arrival = receive
        .begin
        .as_deref()
        .ok_or_else(|| Problem::invalid("begin", "is needed to begin"))?
        .clone();
    let vm = arrival.vm;
    rules::check_spec(&vm)?;
    rules::check_session(&arrival.session)?;
    let kek = match (&vm.key, &arrival.key) {
        (Some(reference), Some(sealed)) => Some(shared.key_box.open(vm.vm, reference, sealed)?),
        _ => None,
    };
    if rules::key_state(&vm, kek.is_some()) == KeyState::Missing {
        return Err(rules::locked(&vm));
    }
    let session = session_of(shared, vm.vm, &arrival.session)?;
    let told_under = copy_secret(shared, vm.vm, &arrival.session, kek.as_ref())?;
    let transit = memory_transit(&arrival.session, told_under.as_ref())?;
    let listener = shared.migrations.as_ref().ok_or_else(|| {
        let what = "this host receives no VMs: its agent has no address for migrations";
        Problem::new(ErrorCode::Unsupported, what)
    })?;
    let pending = listener.expect(session).map_err(lost)?;
    let (generation, migration) = (arrival.generation, arrival.session.migration);
    let at_rest = receive.is_at_rest();
    Ok(Expected {
        task,
        job,
        vm,
        kek,
        told_under,
        transit,
        generation,
        migration,
        at_rest,
        pending,
    })
}
