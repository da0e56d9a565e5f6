//! The backup of a server (docs/formats/server-backup.md): what is readable before it is opened, and the list of its
//! files, which is the first thing inside.
//!
//! ```text
//! "vmsealsb" (8) ‖ version (4) ‖ length of the envelope (4) ‖ envelope ‖ frames
//! in the frames:  length of the list (4) ‖ list, JSON ‖ the files, one after the other
//! ```

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::id::ProviderId;

const MAGIC: &[u8; 8] = b"vmsealsb";

/// The version of the file.
pub const VERSION: u32 = 1;

/// The length of the fixed part, in bytes.
pub const HEAD_LEN: usize = 16;

/// The most bytes of an envelope: a sealed key has some hundred.
pub const ENVELOPE_MAX: usize = 4096;

/// The most bytes of a frame's content. It is held in memory as a whole.
pub const FRAME_MAX: usize = 1 << 20;

/// The most bytes of the list: a thousand providers with some files each.
pub const LIST_MAX: usize = 1 << 20;

/// The most files.
pub const FILES_MAX: usize = 10_000;

/// The longest name of a provider's file, in bytes.
const NAME_MAX: usize = 128;

/// The files of a data directory that are not a provider's, in the order in which they are restored. Without the
/// inventory a directory is not a server's: it comes last.
pub const FILES: [&str; 4] = ["ca.key", "ca.pem", "admin.token", INVENTORY];

/// The inventory.
pub const INVENTORY: &str = "inventory.db";

/// The directory of the providers' files.
pub const PROVIDERS: &str = "providers";

/// Why a backup cannot be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ServerBackupError {
    /// It has another beginning, or is too short.
    #[error("this is not a backup of a server")]
    NotABackup,
    /// A later vmseal made it.
    #[error("the backup has version {0}; this vmseal knows version {VERSION}: use a newer one")]
    UnknownVersion(u32),
    /// The list of files is none of ours.
    #[error("the list of the backup's files is damaged: {0}")]
    List(String),
}

/// The fixed part of a backup with an envelope of this length.
#[must_use]
pub fn head(envelope: usize) -> [u8; HEAD_LEN] {
    let mut head = [0; HEAD_LEN];
    head[..8].copy_from_slice(MAGIC);
    head[8..12].copy_from_slice(&VERSION.to_be_bytes());
    head[12..].copy_from_slice(&u32::try_from(envelope).unwrap_or(u32::MAX).to_be_bytes());
    head
}

/// The length of the envelope.
///
/// # Errors
/// [`ServerBackupError`].
pub fn parse_head(head: &[u8; HEAD_LEN]) -> Result<usize, ServerBackupError> {
    let [.., v0, v1, v2, v3, l0, l1, l2, l3] = *head;
    if !head.starts_with(MAGIC) {
        return Err(ServerBackupError::NotABackup);
    }
    let version = u32::from_be_bytes([v0, v1, v2, v3]);
    if version != VERSION {
        return Err(ServerBackupError::UnknownVersion(version));
    }
    let length = usize::try_from(u32::from_be_bytes([l0, l1, l2, l3])).unwrap_or(usize::MAX);
    if length == 0 || length > ENVELOPE_MAX {
        return Err(ServerBackupError::NotABackup);
    }
    Ok(length)
}

/// The list of a backup's files, and where they are from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileList {
    /// When the inventory was copied.
    pub made: Timestamp,
    /// The version of vmseal that made it.
    pub vmseal: String,
    /// The files, in the order in which they follow.
    pub files: Vec<ListedFile>,
}

/// A file of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListedFile {
    /// Its path in the data directory.
    pub path: String,
    /// Its length, in bytes.
    pub length: u64,
}

/// Parses a list, and checks that each path is one of a data directory.
///
/// # Errors
/// [`ServerBackupError::List`].
pub fn parse_list(json: &[u8]) -> Result<FileList, ServerBackupError> {
    let wrong = |why: String| ServerBackupError::List(why);
    if json.len() > LIST_MAX {
        return Err(wrong(format!("it has more than {LIST_MAX} bytes")));
    }
    let list: FileList = serde_json::from_slice(json).map_err(|error| wrong(error.to_string()))?;
    if list.files.len() > FILES_MAX {
        return Err(wrong(format!("it has more than {FILES_MAX} files")));
    }
    let mut seen = std::collections::HashSet::new();
    for file in &list.files {
        if !is_allowed(&file.path) {
            return Err(wrong(format!("'{}' is no file of a server", file.path.escape_debug())));
        }
        if !seen.insert(&file.path) {
            return Err(wrong(format!("'{}' is in it twice", file.path)));
        }
    }
    let lacks = |name: &&&str| **name != "admin.token" && !seen.contains(&(**name).to_owned());
    if let Some(name) = FILES.iter().find(lacks) {
        return Err(wrong(format!("'{name}' is not in it")));
    }
    if list.files.last().is_none_or(|file| file.path != INVENTORY) {
        return Err(wrong(format!("'{INVENTORY}' is not the last")));
    }
    Ok(list)
}

/// Whether a path is one of [`FILES`], or `providers/<provider id>/<file>`.
#[must_use]
pub fn is_allowed(path: &str) -> bool {
    if FILES.contains(&path) {
        return true;
    }
    let mut parts = path.split('/');
    let (directory, provider, name) = (parts.next(), parts.next(), parts.next());
    let named = |name: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        !name.is_empty()
            && name.len() <= NAME_MAX
            && !name.starts_with('.')
            && name.bytes().all(plain)
    };
    directory == Some(PROVIDERS)
        && provider.is_some_and(|id| {
            // In the one form in which ids are written, so that two paths are never one file.
            id.parse::<ProviderId>().is_ok_and(|parsed| parsed.to_string() == id)
        })
        && name.is_some_and(named)
        && parts.next().is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(paths: &[&str]) -> Vec<u8> {
        let file = |path: &&str| ListedFile { path: (*path).to_owned(), length: 1 };
        let made = Timestamp::UNIX_EPOCH;
        let files = paths.iter().map(file).collect();
        serde_json::to_vec(&FileList { made, vmseal: "1".to_owned(), files }).unwrap()
    }

    #[test]
    fn a_head_is_read_as_it_was_written_and_others_are_refused() {
        assert_eq!(parse_head(&head(132)), Ok(132));
        let mut later = head(132);
        later[11] = 2;
        assert_eq!(parse_head(&later), Err(ServerBackupError::UnknownVersion(2)));
        for wrong in [head(0), head(ENVELOPE_MAX + 1), [0; HEAD_LEN]] {
            assert_eq!(parse_head(&wrong), Err(ServerBackupError::NotABackup));
        }
    }

    #[test]
    fn a_list_names_files_of_a_data_directory_and_no_others() {
        let id = ProviderId::new().to_string();
        let key = format!("providers/{id}/key");
        let good = ["ca.key", "ca.pem", &key, "inventory.db"];
        assert_eq!(parse_list(&list(&good)).unwrap().files.len(), 4);
        let upper = format!("providers/{}/key", id.to_uppercase());
        let deep = format!("providers/{id}/a/key");
        let above = format!("providers/{id}/..");
        for wrong in ["../ca.key", "/etc/passwd", "providers/x/key", &upper, &deep, &above, ""] {
            let paths = ["ca.key", "ca.pem", wrong, "inventory.db"];
            assert!(
                matches!(parse_list(&list(&paths)), Err(ServerBackupError::List(_))),
                "{wrong}"
            );
        }
        for paths in [
            &["ca.key", "ca.pem"][..],
            &["ca.key", "inventory.db"],
            &["ca.key", "ca.pem", "inventory.db", "admin.token"],
            &["ca.key", "ca.key", "ca.pem", "inventory.db"],
        ] {
            assert!(parse_list(&list(paths)).is_err(), "{paths:?}");
        }
    }
}
