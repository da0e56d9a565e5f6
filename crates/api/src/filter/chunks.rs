//! The chunks by which the copy of a disk is followed, and how much it may lack when the disk is to pivot: for filters, which
//! copy, and for agents, which say when a copy is good enough.

/// The smallest chunk, in bytes: its copy takes as long as a few random writes, and less would make the map and
/// the tables beside it larger without copying much less, as writes come in neighbourhoods.
pub const COPY_CHUNK_MIN: u64 = 1 << 20;

/// The most chunks: tables of 4 MiB and a map of 34 KiB. Disks beyond 256 GiB have larger chunks.
pub const COPY_CHUNKS_MAX: u64 = 256 * 1024;

/// How much a copy may lack when the disk is to pivot, in bytes, where four chunks are no more: the guest waits while it is
/// copied, which is to take a fraction of a second.
pub const PIVOT_BYTES_MAX: u64 = 64 << 20;

/// How many chunks a copy may lack in any case when the disk is to pivot: a guest may always have changed some since the last
/// pass. Those of the largest disks, of 256 MiB, take a second or two.
pub const PIVOT_CHUNKS_MIN: u64 = 4;

/// The length of a chunk of a disk of `size` bytes, in bytes: a power of two. It is in the maps on datastores
/// (docs/formats/replica-map.md), so filters and agents of all versions have the same.
#[must_use]
pub fn copy_chunk(size: u64) -> u64 {
    let mut chunk = COPY_CHUNK_MIN;
    while size.div_ceil(chunk) > COPY_CHUNKS_MAX {
        chunk *= 2;
    }
    chunk
}

/// The most that a copy with chunks of `chunk` bytes may lack when the disk is to pivot, in bytes.
#[must_use]
pub fn pivot_bytes(chunk: u64) -> u64 {
    PIVOT_BYTES_MAX.max(chunk.saturating_mul(PIVOT_CHUNKS_MIN))
}

/// How much such a copy may lack at the end of a pass until its filter slows the guest no further, in bytes: half of what a pivot
/// may take, as the guest may change as much again until the next pass ends. The agent has to be content with what a pivot may
/// take: a filter need not come closer.
#[must_use]
pub fn slowed_bytes(chunk: u64) -> u64 {
    pivot_bytes(chunk) / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::DISK_SIZE_MAX;

    #[test]
    fn chunks_and_what_a_pivot_may_take_grow_with_the_disk() {
        for (size, chunk, pivot) in [
            (4096, 1 << 20, 64 << 20),
            (256 << 30, 1 << 20, 64 << 20),
            ((256 << 30) + 4096, 2 << 20, 64 << 20),
            (4 << 40, 16 << 20, 64 << 20),
            ((4 << 40) + 4096, 32 << 20, 128 << 20),
            (DISK_SIZE_MAX, 256 << 20, 1 << 30),
        ] {
            assert_eq!((copy_chunk(size), pivot_bytes(copy_chunk(size))), (chunk, pivot), "{size}");
            assert!(slowed_bytes(chunk) >= 2 * chunk, "{size}: a guest changes one at any time");
        }
        assert!(u64::MAX.div_ceil(copy_chunk(u64::MAX)) <= COPY_CHUNKS_MAX);
    }
}
