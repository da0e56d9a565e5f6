//! The running control plane: starts all parts, and offers the services, whatever their transport.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::task::JoinHandle;
use vmseal_api::client::ClientIdentity;
use vmseal_secret::sealed_box::{BoxError, Recipient};

use crate::backup::make;
use crate::hosts::Hosts;
use crate::hosts::connector::HttpsConnector;
use crate::providers::Providers;
use crate::remotes::{HttpsRemotes, Remotes};
use crate::retention;
use crate::services::{Services, disks, drain};
use crate::setup::authority::Authority;
use crate::setup::expiry;
use crate::setup::identity::Identity;
use crate::setup::initialise::Initialised;
use crate::store::alarms::{self, RaisedAlarm};
use crate::store::{Store, StoreError};
use crate::tasks::{Engine, Retry, autostart};

/// The source of the alarms about the server's own certificates.
const CERTIFICATE_ALARMS: &str = "certificates of the server";

/// How often the server checks whether its certificate must be renewed.
const RENEW_EVERY: Duration = Duration::from_secs(24 * 3600);

/// Why the control plane cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The inventory.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// No key pair for passphrases could be made.
    #[error(transparent)]
    Box(#[from] BoxError),
}

/// A running control plane.
pub struct ControlPlane {
    services: Arc<Services>,
    identity: Arc<Identity>,
    renewing: JoinHandle<()>,
    deleting_events: JoinHandle<()>,
    starting: JoinHandle<()>,
    draining: JoinHandle<()>,
    _lock: nix::fcntl::Flock<std::fs::File>,
}

impl ControlPlane {
    /// Starts it: it monitors the hosts, resumes the tasks, renews its certificate and deletes events older than
    /// `keep_events_days`. `hold_steps` is for tests ([`Engine::holding_steps`]). Credentials are in `credentials_dir` (systemd's `$CREDENTIALS_DIRECTORY`).
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start(
        Initialised { lock, authority, identity, store }: Initialised,
        data_dir: &Path,
        credentials_dir: Option<PathBuf>,
        keep_events_days: u32,
        hold_steps: Option<PathBuf>,
    ) -> Result<Self, StartError> {
        // What a backup left whose server was killed.
        make::sweep(data_dir);
        let (store, authority, identity) =
            (Arc::new(store), Arc::new(authority), Arc::new(identity));
        disks::end_exposures(&store).await?;
        let connector = Arc::new(HttpsConnector(ClientIdentity {
            authority: authority.pem().to_owned(),
            certificate: Arc::clone(&identity) as _,
        }));
        let providers = Providers::open(Arc::clone(&store), data_dir, credentials_dir).await?;
        let providers = Arc::new(providers);
        let hosts = Hosts::start(Arc::clone(&store), Arc::clone(&providers), connector).await?;
        let hosts = Arc::new(hosts);
        let connector = Arc::new(HttpsRemotes);
        let remotes = Arc::new(Remotes::new(Arc::clone(&store), data_dir, connector));
        let engine = Engine::new(
            Arc::clone(&store),
            Arc::clone(&providers),
            Arc::clone(&hosts),
            Arc::clone(&remotes),
            Retry::USUAL,
        );
        let engine = Arc::new(engine.holding_steps(hold_steps));
        engine.resume().await?;
        let renewing =
            tokio::spawn(renew(Arc::clone(&identity), Arc::clone(&authority), Arc::clone(&store)));
        let recipient = Recipient::generate()?;
        let deleting_events =
            tokio::spawn(retention::delete_old_events(Arc::clone(&store), keep_events_days));
        let starting = tokio::spawn(autostart::run(Arc::clone(&engine)));
        let data_dir = data_dir.to_owned();
        let services =
            Services { store, providers, hosts, remotes, engine, authority, recipient, data_dir };
        let services = Arc::new(services);
        let draining = tokio::spawn(drain::run(Arc::clone(&services)));
        Ok(Self { services, identity, renewing, deleting_events, starting, draining, _lock: lock })
    }

    /// Its services.
    #[must_use]
    pub fn services(&self) -> &Arc<Services> {
        &self.services
    }

    /// The server's certificate.
    #[must_use]
    pub fn identity(&self) -> &Arc<Identity> {
        &self.identity
    }

    /// Stops all work; tasks stop where they are and resume at the next start.
    pub fn stop_work(&self) {
        self.renewing.abort();
        self.deleting_events.abort();
        self.starting.abort();
        self.draining.abort();
        self.services.engine.stop();
    }

    /// Closes the inventory; call it once the services are no longer used.
    pub async fn close(self) {
        self.stop_work();
        self.services.store.close().await;
    }
}

async fn renew(identity: Arc<Identity>, authority: Arc<Authority>, store: Arc<Store>) {
    loop {
        if let Err(error) = identity.renew(&authority) {
            tracing::error!(%error, "the server's certificate could not be renewed");
        }
        let raised = expiry::of_server(&identity.der(), authority.der(), Timestamp::now());
        if let Err(error) = raise(&store, raised.as_slice()).await {
            tracing::error!(%error, "the alarm about the server's certificate could not be written");
        }
        tokio::time::sleep(RENEW_EVERY).await;
    }
}

async fn raise(store: &Store, raised: &[RaisedAlarm]) -> Result<(), StoreError> {
    if alarms::differ(&mut *store.read().await?, CERTIFICATE_ALARMS, raised).await? {
        let mut write = store.write().await?;
        alarms::replace(&mut write, CERTIFICATE_ALARMS, raised).await?;
        write.commit().await?;
    }
    Ok(())
}
