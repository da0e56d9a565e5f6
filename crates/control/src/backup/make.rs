//! Writes a backup while the server runs.
//!
//! The inventory is copied first, then the files are read: a provider's file is on disk before the inventory names it,
//! so that each provider of the copy has its file, unless it was changed meanwhile. Then all is done again.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use tokio::sync::Semaphore;
use uuid::Uuid;
use vmseal_api::atomic_file::PRIVATE;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::server_backup::{
    FILES, FileList, INVENTORY, ListedFile, PROVIDERS, head, is_allowed,
};
use vmseal_secret::SecretBytes;
use zeroize::Zeroizing;

use super::frames::FrameWriter;
use super::{ASSOCIATED, KEY_LEN, inventory};
use crate::providers::sealed_file;
use crate::store::{Part, Store, kmip, providers};

/// What the names of files begin with that a backup has in the data directory while it is written.
const TEMPORARY: &str = "backup-";

/// How often a backup is begun again because a provider was changed meanwhile, which takes an operator.
const ATTEMPTS: u32 = 5;

/// The longest file beside the inventory, in bytes: keys and certificates.
const SMALL_MAX: u64 = 1 << 20;

/// One at a time: each needs room for two copies of the inventory.
static BACKUPS: Semaphore = Semaphore::const_new(1);

/// A sealed backup: a file without a name, at its beginning.
pub struct SealedBackup {
    /// The file.
    pub file: File,
    /// Its length, in bytes.
    pub length: u64,
}

fn failed(path: &Path, error: &io::Error) -> Problem {
    let code = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => ErrorCode::NoSpace,
        _ => ErrorCode::Internal,
    };
    Problem::new(code, format!("no backup was made: {}: {error}", path.display()))
}

/// Removes what a backup left that did not end.
pub fn sweep(data_dir: &Path) {
    for entry in std::fs::read_dir(data_dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let rest = name.to_str().and_then(|name| name.strip_prefix(TEMPORARY));
        // An operator's own backup may lie here, too.
        if rest.is_some_and(|rest| rest.parse::<uuid::Uuid>().is_ok()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Makes a backup of the server with this inventory and data directory.
///
/// # Errors
/// `no-space`; `wrong-state` while providers are changed again and again; the inventory's.
pub async fn make(
    store: &Store,
    data_dir: &Path,
    passphrase: SecretBytes,
) -> Result<SealedBackup, Problem> {
    let _turn = BACKUPS.acquire().await.map_err(|error| crate::internal(&error))?;
    for _ in 0..ATTEMPTS {
        let before = provider_files(store).await?;
        let made = Timestamp::now();
        let copy = copied(data_dir).await?;
        let files = small_files(data_dir)?;
        if provider_files(store).await? != before {
            continue;
        }
        let data_dir = data_dir.to_owned();
        let work = move || seal(&data_dir, made, files, copy, &passphrase);
        return tokio::task::spawn_blocking(work).await.map_err(|error| crate::internal(&error))?;
    }
    let detail = "a key provider is being changed again and again: try later";
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// What the inventory says of the providers' files.
async fn provider_files(store: &Store) -> Result<Vec<String>, Problem> {
    let mut read = store.read().await?;
    let mut all = Vec::new();
    for provider in providers::list(&mut read, &Part::all()).await? {
        let client = kmip::client(&mut read, provider.id).await?;
        let keys = client.map(|client| (client.key_file, client.next_key_file));
        all.push(format!("{} {keys:?}", provider.id));
    }
    Ok(all)
}

/// A copy of the inventory, without a name.
async fn copied(data_dir: &Path) -> Result<File, Problem> {
    let path = data_dir.join(format!("{TEMPORARY}{}", Uuid::new_v4()));
    let copied = inventory::copy(&data_dir.join(INVENTORY), &path).await;
    let file = File::open(&path);
    let _ = std::fs::remove_file(&path);
    copied.map_err(|error| {
        let detail = format!("no backup was made: the inventory cannot be copied: {error}");
        Problem::new(ErrorCode::Internal, detail)
    })?;
    file.map_err(|error| failed(&path, &error))
}

type Content = Zeroizing<Vec<u8>>;

/// All files but the inventory, by their paths in the data directory.
fn small_files(data_dir: &Path) -> Result<Vec<(String, Content)>, Problem> {
    let mut files = Vec::new();
    for name in FILES.into_iter().filter(|name| *name != INVENTORY) {
        match read(&data_dir.join(name)) {
            Ok(content) => files.push((name.to_owned(), content)),
            // The operator has moved it elsewhere, as advised.
            Err(error) if error.kind() == io::ErrorKind::NotFound && name == "admin.token" => {}
            Err(error) => return Err(failed(&data_dir.join(name), &error)),
        }
    }
    let mut below = Vec::new();
    for provider in entries(&data_dir.join(PROVIDERS))? {
        for file in entries(&provider)? {
            let place = file.strip_prefix(data_dir).unwrap_or(&file).to_string_lossy().into_owned();
            // A file that is being replaced has another name beside it.
            if is_allowed(&place) && !place.ends_with(".new") {
                let content = read(&file).map_err(|error| failed(&file, &error))?;
                below.push((place, content));
            }
        }
    }
    below.sort_by(|one, other| one.0.cmp(&other.0));
    files.extend(below);
    Ok(files)
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>, Problem> {
    match std::fs::read_dir(directory) {
        Ok(entries) => {
            let paths: io::Result<Vec<_>> =
                entries.map(|entry| entry.map(|entry| entry.path())).collect();
            paths.map_err(|error| failed(directory, &error))
        }
        // No provider has been added.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(directory, &error)),
    }
}

fn read(path: &Path) -> io::Result<Content> {
    let file = File::open(path)?;
    let length = file.metadata()?.len();
    if length > SMALL_MAX {
        return Err(io::Error::other(format!("it has more than {SMALL_MAX} bytes")));
    }
    // With room for all of it, so that no copy of a key is left where it grew.
    let mut content = Zeroizing::new(Vec::with_capacity(usize::try_from(length).unwrap_or(0) + 1));
    file.take(SMALL_MAX).read_to_end(&mut content)?;
    Ok(content)
}

/// Seals all of it into a file without a name.
fn seal(
    data_dir: &Path,
    made: Timestamp,
    files: Vec<(String, Content)>,
    mut copy: File,
    passphrase: &SecretBytes,
) -> Result<SealedBackup, Problem> {
    let key = SecretBytes::random(KEY_LEN).map_err(|error| crate::internal(&error))?;
    let envelope = sealed_file::seal(&key, passphrase, ASSOCIATED)?;
    let path = data_dir.join(format!("{TEMPORARY}{}", Uuid::new_v4()));
    let sealed = (|| -> io::Result<SealedBackup> {
        let length_of = |content: &Content| content.len() as u64;
        let mut listed: Vec<_> = files
            .iter()
            .map(|(path, content)| ListedFile { path: path.clone(), length: length_of(content) })
            .collect();
        let length = copy.metadata()?.len();
        listed.push(ListedFile { path: INVENTORY.to_owned(), length });
        let vmseal = env!("CARGO_PKG_VERSION").to_owned();
        let list = serde_json::to_vec(&FileList { made, vmseal, files: listed })?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(PRIVATE).open(&path)?;
        std::fs::remove_file(&path)?;
        let mut to = io::BufWriter::new(file);
        to.write_all(&head(envelope.len()))?;
        to.write_all(&envelope)?;
        let mut frames = FrameWriter::new(to, &key)?;
        let list_length = u32::try_from(list.len()).map_err(io::Error::other)?;
        frames.write_all(&list_length.to_be_bytes())?;
        frames.write_all(&list)?;
        for (_, content) in &files {
            frames.write_all(content)?;
        }
        io::copy(&mut (&mut copy).take(length), &mut frames)?;
        let mut file = frames.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
        let length = file.stream_position()?;
        file.rewind()?;
        Ok(SealedBackup { file, length })
    })();
    sealed.map_err(|error| failed(&path, &error))
}
