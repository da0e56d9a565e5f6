//! KMIP providers: a key management system creates, stores and destroys the KEKs.
//!
//! | module | what |
//! |---|---|
//! | this | the provider and its servers |
//! | `ask`, `race` | chooses the server to ask, and when to ask the next one |
//! | `get` | reads and checks a key |
//! | `create` | creates a key exactly once |
//! | `destroy` | destroys unwanted keys |
//! | `watch` | tries servers, reads states of keys, raises alarms |
//! | `life` | adds a provider, sets the trust in its servers |
//! | `servers` | adds, removes, reorders servers, changes their addresses |
//! | `certificates` | sets and replaces its client key and certificate |
//! | `backup` | writes and restores its settings and client key |
//! | `trial` | tests servers, with a test key |
//! | `client_key` | the private key and its certificate |
//! | [`problem`] | problems with their remedies |
//!
//! The servers of a provider must replicate; vmseal does not rely on that, as it accepts a key only with the
//! check value in the inventory.

mod ask;
mod backup;
pub(crate) mod certificate;
mod certificates;
mod client_key;
mod create;
mod destroy;
mod get;
mod life;
pub(crate) mod problem;
mod race;
mod servers;
#[cfg(test)]
mod tests;
mod trial;
mod watch;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use tokio::sync::{Notify, watch as changes};
use tokio::time::Instant;
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{ProviderId, VmId};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::kmip::KmipSeen;
use vmseal_api::model::ProviderStatus;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::OperationCode;
use vmseal_kmip::client::{Client, Ended, Endpoint, Observer, Settings, Timeouts, Trust};
use vmseal_kmip::operation::KeyId;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{KeyContext, check_value};

use self::client_key::ClientKey;
use super::{GivenKey, KeyProvider};
use crate::locks::Locks;
use crate::metrics;
use crate::store::{Store, StoreError, key_requests, kmip};

/// The alarms about keys in use that are no longer as they should be.
const KEY_STATE: &str = "key-state";

pub use self::certificates::{NewCertificate, NewName};
pub(in crate::providers) use self::create::orphan;
pub use self::servers::ServerChange;
pub use self::watch::MonitoredProvider;
pub use vmseal_kmip::client::KMIP_PORT;

/// The timeout of each step: a starting VM may wait for all of them, and a request of the API has
/// a minute in all. Hardware may take some seconds to create a key.
const TIMEOUTS: Timeouts = Timeouts {
    wait: Duration::from_secs(10),
    connect: Duration::from_secs(5),
    handshake: Duration::from_secs(if cfg!(test) { 2 } else { 10 }),
    write: Duration::from_secs(5),
    read: Duration::from_secs(if cfg!(test) { 2 } else { 15 }),
};

/// How long a server that was late is asked after the others. An answer to the watch does not shorten it:
/// some servers hang only on requests for keys.
const LATE_FOR: Duration = Duration::from_secs(10);

/// A KMIP provider.
pub struct KmipProvider {
    id: ProviderId,
    name: String,
    store: Arc<Store>,
    setup: RwLock<Configuration>,
    /// Held from the check of a change of its setup until the change is in the inventory and in `setup`.
    changing: tokio::sync::Mutex<()>,
    /// Locks of keys, by id, while they are destroyed: a second destruction would record that they were already gone, or
    /// get its Revoke refused.
    destroying: Locks<String>,
    /// The faults of keys in use, by id, as last seen by the watch.
    key_faults: Mutex<HashMap<String, Problem>>,
    /// Requests of running tests.
    trials: Mutex<HashSet<Uuid>>,
    /// Wakes the watch.
    wake: Notify,
    /// Notified when a provider can be used again.
    usable: changes::Sender<u64>,
}

/// The setup by the operator.
#[derive(Default)]
struct Configuration {
    /// None until its passphrase is given.
    key: Option<Arc<ClientKey>>,
    certificate: Option<String>,
    /// Another key waits for its certificate: it is in the inventory, and here when it was made or opened since
    /// the server's start.
    next_key: bool,
    next: Option<Arc<ClientKey>>,
    servers: Vec<Arc<ServerState>>,
}

/// A server and its state.
struct ServerState {
    row: kmip::Server,
    /// The client, or what is missing for it.
    client: Result<Arc<Client>, Problem>,
    seen: Mutex<Option<KmipSeen>>,
    /// When another server last had to answer in its place.
    late: Mutex<Option<Instant>>,
}

impl ServerState {
    fn seen(&self) -> Option<KmipSeen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why it cannot be used, if known.
    fn fault(&self) -> Option<Problem> {
        match &self.client {
            Err(problem) => Some(problem.clone()),
            Ok(_) => self.seen().and_then(|seen| seen.problem),
        }
    }

    /// Whether another server had to answer in its place recently.
    fn is_late(&self) -> bool {
        let late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        late.is_some_and(|since| since.elapsed() < LATE_FOR)
    }

    fn set_late(&self) {
        *self.late.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Records how it answered.
    fn saw(&self, problem: Option<Problem>) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let (version, vendor) =
            seen.take().map(|seen| (seen.version, seen.vendor)).unwrap_or_default();
        *seen = Some(KmipSeen { at: Timestamp::now(), version, vendor, problem });
    }
}

impl KmipProvider {
    /// A provider, sealed.
    fn new(id: ProviderId, name: String, store: Arc<Store>, usable: changes::Sender<u64>) -> Self {
        let (setup, wake) = (RwLock::default(), Notify::new());
        let (key_faults, trials) = (Mutex::default(), Mutex::default());
        let (changing, destroying) = (tokio::sync::Mutex::default(), Locks::default());
        Self { id, name, store, setup, changing, destroying, key_faults, trials, wake, usable }
    }

    /// Reads its setup from the inventory; another private key may come with it. Servers that stay as they
    /// are keep their connections, and what is known of them.
    pub(super) async fn load(&self, key: Option<Arc<ClientKey>>) -> Result<(), StoreError> {
        let mut read = self.store.read().await?;
        let rows = kmip::servers(&mut read, self.id).await?;
        let client = kmip::client(&mut read, self.id).await?;
        drop(read);
        let next_key = client.as_ref().is_some_and(|row| row.next_key_file.is_some());
        let certificate = client.and_then(|row| row.certificate);
        let mut setup = self.setup.write().unwrap_or_else(PoisonError::into_inner);
        let same_client = key.is_none() && setup.certificate == certificate;
        if let Some(key) = key {
            setup.key = Some(key);
        }
        if !next_key {
            setup.next = None;
        }
        let servers = rows.into_iter().map(|row| {
            let known = setup.servers.iter().find(|server| server.row == row);
            if let Some(known) = known.filter(|known| same_client && known.client.is_ok()) {
                return Arc::clone(known);
            }
            let client = self.client(&row, certificate.as_deref(), setup.key.as_deref());
            let (seen, late) = (Mutex::default(), Mutex::default());
            Arc::new(ServerState { row, client: client.map(Arc::new), seen, late })
        });
        let servers = servers.collect();
        (setup.servers, setup.certificate, setup.next_key) = (servers, certificate, next_key);
        Ok(())
    }

    /// The key that waits for its certificate, if it is open.
    fn next_key(&self) -> Option<Arc<ClientKey>> {
        self.setup.read().unwrap_or_else(PoisonError::into_inner).next.clone()
    }

    fn set_next_key(&self, key: Arc<ClientKey>) {
        let mut setup = self.setup.write().unwrap_or_else(PoisonError::into_inner);
        (setup.next, setup.next_key) = (Some(key), true);
    }

    /// Wakes the watch.
    pub(super) fn look_now(&self) {
        self.wake.notify_one();
    }

    fn client(
        &self,
        row: &kmip::Server,
        certificate: Option<&str>,
        key: Option<&ClientKey>,
    ) -> Result<Client, Problem> {
        let missing =
            |fault, what: &str| problem::new(&self.name, ErrorCode::WrongState, fault, what);
        let Some(key) = key else {
            return Err(missing(KeyFault::ProviderSealed, "it is sealed"));
        };
        let trust = match &row.trust {
            None => {
                let what =
                    format!("nobody has trusted the certificate of its server '{}'", row.alias);
                return Err(missing(KeyFault::NotTrusted, &what));
            }
            Some(kmip::Trust::Pinned { certificate }) => Trust::pinned(certificate),
            Some(kmip::Trust::Authorities { certificates }) => Trust::authorities(certificates),
        };
        let Some(certificate) = certificate else {
            return Err(missing(KeyFault::NoClientCertificate, "it has no client certificate"));
        };
        let unusable = |why: String| Problem::new(ErrorCode::WrongState, why);
        let endpoint = Endpoint::new(row.host.clone(), row.port)
            .map_err(|error| unusable(error.to_string()))?;
        let trust = trust.map_err(|error| unusable(error.to_string()))?;
        let mut settings = Settings::new(endpoint, trust, key.identity(certificate)?);
        settings.timeouts = TIMEOUTS;
        let (provider, server) = (self.id.to_string(), row.alias.clone());
        settings.observer = Some(Arc::new(Counted { provider, server }));
        Client::new(settings).map_err(|error| unusable(error.to_string()))
    }

    fn key(&self) -> Result<Arc<ClientKey>, Problem> {
        let setup = self.setup.read().unwrap_or_else(PoisonError::into_inner);
        setup.key.clone().ok_or_else(|| {
            problem::new(
                &self.name,
                ErrorCode::WrongState,
                KeyFault::ProviderSealed,
                "it is sealed",
            )
        })
    }

    fn servers(&self) -> Vec<Arc<ServerState>> {
        self.setup.read().unwrap_or_else(PoisonError::into_inner).servers.clone()
    }

    /// Whether it can be used.
    pub(super) fn status(&self) -> ProviderStatus {
        let servers = self.servers();
        let faults: Vec<_> = servers.iter().map(|server| server.fault()).collect();
        // The best of its servers decides.
        if faults.iter().any(Option::is_none) {
            let answers =
                |server: &Arc<ServerState>| server.fault().is_none() && server.seen().is_some();
            return if !servers.iter().any(answers) {
                ProviderStatus::Untried
            } else if faults.iter().any(Option::is_some) {
                ProviderStatus::Degraded
            } else {
                ProviderStatus::Normal
            };
        }
        let has =
            |fault| faults.iter().flatten().any(|problem: &Problem| problem.reason == Some(fault));
        if has(KeyFault::ProviderSealed) {
            ProviderStatus::Sealed
        } else if has(KeyFault::NoClientCertificate) {
            ProviderStatus::NeedsCertificate
        } else if faults
            .iter()
            .flatten()
            .all(|problem| problem.reason == Some(KeyFault::NotTrusted))
        {
            ProviderStatus::NeedsTrust
        } else {
            ProviderStatus::Failing
        }
    }

    fn check(&self, vm: VmId, key_id: &str, kek: &SecretBytes) -> Result<String, Problem> {
        let context =
            KeyContext { vm: vm.0.into_bytes(), provider: self.id.0.into_bytes(), key_id };
        let check = check_value(kek, &context).map_err(|error| crate::internal(&error))?;
        Ok(check.to_string())
    }

    /// Refuses a key whose bytes do not match its reference: an id alone proves nothing, as servers
    /// that do not replicate have different keys under one.
    fn compare(
        &self,
        vm: VmId,
        key: &KeyReference,
        kek: &SecretBytes,
        server: &ServerState,
    ) -> Result<(), Problem> {
        if self.check(vm, &key.key_id, kek)? == key.check {
            return Ok(());
        }
        let what = format!(
            "has other bytes at server '{}' than the one that was made for the VM",
            server.row.alias
        );
        let fault = KeyFault::KeyMismatch;
        Err(self.wrong_key(ErrorCode::KeyMismatch, fault, &key.key_id, &what))
    }

    fn key_id(&self, key_id: &str) -> Result<KeyId, Problem> {
        KeyId::new(key_id).map_err(|error| {
            let what = format!("key '{key_id}': {error}");
            problem::new(&self.name, ErrorCode::NotFound, KeyFault::KeyMissing, &what)
        })
    }

    /// A problem of one of its keys.
    fn wrong_key(&self, code: ErrorCode, fault: KeyFault, key_id: &str, what: &str) -> Problem {
        problem::new(&self.name, code, fault, &format!("key '{key_id}' {what}"))
    }
}

#[async_trait]
impl KeyProvider for KmipProvider {
    async fn create_key(
        &self,
        vm: VmId,
        request: Uuid,
    ) -> Result<(KeyReference, SecretBytes), Problem> {
        self.within_deadline(self.create(vm, request)).await
    }

    async fn get_key(&self, vm: VmId, key: &KeyReference) -> Result<GivenKey, Problem> {
        self.read_key(vm, key).await
    }

    async fn reference_of(&self, vm: VmId, key_id: &str) -> Result<KeyReference, Problem> {
        self.read_reference(vm, key_id).await
    }

    async fn destroy_key(
        &self,
        vm: VmId,
        vm_name: &str,
        key: &KeyReference,
    ) -> Result<(), Problem> {
        self.destroy(vm, vm_name, key).await
    }

    async fn abandon(&self, request: Uuid) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        let Some(mut noted) = key_requests::get(&mut write, self.id, request).await? else {
            return Ok(());
        };
        noted.abandoned = true;
        key_requests::put(&mut write, self.id, &noted).await?;
        write.commit().await?;
        self.wake.notify_one();
        Ok(())
    }

    fn known_fault(&self) -> Option<Problem> {
        let faults: Vec<_> = self.servers().iter().map(|server| server.fault()).collect();
        if faults.iter().any(Option::is_none) { None } else { faults.into_iter().flatten().next() }
    }

    fn known_fault_of(&self, key_id: &str) -> Option<Problem> {
        self.key_faults.lock().unwrap_or_else(PoisonError::into_inner).get(key_id).cloned()
    }
}

/// Counts the requests to a server.
#[derive(Debug)]
struct Counted {
    provider: String,
    server: String,
}

impl Observer for Counted {
    fn ended(&self, operation: OperationCode, took: Duration, how: Ended) {
        let outcome = match how {
            Ended::Done => "done",
            Ended::Refused => "refused",
            Ended::Failed => "failed",
        };
        let server = (self.provider.as_str(), self.server.as_str());
        metrics::get().kms_request(server, &operation.to_string(), took, outcome);
    }
}
