//! Disks are encrypted, re-encrypted and decrypted in their files: each step repeated, every refusal provoked.

use vmseal_api::host::{
    ConvertJob, DiskFacts, DiskToConvert, DropSourcesJob, HostAgent, JobKind, JobSpec, JobState,
};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::ErrorCode;

use super::mirror::{copy, disk_mut};
use super::{Session, done, refused};

/// The job that converts one disk.
pub fn conversion(disk: DiskId, encrypted: bool) -> JobSpec {
    let disks = vec![DiskToConvert { disk, encrypted }];
    JobSpec::Convert(ConvertJob { disks, bytes_per_second: None })
}

/// The plain disk is encrypted, encrypted anew, and decrypted.
pub async fn disks(agent: &dyn HostAgent, session: &mut Session) {
    let vm = session.vm();
    let data = session.disk(1).disk;
    let put = |task, job| agent.put_job(vm, task, job);
    let kept = put(TaskId::new(), conversion(data, true)).await;
    refused(kept, ErrorCode::WrongState, "a conversion of a disk with a replica");
    let replica = disk_mut(session, data).replica.take();
    done(agent.register_vm(session.spec.clone()).await, "registering without the replica");
    let none = JobSpec::Convert(ConvertJob { disks: Vec::new(), bytes_per_second: None });
    refused(put(TaskId::new(), none).await, ErrorCode::InvalidRequest, "a conversion of no disk");
    let plain = put(TaskId::new(), conversion(data, false)).await;
    refused(plain, ErrorCode::InvalidRequest, "decrypting a plain disk");
    let strange = put(TaskId::new(), conversion(DiskId::new(), true)).await;
    refused(strange, ErrorCode::NotFound, "a disk that the VM does not have");
    before_the_commit(agent, session, data).await;
    for encrypted in [true, true, false] {
        let facts = converted(agent, session, data, encrypted).await;
        assert_eq!(matches!(facts, DiskFacts::Luks2 { .. }), encrypted, "{facts:?}");
    }
    disk_mut(session, data).replica = replica;
    done(agent.register_vm(session.spec.clone()).await, "registering with the replica");
}

/// What is only prepared is cancelled, and nothing is left of it.
async fn before_the_commit(agent: &dyn HostAgent, session: &Session, disk: DiskId) {
    let vm = session.vm();
    let (task, job) = (TaskId::new(), conversion(disk, true));
    let commit = || agent.commit_job(vm, task, job.clone());
    let cancel = || agent.cancel_job(vm, task, job.clone());
    refused(commit().await, ErrorCode::NotFound, "committing what was not put");
    done(agent.examine_job(vm, job.clone()).await, "examining it");
    for _ in 0..2 {
        done(agent.put_job(vm, task, job.clone()).await, "preparing it");
        assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
        done(agent.put_job(vm, task, job.clone()).await, "the same again");
        // What is only prepared keeps nobody from the disk.
        let other = TaskId::new();
        done(agent.put_job(vm, other, job.clone()).await, "the same of another task");
        done(agent.cancel_job(vm, other, job.clone()).await, "cancelling that");
        refused(commit().await, ErrorCode::NotFound, "committing what another has replaced");
        done(agent.put_job(vm, task, job.clone()).await, "preparing it anew");
        done(cancel().await, "cancelling it");
        done(cancel().await, "cancelling it again");
        assert_eq!(session.worked(agent, task).await, JobState::Cancelled);
        refused(commit().await, ErrorCode::NotFound, "committing what was cancelled");
    }
}

/// Converts a disk, and registers it as it is.
async fn converted(
    agent: &dyn HostAgent,
    session: &mut Session,
    disk: DiskId,
    encrypted: bool,
) -> DiskFacts {
    let (vm, task, job) = (session.vm(), TaskId::new(), conversion(disk, encrypted));
    let put = || agent.put_job(vm, task, job.clone());
    let commit = || agent.commit_job(vm, task, job.clone());
    done(put().await, "preparing it");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    done(commit().await, "beginning it");
    done(commit().await, "beginning it again");
    done(put().await, "putting it again");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    done(commit().await, "beginning it when it is done");
    let cancelled = agent.cancel_job(vm, task, job.clone()).await;
    refused(cancelled, ErrorCode::AlreadyExists, "cancelling what is done");
    let other = agent.put_job(vm, TaskId::new(), copy(disk, true)).await;
    refused(other, ErrorCode::WrongState, "a copy before it has its name");
    let known = session.now(agent).await.disks.into_iter().find(|known| known.disk == disk);
    let facts = known.expect("the disk's facts").facts;
    let registered = disk_mut(session, disk);
    (registered.encrypted, registered.facts) = (encrypted, Some(facts.clone()));
    done(agent.register_vm(session.spec.clone()).await, "registering the disk as it is");
    let settle = JobSpec::DropSources(DropSourcesJob { disks: vec![disk] });
    for _ in 0..2 {
        done(agent.put_job(vm, task, settle.clone()).await, "giving it its name");
        assert_eq!(session.worked(agent, task).await, JobState::Done);
    }
    assert_eq!(done(agent.job(vm, task).await, "the job").kind, JobKind::DropSources);
    facts
}
