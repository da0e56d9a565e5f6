//! Filling a new disk with what a disk of another VM holds, now or at a snapshot. Each has its own key: a filter reads
//! through the one and encrypts under the other.

use std::fs::File;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, SnapshotId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::{SecretBytes, SecretFd};

use crate::filter::{self, Sums, Volume};
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal, is_preallocated};
use crate::storage::exporting;
use crate::storage::locked::Access;
use crate::storage::open;
use crate::storage::opening::{self, Open};

/// A disk that another one is filled from, as the owner of its VM lends it.
pub struct Lent {
    /// Its VM.
    pub spec: VmSpec,
    /// The disk.
    pub disk: DiskSpec,
    /// Its facts.
    pub facts: DiskFacts,
    /// Its VM's KEK, where it is encrypted.
    pub kek: Option<SecretBytes>,
    /// What it held then; none means what it holds, and that nobody writes to it.
    pub snapshot: Option<SnapshotId>,
    /// Whether the new disk stands on it, instead of being filled.
    pub linked: bool,
}

impl Lent {
    /// Opens it for reading. What a snapshot keeps is not changed by the guest, whose filter may have the files. Blocks.
    fn open(&self) -> Result<Open, Problem> {
        let Self { spec, disk, facts, kek, snapshot, .. } = self;
        match snapshot {
            None => open::open(spec, disk, facts, kek.as_ref(), Access::Read),
            Some(snapshot) => opening::open_kept(spec, disk, facts, kek.as_ref(), *snapshot),
        }
    }
}

/// The new disk.
pub struct Target<'a> {
    /// Its VM.
    pub vm: VmId,
    /// The disk.
    pub disk: &'a DiskSpec,
    /// Its image, which reads as zeroes.
    pub file: &'a File,
    /// Where the guest's first byte is in it, in bytes.
    pub offset: u64,
    /// Its DEK.
    pub key: Option<&'a SecretBytes>,
}

impl Target<'_> {
    /// Fills it with what `lent` holds.
    ///
    /// # Errors
    /// The problem of either disk or of the process.
    pub async fn fill(
        &self,
        lent: Lent,
        builder: &DiskBuilder,
        slot: &Slot,
        progress: impl Fn(u64, u64) + Send,
    ) -> Result<(), Problem> {
        if lent.disk.size != self.disk.size {
            let what = format!("disk '{}' has another size than the new one", lent.disk.name);
            return Err(Problem::new(ErrorCode::InvalidRequest, what));
        }
        let directory = &builder.directory;
        directory.renew().await.map_err(internal)?;
        let (from, size) = (lent.disk.disk, lent.disk.size);
        let opened = spawn_blocking(move || lent.open()).await.map_err(internal)??;
        let disk = self.disk(from, size, opened)?;
        exporting::run(self.vm, disk, builder, slot, progress, internal).await.map(drop)
    }

    fn disk(&self, from: DiskId, size: u64, open: Open) -> Result<filter::Disk, Problem> {
        let key: Option<SecretFd> =
            self.key.map(|dek| dek.to_memfd().map_err(internal)).transpose()?;
        let keeps_room = is_preallocated(self.disk);
        Ok(filter::Disk {
            disk: from,
            size,
            file: open.file,
            layers: open.layers,
            offset: open.offset,
            key: open.key,
            shared: open.shared,
            keeps_room: true,
            work: filter::Work::Export {
                target: self.file.try_clone().map_err(internal)?,
                format: Volume::Disk { key, offset: self.offset, keeps_room },
                sums: Sums::default(),
            },
            beside: None,
            replica: None,
            mirror: None,
        })
    }
}
