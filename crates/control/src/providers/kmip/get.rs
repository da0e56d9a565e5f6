//! Reads a key from any server that has it. The check value identifies the right one.
//!
//! That one server does not have a key proves nothing about the others: replication may be late or broken. So all
//! are asked before a key counts as missing, and it counts as destroyed only when a server says so.

use std::sync::Arc;

use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::key_fault::KeyFault;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::State;
use vmseal_kmip::client::Client;
use vmseal_kmip::operation::KeyId;
use vmseal_secret::SecretBytes;

use super::ask::ServerFailure;
use super::{KmipProvider, ServerState, problem};
use crate::providers::{GivenKey, KeyProvider};
use crate::store::keys;

/// Why a server did not give a key; the more important reason is greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum FailureWeight {
    /// It has no key with this id.
    Missing,
    /// It says that the key is destroyed.
    Destroyed,
    /// It did not answer.
    Silent,
    /// It refused.
    Refused,
    /// It has another key under this id.
    Mismatch,
}

/// The failure of one server to give a key.
#[derive(Clone)]
pub(super) struct GetFailure {
    weight: FailureWeight,
    why: Problem,
}

impl GetFailure {
    pub(super) fn new(answer: ServerFailure) -> Self {
        let (weight, why) = match answer {
            ServerFailure::Refused(why) if why.reason == Some(KeyFault::KeyMissing) => {
                (FailureWeight::Missing, why)
            }
            // Without a reason it is not about the server: this one was not asked.
            ServerFailure::Refused(why) if why.reason.is_none() => (FailureWeight::Silent, why),
            ServerFailure::Refused(why) => (FailureWeight::Refused, why),
            ServerFailure::NoAnswer(why) => (FailureWeight::Silent, why),
        };
        Self { weight, why }
    }

    /// The server says that the key is destroyed.
    pub(super) fn destroyed(why: Problem) -> Self {
        Self { weight: FailureWeight::Destroyed, why }
    }
}

impl From<GetFailure> for Problem {
    fn from(without: GetFailure) -> Self {
        without.why
    }
}

impl KmipProvider {
    pub(super) async fn read_key(&self, vm: VmId, key: &KeyReference) -> Result<GivenKey, Problem> {
        let key_id = key.key_id.as_str();
        if keys::is_destroyed(&mut *self.store.read().await?, self.id, key_id).await? {
            let fault = KeyFault::KeyDestroyed;
            return Err(self.wrong_key(ErrorCode::NotFound, fault, key_id, "is destroyed"));
        }
        let id = &self.key_id(key_id)?;
        let asked =
            self.ask_any(|server| async move { self.read_at(&server, vm, key, id).await }).await;
        let (server, (state, kek)) = asked.map_err(|said| {
            let problem = self.no_key(key_id, said);
            let known = self.known_fault_of(key_id).and_then(|known| known.reason);
            if problem.reason != known && problem.reason.is_some_and(|it| !it.is_of_provider()) {
                // Its alarm.
                self.wake.notify_one();
            }
            problem
        })?;
        let fault = problem::of_state(state).map(|fault| {
            let what = format!("is {state} at server '{}'", server.row.alias);
            self.wrong_key(ErrorCode::WrongState, fault, key_id, &what)
        });
        if fault.is_some() {
            // Its alarm.
            self.wake.notify_one();
        }
        Ok(GivenKey { kek, fault })
    }

    /// The reference of a key by its id, as the first server that has one under it gives it.
    pub(super) async fn read_reference(
        &self,
        vm: VmId,
        key_id: &str,
    ) -> Result<KeyReference, Problem> {
        if keys::is_destroyed(&mut *self.store.read().await?, self.id, key_id).await? {
            let fault = KeyFault::KeyDestroyed;
            return Err(self.wrong_key(ErrorCode::NotFound, fault, key_id, "is destroyed"));
        }
        let id = &self.key_id(key_id)?;
        let ask = |server: Arc<ServerState>| async move {
            let asked = self
                .ask_one(&server, |client: Arc<Client>| async move { client.get_key(id).await });
            asked.await.map_err(GetFailure::new)
        };
        let (_, kek) = self.ask_any(ask).await.map_err(|said| self.no_key(key_id, said))?;
        let check = self.check(vm, key_id, &kek)?;
        Ok(KeyReference { provider: self.id, key_id: key_id.to_owned(), check })
    }

    /// Reads a key at one server: the right one, in a state in which it may open existing data.
    async fn read_at(
        &self,
        server: &ServerState,
        vm: VmId,
        key: &KeyReference,
        id: &KeyId,
    ) -> Result<(State, SecretBytes), GetFailure> {
        let asked = self.ask_one(server, |client: Arc<Client>| async move {
            let state = client.key_state(id).await?;
            match problem::of_state(state) {
                Some(KeyFault::KeyDestroyed | KeyFault::KeyNotActive) => Ok((state, None)),
                _ => Ok((state, Some(client.get_key(id).await?))),
            }
        });
        let (state, kek) = asked.await.map_err(GetFailure::new)?;
        let Some(kek) = kek else {
            let fault = problem::of_state(state).unwrap_or(KeyFault::KeyNotActive);
            let what = format!("is {state} at server '{}'", server.row.alias);
            let why = self.wrong_key(ErrorCode::NotFound, fault, &key.key_id, &what);
            return Err(match fault {
                KeyFault::KeyDestroyed => GetFailure::destroyed(why),
                _ => GetFailure { weight: FailureWeight::Refused, why },
            });
        };
        match self.compare(vm, key, &kek, server) {
            Ok(()) => Ok((state, kek)),
            Err(why) => Err(GetFailure { weight: FailureWeight::Mismatch, why }),
        }
    }

    /// Why no server gave a key, with the failure of each.
    pub(super) fn no_key(
        &self,
        key_id: &str,
        said: Vec<(Arc<ServerState>, Option<GetFailure>)>,
    ) -> Problem {
        let late = |server: &ServerState| {
            let what = format!("server '{}'", server.row.alias);
            GetFailure { weight: FailureWeight::Silent, why: self.too_late(&what) }
        };
        let said: Vec<_> = said
            .into_iter()
            .map(|(server, without)| {
                let without = without.unwrap_or_else(|| late(&server));
                (server, without)
            })
            .collect();
        // The first of equally important ones.
        let heaviest = said.iter().rev().max_by_key(|(_, without)| without.weight);
        let Some((_, heaviest)) = heaviest else {
            return Problem::not_found("provider", &self.name);
        };
        if heaviest.weight == FailureWeight::Missing {
            let names: Vec<_> =
                said.iter().map(|(server, _)| format!("'{}'", server.row.alias)).collect();
            let what = format!("is at none of its servers: {}", names.join(", "));
            return self.wrong_key(ErrorCode::NotFound, KeyFault::KeyMissing, key_id, &what);
        }
        // None of these is about one server.
        let of_all = [KeyFault::ProviderSealed, KeyFault::NoClientCertificate];
        if said.len() == 1 || heaviest.why.reason.is_some_and(|reason| of_all.contains(&reason)) {
            return heaviest.why.clone();
        }
        let each: Vec<_> = said
            .iter()
            .map(|(server, without)| format!("'{}' {}", server.row.alias, word(without)))
            .collect();
        let detail = format!(
            "{}. What the servers say of key '{key_id}': {}",
            heaviest.why.detail.trim_end_matches('.'),
            each.join(", ")
        );
        Problem { detail, ..heaviest.why.clone() }
    }
}

fn word(without: &GetFailure) -> &'static str {
    match without.weight {
        FailureWeight::Missing => "does not have it",
        FailureWeight::Destroyed => "says that it is destroyed",
        FailureWeight::Silent => "does not answer",
        FailureWeight::Refused => "does not give it",
        FailureWeight::Mismatch => "has other bytes under this id",
    }
}
