//! A guest's serial console. The agent keeps QEMU's end open all the time and buffers the last output, so
//! that a late client sees the login prompt. One client has the console at a time; another one is refused or
//! takes it over.
//!
//! A client that does not read is disconnected, so that it cannot block the guest. A guest that does not read
//! blocks only the client that types.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, split};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use vmseal_api::console::{ConsoleClaim, ConsoleStream, Ending, pair};

/// How much of the output a late client is shown, in bytes.
pub const REPLAY_MAX: usize = 64 * 1024;

/// How far a client may be behind before it is disconnected, in bytes.
const BEHIND_MAX: usize = 256 * 1024;

/// The buffer between the agent and a client, each way, in bytes.
const CLIENT_BUFFER: usize = 64 * 1024;

/// How much is read at once, in bytes.
const CHUNK: usize = 4096;

/// Clients that may wait to be attached; they are attached one at a time.
const WAITING_MAX: usize = 4;

/// A client of a running guest's console task.
#[derive(Clone, Debug)]
pub struct Console(mpsc::Sender<NewClient>);

/// Why a client does not get the console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsoleError {
    /// The guest is gone.
    Gone,
    /// Another client has it.
    InUse,
}

/// A client that waits for the console.
struct NewClient {
    claim: ConsoleClaim,
    answer: oneshot::Sender<Result<ConsoleStream, ConsoleError>>,
}

impl Console {
    /// Connects to QEMU's socket. `earlier` is earlier output.
    ///
    /// # Errors
    /// Those of connecting.
    pub async fn connect(socket: &Path, earlier: &[u8]) -> io::Result<Self> {
        let guest = UnixStream::connect(socket).await?;
        let (sender, new_clients) = mpsc::channel(WAITING_MAX);
        let mut replay = Replay::default();
        replay.push(earlier);
        tokio::spawn(serve(guest, new_clients, replay));
        Ok(Self(sender))
    }

    /// A new client.
    ///
    /// # Errors
    /// [`ConsoleError`].
    pub async fn attach(&self, claim: ConsoleClaim) -> Result<ConsoleStream, ConsoleError> {
        let (answer, answered) = oneshot::channel();
        self.0.send(NewClient { claim, answer }).await.map_err(|_| ConsoleError::Gone)?;
        answered.await.unwrap_or(Err(ConsoleError::Gone))
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
    /// Output that the client has not read yet.
    behind: VecDeque<u8>,
    ending: Ending,
}

impl Client {
    fn new(replay: &Replay) -> (Self, ConsoleStream) {
        let (ours, ending, theirs) = pair(CLIENT_BUFFER);
        let (reader, writer) = split(ours);
        (Self { reader, writer, behind: replay.0.clone(), ending }, theirs)
    }

    /// Whether the client has disconnected, without waiting. What it typed before goes to `typed`.
    async fn has_left(&mut self, typed: &mut VecDeque<u8>) -> bool {
        while typed.len() < CLIENT_BUFFER {
            let mut input = [0; CHUNK];
            match timeout(Duration::ZERO, self.reader.read(&mut input)).await {
                Ok(Ok(length)) if length > 0 => typed.extend(&input[..length]),
                Ok(_) => return true,
                Err(_) => return false,
            }
        }
        false
    }
}

/// The events of the console's task.
enum ConsoleEvent {
    NewClient(Option<NewClient>),
    /// The guest's output; `Ok(0)` is its end.
    Output(io::Result<usize>),
    /// The client's input; `Ok(0)` is its end.
    Input(io::Result<usize>),
    /// The guest read this much of the typed input.
    Typed(io::Result<usize>),
    /// The client read this much of its output.
    Taken(io::Result<usize>),
}

async fn serve(guest: UnixStream, mut new_clients: mpsc::Receiver<NewClient>, mut replay: Replay) {
    let (mut from_guest, mut to_guest) = guest.into_split();
    let (mut output, mut input) = ([0; CHUNK], [0; CHUNK]);
    let mut client: Option<Client> = None;
    // Typed input that the guest has not read yet.
    let mut typed: VecDeque<u8> = VecDeque::new();
    loop {
        let happening = tokio::select! {
            stream = new_clients.recv() => ConsoleEvent::NewClient(stream),
            length = from_guest.read(&mut output) => ConsoleEvent::Output(length),
            length = to_guest.write(typed.as_slices().0), if !typed.is_empty() => ConsoleEvent::Typed(length),
            happening = of_client(&mut client, &mut input, typed.is_empty()) => happening,
        };
        match happening {
            ConsoleEvent::NewClient(Some(new_client)) => {
                take_in(new_client, &mut client, &mut typed, &replay).await;
            }
            // The VM's owner has dropped the console: the VM is off.
            ConsoleEvent::NewClient(None) => return,
            ConsoleEvent::Output(Ok(0) | Err(_)) => break,
            ConsoleEvent::Output(Ok(length)) => {
                replay.push(&output[..length]);
                if let Some(reader) = &mut client {
                    reader.behind.extend(&output[..length]);
                }
                if client.as_ref().is_some_and(|client| client.behind.len() > BEHIND_MAX) {
                    tracing::info!("a console client does not read and is disconnected");
                    client = None;
                }
            }
            ConsoleEvent::Input(Ok(length)) if length > 0 => typed.extend(&input[..length]),
            ConsoleEvent::Typed(Ok(length)) if length > 0 => drop(typed.drain(..length)),
            ConsoleEvent::Typed(_) => break,
            ConsoleEvent::Taken(Ok(length)) if length > 0 => {
                if let Some(client) = &mut client {
                    client.behind.drain(..length);
                }
            }
            ConsoleEvent::Input(_) | ConsoleEvent::Taken(_) => client = None,
        }
    }
    // The guest is gone; its last output is still sent to the client.
    if let Some(mut client) = client {
        let rest: Vec<u8> = client.behind.into();
        let _ = client.writer.write_all(&rest).await;
        let _ = client.writer.shutdown().await;
    }
}

/// Gives a new client the console, or refuses it.
async fn take_in(
    new_client: NewClient,
    client: &mut Option<Client>,
    typed: &mut VecDeque<u8>,
    replay: &Replay,
) {
    if let Some(present) = client {
        match new_client.claim {
            ConsoleClaim::TakeOver => present.ending.taken_over(),
            ConsoleClaim::IfFree if present.has_left(typed).await => {}
            ConsoleClaim::IfFree => {
                // A client that does not wait for the answer does not get the console.
                let _ = new_client.answer.send(Err(ConsoleError::InUse));
                return;
            }
        }
    }
    let (taken_in, stream) = Client::new(replay);
    // A client that has disconnected meanwhile is noticed at the next read.
    let _ = new_client.answer.send(Ok(stream));
    *client = Some(taken_in);
}

/// The next event of the client; pending for ever without one. It is not read from while the guest has not
/// read its earlier input.
async fn of_client(client: &mut Option<Client>, input: &mut [u8], may_type: bool) -> ConsoleEvent {
    let Some(Client { reader, writer, behind, .. }) = client else {
        return std::future::pending().await;
    };
    tokio::select! {
        length = reader.read(input), if may_type => ConsoleEvent::Input(length),
        length = writer.write(behind.as_slices().0), if !behind.is_empty() => ConsoleEvent::Taken(length),
        else => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::UnixListener;

    use super::*;

    use vmseal_api::console::is_taken_over;

    const TIMEOUT: std::time::Duration = std::time::Duration::from_secs(30);

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
    async fn a_late_client_sees_the_prompt_types_and_is_taken_over_from_by_force_alone() {
        let (_directory, mut guest, console) = guest().await;
        guest.write_all(b"login: ").await.unwrap();
        let mut first = console.attach(ConsoleClaim::IfFree).await.unwrap();
        expect(&mut first, b"earlier login: ").await;
        first.write_all(b"root\n").await.unwrap();
        let mut typed = [0; 5];
        guest.read_exact(&mut typed).await.unwrap();
        assert_eq!(&typed, b"root\n");

        let refused = console.attach(ConsoleClaim::IfFree).await.err();
        assert_eq!(refused, Some(ConsoleError::InUse));
        first.write_all(b"x").await.unwrap();
        guest.read_exact(&mut typed[..1]).await.unwrap();
        let mut second = console.attach(ConsoleClaim::TakeOver).await.unwrap();
        expect(&mut second, b"earlier login: ").await;
        let end = first.read(&mut [0; 8]).await.unwrap_err();
        assert!(is_taken_over(&end), "{end}");
        // A client that has left is noticed at once, and its earlier input is not lost.
        second.write_all(b"yz").await.unwrap();
        drop(second);
        let mut second = console.attach(ConsoleClaim::IfFree).await.unwrap();
        guest.read_exact(&mut typed[..2]).await.unwrap();
        assert_eq!(&typed[..2], b"yz");
        expect(&mut second, b"earlier login: ").await;
        guest.write_all(b"bye").await.unwrap();
        drop(guest);
        expect(&mut second, b"bye").await;
        assert_eq!(second.read(&mut [0; 8]).await.unwrap(), 0);
        let gone = console.attach(ConsoleClaim::TakeOver).await.err();
        assert_eq!(gone, Some(ConsoleError::Gone));
    }

    #[tokio::test]
    async fn a_guest_that_does_not_read_keeps_nobody_from_the_console() {
        let (_directory, _guest, console) = guest().await;
        let mut busy = console.attach(ConsoleClaim::IfFree).await.unwrap();
        let paste = vec![b'x'; 16 * CLIENT_BUFFER];
        let typing = tokio::spawn(async move { busy.write_all(&paste).await });
        let tries = async {
            assert_eq!(console.attach(ConsoleClaim::IfFree).await.err(), Some(ConsoleError::InUse));
            console.attach(ConsoleClaim::TakeOver).await.unwrap()
        };
        tokio::time::sleep(Duration::from_millis(200)).await;
        timeout(TIMEOUT, tries).await.expect("the console waits for the guest");
        assert!(typing.await.unwrap().is_err(), "the first client can still type");
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_does_not_hold_up_the_guest() {
        let (_directory, mut guest, console) = guest().await;
        let mut lazy = console.attach(ConsoleClaim::IfFree).await.unwrap();
        // Much more than all buffers on the way, the socket's included.
        let flood = vec![b'x'; 8 * BEHIND_MAX];
        guest.write_all(&flood).await.unwrap();
        guest.write_all(b"end").await.unwrap();
        let mut got = Vec::new();
        let cut = tokio::time::timeout(TIMEOUT, lazy.read_to_end(&mut got)).await;
        cut.expect("the client was not disconnected").unwrap();
        assert!(got.len() < flood.len(), "the client was not disconnected before the end");
        // Until all output is read, a new client may get an earlier replay.
        loop {
            let mut next = console.attach(ConsoleClaim::TakeOver).await.unwrap();
            let mut replay = vec![0; REPLAY_MAX];
            next.read_exact(&mut replay).await.unwrap();
            if replay.ends_with(b"end") {
                break;
            }
        }
    }
}
