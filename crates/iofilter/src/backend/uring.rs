//! The file engine on io_uring: one ring per queue, the file registered.
//!
//! ```text
//!  submit: entry into the submission queue        poll: one io_uring_enter, then reap
//!  In flight --whole--> complete     --short--> In flight again with the rest
//!            --0 of a read--> truncated            --not supported (fallocate)--> done synchronously
//! ```
//! A request's memory and its list of segments stay in place until its completion is reaped: the chain
//! keeps the slot, and `rest` is only rewritten between two submissions of the same request.
//!
//! What a ring does passes by the filter of system calls, so each is restricted before it is enabled: to
//! these four operations, on the file that is registered, and nothing can be registered after.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue, types};

use crate::backend::file::{Intact, Target};
use crate::backend::sync::{self, PUNCH, ZERO_RANGE};
use crate::chain::{Backend, Io};
use crate::memory::{Cursor, Segments};
use crate::request::{IoError, Operation, Request, RequestId};

/// Entries of the submission queue: what a pass hands over in one go.
const ENTRIES: u32 = 256;

/// The index of the only registered file.
const FILE: types::Fixed = types::Fixed(0);

/// A request in flight.
#[derive(Debug, Default)]
struct Flight {
    id: Option<RequestId>,
    done: usize,
    rest: Segments,
}

/// See the module.
pub struct UringFile {
    ring: IoUring,
    target: Arc<Target>,
    intact: Intact,
    flights: Vec<Flight>,
    in_flight: usize,
    finished: Vec<(u64, i32)>,
}

impl UringFile {
    pub(super) fn new(target: Arc<Target>) -> io::Result<Self> {
        let ring = restricted(target.fd.as_raw_fd()).or_else(|error| {
            tracing::warn!(%error, "what a ring may do cannot be restricted");
            let ring = IoUring::builder().dontfork().build(ENTRIES)?;
            ring.submitter().register_files(&[target.fd.as_raw_fd()])?;
            Ok::<_, io::Error>(ring)
        })?;
        let (intact, flights, finished) = (Intact::default(), Vec::new(), Vec::new());
        Ok(Self { ring, target, intact, flights, in_flight: 0, finished })
    }

    fn entry(&self, request: &Request, id: RequestId) -> squeue::Entry {
        let at = self.target.offset + request.offset;
        let flight = &self.flights[id.index()];
        let (list, at) = if flight.done == 0 {
            (request.data.as_slice(), at)
        } else {
            (flight.rest.as_slice(), at + flight.done as u64)
        };
        let (iovecs, count) = (list.as_ptr().cast::<libc::iovec>(), list.len() as u32);
        let allocate =
            |mode| opcode::Fallocate::new(FILE, request.length).offset(at).mode(mode).build();
        let entry = match request.operation {
            Operation::Read => opcode::Readv::new(FILE, iovecs, count).offset(at).build(),
            Operation::Write => opcode::Writev::new(FILE, iovecs, count).offset(at).build(),
            Operation::Flush => opcode::Fsync::new(FILE).flags(types::FsyncFlags::DATASYNC).build(),
            Operation::Discard | Operation::WriteZeroes { unmap: true } => allocate(PUNCH),
            Operation::WriteZeroes { unmap: false } => allocate(ZERO_RANGE),
        };
        entry.user_data(id.index() as u64)
    }

    fn push(&mut self, id: RequestId, io: &mut Io<'_>) {
        let entry = self.entry(io.request(id), id);
        // SAFETY: the entry's memory stays valid until its completion; see the module.
        while unsafe { self.ring.submission().push(&entry) }.is_err() {
            if let Err(error) = self.ring.submit()
                && !passing(&error)
            {
                let errno = error.raw_os_error().unwrap_or(libc::EIO);
                return io.complete(id, Err(IoError::Device(errno)));
            }
        }
        self.flights[id.index()].id = Some(id);
        self.in_flight += 1;
    }

    /// Deals with a completion.
    fn reaped(&mut self, index: u64, answer: i32, io: &mut Io<'_>) {
        let Some(flight) = self.flights.get_mut(index as usize) else { return };
        let Some(id) = flight.id.take() else { return };
        self.in_flight -= 1;
        let request = io.request(id);
        match request.operation {
            Operation::Read | Operation::Write => self.moved(id, answer, io),
            _ if matches!(-answer, libc::EINTR | libc::EAGAIN) => self.push(id, io),
            Operation::Flush => {
                let answer = if answer < 0 { Err(IoError::from_errno(-answer)) } else { Ok(()) };
                io.complete(id, self.target.flushed(answer));
            }
            _ if answer >= 0 => io.complete(id, Ok(())),
            Operation::Discard | Operation::WriteZeroes { .. } => {
                let result = self.fall_back(request, -answer);
                io.complete(id, result);
            }
        }
    }

    fn moved(&mut self, id: RequestId, answer: i32, io: &mut Io<'_>) {
        let request = io.request(id);
        let write = request.operation == Operation::Write;
        match answer {
            0 => {
                let why = if write { IoError::NoSpace } else { IoError::Truncated };
                io.complete(id, Err(why));
            }
            moved if moved > 0 => {
                let flight = &mut self.flights[id.index()];
                flight.done += moved as usize;
                let total = request.data.bytes();
                if flight.done >= total {
                    return io.complete(id, Ok(()));
                }
                let mut cursor = Cursor::default();
                cursor.skip(&request.data, flight.done);
                flight.rest.clear();
                flight.rest.push_from(&request.data, &mut cursor, total - flight.done);
                self.push(id, io);
            }
            _ if matches!(-answer, libc::EINTR | libc::EAGAIN) => self.push(id, io),
            _ => io.complete(id, Err(IoError::from_errno(-answer))),
        }
    }

    /// Does without the kind of `fallocate` that failed, if it is one that the file system lacks.
    fn fall_back(&self, request: &Request, errno: i32) -> Result<(), IoError> {
        let punched = request.operation != Operation::WriteZeroes { unmap: false };
        let flag = if punched { &self.target.punches } else { &self.target.zeroes };
        if !self.target.cannot(errno, flag) {
            return Err(IoError::from_errno(errno));
        }
        self.without(request)
    }

    fn without(&self, request: &Request) -> Result<(), IoError> {
        match request.operation {
            Operation::WriteZeroes { unmap } => {
                sync::zero(&self.target, request.offset, request.length, unmap)
            }
            _ => sync::discard(&self.target, request.offset, request.length),
        }
    }
}

/// A ring that can do what this module asks of it with this file, and nothing else (Linux 5.10).
fn restricted(file: RawFd) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_r_disabled().dontfork();
    let ring = builder.clone().setup_coop_taskrun().build(ENTRIES);
    let ring = ring.or_else(|_| builder.build(ENTRIES))?;
    ring.submitter().register_files(&[file])?;
    let registered = squeue::Flags::FIXED_FILE.bits();
    let operations =
        [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
    let mut restrictions = Vec::from(operations.map(Restriction::sqe_op));
    restrictions.push(Restriction::sqe_flags_allowed(registered));
    restrictions.push(Restriction::sqe_flags_required(registered));
    ring.submitter().register_restrictions(&mut restrictions)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// Errors of `io_uring_enter` that pass when completions are reaped.
fn passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

impl Backend for UringFile {
    fn prepare(&mut self, capacity: usize) {
        self.flights.resize_with(capacity, Flight::default);
        self.finished.reserve(capacity);
    }

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let operation = io.request(id).operation;
        if let Err(refusal) = self.intact.allows(&self.target, operation) {
            return io.complete(id, Err(refusal));
        }
        self.flights[id.index()].done = 0;
        let flag = match operation {
            Operation::Discard | Operation::WriteZeroes { unmap: true } => &self.target.punches,
            Operation::WriteZeroes { unmap: false } => &self.target.zeroes,
            _ => return self.push(id, io),
        };
        if flag.load(Ordering::Relaxed) {
            self.push(id, io);
        } else {
            let result = self.without(io.request(id));
            io.complete(id, result);
        }
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.intact.forget();
        if self.in_flight == 0 {
            return;
        }
        if !self.ring.submission().is_empty()
            && let Err(error) = self.ring.submit()
            && !passing(&error)
        {
            tracing::error!(%error, "io_uring_enter failed; requests wait for the next pass");
        }
        let mut finished = std::mem::take(&mut self.finished);
        finished.extend(self.ring.completion().map(|entry| (entry.user_data(), entry.result())));
        for (index, answer) in finished.drain(..) {
            self.reaped(index, answer, io);
        }
        self.finished = finished;
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ring.as_fd())
    }
}

impl Drop for UringFile {
    /// The kernel may still write into requests' memory: wait for it.
    fn drop(&mut self) {
        while self.in_flight > 0 {
            match self.ring.submit_and_wait(1) {
                Err(error) if !passing(&error) => return,
                _ => self.in_flight -= self.ring.completion().count().min(self.in_flight),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(ring: &mut IoUring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the entries of these tests name no memory that goes away before their answer.
        unsafe { ring.submission().push(entry).unwrap() };
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_ring_does_what_a_disk_needs_with_its_file_and_nothing_else() {
        let (file, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let mut ring = restricted(file.as_raw_fd()).unwrap();
        let flush = opcode::Fsync::new(FILE).build();
        assert_eq!(answer(&mut ring, &flush), 0);
        let path = c"/etc/passwd".as_ptr();
        let refused = [
            ("another file", opcode::Fsync::new(types::Fd(other.as_raw_fd())).build()),
            ("a socket", opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build()),
            ("a path", opcode::OpenAt::new(types::Fd(libc::AT_FDCWD), path).build()),
            ("a link", opcode::Fsync::new(FILE).build().flags(squeue::Flags::IO_LINK)),
        ];
        for (what, entry) in refused {
            assert_eq!(answer(&mut ring, &entry), -libc::EACCES, "{what}");
        }
        let more = ring.submitter().register_eventfd(other.as_raw_fd()).unwrap_err();
        assert_eq!(more.raw_os_error(), Some(libc::EACCES));
        assert_eq!(answer(&mut ring, &flush), 0, "it goes on");
    }
}
