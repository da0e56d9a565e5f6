//! A disk's replica on a second datastore, and the map beside the image of what the replica may lack
//! (docs/formats/replica-map.md).
//!
//! ```text
//!  a writer of an image ─► for_writer ─┬─ noted as a pair ──► replica and map, for the chain
//!                                      ├─ not noted ──► map emptied, noted ──► the same
//!                                      └─ replica unavailable ──► map emptied: a later filter copies all
//! ```
//! An image whose map is believed may be changed only by a filter with the replica in its chain. Everything
//! that changes an image begins here: the filters of guests and of tools that write, and the making of a disk
//! ([`for_writer`]); what puts another content in a disk's place, as a revert does ([`copy_again`]); and changes of keys, which are
//! in the header, outside of the map ([`ReplicaHeader`]).
//!
//! The image is the lowest file of a disk that has layers (docs/formats/layers-note.md). The filter copies what the disk shows through all of
//! them, so a layer that is put above, or is merged into what is below it, is no change of the disk: map and replica stay
//! right at every instant of it (docs/decisions/226).
//!
//! A guest gets its disk even when its replica is unavailable or the second datastore hangs. Work on a
//! hanging datastore that was given up may still be done later: it leaves two notes that differ, so that
//! everything is copied.
//!
//! A disk grows with its replica ([`length`]).
//!
//! A disk whose copy takes its place (`vm encrypt`, `vm move`) gets another replica, and the former one goes with the former image
//! ([`former`]).

pub mod former;
pub mod length;
mod pair;

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::spawn_blocking;
use vmseal_api::host::{DatastoreSpec, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::replica::ReplicaPlace;

use self::pair::Pair;
use vmseal_secret::SecretBytes;

use crate::filter::Replica;
use crate::rules;
use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::image_notes::Noted;
use crate::storage::locked::{Access, open_locked};
use crate::timed;

/// How much of a header is written before it is flushed, in bytes: the length of each of its two copies, so
/// that one of them is complete at any time.
const PIECE: usize = 16 * 1024;

/// Prepares the replica for a filter that writes to a disk; it is made if it is missing. None where the disk
/// has no replica or the replica is unavailable: then the map is missing or empty, durably. `image` is open
/// and locked, and the disk's first byte is at `offset` in it.
///
/// # Errors
/// `in-use`, or those of the image's datastore, when a map exists that cannot be opened or emptied: a later
/// filter would believe it.
pub async fn for_writer(
    spec: &VmSpec,
    disk: &DiskSpec,
    image: &File,
    offset: u64,
) -> Result<Option<Replica>, Problem> {
    prepare((spec, disk), image, offset, false).await
}

/// The same of a disk whose image was a copy that has taken the place of another one, whose replica may be there still: that is set
/// aside, and another one is made, which has nothing yet.
///
/// # Errors
/// As [`for_writer`].
pub async fn for_writer_of_copy(
    spec: &VmSpec,
    disk: &DiskSpec,
    image: &File,
    offset: u64,
) -> Result<Option<Replica>, Problem> {
    prepare((spec, disk), image, offset, true).await
}

async fn prepare(
    (spec, disk): (&VmSpec, &DiskSpec),
    image: &File,
    offset: u64,
    was_copy: bool,
) -> Result<Option<Replica>, Problem> {
    let Some(place) = disk.replica.clone() else { return Ok(None) };
    let bytes_per_second = place.bytes_per_second;
    let of = Of { spec: spec.clone(), disk: disk.clone(), place, was_copy };
    let without = |problem: Problem| {
        tracing::warn!(
            vm = %spec.vm, disk = %disk.disk, %problem,
            "a disk is served without its replica, all of which must be copied again"
        );
        Ok(None)
    };
    let beside = match of.beside(image).await {
        Ok(beside) => beside,
        Err(problem) if of.has_no_map().await => return without(problem),
        Err(problem) => return Err(problem),
    };
    match of.open(&beside, image, offset).await {
        Ok(file) => Ok(Some(Replica { file, map: beside.map, bytes_per_second })),
        Err(problem) => {
            of.empty(&beside).await?;
            without(problem)
        }
    }
}

/// Has all of a disk be copied to its replica the next time that it is written: it is about to hold something else, by no filter's
/// writes. Nobody has it open. Blocks.
///
/// # Errors
/// `in-use`, or those of the image's file system: what the disk holds must not be changed then.
pub fn copy_again(home: &Home, disk: DiskId) -> Result<(), Problem> {
    let map = home.map(disk);
    // The next filter makes another one, which has nothing. The home stays, also where it has no disk at present.
    match open_locked(&map, Access::Write)? {
        Some(_lock) => home.remove_locked(&map),
        None => Ok(()),
    }
}

/// Checks that the datastore of a disk's replica is there.
///
/// # Errors
/// `wrong-state` when it carries no mark or another one; `timed-out`.
pub async fn examine(disk: &DiskSpec) -> Result<(), Problem> {
    match &disk.replica {
        Some(place) => look(&place.datastore, VmId::new(), |_| Ok(())).await,
        None => Ok(()),
    }
}

/// Removes the unfinished replica of a disk whose creation failed. `home` is the image's.
///
/// # Errors
/// `in-use`, or those of the image's file system.
pub async fn discard(home: &Home, vm: VmId, disk: &DiskSpec) -> Result<(), Problem> {
    let Some(place) = disk.replica.clone() else { return Ok(()) };
    let (home, id) = (home.clone(), disk.disk);
    // A disk that cannot be examined may be complete.
    let unmade = move || match home.image(id).try_exists() {
        Ok(false) => remove_beside(&home, id).map(|()| true),
        Ok(true) | Err(_) => Ok(false),
    };
    match spawn_blocking(unmade).await.map_err(internal)?? {
        true => remove_replica(vm, id, &place).await,
        false => Ok(()),
    }
}

/// Removes a disk, and its replica first.
///
/// # Errors
/// `in-use`, or those of the image's datastore; the same call can then be repeated to remove the rest.
pub async fn delete_with(vm: VmId, disk: &DiskSpec) -> Result<(), Problem> {
    let (here, id) = (disk.datastore.clone(), disk.disk);
    if let Some(place) = disk.replica.clone() {
        let here = here.clone();
        let begin = move || {
            let home = Home::of(&here, vm)?;
            // Refused when another process uses the image.
            drop(home.open(id)?);
            remove_beside(&home, id)
        };
        spawn_blocking(begin).await.map_err(internal)??;
        remove_replica(vm, id, &place).await?;
    }
    let delete = move || Home::of(&here, vm)?.delete(id);
    spawn_blocking(delete).await.map_err(internal)?
}

/// Removes what is beside the image of a disk for its replica. The map first: it must not exist without its replica.
///
/// # Errors
/// `in-use`, or those of the file system.
pub fn remove_beside(home: &Home, disk: DiskId) -> Result<(), Problem> {
    home.remove(&home.map(disk))?;
    pair::remove(home, disk)
}

/// A replica on a lost datastore does not prevent the removal of its disk. If that datastore comes back, a
/// scan shows the replica.
async fn remove_replica(vm: VmId, disk: DiskId, place: &ReplicaPlace) -> Result<(), Problem> {
    let remove = move |home: &Home| {
        pair::remove(home, disk)?;
        home.remove(&home.former_replica(disk))?;
        home.remove(&home.replica(disk))
    };
    match look(&place.datastore, vm, remove).await {
        Err(problem) if problem.code == ErrorCode::InUse => Err(problem),
        Err(problem) => {
            tracing::warn!(%vm, %disk, %problem, "a disk's replica is left where it is");
            Ok(())
        }
        Ok(()) => Ok(()),
    }
}

/// Does something in a VM's home on the second datastore, with a timeout.
async fn look<T: Send + 'static>(
    place: &DatastoreSpec,
    vm: VmId,
    work: impl FnOnce(&Home) -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let path = place.location.path().to_owned();
    let place = place.clone();
    timed::call(&path, move || work(&Home::of(&place, vm)?)).await
}

/// A replica: its VM and disk, and its place.
#[derive(Clone)]
struct Of {
    spec: VmSpec,
    disk: DiskSpec,
    place: ReplicaPlace,
    /// Whether the replica of another image, which the disk had before, may be in its place.
    was_copy: bool,
}

/// The files beside the image.
struct Beside {
    map: File,
    image: FileIdentity,
    pair: Option<Pair>,
}

/// The files on the second datastore.
struct Found {
    file: File,
    replica: FileIdentity,
    pair: Option<Pair>,
}

impl Of {
    fn home(&self) -> Result<Home, Problem> {
        Home::of(&self.disk.datastore, self.spec.vm)
    }

    async fn beside(&self, image: &File) -> Result<Beside, Problem> {
        let (of, image) = (self.clone(), image.try_clone().map_err(internal)?);
        let open = move || {
            let (home, disk) = (of.home()?, of.disk.disk);
            let map = home.open_or_make(&of.spec, &of.disk.datastore, &home.map(disk))?;
            let path = home.image(disk);
            let image =
                FileIdentity::of(&image).map_err(|error| failed(&path, "looked at", &error))?;
            Ok(Beside { map, image, pair: pair::read(&home, disk) })
        };
        spawn_blocking(open).await.map_err(internal)?
    }

    /// Whether it is certain that there is no map.
    async fn has_no_map(&self) -> bool {
        let of = self.clone();
        let looked = move || of.home().map(|home| home.map(of.disk.disk).symlink_metadata());
        let looked = spawn_blocking(looked).await;
        matches!(looked, Ok(Ok(Err(error))) if error.kind() == io::ErrorKind::NotFound)
    }

    /// Empties the map, so that everything is copied again.
    async fn empty(&self, beside: &Beside) -> Result<(), Problem> {
        let (of, map) = (self.clone(), beside.map.try_clone().map_err(internal)?);
        let empty = move || {
            let path = of.home()?.map(of.disk.disk);
            let emptied = map.set_len(0).and_then(|()| map.sync_all());
            emptied.map_err(|error| failed(&path, "emptied", &error))
        };
        spawn_blocking(empty).await.map_err(internal)?
    }

    /// The replica, and a map that is about it.
    async fn open(&self, beside: &Beside, image: &File, offset: u64) -> Result<File, Problem> {
        let image = reopened(image).map_err(internal)?;
        let of = self.clone();
        let open = move |home: &Home| of.open_there(home, &image, offset);
        let found = look(&self.place.datastore, self.spec.vm, open).await?;
        let known = beside.pair.as_ref().is_some_and(|pair| {
            found.pair.as_ref() == Some(pair) && pair.is_of(&beside.image, &found.replica)
        });
        if !known {
            self.empty(beside).await?;
            self.note(Pair::new(beside.image.clone(), found.replica)).await?;
        }
        Ok(found.file)
    }

    /// Notes that the empty map is about these two from now on.
    async fn note(&self, pair: Pair) -> Result<(), Problem> {
        let disk = self.disk.disk;
        let (of, here) = (self.clone(), pair.clone());
        let beside = move || pair::write(&of.home()?, disk, &here);
        spawn_blocking(beside).await.map_err(internal)??;
        let there = move |home: &Home| pair::write(home, disk, &pair);
        look(&self.place.datastore, self.spec.vm, there).await
    }

    /// Opens the replica, or makes it, with the header of the image.
    fn open_there(&self, home: &Home, image: &File, offset: u64) -> Result<Found, Problem> {
        let (disk, path) = (self.disk.disk, home.replica(self.disk.disk));
        if self.was_copy {
            let looked = FileIdentity::of(image);
            let image = looked.map_err(|error| failed(&path, "compared with its image", &error))?;
            former::set_aside(home, disk, &image)?;
        }
        let file = home.open_or_make(&self.spec, &self.place.datastore, &path)?;
        length::fit(home, disk, &file, offset.saturating_add(self.disk.size))?;
        let copied = copy_header((image, offset), &file, &path);
        copied.map_err(|error| failed(&path, "given its header", &error))?;
        let (here, encrypted) = (&self.place.datastore, offset > 0);
        Noted { here, vm: self.spec.vm, disk, encrypted }.note(&file);
        let replica =
            FileIdentity::of(&file).map_err(|error| failed(&path, "looked at", &error))?;
        Ok(Found { file, replica, pair: pair::read(home, disk) })
    }
}

/// The open replica of a disk whose keys will be changed; locked by this process, or by the one that serves the disk to the guest, which
/// writes behind the header only.
pub struct ReplicaHeader {
    home: Home,
    file: File,
}

impl ReplicaHeader {
    /// Opens it. A missing replica gets its header when it is made. Blocks.
    ///
    /// # Errors
    /// `in-use`, or those of the replica's datastore: the replica would still open with a key that is
    /// dropped. `wrong-state` for one that is missing beside a guest, whose next filter may be making it.
    pub fn open(spec: &VmSpec, disk: &DiskSpec, access: Access) -> Result<Option<Self>, Problem> {
        let Some(place) = &disk.replica else { return Ok(None) };
        let home = Home::of(&place.datastore, spec.vm)?;
        let beside = access == Access::BesideGuest;
        let access = if beside { Access::BesideGuest } else { Access::Write };
        let file = home.open_replica(disk.disk, access)?;
        if file.is_none() && beside {
            let what = format!(
                "is not off, and the replica of its disk '{}' is not there: stop it first, or stop and start it, which makes another",
                disk.name
            );
            return Err(rules::wrong_state(spec, &what));
        }
        Ok(file.map(|file| Self { home, file }))
    }

    /// Copies the image's header, so that the replica opens with the same keys, durably. Blocks.
    ///
    /// # Errors
    /// Those of the replica's datastore: the replica may then still open with the earlier keys.
    pub fn copy(
        &self,
        (spec, kek): (&VmSpec, Option<&SecretBytes>),
        disk: &DiskSpec,
        image: &File,
        offset: u64,
    ) -> Result<(), Problem> {
        if let Some(place) = &disk.replica {
            self.home.describe(spec, &place.datastore, kek)?;
        }
        let path = self.home.replica(disk.disk);
        let copied =
            reopened(image).and_then(|image| copy_header((&image, offset), &self.file, &path));
        copied.map_err(|error| failed(&path, "given its header", &error))?;
        if let Some(place) = &disk.replica {
            let (here, encrypted) = (&place.datastore, offset > 0);
            Noted { here, vm: spec.vm, disk: disk.disk, encrypted }.note(&self.file);
        }
        Ok(())
    }
}

/// Opens the same file again. A filter that had the given open file has set O_DIRECT on it, for its own
/// aligned buffers; and a thread that was given up does not hold its lock.
fn reopened(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// The replicas whose headers are written, by path.
static HEADERS: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

/// Copies a header to the replica at `path`, one at a time: who has changed the image's copies it afterwards, and what another filter's start
/// has read before that is not written later.
fn copy_header((image, length): (&File, u64), replica: &File, path: &Path) -> io::Result<()> {
    let mut all = HEADERS.lock().unwrap_or_else(PoisonError::into_inner);
    let one = Arc::clone(all.entry(path.to_owned()).or_default());
    drop(all);
    let _copying = one.lock().unwrap_or_else(PoisonError::into_inner);
    copy(image, replica, length)
}

/// Copies everything before the data, from the end: the key areas are behind the two copies that refer to
/// them, so that after a power cut at any point the header opens as before or as after.
fn copy(image: &File, replica: &File, length: u64) -> io::Result<()> {
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
    // An equal header may have been written by a process that was killed before it flushed.
    replica.sync_all()
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::Device;

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use vmseal_api::host::Allocation;
    use vmseal_api::id::{DatastoreId, DiskId};
    use vmseal_api::problem::ErrorCode;

    use vmseal_api::host::DatastoreLocation;

    use super::*;
    use crate::storage::datastore;

    /// The offset of the disk in its image: not a multiple of the piece.
    const OFFSET: u64 = 3 * PIECE as u64 + 4096;
    const SIZE: u64 = 1 << 20;

    struct Bench {
        directory: tempfile::TempDir,
        spec: VmSpec,
        image: File,
    }

    impl Bench {
        /// A disk with random bytes, with a replica on a second datastore.
        async fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let place = |name: &str| {
                let path = directory.path().join(name);
                std::fs::create_dir(&path).unwrap();
                let location = DatastoreLocation::Dir { path };
                let place = DatastoreSpec { datastore: DatastoreId::new(), location };
                datastore::probe(&place).unwrap();
                place
            };
            let mut spec = crate::process::run_dir::tests::spec();
            let replica = ReplicaPlace { datastore: place("second"), bytes_per_second: 1 << 20 };
            spec.devices = vec![Device::Disk(DiskSpec {
                disk: DiskId::new(),
                name: "d".to_owned(),
                datastore: place("first"),
                size: SIZE,
                encrypted: false,
                allocation: Allocation::Thin,
                role: Default::default(),
                limits: Default::default(),
                cache: None,
                replica: Some(replica),
                facts: None,
            })];
            let home = Home::of(&spec.disk_at(0).unwrap().datastore, spec.vm).unwrap();
            let image = home.begin(&spec, spec.disk_at(0).unwrap(), OFFSET + SIZE).unwrap();
            image.write_all_at(&[7; OFFSET as usize], 0).unwrap();
            // The state in which filters that fill disks leave it, where the file system has O_DIRECT.
            let _ = fcntl(&image, FcntlArg::F_SETFL(OFlag::O_DIRECT));
            drop(
                for_writer(&spec, spec.disk_at(0).unwrap(), &image, OFFSET).await.unwrap().unwrap(),
            );
            fcntl(&image, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
            home.finish(spec.disk_at(0).unwrap().disk, &image).unwrap();
            Self { directory, spec, image }
        }

        fn disk(&self) -> &DiskSpec {
            self.spec.disk_at(0).unwrap()
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

        /// Fills the map as a filter does, so that it could be believed.
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
        let bench = Bench::new().await;
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
    async fn what_is_put_in_a_disks_place_is_copied_as_a_whole() {
        let bench = Bench::new().await;
        bench.fill_map();
        drop(bench.for_writer().await.unwrap());
        assert_eq!(bench.map_length(), 1024, "the map is not believed");
        for _ in 0..2 {
            copy_again(&bench.home(), bench.disk().disk).unwrap();
        }
        bench.for_writer().await.unwrap().unwrap();
        assert_eq!(bench.map_length(), 0);
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
            ("in use", |bench| {
                bench.there().open_replica(bench.disk().disk, Access::Write).unwrap()
            }),
        ];
        for (what, spoil) in cases {
            let bench = Bench::new().await;
            bench.fill_map();
            let _held = spoil(&bench);
            assert!(bench.for_writer().await.unwrap().is_none(), "{what}");
            assert_eq!(bench.map_length(), 0, "{what}: the map would be believed");
        }
    }

    /// Only an existing map that cannot be opened is an error: it would be believed later.
    #[tokio::test]
    async fn a_map_that_cannot_be_made_keeps_no_guest_from_its_disk() {
        let bench = Bench::new().await;
        let (home, map) = (bench.home(), bench.home().map(bench.disk().disk));
        std::fs::remove_file(&map).unwrap();
        std::fs::create_dir(&map).unwrap();
        assert!(bench.for_writer().await.is_err(), "what is there is no map");
        std::fs::remove_dir(&map).unwrap();
        // Where the descriptor cannot be written, nothing is made, not even for root.
        let image = home.image(bench.disk().disk);
        let note = image.with_file_name(crate::storage::home::DESCRIPTOR);
        std::fs::remove_file(&note).unwrap();
        std::fs::create_dir(&note).unwrap();
        let served = bench.for_writer().await;
        assert!(!map.exists());
        assert!(served.unwrap().is_none());
    }

    /// Its mark is a pipe: opening it blocks, as on a server that is down.
    #[tokio::test(start_paused = true)]
    async fn a_second_datastore_that_hangs_keeps_no_guest_from_its_disk_and_holds_no_lock_of_it() {
        let bench = Bench::new().await;
        bench.fill_map();
        let mark = bench.directory.path().join("second").join(crate::storage::mark::MARKER);
        std::fs::remove_file(&mark).unwrap();
        nix::unistd::mkfifo(&mark, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let time_passes = async {
            loop {
                tokio::time::advance(std::time::Duration::from_secs(1)).await;
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        };
        let served = tokio::select! {
            served = bench.for_writer() => served,
            () = time_passes => unreachable!("the loop never ends"),
        };
        let (length, home, disk) = (bench.map_length(), bench.home(), bench.disk().disk);
        let Bench { image, directory: _directory, .. } = bench;
        drop(image);
        let free = home.open(disk).map(|image| image.is_some());
        // Before any assertion: the runtime waits for the hanging thread at the end of the test.
        drop(File::options().write(true).open(&mark).unwrap());
        assert!(served.unwrap().is_none());
        assert_eq!((length, free.unwrap()), (0, true));
    }

    #[tokio::test]
    async fn a_missing_or_truncated_replica_is_made_again_and_copied_completely() {
        let bench = Bench::new().await;
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

    /// It goes on with its map: the filter carries that over. One that was truncated before is not taken for one that grew.
    #[tokio::test]
    async fn a_replica_grows_with_its_disk_and_goes_on() {
        let mut bench = Bench::new().await;
        let longer = async |bench: &Bench, size: u64, access| {
            let (vm, disk) = (bench.spec.vm, bench.disk());
            length::lengthen(vm, disk, OFFSET, size, access).await
        };
        let lengths = |bench: &Bench| {
            (bench.replica().metadata().unwrap().len() - OFFSET, bench.map_length())
        };
        bench.fill_map();
        let held = bench.for_writer().await.unwrap();
        longer(&bench, 2 * SIZE, Access::BesideGuest).await.unwrap();
        drop(held);
        assert_eq!(lengths(&bench), (2 * SIZE, 1024));
        // An agent died, and its disk has not grown.
        bench.for_writer().await.unwrap().unwrap();
        assert_eq!(lengths(&bench), (SIZE, 1024));
        // It has grown; twice, as after another death.
        for _ in 0..2 {
            longer(&bench, 3 * SIZE, Access::Write).await.unwrap();
        }
        bench.spec.disks_mut().for_each(|disk| disk.size = 3 * SIZE);
        bench.for_writer().await.unwrap().unwrap();
        assert_eq!(lengths(&bench), (3 * SIZE, 1024), "all of it is copied again");
        let file = File::options().write(true).open(bench.replica()).unwrap();
        file.set_len(OFFSET + 3 * SIZE - 1).unwrap();
        longer(&bench, 4 * SIZE, Access::Write).await.unwrap();
        bench.spec.disks_mut().for_each(|disk| disk.size = 4 * SIZE);
        bench.for_writer().await.unwrap().unwrap();
        assert_eq!(lengths(&bench), (4 * SIZE, 0), "data that is missing counts as copied");
    }

    /// Files that were put in their place: by a restore, or when a datastore was away and came back.
    #[tokio::test]
    async fn a_map_is_not_believed_of_another_image_or_replica() {
        let bench = Bench::new().await;
        let put_back = |path: &Path| {
            let copy = path.with_extension("copy");
            std::fs::copy(path, &copy).unwrap();
            std::fs::rename(&copy, path).unwrap();
        };
        let (image, replica) = (bench.home().image(bench.disk().disk), bench.replica());
        let of = |image: File| {
            let (spec, disk) = (bench.spec.clone(), bench.disk().clone());
            async move { for_writer(&spec, &disk, &image, OFFSET).await.unwrap().unwrap() }
        };
        let opened = |path: &Path| File::options().read(true).write(true).open(path).unwrap();
        for path in [&image, &replica] {
            bench.fill_map();
            drop(of(opened(&image)).await);
            assert_eq!(bench.map_length(), 1024);
            put_back(path);
            drop(of(opened(&image)).await);
            assert_eq!(bench.map_length(), 0, "{}", path.display());
            bench.fill_map();
            drop(of(opened(&image)).await);
            assert_eq!(bench.map_length(), 1024, "the new pair was not noted");
        }
        // The first image is kept unchanged while another one is served; or the note is missing.
        let (note, kept) =
            (bench.home().pair(bench.disk().disk), bench.directory.path().join("kept"));
        let there = bench.there().pair(bench.disk().disk);
        std::fs::copy(&note, &kept).unwrap();
        let spoils: [&dyn Fn(); 3] = [
            &|| {
                std::fs::remove_file(&there).unwrap();
            },
            &|| {
                std::fs::copy(&kept, &note).unwrap();
            },
            &|| std::fs::write(&note, "{").unwrap(),
        ];
        for (number, spoil) in spoils.iter().enumerate() {
            bench.fill_map();
            spoil();
            drop(of(opened(&image)).await);
            assert_eq!(bench.map_length(), 0, "{number}");
        }
    }

    #[tokio::test]
    async fn a_header_that_has_changed_is_copied_and_the_map_goes_on() {
        let bench = Bench::new().await;
        bench.fill_map();
        let copy = || {
            let header = ReplicaHeader::open(&bench.spec, bench.disk(), Access::Write)?;
            header.map_or(Ok(()), |it| {
                it.copy((&bench.spec, None), bench.disk(), &bench.image, OFFSET)
            })
        };
        bench.image.write_all_at(&[9; 100], 5).unwrap();
        copy().unwrap();
        assert_eq!(head(&bench.replica()), head(&bench.home().image(bench.disk().disk)));
        // By a process that was killed before it flushed.
        bench.image.write_all_at(&[9; 100], OFFSET - 100).unwrap();
        let held = bench.for_writer().await.unwrap();
        assert_eq!(head(&bench.replica()), head(&bench.home().image(bench.disk().disk)));
        assert_eq!(bench.map_length(), 1024);
        assert_eq!(copy().unwrap_err().code, ErrorCode::InUse);
        drop(held);
        std::fs::remove_file(bench.replica()).unwrap();
        copy().unwrap();
        assert!(!bench.replica().exists(), "a replica without its map");
    }

    #[tokio::test]
    async fn a_disk_is_removed_with_its_replica_unless_one_is_in_use() {
        let bench = Bench::new().await;
        let (vm, disk) = (bench.spec.vm, bench.disk().clone());
        discard(&bench.home(), vm, &disk).await.unwrap();
        assert!(bench.replica().exists(), "the replica of a complete disk");
        assert_eq!(delete_with(vm, &disk).await.unwrap_err().code, ErrorCode::InUse);
        assert!(bench.replica().exists() && bench.home().map(disk.disk).exists());
        let directory = bench.directory;
        drop(bench.image);
        delete_with(vm, &disk).await.unwrap();
        delete_with(vm, &disk).await.unwrap();
        for place in ["first", "second"] {
            assert_eq!(std::fs::read_dir(directory.path().join(place)).unwrap().count(), 1);
        }
    }

    #[tokio::test]
    async fn a_replica_that_is_broken_keeps_no_disk_from_being_removed() {
        let bench = Bench::new().await;
        std::fs::remove_file(bench.replica()).unwrap();
        std::fs::create_dir(bench.replica()).unwrap();
        let Bench { directory, spec, image } = bench;
        drop(image);
        delete_with(spec.vm, spec.disk_at(0).unwrap()).await.unwrap();
        assert_eq!(std::fs::read_dir(directory.path().join("first")).unwrap().count(), 1);
    }

    #[tokio::test]
    async fn a_datastore_that_is_lost_keeps_no_disk_from_being_removed() {
        let Bench { directory, spec, image } = Bench::new().await;
        std::fs::remove_dir_all(directory.path().join("second")).unwrap();
        drop(image);
        delete_with(spec.vm, spec.disk_at(0).unwrap()).await.unwrap();
        assert_eq!(std::fs::read_dir(directory.path().join("first")).unwrap().count(), 1);
    }
}
