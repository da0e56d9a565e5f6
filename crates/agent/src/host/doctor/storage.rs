//! Directories of datastores.

use std::fs::OpenOptions;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::sys::statfs::{FsType, NFS_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, statfs};

use super::Finding;
use crate::storage::mark;

/// A warning is given when a smaller part of the room is free.
const LITTLE: f64 = 0.05;

/// The bit of a mode that lets everybody write.
const WORLD_WRITABLE: u32 = 0o002;

/// Whether disks can be kept in a directory. No file stays in it.
pub fn datastore(directory: &Path) -> Finding {
    let check = format!("datastore {}", directory.display());
    let failed = |found: String, remedy: &str| Finding::failed(&check, found, remedy);
    let metadata = match std::fs::metadata(directory) {
        Ok(metadata) if metadata.is_dir() => metadata,
        Ok(_) => return failed("it is not a directory".into(), "name a directory"),
        Err(error) => return failed(error.to_string(), "create it, or mount its file system"),
    };
    if let Err(error) = unnamed_file(directory, 0) {
        let found = format!("no file can be created in it: {error}");
        return failed(found, "let the agent's user write to it");
    }
    let usage = match mark::usage(directory) {
        Ok(usage) => usage,
        Err(problem) => return failed(problem.to_string(), "check its file system"),
    };
    let kind = statfs(directory).map(|it| it.filesystem_type());
    let gib = |bytes: u64| bytes >> 30;
    let found = format!("{} GiB of {} GiB are free", gib(usage.free), gib(usage.capacity));
    let mut wrong = Vec::new();
    if metadata.mode() & WORLD_WRITABLE != 0 {
        wrong.push(("everybody may write to it", "deny writing to others (chmod o-w)"));
    }
    if (usage.free as f64) < usage.capacity as f64 * LITTLE {
        wrong.push(("it is nearly full", "free some room, or add another datastore"));
    }
    if let Some(weakness) = kind.ok().and_then(weakness_of) {
        wrong.push(weakness);
    }
    if unnamed_file(directory, libc::O_DIRECT).is_err() {
        wrong.push(("it has no O_DIRECT: data is cached twice", "use ext4 or XFS"));
    }
    if wrong.is_empty() {
        return Finding::ok(&check, found);
    }
    let (meanings, remedies): (Vec<_>, Vec<_>) = wrong.into_iter().unzip();
    let found = format!("{found}; {}", meanings.join("; "));
    Finding::warning(&check, found, &remedies.join("; "))
}

/// A file without a name, which is gone when it is closed.
fn unnamed_file(directory: &Path, flags: libc::c_int) -> std::io::Result<()> {
    let flags = libc::O_TMPFILE | flags;
    OpenOptions::new().write(true).mode(0o600).custom_flags(flags).open(directory).map(drop)
}

fn weakness_of(kind: FsType) -> Option<(&'static str, &'static str)> {
    match kind {
        TMPFS_MAGIC => {
            Some(("it is in memory: disks are lost at the next boot", "use a real disk"))
        }
        OVERLAYFS_SUPER_MAGIC => Some((
            "it is a container's own layer: disks are lost with the container",
            "mount a volume",
        )),
        NFS_SUPER_MAGIC => Some((
            "it is NFS: two hosts that use it would not notice each other",
            "use it on this host only",
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::super::Verdict;
    use super::*;

    #[test]
    fn a_directory_is_tried_and_left_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        assert_ne!(datastore(directory.path()).result, Verdict::Failed);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(directory.path(), open).unwrap();
        let found = datastore(directory.path());
        assert!(
            found.result == Verdict::Warning && found.found.contains("every user"),
            "{found:?}"
        );
        assert_eq!(datastore(Path::new("/nowhere")).result, Verdict::Failed);
        assert_eq!(datastore(Path::new("/dev/null")).result, Verdict::Failed);
        // Where nobody can write, not even root.
        assert_eq!(datastore(Path::new("/proc")).result, Verdict::Failed);
        let (memory, _) = weakness_of(TMPFS_MAGIC).unwrap();
        assert!(memory.contains("next boot"));
    }
}
