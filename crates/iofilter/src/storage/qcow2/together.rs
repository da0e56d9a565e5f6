//! Data that moves together: what the new clusters of a batch are filled with, and then those clusters, all in flight
//! at a time.
//!
//! ```text
//!  batch begins ── fetch: what is below partly written clusters ──> buffers
//!  each request  ── maps, fills the buffer ──> put off           (a further write of that cluster goes to its buffer)
//!  commit        ── finish: all that was put off is written ──> tables (super::commit)
//! ```
//! Only what has its room in the file already is put off, so a full datastore is noticed before anything points to the cluster.

use std::time::Duration;

use io_uring::{opcode, types};

use super::storage::{AlignedBuffer, ImageFile};
use crate::stack::memory::{Cursor, Segments};
use crate::stack::request::IoError;
use crate::storage::rings::{self, LentRing, Ring};

/// The pause before the kernel is asked again, when it refuses to take or to answer requests.
const RETRY: Duration = Duration::from_millis(1);

/// Data on its way.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) write: bool,
    /// The number of the file.
    pub(super) file: usize,
    pub(super) at: u64,
    /// Memory of a request of the batch, or of `buffer`.
    pub(super) data: Segments,
    pub(super) buffer: Option<AlignedBuffer>,
}

impl Transfer {
    fn end(&self) -> u64 {
        self.at + self.data.bytes() as u64
    }

    /// Whether it has anything of this part of its file.
    pub(super) fn meets(&self, at: u64, length: u64) -> bool {
        self.at < at + length && at < self.end()
    }

    /// Puts data over a part of what it will write; false if that is not all in memory of its own.
    pub(super) fn patch(&self, at: u64, data: &Segments) -> bool {
        let within = self.at <= at && at + data.bytes() as u64 <= self.end();
        if self.buffer.is_none() || !within {
            return false;
        }
        let (mut to, mut from) = (Cursor::default(), Cursor::default());
        to.skip(&self.data, (at - self.at) as usize);
        while let Some(piece) = from.next(data, usize::MAX) {
            let mut left = piece;
            while let Some(into) = to.next(&self.data, left.len()).filter(|_| !left.is_empty()) {
                into.copy_from_segment(&left.part(0, into.len()));
                left = left.part(into.len(), usize::MAX);
            }
        }
        true
    }
}

/// Moves data of an image's files.
pub(super) struct Mover {
    ring: Option<LentRing>,
    files: Vec<ImageFile>,
    answers: Vec<(u64, i32)>,
}

impl std::fmt::Debug for Mover {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Mover")
    }
}

impl Mover {
    /// With a ring where that is of use, else one after the other.
    pub(super) fn new(files: &[ImageFile]) -> Self {
        let takes = files.iter().all(ImageFile::takes_rings);
        let numbers: Vec<_> = files.iter().map(ImageFile::number).collect();
        let ring = if takes { rings::lend(&numbers).ok() } else { None };
        Self { ring, files: files.to_vec(), answers: Vec::new() }
    }

    /// Whether much is in flight at a time.
    pub(super) fn has_ring(&self) -> bool {
        self.ring.is_some()
    }

    /// Moves all of these; the outcome of each.
    pub(super) fn run(&mut self, transfers: &[Transfer]) -> Vec<Result<(), IoError>> {
        let mut whole = vec![false; transfers.len()];
        if let (Some(ring), true) = (&mut self.ring, transfers.len() > 1) {
            for transfer in transfers.iter().filter(|transfer| transfer.write) {
                // What this cannot write the call below cannot, either.
                let _ = self.files[transfer.file]
                    .before_data(transfer.at, transfer.data.bytes() as u64);
            }
            in_ring(ring, &self.files, transfers, &mut self.answers, &mut whole);
        }
        let each = transfers.iter().zip(whole).map(|(transfer, whole)| {
            let (file, data, at) = (&self.files[transfer.file], &transfer.data, transfer.at);
            match (whole, transfer.write) {
                (true, true) => {
                    file.grown(transfer.end());
                    Ok(())
                }
                (true, false) => Ok(()),
                (false, true) => file.write_data(data, at),
                (false, false) => file.read_data(data, at),
            }
        });
        each.collect()
    }
}

/// Has the ring move what it takes; says which it has moved as a whole.
fn in_ring(
    ring: &mut LentRing,
    files: &[ImageFile],
    transfers: &[Transfer],
    answers: &mut Vec<(u64, i32)>,
    whole: &mut [bool],
) {
    let mut in_flight = 0;
    for (number, transfer) in transfers.iter().enumerate() {
        if !files[transfer.file].suits(&transfer.data, transfer.at) {
            continue;
        }
        let list = transfer.data.as_slice();
        let (iovecs, count) = (list.as_ptr().cast::<libc::iovec>(), list.len() as u32);
        let file = types::Fixed(transfer.file as u32);
        let entry = if transfer.write {
            opcode::Writev::new(file, iovecs, count).offset(transfer.at).build()
        } else {
            opcode::Readv::new(file, iovecs, count).offset(transfer.at).build()
        };
        // SAFETY: the memory is the transfer's or its request's, and is there until this returns, which is when the kernel
        // has answered for all of it.
        if !unsafe { ring.push(&entry.user_data(number as u64)) } {
            break;
        }
        in_flight += 1;
    }
    let mut told = false;
    while in_flight > 0 {
        if let Err(error) = ring.enter(in_flight)
            && error.raw_os_error() != Some(libc::EINTR)
        {
            if !std::mem::replace(&mut told, true) {
                tracing::error!(%error, "io_uring_enter failed; tried again until it works");
            }
            std::thread::sleep(RETRY);
        }
        answers.clear();
        ring.reap(answers);
        for &(number, moved) in answers.iter() {
            in_flight -= 1;
            let all = transfers.get(number as usize).map(|transfer| transfer.data.bytes());
            if let (Some(whole), Some(all)) = (whole.get_mut(number as usize), all) {
                *whole = usize::try_from(moved) == Ok(all);
            }
        }
    }
}
