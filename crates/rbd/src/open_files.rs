//! The files that are open, and the handles to them.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fuser::{OpenAccMode, OpenFlags};

use crate::directory::Nameless;
use crate::inode::Inode;
use crate::open_file::{OpenFile, Store};

/// What a handle may do with its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights {
    /// It may read.
    pub reads: bool,
    /// It may write.
    pub writes: bool,
}

impl Rights {
    /// Those of a handle that is opened with these flags.
    #[must_use]
    pub fn of(flags: OpenFlags) -> Self {
        let mode = flags.acc_mode();
        Self { reads: mode != OpenAccMode::O_WRONLY, writes: mode != OpenAccMode::O_RDONLY }
    }
}

/// All open files.
#[derive(Default)]
pub struct OpenFiles(Mutex<Tables>);

#[derive(Default)]
struct Tables {
    files: HashMap<Inode, Known>,
    handles: HashMap<u64, (Arc<OpenFile>, Rights)>,
    last_handle: u64,
}

/// A file that is open, or is being opened.
struct Known {
    handles: usize,
    /// Its last name was taken away meanwhile.
    nameless: bool,
    /// Locked while it is opened: that asks the cluster, and others wait for this file alone.
    file: Arc<Mutex<Option<Arc<OpenFile>>>>,
}

impl OpenFiles {
    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a file; returns the handle.
    ///
    /// # Errors
    /// As [`OpenFile::open`].
    pub fn open(&self, store: &Store, inode: Inode, rights: Rights) -> io::Result<u64> {
        let slot = {
            let mut tables = self.tables();
            let known = tables.files.entry(inode).or_insert_with(|| Known {
                handles: 0,
                nameless: false,
                file: Arc::default(),
            });
            known.handles += 1;
            Arc::clone(&known.file)
        };
        let opened = {
            let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
            match &*slot {
                Some(file) => file.open_again(store, rights.writes).map(|()| Arc::clone(file)),
                None => OpenFile::open(store, inode, rights.writes)
                    .map(|file| Arc::clone(slot.insert(Arc::new(file)))),
            }
        };
        let mut tables = self.tables();
        match opened {
            Ok(file) => {
                tables.last_handle += 1;
                let handle = tables.last_handle;
                tables.handles.insert(handle, (file, rights));
                Ok(handle)
            }
            Err(error) => {
                drop(tables.close(inode));
                Err(error)
            }
        }
    }

    /// The file of a handle.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn of_handle(&self, handle: u64) -> io::Result<Arc<OpenFile>> {
        let file = self.tables().handles.get(&handle).map(|(file, _)| Arc::clone(file));
        file.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    /// What a handle may do.
    ///
    /// # Errors
    /// `EBADF`.
    pub fn rights(&self, handle: u64) -> io::Result<Rights> {
        let rights = self.tables().handles.get(&handle).map(|(_, rights)| *rights);
        rights.ok_or_else(|| io::Error::from_raw_os_error(libc::EBADF))
    }

    /// A file, if it is open.
    #[must_use]
    pub fn get(&self, inode: Inode) -> Option<Arc<OpenFile>> {
        let slot = Arc::clone(&self.tables().files.get(&inode)?.file);
        slot.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Closes a handle; returns the file if it has no name any more and nobody has it open.
    pub fn release(&self, inode: Inode, handle: u64) -> Option<Nameless> {
        let (file, ended) = {
            let mut tables = self.tables();
            (tables.handles.remove(&handle), tables.close(inode))
        };
        // An image is closed without the lock on the tables.
        drop(file);
        let known = ended?;
        let nameless = known.nameless;
        drop(known);
        nameless.then_some(Nameless(inode))
    }

    /// A file has lost its last name: returns it if nobody has it open, else it is removed when it is closed.
    pub fn lost_name(&self, nameless: Nameless) -> Option<Nameless> {
        match self.tables().files.get_mut(&nameless.0) {
            Some(known) => {
                known.nameless = true;
                None
            }
            None => Some(nameless),
        }
    }
}

impl Tables {
    /// One handle less; returns the file if that was the last one.
    fn close(&mut self, inode: Inode) -> Option<Known> {
        let known = self.files.get_mut(&inode)?;
        known.handles -= 1;
        if known.handles > 0 {
            return None;
        }
        self.files.remove(&inode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_may_do_what_it_was_opened_for() {
        let rights = |flags| {
            let Rights { reads, writes } = Rights::of(OpenFlags(flags | libc::O_NOATIME));
            (reads, writes)
        };
        assert_eq!(rights(libc::O_RDONLY), (true, false));
        assert_eq!(rights(libc::O_WRONLY), (false, true));
        assert_eq!(rights(libc::O_RDWR), (true, true));
    }
}
