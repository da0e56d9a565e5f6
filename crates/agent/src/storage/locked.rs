//! Opens disk files and locks each one (F_OFD_SETLK on the whole file): one writer, or several readers. A process
//! that inherits the open file holds its lock too.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::file_error::failed;

/// How long a lock may stay after its holder has died: the kernel finishes its requests first.
const LOCK_TIMEOUT: Duration = Duration::from_secs(3);

/// The pause between attempts.
const LOCK_INTERVAL: Duration = Duration::from_millis(50);

fn in_use(path: &Path) -> Problem {
    let what = format!(
        "{} is in use: another process holds its lock. End the VM or the tool that works on it",
        path.display()
    );
    Problem::new(ErrorCode::InUse, what)
}

/// How often a file is made that another host takes for debris before it is locked.
const MAKE_ATTEMPTS: usize = 3;

/// Makes a file that only this user can access.
///
/// # Errors
/// Those of the file system; `AlreadyExists` where something has the name, also a link.
pub fn make(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Makes a file as [`make`] does, and locks it.
///
/// # Errors
/// `in-use`, or those of the file system.
pub fn make_locked(path: &Path) -> Result<File, Problem> {
    for _ in 0..MAKE_ATTEMPTS {
        let file = make(path).map_err(|error| failed(path, "made", &error))?;
        if !lock(&file, Access::Write).map_err(|error| failed(path, "locked", &error))? {
            return Err(in_use(path));
        }
        // A host removes a file only while it holds the file's lock and the file still has its name. So the file keeps its
        // name from now on, or was removed before it was locked.
        let made = file.metadata().map_err(|error| failed(path, "read", &error))?;
        match path.symlink_metadata() {
            Ok(there) if (there.dev(), there.ino()) == (made.dev(), made.ino()) => return Ok(file),
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(failed(path, "read", &error)),
        }
    }
    Err(in_use(path))
}

/// The access to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Reading; locked against writers.
    Read,
    /// Reading and writing; locked against all others.
    Write,
    /// Reading and writing without a lock, beside the process that serves the VM's own guest and holds it: for headers,
    /// which only the agent writes.
    BesideGuest,
    /// Reading without a lock, beside the process that serves the VM's guest and holds it, on this host or another one: an image in a
    /// pool of Ceph that another host has open to be written is not opened here to be written, with a lock or without.
    ReadBesideGuest,
}

impl Access {
    /// Whether the file is opened to be written, too.
    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::BesideGuest)
    }
}

/// Opens a regular file and locks it; none when there is no such file. Waits for a lock that may be a dead
/// process'.
///
/// # Errors
/// `in-use` when another process has it; `damaged` when it is not a regular file.
pub fn open_locked(path: &Path, access: Access) -> Result<Option<File>, Problem> {
    let give_up = Instant::now() + LOCK_TIMEOUT;
    loop {
        match open_once(path, access) {
            Ok(file) => return Ok(file),
            Err(problem) if problem.code == ErrorCode::InUse && Instant::now() < give_up => {
                std::thread::sleep(LOCK_INTERVAL);
            }
            Err(problem) => return Err(problem),
        }
    }
}

/// The same, without waiting for a lock.
///
/// # Errors
/// As [`open_locked`].
pub fn open_once(path: &Path, access: Access) -> Result<Option<File>, Problem> {
    let opened = OpenOptions::new()
        .read(true)
        .write(access.writes())
        // Do not follow a link, and do not block on a pipe.
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => return Err(irregular(path)),
        // An image in a pool of Ceph, of which another host has the lock.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => return Err(in_use(path)),
        Err(error) => return Err(failed(path, "opened", &error)),
    };
    let metadata = file.metadata().map_err(|error| failed(path, "read", &error))?;
    if !metadata.is_file() {
        return Err(irregular(path));
    }
    if !lock(&file, access).map_err(|error| failed(path, "locked", &error))? {
        return Err(in_use(path));
    }
    // Another file may have been put in its place between opening and locking.
    match path.symlink_metadata() {
        Ok(there) if (there.dev(), there.ino()) == (metadata.dev(), metadata.ino()) => {
            Ok(Some(file))
        }
        Ok(_) => Err(in_use(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(path, "read", &error)),
    }
}

fn irregular(path: &Path) -> Problem {
    Problem::new(
        ErrorCode::Damaged,
        format!(
            "{} is not a regular file: somebody has changed the datastore. Put the image back",
            path.display()
        ),
    )
}

/// Locks a file that is open for writing and is passed to the process that has the disk, as a reader locks it. The next
/// process that writes it then waits until the kernel has finished the requests of this one. A lock against all others is that of the
/// process itself, which then writes by the descriptor that it has (docs/decisions/244).
///
/// # Errors
/// Those of the file system.
pub fn lock_for_successors(file: &File) -> io::Result<()> {
    lock(file, Access::Read).map(drop)
}

/// Changes the exclusive lock of an open file to a shared one. An exclusive lock is refused to others as long as anybody has a shared one.
/// A copy of another process' descriptor is the same open file.
///
/// # Errors
/// Those of the file system; `WouldBlock` where another process has it alone.
pub fn share_lock(file: &File) -> io::Result<()> {
    if lock(file, Access::Read)? { Ok(()) } else { Err(io::ErrorKind::WouldBlock.into()) }
}

/// Locks an open file as a whole; false when another process has a lock.
fn lock(file: &File, access: Access) -> io::Result<bool> {
    let kind = match access {
        Access::Read => libc::F_RDLCK,
        Access::Write => libc::F_WRLCK,
        Access::BesideGuest | Access::ReadBesideGuest => return Ok(true),
    };
    let whole = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    match fcntl(file, FcntlArg::F_OFD_SETLK(&whole)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_host_writes_is_read_without_its_lock_and_not_opened_to_be_written() {
        use std::os::unix::fs::FileExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let guest = make_locked(&path).unwrap();
        guest.write_all_at(b"guest", 0).unwrap();
        let in_use = open_once(&path, Access::Read).unwrap_err();
        assert_eq!(in_use.code, ErrorCode::InUse);
        let beside = open_once(&path, Access::ReadBesideGuest).unwrap().unwrap();
        let mut read = [0; 5];
        beside.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"guest");
        let refused = beside.write_all_at(b"other", 0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF), "{refused}");
        open_once(&path, Access::BesideGuest).unwrap().unwrap().write_all_at(b"agent", 0).unwrap();
    }

    #[test]
    fn who_is_to_write_a_file_next_waits_for_the_descriptor_that_writes_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("layer");
        let open = || OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let in_use =
            || open_once(&path, Access::Write).is_err_and(|it| it.code == ErrorCode::InUse);
        drop(make(&path).unwrap());
        // As a filter has a layer that it only reads until what is above it is merged into it.
        let read = open_once(&path, Access::Read).unwrap();
        let written = open();
        lock_for_successors(&written).unwrap();
        drop(read);
        assert!(in_use(), "the one that writes may still write");
        drop(written);
        assert!(!in_use());
        let all = open_once(&path, Access::Write).unwrap();
        lock_for_successors(&open()).unwrap();
        drop(all);
        assert!(!in_use(), "it was locked by what did not get the lock");
    }
}
