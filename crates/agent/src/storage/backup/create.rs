//! Writing a backup: what a snapshot keeps of each disk, as it is, or what has changed of that since the backup below.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::filter::{Extent, SUM_BLOCK, SUM_LEN};
use vmseal_api::host::backup::{BackedUpDisk, BackupManifest, BackupPlace};
use vmseal_api::host::{BackupJob, DiskFacts, DiskRole, DiskSpec, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;
use vmseal_api::transfer::ImageFormat;
use vmseal_qcow2::{Below, create_overlay};
use vmseal_secret::SecretBytes;
use vmseal_secret::digest::sha256;

use super::chain::{Opened, sha256_of};
use super::directory::{Backups, Unfinished, in_memory};
use super::manifest::{Key, check, manifest_of};
use super::tpm::{self, TpmToKeep};
use crate::filter::{self, Sums, Volume, Work};
use crate::process::users::Slot;
use crate::storage::builder::{self, DiskBuilder, internal};
use crate::storage::export::full_or_internal;
use crate::storage::exporting;
use crate::storage::file_error::failed;
use crate::storage::holes::next_data;
use crate::storage::mark::usage;
use crate::storage::opening::{self, Open};

/// A backup to write.
pub struct Creating {
    /// The VM.
    pub spec: VmSpec,
    /// Its disks that are in the backup, with what is pinned of them; those beside the snapshot, too.
    pub disks: Vec<(DiskSpec, DiskFacts)>,
    /// The VM's KEK, where it has one.
    pub kek: Option<SecretBytes>,
    /// The job.
    pub job: BackupJob,
    /// What filters need.
    pub builder: DiskBuilder,
    /// What its guest may have changed of disks since the backup below, as extents, where that is known.
    pub changed: BTreeMap<DiskId, File>,
    /// Whether the VM is suspended: the memory of its guest is not in the backup.
    pub suspended: bool,
    /// What the VM's TPM kept when the snapshot was taken, where this agent has taken it.
    pub tpm: Option<Arc<TpmToKeep>>,
}

/// A backup that has begun.
struct Begun {
    backups: Backups,
    files: Unfinished,
    parent: Option<Opened>,
}

/// A disk whose files are there and empty.
struct Part {
    to_read: filter::Disk,
    file: File,
    sums: File,
    entry: BackedUpDisk,
}

impl Creating {
    fn place(&self) -> BackupPlace {
        let (directory, vm) = (self.job.directory.clone(), self.spec.vm);
        BackupPlace { directory, vm, backup: self.job.backup }
    }

    /// Checks what can be checked before anything is written: the directory, and the backup below. Blocks.
    ///
    /// # Errors
    /// `invalid-request`, `not-found`, `damaged`.
    pub fn check(&self) -> Result<(), Problem> {
        let (place, allowed) = (self.place(), &self.builder.transfer);
        Backups::find(&place, allowed)?;
        self.parent(&place).map(drop)
    }

    fn parent(&self, place: &BackupPlace) -> Result<Option<Opened>, Problem> {
        let of = |backup| BackupPlace { backup, ..place.clone() };
        let parent =
            self.job.parent.map(|backup| Opened::open(&of(backup), &self.builder.transfer));
        parent.transpose().map_err(|problem| {
            let what = format!("{problem}. Make a full backup instead (--full)");
            Problem { detail: what, ..problem }
        })
    }

    /// Writes and flushes the backup, without its name. `progress` receives the bytes done and the total. Also returns how many
    /// bytes of the disks were read, unless it was written before.
    ///
    /// # Errors
    /// The problem; nothing is left then.
    pub async fn run(
        self,
        progress: impl Fn(u64, u64) + Send + Sync,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<(BackupManifest, Option<u64>), Problem> {
        let this = Arc::new(self);
        let written = tokio::select! {
            written = Arc::clone(&this).write(progress) => written,
            Ok(()) = cancelled => {
                Err(Problem::new(ErrorCode::Cancelled, "the backup was cancelled"))
            }
        };
        if written.is_err() {
            // The filter first: it has the files open.
            if let Err(error) = this.builder.directory.sweep().await {
                tracing::warn!(backup = %this.job.backup, %error, "the filter of a backup is left");
            }
            let removed = spawn_blocking(move || {
                let found = Backups::find(&this.place(), &this.builder.transfer)?;
                found.map_or(Ok(()), |backups| backups.remove_unfinished(this.job.backup))
            });
            if let Err(problem) = removed.await.map_err(internal).flatten() {
                tracing::warn!(%problem, "an unfinished backup is left");
            }
        }
        written
    }

    async fn write(
        self: Arc<Self>,
        progress: impl Fn(u64, u64) + Send + Sync,
    ) -> Result<(BackupManifest, Option<u64>), Problem> {
        let slot = self.builder.users.take().ok_or_else(builder::too_many)?;
        // A filter of an earlier attempt is ended.
        self.builder.directory.renew().await.map_err(internal)?;
        let this = Arc::clone(&self);
        let begun = spawn_blocking(move || this.begin()).await.map_err(internal)??;
        let begun = match begun {
            Ok(begun) => Arc::new(begun),
            Err(there) => return Ok((there, None)),
        };
        let total =
            self.disks.iter().map(|(disk, facts)| opening::data_offset(facts) + disk.size).sum();
        let (mut entries, mut before, mut read) = (Vec::new(), 0, 0);
        for group in self.groups() {
            let (this, all) = (Arc::clone(&self), Arc::clone(&begun));
            let open = move || {
                group.into_iter().map(|at| Ok((at, this.open(&all, at)?))).collect::<Result<_, _>>()
            };
            let parts = spawn_blocking(open).await.map_err(internal)??;
            let shown = |done, _| progress(before + done, total);
            let (copied, read_of_group) = self.copy(parts, &slot, shown).await?;
            read += read_of_group;
            before += copied.iter().map(|(_, entry)| entry.length).sum::<u64>();
            progress(before, total);
            entries.extend(copied);
        }
        // In the order of the VM's disks.
        entries.sort_by_key(|(at, _)| *at);
        let entries = entries.into_iter().map(|(_, entry)| entry).collect();
        let finished = spawn_blocking(move || self.finish(&begun, entries));
        Ok((finished.await.map_err(internal)??, Some(read)))
    }

    /// The places of the disks that one filter copies: one after the other, as each may be large. Those that no guest writes to are
    /// small, and go with the first: the start of a process takes longer.
    fn groups(&self) -> Vec<Vec<usize>> {
        let is_beside = |at: &usize| self.job.beside.contains(&self.disks[*at].0.disk);
        let (beside, written): (Vec<usize>, Vec<usize>) =
            (0..self.disks.len()).partition(is_beside);
        let mut groups: Vec<_> = written.into_iter().map(|at| vec![at]).collect();
        match groups.first_mut() {
            Some(first) => first.extend(beside),
            None => groups.push(beside),
        }
        groups
    }

    /// Begins the backup; one that an attempt before has finished is returned as it is.
    fn begin(&self) -> Result<Result<Begun, BackupManifest>, Problem> {
        let place = self.place();
        let backups = Backups::find_or_make(&place, &self.builder.transfer)?;
        if let Some(there) = backups.manifest(place.backup)? {
            return Ok(Err(there));
        }
        let parent = self.parent(&place)?;
        let files = backups.begin(place.backup)?;
        Ok(Ok(Begun { backups, files, parent }))
    }

    /// Opens a disk, and makes its files.
    fn open(&self, begun: &Begun, at: usize) -> Result<Part, Problem> {
        let (disk, facts) = &self.disks[at];
        let opened = if self.job.beside.contains(&disk.disk) {
            opening::open_sealed_beside(&self.spec, disk, facts)
        } else {
            opening::open_sealed_kept(&self.spec, disk, facts, self.job.snapshot)
        };
        let (Open { file: image, layers, shared, .. }, length) = opened?;
        let below = self.below(begun.parent.as_ref(), disk, facts, length)?;
        if below.is_none() {
            check_room(begun, length, [&image].into_iter().chain(&layers))?;
        }
        let tpm = match disk.role {
            DiskRole::Tpm => Some(tpm::write(&begun.files, &self.spec, disk, self.tpm.as_deref())?),
            _ => None,
        };
        let (extension, format) = match (&below, facts) {
            (Some(_), _) => ("qcow2", ImageFormat::Qcow2),
            (None, DiskFacts::Raw) => ("raw", ImageFormat::Raw),
            (None, _) => ("luks", ImageFormat::Raw),
        };
        let entry = BackedUpDisk {
            disk: disk.disk,
            name: disk.name.clone(),
            file: format!("{}.{extension}", disk.name),
            format,
            length,
            bytes: 0,
            facts: facts.clone(),
            sums: format!("{}.sums", disk.name),
            tpm,
            sums_sha256: String::new(),
        };
        let (file, sums) = (begun.files.make(&entry.file)?, begun.files.make(&entry.sums)?);
        let cannot = |error| failed(&begun.backups.shown(self.job.backup), "written", &error);
        let mut changed = None;
        let (format, except) = match below {
            Some(Lower { name, format, sums }) => {
                changed = self.changed_of(disk.disk, facts, &image, &sums)?;
                let below = Below { name: &name, format: format.name() };
                create_overlay(&file, length, below).map_err(cannot)?;
                (Volume::Overlay, Some(sums))
            }
            None => {
                file.set_len(length).map_err(cannot)?;
                (Volume::Raw, None)
            }
        };
        let (target, written) = (file.try_clone(), sums.try_clone());
        let work = Work::Export {
            target: target.map_err(internal)?,
            format,
            sums: Sums { written: Some(written.map_err(internal)?), except, changed },
        };
        let to_read = filter::Disk {
            disk: disk.disk,
            size: length,
            file: image,
            layers,
            offset: 0,
            key: None,
            shared,
            keeps_room: true,
            work,
            beside: None,
            replica: None,
            mirror: None,
        };
        Ok(Part { to_read, file, sums, entry })
    }

    /// What the overlay of a disk can be above; none where the disk is to be copied whole. With another key it is: the
    /// backups of the former one can be deleted then.
    fn below(
        &self,
        parent: Option<&Opened>,
        disk: &DiskSpec,
        facts: &DiskFacts,
        length: u64,
    ) -> Result<Option<Lower>, Problem> {
        let Some(parent) = parent.filter(|it| it.manifest.vm.key == self.spec.key) else {
            return Ok(None);
        };
        let Ok(entry) = parent.disk(disk.disk) else { return Ok(None) };
        if entry.facts != *facts || entry.length != length {
            return Ok(None);
        }
        let full = |problem: Problem| {
            let detail = format!("{problem}. Make a full backup (--full)");
            Problem { detail, ..problem }
        };
        // What is not copied because of the sums is in these files.
        let key = self.spec.key.as_ref().zip(self.kek.as_ref());
        let key = key.map(|(reference, kek)| Key { reference, kek });
        check(&parent.manifest, self.spec.key.as_ref(), key).map_err(full)?;
        parent.files(entry).map_err(full)?;
        let backup = parent.manifest.backup;
        let sums = parent.backups.file(backup, &entry.sums).map_err(full)?;
        if sha256_of(&sums)? != entry.sums_sha256 {
            let what = format!(
                "the sums of disk '{}' in backup '{}' are damaged",
                disk.name, parent.manifest.name
            );
            return Err(full(Problem::new(ErrorCode::Damaged, what)));
        }
        let name = format!("../{backup}/{}", entry.file);
        Ok(Some(Lower { name, format: entry.format, sums }))
    }

    /// What may have changed of a disk since the backup below: what its guest has changed, and the header, which the agent
    /// writes. None where all may have: with another header the data may be encrypted anew, which is no change of the guest's.
    fn changed_of(
        &self,
        disk: DiskId,
        facts: &DiskFacts,
        image: &File,
        sums: &File,
    ) -> Result<Option<File>, Problem> {
        let Some(of_guest) = self.changed.get(&disk) else { return Ok(None) };
        let header = opening::data_offset(facts);
        if !is_summed(image, header, sums)? {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        let mut part = [0; Extent::LEN];
        let mut at = 0;
        while of_guest.read_exact_at(&mut part, at).is_ok() {
            let extent =
                Extent::from_bytes(part).ok_or_else(|| internal("an extent of nothing"))?;
            bytes.extend(Extent { offset: header + extent.offset, ..extent }.to_bytes());
            at += Extent::LEN as u64;
        }
        let file = in_memory().map_err(internal)?;
        file.write_all_at(&bytes, 0).map_err(internal)?;
        Ok(Some(file))
    }

    /// Has a filter write the files of disks; returns what the manifest says of each, and how many bytes were read of all.
    async fn copy(
        &self,
        parts: Vec<(usize, Part)>,
        slot: &Slot,
        progress: impl Fn(u64, u64) + Send + Sync,
    ) -> Result<(Vec<(usize, BackedUpDisk)>, u64), Problem> {
        let (mut to_read, mut written) = (Vec::new(), Vec::new());
        for (at, Part { to_read: disk, file, sums, entry }) in parts {
            to_read.push(disk);
            written.push((at, file, sums, entry));
        }
        let explain = |message| full_or_internal(&self.job.directory, message);
        let vm = self.spec.vm;
        let run = exporting::run_all(vm, to_read, &self.builder, slot, progress, explain);
        let read = run.await?.values().sum();
        let end = move || {
            // The filter has flushed both.
            let end = |(at, file, sums, entry): (usize, File, File, BackedUpDisk)| {
                let bytes = file.metadata().map_err(internal)?.blocks().saturating_mul(512);
                Ok((at, BackedUpDisk { bytes, sums_sha256: sha256_of(&sums)?, ..entry }))
            };
            Ok((written.into_iter().map(end).collect::<Result<_, Problem>>()?, read))
        };
        spawn_blocking(end).await.map_err(internal)?
    }

    fn finish(&self, begun: &Begun, disks: Vec<BackedUpDisk>) -> Result<BackupManifest, Problem> {
        let kek = self.kek.as_ref();
        let manifest = manifest_of(&self.spec, &self.job, disks, kek, self.suspended)?;
        begun.files.finish(&manifest)?;
        Ok(manifest)
    }
}

/// What an overlay is above.
struct Lower {
    /// The name of its file, relative to that of the overlay.
    name: String,
    format: ImageFormat,
    /// The sums of its blocks.
    sums: File,
}

/// Whether the first bytes of an image, a multiple of the blocks that have sums, are those of these sums.
fn is_summed(image: &File, length: u64, sums: &File) -> Result<bool, Problem> {
    let (mut block, mut sum) = (vec![0; SUM_BLOCK], [0; SUM_LEN]);
    let mut data = next_data(image, 0, length).map_err(internal)?;
    for number in 0..length / SUM_BLOCK as u64 {
        let at = number * SUM_BLOCK as u64;
        if data.as_ref().is_some_and(|data| data.end <= at) {
            data = next_data(image, at, length).map_err(internal)?;
        }
        // Most of a header is a hole.
        let is_hole = data.as_ref().is_none_or(|data| data.start >= at + SUM_BLOCK as u64);
        let found = if is_hole {
            [0; SUM_LEN]
        } else {
            image.read_exact_at(&mut block, at).map_err(internal)?;
            if block.iter().all(|byte| *byte == 0) { [0; SUM_LEN] } else { sha256(&block) }
        };
        sums.read_exact_at(&mut sum, number * SUM_LEN as u64).map_err(internal)?;
        if found != sum {
            return Ok(false);
        }
    }
    Ok(length.is_multiple_of(SUM_BLOCK as u64))
}

fn check_room<'a>(
    begun: &Begun,
    length: u64,
    files: impl Iterator<Item = &'a File>,
) -> Result<(), Problem> {
    let mut needed = 0_u64;
    for file in files {
        needed =
            needed.saturating_add(file.metadata().map_err(internal)?.blocks().saturating_mul(512));
    }
    let needed = needed.min(length);
    let free = usage(begun.backups.path())?.free;
    if needed <= free {
        return Ok(());
    }
    let what = format!(
        "{} are needed for the backup and {} are free: make room, or choose another directory",
        Size(needed),
        Size(free)
    );
    Err(Problem::new(ErrorCode::NoSpace, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_that_of_the_sums_also_where_it_has_holes() {
        let (image, sums) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let blocks = 8;
        let length = blocks * SUM_BLOCK as u64;
        image.set_len(length).unwrap();
        // Two pieces in one block, and one that ends in the middle of another.
        for at in [4096, 40_960, 3 * SUM_BLOCK as u64 + 8192] {
            image.write_all_at(&[7; 4096], at).unwrap();
        }
        let mut block = vec![0; SUM_BLOCK];
        for number in 0..blocks {
            image.read_exact_at(&mut block, number * SUM_BLOCK as u64).unwrap();
            let zeroes = block.iter().all(|byte| *byte == 0);
            let sum = if zeroes { [0; SUM_LEN] } else { sha256(&block) };
            sums.write_all_at(&sum, number * SUM_LEN as u64).unwrap();
        }
        assert!(is_summed(&image, length, &sums).unwrap());
        // Zeroes that are written are as good as a hole, and one other byte is not.
        image.write_all_at(&[0; 4096], 5 * SUM_BLOCK as u64).unwrap();
        assert!(is_summed(&image, length, &sums).unwrap());
        for at in [40_961, 3 * SUM_BLOCK as u64 + 8192, 6 * SUM_BLOCK as u64, length - 1] {
            let mut byte = [0];
            image.read_exact_at(&mut byte, at).unwrap();
            image.write_all_at(&[byte[0] ^ 1], at).unwrap();
            assert!(!is_summed(&image, length, &sums).unwrap(), "at {at}");
            image.write_all_at(&byte, at).unwrap();
        }
    }
}
