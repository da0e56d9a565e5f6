//! VMs that move to another host while they run: the guest goes on with all that it had in memory and on its disks, whatever dies
//! meanwhile, and runs on one host at a time.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use vmseal_tests::counting_guest::{
    count, read_marker_of_disk, started_with_one_disk, stop_counting,
};
use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::process::kill_hard;
use vmseal_tests::shell_guest::run;

const VM: &str = "web";
const HERE: &str = "here";
const THERE: &str = "there";
const QEMU: &str = "qemu-system-x86_64";
const FILTER: &str = "vmseal-filter";
const PAGE: usize = 4096;

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const SECRET: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2093");

/// A guest that counts on its disk, and a second host that has its datastore.
fn started(policy: &str) -> (Installation, Console) {
    let (mut here, mut console) = started_with_one_disk(VM, policy);
    here.add_host(THERE).unwrap();
    let store = here.path("datastore");
    here.vmseal(&["datastore", "share", "local", "--host", THERE, "--path", text(&store).unwrap()])
        .unwrap();
    let (one, two) = SECRET;
    run(&mut console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(&mut console);
    (here, console)
}

/// The processes of the guest on a host.
fn processes(here: &Installation, host: &str, name: &str) -> Vec<i32> {
    match host {
        HERE => here.guest_processes(name),
        other => here.guest_processes_on(other, name),
    }
}

fn other(host: &str) -> &'static str {
    if host == HERE { THERE } else { HERE }
}

/// The host that the guest runs on, and no other has a process of it.
fn only_host(here: &Installation) -> String {
    eventually("it runs on one host alone", || {
        let shown = here.vm(VM).ok().filter(|shown| shown["power"] == "running")?;
        let host = shown["host"].as_str()?.to_owned();
        let left = [QEMU, FILTER].iter().flat_map(|it| processes(here, other(&host), it)).count();
        let runs = processes(here, &host, QEMU).len() == 1;
        (runs && left == 0).then_some(host)
    })
    .unwrap()
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
    for (to, host) in [(None, THERE), (Some(HERE), HERE), (Some(THERE), THERE)] {
        let command: Vec<&str> = ["vm", "migrate", VM].into_iter().chain(to).collect();
        here.vmseal(&command).unwrap();
        assert_eq!(only_host(&here), host);
        has_lost_nothing(&here);
    }
    let refused = here.refused(&["vm", "migrate", VM, THERE]).unwrap();
    assert!(refused.contains("it is there already"), "{refused}");
    // What happens to it later is as to any VM of that host.
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    assert_eq!(only_host(&here), THERE);
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

/// What is killed.
#[derive(Clone, Copy, Debug)]
enum Victim {
    AgentOf(bool),
    Qemu,
    FilterOf(bool),
    Server,
}

impl Victim {
    /// Each in turn; a source's QEMU is the guest, and its death that of the guest.
    fn of_round(round: usize) -> Self {
        [
            Self::AgentOf(true),
            Self::AgentOf(false),
            Self::Server,
            Self::Qemu,
            Self::FilterOf(true),
            Self::FilterOf(false),
        ][round % 6]
    }

    fn kill(self, here: &mut Installation, source: &str) {
        let end = |is_source: bool| if is_source { source } else { other(source) };
        match self {
            Self::AgentOf(is_source) if end(is_source) == HERE => {
                here.kill_agent();
                here.start_agent().unwrap();
            }
            Self::AgentOf(_) => {
                here.kill_agent_of(THERE).unwrap();
                here.start_agent_of(THERE).unwrap();
            }
            Self::Qemu => processes(here, end(false), QEMU).into_iter().for_each(kill_hard),
            Self::FilterOf(is_source) => {
                processes(here, end(is_source), FILTER).into_iter().for_each(kill_hard);
            }
            Self::Server => {
                here.kill_server();
                here.start_server().unwrap();
            }
        }
    }
}

#[test]
fn whatever_dies_during_a_migration_the_guest_runs_on_one_host_and_has_lost_nothing() {
    let (mut here, console) = started("encrypted");
    drop(console);
    let rounds = std::env::var("MIGRATION_KILLS").ok().and_then(|it| it.parse().ok()).unwrap_or(6);
    let seed = std::env::var("MIGRATION_SEED").ok().and_then(|it| it.parse().ok());
    let seed: u64 = seed.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("MIGRATION_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for round in 0..rounds {
        let source = only_host(&here);
        let task = here.json(&["vm", "migrate", VM, other(&source), "--no-wait"]).unwrap();
        let milliseconds = random.u64(0..2500);
        sleep(Duration::from_millis(milliseconds));
        let victim = Victim::of_round(round);
        // A guest that runs at the destination already is not killed.
        let arrived = here.vm(VM).unwrap()["host"] != source.as_str();
        eprintln!("round {round}: {victim:?} after {milliseconds} ms, arrived: {arrived}");
        if !(arrived && matches!(victim, Victim::Qemu)) {
            victim.kill(&mut here, &source);
        }
        let _ = here.try_vmseal(&["task", "wait", task["id"].as_str().unwrap()]).unwrap();
        only_host(&here);
        has_lost_nothing(&here);
    }
    let source = only_host(&here);
    here.vmseal(&["vm", "migrate", VM, other(&source)]).unwrap();
    assert_eq!(only_host(&here), other(&source));
    has_lost_nothing(&here);
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

#[test]
fn the_memory_at_the_destination_is_that_at_the_source_byte_for_byte() {
    const HANDED_OVER: &str = "its disks are free";
    const LOADED: &str = "the VM's memory is here";
    const SENT: &str = "the VM is being sent";
    let (here, console) = started("encrypted");
    drop(console);
    let rounds = std::env::var("MIGRATION_ROUNDS").ok().and_then(|it| it.parse().ok()).unwrap_or(2);
    for round in 0..rounds {
        let source = only_host(&here);
        let (from, to) = match &*source {
            HERE => ("agent.log", "agent-there.log"),
            _ => ("agent-there.log", "agent.log"),
        };
        let before = [
            logged(&here, from, SENT),
            logged(&here, from, HANDED_OVER),
            logged(&here, to, LOADED),
        ];
        let task = here.json(&["vm", "migrate", VM, other(&source), "--no-wait"]).unwrap();
        wait_logged(&here, from, SENT, before[0]);
        // Without the server the guest stays between the hosts.
        let server = here.server_process().unwrap();
        kill(Pid::from_raw(server), Signal::SIGSTOP).unwrap();
        wait_logged(&here, from, HANDED_OVER, before[1]);
        wait_logged(&here, to, LOADED, before[2]);
        let differ = differences(&memory_of(&here, &source), &memory_of(&here, other(&source)));
        kill(Pid::from_raw(server), Signal::SIGCONT).unwrap();
        assert!(differ.is_empty(), "round {round}: {} pages differ: {differ:x?}", differ.len());
        here.vmseal(&["task", "wait", task["id"].as_str().unwrap()]).unwrap();
        assert_eq!(only_host(&here), other(&source));
        has_lost_nothing(&here);
    }
}
