//! Proofs: a disk that is encrypted and one that is not; each call repeated, every refusal provoked.

use vmseal_api::host::{HostAgent, JobSpec, JobState, ProveJob};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::ErrorCode;
use vmseal_api::proof::{ImageKind, Verdict};

use super::{Session, done, refused};

/// The job that reads the files of these disks.
pub fn proof(disks: &[DiskId]) -> JobSpec {
    JobSpec::Prove(ProveJob { disks: disks.to_vec(), all: true, seed: 7 })
}

/// The VM is off, its disks are made and its key is there, before and after.
pub async fn disks(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    let [system, data] = [0, 1].map(|index| session.disk(index).disk);
    let put = |job| agent.put_job(vm, TaskId::new(), job);
    refused(put(proof(&[])).await, ErrorCode::InvalidRequest, "a proof of no disk");
    refused(put(proof(&[DiskId::new()])).await, ErrorCode::NotFound, "a strange disk");
    let (task, job) = (TaskId::new(), proof(&[system, data]));
    done(agent.examine_job(vm, job.clone()).await, "examining a proof");
    done(agent.put_job(vm, task, job.clone()).await, "a proof");
    done(agent.put_job(vm, task, job.clone()).await, "the same again");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    done(agent.commit_job(vm, task, job.clone()).await, "committing what is done");
    let status = done(agent.job(vm, task).await, "asking for the proof");
    let report = status.proof.expect("a proof has a report").read().expect("it can be read");
    assert_eq!((report.vm, report.task, report.seed), (vm, task, 7));
    let verdict = |disk| {
        let is_it = |image: &&vmseal_api::proof::ProvenImage| {
            (image.disk, image.kind) == (disk, ImageKind::Image)
        };
        report.images.iter().find(is_it).map(|image| image.verdict)
    };
    assert_eq!(verdict(system), Some(Verdict::Encrypted), "{report:?}");
    assert_eq!(verdict(data), Some(Verdict::NotEncrypted), "{report:?}");
    assert_eq!(report.verdict, Verdict::NotEncrypted, "{report:?}");
    // The state of the host does not have the report.
    let jobs = session.now(agent).await.jobs;
    assert!(jobs.iter().all(|job| job.proof.is_none()), "{jobs:?}");
    done(agent.cancel_job(vm, task, job).await, "cancelling what is done");
}
