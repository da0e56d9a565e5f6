//! Lines from a unix socket that is shared with a writer, with a limit on their length.

use std::io;
use std::sync::Arc;

use tokio::net::UnixStream;

use super::QmpError;

/// How much is read at once, in bytes.
const CHUNK: usize = 16 * 1024;

/// The reading half of a connection.
pub struct LineReader {
    stream: Arc<UnixStream>,
    buffer: Vec<u8>,
    /// There is no line end in `buffer` before this position.
    searched: usize,
    max: usize,
}

impl LineReader {
    /// Reads lines of at most `max` bytes.
    pub fn new(stream: Arc<UnixStream>, max: usize) -> Self {
        Self { stream, buffer: Vec::new(), searched: 0, max }
    }

    /// The next line, without its end; none when the other side has closed.
    pub async fn next(&mut self) -> Result<Option<Vec<u8>>, QmpError> {
        loop {
            if let Some(end) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                self.searched = 0;
                line.pop();
                return Ok(Some(line));
            }
            self.searched = self.buffer.len();
            if self.searched > self.max {
                return Err(QmpError::Protocol(format!("a line of more than {} bytes", self.max)));
            }
            if self.fill().await? == 0 {
                return Ok(None);
            }
        }
    }

    async fn fill(&mut self) -> Result<usize, QmpError> {
        loop {
            self.stream.readable().await?;
            let mut chunk = [0; CHUNK];
            match self.stream.try_read(&mut chunk) {
                Ok(length) => {
                    self.buffer.extend_from_slice(&chunk[..length]);
                    return Ok(length);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(0),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
