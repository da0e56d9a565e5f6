//! Histories made by hand, of disks with errors, and of some that are correct.

use crate::history::checker::{End, History, Read, Write, Wrong};
use crate::history::stamp::{Found, Stamp};

fn write(sequence: u64, asked: u64, end: End) -> Write {
    Write { sequence, units: 0..2, zeroes: false, asked, end }
}

fn done(sequence: u64, asked: u64, done: u64) -> Write {
    write(sequence, asked, End::Done(done))
}

/// Reads of the first unit: the content, and when.
fn history(writes: &[Write], reads: &[(Found, u64, u64)]) -> History {
    let mut history = History::new(vec![Found::Zeroes; 4]);
    history.writes = writes.to_vec();
    let read = |&(found, asked, done)| Read { first: 0, found: vec![found], asked, done };
    history.reads = reads.iter().map(read).collect();
    history
}

fn wrong(writes: &[Write], reads: &[(Found, u64, u64)]) -> Vec<Wrong> {
    history(writes, reads).check().into_iter().map(|finding| finding.wrong).collect()
}

const ONE: Found = Found::Write(1);
const TWO: Found = Found::Write(2);
const ZERO: Found = Found::Zeroes;

#[test]
fn correct_histories_have_no_findings() {
    let both = [done(1, 1, 2), done(2, 5, 8)];
    assert_eq!(wrong(&both, &[(ZERO, 1, 3), (ONE, 3, 4), (ONE, 6, 7), (TWO, 9, 10)]), []);
    assert_eq!(wrong(&both, &[(ONE, 4, 9), (TWO, 6, 7)]), [], "reads at once, in any order");
    let at_once = [done(1, 1, 5), done(2, 2, 6)];
    assert_eq!(wrong(&at_once, &[(TWO, 3, 4), (ONE, 7, 8), (ONE, 9, 10)]), [], "either is last");
    for end in [End::Failed(6), End::Open] {
        let failed = [done(1, 1, 2), write(2, 5, end)];
        assert_eq!(wrong(&failed, &[(ONE, 7, 8), (ONE, 9, 10)]), [], "it did not happen");
        assert_eq!(wrong(&failed, &[(TWO, 7, 8), (TWO, 9, 10)]), [], "it did");
    }
    let open = [done(1, 1, 2), write(2, 5, End::Open)];
    assert_eq!(wrong(&open, &[(ONE, 7, 8), (TWO, 9, 10)]), [], "it happened late");
    let zeroes = |asked, done| Write { zeroes: true, ..self::done(9, asked, done) };
    let twice = [zeroes(1, 2), done(1, 3, 4), zeroes(5, 6)];
    assert_eq!(wrong(&twice, &[(ZERO, 2, 3), (ONE, 4, 5), (ZERO, 7, 8)]), []);
}

#[test]
fn a_lost_write_is_found() {
    assert_eq!(wrong(&[done(1, 1, 2)], &[(ZERO, 3, 4)]), [Wrong::Lost]);
    let both = [done(1, 1, 2), done(2, 3, 4)];
    assert_eq!(wrong(&both, &[(ONE, 5, 6), (ONE, 7, 8)]), [Wrong::Lost; 2]);
    let zeroed = [done(1, 1, 2), Write { zeroes: true, ..done(2, 3, 4) }];
    assert_eq!(wrong(&zeroed, &[(ONE, 5, 6)]), [Wrong::Lost], "zeroes that were not written");
}

#[test]
fn a_stale_read_is_found() {
    let both = [done(1, 1, 2), done(2, 3, 4)];
    assert_eq!(wrong(&both, &[(ONE, 5, 6), (TWO, 7, 8)]), [Wrong::Stale]);
}

#[test]
fn a_write_that_is_done_twice_is_found() {
    let both = [done(1, 1, 2), done(2, 3, 4)];
    assert_eq!(wrong(&both, &[(TWO, 5, 6), (ONE, 7, 8)]), [Wrong::Doubled]);
    let at_once = [done(1, 1, 5), done(2, 2, 6)];
    let seen = [(ONE, 3, 4), (TWO, 7, 8), (ONE, 9, 10)];
    assert_eq!(wrong(&at_once, &seen), [Wrong::Doubled], "first one, then two, then one again");
    // The second write was never answered: only a read that found it orders it.
    let open = [done(1, 1, 2), write(2, 5, End::Open)];
    assert_eq!(wrong(&open, &[(TWO, 7, 8), (ONE, 9, 10)]), [Wrong::Doubled]);
}

#[test]
fn torn_misplaced_and_invented_data_is_found() {
    let one = [done(1, 1, 2)];
    assert_eq!(wrong(&one, &[(Found::Torn, 3, 4)]), [Wrong::Torn]);
    let elsewhere = Found::Misplaced(Stamp { disk: 1, unit: 3, sequence: 1 });
    assert_eq!(wrong(&one, &[(elsewhere, 3, 4)]), [Wrong::Misplaced]);
    assert_eq!(wrong(&one, &[(TWO, 3, 4)]), [Wrong::Invented], "never written");
    assert_eq!(wrong(&[done(1, 5, 6)], &[(ONE, 3, 4)]), [Wrong::Invented], "not written yet");
    let mut beside = history(&one, &[]);
    beside.reads = vec![Read { first: 2, found: vec![ZERO, ONE], asked: 3, done: 4 }];
    let found = beside.check();
    assert_eq!((found[0].wrong, found[0].unit, found.len()), (Wrong::Invented, 3, 1));
}

#[test]
fn where_reads_tear_beside_writes_only_those_are_excused() {
    let excused = |writes: &[Write], reads: &[(Found, u64, u64)]| {
        let mut history = history(writes, reads);
        history.tears_beside_writes = true;
        history.check().into_iter().map(|finding| finding.wrong).collect::<Vec<_>>()
    };
    let one = [done(1, 3, 6)];
    for (asked, done) in [(1, 4), (4, 5), (5, 8)] {
        let reads = [(Found::Torn, asked, done), (ONE, 9, 10)];
        assert_eq!(excused(&one, &reads), [], "{asked}..{done}");
        let doubled = [Wrong::Torn, Wrong::Doubled];
        assert_eq!(wrong(&one, &reads), doubled, "storage that does not tear");
    }
    assert_eq!(excused(&one, &[(Found::Torn, 1, 2)]), [Wrong::Torn], "before the write");
    assert_eq!(excused(&one, &[(Found::Torn, 7, 8)]), [Wrong::Torn], "after it");
    assert_eq!(excused(&one, &[(ZERO, 7, 8)]), [Wrong::Lost]);
}

#[test]
fn a_flush_that_a_power_cut_undoes_is_found() {
    let cut = |flushes: &[u64], writes: &[Write], found: Found| {
        let mut history = history(writes, &[]);
        history.flushes = flushes.to_vec();
        let after = [found, found, ZERO, ZERO];
        let findings = history.check_cut(&after);
        findings.iter().map(|finding| finding.wrong).collect::<Vec<_>>()
    };
    let both = [done(1, 1, 2), done(2, 5, 6)];
    for found in [ZERO, ONE, TWO] {
        assert_eq!(cut(&[], &both, found), [], "nothing was flushed");
    }
    assert_eq!(cut(&[3], &both, ZERO), [Wrong::Unflushed; 2]);
    assert_eq!(cut(&[3], &both, ONE), []);
    assert_eq!(cut(&[3], &both, TWO), [], "it may be there all the same");
    assert_eq!(cut(&[7], &both, ONE), [Wrong::Unflushed; 2]);
    assert_eq!(cut(&[5], &both, ONE), [], "the flush was asked for before the write was done");
    let at_once = [done(1, 1, 5), done(2, 2, 6)];
    assert_eq!(cut(&[7], &at_once, ONE), [], "either is last");
    assert_eq!(cut(&[7], &at_once, ZERO), [Wrong::Unflushed; 2]);
    assert_eq!(cut(&[], &both, Found::Torn), [Wrong::Torn; 2]);
    assert_eq!(cut(&[], &both, Found::Write(3)), [Wrong::Invented; 2]);
    let open = [done(1, 1, 2), write(2, 5, End::Open)];
    assert_eq!(cut(&[7], &open, ONE), [], "a write under way is in no flush");
    assert_eq!(cut(&[7], &open, TWO), []);
}
