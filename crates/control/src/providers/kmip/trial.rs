//! Tests servers: connects to each; on request, also creates a key at one, which all must then have,
//! and destroys it again.
//!
//! The key's request is recorded as unwanted from the beginning: whatever fails, even this process,
//! the watch finds the key and destroys it.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures_util::future::join_all;
use jiff::Timestamp;
use tokio::time::{Instant, sleep};
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::key_fault::KeyFault;
use vmseal_api::kmip::{KmipKeyTested, KmipSeen, KmipTested, ProviderTest};
use vmseal_api::problem::Problem;
use vmseal_kmip::client::Client;
use vmseal_kmip::operation::KeyId;
use vmseal_secret::SecretBytes;

use super::{KmipProvider, ServerState};
use crate::providers::Providers;
use crate::store::events::NewEvent;
use crate::store::key_requests::{self, KeyRequest};
use crate::store::keys;
use crate::store::providers::Provider;

/// How long a key may take from one server to the others before they count as not replicating. Clusters
/// replicate before they answer, or within a second.
const REPLICATION: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });

/// How often a server is asked meanwhile.
const REPLICATION_POLL: Duration = Duration::from_millis(250);

/// The result of the test key at one server.
type KeyTested = Result<KmipKeyTested, Problem>;

impl Providers {
    /// Tries every server, with a key on request.
    ///
    /// # Errors
    /// `unsupported` for a provider of another kind.
    pub async fn test(
        &self,
        provider: &Provider,
        with_key: bool,
        actor: &str,
    ) -> Result<ProviderTest, Problem> {
        let kmip = self.kmip(provider.id)?;
        let servers = kmip.servers();
        join_all(servers.iter().map(|server| kmip.probe(server))).await;
        let mut tested: Vec<_> = servers
            .iter()
            .map(|server| {
                let (alias, seen) = (server.row.alias.clone(), seen_now(server));
                KmipTested { alias, seen, key: None }
            })
            .collect();
        let usable = |tested: &[KmipTested]| -> Vec<Arc<ServerState>> {
            let pairs = servers.iter().zip(tested);
            let usable = pairs.filter(|(_, it)| it.seen.problem.is_none());
            usable.map(|(server, _)| Arc::clone(server)).collect()
        };
        if with_key {
            let (kmip, usable, actor) = (Arc::clone(&kmip), usable(&tested), actor.to_owned());
            // The client may disconnect: the test is completed anyway.
            let tried = tokio::spawn(async move { kmip.try_key(&usable, &actor).await }).await;
            let tried = tried.unwrap_or_else(|error| Err(crate::internal(&error)))?;
            for (server, outcome) in tried {
                let of = tested.iter_mut().find(|it| it.alias == server.row.alias);
                match (of, outcome) {
                    (Some(of), Ok(key)) => of.key = Some(key),
                    (Some(of), Err(problem)) => of.seen.problem = Some(problem),
                    (None, _) => {}
                }
            }
        }
        let keys: Vec<_> = tested.iter().filter_map(|it| it.key).collect();
        let has = |key: &KmipKeyTested| matches!(key, KmipKeyTested::Made | KmipKeyTested::Read);
        let replicate = (keys.len() > 1).then(|| keys.iter().all(has));
        Ok(ProviderTest { servers: tested, replicate })
    }
}

/// The status of a server that was just probed.
fn seen_now(server: &ServerState) -> KmipSeen {
    match (server.seen(), &server.client) {
        (Some(seen), Ok(_)) => seen,
        (_, client) => KmipSeen {
            at: Timestamp::now(),
            version: None,
            vendor: None,
            problem: client.as_ref().err().cloned(),
        },
    }
}

impl KmipProvider {
    /// Creates a key at the first of these servers that can, reads it at each, destroys it, and writes an event.
    async fn try_key(
        &self,
        servers: &[Arc<ServerState>],
        actor: &str,
    ) -> Result<Vec<(Arc<ServerState>, KeyTested)>, Problem> {
        let mut outcomes = Vec::new();
        let mut rest = servers;
        while let Some((maker, others)) = rest.split_first() {
            rest = others;
            let noted = KeyRequest {
                request: Uuid::new_v4(),
                mark: Uuid::new_v4(),
                sent: Timestamp::now(),
                // There is none.
                vm: VmId::new(),
                server: maker.row.alias.clone(),
                marked: true,
                key_id: None,
                abandoned: true,
                moved: false,
            };
            // The watch does not touch it while it is used here.
            let trials = || self.trials.lock().unwrap_or_else(PoisonError::into_inner);
            trials().insert(noted.request);
            let tried = self.make_read_destroy(maker, others, &noted).await;
            trials().remove(&noted.request);
            self.wake.notify_one();
            let alias = &maker.row.alias;
            let detail = match &tried {
                Ok((id, _)) => {
                    format!("key '{id}' was made, read and destroyed at server '{alias}'")
                }
                Err(problem) => format!("a key at server '{alias}': {problem}"),
            };
            let mut write = self.store.write().await?;
            let (kind, target) = ("provider.key-tested", self.name.as_str());
            write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
            write.commit().await?;
            match tried {
                Ok((_, read)) => {
                    outcomes.push((Arc::clone(maker), Ok(KmipKeyTested::Made)));
                    outcomes.extend(others.iter().cloned().zip(read));
                    break;
                }
                // The next one creates it.
                Err(problem) => outcomes.push((Arc::clone(maker), Err(problem))),
            }
        }
        Ok(outcomes)
    }

    /// Whether a request belongs to a running test.
    pub(super) fn is_on_trial(&self, request: Uuid) -> bool {
        self.trials.lock().unwrap_or_else(PoisonError::into_inner).contains(&request)
    }

    async fn make_read_destroy(
        &self,
        maker: &Arc<ServerState>,
        others: &[Arc<ServerState>],
        noted: &KeyRequest,
    ) -> Result<(KeyId, Vec<KeyTested>), Problem> {
        let id = self.create_at(maker, noted.clone()).await?;
        let named = |problem: Problem| {
            let detail = format!(
                "{} The key '{id}' was made for this test and is destroyed as soon as the KMS does it",
                problem.detail.trim_end_matches('.').to_owned() + "."
            );
            Problem { detail, ..problem }
        };
        let kek = self.put_to_use(maker, &id).await.map_err(Problem::from).map_err(named)?;
        let read = join_all(others.iter().map(|server| self.read_replica(server, &id, &kek))).await;
        let key_id = id.as_str().to_owned();
        let check = self.check(noted.vm, &key_id, &kek)?;
        drop(kek);
        let key = KeyReference { provider: self.id, key_id, check };
        let mut write = self.store.write().await?;
        keys::set_unwanted(&mut write, noted.vm, &key).await?;
        key_requests::delete(&mut write, self.id, noted.request).await?;
        write.commit().await?;
        self.destroy_at(maker, noted.vm, &key).await.map_err(named)?;
        Ok((id, read))
    }

    /// Reads at a server the key that another one has created.
    async fn read_replica(&self, server: &ServerState, id: &KeyId, kek: &SecretBytes) -> KeyTested {
        let begun = Instant::now();
        loop {
            let get = |client: Arc<Client>| async move { client.get_key(id).await };
            match self.ask_one(server, get).await.map_err(Problem::from) {
                Ok(other) if other == *kek => return Ok(KmipKeyTested::Read),
                Ok(_) => return Ok(KmipKeyTested::OtherKey),
                Err(problem) if problem.reason == Some(KeyFault::KeyMissing) => {
                    if begun.elapsed() >= REPLICATION {
                        return Ok(KmipKeyTested::Missing);
                    }
                    sleep(REPLICATION_POLL).await;
                }
                // A key of another owner is not the one that was created.
                Err(problem) if problem.reason == Some(KeyFault::KmsDenies) => {
                    return Ok(KmipKeyTested::OtherKey);
                }
                Err(problem) => return Err(problem),
            }
        }
    }
}
