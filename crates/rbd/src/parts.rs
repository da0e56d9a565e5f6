//! Memory of a request in parts, which a filter shares or this process has: librbd moves data from and to it in place.

use std::ffi::c_int;
use std::sync::Arc;

use libc::iovec;
use vmseal_channel::{Piece, SharedMemory};

/// The regions that a filter shares.
pub type Regions = Arc<[Arc<SharedMemory>]>;

/// Parts of memory. Regions stay mapped as long as this lives; the filter may change what is in them at any time.
pub struct Parts {
    vectors: Vec<iovec>,
    _regions: Regions,
}

// SAFETY: the addresses are those of mappings, which belong to the process and not to a thread.
unsafe impl Send for Parts {}

impl Parts {
    /// The parts that a filter names; none where one of them is not within its region.
    #[must_use]
    pub fn of(pieces: &[Piece], regions: &Regions) -> Option<Self> {
        let mut vectors = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let region = regions.get(piece.region as usize)?;
            let start = region.part(piece.offset, piece.length as usize)?;
            if piece.length > 0 {
                let iov_len = piece.length as usize;
                vectors.push(iovec { iov_base: start.as_ptr().cast(), iov_len });
            }
        }
        Some(Self { vectors, _regions: Arc::clone(regions) })
    }

    /// Parts of this process's own memory, by address and length: for a program that has librbd and the data in one process.
    ///
    /// # Safety
    /// Until this is dropped, the memory stays mapped, readable and (where data is read into it) writable, and no Rust reference to it is
    /// used.
    #[must_use]
    pub unsafe fn of_memory(memory: impl IntoIterator<Item = (*mut u8, usize)>) -> Self {
        let some = memory.into_iter().filter(|(_, length)| *length > 0);
        let vectors = some.map(|(start, iov_len)| iovec { iov_base: start.cast(), iov_len });
        Self { vectors: vectors.collect(), _regions: Regions::default() }
    }

    /// As librbd takes them: good as long as this lives, also where it is moved.
    pub(crate) fn vectors(&self) -> (*const iovec, c_int) {
        (self.vectors.as_ptr(), c_int::try_from(self.vectors.len()).unwrap_or(c_int::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_within_regions_that_are_there() {
        let region = || Arc::new(SharedMemory::create(8192).unwrap());
        let regions: Regions = Arc::from([region(), region()]);
        let piece = |region, offset, length| Piece { region, length, offset };
        let parts = Parts::of(&[piece(1, 4096, 4096), piece(0, 5, 0), piece(0, 1, 2)], &regions);
        let parts = parts.unwrap();
        let (start, count) = parts.vectors();
        assert_eq!(count, 2, "an empty part is none");
        // SAFETY: there are as many, and the parts live.
        let vectors = unsafe { std::slice::from_raw_parts(start, 2) };
        let base = |region: usize| regions[region].base().as_ptr() as usize;
        let found = vectors.iter().map(|it| (it.iov_base as usize, it.iov_len));
        assert_eq!(found.collect::<Vec<_>>(), [(base(1) + 4096, 4096), (base(0) + 1, 2)]);
        for wrong in [piece(2, 0, 1), piece(u32::MAX, 0, 0), piece(0, 8192, 1), piece(1, 1, 8192)] {
            assert!(Parts::of(&[wrong], &regions).is_none(), "{wrong:?}");
        }
        assert!(Parts::of(&[piece(0, u64::MAX, 1)], &regions).is_none());
    }

    #[test]
    fn parts_of_own_memory_are_those_that_are_given_but_for_empty_ones() {
        let (mut one, mut other) = ([0_u8; 8], [0_u8; 4]);
        let (one, other) = (one.as_mut_ptr(), other.as_mut_ptr());
        // SAFETY: the arrays outlive the parts, and are not used meanwhile.
        let parts = unsafe { Parts::of_memory([(other, 4), (one, 0), (one, 8)]) };
        let (start, count) = parts.vectors();
        assert_eq!(count, 2);
        // SAFETY: there are as many, and the parts live.
        let vectors = unsafe { std::slice::from_raw_parts(start, 2) };
        let found: Vec<_> =
            vectors.iter().map(|it| (it.iov_base.cast::<u8>(), it.iov_len)).collect();
        assert_eq!(found, [(other, 4), (one, 8)]);
    }
}
