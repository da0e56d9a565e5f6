//! Proofs that a VM's files are encrypted, as its owner begins them. One worker reads the files of all disks: it is the first
//! disk's, and the job is done when it has ended.

use vmseal_api::host::{JobSpec, ProveJob};
use vmseal_api::id::TaskId;
use vmseal_api::problem::Problem;

use super::Owner;
use crate::rules::exclusion::Action;
use crate::storage::proof::Proving;

impl Owner {
    pub(super) fn put_proof(
        &mut self,
        task: TaskId,
        job: ProveJob,
        spec: JobSpec,
    ) -> Result<(), Problem> {
        self.may_work(Action::Prove, &spec)?;
        let kek = self.clone_kek()?;
        let facts = |disk: &vmseal_api::host::DiskSpec| Some((disk.disk, self.facts(disk)?));
        let facts = self.spec.disks().filter_map(facts).collect();
        let Some(first) = job.disks.first().copied() else { return Ok(()) };
        let proving = Proving { spec: self.spec.clone(), facts, kek, task, job };
        self.jobs.begin(task, spec);
        self.workers.begin_proof(&self.shared, first, proving);
        Ok(())
    }
}
