//! A disk that is exposed to an operator's tools: NBD connections, each carried as a stream of bytes from the
//! tool through the server to the agent, and one more stream that keeps the exposure open.

use std::fmt;
use std::time::Duration;

/// The client that holds a disk exposed sends this every [`HOLD_INTERVAL`].
pub const HOLD: u8 = b'.';

/// It sends this to end the exposure, and then reads until the end.
pub const LET_GO: u8 = b'q';

/// How often [`HOLD`] is sent.
pub const HOLD_INTERVAL: Duration = Duration::from_secs(10);

/// An agent that has not received it for so long takes the client for gone, and ends the exposure.
pub const HOLD_TIMEOUT: Duration = Duration::from_secs(45);

/// The kinds of stream of an exposure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposing {
    /// The exposure itself. It ends with this stream, or with [`LET_GO`]; [`HOLD`] keeps it open. The stream
    /// ends when everything is flushed and the disk is free; it carries the error text, if there was an
    /// error.
    Hold {
        /// Whether the disk may be changed.
        writable: bool,
    },
    /// A connection to the exposed disk: the filter's NBD.
    Connect,
}

impl Exposing {
    /// Its path below the API's root.
    #[cfg(feature = "client")]
    pub(crate) fn path(self, vm: impl fmt::Display, disk: impl fmt::Display) -> String {
        let connect = self == Self::Connect;
        let writable = self == Self::Hold { writable: true };
        format!("vms/{vm}/disks/{disk}/expose?connect={connect}&writable={writable}")
    }
}
