//! The pool as a directory tree, over FUSE.
//!
//! Every request asks the cluster, as other hosts may have changed what it is about; only what is open is known here. Which thread does that
//! is for [`Requests`].

mod attributes;
mod fence;
mod known;
mod metadata;
mod release;
mod requests;
mod seeking;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fuser::{FileAttr, OpenFlags, RenameFlags};
use vmseal_api::fencing::Fencing;
use vmseal_api::osd_encryption::OsdEncryption;
use vmseal_api::rbd::Mounted;

use self::known::{KnownInodes, Owner};
use crate::channel::gate::Gate;
use crate::channel::service::Service;
use crate::cluster::{Cluster, MONITORS_SECONDS};
use crate::directory::{Directories, Entry, Nameless};
use crate::image_layout;
use crate::inode::Inode;
use crate::locks::Locks;
use crate::monitors::{Good, Question};
use crate::open_file::{OpenFile, Store};
use crate::open_files::{OpenFiles, Rights};
use crate::osds;
use crate::pools;
use crate::rooms::Rooms;

pub use self::requests::Requests;

/// How long the kernel may know names: not at all, as other hosts change them.
const NAMES_KNOWN: Duration = Duration::ZERO;

/// How long the kernel may know the length of an image that is open here to be written, and its room: nobody else changes them.
const LENGTH_KNOWN: Duration = Duration::from_secs(1);

/// How long it is known what room the pool has and how it keeps data: asking for it is work for a monitor.
const POOL_KNOWN: Good = Good { answer: Duration::from_secs(2), error: Duration::from_secs(2) };

/// How long a request waits for the first answer about the room: as long as monitors may take. Who has a disk opened asks on what file system
/// it is, which comes with the room, and would fail right after a process of this mount has taken another one's place.
const ROOM_FIRST: Duration = Duration::from_secs(MONITORS_SECONDS);

/// In what blocks the room is told, in bytes.
const BLOCK: u32 = 4096;

/// The file system of a pool.
pub struct FileSystem {
    cluster: Arc<Cluster>,
    mounted: Mounted,
    store: Arc<Store>,
    directories: Arc<Directories>,
    open: Arc<OpenFiles>,
    locks: Arc<Locks>,
    /// For filters that do without FUSE.
    service: Arc<Service>,
    /// Left by the service, and by each request that a thread does, when they have ended.
    served: Arc<Gate>,
    /// Handles that are being released.
    releases: Arc<Gate>,
    listings: Mutex<HashMap<u64, Arc<Vec<Entry>>>>,
    last_listing: AtomicU64,
    /// What the kernel knows: names of files, and the directories that were given to other users ([`metadata`]).
    known: KnownInodes,
    /// The room of the pool, in bytes: what it holds, and what it can take yet.
    room: Question<(u64, u64)>,
    /// The value of `POOLS_ATTRIBUTE`.
    facts: Question<Vec<u8>>,
    /// Whether the user may fence.
    fencing: Question<Fencing>,
    /// Whether the cluster's OSDs are encrypted.
    osds: Question<OsdEncryption>,
    rooms: Rooms,
    owner: Owner,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text(name: &OsStr) -> io::Result<&str> {
    name.to_str().ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
}

/// What room a pool has.
fn room(cluster: &Arc<Cluster>, pool: String) -> Question<(u64, u64)> {
    let cluster = Arc::clone(cluster);
    Question::needed("what room the pool has", POOL_KNOWN, ROOM_FIRST, move || {
        pools::room(&cluster, &pool)
    })
}

impl FileSystem {
    /// The file system of a store: its pools (that of names and headers, and that of data after it where it is another one), and who
    /// serves it. The monitors are asked for its room at once.
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
        // That of the data.
        let room = room(&cluster, pools.last().cloned().unwrap_or_default());
        room.begin();
        Self {
            room,
            facts: attributes::facts(&cluster, pools),
            fencing: fence::rights(&cluster),
            osds: osds::encryption(&cluster),
            cluster,
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
            known: KnownInodes::default(),
            owner,
        }
    }

    /// Does what a look-up is answered with, and counts the look-up; not where that fails, as the kernel then counts none either.
    fn counted<T>(&self, inode: Inode, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        // First: the kernel may forget it as soon as it has the answer.
        self.known.looked_up(inode);
        work().inspect_err(|_| self.forget(inode, 1))
    }

    fn forget(&self, inode: Inode, look_ups: u64) {
        if self.known.forget(inode, look_ups) {
            self.rooms.forget(inode);
        }
    }

    /// What has a name: asks about the directory alone.
    fn find(&self, directory: Inode, name: &OsStr) -> io::Result<Inode> {
        let found = self.directories.look_up(directory, text(name)?)?;
        found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))
    }

    /// Describes what [`FileSystem::find`] has found: asks about that alone.
    fn found(
        &self,
        inode: Inode,
        directory: Inode,
        name: &OsStr,
    ) -> io::Result<(FileAttr, Duration)> {
        let name = text(name)?;
        self.counted(inode, || {
            self.known.is_named(inode, directory, name);
            self.attributes(inode)
        })
    }

    fn make_directory(&self, parent: Inode, name: &OsStr) -> io::Result<(FileAttr, Duration)> {
        let directory = Inode::new_directory();
        self.directories.add(parent, text(name)?, directory)?;
        self.counted(directory, || self.attributes(directory))
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
        self.counted(inode, || {
            self.known.is_named(inode, directory, name);
            let handle = self.open.open(&self.store, inode, Rights::of(OpenFlags(flags)))?;
            match self.attributes(inode) {
                Ok((attr, known)) => Ok((attr, known, handle)),
                Err(error) => {
                    self.close(inode, handle);
                    Err(error)
                }
            }
        })
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
            self.known.is_named(inode, directory, new_name);
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
        let known = self.known.name(inode);
        let (parent, known) = known.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOENT))?;
        self.directories.link(inode, (parent, &known), directory, text(name)?)?;
        self.counted(inode, || self.attributes(inode))
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
            if !was_image && let Some((_, name)) = self.known.name(inode) {
                file.name_image(&name);
            }
            Ok(())
        })
    }

    /// Keeps the entries of a directory for a handle, which it returns.
    fn keep_listing(&self, entries: Vec<Entry>) -> u64 {
        let handle = self.last_listing.fetch_add(1, Ordering::Relaxed) + 1;
        lock(&self.listings).insert(handle, Arc::new(entries));
        handle
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
