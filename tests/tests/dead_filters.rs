//! Filters that die about when their guest is stopped: what is saved of it is whole, or it is not saved and goes on.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::process::Output;
use std::thread::sleep;
use std::time::Duration;

use vmseal_tests::counting_guest::{
    count, read_marker_of_disk, started_with_one_disk, stop_counting,
};
use vmseal_tests::eventually;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::{Victim, disks_are_served, during_which, has_its_turn, some_of};
use vmseal_tests::process::kill_hard;
use vmseal_tests::shell_guest::run;

const VM: &str = "web";

/// What the agent says where QEMU before 9.0 has lost a disk with its filter (docs/decisions/020).
const KNOWN_LIMIT: &str = "QEMU accepts another filter for disk";

/// Instants, in milliseconds: fewer than the deaths of filters after which a VM is stopped.
const MOMENTS: [u64; 4] = [0, 5, 20, 80];

fn filters(here: &Installation) -> Vec<i32> {
    here.processes_of(VM, "vmseal-filter").unwrap()
}

fn kill_filters(here: &Installation) {
    filters(here).into_iter().for_each(kill_hard);
}

/// A guest that writes and reads without a break, and has a word in its memory alone.
fn started() -> Installation {
    let (here, mut console) = started_with_one_disk(VM, "encrypted");
    run(&mut console, "m=REMEMBERED; echo SET-$((6 * 7))", "SET-42").unwrap();
    count(&mut console);
    here
}

/// The guest has what it had in memory and on its disk, and goes on.
fn has_lost_nothing(here: &Installation) {
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    run(&mut console, "echo HAS-$m-", "HAS-REMEMBERED-").unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
}

/// Whether the guest is lost for the one reason that is known.
fn is_lost(here: &Installation) -> bool {
    let shown = here.vm(VM).unwrap();
    let said = shown["stopped"]["detail"].as_str().unwrap_or_default();
    shown["power"] == "off" && said.contains(KNOWN_LIMIT)
}

/// It is suspended and goes on with all that it had, or it was refused and has gone on.
fn is_saved_or_goes_on(here: &Installation, ended: &Output) {
    let power = eventually("it runs or is at rest", || {
        let power = here.vm(VM).ok()?["power"].as_str()?.to_owned();
        matches!(power.as_str(), "running" | "suspended" | "off").then_some(power)
    });
    let power = power.unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    eprintln!("{power}: {said}");
    match power.as_str() {
        "suspended" => {
            // A memory that no QEMU loads is found here.
            here.vmseal(&["vm", "resume", VM]).unwrap();
        }
        "running" => {
            assert!(!ended.status.success(), "a task that has suspended it left it running")
        }
        _ => {
            assert!(is_lost(here), "{}", here.vm(VM).unwrap());
            return;
        }
    }
    disks_are_served(here, VM);
    if is_lost(here) {
        return;
    }
    has_lost_nothing(here);
}

/// A guest that QEMU before 9.0 has lost is started again, and seldom.
fn lives_again(here: Installation, lost: &mut u32) -> Installation {
    if !is_lost(&here) {
        return here;
    }
    *lost += 1;
    assert!(*lost <= 1, "{lost} guests are lost");
    drop(here);
    started()
}

#[test]
fn a_guest_whose_filter_has_just_died_is_suspended_with_all_it_has_or_goes_on() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut lost) = (started(), 0);
    for milliseconds in some_of(&MOMENTS) {
        kill_filters(&here);
        sleep(Duration::from_millis(milliseconds));
        let ended = here.try_vmseal(&["vm", "suspend", VM]).unwrap();
        is_saved_or_goes_on(&here, &ended);
        here = lives_again(here, &mut lost);
    }
}

#[test]
fn a_guest_whose_filter_dies_while_it_is_suspended_is_saved_or_goes_on() {
    if !has_its_turn() {
        return;
    }
    let (mut here, mut lost) = (started(), 0);
    for milliseconds in some_of(&MOMENTS) {
        let ended =
            during_which(&here, &["vm", "suspend", VM], milliseconds, || kill_filters(&here));
        is_saved_or_goes_on(&here, &ended);
        here = lives_again(here, &mut lost);
    }
}

/// It needs none to be saved, and gets none while it is paused: QEMU would have it begin, or lose the disk.
#[test]
fn a_paused_guest_whose_filter_dies_is_saved_without_one() {
    let mut here = started();
    here.vmseal(&["vm", "pause", VM]).unwrap();
    kill_filters(&here);
    assert!(here.wait_alarm(VM, "disks-down").unwrap().contains("goes on"));
    // Nor does an agent start one that finds it so.
    Victim::Agent.kill(&mut here, VM);
    here.wait_host().unwrap();
    here.wait_power(VM, "paused").unwrap();
    assert!(here.wait_alarm(VM, "disks-down").unwrap().contains("goes on"));
    assert!(filters(&here).is_empty(), "a filter was started for a guest that is paused");
    here.vmseal(&["vm", "suspend", VM]).unwrap();
    here.wait_power(VM, "suspended").unwrap();
    here.vmseal(&["vm", "resume", VM]).unwrap();
    here.wait_power(VM, "paused").unwrap();
    assert_eq!(filters(&here).len(), 1);
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    has_lost_nothing(&here);

    // Unpaused, it goes on with another one; QEMU before 9.0 would lose its disk, and what to do instead is said.
    here.vmseal(&["vm", "pause", VM]).unwrap();
    kill_filters(&here);
    here.wait_alarm(VM, "disks-down").unwrap();
    let unpaused = here.try_vmseal(&["vm", "unpause", VM]).unwrap();
    let takes_none = !unpaused.status.success();
    if takes_none {
        let why = String::from_utf8_lossy(&unpaused.stderr).into_owned();
        assert!(why.contains("vmseal vm suspend"), "{why}");
        assert_eq!(here.vm(VM).unwrap()["power"], "paused");
        here.vmseal(&["vm", "suspend", VM]).unwrap();
        here.vmseal(&["vm", "resume", VM]).unwrap();
        here.vmseal(&["vm", "unpause", VM]).unwrap();
    }
    disks_are_served(&here, VM);
    has_lost_nothing(&here);

    // A snapshot keeps it so, too: the next filter finds its layers.
    here.vmseal(&["vm", "pause", VM]).unwrap();
    kill_filters(&here);
    here.wait_alarm(VM, "disks-down").unwrap();
    here.vmseal(&["snapshot", "create", VM, "still", "--memory"]).unwrap();
    assert_eq!(here.vm(VM).unwrap()["power"], "paused");
    assert!(filters(&here).is_empty(), "a filter was started for a guest that is paused");
    if takes_none {
        // The snapshot has its memory, and QEMU does not save it twice. A reset would cost the VM.
        let why = here.refused(&["vm", "unpause", VM]).unwrap();
        assert!(why.contains("vmseal snapshot revert"), "{why}");
        let why = here.refused(&["vm", "reset", VM]).unwrap();
        assert!(why.contains("it cannot be reset"), "{why}");
        assert_eq!(here.vm(VM).unwrap()["power"], "paused");
    }
    here.vmseal(&["snapshot", "revert", VM, "still", "--running"]).unwrap();
    assert_eq!(here.vm(VM).unwrap()["power"], "paused");
    here.vmseal(&["vm", "unpause", VM]).unwrap();
    has_lost_nothing(&here);
}
