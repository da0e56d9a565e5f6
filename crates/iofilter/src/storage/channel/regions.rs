//! The memory that a queue shares with its server, by number.
//!
//! ```text
//!  first use: shared, and copied that once ──> Asked ──> Shared: by reference
//!                                                    └─> Refused: copied
//! ```
//! Nobody waits for the answer. An arena that is shared stays mapped as long as the queue.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use vmseal_channel::{REGION_BYTES_MAX, REGIONS_MAX, ToServer, send};

use crate::stack::memory::Arena;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Asked,
    Shared,
    Refused,
}

#[derive(Debug)]
struct Region {
    arena: Arc<Arena>,
    state: State,
}

/// See the module. The first one is the queue's own buffers.
#[derive(Debug)]
pub(super) struct Regions(Vec<Region>);

/// The number of the queue's own buffers.
pub(super) const OWN: u32 = 0;

impl Regions {
    /// The server has the queue's own buffers.
    pub(super) fn new(own: &Arc<Arena>) -> Self {
        Self(vec![Region { arena: Arc::clone(own), state: State::Shared }])
    }

    /// The number of this arena, if the server has it. One that it has not been shown is shown to it.
    pub(super) fn of(&mut self, arena: &Arc<Arena>, socket: BorrowedFd<'_>) -> Option<u32> {
        let Some(index) = self.0.iter().position(|region| Arc::ptr_eq(&region.arena, arena)) else {
            self.show(arena, socket);
            return None;
        };
        (self.0[index].state == State::Shared).then_some(index as u32)
    }

    /// Whether the server has this arena.
    pub(super) fn have(&self, arena: &Arc<Arena>) -> bool {
        let mut known = self.0.iter().filter(|region| region.state == State::Shared);
        known.any(|region| Arc::ptr_eq(&region.arena, arena))
    }

    /// Whether the server has still to answer for one.
    pub(super) fn are_asked(&self) -> bool {
        self.0.iter().any(|region| region.state == State::Asked)
    }

    fn show(&mut self, arena: &Arc<Arena>, socket: BorrowedFd<'_>) {
        let memory = arena.shared_memory().filter(|memory| memory.len() <= REGION_BYTES_MAX);
        let Some(memory) = memory.filter(|_| self.0.len() < REGIONS_MAX) else { return };
        let share = ToServer::Share { region: self.0.len() as u32, bytes: memory.len() as u64 };
        // Where the socket is full, the next request tries again; that the server is gone is noticed elsewhere.
        if send(socket, &share, &[memory.fd()]).is_ok() {
            self.0.push(Region { arena: Arc::clone(arena), state: State::Asked });
        }
    }

    /// The server has answered for the first arena for which it has not; false if there is none.
    pub(super) fn answered(&mut self, errno: i32) -> bool {
        let asked = self.0.iter_mut().find(|region| region.state == State::Asked);
        let Some(asked) = asked else { return false };
        asked.state = if errno == 0 { State::Shared } else { State::Refused };
        if errno != 0 {
            let error = std::io::Error::from_raw_os_error(errno);
            tracing::warn!(%error, "vmseal-rbd does not take a filter's buffers; they are copied");
        }
        true
    }
}
