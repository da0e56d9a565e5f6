//! The program, killed at any instant under a guest that reads while it writes, in parts of sectors, and
//! started again: what was answered is there, once, and the guest sees a pause. Every chain on every backend that
//! outlives the process.

use std::io::Write as _;
use std::time::Duration;

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde_json::Value;

use super::guest::Guest;
use super::rests::{Rests, SIZE};
use super::{chains, judge, log, pause};
use crate::initiator::Initiator;
use crate::seed;
use crate::successor::Filter;

const KILLS: usize = 6;

/// Kills the filter again and again, and ends the last two in order; how many requests were under way then.
fn check(rests: Rests, chain: &[Value], random: fastrand::Rng) -> usize {
    let place = tempfile::tempdir_in(rests.directory()).unwrap();
    let path = place.path();
    rests.make(path);
    let described = chains::in_place(chain, path);
    let start = || Filter::start(path, &rests.backend(path), SIZE, &described);
    let (mut filter, socket) = start();
    let mut guest = Guest::new(Initiator::connect_with_record(socket, u64::MAX), random);
    if chains::has_no_holes(chain) || rests == Rests::Overlay {
        guest.write_all();
    }
    let mut ended = Vec::new();
    if rests == Rests::Overlay {
        ended.push(filter.end());
        rests.lay_over(path);
        let socket;
        (filter, socket) = start();
        guest.driver.reconnect(socket);
    }
    let mut resumed = 0;
    for _ in 0..KILLS {
        guest.go_on();
        pause(&mut guest.random);
        filter.kill();
        while guest.answer(Duration::ZERO) {}
        resumed += guest.under_way();
        let socket;
        (filter, socket) = start();
        guest.driver.reconnect(socket);
    }
    guest.finish();
    ended.push(filter.end());
    rests.repair(path);
    let (filter, socket) = start();
    guest.driver.reconnect(socket);
    guest.go_on();
    guest.finish();
    guest.read_all();
    ended.push(filter.end());
    rests.is_sound(path);
    let findings = guest.history.check();
    let first: Vec<_> = findings.iter().take(5).collect();
    assert!(first.is_empty(), "{} wrong: {first:?}\n{}", findings.len(), log(path));
    judge(chain, &guest, &ended, path);
    resumed
}

fn check_each(rests: Rests) {
    let directory = rests.directory();
    let in_memory = statfs(directory).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC);
    if directory.starts_with("/dev/shm") && !in_memory {
        // Not by a macro, whose words the harness keeps to itself when a test passes.
        let message = "skipped: /dev/shm is no tmpfs, so no file in memory is tried here\n";
        return std::io::stderr().write_all(message.as_bytes()).unwrap();
    }
    let mut random = fastrand::Rng::with_seed(seed());
    let mut in_all = 0;
    for chain in chains::all() {
        // Before it is tried: a test that fails says what it was at.
        print!("{rests:?}, {}: ", chains::name(&chain));
        let resumed = check(rests, &chain, random.fork());
        println!("{resumed} requests were under way when a filter was killed");
        in_all += resumed;
    }
    // A quick chain may have answered whatever it was asked each time; one that delays has not.
    assert!(in_all > 0, "no request was ever under way");
}

#[test]
fn a_filter_that_is_killed_over_a_file_loses_doubles_and_tears_nothing() {
    check_each(Rests::Storage);
}

#[test]
fn a_filter_that_is_killed_over_a_file_in_memory_loses_doubles_and_tears_nothing() {
    check_each(Rests::Memory);
}

#[test]
fn a_filter_that_is_killed_over_a_qcow2_image_loses_doubles_and_tears_nothing() {
    check_each(Rests::Qcow2);
}

#[test]
fn a_filter_that_is_killed_over_a_qcow2_image_in_memory_loses_doubles_and_tears_nothing() {
    check_each(Rests::Qcow2InMemory);
}

#[test]
fn a_filter_that_is_killed_over_an_image_over_another_loses_doubles_and_tears_nothing() {
    check_each(Rests::Overlay);
}
