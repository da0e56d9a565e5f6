//! Core dumps of a VM, as its owner begins them.

use tokio::task::spawn_blocking;
use vmseal_api::host::{DecryptDumpJob, DumpJob, JobSpec};
use vmseal_api::id::{DumpId, TaskId};
use vmseal_api::problem::Problem;

use super::{Owner, State};
use crate::rules::exclusion::Action;
use crate::rules::find_disk;
use crate::storage::core_file::CoreFile;
use crate::storage::export::{self, Export};
use crate::timed;
use crate::vm::dumping::{Decrypting, Dumping};
use crate::vm::internal;

impl Owner {
    /// Whether a core dump could be written now.
    pub(super) async fn ready_to_dump(
        &self,
        job: &DumpJob,
        spec: &JobSpec,
    ) -> Result<CoreFile, Problem> {
        self.may_work(Action::Dump, spec)?;
        let place = find_disk(&self.spec, job.disk)?.datastore.location.path().to_owned();
        let (of, dump) = (self.spec.clone(), job.dump);
        let look = move || {
            let file = CoreFile::of(&of, dump)?;
            file.check_room(&of)?;
            Ok::<_, Problem>(file)
        };
        timed::call(&place, look).await
    }

    pub(super) async fn put_dump(
        &mut self,
        task: TaskId,
        job: DumpJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        let file = self.ready_to_dump(&job, &spec).await?;
        let kek = self.clone_kek()?;
        let running = match &self.state {
            State::Running(running) | State::Stopping { running, .. } => running,
            State::Off | State::Starting { .. } => {
                return Err(internal("a VM that runs has no processes"));
            }
        };
        let (qmp, format) = (running.qmp.clone(), job.format);
        let dumping = Dumping { file, spec: self.spec.clone(), kek, qmp, format };
        self.jobs.begin(task, spec);
        self.workers.begin_dump(job.disk, dumping);
        Ok(())
    }

    /// Whether a core dump could be decrypted so.
    pub(super) async fn ready_to_decrypt(
        &self,
        task: TaskId,
        job: &DecryptDumpJob,
        spec: &JobSpec,
    ) -> Result<Decrypting, Problem> {
        self.may_work(Action::DecryptDump, spec)?;
        let Some(exported) = spec.exported() else {
            return Err(internal("what is decrypted goes to no file"));
        };
        let export = Export { task, job: exported };
        let (wanted, allowed) = (export.clone(), self.shared.transfer.clone());
        let transfer = allowed.clone();
        timed::call(&job.to, move || export::check(&wanted, &transfer)).await?;
        let file = self.core_file(job.dump).await?;
        let kek = self.clone_kek()?;
        let record = self.shared.run_dir.exported(job.disk);
        Ok(Decrypting { file, spec: self.spec.clone(), kek, export, record, allowed })
    }

    pub(super) async fn put_decryption(
        &mut self,
        task: TaskId,
        job: DecryptDumpJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        let decrypting = self.ready_to_decrypt(task, &job, &spec).await?;
        self.jobs.begin(task, spec);
        self.workers.begin_decryption(job.disk, decrypting);
        Ok(())
    }

    pub(super) async fn discard_dump(&mut self, dump: DumpId) -> Result<(), Problem> {
        let file = self.core_file(dump).await?;
        spawn_blocking(move || file.remove()).await.map_err(internal)??;
        self.panics.dumps.retain(|known| known.dump != dump);
        Ok(())
    }

    async fn core_file(&self, dump: DumpId) -> Result<CoreFile, Problem> {
        let spec = self.spec.clone();
        spawn_blocking(move || CoreFile::of(&spec, dump)).await.map_err(internal)?
    }
}
