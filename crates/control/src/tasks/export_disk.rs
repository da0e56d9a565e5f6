//! Writes a disk, or what a core dump holds, to a file of its host. The host writes it under a temporary name, and renames
//! it in a separate step: so it is always known whether the file has its name.

use async_trait::async_trait;
use vmseal_api::host::{DecryptDumpJob, ExportJob, HostAgent, JobSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::ExportFormat;

use super::job::{first_disk, follow};
use super::run::{Run, StepError};
use super::start_vm::prepare;
use super::step::{Limit, Output, WaitPolicy};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::vms::Vm;

/// The steps, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExportDiskStep {
    Prepare,
    WriteFile,
    NameFile,
}

/// Ciphertext is copied without a key, so none is requested.
pub(crate) fn steps(format: ExportFormat) -> &'static [&'static dyn super::step::Step] {
    match format {
        ExportFormat::Sealed => &[&ExportDiskStep::WriteFile, &ExportDiskStep::NameFile],
        _ => &[&ExportDiskStep::Prepare, &ExportDiskStep::WriteFile, &ExportDiskStep::NameFile],
    }
}

#[async_trait]
impl super::step::Step for ExportDiskStep {
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

    fn wait_policy(&self) -> WaitPolicy {
        match self {
            Self::WriteFile => WaitPolicy::BOTH,
            _ => WaitPolicy::NONE,
        }
    }

    fn limit(&self) -> Option<Limit> {
        match self {
            Self::Prepare => Some(Limit::Provider),
            Self::WriteFile => Some(Limit::Copy),
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

/// The job of the task that writes the file, and that file as an export.
async fn order(run: &Run<'_>) -> Result<(JobSpec, ExportJob), StepError> {
    let job = match &run.task.operation {
        Operation::ExportDisk { disk, to, format, passphrase, snapshot, .. } => {
            let (to, passphrase) = (to.clone(), passphrase.clone());
            let (disk, format, snapshot) = (*disk, *format, *snapshot);
            JobSpec::Export(ExportJob { disk, to, format, passphrase, snapshot })
        }
        Operation::DumpVm { dump, to: Some(to), .. } | Operation::DecryptDump { dump, to, .. } => {
            let disk = first_disk(run).await?;
            JobSpec::DecryptDump(DecryptDumpJob { dump: *dump, disk, to: to.clone() })
        }
        _ => return Err(StepError::Final(Problem::new(ErrorCode::Internal, "it writes no file"))),
    };
    let file = job.exported();
    let file = file.ok_or_else(|| Problem::new(ErrorCode::Internal, "it writes no file"))?;
    Ok((job, file))
}

pub(super) async fn write(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let (job, file) = order(run).await?;
    let kind = job.kind();
    begin(run, &vm, &*agent, (job, file)).await?;
    follow(run, &vm, kind).await.map(drop)
}

async fn begin(
    run: &Run<'_>,
    vm: &Vm,
    agent: &dyn HostAgent,
    (job, spec): (JobSpec, ExportJob),
) -> Result<(), StepError> {
    let step = || agent.put_job(vm.id, run.task.id, job.clone());
    let begun = match step().await {
        // The agent restarted since the registration; ciphertext is copied without the key.
        Err(problem)
            if problem.code == ErrorCode::NotFound && spec.format == ExportFormat::Sealed =>
        {
            crate::hosts::register(run.store(), run.hosts(), vm.id).await?;
            step().await
        }
        // The same, with its key.
        Err(problem) if matches!(problem.code, ErrorCode::NotFound | ErrorCode::Locked) => {
            run.hosts().prepare(vm.id, Purpose::Open).await?;
            step().await
        }
        other => other,
    };
    match begun {
        Err(problem) if problem.code == ErrorCode::WrongState && spec.passphrase.is_some() => {
            let detail = format!(
                "{problem}. A passphrase is not stored: if the agent of host '{}' has restarted, export again",
                vm.host_name
            );
            Err(StepError::Final(Problem::new(problem.code, detail)))
        }
        other => Ok(other?),
    }
}

/// Undoes [`write`]: removes the file under its temporary name.
pub(super) async fn drop_unnamed(run: &Run<'_>) -> Result<(), StepError> {
    match drop_half(run).await {
        // A file under the final name is not this step's.
        Err(StepError::Final(problem))
            if matches!(problem.code, ErrorCode::NotFound | ErrorCode::AlreadyExists) =>
        {
            Ok(())
        }
        other => other,
    }
}

/// Removes the file under its temporary name; on failure, the problem says what may be left.
async fn drop_half(run: &Run<'_>) -> Result<(), StepError> {
    let (_, spec) = order(run).await?;
    let dropped = end(run, End::Cancel).await;
    dropped.map_err(|error| error.about(|detail| {
        let (directory, name) = (spec.to.parent(), spec.to.file_name().unwrap_or_default());
        let directory = directory.unwrap_or(std::path::Path::new("/")).display();
        let (name, export) = (name.display(), run.task.id);
        format!("{detail}. A partial file may be left on the host as {directory}/.{name}.vmseal-{export}: remove it there")
    }))
}

pub(super) async fn name(run: &Run<'_>) -> Result<(), StepError> {
    end(run, End::Commit).await
}

/// Undoes [`name`], which is possible only while the file has its temporary name: after that it is the user's.
pub(super) async fn unname(run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
    match drop_half(run).await {
        Err(StepError::Final(problem)) if problem.code == ErrorCode::AlreadyExists => {
            let detail = format!(
                "the export had been given its name when it was called off ({cause}): {problem}"
            );
            Err(StepError::Final(Problem::new(cause.code, detail)))
        }
        // The file exists under neither name: nothing is left of it.
        Err(StepError::Final(problem)) if problem.code == ErrorCode::NotFound => Ok(()),
        other => other,
    }
}

/// How to end a job.
#[derive(Clone, Copy)]
enum End {
    Commit,
    Cancel,
}

/// Ends the job; registers the VM again if the agent has restarted.
async fn end(run: &Run<'_>, how: End) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let agent = run.agent(&vm)?;
    let (job, _) = order(run).await?;
    crate::hosts::register(run.store(), run.hosts(), vm.id).await?;
    let ended = match how {
        End::Commit => agent.commit_job(vm.id, run.task.id, job).await,
        End::Cancel => agent.cancel_job(vm.id, run.task.id, job).await,
    };
    Ok(ended?)
}
