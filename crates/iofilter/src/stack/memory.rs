//! Memory for data: guest memory and bounce buffers, as scatter lists.
//!
//! The guest may change its memory at any time, so nothing here ever makes a Rust reference to it:
//! data goes through raw pointers only. Only this module, [`vmseal_secret::xts`] and the kernel
//! dereference them.

use std::num::NonZeroUsize;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::sys::mman::munmap;
use vmseal_channel::SharedMemory;

/// The most segments of one request: what `preadv2` takes (`IOV_MAX`).
pub const SEGMENTS_MAX: usize = 1024;

/// A piece of memory, laid out as the kernel's `iovec`. A copy of one may outlive the memory, so only this crate
/// reads and writes through it; filters of others copy from and to a request
/// ([`Request::copy_to`](crate::stack::request::Request::copy_to)), and storage of others passes addresses on
/// ([`Request::data`](crate::stack::request::Request::data)).
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Segment(libc::iovec);

// SAFETY: a segment is an address; `Segment::new` has its maker promise that the memory behind it may
// be used from the thread that the request is on.
unsafe impl Send for Segment {}

impl Segment {
    /// Describes `length` bytes at `base`.
    ///
    /// # Safety
    /// The memory stays mapped, readable and (where data is read into it) writable, until the request
    /// that the segment is in has completed, and no Rust reference to it is used in the meantime.
    #[must_use]
    pub unsafe fn new(base: *mut u8, length: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast(), iov_len: length })
    }

    /// Where it starts.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// How long it is, in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The `length` bytes from `start`; cut off where this segment ends.
    #[must_use]
    pub fn part(&self, start: usize, length: usize) -> Self {
        let start = start.min(self.len());
        let length = length.min(self.len() - start);
        Self(libc::iovec { iov_base: self.base().wrapping_add(start).cast(), iov_len: length })
    }

    /// Copies the segment's start into `to`, which is not longer than the segment.
    pub(crate) fn copy_to(&self, to: &mut [u8]) {
        assert!(to.len() <= self.len());
        // SAFETY: `new`'s promise for the source; `to` is a live exclusive slice, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(self.base(), to.as_mut_ptr(), to.len()) }
    }

    /// Copies `from`, which is not longer than the segment, over the segment's start.
    pub(crate) fn copy_from(&self, from: &[u8]) {
        assert!(from.len() <= self.len());
        // SAFETY: `new`'s promise for the target; `from` is a live slice, so they do not overlap.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), self.base(), from.len()) }
    }

    /// Copies a segment that is not longer over this one's start.
    pub(crate) fn copy_from_segment(&self, from: &Segment) {
        assert!(from.len() <= self.len());
        // SAFETY: `new`'s promise for both; `copy` allows the two to overlap, as a guest's may.
        unsafe { ptr::copy(from.base(), self.base(), from.len()) }
    }

    /// Fills it with zeroes.
    pub(crate) fn clear(&self) {
        // SAFETY: `new`'s promise.
        unsafe { ptr::write_bytes(self.base(), 0, self.len()) }
    }

    /// Whether it holds nothing but zeroes.
    #[must_use]
    pub(crate) fn is_zero(&self) -> bool {
        // Ciphertext shows in its first bytes (docs/decisions/046).
        let mut beginning = [0u8; 8];
        let looked = self.part(0, beginning.len());
        looked.copy_to(&mut beginning[..looked.len()]);
        if beginning != [0; 8] {
            return false;
        }
        let mut block = [0u8; 512];
        let mut at = looked.len();
        while at < self.len() {
            let piece = self.part(at, block.len());
            piece.copy_to(&mut block[..piece.len()]);
            if block[..piece.len()].iter().any(|&byte| byte != 0) {
                return false;
            }
            at += piece.len();
        }
        true
    }
}

/// The memory of bounce buffers, which lives as long as it may be used.
#[derive(Debug)]
pub(crate) struct Arena {
    base: NonNull<libc::c_void>,
    length: NonZeroUsize,
    /// What it is, where another process may have it, too.
    shared: Option<SharedMemory>,
}

// SAFETY: an arena is an address range that it alone unmaps; what is in it is reached by segments only.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Takes ownership of a mapping.
    ///
    /// # Safety
    /// It is mapped, readable and writable, and nobody else unmaps it.
    pub(crate) unsafe fn new(base: NonNull<libc::c_void>, length: NonZeroUsize) -> Self {
        Self { base, length, shared: None }
    }

    /// Memory that another process may have, too. What that must not know is never in it.
    pub(crate) fn shared(memory: SharedMemory) -> Self {
        let length = NonZeroUsize::MIN.saturating_add(memory.len().saturating_sub(1));
        Self { base: memory.base().cast(), length, shared: Some(memory) }
    }

    /// What another process gets of it; none of memory of this process alone.
    pub(crate) fn shared_memory(&self) -> Option<&SharedMemory> {
        self.shared.as_ref()
    }

    /// Where a segment begins in it; none if the segment is not within.
    pub(crate) fn place_of(&self, segment: &Segment) -> Option<usize> {
        let at = (segment.base() as usize).checked_sub(self.base() as usize)?;
        (at.checked_add(segment.len())? <= self.len()).then_some(at)
    }

    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr().cast()
    }

    pub(crate) fn len(&self) -> usize {
        self.length.get()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.shared.is_some() {
            // It unmaps itself.
            return;
        }
        // SAFETY: the arena's own mapping, which no list has in its requests any more.
        let unmapped = unsafe { munmap(self.base, self.length.get()) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Arenas that an emptied list remembers: a filter has one.
const ARENAS_KEPT: usize = 4;

/// A scatter list. Its allocation is kept when it is emptied, so a reused list does not allocate.
#[derive(Debug, Default)]
pub struct Segments {
    list: Vec<Segment>,
    bytes: usize,
    /// The arenas that the segments point into. They stay when the list is emptied, so that a list that uses the
    /// same arena again and again changes no reference counts.
    arenas: Vec<Arc<Arena>>,
}

impl Segments {
    /// Forgets all segments.
    pub fn clear(&mut self) {
        self.list.clear();
        self.bytes = 0;
        if self.arenas.len() > ARENAS_KEPT {
            self.arenas.clear();
        }
    }

    /// Adds a segment of a buffer, whose memory then lives as long as it is in the list.
    pub(crate) fn push_of(&mut self, arena: &Arc<Arena>, segment: Segment) {
        if !self.arenas.iter().any(|known| Arc::ptr_eq(known, arena)) {
            self.arenas.push(Arc::clone(arena));
        }
        self.push(segment);
    }

    /// The arena that all segments are in, where another process may have it, too.
    pub(crate) fn shared_arena(&self) -> Option<&Arc<Arena>> {
        let has_all =
            |arena: &Arc<Arena>| self.list.iter().all(|segment| arena.place_of(segment).is_some());
        self.arenas.iter().find(|arena| arena.shared_memory().is_some() && has_all(arena))
    }

    /// Adds a segment at the end; empty ones are left out.
    pub fn push(&mut self, segment: Segment) {
        if !segment.is_empty() {
            self.list.push(segment);
            self.bytes += segment.len();
        }
    }

    /// Adds `length` bytes of `other` from the cursor on, and moves the cursor behind them.
    pub fn push_from(&mut self, other: &Segments, cursor: &mut Cursor, length: usize) {
        let mut left = length;
        while left > 0 {
            let Some(piece) = cursor.next(other, left) else { return };
            self.push(piece);
            left -= piece.len();
        }
    }

    /// How many bytes the segments hold in all.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The segments.
    #[must_use]
    pub fn as_slice(&self) -> &[Segment] {
        &self.list
    }

    /// Whether every segment's address and length is a multiple of `alignment`, a power of two.
    #[must_use]
    pub fn aligned_to(&self, alignment: usize) -> bool {
        alignment <= 1
            || self
                .list
                .iter()
                .all(|segment| (segment.base() as usize | segment.len()) & (alignment - 1) == 0)
    }
}

/// A place in a scatter list.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    index: usize,
    within: usize,
}

impl Cursor {
    /// The contiguous memory at the cursor, at most `most` bytes, without moving; none at the end.
    #[must_use]
    pub fn peek(&self, list: &Segments, most: usize) -> Option<Segment> {
        list.list.get(self.index).map(|segment| segment.part(self.within, most))
    }

    /// The contiguous memory at the cursor, at most `most` bytes; moves behind it.
    pub fn next(&mut self, list: &Segments, most: usize) -> Option<Segment> {
        let piece = self.peek(list, most)?;
        self.within += piece.len();
        if self.within == list.list[self.index].len() {
            (self.index, self.within) = (self.index + 1, 0);
        }
        Some(piece)
    }

    /// Moves `length` bytes on.
    pub fn skip(&mut self, list: &Segments, length: usize) {
        let mut left = length;
        while left > 0 {
            let Some(piece) = self.next(list, left) else { return };
            left -= piece.len();
        }
    }

    /// Gathers `to.len()` bytes into `to`; returns how many there were.
    pub(crate) fn gather(&mut self, list: &Segments, to: &mut [u8]) -> usize {
        let mut done = 0;
        while done < to.len() {
            let Some(piece) = self.next(list, to.len() - done) else { break };
            piece.copy_to(&mut to[done..done + piece.len()]);
            done += piece.len();
        }
        done
    }

    /// Scatters `from` over the list; returns how many bytes found room.
    pub(crate) fn scatter(&mut self, list: &Segments, from: &[u8]) -> usize {
        let mut done = 0;
        while done < from.len() {
            let Some(piece) = self.next(list, from.len() - done) else { break };
            piece.copy_from(&from[done..done + piece.len()]);
            done += piece.len();
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(parts: &mut [Vec<u8>]) -> Segments {
        let mut list = Segments::default();
        for part in parts {
            // SAFETY: the vectors outlive the list in these tests.
            list.push(unsafe { Segment::new(part.as_mut_ptr(), part.len()) });
        }
        list
    }

    #[test]
    fn a_cursor_gathers_and_scatters_across_segments() {
        let mut parts = vec![vec![1, 2, 3], vec![], vec![4], vec![5, 6]];
        let segments = list(&mut parts);
        assert_eq!(segments.bytes(), 6);
        let mut all = [0; 8];
        let mut cursor = Cursor::default();
        cursor.skip(&segments, 2);
        assert_eq!(cursor.gather(&segments, &mut all), 4);
        assert_eq!(all[..4], [3, 4, 5, 6]);
        let mut cursor = Cursor::default();
        cursor.skip(&segments, 1);
        assert_eq!(cursor.scatter(&segments, &[9, 8, 7]), 3);
        drop(segments);
        assert_eq!(parts, vec![vec![1, 9, 8], vec![], vec![7], vec![5, 6]]);
    }

    #[test]
    fn a_range_of_a_list_is_the_same_memory() {
        let mut parts = vec![vec![0; 4], vec![0; 4]];
        let segments = list(&mut parts);
        let mut range = Segments::default();
        let mut cursor = Cursor::default();
        cursor.skip(&segments, 3);
        range.push_from(&segments, &mut cursor, 3);
        assert_eq!(range.bytes(), 3);
        Cursor::default().scatter(&range, &[1, 2, 3]);
        drop((segments, range));
        assert_eq!(parts, vec![vec![0, 0, 0, 1], vec![2, 3, 0, 0]]);
    }

    #[test]
    fn a_list_says_what_shared_memory_all_of_it_is_in() {
        let [one, other] = [2, 1]
            .map(|pages| Arc::new(Arena::shared(SharedMemory::create(pages * 4096).unwrap())));
        // SAFETY: within the arenas, which outlive the segments.
        let at = |arena: &Arena, place: usize, length| unsafe {
            Segment::new(arena.base().add(place), length)
        };
        let mut list = Segments::default();
        list.push_of(&one, at(&one, 512, 4096));
        list.push_of(&one, at(&one, 0, 512));
        assert!(list.shared_arena().is_some_and(|arena| Arc::ptr_eq(arena, &one)));
        assert_eq!(one.place_of(&list.as_slice()[0]), Some(512));
        assert_eq!(other.place_of(&list.as_slice()[0]), None);
        list.push_of(&other, at(&other, 0, 4096));
        assert!(list.shared_arena().is_none(), "a part is elsewhere");
        list.clear();
        list.push(at(&other, 4000, 96));
        assert!(list.shared_arena().is_some_and(|arena| Arc::ptr_eq(arena, &other)));
    }

    #[test]
    fn zeroes_are_distinguished_from_data_at_any_place() {
        for length in [0, 5, 8, 9, 520, 521, 4096] {
            let is_zero = |other: Option<usize>| {
                let mut bytes = vec![0; length];
                other.into_iter().for_each(|at| bytes[at] = 1);
                // SAFETY: `bytes` outlives the segment.
                unsafe { Segment::new(bytes.as_mut_ptr(), length) }.is_zero()
            };
            assert!(is_zero(None));
            (0..length).for_each(|at| assert!(!is_zero(Some(at)), "byte {at} of {length}"));
        }
    }
}
