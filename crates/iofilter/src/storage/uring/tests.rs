//! The engine over a ring that completes requests as a test says, within the kernel's contract; and which operations
//! a real ring allows.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::time::Instant;

use nix::sys::eventfd::{EfdFlags, EventFd};

use io_uring::IoUring;

use super::*;
use crate::stack::blocking;
use crate::stack::chain::{Chain, Filter, Limits};
use crate::stack::pool::Pool;
use crate::storage::rings::restricted;

/// A chain that takes longer is stuck.
const TIMEOUT: Duration = Duration::from_secs(60);

const SIZE: usize = 1 << 20;

/// The outcome of the next request that the kernel takes, or of the next `io_uring_enter`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Whole,
    /// At most this many bytes of a read or write.
    Short(usize),
    /// This error number.
    Fails(i32),
    /// The call fails, and nothing is taken.
    EnterFails(i32),
    /// The call takes one entry.
    EnterTakesOne,
}

/// The kernel's side. Everything that is not in the script succeeds.
struct Scripted {
    file: File,
    script: VecDeque<Outcome>,
    entries: usize,
    queued: VecDeque<[u8; 64]>,
    done: VecDeque<(u64, i32)>,
    event: EventFd,
}

impl Scripted {
    fn new(file: &File, script: impl IntoIterator<Item = Outcome>, entries: usize) -> Self {
        let (file, script) = (file.try_clone().unwrap(), script.into_iter().collect());
        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
        let (queued, done) = (VecDeque::new(), VecDeque::new());
        Self { file, script, entries, queued, done, event }
    }

    /// Does the operation of an entry (linux/io_uring.h).
    fn perform(&mut self, entry: &[u8; 64]) {
        let field = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().unwrap());
        let (offset, address, user) = (field(8), field(16), field(32));
        let count = u32::from_le_bytes(entry[24..28].try_into().unwrap());
        let moves = [opcode::Readv::CODE, opcode::Writev::CODE].contains(&entry[0]);
        let next = match self.script.front() {
            Some(Outcome::EnterFails(_) | Outcome::EnterTakesOne) | None => Outcome::Whole,
            Some(_) => self.script.pop_front().unwrap(),
        };
        let answer = match next {
            Outcome::Fails(errno) => -errno,
            _ if !moves => 0,
            next => {
                // SAFETY: the engine's promise to the kernel, whose place this takes.
                let list = unsafe {
                    std::slice::from_raw_parts(address as *const libc::iovec, count as usize)
                };
                let most = if let Outcome::Short(most) = next { most } else { usize::MAX };
                let write = entry[0] == opcode::Writev::CODE;
                self.move_bytes(list, offset, most, write)
            }
        };
        self.done.push_back((user, answer));
        self.event.write(1).unwrap();
    }

    fn move_bytes(&self, list: &[libc::iovec], mut at: u64, most: usize, write: bool) -> i32 {
        let begin = at;
        for piece in list {
            let length = piece.iov_len.min(most - (at - begin) as usize);
            // SAFETY: as above.
            let bytes =
                unsafe { std::slice::from_raw_parts_mut(piece.iov_base.cast::<u8>(), length) };
            if write {
                self.file.write_all_at(bytes, at).unwrap();
            } else {
                self.file.read_exact_at(bytes, at).unwrap();
            }
            at += length as u64;
        }
        (at - begin) as i32
    }
}

impl Ring for Scripted {
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        if self.queued.len() == self.entries {
            return false;
        }
        // SAFETY: an entry is the kernel's structure, of that length and plain numbers.
        self.queued.push_back(unsafe { std::mem::transmute_copy(entry) });
        true
    }

    fn is_behind(&mut self) -> bool {
        !self.queued.is_empty()
    }

    fn enter(&mut self, _completions: usize) -> io::Result<usize> {
        let mut most = usize::MAX;
        match self.script.front() {
            Some(&Outcome::EnterFails(errno)) => {
                self.script.pop_front();
                return Err(io::Error::from_raw_os_error(errno));
            }
            Some(Outcome::EnterTakesOne) => {
                self.script.pop_front();
                most = 1;
            }
            _ => {}
        }
        let mut taken = 0;
        while taken < most
            && let Some(entry) = self.queued.pop_front()
        {
            self.perform(&entry);
            taken += 1;
        }
        Ok(taken)
    }

    fn reap(&mut self, into: &mut Vec<(u64, i32)>) {
        into.extend(self.done.drain(..));
        let _ = self.event.read();
    }

    fn event(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.event)
    }
}

fn file() -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&content(0), 0).unwrap();
    file
}

fn content(seed: usize) -> Vec<u8> {
    (0..SIZE).map(|at| ((at / 512 + seed) % 251) as u8).collect()
}

/// Requests of this many bytes each, one after the other, in memory of odd pieces.
fn submit(chain: &mut Chain, operation: Operation, bytes: &mut [u8], length: usize) {
    for (index, part) in bytes.chunks_mut(length).enumerate() {
        let id = chain.begin().unwrap();
        for piece in part.chunks_mut(3000) {
            // SAFETY: `sleeps_and_ends` keeps the bytes until all is done.
            chain.data_mut(id).push(unsafe { Segment::new(piece.as_mut_ptr(), piece.len()) });
        }
        chain.submit(id, operation, (index * length) as u64, 0, index as u64);
    }
}

/// Does the requests over a ring with this script, sleeping as in production; returns the memory's content and
/// the results.
fn run(
    file: &File,
    ring: Scripted,
    (operation, mut bytes, length): (Operation, Vec<u8>, usize),
) -> (Vec<u8>, Result<(), IoError>) {
    let target = Arc::new(FileTarget::whole(file.try_clone().unwrap().into()));
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || {
        let backend = Box::new(UringFile::over(ring, target));
        let mut chain = Chain::new(SIZE as u64, false, Vec::new(), backend).unwrap();
        submit(&mut chain, operation, &mut bytes, length);
        let result = blocking::drain(&mut chain);
        drop(chain);
        let _ = send.send((bytes, result));
    });
    receive.recv_timeout(TIMEOUT).expect("the owner of the chain sleeps for ever")
}

#[test]
fn a_request_alone_that_comes_back_unfinished_is_handed_over_again_before_its_owner_sleeps() {
    let ways: [&[Outcome]; 9] = [
        &[Outcome::Short(1)],
        &[Outcome::Short(4096), Outcome::Short(1), Outcome::Short(9000)],
        &[Outcome::Fails(libc::EINTR)],
        &[Outcome::Fails(libc::EAGAIN), Outcome::Short(3000), Outcome::Fails(libc::EAGAIN)],
        &[Outcome::EnterFails(libc::EAGAIN)],
        &[Outcome::EnterFails(libc::EBUSY); 20],
        &[Outcome::EnterFails(libc::ENOMEM); 5],
        &[Outcome::Fails(libc::EAGAIN); 50],
        &[Outcome::Short(10); 100],
    ];
    for way in ways {
        let file = file();
        let ring = Scripted::new(&file, way.iter().copied(), 8);
        let (bytes, result) = run(&file, ring, (Operation::Read, vec![0xee; 65536], 65536));
        assert_eq!(result, Ok(()), "{way:?}");
        assert!(bytes == content(0)[..65536], "{way:?}: a part of the read is missing");
        let ring = Scripted::new(&file, way.iter().copied(), 8);
        let written = content(7)[..65536].to_vec();
        let (bytes, result) = run(&file, ring, (Operation::Write, written.clone(), 65536));
        assert_eq!((result, bytes == written), (Ok(()), true), "{way:?}");
        let mut now = vec![0; 65536];
        file.read_exact_at(&mut now, 0).unwrap();
        assert!(now == written, "{way:?}: a part of the write is missing");
    }
}

#[test]
fn flushes_and_zeroes_that_are_interrupted_are_handed_over_again() {
    for operation in [Operation::Flush, Operation::Discard, Operation::WriteZeroes { unmap: true }]
    {
        let file = file();
        let script = [Outcome::Fails(libc::EINTR), Outcome::Fails(libc::EAGAIN)];
        let target = Arc::new(FileTarget::whole(file.try_clone().unwrap().into()));
        let ring = Scripted::new(&file, script, 8);
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let backend = Box::new(UringFile::over(ring, target));
            let mut chain = Chain::new(SIZE as u64, false, Vec::new(), backend).unwrap();
            let id = chain.begin().unwrap();
            chain.submit(id, operation, 0, 4096, 0);
            let _ = send.send(blocking::drain(&mut chain));
        });
        assert_eq!(receive.recv_timeout(TIMEOUT), Ok(Ok(())), "{operation:?}");
    }
}

/// A system call would have the queue wait for the server of the file. So the ring's file is another one here than that of the target.
#[test]
fn zeroes_that_the_file_system_cannot_make_are_written_by_the_ring() {
    let lacks = Outcome::Fails(libc::EOPNOTSUPP);
    let unmap = Operation::WriteZeroes { unmap: true };
    let keep = Operation::WriteZeroes { unmap: false };
    let (short, again) = (Outcome::Short(100_000), Outcome::Fails(libc::EAGAIN));
    let ways: [(Operation, &[Outcome], bool); 4] = [
        (unmap, &[lacks, lacks, short, again, Outcome::Short(1)], true),
        (keep, &[lacks, again, short, short], true),
        // The ring of this test does nothing where it makes zeroes without writing them.
        (unmap, &[lacks], false),
        (Operation::Discard, &[lacks], false),
    ];
    for (operation, script, written) in ways {
        let (in_ring, by_calls) = (file(), file());
        let target = Arc::new(FileTarget::whole(by_calls.try_clone().unwrap().into()));
        let ring = Scripted::new(&in_ring, script.iter().copied(), 8);
        let (send, receive) = mpsc::channel();
        std::thread::spawn(move || {
            let backend = Box::new(UringFile::over(ring, target));
            let mut chain = Chain::new(SIZE as u64, false, Vec::new(), backend).unwrap();
            let id = chain.begin().unwrap();
            chain.submit(id, operation, 4096, SIZE as u64 - 8192, 0);
            let _ = send.send(blocking::drain(&mut chain));
        });
        assert_eq!(receive.recv_timeout(TIMEOUT), Ok(Ok(())), "{operation:?}");
        let mut expected = content(0);
        let mut now = vec![0; SIZE];
        by_calls.read_exact_at(&mut now, 0).unwrap();
        assert!(now == expected, "{operation:?}: the queue has waited for a system call");
        if written {
            expected[4096..SIZE - 4096].fill(0);
        }
        in_ring.read_exact_at(&mut now, 0).unwrap();
        assert!(now == expected, "{operation:?}: {script:?}");
    }
}

#[test]
fn whatever_the_kernel_may_do_many_requests_at_once_all_end_and_move_all_their_bytes() {
    for seed in 0..30 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut script = || {
            let next = |random: &mut fastrand::Rng| match random.u8(..10) {
                0..=3 => Outcome::Short(random.usize(1..20_000)),
                4 => Outcome::Fails(libc::EINTR),
                5 => Outcome::Fails(libc::EAGAIN),
                6 => Outcome::EnterFails(
                    *random.choice([libc::EAGAIN, libc::EBUSY, libc::EINTR].iter()).unwrap(),
                ),
                7 => Outcome::EnterTakesOne,
                _ => Outcome::Whole,
            };
            (0..200).map(|_| next(&mut random)).collect::<Vec<_>>()
        };
        let file = file();
        let (one, other) = (script(), script());
        // Fewer entries than requests: the others have to wait in line.
        let read =
            run(&file, Scripted::new(&file, one, 4), (Operation::Read, vec![0; SIZE], 16384));
        assert_eq!((read.1, read.0 == content(0)), (Ok(()), true), "seed {seed}");
        let write = (Operation::Write, content(9), 16384);
        assert_eq!(run(&file, Scripted::new(&file, other, 4), write).1, Ok(()), "seed {seed}");
        let mut now = vec![0; SIZE];
        file.read_exact_at(&mut now, 0).unwrap();
        assert!(now == content(9), "seed {seed}");
    }
}

#[test]
fn a_request_without_progress_fails_and_does_not_keep_a_processor_busy() {
    let file = file();
    let target = Arc::new(FileTarget::whole(file.try_clone().unwrap().into()));
    let ring = Scripted::new(&file, std::iter::repeat_n(Outcome::Fails(libc::EAGAIN), 100), 8);
    let mut chain =
        Chain::new(SIZE as u64, false, Vec::new(), Box::new(UringFile::over(ring, target)))
            .unwrap();
    let mut bytes = vec![0; 512];
    submit(&mut chain, Operation::Read, &mut bytes, 512);
    chain.poll();
    assert!(chain.in_flight() == 1 && chain.deadline().is_some());
    let begun = Instant::now();
    blocking::drain(&mut chain).unwrap();
    assert!(begun.elapsed() > RETRY * 10, "tried again without a pause");
    assert_eq!(bytes, content(0)[..512]);
}

fn answer(ring: &mut IoUring, entry: &squeue::Entry) -> i32 {
    // SAFETY: the entries of these tests name no memory that goes away before their answer.
    unsafe { ring.submission().push(entry).unwrap() };
    ring.submit_and_wait(1).unwrap();
    ring.completion().next().unwrap().result()
}

#[test]
fn a_ring_does_what_a_disk_needs_with_its_file_and_nothing_else() {
    let (file, other) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let mut ring = restricted(&[file.as_raw_fd()]).unwrap();
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
    // A spare ring gets its file in this way.
    ring.submitter().register_files_update(0, &[-1]).unwrap();
    assert_eq!(answer(&mut ring, &flush), -libc::EBADF, "it has no file");
    let (_reader, pipe) = nix::unistd::pipe().unwrap();
    ring.submitter().register_files_update(0, &[pipe.as_raw_fd()]).unwrap();
    assert_eq!(answer(&mut ring, &flush), -libc::EINVAL, "a pipe cannot be flushed");
}

/// A filter whose reads go into a buffer of its own.
struct Bounces(Pool);

impl Filter for Bounces {
    fn limits(&self) -> Limits {
        Limits { children: 1 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let buffer = self.0.take(4096).unwrap();
        let child = io.child(id, Operation::Read, 0, 4096).unwrap();
        io.lend(child, &self.0, &buffer, 4096);
        io.pass(child);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        io.release(id);
    }
}

#[test]
fn memory_that_the_kernel_may_still_write_into_is_not_freed() {
    for works in [true, false] {
        let file = file();
        let fails = usize::from(!works) * 5000;
        let script = std::iter::repeat_n(Outcome::EnterFails(libc::ENOMEM), fails);
        let target = Arc::new(FileTarget::whole(file.try_clone().unwrap().into()));
        let backend = UringFile::over(Scripted::new(&file, script, 8), target);
        let bounces = Bounces(Pool::new(4096).unwrap());
        let arena = Arc::downgrade(bounces.0.arena());
        let mut chain =
            Chain::new(SIZE as u64, false, vec![Box::new(bounces)], Box::new(backend)).unwrap();
        let id = chain.begin().unwrap();
        chain.submit(id, Operation::Flush, 0, 0, 0);
        if !works {
            chain.poll();
        }
        assert_eq!(chain.in_flight(), 1);
        drop(chain);
        assert_eq!(arena.upgrade().is_some(), !works, "enter works: {works}");
    }
}
