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
    /// On a cluster of hosts that keep copies for each other.
    Vsan,
}

impl Storage {
    /// Why this kind of storage is unavailable in a directory; none if it is available.
    #[must_use]
    pub fn obstacle(self, directory: &Path) -> Option<String> {
        match self {
            Self::Memory => return None,
            Self::Vsan => {
                let why = "it needs three hosts that keep each disk on one another (vSAN); vmseal measures one host only";
                return Some(why.to_owned());
            }
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
