//! The part of a file that is a disk, for both file engines: which operations the file system lacks, and whether the
//! file is still whole.
//!
//! A regular file that is truncated while it is in use must not become an image with zeroes where data was: a
//! write beyond the new end would extend it again. So its length is checked ([`LengthCheck`]), and an image that
//! was once found too short refuses everything until it is opened again (reads too, if it was changed: the part
//! between its new end and the change may be zeroes that we wrote):
//! ```text
//!   before a change        if the last check is LOOK_EVERY ago
//!   before a change that reaches the disk's end, the only one that can make the file as long as before
//!   after each flush       before it is answered: the flushed data is in a file that was not truncated
//!   before a read          never: a read beyond the end says so itself
//! ```
//! No system call can be limited to the part below the end of a file, so changes in flight when the file is truncated,
//! and changes for [`LOOK_EVERY`] after, can still extend it; no flush after the truncation ever succeeds.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::stack::request::{IoError, Request};
use crate::storage::served;
use crate::storage::statx::length_here;

/// How old the last check of a file's length may be when the file is changed: long against a check, however small the
/// writes are, and short against the time in which anyone notices.
pub(super) const LOOK_EVERY: Duration = Duration::from_micros(200);

/// The part of a file that is a disk.
#[derive(Debug)]
pub struct FileTarget {
    pub(super) fd: OwnedFd,
    /// Where the disk starts in the file.
    pub(super) offset: u64,
    /// Where it ends; none for a block device, whose file length means nothing.
    pub(super) end: Option<u64>,
    /// Cleared when the file system cannot punch holes, or the file must keep its space.
    pub(super) punches: AtomicBool,
    /// Cleared when the file system cannot do it.
    pub(super) zeroes: AtomicBool,
    /// Whether the page cache is bypassed.
    pub(super) direct: bool,
    /// Set when a flush has failed; see [`FileTarget::flushed`].
    pub(super) lost: AtomicBool,
    /// Whether a process serves the file that may answer requests in part.
    pub(super) fuse: bool,
    /// Whether `vmseal-rbd` serves it ([`super::served`]).
    pub(super) served: bool,
    /// Set when the file was found shorter than the disk.
    pub(super) cut: AtomicBool,
    /// Set when it was changed through this value.
    pub(super) changed: AtomicBool,
    /// Set when what was written may still land: see [`FileTarget::give_up`].
    pub(super) broken: AtomicBool,
}

/// The error of a disk that is given up.
pub(super) const BROKEN: IoError = IoError::Device(libc::EIO);

/// Where a part of a request's data is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Where the part begins within the request, in bytes.
    pub(super) from: usize,
    /// How long it is, in bytes.
    pub(super) length: usize,
    /// Which of the ring's files has it.
    pub(super) file: usize,
    /// Where it begins in that file.
    pub(super) at: u64,
}

impl FileTarget {
    /// All of a file, through the page cache, however long it is.
    pub(super) fn whole(fd: OwnedFd) -> Self {
        let (punches, zeroes) = (AtomicBool::new(true), AtomicBool::new(true));
        let (lost, cut) = (AtomicBool::new(false), AtomicBool::new(false));
        let (changed, broken) = (AtomicBool::new(false), AtomicBool::new(false));
        let (offset, end, direct, fuse) = (0, None, false, false);
        let served = served::is_served(&fd);
        Self { fd, offset, end, punches, zeroes, direct, lost, fuse, served, cut, changed, broken }
    }

    /// Whether a flush has failed, so that earlier writes may be lost for good.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// What an error number of the file means. The process ends if it says that the file's server is gone.
    pub(super) fn error(&self, errno: i32) -> IoError {
        served::check(self.served, errno);
        IoError::from_errno(errno)
    }

    /// Remembers that the file system lacks a kind of `fallocate`, if that is what the error means.
    pub(super) fn cannot(&self, errno: i32, flag: &AtomicBool) -> bool {
        let cannot = matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV);
        if cannot {
            flag.store(false, Ordering::Relaxed);
        }
        cannot
    }

    /// The result of a flush that the kernel has answered. When one fails, the kernel drops the data that it
    /// could not write from the page cache and reports that once, to one caller; so from then on every flush
    /// of the disk fails, whoever asks for it. Without a page cache each flush stands for itself. A flush also
    /// fails if the file is too short afterwards: the flushed data may have been truncated.
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

    /// Whether the file still holds all of the disk.
    fn intact(&self) -> Result<(), IoError> {
        let Some(end) = self.end else { return Ok(()) };
        if self.cut.load(Ordering::Relaxed) {
            return Err(IoError::Truncated);
        }
        let has = length_here(&self.fd).map_err(|error| self.error(error as i32))?;
        if has >= end {
            return Ok(());
        }
        if !self.cut.swap(true, Ordering::Relaxed) {
            tracing::error!(has, needs = end, "the image was truncated while it is in use");
        }
        Err(IoError::Truncated)
    }

    /// The file's server breaks the protocol of a queue: what that queue has written may land at any time, over what is
    /// written later by another one. So all of the disk fails from now on, until another process serves it.
    pub(super) fn give_up(&self) {
        self.broken.store(true, Ordering::Release);
    }

    /// Whether a request is refused for good: all of a disk that is given up; of a file that was found too short a
    /// change, and a read of what may have been changed.
    fn refuses(&self, changes: bool) -> Result<(), IoError> {
        if self.broken.load(Ordering::Acquire) {
            return Err(BROKEN);
        }
        let cut = self.cut.load(Ordering::Relaxed);
        let refuses = cut && (changes || self.changed.load(Ordering::Relaxed));
        if refuses { Err(IoError::Truncated) } else { Ok(()) }
    }

    /// Whether a request may go to the file, where its server refuses what is beyond the end: the length need not be
    /// looked at before.
    pub(super) fn allows(&self, request: &Request) -> Result<(), IoError> {
        let changes = request.operation.changes();
        self.refuses(changes)?;
        if changes && !self.changed.load(Ordering::Relaxed) {
            self.changed.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The file's server has refused a request as beyond the end.
    pub(super) fn is_short(&self) -> IoError {
        if !self.cut.swap(true, Ordering::Relaxed) {
            tracing::error!(needs = self.end, "the image was truncated while it is in use");
        }
        IoError::Truncated
    }

    /// Whether a change would make a truncated file as long as the disk needs.
    fn reaches_end(&self, request: &Request) -> bool {
        let behind = self.offset + request.offset + request.length;
        request.operation.changes() && self.end.is_some_and(|end| behind >= end)
    }
}

/// One queue's knowledge of the file's length; see the module.
#[derive(Debug, Default)]
pub(super) struct LengthCheck {
    looked: Option<Instant>,
    /// Whether the check is recent enough for this pass of the queue, which is shorter than a read of the clock.
    recent: bool,
}

impl LengthCheck {
    /// Whether the request may go to the file.
    pub(super) fn allows(&mut self, target: &FileTarget, request: &Request) -> Result<(), IoError> {
        let changes = request.operation.changes();
        target.refuses(changes)?;
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

    /// Checks the file's length, unless that was done just now.
    fn look(&mut self, target: &FileTarget) -> Result<(), IoError> {
        let now = Instant::now();
        if self.looked.is_none_or(|looked| now - looked >= LOOK_EVERY) {
            target.intact()?;
            self.looked = Some(now);
        }
        self.recent = true;
        Ok(())
    }

    /// The next pass reads the clock again.
    pub(super) fn next_pass(&mut self) {
        self.recent = false;
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

    #[test]
    fn after_a_failed_flush_none_is_good_unless_the_page_cache_is_bypassed() {
        let device = Err(IoError::Device(libc::EIO));
        for direct in [false, true] {
            let fd = OwnedFd::from(tempfile::tempfile().unwrap());
            let target = FileTarget { direct, ..FileTarget::whole(fd) };
            assert_eq!(target.flushed(Ok(())), Ok(()));
            assert_eq!(target.flushed(device), device);
            let next = if direct { Ok(()) } else { Err(IoError::Lost) };
            assert_eq!(target.flushed(Ok(())), next);
            assert_eq!(target.flushed(device), device, "what the kernel says now comes first");
        }
    }
}
