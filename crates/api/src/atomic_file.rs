//! Small files that are whole or not there: written beside their place, flushed, renamed into it, and the
//! directory flushed. The server, the agent and the CLI keep their certificates, records and settings so.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Readable by its owner alone.
pub const PRIVATE: u32 = 0o600;

/// Readable by everyone who can enter its directory.
pub const PUBLIC: u32 = 0o644;

/// How much of a file is left out at once where it is all zeros, in bytes: the size of most file systems' blocks.
const PAGE: usize = 4096;

/// Writes a file of this mode. A file that was there is replaced whole; after an error it is still there.
///
/// # Errors
/// As writing, flushing and renaming.
pub fn write(path: &Path, contents: &[u8], mode: u32) -> io::Result<()> {
    prepare(path, contents, mode)?.put()
}

/// A file that is written and flushed beside its place.
#[derive(Debug)]
#[must_use]
pub struct Prepared {
    beside: PathBuf,
    path: PathBuf,
}

/// Does the part of [`write`] that takes long; [`Prepared::put`] does the rest. Nothing has changed before that.
///
/// # Errors
/// As writing and flushing.
pub fn prepare(path: &Path, contents: &[u8], mode: u32) -> io::Result<Prepared> {
    prepare_with(path, mode, |file| file.write_all(contents))
}

/// [`prepare`] for contents that are zeros in large part: those take no room.
///
/// # Errors
/// As writing and flushing.
pub fn prepare_sparse(path: &Path, contents: &[u8], mode: u32) -> io::Result<Prepared> {
    prepare_with(path, mode, |file| {
        file.set_len(contents.len() as u64)?;
        let pages = contents.chunks(PAGE).zip((0..).step_by(PAGE));
        let mut written = pages.filter(|(page, _)| page.iter().any(|byte| *byte != 0));
        written.try_for_each(|(page, at)| file.write_all_at(page, at))
    })
}

fn prepare_with(
    path: &Path,
    mode: u32,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<Prepared> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let (beside, path) = (PathBuf::from(beside), path.to_owned());
    // A crash may have left one, with another mode.
    remove_if_there(&beside)?;
    let written = (|| {
        let options = OpenOptions::new().write(true).create_new(true).mode(mode).open(&beside);
        let mut file = options?;
        fill(&mut file)?;
        file.sync_all()
    })();
    if let Err(error) = written {
        // The first error is the one to report; the next attempt removes what is left.
        let _ = remove_if_there(&beside);
        return Err(error);
    }
    Ok(Prepared { beside, path })
}

impl Prepared {
    /// Puts the file in its place.
    ///
    /// # Errors
    /// As renaming and flushing the directory.
    pub fn put(self) -> io::Result<()> {
        let put =
            std::fs::rename(&self.beside, &self.path).and_then(|()| flush_directory_of(&self.path));
        if put.is_err() {
            let _ = remove_if_there(&self.beside);
        }
        put
    }

    /// Removes the file instead.
    pub fn discard(self) {
        // The next attempt removes what is left.
        let _ = remove_if_there(&self.beside);
    }
}

/// Puts files in their places. Each directory is flushed once, when all of them are there.
///
/// # Errors
/// As [`Prepared::put`]; some may be in their places.
pub fn put_all(files: Vec<Prepared>) -> io::Result<()> {
    let mut left = files.into_iter();
    let renamed = left.try_fold(Vec::<PathBuf>::new(), |mut renamed, file| {
        if let Err(error) = std::fs::rename(&file.beside, &file.path) {
            let _ = remove_if_there(&file.beside);
            return Err(error);
        }
        // One file of each directory stands for it.
        if renamed.iter().all(|other| other.parent() != file.path.parent()) {
            renamed.push(file.path);
        }
        Ok(renamed)
    });
    left.for_each(|file| drop(remove_if_there(&file.beside)));
    renamed?.iter().try_for_each(|path| flush_directory_of(path))
}

/// Makes a directory, and those above it, that only its owner can enter. One that is there stays as it is.
///
/// # Errors
/// As making and flushing it.
pub fn private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    flush_directory_of(path)
}

/// Makes the entries of the directory that holds `path` durable.
///
/// # Errors
/// As opening and flushing the directory.
pub fn flush_directory_of(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        // A name alone is in the working directory.
        Some(parent) if parent.as_os_str().is_empty() => Path::new("."),
        Some(parent) => parent,
        None => Path::new("/"),
    };
    File::open(parent)?.sync_all()
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_also_over_what_a_crash_left() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.key");
        let beside = directory.path().join("a.key.new");
        std::fs::write(&beside, "half of a k").unwrap();
        std::fs::set_permissions(&beside, PermissionsExt::from_mode(0o666)).unwrap();
        for (content, mode) in [("one", PRIVATE), ("two", PRIVATE), ("three", 0o640)] {
            write(&path, content.as_bytes(), mode).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, mode);
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn files_are_put_together_or_the_rest_is_not_left_beside_its_place() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let ready = |name: &str| prepare(&path(name), name.as_bytes(), PRIVATE).unwrap();
        put_all(vec![ready("a"), ready("b")]).unwrap();
        assert!(
            ["a", "b"].iter().all(|name| std::fs::read_to_string(path(name)).unwrap() == *name)
        );
        let all = vec![ready("c"), ready("d"), ready("e")];
        std::fs::create_dir(path("d")).unwrap();
        assert!(put_all(all).is_err());
        let mut left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        left.retain(|entry| entry.as_ref().unwrap().path().extension().is_some());
        assert!(path("c").is_file() && left.is_empty(), "{left:?}");
    }

    #[test]
    fn zeros_take_no_room_and_what_is_discarded_none_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sparse");
        let mut contents = vec![0; (1 << 20) + 9];
        contents[PAGE * 5] = 1;
        *contents.last_mut().unwrap() = 2;
        prepare_sparse(&path, &contents, PRIVATE).unwrap().put().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), contents);
        assert!(path.metadata().unwrap().blocks() * 512 < 1 << 19);
        prepare_sparse(&path, b"other", PRIVATE).unwrap().discard();
        assert_eq!(std::fs::read(&path).unwrap().len(), contents.len());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_what_was_there() {
        let directory = tempfile::tempdir().unwrap();
        assert!(write(&directory.path().join("none/a"), b"", PRIVATE).is_err());
        // A directory is not replaced by a file.
        let taken = directory.path().join("taken");
        std::fs::create_dir(&taken).unwrap();
        assert!(write(&taken, b"text", PRIVATE).is_err());
        assert!(taken.is_dir());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_private_directory_is_closed_to_others() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("one/two");
        private_directory(&path).unwrap();
        private_directory(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }
}
