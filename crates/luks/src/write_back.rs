//! The order in which a changed header reaches its store. Both copies share the key slots' areas, so:
//!
//! ```text
//!  other copy, if it needs repair ─ flush ─▶ new slot into a free area ─ flush ─▶ second copy ─ flush
//!     ─▶ first copy ─ flush ─▶ areas that no copy refers to any more ─ flush
//! ```
//! Whatever is torn or lost between two flushes, at least one copy is intact, and so is every area that it
//! refers to: the disk opens as before or as after.

use crate::error::HeaderError;
use crate::layout::{AREA_LEN, Copy};
use crate::loaded::WorkingCopy;
use crate::store::HeaderStore;

/// One step.
enum Step {
    Write { offset: u64, bytes: Vec<u8> },
    Flush,
}

/// All steps of one change, prepared before the first is executed.
#[derive(Default)]
pub(crate) struct Plan(Vec<Step>);

impl Plan {
    /// Writes and flushes.
    pub(crate) fn write(&mut self, offset: u64, bytes: Vec<u8>) {
        self.0.extend([Step::Write { offset, bytes }, Step::Flush]);
    }

    /// Writes the area of a new key slot, before any copy refers to it.
    pub(crate) fn area(&mut self, working: &WorkingCopy, offset: u64) -> Result<(), HeaderError> {
        self.write(offset, working.read(offset, AREA_LEN as usize)?);
        Ok(())
    }

    /// Overwrites the area of a slot that no copy refers to any more.
    pub(crate) fn wipe_area(&mut self, offset: u64) {
        self.write(offset, vec![0; AREA_LEN as usize]);
    }

    /// Writes both copies, the second first: if it tears, the first is still valid.
    pub(crate) fn copies(&mut self, working: &WorkingCopy) -> Result<(), HeaderError> {
        for copy in [Copy::Secondary, Copy::Primary] {
            self.write(copy.offset(), working.header(copy)?);
        }
        Ok(())
    }

    /// Executes the steps in order and stops at the first failure.
    pub(crate) fn run(self, store: &mut impl HeaderStore) -> Result<(), HeaderError> {
        for step in self.0 {
            match step {
                Step::Write { offset, bytes } => store.write_at(&bytes, offset),
                Step::Flush => store.flush(),
            }
            .map_err(HeaderError::Write)?;
        }
        Ok(())
    }
}
