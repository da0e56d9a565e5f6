//! The chunks of structured replies, without any I/O.

use crate::nbd::{CHUNK_LENGTH, CHUNK_MAGIC, chunk, words};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::request::IoError;

/// The unit in which zeroes are looked for in the data of a read, in bytes: a hole's own chunk is much
/// shorter.
const UNIT: usize = 4096;

/// The most bytes of a chunk before its data: header, offset and, of a hole, length.
const BEGINNING_MAX: usize = CHUNK_LENGTH + 12;

/// The most chunks of a piece of a read; the rest is one chunk of data.
const RUNS_MAX: usize = 8;

/// The limit for the headers of a reply, or of a piece of one, in bytes.
pub const BEGINNINGS: usize = RUNS_MAX * BEGINNING_MAX;

/// The longest error message, in bytes; the rest is cut off.
const MESSAGE_MAX: usize = BEGINNINGS - CHUNK_LENGTH - 6 - 8;

/// A chunk's header.
#[must_use]
pub fn header(flags: u16, kind: u16, cookie: u64, length: u32) -> [u8; CHUNK_LENGTH] {
    let mut bytes = [0; CHUNK_LENGTH];
    bytes[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// The space for the headers of one reply, filled from its start, and the list of segments to send.
pub struct Reply<'a> {
    room: Segment,
    used: usize,
    list: &'a mut Segments,
    cookie: u64,
}

impl<'a> Reply<'a> {
    /// An empty one; `room` has [`BEGINNINGS`] bytes.
    pub fn new(room: Segment, list: &'a mut Segments, cookie: u64) -> Self {
        list.clear();
        Self { room, used: 0, list, cookie }
    }

    /// Adds bytes to send as they are.
    pub fn bytes(&mut self, bytes: &[u8]) {
        let target = self.room.part(self.used, bytes.len());
        target.copy_from(bytes);
        self.used += bytes.len();
        self.list.push(target);
    }

    /// The first `length` bytes of this memory.
    pub fn memory(&mut self, memory: &Segments, length: usize) {
        self.list.push_from(memory, &mut Cursor::default(), length);
    }

    /// A chunk without a payload: success.
    pub fn done(&mut self) {
        self.bytes(&header(chunk::DONE, chunk::NONE, self.cookie, 0));
    }

    /// The header of a chunk with this much data, which must be added to the list next.
    pub fn data(&mut self, offset: u64, length: u32, last: bool) {
        let flags = if last { chunk::DONE } else { 0 };
        self.bytes(&header(flags, chunk::OFFSET_DATA, self.cookie, 8 + length));
        self.bytes(&offset.to_be_bytes());
    }

    fn hole(&mut self, offset: u64, length: u32, last: bool) {
        let flags = if last { chunk::DONE } else { 0 };
        self.bytes(&header(flags, chunk::OFFSET_HOLE, self.cookie, 12));
        self.bytes(&offset.to_be_bytes());
        self.bytes(&length.to_be_bytes());
    }

    /// A piece of a read: its data, and holes where it is zero.
    pub fn sparse(&mut self, offset: u64, data: &Segments, last: bool) {
        let (mut cursor, mut from, mut left) = (Cursor::default(), Cursor::default(), data.bytes());
        let (mut at, mut runs) = (offset, 0);
        while left > 0 {
            runs += 1;
            let mut zero = None;
            let mut length = 0;
            // The run: as long as units are alike.
            while length < left {
                let mut next = cursor;
                let unit = UNIT.min(left - length);
                let is_zero = runs < RUNS_MAX && take_zeroes(data, &mut next, unit);
                if zero.is_some_and(|zero| zero != is_zero) {
                    break;
                }
                if runs == RUNS_MAX {
                    length = left;
                    zero = Some(false);
                    break;
                }
                zero = Some(is_zero);
                if !is_zero {
                    next = cursor;
                    next.skip(data, unit);
                }
                (cursor, length) = (next, length + unit);
            }
            let last = last && length == left;
            if zero == Some(true) {
                self.hole(at, length as u32, last);
                from.skip(data, length);
            } else {
                self.data(at, length as u32, last);
                self.list.push_from(data, &mut from, length);
            }
            (at, left) = (at + length as u64, left - length);
        }
    }

    /// The error that ends a reply; `at` is its offset, if that is known.
    pub fn error(&mut self, number: u32, cause: Option<IoError>, at: Option<u64>) {
        let mut message = cause.map_or_else(|| words(number).to_owned(), |cause| cause.to_string());
        message.truncate(message.floor_char_boundary(MESSAGE_MAX));
        let length = 6 + message.len() + if at.is_some() { 8 } else { 0 };
        let kind = if at.is_some() { chunk::ERROR_OFFSET } else { chunk::ERROR };
        self.bytes(&header(chunk::DONE, kind, self.cookie, length as u32));
        self.bytes(&number.to_be_bytes());
        self.bytes(&(message.len() as u16).to_be_bytes());
        self.bytes(message.as_bytes());
        if let Some(at) = at {
            self.bytes(&at.to_be_bytes());
        }
    }
}

/// Whether the next `length` bytes are zeroes; the cursor is behind them then.
fn take_zeroes(data: &Segments, cursor: &mut Cursor, length: usize) -> bool {
    let mut left = length;
    while left > 0 {
        let Some(part) = cursor.next(data, left) else { return false };
        if !part.is_zero() {
            return false;
        }
        left -= part.len();
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nbd::{error, field};

    /// A client's view of the chunks: kind, payload, whether it is the last.
    fn chunks(mut bytes: &[u8], cookie: u64) -> Vec<(u16, Vec<u8>, bool)> {
        let mut chunks = Vec::new();
        while let Some((header, rest)) = bytes.split_first_chunk::<CHUNK_LENGTH>() {
            assert_eq!(u32::from_be_bytes(field(header, 0)), CHUNK_MAGIC);
            assert_eq!(u64::from_be_bytes(field(header, 8)), cookie);
            let (payload, rest) = rest.split_at(u32::from_be_bytes(field(header, 16)) as usize);
            let last = u16::from_be_bytes(field(header, 4)) == chunk::DONE;
            chunks.push((u16::from_be_bytes(field(header, 6)), payload.to_vec(), last));
            bytes = rest;
        }
        assert!(bytes.is_empty());
        chunks
    }

    fn sent(make: impl FnOnce(&mut Reply<'_>)) -> Vec<(u16, Vec<u8>, bool)> {
        let (mut room, mut list) = (vec![0; BEGINNINGS], Segments::default());
        // SAFETY: the room outlives the reply and the list.
        let segment = unsafe { Segment::new(room.as_mut_ptr(), BEGINNINGS) };
        make(&mut Reply::new(segment, &mut list, 77));
        let mut bytes = vec![0; list.bytes()];
        Cursor::default().gather(&list, &mut bytes);
        chunks(&bytes, 77)
    }

    #[test]
    fn errors_come_in_words_that_fit() {
        let chunks = sent(|reply| reply.error(error::EPERM, None, None));
        let words = words(error::EPERM);
        let expected = [&[0, 0, 0, 1, 0, words.len() as u8], words.as_bytes()].concat();
        assert_eq!(chunks, [(chunk::ERROR, expected, true)]);
        let chunks = sent(|reply| reply.error(error::EIO, Some(IoError::Lost), Some(1 << 40)));
        let (kind, payload, last) = &chunks[0];
        assert_eq!((*kind, *last), (chunk::ERROR_OFFSET, true));
        assert!(payload.ends_with(&(1u64 << 40).to_be_bytes()));
        assert!(IoError::Lost.to_string().as_bytes().starts_with(&payload[6..60]));
    }

    proptest! {
        #[test]
        fn a_piece_is_what_was_read_and_its_zeroes_are_holes(
            runs in prop::collection::vec((any::<bool>(), 1usize..9), 1..30),
            cut in 1usize..9, split in 1usize..40, last: bool,
        ) {
            let mut bytes = Vec::new();
            for (zero, blocks) in &runs {
                bytes.extend(vec![if *zero { 0 } else { 7 }; blocks * 512 * cut]);
            }
            let (mut list, base) = (Segments::default(), bytes.as_mut_ptr());
            for at in (0..bytes.len()).step_by(split * 512) {
                let length = (split * 512).min(bytes.len() - at);
                // SAFETY: inside `bytes`, which is only read from here on and outlives the list.
                list.push(unsafe { Segment::new(base.wrapping_add(at), length) });
            }
            let chunks = sent(|reply| reply.sparse(1 << 33, &list, last));
            prop_assert!(chunks.len() <= RUNS_MAX);
            let (mut read, count) = (Vec::new(), chunks.len());
            for (index, (kind, payload, ends)) in chunks.into_iter().enumerate() {
                prop_assert_eq!(ends, last && index + 1 == count);
                let at = u64::from_be_bytes(payload[..8].try_into().unwrap());
                prop_assert_eq!(at, (1 << 33) + read.len() as u64);
                match kind {
                    chunk::OFFSET_DATA => {
                        let unit = &payload[8..payload.len().min(8 + UNIT)];
                        let begins = unit.iter().any(|&byte| byte != 0) || index + 1 == RUNS_MAX;
                        prop_assert!(begins, "zeroes as data");
                        read.extend(&payload[8..]);
                    }
                    chunk::OFFSET_HOLE => {
                        let length = u32::from_be_bytes(payload[8..].try_into().unwrap());
                        read.resize(read.len() + length as usize, 0);
                    }
                    other => prop_assert!(false, "a chunk of type {other}"),
                }
            }
            prop_assert!(read == bytes);
        }
    }
}
