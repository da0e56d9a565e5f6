//! Linked clones: they hold what the snapshot kept, each writes for itself, under keys of their own, and what they stand on stays
//! as it is; not when the agent, the filter or the server dies meanwhile.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::counting_guest::{count, stop_counting};
use vmseal_tests::figures::bounced_bytes;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{has_its_turn, some_of};
use vmseal_tests::process::kill_hard;
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};

/// A place of the guest's disk that its system does not use, in MiB from the beginning.
const TEXT_AT: u32 = 60;

/// Where the data of an encrypted disk begins in its image, in bytes.
const DATA_AT: usize = 16 << 20;

fn write(console: &mut Console, text: &str) {
    let write =
        format!("echo {text} | dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    run(console, &format!("{write}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

fn reads(console: &mut Console, text: &str) {
    run(console, "echo 3 >/proc/sys/vm/drop_caches; echo DROPPED-$((6 * 7))", "DROPPED-42")
        .unwrap();
    let read = format!("dd if=/dev/vda bs=1M skip={TEXT_AT} count=1 2>/dev/null | head -n 1");
    run(console, &read, text).unwrap();
}

/// A VM that runs, whose guest has written, with a snapshot.
fn source(policy: &str) -> (Installation, Console) {
    let here = Installation::new().unwrap();
    shell_guest::start(&here, "web", policy, &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-BASE");
    here.vmseal(&["snapshot", "create", "web", "base"]).unwrap();
    (here, console)
}

fn clone(here: &Installation, name: &str) {
    here.vmseal(&["vm", "clone", "web", name, "--linked", "--snapshot", "base"]).unwrap();
}

fn started(here: &Installation, vm: &str) -> Console {
    here.vmseal(&["vm", "start", vm]).unwrap();
    booted(here, vm).unwrap()
}

/// Has the disk of a VM that is off hold this.
fn holds(here: &Installation, vm: &str, text: &str) {
    assert!(here.disk_has(vm, "disk0", TEXT_AT, text).unwrap(), "{vm} does not hold {text}");
}

fn stop(here: &Installation, vm: &str, console: Console) {
    here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
    drop(console);
}

/// The files of a VM.
fn files(here: &Installation, vm: &str) -> Vec<PathBuf> {
    let images = here.images(vm).unwrap();
    let home = images[0].parent().unwrap();
    std::fs::read_dir(home).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn is_base(file: &Path) -> bool {
    file.extension().is_some_and(|it| it.to_string_lossy().starts_with("base"))
}

/// The names of what clones stand on, anywhere on the datastore.
fn bases(here: &Installation) -> usize {
    let datastore = here.path("datastore");
    let homes = std::fs::read_dir(datastore).unwrap().map(|home| home.unwrap().path());
    let homes = homes.filter(|home| home.is_dir());
    homes
        .flat_map(|home| std::fs::read_dir(home).unwrap().map(|it| it.unwrap().path()))
        .filter(|file| is_base(file))
        .count()
}

/// The room that a clone takes itself, in bytes.
fn room(here: &Installation, vm: &str) -> u64 {
    let own = files(here, vm).into_iter().filter(|file| !is_base(file));
    own.map(|file| file.metadata().unwrap().blocks() * 512).sum()
}

fn is_in_the_clear(here: &Installation, vm: &str, text: &str) -> bool {
    files(here, vm).iter().any(|file| contains(&std::fs::read(file).unwrap(), text))
}

fn key_of(here: &Installation, vm: &str) -> String {
    here.vm(vm).unwrap()["key"]["key_id"].to_string()
}

/// What is refused while clones stand on it, and whom the error names.
fn is_refused(here: &Installation, arguments: &[&str], names: &[&str]) {
    let said = here.refused(arguments).unwrap();
    for name in names {
        assert!(said.contains(&format!("'{name}'")), "{arguments:?}: {said}");
    }
    assert!(said.contains("linked clones stand on"), "{arguments:?}: {said}");
}

#[test]
fn two_linked_clones_of_a_running_vm_run_at_once_with_data_of_their_own() {
    if !has_its_turn() {
        return;
    }
    let (here, mut web) = source("encrypted");
    count(&mut web);
    let linked = ["vm", "clone", "web", "one", "--linked", "--snapshot", "base"];
    let planned = here.try_vmseal(&[&linked[..], &["--dry-run"]].concat()).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    assert!(
        warned.contains("shares the data key and the data of VM 'web', snapshot 'base'"),
        "{warned}"
    );
    let refused = here.refused(&["vm", "clone", "web", "one", "--linked"]).unwrap();
    assert!(refused.contains("has to stay as long as the clone"), "{refused}");
    assert!(refused.contains("give --snapshot NAME"), "{refused}");
    clone(&here, "one");
    clone(&here, "two");
    stop_counting(&mut web);
    write(&mut web, "TEXT-OF-NOW");

    for vm in ["one", "two"] {
        assert!(room(&here, vm) < 2 << 20, "{vm} takes {} bytes", room(&here, vm));
        let shown = here.vm(vm).unwrap();
        assert_eq!(shown["linked"]["vm"], "web", "{shown}");
        assert_eq!(shown["linked"]["snapshot"], "base", "{shown}");
        assert_eq!(shown["linked"]["shares_data_key"], true, "{shown}");
        assert_ne!(shown["nics"][0]["mac"], here.vm("web").unwrap()["nics"][0]["mac"]);
        assert_ne!(key_of(&here, vm), key_of(&here, "web"));
    }
    assert_eq!(here.vm("web").unwrap()["clones"], serde_json::json!(["one", "two"]));
    assert_ne!(key_of(&here, "one"), key_of(&here, "two"));

    let (mut one, mut two) = (started(&here, "one"), started(&here, "two"));
    for console in [&mut one, &mut two] {
        reads(console, "TEXT-OF-BASE");
    }
    write(&mut one, "TEXT-OF-ONE");
    write(&mut two, "TEXT-OF-TWO");
    reads(&mut one, "TEXT-OF-ONE");
    reads(&mut two, "TEXT-OF-TWO");
    reads(&mut web, "TEXT-OF-NOW");
    for vm in ["web", "one", "two"] {
        for text in ["TEXT-OF-BASE", "TEXT-OF-NOW", "TEXT-OF-ONE", "TEXT-OF-TWO"] {
            assert!(!is_in_the_clear(&here, vm, text), "{text} is in the clear at {vm}");
        }
        // Others have the data key: no guest finds ciphertext in its memory.
        assert!(bounced_bytes(&here, vm).unwrap() > 0, "{vm} decrypts in its guest's memory");
    }
    is_refused(&here, &["snapshot", "delete", "web", "base"], &["one", "two"]);
    // Each has a header of its own.
    for vm in ["web", "one"] {
        let before = key_of(&here, vm);
        here.vmseal(&["vm", "recrypt", vm]).unwrap();
        assert_ne!(key_of(&here, vm), before);
    }
    // The source goes back, and its clones do not.
    stop(&here, "web", web);
    here.vmseal(&["snapshot", "revert", "web", "base"]).unwrap();
    holds(&here, "web", "TEXT-OF-BASE");
    reads(&mut two, "TEXT-OF-TWO");

    // What is shared stays when the source goes, and goes with the last clone.
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    stop(&here, "one", one);
    stop(&here, "two", two);
    reads(&mut started(&here, "one"), "TEXT-OF-ONE");
    here.vmseal(&["vm", "stop", "one", "--force"]).unwrap();
    here.vmseal(&["vm", "delete", "two"]).unwrap();
    here.vmseal(&["vm", "delete", "one"]).unwrap();
    assert_eq!(bases(&here), 0);
}

/// All that is done with a VM is done with a linked clone; with new data keys it is a VM of its own.
#[test]
fn a_linked_clone_is_a_vm_like_others() {
    let (here, web) = source("encrypted");
    stop(&here, "web", web);
    here.vmseal(&["vm", "set", "web", "--template", "on"]).unwrap();
    clone(&here, "one");
    let mut one = started(&here, "one");
    write(&mut one, "TEXT-OF-ONE");
    here.vmseal(&["snapshot", "create", "one", "kept"]).unwrap();
    write(&mut one, "TEXT-OF-TWO");
    // All of it as ciphertext, with the header of the clone.
    let sealed = here.path("sealed");
    let to = sealed.to_str().unwrap();
    let export = ["disk", "export", "one", "disk0", "--format", "sealed", "--to", to];
    here.vmseal(&[&export[..], &["--snapshot", "kept"]].concat()).unwrap();
    let file = std::fs::read(&sealed).unwrap();
    let head = |file: &[u8]| file[..1 << 20].to_vec();
    let own = std::fs::read(&here.images("one").unwrap()[0]).unwrap();
    let other = std::fs::read(&here.images("web").unwrap()[0]).unwrap();
    assert!(head(&file) == head(&own) && head(&file) != head(&other), "it has another header");
    assert!(file[DATA_AT..].iter().any(|byte| *byte != 0), "nothing of the base is in it");
    let raw = here.path("raw");
    let to = raw.to_str().unwrap();
    let export = ["disk", "export", "one", "disk0", "--format", "raw", "--plaintext", "--to", to];
    here.vmseal(&[&export[..], &["--snapshot", "kept"]].concat()).unwrap();
    let file = std::fs::read(&raw).unwrap();
    assert!(file[(TEXT_AT as usize) << 20..].starts_with(b"TEXT-OF-ONE"));

    here.vmseal(&["vm", "suspend", "one"]).unwrap();
    here.vmseal(&["vm", "resume", "one"]).unwrap();
    // Its serial line is another one.
    let mut one = here.console("one").unwrap();
    reads(&mut one, "TEXT-OF-TWO");
    here.vmseal(&["vm", "prove", "one"]).unwrap();
    stop(&here, "one", one);
    here.vmseal(&["snapshot", "revert", "one", "kept"]).unwrap();
    let mut one = started(&here, "one");
    reads(&mut one, "TEXT-OF-ONE");
    here.vmseal(&["snapshot", "delete", "one", "kept"]).unwrap();
    reads(&mut one, "TEXT-OF-ONE");
    let refused = here.refused(&["disk", "resize", "one", "disk0", "--size", "128MiB"]).unwrap();
    assert!(refused.contains("linked clone"), "{refused}");

    // A clone of the clone, and a full one.
    here.vmseal(&["snapshot", "create", "one", "again"]).unwrap();
    here.vmseal(&["vm", "clone", "one", "deeper", "--linked", "--snapshot", "again"]).unwrap();
    here.vmseal(&["vm", "clone", "one", "full", "--snapshot", "again"]).unwrap();
    let mut deeper = started(&here, "deeper");
    reads(&mut deeper, "TEXT-OF-ONE");

    // While its guest runs it gets data and a data key of its own. What stands on it keeps the former files, and stands on the first VM.
    here.vmseal(&["vm", "recrypt", "one", "--deep"]).unwrap();
    assert_eq!(here.vm("one").unwrap()["linked"], serde_json::Value::Null);
    assert_eq!(here.vm("one").unwrap()["clones"], serde_json::Value::Null);
    assert_eq!(here.vm("deeper").unwrap()["linked"]["vm"], "web");
    assert!(!files(&here, "one").iter().any(|file| is_base(file)));
    reads(&mut one, "TEXT-OF-ONE");
    reads(&mut deeper, "TEXT-OF-ONE");
    write(&mut deeper, "TEXT-OF-DEEPER");
    is_refused(&here, &["snapshot", "delete", "web", "base"], &["deeper"]);
    here.vmseal(&["snapshot", "delete", "one", "again"]).unwrap();
    here.vmseal(&["vm", "recrypt", "deeper", "--deep"]).unwrap();
    assert_eq!(here.vm("deeper").unwrap()["linked"], serde_json::Value::Null);
    assert!(!files(&here, "deeper").iter().any(|file| is_base(file)));
    reads(&mut deeper, "TEXT-OF-DEEPER");
    assert_eq!(bases(&here), 0);
    here.vmseal(&["snapshot", "delete", "web", "base"]).unwrap();
    stop(&here, "one", one);
    stop(&here, "deeper", deeper);
    for (vm, text) in
        [("one", "TEXT-OF-ONE"), ("deeper", "TEXT-OF-DEEPER"), ("full", "TEXT-OF-ONE")]
    {
        holds(&here, vm, text);
    }
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    reads(&mut started(&here, "one"), "TEXT-OF-ONE");
    here.vmseal(&["vm", "stop", "one", "--force"]).unwrap();
}

/// Encrypts a VM whose files others have: what its task says has become of them, which nobody is told were overwritten.
fn left_by_encryption(here: &Installation, vm: &str) -> serde_json::Value {
    let done = here.try_vmseal(&["vm", "encrypt", vm, "-o", "json"]).unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success(), "{said}");
    assert!(said.contains("disk 'disk0': its former image was not overwritten"), "{said}");
    assert!(said.contains("Linked clones ") && !said.contains("overwritten with zeroes"), "{said}");
    let task: serde_json::Value = serde_json::from_slice(&done.stdout).unwrap();
    let former = task["former_images"].as_array().unwrap();
    assert_eq!(former.len(), 1, "{task}");
    assert_eq!(former[0]["name"], "disk0");
    let kind = ["events", "--kind", "vm.former-images-removed", "--target", vm];
    let told = here.json(&kind).unwrap();
    assert_eq!(told.as_array().unwrap().len(), 1, "{told}");
    assert!(told[0]["detail"].as_str().unwrap().contains("was not overwritten"), "{told}");
    former[0]["fate"].clone()
}

/// A clone of what is not encrypted is not either, until it is encrypted, whether the other VM is or not: what they shared is left to the clones.
#[test]
fn a_linked_clone_of_a_plain_vm_is_plain_and_each_is_encrypted_alone() {
    let (here, web) = source("plain");
    stop(&here, "web", web);
    clone(&here, "one");
    clone(&here, "two");
    let planned = here.try_vmseal(&["vm", "encrypt", "web", "--dry-run"]).unwrap();
    let warned = String::from_utf8_lossy(&planned.stderr).into_owned();
    let keep = "linked clones 'one', 'two' keep what they share with it, in the clear";
    assert!(warned.contains(keep), "{warned}");
    let left = left_by_encryption(&here, "web");
    assert_eq!((&left["is"], &left["in_the_clear"]), (&"shared".into(), &true.into()), "{left}");
    assert_eq!(left["clones"], serde_json::json!(["one", "two"]));
    assert!(!is_in_the_clear(&here, "web", "TEXT-OF-BASE"));
    assert_eq!(here.vm("web").unwrap()["clones"], serde_json::Value::Null);
    assert_eq!(here.vm("one").unwrap()["linked"], serde_json::Value::Null);
    here.vmseal(&["snapshot", "delete", "web", "base"]).unwrap();
    let mut one = started(&here, "one");
    reads(&mut one, "TEXT-OF-BASE");
    write(&mut one, "TEXT-OF-ONE");
    let left = left_by_encryption(&here, "one");
    assert_eq!(left["clones"], serde_json::json!(["two"]), "{left}");
    reads(&mut one, "TEXT-OF-ONE");
    for text in ["TEXT-OF-BASE", "TEXT-OF-ONE"] {
        assert!(!is_in_the_clear(&here, "one", text), "{text} is in the clear");
    }
    assert!(
        is_in_the_clear(&here, "two", "TEXT-OF-BASE"),
        "the other clone's files were overwritten"
    );
    here.vmseal(&["vm", "delete", "two"]).unwrap();
    assert_eq!(bases(&here), 0);
    stop(&here, "one", one);
    holds(&here, "web", "TEXT-OF-BASE");
}

/// Whatever dies while clones are made: each is whole or not there, and the guest of the source counts on.
#[test]
fn clones_are_whole_or_not_there_whatever_dies() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut web) = source("encrypted");
    count(&mut web);
    let mut kept = Vec::new();
    for (round, milliseconds) in some_of(&[0, 15, 30, 40, 55, 70]).into_iter().enumerate() {
        let name = format!("clone{round}");
        let begin = ["vm", "clone", "web", &name, "--linked", "--snapshot", "base", "--no-wait"];
        here.vmseal(&begin).unwrap();
        sleep(Duration::from_millis(milliseconds));
        match round % 3 {
            0 => {
                here.kill_agent();
                here.start_agent().unwrap();
                here.wait_host().unwrap();
            }
            1 => {
                here.kill_server();
                here.start_server().unwrap();
                here.wait_host().unwrap();
            }
            _ => {
                let filters = here.processes_of("web", "vmseal-filter").unwrap();
                filters.into_iter().for_each(kill_hard);
            }
        }
        here.wait_made(&name).unwrap();
        let mut console = started(&here, &name);
        reads(&mut console, "TEXT-OF-BASE");
        write(&mut console, "TEXT-OF-CLONE");
        reads(&mut console, "TEXT-OF-CLONE");
        stop(&here, &name, console);
        match round % 2 {
            0 => drop(here.vmseal(&["vm", "delete", &name]).unwrap()),
            _ => kept.push(name),
        }
    }
    drop(web);
    let mut web = here.console("web").unwrap();
    stop_counting(&mut web);
    assert!(bounced_bytes(&here, "web").unwrap() > 0, "it decrypts in its guest's memory");
    reads(&mut web, "TEXT-OF-BASE");
    stop(&here, "web", web);
    assert_eq!(bases(&here), kept.len());
    assert_eq!(here.vm("web").unwrap()["clones"], serde_json::json!(kept));
}
