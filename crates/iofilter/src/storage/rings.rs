//! The rings of the process. None can be made once it is confined, so some are made before that, for storage that comes
//! later.
//!
//! ```text
//!  open:    lend ──> a new ring ──────────┐                        ┌──> closed
//!                                         ├──> used by one queue ──┤
//!  sealed:  lend ──> a spare one, or none ┘                        └──> spare, its file taken away
//! ```
//! The filter of system calls does not see a ring's operations, so each ring is restricted before it is enabled: to
//! four operations, on its registered files, and to exchanging those files.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue};
use vmseal_api::filter::BACKING_MAX;

/// Entries of the submission queue: the most that a pass hands over in one go.
const ENTRIES: u32 = 256;

/// The most files of a ring: an image, all that may be below it ([`BACKING_MAX`]), and a file that is there for its lock
/// ([`super::DiskStorage::holding`]).
pub(super) const FILES_MAX: usize = 2 + BACKING_MAX;

/// `IORING_REGISTER_FILES_UPDATE` of linux/io_uring.h.
pub const FILES_UPDATE: u8 = 6;

/// No file, in the table of a ring's files.
const NONE: RawFd = -1;

struct Rings {
    sealed: bool,
    spare: Vec<IoUring>,
}

/// Of the process, as what the kernel refuses it is.
static RINGS: Mutex<Rings> = Mutex::new(Rings { sealed: false, spare: Vec::new() });

fn rings() -> MutexGuard<'static, Rings> {
    RINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes rings for storage that comes later. Where the kernel has none, that storage blocks its queue.
pub fn make_spare(count: usize) {
    for _ in 0..count {
        match restricted(&[]) {
            Ok(ring) => rings().spare.push(ring),
            Err(error) => return tracing::warn!(%error, "no spare rings"),
        }
    }
}

/// No further ring is made.
pub fn seal() {
    rings().sealed = true;
}

/// A ring for these files, [`FILES_MAX`] at most.
///
/// # Errors
/// The kernel's; `OutOfMemory` when there is none left.
pub(super) fn lend(files: &[RawFd]) -> io::Result<LentRing> {
    let spare = {
        let mut rings = rings();
        if rings.sealed { Some(rings.spare.pop()) } else { None }
    };
    let ring = match spare {
        None => restricted(files)?,
        Some(None) => return Err(io::ErrorKind::OutOfMemory.into()),
        Some(Some(ring)) => {
            ring.submitter().register_files_update(0, &table(files)?)?;
            ring
        }
    };
    Ok(LentRing { ring: Some(ring), in_use: false })
}

/// The files of a ring, and nothing in the other places.
fn table(files: &[RawFd]) -> io::Result<[RawFd; FILES_MAX]> {
    let mut table = [NONE; FILES_MAX];
    let places = table.get_mut(..files.len()).ok_or(io::ErrorKind::InvalidInput)?;
    places.copy_from_slice(files);
    Ok(table)
}

/// A ring that can do these operations with these files or those that take their places, and nothing else (Linux 5.10).
pub(super) fn restricted(files: &[RawFd]) -> io::Result<IoUring> {
    let mut builder = IoUring::builder();
    builder.setup_r_disabled().dontfork();
    let ring = builder.clone().setup_coop_taskrun().build(ENTRIES);
    let ring = ring.or_else(|_| builder.build(ENTRIES))?;
    ring.submitter().register_files(&table(files)?)?;
    let registered = squeue::Flags::FIXED_FILE.bits();
    let operations =
        [opcode::Readv::CODE, opcode::Writev::CODE, opcode::Fsync::CODE, opcode::Fallocate::CODE];
    let mut restrictions = Vec::from(operations.map(Restriction::sqe_op));
    restrictions.push(Restriction::sqe_flags_allowed(registered));
    restrictions.push(Restriction::sqe_flags_required(registered));
    restrictions.push(Restriction::register_op(FILES_UPDATE));
    ring.submitter().register_restrictions(&mut restrictions)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// The part of a ring that the engine uses; tests have their own, which completes requests as the test says.
pub trait Ring: Send {
    /// Puts an entry into the submission queue; false if that is full.
    ///
    /// # Safety
    /// The memory that the entry names stays valid until its completion.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool;

    /// Whether `enter` has anything to do: entries that the kernel does not have, or completions that it holds
    /// back because there was no room for them.
    fn is_behind(&mut self) -> bool;

    /// Hands all entries over, and waits for this many completions.
    fn enter(&mut self, completions: usize) -> io::Result<usize>;

    /// Takes the available completions.
    fn reap(&mut self, into: &mut Vec<(u64, i32)>);

    /// Readable when there are completions.
    fn event(&self) -> BorrowedFd<'_>;

    /// The kernel may use memory of its requests for good: nobody else gets the ring.
    fn keep_from_others(&mut self) {}
}

/// A ring, which goes back when it is dropped.
pub struct LentRing {
    ring: Option<IoUring>,
    /// The kernel may still use memory of its requests.
    in_use: bool,
}

impl LentRing {
    /// A ring that does not go back.
    pub(super) fn unrestricted(files: &[RawFd]) -> io::Result<Self> {
        if rings().sealed {
            return Err(io::ErrorKind::OutOfMemory.into());
        }
        let ring = IoUring::builder().dontfork().build(ENTRIES)?;
        ring.submitter().register_files(&table(files)?)?;
        Ok(Self { ring: Some(ring), in_use: true })
    }

    fn ring(&mut self) -> &mut IoUring {
        match &mut self.ring {
            Some(ring) => ring,
            None => unreachable!("it is taken when this is dropped"),
        }
    }
}

impl Drop for LentRing {
    fn drop(&mut self) {
        let Some(mut ring) = self.ring.take() else { return };
        if self.in_use || !rings().sealed {
            return;
        }
        ring.completion().for_each(drop);
        match ring.submitter().register_files_update(0, &[NONE; FILES_MAX]) {
            Ok(_) => rings().spare.push(ring),
            Err(error) => tracing::warn!(%error, "a ring is not used again"),
        }
    }
}

impl Ring for LentRing {
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.ring().submission().push(entry) }.is_ok()
    }

    fn is_behind(&mut self) -> bool {
        let submission = self.ring().submission();
        !submission.is_empty() || submission.cq_overflow()
    }

    fn enter(&mut self, completions: usize) -> io::Result<usize> {
        self.ring().submit_and_wait(completions)
    }

    fn reap(&mut self, into: &mut Vec<(u64, i32)>) {
        into.extend(self.ring().completion().map(|entry| (entry.user_data(), entry.result())));
    }

    fn event(&self) -> BorrowedFd<'_> {
        match &self.ring {
            Some(ring) => ring.as_fd(),
            None => unreachable!("it is taken when this is dropped"),
        }
    }

    fn keep_from_others(&mut self) {
        self.in_use = true;
    }
}
