//! Standard output and standard error, also where the reader has gone or the disk is full.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;

/// Whether the reader of standard output has gone away.
static CLOSED: AtomicBool = AtomicBool::new(false);

/// Prints to standard output. A closed pipe (`vmseal vm list | head -1`) is no error: nothing more is printed, and the
/// command ends as it would have. Any other failure is an error, as a script could take half a result for all of it.
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

/// Whether standard output has no reader any more, so that a command that only prints can end.
pub fn is_closed() -> bool {
    CLOSED.load(Ordering::Relaxed)
}

/// Prints a line for people to standard output, made [`printable`].
pub fn words(text: &str) -> anyhow::Result<()> {
    line(&printable(text))
}

/// Prints a message for people to standard error. If it cannot be written, the command goes on.
pub fn say(text: impl Display) {
    let text = text.to_string();
    let mut to = std::io::stderr().lock();
    for line in text.split('\n') {
        let _ = writeln!(to, "{}", printable(line));
    }
}

/// A text as people are shown it, on one line. Names, headers and messages may come from a datastore or a key server:
/// they must not control the terminal, or reverse the text beside them.
pub fn printable(text: &str) -> String {
    let command =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if command(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_controls_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n\u{9b}c"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c");
        assert_eq!(printable("gnp\u{202e}.exe äö"), "gnp\u{fffd}.exe äö");
    }
}
