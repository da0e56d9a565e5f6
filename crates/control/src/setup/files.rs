//! Files that are there whole or not at all: written beside their place, flushed, renamed, and the
//! directory flushed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

/// For the server's user alone.
pub const PRIVATE: u32 = 0o600;

/// For everyone who reaches the directory.
pub const PUBLIC: u32 = 0o644;

/// Makes a directory that only the server's user can enter; one that exists must be a directory.
///
/// # Errors
/// What the file system says.
pub fn private_directory(path: &Path) -> io::Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    sync_directory(path.parent().filter(|parent| !parent.as_os_str().is_empty()))
}

/// Puts a file in its place, durably, in place of one that may be there.
///
/// # Errors
/// What the file system says; what was there before is there still.
pub fn put(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    // One that a crash left may have other permissions.
    match std::fs::remove_file(&beside) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    sync_directory(path.parent())
}

fn sync_directory(path: Option<&Path>) -> io::Result<()> {
    match path {
        Some(path) => File::open(path)?.sync_all(),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_also_over_the_debris_of_a_crash() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.key");
        std::fs::write(directory.path().join("a.key.new"), "half of a k").unwrap();
        for content in ["one", "two"] {
            put(&path, content.as_bytes(), PRIVATE).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, PRIVATE);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
