//! The dirty bitmaps in a file that filters have marked in (`vmseal_api::bitmap::file` says what is where), as the agent reads and changes
//! them while the VM is off: no filter has the file then.

use jiff::Timestamp;
use vmseal_api::bitmap::check_name;
use vmseal_api::bitmap::file::{
    HEADER, IN_USE_AT, MAGIC, NAME_AT, NAME_LENGTH_AT, SHIFT_AT, SINCE_AT, SIZE_AT, slot_at, stride,
};
use vmseal_api::filter::{BITMAP_GRANULE, BITMAP_NAME_MAX, BITMAPS_MAX, EXTENTS_MAX, Extent};

/// The length of a number in the file, in bytes.
const NUMBER: usize = 8;

/// How many granules one number has bits of.
const WORD: u64 = 64;

/// See the module.
#[derive(Debug)]
pub struct KeptBitmaps {
    file: Vec<u8>,
    size: u64,
    shift: u32,
}

impl KeptBitmaps {
    /// Those in the file of a disk of `size` bytes; none where it is that of a disk of another size.
    #[must_use]
    pub fn parse(file: Vec<u8>, size: u64) -> Option<Self> {
        let shift = u32::try_from(number(&file, SHIFT_AT)?).ok()?;
        let is_known = (BITMAP_GRANULE.trailing_zeros()..u64::BITS).contains(&shift);
        if !file.starts_with(&MAGIC) || number(&file, SIZE_AT)? != size || !is_known {
            return None;
        }
        let this = Self { file, size, shift };
        let length = HEADER + BITMAPS_MAX * stride(this.bytes()?);
        (this.file.len() == length).then_some(this)
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &[u8] {
        &self.file
    }

    /// The names of the bitmaps.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        (0..BITMAPS_MAX).filter_map(|slot| self.name(slot))
    }

    /// Removes a bitmap; returns whether it was there.
    pub fn remove(&mut self, name: &str) -> bool {
        let Some(slot) = self.find(name) else { return false };
        self.put(slot_at(slot) + IN_USE_AT, &0_u64.to_ne_bytes());
        true
    }

    /// Starts a bitmap, all clean; one of this name stays as it is. Returns false where there is no room for another one.
    pub fn start(&mut self, name: &str, since: Timestamp) -> bool {
        if self.find(name).is_some() {
            return true;
        }
        let free = (0..BITMAPS_MAX).find(|slot| self.name(*slot).is_none());
        let Some((slot, bytes)) = free.zip(self.bytes()).filter(|_| check_name(name).is_ok())
        else {
            return false;
        };
        let (at, words) = (slot_at(slot), words_at(slot, bytes));
        self.put(words, &vec![0; bytes]);
        self.put(at + NAME_AT, name.as_bytes());
        self.put(at + NAME_LENGTH_AT, &(name.len() as u64).to_ne_bytes());
        // As the filter has it: a clock that is before 1970 gives 1970.
        let since = u64::try_from(since.as_nanosecond()).unwrap_or(0);
        self.put(at + SINCE_AT, &since.to_ne_bytes());
        self.put(at + IN_USE_AT, &1_u64.to_ne_bytes());
        true
    }

    /// What a bitmap calls dirty, as extents in order; none without the bitmap, and of one with more than [`EXTENTS_MAX`].
    #[must_use]
    pub fn extents(&self, name: &str) -> Option<Vec<u8>> {
        let (slot, bytes) = self.find(name).zip(self.bytes())?;
        let words = self.file.get(words_at(slot, bytes)..)?.get(..bytes)?;
        let granules = self.size.div_ceil(1 << self.shift);
        let is_dirty = |granule: u64| {
            let word = number(words, (granule / WORD) as usize * NUMBER);
            word.is_none_or(|word| word >> (granule % WORD) & 1 == 1)
        };
        let (mut extents, mut begun) = (Vec::new(), None);
        for granule in 0..=granules {
            match (begun, granule < granules && is_dirty(granule)) {
                (None, true) => begun = Some(granule << self.shift),
                (Some(offset), false) => {
                    let length = (granule << self.shift).min(self.size) - offset;
                    extents.extend(Extent { offset, length }.to_bytes());
                    begun = None;
                }
                _ => {}
            }
        }
        (extents.len() <= EXTENTS_MAX * Extent::LEN).then_some(extents)
    }

    fn find(&self, name: &str) -> Option<usize> {
        (0..BITMAPS_MAX).find(|slot| self.name(*slot) == Some(name))
    }

    /// The name of the bitmap that a slot has; none where a filter finds none either.
    fn name(&self, slot: usize) -> Option<&str> {
        let at = slot_at(slot);
        if number(&self.file, at + IN_USE_AT)? != 1 {
            return None;
        }
        let length = usize::try_from(number(&self.file, at + NAME_LENGTH_AT)?).ok()?;
        let name = self.file.get(at + NAME_AT..)?.get(..length)?;
        let name = str::from_utf8(name).ok().filter(|_| length <= BITMAP_NAME_MAX)?;
        check_name(name).is_ok().then_some(name)
    }

    /// How many bytes the bits of one bitmap take.
    fn bytes(&self) -> Option<usize> {
        let words = self.size.div_ceil(1 << self.shift).div_ceil(WORD);
        usize::try_from(words).ok()?.checked_mul(NUMBER)
    }

    /// All places are in the file: its length was checked.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.file[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// Where the bits of a slot are, which take `bytes`.
fn words_at(slot: usize, bytes: usize) -> usize {
    HEADER + slot * stride(bytes)
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_ne_bytes)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Of a disk of 70 granules and a rest, without a bitmap.
    pub const SIZE: u64 = 70 * BITMAP_GRANULE + 4096;

    /// The file of such a disk.
    pub fn empty() -> Vec<u8> {
        let mut file = vec![0; HEADER + BITMAPS_MAX * stride(2 * NUMBER)];
        file[..MAGIC.len()].copy_from_slice(&MAGIC);
        file[SIZE_AT..][..NUMBER].copy_from_slice(&SIZE.to_ne_bytes());
        let shift = u64::from(BITMAP_GRANULE.trailing_zeros());
        file[SHIFT_AT..][..NUMBER].copy_from_slice(&shift.to_ne_bytes());
        file
    }

    fn started(bitmaps: &mut KeptBitmaps, name: &str) -> bool {
        bitmaps.start(name, Timestamp::UNIX_EPOCH)
    }

    fn dirty(bitmaps: &KeptBitmaps, name: &str) -> Vec<(u64, u64)> {
        let extents = bitmaps.extents(name).unwrap();
        let (parts, rest) = extents.as_chunks::<{ Extent::LEN }>();
        assert!(rest.is_empty());
        let extent = |part: &[u8; Extent::LEN]| Extent::from_bytes(*part).unwrap();
        parts.iter().map(extent).map(|it| (it.offset, it.length)).collect()
    }

    #[test]
    fn bitmaps_are_started_clean_read_and_removed() {
        let mut bitmaps = KeptBitmaps::parse(empty(), SIZE).unwrap();
        assert!(bitmaps.extents("one").is_none());
        assert!(["one", "two"].into_iter().all(|name| started(&mut bitmaps, name)));
        // What a filter marks: granules 0, 63, 64 and the last one, of the second slot.
        let words = words_at(1, 2 * NUMBER);
        bitmaps.put(words, &(1_u64 | 1 << 63).to_ne_bytes());
        bitmaps.put(words + NUMBER, &(1_u64 | 1 << 6).to_ne_bytes());
        let at = |granule| granule * BITMAP_GRANULE;
        let two = [(0, at(1)), (at(63), at(2)), (at(70), 4096)];
        assert!(started(&mut bitmaps, "two"), "it is there");
        assert_eq!(dirty(&bitmaps, "two"), two);
        assert!(dirty(&bitmaps, "one").is_empty());

        let again = KeptBitmaps::parse(bitmaps.file().to_vec(), SIZE).unwrap();
        assert_eq!(again.names().collect::<Vec<_>>(), ["one", "two"]);
        assert_eq!(dirty(&again, "two"), two);

        assert!(bitmaps.remove("two") && !bitmaps.remove("two"));
        assert!(started(&mut bitmaps, "three"));
        assert!(dirty(&bitmaps, "three").is_empty(), "a slot that is used again begins clean");
        assert!(started(&mut bitmaps, "four") && started(&mut bitmaps, "five"));
        assert!(!started(&mut bitmaps, "six"), "there is no room for it");
    }

    #[test]
    fn the_file_of_another_disk_is_not_used() {
        assert!(KeptBitmaps::parse(empty(), SIZE + BITMAP_GRANULE).is_none());
        assert!(KeptBitmaps::parse(empty()[..HEADER].to_vec(), SIZE).is_none());
        assert!(KeptBitmaps::parse(Vec::new(), SIZE).is_none());
        for shift in [0_u64, 64, u64::MAX] {
            let mut file = empty();
            file[SHIFT_AT..][..NUMBER].copy_from_slice(&shift.to_ne_bytes());
            assert!(KeptBitmaps::parse(file, SIZE).is_none(), "{shift}");
        }
    }
}
