//! Moves a running VM to another host ([`vmseal_api::host::SendJob`] has the hosts' part).
//!
//! ```text
//!   check ─► transfer ─────────────────────────────► switch ───────────────────► finish ─► done
//!             destination waits, source sends;         destination lets the        source ends its
//!             the guest stands still, memory loaded,   guest go; inventory says so  processes, removes what was
//!             copies of disks whole                                                 copied, forgets
//!                    │                                  commit step
//!                    └── undone: source goes on, destination forgets
//! ```
//! Until the destination is asked to let the guest go, the source can have it back at any time: the destination does nothing by
//! itself. Then its answer decides. While it does not answer, nobody runs the guest, and the task waits: only the destination, or
//! the operator who knows that it is gone for good, can tell ([`undecided`]).

pub(super) mod away;
mod cause;
pub(crate) mod left;
pub(super) mod new_vm;
mod reach;
mod standstill;
mod undecided;
pub(super) mod watched;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use jiff::Timestamp;
use vmseal_api::host::version::MIGRATE_SHARED_TPM;
use vmseal_api::host::{
    Arrival, ArrivingCopies, ArrivingCopy, Departure, DiskRole, DiskState, HostAgent,
    HostDescription, HostState, JobSpec, JobState, MIGRATION_KEY_LEN, MigrationSession, Power,
    ReceiveJob, SealedKey, SendJob, migration_info,
};
use vmseal_api::id::{DatastoreId, HostId, MigrationId, VmId};
use vmseal_api::migration::{DOWNTIME_DEFAULT, Migrated, MigrationPhase};
use vmseal_api::model::Lifecycle;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::{SecretBytes, sealed_box};

use self::cause::{OtherHostWait, Said, Verdict, at_destination, at_source, judge};
pub(crate) use self::reach::reachable;
pub(super) use self::undecided::{ended, is_given_up, is_lost, lost};
use self::watched::Watched;
use super::mirror_vm::set_image;
use super::run::{Run, StepError, absent_is_fine, internal, state_of, wrong_state};
use super::start_vm::locked;
use super::step::{Awaited, Output, Step, WaitPolicy};
use crate::hosts::keys::{self, Purpose};
use crate::hosts::{self};
use crate::operation::Operation;
use crate::operation::migration::{CHECK, CheckedMigration, SWITCH};
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::vms::{self, Vm};
use crate::store::{datastores, evacuations, hosts as store_hosts, placements};

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MigrateVmStep {
    Check,
    Transfer,
    Switch,
    Finish,
}

pub(crate) const STEPS: &[&dyn Step] = &[
    &MigrateVmStep::Check,
    &MigrateVmStep::Transfer,
    &MigrateVmStep::Switch,
    &MigrateVmStep::Finish,
];

/// The connections of any migration: the control channel and the memory. Each disk that is copied has one more.
const STREAMS: u16 = 2;

impl CheckedMigration {
    fn sent(&self) -> SendJob {
        let copies = self.copies.iter().map(|copy| copy.disk).collect();
        SendJob { disks: self.disks.clone(), copies, begin: None }
    }

    fn received(&self) -> ReceiveJob {
        let (generation, disks) = (self.generation, self.copies.clone());
        let (at_rest, suspended) = (false, false);
        let copies = ArrivingCopies { generation, disks, at_rest, suspended };
        let copies = (!copies.disks.is_empty()).then_some(copies);
        ReceiveJob { disks: self.disks.clone(), copies, begin: None }
    }

    /// How many connections the session has.
    fn streams(&self) -> u16 {
        STREAMS.saturating_add(u16::try_from(self.copies.len()).unwrap_or(u16::MAX))
    }
}

#[async_trait]
impl Step for MigrateVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Check => CHECK,
            Self::Transfer => "transfer",
            Self::Switch => SWITCH,
            Self::Finish => "finish",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Check => "check the VM and both hosts",
            Self::Transfer => "send the memory, and disks that the other host does not have",
            Self::Switch => "let the guest go on at the other host",
            Self::Finish => "end its processes at the former host",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Switch)
    }

    fn insists(&self) -> bool {
        // The guest stands still, and may run there already: only the destination knows.
        matches!(self, Self::Switch)
    }

    async fn awaited(&self, run: &Run<'_>) -> Option<Awaited> {
        match self {
            Self::Switch => undecided::destination(run).await,
            Self::Finish => undecided::source(run).await,
            Self::Check | Self::Transfer => None,
        }
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Check | Self::Transfer => WaitPolicy::NONE,
            // For the destination, and for the source.
            Self::Switch | Self::Finish => WaitPolicy::BOTH,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Check => check(run).await.map(|checked| Output::of(&checked)),
            Self::Transfer => transfer(run).await.map(|watched| Output::of(&watched)),
            Self::Switch => {
                let migrated = switch(run).await?;
                Ok(migrated.map_or_else(Output::default, |migrated| Output::of(&migrated)))
            }
            Self::Finish => {
                watched::of(run).show(run, MigrationPhase::Finishing);
                finish(run).await.map(Output::from)
            }
        }
    }

    async fn back(&self, run: &Run<'_>, _: &Problem) -> Result<(), StepError> {
        match self {
            Self::Transfer => stay(run).await,
            Self::Switch => undecided::switch_back(run).await,
            // Past the commit step, or nothing was done.
            Self::Check | Self::Finish => Ok(()),
        }
    }
}

/// The hosts of a task.
struct Ends {
    from: HostId,
    to: HostId,
    encrypted: bool,
    datastore: Option<DatastoreId>,
    downtime_milliseconds: u32,
    compresses: bool,
}

fn ends(run: &Run<'_>) -> Result<Ends, StepError> {
    match run.task.operation {
        Operation::MigrateVm {
            from,
            to,
            encrypted,
            datastore,
            downtime_milliseconds,
            compresses,
            ..
        } => {
            let downtime_milliseconds = downtime_milliseconds.unwrap_or(DOWNTIME_DEFAULT);
            Ok(Ends { from, to, encrypted, datastore, downtime_milliseconds, compresses })
        }
        _ => Err(internal("the task does not say where the VM goes")),
    }
}

/// Checks the preconditions, and settles what the inventory will say.
async fn check(run: &Run<'_>) -> Result<CheckedMigration, StepError> {
    let began = Some(Timestamp::now());
    Watched::default().show(run, MigrationPhase::Connecting);
    let ends = ends(run)?;
    let disks = running_disks(run, ends.from).await?;
    let know_shared_tpm = know_shared_tpm(run, &disks, &ends).await?;
    let mut read = run.store().read().await?;
    let copies = copies_at(&mut read, &disks, know_shared_tpm, &ends).await?;
    let former = former_of(&mut read, &disks, &copies, ends.from).await?;
    let generation = placements::next_generation(&mut read, run.vm_id).await?;
    drop(read);
    require_messenger(run, &disks, &copies, &ends).await?;
    let disks = disks.iter().map(|disk| disk.id).collect();
    Ok(CheckedMigration { disks, generation, copies, former, began })
}

/// Refuses a destination that has a pool of disks which stay there mounted over connections that the VM's policy does not allow, as a start there
/// would.
async fn require_messenger(
    run: &Run<'_>,
    disks: &[Disk],
    copies: &[ArrivingCopy],
    ends: &Ends,
) -> Result<(), StepError> {
    let is_copied = |disk: &Disk| copies.iter().any(|copy| copy.disk == disk.id);
    let stay: Vec<Disk> = disks.iter().filter(|disk| !is_copied(disk)).cloned().collect();
    let (vm, agent) = (run.vm().await?, agent_of(run, ends.to)?);
    Ok(hosts::mounted::require_messenger_at(run.store(), &*agent, &vm, ends.to, &stay).await?)
}

/// The disks of a VM that must run on this host still.
async fn running_disks(run: &Run<'_>, from: HostId) -> Result<Vec<Disk>, StepError> {
    let vm = run.vm().await?;
    if vm.lifecycle != Lifecycle::Ready || vm.host != from {
        return Err(wrong_state(format!(
            "VM '{}' has been changed meanwhile: begin again",
            vm.name
        )));
    }
    let state = run.host_state(from, None).await?;
    match state_of(&state, vm.id).map(|seen| seen.power) {
        Some(Power::Running | Power::Paused) => {}
        _ => return Err(wrong_state(format!("VM '{}' does not run any more", vm.name))),
    }
    Ok(run.disks().await?.into_iter().filter(|disk| !disk.detached).collect())
}

/// Where disks that are copied are at the source.
async fn former_of(
    read: &mut sqlx::SqliteConnection,
    disks: &[Disk],
    copies: &[ArrivingCopy],
    from: HostId,
) -> Result<Vec<ArrivingCopy>, StepError> {
    let mut former = Vec::new();
    for disk in disks.iter().filter(|disk| copies.iter().any(|copy| copy.disk == disk.id)) {
        let known = datastores::find(read, &disk.datastore.datastore.to_string()).await?;
        let datastore = known.and_then(|known| known.spec_on(from));
        former.extend(datastore.map(|datastore| ArrivingCopy { disk: disk.id, datastore }));
    }
    Ok(former)
}

/// Whether the disk of a TPM stays on its datastore, which both hosts have: their agents `know` how, and it is not the only one that a datastore for copies
/// was named for. `all_are_there`: the other host has the datastores of all disks.
pub(crate) fn tpm_stays(know: bool, is_named: bool, all_are_there: bool) -> bool {
    know && !(is_named && all_are_there)
}

/// Whether both agents leave the disk of a TPM on the datastore that both hosts have, if the VM has one.
async fn know_shared_tpm(run: &Run<'_>, disks: &[Disk], ends: &Ends) -> Result<bool, StepError> {
    if disks.iter().all(|disk| disk.role != DiskRole::Tpm) {
        return Ok(false);
    }
    let (source, destination) = (agent_of(run, ends.from)?, agent_of(run, ends.to)?);
    let (here, there) = (source.describe().await?, destination.describe().await?);
    let knows = |description: &HostDescription| {
        description.features.iter().any(|known| known == MIGRATE_SHARED_TPM)
    };
    Ok(knows(&here) && knows(&there))
}

/// The disks that the destination gets copies of: those on datastores that it does not have, and that of a TPM which does not stay.
async fn copies_at(
    read: &mut sqlx::SqliteConnection,
    disks: &[Disk],
    know_shared_tpm: bool,
    ends: &Ends,
) -> Result<Vec<ArrivingCopy>, StepError> {
    let mut there = BTreeSet::new();
    for disk in disks {
        let known = datastores::find(read, &disk.datastore.datastore.to_string()).await?;
        if known.is_some_and(|known| known.on(ends.to).is_some()) {
            there.insert(disk.id);
        }
    }
    let all_are_there = there.len() == disks.len();
    let stays = |disk: &Disk| {
        let elsewhere = |target: DatastoreId| target != disk.datastore.datastore;
        let is_named = ends.datastore.is_some_and(elsewhere);
        there.contains(&disk.id)
            && (disk.role != DiskRole::Tpm || tpm_stays(know_shared_tpm, is_named, all_are_there))
    };
    let mut copies = Vec::new();
    for disk in disks.iter().filter(|disk| !stays(disk)) {
        let target = match ends.datastore {
            Some(target) => datastores::find(read, &target.to_string()).await?,
            None => None,
        };
        let target = target.filter(|target| target.id != disk.datastore.datastore);
        let datastore = target.and_then(|target| target.spec_on(ends.to)).ok_or_else(|| {
            wrong_state(format!(
                "disk '{}' is on datastore '{}', and the other host does not have it, or none for its copy, any more: begin the migration again",
                disk.name, disk.datastore_name
            ))
        })?;
        copies.push(ArrivingCopy { disk: disk.id, datastore });
    }
    Ok(copies)
}

fn checked(run: &Run<'_>) -> Result<CheckedMigration, StepError> {
    let known = run.output(MigrateVmStep::Check.name());
    known.ok_or_else(|| internal("the task does not say which disks it moves"))
}

fn agent_of(run: &Run<'_>, host: HostId) -> Result<Arc<dyn HostAgent>, Problem> {
    run.hosts().agent(host)
}

/// Has the guest sent, unless it is.
async fn transfer(run: &Run<'_>) -> Result<Watched, StepError> {
    let (vm, ends, checked) = (run.vm().await?, ends(run)?, checked(run)?);
    let (source, destination) =
        (run.host_state(ends.from, None).await?, run.host_state(ends.to, None).await?);
    if has_sent(run, &source) && has_loaded(run, &destination)? {
        left::require_no_dump(run, &source, &checked.sent())?;
        return Ok(Watched::late(run, &source));
    }
    // A session serves one attempt; what an earlier one has left is removed.
    leave(run, &ends, &checked).await?;
    let sent = begin(run, &vm, &ends, &checked).await?;
    follow(run, &ends, sent).await
}

/// Tells both hosts of a new session. Returns what the source was told.
async fn begin(
    run: &Run<'_>,
    vm: &Vm,
    ends: &Ends,
    checked: &CheckedMigration,
) -> Result<SendJob, StepError> {
    let (source, destination) = (agent_of(run, ends.from)?, agent_of(run, ends.to)?);
    let (here, there) = (source.describe().await?, destination.describe().await?);
    let mut read = run.store().read().await?;
    let to = store_hosts::find(&mut read, &ends.to.to_string()).await?;
    drop(read);
    let to = to.ok_or_else(|| internal("the other host is not known any more"))?;
    let address = there
        .migration_address
        .ok_or_else(|| wrong_state(format!("host '{}' has no address for migrations", to.name)))?;
    let reached = reachable(address, &to.name, &to.address).await?;
    let spec = hosts::definition_with(run.store(), vm.id, ends.to, &checked.copies).await?;
    let spec = hosts::for_agent(spec, Some(&there));
    let kek = match &vm.key {
        None => None,
        Some(key) => {
            let kek = keys::fetch(&run.context.providers, vm, key, Purpose::Open).await;
            let at = Vm { host: ends.to, host_name: to.name.clone(), ..vm.clone() };
            let kek = kek.map_err(locked)?;
            Some(keys::seal(run.store(), &there.key_box, &at, key, kek).await?)
        }
    };
    let key = SecretBytes::random(MIGRATION_KEY_LEN).map_err(|error| crate::internal(&error))?;
    let new =
        NewSession { vm: vm.id, migration: MigrationId::new(), nonce: nonce()?, key, apart: false };
    let session =
        |key_box: &str, host: &str| new.sealed(key_box, host, (ends.encrypted, checked.streams()));
    let arrival = Arrival {
        session: session(&there.key_box, &to.name)?,
        vm: spec,
        key: kek,
        generation: checked.generation,
    };
    let job = ReceiveJob { begin: Some(Box::new(arrival)), ..checked.received() };
    destination.put_job(vm.id, run.task.id, JobSpec::Receive(job)).await?;
    let departure = Departure {
        session: session(&here.key_box, &vm.host_name)?,
        to: reached,
        downtime_milliseconds: ends.downtime_milliseconds,
        bytes_per_second: run.pace().bytes_per_second,
        compresses: ends.compresses,
        at_rest: false,
        suspended: false,
    };
    let job = SendJob { begin: Some(Box::new(departure)), ..checked.sent() };
    source.put_job(vm.id, run.task.id, JobSpec::Send(job.clone())).await?;
    Ok(job)
}

/// A session that nobody has been told of.
pub(crate) struct NewSession {
    pub(crate) vm: VmId,
    pub(crate) migration: MigrationId,
    pub(crate) nonce: u64,
    pub(crate) key: SecretBytes,
    /// Whether the hosts are of two control planes.
    pub(crate) apart: bool,
}

impl NewSession {
    /// As a host is told of it.
    pub(crate) fn sealed(
        &self,
        key_box: &str,
        host: &str,
        (encrypted, streams): (bool, u16),
    ) -> Result<MigrationSession, Problem> {
        let (public, info) =
            (keys::public_key(key_box, host)?, migration_info(self.vm, self.migration));
        let sealed =
            sealed_box::seal(&public, &info, &self.key).map_err(|error| crate::internal(&error))?;
        let sealed = STANDARD.encode(sealed.as_bytes());
        let key = SealedKey { key_box: key_box.to_owned(), sealed };
        let (migration, nonce) = (self.migration, self.nonce);
        let apart = self.apart;
        Ok(MigrationSession { migration, nonce, key, streams, encrypted, apart })
    }
}

/// A random number.
fn nonce() -> Result<u64, StepError> {
    let random = SecretBytes::random(8).map_err(|error| crate::internal(&error))?;
    let bytes: [u8; 8] = random.expose().try_into().map_err(|_| internal("a nonce of 8 bytes"))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Follows both hosts until the guest is between them. The source is told when the task is given another rate.
async fn follow(run: &Run<'_>, ends: &Ends, mut sent: SendJob) -> Result<Watched, StepError> {
    let mut watched = Watched::default();
    let (mut source, mut destination) =
        (run.host_state(ends.from, None).await?, run.host_state(ends.to, None).await?);
    // As it was told; the task may have been given another one since.
    let told = sent.begin.as_ref().and_then(|departure| departure.bytes_per_second);
    let mut pace = CopyPace { bytes_per_second: told, paused: false };
    let mut wait = OtherHostWait::default();
    loop {
        watched.note(run, &source);
        left::require_no_dump(run, &source, &sent)?;
        let (here, there) = (at_source(run, &source), at_destination(run, &destination));
        if has_sent(run, &source) && there == Said::Done {
            return Ok(watched.loaded(run, &destination));
        }
        match judge(&here, &there, wait.is_over()) {
            Verdict::GoesOn => {}
            Verdict::Waits => wait.begin(),
            Verdict::Ends(error) => return Err(error),
        }
        run.check_cancelled()?;
        tokio::select! {
            newer = run.host_state(ends.from, Some(&source)) => source = newer?,
            newer = run.host_state(ends.to, Some(&destination)) => destination = newer?,
            () = wait.over() => {}
            () = run.another_pace(pace) => {
                pace = run.pace();
                tell_pace(run, ends.from, &mut sent, pace).await?;
            }
        }
    }
}

/// Tells the source how fast it may send.
async fn tell_pace(
    run: &Run<'_>,
    from: HostId,
    sent: &mut SendJob,
    pace: CopyPace,
) -> Result<(), StepError> {
    if let Some(departure) = &mut sent.begin {
        departure.bytes_per_second = pace.bytes_per_second;
    }
    let job = JobSpec::Send(sent.clone());
    Ok(agent_of(run, from)?.put_job(run.vm_id, run.task.id, job).await?)
}

/// Whether the source's guest stands still, and its disks are free.
fn is_handed_over(run: &Run<'_>, source: &HostState) -> bool {
    state_of(source, run.vm_id).is_some_and(|seen| seen.power == Power::Migrating)
}

/// Whether the source has sent all of the guest. Its QEMU may have ended since: the other host has what the guest goes on from.
fn has_sent(run: &Run<'_>, source: &HostState) -> bool {
    let is_sent = run.job_in(source).is_some_and(|job| job.state == JobState::ReadyToCommit);
    is_sent || is_handed_over(run, source)
}

/// Whether the destination has loaded the guest's memory.
fn has_loaded(run: &Run<'_>, destination: &HostState) -> Result<bool, StepError> {
    match run.job_in(destination).map(|job| &job.state) {
        Some(JobState::ReadyToCommit) => Ok(true),
        Some(JobState::Failed { problem }) => Err(StepError::Final(problem.clone())),
        _ => Ok(false),
    }
}

/// Has the source keep the guest, and the destination forget it. The destination has not been asked to let it go.
async fn leave(run: &Run<'_>, ends: &Ends, checked: &CheckedMigration) -> Result<(), StepError> {
    let source = agent_of(run, ends.from)?;
    absent_is_fine(source.cancel_job(run.vm_id, run.task.id, JobSpec::Send(checked.sent())).await)?;
    forget(run, ends, checked).await
}

async fn forget(run: &Run<'_>, ends: &Ends, checked: &CheckedMigration) -> Result<(), StepError> {
    let destination = agent_of(run, ends.to)?;
    let job = JobSpec::Receive(checked.received());
    let cancelled = destination.cancel_job(run.vm_id, run.task.id, job).await;
    absent_is_fine(cancelled)?;
    absent_is_fine(destination.unregister_vm(run.vm_id).await)
}

/// Undoes [`transfer`]. The guest goes on first; what the destination has left it or its monitor removes.
async fn stay(run: &Run<'_>) -> Result<(), StepError> {
    let (ends, checked) = (ends(run)?, checked(run)?);
    let source = agent_of(run, ends.from)?;
    absent_is_fine(source.cancel_job(run.vm_id, run.task.id, JobSpec::Send(checked.sent())).await)?;
    if let Err(error) = forget(run, &ends, &checked).await {
        tracing::warn!(vm = %run.vm_id, error = %error.as_problem(), "the destination may keep what it received for a while");
    }
    let state = run.host_state(ends.from, None).await?;
    run.hosts().until_shown(ends.from, &state).await;
    Ok(())
}

/// Has the destination let the guest go, and records that it is there. Returns how it went, where that is known.
async fn switch(run: &Run<'_>) -> Result<Option<Migrated>, StepError> {
    let (ends, checked, watched) = (ends(run)?, checked(run)?, watched::of(run));
    watched.show(run, MigrationPhase::SwitchOver);
    let destination = agent_of(run, ends.to)?;
    // A server that has restarted may have recorded it before.
    let at_once = run.vm().await?.host != ends.to;
    let job = JobSpec::Receive(checked.received());
    destination.commit_job(run.vm_id, run.task.id, job).await?;
    let (committed, now) = (Instant::now(), Timestamp::now());
    let said = match at_once {
        true => standstill::asked(run, (ends.from, Some(ends.to)), committed).await,
        false => None,
    };
    let began = checked.began.unwrap_or(run.task.created);
    let migrated = watched.ended(began, now, at_once, said);
    record(run, &ends, &checked, migrated).await?;
    let state = run.host_state(ends.to, None).await?;
    run.hosts().until_shown(ends.to, &state).await;
    Ok(migrated)
}

async fn record(
    run: &Run<'_>,
    ends: &Ends,
    checked: &CheckedMigration,
    migrated: Option<Migrated>,
) -> Result<(), StepError> {
    let vm = run.vm().await?;
    if vm.host == ends.to {
        // It was before, and something after that did not answer.
        return Ok(());
    }
    let copied = made(run, ends, checked).await?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    if evacuations::generation(&mut write, run.vm_id, ends.to).await? == Some(checked.generation) {
        return Err(wrong_state(format!(
            "the other host was given up, and is to end VM '{}', which goes on at host '{}'",
            vm.name, vm.host_name
        )));
    }
    for disk in &copied {
        set_image(&mut write, disk, true).await?;
    }
    let to = store_hosts::find(&mut write, &ends.to.to_string()).await?;
    placements::set_owner(&mut write, run.vm_id, ends.to, checked.generation).await?;
    // It has run without a break.
    vms::set_seen(&mut write, run.vm_id, Power::Running, None).await?;
    let how = if ends.encrypted { "encrypted" } else { "not encrypted" };
    let to = to.map_or_else(|| ends.to.to_string(), |host| host.name);
    let disks = match copied.len() {
        0 => String::new(),
        1 => ", with a copy of one disk".to_owned(),
        many => format!(", with copies of {many} disks"),
    };
    let went = migrated.map(|migrated| format!(": {migrated}")).unwrap_or_default();
    let detail = format!("from host '{}' to host '{to}', {how}{disks}{went}", vm.host_name);
    let (actor, target) = (run.task.actor.as_str(), vm.name.as_str());
    write.event(NewEvent { kind: "vm.migrated", actor, target, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// What the destination says of the disks that it has copies of.
async fn made(
    run: &Run<'_>,
    ends: &Ends,
    checked: &CheckedMigration,
) -> Result<Vec<DiskState>, StepError> {
    if checked.copies.is_empty() {
        return Ok(Vec::new());
    }
    let mut state = run.host_state(ends.to, None).await?;
    loop {
        let Some(seen) = state_of(&state, run.vm_id) else {
            let detail = format!("the other host does not know VM '{}' yet", run.task.target);
            return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
        };
        let copied = checked.copies.iter().map(|copy| {
            let is_copy = |seen: &&DiskState| {
                seen.disk == copy.disk && seen.datastore == Some(copy.datastore.datastore)
            };
            seen.disks.iter().find(is_copy).cloned()
        });
        if let Some(copied) = copied.collect::<Option<Vec<_>>>() {
            return Ok(copied);
        }
        if is_lost(Some(seen)) {
            return Err(StepError::Again(ended(run)));
        }
        // Its owner is about to say so.
        state = run.host_state(ends.to, Some(&state)).await?;
    }
}

/// Has the source end the VM's processes, and forget it.
async fn finish(run: &Run<'_>) -> Result<(), StepError> {
    let (ends, checked) = (ends(run)?, checked(run)?);
    let former = (!checked.former.is_empty()).then_some(&*checked.former);
    end_at_source(run, ends.from, checked.sent(), former).await
}

/// Has the source end the VM's processes, delete the images of which there are copies, and forget the VM. `former` is where these
/// were, if the inventory has other places for them by now; none of a task that an earlier version began.
async fn end_at_source(
    run: &Run<'_>,
    from: HostId,
    sent: SendJob,
    former: Option<&[ArrivingCopy]>,
) -> Result<(), StepError> {
    let source = agent_of(run, from)?;
    let copied = sent.copies.clone();
    match (source.commit_job(run.vm_id, run.task.id, JobSpec::Send(sent)).await, former) {
        // An agent that has restarted since it ended the processes does not know the VM, and would delete no image.
        (Err(problem), Some(former)) if problem.code == ErrorCode::NotFound => {
            let spec = hosts::definition_with(run.store(), run.vm_id, from, former);
            let here = source.describe().await?;
            source.register_vm(hosts::for_agent(spec.await?, Some(&here))).await?;
        }
        (done, _) => absent_is_fine(done)?,
    }
    for disk in copied {
        absent_is_fine(source.delete_disk(run.vm_id, disk).await)?;
    }
    absent_is_fine(source.unregister_vm(run.vm_id).await)
}

/// The problem of a failure after the guest has gone on at the other host.
pub(super) fn unfinished(target: &str, cause: &Problem) -> Problem {
    let detail = format!(
        "VM '{target}' runs on the other host, and what is left of it at the former one could not be removed: {cause}. It is removed when that host's agent answers again"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
