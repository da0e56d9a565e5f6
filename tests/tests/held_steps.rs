//! What dies exactly before a step of what an operator does to a VM that runs, or after it and before that is recorded: server, agent,
//! filter and QEMU, while fio in the guest writes and verifies. Each operation goes on or is undone, a retry works, and no write is
//! lost. A run tries one moment of some of the operations, chosen by a seed that is printed; with `VMSEAL_ALL`, all of all.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::path::Path;

use vmseal_tests::eventually;
use vmseal_tests::fio_guest::{ready, started, stop_and_check, write_and_verify};
use vmseal_tests::guest::Console;
use vmseal_tests::held_steps::{Ended, killed_at, without_holding};
use vmseal_tests::installation::{Installation, text};
use vmseal_tests::kills::{Victim, console_again, retried};
use vmseal_tests::shell_guest::run;

const VM: &str = "web";

/// How many blocks a second fio writes.
const WRITES: u32 = 300;

/// Fewer moments than most operations have: a run that tries one of each tries one of these.
const MOMENTS: usize = 10;

/// More moments than any operation has.
const MOMENTS_MAX: usize = 60;

/// What an operator does, one after the other; at the end all is as it was at the beginning. `second` is a directory for a datastore,
/// `to` one for backups.
fn operations(to: &str) -> Vec<Vec<&str>> {
    let disk = "datastore=local,size=16MiB,name=extra";
    vec![
        vec!["vm", "encrypt", VM, "--policy", "encrypted"],
        vec!["vm", "recrypt", VM],
        vec!["snapshot", "create", VM, "one"],
        vec!["vm", "recrypt", VM, "--deep"],
        vec!["vm", "move", VM, "--datastore", "second"],
        vec!["backup", "create", VM, "full", "--to", to],
        vec!["snapshot", "create", VM, "asleep", "--memory"],
        vec!["vm", "prove", VM],
        vec!["vm", "clone", VM, "copy", "--snapshot", "one"],
        vec!["snapshot", "delete", VM, "one"],
        vec!["backup", "verify", VM, "full"],
        vec!["snapshot", "delete", VM, "asleep"],
        vec!["vm", "move", VM, "--datastore", "local"],
        vec!["vm", "dump", VM, "core"],
        vec!["disk", "add", VM, "--disk", disk],
        vec!["disk", "resize", VM, "extra", "--size", "32MiB"],
        vec!["disk", "remove", VM, "extra"],
        vec!["vm", "suspend", VM],
        vec!["vm", "resume", VM],
        vec!["vm", "decrypt", VM, "--policy", "plain", "--yes"],
    ]
}

/// What is made beside the VM, and is in the way of the next turn.
fn tidy_up(here: &Installation) {
    here.vmseal(&["dump", "delete", VM, "core"]).unwrap();
    here.vmseal(&["vm", "delete", "copy"]).unwrap();
    here.vmseal(&["backup", "delete", VM, "full"]).unwrap();
}

/// A guest that was killed with its QEMU: the VM starts again, and has what its guest had flushed.
fn started_again(here: &Installation, console: Console) -> Console {
    drop(console);
    eventually("the VM is off", || (here.vm(VM).ok()?["power"] == "off").then_some(())).unwrap();
    here.vmseal(&["vm", "start", VM]).unwrap();
    let mut console = ready(here, VM);
    run(&mut console, "dd if=/dev/vda bs=1M skip=58 count=1 2>/dev/null | head -n 1", "FLUSHED")
        .unwrap();
    write_and_verify(&mut console, WRITES);
    console
}

/// Does an operation, and kills something at this moment of it; whether it has so many.
fn disturbed(
    here: &mut Installation,
    held: &Path,
    console: &mut Option<Console>,
    operation: &[&str],
    (victim, moment): (Victim, usize),
) -> bool {
    let Ended { at, output } = killed_at(here, held, VM, operation, victim, moment);
    without_holding(held, || {
        let off = matches!(victim, Victim::Qemu)
            && at.is_some()
            && here.vm(VM).unwrap()["power"] == "off";
        if off {
            *console = console.take().map(|console| started_again(here, console));
        }
        retried(here, VM, operation, &output);
    });
    at.is_some()
}

#[test]
fn whatever_dies_at_a_step_of_whatever_operation_it_goes_on_or_is_undone() {
    let all = std::env::var_os("VMSEAL_ALL").is_some();
    let given = std::env::var("VMSEAL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = given.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("VMSEAL_SEED={seed}");
    let mut random = fastrand::Rng::with_seed(seed);

    let mut here = Installation::new().unwrap();
    let mut console = started(&here, VM, "plain", "local");
    let [second, to] = ["second", "backups"].map(|name| {
        let path = here.path(name);
        std::fs::create_dir(&path).unwrap();
        text(&path).unwrap().to_owned()
    });
    here.vmseal(&["datastore", "add", "second", "--host", "here", "--path", &second]).unwrap();
    let flush = "echo FLUSHED | dd of=/dev/vda bs=1M seek=58 conv=notrunc,fsync 2>/dev/null";
    run(&mut console, &format!("{flush}; echo WROTE-$((6 * 7))"), "WROTE-42").unwrap();
    write_and_verify(&mut console, WRITES);
    let held = here.hold_steps().unwrap();
    let mut console = Some(console);

    let victims = [Victim::Agent, Victim::Server, Victim::Filter, Victim::Qemu];
    let turns: Vec<Option<(Victim, usize)>> = match all {
        true => (0..MOMENTS_MAX)
            .flat_map(|moment| victims.map(|victim| Some((victim, moment))))
            .collect(),
        false => vec![None],
    };
    for turn in turns {
        let mut reached = false;
        for operation in operations(&to) {
            if turn.is_none() && !random.bool() {
                without_holding(&held, || here.vmseal(&operation).unwrap());
                continue;
            }
            // A guest that is suspended has neither.
            let alive = operation[1] != "resume";
            let of_run = || {
                // Those that cost a boot are tried less often.
                let of = if random.u8(..8) == 0 { 4 } else { 3 };
                (victims[random.usize(..of)], random.usize(..MOMENTS))
            };
            let (victim, moment) = turn.unwrap_or_else(of_run);
            let victim = match victim {
                Victim::Filter | Victim::Qemu if !alive => Victim::Agent,
                victim => victim,
            };
            reached |= disturbed(&mut here, &held, &mut console, &operation, (victim, moment));
        }
        without_holding(&held, || tidy_up(&here));
        if !reached {
            break;
        }
    }
    let mut console = console_again(&here, VM, console.unwrap());
    stop_and_check(&mut console);
    without_holding(&held, || here.vmseal(&["vm", "stop", VM, "--force"]).unwrap());
}
