//! A guest's serial console: bytes both ways, and whether it ended because another client took it over.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};

/// The WebSocket close code of a console that was taken over; one of the codes that RFC 6455 (7.4.2) leaves
/// to applications.
pub const TAKEN_OVER_CODE: u16 = 4000;

/// The same for people.
pub const TAKEN_OVER: &str = "the console was taken over by another client";

/// What a client asks for if the console is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsoleClaim {
    /// Refuse the client.
    IfFree,
    /// Take it over; the other client is notified.
    TakeOver,
}

/// Both directions of a serial console.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A guest's serial console: bytes both ways. Reading ends with [`is_taken_over`] if another client takes it
/// over.
pub type ConsoleStream = Box<dyn Duplex>;

/// Whether this read error means that the console was taken over.
#[must_use]
pub fn is_taken_over(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::ConnectionAborted
}

/// Notifies a client that its console was taken over, before its stream is dropped.
#[derive(Debug)]
pub struct Ending(Arc<AtomicBool>);

impl Ending {
    /// Notifies the client.
    pub fn taken_over(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A new console for a client, with a buffer of `capacity` bytes in each direction: our side, the notifier,
/// and the client's side.
#[must_use]
pub fn pair(capacity: usize) -> (DuplexStream, Ending, ConsoleStream) {
    let (ours, theirs) = duplex(capacity);
    let taken_over = Arc::new(AtomicBool::new(false));
    let theirs = ClientSide { stream: theirs, taken_over: Arc::clone(&taken_over) };
    (ours, Ending(taken_over), Box::new(theirs))
}

struct ClientSide {
    stream: DuplexStream,
    taken_over: Arc<AtomicBool>,
}

impl AsyncRead for ClientSide {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let at_end = buffer.filled().len() == before && buffer.remaining() > 0;
        if at_end && self.taken_over.load(Ordering::Acquire) {
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::ConnectionAborted, TAKEN_OVER)));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientSide {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[tokio::test]
    async fn the_end_of_a_console_says_whether_it_was_taken_over() {
        for taken in [false, true] {
            let (mut ours, ending, mut theirs) = pair(64);
            ours.write_all(b"bye").await.unwrap();
            if taken {
                ending.taken_over();
            }
            drop(ours);
            let mut said = [0; 3];
            theirs.read_exact(&mut said).await.unwrap();
            assert_eq!(&said, b"bye");
            match theirs.read(&mut said).await {
                Ok(0) => assert!(!taken),
                Err(error) if is_taken_over(&error) => assert!(taken),
                other => panic!("{other:?}"),
            }
        }
    }
}
