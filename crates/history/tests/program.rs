//! The program on a file, as on a guest's disk.

#![allow(clippy::unwrap_used)] // a test

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

/// Where its part of the file begins.
const OFFSET: u64 = 1 << 20;

/// One round in a life of the guest, after one in which this was flushed.
fn runs(directory: &Path, life: u32, former: &str) -> Output {
    let (disk, stop) = (directory.join("disk"), directory.join("stop"));
    let mut program = Command::new(env!("CARGO_BIN_EXE_vmseal-guest-history"));
    program.arg(disk).arg("1").arg(stop).arg(life.to_string());
    program.args(former.split_whitespace()).output().unwrap()
}

/// The last that it has flushed.
fn flushed(output: &Output) -> String {
    let (said, why) = (String::from_utf8_lossy(&output.stdout), &output.stderr);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(why));
    let last = said.lines().next_back().unwrap();
    last.strip_prefix("VMSEAL-DURABLE ").unwrap().to_owned()
}

#[test]
fn a_disk_that_keeps_all_is_well_and_one_that_goes_back_is_not() {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let place = directory.path();
    File::create(place.join("disk")).unwrap().set_len(2 * OFFSET).unwrap();
    // It looks for it after a round.
    File::create(place.join("stop")).unwrap();
    let first = flushed(&runs(place, 0, ""));
    let content = std::fs::read(place.join("disk")).unwrap();
    let second = flushed(&runs(place, 1, &first));
    assert!(first.starts_with("0 ") && second.starts_with("1 "), "{first}, {second}");
    // What it held in the first life is back.
    let disk = File::options().write(true).open(place.join("disk")).unwrap();
    disk.write_all_at(&content[OFFSET as usize..], OFFSET).unwrap();
    let refused = runs(place, 2, &second);
    let why = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && why.contains("Unflushed"), "{why}");
}
