//! The latest ways to pools that this host was told, by the places where they are mounted.
//!
//! VMs that run and tasks at work have the way that they were told when they began, and each of them may have to mount the pool when
//! `vmseal-rbd` has died. So a host takes the latest way that it was told ([`RbdPool::changed`]). It is noted beside the records of the mounts, for
//! later agents, which know of a VM that runs what it was started with. A note that is lost is made again when the server asks about the
//! datastore next.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use vmseal_api::atomic_file::private_directory;
use vmseal_api::datastore::RbdPool;

use crate::storage::json_file;
use crate::storage::mount_files;

/// The longest note, in bytes: five fields of 1024 bytes, each of which JSON may make six times as long, and a path.
const NOTE_MAX: u64 = 64 * 1024;

/// What is known, by the place; none where it was looked for and there is no note.
static KNOWN: Mutex<BTreeMap<PathBuf, Option<RbdPool>>> = Mutex::new(BTreeMap::new());

/// A pool that is mounted at `path` by the later of the way that is given and the one that is known. Notes are in `records`, if they are
/// anywhere.
pub fn latest(records: Option<&Path>, path: &Path, given: &RbdPool) -> RbdPool {
    let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let known = all.entry(path.to_owned()).or_insert_with(|| read(records?, path));
    if let Some(known) = known.as_ref().filter(|known| known.is_same_pool(given))
        && known.changed > given.changed
    {
        return RbdPool { create: given.create, ..known.clone() };
    }
    let is_news = known.as_ref().is_none_or(|it| it.changed != given.changed);
    if given.changed.is_some() && is_news {
        let kept = RbdPool { create: None, ..given.clone() };
        if let Some(records) = records {
            note(records, path, &kept);
        }
        *known = Some(kept);
    }
    given.clone()
}

/// Forgets what is known of a place.
pub fn forget(records: Option<&Path>, path: &Path) {
    let mut all = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    all.insert(path.to_owned(), None);
    if let Some(records) = records
        && let Err(error) = std::fs::remove_file(mount_files::way(records, path))
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "how a pool was mounted is not forgotten");
    }
}

/// A note; none where there is none, or it is damaged.
fn read(records: &Path, path: &Path) -> Option<RbdPool> {
    let read = json_file::read(&mount_files::way(records, path), NOTE_MAX);
    let text = read.unwrap_or_else(|problem| {
        tracing::warn!(path = %path.display(), %problem, "how a pool is mounted is not known");
        None
    });
    let read = serde_json::from_slice(&text?);
    read.inspect_err(|error| {
        tracing::warn!(path = %path.display(), %error, "the note how a pool is mounted is damaged");
    })
    .ok()
}

/// Notes a way. This agent knows it in any case.
fn note(records: &Path, path: &Path, pool: &RbdPool) {
    if let Err(error) = private_directory(records) {
        tracing::warn!(path = %records.display(), %error, "how a pool is mounted is not noted");
        return;
    }
    if let Err(problem) = json_file::write(&mount_files::way(records, path), pool) {
        tracing::warn!(path = %path.display(), %problem, "how a pool is mounted is not noted");
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use vmseal_api::datastore::Messenger;

    use super::*;
    use crate::storage::pool::tests::pool;

    /// A way that was set at this time; none is the first one.
    fn way(monitors: &str, second: Option<i64>) -> RbdPool {
        let changed = second.map(|second| Timestamp::from_second(second).unwrap());
        RbdPool { monitors: monitors.to_owned(), messenger: Messenger::Crc, changed, ..pool() }
    }

    /// Another agent begins, and knows what is noted.
    fn restart(path: &Path) {
        KNOWN.lock().unwrap().remove(path);
    }

    #[test]
    fn a_host_keeps_to_the_latest_way_after_its_agent_restarts() {
        let directory = tempfile::tempdir().unwrap();
        let records = directory.path().join("rbd");
        let path = directory.path().join("ceph");
        let latest = |given: &RbdPool| latest(Some(&records), &path, given).monitors;
        let (first, second, third) =
            (way("first", None), way("second", Some(20)), way("third", Some(30)));
        assert_eq!(latest(&first), "first");
        assert!(!records.exists(), "a way that was never changed is noted");
        assert_eq!(latest(&second), "second");
        assert_eq!(latest(&first), "second", "a VM that runs has the former one");
        restart(&path);
        assert_eq!(latest(&first), "second");
        assert_eq!(latest(&third), "third");
        restart(&path);
        assert_eq!(latest(&second), "third");
        // Another pool is mounted there.
        let other = RbdPool { pool: "other".to_owned(), ..way("other", None) };
        assert_eq!(latest(&other), "other");
        assert_eq!(latest(&first), "third");

        forget(Some(&records), &path);
        assert_eq!(latest(&first), "first");
        restart(&path);
        assert_eq!(latest(&first), "first");
    }

    #[test]
    fn without_a_note_that_can_be_read_what_is_given_counts() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ceph");
        std::fs::write(mount_files::way(directory.path(), &path), "{\"monitors\":").unwrap();
        let (first, second) = (way("first", None), way("second", Some(20)));
        assert_eq!(latest(Some(directory.path()), &path, &first).monitors, "first");
        // One that cannot be written does not keep the pool from being mounted.
        let nowhere = directory.path().join("file");
        std::fs::write(&nowhere, "").unwrap();
        assert_eq!(latest(Some(&nowhere), &path, &second).monitors, "second");
        assert_eq!(latest(Some(&nowhere), &path, &first).monitors, "second");
    }
}
