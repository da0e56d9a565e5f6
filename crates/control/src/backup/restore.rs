//! Makes a data directory of a backup.
//!
//! ```text
//!   empty ─► `restoring` ─► files, the inventory last ─► checked, settled ─► `restoring` removed: a server's
//! ```
//!
//! A server does not start in a directory that has the file `restoring`, so that one that was half restored is never
//! taken for a new one; the same restore, given again, begins from the start.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use vmseal_api::atomic_file::{self, PRIVATE, PUBLIC, private_directory};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::server_backup::{FILES, FileList, INVENTORY, ListedFile, PROVIDERS};
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use super::frames::FrameReader;
use super::inventory::{self, InventoryCount};
use super::{damaged, open};
use crate::setup::authority::Authority;
use crate::setup::initialise::{self, RESTORING};
use crate::store::Store;

/// The longest file beside the inventory, in bytes.
const SMALL_MAX: u64 = 1 << 20;

/// The lock of a data directory; it stays where a restore failed.
const LOCK: &str = "lock";

/// A restored server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredServer {
    /// When the backup was made.
    pub made: Timestamp,
    /// The version of vmseal that made it.
    pub vmseal: String,
    /// What its inventory has.
    pub inventory: InventoryCount,
    /// Whether the administrator's token was in it.
    pub has_token: bool,
}

fn failed(path: &Path, error: &io::Error) -> Problem {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
        _ => ErrorCode::Internal,
    };
    Problem::new(code, format!("{}: {error}", path.display()))
}

fn read_from(file: &Path) -> Result<BufReader<File>, Problem> {
    File::open(file).map(BufReader::new).map_err(|error| {
        let detail = format!("cannot read the backup {}: {error}", file.display());
        Problem::new(ErrorCode::NotFound, detail)
    })
}

/// Reads all of a backup, and checks that it is whole. Nothing is written.
///
/// # Errors
/// `key-mismatch` for a wrong passphrase; `damaged`; `unsupported` for one of a later version.
pub fn verify(file: &Path, passphrase: &SecretBytes) -> Result<FileList, Problem> {
    let (list, mut frames) = open(read_from(file)?, passphrase)?;
    for listed in &list.files {
        let read = io::copy(&mut (&mut frames).take(listed.length), &mut io::sink());
        if read.map_err(damaged)? != listed.length {
            return Err(damaged(format!("'{}' is cut off", listed.path)));
        }
    }
    frames.finish().map_err(damaged)?;
    Ok(list)
}

/// Restores a backup into a directory that is empty or missing.
///
/// # Errors
/// Those of [`verify`]; `already-exists` for a directory that is not empty; `in-use` while another process restores or
/// serves it. Nothing is left in the directory then.
pub async fn restore(
    file: &Path,
    passphrase: &SecretBytes,
    data_dir: &Path,
) -> Result<RestoredServer, Problem> {
    // Before anything is written: a wrong passphrase or file changes nothing.
    let (list, frames) = open(read_from(file)?, passphrase)?;
    let is_new = !data_dir.exists();
    private_directory(data_dir).map_err(|error| failed(data_dir, &error))?;
    check_empty(data_dir)?;
    let lock = initialise::lock(data_dir)
        .map_err(|error| Problem::new(ErrorCode::InUse, error.to_string()))?;
    let marker = data_dir.join(RESTORING);
    let restored = async {
        let why = b"A restore of a backup has begun and not ended: give it again.\n";
        atomic_file::write(&marker, why, PRIVATE).map_err(|error| failed(&marker, &error))?;
        // What an interrupted restore has left.
        remove_restored(data_dir).map_err(|error| failed(data_dir, &error))?;
        write_files(data_dir, &list, frames)?;
        let count = settle(data_dir, &list).await?;
        std::fs::remove_file(&marker)
            .and_then(|()| atomic_file::flush_directory_of(&marker))
            .map_err(|error| failed(&marker, &error))?;
        Ok(count)
    }
    .await;
    match restored {
        Ok(inventory) => {
            let has_token = list.files.iter().any(|file| file.path == "admin.token");
            Ok(RestoredServer { made: list.made, vmseal: list.vmseal, inventory, has_token })
        }
        Err(problem) => {
            // The first error is the one to report. The marker goes last.
            let _ = remove_restored(data_dir).and_then(|()| std::fs::remove_file(&marker));
            let _ = std::fs::remove_file(data_dir.join(LOCK));
            if is_new {
                let _ = std::fs::remove_dir(data_dir);
            }
            drop(lock);
            Err(problem)
        }
    }
}

/// Refuses a directory that has anything but what a restore leaves that was interrupted.
///
/// # Errors
/// `already-exists`.
pub fn check_empty(data_dir: &Path) -> Result<(), Problem> {
    if !data_dir.exists() || data_dir.join(RESTORING).exists() {
        return Ok(());
    }
    let entries = std::fs::read_dir(data_dir).map_err(|error| failed(data_dir, &error))?;
    let other = entries.flatten().find(|entry| entry.file_name() != LOCK);
    match other {
        None => Ok(()),
        Some(other) => {
            let detail = format!(
                "{} is not empty (it has '{}'): a server is restored into an empty directory",
                data_dir.display(),
                other.file_name().to_string_lossy()
            );
            Err(Problem::new(ErrorCode::AlreadyExists, detail))
        }
    }
}

/// Removes what a restore writes.
fn remove_restored(data_dir: &Path) -> io::Result<()> {
    let absent = |outcome: io::Result<()>| match outcome {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    };
    // The inventory first: without it the directory is no server's.
    for name in FILES.iter().rev() {
        for suffix in ["", "-wal", "-shm", ".new"] {
            absent(std::fs::remove_file(data_dir.join(format!("{name}{suffix}"))))?;
        }
    }
    absent(std::fs::remove_dir_all(data_dir.join(PROVIDERS)))
}

fn write_files<R: Read>(
    data_dir: &Path,
    list: &FileList,
    mut frames: FrameReader<R>,
) -> Result<(), Problem> {
    for listed in &list.files {
        let path = data_dir.join(&listed.path);
        if let Some(directory) = path.parent() {
            private_directory(directory).map_err(|error| failed(directory, &error))?;
        }
        match listed.path.as_str() {
            INVENTORY => write_inventory(&path, listed, &mut frames)?,
            _ => write_small(&path, listed, &mut frames)?,
        }
    }
    frames.finish().map_err(damaged)
}

fn write_small(path: &Path, listed: &ListedFile, frames: &mut impl Read) -> Result<(), Problem> {
    if listed.length > SMALL_MAX {
        return Err(damaged(format!("'{}' is longer than such a file", listed.path)));
    }
    let mut content = Zeroizing::new(vec![0; usize::try_from(listed.length).unwrap_or(0)]);
    frames.read_exact(&mut content).map_err(damaged)?;
    let mode = if listed.path == "ca.pem" { PUBLIC } else { PRIVATE };
    atomic_file::write(path, &content, mode).map_err(|error| failed(path, &error))
}

/// The inventory may be long: it is not held in memory.
fn write_inventory(
    path: &Path,
    listed: &ListedFile,
    frames: &mut impl Read,
) -> Result<(), Problem> {
    use std::os::unix::fs::OpenOptionsExt;
    let beside = PathBuf::from(format!("{}.new", path.display()));
    let mut options = std::fs::OpenOptions::new();
    let mut file = options
        .write(true)
        .create_new(true)
        .mode(PRIVATE)
        .open(&beside)
        .map_err(|error| failed(&beside, &error))?;
    let written = io::copy(&mut frames.take(listed.length), &mut file);
    let written = written.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => damaged(error),
        _ => failed(&beside, &error),
    })?;
    if written != listed.length {
        return Err(damaged("the inventory is cut off"));
    }
    file.sync_all()
        .and_then(|()| std::fs::rename(&beside, path))
        .and_then(|()| atomic_file::flush_directory_of(path))
        .map_err(|error| failed(path, &error))
}

/// Checks that authority, inventory and providers' files belong together, and brings the inventory to this version.
async fn settle(data_dir: &Path, list: &FileList) -> Result<InventoryCount, Problem> {
    Authority::open(data_dir).map_err(damaged)?;
    let file = data_dir.join(INVENTORY);
    inventory::check(&file).await.map_err(damaged)?;
    let store = Store::open(&file).await.map_err(damaged)?;
    let settled = async {
        let all = crate::store::Part::all();
        let mut read = store.read().await?;
        for provider in crate::store::providers::list(&mut read, &all).await? {
            let directory = format!("{PROVIDERS}/{}/", provider.id);
            if !list.files.iter().any(|file| file.path.starts_with(&directory)) {
                let name = provider.name;
                return Err(damaged(format!("it lacks the key file of provider '{name}'")));
            }
        }
        drop(read);
        inventory::settle(&store, list.made).await
    }
    .await;
    store.close().await;
    settled
}
