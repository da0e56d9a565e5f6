//! The numbers of files and directories, and the names of their objects in the pool.
//!
//! ```text
//! vmseal.dir.<inode>    a directory: a key for each entry, with its inode. The root is inode 1
//!                         attribute vmseal.image-layout    how images that are made there are cut into objects
//! vmseal.file.<inode>   a file. Up to [`SMALL_MAX`] bytes it is the object's data
//!                         attribute vmseal.size    it is an image, and this long
//!                         attribute vmseal.opened  it is an image, and was opened to be written: another number each time
//!                         attribute vmseal.links   it has several names: its keys, `<directory's inode>/<name>`
//!                         attribute vmseal.image-layout    that of the directory that it was made in
//! vmseal.<inode>        the image (RBD) of a longer file; its metadata vmseal.path says which it is, and that of a disk's which key opens it
//!                         ([`vmseal_api::rbd::NOTE_ATTRIBUTES`])
//! vmseal.removed        a key for each file that is being removed: its inode, with the name that it had
//! vmseal.trial          nothing: whether a user may write is found out by it
//! ```
//! Inodes are random numbers of 64 bits in hexadecimal digits, so hosts need not agree on the next one; bit 62 says that it is a
//! directory.

use std::fmt;
use std::str::FromStr;

/// The longest file that is an object and not an image, in bytes: descriptors, notes and keys are shorter, disks are longer.
pub const SMALL_MAX: u64 = 1 << 20;

/// The object with the files that are being removed.
pub const REMOVED: &str = "vmseal.removed";

/// The object that is written and removed to find out whether a user may do that; also in the pool of data.
pub const TRIAL: &str = "vmseal.trial";

/// The attribute with the length of a file that is an image.
pub const SIZE: &str = "vmseal.size";

/// The attribute of a file that is an image and was opened to be written ([`crate::image_state`]).
pub const OPENED: &str = "vmseal.opened";

/// The attribute with how an image is cut into objects.
pub const IMAGE_LAYOUT: &str = "vmseal.image-layout";

/// The attribute of a file that has several names.
pub const LINKS: &str = "vmseal.links";

/// The metadata of an image that says which file it is.
pub const PATH: &str = "vmseal.path";

const DIRECTORY: u64 = 1 << 62;

/// The number of a file or directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Inode(pub u64);

impl Inode {
    /// The directory that is mounted.
    pub const ROOT: Self = Self(1);

    /// A number that nothing has.
    #[must_use]
    pub fn new_file() -> Self {
        // Below bit 62, and not that of the root.
        Self(fastrand::u64(2..DIRECTORY))
    }

    /// The same for a directory.
    #[must_use]
    pub fn new_directory() -> Self {
        Self(Self::new_file().0 | DIRECTORY)
    }

    /// Whether it is a directory.
    #[must_use]
    pub fn is_directory(self) -> bool {
        self == Self::ROOT || self.0 & DIRECTORY != 0
    }

    /// The object with a directory's entries, or a file's data.
    #[must_use]
    pub fn object(self) -> String {
        let kind = if self.is_directory() { "dir" } else { "file" };
        format!("vmseal.{kind}.{self}")
    }

    /// The name of a file's image.
    #[must_use]
    pub fn image(self) -> String {
        format!("vmseal.{self}")
    }
}

impl fmt::Display for Inode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A text that is no inode.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not the number of a file or directory")]
pub struct NotAnInode(String);

impl FromStr for Inode {
    type Err = NotAnInode;

    fn from_str(text: &str) -> Result<Self, NotAnInode> {
        let number = Some(text).filter(|text| text.len() == 16);
        let number = number.and_then(|text| u64::from_str_radix(text, 16).ok());
        let number = number.filter(|number| (1..DIRECTORY << 1).contains(number));
        number.map(Self).ok_or_else(|| NotAnInode(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_named_as_the_documents_say() {
        assert_eq!(Inode::ROOT.object(), "vmseal.dir.0000000000000001");
        let (file, directory) = (Inode(0x2a), Inode(0x2a | DIRECTORY));
        assert_eq!(file.object(), "vmseal.file.000000000000002a");
        assert_eq!(file.image(), "vmseal.000000000000002a");
        assert_eq!(directory.object(), "vmseal.dir.400000000000002a");
        for inode in [Inode::ROOT, file, directory, Inode::new_file(), Inode::new_directory()] {
            assert_eq!(inode.to_string().parse::<Inode>().unwrap(), inode);
        }
        assert!(!Inode::new_file().is_directory() && Inode::new_directory().is_directory());
        for wrong in ["", "1", "0000000000000000", "ffffffffffffffff", "00000000000000g1"] {
            wrong.parse::<Inode>().unwrap_err();
        }
    }
}
