//! Core dumps: written, decrypted, removed; each call repeated, every refusal provoked.

use std::path::Path;

use vmseal_api::dump::DumpFormat;
use vmseal_api::host::{DecryptDumpJob, DumpJob, HostAgent, JobSpec, JobState};
use vmseal_api::id::{DiskId, DumpId, TaskId};
use vmseal_api::problem::ErrorCode;

use super::{Session, done, refused};

/// The job that writes a core dump.
pub fn dump_of(dump: DumpId, disk: DiskId) -> JobSpec {
    JobSpec::Dump(DumpJob { dump, disk, format: DumpFormat::Elf })
}

/// The job that decrypts one.
pub fn decryption(dump: DumpId, disk: DiskId, to: &Path) -> JobSpec {
    JobSpec::DecryptDump(DecryptDumpJob { dump, disk, to: to.to_owned() })
}

/// The VM runs, before and after.
pub async fn running(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let (task, dump) = (TaskId::new(), DumpId::new());
    refused(
        agent.put_job(vm, TaskId::new(), dump_of(dump, DiskId::new())).await,
        ErrorCode::NotFound,
        "a dump beside a strange disk",
    );
    done(agent.examine_job(vm, dump_of(dump, disk)).await, "examining a dump");
    done(agent.put_job(vm, task, dump_of(dump, disk)).await, "a dump");
    done(agent.put_job(vm, task, dump_of(dump, disk)).await, "the same again");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    let progress = done(agent.job(vm, task).await, "the job").progress;
    assert!(progress.total > 0 && progress.done == progress.total, "{progress:?}");
    done(agent.commit_job(vm, task, dump_of(dump, disk)).await, "committing what is done");
    let again = TaskId::new();
    done(agent.put_job(vm, again, dump_of(dump, disk)).await, "a dump that is there");
    assert_eq!(session.worked(agent, again).await, JobState::Done);

    let to = session.fixture.image.with_file_name(format!("core-{dump}"));
    let relative = decryption(dump, disk, Path::new("core"));
    refused(
        agent.put_job(vm, TaskId::new(), relative).await,
        ErrorCode::InvalidRequest,
        "a relative path",
    );
    let (task, job) = (TaskId::new(), decryption(dump, disk, &to));
    done(agent.put_job(vm, task, job.clone()).await, "decrypting");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    done(agent.commit_job(vm, task, job.clone()).await, "naming the file");
    done(agent.commit_job(vm, task, job.clone()).await, "naming it again");
    refused(
        agent.cancel_job(vm, task, job).await,
        ErrorCode::AlreadyExists,
        "cancelling what has its name",
    );
    refused(
        agent.put_job(vm, TaskId::new(), decryption(dump, disk, &to)).await,
        ErrorCode::AlreadyExists,
        "decrypting to a file that is there",
    );
    let (task, job) = (TaskId::new(), decryption(dump, disk, &to.with_extension("second")));
    done(agent.put_job(vm, task, job.clone()).await, "decrypting again");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    done(agent.cancel_job(vm, task, job.clone()).await, "cancelling");

    done(agent.discard_dump(vm, dump).await, "removing a dump");
    done(agent.discard_dump(vm, dump).await, "removing what is removed");
    let (task, job) = (TaskId::new(), decryption(dump, disk, &to.with_extension("third")));
    done(agent.put_job(vm, task, job).await, "decrypting what is removed");
    let state = session.worked(agent, task).await;
    let absent =
        matches!(&state, JobState::Failed { problem } if problem.code == ErrorCode::NotFound);
    assert!(absent, "{state:?}");
}

/// The VM is off, and its disks are made.
pub async fn off(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let dump = dump_of(DumpId::new(), disk);
    refused(agent.examine_job(vm, dump.clone()).await, ErrorCode::WrongState, "examining");
    refused(
        agent.put_job(vm, TaskId::new(), dump).await,
        ErrorCode::WrongState,
        "a dump of a VM that is off",
    );
}
