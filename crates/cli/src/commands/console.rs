//! `vmseal vm console`: the guest's serial line on this terminal.
//!
//! The terminal is put back as it was however the console ends: by the escape, by the end of the guest or of
//! the connection, by an error, and by every signal that ends a program in an orderly way.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Context;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use vmseal_api::client::ServerClient;
use vmseal_api::console::{ConsoleClaim, ConsoleStream, is_taken_over};
use vmseal_api::host::Power;
use vmseal_api::model::Vm;
use vmseal_api::problem::Problem;

use super::follow::Changes;
use crate::arguments::{Console, Escape};
use crate::exit::{Ended, Exit};
use crate::print;

/// What is read from either side at once, in bytes.
const CHUNK: usize = 4096;

/// How soon the server shows that a guest has ended.
const SHOWN: Duration = Duration::from_secs(2);

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
        // The guest may have left the cursor anywhere in a line.
        print::say("");
    }
}

/// The signals that end a program and can be heard.
struct Ends([Signal; 4]);

impl Ends {
    fn listen() -> std::io::Result<Self> {
        let kinds = [
            SignalKind::hangup(),
            SignalKind::interrupt(),
            SignalKind::quit(),
            SignalKind::terminate(),
        ];
        let [a, b, c, d] = kinds.map(signal);
        Ok(Self([a?, b?, c?, d?]))
    }

    async fn any(&mut self) {
        let [a, b, c, d] = &mut self.0;
        tokio::select! {
            _ = a.recv() => {}
            _ = b.recv() => {}
            _ = c.recv() => {}
            _ = d.recv() => {}
        }
    }
}

/// How a console ended.
enum End {
    /// The person left.
    Left,
    /// The guest's side has closed.
    Closed,
    /// Somebody else has the console now.
    TakenOver,
    /// A signal.
    Told,
}

/// Joins the terminal and the guest's serial line until the escape, or the end of either.
pub async fn attach(server: &ServerClient, options: &Console) -> anyhow::Result<()> {
    let vm = &options.name;
    // Heard from before the terminal is changed.
    let ends = Ends::listen().context("signals cannot be heard")?;
    let claim = if options.force { ConsoleClaim::TakeOver } else { ConsoleClaim::IfFree };
    let guest = server.console(vm, claim).await?;
    let terminal = if std::io::stdin().is_terminal() {
        match options.escape {
            Escape(Some(_)) => {
                print::say(format_args!("connected to {vm}; {} leaves", options.escape))
            }
            Escape(None) => {
                print::say(format_args!("connected to {vm}; only the end of the guest leaves"))
            }
        }
        Some(RawTerminal::enter().context("cannot set the terminal to raw mode")?)
    } else {
        None
    };
    let end = join(guest, options.escape, ends).await;
    drop(terminal);
    match end? {
        End::Left => Ok(()),
        End::Told => Err(Ended::new(Exit::Interrupted, "a signal ended the console").into()),
        End::Closed => why_closed(server, vm).await,
        End::TakenOver => {
            let message = format!(
                "somebody has taken over the console of VM '{vm}'. To take it back: vmseal vm console {vm} --force"
            );
            Err(Ended::new(Exit::Conflict, message).into())
        }
    }
}

async fn join(mut guest: ConsoleStream, escape: Escape, mut ends: Ends) -> anyhow::Result<End> {
    let mut typed = tokio::io::stdin();
    let mut screen = tokio::io::stdout();
    let (mut from_person, mut from_guest) = ([0; CHUNK], [0; CHUNK]);
    let mut typing = true;
    loop {
        tokio::select! {
            () = ends.any() => return Ok(End::Told),
            read = typed.read(&mut from_person), if typing => match read? {
                // A script's input has ended; the guest's answer is still wanted.
                0 => typing = false,
                count => {
                    let (before, left) = until_escape(&from_person[..count], escape);
                    // What is wrong is told by reading.
                    typing = guest.write_all(before).await.is_ok() && guest.flush().await.is_ok();
                    if left {
                        return Ok(End::Left);
                    }
                }
            },
            read = guest.read(&mut from_guest) => match read {
                Err(error) if is_taken_over(&error) => return Ok(End::TakenOver),
                Ok(0) | Err(_) => return Ok(End::Closed),
                Ok(count) => {
                    screen.write_all(&from_guest[..count]).await?;
                    screen.flush().await?;
                }
            },
        }
    }
}

/// What comes before the escape character, and whether there is one.
fn until_escape(typed: &[u8], Escape(escape): Escape) -> (&[u8], bool) {
    match typed.iter().position(|byte| Some(*byte) == escape) {
        Some(place) => (&typed[..place], true),
        None => (typed, false),
    }
}

/// A guest that has ended closes its console; one that runs on has been lost on the way.
async fn why_closed(server: &ServerClient, vm: &str) -> anyhow::Result<()> {
    if let Ok(off) = tokio::time::timeout(SHOWN, until_off(server, vm)).await {
        off?;
        print::say("the guest has ended");
        return Ok(());
    }
    let message = format!(
        "the connection to the console of VM '{vm}' was lost; its guest runs on. To open it again: vmseal vm console {vm}"
    );
    Err(Ended::new(Exit::NoAnswer, message).into())
}

async fn until_off(server: &ServerClient, vm: &str) -> Result<(), Problem> {
    let mut changes = Changes::begin(server).await?;
    loop {
        let now: Vm = server.get(&format!("vms/{vm}")).await?;
        if !matches!(now.power, Some(Power::Running | Power::Stopping)) {
            return Ok(());
        }
        changes.next().await?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_escape_ends_what_is_sent() {
        let usual = Escape::default();
        assert_eq!(until_escape(b"ls\r", usual), (&b"ls\r"[..], false));
        assert_eq!(until_escape(b"ls\r\x1drm\r", usual), (&b"ls\r"[..], true));
        assert_eq!(until_escape(b"\x1d", usual), (&b""[..], true));
        assert_eq!(until_escape(b"\x1dx\x01", Escape(Some(1))), (&b"\x1dx"[..], true));
        assert_eq!(until_escape(b"\x1d", Escape(None)), (&b"\x1d"[..], false));
    }
}
