//! Connections to `vmseal-rbd` that a filter gets beside raw images of a pool: what it reads and writes then goes through memory that both
//! share, and not through FUSE (docs/decisions/263). Without one the filter uses the file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr};

use crate::mounts::{pool_of, served_by_now};

/// The connections for a filter's images, by the numbers of the images' descriptors.
#[derive(Debug, Default)]
pub(super) struct Channels(BTreeMap<RawFd, OwnedFd>);

impl Channels {
    /// Connects for each of these images, which stay open as long as this is used, where `vmseal-rbd` serves it. Blocks as opening
    /// them does.
    pub(super) fn of<'a>(images: impl IntoIterator<Item = &'a File>) -> Self {
        let numbered = |image: &'a File| Some((image.as_raw_fd(), connected(image)?));
        Self(images.into_iter().filter_map(numbered).collect())
    }

    /// Whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// That of an image.
    pub(super) fn beside(&self, image: &File) -> Option<BorrowedFd<'_>> {
        self.0.get(&image.as_raw_fd()).map(AsFd::as_fd)
    }

    /// All of them.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.values().map(AsFd::as_fd)
    }
}

/// The same for an image alone, of a disk with these layers: one that has layers is used as a file.
pub fn of_disk(image: &File, layers: &[File]) -> Option<OwnedFd> {
    if layers.is_empty() { connected(image) } else { None }
}

/// A connection for an image to the process that serves it; none where that is the kernel, or takes none.
fn connected(image: &File) -> Option<OwnedFd> {
    let mounted = pool_of(image).unwrap_or_else(|error| {
        tracing::warn!(%error, "where an image is mounted is not known: it is used as a file");
        None
    })?;
    // The disks' locks are held, so one that hangs is not waited for.
    let served_by = served_by_now(&mounted).unwrap_or_else(|error| {
        tracing::warn!(path = %mounted.display(), %error, "vmseal-rbd does not say where its socket is: an image of its pool is used as a file");
        None
    });
    let Some(socket) = served_by.and_then(|it| it.channel) else {
        tracing::debug!(path = %mounted.display(), "vmseal-rbd has no socket for filters");
        return None;
    };
    connect(Path::new(&socket))
        .inspect_err(|error| {
            tracing::warn!(
                path = %mounted.display(), socket, %error,
                "vmseal-rbd cannot be connected to: an image of its pool is used as a file, which takes more CPU time"
            );
        })
        .ok()
}

/// Connects, or fails at once: the server has as many as it takes, or does not take them now.
fn connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?;
    socket::connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    // The flag is of the open socket, so the filter would have it, too.
    let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
    fcntl(&socket, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(socket)
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::OpenOptionsExt;
    use std::sync::mpsc;

    use nix::sys::socket::{Backlog, bind, listen};

    use super::*;
    use crate::storage::remount::tests::Hung;
    use crate::timed::SHORT_TIMEOUT;

    /// As if `vmseal-rbd` served this image.
    pub(in crate::filter) fn beside(image: &File) -> Channels {
        let (ours, _) = std::os::unix::net::UnixStream::pair().unwrap();
        Channels(BTreeMap::from([(image.as_raw_fd(), ours.into())]))
    }

    #[test]
    fn an_image_that_vmseal_rbd_does_not_serve_has_no_channel() {
        let image = tempfile::tempfile().unwrap();
        let channels = Channels::of([&image]);
        assert!(channels.beside(&image).is_none() && channels.descriptors().next().is_none());
        assert!(of_disk(&image, &[]).is_none());
    }

    #[test]
    fn a_mount_that_hangs_is_not_waited_for() {
        let Some(hung) = Hung::new() else { return };
        // Nobody can open a file there, and the root is found without asking who serves it.
        let mut options = File::options();
        let image = options.read(true).custom_flags(libc::O_PATH).open(hung.place()).unwrap();
        assert!(pool_of(&image).unwrap().is_some());
        let (answer, answers) = mpsc::channel();
        std::thread::spawn(move || answer.send(connected(&image).is_none()));
        // Far more than it takes.
        assert!(answers.recv_timeout(SHORT_TIMEOUT * 5).unwrap());
    }

    #[test]
    fn a_connection_is_made_or_refused_at_once_and_waits_for_messages_as_usual() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool.sock");
        assert_eq!(connect(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let flags = SockFlag::SOCK_CLOEXEC;
        let server = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).unwrap();
        bind(server.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
        assert_eq!(connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        listen(&server, Backlog::new(0).unwrap()).unwrap();
        let first = connect(&path).unwrap();
        let flags = OFlag::from_bits_retain(fcntl(&first, FcntlArg::F_GETFL).unwrap());
        assert!(!flags.contains(OFlag::O_NONBLOCK), "{flags:?}");
        // Nobody takes connections, so there is no room for another one; it is not waited for.
        let mut made = vec![first];
        let refused = loop {
            match connect(&path) {
                Ok(another) if made.len() < 8 => made.push(another),
                other => break other,
            }
        };
        assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
