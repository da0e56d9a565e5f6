//! The user on the other side of a unix socket.

use std::os::unix::net::UnixStream;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Why the peer may not connect.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// It runs as another user.
    #[error("process {pid} of user {uid} may not connect here, only user {allowed} may")]
    User {
        /// Its user.
        uid: u32,
        /// Its process.
        pid: i32,
        /// The user that may connect.
        allowed: u32,
    },
    /// The kernel does not say.
    #[error("the kernel does not say who connects: {0}")]
    Unknown(#[from] nix::Error),
}

/// Checks that the peer runs as user `allowed` (SO_PEERCRED: when it connected).
///
/// # Errors
/// [`PeerError`].
pub fn check(stream: &UnixStream, allowed: u32) -> Result<(), PeerError> {
    let peer = getsockopt(stream, PeerCredentials)?;
    if peer.uid() == allowed {
        return Ok(());
    }
    Err(PeerError::User { uid: peer.uid(), pid: peer.pid(), allowed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_allowed_user_gets_in() {
        let (one, _other) = UnixStream::pair().unwrap();
        let own = nix::unistd::geteuid().as_raw();
        assert!(check(&one, own).is_ok());
        assert!(matches!(check(&one, own + 1), Err(PeerError::User { uid, .. }) if uid == own));
    }
}
