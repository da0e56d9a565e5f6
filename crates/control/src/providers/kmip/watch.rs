//! The watch of a KMS: tries its servers, reads the states of its keys, and retries pending destructions.
//! One task per provider; nothing else raises its alarms.
//!
//! ```text
//!             every server fails                 woken, or after a pause that grows
//!   Normal ───────────────────────► Failing ───────────────────────────────┐
//!     ▲ │ every five minutes,         ▲                                    │
//!     └─┘ or woken, or sooner         └────────── every server fails ──────┤
//!         while something is pending                                       │
//!     ▲                                                                    │
//!     └───── one answers: those that wait for keys are notified ───────────┘
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use jiff::Timestamp;
use tokio::task::JoinHandle;
use vmseal_api::key_fault::KeyFault;
use vmseal_api::kmip::KmipSeen;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::client::{Client, Error};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::{ResultReason, State};

use super::KEY_STATE;
use super::ask::ServerFailure;
use super::certificate::summary;
use super::destroy::{PendingDestruction, alarm_of};
use super::get::GetFailure;
use super::{KeyProvider, KmipProvider, ServerState, problem};
use crate::backoff;
use crate::setup::expiry;
use crate::store::alarms::{self, RaisedAlarm};
use crate::store::{keys, kmip, providers};

/// How often a KMS that answers is checked; as vCenter does.
const EVERY: Duration = Duration::from_secs(300);

/// The pause before one that does not answer is tried again, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The minimum time between two checks, however often the watch is woken.
const REST: Duration = Duration::from_millis(500);

/// A provider with its watch, which ends when this is dropped.
pub struct MonitoredProvider {
    /// The provider.
    pub provider: Arc<KmipProvider>,
    watch: JoinHandle<()>,
}

impl MonitoredProvider {
    pub(super) fn new(provider: KmipProvider) -> Self {
        let provider = Arc::new(provider);
        let watch = tokio::spawn(ProviderMonitor::new(Arc::clone(&provider)).run());
        Self { provider, watch }
    }
}

impl Drop for MonitoredProvider {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

struct ProviderMonitor {
    provider: Arc<KmipProvider>,
    /// In a row.
    failures: u32,
    /// The alarms about keys, as last known.
    about_keys: Vec<RaisedAlarm>,
    /// What is pending, as last known.
    pending: Vec<PendingDestruction>,
    /// How many checks in a row have left something pending.
    left: u32,
}

impl ProviderMonitor {
    fn new(provider: Arc<KmipProvider>) -> Self {
        Self { provider, failures: 0, about_keys: Vec::new(), pending: Vec::new(), left: 0 }
    }

    async fn run(mut self) {
        self.provider.wake.notified().await;
        loop {
            self.look().await;
            self.left = if self.pending.is_empty() { 0 } else { self.left.saturating_add(1) };
            let pause = match (self.failures, self.left) {
                (0, 0) => EVERY,
                // After one late answer a key must not be left for minutes.
                (0, left) => backoff::pause(RETRY.0, EVERY, left),
                (failures, _) => backoff::pause(RETRY.0, RETRY.1, failures),
            };
            tokio::time::sleep(REST.min(pause)).await;
            tokio::select! {
                () = tokio::time::sleep(pause.saturating_sub(REST)) => {}
                () = self.provider.wake.notified() => {}
            }
        }
    }

    async fn look(&mut self) {
        let provider = Arc::clone(&self.provider);
        let servers = provider.servers();
        join_all(servers.iter().map(|server| provider.probe(server))).await;
        let answers = servers.iter().any(|server| server.fault().is_none());
        if answers {
            // Independent of each other: if one fails, its last known alarms stay.
            match provider.look_at_keys().await {
                Ok(raised) => self.about_keys = raised,
                Err(problem) => {
                    tracing::warn!(provider = provider.name, %problem, "the states of its keys could not be read");
                }
            }
            self.note(provider.catch_up().await);
            if self.failures > 0 {
                provider.usable.send_modify(|count| *count += 1);
            }
            self.failures = 0;
        } else {
            self.failures = self.failures.saturating_add(1);
            if let Some(why) = provider.known_fault() {
                self.note(provider.put_off(&why).await);
            }
        }
        if let Err(problem) = self.raise(&servers).await {
            tracing::error!(provider = provider.name, %problem, "its alarms could not be written");
        }
    }

    fn note(&mut self, pending: Result<Vec<PendingDestruction>, Problem>) {
        match pending {
            Ok(pending) => self.pending = pending,
            Err(problem) => {
                tracing::error!(provider = self.provider.name, %problem, "what was put off could not be read");
            }
        }
    }

    async fn raise(&self, servers: &[Arc<ServerState>]) -> Result<(), Problem> {
        let provider = &self.provider;
        let mut raised = provider.about_servers(servers);
        let mut read = provider.store.read().await?;
        let (in_use, _) = providers::uses(&mut read, provider.id).await?;
        let default = providers::default(&mut read).await?.is_some_and(|it| it.id == provider.id);
        drop(read);
        if in_use == 0 {
            // An operator is setting it up.
            raised.retain(|alarm| match alarm.reason {
                Some(KeyFault::NotTrusted | KeyFault::NoClientCertificate) => false,
                Some(KeyFault::ProviderSealed) => default,
                _ => true,
            });
        }
        raised.extend(provider.about_certificates(servers, Timestamp::now()));
        raised.extend(self.about_keys.iter().cloned());
        raised.extend(alarm_of(&provider.name, &self.pending));
        let source = provider.id.to_string();
        if alarms::differ(&mut *provider.store.read().await?, &source, &raised).await? {
            let mut write = provider.store.write().await?;
            alarms::replace(&mut write, &source, &raised).await?;
            write.commit().await?;
        }
        Ok(())
    }
}

impl KmipProvider {
    /// Tries a server: which version it speaks, and what it is.
    pub(super) async fn probe(&self, server: &ServerState) {
        let asked = self.ask_one(server, |client: Arc<Client>| async move {
            let spoken = client.discover().await?.spoken.to_string();
            let vendor = match client.query().await {
                Ok(description) => description.vendor,
                // A client may be allowed only operations on its keys.
                Err(error) if error.refusal() == Some(ResultReason::PermissionDenied) => None,
                Err(error) => return Err(error),
            };
            Ok((spoken, vendor))
        });
        match asked.await {
            Ok((version, vendor)) => {
                let mut seen =
                    server.seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                let (at, version) = (Timestamp::now(), Some(version));
                *seen = Some(KmipSeen { at, version, vendor, problem: None });
            }
            // Without a reason it is not about the KMS.
            Err(ServerFailure::Refused(problem)) if problem.reason.is_some() => {
                server.saw(Some(problem))
            }
            // Already recorded.
            Err(_) => {}
        }
    }

    /// The alarms if all or some servers cannot be used.
    fn about_servers(&self, servers: &[Arc<ServerState>]) -> Vec<RaisedAlarm> {
        let faults: Vec<_> =
            servers.iter().filter_map(|server| Some((server, server.fault()?))).collect();
        let Some((_, first)) = faults.first() else { return Vec::new() };
        let alarm =
            |code, detail, reason| RaisedAlarm { code, target: self.name.clone(), detail, reason };
        if faults.len() == servers.len() {
            let code = match first.reason {
                Some(KeyFault::ProviderSealed) => "provider-sealed",
                _ => "provider-failing",
            };
            return vec![alarm(code, first.detail.clone(), first.reason)];
        }
        let details: Vec<_> = faults
            .iter()
            .map(|(server, problem)| format!("server '{}': {}", server.row.alias, problem.detail))
            .collect();
        vec![alarm("provider-degraded", details.join("; "), first.reason)]
    }

    /// The alarm about certificates that expire soon: the client's, and those that the servers send or that
    /// were trusted.
    pub(super) fn about_certificates(
        &self,
        servers: &[Arc<ServerState>],
        now: Timestamp,
    ) -> Option<RaisedAlarm> {
        let name = &self.name;
        let mut all = Vec::new();
        let setup = self.setup.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(client) = setup.certificate.as_deref().and_then(summary) {
            all.push(expiry::ExpiringCertificate {
                what: "the client certificate".to_owned(),
                until: client.not_after,
                remedy: format!("renew it with the same name (vmseal provider certificate {name})"),
            });
        }
        drop(setup);
        for server in servers {
            let pinned = match &server.row.trust {
                Some(kmip::Trust::Pinned { certificate }) => summary(certificate),
                _ => None,
            };
            let shown = || {
                let ends = server.client.as_ref().ok()?.certificate_ends()?;
                Timestamp::from_second(ends).ok()
            };
            let alias = &server.row.alias;
            if let Some(until) = pinned.map(|it| it.not_after).or_else(shown) {
                all.push(expiry::ExpiringCertificate {
                    what: format!("the certificate of server '{alias}'"),
                    until,
                    remedy: format!(
                        "renew it at the KMS, and trust the new one (vmseal provider trust {name})"
                    ),
                });
            }
        }
        expiry::alarm(name, &all, now)
    }

    /// The alarms about keys in use that are no longer as they should be.
    async fn look_at_keys(&self) -> Result<Vec<RaisedAlarm>, Problem> {
        let living = keys::living(&mut *self.store.read().await?, self.id).await?;
        let used: Vec<_> = living
            .into_iter()
            .filter(|key| !key.unwanted)
            .filter_map(|key| Some((self.key_id(&key.key_id).ok()?, key.vm_name?)))
            .collect();
        if used.is_empty() {
            self.note_faults(HashMap::new());
            return Ok(Vec::new());
        }
        let (mut raised, mut faults) = (Vec::new(), HashMap::new());
        for (id, vm, problem) in self.faults_of(used).await? {
            faults.insert(id.as_str().to_owned(), problem.clone());
            // One alarm for a VM that has two keys during a recryption.
            match raised.iter_mut().find(|known: &&mut RaisedAlarm| known.target == vm) {
                Some(known) => known.detail = format!("{}; {}", known.detail, problem.detail),
                None => {
                    let (code, detail) = (KEY_STATE, problem.detail);
                    raised.push(RaisedAlarm { code, target: vm, detail, reason: problem.reason });
                }
            }
        }
        self.note_faults(faults);
        Ok(raised)
    }

    /// The faults of keys. A key that a server does not have, or reports as destroyed, is requested from the next.
    pub(super) async fn faults_of(
        &self,
        keys: Vec<(KeyId, String)>,
    ) -> Result<Vec<(KeyId, String, Problem)>, Problem> {
        let (mut faults, mut nobody) = (Vec::new(), None);
        let mut open: Vec<_> = keys.into_iter().map(|(id, vm)| (id, vm, Vec::new())).collect();
        let servers = self.by_health();
        let mut answered = false;
        for server in &servers {
            let ids: Vec<_> = open.iter().map(|(id, ..)| id.clone()).collect();
            if ids.is_empty() {
                break;
            }
            let work = |client: Arc<Client>| async move { client.key_states(&ids).await };
            let states = match self.ask_one(server, work).await {
                Ok(states) => states,
                Err(answer) => {
                    let without = GetFailure::new(answer);
                    for (.., said) in &mut open {
                        said.push((Arc::clone(server), Some(without.clone())));
                    }
                    nobody.get_or_insert(without);
                    continue;
                }
            };
            answered = true;
            let asked = std::mem::take(&mut open);
            for (state, (id, vm, mut said)) in states.into_iter().zip(asked) {
                match self.seen_at(server, &id, state) {
                    Ok(None) => {}
                    Ok(Some(fault)) => faults.push((id, vm, fault)),
                    Err(without) => {
                        said.push((Arc::clone(server), Some(*without)));
                        open.push((id, vm, said));
                    }
                }
            }
        }
        if let (false, Some(nobody)) = (answered, nobody) {
            return Err(nobody.into());
        }
        let without = open.into_iter().map(|(id, vm, said)| {
            let problem = self.no_key(id.as_str(), said);
            (id, vm, problem)
        });
        faults.extend(without);
        Ok(faults)
    }

    /// The fault that a key's state at a server means; an error if another server must be asked.
    fn seen_at(
        &self,
        server: &ServerState,
        id: &KeyId,
        state: Result<State, Error>,
    ) -> Result<Option<Problem>, Box<GetFailure>> {
        let state = match state {
            Ok(state) => state,
            Err(error) => {
                return Err(Box::new(GetFailure::new(ServerFailure::Refused(problem::of(
                    &self.name, &error,
                )))));
            }
        };
        let Some(fault) = problem::of_state(state) else { return Ok(None) };
        let what = format!("is {state} at server '{}'", server.row.alias);
        let why = self.wrong_key(ErrorCode::WrongState, fault, id.as_str(), &what);
        match fault {
            KeyFault::KeyDestroyed => Err(Box::new(GetFailure::destroyed(why))),
            _ => Ok(Some(why)),
        }
    }

    /// Wakes the hosts' monitors when keys become unusable, or usable again.
    fn note_faults(&self, faults: HashMap<String, Problem>) {
        let mut known = self.key_faults.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let still = |(id, was): (&String, &Problem)| {
            faults.get(id).is_some_and(|now| now.reason == was.reason)
        };
        let same = known.len() == faults.len() && known.iter().all(still);
        *known = faults;
        drop(known);
        if !same {
            self.usable.send_modify(|count| *count += 1);
        }
    }
}
