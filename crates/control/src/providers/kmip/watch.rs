//! What stands at a KMS: its servers are tried, the states of its keys read, and what was put off is
//! done. One task per provider; nothing else raises its alarms.
//!
//! ```text
//!             every server fails                 woken, or after a pause that grows
//!   Normal ───────────────────────► Failing ───────────────────────────────┐
//!     ▲ │ every five minutes,         ▲                                    │
//!     └─┘ or woken, or sooner         └────────── every server fails ──────┤
//!         while something is put off                                       │
//!     ▲                                                                    │
//!     └───── one answers: whoever waits for keys is told ──────────────────┘
//! ```

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use jiff::Timestamp;
use tokio::task::JoinHandle;
use vmseal_api::kmip::{KeyFault, KmipSeen};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::ResultReason;
use vmseal_kmip::client::Client;

use super::destroy::{Undone, alarm_of};
use super::life::summary;
use super::{KeyProvider, KmipProvider, Server, problem};
use crate::backoff;
use crate::store::alarms::{self, Standing};
use crate::store::{keys, kmip, providers};

/// The alarms about keys in use that are no longer as they should be.
pub(super) const KEY_STATE: &str = "key-state";

/// How often a KMS that answers is looked at; as vCenter does.
const EVERY: Duration = Duration::from_secs(300);

/// How soon one that does not answer is tried again, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// The least time between two looks, however often somebody wakes the watch.
const REST: Duration = Duration::from_millis(500);

/// How long before its end a certificate is an alarm, in days: time for two people to arrange another.
const EXPIRY_DAYS: i64 = 30;

/// A provider with its watch, which ends with it.
pub struct Watched {
    /// The provider.
    pub provider: Arc<KmipProvider>,
    watch: JoinHandle<()>,
}

impl Watched {
    pub(super) fn new(provider: KmipProvider) -> Self {
        let provider = Arc::new(provider);
        let watch = tokio::spawn(Watch::new(Arc::clone(&provider)).run());
        Self { provider, watch }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.watch.abort();
    }
}

struct Watch {
    provider: Arc<KmipProvider>,
    /// In a row.
    failures: u32,
    /// The alarms about keys, as last known.
    about_keys: Vec<Standing>,
    /// What is put off, as last known.
    undone: Vec<Undone>,
    /// How many looks in a row have left something undone.
    left: u32,
}

impl Watch {
    fn new(provider: Arc<KmipProvider>) -> Self {
        Self { provider, failures: 0, about_keys: Vec::new(), undone: Vec::new(), left: 0 }
    }

    async fn run(mut self) {
        self.provider.wake.notified().await;
        loop {
            self.look().await;
            self.left = if self.undone.is_empty() { 0 } else { self.left.saturating_add(1) };
            let pause = match (self.failures, self.left) {
                (0, 0) => EVERY,
                // One answer that was late is not to leave a key there for minutes.
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
            // Each whatever becomes of the other: what is known stays known.
            match provider.look_at_keys().await {
                Ok(standing) => self.about_keys = standing,
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

    fn note(&mut self, undone: Result<Vec<Undone>, Problem>) {
        match undone {
            Ok(undone) => self.undone = undone,
            Err(problem) => {
                tracing::error!(provider = self.provider.name, %problem, "what was put off could not be read");
            }
        }
    }

    async fn raise(&self, servers: &[Arc<Server>]) -> Result<(), Problem> {
        let provider = &self.provider;
        let mut standing = provider.about_servers(servers);
        let (in_use, _) = providers::uses(&mut *provider.store.read().await?, provider.id).await?;
        if in_use == 0 {
            // Somebody is setting it up.
            standing.retain(|alarm| {
                !matches!(
                    alarm.reason,
                    Some(
                        KeyFault::NotTrusted
                            | KeyFault::NoClientCertificate
                            | KeyFault::ProviderSealed
                    )
                )
            });
        }
        standing.extend(provider.about_certificates(servers));
        standing.extend(self.about_keys.iter().cloned());
        standing.extend(alarm_of(&provider.name, &self.undone));
        let source = provider.id.to_string();
        if alarms::differ(&mut *provider.store.read().await?, &source, &standing).await? {
            let mut write = provider.store.write().await?;
            alarms::replace(&mut write, &source, &standing).await?;
            write.commit().await?;
        }
        Ok(())
    }
}

impl KmipProvider {
    /// Tries a server: which version it speaks, and what it is.
    pub(super) async fn probe(&self, server: &Server) {
        let asked = self.ask_one(server, |client: Arc<Client>| async move {
            let spoken = client.discover().await?.spoken.to_string();
            let vendor = match client.query().await {
                Ok(description) => description.vendor,
                // A client may be allowed its keys alone.
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
            Err(super::Answer::No(problem)) if problem.reason.is_some() => {
                server.saw(Some(problem))
            }
            // Noted already.
            Err(_) => {}
        }
    }

    /// The alarms about servers that cannot be used: all of them, or some.
    fn about_servers(&self, servers: &[Arc<Server>]) -> Vec<Standing> {
        let faults: Vec<_> =
            servers.iter().filter_map(|server| Some((server, server.fault()?))).collect();
        let Some((_, first)) = faults.first() else { return Vec::new() };
        let alarm =
            |code, detail, reason| Standing { code, target: self.name.clone(), detail, reason };
        if faults.len() == servers.len() {
            return vec![alarm("provider-failing", first.detail.clone(), first.reason)];
        }
        let details: Vec<_> = faults
            .iter()
            .map(|(server, problem)| format!("server '{}': {}", server.row.alias, problem.detail))
            .collect();
        vec![alarm("provider-degraded", details.join("; "), first.reason)]
    }

    /// The alarms about certificates that end soon.
    fn about_certificates(&self, servers: &[Arc<Server>]) -> Vec<Standing> {
        let mut ending = Vec::new();
        let soon = Timestamp::now().as_second() + EXPIRY_DAYS * 24 * 3600;
        let mut look = |what: String, pem: &str| {
            if let Some(certificate) = summary(pem)
                && certificate.not_after.as_second() < soon
            {
                ending.push(format!("{what} is valid until {}: renew it", certificate.not_after));
            }
        };
        let setup = self.setup.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(certificate) = &setup.certificate {
            look("the client certificate".to_owned(), certificate);
        }
        drop(setup);
        for server in servers {
            if let Some(kmip::Trust::Pinned { certificate }) = &server.row.trust {
                look(format!("the certificate of server '{}'", server.row.alias), certificate);
            }
        }
        if ending.is_empty() {
            return Vec::new();
        }
        let (code, target) = ("certificate-expiring", self.name.clone());
        vec![Standing { code, target, detail: ending.join("; "), reason: None }]
    }

    /// The alarms about keys in use that are no longer as they should be.
    async fn look_at_keys(&self) -> Result<Vec<Standing>, Problem> {
        let living = keys::living(&mut *self.store.read().await?, self.id).await?;
        let used: Vec<_> = living
            .into_iter()
            .filter(|key| !key.unwanted)
            .filter_map(|key| Some((self.key_id(&key.key_id).ok()?, key.vm_name?)))
            .collect();
        if used.is_empty() {
            self.note_revoked(HashMap::new());
            return Ok(Vec::new());
        }
        let ids: Vec<_> = used.iter().map(|(id, _)| id.clone()).collect();
        let asked = self.ask(|client| {
            let ids = ids.clone();
            async move { client.key_states(&ids).await }
        });
        let (server, states) = asked.await?;
        let (mut standing, mut revoked) = (Vec::new(), HashMap::new());
        for (state, (id, vm)) in states.into_iter().zip(used) {
            let problem = match state {
                Ok(state) => match problem::of_state(state) {
                    None => continue,
                    Some(fault) => {
                        let what = format!("is {state} at server '{}'", server.row.alias);
                        self.wrong_key(ErrorCode::WrongState, fault, id.as_str(), &what)
                    }
                },
                Err(error) => problem::of(&self.name, &error),
            };
            if let Some(KeyFault::KeyDeactivated | KeyFault::KeyCompromised) = problem.reason {
                revoked.insert(id.as_str().to_owned(), problem.clone());
            }
            // One alarm for a VM that is being given another key and has two.
            match standing.iter_mut().find(|known: &&mut Standing| known.target == vm) {
                Some(known) => known.detail = format!("{}; {}", known.detail, problem.detail),
                None => {
                    let (code, detail) = (KEY_STATE, problem.detail);
                    standing.push(Standing { code, target: vm, detail, reason: problem.reason });
                }
            }
        }
        self.note_revoked(revoked);
        Ok(standing)
    }

    /// Has the hosts' monitors look when keys can be used no more, or again.
    fn note_revoked(&self, revoked: HashMap<String, Problem>) {
        let mut known = self.revoked.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let same = known.len() == revoked.len() && known.keys().all(|id| revoked.contains_key(id));
        *known = revoked;
        drop(known);
        if !same {
            self.usable.send_modify(|count| *count += 1);
        }
    }
}
