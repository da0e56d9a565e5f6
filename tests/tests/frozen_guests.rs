//! What a snapshot has a guest freeze is thawed: while the agent or a filter dies, and where the guest does not answer or refuses. What an
//! operator freezes stays frozen.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use vmseal_tests::eventually;
use vmseal_tests::guest::Console;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::console_again;
use vmseal_tests::process::kill_hard;
use vmseal_tests::shell_guest::{self, booted, holds, run};

const VM: &str = "web";

/// What says that the guest could not be thawed.
const ALARM: &str = "guest-frozen";

/// How long the agent waits for a freeze.
const FREEZE_TIMEOUT: Duration = Duration::from_secs(40);

/// Reads from the guest's disk.
const READ: &str = "echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/vda of=/dev/null bs=64k count=1 && echo READ-$((6 * 7))";

fn answers(here: &Installation) {
    eventually("the guest's agent answers", || here.vmseal(&["vm", "guest", "ping", VM]).ok())
        .unwrap();
}

fn is_quiesced(here: &Installation, snapshot: &str) -> bool {
    let shown = here.json(&["snapshot", "show", VM, snapshot]).unwrap();
    shown["quiesced"].as_bool().unwrap()
}

fn begin_snapshot(here: &Installation, snapshot: &str) -> Child {
    let mut command = here.command().unwrap();
    command.args(["snapshot", "create", VM, snapshot]);
    command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
}

fn ended(snapshot: Child) {
    let output = snapshot.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The guest answers again, and is thawed.
fn thaws(here: &Installation, console: &mut Console, obstacle: &str) {
    run(console, &format!("rm {obstacle}; echo REMOVED-$((6 * 7))"), "REMOVED-42").unwrap();
    holds(console, "[ ! -e /frozen ]").unwrap();
    here.wait_no_alarm(VM, ALARM).unwrap();
}

fn is_thawed_at_once(here: &Installation, console: &mut Console) {
    here.vmseal(&["snapshot", "create", VM, "quiet"]).unwrap();
    console.expect("FROZEN-42", 0).unwrap();
    assert!(is_quiesced(here, "quiet"));
    let said = "[ -e /frozen ] || echo THAWED-$((6 * 7))";
    run(console, said, "THAWED-42").unwrap();
}

fn is_thawed_after_refusals(here: &Installation, console: &mut Console) {
    run(console, ": >/stuck; echo STUCK-$((6 * 7))", "STUCK-42").unwrap();
    here.vmseal(&["snapshot", "create", VM, "stuck"]).unwrap();
    assert!(is_quiesced(here, "stuck"));
    let told = here.wait_alarm(VM, ALARM).unwrap();
    assert!(told.contains("it is stuck") && told.contains("vmseal vm guest fsthaw"), "{told}");
    // It would be thawed with the snapshot's.
    let refused = here.refused(&["vm", "guest", "fsfreeze", VM]).unwrap();
    assert!(refused.contains("for a snapshot"), "{refused}");
    thaws(here, console, "/stuck");
    here.vmseal(&["vm", "guest", "fsfreeze", VM]).unwrap();
    here.vmseal(&["vm", "guest", "fsthaw", VM]).unwrap();
    holds(console, "[ ! -e /frozen ]").unwrap();
}

/// A filter is replaced while the guest is asked to freeze; then the guest is given up, and has frozen all the same.
fn is_thawed_though_its_freeze_is_not_answered(here: &Installation, console: &mut Console) {
    run(console, ": >/silent; echo SILENT-$((6 * 7))", "SILENT-42").unwrap();
    let snapshot = begin_snapshot(here, "silent");
    console.expect("FROZEN-42", 0).unwrap();
    let frozen = Instant::now();
    let filters = here.processes_of(VM, "vmseal-filter").unwrap();
    filters.iter().copied().for_each(kill_hard);
    run(console, READ, "READ-42").unwrap();
    assert!(frozen.elapsed() < FREEZE_TIMEOUT, "the guest waited for its own freeze");
    assert_ne!(here.processes_of(VM, "vmseal-filter").unwrap(), filters);
    ended(snapshot);
    assert!(!is_quiesced(here, "silent"));
    here.wait_alarm(VM, ALARM).unwrap();
    thaws(here, console, "/silent");
}

fn is_thawed_by_the_next_agent(here: &mut Installation, mut console: Console) {
    run(&mut console, ": >/silent; echo SILENT-$((6 * 7))", "SILENT-42").unwrap();
    let snapshot = begin_snapshot(here, "orphan");
    console.expect("FROZEN-42", 0).unwrap();
    here.kill_agent();
    here.start_agent().unwrap();
    here.wait_alarm(VM, ALARM).unwrap();
    let mut console = console_again(here, VM, console);
    thaws(here, &mut console, "/silent");
    ended(snapshot);
    // The step may have been repeated meanwhile.
    holds(&mut console, "[ ! -e /frozen ]").unwrap();
}

fn stays_frozen_for_an_operator(here: &mut Installation) {
    here.vmseal(&["vm", "guest", "fsfreeze", VM]).unwrap();
    here.vmseal(&["snapshot", "create", VM, "loud"]).unwrap();
    assert!(!is_quiesced(here, "loud"));
    here.kill_agent();
    here.start_agent().unwrap();
    answers(here);
    let thawed = here.vmseal(&["vm", "guest", "fsthaw", VM]).unwrap();
    assert!(thawed.contains("that were thawed: 1"), "{thawed}");
}

#[test]
fn what_a_snapshot_freezes_is_thawed_and_what_an_operator_freezes_is_not() {
    let mut here = Installation::new().unwrap();
    shell_guest::start(&here, VM, "encrypted", &[]).unwrap();
    let mut console = booted(&here, VM).unwrap();
    console.type_text(shell_guest::AGENT).unwrap();
    run(&mut console, ": >/answer; echo READY-$((6 * 7))", "READY-42").unwrap();
    answers(&here);
    is_thawed_at_once(&here, &mut console);
    is_thawed_after_refusals(&here, &mut console);
    is_thawed_though_its_freeze_is_not_answered(&here, &mut console);
    is_thawed_by_the_next_agent(&mut here, console);
    stays_frozen_for_an_operator(&mut here);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();
}
