//! `vmseal vm console`: the guest's serial line on this terminal.
//!
//! The terminal is put back as it was however the console ends: by the escape, by the end of the guest or of
//! the connection, by an error, and by every signal that ends a program in an orderly way.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Context;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::timeout;
use vmseal_api::client::ServerClient;
use vmseal_api::console::{ConsoleClaim, ConsoleStream, is_taken_over};
use vmseal_api::host::Power;
use vmseal_api::model::Vm;
use vmseal_api::problem::Problem;

use super::follow::Changes;
use super::reconnect::{across, answers};
use crate::arguments::{Console, Escape};
use crate::exit::{Ended, Exit};
use crate::print;

/// What is read from either side at once, in bytes.
const CHUNK: usize = 4096;

/// How much of what is typed waits for the guest, in bytes: more than anybody types while a line is blocked.
const PENDING_MAX: usize = 64 * 1024;

/// How long somebody who leaves waits for the guest to take what was typed before.
const LEAVE: Duration = Duration::from_secs(1);

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
pub(super) struct Ends([Signal; 4]);

impl Ends {
    pub(super) fn listen() -> std::io::Result<Self> {
        let kinds = [
            SignalKind::hangup(),
            SignalKind::interrupt(),
            SignalKind::quit(),
            SignalKind::terminate(),
        ];
        let [a, b, c, d] = kinds.map(signal);
        Ok(Self([a?, b?, c?, d?]))
    }

    pub(super) async fn any(&mut self) {
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
    // Heard from before the terminal is changed, and to the end.
    let mut ends = Ends::listen().context("signals cannot be heard")?;
    let claim = if options.force { ConsoleClaim::TakeOver } else { ConsoleClaim::IfFree };
    let guest = tokio::select! {
        guest = server.console(vm, claim) => guest?,
        () = ends.any() => return Err(told().into()),
    };
    let person = std::io::stdin().is_terminal();
    let terminal = if person {
        match options.escape {
            Escape(Some(_)) => {
                print::say(format_args!("connected to {vm}; press {} to leave", options.escape))
            }
            Escape(None) => print::say(format_args!("connected to {vm} until the VM stops")),
        }
        Some(RawTerminal::enter().context("cannot set the terminal to raw mode")?)
    } else {
        None
    };
    let keyboard = Keyboard { escape: options.escape, person, open: true, pending: Vec::new() };
    let (typed, screen) = (tokio::io::stdin(), tokio::io::stdout());
    let end = join(guest, typed, screen, keyboard, ends.any()).await;
    drop(terminal);
    match end? {
        End::Left => Ok(()),
        End::Told => Err(told().into()),
        End::Closed => tokio::select! {
            why = why_closed(server, vm) => why,
            () = ends.any() => Err(told().into()),
        },
        End::TakenOver => {
            let message = format!(
                "somebody has taken over the console of VM '{vm}'. To take it back: vmseal vm console {vm} --force"
            );
            Err(Ended::new(Exit::Conflict, message).into())
        }
    }
}

fn told() -> Ended {
    Ended::new(Exit::Interrupted, "interrupted")
}

/// What a person has typed and the guest has not taken.
struct Keyboard {
    escape: Escape,
    /// Whether a person types, whose escape is heard whatever the guest does. What a script sends can wait.
    person: bool,
    /// Whether there may be more.
    open: bool,
    pending: Vec<u8>,
}

impl Keyboard {
    fn listens(&self) -> bool {
        self.open && (self.person || self.pending.len() < PENDING_MAX)
    }

    /// Takes what was read; says whether the person leaves. What a guest does not take for long is dropped, as a
    /// serial line does.
    fn take(&mut self, typed: &[u8]) -> bool {
        // A script's input has ended; the guest's answer is still wanted.
        self.open = !typed.is_empty();
        let (before, left) = until_escape(typed, self.escape);
        if self.pending.len() < PENDING_MAX {
            self.pending.extend_from_slice(before);
        }
        left
    }
}

/// Carries bytes both ways until either side ends, or `told` does. Nothing that blocks holds up the others.
async fn join(
    guest: ConsoleStream,
    mut typed: impl AsyncRead + Unpin,
    mut screen: impl AsyncWrite + Unpin,
    mut keyboard: Keyboard,
    told: impl Future<Output = ()>,
) -> anyhow::Result<End> {
    let (mut guest_says, mut guest_hears) = tokio::io::split(guest);
    let (mut from_person, mut from_guest) = ([0; CHUNK], [0; CHUNK]);
    let (mut to_show, mut shown) = (Vec::new(), true);
    tokio::pin!(told);
    loop {
        tokio::select! {
            () = &mut told => return Ok(End::Told),
            read = typed.read(&mut from_person), if keyboard.listens() => {
                if keyboard.take(&from_person[..read?]) {
                    // What was typed before is on its way, as far as the guest takes it.
                    let _ = timeout(LEAVE, guest_hears.write_all(&keyboard.pending)).await;
                    return Ok(End::Left);
                }
            }
            written = guest_hears.write(&keyboard.pending), if !keyboard.pending.is_empty() => match written {
                Ok(count) if count > 0 => drop(keyboard.pending.drain(..count)),
                // What is wrong is told by reading.
                _ => {
                    keyboard.pending.clear();
                    keyboard.open = false;
                }
            },
            done = show(&mut screen, &mut to_show), if !shown => {
                done?;
                shown = true;
            }
            read = guest_says.read(&mut from_guest), if shown => match read {
                Err(error) if is_taken_over(&error) => return Ok(End::TakenOver),
                Ok(0) | Err(_) => return Ok(End::Closed),
                Ok(count) => {
                    to_show.extend_from_slice(&from_guest[..count]);
                    shown = false;
                }
            },
        }
    }
}

/// Shows it all. May be given up and begun again: what is shown is gone from `text`.
async fn show(screen: &mut (impl AsyncWrite + Unpin), text: &mut Vec<u8>) -> std::io::Result<()> {
    while !text.is_empty() {
        let count = screen.write(text).await?;
        text.drain(..count);
    }
    screen.flush().await
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
    // Where the server itself was restarted, it is the one to ask.
    across(server, async || answers(server).await).await?;
    if let Ok(off) = timeout(SHOWN, until_off(server, vm)).await {
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

    /// Joins a guest that takes nothing to this input.
    async fn joined(typed: &[u8], person: bool, told: impl Future<Output = ()>) -> End {
        let (_deaf, _, guest) = vmseal_api::console::pair(16);
        let (mut keys, ours) = tokio::io::duplex(1 << 20);
        keys.write_all(typed).await.unwrap();
        let keyboard =
            Keyboard { escape: Escape::default(), person, open: true, pending: Vec::new() };
        let joined = join(guest, ours, tokio::io::sink(), keyboard, told);
        timeout(Duration::from_secs(20), joined).await.expect("it hangs").unwrap()
    }

    #[tokio::test]
    async fn a_guest_that_takes_nothing_can_be_left() {
        let much = [vec![b'x'; 4 * PENDING_MAX], vec![0x1d]].concat();
        let left = joined(&much, true, std::future::pending()).await;
        assert!(matches!(left, End::Left));
        let signal = tokio::time::sleep(Duration::from_millis(100));
        assert!(matches!(joined(&much, false, signal).await, End::Told));
    }
}
