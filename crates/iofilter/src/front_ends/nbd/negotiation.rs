//! The negotiation of a connection: [`super::option`] over a socket, with a limit on its time.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use crate::front_ends::nbd::option::{
    Agreed, Export, HEADER_LENGTH, Header, Hostile, Next, Options, greeting,
};
use crate::stack::stop::Stop;

/// How long a client may take, so that a silent one does not keep others out.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// Why a negotiation failed.
#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    /// The client sent input that cannot be answered.
    #[error("{0}")]
    Hostile(#[from] Hostile),
    /// The client took too long.
    #[error("the client did not finish its options within {} seconds", TIMEOUT.as_secs())]
    Slow,
    /// The connection broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// The filter is stopping.
    #[error("the filter is ending")]
    Stopped,
}

/// Negotiates with a client about the export; none if it must not be served.
///
/// # Errors
/// [`NegotiationError`].
pub fn run(
    stream: &UnixStream,
    export: &Export,
    stop: &Stop,
) -> Result<Option<Agreed>, NegotiationError> {
    stream.set_write_timeout(Some(TIMEOUT))?;
    let client = Client { stream, stop, until: Instant::now() + TIMEOUT };
    client.send(&greeting())?;
    let mut options = Options::new(export, client.read()?)?;
    let (mut data, mut answer) = (Vec::new(), Vec::new());
    loop {
        let header = Header::decode(&client.read::<HEADER_LENGTH>()?)?;
        data.resize(header.length, 0);
        client.fill(&mut data)?;
        answer.clear();
        let next = options.answer(header.option, &data, &mut answer)?;
        client.send(&answer)?;
        match next {
            Next::Option => {}
            Next::Serve => return Ok(Some(options.agreed())),
            Next::End => return Ok(None),
        }
    }
}

struct Client<'a> {
    stream: &'a UnixStream,
    stop: &'a Stop,
    until: Instant,
}

impl Client<'_> {
    fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let mut stream = self.stream;
        stream.write_all(bytes)
    }

    fn read<const N: usize>(&self) -> Result<[u8; N], NegotiationError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    fn fill(&self, bytes: &mut [u8]) -> Result<(), NegotiationError> {
        let (mut stream, mut done) = (self.stream, 0);
        while done < bytes.len() {
            self.wait()?;
            match stream.read(&mut bytes[done..]) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sleeps until there is something to read.
    fn wait(&self) -> Result<(), NegotiationError> {
        let readable = PollFlags::POLLIN;
        let mut fds =
            [PollFd::new(self.stream.as_fd(), readable), PollFd::new(self.stop.event(), readable)];
        loop {
            let left = self.until.saturating_duration_since(Instant::now());
            match ppoll(&mut fds, Some(TimeSpec::from(left)), None) {
                _ if self.stop.asked() => return Err(NegotiationError::Stopped),
                Ok(0) => return Err(NegotiationError::Slow),
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
    }
}
