//! The program, killed at any instant under a guest that reads while it writes, in parts of sectors, and
//! started again: what was answered is there, once, and the guest sees a pause. Every chain on every backend that
//! outlives the process.

mod chains;
mod guest;
mod rests;

use std::io::Write as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use serde_json::Value;

use self::guest::{Failed, Guest};
use self::rests::{Rests, SIZE};
use crate::initiator::Initiator;
use crate::seed;
use crate::successor::Filter;

const KILLS: usize = 6;
/// How long a filter may work on what it was asked for last before it is killed.
const LONGEST_PAUSE: Duration = Duration::from_micros(300);

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
        // Mostly short: a system call or two of a file in memory. A sleep would be longer than that.
        let (kicked, pause) = (Instant::now(), LONGEST_PAUSE / (1 << guest.random.u32(..9)));
        while kicked.elapsed() < pause {}
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
    judge(chain, &guest, &ended, path);
    resumed
}

/// That no disk would have been seen to do anything else.
fn judge(chain: &[Value], guest: &Guest, ended: &[ExitStatus], path: &Path) {
    let log = std::fs::read_to_string(path.join("log")).unwrap();
    let findings = guest.history.check();
    let first: Vec<_> = findings.iter().take(5).collect();
    assert!(first.is_empty(), "{} wrong: {first:?}\n{log}", findings.len());
    assert!(!log.contains("not allowed"), "{log}");
    assert!(ended.iter().all(ExitStatus::success), "{ended:?}\n{log}");
    let Failed { reads, others } = guest.failed;
    let expected = (chains::fails(chain, &["read"]), chains::fails(chain, &["write", "discard"]));
    let failed = format!("{reads} reads and {others} other requests failed");
    assert_eq!((reads > 0, others > 0), expected, "{failed}\n{log}");
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
