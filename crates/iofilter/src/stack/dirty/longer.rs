//! The dirty bitmaps that a file keeps of a disk that was shorter, for the same disk as it is now. Each calls dirty what it called dirty, and
//! all that is new: nothing is called clean of which nobody knows.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use vmseal_api::bitmap::file::{HEADER, IN_USE_AT, MAGIC, SHIFT_AT, SIZE_AT, slot_at, stride};
use vmseal_api::filter::{BITMAP_BYTES_MAX, BITMAP_GRANULE, BITMAPS_MAX};

use super::marks;

/// Granules per word.
const WORD: u64 = 64;

/// A slot that has a bitmap.
pub struct Slot {
    /// Which.
    pub number: usize,
    /// What the file says of it: its name, and since when it counts.
    pub about: Vec<u8>,
    /// Its bits, for the disk as it is now.
    pub bits: Vec<u8>,
}

/// The slots in use of the file of a disk that was shorter than `size` bytes, whose bitmaps have granules of 2 to the power `shift`
/// bytes and take `bytes` now; none where it is another file.
///
/// # Errors
/// Those of the file.
pub fn slots(file: &File, size: u64, shift: u32, bytes: usize) -> io::Result<Vec<Slot>> {
    let mut header = [0; HEADER];
    if file.metadata()?.len() < HEADER as u64 {
        return Ok(Vec::new());
    }
    file.read_exact_at(&mut header, 0)?;
    let Some(before) = Before::of(&header).filter(|it| it.size < size && it.shift <= shift) else {
        return Ok(Vec::new());
    };
    let stride_before = stride(before.bytes());
    if file.metadata()?.len() != (HEADER + BITMAPS_MAX * stride_before) as u64 {
        return Ok(Vec::new());
    }
    let mut slots = Vec::new();
    for number in 0..BITMAPS_MAX {
        let about = &header[slot_at(number)..slot_at(number + 1)];
        if word(about, IN_USE_AT) != Some(1) {
            continue;
        }
        let mut then = vec![0; before.bytes()];
        file.read_exact_at(&mut then, (HEADER + number * stride_before) as u64)?;
        let bits = before.longer(&then, size, shift, bytes);
        slots.push(Slot { number, about: about.to_vec(), bits });
    }
    Ok(slots)
}

/// The same bits of a disk that had `before` bytes and granules of 2 to the power `shift_before` bytes, for the disk when it has
/// `size` bytes and granules of 2 to the power `shift`, which are no smaller.
pub fn bits(then: &[u8], (before, shift_before): (u64, u32), (size, shift): (u64, u32)) -> Vec<u8> {
    let before = Before { size: before, shift: shift_before };
    before.longer(then, size, shift, marks::bytes(size, shift))
}

/// The disk as it was.
struct Before {
    size: u64,
    shift: u32,
}

impl Before {
    /// What the header of a file says of the disk; none where it is not one that a filter could have made.
    fn of(header: &[u8]) -> Option<Self> {
        let size = word(header, SIZE_AT)?;
        let shift = u32::try_from(word(header, SHIFT_AT)?).ok()?;
        let is_known = (BITMAP_GRANULE.trailing_zeros()..u64::BITS).contains(&shift);
        let this = Self { size, shift };
        let fits = header.starts_with(&MAGIC) && is_known && this.bytes() <= BITMAP_BYTES_MAX;
        fits.then_some(this)
    }

    fn bytes(&self) -> usize {
        marks::bytes(self.size, self.shift)
    }

    /// These bits, for the disk of now.
    fn longer(&self, then: &[u8], size: u64, shift: u32, bytes: usize) -> Vec<u8> {
        let mut now = vec![0_u64; bytes / 8];
        let mut mark = |granule: u64| {
            if let Some(word) = now.get_mut((granule / WORD) as usize) {
                *word |= 1 << (granule % WORD);
            }
        };
        let (words, _) = then.as_chunks::<8>();
        for (index, word) in (0_u64..).zip(words) {
            let mut left = u64::from_ne_bytes(*word);
            while left != 0 {
                let granule = index * WORD + u64::from(left.trailing_zeros());
                mark(granule >> (shift - self.shift));
                left &= left - 1;
            }
        }
        // The last granule of before, too, where it was no whole one.
        (self.size >> shift..size.div_ceil(1 << shift)).for_each(mark);
        now.iter().flat_map(|word| word.to_ne_bytes()).collect()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_ne_bytes)
}
