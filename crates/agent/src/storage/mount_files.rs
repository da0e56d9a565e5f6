//! The files that the agent keeps of each mount of a pool, in the directory of the records of `vmseal-rbd`.

use std::path::{Path, PathBuf};

/// The log of the process that serves the mount.
pub(super) fn log(records: &Path, path: &Path) -> PathBuf {
    records.join(format!("{}.log", name(path)))
}

/// The log of a trial, which connects as for the mount.
pub(super) fn trial_log(records: &Path, path: &Path) -> PathBuf {
    records.join(format!("{}.trial.log", name(path)))
}

/// The latest way to the pool that the host was told.
pub(super) fn way(records: &Path, path: &Path) -> PathBuf {
    records.join(format!("{}.way", name(path)))
}

/// A mount point's name among others, as a file's name.
fn name(path: &Path) -> String {
    path.to_string_lossy().trim_start_matches('/').replace('/', "-")
}
