//! The text of `vmseal --version`. It has the commit in release builds only: others would be linked again after every
//! commit.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    let installed = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    let text = match installed.then(commit).flatten() {
        Some(commit) => format!("{version} ({commit})"),
        None if installed => version.to_owned(),
        None => format!("{version} (development build)"),
    };
    println!("cargo::rustc-env=VMSEAL_VERSION={text}");
}

/// The current commit; none outside a repository.
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
