//! Restoring disks of a VM that is off from a backup: new images beside the disks', which take their places when they are
//! whole, flushed and open with the VM's key.
//!
//! ```text
//!  made ─► filled by a filter ─► compared with its sums ─► room ─► opened, flushed ─► named
//!     └──────── whatever dies before the name: it is removed, and another attempt makes it anew
//! ```
//! Room is taken at that point only for a preallocated disk on a pool: zeroes are written where the backup has no data
//! ([`preallocation`]). In a directory it is taken when the image is made.
//!
//! Of a backup of another VM each image gets a header of its own in the place of the one that came with it: a header is of one disk, whose
//! id is in its codes. The data stays as it is, and so does its key (DEK): the header says that others may have that.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::pin::{Pin, pin};
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::atomic_file;
use vmseal_api::host::backup::{BackedUpDisk, BackupManifest, BackupPlace};
use vmseal_api::host::{DiskRole, DiskSpec, KeyReference, RestoredFrom, VmSpec};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_luks::Identity;
use vmseal_secret::SecretBytes;

use super::chain::Opened;
use super::manifest::{Key, check};
use super::tpm;
use super::verify::{open_header, unlocked_header};
use crate::filter::{self, Volume};
use crate::keys;
use crate::process::users::Slot;
use crate::rules;
use crate::storage::builder::{self, DiskBuilder, internal, is_preallocated};
use crate::storage::export::full_or_internal;
use crate::storage::exporting;
use crate::storage::facts::{from_api, role_of, to_api};
use crate::storage::file_error::failed;
use crate::storage::gate::asked;
use crate::storage::home::Home;
use crate::storage::image_notes::{Noted, is_encrypted};
use crate::storage::layers;
use crate::storage::mirror::Mirror;
use crate::storage::opening::{data_offset, header_problem};
use crate::storage::preallocation;
use crate::storage::replica;
use crate::storage::{tpm_place, tpm_state};

/// How much of a header is overwritten at a time, in bytes: few calls, and little memory.
const WIPED_AT_ONCE: usize = 1 << 20;

/// Disks to restore.
pub struct Restoring {
    /// The VM.
    pub spec: VmSpec,
    /// Its disks that are restored.
    pub disks: Vec<DiskSpec>,
    /// The task.
    pub task: TaskId,
    /// Where the backup is.
    pub place: BackupPlace,
    /// The VM that it is of, where that is another one.
    pub from: Option<RestoredFrom>,
    /// Whether others have its data keys.
    pub shared: bool,
    /// The key that the backup opens with; none where it is in the clear.
    pub opens_with: Option<KeyReference>,
    /// The VM's KEK, where it has a key.
    pub kek: Option<SecretBytes>,
    /// The backup's key, where that is not the VM's.
    pub other: Option<(KeyReference, SecretBytes)>,
    /// What filters need.
    pub builder: DiskBuilder,
}

/// A new image.
struct Part {
    file: File,
    sums: File,
    entry: BackedUpDisk,
}

impl Restoring {
    /// The key of the backup.
    fn key(&self) -> Option<Key<'_>> {
        let other = self.other.as_ref().map(|(reference, kek)| Key { reference, kek });
        other.or_else(|| self.vm_key())
    }

    fn vm_key(&self) -> Option<Key<'_>> {
        let (reference, kek) = self.spec.key.as_ref().zip(self.kek.as_ref())?;
        Some(Key { reference, kek })
    }

    /// The VM that was backed up.
    fn backed_up(&self) -> VmId {
        self.place.vm
    }

    /// What the backup has of a disk.
    fn entry<'a>(&self, opened: &'a Opened, disk: DiskId) -> Result<&'a BackedUpDisk, Problem> {
        let from = self.from.as_ref().and_then(|from| from.disks.get(&disk)).copied();
        opened.disk(from.unwrap_or(disk))
    }

    /// Checks what can be checked before anything is written. Blocks.
    ///
    /// # Errors
    /// `not-found`, `damaged`, `locked`, `wrong-state`, `invalid-request`.
    pub fn check(&self) -> Result<(), Problem> {
        let opened = Opened::open(&self.place, &self.builder.transfer)?;
        check(&opened.manifest, self.opens_with.as_ref(), self.key())?;
        self.disks.iter().try_for_each(|disk| self.fits(disk, self.entry(&opened, disk.disk)?))
    }

    /// Checks that what the backup has of a disk can be the disk.
    fn fits(&self, disk: &DiskSpec, entry: &BackedUpDisk) -> Result<(), Problem> {
        let home = Home::of(&disk.datastore, self.spec.vm)?;
        layers::read(&home, disk.disk)?.are_none(&self.spec, disk)?;
        if let Some(mirror) = Mirror::find(&home, disk.disk)? {
            return Err(rules::other_mirror(disk, mirror.task()));
        }
        let header = data_offset(&entry.facts);
        if (header > 0) != disk.encrypted {
            let (then, now) = if disk.encrypted {
                ("in the clear", "encrypted")
            } else {
                ("encrypted", "not encrypted")
            };
            let what = format!("disk '{}' is {then} in the backup, and is {now} now", disk.name);
            return Err(Problem::new(ErrorCode::WrongState, what));
        }
        if entry.length - header > disk.size {
            let what =
                format!("disk '{}' is smaller than it was in the backup: grow it first", disk.name);
            return Err(Problem::new(ErrorCode::WrongState, what));
        }
        Ok(())
    }

    /// Writes and flushes the new images. `progress` receives the bytes done and the total.
    ///
    /// # Errors
    /// The problem; nothing is left then.
    pub async fn run(
        self,
        progress: impl Fn(u64, u64) + Send + Sync,
        cancelled: oneshot::Receiver<()>,
    ) -> Result<BackupManifest, Problem> {
        let this = Arc::new(self);
        let asked = pin!(asked(cancelled));
        let written = Arc::clone(&this).write(progress, asked).await;
        if written.is_err() {
            // The filter first: it has the files open.
            if let Err(error) = this.builder.directory.sweep().await {
                tracing::warn!(%error, "the filter of a restore is left");
            }
            let removed = spawn_blocking(move || discard_restored(&this.spec, &this.disks));
            if let Err(problem) = removed.await.map_err(internal).flatten() {
                tracing::warn!(%problem, "an unfinished image is left");
            }
        }
        written
    }

    async fn write(
        self: Arc<Self>,
        progress: impl Fn(u64, u64) + Send + Sync,
        mut asked: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<BackupManifest, Problem> {
        let slot = self.builder.users.take().ok_or_else(builder::too_many)?;
        // A filter of an earlier attempt is ended, which releases the images.
        self.builder.directory.renew().await.map_err(internal)?;
        let this = Arc::clone(&self);
        let opened = spawn_blocking(move || {
            let opened = Opened::open(&this.place, &this.builder.transfer)?;
            check(&opened.manifest, this.opens_with.as_ref(), this.key())?;
            Ok::<_, Problem>(opened)
        });
        let opened = Arc::new(opened.await.map_err(internal)??);
        let bytes = self.disks.iter().map(|disk| {
            self.entry(&opened, disk.disk).map(|entry| entry.length + room_after(disk, entry))
        });
        let total = bytes.sum::<Result<u64, _>>()?;
        let mut before = 0;
        for at in 0..self.disks.len() {
            let shown = |done: u64| progress(before + done, total);
            let of = (&opened, at);
            let done = Arc::clone(&self).restore(of, &slot, shown, asked.as_mut()).await?;
            before += done;
            progress(before, total);
        }
        Ok(opened.manifest.clone())
    }

    /// Writes the new image of a disk, and gives it its name; how many bytes that were, with those that were written for room. `progress`
    /// receives how many are done. Where it is `asked` to stop, its thread has ended when this returns.
    async fn restore(
        self: Arc<Self>,
        (opened, at): (&Arc<Opened>, usize),
        slot: &Slot,
        progress: impl Fn(u64) + Send + Sync,
        mut asked: Pin<&mut (impl Future<Output = ()> + Send)>,
    ) -> Result<u64, Problem> {
        let (this, all) = (Arc::clone(&self), Arc::clone(opened));
        let begun = spawn_blocking(move || this.begin(&all, at));
        let (to_read, part) = begun.await.map_err(internal)??;
        let copied = part.entry.length;
        tokio::select! {
            filled = self.fill(to_read, at, slot, |done, _| progress(done)) => filled?,
            () = asked.as_mut() => return Err(cancelled()),
        }
        let all = Arc::clone(opened);
        let compare = move || all.compare(&part.entry, &part.sums).map(|()| part);
        let part = spawn_blocking(compare).await.map_err(internal)??;
        let room = room_after(&self.disks[at], &part.entry);
        if room > 0 {
            let shown = |done: u64, _: u64| progress(copied + done);
            let gate = &self.builder.gate;
            let taken = gate.close_when(asked, self.room(at, &part)?.take(gate, shown)).await;
            taken.unwrap_or_else(|| Err(cancelled()))?;
        }
        let (this, all) = (Arc::clone(&self), Arc::clone(opened));
        spawn_blocking(move || this.finish(&all, at, part)).await.map_err(internal)??;
        Ok(copied + room)
    }

    /// Makes the new image of a disk, empty, and what a filter needs to fill it.
    fn begin(&self, opened: &Opened, at: usize) -> Result<(filter::Disk, Part), Problem> {
        let disk = &self.disks[at];
        let entry = self.entry(opened, disk.disk)?.clone();
        self.fits(disk, &entry)?;
        let home = Home::of(&disk.datastore, self.spec.vm)?;
        let path = home.restoring(disk.disk);
        discard_restored(&self.spec, std::slice::from_ref(disk))?;
        let length = data_offset(&entry.facts) + disk.size;
        home.check_room(if is_preallocated(disk) { length } else { room(opened, &entry)? })?;
        let file = home.open_or_make(&self.spec, &disk.datastore, &path)?;
        file.set_len(length).map_err(|error| failed(&path, "made", &error))?;
        if is_preallocated(disk) && room_after(disk, &entry) == 0 {
            home.allocate(disk.disk, &file, 0..length)?;
        }
        let sums = opened.backups.scratch(entry.length)?;
        let to_read = opened.to_read(&entry, entry.length, (&file, Volume::Raw), Some(&sums))?;
        Ok((to_read, Part { file, sums, entry }))
    }

    /// Has a filter fill the new image of a disk.
    async fn fill(
        &self,
        to_read: filter::Disk,
        at: usize,
        slot: &Slot,
        progress: impl Fn(u64, u64) + Send,
    ) -> Result<(), Problem> {
        let home = Home::of(&self.disks[at].datastore, self.spec.vm)?;
        let datastore = home.datastore().to_owned();
        let explain = |message| full_or_internal(&datastore, message);
        let filled = exporting::run(self.spec.vm, to_read, &self.builder, slot, progress, explain);
        filled.await.map(drop)
    }

    /// The image of a disk, filled, which has its room to get.
    fn room(&self, at: usize, part: &Part) -> Result<preallocation::Room, Problem> {
        let disk = &self.disks[at];
        let home = Home::of(&disk.datastore, self.spec.vm)?;
        let image = part.file.try_clone().map_err(internal)?;
        Ok(preallocation::Room { home, disk: disk.disk, image })
    }

    /// Opens the new image of a disk, flushes it and gives it its name.
    fn finish(&self, opened: &Opened, at: usize, part: Part) -> Result<(), Problem> {
        let Part { mut file, entry, .. } = part;
        let disk = &self.disks[at];
        let home = Home::of(&disk.datastore, self.spec.vm)?;
        self.unlock(disk, &entry, &mut file)?;
        let (here, encrypted) = (&disk.datastore, is_encrypted(&entry.facts));
        Noted { here, vm: self.spec.vm, disk: disk.disk, encrypted }.note(&file);
        file.sync_all().map_err(internal)?;
        if let Some(state) = tpm::read(opened, &entry)? {
            let path = home.restored_tpm(disk.disk, self.task);
            let written = atomic_file::write(&path, &state, atomic_file::PRIVATE);
            written.map_err(|error| failed(&path, "written", &error))?;
        }
        // With this name it is whole.
        let (from, to) = (home.restoring(disk.disk), home.restored(disk.disk, self.task));
        std::fs::rename(&from, &to)
            .and_then(|()| atomic_file::flush_directory_of(&to))
            .map_err(|error| failed(&from, "renamed", &error))
    }

    /// Opens an image with its key, and has the VM's key open it alone.
    fn unlock(
        &self,
        disk: &DiskSpec,
        entry: &BackedUpDisk,
        file: &mut File,
    ) -> Result<(), Problem> {
        let Some(facts) = from_api(disk, &entry.facts) else { return Ok(()) };
        let (Some(key), Some(vm_key)) = (self.key(), self.vm_key()) else {
            let what = format!("disk '{}' is locked: its key is not on this host", disk.name);
            return Err(Problem::new(ErrorCode::Locked, what));
        };
        if self.from.is_some() {
            return self.renew_header(disk, entry, file, (key, vm_key));
        }
        drop(open_header(self.spec.vm, file, entry, key)?);
        let cannot = |error| header_problem(&disk.name, &error);
        let held = (key.kek, &keys::context(self.spec.vm, key.reference));
        let wanted = keys::context(self.spec.vm, vm_key.reference);
        if key.reference != vm_key.reference {
            // A change of the key that was under way then may have left another one, and there is room for one only.
            vmseal_luks::drop_other_keks(file, &facts, held.0, held.1).map_err(cannot)?;
            vmseal_luks::add_kek(file, &facts, held, (vm_key.kek, &wanted)).map_err(cannot)?;
        }
        vmseal_luks::drop_other_keks(file, &facts, vm_key.kek, &wanted).map_err(cannot)?;
        if self.shared {
            vmseal_luks::mark_shared(file, &facts, vm_key.kek, &wanted).map_err(cannot)?;
        }
        Ok(())
    }

    /// Has the image of another VM's disk begin with a header of this one's, under this VM's key alone.
    fn renew_header(
        &self,
        disk: &DiskSpec,
        entry: &BackedUpDisk,
        file: &mut File,
        (key, vm_key): (Key<'_>, Key<'_>),
    ) -> Result<(), Problem> {
        let opened = unlocked_header(self.backed_up(), file, entry, key)?;
        let Some(opened) = opened else { return Ok(()) };
        let path = Home::of(&disk.datastore, self.spec.vm)?.restoring(disk.disk);
        // The old one has the data key under the other VM's key, and is not overwritten by a new one.
        wipe(file, data_offset(&entry.facts)).map_err(|error| failed(&path, "written", &error))?;
        let context = keys::context(self.spec.vm, vm_key.reference);
        // The VM that was backed up has the same data key, and so has each other VM that is made of this backup.
        let identity = Identity {
            disk: disk.disk.0,
            holes: opened.holes,
            shared: true,
            role: role_of(&self.spec, disk),
        };
        let (dek, kek) = (&opened.dek, vm_key.kek);
        let made = vmseal_luks::create(file, disk.size, dek, kek, &context, identity);
        let made = made.map_err(|error| header_problem(&disk.name, &error))?;
        if to_api(&made) != entry.facts {
            let what = format!(
                "disk '{}' is encrypted in a form of another version of vmseal, whose headers this one does not make: restore it into the VM that was backed up",
                disk.name
            );
            return Err(Problem::new(ErrorCode::Unsupported, what));
        }
        let opens = vmseal_luks::open(&*file, &made, kek, &context);
        opens.map(drop).map_err(|error| header_problem(&disk.name, &error))
    }
}

fn cancelled() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the restore was cancelled")
}

/// How many bytes of a new image get their room after the data is there, step by step; none where they have it before, or are to have none.
fn room_after(disk: &DiskSpec, entry: &BackedUpDisk) -> u64 {
    let is_written = preallocation::is_written(&disk.datastore.location, disk);
    if is_written { data_offset(&entry.facts) + disk.size } else { 0 }
}

/// Overwrites the first `length` bytes of a file with zeroes.
fn wipe(file: &File, length: u64) -> io::Result<()> {
    let zeroes = vec![0; WIPED_AT_ONCE];
    let mut at = 0;
    while at < length {
        let part = usize::try_from(length - at).unwrap_or(WIPED_AT_ONCE).min(WIPED_AT_ONCE);
        file.write_all_at(&zeroes[..part], at)?;
        at += part as u64;
    }
    Ok(())
}

/// The room that an image needs: that of all files that it is made of, at most.
fn room(opened: &Opened, entry: &BackedUpDisk) -> Result<u64, Problem> {
    let mut room = entry.bytes;
    let mut parent = opened.manifest.parent;
    let mut looked_at = 0;
    while let Some(id) = parent
        && looked_at < vmseal_api::limits::BACKUP_CHAIN_MAX
    {
        let Some(manifest) = opened.backups.manifest(id)? else { break };
        let below = manifest.disks.iter().find(|it| it.disk == entry.disk);
        room = room.saturating_add(below.map_or(0, |it| it.bytes));
        (parent, looked_at) = (manifest.parent, looked_at + 1);
    }
    Ok(room.min(entry.length))
}

/// Puts restored images in the place of those of disks, one after the other, and what a TPM kept in the place of what it keeps. One that is there already stays. Blocks.
///
/// # Errors
/// `not-found` when no disk has a restored image; those of the file system.
pub fn use_restored(spec: &VmSpec, disks: &[DiskSpec], task: TaskId) -> Result<(), Problem> {
    let mut found = false;
    for disk in disks {
        let home = Home::of(&disk.datastore, spec.vm)?;
        if disk.role == DiskRole::Tpm {
            tpm_place::settle_at_rest(spec, disk)?;
        }
        // First what a TPM kept: a disk of a TPM without it has lost it.
        found |= tpm_state::put(&home.tpm_state(disk.disk), &home.restored_tpm(disk.disk, task))?;
        let (from, to) = (home.restored(disk.disk, task), home.image(disk.disk));
        // Before the image: its replica has what the disk holds now.
        replica::copy_again(&home, disk.disk)?;
        match std::fs::rename(&from, &to) {
            Ok(()) => found = true,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(&from, "renamed", &error)),
        }
        atomic_file::flush_directory_of(&to).map_err(|error| failed(&to, "renamed", &error))?;
    }
    if found {
        return Ok(());
    }
    let what = "there is no restored image of any disk: restore them again";
    Err(Problem::new(ErrorCode::NotFound, what))
}

/// Removes restored images that are not used. Blocks.
///
/// # Errors
/// `in-use`; those of the file system.
pub fn discard_restored(spec: &VmSpec, disks: &[DiskSpec]) -> Result<(), Problem> {
    disks.iter().try_for_each(|disk| {
        let home = Home::of(&disk.datastore, spec.vm)?;
        home.all_restored(disk.disk).iter().try_for_each(|path| home.remove(path))
    })
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{Allocation, DatastoreLocation, DatastoreSpec, DiskFacts};
    use vmseal_api::transfer::ImageFormat;

    use super::*;

    #[test]
    fn an_image_on_a_pool_gets_its_room_when_the_data_is_there() {
        let thick =
            DiskSpec { allocation: Allocation::Preallocated, ..crate::rules::tests::disk("data") };
        let thin = DiskSpec { allocation: Allocation::Thin, ..thick.clone() };
        let entry = BackedUpDisk {
            disk: thick.disk,
            name: "data".to_owned(),
            file: "data.raw".to_owned(),
            format: ImageFormat::Raw,
            // The disk has grown since.
            length: thick.size / 2,
            bytes: 0,
            facts: DiskFacts::Raw,
            sums: "data.sums".to_owned(),
            sums_sha256: String::new(),
            tpm: None,
        };
        let on_a_pool = |disk: &DiskSpec| {
            let (path, pool) = ("/ceph".into(), Box::new(crate::storage::pool::tests::pool()));
            let location = DatastoreLocation::Rbd { path, pool };
            let datastore = DatastoreSpec { location, ..disk.datastore.clone() };
            DiskSpec { datastore, ..disk.clone() }
        };
        assert_eq!(room_after(&on_a_pool(&thick), &entry), thick.size);
        assert_eq!(room_after(&on_a_pool(&thin), &entry), 0);
        assert_eq!(room_after(&thick, &entry), 0, "it has it before in a directory");
    }

    #[test]
    fn a_header_is_wiped_and_nothing_else() {
        for length in [1, WIPED_AT_ONCE + 1, 2 * WIPED_AT_ONCE] {
            let file = tempfile::tempfile().unwrap();
            let all = 3 * WIPED_AT_ONCE;
            file.write_all_at(&vec![7; all], 0).unwrap();
            wipe(&file, length as u64).unwrap();
            let mut read = vec![1; all];
            file.read_exact_at(&mut read, 0).unwrap();
            assert!(read[..length].iter().all(|byte| *byte == 0), "{length}");
            assert!(read[length..].iter().all(|byte| *byte == 7), "{length}");
            assert_eq!(file.metadata().unwrap().len(), all as u64);
        }
    }
}
