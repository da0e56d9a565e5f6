//! The flags of open files that two stacks of a disk have.
//!
//! Whether a file is used past the page cache (O_DIRECT) is a flag of the open file, and so of each descriptor of it. A stack that is
//! opened on what a disk has may change it and be refused after that: the disk goes on by the stack that it had, which knows the flags
//! that it was opened with.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

/// Files, which have their flags again when this is dropped.
pub(super) struct KeptFlags(Vec<(Arc<OwnedFd>, OFlag)>);

impl KeptFlags {
    /// As they are now.
    ///
    /// # Errors
    /// Those of the kernel.
    pub(super) fn of<'a>(files: impl Iterator<Item = &'a Arc<OwnedFd>>) -> io::Result<Self> {
        let flags = |file: &Arc<OwnedFd>| -> io::Result<(Arc<OwnedFd>, OFlag)> {
            let flags = fcntl(&**file, FcntlArg::F_GETFL)?;
            Ok((Arc::clone(file), OFlag::from_bits_retain(flags)))
        };
        files.map(flags).collect::<io::Result<_>>().map(Self)
    }

    /// The files keep the flags that they have got since.
    pub(super) fn let_go(mut self) {
        self.0.clear();
    }
}

impl Drop for KeptFlags {
    fn drop(&mut self) {
        for (file, flags) in &self.0 {
            if let Err(error) = fcntl(&**file, FcntlArg::F_SETFL(*flags)) {
                tracing::warn!(%error, "a file does not get its flags again");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_its_flags_again_unless_it_is_to_keep_the_new_ones() {
        let file = Arc::new(OwnedFd::from(tempfile::tempfile().unwrap()));
        let other = file.try_clone().unwrap();
        // A flag that every file system takes.
        let appends = || {
            let flags = OFlag::from_bits_retain(fcntl(&*file, FcntlArg::F_GETFL).unwrap());
            flags.contains(OFlag::O_APPEND)
        };
        for keeps in [false, true] {
            let kept = KeptFlags::of(std::iter::once(&file)).unwrap();
            fcntl(&other, FcntlArg::F_SETFL(OFlag::O_APPEND)).unwrap();
            assert!(appends());
            if keeps {
                kept.let_go();
            } else {
                drop(kept);
            }
            assert_eq!(appends(), keeps);
        }
    }
}
