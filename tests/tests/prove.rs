//! Proofs that VMs are encrypted: of a running VM with a snapshot, of one that is off, of one in the clear, and of one
//! with a single sector in the clear.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::shell_guest::{self, booted};

const VM: &str = "web";

/// Where the data of an encrypted disk begins in its image, in bytes.
const HEADER: u64 = 16 << 20;

const SECTOR: u64 = 4096;

/// A proof that does not end well: its exit status, and what it prints.
fn refused(here: &Installation, arguments: &[&str]) -> (i32, String, String) {
    let output = here.try_vmseal(&[&["vm", "prove", VM], arguments].concat()).unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// The last proof.
fn last(here: &Installation) -> serde_json::Value {
    // The exit status is that of the verdict.
    serde_json::from_str(&refused(here, &["--last", "-o", "json"]).1).unwrap()
}

/// Has openssl check a report as docs/proof.md says.
fn openssl_verifies(here: &Installation, proof: &serde_json::Value) -> bool {
    let directory = here.path("checked");
    std::fs::create_dir_all(&directory).unwrap();
    let signed = &proof["signed"];
    let part = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    let signature = STANDARD.decode(part(&signed["signature"]["value"])).unwrap();
    std::fs::write(directory.join("report"), part(&signed["report"])).unwrap();
    std::fs::write(directory.join("signature"), signature).unwrap();
    std::fs::write(directory.join("host.pem"), part(&signed["signature"]["certificate"])).unwrap();
    let recipe = include_str!("../../docs/proof.md").lines();
    let recipe: Vec<_> = recipe.filter(|line| line.starts_with("openssl ")).collect();
    assert_eq!(recipe.len(), 3, "{recipe:?}");
    let recipe = recipe.join("\n").replace("DATA-DIR", text(&here.path("server")).unwrap());
    let ended = Command::new("sh").args(["-ec", &recipe]).current_dir(directory).output().unwrap();
    eprintln!("{}", String::from_utf8_lossy(&[ended.stdout, ended.stderr].concat()));
    ended.status.success()
}

/// Each part of what was read has the entropy of ciphertext, or no data.
fn has_entropy(data: &serde_json::Value) {
    let parts = data["entropy"].as_array().unwrap();
    let known: Vec<_> = parts.iter().filter_map(serde_json::Value::as_u64).collect();
    assert!(parts.len() == 16 && known.iter().all(|part| *part > 7900), "{data}");
    assert_eq!(data["entropy_min"].as_u64(), known.iter().min().copied(), "{data}");
}

#[test]
fn an_encrypted_vm_is_proved_to_be_and_one_sector_in_the_clear_is_found() {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, VM, "encrypted", &[]).unwrap();
    let console = booted(&here, VM).unwrap();
    here.vmseal(&["snapshot", "create", VM, "one"]).unwrap();
    let none = refused(&here, &["--last"]);
    assert!(none.2.contains("has no proof yet"), "{none:?}");
    let shown = here.vmseal(&["vm", "prove", VM, "--all"]).unwrap();
    assert!(shown.starts_with(&format!("VM {VM}: encrypted; every byte was read")), "{shown}");
    assert!(shown.contains("signed by host"), "{shown}");
    // Its first part has what the guest boots from: ciphertext, of 8 bits a byte as nearly as three digits tell.
    let parts = "\n  disk disk0: entropy of its 16 parts, in bits a byte: ";
    let first = shown.split_once(parts).and_then(|(_, behind)| behind.split(' ').next());
    let first: f64 = first.and_then(|number| number.parse().ok()).unwrap();
    assert!((7.9..=8.0).contains(&first), "{shown}");

    let proof = last(&here);
    let report = &proof["report"];
    assert_eq!(report["verdict"], "encrypted", "{report}");
    let images = report["images"].as_array().unwrap();
    let kinds: Vec<_> = images.iter().map(|image| image["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["image", "layer"], "{report}");
    for image in images {
        assert_eq!(image["header"]["authentic"], true, "{image}");
        assert_eq!(image["header"]["keys"][0], report["key"], "{image}");
        assert_eq!((&image["data"]["clear"], &image["data"]["equal"]), (&0.into(), &0.into()));
        has_entropy(&image["data"]);
    }
    assert!(images[0]["data"]["opened"].as_u64().unwrap() > 1000, "{report}");
    // What is signed is what is shown.
    let signed: serde_json::Value =
        serde_json::from_str(proof["signed"]["report"].as_str().unwrap()).unwrap();
    assert_eq!(&signed, report);
    assert!(openssl_verifies(&here, &proof));
    let mut changed = proof.clone();
    changed["signed"]["report"] = proof["signed"]["report"].as_str().unwrap().to_uppercase().into();
    assert!(!openssl_verifies(&here, &changed), "openssl takes a report that was changed");

    // Off, a sample of the same seed reads the same.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    drop(console);
    let shown = here.vmseal(&["vm", "prove", VM, "--seed", "7"]).unwrap();
    assert!(shown.contains("a sample was read (seed 7)"), "{shown}");

    // Somebody writes a sector in the clear into the image, where the disk has data.
    let path = here.images(VM).unwrap()[0].clone();
    let image = File::options().read(true).write(true).open(&path).unwrap();
    let mut sector = [0; SECTOR as usize];
    let has_data = |number: &u64| {
        let mut bytes = [0; SECTOR as usize];
        image.read_exact_at(&mut bytes, HEADER + number * SECTOR).unwrap();
        bytes.iter().any(|byte| *byte != 0)
    };
    let number = (100..).find(has_data).unwrap();
    let text = b"what the guest has written, in the clear\n";
    sector.chunks_mut(text.len()).for_each(|part| part.copy_from_slice(&text[..part.len()]));
    image.write_all_at(&sector, HEADER + number * SECTOR).unwrap();
    let found = refused(&here, &["--all"]);
    assert!(found.0 == 1 && found.2.contains("is not encrypted"), "{found:?}");
    let report = last(&here)["report"].clone();
    assert_eq!(report["verdict"], "not_encrypted", "{report}");
    let data = &report["images"][0]["data"];
    assert_eq!(data["clear"], 1, "{data}");
    assert_eq!(data["findings"][0]["sector"], number, "{data}");
    assert_eq!(data["findings"][0]["offset"], HEADER + number * SECTOR, "{data}");
    let events = here.json(&["events", "--kind", "vm.proved"]).unwrap();
    assert_eq!(events.as_array().unwrap().len(), 3, "{events}");
    // An older report is found by the digest in its event, and by its task.
    let digest = proof["digest"].as_str().unwrap();
    assert!(events[0]["detail"].as_str().unwrap().ends_with(&format!("; report {digest}")));
    for name in [digest, proof["report"]["task"].as_str().unwrap()] {
        assert_eq!(here.json(&["vm", "prove", VM, "--report", name]).unwrap(), proof);
    }
    let none = refused(&here, &["--report", &"0".repeat(64)]);
    assert!(none.2.contains("no proof of VM 'web' that is kept"), "{none:?}");
    // A report that was written to a file is worth as much when the VM is gone.
    here.vmseal(&["vm", "delete", VM]).unwrap();
    assert!(refused(&here, &["--last"]).2.contains("no VM"), "the VM is there");
    assert!(openssl_verifies(&here, &proof));
    let report = here.path("checked").join("report");
    let sum = Command::new("sha256sum").arg(report).output().unwrap();
    assert!(sum.stdout.starts_with(digest.as_bytes()), "{sum:?}");
    let told = here.json(&["events", "--kind", "vm.proved", "--target", VM]).unwrap();
    assert_eq!(told[0]["detail"], events[0]["detail"]);
}

#[test]
fn a_vm_in_the_clear_is_not_encrypted() {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, VM, "plain", &[]).unwrap();
    let (status, shown, _) = refused(&here, &[]);
    assert!(status == 1 && shown.contains("not encrypted; no header"), "{shown}");
    let planned = here.vmseal(&["vm", "prove", VM, "--dry-run"]).unwrap();
    assert!(planned.contains("read the files of the VM"), "{planned}");
}
