//! The common parts of front ends: the disk as clients see it, and who may connect.

pub mod nbd;
pub mod peer;
pub mod vhost_user;

use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

use crate::disk::allocation::CurrentAllocation;
use crate::disk::size::CurrentSize;
use crate::disk::status::DiskState;

/// The disk that a front end serves, for the life of the process.
#[derive(Debug)]
pub struct ServedDisk {
    /// The disk's size.
    pub size: CurrentSize,
    /// Whether it is read-only.
    pub read_only: bool,
    /// The device id.
    pub serial: Arc<str>,
    /// The counters and the dirty bitmaps.
    pub state: Arc<DiskState>,
    /// How to find its holes.
    pub allocation: CurrentAllocation,
}

/// The next connection, of a process of user `peer_uid`; none if it failed or is refused.
///
/// # Errors
/// Errors of the listener, not of a single connection.
pub fn accept(listener: &UnixListener, peer_uid: u32) -> io::Result<Option<UnixStream>> {
    use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
    let stream = match listener.accept() {
        Ok((stream, _)) => stream,
        Err(error) if matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    if let Err(refusal) = peer::check(&stream, peer_uid) {
        tracing::warn!(%refusal, "a connection to the disk is refused");
        return Ok(None);
    }
    Ok(Some(stream))
}
