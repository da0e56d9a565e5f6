//! Copies the disks of a VM to other images and uses the copies: to encrypt it, to decrypt it, to give its disks new
//! data keys (deep recrypt; its KEK stays), or to move them to another datastore. The VM may run, or be suspended: what is beside its first disk,
//! saved memory and core dumps, is copied with that. What its TPM keeps is copied with the TPM's disk, of a VM that is off or suspended.
//!
//! ```text
//!   encrypt          clear ─► check ─► make-key ─┐  make-key only where the VM has no key
//!   decrypt          clear ─► check ─────────────┼─► prepare ─► copy ─► switch ─► drop-source ─┬─► done
//!   recrypt --deep   clear ─► check ─────────────┤                 │                           └─► decrypt:
//!   move             clear ─► check ─────────────┘          commit step     forget-key ─► destroy-key
//! ```
//!
//! Before the host is asked to use the copies everything can be undone: the copies are removed, and a key that was made
//! for them is destroyed. A host that has begun to use them goes on to the end, disk by disk, and does not go back: what
//! was written since is in the copies. The inventory follows what the host says of each disk, in one transaction with
//! the VM's policy. Then only the former images are left, which no guest reads any more.
//!
//! A task that can be neither finished nor undone leaves a whole VM, perhaps with copies or former images beside its
//! disks, or with some disks that use their copies and others that do not. Any of these operations, begun again, deals
//! with that first (`clear`), before it looks which disks are to be copied. The key goes last of all, when no disk of
//! the VM is encrypted with it ([`keys`]); a TPM's disk always is.
//!
//! Single disks of the guest's may be named, and the others stay as they are: the key then belongs to a VM of which some disks are
//! in the clear. Where a VM gets or gives up its key, what is beside its first disk follows also if that disk itself stays as
//! it is ([`as_it_is`]).

pub(crate) mod as_it_is;
mod copying;
pub(crate) mod former;
pub(crate) mod in_place;
mod keys;
mod parents;

use async_trait::async_trait;
use vmseal_api::former_image::FormerImage;
use vmseal_api::host::version::{MIRROR_BESIDE, MIRROR_TPM};
use vmseal_api::host::{
    DatastoreSpec, DiskFacts, DiskRole, DiskState, DiskToMirror, JobSpec, MirrorJob, Power,
};
use vmseal_api::id::DiskId;
use vmseal_api::model::Lifecycle;
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};

use self::copying::{copy, may_go_on};
use self::former::{drop_sources, not_paused, remove_sources};
use super::run::{Run, StepError, internal, register, state_of};
use super::start_vm::locked;
use super::step::{Limit, Output, Redefines, Step, WaitPolicy};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::disks::{self, Disk};
use crate::store::events::{self, NewEvent};
use crate::store::tasks::{self, Task};
use crate::store::vms::{self, Vm};
use crate::store::{Write, datastores, dumps, links, policies, snapshots};

/// The steps, in order; each operation has some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MirrorVmStep {
    Clear,
    Check,
    MakeKey,
    Prepare,
    Copy,
    Switch,
    DropSource,
    ForgetKey,
    DestroyKey,
}

pub(crate) const ENCRYPT: &[&dyn Step] = &[
    &MirrorVmStep::Clear,
    &MirrorVmStep::Check,
    &MirrorVmStep::MakeKey,
    &MirrorVmStep::Prepare,
    &MirrorVmStep::Copy,
    &MirrorVmStep::Switch,
    &MirrorVmStep::DropSource,
];

pub(crate) const ENCRYPT_WITH_ITS_KEY: &[&dyn Step] = &[
    &MirrorVmStep::Clear,
    &MirrorVmStep::Check,
    &MirrorVmStep::Prepare,
    &MirrorVmStep::Copy,
    &MirrorVmStep::Switch,
    &MirrorVmStep::DropSource,
];

pub(crate) const DECRYPT: &[&dyn Step] = &[
    &MirrorVmStep::Clear,
    &MirrorVmStep::Check,
    &MirrorVmStep::Prepare,
    &MirrorVmStep::Copy,
    &MirrorVmStep::Switch,
    &MirrorVmStep::DropSource,
    &MirrorVmStep::ForgetKey,
    &MirrorVmStep::DestroyKey,
];

/// Of disks that are named: the VM keeps its key.
pub(crate) const DECRYPT_DISKS: &[&dyn Step] = ENCRYPT_WITH_ITS_KEY;
pub(crate) const DEEP_RECRYPT: &[&dyn Step] = ENCRYPT_WITH_ITS_KEY;
pub(crate) const MOVE: &[&dyn Step] = ENCRYPT_WITH_ITS_KEY;

#[async_trait]
impl Step for MirrorVmStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Check => "check",
            Self::MakeKey => "make-key",
            Self::Prepare => "prepare",
            Self::Clear => "clear",
            Self::Copy => "copy",
            Self::Switch => "switch",
            Self::DropSource => "drop-source",
            Self::ForgetKey => "forget-key",
            Self::DestroyKey => "destroy-key",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Check => "check the VM",
            Self::MakeKey => "make the key",
            Self::Prepare => "register and deliver the key",
            Self::Clear => "remove what earlier attempts have left",
            Self::Copy => "copy the disks",
            Self::Switch => "use the copies",
            Self::DropSource => "overwrite and remove the former images",
            Self::ForgetKey => "take the key from the VM",
            Self::DestroyKey => "destroy the key",
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Switch)
    }

    fn redefines(&self) -> Redefines {
        match self {
            Self::Clear => Redefines::AfterUnknownCopy,
            // The host uses copies, or has no key any more, before that is on record.
            Self::Switch | Self::ForgetKey => Redefines::Always,
            Self::Check
            | Self::MakeKey
            | Self::Prepare
            | Self::Copy
            | Self::DropSource
            | Self::DestroyKey => Redefines::Never,
        }
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Check => WaitPolicy::NONE,
            Self::MakeKey | Self::Prepare => WaitPolicy::PROVIDER,
            // Hours of copying are not thrown away because the host is away for a while.
            Self::Clear
            | Self::Copy
            | Self::Switch
            | Self::DropSource
            | Self::ForgetKey
            | Self::DestroyKey => WaitPolicy::BOTH,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::MakeKey | Self::Prepare | Self::DestroyKey => Some(Limit::Provider),
            Self::Clear | Self::Copy | Self::DropSource => Some(Limit::Copy),
            Self::Check | Self::Switch | Self::ForgetKey => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Check => return check(run).await.map(|disks| Output::of(&disks)),
            Self::MakeKey => keys::make(run).await,
            Self::Prepare => {
                prepare(run).await?;
                as_it_is::require_none_came(run).await
            }
            Self::Clear => return clear(run).await.map(|former| Output::of(&former)),
            Self::Copy => copy(run).await,
            Self::Switch => switch(run).await,
            Self::DropSource => {
                return drop_sources(run).await.map(|former| Output::of(&former));
            }
            Self::ForgetKey => keys::forget(run).await,
            Self::DestroyKey => keys::destroy(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::MakeKey => keys::unmake(run).await,
            Self::Copy => uncopy(run, cause).await,
            Self::Switch => switch_back(run, cause).await,
            // What an earlier attempt had left is not brought back, and the host forgets a key that is taken from the VM
            // when that is undone.
            Self::Check | Self::Prepare | Self::Clear => Ok(()),
            // Past the commit step.
            Self::DropSource | Self::ForgetKey | Self::DestroyKey => Ok(()),
        }
    }
}

/// Whether a disk is encrypted after an operation; one that is not named stays as it is.
pub(crate) fn encrypts(operation: &Operation, disk: &Disk) -> bool {
    let named = |disks: &[DiskId]| disks.is_empty() || disks.contains(&disk.id);
    match operation {
        // What is not a disk of the guest's is as the VM is.
        Operation::EncryptVm { disks, .. } => {
            disk.encrypted || !disk.role.is_data() || named(disks)
        }
        Operation::DecryptVm { disks, .. } => disk.encrypted && !named(disks),
        Operation::MoveVm { .. } => disk.encrypted,
        _ => true,
    }
}

/// Whether an operation copies a disk of its VM, while that is at rest: a guest that runs keeps its TPM ([`is_free`]). What a TPM keeps is
/// encrypted in any case, so that only other keys or another place concern its disk, and it is not converted in its file.
pub(crate) fn concerns(operation: &Operation, disk: &Disk) -> bool {
    let is_copied = match operation {
        Operation::MoveVm { .. } | Operation::DeepRecryptVm { in_place: false, .. } => true,
        _ => disk.role != DiskRole::Tpm,
    };
    let differs = match operation {
        Operation::DeepRecryptVm { disks, .. } => {
            disk.encrypted && (disks.is_empty() || disks.contains(&disk.id))
        }
        Operation::MoveVm { disks, to, .. } => {
            disks.contains(&disk.id) && disk.datastore.datastore != to.datastore
        }
        _ => disk.encrypted != encrypts(operation, disk),
    };
    is_copied && !disk.detached && differs
}

/// Whether a disk can be copied as its VM is. What a TPM keeps is swtpm's for as long as the guest runs.
pub(crate) fn is_free(disk: &Disk, at_rest: bool) -> bool {
    at_rest || disk.role != DiskRole::Tpm
}

/// Whether a VM in this state has no guest.
pub(crate) fn is_at_rest(power: Option<Power>) -> bool {
    matches!(power, None | Some(Power::Off | Power::Suspended))
}

/// The datastore that an operation moves disks to.
pub(crate) fn target(operation: &Operation) -> Option<&DatastoreSpec> {
    match operation {
        Operation::MoveVm { to, .. } => Some(to),
        _ => None,
    }
}

/// The job that copies disks, of those that a VM has.
pub(crate) fn mirror(operation: &Operation, disks: &[DiskId], known: &[Disk]) -> JobSpec {
    mirror_at(operation, disks, known, CopyPace::default())
}

/// The same, at this pace.
fn mirror_at(operation: &Operation, disks: &[DiskId], known: &[Disk], pace: CopyPace) -> JobSpec {
    let copied = known.iter().filter(|disk| disks.contains(&disk.id));
    let disks = copied.map(|disk| DiskToMirror {
        disk: disk.id,
        encrypted: encrypts(operation, disk),
        datastore: target(operation).cloned(),
    });
    JobSpec::Mirror(MirrorJob { disks: disks.collect(), pace, forgets_key: false })
}

/// The same, with what becomes of what is beside the VM's first disk: memory, core dumps.
async fn mirror_of(
    run: &Run<'_>,
    operation: &Operation,
    disks: &[DiskId],
    pace: CopyPace,
) -> Result<JobSpec, StepError> {
    let known = run.disks().await?;
    let mut job = mirror_at(operation, disks, &known, pace);
    if let JobSpec::Mirror(job) = &mut job
        && operation.gives_up_key()
    {
        let snapshots = snapshots::of_vm(&mut *run.store().read().await?, run.vm_id).await?;
        // Where there is such a snapshot the agent knows it: the service has asked.
        let with_memory = snapshots.iter().any(|snapshot| snapshot.memory);
        let view = run.hosts().view(run.vm().await?.host);
        let knows = view.description.is_none() || view.has(MIRROR_BESIDE);
        job.forgets_key = (with_memory || knows) && !known.iter().any(stays_encrypted);
    }
    Ok(job)
}

/// Whether a disk is encrypted after its VM is decrypted: the VM keeps its key then.
pub(crate) fn stays_encrypted(disk: &Disk) -> bool {
    disk.encrypted && (disk.role == DiskRole::Tpm || disk.detached)
}

/// The disks that a task copies: settled when it begins, as the inventory differs after the switch.
pub(super) fn of_task(task: &Task) -> Option<Vec<DiskId>> {
    serde_json::from_value(task.outputs.get(MirrorVmStep::Check.name())?.clone()).ok()
}

fn copied(run: &Run<'_>) -> Result<Vec<DiskId>, StepError> {
    of_task(run.task).ok_or_else(|| internal("the task does not say which disks it copies"))
}

/// Checks the preconditions: the VM is complete, and off, suspended, running or paused.
async fn check(run: &Run<'_>) -> Result<Vec<DiskId>, StepError> {
    let vm = run.vm().await?;
    let refused = |what: &str| {
        let detail = format!("VM '{}' {what}", vm.name);
        Err(StepError::Final(Problem::new(ErrorCode::WrongState, detail)))
    };
    if vm.lifecycle != Lifecycle::Ready {
        return refused("has been changed meanwhile: begin again");
    }
    let state = run.host_state(vm.host, None).await?;
    let power = state_of(&state, vm.id).map(|seen| seen.power);
    match power {
        None | Some(Power::Off | Power::Suspended | Power::Running | Power::Paused) => {}
        Some(_) => {
            return refused(
                "is starting, stopping or being suspended: its disks are copied while it runs, is paused, suspended or off",
            );
        }
    }
    let disks = run.disks().await?;
    let operation = &run.task.operation;
    let as_it_is = as_it_is::copied_so(run, &vm, &disks, state_of(&state, vm.id)).await?;
    // The guest may have ended since the service looked, which has asked for the feature only of a VM at rest.
    let view = run.hosts().view(vm.host);
    let knows = view.description.is_none() || view.has(MIRROR_TPM);
    let at_rest = is_at_rest(power) && knows;
    let copied = |disk: &&Disk| {
        (concerns(operation, disk) && is_free(disk, at_rest)) || Some(disk.id) == as_it_is
    };
    Ok(disks.iter().filter(copied).map(|disk| disk.id).collect())
}

/// What the key is for: a decryption writes no disk under it.
pub(crate) fn purpose(operation: &Operation) -> Purpose {
    match operation {
        Operation::DecryptVm { .. } => Purpose::Open,
        _ => Purpose::Encrypt,
    }
}

/// Registers the VM on its host, with its key. A VM that runs takes another key as long as none of its disks is
/// encrypted.
async fn prepare(run: &Run<'_>) -> Result<(), StepError> {
    register(run).await?;
    let prepare = || run.hosts().prepare(run.vm_id, purpose(&run.task.operation));
    let prepared = match prepare().await {
        // The agent has restarted in between.
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::WrongState) => {
            prepare().await
        }
        other => other,
    };
    Ok(prepared.map_err(locked)?)
}

/// Has the host begin a job; an agent that has restarted gets the VM and its key first.
async fn put(run: &Run<'_>, vm: &Vm, job: JobSpec) -> Result<(), StepError> {
    let agent = run.agent(vm)?;
    match agent.put_job(vm.id, run.task.id, job.clone()).await {
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {
            prepare(run).await?;
            Ok(agent.put_job(vm.id, run.task.id, job).await?)
        }
        other => Ok(other?),
    }
}

/// Deals with what tasks have left that could be neither finished nor undone: copies, former images. Returns what has become of the latter.
async fn clear(run: &Run<'_>) -> Result<Vec<FormerImage>, StepError> {
    let vm = run.vm().await?;
    let left = tasks::unknown_of_vm(&mut *run.store().read().await?, vm.id).await?;
    let known: Vec<DiskId> = run.disks().await?.iter().map(|disk| disk.id).collect();
    for task in left.iter().filter(|task| task.operation.mirrors_disks()) {
        let mut disks = of_task(task).unwrap_or_default();
        disks.retain(|disk| known.contains(disk));
        if !disks.is_empty() && cancel(run, &vm, task, &disks).await? == Cancelled::InUse {
            // Some disks may use their copies and others not, and the inventory may not know.
            commit(run, &vm, task, &disks).await?;
            record_found(run, &disks, &task.operation).await?;
        }
    }
    remove_sources(run, &vm, not_paused).await
}

/// What has become of copies that were to be removed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Cancelled {
    /// They are gone.
    Gone,
    /// The host uses them, or some of them, already.
    InUse,
}

/// Has the host remove the copies that a task has made.
async fn cancel(
    run: &Run<'_>,
    vm: &Vm,
    of: &Task,
    disks: &[DiskId],
) -> Result<Cancelled, StepError> {
    known_to_host(run).await?;
    let mut job = mirror_of(run, &of.operation, disks, CopyPace::default()).await?;
    if let (JobSpec::Mirror(job), Some(to)) = (&mut job, target(&of.operation)) {
        let place = place_now(run, vm, to).await?;
        job.disks.iter_mut().for_each(|disk| disk.datastore.clone_from(&place));
    }
    match run.agent(vm)?.cancel_job(vm.id, of.id, job).await {
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(Cancelled::Gone),
        Err(problem) if problem.code == ErrorCode::AlreadyExists => Ok(Cancelled::InUse),
        other => Ok(other.map(|()| Cancelled::Gone)?),
    }
}

/// Where the VM's host has the datastore that disks were to go to. The VM may have been evacuated since, to a host that has it at another place, or
/// not at all: none then. What is beside the disks is removed in any case, and a copy that only the former host gets at is left there.
async fn place_now(
    run: &Run<'_>,
    vm: &Vm,
    to: &DatastoreSpec,
) -> Result<Option<DatastoreSpec>, StepError> {
    let mut read = run.store().read().await?;
    let known = datastores::find(&mut read, &to.datastore.to_string()).await?;
    let Some(known) = known else { return Ok(Some(to.clone())) };
    let now = known.spec_on(vm.host);
    let is_there = now.as_ref().is_some_and(|now| now.location.path() == to.location.path());
    // A host that knows the job has it with the place as it was.
    Ok(if is_there { Some(to.clone()) } else { now })
}

/// Ensures that the host knows the VM. A host that uses copies of which the inventory does not know yet knows better,
/// while the VM runs.
async fn known_to_host(run: &Run<'_>) -> Result<(), StepError> {
    match register(run).await {
        Err(StepError::Final(problem)) if problem.code == ErrorCode::WrongState => Ok(()),
        other => other,
    }
}

/// Undoes [`copy`].
async fn uncopy(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    let (vm, disks) = (run.vm().await?, copied(run)?);
    if disks.is_empty() {
        return Ok(());
    }
    match cancel(run, &vm, run.task, &disks).await? {
        Cancelled::Gone => Ok(()),
        Cancelled::InUse => {
            Err(StepError::Final(unfinished(&run.task.operation, &run.task.target, cause)))
        }
    }
}

/// Has the host use the copies, and records that.
async fn switch(run: &Run<'_>) -> Result<(), StepError> {
    // It was paused when the copies had just become ready.
    may_go_on(run)?;
    let (vm, disks) = (run.vm().await?, copied(run)?);
    if !disks.is_empty()
        && let Err(error) = commit(run, &vm, run.task, &disks).await
    {
        let StepError::Final(problem) = error else { return Err(error) };
        if !is_lost(&problem) {
            return Err(StepError::Final(problem));
        }
        // The job is to be put again, too: it goes on where it was.
        copy(run).await?;
        commit(run, &vm, run.task, &disks).await?;
    }
    record(run, &disks).await
}

/// Whether a host refuses because its agent has restarted, and does not know the VM, the key or the job any more.
fn is_lost(problem: &Problem) -> bool {
    matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked | ErrorCode::WrongState)
}

/// Has the host use the copies that a task has made. An agent that has restarted gets the VM and its key first.
async fn commit(run: &Run<'_>, vm: &Vm, of: &Task, disks: &[DiskId]) -> Result<(), StepError> {
    let job = mirror_of(run, &of.operation, disks, CopyPace::default()).await?;
    let agent = run.agent(vm)?;
    let commit = || agent.commit_job(vm.id, of.id, job.clone());
    match commit().await {
        Err(problem) if is_lost(&problem) => {}
        other => return Ok(other?),
    }
    known_to_host(run).await?;
    run.hosts().deliver(vm, Purpose::Open).await.map_err(locked)?;
    Ok(commit().await?)
}

/// What a host says of a disk that uses its copy.
fn copy_of<'a>(seen: &'a [DiskState], disk: &Disk, operation: &Operation) -> Option<&'a DiskState> {
    let seen = seen.iter().find(|seen| seen.disk == disk.id)?;
    let is_copy = is_encrypted(&seen.facts) == encrypts(operation, disk)
        && target(operation).is_none_or(|to| seen.datastore == Some(to.datastore));
    is_copy.then_some(seen)
}

/// Records the image of a disk as its host has it: a copy, which is a disk of its own, or the one that it had, converted.
pub(super) async fn set_image(
    write: &mut Write<'_>,
    seen: &DiskState,
    is_copy: bool,
) -> Result<(), StepError> {
    if is_copy {
        disks::note_layout(write, seen.disk).await?;
    }
    links::forget(write, seen.disk).await?;
    set_found(write, seen).await
}

/// The same of one that may not be.
async fn set_found(write: &mut Write<'_>, seen: &DiskState) -> Result<(), StepError> {
    disks::set_image(write, seen.disk, is_encrypted(&seen.facts), &seen.facts).await?;
    if let Some(datastore) = seen.datastore {
        disks::set_datastore(write, seen.disk, datastore).await?;
    }
    Ok(())
}

/// Records the images that the host uses, and the VM's policy, in one transaction.
async fn record(run: &Run<'_>, copied: &[DiskId]) -> Result<(), StepError> {
    let host = run.vm().await?.host;
    let state = run.host_state(host, None).await?;
    let seen = state_of(&state, run.vm_id).map_or(&[][..], |seen| &seen.disks);
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let vm = run.vm().await?;
    let mut write = run.store().write().await?;
    let known = disks::of_vm(&mut write, vm.id).await?;
    let (mut names, mut replicated) = (Vec::new(), Vec::new());
    let tpm = tpm_that_stays(&run.task.operation, &known, copied).unwrap_or_default();
    let clones = links::clones_of_disks(&mut write, vm.id, copied).await?;
    for disk in known.iter().filter(|disk| copied.contains(&disk.id)) {
        let Some(copy) = copy_of(seen, disk, &run.task.operation) else {
            let detail = format!(
                "host '{}' does not say of disk '{}' that it uses its copy",
                vm.host_name, disk.name
            );
            return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
        };
        links::part(&mut write, vm.id, disk.id).await?;
        set_image(&mut write, copy, !run.task.operation.is_in_place()).await?;
        names.push(disk.name.as_str());
        replicated.extend(disk.replica.is_some().then_some(disk.name.as_str()));
    }
    set_dumps(&mut write, (&vm, &run.task.operation), &known, copied, seen).await?;
    let policy = give_policy(run, &mut write, &vm, &known).await?;
    let also = tpm.to_owned() + &parents::told(&clones) + &replicas_told(&replicated);
    tell(run, &mut write, &vm, &names, (policy, also)).await?;
    Ok(write.commit().await?)
}

/// What is told of a TPM that has stayed as it was, as its guest runs.
fn tpm_that_stays(
    operation: &Operation,
    known: &[Disk],
    copied: &[DiskId],
) -> Option<&'static str> {
    let stays = |disk: &&Disk| {
        disk.role == DiskRole::Tpm && concerns(operation, disk) && !copied.contains(&disk.id)
    };
    known.iter().find(stays)?;
    Some(match target(operation) {
        Some(_) => {
            "; what its TPM keeps stays where it is, until that is moved while the VM is off"
        }
        None => {
            "; what its TPM keeps stays under the data key that it has, until its disk is recrypted while the VM is off"
        }
    })
}

/// Records how the core dumps are beside the first disk, where that is among the copied ones: they have followed it.
async fn set_dumps(
    write: &mut Write<'_>,
    (vm, operation): (&Vm, &Operation),
    known: &[Disk],
    copied: &[DiskId],
    seen: &[DiskState],
) -> Result<(), StepError> {
    let first = known.iter().find(|disk| disk.facts.is_some() && !disk.detached);
    let copied = first.filter(|first| copied.contains(&first.id));
    let seen = copied.and_then(|first| seen.iter().find(|seen| seen.disk == first.id));
    let Some(seen) = seen else { return Ok(()) };
    // As the host does: it seals them where the VM has a key and keeps it.
    let has_key = vm.key.is_some() && !operation.gives_up_key();
    let encrypted = has_key || is_encrypted(&seen.facts) || known.iter().any(stays_encrypted);
    Ok(dumps::set_encrypted(write, vm.id, encrypted).await?)
}

fn is_encrypted(facts: &DiskFacts) -> bool {
    matches!(facts, DiskFacts::Luks2 { .. })
}

/// Gives the VM the policy of the operation, with its limits and caches, which a guest that runs gets at its next start.
/// Returns the policy's name where it is another one than before.
async fn give_policy(
    run: &Run<'_>,
    write: &mut Write<'_>,
    vm: &Vm,
    known: &[Disk],
) -> Result<Option<String>, StepError> {
    let Some(wanted) = run.task.operation.next_policy().filter(|wanted| *wanted != vm.policy)
    else {
        return Ok(None);
    };
    // A policy that a task is to give to a VM is neither changed nor removed.
    let Some(policy) = policies::find(write, &wanted.to_string()).await? else {
        return Err(internal("the policy that the VM is to have is gone"));
    };
    for disk in known.iter().filter(|disk| disk.role.is_data()) {
        disks::set_settings(write, disk.id, policy.limits, policy.cache).await?;
    }
    let name = policy.name;
    vms::set(write, &Vm { policy: policy.id, policy_name: name.clone(), ..vm.clone() }).await?;
    Ok(Some(name))
}

/// What an event says of replicas that are made anew for the copies.
fn replicas_told(replicated: &[&str]) -> String {
    match replicated {
        [] => String::new(),
        names => {
            let names = names.join(", ");
            format!("; no second copy of {names} until their new replicas have caught up")
        }
    }
}

/// Writes the event that the copies are in use; once, as this step may be repeated.
async fn tell(
    run: &Run<'_>,
    write: &mut Write<'_>,
    vm: &Vm,
    names: &[&str],
    (policy, also): (Option<String>, String),
) -> Result<(), StepError> {
    let kind = match run.task.operation {
        Operation::EncryptVm { .. } => "vm.encrypted",
        Operation::DecryptVm { .. } => "vm.decrypted",
        Operation::MoveVm { .. } => "vm.moved",
        _ => "vm.deep-recrypted",
    };
    let by = format!("as task {}", run.task.id);
    if is_told(run, write, kind, &vm.name, &by).await? {
        return Ok(());
    }
    let disks = match (names, run.task.operation.is_in_place()) {
        ([], _) => "no disk had to be copied".to_owned(),
        (names, false) => format!("disks {}", names.join(", ")),
        (names, true) => format!("disks {}, in place", names.join(", ")),
    };
    let policy = policy.map(|name| format!("; policy '{name}' in place of '{}'", vm.policy_name));
    let place = match target(&run.task.operation) {
        Some(to) => {
            let found = datastores::find(write, &to.datastore.to_string()).await?;
            found.map(|found| format!(" to datastore '{}'", found.name))
        }
        None => None,
    };
    let (place, policy) = (place.unwrap_or_default(), policy.unwrap_or_default());
    let detail = format!("{disks}{place}{policy}{also}; {by}");
    let (actor, target) = (run.task.actor.as_str(), vm.name.as_str());
    Ok(write.event(NewEvent { kind, actor, target, detail: &detail }).await?)
}

/// Whether the task has an event of this kind: its detail ends with `by`.
async fn is_told(
    run: &Run<'_>,
    write: &mut Write<'_>,
    kind: &str,
    vm: &str,
    by: &str,
) -> Result<bool, StepError> {
    let filter = events::Filter {
        kind: Some(kind.to_owned()),
        target: Some(vm.to_owned()),
        since: Some(run.task.created),
        ..events::Filter::default()
    };
    let told = events::last_of(write, 1, &filter).await?;
    Ok(told.iter().any(|event| event.detail.ends_with(by)))
}

/// Undoes [`switch`], which is possible only while the host uses no copy. Otherwise it goes on to the end: some disks
/// may use theirs, and others not.
async fn switch_back(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    let (vm, disks) = (run.vm().await?, copied(run)?);
    if !disks.is_empty() && cancel(run, &vm, run.task, &disks).await? == Cancelled::Gone {
        return Ok(());
    }
    match switch(run).await {
        Err(StepError::Again(problem)) => return Err(StepError::Again(problem)),
        Err(StepError::Final(problem) | StepError::Paused(problem)) => {
            tracing::warn!(task = %run.task.id, %problem, "not all disks use their copies");
            record_found(run, &disks, &run.task.operation).await?;
        }
        Ok(()) => {}
    }
    Err(StepError::Final(unfinished(&run.task.operation, &run.task.target, cause)))
}

/// Records which of the disks that `of` has copied use their copies: for each what the host says.
async fn record_found(run: &Run<'_>, copied: &[DiskId], of: &Operation) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    let seen = state_of(&state, run.vm_id).map_or(&[][..], |seen| &seen.disks);
    let known = disks::of_vm(&mut write, run.vm_id).await?;
    for disk in seen.iter().filter(|seen| copied.contains(&seen.disk)) {
        let before = known.iter().find(|it| it.id == disk.disk);
        match before.is_some_and(|before| parents::has_pivoted(of, before, disk)) {
            true => {
                links::part(&mut write, run.vm_id, disk.disk).await?;
                set_image(&mut write, disk, !of.is_in_place()).await?;
            }
            // It may stand on what it stood on.
            false => set_found(&mut write, disk).await?,
        }
    }
    set_dumps(&mut write, (&vm, &run.task.operation), &known, copied, seen).await?;
    Ok(write.commit().await?)
}

/// Disks as the options that name them.
fn as_options(disks: &[DiskId]) -> String {
    disks.iter().map(|disk| format!(" --disk {disk}")).collect()
}

/// The command that begins a deep recryption again, of the same disks.
fn deep_recrypt(operation: &Operation, target: &str) -> String {
    let named = match operation {
        Operation::DeepRecryptVm { disks, .. } => as_options(disks),
        _ => String::new(),
    };
    format!("vmseal vm recrypt --deep {target}{named}")
}

/// The problem of a failure after the host has begun to use the copies. Where a copy does not open, the cause says so, and the VM is not
/// called whole.
pub(super) fn unfinished(operation: &Operation, target: &str, cause: &Problem) -> Problem {
    let (what, left, again) = match operation {
        Operation::EncryptVm { disks, .. } => (
            "uses encrypted copies of its disks",
            "their former images, which are not encrypted, may be on the datastore still",
            format!("vmseal vm encrypt {target}{}", as_options(disks)),
        ),
        Operation::DecryptVm { disks, .. } => (
            "uses copies of its disks that are not encrypted",
            match disks.is_empty() {
                true => {
                    "their former images may be on the datastore still, and the VM may have its key"
                }
                false => "their former images may be on the datastore still",
            },
            format!("vmseal vm decrypt {target}{}", as_options(disks)),
        ),
        Operation::MoveVm { to, disks, all, .. } => {
            // The disk of a TPM may be named only while its guest is off: where all are moved none is named.
            let named = if *all { String::new() } else { as_options(disks) };
            (
                "uses copies of its disks, all or some of them on the other datastore",
                "their former images may be on the former datastore still",
                format!("vmseal vm move {target} --datastore {}{named}", to.datastore),
            )
        }
        _ => (
            "uses copies of its disks with new keys",
            "their former images may be on the datastore still",
            deep_recrypt(operation, target),
        ),
    };
    let whole = match cause.code {
        ErrorCode::Damaged | ErrorCode::KeyMismatch => "",
        _ => "is whole and ",
    };
    let detail = format!(
        "VM '{target}' {whole}{what}, and {left} ({cause}): once the cause is fixed, begin it again, which finishes it ({again})"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
