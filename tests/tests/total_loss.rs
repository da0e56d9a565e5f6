//! The drills of docs/total-loss.md: a server is lost with its directory, and comes back from its backup; or it comes back
//! from the backup of its key provider and the datastores alone. Guests that ran run on.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_tests::eventually;
use vmseal_tests::installation::{Installation, PASSPHRASE, create, text};

/// The passphrase of backups of the server.
const OF_BACKUP: &str = "another passphrase, of the backup";

fn file(here: &Installation, name: &str, content: &str) -> String {
    let path = here.path(name);
    std::fs::write(&path, content).unwrap();
    text(&path).unwrap().to_owned()
}

/// What `datastore adopt` says of a VM.
pub(crate) fn line<'a>(adoption: &'a Value, name: &str) -> &'a Value {
    let vms = adoption["vms"].as_array().unwrap();
    vms.iter().find(|vm| vm["name"] == name).unwrap_or_else(|| panic!("no {name}: {adoption}"))
}

pub(crate) fn stop(here: &Installation, vm: &str) {
    here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
}

/// A new server gets what the former one had beside its datastores: the keys, from the provider's backup, and the policies.
pub(crate) fn keys_and_policies(here: &Installation) {
    let given = file(here, "passphrase", PASSPHRASE);
    let backup = text(&here.path("keys.backup")).unwrap().to_owned();
    here.vmseal(&[
        "provider",
        "add",
        "keys",
        "--restore",
        &backup,
        "--backup-passphrase-file",
        &given,
        "--passphrase-file",
        &given,
    ])
    .unwrap();
    here.vmseal(&["policy", "create", "encrypted", "--encrypt"]).unwrap();
    here.vmseal(&["policy", "create", "plain", "--plain"]).unwrap();
}

#[test]
fn a_server_that_is_lost_comes_back_from_its_backup_and_takes_in_what_is_newer() {
    let mut here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    let given = file(&here, "backup.passphrase", OF_BACKUP);
    let backup = text(&here.path("server.backup")).unwrap().to_owned();
    let data_dir = text(&here.path("server")).unwrap().to_owned();
    let write = ["server", "backup", "--to", &backup, "--passphrase-file", &given];
    here.vmseal(&[&write[..], &["--dry-run"]].concat()).unwrap();
    assert!(!here.path("server.backup").exists());
    here.vmseal(&write).unwrap();
    let bytes = std::fs::read(&backup).unwrap();
    assert!(here.refused(&write).unwrap().contains("exists already"));
    assert!(std::fs::read(&backup).unwrap() == bytes);
    // Since the backup, a VM that runs has got more memory, and its users say more of it.
    let web = here.vm("web").unwrap()["id"].as_str().unwrap().to_owned();
    let place = here.path("datastore").join(&web).join("vm.json");
    let set = ["vm", "set", "web", "--memory", "64MiB", "--on-drain", "stop"];
    here.vmseal(&set).unwrap();
    // The host writes it after it has answered.
    let described = || {
        let read: Value = serde_json::from_slice(&std::fs::read(&place).ok()?).ok()?;
        (read["about"]["on_drain"] == "stop").then_some(())
    };
    eventually("its descriptor says so", described).unwrap();
    // Newer than the backup: one that runs, and one that does not.
    here.create_counter("later", "encrypted").unwrap();
    assert_eq!(here.boot_counter("later").unwrap(), 1);
    here.create_counter("cold", "encrypted").unwrap();
    let later = here.vm("later").unwrap()["id"].as_str().unwrap().to_owned();
    let guests = here.guest_processes("qemu-system-x86_64");
    assert_eq!(guests.len(), 2);

    let restore =
        ["server", "restore", &backup, "--data-dir", &data_dir, "--passphrase-file", &given];
    assert!(here.refused(&restore).unwrap().contains("is not empty"), "over a server that runs");
    here.lose_server().unwrap();
    let wrong = file(&here, "wrong.passphrase", PASSPHRASE);
    let refused = [&restore[..6], &[&wrong]].concat();
    assert!(here.refused(&refused).unwrap().contains("passphrase is wrong"));
    assert!(!here.path("server").exists());
    here.vmseal(&[&restore[..], &["--dry-run"]].concat()).unwrap();
    assert!(!here.path("server").exists());
    let told: Value = here.json(&restore).unwrap();
    assert_eq!((&told["vms"], &told["hosts"]), (&1.into(), &1.into()), "{told}");
    here.start_server().unwrap();
    here.wait_host().unwrap();

    here.wait_power("web", "running").unwrap();
    here.wait_alarm(&later, "vm-unknown").unwrap();
    assert_eq!(here.guest_processes("qemu-system-x86_64"), guests, "a guest was ended");
    let found = here.json(&["datastore", "adopt", "local"]).unwrap();
    assert_eq!(line(&found, "web")["status"], "known");
    // It was compared before its host was told of it, and this stays when the descriptor is written anew.
    let compared = || {
        let events = here.json(&["events", "--kind", "vm.compared", "--target", "web"]).ok()?;
        let said = events.to_string();
        (said.contains("memory: 64 MiB on the datastore") && !said.contains("nothing"))
            .then_some(())
    };
    eventually("an event says what differs", compared).unwrap();
    let differs = [
        "memory: 64 MiB on the datastore, 32 MiB in the inventory",
        "on-drain: stop on the datastore, migrate in the inventory",
    ];
    assert_eq!(line(&found, "web")["differs"], serde_json::json!(differs), "{found}");
    here.vmseal(&set).unwrap();
    let told = here.json(&["datastore", "adopt", "local", "--dry-run"]).unwrap();
    assert!(line(&told, "web")["differs"].is_null(), "{told}");
    assert_eq!(line(&found, "later")["status"], "begun", "{found}");
    assert_eq!(line(&found, "cold")["status"], "begun", "{found}");
    here.wait_no_alarm(&later, "vm-unknown").unwrap();
    here.wait_power("later", "running").unwrap();
    assert_eq!(here.guest_processes("qemu-system-x86_64"), guests);
    for vm in ["web", "later"] {
        stop(&here, vm);
        assert_eq!(here.boot_counter(vm).unwrap(), 2, "{vm}: what its guest wrote is gone");
    }
    assert_eq!(here.boot_counter("cold").unwrap(), 1);
}

#[test]
fn a_vm_that_was_recrypted_since_the_backup_gets_the_key_that_its_disks_name() {
    let mut here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    stop(&here, "web");
    let given = file(&here, "backup.passphrase", OF_BACKUP);
    let backup = text(&here.path("server.backup")).unwrap().to_owned();
    let data_dir = text(&here.path("server")).unwrap().to_owned();
    here.vmseal(&["server", "backup", "--to", &backup, "--passphrase-file", &given]).unwrap();
    let old = here.vm("web").unwrap();
    here.vmseal(&["vm", "recrypt", "web"]).unwrap();
    let new = here.vm("web").unwrap();
    assert_ne!(old["key"], new["key"]);
    let place = here.path("datastore").join(new["id"].as_str().unwrap()).join("vm.json");
    let described =
        || -> Value { serde_json::from_slice(&std::fs::read(&place).unwrap()).unwrap() };
    let named = described()["key"].clone();

    // Its host restarts, and is told the old key.
    here.lose_server().unwrap();
    here.kill_agent();
    let restore =
        ["server", "restore", &backup, "--data-dir", &data_dir, "--passphrase-file", &given];
    here.vmseal(&restore).unwrap();
    here.start_server().unwrap();
    here.start_agent().unwrap();
    assert_eq!(here.vm("web").unwrap()["key"], old["key"]);
    here.wait_alarm("web", "key-differs").unwrap();
    assert_eq!(described()["key"], named, "the descriptor was overwritten with the old key");
    let found = here.json(&["datastore", "adopt", "local"]).unwrap();
    assert_eq!(line(&found, "web")["status"], "begun", "{found}");
    here.wait_no_alarm("web", "key-differs").unwrap();
    assert_eq!(here.vm("web").unwrap()["key"], new["key"]);
    assert_eq!(here.boot_counter("web").unwrap(), 2);
}

#[test]
fn a_vm_that_has_got_a_disk_a_card_and_a_snapshot_since_the_backup_has_them_again() {
    let mut here = Installation::new().unwrap();
    here.create_counter("web", "encrypted").unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 1);
    stop(&here, "web");
    let given = file(&here, "backup.passphrase", OF_BACKUP);
    let backup = text(&here.path("server.backup")).unwrap().to_owned();
    let data_dir = text(&here.path("server")).unwrap().to_owned();
    here.vmseal(&["server", "backup", "--to", &backup, "--passphrase-file", &given]).unwrap();
    let old = here.vm("web").unwrap();
    let first = old["disks"][0]["name"].as_str().unwrap();
    let more = "datastore=local,size=4MiB,name=more";
    here.vmseal(&["disk", "add", "web", "--disk", more]).unwrap();
    here.vmseal(&["disk", "resize", "web", first, "--size", "16MiB"]).unwrap();
    here.vmseal(&["nic", "add", "web", "--nic", "user,name=second"]).unwrap();
    here.vmseal(&["snapshot", "create", "web", "since"]).unwrap();
    let new = here.vm("web").unwrap();
    let place = here.path("datastore").join(new["id"].as_str().unwrap()).join("vm.json");
    // The host writes it after it has answered.
    let described = || {
        let read: Value = serde_json::from_slice(&std::fs::read(&place).ok()?).ok()?;
        let nics = read["nics"].as_array()?;
        let is_taken = read["snapshots"][0]["name"] == "since";
        (nics.last()?["name"] == "second" && is_taken && read["mac"].is_string()).then_some(())
    };
    eventually("its descriptor has the card and the snapshot", described).unwrap();

    // Its host restarts, too, and has to be told of its VMs.
    here.lose_server().unwrap();
    here.kill_agent();
    let restore =
        ["server", "restore", &backup, "--data-dir", &data_dir, "--passphrase-file", &given];
    here.vmseal(&restore).unwrap();
    here.start_server().unwrap();
    here.start_agent().unwrap();
    here.wait_alarm("web", "inventory-older").unwrap();
    assert_eq!(here.vm("web").unwrap()["disks"], old["disks"]);
    let id = new["id"].as_str().unwrap();
    for change in [&["vm", "start", "web"][..], &["nic", "add", "web", "--nic", "user,name=third"]]
    {
        let refused = here.refused(change).unwrap();
        assert!(refused.contains(&format!("datastore adopt here:local --vm {id}")), "{refused}");
    }
    assert!(described().is_some(), "the descriptor was overwritten with the older devices");
    let tried = here.json(&["datastore", "adopt", "local", "--dry-run"]).unwrap();
    assert_eq!(line(&tried, "web")["status"], "possible", "{tried}");
    assert_eq!(line(&tried, "web")["newer"].as_array().unwrap().len(), 4, "{tried}");
    assert_eq!(here.vm("web").unwrap()["disks"], old["disks"], "a dry run");
    let found = here.json(&["datastore", "adopt", "local"]).unwrap();
    assert_eq!(line(&found, "web")["status"], "begun", "{found}");
    let after = here.vm("web").unwrap();
    for (index, disk) in new["disks"].as_array().unwrap().iter().enumerate() {
        for field in ["id", "name", "size", "encrypted"] {
            assert_eq!(after["disks"][index][field], disk[field], "{field}: {after}");
        }
    }
    let card = |vm: &Value| {
        let last = vm["nics"].as_array().unwrap().last().unwrap().clone();
        (last["name"].clone(), last["mac"].clone())
    };
    assert_eq!(card(&after), card(&new));
    let since = here.json(&["snapshot", "show", "web", "since"]).unwrap();
    assert_eq!(since["current"], true, "{since}");
    here.wait_no_alarm("web", "inventory-older").unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 2);
    stop(&here, "web");
    let again = here.json(&["datastore", "adopt", "local"]).unwrap();
    assert_eq!(line(&again, "web")["status"], "known", "{again}");
    assert!(line(&again, "web")["newer"].is_null(), "{again}");
    // What its guest wrote after the snapshot is gone.
    here.vmseal(&["snapshot", "revert", "web", "since"]).unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 2);
    stop(&here, "web");
    here.vmseal(&["snapshot", "delete", "web", "since"]).unwrap();
}

#[test]
fn with_the_providers_backup_alone_a_new_server_adopts_all_vms_and_they_have_their_data() {
    let mut here = Installation::new().unwrap();
    for (vm, policy) in
        [("web", "encrypted"), ("cold", "encrypted"), ("bare", "encrypted"), ("open", "plain")]
    {
        let image = here.counter_image().unwrap();
        let disk = format!("datastore=local,format=raw,image={}", text(&image).unwrap());
        let card = ["--nic", "user,forward=tcp:22"];
        let tpm: &[&str] = if ["web", "bare"].contains(&vm) { &["--tpm"] } else { &[] };
        here.vmseal(&[&create(vm, policy, &disk)[..], &card, tpm].concat()).unwrap();
        assert_eq!(here.boot_counter(vm).unwrap(), 1);
    }
    for vm in ["cold", "bare", "open"] {
        stop(&here, vm);
    }
    // What is said of one that runs, and of one that is off.
    for vm in ["web", "cold"] {
        let say = ["--description", "the shop", "--label", "tier=gold", "--autostart", "on"];
        let treat = ["--on-drain", "stop", "--migration-encryption", "required"];
        here.vmseal(&[&["vm", "set", vm][..], &say, &treat].concat()).unwrap();
    }
    // What it holds then is the count of one boot.
    let described = ["--description", "before 2.0"];
    here.vmseal(&[&["snapshot", "create", "cold", "first"][..], &described].concat()).unwrap();
    here.vmseal(&["snapshot", "create", "cold", "second"]).unwrap();
    here.vmseal(&["vm", "set", "cold", "--template", "on"]).unwrap();
    // The descriptor does not say that this one keeps memory: its file does.
    here.vmseal(&["snapshot", "create", "web", "asleep", "--memory"]).unwrap();
    let bare = here.vm("bare").unwrap()["id"].as_str().unwrap().to_owned();
    let before = here.vm("cold").unwrap();
    let guests = here.guest_processes("qemu-system-x86_64");
    assert_eq!(guests.len(), 1);

    here.lose_server().unwrap();
    here.start_server().unwrap();
    here.join_again().unwrap();
    let store = text(&here.path("datastore")).unwrap().to_owned();
    let add = ["datastore", "add", "local", "--host", "here", "--path", &store];
    let refused = here.refused(&add).unwrap();
    assert!(refused.contains("with VMs on it: 4") && refused.contains("--existing"), "{refused}");
    here.vmseal(&[&add[..], &["--existing"]].concat()).unwrap();
    // Nothing is adopted without its key, or without a policy.
    let adopt = ["datastore", "adopt", "local"];
    let refused = here.refused(&adopt).unwrap();
    assert!(refused.contains("cannot be adopted as things are: 4"), "{refused}");
    keys_and_policies(&here);
    // Somebody has given a VM more memory.
    let cold = before["id"].as_str().unwrap();
    let descriptor = here.path("datastore").join(cold).join("vm.json");
    let text = std::fs::read_to_string(&descriptor).unwrap();
    let changed = text.replace("\"memory\": 33554432", "\"memory\": 67108864");
    assert_ne!(changed, text);
    std::fs::write(&descriptor, changed).unwrap();
    let refused = here.refused(&["datastore", "adopt", "local", "--vm", "cold"]).unwrap();
    assert!(refused.contains("cannot be adopted as things are: 1"), "{refused}");
    // As an earlier vmseal wrote it.
    let mut older: Value = serde_json::from_str(&text).unwrap();
    let disk = older["disks"][0].as_object_mut().unwrap();
    disk.retain(|field, _| ["disk", "name", "size", "encrypted", "file"].contains(&&**field));
    let fields = ["version", "vm", "name", "key", "disks"];
    older.as_object_mut().unwrap().retain(|field, _| fields.contains(&&**field));
    older["version"] = 1.into();
    std::fs::write(&descriptor, older.to_string()).unwrap();
    let one = ["datastore", "adopt", "local", "--vm", "cold", "--dry-run", "--policy", "encrypted"];
    let sized = [&one[..], &["--vcpus", "1", "--memory", "32MiB"]].concat();
    let said = |arguments: &[&str]| {
        let output = here.try_vmseal(&[arguments, &["-o", "json"]].concat()).unwrap();
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        let line = line(&told, "cold");
        format!("{} {}", line["status"], line["detail"])
    };
    assert!(said(&one).contains("--vcpus and --memory"), "{}", said(&one));
    assert!(said(&sized).contains("--unauthenticated"), "{}", said(&sized));
    let taken = said(&[&sized[..], &["--unauthenticated"]].concat());
    assert!(taken.starts_with("\"possible\""), "{taken}");
    std::fs::write(&descriptor, text).unwrap();

    // Of one VM nothing is left but its disk: the header names its key, and the operator the rest.
    std::fs::remove_file(here.path("datastore").join(&bare).join("vm.json")).unwrap();
    let rename = format!("{bare}=bare");
    let by_header = ["datastore", "adopt", "local", "--vm", &bare, "--rename", &rename];
    let more = ["--vcpus", "1", "--memory", "32MiB", "--policy", "encrypted"];
    let by_header = [&by_header[..], &more].concat();
    let said = here.refused(&by_header).unwrap();
    assert!(said.contains("cannot be adopted as things are: 1"), "{said}");
    here.vmseal(&[&by_header[..], &["--unauthenticated"]].concat()).unwrap();
    // The header of a TPM's disk says what it is.
    let shown = here.vm("bare").unwrap();
    let names: Vec<_> = shown["disks"].as_array().unwrap().iter().map(|it| &it["name"]).collect();
    assert_eq!(names, ["disk0", "tpm"]);
    assert_eq!(shown["hardware"]["tpm"], true);

    let tried = here.json(&["datastore", "adopt", "local", "--dry-run"]).unwrap();
    for vm in ["web", "cold", "open"] {
        assert_eq!(line(&tried, vm)["status"], "possible", "{tried}");
    }
    assert_eq!(here.json(&["vm", "list"]).unwrap().as_array().unwrap().len(), 1);
    here.vmseal(&adopt).unwrap();
    here.wait_power("web", "running").unwrap();
    assert_eq!(here.guest_processes("qemu-system-x86_64"), guests, "a guest was ended");
    let after = here.vm("cold").unwrap();
    for field in ["id", "name", "vcpus", "memory", "key", "policy", "host", "nics"] {
        assert_eq!(before[field], after[field], "{field}");
    }
    for vm in ["web", "cold"] {
        let after = here.vm(vm).unwrap();
        assert_eq!(after["description"], "the shop", "{vm}");
        assert_eq!((&after["labels"]["tier"], &after["autostart"]), (&"gold".into(), &true.into()));
        assert_eq!(after["on_drain"], "stop", "{vm}");
        assert_eq!(after["migration_encryption"], "required", "{vm}");
    }
    assert_eq!(after["template"], true, "{after}");
    here.vmseal(&["vm", "set", "cold", "--template", "off"]).unwrap();
    let first = here.json(&["snapshot", "show", "cold", "first"]).unwrap();
    assert_eq!(first["description"], "before 2.0", "{first}");
    assert_eq!(before["disks"][0], after["disks"][0]);
    assert_eq!(before["nics"].as_array().unwrap().len(), 1);
    let asleep = here.json(&["snapshot", "show", "web", "asleep"]).unwrap();
    assert_eq!(asleep["memory"], true, "{asleep}");
    stop(&here, "web");
    here.vmseal(&["snapshot", "revert", "web", "asleep"]).unwrap();
    here.wait_power("web", "suspended").unwrap();
    here.vmseal(&["vm", "resume", "web"]).unwrap();
    here.wait_power("web", "running").unwrap();
    stop(&here, "web");
    for vm in ["web", "cold", "bare", "open"] {
        assert_eq!(here.boot_counter(vm).unwrap(), 2, "{vm}: what its guest wrote is gone");
    }
    // Its snapshots were adopted with it.
    let second = here.json(&["snapshot", "show", "cold", "second"]).unwrap();
    assert_eq!((&second["parent"], &second["current"]), (&"first".into(), &true.into()));
    stop(&here, "cold");
    here.vmseal(&["snapshot", "revert", "cold", "first"]).unwrap();
    assert_eq!(here.boot_counter("cold").unwrap(), 2, "it was not reverted");
    for snapshot in ["first", "second"] {
        here.vmseal(&["snapshot", "delete", "cold", snapshot]).unwrap();
    }
    // They are VMs like all others.
    stop(&here, "cold");
    here.vmseal(&["vm", "delete", "cold"]).unwrap();
    assert!(!here.path("datastore").join(cold).exists());
}

#[test]
fn a_host_that_joins_again_keeps_its_empty_datastore() {
    let mut here = Installation::new().unwrap();
    let store = text(&here.path("datastore")).unwrap().to_owned();
    let before = here.json(&["datastore", "show", "local"]).unwrap();
    here.vmseal(&["datastore", "remove", "local"]).unwrap();
    here.vmseal(&["host", "remove", "here"]).unwrap();
    here.join_again().unwrap();
    here.vmseal(&["datastore", "add", "local", "--host", "here", "--path", &store]).unwrap();
    let after = here.json(&["datastore", "show", "local"]).unwrap();
    assert_eq!(before["id"], after["id"]);
    // A copy of it has its mark, and is not it.
    let copy = here.path("copy");
    std::fs::create_dir(&copy).unwrap();
    let mark = "vmseal-datastore.json";
    std::fs::copy(here.path("datastore").join(mark), copy.join(mark)).unwrap();
    let add = ["datastore", "add", "copy", "--host", "here", "--path", text(&copy).unwrap()];
    assert!(here.refused(&add).unwrap().contains("the mark of datastore 'local'"));
    here.create_counter("web", "encrypted").unwrap();
    assert_eq!(here.boot_counter("web").unwrap(), 1);
}
