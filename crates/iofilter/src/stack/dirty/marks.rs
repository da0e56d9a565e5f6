//! The bits of a disk's dirty bitmaps, for the queues that mark them and the callers that start and read them.
//!
//! ```text
//!  slot:   unused ── start: all clean ──> used ⇄ clear: all clean
//!             ^──────────stop──────────────┘
//!  change: changed ──> submitted ... done ──> changed ──> answered
//! ```
//! A change that lands after a bitmap was started, or cleared, marks it when it has landed. One that lands before may
//! miss it, but is in any copy that is made afterwards. The mark before it lands is for a bitmap that is replaced: a
//! backup that starts the next bitmap and then reads this one must find the change in one of them.
//!
//! Nothing is locked: slots and their words stay where they are, and one word says which slots are in use.
//! The caller that starts, clears or stops a bitmap makes sure that no other does so at the same time.

use std::fmt::Debug;
use std::sync::OnceLock;

use vmseal_api::filter::BITMAPS_MAX;

use crate::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Bits per word.
const WORD: u64 = 64;

/// Where the bits of a slot are.
pub trait Words: Debug + Send + Sync {
    /// The word at this index; none beyond the last one.
    fn word(&self, index: usize) -> Option<&AtomicU64>;
}

impl Words for Box<[AtomicU64]> {
    fn word(&self, index: usize) -> Option<&AtomicU64> {
        self.get(index)
    }
}

/// See the module.
#[derive(Debug)]
pub struct Marks {
    pub size: u64,
    shift: u32,
    /// The slots that are in use, as bits.
    used: AtomicU64,
    /// One bit per granule; made when a slot is first used, and kept.
    words: [OnceLock<Box<dyn Words>>; BITMAPS_MAX],
}

/// The size of one slot's words, in bytes, for a disk of `size` bytes in granules of 2 to the power `shift`.
pub fn bytes(size: u64, shift: u32) -> usize {
    words(size, shift) * 8
}

fn words(size: u64, shift: u32) -> usize {
    usize::try_from(size.div_ceil(1 << shift).div_ceil(WORD)).unwrap_or(usize::MAX / 8)
}

impl Marks {
    /// No slot in use, for a disk of `size` bytes in granules of 2 to the power `shift`.
    pub fn new(size: u64, shift: u32) -> Self {
        Self { size, shift, used: AtomicU64::new(0), words: Default::default() }
    }

    /// The size of a granule, in bytes.
    pub fn granule(&self) -> u64 {
        1 << self.shift
    }

    /// This range of the disk changes, or has changed. `length` is not 0 and the range is on the disk.
    #[inline]
    pub fn changed(&self, offset: u64, length: u64) {
        let used = self.used.load(SeqCst);
        if used != 0 {
            self.mark(used, offset, length);
        }
    }

    #[cold]
    fn mark(&self, used: u64, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.size);
        if offset >= end {
            return;
        }
        let (first, last) = (offset >> self.shift, (end - 1) >> self.shift);
        for (slot, words) in self.words.iter().enumerate() {
            let Some(words) = words.get().filter(|_| used & 1 << slot != 0) else { continue };
            for index in first / WORD..=last / WORD {
                let Some(word) = words.word(index as usize) else { break };
                let from = first.saturating_sub(index * WORD);
                let until = (last - index * WORD).min(WORD - 1);
                let mask = (u64::MAX << from) & (u64::MAX >> (WORD - 1 - until));
                if word.load(SeqCst) & mask != mask {
                    word.fetch_or(mask, SeqCst);
                }
            }
        }
    }

    /// Whether the slot has its words.
    pub fn is_made(&self, slot: usize) -> bool {
        self.words[slot].get().is_some()
    }

    /// Puts a slot into use, all clean. Its words are made if it has none.
    pub fn start(&self, slot: usize) {
        self.make(slot);
        self.clear(slot);
        self.use_slot(slot);
    }

    /// Makes the words of a slot, if it has none.
    fn make(&self, slot: usize) {
        let count = words(self.size, self.shift);
        let clean = || (0..count).map(|_| AtomicU64::new(0)).collect::<Box<[_]>>();
        self.words[slot].get_or_init(|| Box::new(clean()));
    }

    /// Puts a slot into use with these bits. Its words are made if it has none.
    pub fn start_with(&self, slot: usize, bits: &[u8]) {
        self.make(slot);
        let (bits, _) = bits.as_chunks::<8>();
        let pairs = self.all(slot).zip(bits);
        pairs.for_each(|(word, bits)| word.store(u64::from_ne_bytes(*bits), SeqCst));
        self.use_slot(slot);
    }

    /// The bits of a slot, its words one after another.
    pub fn bits(&self, slot: usize) -> Vec<u8> {
        self.all(slot).flat_map(|word| word.load(SeqCst).to_ne_bytes()).collect()
    }

    /// How many bytes a granule has, as a power of two.
    pub fn shift(&self) -> u32 {
        self.shift
    }

    /// Has a slot that was not used yet have its bits there, which has one for each granule.
    pub fn place(&self, slot: usize, words: Box<dyn Words>) {
        self.words[slot].get_or_init(|| words);
    }

    /// Puts a slot into use that has its words, dirty where they say so.
    pub fn use_slot(&self, slot: usize) {
        self.used.fetch_or(1 << slot, SeqCst);
    }

    /// Makes all of it clean.
    pub fn clear(&self, slot: usize) {
        self.all(slot).for_each(|word| word.store(0, SeqCst));
    }

    fn all(&self, slot: usize) -> impl Iterator<Item = &AtomicU64> {
        let words = self.words[slot].get();
        words.into_iter().flat_map(|words| (0..).map_while(|index| words.word(index)))
    }

    /// Takes a slot out of use.
    pub fn stop(&self, slot: usize) {
        self.used.fetch_and(!(1 << slot), SeqCst);
    }

    /// How much of the disk is in dirty granules of this slot, in bytes.
    pub fn dirty_bytes(&self, slot: usize) -> u64 {
        let words = self.all(slot);
        let granules: u64 = words.map(|word| u64::from(word.load(SeqCst).count_ones())).sum();
        (granules << self.shift).min(self.size)
    }

    /// Whether the disk's byte at `at` is in a dirty granule, and where the next granule of the other kind begins, at
    /// `end` at the latest. A slot that was never used is all dirty.
    pub fn extent(&self, slot: usize, at: u64, end: u64) -> (bool, u64) {
        let Some(words) = self.words[slot].get() else { return (true, end) };
        let word =
            |granule: u64| words.word((granule / WORD) as usize).map(|word| word.load(SeqCst));
        let mut granule = at >> self.shift;
        let Some(first) = word(granule) else { return (true, end) };
        let dirty = first >> (granule % WORD) & 1 == 1;
        while granule << self.shift < end {
            let Some(word) = word(granule) else { break };
            let others = if dirty { !word } else { word } >> (granule % WORD);
            let same = u64::from(others.trailing_zeros()).min(WORD - granule % WORD);
            granule += same;
            if !granule.is_multiple_of(WORD) || same == 0 {
                break;
            }
        }
        (dirty, (granule << self.shift).clamp(at, end))
    }
}
