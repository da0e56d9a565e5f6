//! Other control planes: how this one calls them, and the access tokens that it has there.
//!
//! A token is a file of the data directory that only the server reads, beside the authority's key. It is in no backup of the server.

mod describe;
mod https;
mod snapshots;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use vmseal_api::atomic_file;
use vmseal_api::id::{RemoteId, TaskId};
use vmseal_api::model::About;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{
    ArrivalAddress, ArrivalChecks, ArrivalSession, ArrivalShown, BeginArrival,
};
use zeroize::Zeroizing;

pub use self::describe::{Wanted, describe, keeps_state};
pub use self::https::HttpsRemotes;
use crate::store::remotes::Remote;
use crate::store::{Store, remotes};

/// The directory of the tokens.
const DIRECTORY: &str = "remotes";

/// The calls that this control plane makes to another one. A call may be repeated without harm.
#[async_trait]
pub trait RemoteControlPlane: Send + Sync {
    /// What it says of itself.
    async fn about(&self) -> Result<About, Problem>;
    /// Whether a VM may arrive.
    async fn check_arrival(&self, arrival: &BeginArrival) -> Result<ArrivalChecks, Problem>;
    /// Begins an arrival, and waits a while until it is prepared.
    async fn begin_arrival(&self, id: TaskId, of: &BeginArrival) -> Result<ArrivalShown, Problem>;
    /// Has its host wait for the source.
    async fn begin_session(
        &self,
        id: TaskId,
        session: &ArrivalSession,
    ) -> Result<ArrivalAddress, Problem>;
    /// How far an arrival is. It also says that the source is there.
    async fn arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem>;
    /// Asks it to let the guest go, and waits a while until that is decided.
    async fn commit_arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem>;
    /// Gives an arrival up, unless it was asked to let the guest go.
    async fn cancel_arrival(&self, id: TaskId) -> Result<ArrivalShown, Problem>;
}

/// Connects to other control planes.
pub trait RemoteConnector: Send + Sync {
    /// One of them, as a user with this token.
    ///
    /// # Errors
    /// What is wrong with what is known of it.
    fn connect(&self, remote: &Remote, token: &str)
    -> Result<Arc<dyn RemoteControlPlane>, Problem>;
}

/// The control planes that this one knows.
pub struct Remotes {
    store: Arc<Store>,
    directory: PathBuf,
    connector: Arc<dyn RemoteConnector>,
    /// Connections are kept: a guest stands still while its destination is asked.
    known: Mutex<HashMap<RemoteId, Arc<dyn RemoteControlPlane>>>,
}

impl Remotes {
    /// Those of a data directory.
    #[must_use]
    pub fn new(store: Arc<Store>, data_dir: &Path, connector: Arc<dyn RemoteConnector>) -> Self {
        Self { store, directory: data_dir.join(DIRECTORY), connector, known: Mutex::default() }
    }

    fn file(&self, remote: RemoteId) -> PathBuf {
        self.directory.join(format!("{remote}.token"))
    }

    /// Keeps the token of one that is about to be added.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn keep_token(&self, remote: RemoteId, token: &str) -> Result<(), Problem> {
        let kept = atomic_file::private_directory(&self.directory).and_then(|()| {
            atomic_file::write(&self.file(remote), token.as_bytes(), atomic_file::PRIVATE)
        });
        kept.map_err(|error| {
            let detail = format!("the token cannot be kept in the data directory: {error}");
            Problem::new(ErrorCode::NoSpace, detail)
        })
    }

    /// Forgets the token of one that was removed.
    pub fn forget_token(&self, remote: RemoteId) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&remote);
        if let Err(error) = std::fs::remove_file(self.file(remote)) {
            tracing::warn!(%remote, %error, "the token of a former remote is left");
        }
    }

    /// A connection to one, with a token that is not kept yet.
    ///
    /// # Errors
    /// Those of the connector.
    pub fn connect(
        &self,
        remote: &Remote,
        token: &str,
    ) -> Result<Arc<dyn RemoteControlPlane>, Problem> {
        self.connector.connect(remote, token)
    }

    /// A connection to one.
    ///
    /// # Errors
    /// `wrong-state`: its token is missing.
    pub fn of(&self, remote: &Remote) -> Result<Arc<dyn RemoteControlPlane>, Problem> {
        // What is known of a remote never changes: one that is added again has another id.
        if let Some(known) =
            self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&remote.id)
        {
            return Ok(Arc::clone(known));
        }
        let token = std::fs::read_to_string(self.file(remote.id)).map(Zeroizing::new);
        let token = token.map_err(|error| {
            let name = &remote.name;
            let detail = format!(
                "the access token of remote '{name}' cannot be read ({error}): it is in no backup of the server. Remove the remote and add it again"
            );
            Problem::new(ErrorCode::WrongState, detail)
        })?;
        let connected = self.connect(remote, token.trim())?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(Arc::clone(known.entry(remote.id).or_insert(connected)))
    }

    /// One by its name or id.
    ///
    /// # Errors
    /// `not-found`, and the inventory's.
    pub async fn find(&self, name_or_id: &str) -> Result<Remote, Problem> {
        let found = remotes::find(&mut *self.store.read().await?, name_or_id).await?;
        found.ok_or_else(|| Problem::not_found("remote", name_or_id))
    }
}
