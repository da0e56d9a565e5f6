//! What tests say that this machine cannot try.

use std::fmt::Display;
use std::io::Write as _;
use std::path::Path;

/// Says that the test which runs does not try what it is for, or not all of it, and why.
pub(crate) fn skipped(why: impl Display) {
    let thread = std::thread::current();
    let name = thread.name().map(|name| format!("{name}: ")).unwrap_or_default();
    let line = format!("skipped: {name}{why}\n");
    // Not by a macro, whose output the harness hides when a test passes. Where nobody hears it, the test goes on.
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Whether the machine runs systemd, which starts what mounts pools, as a service; says that the test which runs is skipped then.
pub(crate) fn starts_by_systemd() -> bool {
    let starts = Path::new("/run/systemd/system").is_dir();
    if starts {
        skipped("systemd would start the test's program as a service");
    }
    starts
}
