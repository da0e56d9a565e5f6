use std::path::Path;

use vmseal_api::id::DiskId;
use vmseal_api::transfer::ImageFormat;
use vmseal_qcow2::{Below, create_overlay};
use vmseal_secret::{DEK_LEN, SecretBytes};

use super::*;
use crate::storage::qcow2::Qcow2Disk;

const SIZE: u64 = 64 << 20;
const BLOCK: u64 = sums::BLOCK;
const PIECE_BYTES: u64 = PIECE as u64;

/// Places of the disk of which the file below has a block, and those of which the layer has one.
const BELOW: [u64; 3] = [0, 40 << 20, SIZE - BLOCK];
const ABOVE: [u64; 2] = [BLOCK, 20 << 20];

fn opened(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

/// A layer above a file with little data, as a snapshot leaves it.
fn layered(directory: &Path, encryption: Option<Encryption>) -> Disk {
    let (layer, below) = (directory.join("layer"), directory.join("below"));
    let file = File::create(&below).unwrap();
    file.set_len(SIZE).unwrap();
    for at in BELOW {
        file.write_all_at(&[5; BLOCK as usize], at).unwrap();
    }
    let named = Below { name: "below", format: "raw" };
    create_overlay(File::create(&layer).unwrap(), SIZE, named).unwrap();
    let mut image = Target::overlay(opened(&layer)).unwrap();
    for at in ABOVE {
        image.write(&mut [7; BLOCK as usize], at).unwrap();
    }
    image.flush().unwrap();
    let below = vec![(opened(&below).into(), ImageFormat::Raw)];
    let image = Qcow2Disk::open(opened(&layer).into(), below, 0, SIZE, true).unwrap();
    Disk::new(SIZE, true, encryption, DiskStorage::Qcow2(image), 1)
}

/// What an export of a disk has, and how much it has read.
fn exported(disk: &Disk, mut sums: Option<Sums>) -> (Vec<u8>, u64) {
    let out = tempfile::tempfile().unwrap();
    out.set_len(SIZE).unwrap();
    let mut target = Target::Raw(out.try_clone().unwrap());
    let (state, stop) = (DiskState::new(DiskId::new(), 1), Stop::new().unwrap());
    let (mut chain, allocation) = (disk.chain().unwrap(), disk.allocation());
    run(&mut chain, &allocation, &mut target, sums.as_mut(), &state, &stop).unwrap();
    let mut content = vec![0; SIZE as usize];
    out.read_exact_at(&mut content, 0).unwrap();
    (content, state.totals().read_bytes)
}

#[test]
fn holes_of_a_disk_with_layers_are_not_read() {
    let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
    let disk = layered(scratch.path(), None);
    for with_sums in [false, true] {
        let sums = with_sums.then(|| tempfile::tempfile().unwrap());
        let sums = sums.map(|file| Sums::new(file, None, None).unwrap());
        let (found, read) = exported(&disk, sums);
        let mut expected = vec![0; SIZE as usize];
        for (places, byte) in [(&BELOW[..], 5), (&ABOVE[..], 7)] {
            for at in places {
                expected[*at as usize..(at + BLOCK) as usize].fill(byte);
            }
        }
        assert!(found == expected, "the copy differs");
        // With each part of data the rest of its piece.
        assert!(read <= 5 * PIECE_BYTES, "{read} bytes are read");
    }
}

#[test]
fn holes_that_a_cipher_reads_as_noise_are_copied() {
    let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
    let key = SecretBytes::random(DEK_LEN).unwrap();
    let disk = layered(scratch.path(), Some(Encryption { key, holes: Holes::Ciphertext }));
    let (found, read) = exported(&disk, None);
    assert_eq!(read, SIZE);
    let (mut chain, mut noise) = (disk.chain().unwrap(), vec![0; PIECE]);
    for (index, part) in found.chunks(PIECE).enumerate() {
        let at = index as u64 * PIECE_BYTES;
        blocking::move_bytes(&mut chain, Operation::Read, &mut noise, at).unwrap();
        assert!(noise.iter().any(|byte| *byte != 0), "a hole at {at}");
        assert!(part == noise, "the copy differs at {at}");
    }
}

#[test]
fn a_part_is_a_hole_of_whole_units_or_data_of_a_piece_or_more() {
    let (at, end) = (2 * PIECE_BYTES, 64 * PIECE_BYTES);
    let of = |data, found, until| in_units(Extent { data, end: found }, (at, end), until, BLOCK);
    let hole = |end| OwnExtent { content: Own::Zeroes, end };
    let data = |end| OwnExtent { content: Own::Data, end };
    assert_eq!(of(false, at + 5 * BLOCK + 1, end), hole(at + 5 * BLOCK));
    assert_eq!(of(false, at + BLOCK - 1, end), data(at + PIECE_BYTES), "a hole within a unit");
    assert_eq!(of(true, at + 1, end), data(at + PIECE_BYTES));
    assert_eq!(of(true, at + 9 * PIECE_BYTES + 1, end), data(at + 9 * PIECE_BYTES + BLOCK));
    assert_eq!(of(true, end, at + 3 * BLOCK), data(at + 3 * BLOCK), "the rest has not changed");
    // The last unit may be short.
    let end = at + BLOCK + 4096;
    let last = |data| in_units(Extent { data, end }, (at, end), end, BLOCK);
    assert_eq!((last(false), last(true)), (hole(end), data(end)));
}
