//! The files in which the filters of a VM keep the dirty bitmaps of its disks.
//!
//! ```text
//!  the VM runs   <run dir>/vms/<vm>/bitmaps-<disk>   each filter of the guest marks there, and the next one goes on
//!                   │ its processes have ended         ▲ its first filter is started, the disk's files are as they were left
//!                   ▼                                  │ (and in any case it is removed here)
//!  it is off     <state dir>/bitmaps/<disk>          the same, below a line that says how the disk's files were left
//! ```
//! A backup of a VM that is off reads what is kept, and changes it by putting another file in its place, with the same line above it: that
//! still says how the disk's files were left, as a backup changes none of them.
//!
//! What a bitmap calls clean is believed, so one that may lack a change is not offered: another program, or another host, may have
//! written to the disk while the VM was off, and a host that crashed may have lost marks. The first changes a file's `st_ctime`, or the
//! state of an image in a pool of Ceph ([`image_state`]); of the second nothing is left here: what is kept is removed, durably, before
//! its VM's first filter is started.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::statfs::{FUSE_SUPER_MAGIC, fstatfs};
use serde::{Deserialize, Serialize};
use vmseal_api::atomic_file::{self, PRIVATE, Prepared};
use vmseal_api::bitmap::file::has_any;
use vmseal_api::filter::{BITMAP_BYTES_MAX, BITMAPS_MAX};
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::internal;
use super::kept_bitmaps::KeptBitmaps;
use crate::process::run_dir::ProcessDir;
use crate::storage::home::Home;
use crate::storage::image_state;
use crate::storage::layers::{self, Files};
use crate::storage::locked::Access;
use crate::storage::opening::Open;
use crate::timed::SHORT_TIMEOUT;

/// The version of the line.
const VERSION: u32 = 1;

/// Longer than the clock that file systems take times from goes between two ticks: a file that was written later has a later time.
const TICK: Duration = Duration::from_millis(20);

/// The longest file of a disk's bitmaps, in bytes, with the line above it: names and identities of a chain of layers.
const FILE_MAX: u64 = (BITMAPS_MAX * BITMAP_BYTES_MAX) as u64 + (1 << 20);

/// The file, in the run directory of a VM, that says that its last filter has ended in order.
const ALL_MARKED: &str = "all-marked";

/// Where the bitmaps of VMs are that are off.
#[derive(Clone, Debug)]
pub struct BitmapFiles {
    directory: PathBuf,
}

/// How a file of a disk was left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeftFile {
    inode: u64,
    length: u64,
    /// When it was changed last, in seconds and nanoseconds; zeros of a file that has a state.
    changed: (i64, i64),
    /// The state of an image in a pool of Ceph, whose files have the times of their mount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    state: Option<String>,
}

/// The line above the bitmaps.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Left {
    version: u32,
    files: Vec<LeftFile>,
}

/// What is kept of a disk.
#[derive(Debug)]
pub struct Kept {
    left: Left,
    /// The bitmaps.
    pub bitmaps: KeptBitmaps,
}

impl BitmapFiles {
    /// Those in the state directory of this agent.
    #[must_use]
    pub fn in_state_directory(state: &Path) -> Self {
        Self { directory: state.join("bitmaps") }
    }

    fn path(&self, disk: DiskId) -> PathBuf {
        self.directory.join(disk.to_string())
    }

    /// The file for a filter of a VM that runs, or is started: that of the filter before; that which was kept, if the disk, which is
    /// open, is as it was left; or an empty one. `arrives` says that another host has served the disk since. Blocks.
    ///
    /// # Errors
    /// Those of what was kept: where it stays, it would be believed later.
    pub fn open(
        &self,
        directory: &ProcessDir,
        disk: DiskId,
        opened: &Open,
        arrives: bool,
    ) -> Result<Option<File>, Problem> {
        let path = in_run_directory(directory, disk);
        let kept = self.take(disk).map_err(internal)?;
        let is_first = !path.exists();
        let written = match kept.filter(|_| is_first && !arrives) {
            Some((left, bitmaps)) if is_as_left(opened, &left) => {
                atomic_file::prepare_sparse(&path, &bitmaps, PRIVATE).and_then(Prepared::put)
            }
            _ => Ok(()),
        };
        let options =
            || OpenOptions::new().read(true).write(true).create(true).mode(PRIVATE).open(&path);
        match written.and_then(|()| options()) {
            Ok(file) => Ok(Some(file)),
            Err(error) => {
                // Its guest is served all the same. What is there would miss what it writes.
                tracing::warn!(%disk, %error, "the dirty bitmaps of a disk end with its filter");
                remove_if_there(&path).map_err(internal)?;
                Ok(None)
            }
        }
    }

    /// Takes what was kept; it is not there any more.
    fn take(&self, disk: DiskId) -> io::Result<Option<(Left, Vec<u8>)>> {
        let kept = match self.read(disk) {
            Ok(None) => return Ok(None),
            read => read,
        };
        let path = self.path(disk);
        std::fs::remove_file(&path)?;
        atomic_file::flush_directory_of(&path)?;
        let kept = kept.inspect_err(|error| tracing::warn!(%disk, %error, "its bitmaps are lost"));
        Ok(kept.ok().flatten().and_then(|kept| parse(&kept)))
    }

    /// The file of what is kept; none where nothing is.
    fn read(&self, disk: DiskId) -> io::Result<Option<Vec<u8>>> {
        let path = self.path(disk);
        match std::fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Ok(about) if about.len() <= FILE_MAX => std::fs::read(&path).map(Some),
            other => other.and(Err(ErrorKind::FileTooLarge.into())),
        }
    }

    /// What is kept of a disk of a VM that is off, if its files are as they were left; where a snapshot is named, those that it keeps. It
    /// stays there. Blocks.
    ///
    /// # Errors
    /// Those of the files.
    pub fn look(
        &self,
        spec: &VmSpec,
        disk: &DiskSpec,
        snapshot: Option<SnapshotId>,
    ) -> Result<Option<Kept>, Problem> {
        let kept = self.read(disk.disk).map_err(internal)?;
        let Some((then, bitmaps)) = kept.and_then(|kept| parse(&kept)) else { return Ok(None) };
        let home = Home::of(&disk.datastore, spec.vm)?;
        let files = match snapshot {
            Some(snapshot) => layers::open_kept(&home, disk.disk, snapshot)?,
            None => {
                let active = layers::read(&home, disk.disk)?.active();
                Some(layers::open_from(&home, disk.disk, active)?)
            }
        };
        let Some(Files { layers, image, own, .. }) = files else { return Ok(None) };
        let now = left(own.iter().chain([&image]).chain(&layers)).map_err(internal)?;
        if now.as_ref() != Some(&then.files) {
            return Ok(None);
        }
        let bitmaps = KeptBitmaps::parse(bitmaps, disk.size);
        Ok(bitmaps.map(|bitmaps| Kept { left: then, bitmaps }))
    }

    /// Has what was looked at be as this is. Who is killed meanwhile leaves one or the other. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn put(&self, disk: DiskId, kept: &Kept) -> Result<(), Problem> {
        let file = below_line(&kept.left, kept.bitmaps.file()).map_err(internal)?;
        let put = atomic_file::prepare_sparse(&self.path(disk), &file, PRIVATE);
        put.and_then(Prepared::put).map_err(internal)
    }

    /// Removes one bitmap of those that are kept of a disk. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove(&self, disk: &DiskSpec, name: &str) -> Result<(), Problem> {
        let kept = self.read(disk.disk).map_err(internal)?;
        let Some((left, bitmaps)) = kept.and_then(|kept| parse(&kept)) else { return Ok(()) };
        let Some(bitmaps) = KeptBitmaps::parse(bitmaps, disk.size) else { return Ok(()) };
        let mut kept = Kept { left, bitmaps };
        match kept.bitmaps.remove(name) {
            true => self.put(disk.disk, &kept),
            false => Ok(()),
        }
    }

    /// Keeps the bitmaps of a disk of a VM all of whose processes have ended. `began` is when its caller began to wait. Blocks.
    ///
    /// # Errors
    /// Those of the files. `timed-out` where it took so long that others may have written to the disk meanwhile.
    pub fn keep(
        &self,
        directory: &ProcessDir,
        spec: &VmSpec,
        disk: &DiskSpec,
        began: Instant,
    ) -> Result<(), Problem> {
        let mut bitmaps = Vec::new();
        let Ok(file) = File::open(in_run_directory(directory, disk.disk)) else { return Ok(()) };
        file.take(FILE_MAX).read_to_end(&mut bitmaps).map_err(internal)?;
        if !directory.inside(ALL_MARKED).exists() || !has_any(&bitmaps) {
            return Ok(());
        }
        sleep(TICK);
        let home = Home::of(&disk.datastore, spec.vm)?;
        let Some(files) = left_alone(&home, disk.disk, began)? else { return Ok(()) };
        let kept = below_line(&Left { version: VERSION, files }, &bitmaps).map_err(internal)?;
        atomic_file::private_directory(&self.directory).map_err(internal)?;
        let kept = atomic_file::prepare_sparse(&self.path(disk.disk), &kept, PRIVATE);
        let kept = kept.map_err(internal)?;
        // Who waits for this has not said yet that the VM is off.
        if let Err(late) = in_time(began) {
            kept.discard();
            return Err(late);
        }
        kept.put().map_err(internal)?;
        in_time(began).or_else(|late| self.distrust(disk.disk).and(Err(late)))
    }

    /// Removes what is kept of a disk that something else is about to write to. A crash could lose the time of that write, and keep the write
    /// itself. Blocks.
    ///
    /// # Errors
    /// Those of the file system: it is still believed.
    pub fn distrust(&self, disk: DiskId) -> Result<(), Problem> {
        let path = self.path(disk);
        match std::fs::remove_file(&path) {
            Ok(()) => atomic_file::flush_directory_of(&path).map_err(internal),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(internal(error)),
        }
    }

    /// Removes what is kept of a disk that is deleted, or not this host's any more.
    pub fn forget(&self, disk: DiskId) {
        if let Err(error) = remove_if_there(&self.path(disk)) {
            tracing::warn!(%disk, %error, "the dirty bitmaps of a disk are left");
        }
    }
}

/// Notes that the last filter of a VM has ended in order: nothing that it had begun is left to be done, unmarked.
///
/// # Errors
/// Those of the file system.
pub fn note_all_marked(directory: &ProcessDir) -> io::Result<()> {
    File::create(directory.inside(ALL_MARKED)).map(drop)
}

/// Removes the file of a disk that a guest does not have any more. A filter that still serves the disk marks what has no name.
pub fn forget_unplugged(directory: &ProcessDir, disk: DiskId) {
    if let Err(error) = remove_if_there(&in_run_directory(directory, disk)) {
        tracing::warn!(%disk, %error, "the dirty bitmaps of an unplugged disk are left");
    }
}

/// Whether the caller of [`BitmapFiles::keep`], which began to wait then, still waits.
fn in_time(began: Instant) -> Result<(), Problem> {
    if began.elapsed() <= SHORT_TIMEOUT {
        return Ok(());
    }
    let what = "its datastore or the agent's state directory has answered too late";
    Err(Problem::new(ErrorCode::TimedOut, what))
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn in_run_directory(directory: &ProcessDir, disk: DiskId) -> PathBuf {
    directory.inside(&format!("bitmaps-{disk}"))
}

fn below_line(left: &Left, bitmaps: &[u8]) -> serde_json::Result<Vec<u8>> {
    let mut kept = serde_json::to_vec(left)?;
    kept.push(b'\n');
    kept.extend(bitmaps);
    Ok(kept)
}

fn parse(kept: &[u8]) -> Option<(Left, Vec<u8>)> {
    let end = kept.iter().position(|byte| *byte == b'\n')?;
    let left: Left = serde_json::from_slice(&kept[..end]).ok()?;
    (left.version == VERSION).then(|| (left, kept[end + 1..].to_vec()))
}

fn is_as_left(opened: &Open, then: &Left) -> bool {
    let files = opened.shared.own.iter().chain([&opened.file]).chain(&opened.layers);
    left(files).is_ok_and(|now| now.is_some_and(|now| now == then.files))
}

/// How a disk's files are when nobody writes them any more: the image of a process that has ended is closed a moment later. Who waits began to
/// wait then.
fn left_alone(home: &Home, disk: DiskId, began: Instant) -> Result<Option<Vec<LeftFile>>, Problem> {
    loop {
        // Only read: an image in a pool that is opened to be written is in another state from then on.
        let Some(image) = home.read_beside_guest(disk)? else { return Ok(None) };
        let files = layers::open(home, disk, image, Access::ReadBesideGuest)?;
        match left(files.own.iter().chain([&files.image]).chain(&files.layers)) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && in_time(began).is_ok() => {}
            left => return left.map_err(internal),
        }
        // Its mount closes an image when nobody has the file open any more, and so not while it is open here.
        drop(files);
        sleep(TICK);
    }
}

/// How files are now; none where a file system does not say when they were changed. `ResourceBusy` while one is written.
fn left<'a>(files: impl Iterator<Item = &'a File>) -> io::Result<Option<Vec<LeftFile>>> {
    files
        .map(|file| {
            let about = file.metadata()?;
            let (inode, length) = (about.ino(), about.len());
            if fstatfs(file)?.filesystem_type() == FUSE_SUPER_MAGIC {
                let state = image_state::of(file)?;
                let changed = (0, 0);
                return Ok(state.map(|it| LeftFile { inode, length, changed, state: Some(it) }));
            }
            // Some file systems have whole seconds: two changes in one of them look alike.
            if about.ctime_nsec() == 0 {
                return Ok(None);
            }
            let changed = (about.ctime(), about.ctime_nsec());
            Ok(Some(LeftFile { inode, length, changed, state: None }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use jiff::Timestamp;
    use vmseal_api::host::DatastoreLocation;

    use super::super::kept_bitmaps::tests::{SIZE, empty};
    use super::*;
    use crate::filter::Shared;

    fn opened(image: &Path) -> Open {
        let file = OpenOptions::new().read(true).write(true).open(image).unwrap();
        let shared = Shared::default();
        Open { file, layers: Vec::new(), offset: 0, key: None, notice: None, shared }
    }

    #[test]
    fn what_was_kept_is_offered_once_and_only_if_nobody_wrote_to_the_disk() {
        let root = tempfile::tempdir().unwrap();
        let (files, disk) = (BitmapFiles::in_state_directory(root.path()), DiskId::new());
        let image = root.path().join("image");
        std::fs::write(&image, [0; 4096]).unwrap();
        let run = crate::process::run_dir::RunDir::open(&root.path().join("run")).unwrap();
        let vm = run.vm(vmseal_api::id::VmId::new());
        std::fs::create_dir_all(vm.inside("")).unwrap();
        let keep = || {
            sleep(TICK);
            let now = left([&opened(&image).file].into_iter()).unwrap().expect("no such times");
            let mut kept = serde_json::to_vec(&Left { version: VERSION, files: now }).unwrap();
            kept.extend(b"\nmarks");
            atomic_file::private_directory(&files.directory).unwrap();
            std::fs::write(files.path(disk), kept).unwrap();
        };
        let offered = |arrives| {
            let file = files.open(&vm, disk, &opened(&image), arrives).unwrap().unwrap();
            assert!(!files.path(disk).exists(), "what was kept stays, and would be offered again");
            let mut found = vec![0; 5];
            let found = file.read_exact_at(&mut found, 0).map(|()| found);
            found.unwrap_or_default()
        };
        let run_ends = || std::fs::remove_file(in_run_directory(&vm, disk)).unwrap();

        keep();
        assert_eq!(offered(false), b"marks");
        assert_eq!(offered(false), b"marks", "the next filter of the same run goes on");
        run_ends();
        assert_eq!(offered(false), b"", "it is offered once");
        run_ends();

        keep();
        assert_eq!(offered(true), b"", "another host has served the disk");
        run_ends();

        keep();
        opened(&image).file.write_all_at(b"x", 0).unwrap();
        assert_eq!(offered(false), b"", "another program has written to the disk");
        run_ends();

        keep();
        let copy = root.path().join("copy");
        std::fs::copy(&image, &copy).unwrap();
        std::fs::rename(&copy, &image).unwrap();
        assert_eq!(offered(false), b"", "it is another file");
    }

    #[test]
    fn an_image_in_another_state_is_not_as_it_was_left() {
        let line = |more: &str| {
            let files = format!(r#"[{{"inode":1,"length":2,"changed":[0,0]{more}}}]"#);
            format!("{{\"version\":{VERSION},\"files\":{files}}}\nmarks")
        };
        let read = |line: &str| parse(line.as_bytes()).map(|(left, _)| left.files);
        let state = |of: &str| read(&line(&format!(r#","state":"{of}""#))).unwrap();
        // As earlier versions have written it, of a file in a directory.
        let before = read(&line("")).unwrap();
        assert_eq!(before[0].state, None);
        assert_eq!(state("a"), state("a"));
        assert_ne!(state("a"), state("b"));
        assert_ne!(state("a"), before);
        let kept = below_line(&Left { version: VERSION, files: state("a") }, b"marks").unwrap();
        assert_eq!(parse(&kept).unwrap().0.files, state("a"));
        let kept = below_line(&Left { version: VERSION, files: before }, b"marks").unwrap();
        assert_eq!(kept, line("").as_bytes(), "earlier versions would not read it");
    }

    /// What is kept is older than the last use of the disk, which nobody marked.
    #[test]
    fn what_was_kept_is_not_looked_at_where_the_disk_was_used_since() {
        let root = tempfile::tempdir().unwrap();
        let files = BitmapFiles::in_state_directory(root.path());
        atomic_file::private_directory(&files.directory).unwrap();
        let store = root.path().join("store");
        std::fs::create_dir(&store).unwrap();
        let mut disk = crate::rules::tests::disk("data");
        disk.datastore.location = DatastoreLocation::Dir { path: store };
        disk.size = SIZE;
        crate::storage::datastore::probe(&disk.datastore).unwrap();
        let spec = crate::process::run_dir::tests::spec();
        let home = Home::of(&disk.datastore, spec.vm).unwrap();
        let file = home.begin(&spec, &disk, disk.size).unwrap();
        home.finish(disk.disk, &file).unwrap();
        drop(file);
        let image = home.image(disk.disk);
        let keep = || {
            sleep(TICK);
            let now = left([&opened(&image).file].into_iter()).unwrap().expect("no such times");
            let mut bitmaps = KeptBitmaps::parse(empty(), SIZE).unwrap();
            assert!(bitmaps.start("nightly", Timestamp::now()));
            let kept = Kept { left: Left { version: VERSION, files: now }, bitmaps };
            files.put(disk.disk, &kept).unwrap();
            sleep(TICK);
        };
        let is_used = || {
            let kept = files.look(&spec, &disk, None).unwrap();
            kept.is_some_and(|kept| kept.bitmaps.names().eq(["nightly"]))
        };
        assert!(!is_used(), "there is nothing");
        keep();
        assert!(is_used() && is_used(), "it does not stay");
        opened(&image).file.write_all_at(b"x", 0).unwrap();
        assert!(!is_used(), "the disk was written to since");
        keep();
        std::fs::copy(&image, home.path().join("older")).unwrap();
        std::fs::rename(home.path().join("older"), &image).unwrap();
        assert!(!is_used(), "another image was put there");
        keep();
        let grown = DiskSpec { size: 2 * SIZE, ..disk.clone() };
        assert!(files.look(&spec, &grown, None).unwrap().is_none(), "the disk is longer");
    }
}
