//! `vmseal lab run` with an experiment of a test's own.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::program;

/// Runs an experiment, given as its file has it, with these options. What the report says of it.
#[must_use]
pub fn measured<I>(experiment: &str, options: I) -> Value
where
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    let home = tempfile::tempdir().unwrap();
    let (file, report) = (home.path().join("mine.toml"), home.path().join("report.json"));
    std::fs::write(&file, experiment).unwrap();
    let mut command = Command::new(program("vmseal").unwrap());
    command.args(["lab", "run"]).arg(&file).arg("--report").arg(&report);
    let output = command.args(options).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    report["experiments"][0].clone()
}
