//! A raw file or block device.
//!
//! Two engines with one contract, chosen when the disk is opened: where the file's pages are in memory
//! (tmpfs, ramfs, hugetlbfs) a system call copies at once and io_uring would hand the request to a
//! kernel worker, so [`super::sync`] is used; else [`super::uring`], unless the kernel refuses to make a
//! ring.
//!
//! A regular file that someone truncates while it is in use must not become an image with zeroes where data was: a
//! write behind the new end would make it longer again. So its length is looked at ([`Intact`]), and an image that
//! was found too short once refuses everything until it is opened again (reads too, if it was changed: what then lies
//! between its new end and the change may be zeroes of ours):
//! ```text
//!   before a change        if the last look is LOOK_EVERY ago
//!   before a change that reaches the disk's end, the only one that can make the file as long as before
//!   after each flush       before it is answered: what it covers is in a file that was not cut
//!   before a read          never: a read behind the end says so itself
//! ```
//! No system call writes only below the end of a file, so what is under way when the file is cut, and changes
//! for [`LOOK_EVERY`] after, can still extend it; no flush after the cut is ever good.
//!
//! O_DIRECT is set on the open file description that was passed in, so its other holders get it too.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::statfs::{FsType, fstatfs};
use vmseal_api::filter::Direct;

use crate::stack::chain::Backend;
use crate::stack::request::{IoError, Request};
use crate::storage::extent::{Extent, raw_extent};
use crate::storage::sync::SyncFile;
use crate::storage::uring::UringFile;

/// hugetlbfs and ramfs (linux/magic.h); tmpfs is in nix.
const HUGETLBFS_MAGIC: i64 = 0x958_458f6;
const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// How old the last look at a file's length may be when it is changed: long against a look, however small the writes
/// are, and short against the time that anybody has to notice what he did.
const LOOK_EVERY: Duration = Duration::from_micros(200);

/// What direct I/O needs where the kernel does not say: the block of nearly every device.
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
    /// O_DIRECT was asked for and is not to be had.
    #[error(
        "the file system does not allow direct I/O (O_DIRECT): {0}; configure `direct` as auto or off"
    )]
    Direct(#[source] io::Error),
    /// Opened without the right to write.
    #[error("the image is open for reading only, but the disk is not read-only")]
    NotWritable,
}

/// The part of a file that is a disk.
#[derive(Debug)]
pub struct Target {
    pub(super) fd: OwnedFd,
    /// Where the disk starts in the file.
    pub(super) offset: u64,
    /// Where it ends; none for a block device, whose length is not the file's to say.
    end: Option<u64>,
    /// Cleared when the file system says that it cannot, or the file is to keep its room.
    pub(super) punches: AtomicBool,
    /// Cleared when the file system says that it cannot.
    pub(super) zeroes: AtomicBool,
    /// Whether the page cache is bypassed.
    direct: bool,
    /// Set when a flush has failed; see [`Target::flushed`].
    lost: AtomicBool,
    /// Whether a process serves the file.
    pub(super) fuse: bool,
    /// Set when the file was found shorter than the disk.
    cut: AtomicBool,
    /// Set when it was changed through this.
    changed: AtomicBool,
}

/// An open disk, from which each queue gets its backend.
#[derive(Clone, Debug)]
pub struct FileDisk {
    target: Arc<Target>,
    in_memory: bool,
    block: u32,
    memory: u32,
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
        let fuse = kind == nix::sys::statfs::FUSE_SUPER_MAGIC;
        let target = Target { offset, end, direct, fuse, ..Target::whole(fd) };
        Ok(Self { target: Arc::new(target), in_memory, block, memory })
    }

    /// A disk of zeroes in memory, which takes room as it is written and is gone with the process.
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

    /// Never gives room back, as where the file system cannot: a discard does nothing, and what is to
    /// read as zeroes becomes zeroes that are allocated.
    pub fn keep_room(&self) {
        self.target.punches.store(false, Ordering::Relaxed);
    }

    /// Whoever alone writes to the file will write again all that was written since the last good flush: a
    /// failed one need not fail those that follow.
    pub fn forget_failed_flush(&self) {
        self.target.lost.store(false, Ordering::Release);
    }

    /// Whoever alone writes to the file will write all of it again, should it have its length again.
    pub fn forget_cut(&self) {
        self.target.cut.store(false, Ordering::Relaxed);
    }

    /// Whether the other one is of the same file.
    #[must_use]
    pub fn is_same_file(&self, other: &Self) -> bool {
        let id = |disk: &Self| {
            nix::sys::stat::fstat(&disk.target.fd).map(|stat| (stat.st_dev, stat.st_ino))
        };
        matches!((id(self), id(other)), (Ok(one), Ok(other)) if one == other)
    }

    /// Whether the file system has not yet said that it cannot punch holes, and may.
    #[must_use]
    pub fn punches(&self) -> bool {
        self.target.punches.load(Ordering::Relaxed)
    }

    /// The hole or the data at `at`, which is below `end`, up to `end` at the most.
    ///
    /// # Errors
    /// As lseek.
    pub fn extent(&self, at: u64, end: u64) -> io::Result<Extent> {
        let offset = self.target.offset;
        let found = raw_extent(&self.target.fd, offset + at, offset + end)?;
        Ok(Extent { end: found.end - offset, ..found })
    }

    /// The smallest unit the file takes, in bytes.
    #[must_use]
    pub fn block(&self) -> u32 {
        self.block
    }

    /// Whether its pages are in memory, so that a request is done as it is asked for.
    #[must_use]
    pub fn works_at_once(&self) -> bool {
        self.in_memory
    }

    /// What addresses and lengths of memory have to be multiples of.
    #[must_use]
    pub fn memory_alignment(&self) -> u32 {
        self.memory
    }

    /// A backend for one queue.
    #[must_use]
    pub fn queue(&self) -> Box<dyn Backend> {
        if !self.in_memory {
            match UringFile::new(Arc::clone(&self.target)) {
                Ok(backend) => return Box::new(backend),
                Err(error) => tracing::warn!(%error, "no io_uring; each request blocks its queue"),
            }
        }
        self.blocking_queue()
    }

    /// A backend that needs no ring, and whose requests block whoever makes them.
    #[must_use]
    pub fn blocking_queue(&self) -> Box<dyn Backend> {
        Box::new(SyncFile::new(Arc::clone(&self.target)))
    }
}

impl Target {
    /// All of a file, by way of the page cache, however long it is.
    pub(super) fn whole(fd: OwnedFd) -> Self {
        let (punches, zeroes) = (AtomicBool::new(true), AtomicBool::new(true));
        let (lost, cut) = (AtomicBool::new(false), AtomicBool::new(false));
        let changed = AtomicBool::new(false);
        let (offset, end, direct, fuse) = (0, None, false, false);
        Self { fd, offset, end, punches, zeroes, direct, lost, fuse, cut, changed }
    }

    /// Whether a flush has failed, and what was written before it may be lost for good.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Remembers that the file system lacks a kind of `fallocate`, if that is what the error means.
    pub(super) fn cannot(&self, errno: i32, flag: &AtomicBool) -> bool {
        let cannot = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV);
        if cannot {
            flag.store(false, Ordering::Relaxed);
        }
        cannot
    }

    /// What a flush comes to that the kernel has answered. Where one fails, the kernel drops from the page
    /// cache what it could not write, says so once, and to one of those who ask; so from then on no flush
    /// of the disk is good, whoever asks for it. Without a page cache each flush speaks for itself. Nor is one good
    /// after which the file is too short: what it was to cover may be what was cut off.
    pub(super) fn flushed(&self, answer: Result<(), IoError>) -> Result<(), IoError> {
        if answer.is_err() && !self.direct {
            self.lost.store(true, Ordering::Release);
        }
        answer?;
        if self.lost.load(Ordering::Acquire) {
            return Err(IoError::Lost);
        }
        self.intact()
    }

    /// Whether the file still has all of the disk.
    fn intact(&self) -> Result<(), IoError> {
        let Some(end) = self.end else { return Ok(()) };
        if self.cut.load(Ordering::Relaxed) {
            return Err(IoError::Truncated);
        }
        let stat =
            nix::sys::stat::fstat(&self.fd).map_err(|error| IoError::Device(error as i32))?;
        let has = u64::try_from(stat.st_size).unwrap_or(0);
        if has >= end {
            return Ok(());
        }
        if !self.cut.swap(true, Ordering::Relaxed) {
            tracing::error!(has, needs = end, "the image was truncated while it is in use");
        }
        Err(IoError::Truncated)
    }

    /// Whether a change would make a file that was cut as long as it is to be.
    fn reaches_end(&self, request: &Request) -> bool {
        let behind = self.offset + request.offset + request.length;
        request.operation.changes() && self.end.is_some_and(|end| behind >= end)
    }
}

/// What one queue knows of the file's length; see the module.
#[derive(Debug, Default)]
pub(super) struct Intact {
    looked: Option<Instant>,
    /// Whether the look is recent enough for this pass of the queue, which is shorter than a look at the clock.
    recent: bool,
}

impl Intact {
    /// Whether the request may go to the file.
    pub(super) fn allows(&mut self, target: &Target, request: &Request) -> Result<(), IoError> {
        let changes = request.operation.changes();
        if target.cut.load(Ordering::Relaxed) && (changes || target.changed.load(Ordering::Relaxed))
        {
            return Err(IoError::Truncated);
        }
        if target.end.is_none() || !changes {
            return Ok(());
        }
        if target.reaches_end(request) {
            target.intact()?;
        } else if !self.recent {
            self.look(target)?;
        }
        if !target.changed.load(Ordering::Relaxed) {
            target.changed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Looks at the file's length, unless that was done just now.
    fn look(&mut self, target: &Target) -> Result<(), IoError> {
        let now = Instant::now();
        if self.looked.is_none_or(|looked| now - looked >= LOOK_EVERY) {
            target.intact()?;
            self.looked = Some(now);
        }
        self.recent = true;
        Ok(())
    }

    /// The next pass looks at the clock again.
    pub(super) fn next_pass(&mut self) {
        self.recent = false;
    }
}

/// Where the disk ends in a regular file.
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

fn is_in_memory(kind: FsType) -> bool {
    kind == nix::sys::statfs::TMPFS_MAGIC || matches!(kind.0, HUGETLBFS_MAGIC | RAMFS_MAGIC)
}

fn set_direct(fd: &OwnedFd) -> io::Result<()> {
    let flags = OFlag::from_bits_retain(fcntl(fd, FcntlArg::F_GETFL)?);
    fcntl(fd, FcntlArg::F_SETFL(flags | OFlag::O_DIRECT))?;
    Ok(())
}

/// What direct I/O on this file wants of memory and of offsets (`STATX_DIOALIGN`, Linux 6.1).
fn direct_alignment(fd: &OwnedFd) -> (u32, u32) {
    let mut statx = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; the kernel fills the structure,
    // of which all-zero is a valid value.
    let statx = unsafe {
        let failed = libc::statx(
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            statx.as_mut_ptr(),
        );
        if failed != 0 {
            return (DIRECT_ALIGNMENT, DIRECT_ALIGNMENT);
        }
        statx.assume_init()
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

/// Zeroes to write where the file system cannot make them; aligned for direct I/O.
#[repr(align(4096))]
pub(super) struct Zeroes(pub(super) [u8; ZEROES]);

/// How many of them.
pub(super) const ZEROES: usize = 64 * 1024;

pub(super) static ZERO: Zeroes = Zeroes([0; ZEROES]);

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

    /// A pipe cannot be flushed: each engine has to have asked the kernel, and to tell what it says.
    #[test]
    fn a_flush_is_answered_by_the_kernel_and_nobody_else() {
        let flushed = |fd: OwnedFd, in_memory| {
            let target = Target { direct: true, ..Target::whole(fd) };
            let disk = FileDisk { target: Arc::new(target), in_memory, block: 512, memory: 1 };
            let mut chain = Chain::new(4096, false, Vec::new(), disk.queue());
            assert_eq!(chain.wait_handle().is_none(), in_memory, "the other engine is tested");
            blocking::flush(&mut chain)
        };
        for in_memory in [false, true] {
            let (_reader, writer) = nix::unistd::pipe().unwrap();
            assert_eq!(flushed(writer, in_memory), Err(IoError::Device(libc::EINVAL)));
            assert_eq!(flushed(tempfile::tempfile().unwrap().into(), in_memory), Ok(()));
        }
    }

    #[test]
    fn after_a_failed_flush_none_is_good_unless_the_page_cache_is_bypassed() {
        let device = Err(IoError::Device(libc::EIO));
        for direct in [false, true] {
            let fd = OwnedFd::from(tempfile::tempfile().unwrap());
            let target = Target { direct, ..Target::whole(fd) };
            assert_eq!(target.flushed(Ok(())), Ok(()));
            assert_eq!(target.flushed(device), device);
            let next = if direct { Ok(()) } else { Err(IoError::Lost) };
            assert_eq!(target.flushed(Ok(())), next);
            assert_eq!(target.flushed(device), device, "what the kernel says now comes first");
        }
    }
}
