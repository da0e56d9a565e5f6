//! Storage that fails: over every backend and through every chain a failed change is done or not,
//! sector by sector where a disk is encrypted, and what a read has found stays; every failure is reported, and nothing
//! else is reported as one.

use std::cell::Cell;

use proptest::prelude::*;
use proptest::test_runner::{RngSeed, TestRunner};
use vmseal_api::filter::{FaultKind, FaultRange, FaultRule, FaultSpec, Holes, OperationKind};
use vmseal_iofilter::disk::Disk;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::request::IoError;

use crate::model::ask::{self, Ask, What, asks, submit};
use crate::model::possible::Possible;
use crate::model::store::{PLACES, Place, Store};
use crate::model::{BLOCK, SIZE, assert_image, assert_replica, content};
use crate::replicated::{self, Replicated};
use crate::seed;

const SECTOR: usize = 4096;

/// The faults that the filter's configuration allows, except lost requests: those are not reported.
fn rules() -> impl Strategy<Value = Vec<FaultRule>> {
    use OperationKind::{Discard, Flush, Read, Write};
    let kind = prop_oneof![
        Just(FaultKind::Error { errno: libc::EIO }),
        Just(FaultKind::Error { errno: libc::ENOSPC }),
        Just(FaultKind::Torn),
    ];
    let operations = prop::sample::subsequence(vec![Read, Write, Flush, Discard], 0..=4);
    let range = (0..SIZE / BLOCK, 1..200u64)
        .prop_map(|(block, blocks)| FaultRange { offset: block * BLOCK, length: blocks * BLOCK });
    // A bad spot, or an occasional error.
    let spot = prop_oneof![
        1 => (range.prop_map(Some), 1..3u64),
        3 => (Just(None), 2..25u64),
    ];
    let times = prop_oneof![3 => Just(None), 1 => (1..10u64).prop_map(Some)];
    let rule = (kind, operations, spot, 0..10u64, times).prop_map(
        |(kind, operations, (range, one_in), after, times)| {
            let operations = if kind == FaultKind::Torn { vec![Write] } else { operations };
            FaultRule { operations, range, after, one_in, times, kind }
        },
    );
    prop::collection::vec(rule, 1..4)
}

/// One or two layers with rules.
fn faults() -> impl Strategy<Value = Vec<FaultSpec>> {
    let spec = (any::<u64>(), rules()).prop_map(|(seed, rules)| FaultSpec { seed, rules });
    prop::collection::vec(spec, 1..3)
}

/// The counters of the layers `fault` of a disk.
#[derive(Clone, Copy, Debug, Default)]
struct Struck {
    errors: u64,
    torn: u64,
}

impl Struck {
    fn of(disk: &Disk) -> Self {
        let layers = disk.layers();
        let all = layers.iter().filter(|layer| layer.kind() == "fault");
        let all: Vec<_> = all.flat_map(|layer| layer.counters()).collect();
        let sum = |name| all.iter().filter(|counter| counter.0 == name).map(|c| c.1).sum();
        Self { errors: sum("errors"), torn: sum("torn_writes") }
    }

    fn all(self) -> u64 {
        self.errors + self.torn
    }

    fn and(self, other: Self) -> Self {
        Self { errors: self.errors + other.errors, torn: self.torn + other.torn }
    }
}

/// A guest of one disk, and what it knows about the content.
struct Guest {
    place: Place,
    holes: Option<Holes>,
    possible: Possible,
}

impl Guest {
    /// Does requests as [`crate::model::run`] does, and accepts every answer.
    fn run(&mut self, disk: &Disk, chain: &mut Chain, asks: &[Ask]) {
        let mut rest = asks;
        while !rest.is_empty() {
            let (batch, later) = rest.split_at(ask::apart(rest));
            let mut buffers: Vec<Vec<u8>> = batch.iter().map(Ask::content).collect();
            let before = Struck::of(disk).all();
            let answers = ask_all(chain, batch, &mut buffers);
            let struck = Struck::of(disk).all() - before;
            let failed = answers.iter().filter(|answer| answer.is_err()).count() as u64;
            // Several parts of a request may have met one.
            assert!(failed <= struck, "{failed} requests failed of {struck} faults: {batch:?}");
            assert!(struck == 0 || failed > 0, "{struck} faults are not reported: {batch:?}");
            for ((ask, buffer), answer) in batch.iter().zip(&buffers).zip(&answers) {
                let write = ask.what == What::Write;
                assert!(!write || *buffer == ask.content(), "a write changed the guest's memory");
                match answer {
                    Ok(()) => self.done(ask, buffer),
                    Err(IoError::Device(libc::EIO) | IoError::NoSpace) => self.failed(ask, buffer),
                    Err(error) => panic!("{ask:?}: {error:?}, which no fault says"),
                }
            }
            rest = later;
        }
    }

    fn done(&mut self, ask: &Ask, buffer: &[u8]) {
        let start = ask.range().start;
        match ask.what {
            What::Read => self.possible.found(start, buffer),
            What::Write => self.possible.put(start, buffer),
            What::Zero | What::Unmap => self.possible.put(start, &vec![0; buffer.len()]),
            What::Flush => {}
            What::Discard => {
                let range = self.discarded(ask);
                self.possible.may_be_put(range.start, &vec![0; range.len()]);
            }
        }
    }

    fn failed(&mut self, ask: &Ask, buffer: &[u8]) {
        let (start, reach) = (ask.range().start, self.reach(ask));
        match ask.what {
            What::Write => self.possible.may_be_put(start, &buffer[..reach]),
            What::Zero | What::Unmap => self.possible.may_be_put(start, &vec![0; reach]),
            What::Read | What::Flush | What::Discard => {}
        }
    }

    /// The part of a discard that can become zeroes: where a disk is encrypted, whole sectors if these may be holes.
    fn discarded(&self, ask: &Ask) -> std::ops::Range<usize> {
        let range = ask.range();
        match self.holes {
            None => range,
            Some(Holes::Ciphertext) => range.start..range.start,
            Some(Holes::Zero) => {
                let start = range.start.next_multiple_of(SECTOR);
                start..(range.end / SECTOR * SECTOR).max(start)
            }
        }
    }

    /// How many bytes from its beginning a failed change may have changed: a fault does nothing, or the first
    /// half of a write in whole sectors.
    fn reach(&self, ask: &Ask) -> usize {
        let (start, end) = (ask.range().start, ask.range().end);
        let up_to = match (ask.what, self.holes, self.place) {
            (What::Read | What::Flush | What::Discard, _, _) => start,
            // Whole sectors may go to storage as several writes at the same time, of which another failed. A sector
            // that is changed in part comes after those before it, and alone.
            (_, Some(_), _) => {
                let whole = (end / SECTOR).saturating_sub(start.div_ceil(SECTOR));
                let last = (end - 1) / SECTOR * SECTOR;
                if end.is_multiple_of(SECTOR) && whole > 1 { end } else { last }
            }
            // Perhaps as several writes one after the other, of which the last is not done whole.
            (_, None, Place::Storage) => end - BLOCK as usize,
            (What::Write, None, _) => start + (end - start) / 2 / SECTOR * SECTOR,
            (What::Zero | What::Unmap, None, _) => start,
        };
        up_to.saturating_sub(start)
    }
}

/// The answers to requests in flight together: one to each.
fn ask_all(chain: &mut Chain, batch: &[Ask], buffers: &mut [Vec<u8>]) -> Vec<Result<(), IoError>> {
    for (tag, (ask, buffer)) in batch.iter().zip(buffers).enumerate() {
        submit(chain, ask, buffer, tag as u64);
    }
    let mut answers = vec![None; batch.len()];
    ask::finish(chain, |done| {
        let ask = &batch[done.tag as usize];
        assert_eq!(done.operation, ask.operation());
        let before = answers[done.tag as usize].replace(done.result);
        assert!(before.is_none(), "answered twice: {ask:?}");
    });
    answers.into_iter().map(|answer| answer.expect("each is answered")).collect()
}

/// Reads of the whole disk that are short enough for a cache.
fn sweep() -> Vec<Ask> {
    let ask = |start| Ask { what: What::Read, start, blocks: 64, fill: 0, cut: 9000 };
    (0..SIZE / BLOCK).step_by(64).map(ask).collect()
}

fn check(
    (place, holes, (holds_back, caches, replicates)): (Place, Option<Holes>, (bool, bool, bool)),
    batches: &[Vec<Ask>],
    faults: &[FaultSpec],
) -> Struck {
    let store = Store::new(place, holes, holds_back, caches, replicates);
    let atom = if holes.is_some() { SECTOR } else { BLOCK as usize };
    let possible = Possible::new(&content(&store, holes), atom);
    let mut guest = Guest { place, holes, possible };
    let replicated = store.replicates.then(|| Replicated::new(SIZE));
    let replicated = replicated.as_ref();
    let before = replicated.map(|it| replicated::below(&store.open_with(Some(it), &[])));
    let mut struck = Struck::default();
    for asks in batches {
        let disk = store.open_with(replicated, faults);
        let mut chain = disk.chain().unwrap();
        let (first, second) = asks.split_at(asks.len() / 2);
        guest.run(&disk, &mut chain, first);
        if let Some(replicated) = replicated {
            replicated.copy_some(&disk);
        }
        guest.run(&disk, &mut chain, second);
        guest.run(&disk, &mut chain, &sweep());
        guest.run(&disk, &mut chain, &sweep());
        struck = struck.and(Struck::of(&disk));
    }
    let disk = store.open_with(replicated, &[]);
    guest.run(&disk, &mut disk.chain().unwrap(), &sweep());
    if let (Some(replicated), Some(before)) = (replicated, before) {
        replicated.copy(&disk);
        assert_replica(&replicated.bytes(), &before, &replicated::below(&disk));
    }
    drop(disk);
    assert_image(&store, holes, &guest.possible.settled());
    struck
}

#[test]
fn failed_changes_are_reported_and_done_or_not_and_nothing_else_changes() {
    let seed = seed::seed();
    let flags = [false, true];
    for place in PLACES {
        let struck = Cell::new(Struck::default());
        for case in 0..24 {
            let holes = [None, Some(Holes::Zero), Some(Holes::Ciphertext)][case / 8];
            let layers = (flags[case & 1], flags[case >> 1 & 1], flags[case >> 2 & 1]);
            let mut runner = TestRunner::new(ProptestConfig {
                cases: seed::rounds(3),
                failure_persistence: None,
                max_shrink_iters: 256,
                rng_seed: RngSeed::Fixed(seed ^ ((place as u64) << 8) ^ case as u64),
                ..ProptestConfig::default()
            });
            let inputs = (prop::collection::vec(asks(), 1..4), faults());
            let outcome = runner.run(&inputs, |(batches, faults)| {
                let met = check((place, holes, layers), &batches, &faults);
                struck.set(struck.get().and(met));
                Ok(())
            });
            if let Err(error) = outcome {
                panic!(
                    "{place:?}, {holes:?}, (holds back, caches, replicates) {layers:?}: {error}"
                );
            }
        }
        let struck = struck.get();
        assert!(struck.errors > 0 && struck.torn > 0, "{place:?}: {struck:?}");
    }
}
