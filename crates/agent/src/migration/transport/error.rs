//! Why a migration's transport failed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use uuid::Uuid;
use vmseal_seal::frame::FrameError;
use vmseal_seal::wire::HelloError;

use super::{HANDSHAKE_TIMEOUT, MESSAGE_MAX, STALL_TIMEOUT};
use crate::migration::placement::PlacementError;

/// Why a session, or a stream of it, failed. Cheap to clone: everybody who waits gets the first one.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TransportError {
    /// The address to listen at.
    #[error("the migration port cannot be opened at {address}: {error}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The error.
        error: Arc<io::Error>,
    },
    /// The other host could not be reached.
    #[error("the other host cannot be reached at {address}: {error}")]
    Connect {
        /// Its address.
        address: SocketAddr,
        /// The error.
        error: Arc<io::Error>,
    },
    /// The other host closed the connection in the handshake: it does not know the migration, or this host did not prove that it
    /// has its key, or the stream was taken before.
    #[error("the other host refused stream {stream} of the migration")]
    Refused {
        /// The stream.
        stream: u16,
    },
    /// The handshake took too long.
    #[error("stream {stream}: the handshake took more than {} s", HANDSHAKE_TIMEOUT.as_secs())]
    HandshakeTimeout {
        /// The stream.
        stream: u16,
    },
    /// What the other host said in the handshake.
    #[error("stream {stream}: the other host is not the one of this migration: {error}")]
    Hello {
        /// The stream.
        stream: u16,
        /// What was wrong.
        error: Arc<HelloError>,
    },
    /// The migration is expected already.
    #[error("migration {0} is expected already; a spec serves one session")]
    AlreadyExpected(Uuid),
    /// Not every stream has come.
    #[error("of {streams} streams of migration {migration}, {came} have come within {seconds} s")]
    NotConnected {
        /// The migration.
        migration: Uuid,
        /// How many there are.
        streams: u16,
        /// How many have come.
        came: u16,
        /// The time that they had, in seconds.
        seconds: u64,
    },
    /// A frame that is damaged, replayed, out of order, too long, or missing.
    #[error("stream {stream}: {error}")]
    Frame {
        /// The stream.
        stream: u16,
        /// What is wrong.
        error: FrameError,
    },
    /// A frame of a kind that has no place on this stream.
    #[error("stream {stream}: a frame of kind {kind} has no place there")]
    Kind {
        /// The stream.
        stream: u16,
        /// The kind's number.
        kind: u8,
    },
    /// A frame that does not hold what it says.
    #[error("stream {stream}: what a frame holds cannot be decompressed")]
    Compressed {
        /// The stream.
        stream: u16,
    },
    /// What comes cannot be placed in memory.
    #[error("stream {stream}: {error}")]
    Placement {
        /// The stream.
        stream: u16,
        /// Why.
        error: PlacementError,
    },
    /// Nothing was taken or answered for too long.
    #[error(
        "stream {stream}: the other host has taken nothing for {} s",
        STALL_TIMEOUT.as_secs()
    )]
    Stalled {
        /// The stream.
        stream: u16,
    },
    /// The connection broke.
    #[error("stream {stream}: the connection to the other host is lost: {error}")]
    Lost {
        /// The stream.
        stream: u16,
        /// The error.
        error: Arc<io::Error>,
    },
    /// The local socket of a bridge.
    #[error("stream {stream}: the local socket that it carries failed: {error}")]
    Local {
        /// The stream.
        stream: u16,
        /// The error.
        error: Arc<io::Error>,
    },
    /// A message that does not fit.
    #[error("stream {stream}: a message of {length} bytes; at most {MESSAGE_MAX} are allowed")]
    MessageTooLong {
        /// The stream.
        stream: u16,
        /// Its length.
        length: usize,
    },
    /// A message that is none of those that were to come.
    #[error("stream {stream}: a message cannot be read: {error}")]
    Message {
        /// The stream.
        stream: u16,
        /// What is wrong.
        error: Arc<serde_json::Error>,
    },
    /// No message came, or none was taken, in time.
    #[error("stream {stream}: the other host was silent for {} s", within.as_secs_f32())]
    Silent {
        /// The stream.
        stream: u16,
        /// The time that it had.
        within: std::time::Duration,
    },
    /// The end came where a message was to come.
    #[error("stream {stream}: the other host has ended it")]
    Ended {
        /// The stream.
        stream: u16,
    },
    /// This host dropped a stream without its end.
    #[error("stream {stream} was given up on this host before its end")]
    Abandoned {
        /// The stream.
        stream: u16,
    },
    /// Cancelled on this host.
    #[error("the migration was cancelled")]
    Cancelled,
    /// This host could not set up a stream.
    #[error("stream {stream} cannot be set up on this host: {error}")]
    Setup {
        /// The stream.
        stream: u16,
        /// The error.
        error: Arc<io::Error>,
    },
}

impl TransportError {
    /// Whether it says only that the other host is gone, takes nothing or has given up: why that is, the other host knows.
    #[must_use]
    pub fn is_of_other_host(&self) -> bool {
        match self {
            Self::Refused { .. }
            | Self::HandshakeTimeout { .. }
            | Self::NotConnected { .. }
            | Self::Stalled { .. }
            | Self::Lost { .. }
            | Self::Silent { .. }
            | Self::Ended { .. } => true,
            // One that is cut off looks so: what was changed on its way has another error.
            Self::Frame { error, .. } => matches!(error, FrameError::Truncated(_)),
            Self::Bind { .. }
            | Self::Connect { .. }
            | Self::Hello { .. }
            | Self::AlreadyExpected(_)
            | Self::Kind { .. }
            | Self::Compressed { .. }
            | Self::Placement { .. }
            | Self::Local { .. }
            | Self::MessageTooLong { .. }
            | Self::Message { .. }
            | Self::Abandoned { .. }
            | Self::Cancelled
            | Self::Setup { .. } => false,
        }
    }

    /// Whether it follows from what this host has done with its end: who has done it says why.
    #[must_use]
    pub fn is_of_this_end(&self) -> bool {
        matches!(self, Self::Local { .. } | Self::Abandoned { .. } | Self::Cancelled)
    }

    /// What an error of reading from or writing to a connection means.
    pub(super) fn of_connection(stream: u16, error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::TimedOut => Self::Stalled { stream },
            _ => Self::Lost { stream, error: Arc::new(error) },
        }
    }

    pub(super) fn frame(stream: u16) -> impl FnOnce(FrameError) -> Self {
        move |error| Self::Frame { stream, error }
    }

    pub(super) fn hello(stream: u16) -> impl FnOnce(HelloError) -> Self {
        move |error| Self::Hello { stream, error: Arc::new(error) }
    }

    pub(super) fn setup(stream: u16) -> impl FnOnce(io::Error) -> Self {
        move |error| Self::Setup { stream, error: Arc::new(error) }
    }
}
