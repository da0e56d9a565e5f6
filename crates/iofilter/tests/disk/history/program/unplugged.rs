//! The program, hit by a power cut at any instant: every chain over a raw file, a qcow2 image and images over others,
//! which forget ([`super::forgetful`]). Flushed data is there, every other block has old or requested content, and the
//! image is sound.

use std::io::{self, Write as _};
use std::time::Duration;

use serde_json::Value;
use vmseal_initiator::driver::Driver;

use super::backends::BackendKind;
use super::forgetful::Forgetful;
use super::{Program, chains, pause};
use crate::history::checker::{Finding, Wrong};
use crate::history::{BLOCK, SECTOR};
use crate::seed::seed;

const CUTS: usize = 2;

/// All files that a disk may be stored in, and the replica's.
const FILES: [&str; 5] = ["disk", "middle", "base", "replica", "map"];

/// Cuts the power again and again; returns what is wrong.
fn run(kind: BackendKind, chain: &[Value], syncs: bool, mut random: fastrand::Rng) -> Vec<Finding> {
    let place = tempfile::tempdir_in(kind.directory()).unwrap();
    let mut program = Program::new(kind, place.path(), chain);
    let mut guest = program.guest(random.fork());
    // A hole is a sector of zeroes, not a block of zeroes.
    let granule = if chains::holes(chain) == Some("zero") { SECTOR } else { BLOCK };
    let cuts = random.fork();
    let files = Forgetful::mount(place.path(), &FILES, granule as u64, syncs, cuts).unwrap();
    let (mut filter, socket) = program.start(&mut random);
    guest.reboot(Driver::connect_with_record(socket, u64::MAX));
    let mut findings = Vec::new();
    for _ in 0..CUTS {
        guest.go_on();
        pause(&mut random);
        filter.kill();
        while guest.answer(Duration::ZERO) {}
        files.cut();
        kind.repair(place.path());
        let socket;
        (filter, socket) = program.start(&mut random);
        let driver = Driver::connect_with_record(socket, u64::MAX);
        let (history, found) = guest.reboot(driver);
        findings.extend(history.check());
        findings.extend(history.check_cut(&found));
    }
    guest.go_on();
    program.meet_faults(&mut guest);
    guest.finish();
    guest.read_all();
    program.end(filter);
    kind.is_sound(place.path());
    findings.extend(guest.history.check());
    if findings.is_empty() {
        program.judge(&guest);
    } else {
        println!("{}", program.log());
    }
    drop(files);
    place.close().expect("nothing is mounted in it any more");
    findings
}

/// Whether a file system of ours can be mounted here; says so if not.
pub(super) fn can_mount() -> bool {
    let place = tempfile::tempdir().unwrap();
    let random = fastrand::Rng::new();
    match Forgetful::mount(place.path(), &[], BLOCK as u64, true, random) {
        Ok(_) => true,
        Err(error) => {
            let kind = error.kind();
            let may_be = [io::ErrorKind::PermissionDenied, io::ErrorKind::NotFound].contains(&kind);
            assert!(may_be, "{error}");
            // Not by a macro, whose output the harness hides when a test passes.
            let message = format!("skipped: files that forget are mounted by FUSE: {error}\n");
            io::stderr().write_all(message.as_bytes()).unwrap();
            false
        }
    }
}

fn check_each(kind: BackendKind) {
    if !can_mount() {
        return;
    }
    let mut random = fastrand::Rng::with_seed(seed());
    for chain in chains::of_run(&mut random) {
        println!("{kind:?}, {}", chains::name(&chain));
        let findings = run(kind, &chain, true, random.fork());
        let first: Vec<_> = findings.iter().take(5).collect();
        assert!(first.is_empty(), "{} wrong: {first:?}", findings.len());
    }
}

#[test]
fn of_a_file_only_what_was_not_flushed_goes_with_the_power() {
    check_each(BackendKind::Storage);
}

#[test]
fn of_a_file_that_keeps_its_room_only_what_was_not_flushed_goes_with_the_power() {
    check_each(BackendKind::PageCache);
}

#[test]
fn of_a_qcow2_image_only_what_was_not_flushed_goes_with_the_power() {
    check_each(BackendKind::Qcow2);
}

#[test]
fn of_images_over_others_only_what_was_not_flushed_goes_with_the_power() {
    check_each(BackendKind::Overlay);
}

#[test]
fn files_that_lose_flushed_data_are_detected() {
    if !can_mount() {
        return;
    }
    let mut random = fastrand::Rng::with_seed(seed());
    let mut is_found = |chain: &[Value]| {
        let findings = run(BackendKind::Storage, chain, false, random.fork());
        findings.iter().any(|finding| finding.wrong == Wrong::Unflushed)
    };
    for chain in chains::all().iter().filter(|chain| !chains::fails(chain, &["read", "write"])) {
        let found = (0..8).any(|_| is_found(chain));
        assert!(found, "{}: nothing is found to be lost", chains::name(chain));
    }
}
