//! Files that are whole or not there: written beside their place, flushed, and renamed into it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file that only its owner reads (0600). What was there is replaced at once or not at all.
///
/// # Errors
/// As writing; nothing is left behind then.
pub fn write(path: &Path, contents: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = Path::new(&temporary);
    let written = (|| {
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(temporary)?;
        file.write_all(contents)?;
        file.sync_all()?;
        std::fs::rename(temporary, path)?;
        flush_directory_of(path)
    })();
    if written.is_err() {
        // The first error is the one that counts; what is left is overwritten by the next attempt.
        let _ = std::fs::remove_file(temporary);
    }
    written
}

/// Makes the entries of the directory that holds `path` durable.
///
/// # Errors
/// As opening and flushing the directory.
pub fn flush_directory_of(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_private() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a");
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
        assert!(write(&directory.path().join("none/a"), b"").is_err());
    }
}
