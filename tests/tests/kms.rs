//! Keys from a real KMS over KMIP: a VM's life while the KMS is there, while it is away, and after.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use vmseal_kmip::ResultReason;
use vmseal_kmip::client::{Client, Settings};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::testing::{Authority, Issued, PyKmip, Validity};
use vmseal_tests::eventually;
use vmseal_tests::header;
use vmseal_tests::installation::{Installation, LOUDEST, PASSPHRASE, text};
use vmseal_tests::rest::keep_metrics;
use vmseal_tests::scan::{Needle, Scanner, forms};

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
    asks_before_it_trusts(here, &untrusted);
    asks_for_each_before_it_trusts_any(here, kms);
    here.vmseal(&trust).unwrap();
    let request = here.vmseal(&["provider", "certificate", "kms", "--csr"]).unwrap();
    assert!(request.starts_with("-----BEGIN CERTIFICATE REQUEST-----"), "{request}");
    let (certificate, key) = (path("client.pem"), path("client.key"));
    let import = ["provider", "certificate", "kms", "--import", &certificate, "--key", &key];
    here.vmseal(&[&import, &given[..]].concat()).unwrap();
    // The search for keys below must not find the operator's own copy.
    std::fs::remove_file(&key).unwrap();
    let tested = here.vmseal(&["provider", "test", "kms", "--key"]).unwrap();
    assert!(tested.contains("one: KMIP 1.4") && tested.contains("destroyed a key"), "{tested}");
    let shown = here.json(&["provider", "show", "kms"]).unwrap();
    assert_eq!((&shown["kind"], &shown["status"]), (&"kmip".into(), &"normal".into()));
    here.vmseal(&["policy", "create", "from-kms", "--encrypt", "--provider", "kms"]).unwrap();
}

/// Of several servers all are trusted or none, and a fingerprint is one server's.
fn asks_for_each_before_it_trusts_any(here: &Installation, kms: &PyKmip) {
    let [one, two] = ["one", "two"].map(|alias| format!("{alias}=127.0.0.1:{}", kms.port()));
    let passphrase = here.path("passphrase");
    let given = ["--passphrase-file", text(&passphrase).unwrap()];
    let add = ["provider", "add", "pair", "--kms", &one, "--kms", &two];
    here.vmseal(&[&add[..], &given].concat()).unwrap();
    let trust = ["provider", "trust", "pair"];
    let refused = here.answered(&trust, "yes\nno\n").unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("nothing was trusted"), "{said}");
    assert_eq!(said.matches("(yes/no)").count(), 2, "{said}");
    let servers = here.json(&["provider", "show", "pair"]).unwrap()["kmip"]["servers"].clone();
    let trusts: Vec<_> = servers.as_array().unwrap().iter().map(|it| it["trust"].clone()).collect();
    assert_eq!(trusts, [Value::Null, Value::Null], "one is trusted");
    let known = "00:".repeat(31);
    let fingerprint = [&trust[..], &["--fingerprint", &known, "--dry-run"]].concat();
    let output = here.try_vmseal(&fingerprint).unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("say which with --kms"), "{said}");
    here.vmseal(&["provider", "remove", "pair"]).unwrap();
}

/// A server's certificate is trusted after a "yes" on a terminal alone, having been shown.
fn asks_before_it_trusts(here: &Installation, untrusted: &str) {
    let trust = ["provider", "trust", "kms"];
    let unasked = here.refused(&trust).unwrap();
    assert!(unasked.contains("--fingerprint"), "it does not say what to give: {unasked}");
    for answer in ["no\n", "\n", "yes, of course\n"] {
        let refused = here.answered(&trust, answer).unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("nothing was trusted"), "{said}");
        assert_eq!(here.refused(&["provider", "test", "kms"]).unwrap(), untrusted, "{answer:?}");
    }
    let trusted = here.answered(&trust, "yes\n").unwrap();
    let said = String::from_utf8_lossy(&trusted.stderr).into_owned();
    assert!(trusted.status.success() && said.contains("(yes/no)"), "{said}");
    let shown = here.json(&["provider", "show", "kms"]).unwrap().to_string();
    let fingerprint = said.lines().find_map(|line| line.trim().strip_prefix("SHA-256"));
    assert!(shown.contains(fingerprint.unwrap().trim()), "{shown} does not have that of {said}");
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

/// The secret number of a client's private key: of P-256, in an ECPrivateKey (RFC 5915) of version 1.
fn secret_number(client: &Issued) -> Vec<u8> {
    let key = client.private_key();
    let key = key.expose();
    let before = [2, 1, 1, 4, 32];
    let at = key.windows(before.len()).position(|bytes| bytes == before).unwrap() + before.len();
    key[at..at + 32].to_vec()
}

/// The KEKs of a KMS, the passphrase and the client's private key are in no file, log, metric, argument or
/// environment, and in no memory: but for the private key, with which the server's TLS library signs.
fn nothing_is_found(here: &Installation, keks: &[Vec<u8>], client: &Issued) {
    let passphrase = Needle { name: "the passphrase".into(), bytes: PASSPHRASE.into() };
    let mut needles: Vec<_> = keks.iter().flat_map(|kek| forms("the KEK", kek)).collect();
    needles.push(passphrase);
    let in_memory_of_server = Scanner::new(needles.clone()).unwrap();
    needles.extend(forms("the client's private key", &secret_number(client)));
    let scanner = Scanner::new(needles).unwrap();
    keep_metrics(here).unwrap();
    for log in ["server.log", "agent.log"] {
        let text = std::fs::read_to_string(here.path(log)).unwrap();
        assert!(text.contains("DEBUG request{request_id="), "{log} is not loud: {text}");
    }
    let given = ["passphrase", "kms-passphrase"].map(|name| here.path(name));
    let credentials =
        ["keys", "kms"].map(|of| here.path(&format!("credentials/vmseal-provider-{of}")));
    let mut found = scanner.directory(&here.path(""), &[given, credentials].concat()).unwrap();
    let server = here.own_processes()[0];
    for pid in here.own_processes().into_iter().chain(here.all_guest_processes()) {
        let memory = if pid == server { &in_memory_of_server } else { &scanner };
        found.extend(memory.memory(pid).unwrap());
        found.extend(scanner.arguments_and_environment(pid).unwrap());
    }
    assert_eq!(found, []);
}

#[test]
fn a_vm_lives_on_keys_of_a_kms_and_waits_locked_while_it_is_away() {
    let authority = Authority::new("kms");
    let mut kms = PyKmip::start(&authority);
    let client = authority.client("vmseal", Validity::Now);
    let mut here = Installation::logging(LOUDEST).unwrap();
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
    nothing_is_found(&here, &[kek], &client);

    // Losing the KMS does not touch a VM that runs, nor one that stops and starts on the same host.
    kms.kill();
    assert!(here.refused(&["provider", "test", "kms"]).unwrap().contains("cannot be used"));
    here.wait_alarm("kms", "provider-failing").unwrap();
    let shown = here.vm("sealed").unwrap();
    assert_eq!((&shown["power"], &shown["key_state"]), (&"running".into(), &"held".into()));
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    assert!(here.json(&["events"]).unwrap().to_string().contains("key.held-used"));

    // A host that has lost its keys needs the KMS.
    here.kill_agent();
    here.start_agent().unwrap();
    let said = wait_locked(&here, "sealed", "kms-unreachable");
    assert!(said.contains("refuses connections") && said.contains("provider show kms"), "{said}");
    let refused = here.refused(&["vm", "start", "sealed"]).unwrap();
    assert!(refused.contains("refuses connections"), "{refused}");
    assert_eq!(here.vm("sealed").unwrap()["disks"][0]["size"], 8 << 20);
    // Disks can be handled without a key, and their ciphertext taken to a safe place.
    let image = here.images("sealed").unwrap().remove(0);
    let copy = here.path("copy.sealed");
    let to = copy.to_str().unwrap();
    here.vmseal(&["disk", "export", "sealed", "disk0", "--format", "sealed", "--to", to]).unwrap();
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(&image).unwrap(), "another image");
    let raw = ["--format", "raw", "--plaintext", "--to", "/nowhere"];
    let refused = here.refused(&[&["disk", "export", "sealed", "disk0"], &raw[..]].concat());
    assert!(refused.unwrap().contains("refuses connections"), "{copy:?}");

    // Once it is back, the key comes by itself.
    kms.restart();
    here.wait_no_alarm("sealed", "vm-locked").unwrap();
    here.wait_no_alarm("kms", "provider-failing").unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 3);
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
    here.vmseal(&["policy", "delete", "from-kms"]).unwrap();
    here.vmseal(&["provider", "remove", "kms"]).unwrap();
}

/// Whether cryptsetup opens an image with a KEK as its key file.
fn opens(image: &Path, kek: &[u8]) -> bool {
    let directory = tempfile::tempdir().unwrap();
    let key = directory.path().join("key");
    std::fs::write(&key, kek).unwrap();
    let arguments = ["open", "--test-passphrase", "--batch-mode", "--key-file"];
    let output = Command::new("cryptsetup").args(arguments).arg(key).arg(image).output();
    output.unwrap().status.success()
}

/// How many key slots an image's header has.
fn key_slots(image: &Path) -> usize {
    let arguments = ["luksDump", "--dump-json-metadata"];
    let dump = Command::new("cryptsetup").args(arguments).arg(image).output().unwrap();
    let json: Value = serde_json::from_slice(&dump.stdout).unwrap();
    json["keyslots"].as_object().unwrap().len()
}

/// What is behind the header.
fn data(image: &Path) -> Vec<u8> {
    std::fs::read(image).unwrap().split_off(header::HEAD)
}

/// Begins to recrypt a VM, and kills the server after `when` has come; the next one is started, and the
/// task's end awaited. Gives the state that it ends in.
fn kill_while_recrypting(
    here: &mut Installation,
    provider: &str,
    when: impl FnOnce(&Installation, &str),
    between: impl FnOnce(),
) -> String {
    let begin = ["vm", "recrypt", "sealed", "--provider", provider, "--no-wait"];
    let task = here.json(&begin).unwrap()["id"].as_str().unwrap().to_owned();
    when(here, &task);
    here.kill_server();
    between();
    here.start_server().unwrap();
    let ended = eventually("the task ends", || {
        let task = here.json(&["task", "show", &task]).ok()?;
        (!task["ended"].is_null()).then_some(task)
    });
    ended.unwrap()["state"].as_str().unwrap().to_owned()
}

#[test]
fn a_vm_moves_from_the_native_provider_to_a_kms_and_back() {
    let authority = Authority::new("kms");
    let kms = PyKmip::start(&authority);
    let client = authority.client("vmseal", Validity::Now);
    let mut here = Installation::logging(LOUDEST).unwrap();
    add_provider(&here, &kms, &authority, &client);
    // A server that starts again can use it at once.
    let credential = here.path("credentials/vmseal-provider-kms");
    std::fs::write(&credential, PASSPHRASE).unwrap();
    std::fs::set_permissions(&credential, PermissionsExt::from_mode(0o400)).unwrap();
    let settings = Settings::new(kms.endpoint(), authority.trust(), client.identity());
    let own = Client::new(settings).unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let key_id = |here: &Installation| {
        KeyId::new(here.vm("sealed").unwrap()["key"]["key_id"].as_str().unwrap()).unwrap()
    };

    here.create_counter("sealed", "encrypted").unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 1);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    let image = here.images("sealed").unwrap().remove(0);
    let (before, native) = (data(&image), header::read(&image).unwrap());
    let planned = here.vmseal(&["vm", "recrypt", "sealed", "--provider", "kms", "--dry-run"]);
    assert!(planned.unwrap().contains("destroy the old key"));
    assert_eq!(header::read(&image).unwrap(), native);

    // The server is killed while it waits for the KMS to make the key; the next one goes on.
    let waiting = |here: &Installation, task: &str| {
        let making = || {
            let shown = here.json(&["task", "show", task]).ok()?;
            (shown["step"] == "make the new key").then_some(())
        };
        eventually("it waits for the KMS", making).unwrap();
    };
    kms.freeze();
    assert_eq!(kill_while_recrypting(&mut here, "kms", waiting, || kms.resume()), "done");
    assert_eq!(here.vm("sealed").unwrap()["provider"], "kms");
    assert_eq!((data(&image) == before, key_slots(&image)), (true, 1));
    let id = key_id(&here);
    let kek = runtime.block_on(own.get_key(&id)).unwrap().expose().to_vec();
    assert!(opens(&image, &kek));
    let first = kek.clone();
    // The inventory's key is not what the old header opens with.
    let moved = header::read(&image).unwrap();
    header::write(&image, &native).unwrap();
    assert!(!opens(&image, &kek));
    assert!(here.refused(&["vm", "start", "sealed"]).unwrap().contains("encrypted under key"));
    header::write(&image, &moved).unwrap();
    assert_eq!(here.boot_counter("sealed").unwrap(), 2);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();

    // Killed at any other moment: it opens, with one key, and what the old one was is gone.
    for pause in [5, 20, 60] {
        let old = key_id(&here);
        let moment = |_: &Installation, _: &str| {
            std::thread::sleep(std::time::Duration::from_millis(pause));
        };
        let state = kill_while_recrypting(&mut here, "kms", moment, || {});
        assert_eq!(state, "done", "killed after {pause} ms");
        assert_eq!(key_slots(&image), 1, "killed after {pause} ms");
        let gone = runtime.block_on(own.get_key(&old)).unwrap_err();
        assert_eq!(gone.refusal(), Some(ResultReason::ItemNotFound), "{gone}");
    }
    let (old, before) = (key_id(&here), data(&image));
    let kek = runtime.block_on(own.get_key(&old)).unwrap().expose().to_vec();
    assert!(opens(&image, &kek));

    // And back; PyKMIP forgets a key that is destroyed.
    here.vmseal(&["vm", "recrypt", "sealed", "--provider", "keys"]).unwrap();
    assert_eq!(here.vm("sealed").unwrap()["provider"], "keys");
    assert!(!opens(&image, &kek), "the old key opens the disk still");
    assert_eq!((data(&image) == before, key_slots(&image)), (true, 1));
    let gone = runtime.block_on(own.key_state(&old)).unwrap_err();
    assert_eq!(gone.refusal(), Some(ResultReason::ItemNotFound), "{gone}");
    assert_eq!(here.boot_counter("sealed").unwrap(), 3);
    nothing_is_found(&here, &[first, kek], &client);
    here.vmseal(&["vm", "stop", "sealed", "--force"]).unwrap();
    here.vmseal(&["policy", "delete", "from-kms"]).unwrap();
    here.vmseal(&["provider", "remove", "kms"]).unwrap();
}

/// The servers of the provider `kms`, in their order.
fn servers(here: &Installation) -> Vec<String> {
    let shown = here.json(&["provider", "show", "kms"]).unwrap();
    let servers = shown["kmip"]["servers"].as_array().unwrap();
    servers.iter().map(|server| server["alias"].as_str().unwrap().to_owned()).collect()
}

/// Waits until the list shows the provider `kms` with a status.
fn wait_status(here: &Installation, status: &str) {
    let listed = || {
        let list = here.vmseal(&["provider", "list", "-o", "csv"]).ok()?;
        list.lines().any(|line| line.contains("kms") && line.contains(status)).then_some(())
    };
    eventually(&format!("kms is {status}"), listed).unwrap();
}

/// Servers are added, tested, moved, given another address and removed, by what an operator types.
fn changes_servers(here: &Installation, kms: &PyKmip, other: &mut PyKmip) {
    let authority = here.path("authority.pem");
    let authority = text(&authority).unwrap();
    let same = format!("two=127.0.0.1:{}", kms.port());
    let add = ["provider", "server", "add", "kms", &same];
    let planned = here.vmseal(&[&add[..], &["--dry-run"]].concat()).unwrap();
    assert!(planned.contains("one, two"), "{planned}");
    assert_eq!(servers(here), ["one"], "it was tried only");
    here.vmseal(&add).unwrap();
    wait_status(here, "degraded");
    here.vmseal(&["provider", "trust", "kms", "--kms", "two", "--authority", authority]).unwrap();
    let test = ["provider", "test", "kms", "--key"];
    let tested = here.vmseal(&test).unwrap();
    assert!(tested.contains("the servers replicate"), "{tested}");
    wait_status(here, "normal");
    let elsewhere = format!("two=127.0.0.1:{}", other.port());
    here.vmseal(&["provider", "server", "set", "kms", &elsewhere]).unwrap();
    let tested = here.refused(&test).unwrap();
    assert!(tested.contains("the servers do not replicate"), "{tested}");
    here.vmseal(&["provider", "server", "move", "kms", "two", "--to", "1"]).unwrap();
    assert_eq!(servers(here), ["two", "one"]);
    let refused = here.refused(&["provider", "server", "move", "kms", "two", "--to", "3"]).unwrap();
    assert!(refused.contains("1 to 2"), "{refused}");
    other.kill();
    assert!(here.refused(&["provider", "test", "kms"]).unwrap().contains("1 of 2 servers"));
    wait_status(here, "degraded");
    here.wait_alarm("kms", "provider-degraded").unwrap();
    here.vmseal(&["provider", "server", "remove", "kms", "two"]).unwrap();
    here.wait_no_alarm("kms", "provider-degraded").unwrap();
    let last = here.refused(&["provider", "server", "remove", "kms", "one"]).unwrap();
    assert!(last.contains("the only server"), "{last}");
}

#[test]
fn a_provider_is_changed_by_every_verb_and_outlives_its_passphrase() {
    let authority = Authority::new("kms");
    let (kms, mut other) = (PyKmip::start(&authority), PyKmip::start(&authority));
    let client = authority.client("vmseal", Validity::Now);
    let mut here = Installation::new().unwrap();
    add_provider(&here, &kms, &authority, &client);
    changes_servers(&here, &kms, &mut other);

    // Another passphrase; a common one is refused.
    let write = |here: &Installation, name: &str, content: &str| {
        let path = here.path(name);
        std::fs::write(&path, content).unwrap();
        text(&path).unwrap().to_owned()
    };
    let first = text(&here.path("kms-passphrase")).unwrap().to_owned();
    let second = write(&here, "second", "of no use to anybody else");
    let trivial = write(&here, "trivial", "passwordpassword");
    let change = ["provider", "passphrase", "kms", "--old-passphrase-file", &first];
    let refused = [&change[..], &["--passphrase-file", &trivial]].concat();
    assert!(here.refused(&refused).unwrap().contains("repeats its beginning"));
    here.vmseal(&[&change[..], &["--passphrase-file", &second]].concat()).unwrap();

    // After a restart it is sealed, which is an alarm of the default provider.
    here.vmseal(&["provider", "default", "kms"]).unwrap();
    here.kill_server();
    here.start_server().unwrap();
    here.wait_alarm("kms", "provider-sealed").unwrap();
    let unlock = ["provider", "unlock", "kms", "--passphrase-file", &first];
    here.refused(&unlock).unwrap();

    // The passphrase is lost: another key, and its certificate.
    let third = write(&here, "third", "written down this time");
    let replace = ["provider", "certificate", "kms", "--replace", "--csr"];
    let given = ["--passphrase-file", &third];
    let planned = here.vmseal(&[&replace[..], &given, &["--dry-run"]].concat()).unwrap();
    assert!(planned.contains("make a new client key"), "{planned}");
    let request = here.vmseal(&[&replace[..], &given].concat()).unwrap();
    let signed = write(&here, "signed.pem", &authority.sign(&request));
    here.kill_server();
    here.start_server().unwrap();
    let import = ["provider", "certificate", "kms", "--import"];
    let unasked = here.refused(&[&import[..], &[&signed]].concat()).unwrap();
    assert!(unasked.contains("--passphrase-file"), "{unasked}");
    here.vmseal(&[&import[..], &[&signed], &given].concat()).unwrap();
    here.wait_no_alarm("kms", "provider-sealed").unwrap();
    here.vmseal(&["provider", "test", "kms", "--key"]).unwrap();

    // Another name is another client.
    authority.client("somebody", Validity::Now).write(&here.path(""), "somebody");
    let [certificate, key] = ["somebody.pem", "somebody.key"].map(|name| here.path(name));
    let (certificate, key) = (text(&certificate).unwrap(), text(&key).unwrap());
    let named = [&import[..], &[certificate, "--key", key], &given].concat();
    assert!(here.refused(&named).unwrap().contains("--force"));
    here.vmseal(&[&named[..], &["--force"]].concat()).unwrap();

    // A backup brings it back under another name, with its id.
    let backup = here.path("kms.backup");
    let backup = text(&backup).unwrap();
    here.vmseal(&[&["provider", "backup", "kms", "--to", backup], &given[..]].concat()).unwrap();
    here.vmseal(&[&["provider", "verify", "kms", "--from", backup], &given[..]].concat()).unwrap();
    let id = here.json(&["provider", "show", "kms"]).unwrap()["id"].clone();
    here.vmseal(&["provider", "default", "keys"]).unwrap();
    here.vmseal(&["policy", "delete", "from-kms"]).unwrap();
    here.vmseal(&["provider", "remove", "kms"]).unwrap();
    let restore =
        ["provider", "add", "kms", "--restore", backup, "--backup-passphrase-file", &third];
    here.vmseal(&[&restore[..], &["--passphrase-file", &first]].concat()).unwrap();
    let shown = here.json(&["provider", "show", "kms"]).unwrap();
    assert_eq!((&shown["id"], &shown["status"]), (&id, &"normal".into()));
    here.vmseal(&["provider", "test", "kms", "--key"]).unwrap();
}
