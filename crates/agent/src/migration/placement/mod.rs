//! The memory of a guest that comes, written into it by this agent as it opens the frames, instead of by QEMU
//! (docs/decisions/205).
//!
//! ```text
//!  frames ─► Placement ─┬─► guest_memory: the file that QEMU has its guest's memory in
//!                       └─► QEMU: the same stream without these pages
//! ```
//! Pages are in memory before QEMU gets what came after them: devices' state may refer to them.

mod guest_memory;
pub mod page_stream;

use std::io;
use std::sync::Arc;

use vmseal_seal::frame::CONTENT_MAX;
use zeroize::Zeroizing;

pub use guest_memory::{GuestMemory, Placed, Unsuitable};
use page_stream::{PageStream, Parts, Unexpected};

/// Why the memory cannot be placed any more.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PlacementError {
    /// The stream.
    #[error(
        "{0}: this agent cannot place memory that is sent so. Start the destination's agent with --place-memory off, and move the VM again"
    )]
    Stream(#[from] Unexpected),
    /// The stream ended too early.
    #[error("the source's QEMU ended its stream before all of the memory had come")]
    Cut,
    /// The memory.
    #[error("the guest's memory cannot be written: {0}")]
    Memory(Arc<io::Error>),
}

/// See the module.
#[derive(Debug)]
pub struct Placement {
    stream: PageStream,
    memory: GuestMemory,
    /// What QEMU gets of a piece.
    for_qemu: Zeroizing<Vec<u8>>,
}

impl Placement {
    /// Into the memory that is this block of QEMU's.
    #[must_use]
    pub fn new(block: &'static str, memory: GuestMemory) -> Self {
        let stream = PageStream::new(block, memory.size());
        // It need not grow, which would leave what was in it before.
        let for_qemu = Zeroizing::new(Vec::with_capacity(CONTENT_MAX + page_stream::HEAD_MAX));
        Self { stream, memory, for_qemu }
    }

    /// Takes the next piece of the stream, of at most [`CONTENT_MAX`] bytes, and writes the pages in it. What QEMU is to get of it.
    ///
    /// # Errors
    /// [`PlacementError`].
    pub fn take<'a>(&'a mut self, piece: &'a [u8]) -> Result<&'a [u8], PlacementError> {
        if self.stream.is_at_rest() {
            return Ok(piece);
        }
        let writes = Vec::with_capacity(piece.len() / page_stream::PAGE as usize + 2);
        let mut parts = Parts { for_qemu: std::mem::take(&mut self.for_qemu), writes };
        parts.for_qemu.clear();
        self.stream.take(piece, &mut parts)?;
        let written = self.memory.apply(&parts.writes);
        written.map_err(|error| PlacementError::Memory(Arc::new(error)))?;
        self.for_qemu = parts.for_qemu;
        if let Some(why) = self.stream.gave_up() {
            tracing::info!(%why, "QEMU loads a guest's memory itself: the stream is one that this agent does not know");
        }
        Ok(&self.for_qemu)
    }

    /// The stream has ended. How much was placed; none where QEMU has loaded it all.
    ///
    /// # Errors
    /// [`PlacementError::Cut`].
    pub fn end(&self) -> Result<Option<Placed>, PlacementError> {
        if !self.stream.is_at_rest() {
            return Err(PlacementError::Cut);
        }
        Ok(Some(self.memory.placed()).filter(|_| self.stream.gave_up().is_none()))
    }
}

#[cfg(test)]
pub(super) mod tests;
