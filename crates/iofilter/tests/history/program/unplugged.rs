//! The program, whose power fails at any instant: every chain on every backend over files that forget
//! ([`super::forgetful`]). What a flush covered is there, of the rest each block is one that was there or was asked
//! for, and the image is sound.

use std::io::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::forgetful::Forgetful;
use super::guest::Guest;
use super::rests::{Rests, SIZE};
use super::{chains, judge, log, pause};
use crate::checker::{Finding, Wrong};
use crate::initiator::Initiator;
use crate::successor::Filter;
use crate::{BLOCK, SECTOR, seed};

const CUTS: usize = 3;

/// Cuts the power again and again; what is wrong.
fn run(rests: Rests, chain: &[Value], syncs: bool, mut random: fastrand::Rng) -> Vec<Finding> {
    let place = tempfile::tempdir_in(rests.directory()).unwrap();
    let path = place.path();
    rests.make(path);
    let described = chains::in_place(chain, path);
    let start = || {
        let (filter, socket) = Filter::start(path, &rests.backend(path), SIZE, &described);
        (filter, Initiator::connect_with_record(socket, u64::MAX))
    };
    let (mut filter, driver) = start();
    let mut guest = Guest::new(driver, random.fork());
    if chains::has_no_holes(chain) || rests == Rests::Overlay {
        guest.write_all();
    }
    let mut ended = vec![filter.end()];
    if rests == Rests::Overlay {
        rests.lay_over(path);
    }
    // A hole is a sector of zeroes, not a block of zeroes.
    let granule = if chains::has_holes(chain) { SECTOR } else { BLOCK };
    let names = ["disk", "base", "replica", "map"];
    let files = Forgetful::mount(path, &names, granule as u64, syncs, random.fork()).unwrap();
    let driver;
    (filter, driver) = start();
    guest.reboot(driver);
    let mut findings = Vec::new();
    for _ in 0..CUTS {
        guest.go_on();
        pause(&mut random);
        filter.kill();
        while guest.answer(Duration::ZERO) {}
        files.cut();
        rests.repair(path);
        let driver;
        (filter, driver) = start();
        let (history, found) = guest.reboot(driver);
        findings.extend(history.check());
        findings.extend(history.check_cut(&found));
    }
    guest.go_on();
    guest.finish();
    guest.read_all();
    ended.push(filter.end());
    rests.is_sound(path);
    findings.extend(guest.history.check());
    if findings.is_empty() {
        judge(chain, &guest, &ended, path);
    } else {
        println!("{}", log(path));
    }
    findings
}

/// Whether a file system of ours can be mounted here; says so if not.
fn can_mount() -> bool {
    let may = nix::unistd::geteuid().is_root() && std::path::Path::new("/dev/fuse").exists();
    if !may {
        // Not by a macro, whose words the harness keeps to itself when a test passes.
        let message = "skipped: files that forget are mounted by root, by way of /dev/fuse\n";
        std::io::stderr().write_all(message.as_bytes()).unwrap();
    }
    may
}

fn check_each(rests: Rests) {
    if !can_mount() {
        return;
    }
    let mut random = fastrand::Rng::with_seed(seed());
    for chain in chains::all() {
        println!("{rests:?}, {}", chains::name(&chain));
        let findings = run(rests, &chain, true, random.fork());
        let first: Vec<_> = findings.iter().take(5).collect();
        assert!(first.is_empty(), "{} wrong: {first:?}", findings.len());
    }
}

#[test]
fn of_a_file_only_what_was_not_flushed_goes_with_the_power() {
    check_each(Rests::Storage);
}

#[test]
fn of_a_qcow2_image_only_what_was_not_flushed_goes_with_the_power() {
    check_each(Rests::Qcow2);
}

#[test]
fn of_an_image_over_another_only_what_was_not_flushed_goes_with_the_power() {
    check_each(Rests::Overlay);
}

#[test]
fn files_that_lose_what_was_flushed_are_found_out() {
    if !can_mount() {
        return;
    }
    let mut random = fastrand::Rng::with_seed(seed());
    let found = |chain: &Vec<Value>, random: &mut fastrand::Rng| {
        let findings = run(Rests::Storage, chain, false, random.fork());
        findings.iter().any(|finding| finding.wrong == Wrong::Unflushed)
    };
    for chain in chains::all().iter().filter(|chain| !chains::fails(chain, &["read", "write"])) {
        let found = (0..8).any(|_| found(chain, &mut random));
        assert!(found, "{}: nothing is found to be lost", chains::name(chain));
    }
}
