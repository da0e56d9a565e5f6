//! A leg: a stack that a layer owns, beside what is below it. `replicate` and `mirror` copy the disk to theirs.
//!
//! ```text
//!  layers
//!  replicate or mirror ── its thread reads what is below ──> writes to the leg:  layers
//!  layers                                                                        storage
//!  storage
//! ```
//! It is a stack as the disk's own: configured as `to: {chain, backend}`, opened by the same function, with boundaries that
//! say its size and blocks ([`Leg::boundary`]), and chains that have a wait set ([`LegChain::wait_beside`]). Only one thing
//! is special: nobody else writes there. So its owner can write again what a failed flush may have lost.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::errno::Errno;
use nix::poll::PollFlags;

use crate::layers::stack::Stack;
use crate::stack::blocking;
use crate::stack::chain::Chain;
use crate::stack::figures::CipherTime;
use crate::stack::layer::Boundary;
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};
use crate::storage::DiskStorage;
use crate::storage::file::FileDisk;

/// The limit for the buffers of a chain that copies: four pieces of 512 KiB, and a quarter for `align`.
pub const COPY_POOL_BYTES: usize = 3 * 1024 * 1024;

/// The same where nothing is encrypted: what is copied is aligned.
const PLAIN_POOL_BYTES: usize = 256 * 1024;

/// The same of a chain to a server elsewhere, which has more under way: 48 pieces, and a quarter.
pub const REMOTE_POOL_BYTES: usize = 30 * 1024 * 1024;

/// See the module.
#[derive(Clone, Debug)]
pub struct Leg {
    stack: Stack,
    /// Its files, the one that is written first: what is open has their locks.
    files: Vec<Arc<OwnedFd>>,
}

impl Leg {
    /// This stack, in these files, the one that is written first.
    #[must_use]
    pub fn new(stack: Stack, files: Vec<Arc<OwnedFd>>) -> Self {
        Self { stack, files }
    }

    /// What it is made of.
    #[must_use]
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Its files, the one that is written first.
    #[must_use]
    pub fn files(&self) -> &[Arc<OwnedFd>] {
        &self.files
    }

    /// What it presents to the layer: its size and blocks.
    #[must_use]
    pub fn boundary(&self) -> Boundary {
        self.stack.boundary(0)
    }

    /// A chain of all of it, for a thread of the layer; the time of its cipher is added to `cipher_time`.
    ///
    /// # Errors
    /// The system refuses what it needs, a key is not usable, or all connections to an NBD server are in use.
    pub fn chain(&self, cipher_time: &Arc<CipherTime>) -> io::Result<LegChain> {
        let pool_bytes = match (self.stack.encrypts(), self.is_remote()) {
            (true, true) => REMOTE_POOL_BYTES,
            (true, false) => COPY_POOL_BYTES,
            (false, _) => PLAIN_POOL_BYTES,
        };
        let storage = self.stack.storage().queue()?;
        let chain = self.stack.chain(0, false, pool_bytes, cipher_time, storage)?;
        Ok(LegChain { chain, leg: Some(self.clone()) })
    }

    fn storage(&self) -> &DiskStorage {
        self.stack.storage()
    }

    /// Whether a server elsewhere has it: requests take as long as the way there and back.
    fn is_remote(&self) -> bool {
        matches!(self.storage(), DiskStorage::Nbd(_))
    }
}

/// A chain of a leg, used by a thread that may sleep.
pub struct LegChain {
    pub(super) chain: Chain,
    /// None of one that only a test has.
    leg: Option<Leg>,
}

impl LegChain {
    /// A chain of which nothing else is known, for tests: nothing can be written again after a failed flush.
    #[must_use]
    pub fn new(chain: Chain) -> Self {
        Self { chain, leg: None }
    }

    /// A chain without a ring, to a file of the layer's own.
    ///
    /// # Errors
    /// The system refuses what a chain needs.
    pub fn of_file(file: FileDisk, size: u64) -> io::Result<Self> {
        let chain = Chain::new(size, false, Vec::new(), file.blocking_queue())?;
        let stack = Stack::new(Vec::new(), DiskStorage::File(file), size);
        Ok(Self { chain, leg: Some(Leg::new(stack, Vec::new())) })
    }

    /// Fills the segment from it.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn read(&mut self, offset: u64, into: Segment) -> Result<(), IoError> {
        self.run(Operation::Read, offset, Some(into))
    }

    /// Writes the segment.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn write(&mut self, offset: u64, from: Segment) -> Result<(), IoError> {
        self.run(Operation::Write, offset, Some(from))
    }

    /// Makes earlier writes durable. After an error everything since the last good flush must be written again; then the
    /// next one may succeed.
    ///
    /// # Errors
    /// [`IoError`].
    pub fn flush(&mut self) -> Result<(), IoError> {
        let flushed = self.run(Operation::Flush, 0, None);
        if flushed.is_err() {
            self.forget_failed_flush();
        }
        flushed
    }

    /// Everything since the last good flush will be written again: a failed flush need not fail those that follow.
    pub(super) fn forget_failed_flush(&self) {
        if let Some(leg) = &self.leg {
            leg.storage().forget_failed_flush();
        }
    }

    /// Whether a server elsewhere has it.
    #[must_use]
    pub fn is_remote(&self) -> bool {
        self.leg.as_ref().is_some_and(Leg::is_remote)
    }

    /// Whether zeroes cost no more than a hole.
    #[must_use]
    pub fn punches(&self) -> bool {
        self.leg.as_ref().is_some_and(|leg| leg.stack.keeps_zeroes() && leg.storage().punches())
    }

    /// All of it will be written again, if its file was truncated and gets its length back.
    pub fn forget_cut(&self) {
        if let Some(leg) = &self.leg {
            leg.storage().forget_cut();
        }
    }

    /// Sleeps until this chain or another one has work.
    pub fn wait_beside(&mut self, other: &mut Chain) {
        let own = &mut self.chain;
        let busy = own.in_flight() > 0;
        if busy && !own.arm() {
            return own.disarm(false);
        }
        let (event, handle) = own.wait_set();
        let wanted = |events| if busy { events } else { PollFlags::empty() };
        let (handle, events) = handle.unwrap_or((event, PollFlags::empty()));
        let others = [(event, wanted(PollFlags::POLLIN)), (handle, wanted(events))];
        let slept = other.wait(others, own.deadline().filter(|_| busy));
        if let Err(error) = slept
            && error != Errno::EINTR
        {
            std::thread::sleep(blocking::LOOK_AGAIN);
        }
        if busy {
            own.disarm(slept.is_ok_and(|[event, _]| !event.is_empty()));
        }
    }

    fn run(
        &mut self,
        operation: Operation,
        offset: u64,
        memory: Option<Segment>,
    ) -> Result<(), IoError> {
        let id = self.chain.begin().ok_or(IoError::Overload)?;
        if let Some(segment) = memory {
            self.chain.data_mut(id).push(segment);
        }
        self.chain.submit(id, operation, offset, 0, 0);
        let result = blocking::drain(&mut self.chain);
        if result == Err(IoError::Truncated) {
            self.forget_cut();
        }
        result
    }
}
