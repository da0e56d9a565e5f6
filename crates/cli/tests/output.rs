//! Commands whose result cannot be printed.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::fs::OpenOptions;
use std::io::pipe;
use std::path::Path;
use std::process::{Command, Output, Stdio};

fn vmseal(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vmseal"));
    command.args(arguments);
    command
}

/// Runs it with this standard output.
fn run(mut command: Command, output: impl Into<Stdio>) -> Output {
    command.stdout(output).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap()
}

/// A pipe whose reader has gone.
fn closed() -> impl Into<Stdio> {
    let (reader, writer) = pipe().unwrap();
    drop(reader);
    writer
}

fn full() -> std::fs::File {
    OpenOptions::new().write(true).open(Path::new("/dev/full")).unwrap()
}

/// `doctor` with directories and a QEMU that do not exist: it fails, and needs no server.
const FAILING: [&str; 7] =
    ["doctor", "--qemu", "/nowhere/qemu", "--state-dir", "/nowhere/a", "--data-dir", "/nowhere/b"];

#[test]
fn a_result_that_does_not_fit_on_a_disk_is_a_failure() {
    for arguments in [&["completion", "bash"][..], &FAILING] {
        let ended = run(vmseal(arguments), full());
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert_eq!(ended.status.code(), Some(1), "{arguments:?}: {said}");
        assert!(said.contains("could not be printed: No space left"), "{said}");
    }
}

#[test]
fn a_closed_pipe_does_not_change_the_exit_code() {
    let ended = run(vmseal(&["completion", "bash"]), closed());
    assert_eq!((ended.status.code(), &*ended.stderr), (Some(0), &b""[..]));
    let ended = run(vmseal(&FAILING), closed());
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains(" found"), "{said}");
}

#[test]
fn messages_that_cannot_be_written_are_no_failure() {
    let mut command = vmseal(&FAILING);
    let status = command.stdout(Stdio::null()).stderr(full()).status().unwrap();
    assert_eq!(status.code(), Some(1), "it panicked");
}
