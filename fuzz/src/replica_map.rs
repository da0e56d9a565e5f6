//! The map of a replica. What is read is what is written back; a chunk is clean only where the file's own
//! block says so under its checksum.

use vmseal_api::id::DiskId;
use vmseal_iofilter::layers::replicate::format::{BLOCK, Geometry, Image};

/// The disk and the size (9000 chunks, in three blocks) of the seeds.
const DISK: DiskId = DiskId(uuid::Uuid::from_bytes([7; 16]));
const SIZE: u64 = 9000 << 20;

/// See the module.
pub fn run(data: &[u8]) {
    let geometry = Geometry::new(DISK, SIZE);
    let Ok((image, damaged)) = Image::read(geometry, data) else { return };
    if image.bytes()[..BLOCK] != data[..BLOCK] {
        // That of the disk when it was shorter: it is rewritten for the disk as it is, where what is new is dirty.
        assert!(image.is_dirty(geometry.chunks() - 1));
        assert_eq!(Image::read(geometry, image.bytes()), Ok((image.clone(), 0)));
        return;
    }
    let own = |index: usize| data.get(index * BLOCK..(index + 1) * BLOCK);
    let fresh = Image::new(geometry);
    let taken = (1..image.blocks()).filter(|index| {
        let block = &image.bytes()[index * BLOCK..(index + 1) * BLOCK];
        let is_own = own(*index) == Some(block);
        assert!(is_own || block == &fresh.bytes()[index * BLOCK..(index + 1) * BLOCK]);
        is_own
    });
    assert!(taken.count() >= image.blocks() - 1 - damaged);
    assert_eq!(Image::read(geometry, image.bytes()), Ok((image.clone(), 0)));
}
