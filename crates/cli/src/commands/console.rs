//! `vmseal vm console`: the guest's serial line on this terminal.
//!
//! The terminal is restored however the console ends: by the escape, by the end of the guest or of the connection,
//! by an error, and by every signal that can be handled.

use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::time::Duration;

use anyhow::Context;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Instant, sleep_until, timeout};
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

/// The most that is read from either side at once, in bytes.
const CHUNK: usize = 4096;

/// The most typed input that waits for the guest, in bytes: more than a person types while a line is blocked.
const PENDING_MAX: usize = 64 * 1024;

/// How long the guest's output is shown after the end of the input.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the guest may take to read what was typed before the escape.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the server may take to show that a guest has ended.
const OFF_TIMEOUT: Duration = Duration::from_secs(2);

/// The terminal in raw mode; restored on drop.
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

/// The signals that end a program and can be handled.
pub(super) struct EndSignals([Signal; 4]);

impl EndSignals {
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
    /// The user typed the escape.
    Left,
    /// The guest's side has closed.
    Closed,
    /// Another user has the console now.
    TakenOver,
    /// A signal.
    Signal,
}

/// Connects the terminal to the guest's serial line until the escape, or the end of either.
pub async fn attach(server: &ServerClient, options: &Console) -> anyhow::Result<()> {
    let vm = &options.name;
    // From before the terminal is changed, and to the end.
    let mut ends = EndSignals::listen().context("cannot listen for signals")?;
    let claim = if options.force { ConsoleClaim::TakeOver } else { ConsoleClaim::IfFree };
    let guest = tokio::select! {
        guest = server.console(vm, claim) => guest?,
        () = ends.any() => return Err(interrupted().into()),
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
        End::Signal => Err(interrupted().into()),
        End::Closed => tokio::select! {
            why = why_closed(server, vm) => why,
            () = ends.any() => Err(interrupted().into()),
        },
        End::TakenOver => {
            let message = format!(
                "somebody has taken over the console of VM '{vm}'. To take it back: vmseal vm console {vm} --force"
            );
            Err(Ended::new(Exit::Conflict, message).into())
        }
    }
}

fn interrupted() -> Ended {
    Ended::new(Exit::Interrupted, "interrupted")
}

/// Typed input that the guest has not read yet.
struct Keyboard {
    escape: Escape,
    /// Whether a person types: their escape is read even if the guest reads nothing. A script's input can wait.
    person: bool,
    /// Whether there may be more input.
    open: bool,
    pending: Vec<u8>,
}

impl Keyboard {
    fn listens(&self) -> bool {
        self.open && (self.person || self.pending.len() < PENDING_MAX)
    }

    /// Whether all input has come to its end and gone to the guest.
    fn is_done(&self) -> bool {
        !self.open && self.pending.is_empty()
    }

    /// Takes what was read; returns whether it has the escape. Input beyond the limit is dropped, as by a serial line.
    fn take(&mut self, typed: &[u8]) -> bool {
        self.open = !typed.is_empty();
        let (before, left) = until_escape(typed, self.escape);
        if self.pending.len() < PENDING_MAX {
            self.pending.extend_from_slice(before);
        }
        left
    }
}

/// Copies bytes both ways until either side ends, or a signal comes. No direction blocks another.
async fn join(
    guest: ConsoleStream,
    mut typed: impl AsyncRead + Unpin,
    mut screen: impl AsyncWrite + Unpin,
    mut keyboard: Keyboard,
    signal: impl Future<Output = ()>,
) -> anyhow::Result<End> {
    let (mut guest_output, mut guest_input) = tokio::io::split(guest);
    let (mut from_person, mut from_guest) = ([0; CHUNK], [0; CHUNK]);
    let (mut to_show, mut shown) = (Vec::new(), true);
    tokio::pin!(signal);
    let mut leave_at = None;
    loop {
        if keyboard.is_done() && leave_at.is_none() {
            leave_at = Some(Instant::now() + ANSWER_TIMEOUT);
        }
        tokio::select! {
            () = &mut signal => return Ok(End::Signal),
            () = sleep_until(leave_at.unwrap_or_else(Instant::now)), if leave_at.is_some() => {
                return Ok(End::Left);
            }
            read = typed.read(&mut from_person), if keyboard.listens() => {
                if keyboard.take(&from_person[..read?]) {
                    // What was typed before the escape still goes to the guest, as far as it reads.
                    let _ = timeout(LEAVE_TIMEOUT, guest_input.write_all(&keyboard.pending)).await;
                    return Ok(End::Left);
                }
            }
            written = guest_input.write(&keyboard.pending), if !keyboard.pending.is_empty() => match written {
                Ok(count) if count > 0 => drop(keyboard.pending.drain(..count)),
                // Reading reports an error.
                _ => {
                    keyboard.pending.clear();
                    keyboard.open = false;
                }
            },
            done = show(&mut screen, &mut to_show), if !shown => {
                done?;
                shown = true;
            }
            read = guest_output.read(&mut from_guest), if shown => match read {
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

/// Writes all of `text`. It can be cancelled and called again: what is written is removed from `text`.
async fn show(screen: &mut (impl AsyncWrite + Unpin), text: &mut Vec<u8>) -> std::io::Result<()> {
    while !text.is_empty() {
        let count = screen.write(text).await?;
        text.drain(..count);
    }
    screen.flush().await
}

/// The input before the escape character, and whether there is one.
fn until_escape(typed: &[u8], Escape(escape): Escape) -> (&[u8], bool) {
    match typed.iter().position(|byte| Some(*byte) == escape) {
        Some(place) => (&typed[..place], true),
        None => (typed, false),
    }
}

/// A console closes when its guest ends; if the guest still runs, the connection was lost.
async fn why_closed(server: &ServerClient, vm: &str) -> anyhow::Result<()> {
    // The server may be restarting.
    across(server, async || answers(server).await).await?;
    if let Ok(off) = timeout(OFF_TIMEOUT, until_off(server, vm)).await {
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
    let mut changes = Changes::begin(server, "vm").await?;
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

    /// Joins a guest that reads nothing to this input.
    async fn joined(typed: &[u8], person: bool, signal: impl Future<Output = ()>) -> End {
        let (_silent, _, guest) = vmseal_api::console::pair(16);
        let (mut keys, ours) = tokio::io::duplex(1 << 20);
        keys.write_all(typed).await.unwrap();
        let keyboard =
            Keyboard { escape: Escape::default(), person, open: true, pending: Vec::new() };
        let joined = join(guest, ours, tokio::io::sink(), keyboard, signal);
        timeout(Duration::from_secs(20), joined).await.expect("it hangs").unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn the_end_of_the_input_leaves_once_the_guest_has_it_and_had_time_to_answer() {
        let (mut guest, _, console) = vmseal_api::console::pair(16);
        let keyboard =
            Keyboard { escape: Escape::default(), person: false, open: true, pending: Vec::new() };
        let script = &b"uptime\r"[..];
        let (mut heard, mut answer) = ([0; 7], Vec::new());
        let join = join(console, script, &mut answer, keyboard, std::future::pending());
        let (end, ()) = tokio::join!(join, async {
            guest.read_exact(&mut heard).await.unwrap();
            guest.write_all(b"up 3 days").await.unwrap();
        });
        assert!(matches!(end.unwrap(), End::Left));
        assert_eq!((&heard, &answer[..]), (b"uptime\r", &b"up 3 days"[..]));
    }

    #[tokio::test]
    async fn a_guest_that_reads_nothing_can_be_left() {
        let much = [vec![b'x'; 4 * PENDING_MAX], vec![0x1d]].concat();
        let left = joined(&much, true, std::future::pending()).await;
        assert!(matches!(left, End::Left));
        let signal = tokio::time::sleep(Duration::from_millis(100));
        assert!(matches!(joined(&much, false, signal).await, End::Signal));
    }
}
