//! A file system (FUSE) whose files forget at a power cut what was not made durable: of every change since, any
//! granules may be there, in any combination.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fuser::{
    BackgroundSession, BsdFileFlags, Config, Errno, FileAttr, FileHandle, FileType, Filesystem,
    FopenFlags, Generation, INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, SessionACL, TimeOrNow, WriteFlags,
};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

/// How long the kernel may take to close the files of a dead process.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A change of a file that is not durable.
enum Change {
    Bytes { at: u64, bytes: Vec<u8> },
    Length(u64),
}

struct Image {
    name: String,
    durable: Vec<u8>,
    visible: Vec<u8>,
    changes: Vec<Change>,
    /// How often it is open.
    handles: usize,
}

impl Image {
    fn put(&mut self, at: u64, bytes: Vec<u8>) {
        put(&mut self.visible, at, &bytes);
        self.changes.push(Change::Bytes { at, bytes });
    }

    fn set_length(&mut self, length: u64) {
        self.visible.resize(length as usize, 0);
        self.changes.push(Change::Length(length));
    }

    fn sync(&mut self) {
        for change in self.changes.drain(..) {
            match change {
                Change::Bytes { at, bytes } => put(&mut self.durable, at, &bytes),
                Change::Length(length) => self.durable.resize(length as usize, 0),
            }
        }
    }

    fn cut(&mut self, granule: u64, random: &mut fastrand::Rng) {
        for change in self.changes.drain(..) {
            // All of it, nothing, or some of its granules.
            let (whole, chance) = (random.bool(), random.bool());
            match change {
                Change::Length(length) if chance => self.durable.resize(length as usize, 0),
                Change::Length(_) => {}
                Change::Bytes { at, bytes } => {
                    let mut rest = &bytes[..];
                    let mut at = at;
                    while !rest.is_empty() {
                        let length = (granule - at % granule).min(rest.len() as u64);
                        let (part, after) = rest.split_at(length as usize);
                        let kept = if whole { chance } else { random.bool() };
                        if kept {
                            put(&mut self.durable, at, part);
                        }
                        (at, rest) = (at + length, after);
                    }
                }
            }
        }
        self.visible.clone_from(&self.durable);
    }
}

/// Applies a write: one past the end extends the file.
fn put(content: &mut Vec<u8>, at: u64, bytes: &[u8]) {
    let (at, end) = (at as usize, at as usize + bytes.len());
    content.resize(content.len().max(end), 0);
    content[at..end].copy_from_slice(bytes);
}

struct Inside {
    images: Vec<Image>,
    granule: u64,
    random: fastrand::Rng,
    /// Whether a sync makes anything durable.
    syncs: bool,
}

/// The file system; unmounted when dropped.
pub struct Forgetful {
    place: PathBuf,
    inside: Arc<Mutex<Inside>>,
    _mounted: BackgroundSession,
}

impl Forgetful {
    /// Replaces the files of a directory by links to files here, with all their content durable. `granule`
    /// bytes are written whole or not at all. Only the calling thread and its children see the files.
    ///
    /// # Errors
    /// The system does not let us mount it.
    pub fn mount(
        directory: &Path,
        names: &[&str],
        granule: u64,
        syncs: bool,
        random: fastrand::Rng,
    ) -> io::Result<Self> {
        // A mount in a private namespace is removed with its processes, however they end.
        unshare(CloneFlags::CLONE_NEWNS)?;
        mount(
            None::<&str>,
            "/",
            None::<&str>,
            MsFlags::MS_REC | MsFlags::MS_PRIVATE,
            None::<&str>,
        )?;
        let place = directory.join("forgetful");
        fs::create_dir(&place)?;
        let mut images = Vec::new();
        for name in names {
            let path = directory.join(name);
            if path.exists() {
                let durable = fs::read(&path)?;
                let (visible, changes) = (durable.clone(), Vec::new());
                images.push(Image { name: (*name).into(), durable, visible, changes, handles: 0 });
                fs::remove_file(&path)?;
                symlink(place.join(name), &path)?;
            }
        }
        let inside = Arc::new(Mutex::new(Inside { images, granule, random, syncs }));
        let mut config = Config::default();
        // The filter drops its privileges.
        config.acl = SessionACL::All;
        let mounted = fuser::spawn_mount(Files(Arc::clone(&inside)), &place, &config)?;
        Ok(Self { place, inside, _mounted: mounted })
    }

    /// The power fails, once every process that had the files open is dead.
    pub fn cut(&self) {
        assert!(self.is_closed(), "somebody has a file open");
        let Inside { images, granule, random, .. } = &mut *self.inside();
        images.iter_mut().for_each(|image| image.cut(*granule, random));
    }

    /// Whether no file is open, or none is soon: the kernel closes those of dead processes with a delay.
    fn is_closed(&self) -> bool {
        let until = Instant::now() + TIMEOUT;
        while self.inside().images.iter().any(|image| image.handles > 0) {
            if Instant::now() > until {
                return false;
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        true
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.inside.lock().unwrap()
    }
}

impl Drop for Forgetful {
    fn drop(&mut self) {
        // After a failed test a filter may still be running.
        if !std::thread::panicking() {
            self.is_closed();
        }
        let _ = umount2(&self.place, MntFlags::MNT_DETACH);
    }
}

/// The requests of the kernel.
struct Files(Arc<Mutex<Inside>>);

impl Files {
    /// Does something with an image.
    fn with<T>(&self, ino: INodeNo, run: impl FnOnce(&mut Image) -> T) -> Result<T, Errno> {
        let index = u64::from(ino).checked_sub(FIRST).ok_or(Errno::EISDIR)?;
        let mut inside = self.0.lock().unwrap();
        inside.images.get_mut(index as usize).map(run).ok_or(Errno::ENOENT)
    }
}

const ROOT: u64 = 1;
/// The number of the first image.
const FIRST: u64 = 2;
/// The kernel caches nothing.
const KEPT: Duration = Duration::ZERO;

fn attributes(ino: u64, size: u64) -> FileAttr {
    let root = ino == ROOT;
    FileAttr {
        ino: INodeNo(ino),
        size,
        blocks: size.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if root { FileType::Directory } else { FileType::RegularFile },
        perm: if root { 0o755 } else { 0o666 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Files {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let inside = self.0.lock().unwrap();
        let named = (FIRST..).zip(&inside.images).find(|(_, image)| name == image.name.as_str());
        match named {
            Some((ino, image)) => {
                let about = attributes(ino, image.visible.len() as u64);
                reply.entry(&KEPT, &about, Generation(0));
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let size = match u64::from(ino) {
            ROOT => Ok(0),
            _ => self.with(ino, |image| image.visible.len() as u64),
        };
        match size {
            Ok(size) => reply.attr(&KEPT, &attributes(ino.into(), size)),
            Err(error) => reply.error(error),
        }
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = self.with(ino, |image| {
            if let Some(size) = size {
                image.set_length(size);
            }
            image.visible.len() as u64
        });
        match set {
            Ok(size) => reply.attr(&KEPT, &attributes(ino.into(), size)),
            Err(error) => reply.error(error),
        }
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        match self.with(ino, |image| image.handles += 1) {
            // Past the page cache: its content would survive the power cut.
            Ok(()) => reply.opened(FileHandle(0), FopenFlags::FOPEN_DIRECT_IO),
            Err(error) => reply.error(error),
        }
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        answer(self.with(ino, |image| image.handles -= 1), reply);
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let read = self.with(ino, |image| {
            let start = (offset as usize).min(image.visible.len());
            let end = (start + size as usize).min(image.visible.len());
            image.visible[start..end].to_vec()
        });
        match read {
            Ok(bytes) => reply.data(&bytes),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        match self.with(ino, |image| image.put(offset, data.to_vec())) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    /// A close, which makes nothing durable.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, ino: INodeNo, _: FileHandle, _data: bool, reply: ReplyEmpty) {
        let syncs = self.0.lock().unwrap().syncs;
        let sync = |image: &mut Image| {
            if syncs {
                image.sync()
            }
        };
        answer(self.with(ino, sync), reply);
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let zeroes = mode & (libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE) != 0;
        let keeps = mode & libc::FALLOC_FL_KEEP_SIZE != 0;
        let done = self.with(ino, |image| {
            let (has, end) = (image.visible.len() as u64, offset + length);
            if !keeps && end > has {
                image.set_length(end);
            }
            let there = (image.visible.len() as u64).min(end).saturating_sub(offset);
            if zeroes && there > 0 {
                image.put(offset, vec![0; there as usize]);
            }
        });
        answer(done, reply);
    }
}

fn answer(done: Result<(), Errno>, reply: ReplyEmpty) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}
