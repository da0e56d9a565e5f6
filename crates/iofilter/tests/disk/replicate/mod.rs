//! A replica never counts as equal where it differs: whatever is in flight, whenever the process is killed or the
//! power fails, and whichever of disk, replica and map gives errors. And in the end it is equal.

mod killed;
mod mirror;
mod overlap;
mod rig;
mod troubles;

use vmseal_api::filter::{FaultKind, FaultRule, FaultSpec, FilterSpec, OperationKind};

use crate::replicate::rig::{Faults, Rig};
use crate::seed::seed;

fn faults(kinds: &[FaultKind], operations: &[OperationKind], one_in: u64) -> Vec<FilterSpec> {
    let rule = |kind: &FaultKind| FaultRule {
        kind: *kind,
        operations: operations.to_vec(),
        range: None,
        one_in,
        after: 0,
        times: None,
    };
    vec![FilterSpec::Fault(FaultSpec { seed: 1, rules: kinds.iter().map(rule).collect() })]
}

/// The events in all runs of a rig.
#[derive(Debug, Default)]
struct Happened {
    resumed: usize,
    equal_before_the_end: usize,
    unmarked_while_asked: usize,
    grown_with_their_maps: usize,
}

/// Several runs of a disk and its replica, each ended by a kill or a power cut, between two of which the disk may grow; after the
/// last one, or in between, the parts that count as equal are equal.
fn live(faults: &Faults, seed: u64, happened: &mut Happened) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut rig = Rig::new(faults.clone(), random.fork());
    rig.begin_short();
    for life in 0..5 {
        let grown = life > 1 && random.bool() && rig.grow();
        let mut guest = rig.start();
        let resumed = life > 0 && guest.dirty() < rig.size();
        happened.resumed += usize::from(resumed);
        happened.grown_with_their_maps += usize::from(grown && resumed);
        for _ in 0..random.usize(0..6) {
            let before = guest.dirty();
            guest.run(random.usize(1..120));
            happened.unmarked_while_asked += usize::from(guest.dirty() < before);
            if random.u8(..3) == 0 {
                guest.settle();
                if guest.dirty() == 0 {
                    happened.equal_before_the_end += 1;
                    rig.is_equal("settled");
                }
            }
        }
        drop(guest);
        match random.bool() {
            true => rig.cut(),
            false => rig.kill(),
        }
        rig.unmarked_chunks_are_equal();
    }
    rig.heal();
    let mut guest = rig.start();
    guest.settle();
    assert_eq!(guest.dirty(), 0, "it does not become equal");
    let status = guest.status();
    assert_eq!((status.last_error, status.lag_milliseconds.is_some()), (None, true));
    drop(guest);
    rig.is_equal("at the end");
}

fn check(name: &str, faults: &Faults, rounds: u64) -> Happened {
    let (seed, mut happened) = (seed(), Happened::default());
    for round in 0..rounds {
        live(faults, seed.wrapping_add(round), &mut happened);
    }
    println!("{name}: {happened:?}");
    happened
}

#[test]
fn unmarked_chunks_are_equal_after_any_kill_or_power_cut() {
    let happened = check("no errors", &Faults::default(), 150);
    // Otherwise the test proves nothing.
    assert!(happened.resumed > 50, "{happened:?}");
    assert!(happened.equal_before_the_end > 50, "{happened:?}");
    assert!(happened.unmarked_while_asked > 50, "{happened:?}");
    assert!(happened.grown_with_their_maps > 5, "{happened:?}");
}

#[test]
fn errors_of_replica_and_map_never_reach_the_guest_and_are_repaired() {
    use FaultKind::{Error, Torn};
    let changes = [OperationKind::Write, OperationKind::Discard, OperationKind::Flush];
    let writes = [OperationKind::Write];
    let full = Error { errno: libc::ENOSPC };
    let broken = Error { errno: libc::EIO };
    let replica = Faults {
        replica: [faults(&[full, broken], &changes, 8), faults(&[Torn], &writes, 8)].concat(),
        ..Faults::default()
    };
    let map = Faults {
        map: [faults(&[full, broken], &changes, 4), faults(&[Torn], &writes, 4)].concat(),
        ..Faults::default()
    };
    let unreadable =
        Faults { map: faults(&[broken], &[OperationKind::Read], 2), ..Faults::default() };
    let source =
        Faults { source: faults(&[broken], &[OperationKind::Read], 6), ..Faults::default() };
    let all = Faults {
        source: source.source.clone(),
        ..Faults { map: map.map.clone(), ..replica.clone() }
    };
    // Most errors are possible in the order in which a map is rewritten.
    for (name, faults, rounds) in [
        ("the replica", replica, 50),
        ("the map", map, 150),
        ("reading the map", unreadable, 50),
        ("reading the disk", source, 50),
        ("all", all, 50),
    ] {
        check(name, &faults, rounds);
    }
}
