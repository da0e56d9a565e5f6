//! Which file it is, whatever its name.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

/// Identifies a file, whatever its name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileIdentity {
    pub(super) inode: u64,
    /// When it was created, in nanoseconds since 1970, where the file system has that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) born: Option<u64>,
}

impl FileIdentity {
    /// The identity of an open file.
    ///
    /// # Errors
    /// Those of fstat(2).
    pub fn of(file: &File) -> io::Result<Self> {
        file.metadata().map(|metadata| Self::in_metadata(&metadata))
    }

    /// The identity in what is known of a file.
    #[must_use]
    pub fn in_metadata(metadata: &Metadata) -> Self {
        let born = metadata.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let born = born.and_then(|at| u64::try_from(at.as_nanos()).ok());
        Self { inode: metadata.ino(), born }
    }
}
