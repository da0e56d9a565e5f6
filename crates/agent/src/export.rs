//! Writing a disk to a file of the host's, for whoever takes it elsewhere.
//!
//! ```text
//! .NAME.vmseal-ID (new, 0600) ─► [LUKS2 header] ─► written by a filter ─► flushed    | Finish: NAME
//! ```
//! The file has another name until it is whole; that name follows from the export's id, so that whoever
//! repeats or calls off the export finds what an earlier attempt has left.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::filter::DiskActivity;
use vmseal_api::host::{DiskFacts, DiskSpec, ExportSpec, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::ExportFormat;
use vmseal_secret::{DEK_LEN, SecretBytes};

use crate::datastore::usage;
use crate::disk::{self, Open, Workshop, internal};
use crate::filter::{self, Control, Volume};
use crate::users::Slot;
use crate::{atomic_file, filling, rules};

/// How often an export is asked how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// What is to be exported.
pub struct Order {
    /// The VM.
    pub spec: VmSpec,
    /// The disk, one of the VM's.
    pub disk: DiskSpec,
    /// What is pinned of it.
    pub facts: DiskFacts,
    /// The VM's KEK, where the disk is encrypted.
    pub kek: Option<SecretBytes>,
    /// Where to, and as what.
    pub export: ExportSpec,
    /// The passphrase of a LUKS2 file.
    pub passphrase: Option<SecretBytes>,
}

/// The name of the file until it is whole.
fn unnamed(export: &ExportSpec) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(export.to.file_name().unwrap_or_default());
    name.push(format!(".vmseal-{}", export.export));
    export.to.with_file_name(name)
}

fn failed(path: &Path, what: &str, error: &io::Error) -> Problem {
    let code = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => ErrorCode::NoSpace,
        Some(libc::ENOENT | libc::ENOTDIR | libc::EACCES | libc::EROFS) => {
            ErrorCode::InvalidRequest
        }
        _ => ErrorCode::Internal,
    };
    Problem::new(code, format!("{} cannot be {what}: {error}", path.display()))
}

fn taken(path: &Path) -> Problem {
    let what =
        format!("{} is there already: name a file that is not, or remove it", path.display());
    Problem::new(ErrorCode::AlreadyExists, what)
}

/// Sees that an export can begin: nothing is there under its name.
///
/// # Errors
/// `invalid-request`, `already-exists`.
pub fn check(export: &ExportSpec) -> Result<(), Problem> {
    rules::check_export(export)?;
    match export.to.symlink_metadata() {
        Ok(_) => Err(taken(&export.to)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(&export.to, "made", &error)),
    }
}

/// Writes the file, not yet under its name, and flushes it. `progress` is told bytes done and in all.
///
/// # Errors
/// What is wrong; nothing is left then.
pub async fn write(
    order: Order,
    workshop: &Workshop,
    progress: impl Fn(u64, u64) + Send,
    cancelled: oneshot::Receiver<()>,
) -> Result<(), Problem> {
    let export = order.export.clone();
    let written = attempt(order, workshop, progress, cancelled).await;
    if written.is_err() {
        // The filter first: it has the file open.
        if let Err(error) = workshop.directory.sweep().await {
            tracing::warn!(export = %export.export, %error, "cannot remove an export's directory");
        }
        if let Err(problem) = remove(&export)
            && problem.code != ErrorCode::NotFound
        {
            tracing::warn!(export = %export.export, %problem, "a half-written export is left");
        }
    }
    written
}

async fn attempt(
    order: Order,
    workshop: &Workshop,
    progress: impl Fn(u64, u64) + Send,
    cancelled: oneshot::Receiver<()>,
) -> Result<(), Problem> {
    let slot = workshop.users.take().ok_or_else(disk::too_many)?;
    let directory = &workshop.directory;
    // Whatever an earlier attempt has left running lets go of the disk.
    directory.renew().await.map_err(internal)?;
    let (vm, export) = (order.spec.vm, order.export.clone());
    // Short, and not to be cancelled: a file must not come to be behind the back of whoever removes it.
    let (target, disk) = spawn_blocking(move || begin(order)).await.map_err(internal)??;
    tokio::select! {
        written = fill(vm, &export, disk, workshop, &slot, progress) => written?,
        Ok(()) = cancelled => {
            return Err(Problem::new(ErrorCode::Cancelled, "the export was called off"));
        }
    }
    spawn_blocking(move || target.sync_all()).await.map_err(internal)?.map_err(internal)
}

/// Has a filter of its own write the file.
async fn fill(
    vm: VmId,
    export: &ExportSpec,
    disk: filter::Disk,
    workshop: &Workshop,
    slot: &Slot,
    progress: impl Fn(u64, u64) + Send,
) -> Result<(), Problem> {
    let directory = &workshop.directory;
    let id = disk.disk;
    let process = filter::start(&workshop.filter, vm, directory, vec![disk], slot.filter())
        .map_err(internal)?;
    let control = Control::of(directory);
    control.ready(&process, directory).await.map_err(internal)?;
    loop {
        let status = control.status_of(&process, directory).await.map_err(internal)?;
        match status.disks.into_iter().next().map(|disk| disk.state) {
            Some(DiskActivity::Exporting { done, total }) => progress(done, total),
            Some(DiskActivity::Idle) => break,
            Some(DiskActivity::Failed { message }) => return Err(told_if_full(export, message)),
            other => return Err(internal(format!("the filter of an export says {other:?}"))),
        }
        tokio::time::sleep(PROGRESS_INTERVAL).await;
    }
    filling::end_idle(&control, id).await?;
    process.end_within(filter::SHUTDOWN_TIMEOUT).await;
    directory.sweep().await.map_err(internal)
}

fn told_if_full(export: &ExportSpec, message: String) -> Problem {
    let directory = export.to.parent().unwrap_or(Path::new("/"));
    // As much as a file system may keep to itself.
    let full = usage(directory).is_ok_and(|usage| usage.free < 16 << 20);
    if !full {
        return internal(message);
    }
    let what = format!("{} is full: make room. {message}", directory.display());
    Problem::new(ErrorCode::NoSpace, what)
}

/// Opens the disk and makes the file, with its header where it has one.
fn begin(order: Order) -> Result<(File, filter::Disk), Problem> {
    let Order { spec, disk, facts, kek, export, passphrase } = order;
    let (Open { file, offset, key, .. }, size) = match export.format {
        // All of the image, as it is: its ciphertext is the disk that is written out.
        ExportFormat::Sealed => {
            let (file, length) = disk::open_sealed(&spec, &disk, &facts)?;
            (Open { file, offset: 0, key: None, notice: None }, length)
        }
        _ => (disk::open(&spec, &disk, &facts, kek.as_ref())?, disk.size),
    };
    let allocated = file.metadata().map_err(internal)?.blocks().saturating_mul(512);
    let needed = match export.format {
        // Everything is ciphertext, zeroes too.
        ExportFormat::Luks2 => vmseal_luks::DATA_OFFSET + disk.size,
        ExportFormat::Raw | ExportFormat::Qcow2 | ExportFormat::Sealed => allocated.min(size),
    };
    let mut target = make(&export, needed)?;
    let format = match export.format {
        ExportFormat::Qcow2 => Volume::Qcow2,
        ExportFormat::Raw | ExportFormat::Sealed => {
            target.set_len(size).map_err(|error| failed(&export.to, "made", &error))?;
            Volume::Raw
        }
        ExportFormat::Luks2 => {
            let passphrase = passphrase.ok_or_else(|| internal("the passphrase is not there"))?;
            let length = vmseal_luks::DATA_OFFSET + disk.size;
            target.set_len(length).map_err(|error| failed(&export.to, "made", &error))?;
            let dek = SecretBytes::random(DEK_LEN).map_err(internal)?;
            vmseal_luks::create_for_passphrase(&mut target, &dek, &passphrase).map_err(internal)?;
            let key = dek.to_memfd().map_err(internal)?;
            Volume::Luks2 { key, offset: vmseal_luks::DATA_OFFSET }
        }
    };
    let work = filter::Work::Export { target: target.try_clone().map_err(internal)?, format };
    // Nothing is written to the disk.
    let keeps_room = true;
    let disk = disk.disk;
    let disk = filter::Disk { disk, size, file, offset, key, keeps_room, work };
    Ok((target, disk))
}

/// Makes the file; what an earlier attempt has left is removed.
fn make(export: &ExportSpec, needed: u64) -> Result<File, Problem> {
    check(export)?;
    let path = unnamed(export);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed(&path, "removed", &error));
        }
        _ => {}
    }
    let directory = export.to.parent().unwrap_or(Path::new("/"));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .map_err(|error| failed(&export.to, "made", &error))?;
    let free = usage(directory)?.free;
    if needed <= free {
        return Ok(file);
    }
    let _ = std::fs::remove_file(&path);
    let what = format!(
        "{needed} bytes are needed in {} and {free} are free: make room, or name another place",
        directory.display()
    );
    Err(Problem::new(ErrorCode::NoSpace, what))
}

/// Gives a written file its name, which nothing has yet. One that has it already is left as it is.
///
/// # Errors
/// `already-exists` when something else has the name; `not-found` when there is nothing to be named.
pub fn name(export: &ExportSpec) -> Result<(), Problem> {
    let (from, to) = (unnamed(export), &export.to);
    match renameat2(AT_FDCWD, &from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE) {
        Ok(()) => {}
        Err(Errno::EEXIST) => return Err(taken(to)),
        // Named before: the answer was lost.
        Err(Errno::ENOENT) if to.symlink_metadata().is_ok() => {}
        Err(Errno::ENOENT) => {
            let what = format!("what was exported to {} is gone: export it again", to.display());
            return Err(Problem::new(ErrorCode::NotFound, what));
        }
        Err(error) => return Err(failed(to, "named", &error.into())),
    }
    atomic_file::flush_directory_of(to).map_err(|error| failed(to, "named", &error))
}

/// Removes what has been written and has no name yet.
///
/// # Errors
/// `not-found` when there is no such thing.
pub fn remove(export: &ExportSpec) -> Result<(), Problem> {
    rules::check_export(export)?;
    let path = unnamed(export);
    match std::fs::remove_file(&path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let what = format!("there is no half-written {}", export.to.display());
            Err(Problem::new(ErrorCode::NotFound, what))
        }
        Err(error) => Err(failed(&path, "removed", &error)),
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::TaskId;

    use super::*;

    fn spec(to: PathBuf) -> ExportSpec {
        ExportSpec { export: TaskId::new(), to, format: ExportFormat::Raw, passphrase: None }
    }

    #[test]
    fn a_file_gets_its_name_once_and_replaces_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let export = spec(directory.path().join("out.raw"));
        assert_eq!(name(&export).unwrap_err().code, ErrorCode::NotFound);
        drop(make(&export, 0).unwrap());
        // What an earlier attempt left is no hindrance.
        drop(make(&export, 0).unwrap());
        assert!(!export.to.exists());
        name(&export).unwrap();
        name(&export).unwrap();
        assert!(export.to.exists() && !unnamed(&export).exists());
        assert_eq!(remove(&export).unwrap_err().code, ErrorCode::NotFound);
        assert!(export.to.exists(), "what has its name is never removed");
        assert_eq!(check(&export).unwrap_err().code, ErrorCode::AlreadyExists);
        let second = ExportSpec { export: TaskId::new(), ..export.clone() };
        std::fs::write(unnamed(&second), "x").unwrap();
        assert_eq!(name(&second).unwrap_err().code, ErrorCode::AlreadyExists);
        remove(&second).unwrap();
    }

    #[test]
    fn places_that_cannot_be_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for to in ["relative", "/", "/tmp/.."] {
            let problem = check(&spec(to.into())).unwrap_err();
            assert_eq!(problem.code, ErrorCode::InvalidRequest, "{to}: {problem}");
        }
        let nowhere = spec(directory.path().join("none/out"));
        assert_eq!(make(&nowhere, 0).unwrap_err().code, ErrorCode::InvalidRequest);
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/nowhere", &link).unwrap();
        assert_eq!(check(&spec(link)).unwrap_err().code, ErrorCode::AlreadyExists);
        let large = spec(directory.path().join("large"));
        assert_eq!(make(&large, u64::MAX).unwrap_err().code, ErrorCode::NoSpace);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "debris");
        let plain = ExportSpec { format: ExportFormat::Luks2, ..large };
        assert_eq!(check(&plain).unwrap_err().field.as_deref(), Some("passphrase"));
    }
}
