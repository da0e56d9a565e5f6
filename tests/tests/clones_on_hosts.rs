//! Clones for another host: sent to a datastore that it has alone, or made on one that both hosts have.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{has_its_turn, some_of};
use vmseal_tests::scan::contains;
use vmseal_tests::shell_guest::{self, booted, run};
use vmseal_tests::tpm_guest;
use vmseal_tests::two_hosts::{
    HERE, THERE, Victim, add_host_with_datastore, only_host, own_datastore, own_directory,
};

/// A place of the guest's disk that its system does not use, in MiB from the beginning.
const TEXT_AT: u32 = 60;

fn write(console: &mut Console, text: &str) {
    let write =
        format!("echo {text} | dd of=/dev/vda bs=1M seek={TEXT_AT} conv=notrunc,fsync 2>/dev/null");
    run(console, &format!("{write}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
}

fn reads(console: &mut Console, text: &str) {
    let read = format!("dd if=/dev/vda bs=1M skip={TEXT_AT} count=1 2>/dev/null | head -n 1");
    run(console, &read, text).unwrap();
}

/// Two hosts, each with a datastore of its own.
fn two_hosts() -> Installation {
    let mut here = Installation::new().unwrap();
    add_host_with_datastore(&mut here).unwrap();
    here
}

fn id(here: &Installation, vm: &str) -> String {
    here.vm(vm).unwrap()["id"].as_str().unwrap().to_owned()
}

/// The files of a VM, by its id, on the datastore that a host has alone.
fn files_of(here: &Installation, host: &str, id: &str) -> Vec<PathBuf> {
    let all = here.datastore_entries(&own_directory(here, host)).unwrap_or_default();
    all.into_iter().filter(|file| file.to_string_lossy().contains(id)).collect()
}

/// A VM is at this host, all of it on this datastore, and no file there has the text.
fn is_sealed_at(here: &Installation, vm: &str, (host, datastore): (&str, &str), text: &str) {
    let shown = here.vm(vm).unwrap();
    assert_eq!((shown["host"].as_str(), shown["power"].as_str()), (Some(host), Some("off")));
    let disks = shown["disks"].as_array().unwrap();
    assert!(disks.iter().all(|disk| disk["datastore"] == datastore), "{shown}");
    for file in here.home_files(vm).unwrap().into_iter().filter(|file| file.is_file()) {
        assert!(!contains(&std::fs::read(&file).unwrap(), text), "in {}", file.display());
    }
}

/// It starts where it is, and its guest reads the text.
fn starts_with(here: &Installation, vm: &str, host: &str, text: &str) {
    here.vmseal(&["vm", "start", vm]).unwrap();
    assert_eq!(here.vm(vm).unwrap()["host"], host);
    reads(&mut booted(here, vm).unwrap(), text);
    here.vmseal(&["vm", "stop", vm, "--force"]).unwrap();
}

#[test]
fn a_clone_is_sent_to_a_host_that_does_not_have_the_datastore() {
    let here = two_hosts();
    shell_guest::start(&here, "web", "encrypted", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    here.vmseal(&["snapshot", "create", "web", "one"]).unwrap();
    write(&mut console, "TEXT-OF-TWO");

    let clone = ["vm", "clone", "web", "live", "--host", THERE];
    let planned = here.vmseal(&[&clone[..], &["--dry-run"]].concat()).unwrap();
    assert!(planned.contains("choose host 'there'"), "{planned}");
    assert!(planned.contains("disk0 (64 MiB on datastore 'far')"), "{planned}");
    assert!(planned.contains("on host 'here' first"), "{planned}");
    assert!(planned.contains("send the disks to the other host"), "{planned}");
    let kept = ["vm", "clone", "web", "kept", "--host", THERE, "--snapshot", "one"];
    let linked = here.refused(&[&kept[..], &["--linked"]].concat()).unwrap();
    assert!(linked.contains("--host") && linked.contains("a linked clone shares"), "{linked}");

    // Of the guest that runs, and of what the snapshot keeps.
    here.vmseal(&clone).unwrap();
    here.vmseal(&[&kept[..], &["--datastore", "far"]].concat()).unwrap();
    reads(&mut console, "TEXT-OF-TWO");
    let snapshots = here.json(&["snapshot", "list", "web"]).unwrap();
    assert_eq!(snapshots.as_array().unwrap().len(), 1, "{snapshots}");
    for (vm, holds) in [("live", "TEXT-OF-TWO"), ("kept", "TEXT-OF-ONE")] {
        is_sealed_at(&here, vm, (THERE, own_datastore(THERE)), holds);
        assert_eq!(files_of(&here, HERE, &id(&here, vm)), Vec::<PathBuf>::new(), "{vm} is left");
        let [of_clone, of_web] = [vm, "web"].map(|vm| here.vm(vm).unwrap()["key"].clone());
        assert!(of_clone["key_id"].is_string() && of_clone != of_web, "{of_clone}");
        starts_with(&here, vm, THERE, holds);
    }
    let events = here.json(&["events"]).unwrap().to_string();
    assert!(events.contains("sent from the host that made it, encrypted"), "{events}");
    assert_eq!(here.vm("web").unwrap()["host"], HERE);
    // Each goes without the other.
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    here.vmseal(&["vm", "delete", "web"]).unwrap();
    starts_with(&here, "kept", THERE, "TEXT-OF-ONE");
    for vm in ["live", "kept"] {
        here.vmseal(&["vm", "delete", vm]).unwrap();
    }
    let left = here.datastore_entries(&own_directory(&here, THERE)).unwrap();
    assert_eq!(left, Vec::<PathBuf>::new());
}

#[test]
fn a_clone_on_a_datastore_that_both_hosts_have_is_not_sent() {
    let here = two_hosts();
    shell_guest::start(&here, "web", "encrypted", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    drop(console);
    here.vmseal(&["datastore", "share", "local", "--host", THERE]).unwrap();
    here.vmseal(&["vm", "set", "web", "--template", "on"]).unwrap();

    let clone = ["vm", "clone", "web", "copy", "--host", THERE];
    let planned = here.vmseal(&[&clone[..], &["--dry-run"]].concat()).unwrap();
    assert!(planned.contains("nothing is sent to the other host"), "{planned}");
    here.vmseal(&clone).unwrap();
    is_sealed_at(&here, "copy", (THERE, "local"), "TEXT-OF-ONE");
    here.vmseal(&["vm", "start", "copy"]).unwrap();
    assert_eq!(only_host(&here, "copy").unwrap(), THERE);
    reads(&mut booted(&here, "copy").unwrap(), "TEXT-OF-ONE");
    here.vmseal(&["vm", "stop", "copy", "--force"]).unwrap();
    here.vmseal(&["vm", "delete", "copy"]).unwrap();
}

/// The TPM of a clone is a new one. Its disk and what it keeps are sent as those of any VM that is off.
#[test]
fn a_clone_that_is_sent_has_a_tpm_of_its_own() {
    let here = two_hosts();
    tpm_guest::create(&here, "web", &[]);
    here.vmseal(&["vm", "clone", "web", "copy", "--host", THERE]).unwrap();
    assert_eq!(files_of(&here, HERE, &id(&here, "copy")), Vec::<PathBuf>::new());
    let mut guest = tpm_guest::start(&here, "copy");
    assert!(tpm_guest::has_tpm(&mut guest));
    assert_eq!(only_host(&here, "copy").unwrap(), THERE);
}

/// Server and agents die while a clone is made and sent: it is whole at the other host, or nothing of it is left at either.
#[test]
fn a_clone_that_is_sent_is_whole_or_gone_whatever_dies() {
    if !has_its_turn() {
        return;
    }
    let mut here = two_hosts();
    shell_guest::start(&here, "web", "encrypted", &[]).unwrap();
    let mut console = booted(&here, "web").unwrap();
    write(&mut console, "TEXT-OF-ONE");
    here.vmseal(&["vm", "stop", "web", "--force"]).unwrap();
    drop(console);
    let victims = [Victim::Server, Victim::AgentOf(true), Victim::AgentOf(false)];
    for (round, milliseconds) in some_of(&[50, 150, 300, 600, 1200, 2400]).into_iter().enumerate() {
        let name = format!("clone{round}");
        let clone = ["vm", "clone", "web", &name, "--host", THERE, "--rate", "16M", "--no-wait"];
        let task = here.json(&clone).unwrap()["id"].as_str().unwrap().to_owned();
        let clone = id(&here, &name);
        sleep(Duration::from_millis(milliseconds));
        let victim = victims[round % victims.len()];
        victim.kill(&mut here, HERE);
        let waited = here.try_vmseal(&["task", "wait", &task]).unwrap();
        eprintln!("{victim:?} after {milliseconds} ms: {:?}", waited.status);
        let gone = |host| files_of(&here, host, &clone).is_empty().then_some(());
        eventually("nothing is left where it was made", || gone(HERE)).unwrap();
        if !waited.status.success() {
            here.refused(&["vm", "show", &name]).unwrap();
            eventually("nothing is left at the other host", || gone(THERE)).unwrap();
            continue;
        }
        is_sealed_at(&here, &name, (THERE, own_datastore(THERE)), "TEXT-OF-ONE");
        starts_with(&here, &name, THERE, "TEXT-OF-ONE");
        here.vmseal(&["vm", "delete", &name]).unwrap();
    }
}
