//! How much memory the queues of this process may share, those of all disks together. A queue that is not within goes through
//! its file.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use vmseal_channel::RING_BYTES;

/// The buffers of one queue, in bytes: eight requests of the longest kind keep a cluster busy. They take memory as they are first used.
pub const BUFFER_BYTES: usize = 32 << 20;

/// What one queue shares at most: its ring, its buffers, and those of a cipher above it, which are as many.
const QUEUE_BYTES: usize = RING_BYTES + 2 * BUFFER_BYTES;

/// What all queues share at most, in bytes: those of three disks with four queues each, and of one of them once more, where it is moved.
pub const SHARED_BYTES_MAX: usize = 16 * QUEUE_BYTES;

static OF_PROCESS: LazyLock<Arc<Budget>> = LazyLock::new(Arc::default);

/// Counts what is shared.
#[derive(Debug, Default)]
pub(super) struct Budget {
    shared: AtomicUsize,
}

/// The memory of a queue, which counts until this is dropped.
#[derive(Debug)]
pub(super) struct Taken(Arc<Budget>);

impl Budget {
    /// That of this process.
    pub(super) fn of_process() -> Arc<Self> {
        Arc::clone(&*OF_PROCESS)
    }

    /// Takes the memory of a queue.
    ///
    /// # Errors
    /// `QuotaExceeded`: the queues share as much as they may.
    pub(super) fn take(self: &Arc<Self>) -> io::Result<Taken> {
        let more = |shared: usize| {
            let more = shared + QUEUE_BYTES;
            (more <= SHARED_BYTES_MAX).then_some(more)
        };
        match self.shared.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Taken(Arc::clone(self))),
            Err(shared) => {
                let what = format!(
                    "the queues of this process share {shared} bytes already, and {SHARED_BYTES_MAX} are the most"
                );
                Err(io::Error::new(io::ErrorKind::QuotaExceeded, what))
            }
        }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.shared.fetch_sub(QUEUE_BYTES, Ordering::Relaxed);
    }
}
