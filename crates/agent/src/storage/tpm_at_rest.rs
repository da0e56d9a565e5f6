//! What the TPM of a VM keeps that is off or suspended, taken into locked memory: to be sent ([`crate::storage::sent_tpm`]), or written
//! to a file ([`crate::storage::export`]).
//!
//! A swtpm of its own loads it, and gives it in the clear. Nothing uses the TPM meanwhile: its VM's owner starts no guest.

use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use crate::hypervisor::tpm::{Permanent, Swtpm};
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal, too_many};
use crate::storage::home::Home;
use crate::storage::locked::Access;
use crate::storage::tpm_disk::key_of;
use crate::storage::tpm_handover::Side;
use crate::storage::{mirror, opening, tpm_place, tpm_state};

/// A TPM that nobody uses.
pub struct TpmAtRest {
    /// The VM, which is at rest.
    pub spec: VmSpec,
    /// The disk that has the TPM's key.
    pub disk: DiskSpec,
    /// Its facts.
    pub facts: DiskFacts,
    /// The VM's KEK.
    pub kek: Option<SecretBytes>,
}

impl TpmAtRest {
    /// Takes what it keeps. The disk's lock is held as long as its side is. What a failure leaves in the directory of processes is to be
    /// swept.
    ///
    /// # Errors
    /// `damaged`, `locked`, `in-use`; those of swtpm.
    pub async fn take(
        self,
        swtpm: &Swtpm,
        builder: &DiskBuilder,
    ) -> Result<(Permanent, Arc<Side>), Problem> {
        let slot = Arc::new(builder.users.take().ok_or_else(too_many)?);
        builder.directory.renew().await.map_err(internal)?;
        let open = move || self.open(slot);
        let side = Arc::new(spawn_blocking(open).await.map_err(internal)??);
        let kept = side.take(swtpm, &builder.directory).await?;
        builder.directory.sweep().await.map_err(internal)?;
        Ok((kept, side))
    }

    /// Opens it. Blocks.
    fn open(&self, slot: Arc<Slot>) -> Result<Side, Problem> {
        let Self { spec, disk, facts, kek } = self;
        let (disk, facts) = mirror::as_it_is(spec, disk, facts, Access::Write)?;
        let unlocked = opening::open_for_key(spec, &disk, &facts, kek.as_ref())?;
        tpm_place::settle(spec, &disk)?;
        let path = Home::of(&disk.datastore, spec.vm)?.tpm_state(disk.disk);
        let directory = tpm_state::open(&path, slot.tpm())?;
        let key = key_of(&unlocked.dek, disk.disk)?;
        Ok(Side { directory, lock: unlocked.file, key, slot })
    }
}
