//! Where clusters of the guest's disk are, for the queues, so that data moves without the image's thread.
//!
//! ```text
//!  thread   a request found or made a cluster ── tables committed ──> put
//!           it makes one in place of a layer's ──> forget, before that is answered
//!  queue    places ──> files and offsets: read there at once, or written if all are the image's own
//!                └── nothing ──> the thread
//! ```
//! A cluster that the image itself has is never taken out: it stays at its place for as long as the image is open
//! ([`super::image`]): a discard empties it, and it is not used for anything else. A compressed cluster is never
//! put here. One that a file below has stays there, too, as nobody changes what shows of those; it goes out when the image gets one of its own.
//! A queue that found the former place meanwhile began its read before the write was answered. So an entry is
//! right, and a missing one costs a detour.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::storage::target::Place;

/// How many clusters are known at a time: of 64 KiB each, those of 2 GiB. Another that has the same place takes it.
const ENTRIES: usize = 32 * 1024;

/// Bits of an entry for the place in the file, and above them for the file; the rest says which of the guest's it is.
/// A place beyond that is not put here.
const PLACE_BITS: u32 = 36;
const FILE_BITS: u32 = 4;

/// The unit of places, in bytes, unless clusters are smaller: those of a file below may be smaller than the image's.
const UNIT: u64 = 4096;

/// See the module. An entry of 0 is none.
#[derive(Debug)]
pub(super) struct KnownClusters {
    cluster: u64,
    unit: u64,
    entries: Box<[AtomicU64]>,
}

impl KnownClusters {
    /// None yet, of an image with clusters of this size.
    pub(super) fn new(cluster: u64) -> Self {
        let entries = (0..ENTRIES).map(|_| AtomicU64::new(0)).collect();
        Self { cluster, unit: cluster.min(UNIT), entries }
    }

    /// Lists where `length` bytes from `at` on of the image's disk are; false if they are not all in known clusters.
    pub(super) fn places(&self, at: u64, length: u64, places: &mut Vec<Place>) -> bool {
        places.clear();
        let mut done = 0;
        while done < length {
            let inside = (at + done) % self.cluster;
            let piece = (self.cluster - inside).min(length - done);
            let Some((file, begin)) = self.find((at + done) / self.cluster) else { return false };
            push(
                places,
                Place { from: done as usize, length: piece as usize, file, at: begin + inside },
            );
            done += piece;
        }
        length > 0
    }

    /// The file that has a cluster, and where it begins there.
    fn find(&self, number: u64) -> Option<(usize, u64)> {
        let (index, tag) = Self::index(number)?;
        let entry = self.entries[index].load(Ordering::Acquire);
        let place = (entry & ((1 << PLACE_BITS) - 1)) * self.unit;
        let file = entry >> PLACE_BITS & ((1 << FILE_BITS) - 1);
        (entry >> (PLACE_BITS + FILE_BITS) == tag).then_some((file as usize, place))
    }

    /// A committed cluster: the guest's at `at`, where one begins, is all in this file from `place` on.
    pub(super) fn put(&self, at: u64, file: usize, place: u64) {
        let (file, units) = (file as u64, place / self.unit);
        if let Some((index, tag)) = Self::index(at / self.cluster)
            && place.is_multiple_of(self.unit)
            && units >> PLACE_BITS == 0
            && file >> FILE_BITS == 0
        {
            let entry = tag << (PLACE_BITS + FILE_BITS) | file << PLACE_BITS | units;
            self.entries[index].store(entry, Ordering::Release);
        }
    }

    /// The guest's cluster at `at` is no longer where it was.
    pub(super) fn forget(&self, at: u64) {
        if let Some((index, _)) = Self::index(at / self.cluster) {
            self.entries[index].store(0, Ordering::Release);
        }
    }

    /// The index of an entry, and what tells clusters with the same index apart, which is never 0.
    fn index(number: u64) -> Option<(usize, u64)> {
        let (index, tag) = (number % ENTRIES as u64, number / ENTRIES as u64 + 1);
        (tag >> (64 - PLACE_BITS - FILE_BITS) == 0).then_some((index as usize, tag))
    }
}

/// Adds a place, or makes the last one longer.
pub(super) fn push(places: &mut Vec<Place>, next: Place) {
    match places.last_mut() {
        Some(last)
            if last.file == next.file
                && last.at + last.length as u64 == next.at
                && last.from + last.length == next.from =>
        {
            last.length += next.length;
        }
        _ => places.push(next),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_within_known_clusters_is_found_and_nothing_else() {
        let (known, cluster) = (KnownClusters::new(4096), 4096);
        let others = cluster * ENTRIES as u64;
        let find = |at, length| {
            let mut places = Vec::new();
            known.places(at, length, &mut places).then_some(places)
        };
        let one = |from, length, file, at| Place { from, length, file, at };
        assert_eq!(find(0, 512), None);
        known.put(8192, 0, 40960);
        assert_eq!(find(8192, 4096), Some(vec![one(0, 4096, 0, 40960)]));
        assert_eq!(find(8192 + 512, 1024), Some(vec![one(0, 1024, 0, 40960 + 512)]));
        assert_eq!(find(8192 + 512, 4096), None, "it ends in the next one");
        // The next one in a file below; then beside it in the same file.
        known.put(12288, 3, 4096);
        let two = vec![one(0, 3584, 0, 40960 + 512), one(3584, 512, 3, 4096)];
        assert_eq!(find(8192 + 512, 4096), Some(two));
        known.put(12288, 0, 45056);
        assert_eq!(find(8192 + 512, 4096), Some(vec![one(0, 4096, 0, 40960 + 512)]));
        known.forget(12288);
        assert_eq!(find(12288, 512), None, "it was forgotten");
        assert_eq!(find(8192 + others, 512), None, "another of the same index");
        known.put(8192 + others, 1, 81920);
        assert_eq!(find(8192, 512), None, "its place is taken");
        assert_eq!(find(8192 + others, 512), Some(vec![one(0, 512, 1, 81920)]));
        known.put(0, 0, cluster << PLACE_BITS);
        known.put(4096, 0, 512);
        known.put(u64::MAX / cluster * cluster, 0, 4096);
        assert_eq!((find(0, 512), find(4096, 512)), (None, None));
        assert_eq!(find(u64::MAX - 4095, 512), None);
    }
}
