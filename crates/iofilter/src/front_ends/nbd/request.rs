//! What a request asks of the disk, and its state until it is answered.
//!
//! ```text
//!  read            Receiving (no data, only memory) --> Running --> Answering ─┬─> free
//!                                                          ^──more pieces──────┘
//!  write           Receiving --piece there--> Running ─┬─> [Flushing] --> Answering --> free
//!                      ^──────────more pieces──────────┘
//!  trim, zeroes    Running ↺ piece by piece --> [Flushing] --> Answering --> free
//!  flush           Running --> Answering --> free
//!  block status    Receiving (no data, only memory) --> Answering --> free
//!  refused         [Receiving, data is dropped] --> Answering --> free
//! ```
//! A long request goes through its buffers piece by piece, so that no client uses more of our memory than
//! others.

use std::time::Instant;

use crate::front_ends::nbd::context::STATUS_MAX;
use crate::nbd::{BLOCK_MAX, Request, command, command_flag, error};
use crate::stack::memory::Segments;
use crate::stack::pool::{Buffer, Pool};
use crate::stack::request::{IoError, LOGICAL_BLOCK, Operation};

/// The longest piece of a trim or of write-zeroes, in bytes: about as much as can be encrypted and written in
/// the time that a shutdown may wait.
const RANGE_MAX: u64 = 32 * 1024 * 1024;

/// The action that a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientCommand {
    /// Disconnect.
    Disconnect,
    /// An operation for the chain; `durable`: before it is answered.
    Io {
        /// The operation.
        operation: Operation,
        /// Whether a flush must follow.
        durable: bool,
    },
    /// A block status; `one`: one extent per context.
    Status {
        /// Whether one extent is enough.
        one: bool,
    },
    /// Refused with an [`error`]; a write's data still follows.
    Refused(u32),
}

/// The properties of the disk and of the connection that requests depend on.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    /// The disk's size in bytes.
    pub size: u64,
    /// Whether it is read-only.
    pub read_only: bool,
    /// Whether replies are structured.
    pub structured: bool,
    /// Whether there are contexts.
    pub contexts: bool,
    /// Whether zeroes that may be holes need not be written.
    pub zeroes_fast: bool,
}

impl Terms {
    /// The flags that are allowed with a command.
    fn known(&self, command: u16) -> u16 {
        command_flag::FUA
            | match command {
                command::READ if self.structured => command_flag::DF,
                command::WRITE_ZEROES => command_flag::NO_HOLE | command_flag::FAST_ZERO,
                command::BLOCK_STATUS => command_flag::REQ_ONE,
                _ => 0,
            }
    }

    fn has(&self, offset: u64, length: u64) -> bool {
        let whole = (offset | length).is_multiple_of(LOGICAL_BLOCK);
        whole && offset.checked_add(length).is_some_and(|end| end <= self.size)
    }
}

/// Checks a request and returns its action.
#[must_use]
pub fn understand(request: &Request, terms: &Terms) -> ClientCommand {
    if request.command != command::DISCONNECT && request.flags & !terms.known(request.command) != 0
    {
        return ClientCommand::Refused(error::EINVAL);
    }
    let operation = match request.command {
        command::DISCONNECT => return ClientCommand::Disconnect,
        command::READ => Operation::Read,
        command::WRITE => Operation::Write,
        command::FLUSH => return ClientCommand::Io { operation: Operation::Flush, durable: false },
        command::BLOCK_STATUS => {
            let length = u64::from(request.length);
            let possible = terms.contexts && length > 0 && terms.has(request.offset, length);
            let one = request.flags & command_flag::REQ_ONE != 0;
            return if possible {
                ClientCommand::Status { one }
            } else {
                ClientCommand::Refused(error::EINVAL)
            };
        }
        command::TRIM => Operation::Discard,
        command::WRITE_ZEROES => {
            Operation::WriteZeroes { unmap: request.flags & command_flag::NO_HOLE == 0 }
        }
        _ => return ClientCommand::Refused(error::EINVAL),
    };
    if terms.read_only && operation.changes() {
        return ClientCommand::Refused(error::EPERM);
    }
    let length = u64::from(request.length);
    let whole = (request.offset | length).is_multiple_of(LOGICAL_BLOCK);
    if !whole || (operation == Operation::Read && request.length > BLOCK_MAX) {
        return ClientCommand::Refused(error::EINVAL);
    }
    if !terms.has(request.offset, length) {
        let zeroes = matches!(operation, Operation::WriteZeroes { .. });
        let grows = operation == Operation::Write || zeroes;
        return ClientCommand::Refused(if grows { error::ENOSPC } else { error::EINVAL });
    }
    let fast = terms.zeroes_fast && operation == Operation::WriteZeroes { unmap: true };
    if request.flags & command_flag::FAST_ZERO != 0 && !fast {
        return ClientCommand::Refused(error::ENOTSUP);
    }
    let durable = operation.changes() && request.flags & command_flag::FUA != 0;
    ClientCommand::Io { operation, durable }
}

/// The state of a request; see the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It waits for memory or data.
    Receiving,
    /// The chain has it.
    Running,
    /// The chain has the flush that follows it.
    Flushing,
    /// It has something to send.
    Answering,
}

/// A request in flight. Its lists keep their allocations from one request to the next.
#[derive(Debug)]
pub struct Slot {
    /// As received.
    pub request: Request,
    /// Its action.
    pub operation: Operation,
    /// Whether a flush must follow.
    pub durable: bool,
    /// Whether it asks for a block status, and for one extent only.
    pub status: Option<bool>,
    /// Its state.
    pub stage: Stage,
    /// How many bytes of it are done.
    pub done: u64,
    /// Whether a reply has begun whose data is still to come.
    pub begun: bool,
    /// When it was received.
    pub began: Instant,
    /// The error for the client; 0 on success.
    pub error: u32,
    /// The disk's error, if it was the disk.
    pub cause: Option<IoError>,
    /// The memory of the piece in flight.
    pub memory: Segments,
    /// The segments to send: the reply, or a piece of it.
    pub reply: Segments,
    buffers: Vec<Buffer>,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            request: Request::default(),
            operation: Operation::Flush,
            durable: false,
            status: None,
            stage: Stage::Receiving,
            done: 0,
            begun: false,
            began: Instant::now(),
            error: 0,
            cause: None,
            memory: Segments::default(),
            reply: Segments::default(),
            buffers: Vec::new(),
        }
    }
}

impl Slot {
    /// Resets it for a new request.
    pub fn begin(&mut self, request: Request, asked: ClientCommand) {
        debug_assert!(self.buffers.is_empty());
        self.began = Instant::now();
        let (operation, durable, error) = match asked {
            ClientCommand::Io { operation, durable } => (operation, durable, 0),
            // A refused request with data is handled like a read of that data.
            ClientCommand::Refused(error) if request.command == command::WRITE => {
                (Operation::Write, false, error)
            }
            ClientCommand::Refused(error) => (Operation::Flush, false, error),
            ClientCommand::Disconnect | ClientCommand::Status { .. } => {
                (Operation::Flush, false, 0)
            }
        };
        self.status = match asked {
            ClientCommand::Status { one } => Some(one),
            _ => None,
        };
        (self.request, self.operation, self.durable) = (request, operation, durable);
        (self.stage, self.done, self.begun, self.error) = (Stage::Receiving, 0, false, error);
        self.cause = None;
        self.memory.clear();
        self.reply.clear();
    }

    /// How many bytes of it are not done.
    #[must_use]
    pub fn left(&self) -> u64 {
        match self.operation {
            Operation::Flush => 0,
            _ => u64::from(self.request.length) - self.done,
        }
    }

    /// Whether it moves data through our memory.
    #[must_use]
    pub fn needs_memory(&self) -> bool {
        let moves = matches!(self.operation, Operation::Read | Operation::Write);
        self.status.is_some() || (moves && self.left() > 0)
    }

    /// How much memory its next piece needs, at most `most` bytes.
    fn piece(&self, most: usize) -> usize {
        let all = if self.status.is_some() { STATUS_MAX as u64 } else { self.left() };
        usize::try_from(all).map_or(most, |all| all.min(most))
    }

    /// The offset of the piece in memory, once it is done.
    #[must_use]
    pub fn piece_offset(&self) -> u64 {
        self.request.offset + self.done - self.memory.bytes() as u64
    }

    /// Whether the segments to send include data.
    #[must_use]
    pub fn brings_data(&self) -> bool {
        self.operation == Operation::Read && self.error == 0
    }

    /// The length of the next piece of a trim or of write-zeroes.
    #[must_use]
    pub fn range(&self) -> u64 {
        self.left().min(RANGE_MAX)
    }

    /// Takes memory for pieces of at most `most` bytes; all it needs, or none.
    pub fn take_memory(&mut self, pool: &mut Pool, most: usize) -> bool {
        let wanted = self.piece(most);
        let mut has = 0;
        while has < wanted {
            let Some(buffer) = pool.take(wanted - has) else {
                self.give_memory(pool);
                return false;
            };
            has += buffer.len();
            self.buffers.push(buffer);
        }
        self.lay_out(pool, most);
        true
    }

    /// Makes the buffers the memory of the next piece.
    pub fn lay_out(&mut self, pool: &Pool, most: usize) {
        self.memory.clear();
        let mut missing = self.piece(most);
        for buffer in &self.buffers {
            let part = pool.segment(buffer).part(0, missing);
            self.memory.push(part);
            missing -= part.len();
        }
    }

    /// Gives all memory back.
    pub fn give_memory(&mut self, pool: &mut Pool) {
        self.memory.clear();
        self.reply.clear();
        self.buffers.drain(..).for_each(|buffer| pool.give(buffer));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::stack::pool::BLOCK;

    const SIZE: u64 = 1 << 30;

    const TERMS: Terms =
        Terms { size: SIZE, read_only: false, structured: true, contexts: true, zeroes_fast: true };

    fn ask(command: u16, flags: u16, offset: u64, length: u32) -> ClientCommand {
        understand(&Request { flags, command, cookie: 0, offset, length }, &TERMS)
    }

    #[test]
    fn each_command_is_what_the_document_says() {
        let io = |operation, durable| ClientCommand::Io { operation, durable };
        assert_eq!(ask(command::READ, 1, 512, 1024), io(Operation::Read, false));
        assert_eq!(ask(command::WRITE, 0, SIZE - 512, 512), io(Operation::Write, false));
        assert_eq!(ask(command::WRITE, 1, 0, 512), io(Operation::Write, true));
        assert_eq!(ask(command::FLUSH, 0, 77, 3), io(Operation::Flush, false));
        assert_eq!(ask(command::TRIM, 1, 0, 1 << 30), io(Operation::Discard, true));
        let zeroes = |unmap| io(Operation::WriteZeroes { unmap }, false);
        assert_eq!(ask(command::WRITE_ZEROES, 0, 0, 1 << 30), zeroes(true));
        assert_eq!(ask(command::WRITE_ZEROES, 2, 0, 512), zeroes(false));
        assert_eq!(ask(command::DISCONNECT, 0, 0, 0), ClientCommand::Disconnect);
        assert_eq!(ask(command::WRITE_ZEROES, 16, 0, 512), zeroes(true));
        assert_eq!(ask(command::READ, 4, 0, 512), io(Operation::Read, false));
        assert_eq!(ask(command::BLOCK_STATUS, 0, 0, 1 << 30), ClientCommand::Status { one: false });
        assert_eq!(ask(command::BLOCK_STATUS, 8, 512, 512), ClientCommand::Status { one: true });
    }

    #[test]
    fn commands_that_were_not_negotiated_are_refused() {
        let ask = |command, flags, terms: &Terms| {
            understand(&Request { flags, command, cookie: 0, offset: 0, length: 512 }, terms)
        };
        let invalid = ClientCommand::Refused(error::EINVAL);
        let simple = Terms { structured: false, contexts: false, ..TERMS };
        assert_eq!(ask(command::READ, command_flag::DF, &simple), invalid);
        assert_eq!(ask(command::BLOCK_STATUS, 0, &simple), invalid);
        let slow = Terms { zeroes_fast: false, ..TERMS };
        let fast = command_flag::FAST_ZERO;
        for (flags, terms) in [(fast, &slow), (fast | command_flag::NO_HOLE, &TERMS)] {
            let refused = ClientCommand::Refused(error::ENOTSUP);
            assert_eq!(ask(command::WRITE_ZEROES, flags, terms), refused);
        }
        assert!(matches!(ask(command::WRITE_ZEROES, 0, &slow), ClientCommand::Io { .. }));
    }

    #[test]
    fn impossible_requests_are_refused_with_the_right_number() {
        use error::{EINVAL, ENOSPC};
        for (command, flags, offset, length, number) in [
            (command::READ, 0, 0, BLOCK_MAX + 512, EINVAL),
            (command::READ, 0, SIZE, 512, EINVAL),
            (command::READ, 0, 1, 512, EINVAL),
            (command::READ, 0, 0, 513, EINVAL),
            (command::READ, 2, 0, 512, EINVAL),
            (8, 0, 0, 512, EINVAL),
            (command::WRITE, 2, 0, 512, EINVAL),
            (command::WRITE, 0, SIZE - 512, 1024, ENOSPC),
            (command::WRITE_ZEROES, 4, 0, 512, EINVAL),
            (command::READ, 8, 0, 512, EINVAL),
            (command::BLOCK_STATUS, 4, 0, 512, EINVAL),
            (command::BLOCK_STATUS, 0, 0, 0, EINVAL),
            (command::BLOCK_STATUS, 0, 0, 511, EINVAL),
            (command::BLOCK_STATUS, 0, SIZE - 512, 1024, EINVAL),
            (command::WRITE_ZEROES, 0, u64::MAX - 511, 512, ENOSPC),
            (command::TRIM, 0, SIZE, 512, EINVAL),
            (5, 0, 0, 512, EINVAL),
            (6, 32, 0, 512, EINVAL),
        ] {
            let asked = ask(command, flags, offset, length);
            assert_eq!(
                asked,
                ClientCommand::Refused(number),
                "{command} {flags} {offset} {length}"
            );
        }
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            let request = Request { command, length: 512, ..Request::default() };
            let terms = Terms { read_only: true, ..TERMS };
            assert_eq!(understand(&request, &terms), ClientCommand::Refused(error::EPERM));
        }
    }

    #[test]
    fn memory_is_taken_whole_or_not_at_all_and_goes_round() {
        let mut pool = Pool::new(20 * BLOCK).unwrap();
        let request = Request { command: command::WRITE, length: 100_352, ..Request::default() };
        let (mut one, mut other) = (Slot::default(), Slot::default());
        for slot in [&mut one, &mut other] {
            slot.begin(request, ClientCommand::Refused(1));
        }
        assert!(one.take_memory(&mut pool, 16 * BLOCK));
        assert!(!other.take_memory(&mut pool, 16 * BLOCK), "four blocks are left");
        assert!(other.memory.as_slice().is_empty());
        one.done = 16 * BLOCK as u64;
        one.lay_out(&pool, 16 * BLOCK);
        assert_eq!(one.memory.bytes(), 100_352 - 16 * BLOCK);
        one.give_memory(&mut pool);
        assert!(other.take_memory(&mut pool, 20 * BLOCK));
        other.give_memory(&mut pool);
    }

    proptest! {
        #[test]
        fn whatever_is_let_through_is_on_the_disk_and_in_blocks(
            command in 0u16..10, flags in 0u16..32, offset: u64, length: u32, near: bool,
        ) {
            let offset = if near { SIZE - offset % 8192 } else { offset };
            if let ClientCommand::Io { operation, .. } = ask(command, flags, offset, length)
                && operation != Operation::Flush
            {
                prop_assert!(offset + u64::from(length) <= SIZE);
                prop_assert_eq!((offset | u64::from(length)) % 512, 0);
            }
        }
    }
}
