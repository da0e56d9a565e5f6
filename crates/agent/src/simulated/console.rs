//! A guest that prints a line and echoes.

use std::sync::{Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::task::JoinHandle;
use vmseal_api::console::{ConsoleClaim, ConsoleStream, Ending, pair};

/// The first output of a simulated guest: the same as the contract suite's.
const BANNER: &str = "vmseal contract guest\r\n";

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
    pub fn console(&self, claim: ConsoleClaim) -> Option<ConsoleStream> {
        let mut client = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(present) = client.as_ref().filter(|present| !present.echo.is_finished()) {
            match claim {
                ConsoleClaim::IfFree => return None,
                ConsoleClaim::TakeOver => present.ending.taken_over(),
            }
        }
        let (ours, ending, theirs) = pair(BUFFER);
        *client = Some(Client { echo: tokio::spawn(echo(ours)), ending });
        Some(theirs)
    }
}

async fn echo(mut stream: DuplexStream) {
    if stream.write_all(BANNER.as_bytes()).await.is_err() {
        return;
    }
    let mut typed = [0; 1024];
    while let Ok(length) = stream.read(&mut typed).await {
        if length == 0 || stream.write_all(&typed[..length]).await.is_err() {
            return;
        }
    }
}
