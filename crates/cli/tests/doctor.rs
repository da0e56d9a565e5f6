//! `vmseal doctor` looks where the agent is told to look.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::process::Command;

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
