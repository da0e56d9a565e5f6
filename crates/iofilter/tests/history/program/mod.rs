//! The program itself under a guest: killed, and cut off from its power.

mod chains;
mod forgetful;
mod guest;
mod killed;
mod rests;
mod unplugged;

use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use serde_json::Value;

use self::guest::{Failed, Guest};

/// How long a filter may work on what it was asked for last before it ends.
const LONGEST_PAUSE: Duration = Duration::from_micros(300);

/// Mostly short: a system call or two of a file in memory. A sleep would be longer than that.
fn pause(random: &mut fastrand::Rng) {
    let (begun, pause) = (Instant::now(), LONGEST_PAUSE / (1 << random.u32(..9)));
    while begun.elapsed() < pause {}
}

/// That filters ended well, and only those requests failed that a rule of the chain lets fail.
fn judge(chain: &[Value], guest: &Guest, ended: &[ExitStatus], path: &Path) {
    let log = log(path);
    assert!(!log.contains("not allowed"), "{log}");
    assert!(ended.iter().all(ExitStatus::success), "{ended:?}\n{log}");
    let Failed { reads, others } = guest.failed;
    let expected = (chains::fails(chain, &["read"]), chains::fails(chain, &["write", "discard"]));
    let failed = format!("{reads} reads and {others} other requests failed");
    assert_eq!((reads > 0, others > 0), expected, "{failed}\n{log}");
}

fn log(path: &Path) -> String {
    std::fs::read_to_string(path.join("log")).unwrap()
}
