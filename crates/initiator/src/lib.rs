//! Clients of a served disk, for benchmarks and tests.
//!
//! An [`Initiator`] has requests in slots and is as fast as its transport allows, so that the server is what
//! is measured.
//!
//! ```text
//! submit … submit → publish (tells the server) → reap ⇄ wait → submit …
//! ```
//!
//! [`VhostUser`] is the driver of a guest without the guest, [`Nbd`] a client of one connection. [`driver`]
//! is a guest's driver for tests, which can also misbehave, and panics where the server does; [`moved`] is one whose
//! guest is moved to another machine.

pub mod driver;
mod memory;
pub mod moved;
mod nbd;
mod queue;
mod vhost_user;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};

pub use self::nbd::Nbd;
pub use self::vhost_user::VhostUser;

/// The deepest queue: three descriptors a request in a ring of at most 1024, QEMU's own limit.
pub const DEPTH_MAX: u16 = 1024 / 3;
/// The largest request, in bytes.
pub const BLOCK_MAX: u32 = 4 << 20;
/// How long the server may complete nothing before it counts as stuck: as long as a guest waits for its disk. A cluster whose OSDs share a
/// busy disk takes more than ten seconds at times.
pub const STALL: Duration = Duration::from_secs(30);

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Disk to buffer.
    Read,
    /// Buffer to disk.
    Write,
    /// Make what was written durable.
    Flush,
}

impl Operation {
    fn request_type(self) -> u32 {
        match self {
            Self::Read => VIRTIO_BLK_T_IN,
            Self::Write => VIRTIO_BLK_T_OUT,
            Self::Flush => VIRTIO_BLK_T_FLUSH,
        }
    }
}

/// What the initiator does while nothing completes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Wait {
    /// Sleep until the server interrupts, as a guest's kernel does.
    Sleep,
    /// Poll, with interrupts suppressed.
    Poll,
}

/// Why a benchmark or test of a server failed.
#[derive(Debug, thiserror::Error)]
pub enum InitiatorError {
    /// An invalid queue size.
    #[error(
        "a queue of depth {depth} with blocks of {block} bytes: depths of 1 to {DEPTH_MAX} and blocks of 512 to {BLOCK_MAX} bytes, a multiple of 512, are allowed"
    )]
    Shape {
        /// The depth asked for.
        depth: u16,
        /// The block size asked for, in bytes.
        block: u32,
    },
    /// No shared memory.
    #[error("{size} bytes of memory to share with the server could not be had")]
    Memory {
        /// The size.
        size: usize,
        /// The cause.
        source: io::Error,
    },
    /// No connection to the socket.
    #[error("no connection to the server's socket {}", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A message of the vhost-user handshake failed.
    #[error("the server did not accept {message}")]
    Handshake {
        /// The message, as the vhost-user specification calls it.
        message: &'static str,
        /// The cause.
        source: vhost::Error,
    },
    /// The server lacks a required feature.
    #[error("the server does not offer {0}")]
    Missing(&'static str),
    /// An event descriptor failed.
    #[error("event descriptors failed")]
    Events(#[source] io::Error),
    /// The server closed its socket with requests in flight.
    #[error("the server closed the connection; see its log")]
    Closed,
    /// [`STALL`] passed.
    #[error("the server completed nothing for {} s", STALL.as_secs())]
    Stalled,
    /// A socket failed.
    #[error("the connection failed")]
    Socket(#[source] io::Error),
    /// The server's data is not valid NBD.
    #[error("the server does not keep to NBD: {0}")]
    Protocol(&'static str),
    /// The server completed a request that is not in flight.
    #[error("the server completed request {id}, which is not in flight")]
    NotInFlight {
        /// The head of a descriptor chain, or the cookie of NBD.
        id: u64,
    },
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Its slot.
    pub slot: u16,
    /// 0, or the error: VIRTIO_BLK_S_IOERR (1) and so on, over NBD the error's number.
    pub status: u8,
}

/// A client with a number of slots, each for one request of up to a block.
pub trait Initiator: Send {
    /// The disk's size in bytes.
    fn capacity(&self) -> u64;

    /// The number of slots.
    fn depth(&self) -> u16;

    /// Fills the start of a slot's buffer.
    ///
    /// # Panics
    /// If the slot does not exist or `bytes` are more than a block.
    fn fill(&mut self, slot: u16, bytes: &[u8]);

    /// Copies from the start of a slot's buffer.
    ///
    /// # Panics
    /// If the slot does not exist or `bytes` are more than a block.
    fn copy(&self, slot: u16, bytes: &mut [u8]);

    /// Puts a request of `length` bytes at byte `offset` into a slot; [`Self::publish`] starts it.
    ///
    /// # Panics
    /// If the slot is in flight or does not exist, or the request is longer than a block.
    fn submit(&mut self, slot: u16, operation: Operation, offset: u64, length: u32);

    /// Starts the submitted requests.
    ///
    /// # Errors
    /// Those of the connection.
    fn publish(&mut self) -> Result<(), InitiatorError>;

    /// Appends the completions that have arrived; does not wait.
    ///
    /// # Errors
    /// [`InitiatorError::NotInFlight`], [`InitiatorError::Protocol`].
    fn reap(&mut self, completions: &mut Vec<Completion>) -> Result<(), InitiatorError>;

    /// Waits until a completion may have arrived, about this long and no longer than [`STALL`].
    ///
    /// # Errors
    /// [`InitiatorError::Closed`], [`InitiatorError::Stalled`] if none has, and those of the connection.
    fn wait_for(&mut self, limit: Duration) -> Result<(), InitiatorError>;

    /// Waits until a completion may have arrived.
    ///
    /// # Errors
    /// [`InitiatorError::Closed`], [`InitiatorError::Stalled`], and those of the connection.
    fn wait(&mut self) -> Result<(), InitiatorError> {
        self.wait_for(STALL)
    }

    /// Runs one request and waits for it; for set-up, not for measurements.
    ///
    /// # Errors
    /// As [`Self::wait`] and [`Self::reap`].
    fn run_one(
        &mut self,
        operation: Operation,
        offset: u64,
        length: u32,
    ) -> Result<u8, InitiatorError> {
        self.submit(0, operation, offset, length);
        self.publish()?;
        let mut completions = Vec::new();
        loop {
            self.reap(&mut completions)?;
            if let Some(completion) = completions.first() {
                return Ok(completion.status);
            }
            self.wait()?;
        }
    }
}

fn check_shape(depth: u16, block: u32) -> Result<(), InitiatorError> {
    let whole_sectors = block.is_multiple_of(512) && (512..=BLOCK_MAX).contains(&block);
    if !whole_sectors || !(1..=DEPTH_MAX).contains(&depth) {
        return Err(InitiatorError::Shape { depth, block });
    }
    Ok(())
}
