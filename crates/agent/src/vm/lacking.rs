//! How much the copies of disks may lack when they are as good as complete, and when their disks are to pivot. Filters count in
//! chunks, which are longer on large disks, and so do these limits.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;
use vmseal_api::filter::{
    DiskStatus, FilterStatus, PIVOT_BYTES_MAX, PIVOT_CHUNKS_MIN, copy_chunk, pivot_bytes,
};
use vmseal_api::host::DiskSpec;
use vmseal_api::id::DiskId;

/// How much copies may lack when they are as good as complete, in bytes, where [`PIVOT_CHUNKS_MIN`] chunks of each are no more: a
/// guest that writes always leaves some.
pub const READY_BYTES: u64 = PIVOT_BYTES_MAX / 4;

/// After how long copies that come no closer are as good as complete with what their disks' pivots may take. Of a copy at a
/// server elsewhere, chunks may count as copied only every 16 seconds: a batch takes 8, and is flushed while the next one is copied.
const SETTLED_AFTER: Duration = Duration::from_secs(30);

/// The sizes of disks that are copied, in bytes.
pub type Sizes = BTreeMap<DiskId, u64>;

/// Those of a VM's disks.
pub fn sizes<'a>(disks: impl IntoIterator<Item = &'a DiskSpec>) -> Sizes {
    disks.into_iter().map(|disk| (disk.disk, disk.size)).collect()
}

/// Tells when copies are as good as complete: when they lack little together. But a filter slows a guest only until a pivot may take
/// what is left ([`vmseal_api::filter::slowed_bytes`]), and not at all for chunks that change too fast to be clean at any time. So when
/// they have come no closer for a while, what pivots may take is enough.
pub struct Nearing {
    /// What is little, in bytes.
    ready: u64,
    /// What the pivots may take together, in bytes.
    pivots: u64,
    /// The least that was lacking, and since when.
    least: Option<(u64, Instant)>,
}

impl Nearing {
    /// Of copies of disks of these sizes, in bytes.
    pub fn of(sizes: impl IntoIterator<Item = u64>) -> Self {
        let (mut few, mut pivots) = (0_u64, 0_u64);
        for chunk in sizes.into_iter().map(copy_chunk) {
            few = few.saturating_add(chunk.saturating_mul(PIVOT_CHUNKS_MIN));
            pivots = pivots.saturating_add(pivot_bytes(chunk));
        }
        Self { ready: READY_BYTES.max(few), pivots, least: None }
    }

    /// Whether copies that lack so many bytes are as good as complete.
    pub fn is_ready(&mut self, lacking: u64) -> bool {
        let now = Instant::now();
        let since = match self.least {
            Some((least, since)) if least <= lacking => since,
            _ => {
                self.least = Some((lacking, now));
                now
            }
        };
        let settled = now.saturating_duration_since(since) >= SETTLED_AFTER;
        lacking <= if settled { self.pivots.max(self.ready) } else { self.ready }
    }
}

/// How much the copy of a disk may lack, in bytes.
pub fn dirty(disk: &DiskStatus) -> u64 {
    disk.mirror.as_ref().map_or(0, |mirror| mirror.dirty_bytes)
}

/// A disk whose copy lacks more than a pivot may take. One whose size is not known counts as small.
pub fn too_far<'a>(status: &'a FilterStatus, sizes: &Sizes) -> Option<&'a DiskStatus> {
    let most = |disk: DiskId| pivot_bytes(copy_chunk(sizes.get(&disk).copied().unwrap_or(0)));
    status.disks.iter().find(|disk| dirty(disk) > most(disk.disk))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use vmseal_api::filter::slowed_bytes;
    use vmseal_api::id::VmId;

    use super::*;

    const SMALL: u64 = 100 << 30;
    /// Its chunks have 32 MiB.
    const LARGE: u64 = 5 << 40;

    #[tokio::test(start_paused = true)]
    async fn a_copy_is_ready_while_its_guest_keeps_a_few_chunks_changed() {
        let few = |sizes: &[u64], most: u64| {
            let is_ready = |lacking| Nearing::of(sizes.iter().copied()).is_ready(lacking);
            is_ready(most) && !is_ready(most + 1)
        };
        assert!(few(&[SMALL], 16 << 20));
        assert!(few(&[2 << 40], 32 << 20), "four chunks of 8 MiB");
        assert!(few(&[LARGE], 128 << 20), "four chunks");
        assert!(few(&[LARGE, LARGE], 256 << 20), "each has its own");
        assert!(few(&[], 16 << 20));
    }

    #[tokio::test(start_paused = true)]
    async fn a_copy_that_comes_no_closer_is_ready_with_what_a_pivot_may_take() {
        let mut nearing = Nearing::of([SMALL, SMALL]);
        let later = || tokio::time::advance(SETTLED_AFTER / 2);
        assert!(!nearing.is_ready(1 << 30));
        later().await;
        assert!(!nearing.is_ready(100 << 20));
        later().await;
        assert!(!nearing.is_ready(99 << 20), "it comes closer");
        later().await;
        assert!(!nearing.is_ready(110 << 20));
        later().await;
        assert!(!nearing.is_ready(129 << 20), "more than two pivots may take");
        assert!(nearing.is_ready(128 << 20));
        assert!(!nearing.is_ready(98 << 20), "it comes closer again");
        later().await;
        assert!(nearing.is_ready(16 << 20), "little is enough at any time");
    }

    /// Else a guest could write so that its filter does not slow it, and its copy never be ready.
    #[tokio::test(start_paused = true)]
    async fn what_a_filter_is_content_with_is_ready_and_can_pivot() {
        for size in [4096, SMALL, 300 << 30, 1 << 40, 2 << 40, LARGE, 62 << 40] {
            let (mut nearing, chunk) = (Nearing::of([size]), copy_chunk(size));
            // As much again may change until the next pass ends.
            let most = 2 * slowed_bytes(chunk);
            nearing.is_ready(most);
            tokio::time::advance(SETTLED_AFTER).await;
            assert!(nearing.is_ready(most), "{size}: it would never be ready");
            assert!(!nearing.is_ready(pivot_bytes(chunk) + chunk), "{size}: it could not pivot");
        }
    }

    /// The status of a filter whose disks' copies lack so much.
    fn lacking(disks: &[(DiskId, u64)]) -> FilterStatus {
        let disks = disks.iter().map(|(disk, bytes)| {
            json!({
                "disk": disk, "state": { "is": "connected" },
                "counters": {
                    "reads": 0, "read_bytes": 0, "writes": 0, "written_bytes": 0, "flushes": 0,
                    "discards": 0, "errors": 0
                },
                "mirror": { "pivoted": false, "dirty_bytes": bytes },
            })
        });
        let disks: Vec<_> = disks.collect();
        let vm = VmId::new();
        serde_json::from_value(json!({ "version": 1, "pid": 1, "vm": vm, "disks": disks })).unwrap()
    }

    #[test]
    fn a_disk_pivots_while_its_copy_lacks_what_its_filter_allows() {
        let (small, large) = (DiskId::new(), DiskId::new());
        let sizes = Sizes::from([(small, SMALL), (large, LARGE)]);
        let far = |in_small: u64, in_large: u64| {
            let status = lacking(&[(small, in_small << 20), (large, in_large << 20)]);
            too_far(&status, &sizes).map(|disk| disk.disk)
        };
        assert_eq!(far(64, 128), None);
        assert_eq!(far(65, 128), Some(small));
        assert_eq!(far(64, 160), Some(large));
        let status = lacking(&[(DiskId::new(), 65 << 20)]);
        assert!(too_far(&status, &sizes).is_some(), "the size of this one is not known");
    }
}
