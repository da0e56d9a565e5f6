//! `vmseal doctor` looks where the agent is told to look, and for what an image is built with.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::os::unix::fs::symlink;
use std::process::Command;

use serde_json::Value;

#[test]
fn the_doctor_takes_the_places_that_the_agent_is_given_and_names_them() {
    let places = [
        ["--swtpm", "/nowhere/swtpm"],
        ["--firmware-directory", "/nowhere/firmware"],
        ["--qemu", "/nowhere/qemu"],
        ["--state-dir", "/nowhere/a"],
        ["--data-dir", "/nowhere/b"],
    ];
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal"));
    let ended = command.arg("doctor").args(places.concat()).output().unwrap();
    let (said, complained) =
        (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    for found in ["swtpm: /nowhere/swtpm does not run", "ovmf: /nowhere/firmware lacks files"] {
        assert!(said.contains(found), "{found}: {said}{complained}");
    }
}

#[test]
fn the_doctor_names_the_packages_that_are_missing_to_build_an_image() {
    // By `id` the script that builds it sees whether it is root's; there is no other program.
    let programs = tempfile::tempdir().unwrap();
    symlink("/usr/bin/id", programs.path().join("id")).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal"));
    command.args([
        "doctor",
        "--qemu=/nowhere/qemu",
        "--state-dir=/nowhere/a",
        "--data-dir=/nowhere/b",
    ]);
    let ended = command.args(["-o", "json"]).env("PATH", programs.path()).output().unwrap();
    let findings: Vec<Value> = serde_json::from_slice(&ended.stdout).unwrap();
    let finding = findings.iter().find(|it| it["check"] == "image-builder").unwrap();
    assert_eq!(finding["result"], "warning", "{finding}");
    let remedy = finding["remedy"].as_str().unwrap();
    assert!(remedy.starts_with("apt install "), "{remedy}");
    for package in ["mmdebstrap", "mtools", "grub-common"] {
        assert!(remedy.contains(package), "{package}: {remedy}");
        assert!(finding["found"].as_str().unwrap().contains(package), "{package}: {finding}");
    }
}
