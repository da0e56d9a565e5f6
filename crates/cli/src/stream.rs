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

/// Prints a line for people to standard output, made [`printable`].
pub fn words(text: &str) -> anyhow::Result<()> {
    line(&printable(text))
}

/// Says something to the person, on standard error. Where nobody hears it, the command goes on.
pub fn say(text: impl Display) {
    let text = text.to_string();
    let mut to = std::io::stderr().lock();
    for line in text.split('\n') {
        let _ = writeln!(to, "{}", printable(line));
    }
}

/// What people are shown of a text, on one line. Names, headers and messages may be whatever somebody wrote on a
/// datastore, or a key server told: nothing of it commands the terminal, or turns round what stands beside it.
pub fn printable(text: &str) -> String {
    let command =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if command(c) { '\u{fffd}' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_shown_commands_the_terminal() {
        assert_eq!(printable("a\u{1b}[2Jb\n\u{9b}c"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c");
        assert_eq!(printable("gnp\u{202e}.exe äö"), "gnp\u{fffd}.exe äö");
    }
}
