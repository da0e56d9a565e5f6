//! The file engine that does each request synchronously: `preadv`, `pwritev`, `fallocate`, `fdatasync`.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::stack::chain::{Io, Storage};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::request::{IoError, Operation, Request, RequestId};
use crate::storage::target::{FileTarget, LengthCheck, Place, ZERO, ZEROES};

/// See the module.
pub struct SyncFile {
    target: Arc<FileTarget>,
    intact: LengthCheck,
    rest: Segments,
}

impl SyncFile {
    pub(super) fn new(target: Arc<FileTarget>) -> Self {
        Self { target, intact: LengthCheck::default(), rest: Segments::default() }
    }

    fn perform(&mut self, request: &Request) -> Result<(), IoError> {
        let (offset, length) = (request.offset, request.length);
        self.intact.allows(&self.target, request)?;
        match request.operation {
            Operation::Read | Operation::Write => transfer(&self.target, request, &mut self.rest),
            Operation::Flush => flush(&self.target),
            Operation::Discard => discard(&self.target, offset, length),
            Operation::WriteZeroes { unmap } => zero(&self.target, offset, length, unmap),
        }
    }
}

/// Reads or writes all of a request; `rest` is for the segments that a call leaves over.
pub(super) fn transfer(
    target: &FileTarget,
    request: &Request,
    rest: &mut Segments,
) -> Result<(), IoError> {
    let (length, at) = (request.data.bytes(), target.offset + request.offset);
    transfer_part(target, request, &Place { from: 0, length, file: 0, at }, rest)
}

/// The same for a part of it, at its place in this file.
pub(super) fn transfer_part(
    target: &FileTarget,
    request: &Request,
    part: &Place,
    rest: &mut Segments,
) -> Result<(), IoError> {
    let write = request.operation == Operation::Write;
    let mut done = 0;
    if part.length == request.data.bytes() {
        done = once(target, write, part.at, request.data.as_slice())?;
    }
    while done < part.length {
        let mut cursor = Cursor::default();
        cursor.skip(&request.data, part.from + done);
        rest.clear();
        rest.push_from(&request.data, &mut cursor, part.length - done);
        done += once(target, write, part.at + done as u64, rest.as_slice())?;
    }
    Ok(())
}

impl Storage for SyncFile {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let result = self.perform(io.request(id));
        io.complete(id, result);
    }

    fn poll(&mut self, _io: &mut Io<'_>) {
        self.intact.next_pass();
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn errno() -> i32 {
    nix::errno::Errno::last_raw()
}

/// One `preadv` or `pwritev`; how many bytes it moved, never 0.
pub(super) fn once(
    target: &FileTarget,
    write: bool,
    at: u64,
    segments: &[Segment],
) -> Result<usize, IoError> {
    let (fd, count) = (target.fd.as_raw_fd(), segments.len() as i32);
    let (iovecs, at) = (segments.as_ptr().cast::<libc::iovec>(), at as i64);
    loop {
        // SAFETY: `Segment` is an iovec (transparent), whose memory its maker promised; there are at
        // most `SEGMENTS_MAX` of them.
        let moved = unsafe {
            if write {
                libc::pwritev(fd, iovecs, count, at)
            } else {
                libc::preadv(fd, iovecs, count, at)
            }
        };
        match moved {
            0 if write => return Err(IoError::NoSpace),
            0 => return Err(IoError::Truncated),
            moved if moved > 0 => return Ok(moved as usize),
            _ if errno() == libc::EINTR => {}
            _ => return Err(target.error(errno())),
        }
    }
}

/// Makes the file durable.
pub(super) fn flush(target: &FileTarget) -> Result<(), IoError> {
    let answer = nix::unistd::fdatasync(&target.fd);
    target.flushed(answer.map_err(|error| target.error(error as i32)))
}

/// The mode that asks for a hole.
pub(super) const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// The mode that asks for allocated zeroes.
pub(super) const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

fn fallocate(target: &FileTarget, mode: i32, offset: u64, length: u64) -> Result<(), i32> {
    loop {
        let (fd, start) = (target.fd.as_raw_fd(), (target.offset + offset) as i64);
        // SAFETY: a plain system call on our descriptor.
        if unsafe { libc::fallocate(fd, mode, start, length as i64) } == 0 {
            return Ok(());
        }
        if errno() != libc::EINTR {
            return Err(errno());
        }
    }
}

/// Takes room for a part of the file without making it longer; false if the file system does not.
pub(super) fn allocate(target: &FileTarget, offset: u64, length: u64) -> bool {
    fallocate(target, libc::FALLOC_FL_KEEP_SIZE, offset, length).is_ok()
}

/// Punches a hole; does nothing where the file system cannot, as discard is a hint.
pub(super) fn discard(target: &FileTarget, offset: u64, length: u64) -> Result<(), IoError> {
    if !target.punches.load(Ordering::Relaxed) {
        return Ok(());
    }
    match fallocate(target, PUNCH, offset, length) {
        Ok(()) => Ok(()),
        Err(errno) if target.cannot(errno, &target.punches) => Ok(()),
        Err(errno) => Err(target.error(errno)),
    }
}

/// Makes a range read as zeroes, in the cheapest way that the file system has.
pub(super) fn zero(
    target: &FileTarget,
    offset: u64,
    length: u64,
    unmap: bool,
) -> Result<(), IoError> {
    let ways = [(PUNCH, &target.punches, unmap), (ZERO_RANGE, &target.zeroes, true)];
    for (mode, flag, allowed) in ways {
        if allowed && flag.load(Ordering::Relaxed) {
            match fallocate(target, mode, offset, length) {
                Ok(()) => return Ok(()),
                Err(errno) if target.cannot(errno, flag) => {}
                Err(errno) => return Err(target.error(errno)),
            }
        }
    }
    let mut done = 0;
    while done < length {
        let piece = (length - done).min(ZEROES as u64) as usize;
        // SAFETY: a static, which is only read.
        let segment = unsafe { Segment::new(ZERO.0.as_ptr().cast_mut(), piece) };
        done += once(target, true, target.offset + offset + done, &[segment])? as u64;
    }
    Ok(())
}
