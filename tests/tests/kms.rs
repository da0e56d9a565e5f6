//! Keys from a real KMS over KMIP: a VM's life while the KMS is there, while it is away, and after.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_kmip::ResultReason;
use vmseal_kmip::client::{Client, Settings};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::testing::{Authority, Issued, PyKmip, Validity};
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, PASSPHRASE, text};
use vmseal_tests::scan::{Scanner, forms};

/// Adds the provider `kms` and the policy `from-kms`, by the commands that an operator types.
fn add_provider(here: &Installation, kms: &PyKmip, authority: &Authority, client: &Issued) {
    client.write(&here.path(""), "client");
    std::fs::write(here.path("authority.pem"), authority.certificate()).unwrap();
    std::fs::write(here.path("kms-passphrase"), PASSPHRASE).unwrap();
    let path = |name| text(&here.path(name)).unwrap().to_owned();
    let given = ["--passphrase-file", &path("kms-passphrase")];
    let server = format!("one=127.0.0.1:{}", kms.port());
    here.vmseal(&[&["provider", "add", "kms", "--kms", &server], &given[..]].concat()).unwrap();
    let untrusted = here.refused(&["provider", "test", "kms"]).unwrap();
    assert!(untrusted.contains("1 of 1 servers cannot be used"), "{untrusted}");
    let trust = ["provider", "trust", "kms", "--authority", &path("authority.pem")];
    let tried = here.vmseal(&[&trust[..], &["--dry-run"]].concat()).unwrap();
    assert!(tried.contains("what is signed by"), "{tried}");
    assert_eq!(here.refused(&["provider", "test", "kms"]).unwrap(), untrusted, "it is trusted");
    here.vmseal(&trust).unwrap();
    let request = here.vmseal(&["provider", "certificate", "kms", "--csr"]).unwrap();
    assert!(request.starts_with("-----BEGIN CERTIFICATE REQUEST-----"), "{request}");
    let (certificate, key) = (path("client.pem"), path("client.key"));
    let import = ["provider", "certificate", "kms", "--import", &certificate, "--key", &key];
    here.vmseal(&[&import, &given[..]].concat()).unwrap();
    // The operator's copy of the key is the operator's.
    std::fs::remove_file(&key).unwrap();
    let tested = here.vmseal(&["provider", "test", "kms", "--key"]).unwrap();
    assert!(tested.contains("one: KMIP 1.4") && tested.contains("destroyed a key"), "{tested}");
    let shown = here.json(&["provider", "show", "kms"]).unwrap();
    assert_eq!((&shown["kind"], &shown["status"]), (&"kmip".into(), &"normal".into()));
    here.vmseal(&["policy", "add", "from-kms", "--encrypt", "--provider", "kms"]).unwrap();
}

/// Waits until a VM is locked for this reason; gives the alarm's words.
fn wait_locked(here: &Installation, vm: &str, reason: &str) -> String {
    let alarm = eventually(&format!("{vm} is locked: {reason}"), || {
        let alarms = here.alarms(vm).ok()?;
        let found = |alarm: &&Value| alarm["code"] == "vm-locked" && alarm["reason"] == reason;
        alarms.iter().find(found).cloned()
    });
    alarm.unwrap()["detail"].as_str().unwrap().to_owned()
}

#[test]
fn a_vm_lives_on_keys_of_a_kms_and_waits_locked_while_it_is_away() {
    let authority = Authority::new("kms");
    let mut kms = PyKmip::start(&authority);
    let client = authority.client("vmseal", Validity::Now);
    let mut here = Installation::new().unwrap();
    add_provider(&here, &kms, &authority, &client);
    here.create_counter("sealed", "from-kms").unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 1);

    // The key's bytes, got without asking any of our processes, are nowhere.
    let shown = here.vm("sealed").unwrap();
    let id = KeyId::new(shown["key"]["key_id"].as_str().unwrap()).unwrap();
    let settings = Settings::new(kms.endpoint(), authority.trust(), client.identity());
    let own = Client::new(settings).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let kek = runtime.block_on(own.get_key(&id)).unwrap().expose().to_vec();
    let scanner = Scanner::new(forms("the KEK", &kek)).unwrap();
    let mut found = scanner.directory(&here.path(""), &[]).unwrap();
    for pid in here.own_processes().into_iter().chain(here.all_guest_processes()) {
        found.extend(scanner.memory(pid).unwrap());
        found.extend(scanner.arguments_and_environment(pid).unwrap());
    }
    assert_eq!(found, []);

    // Losing the KMS does not touch a VM that runs, nor one that stops and starts on the same host.
    kms.kill();
    assert!(here.refused(&["provider", "test", "kms"]).unwrap().contains("cannot be used"));
    here.wait_alarm("kms", "provider-failing").unwrap();
    let shown = here.vm("sealed").unwrap();
    assert_eq!((&shown["power"], &shown["key_state"]), (&"running".into(), &"held".into()));
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();

    // A host that has lost its keys needs the KMS.
    here.kill_agent();
    here.start_agent().unwrap();
    let said = wait_locked(&here, "sealed", "kms-unreachable");
    assert!(said.contains("refuses connections") && said.contains("provider show kms"), "{said}");
    let refused = here.refused(&["vm", "start", "sealed"]).unwrap();
    assert!(refused.contains("refuses connections"), "{refused}");
    assert_eq!(here.vm("sealed").unwrap()["disks"][0]["size"], 8 << 20);
    here.images("sealed").unwrap();

    // Once it is back, the key comes by itself.
    kms.restart();
    here.wait_no_alarm("sealed", "vm-locked").unwrap();
    here.wait_no_alarm("kms", "provider-failing").unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();

    // A locked VM can be deleted, and its key is destroyed as soon as that can be asked.
    kms.kill();
    here.kill_agent();
    here.start_agent().unwrap();
    wait_locked(&here, "sealed", "kms-unreachable");
    let image = here.images("sealed").unwrap().remove(0);
    here.vmseal(&["vm", "delete", "sealed"]).unwrap();
    assert!(!image.exists());
    let refused = here.json(&["events"]).unwrap().to_string();
    assert!(refused.contains("key.destruction-pending"), "{refused}");
    kms.restart();
    eventually("the key is destroyed", || {
        let events = here.json(&["events"]).ok()?;
        events.to_string().contains("key.destroyed").then_some(())
    })
    .unwrap();
    let gone = runtime.block_on(own.key_state(&id)).unwrap_err();
    assert_eq!(gone.refusal(), Some(ResultReason::ItemNotFound), "{gone}");
    here.vmseal(&["policy", "remove", "from-kms"]).unwrap();
    here.vmseal(&["provider", "remove", "kms"]).unwrap();
}
