//! Encrypts, decrypts or deeply recrypts the disks of a VM that is off in the files that they have, where there is no room for
//! copies.
//!
//! ```text
//!   encrypt          check ─► make-key ─┐  make-key only where the VM has no key
//!   decrypt          check ─────────────┼─► prepare ─► ready ─► begin ─► convert ─► record ─► settle ─┬─► done
//!   recrypt --deep   check ─────────────┘                        │                                    └─► decrypt:
//!                                                           commit step                  forget-key ─► destroy-key
//! ```
//! Where single disks are decrypted the VM keeps its key.
//!
//! Until the host has begun everything is undone. From then on the disks cannot be used and the task goes forward only: it
//! waits for a host or a datastore that is away, and goes on where it was after the death of any process. A task that cannot
//! go on leaves disks that are converted in part; the same begun again goes on with them.

use async_trait::async_trait;
use vmseal_api::host::{ConvertJob, DiskToConvert, JobKind, JobSpec, JobState, Power};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::former::drop_sources;
use super::{
    Cancelled, MirrorVmStep, as_options, check, copied, deep_recrypt, encrypts, is_lost, keys,
    known_to_host, may_go_on, prepare, put, record,
};
use crate::operation::Operation;
use crate::store::tasks::Task;
use crate::store::vms::Vm;
use crate::tasks::job::follow;
use crate::tasks::run::{Run, StepError, state_of};
use crate::tasks::step::{Limit, Output, Step, WaitPolicy};

/// The steps, in order; each operation has some of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InPlaceStep {
    Check,
    MakeKey,
    Prepare,
    Ready,
    Begin,
    Convert,
    Record,
    Settle,
    ForgetKey,
    DestroyKey,
}

pub(crate) const ENCRYPT: &[&dyn Step] = &[
    &InPlaceStep::Check,
    &InPlaceStep::MakeKey,
    &InPlaceStep::Prepare,
    &InPlaceStep::Ready,
    &InPlaceStep::Begin,
    &InPlaceStep::Convert,
    &InPlaceStep::Record,
    &InPlaceStep::Settle,
];

pub(crate) const ENCRYPT_WITH_ITS_KEY: &[&dyn Step] = &[
    &InPlaceStep::Check,
    &InPlaceStep::Prepare,
    &InPlaceStep::Ready,
    &InPlaceStep::Begin,
    &InPlaceStep::Convert,
    &InPlaceStep::Record,
    &InPlaceStep::Settle,
];

pub(crate) const DECRYPT: &[&dyn Step] = &[
    &InPlaceStep::Check,
    &InPlaceStep::Prepare,
    &InPlaceStep::Ready,
    &InPlaceStep::Begin,
    &InPlaceStep::Convert,
    &InPlaceStep::Record,
    &InPlaceStep::Settle,
    &InPlaceStep::ForgetKey,
    &InPlaceStep::DestroyKey,
];

/// Of disks that are named: the VM keeps its key.
pub(crate) const DECRYPT_DISKS: &[&dyn Step] = ENCRYPT_WITH_ITS_KEY;
pub(crate) const DEEP_RECRYPT: &[&dyn Step] = ENCRYPT_WITH_ITS_KEY;

#[async_trait]
impl Step for InPlaceStep {
    fn name(&self) -> &'static str {
        match self {
            // Other modules read which disks a task is about from the output of this step.
            Self::Check => MirrorVmStep::Check.name(),
            Self::MakeKey => "make-key",
            Self::Prepare => "prepare",
            Self::Ready => "ready",
            Self::Begin => "begin",
            Self::Convert => "convert",
            Self::Record => "record",
            Self::Settle => "settle",
            Self::ForgetKey => "forget-key",
            Self::DestroyKey => "destroy-key",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Check => MirrorVmStep::Check.title(),
            Self::MakeKey => MirrorVmStep::MakeKey.title(),
            Self::Prepare => MirrorVmStep::Prepare.title(),
            Self::Ready => "make the new headers and journals",
            Self::Begin => "take the disks out of use",
            Self::Convert => "convert the disks in place",
            Self::Record => "record what they are",
            Self::Settle => "put the disks into use",
            Self::ForgetKey => MirrorVmStep::ForgetKey.title(),
            Self::DestroyKey => MirrorVmStep::DestroyKey.title(),
        }
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Begin)
    }

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::Check => WaitPolicy::NONE,
            Self::MakeKey | Self::Prepare | Self::Ready => WaitPolicy::PROVIDER,
            Self::Begin
            | Self::Convert
            | Self::Record
            | Self::Settle
            | Self::ForgetKey
            | Self::DestroyKey => WaitPolicy::BOTH,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::MakeKey | Self::Prepare | Self::DestroyKey => Some(Limit::Provider),
            Self::Convert => Some(Limit::Copy),
            Self::Check
            | Self::Ready
            | Self::Begin
            | Self::Record
            | Self::Settle
            | Self::ForgetKey => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Check => return check_off(run).await.map(|disks| Output::of(&disks)),
            Self::MakeKey => keys::make(run).await,
            Self::Prepare => prepare(run).await,
            Self::Ready => ready(run).await,
            Self::Begin => begin(run).await,
            Self::Convert => convert(run).await,
            Self::Record => record(run, &copied(run)?).await,
            Self::Settle => drop_sources(run).await.map(drop),
            Self::ForgetKey => keys::forget(run).await,
            Self::DestroyKey => keys::destroy(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::MakeKey => keys::unmake(run).await,
            Self::Ready | Self::Begin => unready(run, cause).await,
            Self::Check | Self::Prepare => Ok(()),
            // Past the commit step.
            Self::Convert | Self::Record | Self::Settle | Self::ForgetKey | Self::DestroyKey => {
                Ok(())
            }
        }
    }
}

/// The job that converts disks.
pub(crate) fn job(
    operation: &Operation,
    disks: &[DiskId],
    known: &[crate::store::disks::Disk],
    rate: Option<u64>,
) -> JobSpec {
    let converted = known.iter().filter(|disk| disks.contains(&disk.id));
    let disks =
        converted.map(|disk| DiskToConvert { disk: disk.id, encrypted: encrypts(operation, disk) });
    JobSpec::Convert(ConvertJob { disks: disks.collect(), bytes_per_second: rate })
}

async fn job_of(run: &Run<'_>, disks: &[DiskId]) -> Result<JobSpec, StepError> {
    let rate = run.pace().bytes_per_second;
    Ok(job(&run.task.operation, disks, &run.disks().await?, rate))
}

/// Checks the preconditions: the VM is complete, and off.
async fn check_off(run: &Run<'_>) -> Result<Vec<DiskId>, StepError> {
    let disks = check(run).await?;
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    match state_of(&state, vm.id).map(|seen| seen.power) {
        None | Some(Power::Off) => Ok(disks),
        Some(_) => Err(StepError::Final(is_not_off(&vm.name))),
    }
}

/// The refusal of a VM that is not off.
pub(crate) fn is_not_off(vm: &str) -> Problem {
    let detail = format!(
        "VM '{vm}' is not off: disks are converted in place only then. Stop it first (vmseal vm stop {vm}), or leave out --in-place: copies are made while it runs, where there is room for them"
    );
    Problem::new(ErrorCode::WrongState, detail)
}

/// Has the host make what it needs; the disks stay as they are.
async fn ready(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, disks) = (run.vm().await?, copied(run)?);
    if disks.is_empty() {
        return Ok(());
    }
    put(run, &vm, job_of(run, &disks).await?).await
}

/// Has the host begin.
async fn begin(run: &Run<'_>) -> Result<(), StepError> {
    may_go_on(run)?;
    let (vm, disks) = (run.vm().await?, copied(run)?);
    if disks.is_empty() {
        return Ok(());
    }
    begun(run, &vm, &disks).await
}

/// Ensures that the host works, or has worked, on the disks: an agent that has restarted gets the VM, its key and the job again,
/// which goes on where it was.
async fn begun(run: &Run<'_>, vm: &Vm, disks: &[DiskId]) -> Result<(), StepError> {
    let (agent, job) = (run.agent(vm)?, job_of(run, disks).await?);
    match agent.commit_job(vm.id, run.task.id, job.clone()).await {
        Err(problem) if is_lost(&problem) => {
            put(run, vm, job.clone()).await?;
            Ok(agent.commit_job(vm.id, run.task.id, job).await?)
        }
        other => Ok(other?),
    }
}

/// Follows the work to its end. What a host reports as failed is begun again, as the disks cannot be used before: it may be that
/// its datastore is away, or full.
async fn convert(run: &Run<'_>) -> Result<(), StepError> {
    let (vm, disks) = (run.vm().await?, copied(run)?);
    if disks.is_empty() {
        return Ok(());
    }
    let result = async {
        begun(run, &vm, &disks).await?;
        follow(run, &vm, JobKind::Convert).await?;
        let state = run.host_state(vm.host, None).await?;
        match run.job_in(&state).map(|job| &job.state) {
            Some(JobState::Done) => Ok(()),
            _ => {
                let detail = format!("host '{}' has not converted all disks", vm.host_name);
                Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)))
            }
        }
    };
    match result.await {
        Err(StepError::Final(problem)) if may_pass(&problem) => Err(StepError::Again(problem)),
        other => other,
    }
}

/// Whether another attempt may get further without anybody changing the disk's files.
fn may_pass(problem: &Problem) -> bool {
    !matches!(
        problem.code,
        ErrorCode::Damaged
            | ErrorCode::KeyMismatch
            | ErrorCode::InvalidRequest
            | ErrorCode::Unsupported
    )
}

/// Undoes what the host has made; it refuses when data has moved.
async fn unready(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    let (vm, disks) = (run.vm().await?, copied(run)?);
    if disks.is_empty() || cancel(run, &vm, run.task, &disks).await? == Cancelled::Gone {
        return Ok(());
    }
    Err(StepError::Final(unfinished(&run.task.operation, &run.task.target, cause)))
}

async fn cancel(
    run: &Run<'_>,
    vm: &Vm,
    of: &Task,
    disks: &[DiskId],
) -> Result<Cancelled, StepError> {
    known_to_host(run).await?;
    let job = job_of(run, disks).await?;
    match run.agent(vm)?.cancel_job(vm.id, of.id, job).await {
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(Cancelled::Gone),
        Err(problem) if problem.code == ErrorCode::AlreadyExists => Ok(Cancelled::InUse),
        other => Ok(other.map(|()| Cancelled::Gone)?),
    }
}

/// The problem of a failure after the host has begun.
pub(crate) fn unfinished(operation: &Operation, target: &str, cause: &Problem) -> Problem {
    let (what, again) = match operation {
        Operation::EncryptVm { disks, .. } => {
            ("encrypted", format!("vmseal vm encrypt {target}{}", as_options(disks)))
        }
        Operation::DecryptVm { disks, .. } => {
            ("decrypted", format!("vmseal vm decrypt {target}{}", as_options(disks)))
        }
        _ => ("encrypted anew", deep_recrypt(operation, target)),
    };
    let detail = format!(
        "the disks of VM '{target}' are being {what} in place, which has not come to its end ({cause}): nothing is lost, and the VM cannot start before it has. Once the cause is fixed, begin it again, which goes on where it was ({again} --in-place)"
    );
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
