//! The storage of a chain: an image that librbd has open in this process.
//!
//! ```text
//!  submit ── rbd_aio_... ──> librbd's threads ── answer ──> list ──> poll
//!                                       └── the chain sleeps: its eventfd
//! ```
//! librbd reads into the request's own memory and writes from it; nothing is copied in between.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use nix::libc;
use vmseal_iofilter::stack::chain::{Io, Storage};
use vmseal_iofilter::stack::request::{IoError, Operation, Request, RequestId};
use vmseal_rbd::image::Image;
use vmseal_rbd::parts::Parts;

/// A request that librbd has answered.
type Answer = (RequestId, Result<(), IoError>);

/// See the module.
pub struct Queue {
    image: Arc<Image>,
    /// Where the disk begins in the image, in bytes.
    offset: u64,
    in_flight: usize,
    sender: Sender<Answer>,
    answers: Receiver<Answer>,
}

impl Queue {
    /// The queue of a disk that begins there in the image.
    pub fn new(image: Arc<Image>, offset: u64) -> Self {
        let (sender, answers) = channel();
        Self { image, offset, in_flight: 0, sender, answers }
    }
}

/// What the chain is told.
fn outcome(done: io::Result<()>) -> Result<(), IoError> {
    done.map_err(|error| IoError::from_errno(error.raw_os_error().unwrap_or(libc::EIO)))
}

/// What is within an image is read whole.
fn whole(read: u64, length: u64) -> io::Result<()> {
    if read == length { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EIO)) }
}

/// The memory of a request, as librbd takes it.
fn memory(request: &Request) -> Parts {
    let segments = request.data().as_slice().iter();
    // SAFETY: the request has its memory until it is completed. That is after librbd's answer, for which `finish` waits, too.
    unsafe { Parts::of_memory(segments.map(|segment| (segment.base(), segment.len()))) }
}

impl Storage for Queue {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let (offset, length) = (self.offset + request.offset, request.length);
        let (sender, waker) = (self.sender.clone(), io.waker().clone());
        let answer = move |done: io::Result<()>| {
            // The queue is there until it has all answers.
            let _ = sender.send((id, outcome(done)));
            waker.wake();
        };
        self.in_flight += 1;
        match request.operation {
            Operation::Read => {
                self.image.read_into(offset, memory(request), move |read| {
                    answer(read.and_then(|read| whole(read, length)));
                });
            }
            Operation::Write => self.image.write_from(offset, memory(request), answer),
            Operation::Flush => self.image.flush(answer),
            Operation::Discard | Operation::WriteZeroes { unmap: true } => {
                self.image.write_zeroes(offset..offset + length, false, answer);
            }
            Operation::WriteZeroes { unmap: false } => {
                self.image.write_zeroes(offset..offset + length, true, answer);
            }
        }
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        while let Ok((id, result)) = self.answers.try_recv() {
            self.in_flight -= 1;
            io.complete(id, result);
        }
    }

    /// None: librbd's threads wake the chain by its own eventfd.
    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn works_at_once(&self) -> bool {
        false
    }

    fn finish(&mut self) -> bool {
        while self.in_flight > 0 && self.answers.recv().is_ok() {
            self.in_flight -= 1;
        }
        self.in_flight == 0
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.finish();
    }
}
