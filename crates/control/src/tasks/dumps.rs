//! Writes a core dump of a VM's guest, decrypts one, and removes one.
//!
//! ```text
//! dump     reserve (its row is there) ─► prepare ─► dump [─► decrypt to a file] ─► record (commit) [─► name the file]
//! decrypt  prepare ─► decrypt to a file ─► name the file
//! delete   register (commit) ─► remove the file ─► remove the row
//! ```
//! A dump that fails or is cancelled is removed.

use async_trait::async_trait;
use vmseal_api::host::{DumpJob, JobKind, JobSpec};
use vmseal_api::id::DumpId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::export_disk;
use super::job::{first_disk, follow, put};
use super::run::{Run, StepError, absent_is_fine, register};
use super::start_vm::prepare;
use super::step::{Limit, Output, Step};
use crate::operation::Operation;
use crate::store::dumps::{self, Dump};
use crate::store::events::NewEvent;

/// The steps of the three operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DumpStep {
    Reserve,
    Prepare,
    Dump,
    WriteFile,
    NameFile,
    Record,
    Register,
    RemoveFile,
    RemoveRow,
}

pub(crate) const DUMP: &[&dyn Step] =
    &[&DumpStep::Reserve, &DumpStep::Prepare, &DumpStep::Dump, &DumpStep::Record];

pub(crate) const DUMP_AND_DECRYPT: &[&dyn Step] = &[
    &DumpStep::Reserve,
    &DumpStep::Prepare,
    &DumpStep::Dump,
    &DumpStep::WriteFile,
    &DumpStep::Record,
    &DumpStep::NameFile,
];

pub(crate) const DECRYPT: &[&dyn Step] =
    &[&DumpStep::Prepare, &DumpStep::WriteFile, &DumpStep::NameFile];

pub(crate) const DELETE: &[&dyn Step] =
    &[&DumpStep::Register, &DumpStep::RemoveFile, &DumpStep::RemoveRow];

#[async_trait]
impl Step for DumpStep {
    fn name(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::Prepare => "prepare",
            Self::Dump => "dump",
            Self::WriteFile => "write-file",
            Self::NameFile => "name-file",
            Self::Record => "record-dump",
            Self::Register => "register",
            Self::RemoveFile => "remove-file",
            Self::RemoveRow => "remove-row",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Reserve => "reserve its name",
            Self::Prepare => "register and deliver the key",
            Self::Dump => "write the guest's memory, encrypted",
            Self::WriteFile => "decrypt it to a file",
            Self::NameFile => "give the file its name",
            Self::Record => "record the core dump",
            Self::Register => "register the VM with its host",
            Self::RemoveFile => "remove the core dump",
            Self::RemoveRow => "remove it from the inventory",
        }
    }

    fn needs_key(&self) -> bool {
        matches!(self, Self::Prepare)
    }

    fn commits(&self) -> bool {
        matches!(self, Self::Record | Self::Register)
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare => Some(Limit::Provider),
            Self::Dump | Self::WriteFile => Some(Limit::Short),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Reserve => Ok(Output::default()),
            Self::Prepare => prepare(run).await.map(Output::from),
            Self::Dump => dump(run).await.map(|bytes| Output::of(&bytes)),
            Self::WriteFile => export_disk::write(run).await.map(Output::from),
            Self::NameFile => export_disk::name(run).await.map(Output::from),
            Self::Record => record(run).await.map(Output::from),
            Self::Register => register(run).await.map(Output::from),
            Self::RemoveFile => remove_file(run).await.map(Output::from),
            Self::RemoveRow => remove_row(run).await.map(Output::from),
        }
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => {
                let mut write = run.store().write().await?;
                dumps::delete(&mut write, id(run)?).await?;
                Ok(write.commit().await?)
            }
            Self::Dump => {
                let vm = run.vm().await?;
                let (agent, job) = (run.agent(&vm)?, job(run).await?);
                absent_is_fine(agent.cancel_job(vm.id, run.task.id, job).await)?;
                remove_file(run).await
            }
            Self::WriteFile => export_disk::drop_unnamed(run).await,
            Self::NameFile => export_disk::unname(run, cause).await,
            Self::Prepare | Self::Record | Self::Register | Self::RemoveFile | Self::RemoveRow => {
                Ok(())
            }
        }
    }
}

fn id(run: &Run<'_>) -> Result<DumpId, StepError> {
    match run.task.operation {
        Operation::DumpVm { dump, .. }
        | Operation::DecryptDump { dump, .. }
        | Operation::DeleteDump { dump, .. } => Ok(dump),
        _ => {
            let what = "the task is about no core dump";
            Err(StepError::Final(Problem::new(ErrorCode::Internal, what)))
        }
    }
}

/// The row of the dump; none if it is removed.
async fn find(run: &Run<'_>) -> Result<Option<Dump>, StepError> {
    let id = id(run)?;
    let known = dumps::of_vm(&mut *run.store().read().await?, run.vm_id).await?;
    Ok(known.into_iter().find(|known| known.id == id))
}

async fn job(run: &Run<'_>) -> Result<JobSpec, StepError> {
    let (dump, disk) = (id(run)?, first_disk(run).await?);
    let format = find(run).await?.map(|dump| dump.format).unwrap_or_default();
    Ok(JobSpec::Dump(DumpJob { dump, disk, format }))
}

/// Returns the length of the file.
async fn dump(run: &Run<'_>) -> Result<u64, StepError> {
    let vm = run.vm().await?;
    put(run, &vm, job(run).await?).await?;
    follow(run, &vm, JobKind::Dump).await?;
    match run.agent(&vm)?.job(vm.id, run.task.id).await {
        Ok(status) => Ok(status.progress.total),
        // The agent has restarted since: it finds the file when it is asked again.
        Err(problem) if problem.code == ErrorCode::NotFound => Err(StepError::Again(problem)),
        Err(problem) => Err(problem.into()),
    }
}

async fn record(run: &Run<'_>) -> Result<(), StepError> {
    let Some(dump) = find(run).await? else { return Ok(()) };
    let vm = run.vm().await?;
    let bytes: u64 = run.output(DumpStep::Dump.name()).unwrap_or_default();
    let mut write = run.store().write().await?;
    dumps::set_written(&mut write, dump.id, bytes).await?;
    let how = if dump.encrypted { "encrypted" } else { "IN THE CLEAR, as the VM has no key" };
    let detail = format!("core dump '{}', {how}", dump.name);
    let (kind, actor) = ("vm.dumped", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

async fn remove_file(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    register(run).await?;
    run.agent(&vm)?.discard_dump(vm.id, id(run)?).await?;
    // Who migrates the VM next is refused while its host tells of one that is not listed.
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    Ok(())
}

async fn remove_row(run: &Run<'_>) -> Result<(), StepError> {
    // The host's monitor records what the host has written by itself under the same lock.
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let Some(dump) = find(run).await? else { return Ok(()) };
    let vm = run.vm().await?;
    let mut write = run.store().write().await?;
    dumps::delete(&mut write, dump.id).await?;
    let detail = format!("core dump '{}'", dump.name);
    let (kind, actor) = ("dump.deleted", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// The problem of a failure after the commit step.
pub(super) fn unfinished(operation: &Operation, target: &str, cause: &Problem) -> Problem {
    let detail = match operation {
        Operation::DeleteDump { .. } => format!(
            "a core dump of VM '{target}' is removed in part ({cause}): delete it again once the cause is fixed"
        ),
        _ => format!(
            "the core dump of VM '{target}' is whole, and the file that it was decrypted to has no name yet ({cause}): decrypt it again once the cause is fixed (vmseal dump decrypt {target})"
        ),
    };
    Problem { reason: cause.reason, ..Problem::new(cause.code, detail) }
}
