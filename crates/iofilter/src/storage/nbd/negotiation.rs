//! The client's half of the handshake (fixed newstyle), on a socket that somebody else has connected. Whatever the server
//! sends, it is read in pieces of bounded length, and all of it until a point in time.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};
use std::os::fd::AsRawFd;

use crate::nbd::{
    BLOCK_MAX, BLOCK_MIN, BLOCK_PREFERRED, NBD_MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, field,
    handshake, info, option, option_reply, transmission,
};

/// How long a server may take for all connections of a disk: a guest may wait meanwhile.
pub const TIMEOUT: Duration = Duration::from_secs(5);

/// The longest name of an export, in bytes: what every server takes.
pub const NAME_MAX: usize = 255;

/// The longest answer to an option, in bytes: the protocol's limit of a string, and what stands before it.
const ANSWER_MAX: u32 = 4096 + 64;

/// The most answers to one option: a server tells of an export in a handful.
const ANSWERS_MAX: usize = 32;

/// How much of a server's own words is shown.
const WORDS_MAX: usize = 200;

/// Why a server's export cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NegotiationError {
    /// The connection.
    #[error("the connection to the NBD server cannot be used: {0}")]
    Socket(#[from] io::Error),
    /// It speaks another language.
    #[error("the server does not speak NBD as is expected: {0}")]
    Protocol(&'static str),
    /// It refuses the export.
    #[error("the NBD server refuses the export {name:?} ({why}): {words}")]
    Refused {
        /// The export.
        name: String,
        /// What its answer means.
        why: &'static str,
        /// What it says itself.
        words: String,
    },
}

/// What a server says of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its size, in bytes.
    pub size: u64,
    /// [`transmission`] flags.
    pub flags: u16,
    /// The smallest block that a request may have, in bytes; a power of two from 512 to 4096.
    pub block: u32,
    /// The most data of a request, in bytes; a multiple of `block`.
    pub block_max: u32,
    /// Whether it answers in chunks.
    pub structured: bool,
}

impl Export {
    /// Whether it has all of these flags.
    #[must_use]
    pub fn has(&self, flags: u16) -> bool {
        self.flags & flags == flags
    }
}

/// A socket that is used until a point in time.
struct Stream<'a> {
    socket: BorrowedFd<'a>,
    until: Instant,
}

impl Stream<'_> {
    fn wait(&self, events: PollFlags) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let late = || io::Error::new(ErrorKind::TimedOut, "it does not answer in time");
        match poll(&mut [PollFd::new(self.socket, events)], timeout) {
            Ok(0) if left.is_zero() => Err(late()),
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read<const N: usize>(&self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.read_into(&mut bytes)?;
        Ok(bytes)
    }

    fn read_into(&self, mut bytes: &mut [u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.wait(PollFlags::POLLIN)?;
            match recv(self.socket.as_raw_fd(), bytes, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => bytes = &mut bytes[count..],
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        while !bytes.is_empty() {
            self.wait(PollFlags::POLLOUT)?;
            match send(self.socket.as_raw_fd(), bytes, flags) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn ask(&self, option: u32, data: &[u8]) -> io::Result<()> {
        let length = (data.len() as u32).to_be_bytes();
        let header = [&OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &length];
        self.send(&[&header.concat(), data].concat())
    }

    /// The kind of the next answer to this option, and what it says.
    fn answer(&self, to: u32) -> Result<(u32, Vec<u8>), NegotiationError> {
        let header = self.read::<20>()?;
        if u64::from_be_bytes(field(&header, 0)) != OPTION_REPLY_MAGIC {
            return Err(NegotiationError::Protocol("an answer does not begin as one"));
        }
        if u32::from_be_bytes(field(&header, 8)) != to {
            return Err(NegotiationError::Protocol("it answers what it was not asked"));
        }
        let length = u32::from_be_bytes(field(&header, 16));
        if length > ANSWER_MAX {
            return Err(NegotiationError::Protocol("an answer is too long"));
        }
        let mut data = vec![0; length as usize];
        self.read_into(&mut data)?;
        Ok((u32::from_be_bytes(field(&header, 12)), data))
    }
}

/// Asks for the export of this name, and has the server serve it on this socket.
///
/// # Errors
/// [`NegotiationError`]; the socket is of no further use.
pub fn run(socket: impl AsFd, name: &str, until: Instant) -> Result<Export, NegotiationError> {
    let stream = Stream { socket: socket.as_fd(), until };
    let greeting = stream.read::<18>()?;
    if u64::from_be_bytes(field(&greeting, 0)) != NBD_MAGIC
        || u64::from_be_bytes(field(&greeting, 8)) != OPTION_MAGIC
    {
        return Err(NegotiationError::Protocol("its greeting is another one"));
    }
    let flags = u16::from_be_bytes(field(&greeting, 16));
    if flags & handshake::FIXED_NEWSTYLE == 0 {
        return Err(NegotiationError::Protocol("it knows no fixed newstyle"));
    }
    let flags = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    stream.send(&u32::from(flags).to_be_bytes())?;
    stream.ask(option::STRUCTURED_REPLY, &[])?;
    let structured = match stream.answer(option::STRUCTURED_REPLY)?.0 {
        option_reply::ACK => true,
        refused if refused & option_reply::ERROR != 0 => false,
        _ => return Err(NegotiationError::Protocol("it neither takes nor refuses an option")),
    };
    let length = (name.len() as u32).to_be_bytes();
    let asked = [1u16.to_be_bytes(), info::BLOCK_SIZE.to_be_bytes()].concat();
    stream.ask(option::GO, &[&length[..], name.as_bytes(), &asked].concat())?;
    go(&stream, name, structured)
}

/// Reads what the server tells of the export.
fn go(stream: &Stream<'_>, name: &str, structured: bool) -> Result<Export, NegotiationError> {
    let (mut export, mut blocks) = (None, (BLOCK_MIN, BLOCK_MAX));
    for _ in 0..ANSWERS_MAX {
        let (kind, data) = stream.answer(option::GO)?;
        match kind {
            option_reply::ACK => {
                let (size, flags) = export
                    .ok_or(NegotiationError::Protocol("it does not tell the export's size"))?;
                let (block, block_max) = blocks;
                return Ok(Export { size, flags, block, block_max, structured });
            }
            option_reply::INFO => match said(&data) {
                Some(Said::Export(size, flags)) => export = Some((size, flags)),
                Some(Said::Blocks(least, most)) => blocks = sensible(least, most)?,
                Some(Said::Other) => {}
                None => return Err(NegotiationError::Protocol("what it tells has a wrong length")),
            },
            refused if refused & option_reply::ERROR != 0 => {
                return Err(NegotiationError::Refused {
                    name: name.into(),
                    why: why(refused),
                    words: words(&data),
                });
            }
            _ => return Err(NegotiationError::Protocol("it answers with another kind of answer")),
        }
    }
    Err(NegotiationError::Protocol("it does not come to an end"))
}

enum Said {
    Export(u64, u16),
    Blocks(u32, u32),
    Other,
}

fn said(data: &[u8]) -> Option<Said> {
    let (kind, rest) = data.split_first_chunk::<2>()?;
    match u16::from_be_bytes(*kind) {
        info::EXPORT => {
            let bytes: &[u8; 10] = rest.try_into().ok()?;
            let (size, flags) = (u64::from_be_bytes(field(bytes, 0)), field(bytes, 8));
            Some(Said::Export(size, u16::from_be_bytes(flags)))
        }
        info::BLOCK_SIZE => {
            let bytes: &[u8; 12] = rest.try_into().ok()?;
            let (least, most) = (field(bytes, 0), field(bytes, 8));
            Some(Said::Blocks(u32::from_be_bytes(least), u32::from_be_bytes(most)))
        }
        _ => Some(Said::Other),
    }
}

/// The least and the most of a request, in bytes, as this client uses them.
fn sensible(least: u32, most: u32) -> Result<(u32, u32), NegotiationError> {
    let least = least.max(BLOCK_MIN);
    if !least.is_power_of_two() || least > BLOCK_PREFERRED {
        return Err(NegotiationError::Protocol("its blocks are larger than 4096 bytes"));
    }
    let most = most.min(BLOCK_MAX) / least * least;
    if most == 0 {
        return Err(NegotiationError::Protocol("its requests are shorter than its blocks"));
    }
    Ok((least, most))
}

fn why(refused: u32) -> &'static str {
    match refused & !option_reply::ERROR {
        1 => "it is too old: it does not know NBD_OPT_GO",
        2 => "it does not allow it",
        5 => "it demands TLS, which filters do not speak: tunnel it",
        6 => "it has no such export",
        7 => "it ends",
        8 => "it demands other blocks",
        _ => "the question makes no sense to it",
    }
}

/// Words of somebody else, for the log.
fn words(data: &[u8]) -> String {
    let text = String::from_utf8_lossy(data);
    let shown: String = text.chars().take(WORDS_MAX).flat_map(char::escape_debug).collect();
    if shown.is_empty() { "it says no more".into() } else { shown }
}

/// What a disk that is written needs of a server: to make it durable.
pub(super) fn can_be_written(export: &Export) -> bool {
    let durable = transmission::HAS_FLAGS | transmission::SEND_FLUSH;
    export.has(durable) && !export.has(transmission::READ_ONLY)
}
