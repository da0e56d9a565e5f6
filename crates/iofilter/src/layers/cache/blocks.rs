//! The cached blocks of a disk, shared by its queues, and the rules that keep stale blocks out.
//!
//! ```text
//!  stripe  quiet, generation g --begin_change--> 1 in flight, generation g + 1, its blocks forgotten
//!          n in flight         --begin_change--> n + 1 in flight, the next generation, forgotten
//!          n in flight         --end_change----> n - 1 in flight; quiet at 0
//!
//!  read    quiet, generation g --ticket--> storage is asked --install--> kept if it is still g
//!          a change in flight  --ticket--> void: nothing is kept of what storage answers
//! ```
//! So a cached block was read from storage while nothing changed it. A change that failed, or was done in
//! part, has forgotten its blocks like any other.
//!
//! Blocks are found as in a processor's cache: a number leads to a set of a few places, and among these
//! the clock algorithm makes room (a block that was used since the last round stays for another one).
//! Nothing is allocated after construction. Shared data is behind one lock of [`SHARDS`], held at most for
//! the time it takes to copy a stretch.

use std::sync::PoisonError;

use crate::sync::{Mutex, MutexGuard};

/// The unit of caching, in bytes.
pub const BLOCK: u64 = 4096;

/// How many bytes share a lock and a stripe.
pub const STRETCH: u64 = 64 * 1024;

/// How many locks there are: the most queues that a disk has.
const SHARDS: u64 = 16;

/// Stripes of a shard. Stretches this many shards apart share one; then some blocks are not cached
/// that could be.
const STRIPES: u64 = 64;

/// The places that a block can be in.
const WAYS: usize = 8;

/// The number of no block: no disk is this large.
const NOTHING: u64 = u64::MAX;

/// What a cache has done, in requests and in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Reads that it answered.
    pub hits: u64,
    /// Reads that it could not answer, or not whole.
    pub misses: u64,
    /// Blocks kept.
    pub installed: u64,
    /// Blocks forgotten because they were changed.
    pub invalidated: u64,
    /// Blocks forgotten to make room.
    pub evicted: u64,
}

/// The permission to cache what a read returns; for [`STRETCH`] bytes at most, which touch two stretches.
#[derive(Debug)]
pub struct Ticket {
    offset: u64,
    length: u64,
    generations: [Option<u64>; 2],
}

/// The blocks of one disk.
pub struct Blocks(Box<[Mutex<Shard>]>);

struct Shard {
    stripes: [Stripe; STRIPES as usize],
    sets: Box<[Set]>,
    /// The contents of the places, set by set.
    data: Box<[u8]>,
    counts: Counts,
}

#[derive(Clone, Copy, Default)]
struct Stripe {
    /// Changes in flight.
    changing: u32,
    /// How many changes have begun.
    generation: u64,
}

#[derive(Clone)]
struct Set {
    blocks: [u64; WAYS],
    /// A bit for each place that was used since the last round of the clock.
    used: u8,
    hand: u8,
}

impl Blocks {
    /// Room for `bytes`; a shard has at least one set.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let sets = usize::try_from(bytes / SHARDS / BLOCK).unwrap_or(usize::MAX) / WAYS;
        Self((0..SHARDS).map(|_| Mutex::new(Shard::new(sets.max(1)))).collect())
    }

    fn shard(&self, stretch: u64) -> MutexGuard<'_, Shard> {
        lock(&self.0[(stretch % SHARDS) as usize])
    }

    /// Gives the cached bytes of the range to `take`, piece by piece in order; true if the whole range
    /// was cached.
    pub fn read(&self, offset: u64, length: u64, mut take: impl FnMut(&[u8])) -> bool {
        let mut given = 0;
        for StretchPart { stretch, start, end } in pieces(offset, length) {
            let mut shard = self.shard(stretch);
            if !shard.give(start, end, &mut take) {
                shard.counts.misses += 1;
                return false;
            }
            given += end - start;
            if given == length {
                shard.counts.hits += 1;
            }
        }
        true
    }

    /// Called before storage is asked for the range.
    #[must_use]
    pub fn ticket(&self, offset: u64, length: u64) -> Ticket {
        debug_assert!(length <= STRETCH);
        let mut generations = [None; 2];
        for (piece, generation) in pieces(offset, length).zip(&mut generations) {
            *generation = self.shard(piece.stretch).stripe(piece.stretch).quiet();
        }
        Ticket { offset, length, generations }
    }

    /// Caches what storage has answered, in whole blocks, where nothing has changed since the ticket was
    /// given. `fetch` copies from this offset in the range.
    pub fn install(&self, ticket: &Ticket, mut fetch: impl FnMut(usize, &mut [u8])) {
        let pieces = pieces(ticket.offset, ticket.length).zip(ticket.generations);
        for (StretchPart { stretch, start, end }, generation) in pieces {
            let mut shard = self.shard(stretch);
            if generation != Some(shard.stripe(stretch).generation) {
                continue;
            }
            for block in start.div_ceil(BLOCK)..end / BLOCK {
                let at = (block * BLOCK - ticket.offset) as usize;
                shard.keep(block, |place| fetch(at, place));
            }
        }
    }

    /// Called before the range is changed: its cached blocks are forgotten, and data that was read before
    /// the end of the change is not cached.
    pub fn begin_change(&self, offset: u64, length: u64) {
        let blocks = offset / BLOCK..(offset + length).div_ceil(BLOCK);
        if covers_all(offset, length) {
            for shard in &self.0 {
                let mut shard = lock(shard);
                shard.stripes.iter_mut().for_each(Stripe::begin);
                shard.forget_all_in(&blocks);
            }
            return;
        }
        for StretchPart { stretch, start, end } in pieces(offset, length) {
            let mut shard = self.shard(stretch);
            shard.stripe(stretch).begin();
            (start / BLOCK..end.div_ceil(BLOCK)).for_each(|block| shard.forget(block));
        }
    }

    /// Called after a change, however it ended, with the range that it began with.
    pub fn end_change(&self, offset: u64, length: u64) {
        if covers_all(offset, length) {
            for shard in &self.0 {
                lock(shard).stripes.iter_mut().for_each(Stripe::end);
            }
            return;
        }
        for piece in pieces(offset, length) {
            self.shard(piece.stretch).stripe(piece.stretch).end();
        }
    }

    /// What was done since it was made.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.0.iter().fold(Counts::default(), |sum, shard| {
            let counts = lock(shard).counts;
            Counts {
                hits: sum.hits + counts.hits,
                misses: sum.misses + counts.misses,
                installed: sum.installed + counts.installed,
                invalidated: sum.invalidated + counts.invalidated,
                evicted: sum.evicted + counts.evicted,
            }
        })
    }
}

impl Stripe {
    /// The generation, unless a change is in flight.
    fn quiet(&self) -> Option<u64> {
        (self.changing == 0).then_some(self.generation)
    }

    fn begin(&mut self) {
        self.changing += 1;
        self.generation += 1;
    }

    fn end(&mut self) {
        debug_assert!(self.changing > 0, "a change ended that had not begun");
        self.changing -= 1;
    }
}

impl Shard {
    fn new(sets: usize) -> Self {
        Self {
            stripes: [Stripe::default(); STRIPES as usize],
            sets: vec![Set { blocks: [NOTHING; WAYS], used: 0, hand: 0 }; sets].into(),
            data: vec![0; sets * WAYS * BLOCK as usize].into(),
            counts: Counts::default(),
        }
    }

    fn stripe(&mut self, stretch: u64) -> &mut Stripe {
        &mut self.stripes[(stretch / SHARDS % STRIPES) as usize]
    }

    /// The set of a block: by Fibonacci hashing, which spreads neighbours.
    fn set(&self, block: u64) -> usize {
        (block.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % self.sets.len()
    }

    /// Where a block is: its set, and which of its places.
    fn find(&self, block: u64) -> Option<(usize, usize)> {
        let set = self.set(block);
        let way = self.sets[set].blocks.iter().position(|kept| *kept == block)?;
        Some((set, way))
    }

    fn give(&mut self, start: u64, end: u64, take: &mut impl FnMut(&[u8])) -> bool {
        let mut at = start;
        while at < end {
            let Some((set, way)) = self.find(at / BLOCK) else { return false };
            self.sets[set].used |= 1 << way;
            let within = (at % BLOCK) as usize;
            let length = (BLOCK - at % BLOCK).min(end - at);
            take(&self.place(set, way)[within..within + length as usize]);
            at += length;
        }
        true
    }

    fn place(&mut self, set: usize, way: usize) -> &mut [u8] {
        let start = (set * WAYS + way) * BLOCK as usize;
        &mut self.data[start..start + BLOCK as usize]
    }

    fn keep(&mut self, block: u64, fill: impl FnOnce(&mut [u8])) {
        if self.find(block).is_some() {
            // Another read brought the same block.
            return;
        }
        let index = self.set(block);
        let set = &mut self.sets[index];
        let way = set.make_room();
        let before = std::mem::replace(&mut set.blocks[way], block);
        self.counts.installed += 1;
        self.counts.evicted += u64::from(before != NOTHING);
        fill(self.place(index, way));
    }

    fn forget(&mut self, block: u64) {
        if let Some((set, way)) = self.find(block) {
            self.sets[set].blocks[way] = NOTHING;
            self.counts.invalidated += 1;
        }
    }

    fn forget_all_in(&mut self, blocks: &std::ops::Range<u64>) {
        let kept = self.sets.iter_mut().flat_map(|set| &mut set.blocks);
        for kept in kept.filter(|kept| blocks.contains(kept)) {
            *kept = NOTHING;
            self.counts.invalidated += 1;
        }
    }
}

impl Set {
    /// A place that is free, or whose block has not been used for a round of the clock.
    fn make_room(&mut self) -> usize {
        if let Some(free) = self.blocks.iter().position(|kept| *kept == NOTHING) {
            self.used &= !(1 << free);
            return free;
        }
        loop {
            let way = usize::from(self.hand);
            self.hand = (self.hand + 1) % WAYS as u8;
            if self.used & (1 << way) == 0 {
                return way;
            }
            self.used &= !(1 << way);
        }
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The part of a range that is in one stretch; in bytes.
struct StretchPart {
    stretch: u64,
    start: u64,
    end: u64,
}

fn pieces(offset: u64, length: u64) -> impl Iterator<Item = StretchPart> {
    let end = offset + length;
    (offset / STRETCH..end.div_ceil(STRETCH)).map(move |stretch| StretchPart {
        stretch,
        start: offset.max(stretch * STRETCH),
        end: end.min((stretch + 1) * STRETCH),
    })
}

/// Whether a range touches every stripe, some perhaps twice.
fn covers_all(offset: u64, length: u64) -> bool {
    (offset + length).div_ceil(STRETCH) - offset / STRETCH >= SHARDS * STRIPES
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: u64 = 1 << 20;

    /// Reads a range from a storage of `fill` through the cache's rules.
    fn fetch(blocks: &Blocks, offset: u64, length: u64, fill: u8) {
        let ticket = blocks.ticket(offset, length);
        blocks.install(&ticket, |_, place| place.fill(fill));
    }

    fn found(blocks: &Blocks, offset: u64, length: u64) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        blocks.read(offset, length, |piece| bytes.extend_from_slice(piece)).then_some(bytes)
    }

    #[test]
    fn a_range_is_given_whole_and_in_order_or_not_at_all() {
        let blocks = Blocks::new(ROOM);
        let (from, length) = (STRETCH - 2 * BLOCK, 4 * BLOCK);
        let ticket = blocks.ticket(from, length);
        blocks.install(&ticket, |at, place| place.fill((at as u64 / BLOCK) as u8 + 1));
        let whole = found(&blocks, from, length).unwrap();
        let expected: Vec<u8> = (1..=4).flat_map(|fill| [fill; BLOCK as usize]).collect();
        assert!(whole == expected);
        let part = found(&blocks, from + BLOCK - 512, 1024).unwrap();
        assert_eq!(part, [[1; 512], [2; 512]].concat());
        assert_eq!(found(&blocks, from - 512, 1024), None);
        assert_eq!(found(&blocks, from + length - 512, 1024), None);
        let counts = blocks.counts();
        assert_eq!((counts.hits, counts.misses, counts.installed), (2, 2, 4));
    }

    #[test]
    fn only_whole_blocks_are_kept() {
        let blocks = Blocks::new(ROOM);
        fetch(&blocks, 512, 2 * BLOCK, 7);
        assert_eq!(found(&blocks, 512, 512), None);
        assert_eq!(found(&blocks, BLOCK, BLOCK), Some(vec![7; BLOCK as usize]));
        assert_eq!(found(&blocks, 2 * BLOCK, 512), None);
    }

    #[test]
    fn a_change_forgets_its_blocks_and_lets_none_be_kept_that_were_read_before_its_end() {
        let blocks = Blocks::new(ROOM);
        fetch(&blocks, 0, 2 * BLOCK, 1);
        let before = blocks.ticket(0, BLOCK);
        blocks.begin_change(512, 512);
        assert_eq!(found(&blocks, 0, 512), None);
        assert!(found(&blocks, BLOCK, BLOCK).is_some(), "its neighbour stays");
        let during = blocks.ticket(0, BLOCK);
        blocks.install(&before, |_, place| place.fill(1));
        blocks.install(&during, |_, place| place.fill(1));
        blocks.begin_change(0, BLOCK);
        blocks.end_change(512, 512);
        let other = blocks.ticket(0, BLOCK);
        blocks.end_change(0, BLOCK);
        for ticket in [&before, &during, &other] {
            blocks.install(ticket, |_, place| place.fill(1));
        }
        assert_eq!(found(&blocks, 0, 512), None);
        fetch(&blocks, 0, BLOCK, 2);
        assert_eq!(found(&blocks, 0, 512), Some(vec![2; 512]));
        assert_eq!(blocks.counts().invalidated, 1);
    }

    #[test]
    fn a_change_of_more_than_all_stripes_is_as_any_other() {
        let blocks = Blocks::new(ROOM);
        let far = STRETCH * SHARDS * STRIPES * 3;
        let (inside, outside) = (far / 2, far + STRETCH);
        for offset in [0, inside, outside] {
            fetch(&blocks, offset, BLOCK, 1);
        }
        let before = blocks.ticket(inside, BLOCK);
        blocks.begin_change(BLOCK, far);
        assert_eq!(found(&blocks, inside, BLOCK), None);
        assert!(found(&blocks, 0, BLOCK).is_some() && found(&blocks, outside, BLOCK).is_some());
        let during = blocks.ticket(inside, BLOCK);
        blocks.end_change(BLOCK, far);
        for ticket in [&before, &during] {
            blocks.install(ticket, |_, place| place.fill(1));
        }
        assert_eq!(found(&blocks, inside, BLOCK), None);
        fetch(&blocks, inside, BLOCK, 2);
        assert!(found(&blocks, inside, BLOCK).is_some());
    }

    #[test]
    fn no_more_is_kept_than_there_is_room_for_and_what_is_used_stays() {
        let blocks = Blocks::new(ROOM);
        let places = ROOM / BLOCK;
        fetch(&blocks, 0, BLOCK, 9);
        for block in 1..places * 20 {
            fetch(&blocks, block * BLOCK, BLOCK, 1);
            assert!(found(&blocks, 0, BLOCK).is_some(), "the block in use went, at {block}");
        }
        let here = (0..places * 20).filter(|block| found(&blocks, block * BLOCK, 512).is_some());
        let (here, counts) = (here.count() as u64, blocks.counts());
        assert!(here > places / 2 && here <= places, "{here} of {places}");
        assert_eq!(counts.installed - counts.evicted, here);
    }
}
