//! What a server answers, without any I/O: simple replies and structured ones, to requests that are in flight.
//!
//! ```text
//!  Header ──read, no error──> Data ──all of it──> Header | Ended
//!         ──error chunk─────> Words ─all of it──> Header | Ended
//!         ──anything else──────────────────────> Header | Ended     Ended: the last of a reply; its request is done
//! ```
//! A request is ended once, by the last part of its reply. Data lies within the request that asked for it. A read succeeds
//! only when as much has come as was asked for. After anything else the connection is broken: where the next reply begins is
//! not known then.

use crate::nbd::{CHUNK_LENGTH, CHUNK_MAGIC, REPLY_LENGTH, REPLY_MAGIC, chunk, field};
use crate::stack::request::IoError;

/// The longest header, in bytes: of a chunk of zeroes.
pub const HEADER_MAX: usize = CHUNK_LENGTH + 12;

/// The longest chunk that tells of an error, in bytes: the protocol's limit of a string, and what stands around it.
const ERROR_CHUNK_MAX: u32 = 4096 + 64;

/// Why a connection cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// A reply begins with another number.
    #[error("a reply does not begin as one")]
    Magic,
    /// To something that was not asked, or is answered.
    #[error("it answers what it was not asked")]
    Unasked,
    /// Before it can know what it is to do.
    #[error("it answers before it has all of the request")]
    TooEarly,
    /// A chunk that does not belong there.
    #[error("a part of a reply is not of its kind, or of a wrong length")]
    Chunk,
    /// Data that was not asked for.
    #[error("it sends other data than was asked for")]
    Data,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// More must arrive first.
    More,
    /// This many bytes of data come next, for a read of this slot, from this byte of it on. [`Replies::took`] says how many
    /// of them were taken.
    Data {
        /// The slot.
        slot: usize,
        /// In bytes from the read's beginning.
        at: u32,
        /// In bytes.
        length: u32,
    },
    /// This part of a read is zeroes.
    Zeroes {
        /// The slot.
        slot: usize,
        /// In bytes from the read's beginning.
        at: u32,
        /// In bytes.
        length: u32,
    },
    /// A request is answered.
    Done {
        /// The slot.
        slot: usize,
        /// How it went.
        result: Result<(), IoError>,
    },
}

/// What was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Whether data is to come.
    pub read: bool,
    /// Where, in bytes of the export.
    pub offset: u64,
    /// How much, in bytes.
    pub length: u32,
}

#[derive(Clone, Copy, Debug)]
struct Flight {
    asked: Asked,
    /// Whether all of the request is with the server.
    sent: bool,
    /// How much of a read has come.
    came: u32,
    failed: Option<IoError>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Header,
    Data { slot: usize, at: u32, left: u32, last: bool },
    Words { slot: usize, left: u32, last: bool },
    Ended { slot: usize },
}

/// The requests in flight of a connection, and the reader of its replies.
#[derive(Debug)]
pub struct Replies {
    structured: bool,
    slots: Vec<(u32, Option<Flight>)>,
    state: State,
}

impl Replies {
    /// Of a connection with this many slots for requests.
    #[must_use]
    pub fn new(structured: bool, slots: usize) -> Self {
        Self { structured, slots: vec![(0, None); slots], state: State::Header }
    }

    /// A request begins; returns its cookie, which no other request of this slot has for a long time.
    pub fn begin(&mut self, slot: usize, asked: Asked) -> u64 {
        let (count, flight) = &mut self.slots[slot];
        *count = count.wrapping_add(1);
        *flight = Some(Flight { asked, sent: false, came: 0, failed: None });
        u64::from(*count) << 32 | slot as u64
    }

    /// The server has all of a request.
    pub fn sent(&mut self, slot: usize) {
        if let Some(flight) = self.flight(slot) {
            flight.sent = true;
        }
    }

    /// Whether a reply has begun and is not ended.
    #[must_use]
    pub fn is_within_a_reply(&self) -> bool {
        !matches!(self.state, State::Header)
    }

    fn flight(&mut self, slot: usize) -> Option<&mut Flight> {
        self.slots.get_mut(slot)?.1.as_mut()
    }

    fn asked(&mut self, cookie: u64) -> Result<(usize, &mut Flight), Broken> {
        let slot = (cookie & u64::from(u32::MAX)) as usize;
        let (count, flight) = self.slots.get_mut(slot).ok_or(Broken::Unasked)?;
        if u64::from(*count) != cookie >> 32 {
            return Err(Broken::Unasked);
        }
        let flight = flight.as_mut().ok_or(Broken::Unasked)?;
        if flight.sent { Ok((slot, flight)) } else { Err(Broken::TooEarly) }
    }

    /// So many bytes of data were taken.
    pub fn took(&mut self, count: u32) {
        if let State::Data { slot, at, left, last } = self.state {
            let count = count.min(left);
            self.state = State::Data { slot, at: at + count, left: left - count, last };
            self.pass_empty();
        }
    }

    /// Goes on behind data or words of which nothing is left.
    fn pass_empty(&mut self) {
        if let State::Data { slot, left: 0, last, .. } | State::Words { slot, left: 0, last } =
            self.state
        {
            self.state = if last { State::Ended { slot } } else { State::Header };
        }
    }

    /// Reads on: what comes next. Takes from `input` what it has understood; of data it takes nothing.
    ///
    /// # Errors
    /// [`Broken`]: the connection is of no further use.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Event, Broken> {
        loop {
            match self.state {
                State::Data { slot, at, left, .. } => {
                    return Ok(Event::Data { slot, at, length: left });
                }
                State::Words { slot, left, last } => {
                    let count = (left as usize).min(input.len());
                    *input = &input[count..];
                    self.state = State::Words { slot, left: left - count as u32, last };
                    self.pass_empty();
                    if matches!(self.state, State::Words { .. }) {
                        return Ok(Event::More);
                    }
                }
                State::Ended { slot } => {
                    self.state = State::Header;
                    let Some(flight) = self.slots[slot].1.take() else {
                        return Err(Broken::Unasked);
                    };
                    let all = !flight.asked.read || flight.came == flight.asked.length;
                    let result = match flight.failed {
                        Some(error) => Err(error),
                        None if all => Ok(()),
                        None => return Err(Broken::Data),
                    };
                    return Ok(Event::Done { slot, result });
                }
                State::Header => match self.header(input)? {
                    Some(Event::More) => {}
                    Some(event) => return Ok(event),
                    None => return Ok(Event::More),
                },
            }
        }
    }

    /// Reads a header, if all of it is there; [`Event::More`] if there is nothing to tell of it.
    fn header(&mut self, input: &mut &[u8]) -> Result<Option<Event>, Broken> {
        let Some(magic) = input.first_chunk::<4>() else { return Ok(None) };
        match u32::from_be_bytes(*magic) {
            REPLY_MAGIC => self.simple(input),
            CHUNK_MAGIC if self.structured => self.chunk(input),
            _ => Err(Broken::Magic),
        }
    }

    fn simple(&mut self, input: &mut &[u8]) -> Result<Option<Event>, Broken> {
        let Some((header, rest)) = input.split_first_chunk::<REPLY_LENGTH>() else {
            return Ok(None);
        };
        let structured = self.structured;
        let (slot, flight) = self.asked(u64::from_be_bytes(field(header, 8)))?;
        let asked = flight.asked;
        if asked.read && structured {
            return Err(Broken::Chunk);
        }
        *input = rest;
        let error = u32::from_be_bytes(field(header, 4));
        if error != 0 {
            flight.failed = Some(meaning(error));
        } else if asked.read {
            flight.came = asked.length;
            self.state = State::Data { slot, at: 0, left: asked.length, last: true };
            self.pass_empty();
            return Ok(Some(Event::More));
        }
        self.state = State::Ended { slot };
        Ok(Some(Event::More))
    }

    fn chunk(&mut self, input: &mut &[u8]) -> Result<Option<Event>, Broken> {
        let Some((header, rest)) = input.split_first_chunk::<CHUNK_LENGTH>() else {
            return Ok(None);
        };
        let last = u16::from_be_bytes(field(header, 4)) & chunk::DONE != 0;
        let kind = u16::from_be_bytes(field(header, 6));
        let length = u32::from_be_bytes(field(header, 16));
        let (slot, flight) = self.asked(u64::from_be_bytes(field(header, 8)))?;
        let asked = flight.asked;
        match kind {
            chunk::NONE if length == 0 && last => {
                *input = rest;
                self.state = State::Ended { slot };
            }
            chunk::OFFSET_DATA if asked.read && length > 8 => {
                let Some((offset, rest)) = rest.split_first_chunk::<8>() else { return Ok(None) };
                let length = length - 8;
                let at = flight.place(u64::from_be_bytes(*offset), length)?;
                *input = rest;
                self.state = State::Data { slot, at, left: length, last };
            }
            chunk::OFFSET_HOLE if asked.read && length == 12 => {
                let Some((hole, rest)) = rest.split_first_chunk::<12>() else { return Ok(None) };
                let length = u32::from_be_bytes(field(hole, 8));
                let at = flight.place(u64::from_be_bytes(field(hole, 0)), length)?;
                *input = rest;
                self.state = if last { State::Ended { slot } } else { State::Header };
                return Ok(Some(Event::Zeroes { slot, at, length }));
            }
            // Those that are not known, too.
            kind if kind & chunk::ERRORS != 0 && (6..=ERROR_CHUNK_MAX).contains(&length) => {
                let Some((error, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
                flight.failed.get_or_insert(meaning(u32::from_be_bytes(*error)));
                *input = rest;
                self.state = State::Words { slot, left: length - 4, last };
            }
            _ => return Err(Broken::Chunk),
        }
        Ok(Some(Event::More))
    }
}

impl Flight {
    /// Where in the read this part of the export is.
    fn place(&mut self, offset: u64, length: u32) -> Result<u32, Broken> {
        let at = offset.checked_sub(self.asked.offset).ok_or(Broken::Data)?;
        let within =
            at.checked_add(length.into()).is_some_and(|end| end <= self.asked.length.into());
        if length == 0 || !within {
            return Err(Broken::Data);
        }
        // Each byte comes once.
        self.came = self.came.checked_add(length).ok_or(Broken::Data)?;
        if self.came > self.asked.length {
            return Err(Broken::Data);
        }
        Ok(at as u32)
    }
}

/// The error that a number of the protocol stands for; its numbers are those of Linux.
fn meaning(number: u32) -> IoError {
    match number {
        1 | 5 | 12 | 22 | 28 | 75 | 95 => IoError::from_errno(number as i32),
        108 => IoError::Disconnected,
        _ => IoError::Device(libc::EIO),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: Asked = Asked { read: true, offset: 4096, length: 1024 };
    const WRITE: Asked = Asked { read: false, offset: 0, length: 512 };

    fn replies(structured: bool, asked: &[Asked]) -> (Replies, Vec<u64>) {
        let mut replies = Replies::new(structured, asked.len());
        let begin = |(slot, asked): (usize, &Asked)| {
            let cookie = replies.begin(slot, *asked);
            replies.sent(slot);
            cookie
        };
        let cookies = asked.iter().enumerate().map(begin).collect();
        (replies, cookies)
    }

    fn chunk_of(cookie: u64, flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = CHUNK_MAGIC.to_be_bytes().to_vec();
        bytes.extend([flags.to_be_bytes(), kind.to_be_bytes()].concat());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend((payload.len() as u32).to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn data_of(offset: u64, data: &[u8]) -> Vec<u8> {
        [&offset.to_be_bytes()[..], data].concat()
    }

    /// All that is told of a stream that arrives in pieces of this length.
    fn told(replies: &mut Replies, stream: &[u8], piece: usize) -> Result<Vec<Event>, Broken> {
        let (mut events, mut arrived, mut taken) = (Vec::new(), 0, 0);
        loop {
            let mut input = &stream[taken..arrived];
            let event = replies.next(&mut input)?;
            taken = arrived - input.len();
            match event {
                Event::More if arrived == stream.len() => return Ok(events),
                Event::More => arrived = (arrived + piece).min(stream.len()),
                Event::Data { slot, at, length } if taken == arrived => {
                    assert!(arrived < stream.len(), "{length} bytes at {at} of {slot} are missing");
                    arrived = (arrived + piece).min(stream.len());
                }
                Event::Data { slot, at, length } => {
                    let count = (length as usize).min(arrived - taken);
                    taken += count;
                    replies.took(count as u32);
                    events.push(Event::Data { slot, at, length: count as u32 });
                }
                other => events.push(other),
            }
        }
    }

    #[test]
    fn replies_are_understood_however_they_arrive() {
        let error = |cookie, number: u32, words: &[u8]| {
            let payload = [&number.to_be_bytes()[..], &(words.len() as u16).to_be_bytes(), words];
            chunk_of(cookie, chunk::DONE, chunk::ERROR, &payload.concat())
        };
        let hole = [&4608u64.to_be_bytes()[..], &512u32.to_be_bytes()].concat();
        for piece in [1, 7, 20, 4096] {
            let (mut simple, cookies) = replies(false, &[READ, WRITE, READ]);
            let stream = [
                &crate::nbd::reply(cookies[1], 0)[..],
                &crate::nbd::reply(cookies[0], 0),
                &[7; 1024],
                &crate::nbd::reply(cookies[2], 28),
            ];
            let events = told(&mut simple, &stream.concat(), piece).unwrap();
            assert_eq!(events[0], Event::Done { slot: 1, result: Ok(()) });
            let no_space = Event::Done { slot: 2, result: Err(IoError::NoSpace) };
            assert_eq!(events[events.len() - 1], no_space);
            assert_eq!(events[events.len() - 2], Event::Done { slot: 0, result: Ok(()) });

            let (mut chunks, cookies) = replies(true, &[READ, WRITE, READ]);
            let stream = [
                chunk_of(cookies[0], 0, chunk::OFFSET_HOLE, &hole),
                error(cookies[2], 5, b"bad luck"),
                chunk_of(cookies[0], chunk::DONE, chunk::OFFSET_DATA, &data_of(4096, &[7; 512])),
                chunk_of(cookies[1], chunk::DONE, chunk::NONE, &[]),
            ];
            let events = told(&mut chunks, &stream.concat(), piece).unwrap();
            assert_eq!(events[0], Event::Zeroes { slot: 0, at: 512, length: 512 });
            let failed = Event::Done { slot: 2, result: Err(IoError::Device(5)) };
            assert_eq!(events[1], failed);
            assert!(matches!(events[2], Event::Data { slot: 0, at: 0, .. }), "{events:?}");
            let done = [0, 1].map(|slot| Event::Done { slot, result: Ok(()) });
            assert_eq!(events[events.len() - 2..], done);
        }
    }

    #[test]
    fn what_does_not_answer_a_request_breaks_the_connection() {
        let broken = |structured, make: &dyn Fn(&[u64]) -> Vec<u8>| {
            let (mut replies, cookies) = replies(structured, &[READ, WRITE]);
            told(&mut replies, &make(&cookies), 4096).unwrap_err()
        };
        let simple = |cookie| crate::nbd::reply(cookie, 0).to_vec();
        assert_eq!(broken(false, &|_| vec![0; 4]), Broken::Magic);
        assert_eq!(broken(false, &|of| chunk_of(of[1], 1, 0, &[])), Broken::Magic);
        assert_eq!(broken(false, &|of| simple(of[1] + (1 << 32))), Broken::Unasked);
        assert_eq!(broken(false, &|_| simple(2)), Broken::Unasked);
        assert_eq!(broken(false, &|of| [simple(of[1]), simple(of[1])].concat()), Broken::Unasked);
        assert_eq!(broken(true, &|of| simple(of[0])), Broken::Chunk);
        assert_eq!(broken(true, &|of| chunk_of(of[1], 1, 0, &[1])), Broken::Chunk);
        let data = |of: &[u64], offset, length, flags| {
            chunk_of(of[0], flags, chunk::OFFSET_DATA, &data_of(offset, &vec![7; length]))
        };
        assert_eq!(broken(true, &|of| data(of, 4095, 512, 0)), Broken::Data);
        assert_eq!(broken(true, &|of| data(of, 4096 + 512, 513, 0)), Broken::Data);
        assert_eq!(broken(true, &|of| data(of, u64::MAX, 512, 0)), Broken::Data);
        // Too little of it, and some of it twice.
        assert_eq!(broken(true, &|of| data(of, 4096, 512, chunk::DONE)), Broken::Data);
        let twice = |of: &[u64]| [data(of, 4096, 1024, 0), data(of, 4096, 512, 0)].concat();
        assert_eq!(broken(true, &twice), Broken::Data);
        let mut early = Replies::new(false, 1);
        let cookie = early.begin(0, WRITE);
        assert_eq!(told(&mut early, &simple(cookie), 4096), Err(Broken::TooEarly));
    }
}
