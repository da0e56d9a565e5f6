//! The kernel's requests, and which threads do them.
//!
//! ```text
//!  the kernel ──> a thread that takes requests ──> what asks nobody, reads and writes of images: librbd's threads answer them
//!                   └──> names    ──> whatever is about names, attributes, locks
//!                   └──> data     ──> what asks the cluster about an open file: it gets longer, it is an object
//!                   └──> monitors ──> what the monitors know; the room of the pool has threads of its own
//! ```
//! So a thread that takes requests waits for nobody, and names that the cluster does not answer about, or monitors, take no thread from data.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags,
    PollNotifier, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use vmseal_api::rbd::{ASK_TICKET, ASK_WHOLE, WHOLE};

use super::attributes::{KnownTo, tell};
use super::{BLOCK, FileSystem, NAMES_KNOWN, lock, text};
use crate::answers::{Refuse, answer};
use crate::cluster::Held;
use crate::holes::take_room_beside;
use crate::inode::Inode;
use crate::locks::Owner;
use crate::open_file::{FileImage, OpenFile, Part, Store};
use crate::open_files::Rights;
use crate::rooms::Rooms;
use crate::workers::Workers;

/// The longest read or write, in bytes: longer ones come in parts. Linux takes 1 MiB unless told otherwise.
const TRANSFER_MAX: u32 = 1 << 20;

/// The most reads and writes in flight: the queues of several busy disks.
const IN_FLIGHT_MAX: u16 = 1024;

/// The most threads for names, and for data: so many are busy where no placement group answers, with 64 MiB of stacks in all.
const NAMES_MAX: usize = 32;
const DATA_MAX: usize = 32;

/// The most threads for what monitors know: none of them waits for longer than seconds.
const MONITORS_MAX: usize = 4;

/// The most threads for the room of the pool: until there was a first answer they wait as long as monitors may take, for the same one.
const ROOM_MAX: usize = 4;

/// The mode of `fallocate(2)` that makes zeroes.
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE;
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE;

/// How a file is opened: nothing of it is in the page cache, and its writes need not wait for each other.
const OPENED: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

/// The requests for a file system.
pub struct Requests {
    files: Arc<FileSystem>,
    names: Arc<Workers>,
    data: Workers,
    monitors: Workers,
    room: Workers,
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

fn entry(reply: ReplyEntry, (attr, known): (FileAttr, Duration)) {
    reply.entry_with_ttls(&known, &NAMES_KNOWN, &attr, Generation(0));
}

fn attributes(reply: ReplyAttr, (attr, known): (FileAttr, Duration)) {
    reply.attr(&known, &attr);
}

fn done(reply: ReplyEmpty, (): ()) {
    reply.ok();
}

/// Tells how much a pool holds, and how much it can take yet.
fn room(reply: ReplyStatfs, (used, free): (u64, u64)) {
    let block = u64::from(BLOCK);
    let (total, free) = ((used + free) / block, free / block);
    reply.statfs(total, free, free, 0, 0, BLOCK, 255, BLOCK);
}

fn read_image(image: &FileImage, offset: u64, size: u32, reply: ReplyData) {
    let part = image.within(offset..offset.saturating_add(size.into()));
    if part.is_empty() {
        return reply.data(&[]);
    }
    let length = (part.end - part.start) as usize;
    image.image().read(part.start, length, move |read| {
        answer(reply, read, |reply, bytes| reply.data(bytes));
    });
}

/// Writes to an image that is as long as that needs.
fn write_image(image: &Arc<FileImage>, offset: u64, data: &[u8], reply: ReplyWrite) {
    let length = data.len() as u32;
    // The image is closed by a thread of this file system, never by one of librbd's: the kernel does not release the handle
    // before it has this answer.
    let written = Arc::downgrade(image);
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

/// Whether a file is to be longer after it has got room.
fn grows(image: &FileImage, end: u64, mode: i32) -> bool {
    mode & libc::FALLOC_FL_KEEP_SIZE == 0 && end > image.size()
}

/// The image of a file that is to get room up to `end`, and is as long as that needs.
fn image_to_allocate(
    file: &OpenFile,
    store: &Store,
    end: u64,
    mode: i32,
) -> io::Result<Arc<FileImage>> {
    // Of an object zeroes are written, and room is not taken.
    let image = file.image().ok_or_else(unsupported)?;
    if grows(&image, end, mode) {
        file.set_size(store, end)?;
    }
    Ok(image)
}

/// Makes a part of an image zeroes, a hole, or room.
fn allocate(image: Arc<FileImage>, within: Range<u64>, mode: i32, reply: ReplyEmpty) {
    let part = image.within(within);
    if part.is_empty() {
        return reply.ok();
    }
    let ended = move |ended| answer(reply, ended, done);
    match mode & !libc::FALLOC_FL_KEEP_SIZE {
        PUNCH_HOLE => image.image().write_zeroes(part, false, ended),
        ZERO_RANGE => image.image().write_zeroes(part, true, ended),
        0 => take_room_beside(image, part, ended),
        _ => ended(Err(unsupported())),
    }
}

fn unsupported() -> io::Error {
    io::Error::from_raw_os_error(libc::EOPNOTSUPP)
}

/// Has a thread do something.
fn later(
    files: &Arc<FileSystem>,
    workers: &Workers,
    about: Inode,
    work: impl FnOnce(&Arc<FileSystem>) + Send + 'static,
) {
    let (files, inside) = (Arc::clone(files), files.served.enter());
    workers.run(about, move || {
        work(&files);
        // Who ends the process waits until all is closed.
        drop(files);
        drop(inside);
    });
}

impl Requests {
    /// Those for this file system.
    ///
    /// # Errors
    /// The system has no threads.
    pub fn of(files: FileSystem) -> io::Result<Self> {
        Ok(Self {
            files: Arc::new(files),
            names: Arc::new(Workers::new("names", NAMES_MAX)?),
            data: Workers::new("data", DATA_MAX)?,
            monitors: Workers::new("ask-monitors", MONITORS_MAX)?,
            room: Workers::new("ask-room", ROOM_MAX)?,
        })
    }

    /// Has a thread do a request.
    fn later(
        &self,
        workers: &Workers,
        about: Inode,
        work: impl FnOnce(&FileSystem) + Send + 'static,
    ) {
        later(&self.files, workers, about, move |files| work(files));
    }

    /// Has a thread do a request, and answer it.
    fn answered<R: Refuse, T: 'static>(
        &self,
        workers: &Workers,
        about: Inode,
        reply: R,
        work: impl FnOnce(&FileSystem) -> io::Result<T> + Send + 'static,
        with: impl FnOnce(R, T) + Send + 'static,
    ) {
        self.later(workers, about, move |files| answer(reply, work(files), with));
    }
}

#[allow(clippy::too_many_arguments)] // FUSE's
impl Filesystem for Requests {
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
        let (directory, name, names) = (inode(parent), name.to_owned(), Arc::clone(&self.names));
        later(&self.files, &self.names, directory, move |files| {
            let found = match files.find(directory, &name) {
                Ok(found) => found,
                Err(error) => return reply.refuse(error),
            };
            let describe = move |files: &FileSystem| {
                answer(reply, files.found(found, directory, &name), entry);
            };
            // Of a directory nobody is asked.
            if found.is_directory() {
                return describe(files);
            }
            // It is about the file from here on: one that hangs keeps no threads from the directory's other files.
            later(files, &names, found, move |files| describe(files));
        });
    }

    fn forget(&self, _: &Request, ino: INodeNo, nlookup: u64) {
        self.files.forget(inode(ino), nlookup);
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let ino = inode(ino);
        // Of a directory nobody is asked.
        if ino.is_directory() {
            return answer(reply, self.files.attributes(ino), attributes);
        }
        self.answered(
            &self.names,
            ino,
            reply,
            move |files| files.describe(ino, Rooms::ask),
            attributes,
        );
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
        let set = move |files: &FileSystem| {
            files.give(ino, user, group);
            size.map_or(Ok(()), |size| files.set_size(ino, size))?;
            files.attributes(ino)
        };
        // Of a directory nobody is asked.
        if ino.is_directory() {
            return answer(reply, set(&self.files), attributes);
        }
        self.answered(&self.names, ino, reply, set, attributes);
    }

    fn mkdir(&self, _: &Request, parent: INodeNo, name: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        let (parent, name) = (inode(parent), name.to_owned());
        self.answered(
            &self.names,
            parent,
            reply,
            move |files| files.make_directory(parent, &name),
            entry,
        );
    }

    fn unlink(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (parent, name) = (inode(parent), name.to_owned());
        self.answered(
            &self.names,
            parent,
            reply,
            move |files| files.unlink_file(parent, &name),
            done,
        );
    }

    fn rmdir(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (parent, name) = (inode(parent), name.to_owned());
        let remove =
            move |files: &FileSystem| files.directories.remove_directory(parent, text(&name)?);
        self.answered(&self.names, parent, reply, remove, done);
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
        let (parent, to_parent) = (inode(parent), inode(newparent));
        let (name, to_name) = (name.to_owned(), newname.to_owned());
        let rename = move |files: &FileSystem| {
            let (from, to) = ((parent, name.as_os_str()), (to_parent, to_name.as_os_str()));
            files.rename_entry(from, to, flags)
        };
        self.answered(&self.names, parent, reply, rename, done);
    }

    fn link(
        &self,
        _: &Request,
        ino: INodeNo,
        newparent: INodeNo,
        newname: &OsStr,
        reply: ReplyEntry,
    ) {
        let (ino, parent, name) = (inode(ino), inode(newparent), newname.to_owned());
        self.answered(
            &self.names,
            parent,
            reply,
            move |files| files.add_link(ino, parent, &name),
            entry,
        );
    }

    fn open(&self, _: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let (ino, rights) = (inode(ino), Rights::of(flags));
        let open = move |files: &FileSystem| files.open.open(&files.store, ino, rights);
        self.answered(&self.names, ino, reply, open, |reply: ReplyOpen, handle| {
            reply.opened(FileHandle(handle), OPENED);
        });
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
        let (parent, name) = (inode(parent), name.to_owned());
        let make = move |files: &FileSystem| files.make_file(parent, &name, flags);
        self.answered(
            &self.names,
            parent,
            reply,
            make,
            |reply: ReplyCreate, (attr, known, handle)| {
                reply.created(&known, &attr, Generation(0), FileHandle(handle), OPENED);
            },
        );
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
        let file = match self.files.open.of_handle(fh.0) {
            Ok(file) => file,
            Err(error) => return reply.refuse(error),
        };
        if let Some(image) = file.image_now() {
            return read_image(&image, offset, size, reply);
        }
        let ino = inode(ino);
        self.later(&self.data, ino, move |files| {
            let image = file.image();
            drop(file);
            if let Some(image) = image {
                return read_image(&image, offset, size, reply);
            }
            let read = files.read_object(ino, offset, size);
            answer(reply, read, |reply, bytes| reply.data(&bytes));
        });
    }

    fn write(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let file = match self.files.open.of_handle(fh.0) {
            Ok(file) => file,
            Err(error) => return reply.refuse(error),
        };
        let end = offset.saturating_add(data.len() as u64);
        if let Some(image) = file.image_now().filter(|image| end <= image.image().size()) {
            return write_image(&image, offset, data, reply);
        }
        let data = data.to_vec();
        self.later(&self.data, inode(ino), move |files| {
            let part = file.write(&files.store, offset, &data);
            drop(file);
            match part {
                Ok(Part::Image(image)) => write_image(&image, offset, &data, reply),
                Ok(Part::Done) => reply.written(data.len() as u32),
                Err(error) => reply.refuse(error),
            }
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
        let (ino, owner) = (inode(ino), lock_owner.0);
        // As with most files: then nobody is asked.
        if !self.files.locks.has(ino) {
            return reply.ok();
        }
        let unlock =
            move |files: &FileSystem| files.locks.unlock(ino, |other| other.owner == owner);
        self.answered(&self.names, ino, reply, unlock, done);
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
        let (ino, inside) = (inode(ino), self.files.releases.enter());
        self.later(&self.names, ino, move |files| files.release_handle(ino, fh.0, reply, inside));
    }

    fn fsync(&self, _: &Request, ino: INodeNo, fh: FileHandle, _: bool, reply: ReplyEmpty) {
        let file = match self.files.open.of_handle(fh.0) {
            Ok(file) => file,
            Err(error) => return reply.refuse(error),
        };
        if let Some(image) = file.image_now().filter(|image| !image.has_grown()) {
            return image.image().flush(move |flushed| answer(reply, flushed, done));
        }
        // Objects are durable when they are written.
        self.later(&self.data, inode(ino), move |files| {
            let flushed = file.flush(&files.store);
            drop(file);
            answer(reply, flushed, done);
        });
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.ok();
    }

    fn opendir(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let ino = inode(ino);
        let list = move |files: &FileSystem| {
            files.directories.list(ino).map(|entries| files.keep_listing(entries))
        };
        self.answered(&self.names, ino, reply, list, |reply: ReplyOpen, handle| {
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
        let entries = lock(&self.files.listings).get(&fh.0).cloned().unwrap_or_default();
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
        lock(&self.files.listings).remove(&fh.0);
        reply.ok();
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        if let Some(known) = self.files.room.known() {
            return room(reply, known);
        }
        self.answered(&self.room, Inode::ROOT, reply, |files| files.room.ask(), room);
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
        let (ino, owner) = (inode(ino), Owner { owner: lock_owner.0, handle: fh.0 });
        let look = move |files: &FileSystem| match held(typ) {
            Some(wanted) => files.locks.is_free(ino, owner, wanted),
            None => Ok(true),
        };
        self.answered(&self.names, ino, reply, look, move |reply: ReplyLock, free| {
            let unlocked = i32::from(libc::F_UNLCK as i16);
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
        let set = move |files: &FileSystem| match held(typ) {
            // Waiting for another host's lock is not possible without asking again and again.
            Some(_) if sleep => Err(unsupported()),
            Some(wanted) => files.locks.lock(ino, owner, wanted),
            None => files.locks.unlock(ino, |other| other.owner == owner.owner).map(|()| true),
        };
        self.answered(&self.names, ino, reply, set, |reply: ReplyEmpty, done| match done {
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
                let ticket = self.files.ticket(inode(of), fh.0);
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
        let (of, name, value) = (inode(of), name.to_owned(), value.to_vec());
        let set = move |files: &FileSystem| files.set_attribute(of, &name, &value, flags);
        self.answered(&self.names, of, reply, set, done);
    }

    fn getxattr(&self, _: &Request, of: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let of = inode(of);
        let workers = match KnownTo::of(of, name) {
            KnownTo::Process => return tell(reply, self.files.attribute(of, name), size),
            KnownTo::Monitors => &self.monitors,
            KnownTo::Pool => &self.names,
        };
        let name = name.to_owned();
        self.later(workers, of, move |files| tell(reply, files.attribute(of, &name), size));
    }

    fn listxattr(&self, _: &Request, of: INodeNo, size: u32, reply: ReplyXattr) {
        let of = inode(of);
        self.later(&self.names, of, move |files| tell(reply, files.attribute_names(of), size));
    }

    fn removexattr(&self, _: &Request, of: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (of, name) = (inode(of), name.to_owned());
        self.answered(&self.names, of, reply, move |files| files.remove_attribute(of, &name), done);
    }

    fn fallocate(
        &self,
        _: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let file = match self.files.open.of_handle(fh.0) {
            Ok(file) => file,
            Err(error) => return reply.refuse(error),
        };
        let end = offset.saturating_add(length);
        if let Some(image) = file.image_now().filter(|image| !grows(image, end, mode)) {
            return allocate(image, offset..end, mode, reply);
        }
        self.later(&self.data, inode(ino), move |files| {
            let image = image_to_allocate(&file, &files.store, end, mode);
            drop(file);
            match image {
                Ok(image) => allocate(image, offset..end, mode, reply),
                Err(error) => reply.refuse(error),
            }
        });
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
        let ino = inode(ino);
        let seek = move |files: &FileSystem| files.seek(fh.0, ino, from, data);
        self.answered(&self.data, ino, reply, seek, |reply: ReplyLseek, at| {
            reply.offset(i64::try_from(at).unwrap_or(i64::MAX));
        });
    }
}
