//! A guest's serial console. The agent holds QEMU's end all the time and keeps the last of the output,
//! so that whoever comes late sees the login prompt; the newest client takes over from the last.
//!
//! A client that does not read is cut, so that it cannot hold up the guest.

use std::collections::VecDeque;
use std::io;
use std::path::Path;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, duplex, split};
use tokio::net::UnixStream;
use tokio::sync::mpsc;
use vmseal_api::host::ConsoleStream;

/// How much of the output a late client is shown, in bytes.
pub const REPLAY_MAX: usize = 64 * 1024;

/// How far a client may be behind before it is cut, in bytes.
const BEHIND_MAX: usize = 256 * 1024;

/// The buffer between the agent and a client, each way, in bytes.
const CLIENT_BUFFER: usize = 64 * 1024;

/// How much is read at once, in bytes.
const CHUNK: usize = 4096;

/// Clients that wait to be taken in; they come one at a time.
const NEWCOMERS_MAX: usize = 4;

/// The way to a running guest's console.
#[derive(Clone, Debug)]
pub struct Console(mpsc::Sender<DuplexStream>);

impl Console {
    /// Connects to QEMU's socket. `earlier` is output from before.
    ///
    /// # Errors
    /// As connecting.
    pub async fn connect(socket: &Path, earlier: &[u8]) -> io::Result<Self> {
        let guest = UnixStream::connect(socket).await?;
        let (sender, newcomers) = mpsc::channel(NEWCOMERS_MAX);
        let mut replay = Replay::default();
        replay.push(earlier);
        tokio::spawn(serve(guest, newcomers, replay));
        Ok(Self(sender))
    }

    /// A new client; none when the guest is gone.
    pub async fn attach(&self) -> Option<ConsoleStream> {
        let (ours, theirs) = duplex(CLIENT_BUFFER);
        self.0.send(ours).await.ok()?;
        Some(Box::new(theirs))
    }
}

/// The last [`REPLAY_MAX`] bytes of output.
#[derive(Default)]
struct Replay(VecDeque<u8>);

impl Replay {
    fn push(&mut self, output: &[u8]) {
        self.0.extend(output);
        let excess = self.0.len().saturating_sub(REPLAY_MAX);
        self.0.drain(..excess);
    }
}

struct Client {
    reader: ReadHalf<DuplexStream>,
    writer: WriteHalf<DuplexStream>,
    /// Output that it has not taken yet.
    behind: VecDeque<u8>,
}

impl Client {
    fn new(stream: DuplexStream, replay: &Replay) -> Self {
        let (reader, writer) = split(stream);
        Self { reader, writer, behind: replay.0.clone() }
    }
}

/// What happened, out of all that can.
enum Happening {
    Newcomer(Option<DuplexStream>),
    /// The guest's output; `Ok(0)` is its end.
    Output(io::Result<usize>),
    /// The client's input; `Ok(0)` is its end.
    Input(io::Result<usize>),
    /// The client took so much of its output.
    Taken(io::Result<usize>),
}

async fn serve(guest: UnixStream, mut newcomers: mpsc::Receiver<DuplexStream>, mut replay: Replay) {
    let (mut from_guest, mut to_guest) = guest.into_split();
    let (mut output, mut input) = ([0; CHUNK], [0; CHUNK]);
    let mut client: Option<Client> = None;
    loop {
        let happening = tokio::select! {
            stream = newcomers.recv() => Happening::Newcomer(stream),
            length = from_guest.read(&mut output) => Happening::Output(length),
            happening = of_client(&mut client, &mut input) => happening,
        };
        match happening {
            Happening::Newcomer(Some(stream)) => client = Some(Client::new(stream, &replay)),
            // The VM's owner has let go: the VM is off.
            Happening::Newcomer(None) => return,
            Happening::Output(Ok(0) | Err(_)) => break,
            Happening::Output(Ok(length)) => {
                replay.push(&output[..length]);
                if let Some(reader) = &mut client {
                    reader.behind.extend(&output[..length]);
                }
                if client.as_ref().is_some_and(|client| client.behind.len() > BEHIND_MAX) {
                    tracing::info!("a console client does not read and is cut");
                    client = None;
                }
            }
            Happening::Input(Ok(length)) if length > 0 => {
                if to_guest.write_all(&input[..length]).await.is_err() {
                    break;
                }
            }
            Happening::Taken(Ok(length)) if length > 0 => {
                if let Some(client) = &mut client {
                    client.behind.drain(..length);
                }
            }
            Happening::Input(_) | Happening::Taken(_) => client = None,
        }
    }
    // The guest is gone; its last words still reach the client.
    if let Some(mut client) = client {
        let rest: Vec<u8> = client.behind.into();
        let _ = client.writer.write_all(&rest).await;
        let _ = client.writer.shutdown().await;
    }
}

/// The next thing that the client does; never ends without a client.
async fn of_client(client: &mut Option<Client>, input: &mut [u8]) -> Happening {
    let Some(Client { reader, writer, behind }) = client else {
        return std::future::pending().await;
    };
    if behind.is_empty() {
        return Happening::Input(reader.read(input).await);
    }
    tokio::select! {
        length = reader.read(input) => Happening::Input(length),
        length = writer.write(behind.as_slices().0) => Happening::Taken(length),
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);

    async fn guest() -> (tempfile::TempDir, UnixStream, Console) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console");
        let listener = UnixListener::bind(&path).unwrap();
        let console = Console::connect(&path, b"earlier ").await.unwrap();
        let (guest, _) = listener.accept().await.unwrap();
        (directory, guest, console)
    }

    async fn expect(stream: &mut ConsoleStream, text: &[u8]) {
        let mut got = vec![0; text.len()];
        stream.read_exact(&mut got).await.unwrap();
        assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(text));
    }

    #[tokio::test]
    async fn a_late_client_sees_the_prompt_types_and_is_taken_over_from() {
        let (_directory, mut guest, console) = guest().await;
        guest.write_all(b"login: ").await.unwrap();
        let mut first = console.attach().await.unwrap();
        expect(&mut first, b"earlier login: ").await;
        first.write_all(b"root\n").await.unwrap();
        let mut typed = [0; 5];
        guest.read_exact(&mut typed).await.unwrap();
        assert_eq!(&typed, b"root\n");

        let mut second = console.attach().await.unwrap();
        expect(&mut second, b"earlier login: ").await;
        assert_eq!(first.read(&mut [0; 8]).await.unwrap(), 0, "the first is taken over from");
        guest.write_all(b"bye").await.unwrap();
        drop(guest);
        expect(&mut second, b"bye").await;
        assert_eq!(second.read(&mut [0; 8]).await.unwrap(), 0);
        assert!(console.attach().await.is_none());
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_does_not_hold_up_the_guest() {
        let (_directory, mut guest, console) = guest().await;
        let mut lazy = console.attach().await.unwrap();
        // Much more than all buffers on the way, the socket's included.
        let flood = vec![b'x'; 8 * BEHIND_MAX];
        guest.write_all(&flood).await.unwrap();
        guest.write_all(b"end").await.unwrap();
        let mut got = Vec::new();
        let cut = tokio::time::timeout(PATIENCE, lazy.read_to_end(&mut got)).await;
        cut.expect("it was not cut").unwrap();
        assert!(got.len() < flood.len(), "it was not cut before the end");
        // Until all of the flood is read, a newcomer may be shown an earlier state.
        loop {
            let mut next = console.attach().await.unwrap();
            let mut replay = vec![0; REPLAY_MAX];
            next.read_exact(&mut replay).await.unwrap();
            if replay.ends_with(b"end") {
                break;
            }
        }
    }
}
