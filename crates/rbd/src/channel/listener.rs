//! The socket at which filters connect: agents do that for them, and pass the connection on.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, listen, socket,
};
use vmseal_channel::CONNECTIONS_MAX;

use crate::channel::connection;
use crate::channel::service::Service;

/// How many connections may wait to be taken.
const BACKLOG: i32 = 128;

/// After how long it is tried again where the system has no descriptor or memory for a connection.
const TRIED_AGAIN: Duration = Duration::from_secs(1);

/// The stack of a thread that serves a connection, in bytes: there may be many, and they call librbd.
const STACK: usize = 512 << 10;

/// The socket, which nobody serves yet.
pub struct Listener {
    socket: OwnedFd,
    path: String,
}

impl Listener {
    /// Makes it. A socket that another process has left there is replaced: the caller knows that none serves it.
    ///
    /// # Errors
    /// `AlreadyExists` where something else is there; those of the file system; `InvalidInput` where the path is too long for a socket
    /// or is no text.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let name = path.to_str().ok_or(io::ErrorKind::InvalidInput)?;
        match path.symlink_metadata() {
            Ok(there) if there.file_type().is_socket() => std::fs::remove_file(path)?,
            Ok(_) => {
                let what = "there is something that is no socket";
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let flags = SockFlag::SOCK_CLOEXEC;
        let made = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
        bind(made.as_raw_fd(), &UnixAddr::new(path)?)?;
        // Before anybody can connect.
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        listen(&made, Backlog::new(BACKLOG)?)?;
        Ok(Self { socket: made, path: name.to_owned() })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Takes connections in a thread of its own, until the file system is gone.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn serve(self, service: &Arc<Service>) -> io::Result<()> {
        let service = Arc::downgrade(service);
        let name = std::thread::Builder::new().name("channel".into());
        name.spawn(move || self.accept(&service)).map(drop)
    }

    fn accept(&self, service: &Weak<Service>) {
        // Each connection has a copy.
        let open = Arc::new(());
        loop {
            let connection = match accept4(self.socket.as_raw_fd(), SockFlag::SOCK_CLOEXEC) {
                // SAFETY: the kernel has just made it, and nobody else has its number.
                Ok(fd) => unsafe { OwnedFd::from_raw_fd(fd) },
                Err(Errno::EINTR | Errno::ECONNABORTED) => continue,
                Err(error) => {
                    tracing::warn!(%error, "a filter's connection is not taken");
                    std::thread::sleep(TRIED_AGAIN);
                    continue;
                }
            };
            if service.strong_count() == 0 {
                return;
            }
            if Arc::strong_count(&open) > CONNECTIONS_MAX {
                tracing::warn!(most = CONNECTIONS_MAX, "too many filters are connected");
                continue;
            }
            let (counted, service) = (Arc::clone(&open), Weak::clone(service));
            let name = std::thread::Builder::new().name("filter".into()).stack_size(STACK);
            let served = name.spawn(move || {
                connection::serve(connection, &service);
                drop(counted);
            });
            if let Err(error) = served {
                tracing::warn!(%error, "a filter's connection is not served: no thread");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_that_was_left_is_replaced_and_only_its_owner_connects() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mount.sock");
        for _ in 0..2 {
            let listener = Listener::bind(&path).unwrap();
            assert_eq!(Path::new(listener.path()), path);
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            let flags = SockFlag::SOCK_CLOEXEC;
            let client = socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
            let address = UnixAddr::new(&path).unwrap();
            nix::sys::socket::connect(client.as_raw_fd(), &address).unwrap();
        }
        let long = directory.path().join("x".repeat(120));
        Listener::bind(&long).err().unwrap();
        let other = directory.path().join("other.sock");
        std::fs::write(&other, "a record").unwrap();
        let refused = Listener::bind(&other).err().unwrap();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read(&other).unwrap(), b"a record");
    }
}
