//! What an image of QEMU's format has itself, as its reader sees it.

use std::io;

use crate::storage::extent::{Own, OwnExtent};
use crate::storage::qcow2::Extents;

/// See the module.
#[derive(Debug)]
pub struct LayerParts {
    extents: Extents,
    /// Whether zeroes in storage are zeroes to the reader: not where all ciphertext is decrypted.
    zeroes: bool,
}

impl LayerParts {
    /// Those of an image. `zeroes`: whether zeroes in storage read as zeroes.
    #[must_use]
    pub fn new(extents: Extents, zeroes: bool) -> Self {
        Self { extents, zeroes }
    }

    /// What the image itself has at `at`, which is below `end`, up to `end` at most.
    ///
    /// # Errors
    /// As [`Extents::own`].
    pub fn at(&self, at: u64, end: u64) -> io::Result<OwnExtent> {
        let found = self.extents.own(at, end)?;
        Ok(match found.content {
            Own::Zeroes if !self.zeroes => OwnExtent { content: Own::Data, ..found },
            _ => found,
        })
    }
}
