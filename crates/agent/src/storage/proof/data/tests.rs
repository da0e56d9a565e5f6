use vmseal_secret::DEK_LEN;

use super::*;

const OFFSET: u64 = 1 << 20;

fn key() -> SecretBytes {
    SecretBytes::random(DEK_LEN).unwrap()
}

/// What a guest writes: text.
fn plain(number: u64) -> [u8; SECTOR] {
    let mut bytes = [b' '; SECTOR];
    let line = format!("sector {number} of what the guest has written\n");
    bytes
        .chunks_mut(line.len())
        .for_each(|part| part.copy_from_slice(&line.as_bytes()[..part.len()]));
    bytes
}

/// An encrypted disk with text in its sectors.
fn disk(dek: &SecretBytes, sectors: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    let mut cipher = Xts::new(dek.expose(), Direction::Encrypt).unwrap();
    for number in 0..sectors {
        let (at, mut sealed) = (number * SECTOR as u64, [0; SECTOR]);
        cipher.one(at, &plain(number), &mut sealed).unwrap();
        file.write_all_at(&sealed, OFFSET + at).unwrap();
    }
    file
}

fn report(file: &File, dek: Option<&SecretBytes>) -> ProvenData {
    let mut read = 0;
    let mut reading =
        Reading { all: true, seed: 1, progress: &mut |more| read += more, cancelled: &|| false };
    let report = examine(file, Form::Flat(OFFSET), dek, &mut reading).unwrap();
    assert_eq!(report.read, read);
    report
}

#[test]
fn an_encrypted_disk_is_opened_sector_by_sector() {
    let dek = key();
    let file = disk(&dek, 100);
    // A discarded sector.
    file.write_all_at(&[0; SECTOR], OFFSET + 7 * SECTOR as u64).unwrap();
    let found = report(&file, Some(&dek));
    assert_eq!((found.sectors, found.holes, found.opened), (100, 1, 99), "{found:?}");
    assert_eq!((found.undecided, found.clear, found.equal), (0, 0, 0), "{found:?}");
    assert!(found.entropy_min.unwrap() > 7900 && found.findings.is_empty(), "{found:?}");
    assert_eq!(found.entropy.iter().flatten().count(), REGIONS, "{found:?}");
    // The right key is what makes the difference.
    let found = report(&file, Some(&key()));
    assert_eq!((found.opened, found.undecided), (0, 99), "{found:?}");
}

#[test]
fn one_sector_in_the_clear_is_found_and_named() {
    let dek = key();
    let file = disk(&dek, 300);
    let at = OFFSET + 123 * SECTOR as u64;
    file.write_all_at(&plain(123), at).unwrap();
    let found = report(&file, Some(&dek));
    assert_eq!((found.clear, found.opened), (1, 299), "{found:?}");
    let [finding] = &found.findings[..] else { panic!("{found:?}") };
    assert_eq!((finding.offset, finding.sector), (at, Some(123)));
}

#[test]
fn a_disk_in_the_clear_has_all_its_sectors_found_and_some_named() {
    let file = tempfile::tempfile().unwrap();
    for number in 0..100 {
        file.write_all_at(&plain(number), OFFSET + number * SECTOR as u64).unwrap();
    }
    let found = report(&file, None);
    assert_eq!((found.clear, found.findings.len()), (100, FINDINGS_MAX), "{found:?}");
    assert!(found.entropy_min.unwrap() < 5000, "{found:?}");
}

/// Sectors of zeroes are left out, one that is written in the clear lessens the entropy of its region alone, and the least is that of
/// the region of text.
#[test]
fn each_region_has_the_entropy_of_what_was_read_of_it() {
    const SECTORS: u64 = 4;
    const DISCARDED: u64 = 3;
    const TEXT: u64 = 5;
    const HALF: u64 = 9;
    let dek = key();
    let file = disk(&dek, SECTORS * REGIONS as u64);
    let write = |number: u64, sector: [u8; SECTOR]| {
        file.write_all_at(&sector, OFFSET + number * SECTOR as u64).unwrap();
    };
    for number in 0..SECTORS {
        write(DISCARDED * SECTORS + number, [0; SECTOR]);
        write(TEXT * SECTORS + number, plain(number));
    }
    // Half of its bytes are the same one: a bit for which half, and 8 bits for those of the other one.
    for number in 0..SECTORS / 2 {
        write(HALF * SECTORS + number, [7; SECTOR]);
    }
    let found = report(&file, Some(&dek));
    assert_eq!(found.entropy.len(), REGIONS);
    for (region, entropy) in (0..).zip(&found.entropy) {
        let expected = match (region, *entropy) {
            (DISCARDED, found) => found.is_none(),
            (TEXT, Some(found)) => (3500..4200).contains(&found),
            (HALF, Some(found)) => (4900..5000).contains(&found),
            (_, Some(found)) => found > 7900,
            (_, None) => false,
        };
        assert!(expected, "region {region}: {found:?}");
    }
    assert_eq!(found.entropy_min, found.entropy[TEXT as usize]);
}

#[test]
fn reading_stops_when_it_is_cancelled() {
    let file = disk(&key(), 10);
    let mut reading = Reading { all: true, seed: 1, progress: &mut |_| {}, cancelled: &|| true };
    let stopped = examine(&file, Form::Flat(OFFSET), None, &mut reading);
    assert!(matches!(stopped, Err(DataError::Cancelled)));
}
