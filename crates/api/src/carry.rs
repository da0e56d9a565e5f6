//! A stream of bytes over a WebSocket: a guest's console, or a disk's NBD. The client, the server and the agent
//! carry both in this way, each with the messages of its own WebSocket library.

use std::time::Duration;

use futures_util::{Sink, SinkExt, Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite;

use crate::console::{TAKEN_OVER, TAKEN_OVER_CODE, is_taken_over};

/// The most bytes of a message, each way.
pub const MESSAGE_MAX: usize = 64 * 1024;

/// How long a socket may take to close.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// A message of a WebSocket library.
pub trait WireMessage: Sized {
    /// A message of these bytes.
    fn bytes(bytes: Vec<u8>) -> Self;

    /// The WebSocket's end with [`TAKEN_OVER_CODE`].
    fn taken_over() -> Self;

    /// What it says.
    fn meaning(self) -> Meaning;
}

/// What a message says.
pub enum Meaning {
    /// These bytes.
    Bytes(Vec<u8>),
    /// Something that the WebSocket library answers itself.
    Control,
    /// The end, or something that has no place in a stream of bytes.
    End,
    /// The end with [`TAKEN_OVER_CODE`].
    TakenOver,
}

impl WireMessage for tungstenite::Message {
    fn bytes(bytes: Vec<u8>) -> Self {
        Self::binary(bytes)
    }

    fn taken_over() -> Self {
        let frame = tungstenite::protocol::CloseFrame {
            code: TAKEN_OVER_CODE.into(),
            reason: TAKEN_OVER.into(),
        };
        Self::Close(Some(frame))
    }

    fn meaning(self) -> Meaning {
        match self {
            Self::Binary(bytes) => Meaning::Bytes(bytes.into()),
            Self::Ping(_) | Self::Pong(_) => Meaning::Control,
            Self::Close(Some(frame)) if u16::from(frame.code) == TAKEN_OVER_CODE => {
                Meaning::TakenOver
            }
            Self::Text(_) | Self::Close(_) | Self::Frame(_) => Meaning::End,
        }
    }
}

#[cfg(feature = "axum")]
impl WireMessage for axum::extract::ws::Message {
    fn bytes(bytes: Vec<u8>) -> Self {
        Self::Binary(bytes.into())
    }

    fn taken_over() -> Self {
        let frame =
            axum::extract::ws::CloseFrame { code: TAKEN_OVER_CODE, reason: TAKEN_OVER.into() };
        Self::Close(Some(frame))
    }

    fn meaning(self) -> Meaning {
        match self {
            Self::Binary(bytes) => Meaning::Bytes(bytes.into()),
            Self::Ping(_) | Self::Pong(_) => Meaning::Control,
            Self::Close(Some(frame)) if frame.code == TAKEN_OVER_CODE => Meaning::TakenOver,
            Self::Text(_) | Self::Close(_) => Meaning::End,
        }
    }
}

/// How [`carry`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CarryEnd {
    /// One side ended.
    Closed,
    /// The other end of the WebSocket said that another client has taken the console over.
    TakenOver,
}

/// Carries bytes between a WebSocket and a stream until either ends, then closes the WebSocket. Neither direction
/// waits for the other: a server may have to send before it can take more.
pub async fn carry<S, M, E>(socket: S, stream: impl AsyncRead + AsyncWrite) -> CarryEnd
where
    S: Stream<Item = Result<M, E>> + Sink<M>,
    M: WireMessage,
{
    let (mut sink, mut source) = socket.split();
    let (mut from, mut to) = split(stream);
    let end = tokio::select! {
        () = send(&mut from, &mut sink) => CarryEnd::Closed,
        end = receive(&mut source, &mut to) => end,
    };
    // The other side may be gone.
    let _ = timeout(CLOSE_TIMEOUT, sink.close()).await;
    end
}

/// From the stream to the WebSocket, until either ends.
async fn send<M: WireMessage>(
    from: &mut (impl AsyncRead + Unpin),
    sink: &mut (impl Sink<M> + Unpin),
) {
    let mut buffer = vec![0; MESSAGE_MAX];
    loop {
        match from.read(&mut buffer).await {
            Ok(count @ 1..) => {
                if sink.send(M::bytes(buffer[..count].to_vec())).await.is_err() {
                    return;
                }
            }
            Err(error) if is_taken_over(&error) => {
                let _ = sink.send(M::taken_over()).await;
                return;
            }
            Ok(0) | Err(_) => return,
        }
    }
}

/// From the WebSocket to the stream, until either ends.
async fn receive<M: WireMessage, E>(
    source: &mut (impl Stream<Item = Result<M, E>> + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> CarryEnd {
    let end = loop {
        match source.next().await.map(|message| message.map(M::meaning)) {
            Some(Ok(Meaning::Bytes(bytes))) => {
                if to.write_all(&bytes).await.is_err() || to.flush().await.is_err() {
                    break CarryEnd::Closed;
                }
            }
            Some(Ok(Meaning::Control)) => {}
            Some(Ok(Meaning::TakenOver)) => break CarryEnd::TakenOver,
            Some(Ok(Meaning::End) | Err(_)) | None => break CarryEnd::Closed,
        }
    };
    // Whose console was taken over reads of that first, and of the end then: the caller tells it, and drops the stream.
    if end == CarryEnd::Closed {
        let _ = to.shutdown().await;
    }
    end
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};
    use tokio_tungstenite::WebSocketStream;
    use tokio_tungstenite::tungstenite::Message;
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;
    use crate::console;

    async fn carried(
        socket: DuplexStream,
        role: Role,
        stream: impl AsyncRead + AsyncWrite,
    ) -> CarryEnd {
        let socket = WebSocketStream::from_raw_socket(socket, role, None).await;
        let carried = carry(socket, stream);
        timeout(Duration::from_secs(30), carried).await.expect("it does not end")
    }

    #[tokio::test]
    async fn both_directions_may_be_full_and_the_end_of_one_side_is_that_of_the_other() {
        let ((tool, near), (far, disk)) = (duplex(4096), duplex(4096));
        let (one, other) = duplex(4096);
        let carrying = [
            tokio::spawn(carried(one, Role::Client, near)),
            tokio::spawn(carried(other, Role::Server, far)),
        ];
        // Each says much before it listens to anything, as tools that read and write at once may.
        let much: Vec<u8> = (0..1_000_000u32).map(|number| number as u8).collect();
        let talk = async |side: DuplexStream| {
            let (mut from, mut to) = split(side);
            let mut heard = vec![0; much.len()];
            let (said, got) = tokio::join!(to.write_all(&much), async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                from.read_exact(&mut heard).await
            });
            said.unwrap();
            got.unwrap();
            assert!(heard == much);
        };
        tokio::join!(talk(tool), talk(disk));
        for side in carrying {
            assert_eq!(side.await.unwrap(), CarryEnd::Closed);
        }
    }

    #[tokio::test]
    async fn the_stream_of_a_console_that_is_taken_over_does_not_end_before_its_reader_is_told() {
        let (mut guest, ending, client_side) = console::pair(64);
        let (one, other) = duplex(4096);
        let (mut user, mut near) = duplex(64);
        let agent = tokio::spawn(carried(one, Role::Server, client_side));
        guest.shutdown().await.unwrap();
        ending.taken_over();
        drop(guest);
        assert_eq!(carried(other, Role::Client, &mut near).await, CarryEnd::TakenOver);
        agent.await.unwrap();
        let mut end = [0; 1];
        let read = timeout(Duration::from_millis(50), user.read(&mut end)).await;
        assert!(read.is_err(), "it has ended");
        drop(near);
        assert_eq!(user.read(&mut end).await.unwrap(), 0);
    }

    #[tokio::test]
    async fn a_console_that_is_taken_over_says_so_at_the_other_end() {
        let (mut guest, ending, client_side) = console::pair(64);
        let (one, other) = duplex(4096);
        let (user, near) = duplex(64);
        let agent = tokio::spawn(carried(one, Role::Server, client_side));
        let client = tokio::spawn(carried(other, Role::Client, near));
        guest.write_all(b"bye").await.unwrap();
        ending.taken_over();
        drop(guest);
        let mut said = Vec::new();
        let (mut from, _to) = split(user);
        from.read_to_end(&mut said).await.unwrap();
        assert_eq!(said, b"bye");
        assert_eq!(client.await.unwrap(), CarryEnd::TakenOver);
        assert_eq!(agent.await.unwrap(), CarryEnd::Closed);
    }

    #[tokio::test]
    async fn a_message_of_text_ends_it() {
        let (one, other) = duplex(4096);
        let (_user, near) = duplex(64);
        let carrying = tokio::spawn(carried(one, Role::Server, near));
        let mut client = WebSocketStream::from_raw_socket(other, Role::Client, None).await;
        client.send(Message::text("text")).await.unwrap();
        assert_eq!(carrying.await.unwrap(), CarryEnd::Closed);
        assert!(matches!(client.next().await, Some(Ok(Message::Close(_)))));
    }
}
