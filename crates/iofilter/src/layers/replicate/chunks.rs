//! Which chunks of a disk may differ from its replica. Shared by the queues that change them, the map that records
//! them, and the copier.
//!
//! ```text
//!  clean ── mark: recorded durably ──> marked ── unmark, if nothing changed since the ticket ──> clean
//! ```
//! A chunk has one word: whether it is marked, how many changes of it are in flight, and a generation that each
//! change raises. A change begins before it checks whether its chunks are marked, and is passed down only when all of
//! them are. A mark is removed only if the word is the same as when the copy began, with no change in flight.
//! So every change that is passed down is marked, and stays marked until a copy that began after its end.
//!
//! Chunks that an earlier process had marked are first marked in memory, to be copied, and recorded perhaps later.
//! Until the map says that they are recorded, no change is passed down.
//!
//! Only the owner of the map ([`super::map`]) marks and unmarks.

use std::sync::atomic::AtomicBool;

use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// The chunk is recorded as one that may differ.
const MARKED: u64 = 1;

/// One change in flight.
const CHANGE: u64 = 1 << 1;

/// Twenty bits of changes in flight: more than all queues of a process can have.
const UNDER_WAY: u64 = ((1 << 20) - 1) << 1;

/// One more change has begun. The remaining bits last for months of changes to one chunk.
const GENERATION: u64 = 1 << 21;

/// The replica was never complete, so there is no time up to which it has every change.
pub const NEVER: u64 = 0;

/// Consecutive chunks, both ends included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The first.
    pub first: usize,
    /// The last.
    pub last: usize,
}

/// The word of a chunk when a copy of it began, with no change in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyTicket(u64);

/// See the module.
#[derive(Debug)]
pub struct Chunks {
    words: Box<[AtomicU64]>,
    /// Of marked chunks: the replica has every change made before this time. Milliseconds since 1970, or [`NEVER`].
    up_to: Box<[AtomicU64]>,
    marked: AtomicU64,
    /// All marks are recorded durably. It never becomes false again, so the concurrency models need not try its orders.
    on_record: AtomicBool,
}

impl Chunks {
    /// This many chunks, all clean. No change is passed down before [`Self::on_record`].
    #[must_use]
    pub fn new(count: usize) -> Self {
        let zeroes = || (0..count).map(|_| AtomicU64::new(0)).collect();
        let (marked, on_record) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { words: zeroes(), up_to: zeroes(), marked, on_record }
    }

    /// All marks are recorded durably, and from now on each is recorded before it is set.
    pub fn on_record(&self) {
        self.on_record.store(true, SeqCst);
    }

    /// Whether changes of marked chunks may be passed down.
    #[must_use]
    pub fn is_on_record(&self) -> bool {
        self.on_record.load(SeqCst)
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words.len()
    }

    /// How many are marked.
    #[must_use]
    pub fn marked(&self) -> u64 {
        self.marked.load(SeqCst)
    }

    /// A change begins; true if it may be passed down at once. It must end with [`Self::end`] either way.
    pub fn begin(&self, span: Span) -> bool {
        let words = &self.words[span.first..=span.last];
        words.iter().fold(self.is_on_record(), |all, word| {
            let before = word.fetch_add(GENERATION + CHANGE, SeqCst);
            all & (before & MARKED != 0)
        })
    }

    /// A change has ended, however it went.
    pub fn end(&self, span: Span) {
        for word in &self.words[span.first..=span.last] {
            word.fetch_sub(CHANGE, SeqCst);
        }
    }

    /// The first chunk from `from` to `last` that is not marked, or not recorded. A change that has begun and was
    /// marked stays marked.
    #[must_use]
    pub fn first_clean(&self, from: usize, last: usize) -> Option<usize> {
        if !self.is_on_record() {
            return Some(from);
        }
        (from..=last).find(|chunk| self.words[*chunk].load(SeqCst) & MARKED == 0)
    }

    /// The first marked chunk from `from` on.
    #[must_use]
    pub fn next_marked(&self, from: usize) -> Option<usize> {
        let rest = self.words.get(from..)?;
        Some(from + rest.iter().position(|word| word.load(SeqCst) & MARKED != 0)?)
    }

    /// Marks recorded chunks; of those that were clean the replica has every change made before `up_to`.
    pub fn mark(&self, span: Span, up_to: u64) {
        for chunk in span.first..=span.last {
            // Nobody else marks or unmarks, so this value cannot change.
            let clean = self.words[chunk].load(SeqCst) & MARKED == 0;
            if clean {
                self.up_to[chunk].store(up_to, SeqCst);
                self.marked.fetch_add(1, SeqCst);
                self.words[chunk].fetch_or(MARKED, SeqCst);
            } else {
                self.up_to[chunk].fetch_min(up_to, SeqCst);
            }
        }
    }

    /// A copy of a marked chunk begins; it counts as complete only with a ticket.
    #[must_use]
    pub fn ticket(&self, chunk: usize) -> Option<CopyTicket> {
        let word = self.words[chunk].load(SeqCst);
        (word & MARKED != 0 && word & UNDER_WAY == 0).then_some(CopyTicket(word))
    }

    /// The replica durably has the chunk as of its ticket: it is clean, unless it has changed since.
    pub fn unmark(&self, chunk: usize, ticket: CopyTicket) -> bool {
        let clean = ticket.0 & !MARKED;
        let same = self.words[chunk].compare_exchange(ticket.0, clean, SeqCst, SeqCst).is_ok();
        if same {
            self.marked.fetch_sub(1, SeqCst);
        }
        same
    }

    /// The replica durably has every change made before `up_to` to a chunk that stays marked.
    pub fn copied(&self, chunk: usize, up_to: u64) {
        self.up_to[chunk].fetch_max(up_to, SeqCst);
    }

    /// Up to when the replica has every change: `now` if no chunk is marked, [`NEVER`] if it was never complete.
    #[must_use]
    pub fn all_up_to(&self, now: u64) -> u64 {
        if self.marked() == 0 {
            return now;
        }
        let all = self.words.iter().zip(&self.up_to);
        let marked = all.filter(|(word, _)| word.load(SeqCst) & MARKED != 0);
        marked.map(|(_, up_to)| up_to.load(SeqCst)).min().unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Span = Span { first: 0, last: 3 };
    const ONE: Span = Span { first: 1, last: 1 };

    #[test]
    fn a_change_goes_down_when_its_chunks_are_marked_and_a_mark_stays_while_it_is_under_way() {
        let chunks = Chunks::new(4);
        chunks.on_record();
        assert!(!chunks.begin(ALL));
        chunks.mark(ONE, 5);
        assert_eq!(chunks.first_clean(0, 3), Some(0));
        assert_eq!(chunks.first_clean(1, 1), None);
        chunks.mark(ALL, 6);
        assert_eq!((chunks.first_clean(0, 3), chunks.marked()), (None, 4));
        assert_eq!(chunks.ticket(1), None, "under way");
        chunks.end(ALL);
        let ticket = chunks.ticket(1).unwrap();
        assert!(chunks.begin(ONE), "marked already");
        assert!(!chunks.unmark(1, ticket), "under way again");
        chunks.end(ONE);
        assert!(!chunks.unmark(1, ticket), "changed since");
        let ticket = chunks.ticket(1).unwrap();
        assert!(chunks.unmark(1, ticket));
        assert!(!chunks.unmark(1, ticket), "twice");
        assert_eq!((chunks.ticket(1), chunks.marked(), chunks.next_marked(1)), (None, 3, Some(2)));
    }

    #[test]
    fn what_is_marked_is_to_be_copied_and_goes_down_only_when_it_is_on_record() {
        let chunks = Chunks::new(4);
        chunks.mark(ALL, 5);
        assert!(chunks.ticket(1).is_some());
        assert!(!chunks.begin(ONE), "perhaps not recorded");
        assert_eq!(chunks.first_clean(1, 1), Some(1));
        chunks.on_record();
        assert_eq!(chunks.first_clean(1, 1), None);
        assert!(chunks.begin(ONE));
    }

    #[test]
    fn the_replica_is_as_old_as_its_oldest_marked_chunk() {
        let chunks = Chunks::new(4);
        assert_eq!(chunks.all_up_to(100), 100);
        chunks.mark(ALL, NEVER);
        assert_eq!(chunks.all_up_to(100), NEVER);
        (0..4).for_each(|chunk| chunks.copied(chunk, 50 + chunk as u64));
        assert_eq!(chunks.all_up_to(100), 50);
        chunks.mark(ALL, 90);
        assert_eq!(chunks.all_up_to(100), 50, "a mark makes nothing younger");
        let ticket = chunks.ticket(0).unwrap();
        assert!(chunks.unmark(0, ticket));
        assert_eq!(chunks.all_up_to(100), 51);
        chunks.mark(ALL, 20);
        assert_eq!(chunks.all_up_to(100), 20);
    }
}
