//! Opens the data directory at the first and every later start.
//!
//! ```text
//! ca.key, ca.pem      the authority
//! server.pem          the server's key and certificate
//! admin.token         the first user's token, written once; remove it when you have stored it
//! inventory.db        the inventory
//! providers/ID/key    a native provider's key, sealed under its passphrase
//! lock                held by the running server
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
use crate::store::{Store, StoreError, users};
use vmseal_api::atomic_file;

/// The name of the first user.
pub const ADMIN: &str = "admin";

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum InitialiseError {
    /// Another server has the data directory.
    #[error("another server runs with the data directory {0}")]
    Locked(PathBuf),
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
    let authority = Authority::open(data_dir)?;
    let identity = Identity::open(data_dir, &authority, names)?;
    let store = Store::open(&data_dir.join("inventory.db")).await?;
    make_admin(data_dir, &store).await?;
    Ok(Initialised { lock, authority, identity, store })
}

fn lock(data_dir: &Path) -> Result<Flock<File>, InitialiseError> {
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

/// Writes the token first, then its hash: after a crash between the two there is no user yet, and the next start
/// writes another token.
async fn make_admin(data_dir: &Path, store: &Store) -> Result<(), InitialiseError> {
    if !users::list(&mut *store.read().await?).await?.is_empty() {
        return Ok(());
    }
    let mut random = Zeroizing::new([0; 32]);
    aws_lc_rs::rand::fill(&mut *random).map_err(|_| InitialiseError::Random)?;
    let token = Zeroizing::new(URL_SAFE_NO_PAD.encode(*random));
    let path = data_dir.join("admin.token");
    let text = Zeroizing::new(format!("{}\n", token.as_str()));
    atomic_file::write(&path, text.as_bytes(), atomic_file::PRIVATE).map_err(file_error(&path))?;
    let mut write = store.write().await?;
    users::insert(&mut write, ADMIN, &crate::sha256_hex(token.as_bytes())).await?;
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
        for private in ["ca.key", "server.pem", "admin.token"] {
            assert_eq!(mode(private), 0o600, "{private}");
        }
        let (ca, admin) = (first.authority.pem().to_owned(), token(&directory));
        assert!(matches!(start(&directory).await, Err(InitialiseError::Locked(_))));
        drop(first);
        let second = start(&directory).await.unwrap();
        assert_eq!((second.authority.pem(), token(&directory)), (ca.as_str(), admin));
    }

    #[tokio::test]
    async fn the_token_itself_is_not_in_the_inventory() {
        let directory = tempfile::tempdir().unwrap();
        let started = start(directory.path()).await.unwrap();
        let token = token(directory.path());
        let users = users::list(&mut started.store.read().await.unwrap()).await.unwrap();
        assert_eq!(users[0].1, crate::sha256_hex(token.trim().as_bytes()));
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
            let users = users::list(&mut started.store.read().await.unwrap()).await.unwrap();
            assert_eq!(users[0].1, crate::sha256_hex(token(directory.path()).trim().as_bytes()));
        }
    }

    #[test]
    fn loopback_has_all_of_its_names() {
        let names = certificate_names("127.0.0.1:1".parse().unwrap(), &["x".to_owned()]);
        assert_eq!(names, ["127.0.0.1", "::1", "localhost", "x"]);
        assert_eq!(certificate_names("192.0.2.1:1".parse().unwrap(), &[]), ["192.0.2.1"]);
    }
}
