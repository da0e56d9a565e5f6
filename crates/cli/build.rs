//! What `vmseal --version` says: a program that is installed tells its commit. One of a developer's does not: it would be
//! linked again after every commit.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    let installed = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let said = match installed.then(commit).flatten() {
        Some(commit) => format!("{version} ({commit})"),
        None if installed => version.to_owned(),
        None => format!("{version} (development build)"),
    };
    println!("cargo::rustc-env=VMSEAL_VERSION={said}");
}

/// The commit that is built; none outside a repository.
fn commit() -> Option<String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let log = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])?;
    if Path::new(&log).exists() {
        println!("cargo::rerun-if-changed={log}");
    }
    git(&["rev-parse", "--short=12", "HEAD"])
}
