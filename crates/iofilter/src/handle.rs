//! Turns the handles in the configuration into open descriptors.
//!
//! An inherited descriptor is taken once: from then on it is ours, is not inherited further, and is
//! closed when it is no longer needed.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect, getsockopt, socket, sockopt,
};
use nix::sys::stat::{Mode, umask};
use vmseal_api::filter::Handle;
use vmseal_secret::{DEK_LEN, MemoryError, SecretBytes};

/// The first descriptor that can be passed: 0 to 2 are standard input, output and error.
const FIRST: RawFd = 3;

/// How long a lock may outlive its holder.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// How often a lock is tried.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// Why a handle in the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HandleError {
    /// Named twice, or one of the standard descriptors.
    #[error("descriptor {0} is named twice, or is a standard one")]
    Taken(RawFd),
    /// Not open, or not what it should be.
    #[error("descriptor {fd} cannot be used: {error}")]
    Descriptor {
        /// Its number.
        fd: RawFd,
        /// Why.
        error: io::Error,
    },
    /// Not among those that came with a request, or named twice.
    #[error("descriptor {0} did not come with the request, or is named twice")]
    NotPassed(RawFd),
    /// A path, where nothing can be opened any more.
    #[error("{0} cannot be opened while the filter runs: pass its descriptor")]
    NoPaths(PathBuf),
    /// It cannot be opened.
    #[error("cannot open {path}: {error}")]
    Path {
        /// Its path.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// The path of a socket is in use.
    #[error("{0} exists already and is in use, or is not a socket")]
    InUse(PathBuf),
    /// Another process uses it.
    #[error("{0} is in use: another process holds its lock. End the filter or the VM that uses it")]
    Locked(PathBuf),
    /// A key file that others can read, or of the wrong length.
    #[error(
        "key file {0} must be a file of {DEK_LEN} bytes that nobody but its owner can read (mode 0600)"
    )]
    KeyFile(PathBuf),
    /// A key's memory cannot be mapped.
    #[error("the key cannot be taken: {0}")]
    Key(#[from] MemoryError),
}

/// A socket that serves a VMM.
#[derive(Debug)]
pub enum Socket {
    /// Listening: any peer that connects is served.
    Listening(UnixListener),
    /// Connected: its one peer is served.
    Connected(UnixStream),
    /// Connected by another process before that closes its end of a pipe.
    Connecting(UnixStream, OwnedFd),
}

/// Opens handles, each descriptor once.
#[derive(Debug, Default)]
pub struct Handles {
    taken: HashSet<RawFd>,
    /// Those that came with a request: only they can be named, by their place.
    passed: Option<Vec<Option<OwnedFd>>>,
}

impl Handles {
    /// The descriptors that came with a request.
    #[must_use]
    pub fn passed(descriptors: Vec<OwnedFd>) -> Self {
        let passed = Some(descriptors.into_iter().map(Some).collect());
        Self { taken: HashSet::new(), passed }
    }

    /// Has a descriptor that came with a request be used no more where there is another one `instead` of it.
    ///
    /// # Errors
    /// Those of `instead`.
    pub fn exchange(
        &mut self,
        instead: impl Fn(&OwnedFd) -> io::Result<Option<OwnedFd>>,
    ) -> io::Result<()> {
        for passed in self.passed.iter_mut().flatten().flatten() {
            if let Some(other) = instead(passed)? {
                *passed = other;
            }
        }
        Ok(())
    }

    /// A file.
    ///
    /// # Errors
    /// [`HandleError`].
    pub fn file(&mut self, handle: &Handle, write: bool) -> Result<OwnedFd, HandleError> {
        match handle {
            Handle::Fd(fd) => self.inherited(*fd),
            Handle::Path(path) => {
                self.may_open(path).and_then(|()| open(path, write)).map(Into::into)
            }
        }
    }

    /// A disk's image, or another file that no other process may use meanwhile: [`Handles::file`], locked.
    ///
    /// # Errors
    /// [`HandleError`]; [`HandleError::Locked`] when another process uses it.
    pub fn image(&mut self, handle: &Handle, write: bool) -> Result<OwnedFd, HandleError> {
        let file = self.file(handle, write)?;
        lock_if_path(&file, handle, write)?;
        Ok(file)
    }

    /// A disk's key: an inherited `memfd_secret`, or (to start a filter by hand) a file of raw bytes.
    ///
    /// # Errors
    /// [`HandleError`].
    pub fn key(&mut self, handle: &Handle) -> Result<SecretBytes, HandleError> {
        match handle {
            Handle::Fd(fd) => Ok(SecretBytes::from_memfd(self.inherited(*fd)?, DEK_LEN)?),
            Handle::Path(path) => self.may_open(path).and_then(|()| key_file(path)),
        }
    }

    /// A stream socket that somebody has connected, of any family; at a path, a server that listens there.
    ///
    /// # Errors
    /// [`HandleError`].
    pub fn stream(&mut self, handle: &Handle) -> Result<OwnedFd, HandleError> {
        match handle {
            Handle::Fd(number) => {
                let fd = self.inherited(*number)?;
                let wrong = match getsockopt(&fd, sockopt::SockType) {
                    Ok(SockType::Stream) => return Ok(fd),
                    Ok(_) => io::Error::new(io::ErrorKind::InvalidInput, "not a stream socket"),
                    Err(error) => error.into(),
                };
                Err(HandleError::Descriptor { fd: *number, error: wrong })
            }
            Handle::Path(path) => {
                self.may_open(path)?;
                let failed = |error| HandleError::Path { path: path.into(), error };
                UnixStream::connect(path).map(Into::into).map_err(failed)
            }
        }
    }

    /// A unix socket for sequenced packets that somebody has connected; at a path, a server that listens there.
    ///
    /// # Errors
    /// [`HandleError`].
    pub fn packets(&mut self, handle: &Handle) -> Result<OwnedFd, HandleError> {
        match handle {
            Handle::Fd(number) => {
                let fd = self.inherited(*number)?;
                let wrong = match getsockopt(&fd, sockopt::SockType) {
                    Ok(SockType::SeqPacket) => return Ok(fd),
                    Ok(_) => io::Error::new(io::ErrorKind::InvalidInput, "not a packet socket"),
                    Err(error) => error.into(),
                };
                Err(HandleError::Descriptor { fd: *number, error: wrong })
            }
            Handle::Path(path) => {
                self.may_open(path)?;
                let failed =
                    |error: Errno| HandleError::Path { path: path.into(), error: error.into() };
                connect_packets(path).map_err(failed)
            }
        }
    }

    /// A unix socket, connected or listening; one at a path listens, as with [`Handles::listener`].
    ///
    /// # Errors
    /// [`HandleError`].
    pub fn socket(&mut self, handle: &Handle) -> Result<Socket, HandleError> {
        let Handle::Fd(number) = handle else {
            return self.listener(handle).map(Socket::Listening);
        };
        let fd = self.inherited(*number)?;
        match getsockopt(&fd, sockopt::AcceptConn) {
            Ok(true) => Ok(Socket::Listening(UnixListener::from(fd))),
            Ok(false) => Ok(Socket::Connected(UnixStream::from(fd))),
            Err(error) => Err(HandleError::Descriptor { fd: *number, error: error.into() }),
        }
    }

    /// A unix socket that another process connects; see [`Socket::Connecting`].
    ///
    /// # Errors
    /// [`HandleError`].
    pub fn connecting(&mut self, socket: &Handle, pipe: &Handle) -> Result<Socket, HandleError> {
        let socket = UnixStream::from(self.file(socket, true)?);
        Ok(Socket::Connecting(socket, self.file(pipe, false)?))
    }

    /// A listening unix socket. One at a path is created with mode 0600; a left-over socket that nobody
    /// listens on is replaced.
    ///
    /// # Errors
    /// [`HandleError`].
    pub fn listener(&mut self, handle: &Handle) -> Result<UnixListener, HandleError> {
        match handle {
            Handle::Path(path) => listen(path),
            Handle::Fd(number) => {
                let fd = self.inherited(*number)?;
                if getsockopt(&fd, sockopt::AcceptConn).is_ok_and(|listens| listens) {
                    return Ok(UnixListener::from(fd));
                }
                let error = io::Error::new(io::ErrorKind::InvalidInput, "not a listening socket");
                Err(HandleError::Descriptor { fd: *number, error })
            }
        }
    }

    fn may_open(&self, path: &Path) -> Result<(), HandleError> {
        if self.passed.is_none() { Ok(()) } else { Err(HandleError::NoPaths(path.into())) }
    }

    /// An inherited descriptor.
    ///
    /// # Errors
    /// [`HandleError`]: not open, or taken already.
    pub fn inherited(&mut self, fd: RawFd) -> Result<OwnedFd, HandleError> {
        if let Some(passed) = &mut self.passed {
            let place = usize::try_from(fd).ok().and_then(|place| passed.get_mut(place));
            return place.and_then(Option::take).ok_or(HandleError::NotPassed(fd));
        }
        if fd < FIRST || !self.taken.insert(fd) {
            return Err(HandleError::Taken(fd));
        }
        // SAFETY: F_GETFD only asks whether the number is open.
        if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
            return Err(HandleError::Descriptor { fd, error: io::Error::last_os_error() });
        }
        // SAFETY: it is open, passed to us by whoever started the process, and taken only once; this
        // happens before the process opens anything of its own.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        fcntl(&owned, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
            .map_err(|error| HandleError::Descriptor { fd, error: error.into() })?;
        Ok(owned)
    }
}

/// Locks a file that was opened by its path as agents lock images: against all others if it is to be written, else
/// against writers. An inherited file was locked by the process that passed it.
///
/// # Errors
/// [`HandleError::Locked`] when somebody has it.
pub fn lock_if_path(file: &OwnedFd, handle: &Handle, write: bool) -> Result<(), HandleError> {
    match handle {
        Handle::Path(path) => lock(file, path, write),
        Handle::Fd(_) => Ok(()),
    }
}

fn open(path: &Path, write: bool) -> Result<File, HandleError> {
    OpenOptions::new()
        .read(true)
        .write(write)
        .open(path)
        .map_err(|error| HandleError::Path { path: path.into(), error })
}

/// Locks an open file as a whole (the lock of docs/formats and crate agent's `home`). A process that was killed may
/// keep it a little longer: the kernel finishes its requests first.
fn lock(file: &OwnedFd, path: &Path, write: bool) -> Result<(), HandleError> {
    let kind = if write { libc::F_WRLCK } else { libc::F_RDLCK };
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        // Must be 0 for locks of open file descriptions.
        l_pid: 0,
    };
    let give_up = Instant::now() + LOCK_TIMEOUT;
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&whole)) {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN | Errno::EACCES) if Instant::now() < give_up => {
                std::thread::sleep(LOCK_INTERVAL);
            }
            Err(Errno::EAGAIN | Errno::EACCES) => return Err(HandleError::Locked(path.into())),
            Err(error) => {
                return Err(HandleError::Path { path: path.into(), error: error.into() });
            }
        }
    }
}

fn connect_packets(path: &Path) -> Result<OwnedFd, Errno> {
    let (family, kind) = (AddressFamily::Unix, SockType::SeqPacket);
    let socket = socket(family, kind, SockFlag::SOCK_CLOEXEC, None)?;
    connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
    Ok(socket)
}

fn key_file(path: &Path) -> Result<SecretBytes, HandleError> {
    let failed = |error| HandleError::Path { path: path.into(), error };
    let options = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let mut file = options.map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let private = metadata.is_file() && metadata.mode() & 0o077 == 0;
    if !private || metadata.len() != DEK_LEN as u64 {
        return Err(HandleError::KeyFile(path.into()));
    }
    let mut key = SecretBytes::zeroed(DEK_LEN)?;
    file.read_exact(key.expose_mut()).map_err(failed)?;
    Ok(key)
}

fn listen(path: &Path) -> Result<UnixListener, HandleError> {
    if let Ok(metadata) = path.symlink_metadata() {
        if !metadata.file_type().is_socket() || UnixStream::connect(path).is_ok() {
            return Err(HandleError::InUse(path.into()));
        }
        let removed = std::fs::remove_file(path);
        removed.map_err(|error| HandleError::Path { path: path.into(), error })?;
    }
    let before = umask(Mode::from_bits_truncate(0o177));
    let bound = UnixListener::bind(path);
    umask(before);
    let listener = bound.map_err(|error| HandleError::Path { path: path.into(), error })?;
    tracing::debug!(path = %path.display(), fd = listener.as_raw_fd(), "listening");
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_key_file_that_others_can_read_or_of_another_length_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        std::fs::write(&path, [7; DEK_LEN]).unwrap();
        let handle = Handle::Path(path.clone());
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let refused = Handles::default().key(&handle);
        assert!(matches!(refused, Err(HandleError::KeyFile(_))));
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(Handles::default().key(&handle).unwrap().expose(), [7; DEK_LEN]);
        std::fs::write(&path, [7; DEK_LEN + 1]).unwrap();
        assert!(matches!(Handles::default().key(&handle), Err(HandleError::KeyFile(_))));
    }

    #[test]
    fn an_image_at_a_path_is_one_writer_s_or_some_readers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, [7; 512]).unwrap();
        let handle = Handle::Path(path.clone());
        let open = |write| Handles::default().image(&handle, write);
        let writer = open(true).unwrap();
        for write in [true, false] {
            assert!(matches!(open(write), Err(HandleError::Locked(of)) if of == path));
        }
        drop(writer);
        // As on a file system that is mounted read-only.
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o400)).unwrap();
        let readers = [open(false).unwrap(), open(false).unwrap()];
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert!(matches!(open(true), Err(HandleError::Locked(_))));
        drop(readers);
        open(true).unwrap();
    }

    #[test]
    fn descriptors_that_are_not_open_or_named_twice_are_refused() {
        let mut handles = Handles::default();
        let closed = handles.file(&Handle::Fd(1_000_000), false);
        assert!(matches!(closed, Err(HandleError::Descriptor { .. })));
        let again = handles.file(&Handle::Fd(1_000_000), false);
        assert!(matches!(again, Err(HandleError::Taken(_))));
        assert!(matches!(handles.file(&Handle::Fd(1), false), Err(HandleError::Taken(1))));
    }

    #[test]
    fn a_left_over_socket_is_replaced_and_one_in_use_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let handle = Handle::Path(path.clone());
        let first = Handles::default().listener(&handle).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
        assert!(matches!(Handles::default().listener(&handle), Err(HandleError::InUse(_))));
        drop(first);
        assert!(Handles::default().listener(&handle).is_ok());
    }
}
