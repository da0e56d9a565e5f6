//! A raw file or block device.
//!
//! Two engines with one contract, chosen when the disk is opened: where the file's pages are in memory
//! (tmpfs, ramfs, hugetlbfs) a system call copies at once and io_uring would hand the request to a
//! kernel worker, so [`super::sync`] is used; else [`super::uring`], unless the kernel refuses to make a
//! ring.
//!
//! A file that `vmseal-rbd` serves may come with a connection to it: then the third engine is used, [`super::channel`].
//!
//! How a file that is truncated while in use is handled: [`super::target`].
//!
//! O_DIRECT is set on the open file description that was passed in, so its other holders get it too.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::statfs::{FsType, fstatfs};
use vmseal_api::filter::Direct;

use crate::stack::chain::Storage;
use crate::stack::request::IoError;
use crate::storage::channel::{self, Connection};
use crate::storage::extent::{Extent, raw_extent};
use crate::storage::served;
use crate::storage::statx::statx;
use crate::storage::sync::SyncFile;
use crate::storage::target::FileTarget;
use crate::storage::uring::UringFile;

/// hugetlbfs and ramfs (linux/magic.h); tmpfs is in nix.
const HUGETLBFS_MAGIC: i64 = 0x958_458f6;
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// The alignment for direct I/O where the kernel does not say: the block of nearly every device.
const DIRECT_ALIGNMENT: u32 = 4096;

/// Why a disk's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A system call failed.
    #[error("cannot look at the image: {0}")]
    Look(#[source] io::Error),
    /// Neither a file nor a block device.
    #[error("the image is neither a regular file nor a block device")]
    Kind,
    /// Shorter than the disk.
    #[error(
        "the image has {has} bytes where the disk needs {needs}: it was truncated; restore it from a copy"
    )]
    Truncated {
        /// Its length.
        has: u64,
        /// Offset and size of the disk.
        needs: u64,
    },
    /// The data does not start where direct I/O can read.
    #[error("the data starts at byte {offset}, but the storage works in blocks of {block} bytes")]
    Offset {
        /// Where the data starts.
        offset: u64,
        /// The storage's block.
        block: u32,
    },
    /// O_DIRECT was asked for and is not available.
    #[error(
        "the file system does not allow direct I/O (O_DIRECT): {0}; configure `direct` as auto or off"
    )]
    Direct(#[source] io::Error),
    /// Opened without the right to write.
    #[error("the image is open for reading only, but the disk is not read-only")]
    NotWritable,
}

/// An open disk, from which each queue gets its backend.
#[derive(Clone, Debug)]
pub struct FileDisk {
    target: Arc<FileTarget>,
    in_memory: bool,
    block: u32,
    memory: u32,
    /// A file that the rings of its queues have open for its lock.
    held: Option<Arc<FileTarget>>,
    /// To the process that serves the file, for queues in shared memory.
    channel: Option<Arc<Connection>>,
}

impl FileDisk {
    /// Looks at the file and decides how to use it. The disk is `size` bytes from `offset` on.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        fd: OwnedFd,
        offset: u64,
        size: u64,
        direct: Direct,
        read_only: bool,
    ) -> Result<Self, OpenError> {
        let end = check_length(&fd, offset, size)?;
        check_mode(&fd, read_only)?;
        let kind = file_system(&fd).map_err(OpenError::Look)?;
        let in_memory = is_in_memory(kind);
        let direct = match direct {
            Direct::Off => false,
            Direct::On => set_direct(&fd).map(|()| true).map_err(OpenError::Direct)?,
            Direct::Auto => !in_memory && set_direct(&fd).is_ok(),
        };
        let (memory, block) = if direct { direct_alignment(&fd) } else { (1, 512) };
        if !offset.is_multiple_of(u64::from(block)) {
            return Err(OpenError::Offset { offset, block });
        }
        let fuse = kind == nix::sys::statfs::FUSE_SUPER_MAGIC && !served::is_served(&fd);
        let target = FileTarget { offset, end, direct, fuse, ..FileTarget::whole(fd) };
        let target = Arc::new(target);
        Ok(Self { target, in_memory, block, memory, held: None, channel: None })
    }

    /// A disk of zeroes in memory, which is allocated as it is written and lost with the process.
    ///
    /// # Errors
    /// [`OpenError::Look`]: the kernel refuses it.
    pub fn in_memory(size: u64) -> Result<Self, OpenError> {
        let flags = MFdFlags::MFD_CLOEXEC;
        let file = memfd_create(c"disk", flags).map(File::from);
        let file = file.map_err(|error| OpenError::Look(error.into()))?;
        file.set_len(size).map_err(OpenError::Look)?;
        Self::open(file.into(), 0, size, Direct::Off, false)
    }

    /// See [`DiskStorage::holding`](super::DiskStorage::holding).
    pub(super) fn holding(self, lock: OwnedFd) -> Self {
        Self { held: Some(Arc::new(FileTarget::whole(lock))), ..self }
    }

    /// The same, whose queues are in memory that this process and the server of the file share. Not where a file is
    /// [held](super::DiskStorage::holding): only rings do that.
    #[must_use]
    pub fn with_channel(self, channel: Arc<Connection>) -> Self {
        Self { channel: Some(channel), ..self }
    }

    /// Whether its queues are in shared memory, unless the server refuses.
    #[must_use]
    pub fn has_channel(&self) -> bool {
        self.channel.is_some() && self.held.is_none()
    }

    /// Never gives space back, as on a file system that cannot: a discard does nothing, and write-zeroes
    /// leaves allocated zeroes.
    pub fn keep_room(&self) {
        self.target.punches.store(false, Ordering::Relaxed);
    }

    /// The caller is the only writer and will write again everything since the last good flush: a
    /// failed flush need not fail those that follow.
    pub fn forget_failed_flush(&self) {
        self.target.lost.store(false, Ordering::Release);
    }

    /// The caller is the only writer and will write all of the file again if it gets its length back.
    pub fn forget_cut(&self) {
        self.target.cut.store(false, Ordering::Relaxed);
    }

    /// Whether it is in this file.
    #[must_use]
    pub fn is_in(&self, file: &impl AsFd) -> bool {
        let id = |fd| nix::sys::stat::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
        matches!((id(self.as_fd()), id(file.as_fd())), (Ok(one), Ok(other)) if one == other)
    }

    /// Makes what was written durable, beside the queues.
    ///
    /// # Errors
    /// As a queue's flush.
    pub fn flush_beside(&self) -> Result<(), IoError> {
        crate::storage::sync::flush(&self.target)
    }

    /// Whether it may punch holes, and the file system has not refused that so far.
    #[must_use]
    pub fn punches(&self) -> bool {
        self.target.punches.load(Ordering::Relaxed)
    }

    /// The hole or the data at `at`, which is below `end`, up to `end` at most.
    ///
    /// # Errors
    /// As lseek.
    pub fn extent(&self, at: u64, end: u64) -> io::Result<Extent> {
        let offset = self.target.offset;
        let found = raw_extent(&self.target.fd, offset + at, offset + end)?;
        Ok(Extent { end: found.end - offset, ..found })
    }

    /// The smallest unit that the file takes, in bytes.
    #[must_use]
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Whether its pages are in memory, so that requests complete as they are submitted.
    #[must_use]
    pub fn works_at_once(&self) -> bool {
        self.in_memory && !self.has_channel()
    }

    /// The alignment of addresses and lengths of memory.
    #[must_use]
    pub fn memory_alignment(&self) -> u32 {
        self.memory
    }

    /// A backend for one queue.
    #[must_use]
    pub fn queue(&self) -> Box<dyn Storage> {
        if let Some(channel) = self.channel.as_ref().filter(|_| self.held.is_none()) {
            match channel::Queue::attach(channel, Arc::clone(&self.target)) {
                Ok(backend) => {
                    tracing::info!("a queue shares memory with vmseal-rbd");
                    return Box::new(backend);
                }
                Err(error) => {
                    tracing::warn!(%error, "there is no queue in memory that is shared with vmseal-rbd; the disk's data goes through its file");
                }
            }
        }
        if !self.in_memory {
            match UringFile::of_files(Arc::clone(&self.target), self.held.as_slice()) {
                Ok(backend) => return Box::new(backend),
                Err(error) => tracing::warn!(%error, "no io_uring; each request blocks its queue"),
            }
        }
        self.blocking_queue()
    }

    /// A backend without a ring, whose requests block the caller.
    #[must_use]
    pub fn blocking_queue(&self) -> Box<dyn Storage> {
        Box::new(SyncFile::new(Arc::clone(&self.target)))
    }
}

impl AsFd for FileDisk {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.target.fd.as_fd()
    }
}

/// The end of the disk in a regular file.
fn check_length(fd: &OwnedFd, offset: u64, size: u64) -> Result<Option<u64>, OpenError> {
    let look = |error: nix::Error| OpenError::Look(error.into());
    let stat = nix::sys::stat::fstat(fd).map_err(look)?;
    let kind = stat.st_mode & libc::S_IFMT;
    let has = match kind {
        libc::S_IFREG => u64::try_from(stat.st_size).unwrap_or(0),
        libc::S_IFBLK => {
            let end = nix::unistd::lseek(fd, 0, nix::unistd::Whence::SeekEnd).map_err(look)?;
            u64::try_from(end).unwrap_or(0)
        }
        _ => return Err(OpenError::Kind),
    };
    let needs = offset.saturating_add(size);
    if has < needs {
        return Err(OpenError::Truncated { has, needs });
    }
    Ok((kind == libc::S_IFREG).then_some(needs))
}

pub(super) fn check_mode(fd: &OwnedFd, read_only: bool) -> Result<(), OpenError> {
    let flags = fcntl(fd, FcntlArg::F_GETFL).map_err(|error| OpenError::Look(error.into()))?;
    let writable = flags & libc::O_ACCMODE == libc::O_RDWR;
    if read_only || writable { Ok(()) } else { Err(OpenError::NotWritable) }
}

fn file_system(fd: &OwnedFd) -> io::Result<FsType> {
    Ok(fstatfs(fd.as_fd())?.filesystem_type())
}

/// Whether a ring moves data of this file well.
pub(super) fn takes_rings(fd: &OwnedFd) -> io::Result<bool> {
    let kind = file_system(fd)?;
    let in_parts = kind == nix::sys::statfs::FUSE_SUPER_MAGIC && !served::is_served(fd);
    Ok(!is_in_memory(kind) && !in_parts)
}

fn is_in_memory(kind: FsType) -> bool {
    kind == nix::sys::statfs::TMPFS_MAGIC || matches!(kind.0, HUGETLBFS_MAGIC | RAMFS_MAGIC)
}

/// Has a file be used past the page cache, if its file system allows that; the alignment that it needs then, of memory
/// and of offsets.
pub(super) fn past_page_cache(fd: &OwnedFd) -> Option<(u32, u32)> {
    set_direct(fd).ok()?;
    Some(direct_alignment(fd))
}

/// Has a file be used through the page cache.
pub(super) fn through_page_cache(fd: &OwnedFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    if flags.contains(OFlag::O_DIRECT) {
        fcntl(fd, FcntlArg::F_SETFL(flags - OFlag::O_DIRECT))?;
    }
    Ok(())
}

fn set_direct(fd: &OwnedFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT))?;
    Ok(())
}

/// The alignment that direct I/O on this file needs, of memory and of offsets (`STATX_DIOALIGN`, Linux 6.1).
fn direct_alignment(fd: &OwnedFd) -> (u32, u32) {
    let Ok(statx) = statx(fd, 0, libc::STATX_DIOALIGN) else {
        return (DIRECT_ALIGNMENT, DIRECT_ALIGNMENT);
    };
    let known = statx.stx_mask & libc::STATX_DIOALIGN != 0;
    let sane = |value: u32| value.is_power_of_two() && value <= DIRECT_ALIGNMENT;
    let (memory, block) = (statx.stx_dio_mem_align, statx.stx_dio_offset_align);
    if known && sane(memory) && sane(block) {
        (memory, block.max(512))
    } else {
        (DIRECT_ALIGNMENT, DIRECT_ALIGNMENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stack::blocking;
    use crate::stack::chain::Chain;

    #[test]
    fn a_file_that_keeps_its_room_gives_none_back_and_reads_zeroes_where_they_are_asked_for() {
        use std::io::Write;
        use std::os::unix::fs::{FileExt, MetadataExt};
        const SIZE: u64 = 1 << 20;
        let file_of = |keeps: bool| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(&vec![7; SIZE as usize]).unwrap();
            file.sync_all().unwrap();
            let fd = OwnedFd::from(file.try_clone().unwrap());
            let disk = FileDisk::open(fd, 0, SIZE, Direct::Off, false).unwrap();
            if keeps {
                disk.keep_room();
            }
            crate::storage::sync::discard(&disk.target, 0, SIZE / 2).unwrap();
            crate::storage::sync::zero(&disk.target, SIZE / 2, SIZE / 2, true).unwrap();
            let mut half = vec![1; SIZE as usize / 2];
            file.read_exact_at(&mut half, SIZE / 2).unwrap();
            assert!(half.iter().all(|byte| *byte == 0));
            file.sync_all().unwrap();
            file.metadata().unwrap().blocks() * 512
        };
        assert!(file_of(true) >= SIZE, "room was given back");
        // Without this the test would prove nothing on a file system that cannot punch holes.
        assert!(file_of(false) < SIZE, "this file system gives no room back");
    }

    /// What the ring has open is closed when the kernel has finished its last request, and not before.
    #[test]
    fn a_file_that_is_held_stays_locked_as_long_as_a_ring_of_the_disk_is_there() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let whole = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: 0,
            l_len: 0,
            l_pid: 0,
        };
        let lock = |file: &File| fcntl(file, FcntlArg::F_OFD_SETLK(&whole)).is_ok();
        let held = named.reopen().unwrap();
        assert!(lock(&held));
        let target = Arc::new(FileTarget::whole(tempfile::tempfile().unwrap().into()));
        let (in_memory, channel) = (false, None);
        let disk = FileDisk { target, in_memory, block: 512, memory: 1, held: None, channel };
        let queue = disk.holding(held.into()).queue();
        assert!(!lock(&named.reopen().unwrap()), "only the process has held it");
        drop(queue);
        let until = std::time::Instant::now() + std::time::Duration::from_secs(30);
        while !lock(&named.reopen().unwrap()) {
            assert!(std::time::Instant::now() < until, "it is locked for ever");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// A pipe cannot be flushed: each engine must ask the kernel and report its answer.
    #[test]
    fn a_flush_is_answered_by_the_kernel_and_nobody_else() {
        let flushed = |fd: OwnedFd, in_memory| {
            let target = FileTarget { direct: true, ..FileTarget::whole(fd) };
            let target = Arc::new(target);
            let (held, channel) = (None, None);
            let disk = FileDisk { target, in_memory, block: 512, memory: 1, held, channel };
            let mut chain = Chain::new(4096, false, Vec::new(), disk.queue()).unwrap();
            assert_eq!(chain.works_at_once(), in_memory, "the other engine is tested");
            blocking::flush(&mut chain)
        };
        for in_memory in [false, true] {
            let (_reader, writer) = nix::unistd::pipe().unwrap();
            assert_eq!(flushed(writer, in_memory), Err(IoError::Device(libc::EINVAL)));
            assert_eq!(flushed(tempfile::tempfile().unwrap().into(), in_memory), Ok(()));
        }
    }
}
