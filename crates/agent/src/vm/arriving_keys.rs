//! What the copies of a guest's disks are made, and told of, under. See [`super::migration`].

use std::sync::Arc;

use vmseal_api::id::MigrationId;
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use super::internal;
use crate::storage::memory_transit::MemoryTransit;

/// See the module.
#[derive(Clone, Copy)]
pub struct ArrivingKeys<'a> {
    /// The VM's key here; none where it has none.
    pub kek: Option<&'a SecretBytes>,
    /// What the keys of the copies are told under.
    pub told_under: Option<&'a SecretBytes>,
    /// What the memory of snapshots, and what a TPM keeps, come sealed under, where the source has another key of the VM.
    pub transit: Option<&'a Arc<MemoryTransit>>,
    /// The attempt.
    pub migration: MigrationId,
}

impl ArrivingKeys<'_> {
    /// What the memory of a snapshot comes under, and the VM's key here that it is put under; none where it comes under that key.
    ///
    /// # Errors
    /// `internal`: there is no memory for it, or no key.
    pub fn apart(&self) -> Result<Option<(Arc<MemoryTransit>, SecretBytes)>, Problem> {
        let Some(transit) = self.transit else { return Ok(None) };
        let kek = self.kek.ok_or_else(|| internal("the VM has no key here"))?;
        Ok(Some((Arc::clone(transit), kek.try_clone().map_err(internal)?)))
    }
}
