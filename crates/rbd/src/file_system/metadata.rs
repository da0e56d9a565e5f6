//! What a file or directory is like: its length, room, times and owner.
//!
//! All belongs to the user of this process, except directories that were given to another one (`chown(2)`), and the files in them: swtpm, which
//! has a user of its own, has such a directory open. Other hosts see nothing of that, nor does the next process that serves the mount: what a
//! program has open ends with this one, and each start of a TPM gives its directory away once more.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo};

use super::{BLOCK, FileSystem, LENGTH_KNOWN, NAMES_KNOWN};
use crate::inode::Inode;
use crate::open_file::noted_size;
use crate::rooms::Rooms;

/// A file whose room is known, or is taken to be its length.
fn taking(attr: FileAttr, room: Option<u64>) -> FileAttr {
    FileAttr { blocks: room.unwrap_or(attr.size).min(attr.size).div_ceil(512), ..attr }
}

impl FileSystem {
    /// What a file or directory is like, and how long the kernel may know it.
    pub(super) fn attributes(&self, inode: Inode) -> io::Result<(FileAttr, Duration)> {
        self.describe(inode, Rooms::known)
    }

    pub(super) fn describe(
        &self,
        inode: Inode,
        room: fn(&Rooms, Inode) -> Option<u64>,
    ) -> io::Result<(FileAttr, Duration)> {
        if inode.is_directory() {
            return Ok((self.attr(inode, 0, UNIX_EPOCH, 2), NAMES_KNOWN));
        }
        let names = self.directories.names(inode)?;
        let image = self.open.get(inode).and_then(|file| file.image());
        // Given up before its room is counted: it must be closed when its handle is.
        let image = image.map(|image| (image.size(), image.is_writable()));
        if let Some((size, writable)) = image {
            let room = room(&self.rooms, inode);
            let known = if writable && room.is_some() { LENGTH_KNOWN } else { NAMES_KNOWN };
            return Ok((taking(self.attr(inode, size, UNIX_EPOCH, names), room), known));
        }
        let (length, changed) = match self.store.pool.stat(&inode.object()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (0, UNIX_EPOCH),
            told => told?,
        };
        let size = noted_size(&self.store.pool, inode)?;
        let room = size.and_then(|_| room(&self.rooms, inode));
        let attr = self.attr(inode, size.unwrap_or(length), changed, names);
        Ok((taking(attr, room), NAMES_KNOWN))
    }

    /// Gives a directory to a user or group; the kernel has checked who asks for it. A file belongs to who has its directory, and is not given
    /// away by itself.
    pub(super) fn give(&self, inode: Inode, user: Option<u32>, group: Option<u32>) {
        if !inode.is_directory() || (user.is_none() && group.is_none()) {
            return;
        }
        self.known.give(inode, user, group, self.owner);
    }

    fn attr(&self, inode: Inode, size: u64, changed: SystemTime, names: u32) -> FileAttr {
        let directory = inode.is_directory();
        let (uid, gid) = self.known.given(inode, names).unwrap_or(self.owner);
        FileAttr {
            ino: INodeNo(inode.0),
            size,
            blocks: size.div_ceil(512),
            atime: changed,
            mtime: changed,
            ctime: changed,
            crtime: UNIX_EPOCH,
            kind: if directory { FileType::Directory } else { FileType::RegularFile },
            perm: if directory { 0o700 } else { 0o600 },
            nlink: names,
            uid,
            gid,
            rdev: 0,
            blksize: BLOCK,
            flags: 0,
        }
    }
}
