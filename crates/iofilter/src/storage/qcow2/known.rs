//! Clusters of an image that are known to the queues, so that data moves without the image's thread.
//!
//! ```text
//!  thread   a request found or made a cluster of the image itself ── tables committed ──> put
//!  queue    find ──> the place in the file: read or written there at once
//!                └── nothing ──> the thread
//! ```
//! Nothing is ever taken out: a cluster that the guest has in the image stays at its place for as long as the image is open
//! ([`super::image`]): a discard empties it, and it is not used for anything else. A compressed cluster is never
//! put here. So an entry is right for good, and a missing one costs a detour.

use std::sync::atomic::{AtomicU64, Ordering};

/// How many clusters are known at a time: of 64 KiB each, those of 2 GiB. Another that has the same place takes it.
const ENTRIES: usize = 32 * 1024;

/// Bits of an entry for the cluster in the file; the rest says which of the guest's it is. A file beyond that is not put here.
const HOST_BITS: u32 = 32;

/// See the module. An entry of 0 is none.
#[derive(Debug)]
pub(super) struct KnownClusters {
    cluster: u64,
    entries: Box<[AtomicU64]>,
}

impl KnownClusters {
    /// None yet, of an image with clusters of this size.
    pub(super) fn new(cluster: u64) -> Self {
        Self { cluster, entries: (0..ENTRIES).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Where `length` bytes from `at` on of the image's disk are in the file, if they are in one known cluster.
    pub(super) fn find(&self, at: u64, length: u64) -> Option<u64> {
        let (number, inside) = (at / self.cluster, at % self.cluster);
        if length == 0 || inside + length > self.cluster {
            return None;
        }
        let (index, tag) = Self::place(number)?;
        let entry = self.entries[index].load(Ordering::Acquire);
        let host = entry & ((1 << HOST_BITS) - 1);
        (entry >> HOST_BITS == tag).then_some(host * self.cluster + inside)
    }

    /// A committed cluster of the image itself: the guest's at `at` is in the file at `host`; both are where clusters begin.
    pub(super) fn put(&self, at: u64, host: u64) {
        let host = host / self.cluster;
        if let Some((index, tag)) = Self::place(at / self.cluster)
            && host >> HOST_BITS == 0
        {
            self.entries[index].store(tag << HOST_BITS | host, Ordering::Release);
        }
    }

    /// The index of an entry, and what tells clusters with the same index apart, which is never 0.
    fn place(number: u64) -> Option<(usize, u64)> {
        let (index, tag) = (number % ENTRIES as u64, number / ENTRIES as u64 + 1);
        (tag >> (64 - HOST_BITS) == 0).then_some((index as usize, tag))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_within_a_known_cluster_is_found_and_nothing_else() {
        let (known, cluster) = (KnownClusters::new(4096), 4096);
        let others = cluster * ENTRIES as u64;
        assert_eq!(known.find(0, 512), None);
        known.put(8192, 40960);
        assert_eq!(known.find(8192, 4096), Some(40960));
        assert_eq!(known.find(8192 + 512, 1024), Some(40960 + 512));
        assert_eq!(known.find(8192 + 512, 4096), None, "it ends in the next one");
        assert_eq!(known.find(8192 + others, 512), None, "another of the same index");
        known.put(8192 + others, 81920);
        assert_eq!(known.find(8192, 512), None, "its place is taken");
        assert_eq!(known.find(8192 + others, 512), Some(81920));
        known.put(0, cluster << HOST_BITS);
        known.put(u64::MAX / cluster * cluster, 4096);
        assert_eq!((known.find(0, 512), known.find(u64::MAX - 4095, 512)), (None, None));
    }
}
