//! Tests of the network between two hosts while a VM migrates. Whoever captures its packets reads nothing of an encrypted guest. When
//! the link is cut, the guest keeps running on one host and loses no data. Before a migration the link is tried.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::capture::{Capture, Captured};
use vmseal_tests::counting_guest::{MARKER, SECRET, count, read_marker, started, stop_counting};
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::network::{ip, own_namespace};
use vmseal_tests::rest::scrape;
use vmseal_tests::shell_guest::run;
use vmseal_tests::two_hosts::{
    HERE, THERE, add_host_with_datastore, only_host, other, rounds_of_kills,
};

const VM: &str = "web";

/// A text that the guest has in its memory alone, many times: typed in two parts, so that nothing else has it.
const IN_MEMORY: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2096");

/// Where the second host receives VMs.
const RECEIVES_AT: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);

/// A guest that counts on its disk, and a second host with a datastore of its own, in a network of this test's own.
fn two_hosts(policy: &str) -> Installation {
    let (mut here, mut console) = started(VM, policy);
    link(true);
    here.receive_at(RECEIVES_AT);
    add_host_with_datastore(&mut here).unwrap();
    let (one, two) = IN_MEMORY;
    let remember = format!(
        "m={one}; m=${{m}}{two}; n=0; while [ $n -lt 500 ]; do echo $m; n=$((n + 1)); done >/remembered"
    );
    run(&mut console, &format!("{remember}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(&mut console);
    here
}

/// Makes the second host's address reachable, or cuts it off: packets to it and from it are lost then.
fn link(up: bool) {
    let verb = if up { "add" } else { "del" };
    ip(&format!("addr {verb} {RECEIVES_AT}/32 dev lo")).unwrap();
}

/// The guest has what it had, and goes on counting.
fn has_lost_nothing(here: &Installation) {
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    let (one, two) = IN_MEMORY;
    let all = format!("echo HAS-$(grep -c {one}{two} /remembered)-");
    run(&mut console, &all, "HAS-500-").unwrap();
    read_marker(&mut console);
    count(&mut console);
}

/// What goes over the network while the VM moves to this host.
fn captured(here: &Installation, to: &str) -> Captured {
    let memory = format!("{}{}", IN_MEMORY.0, IN_MEMORY.1);
    let capture = Capture::begin(&[MARKER, SECRET, &memory]).unwrap();
    let task = here.json(&["vm", "migrate", VM, to]).unwrap();
    let captured = capture.end().unwrap();
    let sent = task["migrated"]["sent"].as_u64().unwrap_or_else(|| panic!("{task:#}"));
    assert!(captured.bytes > sent, "{} of {sent} bytes were captured", captured.bytes);
    captured
}

#[test]
fn whoever_listens_between_the_hosts_reads_nothing_of_a_guest_that_is_sent_encrypted() {
    if !own_namespace().unwrap() {
        return;
    }
    let here = two_hosts("encrypted");
    assert_eq!(captured(&here, THERE).texts, BTreeSet::new());
    has_lost_nothing(&here);
    drop(here);

    // One without a key is read where it is sent as it is, and only there.
    link(false);
    let here = two_hosts("plain");
    let memory = format!("{}{}", IN_MEMORY.0, IN_MEMORY.1);
    let all = BTreeSet::from([MARKER.to_owned(), SECRET.to_owned(), memory]);
    for (to, mode, read) in [(THERE, "required", BTreeSet::new()), (HERE, "disabled", all)] {
        here.vmseal(&["vm", "set", VM, "--migration-encryption", mode]).unwrap();
        assert_eq!(captured(&here, to).texts, read, "{mode}");
        has_lost_nothing(&here);
    }
}

#[test]
fn an_address_that_is_not_reached_is_refused_before_anything_is_begun() {
    if !own_namespace().unwrap() {
        return;
    }
    let here = two_hosts("encrypted");
    let tasks = here.json(&["task", "list"]).unwrap();
    let before = here.vm(VM).unwrap()["host"].clone();
    let port = format!("{RECEIVES_AT}:");
    link(false);
    for begin in [&["vm", "migrate", VM, THERE, "--dry-run"][..], &["vm", "migrate", VM, THERE][..]]
    {
        let told = here.refused(begin).unwrap();
        let names = [
            "VM 'web' cannot go to host 'there'",
            port.as_str(),
            "is not reached from the VM's host 'here'",
            "--migration-listen",
        ];
        assert!(names.iter().all(|name| told.contains(name)), "{told}");
    }
    assert_eq!(here.json(&["task", "list"]).unwrap(), tasks, "a task was begun");
    assert_eq!(here.vm(VM).unwrap()["host"], before);
    has_lost_nothing(&here);

    // The port is tried without a trace at the other host, and the VM moves.
    link(true);
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("choose host 'there'"), "{planned}");
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    let metrics = scrape(&here, &format!("/metrics/hosts/{THERE}")).unwrap();
    let none = "vmseal_agent_migration_connections_refused_total{reason=\"lost\"} 0";
    assert!(metrics.lines().any(|line| line == none), "{metrics}");
    has_lost_nothing(&here);
}

#[test]
fn whenever_the_link_is_cut_the_guest_runs_on_one_host_and_moves_when_there_is_one_again() {
    if !has_its_turn() {
        return;
    }
    if !own_namespace().unwrap() {
        return;
    }
    let here = two_hosts("encrypted");
    let (rounds, mut random) = rounds_of_kills(3);
    for round in 0..rounds {
        assert_eq!(only_host(&here, VM).unwrap(), HERE);
        let begin = ["vm", "migrate", VM, THERE, "--rate", "60MiB", "--no-wait"];
        let task = here.json(&begin).unwrap();
        let task = task["id"].as_str().unwrap();
        let (after, cut) = (random.u64(0..3500), random.u64(200..2000));
        sleep(Duration::from_millis(after));
        link(false);
        sleep(Duration::from_millis(cut));
        // A short cut is as if nothing had been; in a long one somebody gives up.
        let is_long = round % 2 == 1;
        if is_long {
            let _ = here.try_vmseal(&["task", "cancel", task]).unwrap();
            let _ = here.try_vmseal(&["task", "wait", task]).unwrap();
            only_host(&here, VM).unwrap();
        }
        link(true);
        let ended = here.try_vmseal(&["task", "wait", task]).unwrap();
        let host = only_host(&here, VM).unwrap();
        let told = String::from_utf8_lossy(&ended.stderr);
        eprintln!("round {round}: {cut} ms after {after} ms: it is on {host}; {told}");
        has_lost_nothing(&here);
        if host == HERE {
            here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
            has_lost_nothing(&here);
        }
        here.vmseal(&["vm", "migrate", VM, other(THERE)]).unwrap();
        has_lost_nothing(&here);
    }
}
