//! The map on disk: which chunks may differ from the copy, a replica or a mirror's (docs/formats/replica-map.md).
//!
//! ```text
//!  block 0   identity: magic, version, chunk, disk, size,      each 512 bytes, the last 8 of which
//!            and whether the disk has pivoted to a mirror      are a checksum that is bound to the
//!  block 1   up to when the copy has everything                map and to the block's place in it
//!  block 2…  4032 chunks each, one bit a chunk
//! ```
//! A block of bits with a wrong checksum means that all of its chunks may differ: it was torn, zeroed or
//! damaged. A faulty first block means that all chunks of the disk may differ; but that of a mirror must be sound, or
//! all zeroes: the disk may have pivoted, and then its former place is out of date.

use crc::{CRC_64_XZ, Crc, Table};
use vmseal_api::filter::{COPY_CHUNKS_MAX, copy_chunk, pivot_bytes, slowed_bytes};
use vmseal_api::id::DiskId;

use crate::layers::replicate::chunks::{NEVER, Span};

/// The unit of writing, in bytes: storage writes it whole. If it is torn nevertheless, its checksum shows it.
pub const BLOCK: usize = 512;

/// The content of a block without its checksum, in bytes.
const CONTENT: usize = BLOCK - 8;

/// How many chunks a block has bits for.
const BITS: usize = CONTENT * 8;

/// Blocks before the bits.
const BEFORE: usize = 2;

const VERSION: u32 = 1;

/// Where block 0 says that the disk has pivoted: 1 there.
const PIVOTED: usize = 40;

static CRC: Crc<u64, Table<16>> = Crc::<u64, Table<16>>::new(&CRC_64_XZ);

/// What a copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To follow the disk for good.
    Replica,
    /// To be what the disk pivots to.
    Mirror,
}

impl Purpose {
    fn magic(self) -> [u8; 8] {
        match self {
            Self::Replica => *b"vmsealRM",
            Self::Mirror => *b"vmsealMM",
        }
    }
}

/// How a disk is divided into chunks, which disk it is, and what its copy is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    purpose: Purpose,
    disk: DiskId,
    size: u64,
    /// A chunk's length is 2 to this power.
    shift: u32,
}

impl Geometry {
    /// Of a replica of a disk of `size` bytes, which must not be 0.
    #[must_use]
    pub fn new(disk: DiskId, size: u64) -> Self {
        Self { purpose: Purpose::Replica, disk, size, shift: copy_chunk(size).trailing_zeros() }
    }

    /// The same of a mirror.
    #[must_use]
    pub fn of_mirror(self) -> Self {
        Self { purpose: Purpose::Mirror, ..self }
    }

    /// That of a map with this first block, if it is of this disk's replica before the disk grew. The copy of a mirror does not grow.
    fn before_it_grew(self, first: &[u8]) -> Option<Self> {
        let shift = u32::from_le_bytes(*first.get(12..)?.first_chunk()?);
        let size = u64::from_le_bytes(*first.get(32..)?.first_chunk()?);
        // Chunks get longer with the disk, and never shorter.
        let fits = (1..self.size).contains(&size) && shift <= self.shift;
        if self.purpose != Purpose::Replica || !fits || size.div_ceil(1 << shift) > COPY_CHUNKS_MAX
        {
            return None;
        }
        let shorter = Self { size, shift, ..self };
        let mut block = [0; BLOCK];
        block[..40].copy_from_slice(&shorter.identity());
        (first[..CONTENT] == block[..CONTENT]).then_some(shorter)
    }

    /// What the copy is for.
    #[must_use]
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// The same with chunks of 2 to the power of `shift` bytes: for tests, whose disks are small.
    #[must_use]
    pub fn with_shift(self, shift: u32) -> Self {
        Self { shift, ..self }
    }

    /// The disk's size in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The most chunks that a copy may lack when the disk is to pivot ([`pivot_bytes`]).
    #[must_use]
    pub fn pivot_chunks(&self) -> u64 {
        pivot_bytes(self.chunk()) >> self.shift
    }

    /// The most chunks that a copy may lack at the end of a pass until its guest is slowed no further ([`slowed_bytes`]).
    #[must_use]
    pub fn slowed_chunks(&self) -> u64 {
        slowed_bytes(self.chunk()) >> self.shift
    }

    /// A chunk's length in bytes.
    #[must_use]
    pub fn chunk(&self) -> u64 {
        1 << self.shift
    }

    /// How many chunks there are.
    #[must_use]
    pub fn chunks(&self) -> usize {
        usize::try_from(self.size.div_ceil(1 << self.shift)).unwrap_or(usize::MAX)
    }

    /// The chunks that a range of the disk touches; `length` must not be 0.
    #[must_use]
    pub fn span(&self, offset: u64, length: u64) -> Span {
        let chunk = |at: u64| (at >> self.shift) as usize;
        let last = self.chunks() - 1;
        let end = offset.saturating_add(length.max(1)) - 1;
        Span { first: chunk(offset).min(last), last: chunk(end).min(last) }
    }

    /// All chunks.
    #[must_use]
    pub fn all(&self) -> Span {
        Span { first: 0, last: self.chunks() - 1 }
    }

    /// Where a chunk begins and ends on the disk, in bytes.
    #[must_use]
    pub fn range(&self, chunk: usize) -> (u64, u64) {
        let start = (chunk as u64) << self.shift;
        (start, (start + self.chunk()).min(self.size))
    }

    /// The length of the map, in bytes.
    #[must_use]
    pub fn map_bytes(&self) -> usize {
        (BEFORE + self.chunks().div_ceil(BITS)) * BLOCK
    }

    fn identity(&self) -> [u8; 40] {
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&self.purpose.magic());
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.shift.to_le_bytes());
        bytes[16..32].copy_from_slice(self.disk.0.as_bytes());
        bytes[32..].copy_from_slice(&self.size.to_le_bytes());
        bytes
    }

    fn checksum(&self, index: usize, content: &[u8]) -> [u8; 8] {
        checksum(&self.identity(), index, content)
    }
}

fn checksum(identity: &[u8], index: usize, content: &[u8]) -> [u8; 8] {
    let mut digest = CRC.digest();
    digest.update(identity);
    digest.update(&(index as u64).to_le_bytes());
    digest.update(content);
    digest.finalize().to_le_bytes()
}

/// A map as stored in its file, or about to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    geometry: Geometry,
    bytes: Vec<u8>,
}

/// Why a map is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Foreign {
    /// No map at all, or one that was invalidated.
    #[error("it is new, void or damaged")]
    NoMap,
    /// A sound map of another disk or version, or of the disk when it was longer.
    #[error("it is of another disk, of another size, or of another version of vmseal")]
    Other,
    /// A mirror's that does not say whether the disk has pivoted.
    #[error("it is damaged, and does not say which place has the disk's data")]
    Damaged,
}

impl Image {
    /// Of a replica whose content is unknown.
    #[must_use]
    pub fn new(geometry: Geometry) -> Self {
        let mut image = Self { geometry, bytes: vec![0; geometry.map_bytes()] };
        image.bytes[..40].copy_from_slice(&geometry.identity());
        image.set(geometry.all(), true);
        (0..image.blocks()).for_each(|index| image.seal(index));
        image
    }

    /// Reads a map from a file's bytes; also says how many blocks are damaged. All chunks of those are dirty.
    ///
    /// # Errors
    /// [`Foreign`].
    pub fn read(geometry: Geometry, file: &[u8]) -> Result<(Self, usize), Foreign> {
        let mut image = Self::new(geometry);
        let first = file.get(..BLOCK).ok_or(Foreign::NoMap)?;
        let sound = first[CONTENT..] == checksum(&first[..40], 0, &first[..CONTENT]);
        if first[..8] != geometry.purpose.magic() || !sound {
            let damaged =
                geometry.purpose == Purpose::Mirror && first.iter().any(|byte| *byte != 0);
            return Err(if damaged { Foreign::Damaged } else { Foreign::NoMap });
        }
        if geometry.purpose == Purpose::Mirror && first[PIVOTED] == 1 {
            image.set_pivoted(true);
        }
        if first != &image.bytes[..BLOCK] {
            let shorter = geometry.before_it_grew(first).ok_or(Foreign::Other)?;
            let (former, damaged) = Self::read(shorter, file)?;
            return Ok((former.longer(geometry), damaged));
        }
        let mut damaged = 0;
        for index in 1..image.blocks() {
            let range = index * BLOCK..(index + 1) * BLOCK;
            let sound = file
                .get(range.clone())
                .filter(|block| block[CONTENT..] == geometry.checksum(index, &block[..CONTENT]));
            match sound {
                Some(block) => image.bytes[range].copy_from_slice(block),
                None => damaged += 1,
            }
        }
        Ok((image, damaged))
    }

    /// The map of the same replica after the disk has grown: a chunk is clean where all of it is in chunks that were, and what is
    /// new is dirty.
    fn longer(&self, geometry: Geometry) -> Self {
        let former = self.geometry;
        let mut image = Self::new(geometry);
        for chunk in 0..geometry.chunks() {
            let (start, end) = geometry.range(chunk);
            let was_there = end <= former.size;
            let before = former.span(start, end - start);
            if was_there && !(before.first..=before.last).any(|chunk| self.is_dirty(chunk)) {
                image.set(Span { first: chunk, last: chunk }, false);
            }
        }
        (0..image.blocks()).for_each(|index| image.seal(index));
        image.set_up_to(self.up_to());
        image
    }

    /// Whether the disk has pivoted to the copy.
    #[must_use]
    pub fn is_pivoted(&self) -> bool {
        self.bytes[PIVOTED] == 1
    }

    /// Changes that; block 0 is sealed.
    pub fn set_pivoted(&mut self, pivoted: bool) {
        self.bytes[PIVOTED] = u8::from(pivoted);
        self.seal(0);
    }

    /// How many blocks there are.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.bytes.len() / BLOCK
    }

    /// The bytes of blocks with correct checksums.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Updates the checksum of a block.
    pub fn seal(&mut self, index: usize) {
        let (content, checksum) =
            self.bytes[index * BLOCK..(index + 1) * BLOCK].split_at_mut(CONTENT);
        checksum.copy_from_slice(&self.geometry.checksum(index, content));
    }

    /// Sets the chunks' bits; returns the blocks that have changed, if any, which must be sealed.
    pub fn set(&mut self, span: Span, dirty: bool) -> Option<(usize, usize)> {
        let mut changed: Option<(usize, usize)> = None;
        for chunk in span.first..=span.last {
            let (block, byte, bit) = place(chunk);
            let old = self.bytes[byte];
            let new = if dirty { old | bit } else { old & !bit };
            if new != old {
                self.bytes[byte] = new;
                changed = Some((changed.map_or(block, |(first, _)| first), block));
            }
        }
        changed
    }

    /// Whether a chunk may differ.
    #[must_use]
    pub fn is_dirty(&self, chunk: usize) -> bool {
        let (_, byte, bit) = place(chunk);
        self.bytes[byte] & bit != 0
    }

    /// Up to when the replica has every change, in milliseconds since 1970, or [`NEVER`].
    #[must_use]
    pub fn up_to(&self) -> u64 {
        let bytes = self.bytes[BLOCK..].first_chunk().copied();
        bytes.map_or(NEVER, u64::from_le_bytes)
    }

    /// Changes that time; the block is sealed.
    pub fn set_up_to(&mut self, up_to: u64) {
        self.bytes[BLOCK..BLOCK + 8].copy_from_slice(&up_to.to_le_bytes());
        self.seal(1);
    }
}

/// The block, byte and bit of a chunk.
fn place(chunk: usize) -> (usize, usize, u8) {
    let (block, within) = (BEFORE + chunk / BITS, chunk % BITS);
    (block, block * BLOCK + within / 8, 1 << (within % 8))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn disk(byte: u8) -> DiskId {
        let pair = format!("{byte:02x}");
        let digits = |count: usize| pair.repeat(count);
        let groups = [digits(4), digits(2), digits(2), digits(2), digits(6)];
        groups.join("-").parse().unwrap()
    }

    /// Maps on disks must stay readable: these bytes change only with the version.
    #[test]
    fn a_map_is_these_bytes() {
        let geometry = Geometry::new(disk(7), 5 << 20);
        let mut image = Image::new(geometry);
        image.set(Span { first: 1, last: 2 }, false);
        image.seal(2);
        image.set_up_to(0x0102_0304_0506);
        let bytes = image.bytes();
        assert_eq!(bytes.len(), 3 * BLOCK);
        let mut expected = vec![0; 3 * BLOCK];
        expected[..8].copy_from_slice(b"vmsealRM");
        expected[8..16].copy_from_slice(&[1, 0, 0, 0, 20, 0, 0, 0]);
        expected[16..32].fill(7);
        expected[32..40].copy_from_slice(&[0, 0, 0x50, 0, 0, 0, 0, 0]);
        expected[BLOCK..BLOCK + 6].copy_from_slice(&[6, 5, 4, 3, 2, 1]);
        expected[2 * BLOCK] = 0b1_1001;
        let checksums: [[u8; 8]; 3] = GOLDEN;
        for (block, checksum) in expected.chunks_mut(BLOCK).zip(checksums) {
            block[CONTENT..].copy_from_slice(&checksum);
        }
        for (index, (found, wanted)) in bytes.chunks(BLOCK).zip(expected.chunks(BLOCK)).enumerate()
        {
            assert_eq!(found, wanted, "block {index}: {:02x?}", &found[CONTENT..]);
        }
    }

    /// The checksums: CRC-64/XZ of the first 40 bytes of the map, the number of the block, and its first 504 bytes.
    const GOLDEN: [[u8; 8]; 3] = [
        [0xb3, 0x6f, 0x53, 0x5e, 0x94, 0xb8, 0x36, 0x8f],
        [0x80, 0x14, 0xab, 0x07, 0x1f, 0x20, 0x40, 0xf0],
        [0x87, 0xfe, 0xc1, 0x97, 0x8c, 0x55, 0x1b, 0x9f],
    ];

    #[test]
    fn chunks_are_of_a_size_that_bounds_the_map() {
        let chunk = |size| Geometry::new(disk(1), size).chunk();
        assert_eq!((chunk(4096), chunk(256 << 30)), (1 << 20, 1 << 20));
        assert_eq!((chunk((256 << 30) + 4096), chunk(64 << 40)), (2 << 20, 256 << 20));
        let pivot = |size| Geometry::new(disk(1), size).pivot_chunks();
        assert_eq!((pivot(4096), pivot(1 << 40), pivot(5 << 40), pivot(64 << 40)), (64, 16, 4, 4));
        let slowed = |size| Geometry::new(disk(1), size).slowed_chunks();
        assert_eq!((slowed(4096), slowed(1 << 40), slowed(5 << 40)), (32, 8, 2));
        let largest = Geometry::new(disk(1), i64::MAX as u64 / 2);
        assert!(largest.map_bytes() <= 34 * 1024, "{}", largest.map_bytes());
        let geometry = Geometry::new(disk(1), (3 << 20) + 4096);
        assert_eq!((geometry.chunks(), geometry.map_bytes()), (4, 3 * BLOCK));
        assert_eq!(geometry.range(3), (3 << 20, (3 << 20) + 4096));
        assert_eq!(geometry.span((1 << 20) - 512, 512), Span { first: 0, last: 0 });
        assert_eq!(geometry.span((1 << 20) - 512, 1024), Span { first: 0, last: 1 });
        assert_eq!(geometry.span(0, geometry.size()), geometry.all());
    }

    #[test]
    fn a_map_of_another_disk_size_or_place_is_not_believed() {
        let geometry = Geometry::new(disk(1), 9000 << 20);
        let mut clean = Image::new(geometry);
        clean.set(geometry.all(), false);
        (0..clean.blocks()).for_each(|index| clean.seal(index));
        let read = |bytes: &[u8]| Image::read(geometry, bytes);
        assert_eq!(read(clean.bytes()), Ok((clean.clone(), 0)));
        let others = [
            Geometry::new(disk(2), geometry.size()),
            Geometry::new(disk(1), geometry.size() - (1 << 20)),
            geometry.with_shift(21),
        ];
        for other in others {
            assert_eq!(Image::read(other, clean.bytes()), Err(Foreign::Other), "{other:?}");
        }
        for nothing in [&[][..], &[0; 100], &[0; 4096], &[0xff; 4096]] {
            assert_eq!(read(nothing), Err(Foreign::NoMap));
        }
        let swapped = [&clean.bytes()[..2 * BLOCK], &clean.bytes()[3 * BLOCK..4 * BLOCK]].concat();
        let (image, damaged) = read(&swapped).unwrap();
        assert_eq!(damaged, clean.blocks() - 2, "a block in another one's place, and missing ones");
        assert!((0..geometry.chunks()).all(|chunk| image.is_dirty(chunk)));
    }

    #[test]
    fn the_map_of_a_disk_that_grew_goes_on_and_what_is_new_is_dirty() {
        let dirty = |image: &Image, geometry: Geometry| -> Vec<usize> {
            (0..geometry.chunks()).filter(|chunk| image.is_dirty(*chunk)).collect()
        };
        // Its last chunk is half a one, and becomes a whole one.
        let former = Geometry::new(disk(1), (9 << 20) + (1 << 19));
        let mut image = Image::new(former);
        image.set(former.all(), false);
        image.set(Span { first: 2, last: 2 }, true);
        (0..image.blocks()).for_each(|index| image.seal(index));
        image.set_up_to(77);
        let longer = Geometry::new(disk(1), 12 << 20);
        let (found, damaged) = Image::read(longer, image.bytes()).unwrap();
        assert_eq!((dirty(&found, longer), damaged, found.up_to()), (vec![2, 9, 10, 11], 0, 77));
        // What is rewritten for the longer disk is a map of that, and of no other.
        assert_eq!(Image::read(longer, found.bytes()), Ok((found.clone(), 0)));
        // Chunks that are twice as long: one is clean where both were.
        let doubled = longer.with_shift(21);
        let (coarser, _) = Image::read(doubled, image.bytes()).unwrap();
        assert_eq!(dirty(&coarser, doubled), [1, 4, 5]);
        // Killed while it was rewritten: the bits are of the longer disk, the first block is not.
        let torn = [&image.bytes()[..BLOCK], &found.bytes()[BLOCK..]].concat();
        let (found, _) = Image::read(longer, &torn).unwrap();
        assert_eq!((dirty(&found, longer).len(), found.up_to()), (longer.chunks(), NEVER));
        // It says where the disk's data is, and does not grow.
        let mirror = Image::new(former.of_mirror());
        assert_eq!(Image::read(longer.of_mirror(), mirror.bytes()), Err(Foreign::Other));
    }

    proptest! {
        /// Never less dirty than it was, whatever was torn, lost or changed.
        #[test]
        fn damage_makes_chunks_dirty_and_never_clean(
            spans in prop::collection::vec((0usize..9000, 0usize..3000, any::<bool>()), 0..20),
            damage in prop::collection::vec((0usize..5 * BLOCK, 1u8..), 0..4),
            cut in prop::option::of(0usize..5 * BLOCK),
        ) {
            let geometry = Geometry::new(disk(1), 9000 << 20);
            let mut image = Image::new(geometry);
            for (first, more, dirty) in spans {
                let last = (first + more).min(8999);
                image.set(Span { first, last }, dirty);
            }
            (0..image.blocks()).for_each(|index| image.seal(index));
            image.set_up_to(77);
            let mut bytes = image.bytes().to_vec();
            damage.iter().for_each(|(at, with)| bytes[*at] ^= with);
            bytes.truncate(cut.unwrap_or(usize::MAX));
            if let Ok((found, _)) = Image::read(geometry, &bytes) {
                for chunk in 0..geometry.chunks() {
                    prop_assert!(found.is_dirty(chunk) || !image.is_dirty(chunk), "chunk {}", chunk);
                }
                prop_assert!([77, NEVER].contains(&found.up_to()));
            }
        }
    }
}
