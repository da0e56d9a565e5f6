//! The inventory: SQLite through sqlx, one module per resource. No secret is ever in it.
//!
//! One connection writes and a few read. A [`Write`] is a transaction that is either committed or rolled back when
//! it is dropped; related data (a state and its event) is written in one transaction. The file is in WAL mode with
//! `synchronous=FULL`: committed data is on disk.

pub mod alarms;
pub mod backups;
pub mod changes;
pub mod datastore_keys;
pub mod datastores;
pub mod disks;
pub mod drains;
pub mod dumps;
pub mod evacuations;
pub mod events;
pub mod exposures;
pub mod hosts;
pub mod key_requests;
pub mod keys;
pub mod kmip;
pub mod links;
pub mod memory_generations;
pub mod nics;
pub mod panics;
pub mod placements;
pub mod policies;
pub mod proofs;
pub mod providers;
pub mod remotes;
pub mod snapshots;
pub mod tasks;
pub mod uncertain;
pub mod users;
pub mod vms;

#[cfg(test)]
mod migration_tests;

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::pool::PoolConnection;
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};
use sqlx::{Sqlite, SqliteConnection, Transaction};
use tokio::sync::watch;
use vmseal_api::problem::{ErrorCode, Problem};

use self::changes::{Changes, Kinds, Numbers, Written};

/// The number of connections that read; a request needs one for some milliseconds. All are opened with the inventory and
/// stay open: a request does not wait for a thread to start and a file to open.
const READERS: u32 = 4;

/// How long a request waits for a connection before it fails.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(15);

/// The generation of a new volume or placement.
const FIRST_GENERATION: i64 = 1;

/// How many rows a page of a list has at most.
pub const PAGE_MAX: u32 = 1000;

/// Why the inventory could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// SQLite, or the disk below it.
    #[error("the inventory failed: {0}")]
    Database(#[from] sqlx::Error),
    /// The schema could not be brought up to date.
    #[error("the inventory's schema cannot be brought up to date: {0}")]
    Migration(#[from] sqlx::migrate::MigrateError),
    /// A value that this version does not write.
    #[error("the inventory holds '{value}' where {expected} is expected")]
    Unreadable {
        /// The value.
        value: String,
        /// The expected kind of value.
        expected: &'static str,
    },
    /// A name or id is taken.
    #[error("{0} exists already")]
    Taken(String),
}

impl StoreError {
    /// Whether a retry may succeed: the disk is full, fails, or is busy.
    #[must_use]
    pub fn may_pass(&self) -> bool {
        let is_io = matches!(self, Self::Database(sqlx::Error::Io(_)));
        is_io || self.is_busy() || self.sqlite_code().is_some_and(|it| SQLITE_FAILS.contains(&it))
    }

    /// Whether nothing is wrong but that there was no connection, or no lock, in time.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Database(sqlx::Error::PoolTimedOut))
            || self.sqlite_code().is_some_and(|it| SQLITE_BUSY.contains(&it))
    }

    /// SQLite's primary result code: the lowest byte of what it returns (sqlite.org/rescode.html).
    fn sqlite_code(&self) -> Option<u32> {
        let Self::Database(sqlx::Error::Database(error)) = self else { return None };
        error.code()?.parse::<u32>().ok().map(|code| code & 0xff)
    }
}

/// SQLite's BUSY, LOCKED.
const SQLITE_BUSY: [u32; 2] = [5, 6];

/// SQLite's NOMEM, IOERR, FULL, CANTOPEN.
const SQLITE_FAILS: [u32; 4] = [7, 10, 13, 14];

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Taken(_) => Problem::new(ErrorCode::AlreadyExists, error.to_string()),
            error if error.is_busy() => {
                tracing::warn!(%error, "the inventory is busy");
                let wait = ACQUIRE_TIMEOUT.as_secs();
                let detail = format!(
                    "the server is busy: its inventory could not be used within {wait} seconds. Try again"
                );
                Problem { inventory: true, ..Problem::new(ErrorCode::Busy, detail) }
            }
            error => Problem { inventory: error.may_pass(), ..crate::internal(&error) },
        }
    }
}

/// The error of an insert: a name that is taken, or the database's.
pub(crate) fn taken(what: impl FnOnce() -> String) -> impl FnOnce(sqlx::Error) -> StoreError {
    move |error| match error.as_database_error() {
        Some(database) if database.is_unique_violation() => StoreError::Taken(what()),
        _ => error.into(),
    }
}

/// The inventory.
pub struct Store {
    writer: SqlitePool,
    readers: SqlitePool,
    /// The sequence number of the newest event.
    events: watch::Sender<i64>,
    changes: Changes,
    written: Written,
}

impl Store {
    /// Opens the inventory, creates it if there is none, and brings its schema up to date.
    ///
    /// # Errors
    /// [`StoreError`].
    pub async fn open(file: &Path) -> Result<Self, StoreError> {
        let options = SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(ACQUIRE_TIMEOUT);
        // A connection is a thread of this process, which cannot go away while it is idle: it is neither asked before each use
        // whether it is there, nor closed because of its age.
        let pool = |connections| {
            SqlitePoolOptions::new()
                .max_connections(connections)
                .acquire_timeout(ACQUIRE_TIMEOUT)
                .test_before_acquire(false)
                .idle_timeout(None::<Duration>)
                .max_lifetime(None::<Duration>)
        };
        let written = Written::default();
        let watched = written.clone();
        let writer = pool(1).after_connect(move |connection, _| {
            let watched = watched.clone();
            Box::pin(async move { watched.watch(connection).await })
        });
        let writer = writer.connect_with(options.clone()).await?;
        sqlx::migrate!().run(&writer).await?;
        let readers = pool(READERS).connect_with(options.pragma("query_only", "on")).await?;
        let mut opened = Vec::new();
        for _ in 0..READERS {
            opened.push(readers.acquire().await?);
        }
        drop(opened);
        let (events, changes) = (watch::Sender::new(0), Changes::begin());
        let store = Self { writer, readers, events, changes, written };
        let last = events::last(&mut *store.read().await?).await?;
        store.events.send_replace(last);
        Ok(store)
    }

    /// A connection for reading. There are few: do not wait for anything else while you have one, nor for another one. The
    /// head of a `match`, an `if let` or a loop keeps its temporary values to the end: read in a statement before it.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub async fn read(&self) -> Result<PoolConnection<Sqlite>, StoreError> {
        Ok(self.readers.acquire().await?)
    }

    /// A transaction for writing. There is one at a time: do not wait for anything else in it.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub async fn write(&self) -> Result<Write<'_>, StoreError> {
        let transaction = self.writer.begin_with("BEGIN IMMEDIATE").await?;
        // Left from a transaction that was rolled back.
        self.written.take();
        Ok(Write { transaction, store: self, newest: None, told: Kinds::NONE })
    }

    /// Follows the sequence number of the newest event.
    #[must_use]
    pub fn newest_event(&self) -> watch::Receiver<i64> {
        self.events.subscribe()
    }

    /// Follows the change numbers.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<Numbers> {
        self.changes.subscribe()
    }

    /// Reports a change of a resource's state that is not in the inventory.
    pub fn note_change(&self, kinds: Kinds) {
        self.changes.note(kinds);
    }

    /// Waits for running statements, and closes the file.
    pub async fn close(&self) {
        self.writer.close().await;
        self.readers.close().await;
    }
}

/// A transaction: all of it happens at [`Write::commit`], or nothing.
pub struct Write<'a> {
    transaction: Transaction<'a, Sqlite>,
    store: &'a Store,
    newest: Option<i64>,
    /// The kinds that its events are about.
    told: Kinds,
}

impl Write<'_> {
    /// Adds an event to the transaction.
    ///
    /// # Errors
    /// [`StoreError::Database`].
    pub async fn event(&mut self, event: events::NewEvent<'_>) -> Result<(), StoreError> {
        self.told = self.told.and(Kinds::of_event(event.kind));
        self.newest = Some(events::append(&mut self.transaction, event).await?);
        Ok(())
    }

    /// Commits durably, and wakes those that wait for events.
    ///
    /// # Errors
    /// [`StoreError::Database`]: nothing was written.
    pub async fn commit(self) -> Result<(), StoreError> {
        let written = self.store.written.take();
        self.transaction.commit().await?;
        if let Some(newest) = self.newest {
            // A later commit may have got here first.
            self.store.events.send_modify(|last| *last = newest.max(*last));
        }
        self.store.changes.note(written.and(self.told));
        Ok(())
    }
}

impl Deref for Write<'_> {
    type Target = SqliteConnection;
    fn deref(&self) -> &SqliteConnection {
        &self.transaction
    }
}

impl DerefMut for Write<'_> {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.transaction
    }
}

/// A part of a list.
#[derive(Clone, Debug)]
pub struct Part {
    /// The last id of the part before; empty for the beginning.
    pub after: String,
    /// How many rows at most.
    pub limit: u32,
}

impl Part {
    /// The whole of a list whose length is bounded elsewhere.
    #[must_use]
    pub fn all() -> Self {
        Self { after: String::new(), limit: u32::MAX }
    }
}

/// Parses a text column.
fn parse<T: FromStr>(value: &str, expected: &'static str) -> Result<T, StoreError> {
    value.parse().map_err(|_| StoreError::Unreadable { value: value.to_owned(), expected })
}

/// The first of the names `BEGIN-1`, `BEGIN-2` and so on that is not taken.
pub(crate) fn free_name<'a>(begin: &str, taken: impl Iterator<Item = &'a str>) -> String {
    let taken: std::collections::HashSet<&str> = taken.collect();
    let mut names = (1..=taken.len() + 1).map(|number| format!("{begin}-{number}"));
    names.find(|name| !taken.contains(name.as_str())).unwrap_or_default()
}

/// A column that holds JSON.
fn from_json<T: DeserializeOwned>(value: &str, expected: &'static str) -> Result<T, StoreError> {
    serde_json::from_str(value)
        .map_err(|_| StoreError::Unreadable { value: value.to_owned(), expected })
}

/// JSON for a column. Our own types can always be serialized.
fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// A column that holds the name of a variant.
fn from_name<T: DeserializeOwned>(value: &str, expected: &'static str) -> Result<T, StoreError> {
    serde_json::from_value(serde_json::Value::String(value.to_owned()))
        .map_err(|_| StoreError::Unreadable { value: value.to_owned(), expected })
}

/// The name of a variant, as serde has it.
pub(crate) fn to_name<T: Serialize>(value: &T) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}

/// An unsigned value from a column; SQL has no unsigned type, and our limits keep sizes below 2^63.
fn unsigned(value: i64, expected: &'static str) -> Result<u64, StoreError> {
    value.try_into().map_err(|_| StoreError::Unreadable { value: value.to_string(), expected })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn uncommitted_writes_are_lost_and_events_wake_readers() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let mut newest = store.newest_event();
        let event = events::NewEvent { kind: "test", actor: "me", target: "it", detail: "" };
        let mut write = store.write().await.unwrap();
        write.event(event).await.unwrap();
        drop(write);
        assert_eq!(events::last(&mut store.read().await.unwrap()).await.unwrap(), 0);
        assert!(!newest.has_changed().unwrap());
        let mut write = store.write().await.unwrap();
        write.event(event).await.unwrap();
        write.commit().await.unwrap();
        assert!(newest.has_changed().unwrap());
        let last = *newest.borrow_and_update();
        store.close().await;
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        assert_eq!(*store.newest_event().borrow(), last);
    }

    #[tokio::test]
    async fn a_power_cut_cannot_lose_a_commit_and_readers_cannot_write() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let pragma = |name| sqlx::AssertSqlSafe(format!("PRAGMA {name}"));
        let mut write = store.write().await.unwrap();
        let mode: String =
            sqlx::query_scalar(pragma("journal_mode")).fetch_one(&mut *write).await.unwrap();
        let synchronous: i64 =
            sqlx::query_scalar(pragma("synchronous")).fetch_one(&mut *write).await.unwrap();
        assert_eq!((mode.as_str(), synchronous), ("wal", 2));
        drop(write);
        let mut read = store.read().await.unwrap();
        assert!(sqlx::query("DELETE FROM events").execute(&mut *read).await.is_err());
    }

    /// A database that may not grow fails like one on a full disk (SQLITE_FULL).
    #[tokio::test]
    async fn a_full_disk_may_pass_and_a_name_that_is_taken_does_not() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        let mut write = store.write().await.unwrap();
        sqlx::query("PRAGMA max_page_count = 1").execute(&mut *write).await.unwrap();
        let detail = "x".repeat(1 << 20);
        let event = events::NewEvent { kind: "k", actor: "a", target: "t", detail: &detail };
        let error = write.event(event).await.unwrap_err();
        assert!(error.may_pass(), "{error}");
        let problem = Problem::from(error);
        assert!(problem.inventory && problem.code == ErrorCode::Internal, "{problem}");
        assert!(!serde_json::to_string(&problem).unwrap().contains("inventory\""));
        drop(write);
        let mut write = store.write().await.unwrap();
        let error =
            sqlx::query("INSERT INTO alarms (source) VALUES ('x')").execute(&mut *write).await;
        assert!(!StoreError::from(error.unwrap_err()).may_pass());
        assert!(!StoreError::Taken("a name".to_owned()).may_pass());
    }

    #[tokio::test]
    async fn a_connection_that_is_free_is_there_at_once() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(&directory.path().join("db")).await.unwrap();
        assert_eq!(store.readers.size(), READERS, "not all are open");
        let all = READERS as usize;
        // Those that were used come back by tasks of their own.
        while store.readers.num_idle() < all {
            tokio::task::yield_now().await;
        }
        let taken: Vec<_> = (0..all).map(|_| store.read().now_or_never()).collect();
        assert!(taken.iter().all(Option::is_some), "it waits for another thread");
    }

    #[tokio::test]
    async fn a_busy_inventory_is_told_as_such() {
        let busy = StoreError::from(sqlx::Error::PoolTimedOut);
        assert!(busy.is_busy() && busy.may_pass());
        let problem = Problem::from(busy);
        assert_eq!((problem.code, problem.status), (ErrorCode::Busy, 503));
        assert!(problem.inventory && problem.detail.contains("Try again"), "{problem}");

        // SQLITE_BUSY: another process has the lock of the file.
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("db");
        let store = Store::open(&file).await.unwrap();
        let _write = store.write().await.unwrap();
        let other = SqliteConnectOptions::new().filename(&file).busy_timeout(Duration::ZERO);
        let other = SqlitePoolOptions::new().connect_with(other).await.unwrap();
        let locked = other.begin_with("BEGIN IMMEDIATE").await.err().unwrap();
        let locked = StoreError::from(locked);
        assert!(locked.is_busy(), "{locked}");
        assert_eq!(Problem::from(locked).code, ErrorCode::Busy);
    }

    /// The beginnings of statements that keep the temporary values of their heads until their ends.
    const KEEPING: [&str; 5] = ["for ", "while let ", "if let ", "} else if let ", "match "];

    /// Where a statement of this kind has a connection in its head.
    fn held(file: &Path) -> Vec<String> {
        let source = std::fs::read_to_string(file).unwrap();
        let lines: Vec<&str> = source.lines().map(str::trim).collect();
        let keeps = |line: &str| {
            let within = line.contains(" match ") && !line.starts_with("//");
            within || KEEPING.iter().any(|head| line.starts_with(head))
        };
        let mut found = Vec::new();
        for (at, _) in lines.iter().enumerate().filter(|(_, line)| keeps(line)) {
            let rest = &lines[at..];
            let end = rest.iter().position(|line| line.ends_with(['{', ';', '}']));
            let head = rest[..=end.unwrap_or(0)].concat();
            if [".read().await", ".write().await"].iter().any(|taken| head.contains(taken)) {
                found.push(format!("{}:{}: {head}", file.display(), at + 1));
            }
        }
        found
    }

    fn sources(directory: &Path) -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
        let (directories, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
        let mut found: Vec<_> = directories.iter().flat_map(|within| sources(within)).collect();
        found
            .extend(files.into_iter().filter(|path| path.extension().is_some_and(|it| it == "rs")));
        found
    }

    /// A loop over what was read would keep one of the few connections while it asks hosts and key servers.
    #[test]
    fn no_statement_keeps_a_connection_in_its_head() {
        let sources = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
        assert!(sources.len() > 100, "{} files", sources.len());
        let held: Vec<_> = sources.iter().flat_map(|file| held(file)).collect();
        assert!(held.is_empty(), "{held:#?}");
    }
}
