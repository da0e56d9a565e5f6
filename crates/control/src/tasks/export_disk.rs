//! Writing a disk to a file of its host. The host writes it under another name first, and gives it its own
//! in a step of its own: whether that has happened can always be told.

use async_trait::async_trait;
use vmseal_api::host::{ExportPhase, ExportSpec, ExportStep, HostAgent, HostState};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::{ExportFormat, Progress};

use super::run::{Run, StepError, state_of};
use super::start_vm::prepare;
use super::step::{Limit, Output, Patience};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::vms::Vm;

/// What is done, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Prepare,
    WriteFile,
    NameFile,
}

/// Ciphertext is copied without a key, and without asking for one.
pub(crate) fn steps(format: ExportFormat) -> &'static [&'static dyn super::step::Step] {
    match format {
        ExportFormat::Sealed => &[&Step::WriteFile, &Step::NameFile],
        _ => &[&Step::Prepare, &Step::WriteFile, &Step::NameFile],
    }
}

#[async_trait]
impl super::step::Step for Step {
    fn name(&self) -> &'static str {
        match self {
            Self::Prepare => "prepare",
            Self::WriteFile => "write-file",
            Self::NameFile => "name-file",
        }
    }

    fn title(&self) -> &'static str {
        match self {
            Self::Prepare => "register and deliver the key",
            Self::WriteFile => "write the file",
            Self::NameFile => "give the file its name",
        }
    }

    fn patience(&self) -> Patience {
        match self {
            Self::WriteFile => Patience::BOTH,
            _ => Patience::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare => Some(Limit::Provider),
            Self::WriteFile => Some(Limit::HostWork),
            _ => None,
        }
    }

    async fn forward(&self, run: &Run<'_>) -> Result<Output, StepError> {
        match self {
            Self::Prepare => prepare(run).await,
            Self::WriteFile => write(run).await,
            Self::NameFile => name(run).await,
        }
        .map(Output::from)
    }

    async fn back(&self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::Prepare => Ok(()),
            Self::WriteFile => drop_unnamed(run).await,
            Self::NameFile => unname(run, cause).await,
        }
    }
}

fn order(run: &Run<'_>) -> Result<(DiskId, ExportSpec), StepError> {
    let Operation::ExportDisk { disk, to, format, passphrase, .. } = &run.task.operation else {
        return Err(StepError::Final(Problem::new(ErrorCode::Internal, "it is no export")));
    };
    let (export, to) = (run.task.id, to.clone());
    Ok((*disk, ExportSpec { export, to, format: *format, passphrase: passphrase.clone() }))
}

pub(super) async fn write(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let (disk, spec) = order(run)?;
    begin(run, &vm, &*agent, disk, &spec).await?;
    let mut state: Option<HostState> = None;
    loop {
        let next = run.news(&*agent, state.as_ref()).await?;
        let exports = state_of(&next, vm.id).map(|seen| seen.exports.as_slice());
        let known = exports.unwrap_or_default().iter().find(|known| known.export == spec.export);
        match known.map(|known| &known.phase) {
            Some(ExportPhase::Writing { done, total }) => {
                run.show(Progress { done: *done, total: *total });
            }
            Some(ExportPhase::Written) => {
                run.show(Progress::default());
                return Ok(());
            }
            Some(ExportPhase::Failed { problem }) => return Err(StepError::Final(problem.clone())),
            // The agent restarted and knows nothing of it: begin again.
            None => {
                let detail = format!("host '{}' lost track of the export", vm.host_name);
                return Err(StepError::Again(Problem::new(ErrorCode::Unreachable, detail)));
            }
        }
        run.check_cancelled()?;
        state = Some(next);
    }
}

async fn begin(
    run: &Run<'_>,
    vm: &Vm,
    agent: &dyn HostAgent,
    disk: DiskId,
    spec: &ExportSpec,
) -> Result<(), StepError> {
    let step = || agent.export_disk(vm.id, disk, ExportStep::Begin, spec.clone());
    let begun = match step().await {
        // The agent restarted since it was told of the VM; ciphertext is copied without the key.
        Err(problem)
            if problem.code == ErrorCode::NotFound && spec.format == ExportFormat::Sealed =>
        {
            crate::hosts::register(run.store(), run.hosts(), vm.id).await?;
            step().await
        }
        // The same, and of its key.
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {
            run.hosts().prepare(vm.id, Purpose::Open).await?;
            step().await
        }
        other => other,
    };
    match begun {
        Err(problem) if problem.code == ErrorCode::WrongState && spec.passphrase.is_some() => {
            let detail = format!(
                "{problem}. A passphrase is kept nowhere: if the agent of host '{}' has restarted, export again",
                vm.host_name
            );
            Err(StepError::Final(Problem::new(problem.code, detail)))
        }
        other => Ok(other?),
    }
}

/// Undoes [`write`]: nothing without a name is left.
pub(super) async fn drop_unnamed(run: &Run<'_>) -> Result<(), StepError> {
    match drop_half(run).await {
        // What has the name is not this step's.
        Err(StepError::Final(problem))
            if matches!(problem.code, ErrorCode::NotFound | ErrorCode::AlreadyExists) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// Removes what has no name yet; where that fails it is said what may be left.
async fn drop_half(run: &Run<'_>) -> Result<(), StepError> {
    let (_, spec) = order(run)?;
    let dropped = step(run, ExportStep::Drop).await;
    dropped.map_err(|error| error.about(|detail| {
        let (directory, name) = (spec.to.parent(), spec.to.file_name().unwrap_or_default());
        let directory = directory.unwrap_or(std::path::Path::new("/")).display();
        let (name, export) = (name.display(), spec.export);
        format!("{detail}. What was written may be left on the host as {directory}/.{name}.vmseal-{export}: remove it there")
    }))
}

pub(super) async fn name(run: &Run<'_>) -> Result<(), StepError> {
    step(run, ExportStep::Finish).await
}

/// Undoes [`name`], which can be done only while the file has no name: what has one is the user's.
pub(super) async fn unname(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    match drop_half(run).await {
        Err(StepError::Final(problem)) if problem.code == ErrorCode::AlreadyExists => {
            let detail = format!(
                "the export had been given its name when it was called off ({cause}): {problem}"
            );
            Err(StepError::Final(Problem::new(cause.code, detail)))
        }
        // It is not there, with its name or without: nothing is left of it.
        Err(StepError::Final(problem)) if problem.code == ErrorCode::NotFound => Ok(()),
        other => other,
    }
}

/// Takes a step; an agent that has restarted is told of the VM again.
async fn step(run: &Run<'_>, step: ExportStep) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let (disk, spec) = order(run)?;
    crate::hosts::register(run.store(), run.hosts(), vm.id).await?;
    Ok(agent.export_disk(vm.id, disk, step, spec).await?)
}
