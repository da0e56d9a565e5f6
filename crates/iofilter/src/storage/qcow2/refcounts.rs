//! A refcount block: packed numbers of 1 to 64 bits (QEMU's docs/interop/qcow2.txt, "Host cluster
//! management"). Those of less than a byte begin at the least significant bit; the others are big-endian.

/// How many refcounts of `1 << order` bits a block of so many bytes has.
pub(super) fn count(bytes: usize, order: u32) -> usize {
    (bytes * 8) >> order
}

/// The refcount at `index`.
pub(super) fn get(block: &[u8], order: u32, index: usize) -> u64 {
    if order < 3 {
        let (bits, bit) = (1 << order, index << order);
        return u64::from(block[bit / 8] >> (bit % 8)) & ((1 << bits) - 1);
    }
    let width = 1 << (order - 3);
    let field = &block[index * width..][..width];
    field.iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn set(block: &mut [u8], order: u32, index: usize, value: u64) {
    if order < 3 {
        let (bits, bit) = (1 << order, index << order);
        let mask = ((1u16 << bits) - 1) as u8;
        let byte = &mut block[bit / 8];
        *byte = *byte & !(mask << (bit % 8)) | (value as u8 & mask) << (bit % 8);
        return;
    }
    let width = 1 << (order - 3);
    block[index * width..][..width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
}

/// The block that must be in the file instead of `disk` so that no refcount is less than in `exact`, and the index
/// after which nothing changes; none if all are high enough. From the first raised one on, `reserve` free clusters are
/// counted, too: they will be used next, and then need no other write of the block.
pub(super) fn raised(
    disk: &[u8],
    exact: &[u8],
    order: u32,
    reserve: usize,
) -> Option<(Vec<u8>, usize)> {
    let all = 0..count(disk.len(), order);
    let low = |&index: &usize| get(disk, order, index) < get(exact, order, index);
    let first = if disk == exact { None } else { all.clone().find(low) }?;
    let (mut block, mut left, mut end) = (disk.to_vec(), reserve, first);
    for index in first..all.end {
        let (now, wanted) = (get(disk, order, index), get(exact, order, index));
        if wanted > now {
            set(&mut block, order, index, wanted);
            end = index + 1;
        } else if now == 0 && left > 0 {
            set(&mut block, order, index, 1);
            (left, end) = (left - 1, index + 1);
        }
    }
    Some((block, end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_every_width_keep_their_neighbours() {
        for order in 0..=6u32 {
            let mut block = vec![0; 512];
            let bits = 1u32 << order;
            let most = u64::MAX >> (64 - bits);
            assert_eq!(count(block.len(), order), 4096 >> order);
            for index in [0, 3, 5, count(block.len(), order) - 1] {
                set(&mut block, order, index, most);
                assert_eq!(get(&block, order, index), most, "{order}");
            }
            assert_eq!(get(&block, order, 4), 0, "{order}");
            set(&mut block, order, 3, 0);
            assert_eq!((get(&block, order, 3), get(&block, order, 5)), (0, most), "{order}");
        }
        // As QEMU writes them.
        assert_eq!(get(&[0b0000_0100], 0, 2), 1);
        assert_eq!(get(&[0x12, 0x34], 4, 0), 0x1234);
    }

    #[test]
    fn nothing_is_lowered_and_the_next_ones_are_reserved() {
        let disk = [1, 0, 2, 0, 0, 0, 0, 0];
        assert_eq!(raised(&disk, &disk, 3, 2), None);
        assert_eq!(raised(&disk, &[1, 0, 1, 0, 0, 0, 0, 0], 3, 2), None);
        let more = raised(&disk, &[0, 0, 1, 1, 0, 1, 0, 0], 3, 2);
        assert_eq!(more.unwrap(), (vec![1, 0, 2, 1, 1, 1, 1, 0], 7));
    }
}
