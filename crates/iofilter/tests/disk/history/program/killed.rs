//! The program, killed at any instant under a guest that reads while it writes, in parts of sectors, and
//! started again: answered writes are there, once, and the guest sees a pause. Every chain on every kind of
//! storage that outlives the process.

use std::io::Write as _;
use std::time::Duration;

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde_json::Value;

use super::backends::BackendKind;
use super::{Program, chains, pause};
use crate::seed::seed;

const KILLS: usize = 4;

/// Kills the filter again and again, and ends the last two in order; returns how many requests were in flight then.
fn check(kind: BackendKind, chain: &[Value], mut random: fastrand::Rng) -> usize {
    let place = tempfile::tempdir_in(kind.directory()).unwrap();
    let mut program = Program::new(kind, place.path(), chain);
    let mut guest = program.guest(random.fork());
    let (mut filter, socket) = program.start(&mut random);
    guest.driver.reconnect(socket);
    let mut resumed = 0;
    for _ in 0..KILLS {
        guest.go_on();
        pause(&mut random);
        filter.kill();
        kind.is_usable(place.path());
        while guest.answer(Duration::ZERO) {}
        resumed += guest.under_way();
        let socket;
        (filter, socket) = program.start(&mut random);
        guest.driver.reconnect(socket);
    }
    guest.finish();
    program.end(filter);
    kind.repair(place.path());
    let (filter, socket) = program.start(&mut random);
    guest.driver.reconnect(socket);
    guest.go_on();
    program.meet_faults(&mut guest);
    guest.finish();
    guest.read_all();
    program.end(filter);
    kind.is_sound(place.path());
    let findings = guest.history.check();
    let first: Vec<_> = findings.iter().take(5).collect();
    if let Some(one) = first.first() {
        let unit = guest.history.of_unit(one.unit);
        let (count, log) = (findings.len(), program.log());
        panic!("{count} wrong: {first:?}\nunit {}:\n{unit}{log}", one.unit);
    }
    program.judge(&guest);
    resumed
}

fn check_each(kind: BackendKind) {
    let directory = kind.directory();
    let in_memory = statfs(directory).is_ok_and(|about| about.filesystem_type() == TMPFS_MAGIC);
    if directory.starts_with("/dev/shm") && !in_memory {
        // Not by a macro, whose output the harness hides when a test passes.
        let message = "skipped: /dev/shm is no tmpfs, so no file in memory is tried here\n";
        return std::io::stderr().write_all(message.as_bytes()).unwrap();
    }
    let mut random = fastrand::Rng::with_seed(seed());
    let mut in_all = 0;
    for chain in chains::of_run(&mut random) {
        // Printed first: a test that fails shows which case it was.
        print!("{kind:?}, {}: ", chains::name(&chain));
        let resumed = check(kind, &chain, random.fork());
        println!("{resumed} requests were in flight when a filter was killed");
        in_all += resumed;
    }
    // A quick chain may have answered every request each time; one that delays has not.
    assert!(in_all > 0, "no request was ever in flight");
}

#[test]
fn a_filter_that_is_killed_over_a_file_loses_doubles_and_tears_nothing() {
    check_each(BackendKind::Storage);
}

#[test]
fn a_filter_that_is_killed_over_a_file_in_the_page_cache_loses_doubles_and_tears_nothing() {
    check_each(BackendKind::PageCache);
}

#[test]
fn a_filter_that_is_killed_over_a_file_in_memory_loses_doubles_and_tears_nothing() {
    check_each(BackendKind::Memory);
}

#[test]
fn a_filter_that_is_killed_over_a_qcow2_image_loses_doubles_and_tears_nothing() {
    check_each(BackendKind::Qcow2);
}

#[test]
fn a_filter_that_is_killed_over_a_qcow2_image_in_memory_loses_doubles_and_tears_nothing() {
    check_each(BackendKind::Qcow2InMemory);
}

#[test]
fn a_filter_that_is_killed_over_images_over_others_loses_doubles_and_tears_nothing() {
    check_each(BackendKind::Overlay);
}
