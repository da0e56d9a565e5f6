//! A stream as frames with a kind, sent and received by threads of the caller: each call blocks.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;

use vmseal_seal::frame::{CONTENT_MAX, Content, HEAD_LEN, Kind, Opener, Sealer, TAG_LEN};
use zeroize::Zeroizing;

use super::error::TransportError;
use super::session::{Shared, Stream};

/// A stream's two directions. The direction that is not used is to be finished, or dropped by the receiver, like any other.
///
/// # Errors
/// [`TransportError::Setup`].
pub fn records(stream: Stream) -> Result<(RecordSender, RecordReceiver), TransportError> {
    let Stream { shared, number, ends } = stream;
    let blocking = shared.connection(number).socket.set_nonblocking(false);
    blocking.map_err(|error| shared.fail(TransportError::setup(number)(error)))?;
    let sender = RecordSender {
        shared: shared.clone(),
        stream: number,
        sealer: Some(ends.sealer),
        frame: Zeroizing::new(vec![0; HEAD_LEN + CONTENT_MAX + TAG_LEN]),
    };
    // Behind a frame there is room for the head of the next one, which is often there already.
    let buffer = Zeroizing::new(vec![0; HEAD_LEN + CONTENT_MAX + TAG_LEN + HEAD_LEN]);
    let receiver = RecordReceiver {
        shared,
        stream: number,
        opener: ends.opener,
        buffer,
        filled: 0,
        given: 0,
        ended: false,
    };
    Ok((sender, receiver))
}

/// Seals and sends frames. One that is dropped without [`RecordSender::finish`] fails the session.
pub struct RecordSender {
    shared: Arc<Shared>,
    stream: u16,
    /// None once the end was sealed.
    sealer: Option<Sealer>,
    frame: Zeroizing<Vec<u8>>,
}

impl RecordSender {
    /// The place for the content of the next frame: [`CONTENT_MAX`] bytes.
    pub fn content(&mut self) -> &mut [u8] {
        &mut self.frame[HEAD_LEN..HEAD_LEN + CONTENT_MAX]
    }

    /// Sends a frame with the first `length` bytes of [`RecordSender::content`].
    ///
    /// # Errors
    /// [`TransportError`]: the session has failed.
    ///
    /// # Panics
    /// With a length of more than [`CONTENT_MAX`].
    pub fn send_filled(&mut self, kind: Kind, length: usize) -> Result<(), TransportError> {
        assert!(length <= CONTENT_MAX, "a frame of {length} bytes");
        let stopped = self.shared.pace.wait(HEAD_LEN + length + TAG_LEN);
        stopped.map_err(|_| self.shared.fail(TransportError::Cancelled))?;
        let abandoned = TransportError::Abandoned { stream: self.stream };
        let sealer = self.sealer.as_mut().ok_or(abandoned)?;
        let frame = &mut self.frame[..HEAD_LEN + length + TAG_LEN];
        sealer.seal(kind, frame).map_err(|error| {
            self.shared.fail(TransportError::Frame { stream: self.stream, error })
        })?;
        let connection = self.shared.connection(self.stream);
        (&connection.socket)
            .write_all(frame)
            .map_err(|error| self.shared.fail(TransportError::of_connection(self.stream, error)))?;
        connection.sent.frame(length);
        connection.sent.worked();
        Ok(())
    }

    /// Sends a frame with this content.
    ///
    /// # Errors
    /// As [`RecordSender::send_filled`].
    ///
    /// # Panics
    /// With more than [`CONTENT_MAX`] bytes.
    pub fn send(&mut self, kind: Kind, content: &[u8]) -> Result<(), TransportError> {
        assert!(content.len() <= CONTENT_MAX, "a frame of {} bytes", content.len());
        self.content()[..content.len()].copy_from_slice(content);
        self.send_filled(kind, content.len())
    }

    /// Sends the end. The other host knows then that it has everything.
    ///
    /// # Errors
    /// As [`RecordSender::send_filled`].
    pub fn finish(mut self) -> Result<(), TransportError> {
        let abandoned = TransportError::Abandoned { stream: self.stream };
        let end = self.sealer.take().ok_or(abandoned)?.end();
        let end = end.map_err(|error| {
            self.shared.fail(TransportError::Frame { stream: self.stream, error })
        })?;
        let mut socket = &self.shared.connection(self.stream).socket;
        let sent = socket.write_all(&end).and_then(|()| socket.shutdown(Shutdown::Write));
        sent.map_err(|error| self.shared.fail(TransportError::of_connection(self.stream, error)))
    }
}

impl Drop for RecordSender {
    fn drop(&mut self) {
        if self.sealer.is_some() {
            self.shared.fail(TransportError::Abandoned { stream: self.stream });
        }
    }
}

/// Receives and opens frames.
pub struct RecordReceiver {
    shared: Arc<Shared>,
    stream: u16,
    opener: Opener,
    buffer: Zeroizing<Vec<u8>>,
    /// How much of the buffer is filled.
    filled: usize,
    /// How much of it is the frame that was given out last.
    given: usize,
    ended: bool,
}

impl RecordReceiver {
    /// The next frame's kind and content; none at the authenticated end.
    ///
    /// # Errors
    /// [`TransportError`]: the session has failed.
    pub fn receive(&mut self) -> Result<Option<(Kind, &mut [u8])>, TransportError> {
        if self.ended {
            return Ok(None);
        }
        self.buffer.copy_within(self.given..self.filled, 0);
        self.filled -= self.given;
        self.given = 0;
        let length = match self.read_frame() {
            Ok(length) => length,
            Err(error) => return Err(self.shared.fail(error)),
        };
        self.open(length)
    }

    /// Reads a frame with its head, and perhaps the head of the next one. The length of what follows the head.
    fn read_frame(&mut self) -> Result<usize, TransportError> {
        self.read_until(HEAD_LEN, HEAD_LEN)?;
        let mut head = [0; HEAD_LEN];
        head.copy_from_slice(&self.buffer[..HEAD_LEN]);
        let head = self.opener.head(head).map_err(TransportError::frame(self.stream))?;
        let frame = HEAD_LEN + head.following();
        self.read_until(frame, frame + HEAD_LEN)?;
        Ok(frame)
    }

    /// Reads until there are at least `least` bytes, and at most `most`.
    fn read_until(&mut self, least: usize, most: usize) -> Result<(), TransportError> {
        while self.filled < least {
            let mut socket = &self.shared.connection(self.stream).socket;
            match socket.read(&mut self.buffer[self.filled..most]) {
                Ok(0) => {
                    let cut = self.opener.finish().err().map(TransportError::frame(self.stream));
                    return Err(cut.unwrap_or(TransportError::Ended { stream: self.stream }));
                }
                Ok(read) => self.filled += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(TransportError::of_connection(self.stream, error)),
            }
        }
        Ok(())
    }

    fn open(&mut self, frame: usize) -> Result<Option<(Kind, &mut [u8])>, TransportError> {
        let mut head = [0; HEAD_LEN];
        head.copy_from_slice(&self.buffer[..HEAD_LEN]);
        let opened = self
            .opener
            .head(head)
            .and_then(|head| self.opener.open(&head, &mut self.buffer[HEAD_LEN..frame]));
        let received = &self.shared.connection(self.stream).received;
        match opened {
            Ok(Content::Data(kind, content)) => {
                self.given = frame;
                received.frame(content.len());
                received.worked();
                Ok(Some((kind, content)))
            }
            Ok(Content::End) => {
                self.ended = true;
                Ok(None)
            }
            Err(error) => {
                Err(self.shared.fail(TransportError::Frame { stream: self.stream, error }))
            }
        }
    }
}
