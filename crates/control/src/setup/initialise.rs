//! Opens the data directory at the first and every later start.
//!
//! ```text
//! ca.key, ca.pem      the authority
//! server.pem          the server's key and certificate
//! admin.token         the first user's token, written once; remove it when you have stored it
//! metrics.token       the token that may read the metrics alone; remove it to revoke it
//! inventory.db        the inventory
//! providers/ID/key    a native provider's key, sealed under its passphrase
//! lock                held by the running server
//! restoring           a backup is being restored: no server starts
//! ```
//!
//! Each file is written atomically, and a start makes those that are missing: so the next start completes one
//! that was interrupted.

use std::fs::{File, OpenOptions};
use std::net::SocketAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use nix::fcntl::{Flock, FlockArg};
use zeroize::Zeroizing;

use crate::setup::authority::{Authority, AuthorityError};
use crate::setup::identity::Identity;
use crate::store::users::{self, Role};
use crate::store::{Store, StoreError};
use vmseal_api::atomic_file;
use vmseal_api::server_backup::INVENTORY;

/// The name of the first user.
pub const ADMIN: &str = "admin";

/// The file in a directory into which a backup is being restored.
pub const RESTORING: &str = "restoring";

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum InitialiseError {
    /// Another server has the data directory.
    #[error("another server runs with the data directory {0}")]
    Locked(PathBuf),
    /// A restore of a backup did not end.
    #[error(
        "a backup is being restored into {0}, or that was interrupted: give the restore again (vmseal server restore)"
    )]
    Restoring(PathBuf),
    /// A file.
    #[error("{path}: {source}")]
    File {
        /// Which one.
        path: PathBuf,
        /// What the file system says.
        source: std::io::Error,
    },
    /// The inventory.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The authority or the server's certificate.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The random generator failed.
    #[error("the random generator of AWS-LC failed")]
    Random,
}

/// The opened data directory.
pub struct Initialised {
    /// Held while the server runs.
    pub lock: Flock<File>,
    /// The authority.
    pub authority: Authority,
    /// The server's certificate.
    pub identity: Identity,
    /// The inventory.
    pub store: Store,
}

fn file_error(path: &Path) -> impl FnOnce(std::io::Error) -> InitialiseError {
    move |source| InitialiseError::File { path: path.to_owned(), source }
}

/// Opens a data directory, and makes missing files.
///
/// # Errors
/// [`InitialiseError`].
pub async fn initialise(
    data_dir: &Path,
    names: Vec<String>,
) -> Result<Initialised, InitialiseError> {
    atomic_file::private_directory(data_dir).map_err(file_error(data_dir))?;
    let lock = lock(data_dir)?;
    if data_dir.join(RESTORING).exists() {
        return Err(InitialiseError::Restoring(data_dir.to_owned()));
    }
    let authority = Authority::open(data_dir)?;
    let identity = Identity::open(data_dir, &authority, names)?;
    let store = Store::open(&data_dir.join(INVENTORY)).await?;
    make_admin(data_dir, &store).await?;
    make_metrics_user(data_dir, &store).await?;
    Ok(Initialised { lock, authority, identity, store })
}

pub(crate) fn lock(data_dir: &Path) -> Result<Flock<File>, InitialiseError> {
    let path = data_dir.join("lock");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(atomic_file::PRIVATE)
        .open(&path)
        .map_err(file_error(&path))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock)
        .map_err(|_| InitialiseError::Locked(data_dir.to_owned()))
}

/// The user of Prometheus, and the file with the token.
const METRICS: (&str, &str) = ("metrics", "metrics.token");

async fn make_admin(data_dir: &Path, store: &Store) -> Result<(), InitialiseError> {
    if !users::list(&mut *store.read().await?).await?.is_empty() {
        return Ok(());
    }
    make_user(data_dir, store, (ADMIN, "admin.token"), Role::Administrator).await
}

/// Makes the user that may read the metrics; a server of an earlier version has none yet. Its token is made anew unless the
/// file has the one that the inventory knows: an operator removes the file to revoke it.
async fn make_metrics_user(data_dir: &Path, store: &Store) -> Result<(), InitialiseError> {
    let (name, file) = METRICS;
    let known = users::list(&mut *store.read().await?).await?;
    let kept = std::fs::read_to_string(data_dir.join(file)).map(Zeroizing::new);
    let hash = kept.map(|text| crate::sha256_hex(text.trim_end().as_bytes()));
    if hash.is_ok_and(|hash| known.iter().any(|it| it.name == name && it.token_sha256 == hash)) {
        return Ok(());
    }
    make_user(data_dir, store, METRICS, Role::Metrics).await
}

/// Writes the token first, then its hash: after a crash between the two nobody has that token, and the next start writes
/// another one.
async fn make_user(
    data_dir: &Path,
    store: &Store,
    (name, file): (&str, &str),
    role: Role,
) -> Result<(), InitialiseError> {
    let mut random = Zeroizing::new([0; 32]);
    aws_lc_rs::rand::fill(&mut *random).map_err(|_| InitialiseError::Random)?;
    let token = Zeroizing::new(URL_SAFE_NO_PAD.encode(*random));
    let mut write = store.write().await?;
    users::delete(&mut write, name).await?;
    users::insert(&mut write, name, &crate::sha256_hex(token.as_bytes()), role).await?;
    let path = data_dir.join(file);
    let text = Zeroizing::new(format!("{}\n", token.as_str()));
    atomic_file::write(&path, text.as_bytes(), atomic_file::PRIVATE).map_err(file_error(&path))?;
    write.commit().await?;
    Ok(())
}

/// The names in the server's certificate: those that were given and, if it listens on loopback or on all
/// addresses, those of loopback.
#[must_use]
pub fn certificate_names(listen: SocketAddr, asked: &[String]) -> Vec<String> {
    let mut names = asked.to_vec();
    if !listen.ip().is_unspecified() {
        names.push(listen.ip().to_string());
    }
    if listen.ip().is_unspecified() || listen.ip().is_loopback() {
        names.extend(["localhost", "127.0.0.1", "::1"].map(str::to_owned));
    }
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    async fn start(directory: &Path) -> Result<Initialised, InitialiseError> {
        initialise(directory, vec!["localhost".to_owned()]).await
    }

    fn token(directory: &Path) -> String {
        std::fs::read_to_string(directory.join("admin.token")).unwrap()
    }

    #[tokio::test]
    async fn the_first_start_makes_all_and_the_second_changes_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let directory = parent.path().join("a").join("b");
        let first = start(&directory).await.unwrap();
        let mode =
            |name| std::fs::metadata(directory.join(name)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(""), 0o700);
        for private in ["ca.key", "server.pem", "admin.token", "metrics.token"] {
            assert_eq!(mode(private), 0o600, "{private}");
        }
        let (ca, admin) = (first.authority.pem().to_owned(), token(&directory));
        assert!(matches!(start(&directory).await, Err(InitialiseError::Locked(_))));
        drop(first);
        let second = start(&directory).await.unwrap();
        assert_eq!((second.authority.pem(), token(&directory)), (ca.as_str(), admin));
    }

    /// The hash of the token of a user.
    async fn hash_of(started: &Initialised, name: &str) -> String {
        let users = users::list(&mut started.store.read().await.unwrap()).await.unwrap();
        users.into_iter().find(|user| user.name == name).unwrap().token_sha256
    }

    /// Prometheus' token may be made anew, and stays otherwise.
    #[tokio::test]
    async fn the_token_for_metrics_is_made_where_its_file_is_gone_or_has_another() {
        let directory = tempfile::tempdir().unwrap();
        let (name, file) = METRICS;
        let file = directory.path().join(file);
        let mut seen = Vec::new();
        for _ in 0..4 {
            let started = start(directory.path()).await.unwrap();
            let token = std::fs::read_to_string(&file).unwrap();
            assert_eq!(hash_of(&started, name).await, crate::sha256_hex(token.trim().as_bytes()));
            started.store.close().await;
            seen.push(token);
            match seen.len() {
                2 => std::fs::remove_file(&file).unwrap(),
                // As a start that died before the inventory had it leaves it.
                3 => std::fs::write(&file, "another\n").unwrap(),
                _ => {}
            }
        }
        assert!(seen[0] == seen[1] && seen[1] != seen[2] && seen[3] != "another\n");
    }

    #[tokio::test]
    async fn the_token_itself_is_not_in_the_inventory() {
        let directory = tempfile::tempdir().unwrap();
        let started = start(directory.path()).await.unwrap();
        let token = token(directory.path());
        assert_eq!(hash_of(&started, ADMIN).await, crate::sha256_hex(token.trim().as_bytes()));
        started.store.close().await;
        let database = std::fs::read(directory.path().join("inventory.db")).unwrap();
        assert!(!database.windows(43).any(|window| window == token.trim().as_bytes()));
    }

    /// Each file missing in turn, as after a crash before it was made, or after a start of an earlier version.
    #[tokio::test]
    async fn the_next_start_completes_an_interrupted_one() {
        for missing in ["ca.pem", "server.pem", "inventory.db"] {
            let directory = tempfile::tempdir().unwrap();
            let started = start(directory.path()).await.unwrap();
            started.store.close().await;
            drop(started);
            std::fs::remove_file(directory.path().join(missing)).unwrap();
            let started = start(directory.path()).await.unwrap();
            let token = token(directory.path());
            assert_eq!(hash_of(&started, ADMIN).await, crate::sha256_hex(token.trim().as_bytes()));
        }
    }

    #[test]
    fn loopback_has_all_of_its_names() {
        let names = certificate_names("127.0.0.1:1".parse().unwrap(), &["x".to_owned()]);
        assert_eq!(names, ["127.0.0.1", "::1", "localhost", "x"]);
        assert_eq!(certificate_names("192.0.2.1:1".parse().unwrap(), &[]), ["192.0.2.1"]);
    }
}
