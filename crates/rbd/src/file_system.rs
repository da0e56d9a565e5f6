//! The pool as a directory tree, over FUSE.
//!
//! Every request asks the cluster, as other hosts may have changed what it is about; only what is open is known here. Reads and writes of
//! images are answered by librbd's threads when they are done, all others by the thread that got the request.

mod attributes;
mod fence;
mod metadata;
mod release;
mod seeking;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use vmseal_api::fencing::Fencing;
use vmseal_api::rbd::{ASK_TICKET, ASK_WHOLE, Mounted, WHOLE};

use crate::answers::{Refuse, answer};
use crate::channel::gate::Gate;
use crate::channel::service::Service;
use crate::cluster::{Cluster, Held};
use crate::directory::{Directories, Entry, Nameless};
use crate::holes::take_room_beside;
use crate::image_layout;
use crate::inode::Inode;
use crate::locks::{Locks, Owner};
use crate::open_file::{OpenFile, Part, Store};
use crate::open_files::{OpenFiles, Rights};
use crate::osds::Osds;
use crate::rooms::Rooms;

/// How long the kernel may know names: not at all, as other hosts change them.
const NAMES_KNOWN: Duration = Duration::ZERO;

/// How long the kernel may know the length of an image that is open here to be written, and its room: nobody else changes them.
const LENGTH_KNOWN: Duration = Duration::from_secs(1);

/// The longest read or write, in bytes: longer ones come in parts. Linux takes 1 MiB unless told otherwise.
const TRANSFER_MAX: u32 = 1 << 20;

/// The most reads and writes in flight: the queues of several busy disks.
const IN_FLIGHT_MAX: u16 = 1024;

/// How long the room of the pool is known: asking for it is work for a monitor.
const ROOM_KNOWN: Duration = Duration::from_secs(2);

/// In what blocks the room is told, in bytes.
const BLOCK: u32 = 4096;

/// The mode of `fallocate(2)` that makes zeroes.
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE;

/// The file system of a pool.
pub struct FileSystem {
    cluster: Arc<Cluster>,
    /// The pool of names and headers, and that of data after it where it is another one.
    pools: Vec<String>,
    mounted: Mounted,
    store: Arc<Store>,
    directories: Arc<Directories>,
    open: Arc<OpenFiles>,
    locks: Arc<Locks>,
    /// For filters that do without FUSE.
    service: Arc<Service>,
    /// Left by the service when nobody uses it any more.
    served: Arc<Gate>,
    /// Handles that are being released.
    releases: Arc<Gate>,
    listings: Mutex<HashMap<u64, Arc<Vec<Entry>>>>,
    last_listing: AtomicU64,
    /// A name of each file that the kernel knows.
    names: Mutex<HashMap<Inode, (Inode, String)>>,
    /// Directories that were given to other users ([`metadata`]).
    given: Mutex<HashMap<Inode, (u32, u32)>>,
    room: Mutex<Option<(Instant, (u64, u64))>>,
    rooms: Rooms,
    osds: Osds,
    /// Whether the user may fence, and when the monitors have said so.
    fencing: Mutex<Option<(Instant, Fencing)>>,
    owner: (u32, u32),
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text(name: &OsStr) -> io::Result<&str> {
    name.to_str().ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
}

fn inode(of: INodeNo) -> Inode {
    Inode(of.0)
}

/// What a lock of `fcntl(2)` is; none: no lock.
fn held(kind: i32) -> Option<Held> {
    match kind as libc::c_int {
        libc::F_RDLCK => Some(Held::Shared),
        libc::F_WRLCK => Some(Held::Exclusive),
        _ => None,
    }
}

/// How a file is opened: nothing of it is in the page cache, and its writes need not wait for each other.
const OPENED: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

impl FileSystem {
    /// The file system of a store: its pools, and who serves it.
    #[must_use]
    pub fn new(
        cluster: Arc<Cluster>,
        (pools, mounted): (Vec<String>, Mounted),
        store: Store,
        locks: Arc<Locks>,
    ) -> Self {
        let directories = Arc::new(Directories::new(Arc::clone(&store.pool)));
        let owner = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        let (store, open) = (Arc::new(store), Arc::new(OpenFiles::default()));
        let served = Arc::<Gate>::default();
        let service = Service::new(Arc::clone(&open), Arc::clone(&store), served.enter());
        Self {
            osds: Osds::of(Arc::clone(&cluster)),
            cluster,
            pools,
            mounted,
            rooms: Rooms::of(Arc::clone(&store.pool)),
            store,
            directories,
            locks,
            open,
            service: Arc::new(service),
            served,
            releases: Arc::default(),
            listings: Mutex::default(),
            last_listing: AtomicU64::new(0),
            names: Mutex::default(),
            given: Mutex::default(),
            room: Mutex::default(),
            fencing: Mutex::default(),
            owner,
        }
    }

    fn known(&self, inode: Inode, directory: Inode, name: &str) {
        if !inode.is_directory() {
            lock(&self.names).insert(inode, (directory, name.to_owned()));
        }
    }

    fn look_up(&self, directory: Inode, name: &OsStr) -> io::Result<(FileAttr, Duration)> {
        let name = text(name)?;
        let found = self.directories.look_up(directory, name)?;
        let inode = found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        self.known(inode, directory, name);
        self.attributes(inode)
    }

    fn make_file(
        &self,
        directory: Inode,
        name: &OsStr,
        flags: i32,
    ) -> io::Result<(FileAttr, Duration, u64)> {
        let name = text(name)?;
        let inode = match self.directories.add(directory, name, Inode::new_file()) {
            Ok(()) => {
                let made = self.directories.look_up(directory, name)?;
                let pool = &self.store.pool;
                made.map_or(Ok(()), |made| image_layout::inherit(pool, directory, made))?;
                made
            }
            Err(error)
                if error.kind() == io::ErrorKind::AlreadyExists && flags & libc::O_EXCL == 0 =>
            {
                self.directories.look_up(directory, name)?
            }
            Err(error) => return Err(error),
        };
        let inode = inode.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        if inode.is_directory() {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        }
        self.known(inode, directory, name);
        let handle = self.open.open(&self.store, inode, Rights::of(OpenFlags(flags)))?;
        match self.attributes(inode) {
            Ok((attr, known)) => Ok((attr, known, handle)),
            Err(error) => {
                self.close(inode, handle);
                Err(error)
            }
        }
    }

    fn unlink_file(&self, directory: Inode, name: &OsStr) -> io::Result<()> {
        let nameless = self.directories.remove(directory, text(name)?)?;
        self.gone(nameless)
    }

    fn gone(&self, nameless: Option<Nameless>) -> io::Result<()> {
        match nameless.and_then(|nameless| self.open.lost_name(nameless)) {
            Some(nameless) => self.directories.discard(nameless),
            None => Ok(()),
        }
    }

    fn rename_entry(
        &self,
        (directory, name): (Inode, &OsStr),
        (new_directory, new_name): (Inode, &OsStr),
        flags: RenameFlags,
    ) -> io::Result<()> {
        if directory != new_directory {
            return Err(io::Error::from_raw_os_error(libc::EXDEV));
        }
        if !RenameFlags::RENAME_NOREPLACE.contains(flags) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let must_be_free = flags.contains(RenameFlags::RENAME_NOREPLACE);
        let (name, new_name) = (text(name)?, text(new_name)?);
        let nameless = self.directories.rename(directory, name, new_name, must_be_free)?;
        self.gone(nameless)?;
        if let Some(inode) = self.directories.look_up(directory, new_name)? {
            self.known(inode, directory, new_name);
            if let Some(file) = self.open.get(inode) {
                file.name_image(new_name);
            }
        }
        Ok(())
    }

    fn add_link(
        &self,
        inode: Inode,
        directory: Inode,
        name: &OsStr,
    ) -> io::Result<(FileAttr, Duration)> {
        let known = lock(&self.names).get(&inode).cloned();
        let (parent, known) = known.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        self.directories.link(inode, (parent, &known), directory, text(name)?)?;
        self.attributes(inode)
    }

    /// Does something with a file that may not be open.
    fn with_file<T>(
        &self,
        inode: Inode,
        writable: bool,
        work: impl FnOnce(&OpenFile) -> io::Result<T>,
    ) -> io::Result<T> {
        let rights = Rights { reads: true, writes: writable };
        let handle = self.open.open(&self.store, inode, rights)?;
        let done = self.open.of_handle(handle).and_then(|file| work(&file));
        self.close(inode, handle);
        done
    }

    fn set_size(&self, inode: Inode, size: u64) -> io::Result<()> {
        if inode.is_directory() {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        }
        self.with_file(inode, true, |file| {
            let was_image = file.image().is_some();
            file.set_size(&self.store, size)?;
            if !was_image && let Some((_, name)) = lock(&self.names).get(&inode).cloned() {
                file.name_image(&name);
            }
            Ok(())
        })
    }

    fn room(&self) -> io::Result<(u64, u64)> {
        let mut room = lock(&self.room);
        if let Some((_, told)) = room.filter(|(at, _)| at.elapsed() < ROOM_KNOWN) {
            return Ok(told);
        }
        // That of the data.
        let told = self.cluster.room(self.pools.last().map_or("", String::as_str))?;
        *room = Some((Instant::now(), told));
        Ok(told)
    }

    fn read_object(&self, inode: Inode, offset: u64, length: u32) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length as usize];
        match self.store.pool.read(&inode.object(), offset, &mut bytes) {
            Ok(count) => bytes.truncate(count),
            Err(error) if error.kind() == io::ErrorKind::NotFound => bytes.clear(),
            Err(error) => return Err(error),
        }
        Ok(bytes)
    }
}

#[allow(clippy::too_many_arguments)] // FUSE's
impl Filesystem for FileSystem {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_POSIX_LOCKS,
        ];
        for wanted in wanted {
            // Where the kernel has it; without it requests wait for each other.
            let _ = config.add_capabilities(wanted);
        }
        let _ = config.set_max_write(TRANSFER_MAX);
        let _ = config.set_max_background(IN_FLIGHT_MAX);
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self.look_up(inode(parent), name);
        answer(reply, found, |reply, (attr, known)| {
            reply.entry_with_ttls(&known, &NAMES_KNOWN, &attr, Generation(0));
        });
    }

    fn forget(&self, _: &Request, ino: INodeNo, _: u64) {
        lock(&self.names).remove(&inode(ino));
        lock(&self.given).remove(&inode(ino));
        self.rooms.forget(inode(ino));
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        answer(reply, self.describe(inode(ino), Rooms::ask), |reply, (attr, known)| {
            reply.attr(&known, &attr)
        });
    }

    fn setattr(
        &self,
        _: &Request,
        ino: INodeNo,
        _: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let ino = inode(ino);
        self.give(ino, user, group);
        let set = size.map_or(Ok(()), |size| self.set_size(ino, size));
        answer(reply, set.and_then(|()| self.attributes(ino)), |reply, (attr, known)| {
            reply.attr(&known, &attr);
        });
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let directory = Inode::new_directory();
        let made = text(name).and_then(|name| self.directories.add(inode(parent), name, directory));
        answer(reply, made.and_then(|()| self.attributes(directory)), |reply, (attr, known)| {
            reply.entry_with_ttls(&known, &NAMES_KNOWN, &attr, Generation(0));
        });
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.unlink_file(inode(parent), name), |reply, ()| reply.ok());
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let removed =
            text(name).and_then(|name| self.directories.remove_directory(inode(parent), name));
        answer(reply, removed, |reply, ()| reply.ok());
    }

    fn rename(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((inode(parent), name), (inode(newparent), newname));
        answer(reply, self.rename_entry(from, to, flags), |reply, ()| reply.ok());
    }

    fn link(
        &self,
        _: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let linked = self.add_link(inode(ino), inode(newparent), newname);
        answer(reply, linked, |reply, (attr, known)| {
            reply.entry_with_ttls(&known, &NAMES_KNOWN, &attr, Generation(0));
        });
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.open.open(&self.store, inode(ino), Rights::of(flags));
        answer(reply, opened, |reply, handle| reply.opened(FileHandle(handle), OPENED));
    }

    fn create(
        &self,
        _: &Request,
        parent: INodeNo,
        name: &OsStr,
        _: u32,
        _: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let made = self.make_file(inode(parent), name, flags);
        answer(reply, made, |reply, (attr, known, handle)| {
            reply.created(&known, &attr, Generation(0), FileHandle(handle), OPENED);
        });
    }

    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let file = match self.open.of_handle(fh.0) {
            Ok(file) => file,
            Err(error) => return reply.refuse(error),
        };
        let Some(image) = file.image() else {
            let read = self.read_object(inode(ino), offset, size);
            return answer(reply, read, |reply, bytes| reply.data(&bytes));
        };
        let part = image.within(offset..offset.saturating_add(size.into()));
        if part.is_empty() {
            return reply.data(&[]);
        }
        let length = (part.end - part.start) as usize;
        image.image().read(part.start, length, move |read| {
            answer(reply, read, |reply, bytes| reply.data(bytes));
        });
    }

    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let length = data.len() as u32;
        let file = self.open.of_handle(fh.0);
        let part = file.and_then(|file| file.write(&self.store, offset, data));
        let image = match part {
            Ok(Part::Image(image)) => image,
            Ok(Part::Done) => return reply.written(length),
            Err(error) => return reply.refuse(error),
        };
        // The image is closed by a thread of this file system, never by one of librbd's: the kernel does not release the handle
        // before it has this answer.
        let written = Arc::downgrade(&image);
        image.image().write(offset, data, move |done| {
            answer(reply, done, |reply, ()| {
                if let Some(image) = written.upgrade() {
                    image.reaches(offset + u64::from(length));
                    // Not the last one: the handle has it.
                    drop(image);
                }
                reply.written(length);
            });
        });
    }

    /// A process closes the file, and gives up its own locks with that; those of open files stay.
    fn flush(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        let unlocked = self.locks.unlock(inode(ino), |other| other.owner == lock_owner.0);
        answer(reply, unlocked, |reply, ()| reply.ok());
    }

    fn release(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.release_handle(inode(ino), fh.0, reply);
    }

    fn fsync(&self, _: &Request, _: INodeNo, fh: FileHandle, _: bool, reply: ReplyEmpty) {
        let file = match self.open.of_handle(fh.0) {
            Ok(file) => file,
            Err(error) => return reply.refuse(error),
        };
        match file.image() {
            // Objects are durable when they are written.
            None => reply.ok(),
            Some(image) if !image.has_grown() => {
                image.image().flush(move |done| answer(reply, done, |reply, ()| reply.ok()));
            }
            Some(_) => answer(reply, file.flush(&self.store), |reply, ()| reply.ok()),
        }
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        answer(reply, self.directories.list(inode(ino)), |reply, entries| {
            let handle = self.last_listing.fetch_add(1, Ordering::Relaxed) + 1;
            lock(&self.listings).insert(handle, Arc::new(entries));
            reply.opened(FileHandle(handle), FopenFlags::empty());
        });
    }

    fn readdir(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let entries = lock(&self.listings).get(&fh.0).cloned().unwrap_or_default();
        let dots = [(ino, "."), (ino, "..")];
        let dots = dots.iter().map(|(ino, name)| (*ino, FileType::Directory, *name));
        let named = entries.iter().map(|entry| {
            let directory = entry.inode.is_directory();
            let kind = if directory { FileType::Directory } else { FileType::RegularFile };
            (INodeNo(entry.inode.0), kind, entry.name.as_str())
        });
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        for (index, (ino, kind, name)) in dots.chain(named).enumerate().skip(from) {
            if reply.add(ino, index as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn releasedir(&self, _: &Request, _: INodeNo, fh: FileHandle, _: OpenFlags, reply: ReplyEmpty) {
        lock(&self.listings).remove(&fh.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        answer(reply, self.room(), |reply, (used, free)| {
            let block = u64::from(BLOCK);
            let (total, free) = ((used + free) / block, free / block);
            reply.statfs(total, free, free, 0, 0, BLOCK, 255, BLOCK);
        });
    }

    /// The kernel then knows that files are always ready.
    fn poll(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: PollNotifier,
        _: PollEvents,
        _: PollFlags,
        reply: ReplyPoll,
    ) {
        reply.error(Errno::ENOSYS);
    }

    fn getlk(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        _: u32,
        reply: ReplyLock,
    ) {
        let owner = Owner { owner: lock_owner.0, handle: fh.0 };
        let free = match held(typ) {
            Some(wanted) => self.locks.is_free(inode(ino), owner, wanted),
            None => Ok(true),
        };
        let unlocked = i32::from(libc::F_UNLCK as i16);
        answer(reply, free, |reply, free| {
            let kind = if free { unlocked } else { i32::from(libc::F_WRLCK as i16) };
            reply.locked(start, end, kind, 0);
        });
    }

    fn setlk(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        _: u64,
        _: u64,
        typ: i32,
        _: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let (ino, owner) = (inode(ino), Owner { owner: lock_owner.0, handle: fh.0 });
        let done = match held(typ) {
            // Waiting for another host's lock is not possible without asking again and again.
            Some(_) if sleep => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
            Some(wanted) => self.locks.lock(ino, owner, wanted),
            None => self.locks.unlock(ino, |other| other.owner == owner.owner).map(|()| true),
        };
        answer(reply, done, |reply, done| match done {
            true => reply.ok(),
            false => reply.error(Errno::EAGAIN),
        });
    }

    fn ioctl(
        &self,
        _: &Request,
        of: INodeNo,
        fh: FileHandle,
        _: IoctlFlags,
        cmd: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        match cmd {
            ASK_WHOLE => reply.ioctl(0, &WHOLE.to_ne_bytes()),
            ASK_TICKET => {
                let ticket = self.ticket(inode(of), fh.0);
                answer(reply, ticket, |reply, ticket| reply.ioctl(0, &ticket));
            }
            _ => reply.error(Errno::ENOTTY),
        }
    }

    fn setxattr(
        &self,
        _: &Request,
        of: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _: u32,
        reply: ReplyEmpty,
    ) {
        answer(reply, self.set_attribute(inode(of), name, value, flags), |reply, ()| reply.ok());
    }

    fn getxattr(&self, _: &Request, of: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        attributes::tell(reply, self.attribute(inode(of), name), size);
    }

    fn listxattr(&self, _: &Request, of: INodeNo, size: u32, reply: ReplyXattr) {
        attributes::tell(reply, self.attribute_names(inode(of)), size);
    }

    fn removexattr(&self, _: &Request, of: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        answer(reply, self.remove_attribute(inode(of), name), |reply, ()| reply.ok());
    }

    fn fallocate(
        &self,
        _: &Request,
        _: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let unsupported = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
        let file = match self.open.of_handle(fh.0) {
            Ok(file) => file,
            Err(error) => return reply.refuse(error),
        };
        // Of an object zeroes are written, and room is not taken.
        let Some(image) = file.image() else { return reply.refuse(unsupported()) };
        let end = offset.saturating_add(length);
        let change = mode & !libc::FALLOC_FL_KEEP_SIZE;
        let grows = mode & libc::FALLOC_FL_KEEP_SIZE == 0 && end > image.size();
        if grows && let Err(error) = file.set_size(&self.store, end) {
            return reply.refuse(error);
        }
        let part = image.within(offset..end);
        if part.is_empty() {
            return reply.ok();
        }
        let done = move |done| answer(reply, done, |reply: ReplyEmpty, ()| reply.ok());
        match change {
            PUNCH_HOLE => image.image().write_zeroes(part, false, done),
            ZERO_RANGE => image.image().write_zeroes(part, true, done),
            0 => take_room_beside(image, part, done),
            _ => done(Err(unsupported())),
        }
    }

    fn lseek(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let data = match whence {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return reply.refuse(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        let Ok(from) = u64::try_from(offset) else {
            return reply.refuse(io::Error::from_raw_os_error(libc::ENXIO));
        };
        let found = self.seek(fh.0, inode(ino), from, data);
        answer(reply, found, |reply, at| reply.offset(i64::try_from(at).unwrap_or(i64::MAX)));
    }
}
