//! Whether a mirrored disk has pivoted to its copy, as its filter has written into the first block of the map
//! (docs/formats/replica-map.md).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crc::{CRC_64_XZ, Crc};
use vmseal_api::id::DiskId;

const BLOCK: usize = 512;

/// The part of the first block that says what the map is of.
const IDENTITY: usize = 40;

/// The content of a block without its checksum, in bytes.
const CONTENT: usize = BLOCK - 8;

const MAGIC: &[u8; 8] = b"vmsealMM";

const VERSION: u32 = 1;

static CRC: Crc<u64> = Crc::<u64>::new(&CRC_64_XZ);

/// What the first block of a map says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PivotMark {
    /// The disk's data is where it was.
    NotPivoted,
    /// The disk's data is in the copy.
    Pivoted,
    /// Nothing that can be believed.
    Unreadable,
}

/// Reads the first block of a map.
///
/// # Errors
/// Those of reading the file.
pub fn read(map: &File, disk: DiskId) -> io::Result<PivotMark> {
    let mut block = [0; BLOCK];
    let mut filled = 0;
    while filled < BLOCK {
        match map.read_at(&mut block[filled..], filled as u64)? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(mark_in(&block, disk))
}

fn mark_in(block: &[u8; BLOCK], disk: DiskId) -> PivotMark {
    // A filter that makes a map writes this block last.
    if block.iter().all(|byte| *byte == 0) {
        return PivotMark::NotPivoted;
    }
    let known = block[..8] == *MAGIC
        && block[8..12] == VERSION.to_le_bytes()
        && block[16..32] == *disk.0.as_bytes()
        && block[CONTENT..] == checksum(block).to_le_bytes();
    match block[IDENTITY] {
        0 if known => PivotMark::NotPivoted,
        1 if known => PivotMark::Pivoted,
        _ => PivotMark::Unreadable,
    }
}

/// The checksum of a first block: it is bound to the map and to the block's number.
fn checksum(block: &[u8; BLOCK]) -> u64 {
    let mut digest = CRC.digest();
    digest.update(&block[..IDENTITY]);
    digest.update(&0_u64.to_le_bytes());
    digest.update(&block[..CONTENT]);
    digest.finalize()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A block as a filter writes it.
    pub fn block(disk: DiskId, pivoted: u8) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        block[..8].copy_from_slice(MAGIC);
        block[8..12].copy_from_slice(&VERSION.to_le_bytes());
        block[12..16].copy_from_slice(&20_u32.to_le_bytes());
        block[16..32].copy_from_slice(disk.0.as_bytes());
        block[32..40].copy_from_slice(&(8_u64 << 20).to_le_bytes());
        block[IDENTITY] = pivoted;
        let sum = checksum(&block);
        block[CONTENT..].copy_from_slice(&sum.to_le_bytes());
        block
    }

    #[test]
    fn only_a_sound_block_of_this_disk_says_where_its_data_is() {
        let disk = DiskId::new();
        assert_eq!(mark_in(&[0; BLOCK], disk), PivotMark::NotPivoted);
        assert_eq!(mark_in(&block(disk, 0), disk), PivotMark::NotPivoted);
        assert_eq!(mark_in(&block(disk, 1), disk), PivotMark::Pivoted);
        assert_eq!(mark_in(&block(disk, 2), disk), PivotMark::Unreadable);
        assert_eq!(mark_in(&block(DiskId::new(), 1), disk), PivotMark::Unreadable);
        for bit in 0..BLOCK * 8 {
            let mut flipped = block(disk, 0);
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(mark_in(&flipped, disk), PivotMark::Unreadable, "bit {bit}");
        }
    }
}
