//! The numbers and structures of the NBD protocol, without any I/O (NetworkBlockDevice/nbd,
//! `doc/proto.md`). Everything is big-endian. [`crate::front_ends::nbd`] is a server, [`crate::storage::nbd`] a client.

use crate::stack::request::IoError;

/// "NBDMAGIC": the start of a server's greeting.
pub const NBD_MAGIC: u64 = 0x4e42_444d_4147_4943;

/// "IHAVEOPT": fixed newstyle, and the start of each option of a client.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;

/// The start of each answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// The start of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;

/// The start of each simple reply.
pub const REPLY_MAGIC: u32 = 0x6744_6698;

/// The start of each chunk of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// The length of a chunk's header, without its payload.
pub const CHUNK_LENGTH: usize = 20;

/// The length of a request, without a write's data.
pub const REQUEST_LENGTH: usize = 28;

/// The length of a simple reply, without a read's data.
pub const REPLY_LENGTH: usize = 16;

/// The smallest block that a request may have, in bytes.
pub const BLOCK_MIN: u32 = 512;

/// The preferred block, in bytes: an encrypted sector.
pub const BLOCK_PREFERRED: u32 = 4096;

/// The most data of a request, in bytes: the size that clients may use where nothing was negotiated.
pub const BLOCK_MAX: u32 = 32 * 1024 * 1024;

/// Flags of both sides in the handshake.
pub mod handshake {
    /// Both: fixed newstyle.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// Both: no 124 zeroes after the answer to [`super::option::EXPORT_NAME`].
    pub const NO_ZEROES: u16 = 2;
}

/// The options of a client.
pub mod option {
    /// Use this export, or end; cannot be refused otherwise.
    pub const EXPORT_NAME: u32 = 1;
    /// End.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export, and use it.
    pub const GO: u32 = 7;
    /// Answer reads in chunks, and errors with messages.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose the contexts for [`super::command::BLOCK_STATUS`].
    pub const SET_META_CONTEXT: u32 = 10;
}

/// The answers of a server to an option.
pub mod option_reply {
    /// Done; nothing follows.
    pub const ACK: u32 = 1;
    /// An export.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// A context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in the type of every answer that refuses.
    pub const ERROR: u32 = 1 << 31;
    /// The option is unknown.
    pub const ERROR_UNSUPPORTED: u32 = (1 << 31) + 1;
    /// The option makes no sense.
    pub const ERROR_INVALID: u32 = (1 << 31) + 3;
    /// There is no such export.
    pub const ERROR_UNKNOWN: u32 = (1 << 31) + 6;
    /// The request is too large.
    pub const ERROR_TOO_BIG: u32 = (1 << 31) + 9;
}

/// The kinds of information about an export.
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// Sizes of blocks.
    pub const BLOCK_SIZE: u16 = 3;
}

/// The capabilities of an export.
pub mod transmission {
    /// The flags are valid.
    pub const HAS_FLAGS: u16 = 1;
    /// It is read-only.
    pub const READ_ONLY: u16 = 1 << 1;
    /// It supports flush.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// It supports forced unit access.
    pub const SEND_FUA: u16 = 1 << 3;
    /// It supports trim.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// It supports write-zeroes.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// A read can be asked for in one chunk.
    pub const SEND_DF: u16 = 1 << 7;
    /// A flush on one connection covers what was answered on all of them.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Write-zeroes can be refused if it is not fast.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// The commands of requests.
pub mod command {
    /// Read data from the disk.
    pub const READ: u16 = 0;
    /// Write data to the disk.
    pub const WRITE: u16 = 1;
    /// Disconnect; it is not answered.
    pub const DISCONNECT: u16 = 2;
    /// Make durable.
    pub const FLUSH: u16 = 3;
    /// Discard data.
    pub const TRIM: u16 = 4;
    /// Write zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Describe allocation and changes.
    pub const BLOCK_STATUS: u16 = 7;
}

/// The flags of commands.
pub mod command_flag {
    /// Durable before it is answered.
    pub const FUA: u16 = 1;
    /// Write-zeroes that must keep their space allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// A read whose data comes in one chunk.
    pub const DF: u16 = 1 << 2;
    /// A block status of one extent a context.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Write-zeroes that must be refused if the zeroes would have to be written.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// The flags and types of chunks.
pub mod chunk {
    /// The last chunk of its reply.
    pub const DONE: u16 = 1;
    /// Set in the type of every chunk that tells of an error.
    pub const ERRORS: u16 = 1 << 15;
    /// No payload.
    pub const NONE: u16 = 0;
    /// An offset, and data.
    pub const OFFSET_DATA: u16 = 1;
    /// An offset, and the length of the zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// A context, and its extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// An error, and a message.
    pub const ERROR: u16 = (1 << 15) + 1;
    /// An error, a message, and its offset.
    pub const ERROR_OFFSET: u16 = (1 << 15) + 2;
}

/// The flags of extents.
pub mod extent {
    /// `base:allocation`: nothing is allocated.
    pub const HOLE: u32 = 1;
    /// `base:allocation`: it reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
    /// `qemu:dirty-bitmap:`: it changed.
    pub const DIRTY: u32 = 1;
}

/// The error numbers of replies.
pub mod error {
    /// The disk is read-only.
    pub const EPERM: u32 = 1;
    /// The datastore failed.
    pub const EIO: u32 = 5;
    /// The request makes no sense.
    pub const EINVAL: u32 = 22;
    /// No space, or beyond the end of the disk.
    pub const ENOSPC: u32 = 28;
    /// It would not be fast.
    pub const ENOTSUP: u32 = 95;
    /// The filter is stopping.
    pub const ESHUTDOWN: u32 = 108;
}

/// The message for an error number of [`error`].
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

/// The error number for an error.
#[must_use]
pub fn number(error: IoError) -> u32 {
    match error {
        IoError::OutOfRange => error::EINVAL,
        IoError::ReadOnly => error::EPERM,
        IoError::NoSpace => error::ENOSPC,
        IoError::Scattered
        | IoError::Truncated
        | IoError::Lost
        | IoError::Disconnected
        | IoError::Stalled
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
    /// The client's own number for it.
    pub cookie: u64,
    /// The offset, in bytes.
    pub offset: u64,
    /// The length, in bytes.
    pub length: u32,
}

impl Request {
    /// Parses one; none if it does not start like a request.
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

    /// Its bytes.
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

/// A simple reply; `error` is 0 on success, and then a read's data follows.
#[must_use]
pub fn reply(cookie: u64, error: u32) -> [u8; REPLY_LENGTH] {
    let mut bytes = [0; REPLY_LENGTH];
    bytes[..4].copy_from_slice(&REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// `N` bytes of a structure of a fixed length that covers them.
pub(crate) fn field<const L: usize, const N: usize>(bytes: &[u8; L], at: usize) -> [u8; N] {
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
