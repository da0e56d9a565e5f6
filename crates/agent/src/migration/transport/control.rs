//! A stream as messages of the two agents: JSON, one message a frame.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::time::timeout;
use vmseal_seal::frame::{Content, FrameError, HEAD_LEN, Kind, Opener, Sealer, TAG_LEN};

use super::MESSAGE_MAX;
use super::error::TransportError;
use super::session::{Shared, Stream};

/// The kind of a frame that is a message.
const MESSAGE: Kind = Kind::new(3);

/// Both directions of a stream of messages. An error fails the session, unless it says otherwise.
pub struct Control {
    sender: ControlSender,
    receiver: ControlReceiver,
}

impl Control {
    /// Uses a stream for messages.
    ///
    /// # Errors
    /// [`TransportError::Setup`].
    pub fn new(stream: Stream) -> Result<Self, TransportError> {
        let Stream { shared, number, ends } = stream;
        let socket = &shared.connection(number).socket;
        let socket = socket.try_clone().and_then(|socket| {
            socket.set_nonblocking(true)?;
            TcpStream::from_std(socket)
        });
        let socket = socket.map_err(|error| shared.fail(TransportError::setup(number)(error)))?;
        let (reading, writing) = socket.into_split();
        let sender = ControlSender {
            shared: shared.clone(),
            stream: number,
            sealer: Some(ends.sealer),
            socket: writing,
            sending: false,
        };
        let (opener, buffer) = (ends.opener, Vec::new());
        let receiver = ControlReceiver {
            shared,
            stream: number,
            opener,
            socket: reading,
            buffer,
            ended: false,
        };
        Ok(Self { sender, receiver })
    }

    /// As [`ControlSender::send`].
    ///
    /// # Errors
    /// As there.
    pub async fn send<T: Serialize>(
        &mut self,
        message: &T,
        within: Duration,
    ) -> Result<(), TransportError> {
        self.sender.send(message, within).await
    }

    /// As [`ControlReceiver::receive`].
    ///
    /// # Errors
    /// As there.
    pub async fn receive<T: DeserializeOwned>(
        &mut self,
        within: Duration,
    ) -> Result<T, TransportError> {
        self.receiver.receive(within).await
    }

    /// The two directions, for two tasks.
    #[must_use]
    pub fn split(self) -> (ControlSender, ControlReceiver) {
        (self.sender, self.receiver)
    }

    /// As [`ControlSender::finish`].
    ///
    /// # Errors
    /// As there.
    pub async fn finish(self, within: Duration) -> Result<(), TransportError> {
        self.sender.finish(within).await
    }
}

/// Sends messages. One that is dropped without [`ControlSender::finish`] fails the session.
pub struct ControlSender {
    shared: Arc<Shared>,
    stream: u16,
    /// None once the end was sealed.
    sealer: Option<Sealer>,
    socket: OwnedWriteHalf,
    /// A message may be sent in part: its future was dropped.
    sending: bool,
}

impl ControlSender {
    /// Sends a message. A future that is dropped before it is done leaves a stream that can send no more.
    ///
    /// # Errors
    /// [`TransportError`]: the session has failed, but for [`TransportError::MessageTooLong`] and [`TransportError::Message`].
    pub async fn send<T: Serialize>(
        &mut self,
        message: &T,
        within: Duration,
    ) -> Result<(), TransportError> {
        let stream = self.stream;
        let content = serde_json::to_vec(message)
            .map_err(|error| TransportError::Message { stream, error: Arc::new(error) })?;
        if content.len() > MESSAGE_MAX {
            return Err(TransportError::MessageTooLong { stream, length: content.len() });
        }
        let mut frame = vec![0; HEAD_LEN];
        frame.extend_from_slice(&content);
        frame.resize(frame.len() + TAG_LEN, 0);
        let sealer = match &mut self.sealer {
            Some(sealer) if !self.sending => sealer,
            _ => return Err(self.shared.fail(TransportError::Abandoned { stream })),
        };
        let sealed = sealer.seal(MESSAGE, &mut frame);
        sealed.map_err(|error| self.shared.fail(TransportError::Frame { stream, error }))?;
        self.sending = true;
        self.write(&frame, within).await?;
        self.sending = false;
        self.shared.connection(stream).sent.frame(content.len());
        Ok(())
    }

    /// Sends the end: the other host knows that there are no more messages.
    ///
    /// # Errors
    /// As [`ControlSender::send`].
    pub async fn finish(mut self, within: Duration) -> Result<(), TransportError> {
        let stream = self.stream;
        let Some(sealer) = self.sealer.take().filter(|_| !self.sending) else {
            return Err(self.shared.fail(TransportError::Abandoned { stream }));
        };
        let end = sealer.end();
        let end = end.map_err(|error| self.shared.fail(TransportError::Frame { stream, error }))?;
        self.write(&end, within).await?;
        let shut = self.socket.shutdown().await;
        shut.map_err(|error| self.shared.fail(TransportError::of_connection(stream, error)))
    }

    async fn write(&mut self, frame: &[u8], within: Duration) -> Result<(), TransportError> {
        let stream = self.stream;
        let written = match timeout(within, self.socket.write_all(frame)).await {
            Ok(written) => written.map_err(|error| TransportError::of_connection(stream, error)),
            Err(_) => Err(TransportError::Silent { stream, within }),
        };
        written.map_err(|error| self.shared.fail(error))
    }
}

impl Drop for ControlSender {
    fn drop(&mut self) {
        if self.sealer.is_some() {
            self.shared.fail(TransportError::Abandoned { stream: self.stream });
        }
    }
}

/// Receives messages.
pub struct ControlReceiver {
    shared: Arc<Shared>,
    stream: u16,
    opener: Opener,
    socket: OwnedReadHalf,
    /// A part of the next frame: what was read stays when a future is dropped.
    buffer: Vec<u8>,
    ended: bool,
}

impl ControlReceiver {
    /// The next message. A future that is dropped loses nothing.
    ///
    /// # Errors
    /// [`TransportError`]: the session has failed, but for [`TransportError::Silent`], after which it can be asked again,
    /// [`TransportError::Ended`] at the authenticated end, and [`TransportError::Message`] for one that cannot be read.
    pub async fn receive<T: DeserializeOwned>(
        &mut self,
        within: Duration,
    ) -> Result<T, TransportError> {
        let stream = self.stream;
        if self.ended {
            return Err(TransportError::Ended { stream });
        }
        match timeout(within, self.read_frame()).await {
            Ok(read) => read.map_err(|error| self.shared.fail(error))?,
            Err(_) => return Err(TransportError::Silent { stream, within }),
        }
        let mut frame = std::mem::take(&mut self.buffer);
        let opened = open(&mut self.opener, &mut frame);
        let Some((kind, content)) =
            opened.map_err(|error| self.shared.fail(TransportError::Frame { stream, error }))?
        else {
            self.ended = true;
            return Err(TransportError::Ended { stream });
        };
        if kind != MESSAGE {
            return Err(self.shared.fail(TransportError::Kind { stream, kind: kind.number() }));
        }
        self.shared.connection(stream).received.frame(content.len());
        serde_json::from_slice(content)
            .map_err(|error| TransportError::Message { stream, error: Arc::new(error) })
    }

    /// Reads until the buffer has a whole frame.
    async fn read_frame(&mut self) -> Result<(), TransportError> {
        loop {
            let missing = match self.buffer.first_chunk() {
                None => HEAD_LEN - self.buffer.len(),
                Some(head) => {
                    let head =
                        self.opener.head(*head).map_err(TransportError::frame(self.stream))?;
                    let length = head.following() - TAG_LEN;
                    if length > MESSAGE_MAX {
                        return Err(TransportError::MessageTooLong { stream: self.stream, length });
                    }
                    HEAD_LEN + head.following() - self.buffer.len()
                }
            };
            if missing == 0 {
                return Ok(());
            }
            let mut limited = (&mut self.socket).take(missing as u64);
            match limited.read_buf(&mut self.buffer).await {
                Ok(0) => {
                    let cut = self.opener.finish().err().map(TransportError::frame(self.stream));
                    return Err(cut.unwrap_or(TransportError::Ended { stream: self.stream }));
                }
                Ok(_) => {}
                Err(error) => return Err(TransportError::of_connection(self.stream, error)),
            }
        }
    }
}

fn open<'a>(
    opener: &mut Opener,
    frame: &'a mut [u8],
) -> Result<Option<(Kind, &'a [u8])>, FrameError> {
    let Some((head, sealed)) = frame.split_first_chunk_mut() else {
        return Err(FrameError::Truncated(0));
    };
    let head = opener.head(*head)?;
    match opener.open(&head, sealed)? {
        Content::Data(kind, content) => Ok(Some((kind, content))),
        Content::End => Ok(None),
    }
}
