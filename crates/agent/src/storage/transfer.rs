//! The directories of this host that images are imported from and exported to. The agent is root and the
//! users who import and export are not: files elsewhere are neither read nor written, whatever path or link
//! names them.
//!
//! A path must begin with one of the directories, and the kernel opens it beneath that directory (`openat2`,
//! RESOLVE_BENEATH): no symbolic link, `..` or magic link of /proc leads out of it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;

/// The directories. Clones share them.
#[derive(Clone, Debug)]
pub struct TransferDirectories(Arc<[PathBuf]>);

/// Why a file is not opened.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// It is in none of the directories.
    #[error("{0}")]
    Outside(String),
    /// The file system.
    #[error(transparent)]
    File(#[from] io::Error),
}

/// The open directory of a file that is written: the file is created, renamed and removed in this one, even
/// if its path leads elsewhere by then.
#[derive(Debug)]
pub struct Parent {
    path: PathBuf,
    _open: OwnedFd,
}

impl Parent {
    /// A path of the directory that is valid for as long as this lives.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl TransferDirectories {
    /// From a list of directories.
    ///
    /// # Errors
    /// The first path that is not absolute.
    pub fn new(directories: Vec<PathBuf>) -> Result<Self, PathBuf> {
        match directories.iter().find(|directory| !directory.is_absolute()) {
            Some(relative) => Err(relative.clone()),
            None => Ok(Self(directories.into())),
        }
    }

    /// All directories: for the simulated host, and tests.
    #[must_use]
    pub fn anywhere() -> Self {
        Self(Arc::new([PathBuf::from("/")]))
    }

    /// The list that the server shows.
    #[must_use]
    pub fn shown(&self) -> Vec<String> {
        self.0.iter().map(|directory| directory.display().to_string()).collect()
    }

    /// Opens an image for reading.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn image(&self, path: &Path) -> Result<std::fs::File, TransferError> {
        // Opening a pipe would wait for its other end.
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
        self.open(path, flags, path).map(std::fs::File::from)
    }

    /// Opens the directory of a file to write.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn parent(&self, path: &Path) -> Result<Parent, TransferError> {
        self.open_directory(path.parent().unwrap_or(Path::new("/")), path)
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// [`TransferError`].
    pub fn directory(&self, path: &Path) -> Result<Parent, TransferError> {
        self.open_directory(path, path)
    }

    fn open_directory(&self, path: &Path, shown: &Path) -> Result<Parent, TransferError> {
        let open = self.open(path, OFlag::O_PATH | OFlag::O_DIRECTORY, shown)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        Ok(Parent { path, _open: open })
    }

    fn open(&self, path: &Path, flags: OFlag, shown: &Path) -> Result<OwnedFd, TransferError> {
        for directory in self.0.iter() {
            let Ok(beneath) = path.strip_prefix(directory) else { continue };
            let base = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
            let base = open(directory, base, Mode::empty()).map_err(io::Error::from)?;
            let beneath = if beneath == Path::new("") { Path::new(".") } else { beneath };
            // Nothing leads out of the root; links there are absolute, and BENEATH refuses all of these.
            let resolve = if directory == Path::new("/") {
                ResolveFlag::empty()
            } else {
                ResolveFlag::RESOLVE_BENEATH
            };
            let how = OpenHow::new()
                .flags(flags | OFlag::O_CLOEXEC)
                .resolve(resolve | ResolveFlag::RESOLVE_NO_MAGICLINKS);
            match openat2(&base, beneath, how) {
                Ok(open) => return Ok(open),
                // It leads out of this directory, and may be in another one.
                Err(Errno::EXDEV | Errno::ELOOP) => {}
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Err(TransferError::Outside(self.refusal(shown)))
    }

    fn refusal(&self, path: &Path) -> String {
        let add = "start the agent with --transfer-directory DIR (once for each)";
        match self.0.as_ref() {
            [] => format!("{} is not opened: this host allows no directory; {add}", path.display()),
            _ => format!(
                "{} is in none of the directories that this host imports from and exports to, or a link leads out of them: {}. Use one of them, or {add}",
                path.display(),
                self.shown().join(", ")
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_outside_of_the_directories_is_opened() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for name in ["one/sub", "two", "secret"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        for name in ["one/image", "one/sub/image", "two/image", "secret/image"] {
            std::fs::write(at(name), name).unwrap();
        }
        symlink("sub/image", at("one/inside")).unwrap();
        symlink("../secret/image", at("one/outside")).unwrap();
        symlink(at("secret/image"), at("one/absolute")).unwrap();
        symlink(at("secret"), at("one/directory")).unwrap();
        symlink("/proc/self/root", at("one/magic")).unwrap();
        let allowed = TransferDirectories::new(vec![at("one"), at("two")]).unwrap();
        for name in ["one/image", "one/sub/image", "one/sub/../image", "one/inside", "two/image"] {
            allowed.image(&at(name)).unwrap();
            allowed.parent(&at(name)).unwrap();
        }
        for name in [
            "secret/image",
            "one/../secret/image",
            "one/outside",
            "one/absolute",
            "one/directory/image",
            "one/magic/etc/passwd",
            "onemore",
        ] {
            match allowed.image(&at(name)) {
                Err(TransferError::Outside(told)) => {
                    assert!(told.contains("--transfer-directory"), "{told}");
                    assert!(told.contains(&at("two").display().to_string()), "{told}");
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        for name in ["secret/new", "one/../new", "one/directory/new"] {
            assert!(matches!(allowed.parent(&at(name)), Err(TransferError::Outside(_))), "{name}");
        }
        assert!(matches!(allowed.image(&at("one/none")), Err(TransferError::File(_))));
        let parent = allowed.parent(&at("one/sub/new")).unwrap();
        std::fs::rename(at("one/sub"), at("one/moved")).unwrap();
        std::fs::write(parent.path().join("new"), "x").unwrap();
        assert!(at("one/moved/new").exists(), "the file is not in the directory that was opened");
        let none = TransferDirectories::new(Vec::new()).unwrap();
        assert!(matches!(none.image(&at("one/image")), Err(TransferError::Outside(_))));
        assert_eq!(TransferDirectories::new(vec!["a/b".into()]).unwrap_err(), Path::new("a/b"));
        // An agent that allows everything follows links as they are.
        TransferDirectories::anywhere().image(&at("one/absolute")).unwrap();
    }
}
