//! The record of a disk's export, kept apart from the exported file. It identifies that file, so that no
//! other is taken for it, and so that the next agent removes one that was abandoned.
//!
//! ```text
//! <run dir>/exports/<disk id>.json   the disk's last export; lost at a reboot
//! ```

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmseal_api::id::TaskId;

use vmseal_api::atomic_file::{self, PRIVATE};

/// The version of the record.
const VERSION: u32 = 1;

/// The record.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exported {
    version: u32,
    export: TaskId,
    /// The file's path until it has its final name.
    unnamed: PathBuf,
    device: u64,
    inode: u64,
    /// It is complete: it waits for its final name or has it.
    written: bool,
}

impl Exported {
    /// The record of a new, empty file.
    ///
    /// # Errors
    /// As the file system.
    pub fn begun(export: TaskId, unnamed: &Path, file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        let (device, inode) = (metadata.dev(), metadata.ino());
        let unnamed = unnamed.to_owned();
        Ok(Self { version: VERSION, export, unnamed, device, inode, written: false })
    }

    /// Writes the record to `path`.
    ///
    /// # Errors
    /// As the file system.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        atomic_file::write(path, &serde_json::to_vec(self)?, PRIVATE)
    }

    /// Records that the file is complete.
    ///
    /// # Errors
    /// As the file system.
    pub fn written(path: &Path) -> io::Result<()> {
        match Self::read(path) {
            Some(record) => Self { written: true, ..record }.write(path),
            None => Ok(()),
        }
    }

    /// The record at `path`; none where it is missing or cannot be read.
    #[must_use]
    pub fn read(path: &Path) -> Option<Self> {
        let record: Self = serde_json::from_slice(&std::fs::read(path).ok()?).ok()?;
        Some(record).filter(|record| record.version == VERSION)
    }

    /// Whether it is the record of this export.
    #[must_use]
    pub fn is_of(&self, export: TaskId) -> bool {
        self.export == export
    }

    /// Whether this is the file that was written.
    #[must_use]
    pub fn is_file(&self, metadata: &Metadata) -> bool {
        (metadata.dev(), metadata.ino()) == (self.device, self.inode)
    }

    /// Removes the file unless it has its final name.
    pub fn remove_unnamed(&self) {
        let path = &self.unnamed;
        if path.symlink_metadata().is_ok_and(|metadata| self.is_file(&metadata)) {
            tracing::info!(path = %path.display(), "removing an abandoned export");
            if let Err(error) = std::fs::remove_file(path) {
                tracing::warn!(path = %path.display(), %error, "an unfinished export is left");
            }
        }
    }
}

/// Removes files that an earlier agent was writing; they are written again if they are still wanted. Complete
/// files stay, as they may be about to get their final names. Blocks.
pub fn sweep(records: &Path) {
    for record in std::fs::read_dir(records).into_iter().flatten().flatten() {
        let path = record.path();
        if let Some(found) = Exported::read(&path).filter(|found| !found.written) {
            found.remove_unnamed();
            let _ = std::fs::remove_file(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn only_unfinished_exports_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        std::fs::create_dir(at("records")).unwrap();
        for name in ["writing", "written", "replaced"] {
            let file = File::create(at(name)).unwrap();
            let record = at("records").join(name);
            Exported::begun(TaskId::new(), &at(name), &file).unwrap().write(&record).unwrap();
            assert_eq!(record.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        }
        Exported::written(&at("records/written")).unwrap();
        std::fs::write(at("records/garbage"), "{").unwrap();
        // Another file is put there. The old one is kept so that its inode is not reused.
        std::fs::rename(at("replaced"), at("elsewhere")).unwrap();
        std::fs::write(at("replaced"), "not ours").unwrap();
        sweep(&at("records"));
        let there = ["writing", "written", "replaced", "elsewhere"].map(|name| at(name).exists());
        assert_eq!(there, [false, true, true, true]);
        assert!(Exported::read(&at("records/written")).is_some());
    }
}
