//! A disk that is exposed to an operator's tools: NBD connections, each carried as a stream of bytes from
//! the tool over the server to the agent, and one stream more that holds the exposure open.

use std::fmt;
use std::time::Duration;

/// What whoever holds a disk exposed sends every [`HOLD_INTERVAL`].
pub const HOLD: u8 = b'.';

/// What it sends to end the exposure, and then reads until the end.
pub const LET_GO: u8 = b'q';

/// How often [`HOLD`] is sent.
pub const HOLD_INTERVAL: Duration = Duration::from_secs(10);

/// After how long without it an agent takes the holder for gone, and ends the exposure.
pub const HOLD_TIMEOUT: Duration = Duration::from_secs(45);

/// What is opened of a disk's exposure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposing {
    /// The exposure itself. It ends with this stream, or with [`LET_GO`]; [`HOLD`] keeps it. The stream ends
    /// when all is flushed and the disk is free; what is read from it is what went wrong, in words.
    Hold {
        /// Whether the disk may be changed.
        writable: bool,
    },
    /// A connection to the disk, which is being held exposed: NBD as the filter speaks it.
    Connect,
}

impl Exposing {
    /// Where it is asked for, below the API's root.
    #[cfg(feature = "client")]
    pub(crate) fn path(self, vm: impl fmt::Display, disk: impl fmt::Display) -> String {
        let connect = self == Self::Connect;
        let writable = self == Self::Hold { writable: true };
        format!("vms/{vm}/disks/{disk}/expose?connect={connect}&writable={writable}")
    }
}
