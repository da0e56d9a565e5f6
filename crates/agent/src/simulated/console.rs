//! A guest that says a line and echoes.

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::sync::watch;
use vmseal_api::host::ConsoleStream;

/// What a simulated guest says first: the same as the contract suite's.
const BANNER: &str = "vmseal contract guest\r\n";

/// The buffer of a console, each way, in bytes.
const BUFFER: usize = 64 * 1024;

/// A running guest. Its consoles end with it, and each with the next.
pub struct Guest(watch::Sender<u64>);

impl Guest {
    pub fn new() -> Self {
        Self(watch::Sender::new(0))
    }

    pub fn console(&self) -> ConsoleStream {
        self.0.send_modify(|number| *number += 1);
        let (ours, theirs) = duplex(BUFFER);
        tokio::spawn(echo(ours, self.0.subscribe()));
        Box::new(theirs)
    }
}

async fn echo(mut stream: DuplexStream, mut newer: watch::Receiver<u64>) {
    if stream.write_all(BANNER.as_bytes()).await.is_err() {
        return;
    }
    let mut typed = [0; 1024];
    loop {
        tokio::select! {
            // A newer console, or the guest's end.
            _ = newer.changed() => return,
            length = stream.read(&mut typed) => match length {
                Ok(length) if length > 0 => {
                    if stream.write_all(&typed[..length]).await.is_err() {
                        return;
                    }
                }
                _ => return,
            },
        }
    }
}
