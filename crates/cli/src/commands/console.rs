//! `vmseal vm console`: the guest's serial line on this terminal.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use anyhow::Context;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vmseal_api::client::ServerClient;

/// Ctrl-], telnet's and virsh's escape.
const ESCAPE: u8 = 0x1d;

/// What is read from either side at once, in bytes.
const CHUNK: usize = 4096;

/// The terminal in raw mode, put back as it was at the end, however it ends.
struct RawTerminal(Termios);

impl RawTerminal {
    fn enter() -> anyhow::Result<Self> {
        let before = tcgetattr(std::io::stdin().as_fd())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(std::io::stdin().as_fd(), SetArg::TCSANOW, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(std::io::stdin().as_fd(), SetArg::TCSANOW, &self.0);
    }
}

/// Joins the terminal and the guest's serial line until Ctrl-], or the end of either.
pub async fn attach(server: &ServerClient, vm: &str) -> anyhow::Result<()> {
    let mut guest = server.console(vm).await?;
    let _raw = if std::io::stdin().is_terminal() {
        eprintln!("connected to {vm}; Ctrl-] leaves");
        Some(RawTerminal::enter().context("cannot set the terminal to raw mode")?)
    } else {
        None
    };
    let mut typed = tokio::io::stdin();
    let mut screen = tokio::io::stdout();
    let (mut from_person, mut from_guest) = ([0; CHUNK], [0; CHUNK]);
    let mut typing = true;
    loop {
        tokio::select! {
            read = typed.read(&mut from_person), if typing => match read? {
                // A script's input has ended; the guest's answer is still wanted.
                0 => typing = false,
                count => {
                    let (before, left) = until_escape(&from_person[..count]);
                    guest.write_all(before).await?;
                    guest.flush().await?;
                    if left {
                        break;
                    }
                }
            },
            read = guest.read(&mut from_guest) => match read? {
                0 => break,
                count => {
                    screen.write_all(&from_guest[..count]).await?;
                    screen.flush().await?;
                }
            },
        }
    }
    Ok(())
}

/// What comes before the escape character, and whether there is one.
fn until_escape(typed: &[u8]) -> (&[u8], bool) {
    match typed.iter().position(|byte| *byte == ESCAPE) {
        Some(place) => (&typed[..place], true),
        None => (typed, false),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_escape_ends_what_is_sent() {
        assert_eq!(until_escape(b"ls\r"), (&b"ls\r"[..], false));
        assert_eq!(until_escape(b"ls\r\x1drm\r"), (&b"ls\r"[..], true));
        assert_eq!(until_escape(b"\x1d"), (&b""[..], true));
    }
}
