//! What the guest's virtio-blk driver sees of the disk: features and configuration space
//! (virtio 1.2, §5.2.3 and §5.2.4).

use vhost::vhost_user::message::VhostUserVirtioFeatures;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ,
    VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

/// The largest ring we serve; QEMU allows as much.
pub const RING_MAX: u16 = 1024;

/// The most data segments of a request: QEMU's default ring of 128, less header and status.
const SEGMENTS: u32 = 126;

/// The longest discard, in 512-byte sectors: 1 GiB.
pub const DISCARD_SECTORS_MAX: u32 = 2 * 1024 * 1024;

/// The longest write-zeroes, in 512-byte sectors: 32 MiB, as it may have to be encrypted and written.
pub const WRITE_ZEROES_SECTORS_MAX: u32 = 64 * 1024;

/// 4096-byte sectors, in 512-byte units: the best alignment of discards.
const SECTOR_UNITS: u32 = 8;

/// log2 of [`SECTOR_UNITS`]: a physical block is 2^3 logical ones.
const PHYSICAL_EXPONENT: u8 = 3;

/// The length of the part of `struct virtio_blk_config` that we fill; the rest reads as zeroes.
const FILLED: usize = 60;

/// The longest configuration space a front end may ask for, in bytes.
pub const SPACE: usize = 256;

/// The bit by which a backend says that it can log what it writes into the guest's memory (vhost-user, "Migration").
const VHOST_F_LOG_ALL: u32 = 26;

/// The features offered for a disk.
#[must_use]
pub fn features(read_only: bool, queues: u16) -> u64 {
    let mut bits = vec![
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_F_VERSION_1,
        VIRTIO_RING_F_EVENT_IDX,
        VIRTIO_RING_F_INDIRECT_DESC,
    ];
    if read_only {
        bits.push(VIRTIO_BLK_F_RO);
    } else {
        bits.extend([VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_WRITE_ZEROES]);
    }
    if queues > 1 {
        bits.push(VIRTIO_BLK_F_MQ);
    }
    // Without it QEMU would neither move nor save the memory of any guest.
    bits.push(VHOST_F_LOG_ALL);
    let offered = bits.iter().fold(0, |all, bit| all | 1u64 << bit);
    offered | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
}

/// Whether a driver that acknowledged these features sends flushes.
#[must_use]
pub fn flushes(acknowledged: u64) -> bool {
    acknowledged & (1 << VIRTIO_BLK_F_FLUSH) != 0
}

/// Whether what is written into the guest's memory is to be logged.
#[must_use]
pub fn logs(acknowledged: u64) -> bool {
    acknowledged & (1 << VHOST_F_LOG_ALL) != 0
}

/// Whether logging is all that distinguishes two sets of features.
#[must_use]
pub fn differ_in_logging(one: u64, other: u64) -> bool {
    one ^ other == 1 << VHOST_F_LOG_ALL
}

/// The configuration space of a disk of `size` bytes.
#[must_use]
pub fn space(size: u64, queues: u16) -> [u8; SPACE] {
    let mut space = [0; SPACE];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(size / 512).to_le_bytes()); // capacity
    put(12, &SEGMENTS.to_le_bytes()); // seg_max
    put(20, &512u32.to_le_bytes()); // blk_size
    put(24, &[PHYSICAL_EXPONENT]);
    put(26, &(SECTOR_UNITS as u16).to_le_bytes()); // min_io_size, in logical blocks
    put(32, &[1]); // writeback
    put(34, &queues.to_le_bytes()); // num_queues
    put(36, &DISCARD_SECTORS_MAX.to_le_bytes());
    put(40, &1u32.to_le_bytes()); // max_discard_seg
    put(44, &SECTOR_UNITS.to_le_bytes()); // discard_sector_alignment
    put(48, &WRITE_ZEROES_SECTORS_MAX.to_le_bytes());
    put(52, &1u32.to_le_bytes()); // max_write_zeroes_seg
    put(56, &[1]); // write_zeroes_may_unmap
    debug_assert!(space[FILLED..].iter().all(|&byte| byte == 0));
    space
}

#[cfg(test)]
mod tests {
    use virtio_bindings::virtio_blk::virtio_blk_config;

    use super::*;

    #[test]
    fn the_space_is_laid_out_as_the_kernels_structure() {
        let space = space(1 << 40, 4);
        // SAFETY: the structure is plain integers, shorter than the space, read unaligned.
        let config: virtio_blk_config = unsafe { std::ptr::read_unaligned(space.as_ptr().cast()) };
        assert_eq!({ config.capacity }, (1 << 40) / 512);
        assert_eq!(({ config.seg_max }, { config.blk_size }), (126, 512));
        assert_eq!((config.physical_block_exp, { config.min_io_size }), (3, 8));
        assert_eq!((config.wce, { config.num_queues }), (1, 4));
        assert_eq!({ config.max_discard_sectors }, DISCARD_SECTORS_MAX);
        assert_eq!(({ config.max_discard_seg }, { config.discard_sector_alignment }), (1, 8));
        assert_eq!({ config.max_write_zeroes_sectors }, WRITE_ZEROES_SECTORS_MAX);
        assert_eq!(({ config.max_write_zeroes_seg }, config.write_zeroes_may_unmap), (1, 1));
    }

    #[test]
    fn a_read_only_disk_offers_nothing_that_changes_it() {
        let bit = |feature: u32| 1u64 << feature;
        let read_only = features(true, 1);
        assert_ne!(read_only & bit(VIRTIO_BLK_F_RO), 0);
        assert_eq!(read_only & (bit(VIRTIO_BLK_F_DISCARD) | bit(VIRTIO_BLK_F_MQ)), 0);
        assert_eq!(features(false, 2) & bit(VIRTIO_BLK_F_RO), 0);
    }
}
