//! KMIP providers: KEKs that are made, kept and destroyed by a key management system.
//!
//! | module | what |
//! |---|---|
//! | this | the provider: its servers, a key read and checked |
//! | `create` | a key made, once, whatever is lost on the way |
//! | `destroy` | keys that nobody wants any more |
//! | `watch` | what stands: servers tried, states of keys, alarms |
//! | `life` | added, trusted, given a certificate, tested |
//! | `trial` | a key made to see whether that works |
//! | `client_key` | the private key and its certificate |
//! | [`problem`] | what goes wrong, with its remedy |
//!
//! Servers are asked in their order, and the first that answers serves: a refusal is an answer. They
//! have to replicate; that they do is not taken on trust, as a key counts only with the check value that the
//! inventory has of it.

mod client_key;
mod create;
mod destroy;
mod life;
pub(crate) mod problem;
#[cfg(test)]
mod tests;
mod trial;
mod watch;

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use jiff::Timestamp;
use tokio::sync::{Notify, watch as changes};
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{ProviderId, VmId};
use vmseal_api::kmip::{KeyFault, KmipSeen};
use vmseal_api::model::ProviderStatus;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::OperationCode;
use vmseal_kmip::client::{Client, Ended, Endpoint, Error, Observer, Settings, Timeouts, Trust};
use vmseal_kmip::operation::KeyId;
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{KeyContext, check_value};

use self::client_key::ClientKey;
use super::{GivenKey, KeyProvider};
use crate::locks::Locks;
use crate::metrics;
use crate::store::{Store, StoreError, key_requests, keys, kmip};

pub(in crate::providers) use self::create::orphan;
pub use self::watch::Watched;
pub use vmseal_kmip::client::KMIP_PORT;

/// How long each step may take: a VM that is started waits for all of them, and a request of the API has
/// a minute in all. A key may be made in hardware: some seconds.
const TIMEOUTS: Timeouts = Timeouts {
    wait: Duration::from_secs(10),
    connect: Duration::from_secs(5),
    handshake: Duration::from_secs(if cfg!(test) { 2 } else { 10 }),
    write: Duration::from_secs(5),
    read: Duration::from_secs(if cfg!(test) { 2 } else { 15 }),
};

/// A KMIP provider.
pub struct KmipProvider {
    id: ProviderId,
    name: String,
    store: Arc<Store>,
    setup: RwLock<Setup>,
    /// Held from the check of a change of its setup until the change is in the inventory and in `setup`.
    changing: tokio::sync::Mutex<()>,
    /// Of keys, by id, while they are destroyed: whoever came second would note that they were gone already, or
    /// have its Revoke refused.
    destroying: Locks<String>,
    /// Keys in use that encrypt nothing new, by id, as the watch saw them last.
    revoked: Mutex<HashMap<String, Problem>>,
    /// Requests of tests that are under way.
    trials: Mutex<HashSet<Uuid>>,
    /// Asks the watch to look now.
    wake: Notify,
    /// Told when a provider can be used again.
    usable: changes::Sender<u64>,
}

/// All that an operator sets.
#[derive(Default)]
struct Setup {
    /// None until its passphrase is given.
    key: Option<Arc<ClientKey>>,
    certificate: Option<String>,
    servers: Vec<Arc<Server>>,
}

/// A server, and what is known of it.
struct Server {
    row: kmip::Server,
    /// None while something is missing, with what that is.
    client: Result<Arc<Client>, Problem>,
    seen: Mutex<Option<KmipSeen>>,
}

impl Server {
    fn seen(&self) -> Option<KmipSeen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why it cannot be used, as far as is known.
    fn fault(&self) -> Option<Problem> {
        match &self.client {
            Err(problem) => Some(problem.clone()),
            Ok(_) => self.seen().and_then(|seen| seen.problem),
        }
    }

    /// Notes how it answered.
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
        let (revoked, trials) = (Mutex::default(), Mutex::default());
        let (changing, destroying) = (tokio::sync::Mutex::default(), Locks::default());
        Self { id, name, store, setup, changing, destroying, revoked, trials, wake, usable }
    }

    /// Reads its setup from the inventory; another private key may come with it.
    pub(super) async fn load(&self, key: Option<ClientKey>) -> Result<(), StoreError> {
        let mut read = self.store.read().await?;
        let rows = kmip::servers(&mut read, self.id).await?;
        let certificate = kmip::client(&mut read, self.id).await?.and_then(|row| row.certificate);
        drop(read);
        let mut setup = self.setup.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(key) = key {
            setup.key = Some(Arc::new(key));
        }
        let servers = rows.into_iter().map(|row| {
            let client = self.client(&row, certificate.as_deref(), setup.key.as_deref());
            Arc::new(Server { row, client: client.map(Arc::new), seen: Mutex::default() })
        });
        setup.servers = servers.collect();
        setup.certificate = certificate;
        Ok(())
    }

    /// Has the watch look now.
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

    fn servers(&self) -> Vec<Arc<Server>> {
        self.setup.read().unwrap_or_else(PoisonError::into_inner).servers.clone()
    }

    /// Whether it can be used.
    pub(super) fn status(&self) -> ProviderStatus {
        let servers = self.servers();
        let faults: Vec<_> = servers.iter().map(|server| server.fault()).collect();
        // The best of its servers decides.
        if faults.iter().any(Option::is_none) {
            let answers =
                |server: &Arc<Server>| server.fault().is_none() && server.seen().is_some();
            return if servers.iter().any(answers) {
                ProviderStatus::Normal
            } else {
                ProviderStatus::Untried
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

    /// Asks the servers in their order; the first that answers serves.
    async fn ask<T, W, F>(&self, work: W) -> Result<(Arc<Server>, T), Problem>
    where
        W: Fn(Arc<Client>) -> F,
        F: Future<Output = Result<T, Error>>,
    {
        let mut first = None;
        for server in self.servers() {
            match self.ask_one(&server, &work).await {
                Ok(answer) => return Ok((server, answer)),
                Err(Answer::No(problem)) => return Err(problem),
                Err(Answer::None(problem)) => {
                    first.get_or_insert(problem);
                }
            }
        }
        Err(first.unwrap_or_else(|| Problem::not_found("provider", &self.name)))
    }

    /// Asks one server, and notes how it answered.
    async fn ask_one<T, W, F>(&self, server: &Server, work: W) -> Result<T, Answer>
    where
        W: FnOnce(Arc<Client>) -> F,
        F: Future<Output = Result<T, Error>>,
    {
        let client = server.client.as_ref().map_err(|problem| Answer::None(problem.clone()))?;
        match work(Arc::clone(client)).await {
            Ok(answer) => {
                self.note(server, None);
                Ok(answer)
            }
            Err(error) => {
                let problem = problem::of(&self.name, &error);
                if problem::is_silence(&error) {
                    self.note(server, Some(problem.clone()));
                    Err(Answer::None(problem))
                } else {
                    if error.refusal().is_some() {
                        self.note(server, None);
                    }
                    Err(Answer::No(problem))
                }
            }
        }
    }

    /// As [`Self::ask_one`], but a server that did not answer before in the same pass.
    async fn ask_unless<T, W, F>(
        &self,
        silent: &mut Silent,
        server: &Server,
        work: W,
    ) -> Result<T, Answer>
    where
        W: FnOnce(Arc<Client>) -> F,
        F: Future<Output = Result<T, Error>>,
    {
        if let Some(problem) = silent.0.get(&server.row.alias) {
            return Err(Answer::None(problem.clone()));
        }
        let answer = self.ask_one(server, work).await;
        if let Err(Answer::None(problem)) = &answer {
            silent.0.insert(server.row.alias.clone(), problem.clone());
        }
        answer
    }

    /// Notes how a server answered; when that is new, the watch is to look.
    fn note(&self, server: &Server, problem: Option<Problem>) {
        let was = server.seen().map(|seen| seen.problem.is_some());
        let is = problem.is_some();
        server.saw(problem);
        if was != Some(is) {
            self.wake.notify_one();
        }
    }

    fn check(&self, vm: VmId, key_id: &str, kek: &SecretBytes) -> Result<String, Problem> {
        let context =
            KeyContext { vm: vm.0.into_bytes(), provider: self.id.0.into_bytes(), key_id };
        let check = check_value(kek, &context).map_err(|error| crate::internal(&error))?;
        Ok(check.to_string())
    }

    /// Refuses a key that has other bytes than its reference says: an id alone says nothing, as servers
    /// that do not replicate have different keys under one.
    fn compare(
        &self,
        vm: VmId,
        key: &KeyReference,
        kek: &SecretBytes,
        server: &Server,
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

/// Why there is no success.
enum Answer {
    /// The server answered, and it is no.
    No(Problem),
    /// The server did not answer in any way that counts.
    None(Problem),
}

impl From<Answer> for Problem {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::No(problem) | Answer::None(problem) => problem,
        }
    }
}

/// The servers that did not answer in one pass over many keys, by alias: time-outs add up.
#[derive(Default)]
struct Silent(HashMap<String, Problem>);

#[async_trait]
impl KeyProvider for KmipProvider {
    async fn create_key(
        &self,
        vm: VmId,
        request: Uuid,
    ) -> Result<(KeyReference, SecretBytes), Problem> {
        self.create(vm, request).await
    }

    async fn get_key(&self, vm: VmId, key: &KeyReference) -> Result<GivenKey, Problem> {
        let key_id = key.key_id.as_str();
        if keys::is_destroyed(&mut *self.store.read().await?, self.id, key_id).await? {
            let fault = KeyFault::KeyDestroyed;
            return Err(self.wrong_key(ErrorCode::NotFound, fault, key_id, "is destroyed"));
        }
        let id = self.key_id(key_id)?;
        let asked = self.ask(|client| {
            let id = id.clone();
            async move {
                let state = client.key_state(&id).await?;
                match problem::of_state(state) {
                    Some(KeyFault::KeyDestroyed | KeyFault::KeyNotActive) => Ok((state, None)),
                    _ => Ok((state, Some(client.get_key(&id).await?))),
                }
            }
        });
        let (server, (state, kek)) = asked.await?;
        let fault = problem::of_state(state);
        let Some(kek) = kek else {
            let fault = fault.unwrap_or(KeyFault::KeyNotActive);
            let what = format!("is {state} at server '{}'", server.row.alias);
            return Err(self.wrong_key(ErrorCode::NotFound, fault, key_id, &what));
        };
        self.compare(vm, key, &kek, &server)?;
        let fault = fault.map(|fault| {
            let what = format!("is {state} at server '{}'", server.row.alias);
            self.wrong_key(ErrorCode::WrongState, fault, key_id, &what)
        });
        if fault.is_some() {
            // Its alarm.
            self.wake.notify_one();
        }
        Ok(GivenKey { kek, fault })
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
        self.revoked.lock().unwrap_or_else(PoisonError::into_inner).get(key_id).cloned()
    }
}

/// Counts what a server is asked.
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
