//! How much the copies of disks may lack when they are as good as complete, and when their disks are to pivot. Filters count in
//! chunks, which are longer on large disks, and so do these limits.

use std::collections::BTreeMap;

use vmseal_api::filter::{
    DiskStatus, FilterStatus, PIVOT_BYTES_MAX, PIVOT_CHUNKS_MIN, copy_chunk, pivot_bytes,
};
use vmseal_api::host::DiskSpec;
use vmseal_api::id::DiskId;

/// How much copies may lack when they are as good as complete, in bytes, where [`PIVOT_CHUNKS_MIN`] chunks of each are no more: a
/// guest that writes always leaves some.
pub const READY_BYTES: u64 = PIVOT_BYTES_MAX / 4;

/// The sizes of disks that are copied, in bytes.
pub type Sizes = BTreeMap<DiskId, u64>;

/// Those of a VM's disks.
pub fn sizes<'a>(disks: impl IntoIterator<Item = &'a DiskSpec>) -> Sizes {
    disks.into_iter().map(|disk| (disk.disk, disk.size)).collect()
}

/// How much the copies of disks of these sizes may lack together when they are as good as complete, in bytes. A filter slows a
/// guest until a copy lacks no more chunks than a pivot may take ([`pivot_bytes`]), and not further: of a large disk, where these
/// are few, less may never be left.
pub fn ready_bytes(sizes: impl IntoIterator<Item = u64>) -> u64 {
    let few = |size| copy_chunk(size).saturating_mul(PIVOT_CHUNKS_MIN);
    READY_BYTES.max(sizes.into_iter().map(few).fold(0, u64::saturating_add))
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
    use vmseal_api::id::VmId;

    use super::*;

    const SMALL: u64 = 100 << 30;
    /// Its chunks have 32 MiB.
    const LARGE: u64 = 5 << 40;

    #[test]
    fn a_copy_is_ready_while_its_guest_keeps_a_few_chunks_changed() {
        assert_eq!(ready_bytes([SMALL]), 16 << 20);
        assert_eq!(ready_bytes([2 << 40]), 32 << 20, "four chunks of 8 MiB");
        assert_eq!(ready_bytes([LARGE]), 128 << 20, "four chunks");
        assert_eq!(ready_bytes([LARGE, LARGE]), 256 << 20, "each has its own");
        for size in [SMALL, 300 << 30, 1 << 40, 2 << 40, LARGE, 62 << 40] {
            assert!(
                ready_bytes([size]) <= pivot_bytes(copy_chunk(size)),
                "{size}: it could not pivot"
            );
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
