//! Destroys unwanted keys. They are marked first; what the KMS cannot do now is retried until it can.
//!
//! A failure of one key or request does not delay the others; a server that does not answer is
//! asked once in a pass.

use std::sync::Arc;

use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::key_fault::KeyFault;
use vmseal_api::problem::Problem;
use vmseal_kmip::client::{Client, Error};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::{ResultReason, RevocationReason, State};
use vmseal_secret::SecretBytes;

use super::KEY_STATE;
use super::ask::{ServerFailure, Silent};
use super::create::{LEFT_BEHIND, LocateResult, is_left_behind, may_be_late};
use super::{KmipProvider, ServerState};
use crate::store::alarms::{self, RaisedAlarm};
use crate::store::events::NewEvent;
use crate::store::key_requests::{self, KeyRequest};
use crate::store::keys::{self, LivingKey};

/// How many keys an alarm names, so that it stays readable.
const NAMED_MAX: usize = 3;

/// A pending destruction, with the reason.
pub(super) struct PendingDestruction {
    what: String,
    why: Problem,
}

impl PendingDestruction {
    fn key(key: &LivingKey, why: Problem) -> Self {
        let vm = key.vm_name.clone().unwrap_or_else(|| key.vm.to_string());
        Self { what: format!("key '{}' of VM {vm}", key.key_id), why }
    }

    fn request(noted: &KeyRequest, why: Problem) -> Self {
        let (mark, vm) = (noted.mark, noted.vm);
        Self { what: format!("what was asked for as {mark} for VM {vm}"), why }
    }
}

/// The alarm about pending destructions.
pub(super) fn alarm_of(provider: &str, pending: &[PendingDestruction]) -> Option<RaisedAlarm> {
    let first = pending.first()?;
    let named = pending.iter().take(NAMED_MAX);
    let mut named: Vec<_> =
        named.map(|pending| format!("{}: {}", pending.what, pending.why.detail)).collect();
    if pending.len() > NAMED_MAX {
        named.push(format!("and {} more", pending.len() - NAMED_MAX));
    }
    let detail = format!(
        "keys that are to be destroyed and still exist: {}. This is retried. {}",
        pending.len(),
        named.join("; ")
    );
    let (code, target) = ("keys-await-destruction", provider.to_owned());
    Some(RaisedAlarm { code, target, detail, reason: first.why.reason })
}

impl KmipProvider {
    /// Destroys a key, now or as soon as the KMS answers: its VM can be removed meanwhile.
    pub(super) async fn destroy(
        &self,
        vm: VmId,
        vm_name: &str,
        key: &KeyReference,
    ) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        if keys::is_destroyed(&mut write, self.id, &key.key_id).await? {
            return Ok(());
        }
        keys::set_unwanted(&mut write, vm, key).await?;
        write.commit().await?;
        let silent = &mut Silent::default();
        match self.within_deadline(self.destroy_now(vm, vm_name, key, silent)).await {
            Ok(()) => Ok(()),
            Err(problem) => {
                // For its alarm.
                self.wake.notify_one();
                let detail = format!("key '{}' is destroyed later: {problem}", key.key_id);
                let mut write = self.store.write().await?;
                let (kind, actor) = ("key.destruction-pending", crate::SELF);
                write.event(NewEvent { kind, actor, target: vm_name, detail: &detail }).await?;
                Ok(write.commit().await?)
            }
        }
    }

    /// Destroys a key that one server has just given and that is marked as unwanted.
    pub(super) async fn destroy_at(
        &self,
        server: &ServerState,
        vm: VmId,
        key: &KeyReference,
    ) -> Result<(), Problem> {
        let id = self.key_id(&key.key_id)?;
        let _alone = self.destroying.lock(key.key_id.clone()).await;
        let work = |client| async move { revoke_and_destroy(&client, &id).await };
        self.ask_one(server, work).await?;
        let mut write = self.store.write().await?;
        keys::destroy(&mut write, vm, key).await?;
        Ok(write.commit().await?)
    }

    /// Destroys a key that a server made for one of our requests and that cannot be read, so that there is no
    /// check value to compare: the server named the id itself, and no VM has it.
    pub(super) async fn destroy_by_id(
        &self,
        server: &ServerState,
        vm: VmId,
        id: &KeyId,
    ) -> Result<(), Problem> {
        let key_id = id.as_str().to_owned();
        let _alone = self.destroying.lock(key_id.clone()).await;
        let work = |client| async move { revoke_and_destroy(&client, id).await };
        self.ask_one(server, work).await?;
        let detail = format!(
            "key '{key_id}' of provider '{}': destroyed at server '{}', which made it and does not give it",
            self.name, server.row.alias
        );
        let key = KeyReference { provider: self.id, key_id, check: String::new() };
        let mut write = self.store.write().await?;
        if keys::destroy(&mut write, vm, &key).await? {
            let (kind, actor, target) = ("key.destroyed", crate::SELF, self.name.as_str());
            write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        }
        Ok(write.commit().await?)
    }

    async fn destroy_now(
        &self,
        vm: VmId,
        vm_name: &str,
        key: &KeyReference,
        silent: &mut Silent,
    ) -> Result<(), Problem> {
        let id = self.key_id(&key.key_id)?;
        let _alone = self.destroying.lock(key.key_id.clone()).await;
        if keys::is_destroyed(&mut *self.store.read().await?, self.id, &key.key_id).await? {
            return Ok(());
        }
        let what = match self.where_it_is(vm, key, &id, silent).await? {
            None => "was destroyed already at every server".to_owned(),
            Some(server) => {
                let work = |client| async move { revoke_and_destroy(&client, &id).await };
                self.ask_unless(silent, &server, work).await?;
                format!("destroyed at server '{}'", server.row.alias)
            }
        };
        let detail = format!("key '{}' of provider '{}': {what}", key.key_id, self.name);
        let mut write = self.store.write().await?;
        if keys::destroy(&mut write, vm, key).await? {
            let (kind, actor) = ("key.destroyed", crate::SELF);
            write.event(NewEvent { kind, actor, target: vm_name, detail: &detail }).await?;
        }
        let is_told_of = alarms::is_raised(&mut write, &self.id.to_string(), KEY_STATE).await?;
        write.commit().await?;
        if is_told_of {
            // The alarm may have been about this key.
            self.wake.notify_one();
        }
        Ok(())
    }

    /// A server that has the key with the right bytes: a key destroyed under a wrong id could not be recovered.
    /// `None` only if every server says that it has none: replication to one server may have failed.
    async fn where_it_is(
        &self,
        vm: VmId,
        key: &KeyReference,
        id: &KeyId,
        silent: &mut Silent,
    ) -> Result<Option<Arc<ServerState>>, Problem> {
        let (mut refused, mut unanswered) = (None, None);
        for server in self.by_health() {
            let work = |client| async move { read_if_there(&client, id).await };
            match self.ask_unless(silent, &server, work).await {
                Ok(Some(kek)) => match self.compare(vm, key, &kek, &server) {
                    Ok(()) => return Ok(Some(server)),
                    Err(problem) => {
                        refused.get_or_insert(problem);
                    }
                },
                Ok(None) => {}
                Err(ServerFailure::Refused(problem)) => {
                    refused.get_or_insert(problem);
                }
                Err(ServerFailure::NoAnswer(problem)) => {
                    unanswered.get_or_insert(problem);
                }
            }
        }
        refused.or(unanswered).map_or(Ok(None), Err)
    }

    /// Retries what is pending; returns what still is.
    ///
    /// # Errors
    /// The inventory's.
    pub(super) async fn catch_up(&self) -> Result<Vec<PendingDestruction>, Problem> {
        let (mut pending, mut silent) = (Vec::new(), Silent::default());
        let abandoned = key_requests::abandoned(&mut *self.store.read().await?, self.id).await?;
        for noted in abandoned {
            if self.is_on_trial(noted.request) {
                continue;
            }
            if let Err(why) = self.settle(&noted, &mut silent).await {
                tracing::warn!(provider = self.name, request = %noted.request, problem = %why, "a request stays open");
                pending.push(PendingDestruction::request(&noted, why));
            }
        }
        for key in self.unwanted().await? {
            let (key_id, check) = (key.key_id.clone(), key.check.clone());
            let reference = KeyReference { provider: self.id, key_id, check };
            let name = key.vm_name.clone().unwrap_or_else(|| key.vm.to_string());
            if let Err(why) = self.destroy_now(key.vm, &name, &reference, &mut silent).await {
                tracing::warn!(provider = self.name, key = key.key_id, problem = %why, "a key stays");
                pending.push(PendingDestruction::key(&key, why));
            }
        }
        Ok(pending)
    }

    /// What is pending while no server answers.
    ///
    /// # Errors
    /// The inventory's.
    pub(super) async fn put_off(&self, why: &Problem) -> Result<Vec<PendingDestruction>, Problem> {
        let requests = key_requests::abandoned(&mut *self.store.read().await?, self.id).await?;
        let mut pending: Vec<_> =
            requests.iter().map(|noted| PendingDestruction::request(noted, why.clone())).collect();
        pending.extend(
            self.unwanted().await?.iter().map(|key| PendingDestruction::key(key, why.clone())),
        );
        Ok(pending)
    }

    async fn unwanted(&self) -> Result<Vec<LivingKey>, Problem> {
        let living = keys::living(&mut *self.store.read().await?, self.id).await?;
        Ok(living.into_iter().filter(|key| key.unwanted).collect())
    }

    /// Finds out the outcome of a request whose key is unwanted.
    async fn settle(&self, noted: &KeyRequest, silent: &mut Silent) -> Result<(), Problem> {
        // In this order: of a server that is asked at its new address, the request says that it was moved.
        let servers = self.servers();
        let noted = key_requests::get(&mut *self.store.read().await?, self.id, noted.request).await;
        let Some(noted) = &noted? else { return Ok(()) };
        let server = servers.into_iter().find(|server| server.row.alias == noted.server);
        let Some(server) = server else {
            return self.tell_orphan(noted, "which the provider does not have any more").await;
        };
        let located = match &noted.key_id {
            Some(id) if !noted.moved => LocateResult::Found(self.key_id(id)?),
            _ => self.locate(&server, noted, silent).await?,
        };
        let mut write = match located {
            LocateResult::Ambiguous => {
                return self.tell_orphan(noted, "which cannot find it by the request").await;
            }
            LocateResult::Found(id) => {
                let key_id = id.as_str().to_owned();
                // One that became a VM's key after all is not touched.
                let mut read = self.store.read().await?;
                let is_known = keys::is_known(&mut read, self.id, &key_id).await?;
                drop(read);
                let work = |client| {
                    let id = id.clone();
                    async move { read_if_there(&client, &id).await }
                };
                let check = match self.ask_unless(silent, &server, work).await {
                    Ok(Some(kek)) => self.check(noted.vm, &key_id, &kek)?,
                    // Without a check value nothing is destroyed; the key is gone already.
                    Ok(None) => String::new(),
                    Err(ServerFailure::Refused(why)) if cannot_be_read(&why) && !is_known => {
                        self.destroy_by_id(&server, noted.vm, &id).await?;
                        return self.forget_request(noted.request).await;
                    }
                    Err(answer) => return Err(answer.into()),
                };
                let key = KeyReference { provider: self.id, key_id, check };
                let mut write = self.store.write().await?;
                if !is_known {
                    keys::set_unwanted(&mut write, noted.vm, &key).await?;
                }
                write
            }
            LocateResult::NotFound if is_left_behind(noted) => {
                return self.tell_orphan(noted, LEFT_BEHIND).await;
            }
            // The watch looks for it again.
            LocateResult::NotFound if may_be_late(noted) => return Ok(()),
            LocateResult::NotFound => self.store.write().await?,
        };
        key_requests::delete(&mut write, self.id, noted.request).await?;
        Ok(write.commit().await?)
    }
}

/// A key in any state; `None` if it is destroyed or missing.
async fn read_if_there(client: &Arc<Client>, id: &KeyId) -> Result<Option<SecretBytes>, Error> {
    let read = async {
        match client.key_state(id).await? {
            State::Destroyed | State::DestroyedCompromised => Ok(None),
            _ => client.get_key(id).await.map(Some),
        }
    };
    match read.await {
        Err(error) if error.refusal() == Some(ResultReason::ItemNotFound) => Ok(None),
        other => other,
    }
}

/// Whether a key exists but the server does not release it, or not its state.
fn cannot_be_read(why: &Problem) -> bool {
    let reasons = [KeyFault::KeyUnusable, KeyFault::KmsRefuses, KeyFault::KmsDenies];
    why.reason.is_some_and(|reason| reasons.contains(&reason))
}

/// Takes a key out of use and destroys it; false if it no longer exists.
async fn revoke_and_destroy(client: &Arc<Client>, id: &KeyId) -> Result<bool, Error> {
    let revoke = || client.revoke(id, RevocationReason::CessationOfOperation);
    let gone = |error: &Error| error.refusal() == Some(ResultReason::ItemNotFound);
    match client.key_state(id).await {
        Ok(State::Destroyed | State::DestroyedCompromised) => return Ok(false),
        Ok(State::Active) => revoke().await?,
        Ok(_) => {}
        Err(error) if gone(&error) => return Ok(false),
        // It does not report states. Only an Active key can be revoked, and must be before it is destroyed;
        // of any other one the refusal says nothing.
        Err(error) if error.refusal().is_some() => match revoke().await {
            Err(error) if error.refusal().is_none() => return Err(error),
            _ => {}
        },
        Err(error) => return Err(error),
    }
    match client.destroy(id).await {
        Err(error) if gone(&error) => Ok(false),
        other => other.map(|()| true),
    }
}
