//! Commands at a terminal of their own.

use std::fs::File;
use std::io::Write;
use std::process::Command;

/// The program, arguments and environment of a command, with a terminal as standard input, at which somebody types this; and the
/// other end of that terminal, which is there until it is dropped. It is the terminal of a session of its own: what nobody else may
/// read is asked for there, not at the standard input.
pub fn at_terminal(command: &Command, typed: &str) -> anyhow::Result<(Command, File)> {
    let pair = nix::pty::openpty(None, None)?;
    let mut terminal = File::from(pair.master);
    terminal.write_all(typed.as_bytes())?;
    let mut session = Command::new("setsid");
    session.args(["--ctty", "--wait"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => session.env(name, value),
            None => session.env_remove(name),
        };
    }
    session.stdin(pair.slave);
    Ok((session, terminal))
}
