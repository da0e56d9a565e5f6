//! Directories: the names of files, in the keys of an object each.
//!
//! Each change of a directory is one change of its object, all or nothing. A file whose last name is taken away is removed in steps,
//! and a process that dies meanwhile leaves them to its successor:
//! ```text
//!  its inode in vmseal.removed ─► its name is gone ─► image and object are gone ─► its inode out of vmseal.removed
//! ```
//! An image that somebody has open stays until that is closed.

use std::io;
use std::sync::Arc;

use crate::cluster::{KeyChange, Pool};
use crate::image;
use crate::inode::{Inode, LINKS, REMOVED};
use crate::open_file::noted_size;

/// The longest name of a file, in bytes: `NAME_MAX`.
const NAME_MAX: usize = 255;

/// The directories of a pool.
pub struct Directories {
    pool: Arc<Pool>,
}

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// What it names.
    pub inode: Inode,
}

/// A file without a name, which is to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Nameless(pub Inode);

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

fn parse(value: &str) -> io::Result<Inode> {
    value.parse().map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Checks a name for a new entry.
fn check(name: &str) -> io::Result<()> {
    if name.len() > NAME_MAX {
        return Err(errno(libc::ENAMETOOLONG));
    }
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(errno(libc::EINVAL));
    }
    Ok(())
}

fn link(directory: Inode, name: &str) -> String {
    format!("{directory}/{name}")
}

impl Directories {
    /// The directories of this pool.
    #[must_use]
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool }
    }

    /// What a name stands for.
    ///
    /// # Errors
    /// The cluster's.
    pub fn look_up(&self, directory: Inode, name: &str) -> io::Result<Option<Inode>> {
        self.pool.key(&directory.object(), name)?.map(|value| parse(&value)).transpose()
    }

    fn named(&self, directory: Inode, name: &str) -> io::Result<Inode> {
        self.look_up(directory, name)?.ok_or_else(|| errno(libc::ENOENT))
    }

    /// All entries.
    ///
    /// # Errors
    /// The cluster's.
    pub fn list(&self, directory: Inode) -> io::Result<Vec<Entry>> {
        let keys = self.pool.keys(&directory.object())?;
        let entry = |(name, value): (String, String)| Ok(Entry { inode: parse(&value)?, name });
        keys.into_iter().map(entry).collect()
    }

    /// Makes an entry for a new file or directory.
    ///
    /// # Errors
    /// `AlreadyExists`; the cluster's.
    pub fn add(&self, directory: Inode, name: &str, inode: Inode) -> io::Result<()> {
        check(name)?;
        let value = inode.to_string();
        let (absent, set) = (&[name][..], &[(name, value.as_str())][..]);
        self.pool.change_keys(&directory.object(), &KeyChange { absent, set, remove: &[] })?;
        // So that it has a time of change, and its directory is there.
        self.pool.make(&inode.object())
    }

    /// Takes a name away; returns the file if that was its last one.
    ///
    /// # Errors
    /// `NotFound`, `IsADirectory`; the cluster's.
    pub fn remove(&self, directory: Inode, name: &str) -> io::Result<Option<Nameless>> {
        let inode = self.named(directory, name)?;
        if inode.is_directory() {
            return Err(errno(libc::EISDIR));
        }
        self.begin_removal(inode, directory, name)?;
        let remove = &[name][..];
        self.pool
            .change_keys(&directory.object(), &KeyChange { remove, ..KeyChange::default() })?;
        self.without_name(inode, directory, name)
    }

    /// Removes an empty directory.
    ///
    /// # Errors
    /// `DirectoryNotEmpty`, `NotFound`, `NotADirectory`; the cluster's.
    pub fn remove_directory(&self, directory: Inode, name: &str) -> io::Result<()> {
        let inode = self.named(directory, name)?;
        if !inode.is_directory() {
            return Err(errno(libc::ENOTDIR));
        }
        if !self.pool.keys(&inode.object())?.is_empty() {
            return Err(errno(libc::ENOTEMPTY));
        }
        let remove = &[name][..];
        self.pool
            .change_keys(&directory.object(), &KeyChange { remove, ..KeyChange::default() })?;
        self.pool.remove(&inode.object())
    }

    /// Gives an entry another name in its directory; returns the file that had that name, if it has none now.
    ///
    /// # Errors
    /// `NotFound`; `AlreadyExists` where the other name must be free; the cluster's.
    pub fn rename(
        &self,
        directory: Inode,
        name: &str,
        to: &str,
        must_be_free: bool,
    ) -> io::Result<Option<Nameless>> {
        check(to)?;
        let inode = self.named(directory, name)?;
        if name == to {
            return Ok(None);
        }
        let replaced = if must_be_free { None } else { self.look_up(directory, to)? };
        match replaced {
            Some(other) if other == inode => {
                // Both are names of one file; nothing is done then (rename(2)).
                return Ok(None);
            }
            Some(other) if other.is_directory() && inode.is_directory() => {
                self.remove_directory(directory, to)?;
            }
            Some(other) if other.is_directory() => return Err(errno(libc::EISDIR)),
            Some(_) if inode.is_directory() => return Err(errno(libc::ENOTDIR)),
            Some(other) => self.begin_removal(other, directory, to)?,
            None => {}
        }
        let has_links = !inode.is_directory() && self.has_links(inode)?;
        let (before, after) = (link(directory, name), link(directory, to));
        if has_links {
            let set = &[(after.as_str(), "1")][..];
            self.pool.change_keys(&inode.object(), &KeyChange { set, ..KeyChange::default() })?;
        }
        let value = inode.to_string();
        let absent = if must_be_free { &[to][..] } else { &[] };
        let change = KeyChange { absent, set: &[(to, &value)], remove: &[name] };
        self.pool.change_keys(&directory.object(), &change)?;
        if has_links {
            let remove = &[before.as_str()][..];
            self.pool
                .change_keys(&inode.object(), &KeyChange { remove, ..KeyChange::default() })?;
        }
        match replaced.filter(|other| !other.is_directory()) {
            Some(other) => self.without_name(other, directory, to),
            None => Ok(None),
        }
    }

    /// Gives a file a further name.
    ///
    /// # Errors
    /// `AlreadyExists`; the cluster's.
    pub fn link(
        &self,
        inode: Inode,
        known_as: (Inode, &str),
        directory: Inode,
        name: &str,
    ) -> io::Result<()> {
        check(name)?;
        // All its names first: one that is not there yet only keeps the file longer than needed if this process dies.
        let (known, new) = (link(known_as.0, known_as.1), link(directory, name));
        let set = &[(known.as_str(), "1"), (new.as_str(), "1")][..];
        self.pool.change_keys(&inode.object(), &KeyChange { set, ..KeyChange::default() })?;
        self.pool.set_attribute(&inode.object(), LINKS, "1")?;
        let value = inode.to_string();
        let change = KeyChange { absent: &[name], set: &[(name, &value)], remove: &[] };
        let added = self.pool.change_keys(&directory.object(), &change);
        if added.is_err() {
            let remove = &[new.as_str()][..];
            self.pool
                .change_keys(&inode.object(), &KeyChange { remove, ..KeyChange::default() })?;
        }
        added
    }

    /// How many names a file has.
    ///
    /// # Errors
    /// The cluster's.
    pub fn names(&self, inode: Inode) -> io::Result<u32> {
        if !self.has_links(inode)? {
            return Ok(1);
        }
        let names = self.pool.keys(&inode.object())?.len();
        Ok(u32::try_from(names).unwrap_or(u32::MAX))
    }

    fn has_links(&self, inode: Inode) -> io::Result<bool> {
        Ok(self.pool.attribute(&inode.object(), LINKS)?.is_some())
    }

    fn begin_removal(&self, inode: Inode, directory: Inode, name: &str) -> io::Result<()> {
        let (key, value) = (inode.to_string(), link(directory, name));
        let set = &[(key.as_str(), value.as_str())][..];
        self.pool.change_keys(REMOVED, &KeyChange { set, ..KeyChange::default() })
    }

    fn end_removal(&self, inode: Inode) -> io::Result<()> {
        let key = inode.to_string();
        let remove = &[key.as_str()][..];
        self.pool.change_keys(REMOVED, &KeyChange { remove, ..KeyChange::default() })
    }

    /// A name of a file is gone: it may have others.
    fn without_name(
        &self,
        inode: Inode,
        directory: Inode,
        name: &str,
    ) -> io::Result<Option<Nameless>> {
        if self.has_links(inode)? {
            let gone = link(directory, name);
            let remove = &[gone.as_str()][..];
            self.pool
                .change_keys(&inode.object(), &KeyChange { remove, ..KeyChange::default() })?;
            if !self.pool.keys(&inode.object())?.is_empty() {
                self.end_removal(inode)?;
                return Ok(None);
            }
        }
        Ok(Some(Nameless(inode)))
    }

    /// Removes a file that has no name, and that nobody here has open.
    ///
    /// # Errors
    /// The cluster's. It is tried again at the next mount.
    pub fn discard(&self, Nameless(inode): Nameless) -> io::Result<()> {
        if noted_size(&self.pool, inode)?.is_some() {
            match image::remove(&self.pool, &inode.image()) {
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    tracing::info!(%inode, "a removed image is open elsewhere; it is removed at the next mount");
                    return Ok(());
                }
                removed => removed?,
            }
        }
        self.pool.remove(&inode.object())?;
        self.end_removal(inode)
    }

    /// Ends removals that a process has begun that is dead.
    ///
    /// # Errors
    /// The cluster's.
    pub fn end_removals(&self) -> io::Result<()> {
        for (key, value) in self.pool.keys(REMOVED)? {
            let (inode, of) = (parse(&key)?, value.split_once('/'));
            let Some((directory, name)) = of else { continue };
            let directory = parse(directory)?;
            if self.look_up(directory, name)? == Some(inode) {
                // It had got no further.
                self.end_removal(inode)?;
                continue;
            }
            if let Some(nameless) = self.without_name(inode, directory, name)? {
                self.discard(nameless)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_a_file_system_takes() {
        check("vm.json").unwrap();
        check(&"n".repeat(NAME_MAX)).unwrap();
        for wrong in ["", ".", "..", "a/b", "a\0b", &"n".repeat(NAME_MAX + 1)] {
            check(wrong).unwrap_err();
        }
    }
}
