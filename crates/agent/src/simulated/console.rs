//! A guest that prints a line and echoes.

use std::sync::{Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::task::JoinHandle;
use vmseal_api::console::{ConsoleClaim, ConsoleStream, Ending, pair};
use vmseal_api::guest::{GuestAnswer, GuestCommand};

/// The first output of a simulated guest: the same as the contract suite's.
const BANNER: &str = "vmseal contract guest\r\n";

/// What a simulated guest reads to panic: the same as the contract suite's.
const PANIC: u8 = b'~';

/// The buffer of a console, each way, in bytes.
const BUFFER: usize = 64 * 1024;

/// A running guest. Its console ends with it.
pub struct Guest(Mutex<Option<Client>>);

struct Client {
    echo: JoinHandle<()>,
    ending: Ending,
}

impl Drop for Client {
    fn drop(&mut self) {
        self.echo.abort();
    }
}

impl Guest {
    pub fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// A console for a client; none while another one has it and it may not be taken over.
    /// The guest calls `panic` where it is told to panic.
    pub fn console(
        &self,
        claim: ConsoleClaim,
        panic: impl Fn() + Send + 'static,
    ) -> Option<ConsoleStream> {
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(present) = client.as_ref().filter(|present| !present.echo.is_finished()) {
            match claim {
                ConsoleClaim::IfFree => return None,
                ConsoleClaim::TakeOver => present.ending.taken_over(),
            }
        }
        let (ours, ending, theirs) = pair(BUFFER);
        *client = Some(Client { echo: tokio::spawn(echo(ours, panic)), ending });
        Some(theirs)
    }
}

/// A screen that says its version of VNC and no more.
pub fn screen() -> ConsoleStream {
    let (mut ours, _, theirs) = pair(BUFFER);
    tokio::spawn(async move {
        if ours.write_all(b"RFB 003.008\n").await.is_ok() {
            // Until the client leaves.
            let _ = ours.read(&mut [0; 64]).await;
        }
    });
    theirs
}

/// What the agent in a simulated guest answers: programs print their arguments.
pub fn answer(command: GuestCommand) -> GuestAnswer {
    match command {
        GuestCommand::Ping => GuestAnswer::Pong,
        GuestCommand::Exec { arguments, .. } => GuestAnswer::Ended {
            status: Some(0),
            signal: None,
            stdout: STANDARD.encode(arguments.join(" ")),
            stderr: String::new(),
            truncated: false,
        },
        GuestCommand::Freeze => GuestAnswer::Frozen { file_systems: 1 },
        GuestCommand::Thaw => GuestAnswer::Thawed { file_systems: 1 },
    }
}

async fn echo(mut stream: DuplexStream, panic: impl Fn()) {
    if stream.write_all(BANNER.as_bytes()).await.is_err() {
        return;
    }
    let mut typed = [0; 1024];
    while let Ok(length) = stream.read(&mut typed).await {
        if length == 0 || stream.write_all(&typed[..length]).await.is_err() {
            return;
        }
        if typed[..length].contains(&PANIC) {
            panic();
            // It boots again, or is never heard of.
            if stream.write_all(BANNER.as_bytes()).await.is_err() {
                return;
            }
        }
    }
}
