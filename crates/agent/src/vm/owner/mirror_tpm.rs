//! The disk with the key of a VM's TPM, among those that are copied: of a VM that is off or suspended, with what the TPM keeps.
//!
//! ```text
//!  put ─► copy begun, noted ─► a filter of its own copies its data, which is none
//!  commit ─► what the TPM keeps is encrypted anew, beside the copy ─► the disk pivots ─► the other disks pivot
//! ```
//! It is the first, as most of what can fail fails here, and all is as it was then. Between the two arrows nothing starts the VM: its
//! owner does both.

use vmseal_api::host::{DiskRole, MirrorJob, Power};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use super::Owner;
use crate::rules::{self, find_disk};
use crate::storage::mirror::Mirror;
use crate::storage::mirror::tpm::CopyTpm;
use crate::vm::internal;
use crate::vm::workers::Workers;

impl Owner {
    /// Checks that what a TPM keeps could be copied now, where its disk is among those of a job.
    pub(super) fn may_copy_tpm(&self, job: &MirrorJob) -> Result<(), Problem> {
        rules::check_tpm_at_rest(&self.spec, job, self.power())?;
        if self.tpm_of(job)?.is_some() { self.shared.swtpm.examine() } else { Ok(()) }
    }

    /// What copies what a TPM keeps, where its disk is among those of a job.
    fn tpm_of(&self, job: &MirrorJob) -> Result<Option<CopyTpm>, Problem> {
        for wanted in &job.disks {
            let disk = find_disk(&self.spec, wanted.disk)?.clone();
            if disk.role != DiskRole::Tpm {
                continue;
            }
            let facts = self.facts(&disk).ok_or_else(|| internal("a disk without facts"))?;
            let (spec, kek, swtpm) =
                (self.spec.clone(), self.clone_kek()?, self.shared.swtpm.clone());
            return Ok(Some(CopyTpm { spec, disk, facts, kek, swtpm }));
        }
        Ok(None)
    }

    /// Has the disk of a TPM pivot, with what the TPM keeps, where it is among those of a job and has not. `known` are the copies of these.
    pub(super) async fn pivot_tpm(
        &mut self,
        job: &MirrorJob,
        known: &[Option<Mirror>],
    ) -> Result<(), Problem> {
        let Some(copy) = self.tpm_of(job)? else { return Ok(()) };
        let disk = copy.disk.disk;
        let index = job.disks.iter().position(|wanted| wanted.disk == disk);
        let mirror = index.and_then(|index| known.get(index)?.as_ref());
        if mirror.is_some_and(|mirror| mirror.pivoted) {
            return Ok(());
        }
        rules::check_tpm_at_rest(&self.spec, job, self.power())?;
        self.workers.cancel(disk).await;
        copy.run(&Workers::builder(&self.shared, disk)).await?;
        let pivoted = self.copying(&[disk])?.pivot().await;
        if pivoted.is_err() {
            // It may have pivoted nevertheless.
            self.take_copies(job).await?;
        }
        pivoted
    }

    /// Whether a disk is that of a TPM whose guest has it: swtpm holds its image, and its copy goes on when the VM is at rest.
    pub(super) fn is_of_tpm_in_use(&self, disk: DiskId) -> bool {
        let of_tpm = self.spec.disk(disk).is_some_and(|disk| disk.role == DiskRole::Tpm);
        of_tpm && !matches!(self.power(), Power::Off | Power::Suspended)
    }
}
