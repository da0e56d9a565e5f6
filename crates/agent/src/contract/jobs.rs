//! Jobs: disks are made and exported, each step repeated; a task has one job.

use std::path::{Path, PathBuf};

use vmseal_api::host::{
    CreateJob, DiskFacts, DiskToCreate, ExportJob, HostAgent, ImageSource, JobKind, JobSpec,
    JobState, VmState,
};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::{ExportFormat, ImageFormat};

use super::{Session, done, refused};

/// A raw image to fill a disk from.
pub fn image(path: &Path) -> Option<ImageSource> {
    Some(ImageSource { path: path.to_owned(), format: ImageFormat::Raw, force: false })
}

/// The job that makes one disk.
pub fn creation(disk: DiskId, source: Option<ImageSource>) -> JobSpec {
    JobSpec::Create(CreateJob {
        disks: vec![DiskToCreate { disk, source, cloud_init: None, copy_of: None }],
    })
}

impl Session {
    /// Puts the job of a new task that makes a disk.
    pub async fn create(
        &self,
        agent: &dyn HostAgent,
        disk: DiskId,
        source: Option<ImageSource>,
    ) -> Result<TaskId, Problem> {
        let task = TaskId::new();
        agent.put_job(self.vm(), task, creation(disk, source)).await.map(|()| task)
    }

    /// Waits until a job has ended or waits to be committed.
    pub async fn worked(&self, agent: &dyn HostAgent, task: TaskId) -> JobState {
        let state_in = |state: &VmState| {
            let job = state.jobs.iter().find(|job| job.task == task)?;
            (!matches!(job.state, JobState::Waiting | JobState::Running)).then(|| job.state.clone())
        };
        let state = self.wait(agent, "the end of a job", |state| state_in(state).is_some()).await;
        let found = state_in(&state).expect("the job was there");
        let asked = done(agent.job(self.vm(), task).await, "asking for a job");
        assert_eq!((&asked.state, asked.task), (&found, task));
        assert!(asked.progress.done <= asked.progress.total, "{asked:?}");
        found
    }

    /// Waits until a job has made a disk.
    pub async fn made(&self, agent: &dyn HostAgent, task: TaskId, disk: DiskId) -> DiskFacts {
        assert_eq!(self.worked(agent, task).await, JobState::Done);
        let known = self.now(agent).await.disks.into_iter().find(|known| known.disk == disk);
        known.expect("the disk that was made").facts
    }

    fn export(&self, name: &str, disk: DiskId, format: ExportFormat) -> (TaskId, JobSpec) {
        let to = self.fixture.image.with_file_name(name);
        let job = ExportJob { disk, to, format, passphrase: None, snapshot: None };
        (TaskId::new(), JobSpec::Export(job))
    }

    /// Puts an export and waits until it is written.
    async fn written(&self, agent: &dyn HostAgent, (task, job): &(TaskId, JobSpec)) {
        let put = || agent.put_job(self.vm(), *task, job.clone());
        done(put().await, "an export");
        done(put().await, "the same, while it is written");
        assert_eq!(self.worked(agent, *task).await, JobState::ReadyToCommit);
        done(put().await, "the same, when it is written");
    }
}

/// Disks are made, found complete, removed and made again. In the end both are there and pinned.
pub async fn disks(agent: &dyn HostAgent, session: &mut Session) {
    let vm = session.vm();
    let [system, data] = [0, 1].map(|index| session.disk(index).disk);
    refused(agent.power_on(vm).await, ErrorCode::WrongState, "starting without disks");
    let strange = session.create(agent, DiskId::new(), None).await;
    refused(strange, ErrorCode::NotFound, "a disk that the VM does not have");
    let none = JobSpec::Create(CreateJob { disks: vec![] });
    let code = ErrorCode::InvalidRequest;
    refused(agent.put_job(vm, TaskId::new(), none).await, code, "a job without disks");
    refused(agent.job(vm, TaskId::new()).await, ErrorCode::NotFound, "an unknown job");
    let missing = image(&session.fixture.datastore.join("no-such-image"));
    if let Ok(task) = session.create(agent, data, missing).await {
        let failed = session.worked(agent, task).await;
        assert!(matches!(failed, JobState::Failed { .. }), "{failed:?}");
    }
    let guest = image(&session.fixture.image);
    let (task, job) = (TaskId::new(), creation(system, guest.clone()));
    done(agent.examine_job(vm, job.clone()).await, "examining its creation");
    assert!(session.now(agent).await.disks.is_empty(), "the disk is made");
    done(agent.put_job(vm, task, job.clone()).await, "the encrypted disk");
    done(agent.put_job(vm, task, job.clone()).await, "the same, while it is made");
    refused(agent.put_job(vm, task, creation(system, None)).await, ErrorCode::Conflict, "another");
    let facts = session.made(agent, task, system).await;
    assert!(matches!(facts, DiskFacts::Luks2 { sector_size: 4096, key_bits: 512, .. }));
    assert_eq!(done(agent.job(vm, task).await, "a job").kind, JobKind::Create);
    done(agent.put_job(vm, task, job.clone()).await, "the same, when it is made");
    done(agent.commit_job(vm, task, job.clone()).await, "committing a finished job");
    let other = agent.cancel_job(vm, task, creation(data, None)).await;
    refused(other, ErrorCode::Conflict, "cancelling another job of the task");
    let plain = done(session.create(agent, data, None).await, "the plain disk");
    assert_eq!(session.made(agent, plain, data).await, DiskFacts::Raw);
    let again = done(session.create(agent, system, guest.clone()).await, "a disk that is made");
    assert_eq!(session.made(agent, again, system).await, facts);

    // Removed and made again.
    done(agent.delete_disk(vm, system).await, "removing");
    done(agent.delete_disk(vm, system).await, "removing again");
    assert!(session.now(agent).await.disks.iter().all(|state| state.disk != system));
    let removed = done(session.create(agent, system, guest.clone()).await, "making");
    done(agent.delete_disk(vm, system).await, "removing while it is made");
    assert_eq!(session.worked(agent, removed).await, JobState::Cancelled);
    let job = creation(system, guest.clone());
    done(agent.put_job(vm, removed, job.clone()).await, "the same job once more");
    done(agent.cancel_job(vm, removed, job.clone()).await, "cancelling it");
    done(agent.cancel_job(vm, removed, job.clone()).await, "cancelling it again");
    assert_eq!(session.worked(agent, removed).await, JobState::Cancelled);
    refused(agent.commit_job(vm, removed, job.clone()).await, ErrorCode::NotFound, "committing it");
    // Both at once: the complete one is not touched.
    let wanted = |disk, source| DiskToCreate { disk, source, cloud_init: None, copy_of: None };
    let disks = vec![wanted(system, guest), wanted(data, None)];
    let both = TaskId::new();
    let job = JobSpec::Create(CreateJob { disks });
    done(agent.put_job(vm, both, job).await, "making both");
    let facts = session.made(agent, both, system).await;
    let pinned = [facts, session.made(agent, both, data).await];
    for (disk, facts) in session.spec.disks_mut().zip(pinned) {
        disk.facts = Some(facts);
    }
    let contents = done(agent.scan_datastore(session.place.clone()).await, "scanning");
    let found: Vec<_> = contents.images.iter().filter_map(|image| image.named).collect();
    assert_eq!(found.len(), 2, "{contents:?}");
    assert!(found.iter().all(|name| name.vm == vm && [system, data].contains(&name.disk)));
    // As the server does when it has pinned them.
    done(agent.register_vm(session.spec.clone()).await, "registering with facts");
    let export = |to: PathBuf| {
        let (disk, format) = (system, ExportFormat::Raw);
        agent.examine_job(
            vm,
            JobSpec::Export(ExportJob { disk, to, format, passphrase: None, snapshot: None }),
        )
    };
    let to = session.fixture.datastore.join("exported");
    done(export(to.clone()).await, "examining its export");
    let jobs = session.now(agent).await.jobs;
    assert!(
        !to.exists() && jobs.iter().all(|job| job.kind != JobKind::Export),
        "the disk is exported"
    );
    refused(
        export("relative".into()).await,
        ErrorCode::InvalidRequest,
        "an export to a relative path",
    );
}

/// What can be exported without the key: ciphertext, and disks that are not encrypted.
pub async fn locked_exports(agent: &dyn HostAgent, session: &Session) {
    let (vm, [system, data]) = (session.vm(), [0, 1].map(|index| session.disk(index).disk));
    let (task, raw) = session.export("locked.raw", system, ExportFormat::Raw);
    refused(agent.put_job(vm, task, raw).await, ErrorCode::Locked, "without its key");
    let (task, plain) = session.export("system.sealed", data, ExportFormat::Sealed);
    let put = agent.put_job(vm, task, plain).await;
    refused(put, ErrorCode::InvalidRequest, "ciphertext of a plain disk");
    let export = session.export("system.sealed", system, ExportFormat::Sealed);
    session.written(agent, &export).await;
    let (task, sealed) = export;
    let commit = || agent.commit_job(vm, task, sealed.clone());
    done(commit().await, "committing the export");
    assert_eq!(session.worked(agent, task).await, JobState::Done);
    done(commit().await, "committing it again");
    let put = agent.put_job(vm, TaskId::new(), sealed.clone()).await;
    refused(put, ErrorCode::AlreadyExists, "a file that exists");
}

/// An export can be cancelled until it is committed.
pub async fn exports(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    let export = session.export("system.raw", session.disk(0).disk, ExportFormat::Raw);
    let (task, job) = &export;
    let commit = || agent.commit_job(vm, *task, job.clone());
    let cancel = || agent.cancel_job(vm, *task, job.clone());
    refused(commit().await, ErrorCode::NotFound, "committing an unknown export");
    refused(cancel().await, ErrorCode::NotFound, "cancelling an unknown export");
    session.written(agent, &export).await;
    done(cancel().await, "cancelling it");
    assert_eq!(session.worked(agent, *task).await, JobState::Cancelled);
    done(cancel().await, "cancelling it again");
    refused(commit().await, ErrorCode::NotFound, "committing a cancelled export");
    session.written(agent, &export).await;
    done(commit().await, "committing the export");
    refused(cancel().await, ErrorCode::AlreadyExists, "cancelling a committed export");
}
