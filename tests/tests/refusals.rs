//! Damage at the datastore: what can be used is used and reported; what cannot is refused clearly, and
//! nothing is written.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde_json::{Value, json};
use vmseal_api::size::Size;
use vmseal_secret::SecretBytes;
use vmseal_secret::passphrase::{Cost, open_with_passphrase, seal_with_passphrase};
use vmseal_tests::eventually;
use vmseal_tests::guest::counter_disk;
use vmseal_tests::header;
use vmseal_tests::installation::{Installation, PASSPHRASE, create, text};

/// How long a refusal may take: nothing that a hostile header asks for is computed.
const REFUSAL: Duration = Duration::from_secs(5);

/// An installation with one encrypted VM that has run and is off, and its image.
fn with_stopped_vm() -> (Installation, PathBuf) {
    let here = Installation::new().unwrap();
    here.create_counter("sealed", "encrypted").unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 1);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    let image = here.images("sealed").unwrap().remove(0);
    (here, image)
}

/// The VM is not started, and the error holds all of `expected`; the image is left as it is.
fn refuses_to_start(here: &Installation, image: &Path, expected: &[&str]) {
    let before = header::hash(image).unwrap();
    let said = here.refused(&["vm", "start", "sealed"]).unwrap();
    println!("refused: {}", said.trim());
    for part in expected {
        assert!(said.contains(part), "it does not say '{part}': {said}");
    }
    assert_eq!(header::hash(image).unwrap(), before, "the refused image was written");
    let shown = here.vm("sealed").unwrap();
    assert_eq!(shown["power"], "off");
    for program in ["vmseal-filter", "qemu-system-x86_64"] {
        let left = eventually("no process is left", || {
            here.guest_processes(program).is_empty().then_some(())
        });
        left.unwrap();
    }
}

#[test]
fn with_one_copy_of_the_header_damaged_the_other_is_used_and_it_is_reported() {
    for copy in [0, 1] {
        let (here, image) = with_stopped_vm();
        header::damage(&image, copy).unwrap();
        assert_eq!(here.boot_counter("sealed").unwrap(), 2);
        let said = here.wait_alarm("sealed", "header-copy-damaged").unwrap();
        assert!(said.contains(["first", "second"][copy]), "{said}");
        here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
        assert_eq!(here.boot_counter("sealed").unwrap(), 3);
    }
}

#[test]
fn with_both_copies_of_the_header_damaged_it_is_refused() {
    let (here, image) = with_stopped_vm();
    let good = header::read(&image).unwrap();
    header::damage(&image, 0).unwrap();
    header::damage(&image, 1).unwrap();
    refuses_to_start(&here, &image, &["both copies", "backup"]);
    header::write(&image, &good).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
}

/// Forged headers have right checksums: only a comparison with the inventory can tell them.
#[test]
fn a_forged_header_is_refused_by_name() {
    type Forgery = (&'static str, fn(&mut Value), &'static [&'static str]);
    let forgeries: [Forgery; 10] = [
        (
            "another cipher",
            |json| json["segments"]["0"]["encryption"] = "aes-cbc-essiv:sha256".into(),
            &["cipher", "aes-cbc-essiv"],
        ),
        (
            "no cipher at all",
            |json| json["segments"]["0"]["encryption"] = "cipher_null-ecb".into(),
            &["cipher", "cipher_null"],
        ),
        (
            "the key stored in the clear",
            |json| json["keyslots"]["0"]["area"]["encryption"] = "cipher_null-ecb".into(),
            &["keyslot.area.encryption", "cipher_null"],
        ),
        (
            "a moved segment",
            |json| json["segments"]["0"]["offset"] = "16781312".into(),
            &["16781312", "16777216"],
        ),
        (
            "smaller sectors",
            |json| json["segments"]["0"]["sector_size"] = 512.into(),
            &["sector size", "512"],
        ),
        (
            "a key derivation of hours",
            |json| json["keyslots"]["0"]["kdf"]["iterations"] = u32::MAX.into(),
            &["4294967295", "limit"],
        ),
        (
            "a key derivation of all memory",
            |json| {
                json["keyslots"]["0"]["kdf"] = json!({
                    "type": "argon2id", "time": 1000, "memory": 4_194_304, "cpus": 4,
                    "salt": "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
                });
            },
            &["argon2id", "limit"],
        ),
        (
            "a digest of hours",
            |json| json["digests"]["0"]["iterations"] = u32::MAX.into(),
            &["digest", "4294967295"],
        ),
        (
            "an unknown requirement",
            |json| json["config"]["requirements"] = json!({"mandatory": ["online-reencrypt-v9"]}),
            &["requires", "online-reencrypt-v9"],
        ),
        (
            "another meaning of holes",
            |json| json["tokens"]["0"]["holes"] = "ciphertext".into(),
            &["authentication code"],
        ),
    ];
    let (here, image) = with_stopped_vm();
    let good = header::read(&image).unwrap();
    // An edit that changes nothing opens: it is not the test's own checksum that is refused.
    header::forge(&image, |_| {}).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    for (what, edit, expected) in forgeries {
        println!("{what}");
        header::write(&image, &good).unwrap();
        header::forge(&image, edit).unwrap();
        let begun = Instant::now();
        refuses_to_start(&here, &image, expected);
        assert!(begun.elapsed() < REFUSAL, "{what}: refused after {:?}", begun.elapsed());
    }
    header::write(&image, &good).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 3);
}

#[test]
fn the_header_of_another_vms_disk_is_refused() {
    let (here, image) = with_stopped_vm();
    here.create_counter("other", "encrypted").unwrap();
    let others = header::read(&here.images("other").unwrap()[0]).unwrap();
    header::write(&image, &others).unwrap();
    let (own_id, other_id) = (disk_id(&here, "sealed"), disk_id(&here, "other"));
    refuses_to_start(&here, &image, &["header of disk", &own_id, &other_id]);
}

/// The wrong KEK is one of the right id with other bytes. The host meets it in a header that another KEK
/// made, the server in a provider that derives from another root key (of a backup of before, or of a server
/// that does not replicate).
#[test]
fn another_key_under_the_right_id_is_refused_by_host_and_server() {
    let (mut here, image) = with_stopped_vm();
    let key_id = here.vm("sealed").unwrap()["key"]["key_id"].as_str().unwrap().to_owned();
    let good = header::read(&image).unwrap();
    let mut own = Value::Null;
    header::forge(&image, |json| own = json["tokens"]["0"].clone()).unwrap();
    here.create_counter("other", "encrypted").unwrap();
    let others = header::read(&here.images("other").unwrap()[0]).unwrap();
    header::write(&image, &others).unwrap();
    let takes = |fields: &[&str]| {
        let forged = header::forge(&image, |json| {
            fields.iter().for_each(|field| json["tokens"]["0"][field] = own[field].clone());
        });
        forged.unwrap();
    };
    takes(&["provider", "key_id", "vm", "disk"]);
    refuses_to_start(&here, &image, &["disk0", &key_id, "another key for the same id"]);
    takes(&["check"]);
    refuses_to_start(&here, &image, &["disk0", &key_id, "does not open"]);
    header::write(&image, &good).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();

    let key_file = root_key_file(&here);
    let right = exchange_root_key(&key_file);
    here.kill_agent();
    here.kill_server();
    here.start_server().unwrap();
    here.start_agent().unwrap();
    assert_eq!(here.json(&["provider", "show", "keys"]).unwrap()["status"], "normal");
    let said = here.wait_alarm("sealed", "vm-locked").unwrap();
    println!("the alarm says: {said}");
    assert!(said.contains(&key_id) && said.contains("not the one"), "{said}");
    refuses_to_start(&here, &image, &["'keys'", &key_id, "not the one", "backup"]);
    assert_eq!(here.vm("sealed").unwrap()["key_state"], "missing");

    here.kill_server();
    std::fs::write(&key_file, right).unwrap();
    here.start_server().unwrap();
    here.wait_no_alarm("sealed", "vm-locked").unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 3);
}

fn root_key_file(here: &Installation) -> PathBuf {
    let provider = here.json(&["provider", "show", "keys"]).unwrap();
    here.path("server/providers").join(provider["id"].as_str().unwrap()).join("key")
}

/// Puts a key file of the same provider with another key-derivation key in place; gives what was there.
fn exchange_root_key(path: &Path) -> Vec<u8> {
    const PURPOSE: &[u8] = b"vmseal native provider key v1";
    let sealed = std::fs::read(path).unwrap();
    let passphrase = SecretBytes::from_wiped(&mut PASSPHRASE.as_bytes().to_vec()).unwrap();
    let mut root = open_with_passphrase(&sealed, &passphrase, PURPOSE).unwrap();
    *root.expose_mut().last_mut().unwrap() ^= 1;
    let other = seal_with_passphrase(&root, &passphrase, PURPOSE, Cost::RECOMMENDED).unwrap();
    std::fs::write(path, other).unwrap();
    sealed
}

fn disk_id(here: &Installation, vm: &str) -> String {
    here.vm(vm).unwrap()["disks"][0]["id"].as_str().unwrap().to_owned()
}

#[test]
fn a_truncated_image_is_refused() {
    let (here, image) = with_stopped_vm();
    let file = File::options().write(true).open(&image).unwrap();
    let whole = file.metadata().unwrap().len();
    file.set_len(whole - 4096).unwrap();
    refuses_to_start(&here, &image, &["truncated", &Size(whole).to_string()]);
    file.set_len(whole).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
}

#[test]
fn an_image_that_is_gone_or_is_a_link_is_refused() {
    let (here, image) = with_stopped_vm();
    let away = here.path("away.raw");
    std::fs::rename(&image, &away).unwrap();
    let said = here.refused(&["vm", "start", "sealed"]).unwrap();
    assert!(said.contains(text(&image).unwrap()), "{said}");
    assert!(!image.exists(), "it was created again");
    std::os::unix::fs::symlink(&away, &image).unwrap();
    refuses_to_start(&here, &away, &[text(&image).unwrap()]);
    std::fs::remove_file(&image).unwrap();
    std::fs::rename(&away, &image).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
}

/// A lock on the whole file that belongs to its open description, as another host's filter would hold it.
fn lock(file: &File) {
    let whole = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&whole)).unwrap();
}

#[test]
fn an_image_in_use_is_refused_and_not_deleted() {
    let (here, image) = with_stopped_vm();
    let file = File::options().read(true).write(true).open(&image).unwrap();
    lock(&file);
    refuses_to_start(&here, &image, &["use"]);
    let said = here.refused(&["vm", "delete", "sealed"]).unwrap();
    assert!(said.contains("use"), "{said}");
    assert!(image.exists());
    drop(file);
    assert_eq!(here.vm("sealed").unwrap()["lifecycle"], "ready");
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    here.vmseal(&["vm", "delete", "sealed"]).unwrap();
    assert!(!image.exists());
}

#[test]
fn a_datastore_that_is_not_the_one_it_was_is_refused() {
    let (here, image) = with_stopped_vm();
    let (store, away) = (here.path("datastore"), here.path("datastore.away"));
    std::fs::rename(&store, &away).unwrap();
    // As an unmounted file system leaves it: the directory is there, and empty.
    std::fs::create_dir(&store).unwrap();
    for arguments in [
        &["vm", "start", "sealed"][..],
        &create("new", "plain", "datastore=local,size=1MiB")[..],
        &["vm", "delete", "sealed"][..],
    ] {
        let said = here.refused(arguments).unwrap();
        println!("refused: {}", said.trim());
        assert!(said.contains(text(&store).unwrap()), "{said}");
        let found: Vec<_> = std::fs::read_dir(&store).unwrap().collect();
        assert!(found.is_empty(), "something was written: {found:?}");
    }
    std::fs::remove_dir(&store).unwrap();
    std::fs::rename(&away, &store).unwrap();
    assert!(image.exists());
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
}

/// A small file system in memory; unmounted when dropped. None without root.
struct SmallDatastore(PathBuf);

impl SmallDatastore {
    /// Mounts it and adds it as datastore `small`.
    fn add(here: &Installation, size: u64) -> Option<Self> {
        if !nix::unistd::Uid::effective().is_root() {
            vmseal_tests::skipped("it takes root to mount a small file system");
            return None;
        }
        let path = here.path("small");
        std::fs::create_dir(&path).unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size},mode=0755"), "tmpfs"])
            .arg(&path)
            .status()
            .unwrap();
        assert!(mounted.success());
        let small = Self(path);
        let path = text(&small.0).unwrap();
        here.vmseal(&["datastore", "add", "small", "--host", "here", "--path", path]).unwrap();
        Some(small)
    }
}

impl Drop for SmallDatastore {
    fn drop(&mut self) {
        // Lazily: a filter that the installation has yet to kill may hold a file open.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_disk_that_does_not_fit_fails_and_leaves_nothing() {
    let here = Installation::new().unwrap();
    let Some(small) = SmallDatastore::add(&here, 16 << 20) else { return };
    let image = here.path("large.raw");
    std::fs::write(&image, vec![0x5a; 32 << 20]).unwrap();
    let disk = format!("datastore=small,format=raw,image={}", text(&image).unwrap());
    // That of an image is seen before anything is made.
    for policy in ["encrypted", "plain"] {
        let said = here.refused(&create("large", policy, &disk)).unwrap();
        assert!(said.contains(text(&small.0).unwrap()), "{said}");
        let tasks = here.json(&["task", "list"]).unwrap();
        assert!(!tasks.to_string().contains("vm.create"), "{tasks}");
    }
    // Of an empty disk that takes all of its room at once its task says it.
    for (policy, encrypt) in [("sealed-whole", "--encrypt"), ("open-whole", "--plain")] {
        here.vmseal(&["policy", "create", policy, encrypt, "--preallocate"]).unwrap();
        let said = here.refused(&create("large", policy, "datastore=small,size=32MiB")).unwrap();
        println!("refused: {}", said.trim());
        let tasks = here.json(&["task", "list"]).unwrap();
        let last = tasks.as_array().unwrap().last().unwrap().clone();
        assert_eq!(last["state"], "failed", "{last}");
        assert_eq!(last["problem"]["code"], "no-space", "{last}");
        assert!(here.refused(&["vm", "show", "large"]).unwrap().contains("'large'"));
        let left = here.datastore_entries(&small.0).unwrap();
        assert!(left.is_empty(), "{left:?}");
    }
    // There is room for a smaller one.
    let disk = format!(
        "datastore=small,format=raw,image={}",
        text(&here.counter_image().unwrap()).unwrap()
    );
    here.vmseal(&create("fits", "encrypted", &disk)).unwrap();
    assert_eq!(here.boot_counter("fits").unwrap(), 1);
    here.vmseal(&["vm", "stop", "fits", "--force"]).unwrap();
}

/// The counting guest with its number on another page than its code, so that writing it needs room.
fn far_counter(path: &Path) {
    const PACKET: [u8; 16] = [16, 0, 1, 0, 0, 0x7e, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    counter_disk(path, 8 << 20).unwrap();
    let mut image = std::fs::read(path).unwrap();
    let found: Vec<_> =
        (0..512 - PACKET.len()).filter(|at| image[*at..].starts_with(&PACKET)).collect();
    assert_eq!(found.len(), 1, "the guest's disk address packet");
    // Which sector: the second 4096 bytes instead of the second 512.
    image[found[0] + 8] = 8;
    std::fs::write(path, &image[..4096]).unwrap();
    File::options().write(true).open(path).unwrap().set_len(8 << 20).unwrap();
}

#[test]
fn a_guest_on_a_full_datastore_gets_an_error_and_lives() {
    let here = Installation::new().unwrap();
    let Some(small) = SmallDatastore::add(&here, 4 << 20) else { return };
    let image = here.path("far.raw");
    far_counter(&image);
    let disk = format!("datastore=small,format=raw,image={}", text(&image).unwrap());
    here.vmseal(&create("full", "encrypted", &disk)).unwrap();

    // Write until there is no room left.
    let ballast = small.0.join("ballast");
    let filled = std::fs::write(&ballast, vec![0x5a; 8 << 20]);
    assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);

    here.vmseal(&["vm", "start", "full"]).unwrap();
    let mut console = here.console("full").unwrap();
    console.expect("VMSEAL-DISK-ERROR", 0).unwrap();
    let said = here.wait_alarm("full", "disk-errors").unwrap();
    println!("the alarm says: {said}");
    assert_eq!(here.vm("full").unwrap()["power"], "running");
    // It still runs: it answers what is typed, and once there is room it counts.
    console.type_text("x").unwrap();
    console.expect("x", 0).unwrap();
    std::fs::remove_file(&ballast).unwrap();
    console.type_text("r").unwrap();
    assert_eq!(console.next_count().unwrap(), 1);
    here.vmseal(&["vm", "stop", "full", "--force"]).unwrap();
    assert_eq!(here.boot_counter("full").unwrap(), 2, "nothing is lost");
    here.vmseal(&["vm", "stop", "full", "--force"]).unwrap();
}
