//! Valid disks: made, opened, listed, repaired, adopted, and opened by the real cryptsetup.

#![allow(clippy::unwrap_used, reason = "a test")]

mod disk;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use disk::*;
use vmseal_luks::{
    Copy, CopyFault, DATA_OFFSET, Facts, HeaderError, HeaderNotice, Holes, Identity, Refusal, Role,
};

#[test]
fn a_disk_opens_with_its_key_and_is_listed_without_it() {
    let store = created();
    let opened = open(&store).unwrap();
    assert_eq!(opened.dek, dek());
    assert_eq!((opened.holes, opened.notice), (Holes::Zero, None));
    let (keys, notice) = vmseal_luks::inspect(&store).unwrap();
    assert_eq!((keys.len(), notice), (1, None));
    assert_eq!(
        (keys[0].key_id.as_str(), keys[0].disk, keys[0].holes),
        ("key-1", disk(), Holes::Zero)
    );
    assert_eq!(keys[0].provider.as_bytes(), &CONTEXT.provider);
    assert_eq!(keys[0].vm.as_bytes(), &CONTEXT.vm);
    let check = vmseal_secret::derive::check_value(&kek(), &CONTEXT).unwrap();
    assert_eq!(keys[0].check, check.to_string());
}

#[test]
fn the_golden_header_opens() {
    let mut store = MemoryStore::with_head(include_bytes!("golden/header-v1.bin"));
    assert_eq!(open(&store).unwrap().dek, dek());
    vmseal_luks::drop_other_keks(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
    assert_eq!(open(&store).unwrap().dek, dek());
}

/// What is on record as shared stays so under another key, and cannot be taken back.
#[test]
fn a_disk_whose_data_key_others_may_have_says_so() {
    assert!(!open(&created()).unwrap().shared);
    let mut store = MemoryStore::new();
    let identity = Identity { shared: true, ..identity() };
    vmseal_luks::create(&mut store, SIZE, &dek(), &kek(), &CONTEXT, identity).unwrap();
    assert!(open(&store).unwrap().shared);
    let token = json(&store)["tokens"]["0"].clone();
    assert_eq!((&token["version"], &token["shared"]), (&2.into(), &true.into()));

    let (held, new) = ((&kek(), &CONTEXT), (&new_kek(), &NEW_CONTEXT));
    vmseal_luks::add_kek(&mut store, &facts(), held, new).unwrap();
    vmseal_luks::drop_other_keks(&mut store, &facts(), new.0, new.1).unwrap();
    assert!(vmseal_luks::open(&store, &facts(), new.0, new.1).unwrap().shared);

    for version in [1, 2] {
        let mut forged = store.clone();
        let mut value = json(&forged);
        for token in value["tokens"].as_object_mut().unwrap().values_mut() {
            token.as_object_mut().unwrap().remove("shared");
            token["version"] = version.into();
        }
        set_json(&mut forged, value.to_string().as_bytes());
        let refused = vmseal_luks::open(&forged, &facts(), new.0, new.1).unwrap_err();
        let expected = match version {
            1 => matches!(refused, HeaderError::Refused(Refusal::Mac)),
            _ => matches!(
                refused,
                HeaderError::Refused(Refusal::Field { field: "token.version", .. })
            ),
        };
        assert!(expected, "{version}: {refused}");
    }
}

/// What a disk is for is told without its key, stays so under another one, and cannot be said otherwise.
#[test]
fn a_disk_says_what_it_is_for() {
    assert!(json(&created())["tokens"]["0"].get("role").is_none());
    for (role, said) in [
        (Role::CloudInit, "cloud_init"),
        (Role::UefiVariables, "uefi_variables"),
        (Role::SecureBootVariables, "secure_boot_variables"),
        (Role::Tpm, "tpm"),
    ] {
        let mut store = MemoryStore::new();
        let identity = Identity { role, ..identity() };
        vmseal_luks::create(&mut store, SIZE, &dek(), &kek(), &CONTEXT, identity).unwrap();
        let token = json(&store)["tokens"]["0"].clone();
        assert_eq!((&token["version"], &token["role"]), (&3.into(), &said.into()));
        vmseal_luks::mark_shared(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
        let (held, new) = ((&kek(), &CONTEXT), (&new_kek(), &NEW_CONTEXT));
        vmseal_luks::add_kek(&mut store, &facts(), held, new).unwrap();
        vmseal_luks::drop_other_keks(&mut store, &facts(), new.0, new.1).unwrap();
        let opened = vmseal_luks::open(&store, &facts(), new.0, new.1).unwrap();
        assert_eq!((opened.role, opened.shared), (role, true));
        assert_eq!(vmseal_luks::inspect(&store).unwrap().0[0].role, role);
        let mut value = json(&store);
        for token in value["tokens"].as_object_mut().unwrap().values_mut() {
            token["role"] = if role == Role::Tpm { "cloud_init" } else { "tpm" }.into();
        }
        set_json(&mut store, value.to_string().as_bytes());
        let refused = vmseal_luks::open(&store, &facts(), new.0, new.1).unwrap_err();
        assert!(matches!(refused, HeaderError::Refused(Refusal::Mac)), "{role:?}: {refused}");
    }
}

/// Another VM gets the data key of a disk that had it alone.
#[test]
fn a_disk_is_marked_when_others_get_its_data_key() {
    let mut store = created();
    let (held, new) = ((&kek(), &CONTEXT), (&new_kek(), &NEW_CONTEXT));
    vmseal_luks::add_kek(&mut store, &facts(), held, new).unwrap();
    let before = store.head.clone();
    // The token of the other key would stay without the mark.
    let refused = vmseal_luks::mark_shared(&mut store, &facts(), &kek(), &CONTEXT).unwrap_err();
    assert!(matches!(refused, HeaderError::TwoKeys), "{refused}");
    assert!(store.head == before);
    vmseal_luks::drop_other_keks(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
    vmseal_luks::mark_shared(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
    let opened = open(&store).unwrap();
    assert!(opened.shared && opened.dek == dek() && opened.notice.is_none());
    store.journal.clear();
    vmseal_luks::mark_shared(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
    assert!(store.journal.is_empty(), "it was marked already");
    vmseal_luks::add_kek(&mut store, &facts(), held, new).unwrap();
    vmseal_luks::drop_other_keks(&mut store, &facts(), new.0, new.1).unwrap();
    assert!(vmseal_luks::open(&store, &facts(), new.0, new.1).unwrap().shared);
}

#[test]
fn facts_survive_json_and_name_no_secret() {
    let json = serde_json::to_value(facts()).unwrap();
    assert_eq!(
        json,
        serde_json::json!({
            "version": 1, "disk": disk().to_string(), "size": SIZE, "data_offset": 16777216,
            "sector_size": 4096, "key_bits": 512, "cipher": "aes-xts-plain64"
        })
    );
    assert_eq!(serde_json::from_value::<Facts>(json).unwrap(), facts());
}

#[test]
fn one_damaged_copy_is_reported_and_repaired_only_when_asked() {
    for (copy, start) in [(Copy::Primary, 0), (Copy::Secondary, COPY)] {
        let mut store = created();
        store.head[start + 5000] ^= 1;
        store.journal.clear();
        let damaged = store.head.clone();
        let notice = Some(HeaderNotice::Damaged { copy, fault: CopyFault::Checksum });
        let opened = open(&store).unwrap();
        assert_eq!((opened.dek, opened.notice), (dek(), notice));
        assert_eq!(vmseal_luks::inspect(&store).unwrap().1, notice);
        assert!(store.journal.is_empty() && store.head == damaged, "opening has written");

        vmseal_luks::repair(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
        assert_eq!(open(&store).unwrap().notice, None);
        // Each copy alone is valid now.
        for lost in [0..COPY, COPY..2 * COPY] {
            let mut half = store.clone();
            half.head[lost].fill(0xff);
            assert_eq!(open(&half).unwrap().dek, dek());
        }
        store.journal.clear();
        vmseal_luks::repair(&mut store, &facts(), &kek(), &CONTEXT).unwrap();
        assert!(store.journal.is_empty(), "there was nothing to repair");
    }
}

#[test]
fn both_copies_damaged_is_an_error_that_says_so() {
    let mut store = created();
    store.head[100] ^= 1;
    store.head[COPY] = 0;
    let error = open(&store).unwrap_err();
    assert!(
        matches!(
            error,
            HeaderError::BothCopies { primary: CopyFault::Checksum, secondary: CopyFault::Magic }
        ),
        "{error}"
    );
    assert!(matches!(vmseal_luks::inspect(&store), Err(HeaderError::BothCopies { .. })));
}

#[test]
fn wrong_keys_are_distinguished() {
    let store = created();
    let error = vmseal_luks::open(&store, &facts(), &new_kek(), &CONTEXT).unwrap_err();
    assert!(matches!(error, HeaderError::WrongKek(_)), "{error}");
    let error = vmseal_luks::open(&store, &facts(), &kek(), &NEW_CONTEXT).unwrap_err();
    assert!(matches!(error, HeaderError::OtherKey { .. }), "{error}");
    assert!(error.to_string().contains("key-1") && error.to_string().contains("key-2"));
    let error = vmseal_luks::open(&store, &facts(), &secret(1, 16), &CONTEXT).unwrap_err();
    assert!(matches!(error, HeaderError::KeyLength(_, 16)), "{error}");
    let mut damaged = created();
    damaged.head[2 * COPY + 1000] ^= 1;
    assert!(matches!(open(&damaged), Err(HeaderError::SlotDamaged(_))));
}

#[test]
fn a_truncated_image_is_refused() {
    for size in [0, 100, COPY as u64, DATA_OFFSET - 1, DATA_OFFSET, DATA_OFFSET + SIZE - 1] {
        let mut store = created();
        store.size = size;
        let error = open(&store).unwrap_err();
        assert!(matches!(error, HeaderError::Truncated { found, .. } if found == size), "{error}");
        let made = vmseal_luks::create(&mut store, SIZE, &dek(), &kek(), &CONTEXT, identity());
        assert!(matches!(made, Err(HeaderError::Truncated { .. })));
    }
}

#[test]
fn a_disk_is_made_again_but_another_one_never_overwritten() {
    let mut store = created();
    let other_dek = vmseal_secret::SecretBytes::random(64).unwrap();
    vmseal_luks::create(&mut store, SIZE, &other_dek, &kek(), &CONTEXT, identity()).unwrap();
    assert_eq!(open(&store).unwrap().dek, other_dek);
    let before = store.head.clone();
    let other = Identity { disk: uuid::Uuid::from_bytes([0x34; 16]), ..identity() };
    let error = vmseal_luks::create(&mut store, SIZE, &dek(), &kek(), &CONTEXT, other).unwrap_err();
    assert!(
        matches!(&error, HeaderError::Occupied(found) if *found == disk().to_string()),
        "{error}"
    );
    assert!(store.head == before);
}

#[test]
fn sizes_and_facts_out_of_range_are_refused() {
    for size in [0, 1, 4095, 4097, u64::MAX] {
        assert!(matches!(Facts::new(disk(), size), Err(HeaderError::Size(s)) if s == size));
    }
    let store = created();
    let newer = Facts { version: 2, ..facts() };
    let refused = vmseal_luks::open(&store, &newer, &kek(), &CONTEXT);
    assert!(matches!(refused, Err(HeaderError::UnknownFacts(_))));
}

/// A file with a header, and the KEK as a key file.
fn on_disk(head: &[u8]) -> (tempfile::TempDir, std::path::PathBuf, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let (image, key) = (directory.path().join("image"), directory.path().join("key"));
    let mut file = File::create(&image).unwrap();
    file.write_all(head).unwrap();
    file.set_len(DATA_OFFSET + SIZE).unwrap();
    std::fs::write(&key, kek().expose()).unwrap();
    (directory, image, key)
}

fn cryptsetup(arguments: &[&str], paths: &[(&str, &Path)]) -> std::process::Output {
    let mut command = Command::new("cryptsetup");
    command.args(arguments);
    for (option, path) in paths {
        if !option.is_empty() {
            command.arg(option);
        }
        command.arg(path);
    }
    command.output().unwrap()
}

#[test]
fn the_real_cryptsetup_opens_and_describes_our_header() {
    let (_directory, image, key) = on_disk(&created().head);
    let open = ["open", "--test-passphrase", "--batch-mode"];
    let opened = cryptsetup(&open, &[("--key-file", &key), ("", &image)]);
    assert!(opened.status.success(), "{}", String::from_utf8_lossy(&opened.stderr));
    std::fs::write(&key, new_kek().expose()).unwrap();
    assert!(!cryptsetup(&open, &[("--key-file", &key), ("", &image)]).status.success());

    let dump = cryptsetup(&["luksDump"], &[("", &image)]);
    let text = String::from_utf8(dump.stdout).unwrap();
    for line in [
        "Version:       \t2",
        &format!("UUID:          \t{}", disk()),
        "offset: 16777216 [bytes]",
        "cipher: aes-xts-plain64",
        "sector: 4096 [bytes]",
        "Iterations: 1000",
        "0: vmseal",
    ] {
        assert!(text.contains(line), "no '{line}' in\n{text}");
    }
    let key_out = image.with_extension("dek");
    std::fs::write(&key, kek().expose()).unwrap();
    let arguments = ["luksDump", "--dump-volume-key", "--batch-mode"];
    let paths = [("--key-file", &*key), ("--volume-key-file", &*key_out), ("", &*image)];
    let dumped = cryptsetup(&arguments, &paths);
    assert!(dumped.status.success(), "{}", String::from_utf8_lossy(&dumped.stderr));
    assert_eq!(std::fs::read(key_out).unwrap(), dek().expose());
}

#[test]
fn a_disk_of_cryptsetup_opens_only_after_it_was_adopted() {
    let (_directory, image, key) = on_disk(&[]);
    #[rustfmt::skip]
    let format = [
        "luksFormat", "--batch-mode", "--type", "luks2", "--cipher", "aes-xts-plain64",
        "--key-size", "512", "--sector-size", "4096", "--pbkdf", "pbkdf2", "--hash", "sha256",
        "--pbkdf-force-iterations", "1000",
    ];
    let made = cryptsetup(&format, &[("--key-file", &key), ("", &image)]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));

    let mut file = File::options().read(true).write(true).open(&image).unwrap();
    let refused = vmseal_luks::open(&file, &facts(), &kek(), &CONTEXT).unwrap_err();
    assert!(matches!(refused, HeaderError::Refused(Refusal::NoToken)), "{refused}");
    let refused = vmseal_luks::create(&mut file, SIZE, &dek(), &kek(), &CONTEXT, identity());
    assert!(matches!(refused, Err(HeaderError::Occupied(_))));
    let wrong = vmseal_luks::adopt(&mut file, SIZE, &new_kek(), &CONTEXT, disk());
    assert!(matches!(wrong, Err(HeaderError::WrongKek(_))));

    let adopted = vmseal_luks::adopt(&mut file, SIZE, &kek(), &CONTEXT, disk()).unwrap();
    let opened = vmseal_luks::open(&file, &adopted, &kek(), &CONTEXT).unwrap();
    assert_eq!((opened.holes, opened.notice), (Holes::Ciphertext, None));
    let again = vmseal_luks::adopt(&mut file, SIZE, &kek(), &CONTEXT, disk());
    assert!(matches!(again, Err(HeaderError::Occupied(_))));

    let key_out = image.with_extension("dek");
    let arguments = ["luksDump", "--dump-volume-key", "--batch-mode"];
    let paths = [("--key-file", &*key), ("--volume-key-file", &*key_out), ("", &*image)];
    assert!(cryptsetup(&arguments, &paths).status.success());
    assert_eq!(std::fs::read(key_out).unwrap(), opened.dek.expose());
}
