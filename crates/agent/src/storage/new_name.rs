//! Giving a file, or a directory, a name that nothing has.
//!
//! ```text
//!  a file        has one name ── link ──> both names ── the former one goes ──> has the other one     (it is one of both after a crash)
//!  a directory   the other name is free ── rename ──> has it                  (rename replaces no directory that holds anything)
//! ```
//! That is how it is done on NFS, CephFS and OCFS2, whose clients refuse `RENAME_NOREPLACE` with EINVAL. Other file systems do it at once.

use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

/// Gives what is called `from` the name `to`. Nothing is replaced. Can be repeated. Blocks.
///
/// # Errors
/// `AlreadyExists` where something else has that name; `NotFound` where nothing is called `from`; those of the file system.
pub(crate) fn give(from: &Path, to: &Path) -> io::Result<()> {
    match renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        Ok(()) => Ok(()),
        // Of a file system whose client does not know the flag it may be known already that the name is taken.
        Err(Errno::EINVAL | Errno::ENOSYS | Errno::EEXIST) => in_steps(from, to),
        Err(error) => Err(error.into()),
    }
}

/// The same without the flag.
fn in_steps(from: &Path, to: &Path) -> io::Result<()> {
    if from.symlink_metadata()?.is_dir() {
        return match to.symlink_metadata() {
            Ok(_) => Err(ErrorKind::AlreadyExists.into()),
            Err(error) if error.kind() == ErrorKind::NotFound => std::fs::rename(from, to),
            Err(error) => Err(error),
        };
    }
    match std::fs::hard_link(from, to) {
        // An earlier attempt got so far, or the server has done it and its answer was lost.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && are_one(from, to)? => {}
        linked => linked?,
    }
    std::fs::remove_file(from)
}

/// Takes the name `to` from a file that is still called `from`, too: who gave it died before it had that name alone. Can be repeated. Blocks.
///
/// # Errors
/// Those of the file system.
pub(crate) fn take_back(from: &Path, to: &Path) -> io::Result<()> {
    match are_one(from, to) {
        Ok(true) => std::fs::remove_file(to),
        Ok(false) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether both are names of one file.
fn are_one(one: &Path, other: &Path) -> io::Result<bool> {
    let (one, other) = (one.symlink_metadata()?, other.symlink_metadata()?);
    Ok((one.dev(), one.ino()) == (other.dev(), other.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_replaced_with_the_flag_as_without() {
        for give in [give, in_steps] {
            let directory = tempfile::tempdir().unwrap();
            let at = |name: &str| directory.path().join(name);
            let kind = |result: io::Result<()>| result.unwrap_err().kind();
            assert_eq!(kind(give(&at("file"), &at("free"))), ErrorKind::NotFound);
            std::fs::write(at("file"), "content").unwrap();
            std::fs::write(at("taken"), "somebody else's").unwrap();
            assert_eq!(kind(give(&at("file"), &at("taken"))), ErrorKind::AlreadyExists);
            assert!(at("file").exists());
            give(&at("file"), &at("free")).unwrap();
            assert!(!at("file").exists());
            assert_eq!(std::fs::read(at("free")).unwrap(), b"content");
            assert_eq!(std::fs::read(at("taken")).unwrap(), b"somebody else's");

            std::fs::create_dir(at("directory")).unwrap();
            std::fs::create_dir(at("empty")).unwrap();
            assert_eq!(kind(give(&at("directory"), &at("empty"))), ErrorKind::AlreadyExists);
            give(&at("directory"), &at("whole")).unwrap();
            assert!(at("whole").is_dir() && !at("directory").exists());
        }
    }

    #[test]
    fn a_name_is_taken_back_from_who_has_both_alone() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("file"), "content").unwrap();
        take_back(&at("file"), &at("named")).unwrap();
        std::fs::write(at("other"), "somebody else's").unwrap();
        take_back(&at("file"), &at("other")).unwrap();
        assert_eq!(std::fs::read(at("other")).unwrap(), b"somebody else's");
        std::fs::hard_link(at("file"), at("named")).unwrap();
        take_back(&at("file"), &at("named")).unwrap();
        assert!(at("file").exists() && !at("named").exists());
        give(&at("file"), &at("named")).unwrap();
        take_back(&at("file"), &at("named")).unwrap();
        assert!(at("named").exists(), "it has that name alone");
    }

    #[test]
    fn who_died_between_the_steps_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::write(at("file"), "content").unwrap();
        std::fs::hard_link(at("file"), at("named")).unwrap();
        give(&at("file"), &at("named")).unwrap();
        assert!(!at("file").exists());
        assert_eq!(std::fs::read(at("named")).unwrap(), b"content");
    }
}
