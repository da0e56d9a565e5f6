//! Closing handles. What a filter has in flight by the channel ends before the lock of its file is given up: the next one must not begin
//! while old writes can land.

use std::io;
use std::sync::{Arc, Mutex};

use fuser::ReplyEmpty;

use super::{FileSystem, lock};
use crate::channel::gate::{Gate, Inside};
use crate::channel::service::Service;
use crate::channel::tickets::Ticket;
use crate::directory::Directories;
use crate::inode::Inode;
use crate::locks::Locks;
use crate::open_file::Store;
use crate::open_files::OpenFiles;

/// A handle whose file nobody has open any more.
struct Release {
    open: Arc<OpenFiles>,
    store: Arc<Store>,
    directories: Arc<Directories>,
    locks: Arc<Locks>,
    inode: Inode,
    handle: u64,
    /// Where requests of the channel are in flight.
    in_flight: Option<Arc<Gate>>,
    reply: ReplyEmpty,
    /// Left last.
    _inside: Option<Inside>,
}

fn close(open: &OpenFiles, directories: &Directories, inode: Inode, handle: u64) {
    if let Some(nameless) = open.release(inode, handle)
        && let Err(error) = directories.discard(nameless)
    {
        tracing::warn!(%inode, %error, "a removed file is not gone yet; it is removed at the next mount");
    }
}

impl Release {
    fn run(self) {
        let (inode, handle) = (self.inode, self.handle);
        if let Some(gate) = &self.in_flight {
            gate.wait();
        }
        let noted = self.open.of_handle(handle).and_then(|file| file.note_length(&self.store));
        if let Err(error) = noted {
            tracing::warn!(%inode, %error, "the length of a file is not noted");
        }
        // Before the next one opens it: the image's own lock goes first.
        close(&self.open, &self.directories, inode, handle);
        if let Err(error) = self.locks.unlock(inode, |other| other.handle == handle) {
            tracing::warn!(%inode, %error, "the lock of a closed file is not given up; it runs out");
        }
        self.reply.ok();
    }

    /// Runs in a thread of its own where a filter's requests are to be waited for: this one does others.
    fn start(self) {
        if self.in_flight.is_none() {
            return self.run();
        }
        // Taken by whoever runs it: by this thread where the system has no other.
        let waiting = Arc::new(Mutex::new(Some(self)));
        let there = Arc::clone(&waiting);
        let run = move || {
            let release = lock(&there).take();
            release.into_iter().for_each(Self::run);
        };
        if let Err(error) = std::thread::Builder::new().name("release".into()).spawn(run) {
            tracing::warn!(%error, "a thread of the file system waits for a filter's requests");
            let release = lock(&waiting).take();
            release.into_iter().for_each(Self::run);
        }
    }
}

impl FileSystem {
    /// What serves filters that do without FUSE.
    #[must_use]
    pub fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// Who serves filters, and who does requests, is inside: who ends the process waits until the images are closed.
    #[must_use]
    pub fn served(&self) -> Arc<Gate> {
        Arc::clone(&self.served)
    }

    /// The handles that are being released, for who ends the process: it waits for them.
    #[must_use]
    pub fn releases(&self) -> Arc<Gate> {
        Arc::clone(&self.releases)
    }

    /// A ticket for who has a file open.
    pub(super) fn ticket(&self, of: Inode, handle: u64) -> io::Result<Ticket> {
        // Handles of directories are numbers of their own.
        if of.is_directory() || self.mounted.channel.is_none() {
            return Err(io::Error::from_raw_os_error(libc::ENOTTY));
        }
        self.service.tickets.of(handle, self.open.rights(handle)?)
    }

    pub(super) fn close(&self, inode: Inode, handle: u64) {
        close(&self.open, &self.directories, inode, handle);
    }

    /// Closes a handle; who releases it has gone inside of [`FileSystem::releases`].
    pub(super) fn release_handle(
        &self,
        inode: Inode,
        handle: u64,
        reply: ReplyEmpty,
        inside: Option<Inside>,
    ) {
        let release = Release {
            open: Arc::clone(&self.open),
            store: Arc::clone(&self.store),
            directories: Arc::clone(&self.directories),
            locks: Arc::clone(&self.locks),
            inode,
            handle,
            in_flight: self.service.tickets.release(handle),
            reply,
            _inside: inside,
        };
        release.start();
    }
}
