//! Edited headers with valid checksums: each is refused by name, and nothing is written.

#![allow(clippy::unwrap_used, reason = "a test")]

mod disk;

use std::time::{Duration, Instant};

use disk::*;
use proptest::prelude::*;
use serde_json::{Value, json};
use uuid::Uuid;
use vmseal_luks::{CopyFault, HeaderError, Refusal};

/// Why this header is refused.
fn refusal(store: &MemoryStore) -> Refusal {
    let before = store.head.clone();
    let error = open(store).unwrap_err();
    assert!(store.journal.is_empty() && store.head == before, "a refused header was written");
    match error {
        HeaderError::Refused(refusal) => refusal,
        other => panic!("not refused but: {other}"),
    }
}

#[test]
fn an_edit_that_changes_nothing_opens() {
    assert_eq!(open(&forged(|_| {})).unwrap().dek, dek());
}

#[test]
fn cipher_null() {
    let store = forged(|json| json["segments"]["0"]["encryption"] = "cipher_null-ecb".into());
    let refused = refusal(&store);
    assert!(matches!(&refused, Refusal::Cipher { found, .. } if found.contains("cipher_null")));
    // The same in the key slot: the DEK would be stored in the clear.
    let store =
        forged(|json| json["keyslots"]["0"]["area"]["encryption"] = "cipher_null-ecb".into());
    let refused = refusal(&store);
    assert!(matches!(refused, Refusal::Field { field: "keyslot.area.encryption", .. }));
}

#[test]
fn another_cipher() {
    let store = forged(|json| json["segments"]["0"]["encryption"] = "aes-cbc-plain64".into());
    assert!(matches!(refusal(&store), Refusal::Cipher { .. }));
}

#[test]
fn a_moved_segment() {
    let store = forged(|json| json["segments"]["0"]["offset"] = "16781312".into());
    assert_eq!(refusal(&store), Refusal::Offset { found: 16_781_312, expected: 16_777_216 });
    let store = forged(|json| json["segments"]["0"]["iv_tweak"] = "8".into());
    assert!(matches!(refusal(&store), Refusal::Field { field: "segment.iv_tweak", .. }));
    let store = forged(|json| json["segments"]["0"]["size"] = "4096".into());
    assert!(matches!(refusal(&store), Refusal::Field { field: "segment.size", .. }));
}

#[test]
fn another_sector_size() {
    let store = forged(|json| json["segments"]["0"]["sector_size"] = 512.into());
    assert_eq!(refusal(&store), Refusal::SectorSize { found: 512, expected: 4096 });
}

#[test]
fn a_huge_kdf_cost_is_refused_without_running_it() {
    let argon = json!({
        "type": "argon2id", "time": 1000, "memory": 4194304, "cpus": 4,
        "salt": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
    });
    let edits: [&dyn Fn(&mut Value); 4] = [
        &|json| json["keyslots"]["0"]["kdf"]["iterations"] = u32::MAX.into(),
        &|json| json["keyslots"]["0"]["kdf"] = argon.clone(),
        &|json| json["digests"]["0"]["iterations"] = u32::MAX.into(),
        &|json| json["keyslots"]["0"]["kdf"]["hash"] = "whirlpool".into(),
    ];
    for edit in edits {
        let store = forged(|json| edit(json));
        let started = Instant::now();
        assert!(matches!(refusal(&store), Refusal::Kdf { .. }));
        assert!(started.elapsed() < Duration::from_millis(500));
    }
}

#[test]
fn an_unknown_requirement() {
    let store = forged(|json| {
        json["config"]["requirements"] = json!({"mandatory": ["online-reencrypt-v2"]});
    });
    assert_eq!(refusal(&store), Refusal::Requirement("\"online-reencrypt-v2\"".to_owned()));
    let store = forged(|json| json["config"]["requirements"] = json!({"mandatory": []}));
    open(&store).unwrap();
    let store = forged(|json| json["config"]["flags"] = json!(["allow-discards"]));
    assert!(matches!(refusal(&store), Refusal::Json(_)));
}

#[test]
fn an_extra_segment() {
    let store = forged(|json| json["segments"]["1"] = json["segments"]["0"].clone());
    assert_eq!(refusal(&store), Refusal::Segments(2));
    let store = forged(|json| json["segments"] = json!({}));
    assert_eq!(refusal(&store), Refusal::Segments(0));
}

#[test]
fn an_edited_mac() {
    for edit in ["0".repeat(64), "0".repeat(63), "ä".repeat(32), String::new()] {
        let store = forged(|json| json["tokens"]["0"]["mac"] = edit.clone().into());
        assert_eq!(refusal(&store), Refusal::Mac);
    }
}

#[test]
fn edited_holes_are_noticed_by_the_mac() {
    let store = forged(|json| json["tokens"]["0"]["holes"] = "ciphertext".into());
    assert_eq!(refusal(&store), Refusal::Mac);
}

#[test]
fn the_header_of_another_disk_or_vm() {
    let other = Uuid::from_bytes([0x99; 16]);
    let store = forged(|json| json["tokens"]["0"]["disk"] = other.to_string().into());
    assert_eq!(refusal(&store), Refusal::OtherDisk { found: other, expected: disk() });
    let store = forged(|json| json["tokens"]["0"]["vm"] = other.to_string().into());
    let expected = Uuid::from_bytes(CONTEXT.vm);
    assert_eq!(refusal(&store), Refusal::OtherVm { found: other, expected });
}

/// A header made with the KEK of the same VM, put in another disk's place: its MAC is valid, but for another
/// disk.
#[test]
fn the_true_header_of_another_disk_of_the_same_vm_under_this_disks_id() {
    let mut other = MemoryStore::new();
    let identity = vmseal_luks::Identity { disk: Uuid::from_bytes([0x99; 16]), ..identity() };
    vmseal_luks::create(&mut other, SIZE, &dek(), &kek(), &CONTEXT, identity).unwrap();
    let mut value = json(&other);
    value["tokens"]["0"]["disk"] = disk().to_string().into();
    set_json(&mut other, value.to_string().as_bytes());
    other.journal.clear();
    assert_eq!(refusal(&other), Refusal::Mac);
}

#[test]
fn an_edited_check_value_or_token_version() {
    let store = forged(|json| json["tokens"]["0"]["check"] = "0".repeat(32).into());
    assert!(matches!(open(&store), Err(HeaderError::WrongKek(_))));
    let store = forged(|json| json["tokens"]["0"]["check"] = "x".into());
    assert!(matches!(refusal(&store), Refusal::Field { field: "token.check", .. }));
    let store = forged(|json| {
        json["tokens"]["0"]["version"] = 4.into();
        json["tokens"]["0"]["new"] = true.into();
    });
    assert_eq!(refusal(&store), Refusal::TokenVersion(4));
}

#[test]
fn no_token_or_a_foreign_one() {
    assert_eq!(refusal(&forged(|json| json["tokens"] = json!({}))), Refusal::NoToken);
    let store = forged(|json| {
        json["tokens"]["1"] =
            json!({"type": "luks2-keyring", "keyslots": ["0"], "key_description": "x"});
    });
    assert!(matches!(refusal(&store), Refusal::Json(_)));
    let store = forged(|json| json["tokens"]["1"] = json["tokens"]["0"].clone());
    assert!(matches!(refusal(&store), Refusal::Field { field: "token.keyslots", .. }));
}

#[test]
fn key_sizes_slots_and_digests_that_vmseal_never_writes() {
    type Edit = (&'static str, fn(&mut Value));
    let edits: [Edit; 12] = [
        ("keyslot.key_size", |json| json["keyslots"]["0"]["key_size"] = 32.into()),
        ("keyslot.af.stripes", |json| json["keyslots"]["0"]["af"]["stripes"] = 1.into()),
        ("keyslot.area.offset", |json| json["keyslots"]["0"]["area"]["offset"] = "0".into()),
        ("keyslot.area.offset", |json| json["keyslots"]["0"]["area"]["offset"] = "036864".into()),
        ("keyslot.area.size", |json| json["keyslots"]["0"]["area"]["size"] = "4096".into()),
        ("keyslot.kdf.salt", |json| json["keyslots"]["0"]["kdf"]["salt"] = "AAAA".into()),
        ("digest.salt", |json| json["digests"]["0"]["salt"] = "no base64".into()),
        ("digest.digest", |json| json["digests"]["0"]["digest"] = "AAAA".into()),
        ("the number of key slots", |json| json["keyslots"] = json!({})),
        ("the number of digests", |json| json["digests"] = json!({})),
        ("digest.keyslots", |json| json["digests"]["0"]["keyslots"] = json!(["1"])),
        ("digest.segments", |json| json["digests"]["0"]["segments"] = json!([])),
    ];
    for (expected, edit) in edits {
        match refusal(&forged(edit)) {
            Refusal::Field { field, .. } => assert_eq!(field, expected),
            other => panic!("{expected}: {other}"),
        }
    }
}

#[test]
fn text_that_is_not_json_or_more_than_json() {
    let mut store = created();
    let good = json(&store).to_string();
    let twice = good.replacen("{\"config\"", "{\"tokens\":{},\"config\"", 1);
    assert_ne!(twice, good);
    let entry = good.replacen("\"segments\":{", "\"segments\":{\"0\":null,", 1);
    let segment = json(&store)["segments"]["0"].to_string();
    let entry_twice =
        good.replacen("\"segments\":{", &format!("\"segments\":{{\"0\":{segment},"), 1);
    let deep = "[".repeat(12_000);
    for text in [
        "",
        "no",
        "{}",
        "null",
        "[]",
        "{\"keyslots\":",
        "\u{1}",
        &twice,
        &entry,
        &entry_twice,
        &deep,
        &format!("{good} x"),
        &format!("{good}\0x"),
    ] {
        set_json(&mut store, text.as_bytes());
        store.journal.clear();
        let refused = refusal(&store);
        assert!(matches!(refused, Refusal::Json(_)), "{refused}");
        assert!(refused.to_string().len() < 300, "messages stay short: {refused}");
    }
    set_json(&mut store, &[0xff, 0xfe]);
    store.journal.clear();
    assert!(matches!(refusal(&store), Refusal::Json(_)));
}

#[test]
fn oversized_json() {
    let mut store = created();
    // It fills the area, without an end.
    set_json(&mut store, &[b' '; COPY - 4096]);
    store.journal.clear();
    assert!(matches!(refusal(&store), Refusal::Json(_)));
    // The header claims a larger area.
    let mut store = created();
    for start in [0, COPY] {
        store.head[start + 8..start + 16].copy_from_slice(&(4u64 << 20).to_be_bytes());
    }
    reseal(&mut store);
    let fault = CopyFault::Length(4 << 20);
    match open(&store).unwrap_err() {
        HeaderError::BothCopies { primary, secondary } => {
            assert_eq!((primary, secondary), (fault, fault));
        }
        other => panic!("{other}"),
    }
    // More entries than any header has.
    let store = forged(|json| {
        for number in 1..40 {
            json["segments"][number.to_string()] = json["segments"]["0"].clone();
        }
    });
    let refused = refusal(&store);
    assert!(
        matches!(&refused, Refusal::Json(why) if why.contains("too many entries")),
        "{refused}"
    );
}

#[test]
fn other_versions_places_and_checksums() {
    let cases: [(usize, &[u8], CopyFault); 4] = [
        (6, &[0, 1], CopyFault::Version(1)),
        (0, b"QFI\xfb", CopyFault::Magic),
        (0x48, b"md5\0", CopyFault::ChecksumKind),
        (0x100, &[0, 0, 0, 0, 0, 0, 0x80, 0], CopyFault::Offset(0x8000)),
    ];
    for (at, bytes, expected) in cases {
        let mut store = created();
        for start in [0, COPY] {
            store.head[start + at..start + at + bytes.len()].copy_from_slice(bytes);
        }
        reseal(&mut store);
        match open(&store).unwrap_err() {
            HeaderError::BothCopies { primary, .. } => assert_eq!(primary, expected),
            other => panic!("{other}"),
        }
    }
}

/// An image of zeroes or noise is not a disk.
#[test]
fn garbage_and_nothing() {
    let mut store = MemoryStore::new();
    assert!(matches!(open(&store), Err(HeaderError::BothCopies { .. })));
    aws_lc_rs::rand::fill(&mut store.head).unwrap();
    assert!(matches!(open(&store), Err(HeaderError::BothCopies { .. })));
    assert!(matches!(vmseal_luks::inspect(&store), Err(HeaderError::BothCopies { .. })));
}

/// The bytes that have a meaning: the binary headers' fields, the JSON, the first slot.
fn place() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 0usize..0x200,
        8 => 4096usize..4096 + 1600,
        4 => COPY..COPY + 0x200,
        4 => COPY + 4096..COPY + 4096 + 1600,
        2 => 2 * COPY..2 * COPY + AREA,
        1 => 0usize..HEAD,
    ]
}

fn never_another_dek(store: &MemoryStore) {
    let before = store.head.clone();
    if let Ok(opened) = open(store) {
        assert!(opened.dek == dek(), "it opened with another DEK");
        assert_eq!(opened.holes, vmseal_luks::Holes::Zero);
    }
    let _ = vmseal_luks::inspect(store);
    assert!(store.journal.is_empty() && store.head == before);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Bytes changed at random, with and without valid checksums.
    #[test]
    fn mutated_headers_never_panic_and_never_open_with_another_dek(
        changes in prop::collection::vec((place(), any::<u8>()), 1..6),
        resealed in any::<bool>(),
    ) {
        let mut store = MemoryStore::with_head(include_bytes!("golden/header-v1.bin"));
        for (at, value) in changes {
            store.head[at] = value;
        }
        if resealed {
            reseal(&mut store);
        }
        never_another_dek(&store);
    }

    /// The same edit in both copies' JSON, as a forger would make it, a character at a time.
    #[test]
    fn mutated_json_never_panics_and_never_opens_with_another_dek(
        at in 0usize..1500,
        replacement in prop_oneof![
            "[0-9]{1,12}", "[\"{}:,\\[\\]]", "\\PC{1,3}", Just(String::new())
        ],
    ) {
        let mut store = MemoryStore::with_head(include_bytes!("golden/header-v1.bin"));
        let mut text = json(&store).to_string().into_bytes();
        let at = at.min(text.len() - 1);
        text.splice(at..=at, replacement.bytes());
        set_json(&mut store, &text);
        store.journal.clear();
        never_another_dek(&store);
    }
}
