//! The storage of disks, and whether a directory has it.

use std::path::Path;

use nix::sys::statfs::{EXT4_SUPER_MAGIC, statfs};
use serde::{Deserialize, Serialize};

/// The storage of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Storage {
    /// In files whose pages are in memory.
    Memory,
    /// In files on ext4 that are accessed without the page cache.
    Ext4,
    /// In a pool of a Ceph cluster, which keeps copies; [`crate::ceph::own_pool`] says what it takes.
    Ceph,
}

impl Storage {
    /// Why this kind of storage is unavailable in a directory; none if it is available.
    #[must_use]
    pub fn obstacle(self, directory: &Path) -> Option<String> {
        match self {
            Self::Memory | Self::Ceph => return None,
            Self::Ext4 => {}
        }
        let at = directory.display();
        match statfs(directory) {
            Err(errno) => Some(format!("{at} cannot be used: {}", errno.desc())),
            // ext2 and ext3 have the same number.
            Ok(found) if found.filesystem_type() == EXT4_SUPER_MAGIC => None,
            Ok(_) => {
                let kind = crate::machine::file_system(directory);
                Some(format!(
                    "{at} is on {kind}, not on ext4; choose another with --ext4-directory"
                ))
            }
        }
    }
}
