//! Exports: writing a disk to a file on the host.
//!
//! ```text
//! .NAME.vmseal-ID (new, 0600) ─► [LUKS2 header] ─► written by a filter ─► flushed    | commit: NAME
//! ```
//! That of a VM's TPM holds nothing: what the TPM keeps is written in its place, by no filter ([`crate::storage::tpm_export`]).
//!
//! Until it is complete the file has another name, derived from the export's id, so that a repeated or
//! cancelled export finds what an earlier attempt has left.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskFacts, DiskRole, DiskSpec, ExportJob, VmSpec};
use vmseal_api::id::TaskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;
use vmseal_api::transfer::ExportFormat;
use vmseal_secret::{DEK_LEN, SecretBytes};

use crate::filter::{self, Volume};
use crate::hypervisor::tpm::Swtpm;
use crate::rules;
use crate::storage::builder::{self, DiskBuilder, internal};
use crate::storage::exported::Exported;
use crate::storage::exporting;
use crate::storage::locked::{self, Access};
use crate::storage::mark::usage;
use crate::storage::new_name;
use crate::storage::open;
use crate::storage::opening::{self, Open};
use crate::storage::tpm_at_rest::TpmAtRest;
use crate::storage::tpm_export;
use crate::storage::transfer::{Parent, TransferDirectories, TransferError};
use vmseal_api::atomic_file;

/// An export: its task, target and format.
#[derive(Clone, Debug)]
pub struct Export {
    /// The task, from which the unfinished file's name is derived.
    pub task: TaskId,
    /// The job.
    pub job: ExportJob,
}

/// A disk to export.
pub struct ExportRequest {
    /// The VM.
    pub spec: VmSpec,
    /// The disk, one of the VM's.
    pub disk: DiskSpec,
    /// The facts that are pinned of it.
    pub facts: DiskFacts,
    /// The VM's KEK, where the disk is encrypted.
    pub kek: Option<SecretBytes>,
    /// The export.
    pub export: Export,
    /// The passphrase of a LUKS2 file.
    pub passphrase: Option<SecretBytes>,
    /// The path of its record.
    pub record: PathBuf,
    /// The program that opens what a TPM keeps.
    pub swtpm: Swtpm,
}

/// The name of the unfinished file.
fn unnamed(export: &Export) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(export.job.to.file_name().unwrap_or_default());
    name.push(format!(".vmseal-{}", export.task));
    export.job.to.with_file_name(name)
}

/// A file in an open directory, by the name that it has in `path`.
fn within(parent: &Parent, path: &Path) -> PathBuf {
    parent.path().join(path.file_name().unwrap_or_default())
}

fn parent(export: &Export, allowed: &TransferDirectories) -> Result<Parent, Problem> {
    rules::check_export(&export.job)?;
    allowed.parent(&export.job.to).map_err(|refused| match refused {
        TransferError::Outside(why) => Problem::invalid("to", why),
        TransferError::File(error) => failed(&export.job.to, "made", &error),
    })
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

/// Checks that an export can begin: this host may write there, and there is no file of its name.
///
/// # Errors
/// `invalid-request`, `already-exists`.
pub fn check(export: &Export, allowed: &TransferDirectories) -> Result<(), Problem> {
    nothing_has_its_name(export, &parent(export, allowed)?)
}

fn nothing_has_its_name(export: &Export, parent: &Parent) -> Result<(), Problem> {
    match within(parent, &export.job.to).symlink_metadata() {
        Ok(_) => Err(taken(&export.job.to)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(failed(&export.job.to, "made", &error)),
    }
}

/// Writes and flushes the unfinished file. `progress` receives the bytes done and the total.
///
/// # Errors
/// The problem; nothing is left then.
pub async fn write(
    request: ExportRequest,
    builder: &DiskBuilder,
    progress: impl Fn(u64, u64) + Send,
    cancelled: oneshot::Receiver<()>,
) -> Result<(), Problem> {
    let (export, record) = (request.export.clone(), request.record.clone());
    let written = attempt(request, builder, progress, cancelled).await;
    if written.is_err() {
        // The filter first: it has the file open.
        if let Err(error) = builder.directory.sweep().await {
            tracing::warn!(export = %export.task, %error, "cannot remove an export's directory");
        }
        if let Err(problem) = remove(&export, &record, &builder.transfer)
            && !matches!(problem.code, ErrorCode::NotFound | ErrorCode::AlreadyExists)
        {
            tracing::warn!(export = %export.task, %problem, "an unfinished export is left");
        }
    }
    written
}

async fn attempt(
    request: ExportRequest,
    builder: &DiskBuilder,
    progress: impl Fn(u64, u64) + Send,
    cancelled: oneshot::Receiver<()>,
) -> Result<(), Problem> {
    if request.disk.role == DiskRole::Tpm {
        return write_tpm(request, builder, cancelled).await;
    }
    let slot = builder.users.take().ok_or_else(builder::too_many)?;
    let directory = &builder.directory;
    // A filter of an earlier attempt is ended, which releases the disk.
    directory.renew().await.map_err(internal)?;
    let (vm, export, record) = (request.spec.vm, request.export.clone(), request.record.clone());
    // Short, and not cancelled: no file may be created after whoever removes the export has looked.
    let allowed = builder.transfer.clone();
    let begun = spawn_blocking(move || begin(request, &allowed));
    let (target, disk) = begun.await.map_err(internal)??;
    tokio::select! {
        written = exporting::run(vm, disk, builder, &slot, progress, |message| {
            explained_if_full(&export, message)
        }) => drop(written?),
        Ok(()) = cancelled => {
            return Err(given_up());
        }
    }
    let flushed = move || target.sync_all().and_then(|()| Exported::written(&record));
    spawn_blocking(flushed).await.map_err(internal)?.map_err(internal)
}

fn given_up() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the export was cancelled")
}

/// Writes what the VM's TPM keeps. It is short, and is not broken off; but who has cancelled it finds no file when it ends.
async fn write_tpm(
    request: ExportRequest,
    builder: &DiskBuilder,
    mut cancelled: oneshot::Receiver<()>,
) -> Result<(), Problem> {
    let ExportRequest { spec, disk, facts, kek, export, record, swtpm, .. } = request;
    let at_rest = TpmAtRest { spec, disk, facts, kek };
    let (kept, _side) = at_rest.take(&swtpm, builder).await?;
    if cancelled.try_recv().is_ok() {
        return Err(given_up());
    }
    let allowed = builder.transfer.clone();
    let write = move || {
        let mut target = make(&export, tpm_export::length(&kept), &record, &allowed)?;
        tpm_export::write(&kept, &mut target)
            .and_then(|()| target.sync_all())
            .map_err(|error| failed(&export.job.to, "written", &error))?;
        Exported::written(&record).map_err(internal)
    };
    spawn_blocking(write).await.map_err(internal)??;
    // Nobody would give the file its name, or remove it.
    if cancelled.try_recv().is_ok() { Err(given_up()) } else { Ok(()) }
}

fn explained_if_full(export: &Export, message: String) -> Problem {
    full_or_internal(export.job.to.parent().unwrap_or(Path::new("/")), message)
}

/// The problem of a filter that could not write to a directory: that it is full, where it is.
pub fn full_or_internal(directory: &Path, message: String) -> Problem {
    // The part of the room that a file system may keep for itself.
    let full = usage(directory).is_ok_and(|usage| usage.free < 16 << 20);
    if !full {
        return internal(message);
    }
    let what = format!("{} is full: make room. {message}", directory.display());
    Problem::new(ErrorCode::NoSpace, what)
}

/// Opens the disk and makes the file, with its header where it has one.
fn begin(
    request: ExportRequest,
    allowed: &TransferDirectories,
) -> Result<(File, filter::Disk), Problem> {
    let ExportRequest { spec, disk, facts, kek, export, passphrase, record, .. } = request;
    let sealed = export.job.format == ExportFormat::Sealed;
    let opened = match (export.job.snapshot, sealed) {
        (None, true) => open::open_sealed(&spec, &disk, &facts),
        (Some(snapshot), true) => opening::open_sealed_kept(&spec, &disk, &facts, snapshot),
        (None, false) => open::open(&spec, &disk, &facts, kek.as_ref(), Access::Read)
            .map(|open| (open, disk.size)),
        (Some(snapshot), false) => opening::open_kept(&spec, &disk, &facts, kek.as_ref(), snapshot)
            .map(|open| (open, disk.size)),
    };
    let (Open { file, layers, offset, key, shared, .. }, size) = opened?;
    let room = |file: &File| file.metadata().map(|it| it.blocks().saturating_mul(512));
    let rooms = std::iter::once(&file).chain(&layers).map(room);
    let allocated: u64 = rooms.sum::<io::Result<_>>().map_err(internal)?;
    let needed = match export.job.format {
        // Everything is ciphertext, zeroes too.
        ExportFormat::Luks2 => vmseal_luks::DATA_OFFSET + disk.size,
        ExportFormat::Raw | ExportFormat::Qcow2 | ExportFormat::Sealed => allocated.min(size),
    };
    let mut target = make(&export, needed, &record, allowed)?;
    let format = match export.job.format {
        ExportFormat::Qcow2 => Volume::Qcow2,
        ExportFormat::Raw | ExportFormat::Sealed => {
            target.set_len(size).map_err(|error| failed(&export.job.to, "made", &error))?;
            Volume::Raw
        }
        ExportFormat::Luks2 => {
            let passphrase = passphrase.ok_or_else(|| internal("the passphrase is not there"))?;
            let length = vmseal_luks::DATA_OFFSET + disk.size;
            target.set_len(length).map_err(|error| failed(&export.job.to, "made", &error))?;
            let dek = SecretBytes::random(DEK_LEN).map_err(internal)?;
            vmseal_luks::create_for_passphrase(&mut target, &dek, &passphrase).map_err(internal)?;
            let key = dek.to_memfd().map_err(internal)?;
            Volume::Luks2 { key, offset: vmseal_luks::DATA_OFFSET }
        }
    };
    let work = filter::Work::Export {
        target: target.try_clone().map_err(internal)?,
        format,
        sums: filter::Sums::default(),
    };
    // Nothing is written to the disk.
    let keeps_room = true;
    let disk = disk.disk;
    let (beside, replica) = (None, None);
    let mirror = None;
    let disk = filter::Disk {
        disk,
        size,
        file,
        layers,
        offset,
        key,
        shared,
        keeps_room,
        work,
        beside,
        replica,
        mirror,
    };
    Ok((target, disk))
}

/// Makes the file, of which so many bytes are needed; removes what an earlier attempt has left.
///
/// # Errors
/// `already-exists`, `no-space`, `invalid-request`.
pub fn make(
    export: &Export,
    needed: u64,
    record: &Path,
    allowed: &TransferDirectories,
) -> Result<File, Problem> {
    let parent = parent(export, allowed)?;
    nothing_has_its_name(export, &parent)?;
    if let Some(before) = Exported::read(record) {
        before.remove_unnamed();
    }
    let shown = unnamed(export);
    let path = within(&parent, &shown);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(failed(&shown, "removed", &error));
        }
        _ => {}
    }
    let file = locked::make(&path).map_err(|error| failed(&export.job.to, "made", &error))?;
    // The record is written before any data, so that the file is found again from here on.
    Exported::begun(export.task, &shown, &file)
        .and_then(|begun| begun.write(record))
        .map_err(|error| failed(record, "written", &error))?;
    let free = usage(parent.path())?.free;
    if needed <= free {
        return Ok(file);
    }
    let _ = std::fs::remove_file(&path);
    let directory = export.job.to.parent().unwrap_or(Path::new("/"));
    let what = format!(
        "{} are needed in {} and {} are free: make room, or choose another place",
        Size(needed),
        directory.display(),
        Size(free)
    );
    Err(Problem::new(ErrorCode::NoSpace, what))
}

/// Which file has the export's final name.
enum NameHolder {
    /// There is none.
    Free,
    /// The exported file.
    Export,
    /// Another file.
    Other,
    /// Unknown: the host was restarted, and nothing is on record.
    Unknown,
}

fn named(export: &Export, record: &Path, parent: &Parent) -> NameHolder {
    let Ok(metadata) = within(parent, &export.job.to).symlink_metadata() else {
        return NameHolder::Free;
    };
    match Exported::read(record).filter(|record| record.is_of(export.task)) {
        Some(record) if record.is_file(&metadata) => NameHolder::Export,
        Some(_) => NameHolder::Other,
        None => NameHolder::Unknown,
    }
}

/// The operator must find out whether it is the exported file.
fn name_in_doubt(to: &Path) -> Problem {
    let what = format!(
        "{} exists, and it is no longer known whether it is the exported file: check it",
        to.display()
    );
    Problem::new(ErrorCode::AlreadyExists, what)
}

/// Gives a written file its final name. A file that already has that name is not replaced.
///
/// # Errors
/// `already-exists` when another file has the name, or when that is unknown; `not-found` when there is no
/// written file.
pub fn name(export: &Export, record: &Path, allowed: &TransferDirectories) -> Result<(), Problem> {
    let (parent, to) = (parent(export, allowed)?, &export.job.to);
    let (from, new) = (within(&parent, &unnamed(export)), within(&parent, to));
    match new_name::give(&from, &new) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(taken(to)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match named(export, record, &parent) {
                // The answer to an earlier request was lost.
                NameHolder::Export => {}
                NameHolder::Unknown => return Err(name_in_doubt(to)),
                NameHolder::Free | NameHolder::Other => {
                    let what =
                        format!("what was exported to {} is gone: export it again", to.display());
                    return Err(Problem::new(ErrorCode::NotFound, what));
                }
            }
        }
        Err(error) => return Err(failed(to, "named", &error)),
    }
    atomic_file::flush_directory_of(&new).map_err(|error| failed(to, "named", &error))
}

/// Removes the unfinished or uncommitted file.
///
/// # Errors
/// `already-exists` when it has its final name, or when that is unknown; `not-found` when it exists under
/// neither name.
pub fn remove(
    export: &Export,
    record: &Path,
    allowed: &TransferDirectories,
) -> Result<(), Problem> {
    rules::check_export(&export.job)?;
    let gone = || {
        let what = format!("there is no unfinished export to {}", export.job.to.display());
        Problem::new(ErrorCode::NotFound, what)
    };
    let parent = match allowed.parent(&export.job.to) {
        Ok(parent) => parent,
        // An earlier agent could write there, or the directory is gone: the file on record is identified by
        // its inode.
        Err(_) => {
            let begun = Exported::read(record).filter(|record| record.is_of(export.task));
            return begun.map(|begun| begun.remove_unnamed()).ok_or_else(gone);
        }
    };
    let (path, to) = (unnamed(export), &export.job.to);
    // It has both names where an agent died while it gave it the final one: then nobody was told that it has it.
    new_name::take_back(&within(&parent, &path), &within(&parent, to))
        .map_err(|error| failed(to, "removed", &error))?;
    match std::fs::remove_file(within(&parent, &path)) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            match named(export, record, &parent) {
                NameHolder::Export => Err(rules::has_its_name(&export.job.to)),
                NameHolder::Unknown => Err(name_in_doubt(&export.job.to)),
                NameHolder::Free | NameHolder::Other => Err(gone()),
            }
        }
        Err(error) => Err(failed(&path, "removed", &error)),
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::DiskId;

    use super::*;

    fn spec(to: PathBuf) -> Export {
        let (disk, format) = (DiskId::new(), ExportFormat::Raw);
        Export {
            task: TaskId::new(),
            job: ExportJob { disk, to, format, passphrase: None, snapshot: None },
        }
    }

    #[test]
    fn a_file_gets_its_name_once_and_replaces_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let export = spec(directory.path().join("out.raw"));
        assert_eq!(
            name(&export, &record, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::NotFound
        );
        drop(make(&export, 0, &record, &TransferDirectories::anywhere()).unwrap());
        // The remains of an earlier attempt do not matter.
        drop(make(&export, 0, &record, &TransferDirectories::anywhere()).unwrap());
        assert!(!export.job.to.exists());
        name(&export, &record, &TransferDirectories::anywhere()).unwrap();
        name(&export, &record, &TransferDirectories::anywhere()).unwrap();
        assert!(export.job.to.exists() && !unnamed(&export).exists());
        let told = remove(&export, &record, &TransferDirectories::anywhere()).unwrap_err();
        assert!(
            told.code == ErrorCode::AlreadyExists && told.detail.contains("is whole"),
            "{told}"
        );
        assert!(export.job.to.exists(), "a committed export was removed");
        assert_eq!(
            check(&export, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::AlreadyExists
        );
        let second = Export { task: TaskId::new(), ..export.clone() };
        std::fs::write(unnamed(&second), "x").unwrap();
        assert_eq!(
            name(&second, &record, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::AlreadyExists
        );
        remove(&second, &record, &TransferDirectories::anywhere()).unwrap();
    }

    #[test]
    fn an_export_that_has_both_names_is_removed_with_both() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let export = spec(directory.path().join("out.raw"));
        let anywhere = TransferDirectories::anywhere();
        drop(make(&export, 0, &record, &anywhere).unwrap());
        std::fs::hard_link(unnamed(&export), &export.job.to).unwrap();
        remove(&export, &record, &anywhere).unwrap();
        assert!(!unnamed(&export).exists() && !export.job.to.exists());
    }

    #[test]
    fn a_file_that_has_the_name_is_not_taken_for_the_export() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let export = spec(directory.path().join("out.raw"));
        let _inode_is_not_given_again =
            make(&export, 0, &record, &TransferDirectories::anywhere()).unwrap();
        std::fs::remove_file(unnamed(&export)).unwrap();
        assert_eq!(
            remove(&export, &record, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::NotFound
        );
        std::fs::write(&export.job.to, "somebody else's").unwrap();
        assert_eq!(
            name(&export, &record, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::NotFound
        );
        assert_eq!(
            remove(&export, &record, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::NotFound
        );
        // After a reboot there is no record.
        std::fs::remove_file(&record).unwrap();
        for told in [
            name(&export, &record, &TransferDirectories::anywhere()),
            remove(&export, &record, &TransferDirectories::anywhere()),
        ] {
            let told = told.unwrap_err();
            assert!(
                told.code == ErrorCode::AlreadyExists && !told.detail.contains("whole"),
                "{told}"
            );
        }
    }

    #[test]
    fn the_next_export_of_a_disk_removes_what_the_last_one_left_unnamed() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let left = spec(directory.path().join("left"));
        drop(make(&left, 0, &record, &TransferDirectories::anywhere()).unwrap());
        drop(
            make(
                &spec(directory.path().join("next")),
                0,
                &record,
                &TransferDirectories::anywhere(),
            )
            .unwrap(),
        );
        assert!(!unnamed(&left).exists());
    }

    #[test]
    fn nothing_is_written_where_this_host_may_not() {
        let directory = tempfile::tempdir().unwrap();
        let record = directory.path().join("record");
        let (inside, outside) = (directory.path().join("in"), directory.path().join("out"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
        let allowed = TransferDirectories::new(vec![inside.clone()]).unwrap();
        for to in [outside.join("a"), inside.join("link/a"), inside.join("../out/a")] {
            let refused = check(&spec(to.clone()), &allowed).unwrap_err();
            assert_eq!(refused.field.as_deref(), Some("to"), "{refused}");
            assert!(refused.detail.contains("--transfer-directory"), "{refused}");
            assert!(make(&spec(to), 0, &record, &allowed).is_err());
        }
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
        let export = spec(inside.join("a"));
        drop(make(&export, 0, &record, &allowed).unwrap());
        // An agent that may no longer write there still removes the unfinished file.
        let none = TransferDirectories::new(Vec::new()).unwrap();
        remove(&export, &record, &none).unwrap();
        assert!(!unnamed(&export).exists());
        drop(make(&export, 0, &record, &allowed).unwrap());
        name(&export, &record, &allowed).unwrap();
        assert!(export.job.to.exists());
    }

    #[test]
    fn invalid_places_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        for to in ["relative", "/", "/tmp/.."] {
            let problem = check(&spec(to.into()), &TransferDirectories::anywhere()).unwrap_err();
            assert_eq!(problem.code, ErrorCode::InvalidRequest, "{to}: {problem}");
        }
        let records = tempfile::tempdir().unwrap();
        let record = records.path().join("record");
        let nowhere = spec(directory.path().join("none/out"));
        assert_eq!(
            make(&nowhere, 0, &record, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::InvalidRequest
        );
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/nowhere", &link).unwrap();
        assert_eq!(
            check(&spec(link), &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::AlreadyExists
        );
        let large = spec(directory.path().join("large"));
        assert_eq!(
            make(&large, u64::MAX, &record, &TransferDirectories::anywhere()).unwrap_err().code,
            ErrorCode::NoSpace
        );
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "debris");
        let job = ExportJob { format: ExportFormat::Luks2, ..large.job };
        let plain = Export { job, ..large };
        assert_eq!(
            check(&plain, &TransferDirectories::anywhere()).unwrap_err().field.as_deref(),
            Some("passphrase")
        );
    }
}
