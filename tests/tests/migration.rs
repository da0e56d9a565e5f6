//! VMs that move to another host while they run: the guest goes on with all that it had in memory and on its disks, whatever dies
//! meanwhile, and runs on one host at a time.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use vmseal_tests::counting_guest::{
    count, read_marker_of_disk, started_with_one_disk, stop_counting,
};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{has_its_turn, is_soak_run};
use vmseal_tests::rest;
use vmseal_tests::shell_guest::{booted, run};
use vmseal_tests::two_hosts::{self, HERE, QEMU, THERE, Victim, other, processes};

const VM: &str = "web";
const PAGE: usize = 4096;

/// `--rate 30MiB`: a quarter of what is sent without a limit on a quiet machine.
const RATE: u64 = 30 << 20;

/// Less than what a guest with Linux has in its memory, in bytes.
const GUEST_TOUCHES: u64 = 8 << 20;

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const SECRET: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2093");

/// A guest that counts on its disk, and a second host that has its datastore.
fn started(policy: &str) -> (Installation, Console) {
    let (mut here, mut console) = started_with_one_disk(VM, policy);
    here.add_host(THERE).unwrap();
    let store = here.path("datastore");
    here.vmseal(&["datastore", "share", "local", "--host", THERE, "--path", text(&store).unwrap()])
        .unwrap();
    prepare(&mut console);
    (here, console)
}

/// The guest has the text in its memory, and counts.
fn prepare(console: &mut Console) {
    let (one, two) = SECRET;
    run(console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(console);
}

/// The host that the guest runs on, and no other has a process of it.
fn only_host(here: &Installation) -> String {
    two_hosts::only_host(here, VM).unwrap()
}

/// The guest has what it had, and goes on counting.
fn has_lost_nothing(here: &Installation) {
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    run(&mut console, "echo HAS-$m-", &format!("HAS-{}{}-", SECRET.0, SECRET.1)).unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
}

#[test]
fn a_guest_moves_to_another_host_and_back_and_loses_nothing() {
    let (here, console) = started("encrypted");
    drop(console);
    let planned = here.vmseal(&["vm", "migrate", VM, THERE, "--dry-run"]).unwrap();
    assert!(planned.contains("choose host 'there'"), "{planned}");
    // Without a host, the only other one is chosen.
    let compressed = &["--compress", "--rate", "20MiB"][..];
    for (to, options, host) in
        [(None, &[][..], THERE), (Some(HERE), compressed, HERE), (Some(THERE), &[], THERE)]
    {
        let command = ["vm", "migrate", VM].into_iter().chain(to).chain(options.iter().copied());
        here.vmseal(&command.collect::<Vec<_>>()).unwrap();
        assert_eq!(only_host(&here), host);
        has_lost_nothing(&here);
    }
    let refused = here.refused(&["vm", "migrate", VM, THERE]).unwrap();
    assert!(refused.contains("it is there already"), "{refused}");
    // Less has gone out than QEMU has sent: what was only tried is more than the messages of the agents.
    let tasks = here.json(&["task", "list"]).unwrap();
    let slow = tasks.as_array().unwrap().iter().find(|task| task["rate"] == 20 << 20).unwrap();
    let sent = assert_migrated(slow) as f64;
    let out = figure(&here, THERE, "vmseal_agent_migration_bytes_total{direction=\"out\"}");
    assert!(out < sent - f64::from(1 << 20), "{out} of {sent} bytes");
    // What happens to it later is as to any VM of that host.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    assert_eq!(only_host(&here), THERE);
}

/// A figure of a host's agent.
fn figure(here: &Installation, host: &str, name: &str) -> f64 {
    let text = rest::scrape(here, &format!("/metrics/hosts/{host}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
    line.unwrap_or_else(|| panic!("no {name} in\n{text}")).parse().unwrap()
}

/// What a task keeps of a migration is sensible. Returns what was sent.
fn assert_migrated(task: &Value) -> u64 {
    let of = |name: &str| task["migrated"][name].as_u64().unwrap_or_else(|| panic!("{task:#}"));
    assert!(of("passes") >= 1 && of("sent") >= GUEST_TOUCHES, "{task:#}");
    assert!(of("downtime_milliseconds") > 0 && of("switch_milliseconds") > 0, "{task:#}");
    let still = of("downtime_milliseconds") + of("switch_milliseconds");
    assert!(still < of("milliseconds"), "{task:#}");
    // Not more than two cores and the whole time.
    assert!(of("sealing_milliseconds") <= 2 * of("milliseconds"), "{task:#}");
    assert!(task.get("migration").is_none(), "it is done: {task:#}");
    of("sent")
}

#[test]
fn a_migration_is_seen_while_it_goes_on_and_its_task_keeps_how_it_went() {
    let (mut here, console) = started("encrypted");
    drop(console);
    let watched = here.vmseal(&["vm", "migrate", VM, THERE, "--watch", "-o", "json"]).unwrap();
    let documents: Vec<Value> =
        watched.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let phases: Vec<_> =
        documents.iter().filter_map(|task| task["migration"]["phase"].as_str()).collect();
    assert!(phases.contains(&"connecting"), "{watched}");
    let last = documents.last().unwrap();
    assert_eq!(last["state"], "done", "{watched}");
    let sent = assert_migrated(last);
    let measured = |task: &Value| task["migration"]["progress"]["sent"].as_u64();
    let seen = documents.iter().filter_map(measured).max();
    assert!(seen.is_some_and(|seen| seen > 0 && seen <= sent), "{watched}");

    // The other way, with lines for people, and slower.
    let slowly = ["vm", "migrate", VM, HERE, "--watch", "--rate", "30MiB"];
    let output = here.try_vmseal(&slowly).unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    eprintln!("{told}");
    assert!(output.status.success(), "{told}");
    assert!(told.contains("vm.migrate web: ") && told.contains(": connecting"), "{told}");
    let end = told.lines().last().unwrap();
    assert!(end.starts_with("vm.migrate web: done: "), "{told}");
    assert!(end.contains(" in ") && end.contains("the guest stood still for "), "{told}");
    let (_, went) = end.split_once("done: ").unwrap();
    let events = here.vmseal(&["events", "-c", "kind,detail"]).unwrap();
    let event = events.lines().find(|line| line.starts_with("vm.migrated") && line.ends_with(went));
    assert!(event.is_some_and(|line| line.contains("to host 'here', encrypted: ")), "{events}");

    let tasks = here.json(&["task", "list"]).unwrap();
    let slow = tasks.as_array().unwrap().iter().find(|task| task["rate"] == RATE).unwrap();
    let (sent, took) = (assert_migrated(slow), slow["migrated"]["milliseconds"].as_u64().unwrap());
    assert!(sent * 1000 <= took * RATE * 12 / 10, "{sent} bytes in {took} ms");

    // Both agents have counted it, and nothing is under way.
    for (host, direction) in [(HERE, "out"), (THERE, "in"), (THERE, "out"), (HERE, "in")] {
        let labelled = |name: &str| format!("{name}{{direction=\"{direction}\"}}");
        let bytes = figure(&here, host, &labelled("vmseal_agent_migration_bytes_total"));
        assert!(bytes >= GUEST_TOUCHES as f64, "{host} {direction}: {bytes}");
        let cpu = figure(&here, host, &labelled("vmseal_agent_migration_cpu_seconds_total"));
        assert!(cpu > 0.0 && cpu < 600.0, "{host} {direction}: {cpu}");
        assert_eq!(figure(&here, host, &labelled("vmseal_agent_migrations")), 0.0);
        let refused = "vmseal_agent_migration_connections_refused_total{reason=\"proof\"}";
        assert_eq!(figure(&here, host, refused), 0.0, "{host}");
    }

    // Another server finds what the first has kept.
    let task = last["id"].as_str().unwrap();
    here.kill_server();
    here.start_server().unwrap();
    let kept = here.json(&["task", "show", task]).unwrap();
    assert_eq!(kept["migrated"], last["migrated"]);
    let shown = here.vmseal(&["task", "show", task]).unwrap();
    assert!(shown.contains("MIGRATED:") && shown.contains("SEALING:"), "{shown}");
    eprintln!("{shown}");
    has_lost_nothing(&here);
}

#[test]
fn a_host_is_emptied_whatever_becomes_of_the_server_and_its_guest_loses_nothing() {
    let (mut here, console) = started("encrypted");
    drop(console);
    let planned = here.vmseal(&["host", "drain", HERE, "--dry-run"]).unwrap();
    assert!(planned.contains("migrate to there"), "{planned}");
    here.vmseal(&["host", "drain", HERE, "--no-wait"]).unwrap();
    here.kill_server();
    here.start_server().unwrap();
    eventually("the host is empty", || {
        let host = here.json(&["host", "show", HERE]).ok()?;
        (host["maintenance"] == "drained").then_some(())
    })
    .unwrap();
    assert_eq!(only_host(&here), THERE);
    has_lost_nothing(&here);
    let refused = here.refused(&["vm", "migrate", VM, HERE]).unwrap();
    assert!(refused.contains("vmseal host undrain here"), "{refused}");
    here.vmseal(&["host", "undrain", HERE]).unwrap();
    // The command waits until the host is empty.
    here.vmseal(&["host", "drain", THERE]).unwrap();
    assert_eq!(only_host(&here), HERE);
    has_lost_nothing(&here);
}

#[test]
fn whatever_dies_during_a_migration_the_guest_runs_on_one_host_and_has_lost_nothing() {
    if !has_its_turn() {
        return;
    }
    let (mut here, console) = started("encrypted");
    drop(console);
    let starts = |here: &Installation| {
        here.vmseal(&["vm", "start", VM]).unwrap();
        prepare(&mut booted(here, VM).unwrap());
    };
    let victims = (&Victim::OF_ANY_VM[..], 2500);
    two_hosts::move_while_processes_die(&mut here, VM, victims, starts, |here, _| {
        has_lost_nothing(here);
    });
    let source = only_host(&here);
    here.vmseal(&["vm", "migrate", VM, other(&source)]).unwrap();
    assert_eq!(only_host(&here), other(&source));
    has_lost_nothing(&here);
}

/// QEMU stops the guest by itself when it has sent the most: a filter that has died by then did not say how far it had come.
#[test]
fn a_source_whose_filter_dies_sends_a_guest_that_is_whole_or_keeps_it() {
    if !has_its_turn() {
        return;
    }
    let (mut here, console) = started("encrypted");
    drop(console);
    let starts = |here: &Installation| {
        here.vmseal(&["vm", "start", VM]).unwrap();
        prepare(&mut booted(here, VM).unwrap());
    };
    // Fewer than the deaths of filters after which a VM is stopped.
    let victims = (&[Victim::FilterOf(true); 4][..], 2500);
    two_hosts::move_while_processes_die(&mut here, VM, victims, starts, |here, _| {
        has_lost_nothing(here);
    });
}

/// The memory of the guest in a QEMU.
fn memory_of(here: &Installation, host: &str) -> File {
    let qemu = processes(here, host, QEMU);
    let fds = std::fs::read_dir(format!("/proc/{}/fd", qemu[0])).unwrap();
    let is_memory = |fd: &PathBuf| {
        let target = std::fs::read_link(fd).unwrap_or_default();
        target.to_string_lossy().contains("memory-backend-memfd")
    };
    let fd = fds.map(|fd| fd.unwrap().path()).find(is_memory).unwrap();
    File::open(fd).unwrap()
}

/// The pages that differ, by number.
fn differences(one: &File, other: &File) -> Vec<u64> {
    let length = one.metadata().unwrap().len();
    assert_eq!(length, other.metadata().unwrap().len());
    let (mut here, mut there) = (vec![0; PAGE], vec![0; PAGE]);
    let mut differs = |page: &u64| {
        one.read_exact_at(&mut here, page * PAGE as u64).unwrap();
        other.read_exact_at(&mut there, page * PAGE as u64).unwrap();
        here != there
    };
    (0..length / PAGE as u64).filter(|page| differs(page)).collect()
}

/// Waits until the log of an agent has one more line with this text than before.
fn wait_logged(here: &Installation, log: &str, text: &str, before: usize) {
    eventually(text, || (logged(here, log, text) > before).then_some(())).unwrap();
}

fn logged(here: &Installation, log: &str, text: &str) -> usize {
    std::fs::read_to_string(here.path(log)).unwrap_or_default().matches(text).count()
}

/// Moves the guest to the other host, and compares its memory there with that at its source. What the agent there has placed of it.
fn moved_and_compared(here: &Installation) -> u64 {
    const HANDED_OVER: &str = "its disks are free";
    const LOADED: &str = "the VM's memory is here";
    const SENT: &str = "the VM is being sent";
    let source = only_host(here);
    let (from, to) = match &*source {
        HERE => ("agent.log", "agent-there.log"),
        _ => ("agent-there.log", "agent.log"),
    };
    let before =
        [logged(here, from, SENT), logged(here, from, HANDED_OVER), logged(here, to, LOADED)];
    // Slowly enough that it is not there before the server stands still.
    let slowly = ["vm", "migrate", VM, other(&source), "--rate", "30MiB", "--no-wait"];
    let task = here.json(&slowly).unwrap();
    wait_logged(here, from, SENT, before[0]);
    // Without the server the guest stays between the hosts.
    let server = here.server_process().unwrap();
    kill(Pid::from_raw(server), Signal::SIGSTOP).unwrap();
    assert_eq!(logged(here, from, HANDED_OVER), before[1], "the server stands still too late");
    wait_logged(here, from, HANDED_OVER, before[1]);
    wait_logged(here, to, LOADED, before[2]);
    let differ = differences(&memory_of(here, &source), &memory_of(here, other(&source)));
    kill(Pid::from_raw(server), Signal::SIGCONT).unwrap();
    assert!(differ.is_empty(), "{} pages differ: {differ:x?}", differ.len());
    let task = task["id"].as_str().unwrap();
    here.vmseal(&["task", "wait", task]).unwrap();
    assert_eq!(only_host(here), other(&source));
    has_lost_nothing(here);
    let task = here.json(&["task", "show", task]).unwrap();
    task["migrated"]["placed"].as_u64().unwrap_or(0)
}

#[test]
fn the_memory_at_the_destination_is_that_at_the_source_byte_for_byte() {
    let policy = std::env::var("MIGRATION_POLICY").unwrap_or_else(|_| "encrypted".into());
    let (here, console) = started(&policy);
    drop(console);
    let rounds = std::env::var("MIGRATION_ROUNDS").ok().and_then(|it| it.parse().ok()).unwrap_or(2);
    for round in 0..rounds {
        let placed = moved_and_compared(&here);
        assert!(placed >= GUEST_TOUCHES, "round {round}: {placed} bytes were placed");
    }
}

#[test]
fn qemu_loads_the_memory_where_the_agent_is_not_to_place_it() {
    let (mut here, console) = started("encrypted");
    drop(console);
    assert!(moved_and_compared(&here) >= GUEST_TOUCHES);
    here.kill_agent();
    here.start_agent_with(&["--place-memory", "off"]).unwrap();
    assert_eq!(moved_and_compared(&here), 0);
    assert!(moved_and_compared(&here) >= GUEST_TOUCHES, "the other one still does");
}

/// QEMU answers nothing while it sends the rest of the memory: on a slow line for longer than its monitor's commands may take else.
#[test]
fn a_guest_may_stand_still_for_as_long_as_it_is_allowed_to() {
    // It takes minutes.
    if !is_soak_run() {
        return;
    }
    let (here, mut console) = started("encrypted");
    stop_counting(&mut console);
    // What is left in the end is at least this: it changes all the time.
    let change = "until [ -e /enough ]; do dd if=/dev/urandom of=/changed bs=1M count=40 conv=notrunc 2>/dev/null; done";
    run(&mut console, &format!("({change}) & echo CHANGES-$((6 * 7))"), "CHANGES-42").unwrap();
    count(&mut console);
    drop(console);
    let slowly = ["vm", "migrate", VM, THERE, "--rate", "1MiB", "--downtime", "60s"];
    let task = here.json(&slowly).unwrap();
    let stood_still = task["migrated"]["downtime_milliseconds"].as_u64().unwrap();
    // Longer than a command may take (`COMMAND_TIMEOUT` of QMP).
    assert!(stood_still > 20_000, "{task:#}");
    assert_eq!(only_host(&here), THERE);
    // It leaves the guest's processor to what is read now.
    let mut console = here.console(VM).unwrap();
    run(&mut console, "touch /enough; echo ENOUGH-$((6 * 7))", "ENOUGH-42").unwrap();
    drop(console);
    has_lost_nothing(&here);
}
