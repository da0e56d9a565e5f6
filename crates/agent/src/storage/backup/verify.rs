//! Checking a backup: its manifest, each block, that the key opens each disk, and that a TPM loads what it kept. No guest is
//! needed.

use std::fs::File;
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::host::backup::{BackedUpDisk, BackupManifest, BackupPlace};
use vmseal_api::host::{KeyReference, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::chain::Opened;
use super::directory::in_memory;
use super::manifest::{Key, check};
use super::tpm::{self, Trying};
use crate::filter::Volume;
use crate::hypervisor::tpm::Swtpm;
use crate::keys;
use crate::process::users::Slot;
use crate::storage::builder::{self, DiskBuilder, internal};
use crate::storage::exporting;
use crate::storage::facts::of_disk;
use crate::storage::opening::{data_offset, header_problem};

/// A backup to verify.
pub struct Verifying {
    /// The VM.
    pub spec: VmSpec,
    /// Where the backup is.
    pub place: BackupPlace,
    /// The key that it opens with; none where it is in the clear.
    pub opens_with: Option<KeyReference>,
    /// That key, or the VM's.
    pub key: Option<(KeyReference, SecretBytes)>,
    /// What filters need.
    pub builder: DiskBuilder,
    /// What loads what a TPM kept.
    pub swtpm: Swtpm,
}

impl Verifying {
    /// Reads all of it. `progress` receives the bytes done and the total.
    ///
    /// # Errors
    /// `damaged`, `locked`, `key-mismatch`, `not-found`, `cancelled`; `unsupported` for one with a TPM, on a host without swtpm.
    pub async fn run(
        self,
        progress: impl Fn(u64, u64) + Send + Sync,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<BackupManifest, Problem> {
        let read = tokio::select! {
            read = self.read(progress) => read,
            Ok(()) = cancelled => {
                Err(Problem::new(ErrorCode::Cancelled, "the verification was cancelled"))
            }
        };
        if read.is_err()
            && let Err(error) = self.builder.directory.sweep().await
        {
            tracing::warn!(%error, "the filter of a verification is left");
        }
        read
    }

    async fn read(
        &self,
        progress: impl Fn(u64, u64) + Send + Sync,
    ) -> Result<BackupManifest, Problem> {
        let slot = self.builder.users.take().ok_or_else(builder::too_many)?;
        self.builder.directory.renew().await.map_err(internal)?;
        let (place, allowed) = (self.place.clone(), self.builder.transfer.clone());
        let opened = spawn_blocking(move || Opened::open(&place, &allowed)).await;
        let opened = Arc::new(opened.map_err(internal)??);
        let key = self.key.as_ref().map(|(reference, kek)| Key { reference, kek });
        check(&opened.manifest, self.opens_with.as_ref(), key)?;
        if opened.manifest.disks.iter().any(|disk| disk.tpm.is_some()) {
            self.swtpm.examine()?;
        }
        let total = opened.manifest.disks.iter().map(|disk| disk.length).sum();
        let mut before = 0;
        for disk in &opened.manifest.disks {
            let shown = |done, _| progress(before + done, total);
            self.check_blocks(&opened, disk, &slot, shown).await?;
            let dek = self.check_header(&opened, disk, &slot).await?;
            self.check_tpm(&opened, disk, dek, &slot).await?;
            before += disk.length;
            progress(before, total);
        }
        Ok(opened.manifest.clone())
    }

    async fn check_blocks(
        &self,
        opened: &Arc<Opened>,
        disk: &BackedUpDisk,
        slot: &Slot,
        progress: impl Fn(u64, u64) + Send + Sync,
    ) -> Result<(), Problem> {
        let (of, all) = (disk.clone(), Arc::clone(opened));
        let open = move || {
            let sums = all.backups.scratch(of.length)?;
            let to_read = all.to_read(&of, of.length, (&sums, Volume::Sums), Some(&sums))?;
            Ok::<_, Problem>((sums, to_read))
        };
        let (sums, to_read) = spawn_blocking(open).await.map_err(internal)??;
        let damaged = |message| Problem::new(ErrorCode::Damaged, message);
        exporting::run(self.spec.vm, to_read, &self.builder, slot, progress, damaged).await?;
        let (of, all) = (disk.clone(), Arc::clone(opened));
        spawn_blocking(move || all.compare(&of, &sums)).await.map_err(internal)?
    }

    /// Has a TPM load what it kept, where the disk is that of one.
    async fn check_tpm(
        &self,
        opened: &Arc<Opened>,
        disk: &BackedUpDisk,
        dek: Option<SecretBytes>,
        slot: &Slot,
    ) -> Result<(), Problem> {
        let (of, all) = (disk.clone(), Arc::clone(opened));
        let kept = spawn_blocking(move || tpm::read(&all, &of)).await.map_err(internal)??;
        let Some((state, dek)) = kept.zip(dek) else { return Ok(()) };
        let trying = Trying { swtpm: self.swtpm.clone(), disk: disk.clone(), dek, state };
        trying.run(&self.builder.directory, slot).await
    }

    /// Checks that the key opens an encrypted disk, and returns the disk's key.
    async fn check_header(
        &self,
        opened: &Arc<Opened>,
        disk: &BackedUpDisk,
        slot: &Slot,
    ) -> Result<Option<SecretBytes>, Problem> {
        let length = data_offset(&disk.facts);
        if length == 0 {
            return Ok(None);
        }
        let header = in_memory().map_err(internal)?;
        // The header says how long its image is.
        header.set_len(disk.length).map_err(internal)?;
        let to_read = opened.to_read(disk, length, (&header, Volume::Raw), None)?;
        let damaged = |message| Problem::new(ErrorCode::Damaged, message);
        exporting::run(self.spec.vm, to_read, &self.builder, slot, |_, _| {}, damaged).await?;
        let Some((reference, kek)) = &self.key else { return Ok(None) };
        open_header(self.spec.vm, &header, disk, Key { reference, kek })
    }
}

/// Opens the header of a disk; returns the disk's key, if it is encrypted.
///
/// # Errors
/// `damaged`, `key-mismatch`.
pub(super) fn open_header(
    vm: VmId,
    header: &File,
    disk: &BackedUpDisk,
    key: Key<'_>,
) -> Result<Option<SecretBytes>, Problem> {
    unlocked_header(vm, header, disk, key).map(|opened| opened.map(|opened| opened.dek))
}

/// The same, with what holes mean.
///
/// # Errors
/// As [`open_header`].
pub(super) fn unlocked_header(
    vm: VmId,
    header: &File,
    disk: &BackedUpDisk,
    key: Key<'_>,
) -> Result<Option<vmseal_luks::Opened>, Problem> {
    let size = disk.length - data_offset(&disk.facts);
    let Some(facts) = of_disk(disk.disk, size, &disk.facts) else { return Ok(None) };
    let opened = vmseal_luks::open(header, &facts, key.kek, &keys::context(vm, key.reference));
    opened.map(Some).map_err(|error| header_problem(&disk.name, &error))
}
