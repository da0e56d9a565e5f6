//! Making the image of a disk longer. What is added reads as zeroes, and an image that is longer than its disk is
//! opened like another one: so nothing is half done when this ends in the middle.

use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use vmseal_api::host::{DatastoreLocation, DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::builder::{internal, is_preallocated};
use crate::storage::conversion;
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::layers;
use crate::storage::locked::Access;
use crate::storage::mirror;
use crate::storage::opening;

/// How much room of a pool is taken with one call, in bytes. The kernel has the file locked for as long as the zeroes are written: a guest
/// whose data goes by the file, and not by shared memory, cannot write meanwhile.
const POOL_STEP: u64 = 64 << 20;

/// Whether a process of the VM has the image, and its lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// Nobody.
    Nobody,
    /// The filter of its guest, which works on what was there before.
    Filter,
}

/// A disk that is to be longer.
#[derive(Clone, Debug)]
pub struct Growth {
    /// Its VM.
    pub spec: VmSpec,
    /// The disk, as it is.
    pub disk: DiskSpec,
    /// Its facts.
    pub facts: DiskFacts,
    /// Its new size, in bytes.
    pub size: u64,
    /// Who has its image.
    pub holder: Holder,
}

/// The image of a disk that is to be longer.
struct Image {
    home: Home,
    file: File,
    path: PathBuf,
    /// How long it is, in bytes.
    length: u64,
    /// How long it has to be.
    needed: u64,
}

impl Growth {
    /// Makes the image long enough; one that is, stays as it is. `check` sees the open file before it is changed. Blocks.
    ///
    /// # Errors
    /// `not-found`, `no-space`, `in-use` where another process has it; nothing is changed then, but for room that is taken.
    pub fn make(&self, check: impl FnOnce(&File) -> Result<(), Problem>) -> Result<(), Problem> {
        let Image { home, file, path, length, needed } = self.open(check)?;
        if is_preallocated(&self.disk) {
            self.take_room(&home, &file, self.added(needed))?;
        } else if length < needed {
            file.set_len(needed).map_err(|error| failed(&path, "made longer", &error))?;
        }
        file.sync_all().map_err(|error| failed(&path, "flushed", &error))
    }

    fn take_room(&self, home: &Home, file: &File, mut left: Range<u64>) -> Result<(), Problem> {
        let step = match self.disk.datastore.location {
            DatastoreLocation::Rbd { .. } => POOL_STEP,
            DatastoreLocation::Dir { .. } => u64::MAX,
        };
        while !left.is_empty() {
            let part = left.start..left.end.min(left.start.saturating_add(step));
            left.start = part.end;
            home.allocate(self.disk.disk, file, part)?;
        }
        Ok(())
    }

    /// What is behind the disk as it is on record: nobody uses that before it is longer there. The rest has its room, and is left alone: where
    /// room is taken by writing zeroes into holes (a pool), they would land over what the guest writes there meanwhile.
    fn added(&self, needed: u64) -> Range<u64> {
        opening::data_offset(&self.facts).saturating_add(self.disk.size)..needed
    }

    /// Checks that this could be done. Nothing is changed. Blocks.
    ///
    /// # Errors
    /// As [`Growth::make`].
    pub fn examine(&self, check: impl FnOnce(&File) -> Result<(), Problem>) -> Result<(), Problem> {
        match mirror::has_its_names(&self.spec, &self.disk)? {
            true => self.open(check).map(drop),
            false => Ok(()),
        }
    }

    /// Opens the image, and checks that it may grow and has room.
    fn open(&self, check: impl FnOnce(&File) -> Result<(), Problem>) -> Result<Image, Problem> {
        let Self { spec, disk, facts, .. } = self;
        let home = Home::of(&disk.datastore, spec.vm)?;
        mirror::as_it_is(spec, disk, facts, Access::Write)?;
        if self.size != disk.size {
            layers::read(&home, disk.disk)?.are_none(spec, disk)?;
        }
        let path = home.image(disk.disk);
        let file = match self.holder {
            Holder::Nobody if let Some(refused) = conversion::refusal(&home, &spec.name, disk)? => {
                return Err(refused);
            }
            Holder::Nobody => home.open(disk.disk)?.ok_or_else(|| {
                let what = format!("disk '{}' has no image: {}", disk.name, path.display());
                Problem::new(ErrorCode::NotFound, what)
            })?,
            Holder::Filter => OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
                .map_err(|error| failed(&path, "opened", &error))?,
        };
        check(&file)?;
        let length = file.metadata().map_err(internal)?.len();
        let needed = opening::data_offset(facts).saturating_add(self.size);
        if is_preallocated(disk) && length < needed {
            let (vm, name) = (&spec.name, &disk.name);
            let remedy = format!(
                "free some room, or move the disk first (vmseal vm move {vm} --disk {name} --datastore NAME)"
            );
            home.check_room_or(needed - length, &remedy)?;
        }
        Ok(Image { home, file, path, length, needed })
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{Allocation, Device};
    use vmseal_api::request::DISK_SIZE_MAX;

    use super::*;

    fn made(allocation: Allocation) -> (tempfile::TempDir, VmSpec, DiskSpec) {
        let directory = tempfile::tempdir().unwrap();
        let mut disk = crate::rules::tests::disk("data");
        disk.datastore.location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        disk.allocation = allocation;
        crate::storage::datastore::probe(&disk.datastore).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        spec.devices = vec![Device::Disk(disk.clone())];
        let home = Home::of(&disk.datastore, spec.vm).unwrap();
        let file = home.begin(&spec, &disk, disk.size).unwrap();
        home.finish(disk.disk, &file).unwrap();
        (directory, spec, disk)
    }

    fn length(spec: &VmSpec, disk: &DiskSpec) -> u64 {
        let home = Home::of(&disk.datastore, spec.vm).unwrap();
        home.image(disk.disk).metadata().unwrap().len()
    }

    fn growth((spec, disk): (&VmSpec, &DiskSpec), size: u64) -> Growth {
        let (spec, disk, facts) = (spec.clone(), disk.clone(), DiskFacts::Raw);
        Growth { spec, disk, facts, size, holder: Holder::Nobody }
    }

    #[test]
    fn an_image_grows_once_and_never_shrinks() {
        for allocation in [Allocation::Thin, Allocation::Preallocated] {
            let (_directory, spec, disk) = made(allocation);
            for (size, expected) in [(4 << 20, 4 << 20), (4 << 20, 4 << 20), (1 << 20, 4 << 20)] {
                let before = length(&spec, &disk);
                let growth = growth((&spec, &disk), size);
                growth.examine(|_| Ok(())).unwrap();
                assert_eq!(length(&spec, &disk), before, "a question has made it longer");
                growth.make(|_| Ok(())).unwrap();
                assert_eq!(length(&spec, &disk), expected, "{allocation:?}");
            }
        }
    }

    #[test]
    fn what_the_guest_has_already_is_not_touched_when_its_disk_grows() {
        use std::os::unix::fs::MetadataExt;
        let (_directory, spec, disk) = made(Allocation::Preallocated);
        let home = Home::of(&disk.datastore, spec.vm).unwrap();
        let room = || home.image(disk.disk).metadata().unwrap().blocks() * 512;
        // Not even a hole there, which preallocated disks do not have.
        assert_eq!(room(), 0);
        growth((&spec, &disk), 4 << 20).make(|_| Ok(())).unwrap();
        assert_eq!((length(&spec, &disk), room()), (4 << 20, 3 << 20));
        // Asked once more when it is on record.
        let grown = DiskSpec { size: 4 << 20, ..disk.clone() };
        growth((&spec, &grown), 4 << 20).make(|_| Ok(())).unwrap();
        assert_eq!((length(&spec, &disk), room()), (4 << 20, 3 << 20));
    }

    #[test]
    fn another_file_or_one_in_use_is_left_as_it_is() {
        let (_directory, spec, disk) = made(Allocation::Thin);
        let growth = growth((&spec, &disk), 2 << 20);
        let wrong = |_: &File| Err(Problem::new(ErrorCode::Damaged, "another file"));
        for refused in [growth.examine(wrong), growth.make(wrong)] {
            assert_eq!(refused.unwrap_err().code, ErrorCode::Damaged);
        }
        let home = Home::of(&disk.datastore, spec.vm).unwrap();
        let held = home.open(disk.disk).unwrap();
        assert_eq!(growth.make(|_| Ok(())).unwrap_err().code, ErrorCode::InUse);
        drop(held);
        assert_eq!(length(&spec, &disk), 1 << 20);
    }

    #[test]
    fn a_preallocated_disk_that_has_no_room_is_refused_when_that_is_asked() {
        let (_directory, spec, disk) = made(Allocation::Preallocated);
        let growth = growth((&spec, &disk), DISK_SIZE_MAX);
        for refused in [growth.examine(|_| Ok(())), growth.make(|_| Ok(()))] {
            assert_eq!(refused.unwrap_err().code, ErrorCode::NoSpace);
        }
        assert_eq!(length(&spec, &disk), 1 << 20);
    }
}
