//! Standard output and standard error, and what becomes of a command whose reader has gone or whose disk is full.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

/// Whether the reader of standard output has gone away.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Prints to standard output. A reader that has gone away (`vmseal vm list | head -1`) is no error, and nothing more
/// is printed: the command ends as it would have. Anything else is one: a script would take half a result for the
/// whole.
pub fn print(text: &str) -> anyhow::Result<()> {
    if is_closed() {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => {
            CLOSED.store(true, Ordering::Relaxed);
            Ok(())
        }
        written => written.context("the result could not be printed"),
    }
}

/// Prints a line to standard output.
pub fn line(text: &str) -> anyhow::Result<()> {
    print(&format!("{text}\n"))
}

/// Whether nobody reads any more what is printed: what goes on printing has nothing left to do.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// Says a line to the person, on standard error. Where nobody hears it, the command goes on.
pub fn say(text: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}
