//! An attacker between two hosts while a VM migrates, who changes, leaves out, doubles, reorders, cuts off or repeats what goes over
//! the network: the migration fails by name, the guest goes on where it was and has lost nothing, and moves when the attacker is gone.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::net::Ipv6Addr;

use vmseal_tests::counting_guest::{
    count, read_marker_of_disk, started_with_one_disk, stop_counting,
};
use vmseal_tests::eventually;
use vmseal_tests::installation::Installation;
use vmseal_tests::kills::has_its_turn;
use vmseal_tests::network::own_namespace;
use vmseal_tests::shell_guest::run;
use vmseal_tests::two_hosts::{
    HERE, THERE, add_host_with_datastore, nothing_is_left, only_host, rounds_of_kills,
};
use vmseal_tests::wire::{Aim, Attack, SAID_BY_DESTINATION, SAID_BY_SOURCE, Wire, separate_ipv6};

const VM: &str = "web";

/// A text that the guest has in its memory alone: typed in two parts, so that no log has it.
const IN_MEMORY: (&str, &str) = ("MARKER-OF-", "THE-MEMORY-2098");

/// The connections of a migration with one disk that is copied; the first one is the control channel.
const MEMORY: u16 = 1;
const DISK: u16 = 2;

/// Less than what goes to the destination on each of them, in bytes.
const BULK: usize = 2 << 20;

/// Less than what comes back while the disk is copied: what NBD says first, and answers.
const BACK: usize = 500;

/// The longest stretch that is changed, in bytes: some frames of messages, or a part of one of memory.
const STRETCH_MAX: usize = 8 << 10;

/// What a task says that failed by its connection. QEMU may be quicker to say that its stream has ended.
const BROKEN: [&str; 2] = ["the connection to the other host", "QEMU has not moved"];

/// What the agent logs that finds something else on a stream than what was sent.
const CHANGED: &str = "a stream of a migration was changed on its way";

/// Where something is done.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In a handshake, to either end.
    Handshake,
    /// In the memory: what goes one way alone never waits for an answer to what the attacker keeps back.
    Memory,
    /// In the disk.
    Disk,
    /// In what comes back for the disk.
    Answers,
}

/// What is done in each round.
const ROUNDS: usize = 9;

fn aimed(random: &mut fastrand::Rng, round: usize) -> (Aim, Place) {
    let (bit, length) = (random.u8(..), random.usize(1..STRETCH_MAX));
    let (attack, place) = match round % ROUNDS {
        0 => (Attack::Flip(bit), Place::Handshake),
        1 => (Attack::Flip(bit), Place::Memory),
        2 => (Attack::Flip(bit), Place::Disk),
        3 => (Attack::Flip(bit), Place::Answers),
        4 => (Attack::Drop(length), Place::Memory),
        5 => (Attack::Double(length), Place::Memory),
        6 => (Attack::Swap(length), Place::Memory),
        7 => (Attack::Truncate, if random.bool() { Place::Memory } else { Place::Disk }),
        _ => (Attack::Replay, Place::Memory),
    };
    let to_destination = match place {
        Place::Handshake => random.bool(),
        Place::Memory | Place::Disk => true,
        Place::Answers => false,
    };
    let (stream, at) = match place {
        Place::Handshake => {
            let said = if to_destination { SAID_BY_SOURCE } else { SAID_BY_DESTINATION };
            (random.u16(..=DISK), random.usize(..said))
        }
        Place::Memory => (MEMORY, random.usize(SAID_BY_SOURCE..BULK)),
        Place::Disk => (DISK, random.usize(SAID_BY_SOURCE..BULK)),
        Place::Answers => (DISK, random.usize(SAID_BY_DESTINATION..BACK)),
    };
    (Aim { attack, stream, to_destination, at }, place)
}

/// The guest has what it had, and goes on counting.
fn has_lost_nothing(here: &Installation) {
    let mut console = here.console(VM).unwrap();
    stop_counting(&mut console);
    let (one, two) = IN_MEMORY;
    run(&mut console, "echo HAS-$m-", &format!("HAS-{one}{two}-")).unwrap();
    read_marker_of_disk(&mut console);
    count(&mut console);
}

/// How often an agent has logged that something was changed.
fn changed(here: &Installation, log: &str) -> usize {
    std::fs::read_to_string(here.path(log)).unwrap_or_default().matches(CHANGED).count()
}

/// Moves the VM with this done to it. What the task says; none where it had to be cancelled: a length that was changed has an end wait
/// for what never comes.
fn attacked(here: &Installation, wire: &Wire, aim: Aim) -> Option<String> {
    wire.aim(Some(aim));
    let task = here.json(&["vm", "migrate", VM, THERE, "--no-wait"]).unwrap();
    let task = task["id"].as_str().unwrap();
    let has_ended = || {
        let shown = here.json(&["task", "show", task]).ok()?;
        (!shown["ended"].is_null()).then_some(())
    };
    let mut ended = eventually("the task has ended", has_ended);
    if aim.attack == Attack::Hold {
        // The guest stands still for a minute of that.
        ended = ended.or_else(|_| eventually("the task has ended", has_ended));
    }
    if ended.is_err() {
        let _ = here.try_vmseal(&["task", "cancel", task]).unwrap();
    }
    let waited = here.try_vmseal(&["task", "wait", task]).unwrap();
    let told = String::from_utf8_lossy(&waited.stderr).into_owned();
    eprintln!("{told}");
    assert!(wire.has_struck(), "nothing was done: {aim:?}");
    assert!(!waited.status.success(), "it was not noticed: {aim:?}");
    wire.aim(None);
    ended.is_ok().then_some(told)
}

/// The guest goes on at its source, and nothing of it is left at the destination.
fn stays(here: &Installation) {
    assert_eq!(only_host(here, VM).unwrap(), HERE);
    nothing_is_left(here, THERE);
    has_lost_nothing(here);
}

#[test]
fn whatever_an_attacker_changes_between_the_hosts_the_guest_goes_on_where_it_was() {
    if !has_its_turn() {
        return;
    }
    if !own_namespace().unwrap() {
        return;
    }
    if let Err(error) = separate_ipv6() {
        vmseal_tests::skipped(format_args!("{error:#}"));
        return;
    }
    let (mut here, mut console) = started_with_one_disk(VM, "encrypted");
    here.receive_at(Ipv6Addr::UNSPECIFIED);
    add_host_with_datastore(&mut here).unwrap();
    let (one, two) = IN_MEMORY;
    run(&mut console, &format!("m={one}; m=${{m}}{two}; echo SET-$((6 * 7))"), "SET-42").unwrap();
    count(&mut console);
    drop(console);
    let wire = Wire::before(&here, THERE).unwrap();
    let (rounds, mut random) = rounds_of_kills(ROUNDS);
    for round in 0..rounds {
        let (aim, place) = aimed(&mut random, round);
        eprintln!("round {round}: {aim:?}");
        let finds = if aim.to_destination { "agent-there.log" } else { "agent.log" };
        let before = changed(&here, finds);
        let told = attacked(&here, &wire, aim);
        stays(&here);
        let Some(told) = told else { continue };
        assert!(BROKEN.iter().any(|broken| told.contains(broken)), "{aim:?}: {told}");
        let is_found = !matches!(place, Place::Handshake)
            && !matches!(aim.attack, Attack::Truncate | Attack::Replay);
        if is_found {
            eventually(CHANGED, || (changed(&here, finds) > before).then_some(())).unwrap();
        }
    }
    // Who takes all and passes nothing on does not hold the guest. It stands still for a minute, so not in each run.
    if std::env::var_os("VMSEAL_ALL").is_some() {
        let aim = Aim { attack: Attack::Hold, stream: MEMORY, to_destination: true, at: BULK };
        let told = attacked(&here, &wire, aim).unwrap();
        assert!(BROKEN.iter().any(|broken| told.contains(broken)), "{told}");
        // The task may have the destination's reason: it has lost the connection then.
        let log = std::fs::read_to_string(here.path("agent.log")).unwrap();
        assert!(log.contains("the guest has stood still for"), "{told}");
        stays(&here);
    }
    here.vmseal(&["vm", "migrate", VM, THERE]).unwrap();
    assert_eq!(only_host(&here, VM).unwrap(), THERE);
    has_lost_nothing(&here);
}
