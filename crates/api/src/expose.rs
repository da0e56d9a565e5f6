//! A disk that is exposed to an operator's tools: NBD connections, each carried as a stream of bytes from the
//! tool through the server to the agent, and one more stream that keeps the exposure open.

use std::fmt;
use std::time::Duration;

use futures_util::{Sink, SinkExt, Stream, StreamExt};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::time::timeout;

/// The client that holds a disk exposed sends this every [`HOLD_INTERVAL`].
pub const HOLD: u8 = b'.';

/// It sends this to end the exposure, and then reads until the end.
pub const LET_GO: u8 = b'q';

/// How often [`HOLD`] is sent.
pub const HOLD_INTERVAL: Duration = Duration::from_secs(10);

/// An agent that has not received it for so long takes the client for gone, and ends the exposure.
pub const HOLD_TIMEOUT: Duration = Duration::from_secs(45);

/// The most bytes of a WebSocket's message, each way.
pub const MESSAGE_MAX: usize = 64 * 1024;

/// How long the closing handshake of a socket may take.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// The kinds of stream of an exposure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposing {
    /// The exposure itself. It ends with this stream, or with [`LET_GO`]; [`HOLD`] keeps it open. The stream
    /// ends when everything is flushed and the disk is free; it carries the error text, if there was an
    /// error.
    Hold {
        /// Whether the disk may be changed.
        writable: bool,
    },
    /// A connection to the exposed disk: the filter's NBD.
    Connect,
}

impl Exposing {
    /// Its path below the API's root.
    #[cfg(feature = "client")]
    pub(crate) fn path(self, vm: impl fmt::Display, disk: impl fmt::Display) -> String {
        let connect = self == Self::Connect;
        let writable = self == Self::Hold { writable: true };
        format!("vms/{vm}/disks/{disk}/expose?connect={connect}&writable={writable}")
    }
}

/// The meaning of a WebSocket's message for [`carry`].
pub enum Carried {
    /// Bytes for the stream.
    Bytes(Vec<u8>),
    /// Ignored.
    Nothing,
    /// The end.
    End,
}

/// Carries bytes between a WebSocket and a stream until either ends. Neither direction waits for the other: a
/// server may have to send before it can receive more.
pub async fn carry<S, M, E>(
    socket: S,
    stream: impl AsyncRead + AsyncWrite,
    message: impl Fn(Vec<u8>) -> M,
    carried: impl Fn(M) -> Carried,
) where
    S: Stream<Item = Result<M, E>> + Sink<M>,
{
    let (mut sink, mut source) = socket.split();
    let (mut from, mut to) = split(stream);
    let outwards = async {
        let mut buffer = vec![0; MESSAGE_MAX];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            if sink.send(message(buffer[..count].to_vec())).await.is_err() {
                return;
            }
        }
        // The other side may be gone.
        let _ = timeout(CLOSE_TIMEOUT, sink.close()).await;
    };
    let inwards = async {
        while let Some(Ok(message)) = source.next().await {
            match carried(message) {
                Carried::Bytes(bytes) => {
                    if to.write_all(&bytes).await.is_err() || to.flush().await.is_err() {
                        break;
                    }
                }
                Carried::Nothing => {}
                Carried::End => break,
            }
        }
        let _ = to.shutdown().await;
    };
    tokio::select! {
        () = outwards => {}
        () = inwards => {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{DuplexStream, duplex};
    use tokio_tungstenite::WebSocketStream;
    use tokio_tungstenite::tungstenite::Message;
    use tokio_tungstenite::tungstenite::protocol::Role;

    use super::*;

    async fn carried(socket: DuplexStream, role: Role, stream: DuplexStream) {
        let socket = WebSocketStream::from_raw_socket(socket, role, None).await;
        let bytes = |message| match message {
            Message::Binary(bytes) => Carried::Bytes(bytes.into()),
            _ => Carried::End,
        };
        let carried = carry(socket, stream, Message::binary::<Vec<u8>>, bytes);
        timeout(Duration::from_secs(30), carried).await.expect("carrying does not end");
    }

    #[tokio::test]
    async fn both_directions_may_be_full_and_the_end_of_one_side_is_that_of_the_other() {
        let ((tool, near), (far, disk)) = (duplex(4096), duplex(4096));
        let (one, other) = duplex(4096);
        let carrying = [
            tokio::spawn(carried(one, Role::Client, near)),
            tokio::spawn(carried(other, Role::Server, far)),
        ];
        // Each sends much before it reads anything, as tools that read and write at once may.
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
            side.await.unwrap();
        }
    }
}
