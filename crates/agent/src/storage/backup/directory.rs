//! The directories of backups.
//!
//! ```text
//! <directory>/<vm id>/<backup id>/              a backup
//! <directory>/<vm id>/<backup id>/manifest.json what is in it
//! <directory>/<vm id>/.<backup id>.unfinished/  one that is being written, or removed
//! ```

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use vmseal_api::atomic_file;
use vmseal_api::filter::{SUM_BLOCK, SUM_LEN};
use vmseal_api::host::backup::{BackupManifest, BackupPlace, LENGTH_MAX, parse};
use vmseal_api::id::BackupId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::file_error::failed;
use crate::storage::locked;
use crate::storage::new_name;
use crate::storage::transfer::{Parent, TransferDirectories, TransferError};

/// The name of manifests.
const MANIFEST: &str = "manifest.json";

/// The backups of one VM in one directory.
#[derive(Debug)]
pub struct Backups {
    /// The directory of the VM's backups, open.
    open: Parent,
    /// Its path.
    shown: PathBuf,
    allowed: TransferDirectories,
}

fn refused(error: TransferError, path: &Path) -> Problem {
    match error {
        TransferError::Outside(why) => Problem::invalid("directory", why),
        TransferError::File(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) => Problem::invalid(
                "directory",
                format!("{} is no directory of this host", path.display()),
            ),
            _ => failed(path, "opened", &error),
        },
    }
}

fn check(place: &BackupPlace) -> Result<(), Problem> {
    if place.directory.is_absolute() {
        return Ok(());
    }
    Err(Problem::invalid("directory", "must be an absolute path"))
}

impl Backups {
    /// The backups of the place's VM; none where there are none. Blocks.
    ///
    /// # Errors
    /// `invalid-request`; those of the file system.
    pub fn find(
        place: &BackupPlace,
        allowed: &TransferDirectories,
    ) -> Result<Option<Self>, Problem> {
        check(place)?;
        let outer = allowed.directory(&place.directory);
        let outer = outer.map_err(|error| refused(error, &place.directory))?;
        let name = place.vm.to_string();
        let shown = place.directory.join(&name);
        match outer.path().join(&name).symlink_metadata() {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&shown, "looked at", &error)),
        }
        let open = allowed.directory(&shown).map_err(|error| refused(error, &shown))?;
        Ok(Some(Self { open, shown, allowed: allowed.clone() }))
    }

    /// The same, of a VM that may have none yet: its directory is made. Blocks.
    ///
    /// # Errors
    /// As [`Backups::find`].
    pub fn find_or_make(
        place: &BackupPlace,
        allowed: &TransferDirectories,
    ) -> Result<Self, Problem> {
        if let Some(found) = Self::find(place, allowed)? {
            return Ok(found);
        }
        let outer = allowed.directory(&place.directory);
        let outer = outer.map_err(|error| refused(error, &place.directory))?;
        let (path, shown) =
            (outer.path().join(place.vm.to_string()), place.directory.join(place.vm.to_string()));
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .and_then(|()| atomic_file::flush_directory_of(&path))
            .map_err(|error| failed(&shown, "made", &error))?;
        Self::find(place, allowed)?
            .ok_or_else(|| failed(&shown, "opened", &io::Error::from(io::ErrorKind::NotFound)))
    }

    fn whole(&self, backup: BackupId) -> PathBuf {
        self.open.path().join(backup.to_string())
    }

    fn unfinished(&self, backup: BackupId) -> PathBuf {
        self.open.path().join(unfinished_name(backup))
    }

    /// The path of a backup that people see.
    #[must_use]
    pub fn shown(&self, backup: BackupId) -> PathBuf {
        self.shown.join(backup.to_string())
    }

    /// The manifest of a backup; none where there is no such backup, or one that is not whole.
    ///
    /// # Errors
    /// `damaged`; those of the file system.
    pub fn manifest(&self, backup: BackupId) -> Result<Option<BackupManifest>, Problem> {
        self.manifest_in(&backup.to_string(), backup)
    }

    /// Opens a directory beneath those that this host may read and write: who writes there may have put a link in its place.
    fn directory(&self, name: &str) -> Result<Option<Parent>, Problem> {
        let shown = self.shown.join(name);
        match self.allowed.directory(&shown) {
            Ok(open) => Ok(Some(open)),
            Err(TransferError::File(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(refused(error, &shown)),
        }
    }

    fn manifest_in(&self, name: &str, backup: BackupId) -> Result<Option<BackupManifest>, Problem> {
        let Some(directory) = self.directory(name)? else { return Ok(None) };
        let (path, shown) = (directory.path().join(MANIFEST), self.shown(backup).join(MANIFEST));
        let mut json = Vec::new();
        let read =
            regular(&path).and_then(|file| file.take(LENGTH_MAX as u64 + 1).read_to_end(&mut json));
        match read {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(&shown, "read", &error)),
        }
        let damaged =
            |why: String| Problem::new(ErrorCode::Damaged, format!("{}: {why}", shown.display()));
        let manifest = parse(&json).map_err(|error| damaged(error.to_string()))?;
        if manifest.backup != backup {
            return Err(damaged(format!("it is that of backup {}", manifest.backup)));
        }
        Ok(Some(manifest))
    }

    /// Begins a backup anew: an empty directory that has not its name yet. What backups before have left goes, as the directory was
    /// not there when they failed: a VM has one backup at a time that is written or removed.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn begin(&self, backup: BackupId) -> Result<Unfinished, Problem> {
        self.remove_unfinished(backup)?;
        for left in self.all_unfinished() {
            if let Err(problem) = self.remove_unfinished(left) {
                tracing::warn!(%problem, "an unfinished backup is left");
            }
        }
        let path = self.unfinished(backup);
        DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .map_err(|error| failed(&self.shown(backup), "made", &error))?;
        let open = self.directory(&unfinished_name(backup))?;
        let gone = || failed(&path, "opened", &io::Error::from(io::ErrorKind::NotFound));
        Ok(Unfinished { open: open.ok_or_else(gone)?, shown: self.shown(backup) })
    }

    /// The backups that are not finished, or that are being removed.
    fn all_unfinished(&self) -> Vec<BackupId> {
        let entries = std::fs::read_dir(self.open.path()).into_iter().flatten().flatten();
        entries.filter_map(|entry| unfinished_in(entry.file_name().to_str()?)).collect()
    }

    /// Removes what there is of a backup that was not finished, or that is being removed.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn remove_unfinished(&self, backup: BackupId) -> Result<(), Problem> {
        match std::fs::remove_dir_all(self.unfinished(backup)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed(&self.shown(backup), "removed", &error))
            }
            _ => Ok(()),
        }
    }

    /// Opens a file of a backup for reading.
    ///
    /// # Errors
    /// `not-found`; `damaged` when it is no regular file.
    pub fn file(&self, backup: BackupId, name: &str) -> Result<File, Problem> {
        let shown = self.shown(backup).join(name);
        let directory = self.directory(&backup.to_string())?;
        let path = directory.as_ref().map(|directory| directory.path().join(name));
        let opened =
            path.map_or_else(|| Err(io::ErrorKind::NotFound.into()), |path| regular(&path));
        opened.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                let what = format!("{} is not there: the backup is not whole", shown.display());
                Problem::new(ErrorCode::Damaged, what)
            }
            _ => failed(&shown, "opened", &error),
        })
    }

    /// An empty file without a name in the directory, for the sums of a disk of this length; in memory where the directory cannot
    /// be written. Its room is taken now: what fails later is no want of room.
    ///
    /// # Errors
    /// `no-space`; no memory for one.
    pub fn scratch(&self, length: u64) -> Result<File, Problem> {
        let made = OpenOptions::new()
            .read(true)
            .write(true)
            .mode(0o600)
            .custom_flags(libc::O_TMPFILE)
            .open(self.open.path());
        let file = match made {
            Ok(file) => file,
            Err(_) => in_memory().map_err(|error| failed(&self.shown, "written", &error))?,
        };
        let room = length.div_ceil(SUM_BLOCK as u64).max(1).saturating_mul(SUM_LEN as u64);
        let room = i64::try_from(room).unwrap_or(i64::MAX);
        match fallocate(&file, FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, room) {
            Err(Errno::ENOSPC | Errno::EDQUOT) => Err(Problem::new(
                ErrorCode::NoSpace,
                format!(
                    "there is no space on the directory of backups {}, where sums are noted while a backup is read: make room",
                    self.shown.display()
                ),
            )),
            // Not every file system can.
            _ => Ok(file),
        }
    }

    /// The path of the directory that is valid while this lives.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.open.path()
    }
}

fn unfinished_name(backup: BackupId) -> String {
    format!(".{backup}.unfinished")
}

/// The backup of such a name.
fn unfinished_in(name: &str) -> Option<BackupId> {
    name.strip_prefix('.')?.strip_suffix(".unfinished")?.parse().ok()
}

/// A file in memory.
pub fn in_memory() -> io::Result<File> {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    Ok(nix::sys::memfd::memfd_create(c"vmseal-backup", flags)?.into())
}

/// Opens a regular file: who writes to the directory may have put a link or a pipe there.
fn regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// The directory of a backup that is being written.
pub struct Unfinished {
    open: Parent,
    shown: PathBuf,
}

impl Unfinished {
    /// The path of a file that people see.
    #[must_use]
    pub fn shown(&self, name: &str) -> PathBuf {
        self.shown.join(name)
    }

    /// Makes an empty file.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn make(&self, name: &str) -> Result<File, Problem> {
        locked::make(&self.open.path().join(name))
            .map_err(|error| failed(&self.shown.join(name), "made", &error))
    }

    /// Writes the manifest, durably; all other files are flushed before.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn finish(&self, manifest: &BackupManifest) -> Result<(), Problem> {
        let path = self.open.path().join(MANIFEST);
        serde_json::to_vec_pretty(manifest)
            .map_err(io::Error::from)
            .and_then(|json| atomic_file::write(&path, &json, atomic_file::PRIVATE))
            .map_err(|error| failed(&self.shown.join(MANIFEST), "written", &error))
    }
}

/// Gives a written backup its name; one that has it stays as it is. Blocks.
///
/// # Errors
/// `not-found` when there is neither; those of the file system.
pub fn commit(place: &BackupPlace, allowed: &TransferDirectories) -> Result<(), Problem> {
    let gone = || {
        let what = format!("backup {} is not there: make it again", place.backup);
        Problem::new(ErrorCode::NotFound, what)
    };
    let backups = Backups::find(place, allowed)?.ok_or_else(gone)?;
    let (from, to) = (backups.unfinished(place.backup), backups.whole(place.backup));
    let failed = |error: io::Error| failed(&backups.shown(place.backup), "named", &error);
    if backups.manifest(place.backup)?.is_none() {
        if backups.manifest_in(&unfinished_name(place.backup), place.backup)?.is_none() {
            return Err(gone());
        }
        match new_name::give(&from, &to) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(gone()),
            Err(error) => return Err(failed(error)),
        }
    }
    atomic_file::flush_directory_of(&to).map_err(failed)
}

/// The manifest of a backup. Blocks.
///
/// # Errors
/// `not-found`, `damaged`.
pub fn read(place: &BackupPlace, allowed: &TransferDirectories) -> Result<BackupManifest, Problem> {
    let backups = Backups::find(place, allowed)?;
    let found = backups.map(|backups| backups.manifest(place.backup)).transpose()?.flatten();
    found.ok_or_else(|| absent(place))
}

/// There is no such backup.
pub(super) fn absent(place: &BackupPlace) -> Problem {
    let path = place.directory.join(place.vm.to_string()).join(place.backup.to_string());
    let what = format!(
        "there is no backup in {}: was it moved, or is its file system not mounted?",
        path.display()
    );
    Problem::new(ErrorCode::NotFound, what)
}

/// Removes a backup, whether it is whole or not. It has lost its name before any file is removed. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn discard(place: &BackupPlace, allowed: &TransferDirectories) -> Result<(), Problem> {
    let Some(backups) = Backups::find(place, allowed)? else { return Ok(()) };
    let (whole, unfinished) = (backups.whole(place.backup), backups.unfinished(place.backup));
    let failed = |error: io::Error| failed(&backups.shown(place.backup), "removed", &error);
    if whole.symlink_metadata().is_ok() {
        backups.remove_unfinished(place.backup)?;
        std::fs::rename(&whole, &unfinished)
            .and_then(|()| atomic_file::flush_directory_of(&whole))
            .map_err(failed)?;
    }
    backups.remove_unfinished(place.backup)?;
    // With the last one goes the VM's directory.
    if let Ok(outer) = allowed.directory(&place.directory) {
        let _ = std::fs::remove_dir(outer.path().join(place.vm.to_string()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::VmId;

    use super::*;

    #[test]
    fn a_backup_removes_what_others_of_its_vm_have_left_and_nothing_else() {
        let outer = tempfile::tempdir().unwrap();
        let allowed = TransferDirectories::anywhere();
        let [left, whole, backup] = std::array::from_fn(|_| BackupId::new());
        let place = BackupPlace { directory: outer.path().to_owned(), vm: VmId::new(), backup };
        let backups = Backups::find_or_make(&place, &allowed).unwrap();
        for name in [unfinished_name(left), whole.to_string(), ".other.unfinished".to_owned()] {
            std::fs::create_dir(backups.path().join(&name)).unwrap();
            std::fs::write(backups.path().join(name).join("disk0.luks"), "").unwrap();
        }
        backups.begin(backup).unwrap();
        let there = |name: &str| backups.path().join(name).exists();
        assert!(!there(&unfinished_name(left)) && there(&unfinished_name(backup)));
        assert!(there(&whole.to_string()) && there(".other.unfinished"));
    }
}
