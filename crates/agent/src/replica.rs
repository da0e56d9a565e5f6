//! A disk's replica on a second datastore, and the map beside the image of what the replica may not have
//! (docs/formats/replica-map.md).
//!
//! ```text
//!  who is to write to an image ─► for_writer ─┬─► replica and map, for the chain of the filter that writes
//!                                             └─► map emptied, durably: a later filter copies everything
//! ```
//! Nothing but a filter with the replica in its chain may change an image whose map is believed. Those who
//! change one all begin here: filters of guests and of tools that write ([`for_writer`]), the making and filling
//! of a disk ([`make`]), and changes of keys, which are before what the map speaks of ([`copy_head`]).
//!
//! A replica that is not to be had keeps no guest from its disk.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, DiskSpec, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;
use vmseal_api::replica::ReplicaPlace;

use crate::datastore::failed;
use crate::disk::internal;
use crate::home::Home;
use crate::patience;

/// What is written of a header before it is flushed, in bytes: as long as each of its two copies, so that one of
/// them is whole at any time.
const PIECE: usize = 16 * 1024;

/// A replica that is open, for a filter.
#[derive(Debug)]
pub struct Replica {
    /// An image of its own, as long as header and disk; its lock held.
    pub file: File,
    /// What it may not have; its lock held.
    pub map: File,
    /// How fast it is copied at most.
    pub bytes_per_second: u64,
}

/// What a filter needs that is to write to a disk: its replica, made if it is not there. None where it has none,
/// and where it is not to be had: then there is no map, or it is empty, durably. `image` is open and locked, and
/// the disk's first byte is at `offset` in it.
///
/// # Errors
/// `in-use`, or as the datastore of the image, where a map is there that cannot be opened or emptied: a later
/// filter would believe it.
pub async fn for_writer(
    spec: &VmSpec,
    disk: &DiskSpec,
    image: &File,
    offset: u64,
) -> Result<Option<Replica>, Problem> {
    let Some(place) = disk.replica.clone() else { return Ok(None) };
    let home = look(&place.datastore, spec.vm).await;
    let image = image.try_clone().map_err(internal)?;
    let (spec, disk) = (spec.clone(), disk.clone());
    let open = move || {
        let without = |problem: Problem| {
            tracing::warn!(
                vm = %spec.vm, disk = %disk.disk, %problem,
                "a disk is served without its replica, which is to be copied anew"
            );
            Ok(None)
        };
        let map = match open_map(&spec, &disk) {
            Ok(map) => map,
            Err(problem) if has_no_map(&spec, &disk) => return without(problem),
            Err(problem) => return Err(problem),
        };
        let opened = home.and_then(|home| {
            let to = To { spec: &spec, disk: &disk, place: &place, home: &home };
            to.open(&map, &image, offset)
        });
        match opened {
            Ok(file) => Ok(Some(Replica { file, map, bytes_per_second: place.bytes_per_second })),
            Err(problem) => {
                empty(&map, &spec, &disk)?;
                without(problem)
            }
        }
    };
    spawn_blocking(open).await.map_err(internal)?
}

/// Sees that the place of a disk's replica is there.
///
/// # Errors
/// `wrong-state` when it carries no mark or another one; `timed-out`.
pub async fn examine(disk: &DiskSpec) -> Result<(), Problem> {
    match &disk.replica {
        Some(place) => look(&place.datastore, VmId::new()).await.map(drop),
        None => Ok(()),
    }
}

/// Makes the replica of a disk that is being made: before the image has its name, so that no image is without.
/// Blocks.
///
/// # Errors
/// As the two datastores.
pub fn make(spec: &VmSpec, disk: &DiskSpec, image: &File, offset: u64) -> Result<(), Problem> {
    let Some(place) = &disk.replica else { return Ok(()) };
    let map = open_map(spec, disk)?;
    // The image was filled without the replica; and an earlier attempt may have left a map.
    empty(&map, spec, disk)?;
    let home = Home::of(&place.datastore, spec.vm)?;
    To { spec, disk, place, home: &home }.open(&map, image, offset).map(drop)
}

/// Makes a replica open with the keys that the image opens with, durably. One that is not there gets its header
/// when it is made. Blocks.
///
/// # Errors
/// `in-use`, or as the replica's datastore: then the replica may open with the keys that were before.
pub fn copy_head(spec: &VmSpec, disk: &DiskSpec, image: &File, offset: u64) -> Result<(), Problem> {
    let Some(place) = &disk.replica else { return Ok(()) };
    let home = Home::of(&place.datastore, spec.vm)?;
    let Some(file) = home.open_replica(disk.disk)? else { return Ok(()) };
    home.describe(spec, &place.datastore)?;
    To { spec, disk, place, home: &home }.copy(image, &file, offset)
}

/// Removes what was made of the replica of a disk that was not. `home` is the image's. Blocks.
///
/// # Errors
/// `in-use`, or as the file system.
pub fn discard(home: &Home, vm: VmId, disk: &DiskSpec) -> Result<(), Problem> {
    match &disk.replica {
        Some(place) if !home.image(disk.disk).exists() => remove(home, vm, disk, place),
        _ => Ok(()),
    }
}

/// Removes a disk, and before it its replica. Blocks.
///
/// # Errors
/// `in-use`, or as the datastores; what is left can be removed by the same call.
pub fn delete_with(vm: VmId, disk: &DiskSpec) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, vm)?;
    if let Some(place) = &disk.replica {
        // Refused when somebody uses the image.
        drop(home.open(disk.disk)?);
        remove(&home, vm, disk, place)?;
    }
    home.delete(disk.disk)
}

/// The map first: it never speaks of a replica that is not there. A replica on a datastore that is lost keeps no
/// disk from being removed: should that come back, a scan shows what is left.
fn remove(home: &Home, vm: VmId, disk: &DiskSpec, place: &ReplicaPlace) -> Result<(), Problem> {
    home.remove(&home.map(disk.disk))?;
    match Home::of(&place.datastore, vm) {
        Ok(there) => there.remove(&there.replica(disk.disk)),
        Err(problem) => {
            tracing::warn!(%vm, disk = %disk.disk, %problem, "a disk's replica is left where it is");
            Ok(())
        }
    }
}

async fn look(place: &DatastoreSpec, vm: VmId) -> Result<Home, Problem> {
    let DatastoreLocation::Dir { path } = place.location.clone();
    let place = place.clone();
    patience::look(&path, move || Home::of(&place, vm)).await
}

fn open_map(spec: &VmSpec, disk: &DiskSpec) -> Result<File, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    home.open_or_make(spec, &disk.datastore, &home.map(disk.disk))
}

/// Whether it is certain that nothing says what the replica has.
fn has_no_map(spec: &VmSpec, disk: &DiskSpec) -> bool {
    let looked =
        Home::of(&disk.datastore, spec.vm).map(|home| home.map(disk.disk).symlink_metadata());
    matches!(looked, Ok(Err(error)) if error.kind() == io::ErrorKind::NotFound)
}

/// Has everything be copied again.
fn empty(map: &File, spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    map.set_len(0).and_then(|()| map.sync_all()).map_err(|error| {
        let home = Home::of(&disk.datastore, spec.vm);
        home.map_or_else(|problem| problem, |it| failed(&it.map(disk.disk), "emptied", &error))
    })
}

/// Where a disk's replica goes.
struct To<'a> {
    spec: &'a VmSpec,
    disk: &'a DiskSpec,
    place: &'a ReplicaPlace,
    /// On the replica's datastore.
    home: &'a Home,
}

impl To<'_> {
    /// Opens the replica, or makes it, with the header of the image.
    fn open(&self, map: &File, image: &File, offset: u64) -> Result<File, Problem> {
        let path = self.home.replica(self.disk.disk);
        let file = self.home.open_or_make(self.spec, &self.place.datastore, &path)?;
        let length = offset.saturating_add(self.disk.size);
        let found = file.metadata().map_err(|error| failed(&path, "read", &error))?.len();
        if found != length {
            // New, cut, or not made to its end. In this order: no map speaks of what is not there.
            empty(map, self.spec, self.disk)?;
            file.set_len(length).map_err(|error| failed(&path, "made", &error))?;
        }
        self.copy(image, &file, offset)?;
        Ok(file)
    }

    fn copy(&self, image: &File, replica: &File, length: u64) -> Result<(), Problem> {
        let path = self.home.replica(self.disk.disk);
        copy(image, replica, length).map_err(|error| failed(&path, "given its header", &error))
    }
}

/// Copies what comes before the data. From the end: the keys' places come behind the two copies that name them, so
/// a power cut at any point leaves a header that opens as before or as after.
fn copy(image: &File, replica: &File, length: u64) -> io::Result<()> {
    // Opened anew: a filter that had this open file has set O_DIRECT on it, for its own aligned buffers.
    let image = File::open(format!("/proc/self/fd/{}", image.as_raw_fd()))?;
    let (mut ours, mut theirs) = (vec![0; PIECE], vec![0; PIECE]);
    let mut end = length;
    while end > 0 {
        let at = (end - 1) / PIECE as u64 * PIECE as u64;
        let piece = usize::try_from(end - at).unwrap_or(PIECE);
        let (ours, theirs) = (&mut ours[..piece], &mut theirs[..piece]);
        image.read_exact_at(ours, at)?;
        replica.read_exact_at(theirs, at)?;
        if ours != theirs {
            replica.write_all_at(ours, at)?;
            replica.sync_data()?;
        }
        end = at;
    }
    // What reads as equal may have been written by one that was killed before it flushed.
    replica.sync_all()
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use vmseal_api::host::Allocation;
    use vmseal_api::id::{DatastoreId, DiskId};
    use vmseal_api::problem::ErrorCode;

    use super::*;
    use crate::datastore;

    /// Where the disk begins in its image: not a whole number of pieces.
    const OFFSET: u64 = 3 * PIECE as u64 + 4096;
    const SIZE: u64 = 1 << 20;

    struct Bench {
        directory: tempfile::TempDir,
        spec: VmSpec,
        image: File,
    }

    impl Bench {
        /// A disk that is made, of random bytes, whose replica is on a second datastore.
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let place = |name: &str| {
                let path = directory.path().join(name);
                std::fs::create_dir(&path).unwrap();
                let location = DatastoreLocation::Dir { path };
                let place = DatastoreSpec { datastore: DatastoreId::new(), location };
                datastore::probe(&place).unwrap();
                place
            };
            let mut spec = crate::run_dir::tests::spec();
            let replica = ReplicaPlace { datastore: place("second"), bytes_per_second: 1 << 20 };
            spec.disks = vec![DiskSpec {
                disk: DiskId::new(),
                name: "d".to_owned(),
                datastore: place("first"),
                size: SIZE,
                encrypted: false,
                allocation: Allocation::Thin,
                limits: Default::default(),
                cache: None,
                replica: Some(replica),
                facts: None,
            }];
            let home = Home::of(&spec.disks[0].datastore, spec.vm).unwrap();
            let image = home.begin(&spec, &spec.disks[0], OFFSET + SIZE).unwrap();
            image.write_all_at(&[7; OFFSET as usize], 0).unwrap();
            // As filters that fill disks leave it, where the file system can.
            let _ = fcntl(&image, FcntlArg::F_SETFL(OFlag::O_DIRECT));
            make(&spec, &spec.disks[0], &image, OFFSET).unwrap();
            fcntl(&image, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
            home.finish(spec.disks[0].disk, &image).unwrap();
            Self { directory, spec, image }
        }

        fn disk(&self) -> &DiskSpec {
            &self.spec.disks[0]
        }

        fn home(&self) -> Home {
            Home::of(&self.disk().datastore, self.spec.vm).unwrap()
        }

        fn there(&self) -> Home {
            let place = &self.disk().replica.as_ref().unwrap().datastore;
            Home::of(place, self.spec.vm).unwrap()
        }

        fn replica(&self) -> PathBuf {
            self.there().replica(self.disk().disk)
        }

        async fn for_writer(&self) -> Result<Option<Replica>, Problem> {
            for_writer(&self.spec, self.disk(), &self.image, OFFSET).await
        }

        /// As a filter leaves it: something that could be believed.
        fn fill_map(&self) {
            std::fs::write(self.home().map(self.disk().disk), [1; 1024]).unwrap();
        }

        fn map_length(&self) -> u64 {
            self.home().map(self.disk().disk).metadata().unwrap().len()
        }
    }

    fn head(path: &Path) -> Vec<u8> {
        std::fs::read(path).unwrap()[..OFFSET as usize].to_vec()
    }

    #[tokio::test]
    async fn a_replica_is_an_image_by_itself_and_its_map_is_kept_from_writer_to_writer() {
        let bench = Bench::new();
        assert_eq!(bench.replica().metadata().unwrap().len(), OFFSET + SIZE);
        assert_eq!(head(&bench.replica()), [7; OFFSET as usize]);
        assert_eq!(bench.map_length(), 0);
        bench.fill_map();
        let held = bench.for_writer().await.unwrap().unwrap();
        assert_eq!((bench.map_length(), held.bytes_per_second), (1024, 1 << 20));
        let refused = bench.for_writer().await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InUse, "the map of a disk that is written to");
        drop(held);
        bench.for_writer().await.unwrap().unwrap();
        assert_eq!(bench.map_length(), 1024);
    }

    #[tokio::test]
    async fn a_writer_without_the_replica_has_its_map_emptied() {
        type Spoil = fn(&Bench) -> Option<File>;
        let cases: [(&str, Spoil); 2] = [
            ("not mounted", |bench| {
                let place = bench.directory.path();
                std::fs::rename(place.join("second"), place.join("elsewhere")).unwrap();
                std::fs::create_dir(place.join("second")).unwrap();
                None
            }),
            ("in use", |bench| bench.there().open_replica(bench.disk().disk).unwrap()),
        ];
        for (what, spoil) in cases {
            let bench = Bench::new();
            bench.fill_map();
            let _held = spoil(&bench);
            assert!(bench.for_writer().await.unwrap().is_none(), "{what}");
            assert_eq!(bench.map_length(), 0, "{what}: the map would be believed");
        }
    }

    /// No more than one that is there and cannot be opened: that would be believed later.
    #[tokio::test]
    async fn a_map_that_cannot_be_made_keeps_no_guest_from_its_disk() {
        let bench = Bench::new();
        let (home, map) = (bench.home(), bench.home().map(bench.disk().disk));
        std::fs::remove_file(&map).unwrap();
        std::fs::create_dir(&map).unwrap();
        assert!(bench.for_writer().await.is_err(), "what is there is no map");
        std::fs::remove_dir(&map).unwrap();
        // Where the note of what is in the directory cannot be written, nothing is made, for root neither.
        let image = home.image(bench.disk().disk);
        let note = image.with_file_name(crate::home::DESCRIPTOR);
        std::fs::remove_file(&note).unwrap();
        std::fs::create_dir(&note).unwrap();
        let served = bench.for_writer().await;
        assert!(!map.exists());
        assert!(served.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_replica_that_is_gone_or_cut_is_made_anew_and_copied_whole() {
        let bench = Bench::new();
        let spoils: [fn(&Path) -> io::Result<()>; 2] = [
            |path| std::fs::remove_file(path),
            |path| File::options().write(true).open(path)?.set_len(OFFSET + 5),
        ];
        for spoil in spoils {
            bench.fill_map();
            spoil(&bench.replica()).unwrap();
            bench.for_writer().await.unwrap().unwrap();
            assert_eq!(bench.map_length(), 0);
            assert_eq!(bench.replica().metadata().unwrap().len(), OFFSET + SIZE);
            assert_eq!(head(&bench.replica()), [7; OFFSET as usize]);
        }
    }

    #[tokio::test]
    async fn a_header_that_has_changed_is_copied_and_the_map_goes_on() {
        let bench = Bench::new();
        bench.fill_map();
        let copy = || copy_head(&bench.spec, bench.disk(), &bench.image, OFFSET);
        bench.image.write_all_at(&[9; 100], 5).unwrap();
        copy().unwrap();
        assert_eq!(head(&bench.replica()), head(&bench.home().image(bench.disk().disk)));
        // By whoever was killed before it did.
        bench.image.write_all_at(&[9; 100], OFFSET - 100).unwrap();
        let held = bench.for_writer().await.unwrap();
        assert_eq!(head(&bench.replica()), head(&bench.home().image(bench.disk().disk)));
        assert_eq!(bench.map_length(), 1024);
        assert_eq!(copy().unwrap_err().code, ErrorCode::InUse);
        drop(held);
        std::fs::remove_file(bench.replica()).unwrap();
        copy().unwrap();
        assert!(!bench.replica().exists(), "a replica without a map that knows of it");
    }

    #[test]
    fn a_disk_goes_with_its_replica_and_neither_while_it_is_used() {
        let bench = Bench::new();
        let (vm, disk) = (bench.spec.vm, bench.disk().clone());
        discard(&bench.home(), vm, &disk).unwrap();
        assert!(bench.replica().exists(), "the replica of a disk that is whole");
        assert_eq!(delete_with(vm, &disk).unwrap_err().code, ErrorCode::InUse);
        assert!(bench.replica().exists() && bench.home().map(disk.disk).exists());
        let directory = bench.directory;
        drop(bench.image);
        delete_with(vm, &disk).unwrap();
        delete_with(vm, &disk).unwrap();
        for place in ["first", "second"] {
            assert_eq!(std::fs::read_dir(directory.path().join(place)).unwrap().count(), 1);
        }
    }

    #[test]
    fn a_datastore_that_is_lost_keeps_no_disk_from_being_removed() {
        let Bench { directory, spec, image } = Bench::new();
        std::fs::remove_dir_all(directory.path().join("second")).unwrap();
        drop(image);
        delete_with(spec.vm, &spec.disks[0]).unwrap();
        assert_eq!(std::fs::read_dir(directory.path().join("first")).unwrap().count(), 1);
    }
}
