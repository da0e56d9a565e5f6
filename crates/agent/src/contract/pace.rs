//! Copies of disks are slowed, paused and go on: a copy that is paused is not used, and a pace outlives the agent.

use std::time::Duration;

use vmseal_api::host::{HostAgent, JobSpec, JobState, JobStatus};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::ErrorCode;

use super::mirror::copy_at;
use super::{Session, done, refused};

/// Copies nothing.
pub const PAUSED: CopyPace = CopyPace { bytes_per_second: None, paused: true };

/// The lowest rate: the suite's disks are copied in seconds.
const SLOW: CopyPace = CopyPace { bytes_per_second: Some(1 << 20), paused: false };

/// Longer than a copy of the suite's disk takes without a rate.
const LONG: Duration = Duration::from_secs(1);

impl Session {
    /// Puts a job whose copies are paused then.
    async fn paused(&self, agent: &dyn HostAgent, task: TaskId, job: &JobSpec) -> JobStatus {
        let put = || agent.put_job(self.vm(), task, job.clone());
        done(put().await, "pausing a copy");
        done(put().await, "pausing it again");
        tokio::time::sleep(LONG).await;
        let status = done(agent.job(self.vm(), task).await, "a copy that is paused");
        assert!(status.paused && status.progress.bytes_per_second.is_none(), "{status:?}");
        assert!(matches!(status.state, JobState::Waiting | JobState::Running), "{status:?}");
        let commit = agent.commit_job(self.vm(), task, job.clone()).await;
        refused(commit, ErrorCode::WrongState, "using a copy that is paused");
        status
    }
}

/// The plain disk is copied; in the end nothing is left of that.
pub async fn disk(agent: &dyn HostAgent, session: &Session, disk: DiskId) {
    let (vm, task) = (session.vm(), TaskId::new());
    let put = |pace| agent.put_job(vm, task, copy_at(disk, true, pace));
    let code = ErrorCode::InvalidRequest;
    let crawling = CopyPace { bytes_per_second: Some(1), paused: false };
    refused(put(crawling).await, code, "a copy that could only fall behind");
    session.paused(agent, task, &copy_at(disk, true, PAUSED)).await;
    refused(put(crawling).await, code, "the same while it is there");

    done(put(SLOW).await, "having it go on slowly");
    let status = done(agent.job(vm, task).await, "the copy");
    assert!(!status.paused, "{status:?}");
    done(put(CopyPace::default()).await, "having it go on as fast as it can");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    // Paused when it is as good as complete, it is followed again afterwards.
    session.paused(agent, task, &copy_at(disk, true, PAUSED)).await;
    done(put(SLOW).await, "having it go on");
    assert_eq!(session.worked(agent, task).await, JobState::ReadyToCommit);
    session.paused(agent, task, &copy_at(disk, true, PAUSED)).await;
    let job = copy_at(disk, true, CopyPace::default());
    done(agent.cancel_job(vm, task, job).await, "cancelling what is paused");
    assert_eq!(session.worked(agent, task).await, JobState::Cancelled);
}
