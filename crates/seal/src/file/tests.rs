use vmseal_secret::derive::KeyContext;

use super::*;
use crate::frame::HEAD_LEN;

const VM: Uuid = Uuid::from_bytes([0x11; 16]);

const IDENTITY: Identity = Identity { vm: VM, kind: Kind::Memory, generation: 7 };

fn secret(mut bytes: Vec<u8>) -> SecretBytes {
    SecretBytes::from_wiped(&mut bytes).unwrap()
}

fn key<'a>(kek: &'a SecretBytes, key_id: &'a str) -> VmKey<'a> {
    let context = KeyContext { vm: [0x11; 16], provider: [0x22; 16], key_id };
    VmKey { kek, context }
}

fn sealed(content: &[u8], key: Option<&VmKey<'_>>) -> Vec<u8> {
    let mut writer = create(Vec::new(), IDENTITY, key).unwrap();
    writer.write_all(content).unwrap();
    writer.finish().unwrap()
}

fn opened(file: &[u8], key: Option<&VmKey<'_>>) -> Result<Vec<u8>, FileError> {
    let mut content = Vec::new();
    open(file, VM, Kind::Memory, key)?.read_to_end(&mut content)?;
    Ok(content)
}

fn apply(file: &mut [u8], change: &SlotChange) {
    let at = usize::try_from(change.at).unwrap();
    file[at..at + SLOT_LEN].copy_from_slice(&change.bytes);
}

fn header(file: &[u8]) -> Header {
    Header::decode(file.first_chunk().unwrap()).unwrap()
}

#[test]
fn a_file_opens_with_its_vms_key_alone() {
    let (kek, other) = (secret(vec![1; 32]), secret(vec![2; 32]));
    let file = sealed(b"the guest's memory", Some(&key(&kek, "k1")));
    assert_eq!(opened(&file, Some(&key(&kek, "k1"))).unwrap(), b"the guest's memory");
    assert_eq!(header(&file).identity(), IDENTITY);
    assert!(!file.windows(5).any(|window| window == b"guest"));
    for wrong in [Some(key(&other, "k1")), Some(key(&kek, "k2")), None] {
        let refused = opened(&file, wrong.as_ref()).unwrap_err();
        assert!(matches!(&refused, FileError::OtherKey(keys) if keys[0].key_id == "k1"));
        assert!(refused.to_string().contains("it needs key 'k1'"), "{refused}");
    }
    let of = |vm, kind| open(&file[..], vm, kind, Some(&key(&kek, "k1"))).err();
    assert!(matches!(of(Uuid::nil(), Kind::Memory), Some(FileError::OtherVm(VM))));
    assert!(matches!(of(VM, Kind::Core), Some(FileError::OtherKind { .. })));
    let numbered = |generation| {
        let wanted = Wanted { vm: VM, kind: Kind::Memory, generation: Some(generation) };
        open_wanted(&file[..], wanted, Some(&key(&kek, "k1"))).err()
    };
    assert!(numbered(7).is_none());
    let older = numbered(8);
    assert!(matches!(older, Some(FileError::OtherGeneration { found: 7, expected: 8 })));
}

#[test]
fn a_file_in_the_clear_does_not_pass_for_one_of_a_vm_with_a_key() {
    let kek = secret(vec![1; 32]);
    let file = sealed(b"content", None);
    assert_eq!(opened(&file, None).unwrap(), b"content");
    assert!(header(&file).is_in_the_clear());
    assert!(!header(&sealed(b"content", Some(&key(&kek, "k1")))).is_in_the_clear());
    assert!(matches!(opened(&file, Some(&key(&kek, "k1"))), Err(FileError::OtherKey(_))));
}

/// Another VM, kind, generation or salt in the header is another key of the frames.
#[test]
fn every_changed_bit_is_noticed() {
    let kek = secret(vec![1; 32]);
    let key = key(&kek, "k1");
    let file = sealed(b"content", Some(&key));
    let second_slot = FIXED_LEN + SLOT_LEN..FIXED_LEN + 2 * SLOT_LEN;
    for at in 0..file.len() {
        let mut bad = file.clone();
        bad[at] ^= 1 << (at % 8);
        let vm = Header::decode(bad.first_chunk().unwrap()).map_or(VM, |header| header.vm);
        let kind = Header::decode(bad.first_chunk().unwrap()).map_or(Kind::Memory, |h| h.kind);
        let read = open(&bad[..], vm, kind, Some(&key))
            .and_then(|mut reader| Ok(reader.read_to_end(&mut Vec::new())?));
        // Nothing is in that slot, and nothing relies on it.
        assert_eq!(read.is_ok(), second_slot.contains(&at), "byte {at}");
    }
}

#[test]
fn a_new_key_takes_the_free_slot_and_no_frame_changes() {
    let (first, second, third) = (secret(vec![1; 32]), secret(vec![2; 32]), secret(vec![3; 32]));
    let keys = [key(&first, "k1"), key(&second, "k2"), key(&third, "k3")];
    let mut file = sealed(b"content", Some(&keys[0]));
    let frames = file[HEADER_LEN..].to_vec();
    let change = header(&file).add_key(&keys[0], &keys[1]).unwrap().unwrap();
    apply(&mut file, &change);
    for opens in &keys[..2] {
        assert_eq!(opened(&file, Some(opens)).unwrap(), b"content");
    }
    assert!(header(&file).add_key(&keys[0], &keys[1]).unwrap().is_none(), "it is there");
    // A change that was called off makes room for another one.
    let mut again = file.clone();
    apply(&mut again, &header(&file).add_key(&keys[0], &keys[2]).unwrap().unwrap());
    assert_eq!(opened(&again, Some(&keys[0])).unwrap(), b"content");
    assert_eq!(opened(&again, Some(&keys[2])).unwrap(), b"content");
    assert!(opened(&again, Some(&keys[1])).is_err());
    let stranger = header(&file).keep_only(&keys[2]);
    assert!(matches!(stranger, Err(FileError::OtherKey(_))));
    for change in header(&file).keep_only(&keys[1]).unwrap() {
        apply(&mut file, &change);
    }
    assert!(header(&file).keep_only(&keys[1]).unwrap().is_empty(), "nothing is left to drop");
    assert!(opened(&file, Some(&keys[0])).is_err());
    assert_eq!(opened(&file, Some(&keys[1])).unwrap(), b"content");
    // The slot that has become free takes the next one.
    let change = header(&file).add_key(&keys[1], &keys[2]).unwrap().unwrap();
    assert_eq!(change.at, FIXED_LEN as u64);
    apply(&mut file, &change);
    assert_eq!(opened(&file, Some(&keys[2])).unwrap(), b"content");
    assert_eq!(file[HEADER_LEN..], frames);
}

#[test]
fn a_slot_that_was_torn_hides_nothing_and_is_used_again() {
    let (first, second) = (secret(vec![1; 32]), secret(vec![2; 32]));
    let (old, new) = (key(&first, "k1"), key(&second, "k2"));
    let mut file = sealed(b"content", Some(&old));
    let change = header(&file).add_key(&old, &new).unwrap().unwrap();
    let at = usize::try_from(change.at).unwrap();
    file[at..at + 60].copy_from_slice(&change.bytes[..60]);
    assert_eq!(opened(&file, Some(&old)).unwrap(), b"content");
    let again = header(&file).add_key(&old, &new).unwrap().unwrap();
    assert_eq!(again.at, change.at);
    apply(&mut file, &again);
    assert_eq!(opened(&file, Some(&new)).unwrap(), b"content");
}

#[test]
fn files_of_other_kinds_and_versions_say_so() {
    let kek = secret(vec![1; 32]);
    let file = sealed(b"content", Some(&key(&kek, "k1")));
    let why = |file: &[u8]| opened(file, Some(&key(&kek, "k1"))).unwrap_err();
    assert!(matches!(why(b"short"), FileError::NotSealed));
    assert!(matches!(why(&[0; HEADER_LEN]), FileError::NotSealed));
    let mut later = file.clone();
    later[9] = 2;
    assert!(matches!(why(&later), FileError::Version(2)));
    let cut = why(&file[..file.len() - HEAD_LEN]);
    assert!(cut.to_string().contains("cut off"), "{cut}");
}

/// The file key, salt and KEK of docs/formats/sealed-file.md. What it gives was made by another implementation
/// (pyca/cryptography) from the written format.
#[test]
fn a_file_is_as_the_written_format_has_it() {
    let golden = include_bytes!("../../tests/golden/sealed-file-v1.bin");
    let kek = secret((0..32).collect());
    let key = key(&kek, "key-7");
    assert_eq!(opened(golden, Some(&key)).unwrap(), b"memory of a guest");
    let file_key = secret((32..64).collect());
    let mut writer = create_with(Vec::new(), IDENTITY, Some(&key), &file_key, [0x33; 32]).unwrap();
    writer.write_all(b"memory of a guest").unwrap();
    assert!(writer.finish().unwrap() == golden);
}
