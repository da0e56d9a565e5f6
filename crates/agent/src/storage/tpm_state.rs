//! What a VM's TPM keeps, on the datastore: a directory beside the disk whose key it is encrypted under.
//!
//! ```text
//! <datastore>/<vm id>/<disk id>.tpm/tpm2-00.permall   what it keeps, as swtpm encrypts it
//! <datastore>/<vm id>/<disk id>.tpm/.lock             held by the one swtpm that uses it
//! ```
//! It is made before the disk gets its name: a disk without it has lost it. Who holds the lock of the disk's image has the directory, too. swtpm gets it as a descriptor. It replaces its file as
//! a whole, by a new one that is renamed.

use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use vmseal_api::atomic_file;
use vmseal_api::host::backup::TPM_STATE_MAX;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;

use crate::storage::file_error::failed;

/// The file in which a TPM 2.0 of swtpm's keeps all.
const STATE: &str = "tpm2-00.permall";

/// The most files that swtpm has in its directory, with room: one that has more is another's.
const FILES_MAX: usize = 16;

/// Makes an empty directory, for this user alone; none is the agent's. What an attempt before has left is removed.
///
/// # Errors
/// Those of the file system.
pub fn make(path: &Path, user: Option<u32>) -> Result<File, Problem> {
    remove(path)?;
    DirBuilder::new().mode(0o700).create(path).map_err(|error| failed(path, "made", &error))?;
    let directory = open_directory(path)?;
    own(&directory, user).map_err(|error| failed(path, "given to swtpm", &error))?;
    Ok(directory)
}

/// Makes durable what swtpm has written.
///
/// # Errors
/// `damaged` when it has written nothing; those of the file system.
pub fn flush(path: &Path, directory: &File) -> Result<(), Problem> {
    let Some(state) = inside(directory, STATE).map_err(|error| failed(path, "read", &error))?
    else {
        return Err(missing(path));
    };
    state
        .sync_all()
        .and_then(|()| directory.sync_all())
        .and_then(|()| atomic_file::flush_directory_of(path))
        .map_err(|error| failed(path, "flushed", &error))
}

/// Makes durable what the swtpm that uses this directory has written there. Blocks.
///
/// # Errors
/// As [`flush`].
pub fn flush_beside(path: &Path) -> Result<(), Problem> {
    flush(path, &open_directory(path)?)
}

/// Opens the directory of a TPM that is about to start, and gives what is in it to this user.
///
/// # Errors
/// `damaged` when what the TPM keeps is missing, or is no file; those of the file system.
pub fn open(path: &Path, user: Option<u32>) -> Result<File, Problem> {
    let directory = open_directory(path)?;
    let unread = |error: io::Error| failed(path, "read", &error);
    if inside(&directory, STATE).map_err(unread)?.is_none() {
        return Err(missing(path));
    }
    let entries = std::fs::read_dir(by_descriptor(&directory)).map_err(unread)?;
    for (index, entry) in entries.enumerate() {
        if index == FILES_MAX {
            let what = format!(
                "{} has more than {FILES_MAX} entries, and swtpm makes fewer: remove what is not swtpm's",
                path.display()
            );
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        let name = entry.map_err(unread)?.file_name();
        if let Some(file) = inside(&directory, &name.to_string_lossy()).map_err(unread)? {
            own_file(&file, user).map_err(|error| failed(path, "given to swtpm", &error))?;
        }
    }
    own(&directory, user).map_err(|error| failed(path, "given to swtpm", &error))?;
    Ok(directory)
}

/// What is kept there, as swtpm has encrypted it: all of one instant, as swtpm replaces its file as a whole. Blocks.
///
/// # Errors
/// `damaged` when it is missing, or more than a TPM keeps; those of the file system.
pub fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    let directory = open_directory(path)?;
    let unread = |error: io::Error| failed(path, "read", &error);
    let file = inside(&directory, STATE).map_err(unread)?.ok_or_else(|| missing(path))?;
    let mut state = Vec::new();
    file.take(TPM_STATE_MAX + 1).read_to_end(&mut state).map_err(unread)?;
    if state.len() as u64 <= TPM_STATE_MAX {
        return Ok(state);
    }
    let what = format!("{STATE} in {} has more than {}", path.display(), Size(TPM_STATE_MAX));
    Err(Problem::new(ErrorCode::Damaged, what))
}

/// Makes a directory with this in it, for this user alone; none is the agent's. It is not made durable. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn make_of(path: &Path, state: &[u8], user: Option<u32>) -> Result<File, Problem> {
    let directory = make(path, user)?;
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(by_descriptor(&directory).join(STATE))?;
        file.write_all(state)?;
        own_file(&file, user)
    };
    write().map_err(|error| failed(path, "written", &error))?;
    Ok(directory)
}

/// Has the file at `from` be what is kept in the directory at `path`, which is made where there is none. Returns whether there was
/// such a file. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn put(path: &Path, from: &Path) -> Result<bool, Problem> {
    if matches!(from.symlink_metadata(), Err(error) if error.kind() == io::ErrorKind::NotFound) {
        return Ok(false);
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(failed(path, "made", &error));
        }
        _ => {}
    }
    let directory = open_directory(path)?;
    let put = || {
        std::fs::rename(from, by_descriptor(&directory).join(STATE))?;
        directory.sync_all()?;
        atomic_file::flush_directory_of(path)
    };
    put().map_err(|error| failed(path, "restored", &error))?;
    Ok(true)
}

/// Removes it with all that is in it; does nothing when there is none.
///
/// # Errors
/// Those of the file system.
pub fn remove(path: &Path) -> Result<(), Problem> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        // swtpm makes a directory. Somebody else has put a file in its place, which must not keep the disk from being deleted.
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
            std::fs::remove_file(path).map_err(|error| failed(path, "removed", &error))
        }
        Err(error) => Err(failed(path, "removed", &error)),
        Ok(()) => {
            atomic_file::flush_directory_of(path).map_err(|error| failed(path, "removed", &error))
        }
    }
}

fn missing(path: &Path) -> Problem {
    let what = format!(
        "what the VM's TPM keeps is not there: {STATE} in {}. Restore that directory from a backup, of the same time as the VM's disks; a guest that has keys in its TPM would not start without it",
        path.display()
    );
    Problem::new(ErrorCode::Damaged, what)
}

fn open_directory(path: &Path) -> Result<File, Problem> {
    let opened =
        OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path);
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => missing(path),
        _ => failed(path, "opened", &error),
    })
}

fn by_descriptor(directory: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()))
}

/// A regular file in the directory; none when there is no such file, or it is of another kind.
fn inside(directory: &File, name: &str) -> io::Result<Option<File>> {
    let opened = OpenOptions::new()
        .read(true)
        // Who writes to the datastore decides what is there.
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(by_descriptor(directory).join(name));
    match opened {
        Ok(file) => Ok(file.metadata()?.is_file().then_some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Ok(None),
        Err(error) => Err(error),
    }
}

fn own(directory: &File, user: Option<u32>) -> io::Result<()> {
    directory.set_permissions(Permissions::from_mode(0o700))?;
    if user.is_some() { fchown(directory, user, user) } else { Ok(()) }
}

/// A file that has another name may be any file of the datastore's: it is not given away.
fn own_file(file: &File, user: Option<u32>) -> io::Result<()> {
    let only_here = file.metadata()?.nlink() == 1;
    if user.is_some() && only_here { fchown(file, user, user) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_as_a_whole_and_put_in_the_place_of_what_is_there() {
        let place = tempfile::tempdir().unwrap();
        let (path, from) = (place.path().join("x.tpm"), place.path().join("x.tpm-restored-y"));
        assert_eq!(read(&path).unwrap_err().code, ErrorCode::Damaged);
        make_of(&path, b"then", None).unwrap();
        assert_eq!(read(&path).unwrap(), b"then");
        assert!(!put(&path, &from).unwrap(), "there was none");
        for of_deleted in [false, true] {
            std::fs::write(&from, "before").unwrap();
            assert!(put(&path, &from).unwrap());
            assert_eq!((read(&path).unwrap(), from.exists()), (b"before".to_vec(), false));
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
            assert!(open(&path, None).is_ok(), "{of_deleted}");
            remove(&path).unwrap();
        }
        // Who writes to the datastore has put a link in the place of the directory.
        std::fs::write(&from, "before").unwrap();
        let elsewhere = place.path().join("elsewhere");
        std::fs::create_dir(&elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        put(&path, &from).unwrap_err();
        assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0, "it was followed");
        std::fs::remove_file(&path).unwrap();
        make(&path, None).unwrap();
        let long = File::create(path.join(STATE)).unwrap();
        long.set_len(TPM_STATE_MAX + 1).unwrap();
        assert_eq!(read(&path).unwrap_err().code, ErrorCode::Damaged);
    }

    #[test]
    fn only_files_of_its_own_are_given_away_and_what_is_missing_is_missed() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("x.tpm");
        assert_eq!(open(&path, None).unwrap_err().code, ErrorCode::Damaged);
        let directory = make(&path, None).unwrap();
        assert_eq!(flush(&path, &directory).unwrap_err().code, ErrorCode::Damaged);
        assert_eq!(open(&path, None).unwrap_err().code, ErrorCode::Damaged);
        std::fs::write(path.join(STATE), "state").unwrap();
        flush(&path, &directory).unwrap();
        let other = place.path().join("other");
        std::fs::write(&other, "").unwrap();
        std::fs::hard_link(&other, path.join("linked")).unwrap();
        std::os::unix::fs::symlink(&other, path.join("pointed")).unwrap();
        nix::unistd::mkfifo(&path.join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let root = nix::unistd::geteuid().is_root();
        let user = root.then_some(1_900_000_001);
        open(&path, user).unwrap();
        let owner = |path: &Path| path.symlink_metadata().unwrap().uid();
        if let Some(user) = user {
            assert_eq!((owner(&path), owner(&path.join(STATE))), (user, user));
            assert_eq!(owner(&other), 0, "a file of another place was given away");
        }
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        // A link in the place of the state is none.
        std::fs::remove_file(path.join(STATE)).unwrap();
        std::os::unix::fs::symlink(&other, path.join(STATE)).unwrap();
        assert_eq!(open(&path, user).unwrap_err().code, ErrorCode::Damaged);
        // Too much to be swtpm's.
        std::fs::remove_file(path.join(STATE)).unwrap();
        for index in 0..FILES_MAX {
            std::fs::write(path.join(format!("planted{index}")), "").unwrap();
        }
        std::fs::write(path.join(STATE), "state").unwrap();
        assert!(open(&path, user).unwrap_err().detail.contains("remove"));
        remove(&path).unwrap();
        remove(&path).unwrap();
        // A file in its place is no reason not to delete the disk.
        std::fs::write(&path, "").unwrap();
        remove(&path).unwrap();
        assert!(other.exists() && !path.exists());
    }
}
