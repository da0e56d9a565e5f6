//! The numbers and structures of the NBD protocol, without any I/O (NetworkBlockDevice/nbd,
//! `doc/proto.md`). Everything is big-endian.

use crate::stack::request::IoError;

/// "NBDMAGIC": how a server begins.
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;

/// "IHAVEOPT": fixed newstyle, and each option of a client.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

/// How each answer to an option begins.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// How each request begins.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

/// How each simple reply begins.
pub const REPLY_MAGIC: u32 = 0x6744_6698;

/// How each chunk of a structured reply begins.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// The length of a chunk's header, without its payload.
pub const CHUNK_LENGTH: usize = 20;

/// The length of a request, without a write's data.
pub const REQUEST_LENGTH: usize = 28;

/// The length of a simple reply, without a read's data.
pub const REPLY_LENGTH: usize = 16;

/// The smallest block that a request may have, in bytes.
pub const BLOCK_MIN: u32 = 512;

/// The block that is best for us, in bytes: an encrypted sector.
pub const BLOCK_PREFERRED: u32 = 4096;

/// The most data of a request, in bytes: what clients may rely on where nothing was agreed.
pub const BLOCK_MAX: u32 = 32 * 1024 * 1024;

/// Flags of both sides in the handshake.
pub mod handshake {
    /// Both: fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// Both: no 124 zeroes behind the answer to [`super::option::EXPORT_NAME`].
    pub const NO_ZEROES: u16 = 2;
}

/// What a client asks before it reads or writes.
pub mod option {
    /// Go on with this export, or end; cannot be refused otherwise.
    pub const EXPORT_NAME: u32 = 1;
    /// End.
    pub const ABORT: u32 = 2;
    /// Name the exports.
    pub const LIST: u32 = 3;
    /// Tell of an export.
    pub const INFO: u32 = 6;
    /// Tell of an export, and go on with it.
    pub const GO: u32 = 7;
    /// Answer reads in chunks, and tell of errors in words.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name the contexts there are.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose the contexts that [`super::command::BLOCK_STATUS`] is to tell of.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// What a server answers to an option.
pub mod option_reply {
    /// Done; nothing follows.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// A context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is not known here.
    pub const ERROR_UNSUPPORTED: u32 = (1 << 31) + 1;
    /// The option makes no sense.
    pub const ERROR_INVALID: u32 = (1 << 31) + 3;
    /// There is no such export.
    pub const ERROR_UNKNOWN: u32 = (1 << 31) + 6;
    /// More is asked than can be.
    pub const ERROR_TOO_BIG: u32 = (1 << 31) + 9;
}

/// What can be told of an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Its proper name.
    pub const NAME: u16 = 1;
    /// Sizes of blocks.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod transmission {
    /// There are flags.
    pub const HAS_FLAGS: u16 = 1;
    /// Nothing can be changed.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flushes are understood.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Forced unit access is understood.
    pub const SEND_FUA: u16 = 1 << 3;
    /// Trim is understood.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Write-zeroes is understood.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Reads can be asked for in one chunk.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection is good for what was answered on all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Zeroes that are not fast can be refused.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// What a request can be.
pub mod command {
    /// Data from the disk.
    pub const READ: u16 = 0;
    /// Data to the disk.
    pub const WRITE: u16 = 1;
    /// The end; it is not answered.
    pub const DISCONNECT: u16 = 2;
    /// Make durable.
    pub const FLUSH: u16 = 3;
    /// Data that is no longer needed.
    pub const TRIM: u16 = 4;
    /// Data that reads as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// What is where.
    pub const BLOCK_STATUS: u16 = 7;
}

/// How a request is meant.
pub mod command_flag {
    /// Durable before it is answered.
    pub const FUA: u16 = 1;
    /// Write-zeroes that keep their space.
    pub const NO_HOLE: u16 = 1 << 1;
    /// A read whose data comes in one chunk.
    pub const DF: u16 = 1 << 2;
    /// A block status of one extent a context.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Write-zeroes that are refused if they would have to be written.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Flags and types of chunks.
pub mod chunk {
    /// It is the last one of its reply.
    pub const DONE: u16 = 1;
    /// Nothing but that.
    pub const NONE: u16 = 0;
    /// An offset, and data.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset, and how many zeroes there are.
    pub const OFFSET_HOLE: u16 = 2;
    /// A context, and its extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error, and a message.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// An error, a message, and where it was.
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// Flags of extents.
pub mod extent {
    /// `base:allocation`: nothing is allocated.
    pub const HOLE: u32 = 1;
    /// `base:allocation`: it reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
    /// `qemu:dirty-bitmap:`: it changed.
    pub const DIRTY: u32 = 1;
}

/// Error numbers of replies.
pub mod error {
    /// The disk is read-only.
    pub const EPERM: u32 = 1;
    /// The datastore failed.
    pub const EIO: u32 = 5;
    /// The request makes no sense.
    pub const EINVAL: u32 = 22;
    /// No space, or behind the end of the disk.
    pub const ENOSPC: u32 = 28;
    /// It would not be fast.
    pub const ENOTSUP: u32 = 95;
    /// We are about to end.
    pub const ESHUTDOWN: u32 = 108;
}

/// What an error number of [`error`] tells a client that takes words.
#[must_use]
pub fn words(number: u32) -> &'static str {
    match number {
        error::EPERM => "the disk is served read-only",
        error::EINVAL => {
            "the request is not understood, beyond the end of the disk, or not in whole 512-byte blocks"
        }
        error::ENOSPC => "the request is beyond the end of the disk, which cannot grow",
        error::ENOTSUP => "these zeroes would have to be written, which is not fast",
        error::ESHUTDOWN => "the filter is ending; connect again when it runs again",
        _ => "the datastore failed; the filter's log says more",
    }
}

/// The number that tells a client of an error.
#[must_use]
pub fn number(error: IoError) -> u32 {
    match error {
        IoError::OutOfRange => error::EINVAL,
        IoError::ReadOnly => error::EPERM,
        IoError::NoSpace => error::ENOSPC,
        IoError::Scattered
        | IoError::Truncated
        | IoError::Lost
        | IoError::Device(_)
        | IoError::Cipher
        | IoError::Damaged
        | IoError::Defect
        | IoError::Forgotten
        | IoError::Overload => error::EIO,
    }
}

/// A request as it was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// [`command_flag`]s.
    pub flags: u16,
    /// A [`command`].
    pub command: u16,
    /// What the client knows it by.
    pub cookie: u64,
    /// Where, in bytes.
    pub offset: u64,
    /// How much, in bytes.
    pub length: u32,
}

impl Request {
    /// Takes one apart; none if it does not begin as requests do.
    #[must_use]
    pub fn decode(bytes: &[u8; REQUEST_LENGTH]) -> Option<Self> {
        (u32::from_be_bytes(field(bytes, 0)) == REQUEST_MAGIC).then(|| Self {
            flags: u16::from_be_bytes(field(bytes, 4)),
            command: u16::from_be_bytes(field(bytes, 6)),
            cookie: u64::from_be_bytes(field(bytes, 8)),
            offset: u64::from_be_bytes(field(bytes, 16)),
            length: u32::from_be_bytes(field(bytes, 24)),
        })
    }

    /// As it is sent.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_LENGTH] {
        let mut bytes = [0; REQUEST_LENGTH];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }
}

/// A simple reply; `error` is 0 if all went well, and then a read's data follows.
#[must_use]
pub fn reply(cookie: u64, error: u32) -> [u8; REPLY_LENGTH] {
    let mut bytes = [0; REPLY_LENGTH];
    bytes[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// `N` bytes of a structure of a fixed length that covers them.
pub(super) fn field<const L: usize, const N: usize>(bytes: &[u8; L], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes[at + index])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_come_back_as_they_were_and_nothing_else_is_one(
            flags: u16, command: u16, cookie: u64, offset: u64, length: u32, damage in 0u32..,
        ) {
            let request = Request { flags, command, cookie, offset, length };
            let mut bytes = request.encode();
            prop_assert_eq!(Request::decode(&bytes), Some(request));
            bytes[..4].copy_from_slice(&damage.to_be_bytes());
            prop_assert_eq!(Request::decode(&bytes).is_some(), damage == REQUEST_MAGIC);
        }
    }

    #[test]
    fn a_request_and_a_reply_are_laid_out_as_the_document_has_it() {
        let bytes = [
            0x25, 0x60, 0x95, 0x13, 0, 1, 0, 6, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 1, 0, 0, 0, 0, 0,
            0, 0x10, 0,
        ];
        let request = Request::decode(&bytes).unwrap();
        assert_eq!((request.flags, request.command), (1, command::WRITE_ZEROES));
        assert_eq!((request.offset, request.length), (1 << 32, 4096));
        let expected = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 22, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(reply(request.cookie, error::EINVAL), expected);
    }
}
