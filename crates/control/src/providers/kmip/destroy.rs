//! Keys that nobody wants any more. That is noted first; what the KMS cannot do now is done when it can.

use std::sync::Arc;

use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::kmip::KeyFault;
use vmseal_api::problem::Problem;
use vmseal_kmip::client::{Client, Error};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::{ResultReason, RevocationReason, State};
use vmseal_secret::SecretBytes;

use super::create::Located;
use super::{Answer, KmipProvider, Server};
use crate::store::events::NewEvent;
use crate::store::key_requests::{self, KeyRequest};
use crate::store::keys;

impl KmipProvider {
    /// Destroys a key, now or as soon as the KMS can be asked to: its VM can go meanwhile.
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
        match self.destroy_now(vm, vm_name, key).await {
            Ok(()) => Ok(()),
            Err(problem) => {
                let detail = format!("key '{}' is destroyed later: {problem}", key.key_id);
                let mut write = self.store.write().await?;
                let (kind, actor) = ("key.destruction-pending", crate::SELF);
                write.event(NewEvent { kind, actor, target: vm_name, detail: &detail }).await?;
                Ok(write.commit().await?)
            }
        }
    }

    async fn destroy_now(
        &self,
        vm: VmId,
        vm_name: &str,
        key: &KeyReference,
    ) -> Result<(), Problem> {
        let id = self.key_id(&key.key_id)?;
        let what = match self.where_it_is(&id).await? {
            None => "was destroyed already at every server".to_owned(),
            Some((server, kek)) => {
                // Read first: what is destroyed under a wrong id cannot be had back.
                self.compare(vm, key, &kek, &server)?;
                let work = |client| async move { revoke_and_destroy(&client, &id).await };
                self.ask_one(&server, work).await?;
                format!("destroyed at server '{}'", server.row.alias)
            }
        };
        let detail = format!("key '{}' of provider '{}': {what}", key.key_id, self.name);
        let mut write = self.store.write().await?;
        if keys::destroy(&mut write, vm, key).await? {
            let (kind, actor) = ("key.destroyed", crate::SELF);
            write.event(NewEvent { kind, actor, target: vm_name, detail: &detail }).await?;
        }
        Ok(write.commit().await?)
    }

    /// The first server that has a key, with the key; none only when every server says that it has none: one
    /// alone may not have been replicated to.
    async fn where_it_is(&self, id: &KeyId) -> Result<Option<(Arc<Server>, SecretBytes)>, Problem> {
        let mut silent = None;
        for server in self.servers() {
            let work = |client| async move { read_if_there(&client, id).await };
            match self.ask_one(&server, work).await {
                Ok(Some(kek)) => return Ok(Some((server, kek))),
                Ok(None) => {}
                Err(Answer::No(problem)) => return Err(problem),
                Err(Answer::None(problem)) => silent = Some(problem),
            }
        }
        silent.map_or(Ok(None), Err)
    }

    /// Destroys what is still to be destroyed; the first server that does not answer ends it.
    pub(super) async fn destroy_unwanted(&self) -> Result<(), Problem> {
        let living = keys::living(&mut *self.store.read().await?, self.id).await?;
        for key in living.into_iter().filter(|key| key.unwanted) {
            let reference =
                KeyReference { provider: self.id, key_id: key.key_id, check: key.check };
            let name = key.vm_name.unwrap_or_else(|| key.vm.to_string());
            match self.destroy_now(key.vm, &name, &reference).await {
                Ok(()) => {}
                // The KMS answers, and does not do it: the others may go.
                Err(problem) if is_about_the_key(&problem) => {
                    tracing::warn!(provider = self.name, key = reference.key_id, %problem, "a key stays");
                }
                Err(problem) => return Err(problem),
            }
        }
        Ok(())
    }

    /// Finds out what became of requests whose keys nobody wants any more.
    pub(super) async fn settle_abandoned(&self) -> Result<(), Problem> {
        let abandoned = key_requests::abandoned(&mut *self.store.read().await?, self.id).await?;
        for noted in abandoned {
            self.settle(noted).await?;
        }
        Ok(())
    }

    async fn settle(&self, noted: KeyRequest) -> Result<(), Problem> {
        let server = self.servers().into_iter().find(|server| server.row.alias == noted.server);
        let Some(server) = server else {
            return self.tell_orphan(&noted, "which the provider does not have any more").await;
        };
        let located = match &noted.key_id {
            Some(id) => Located::Found(self.key_id(id)?),
            None => self.locate(&server, &noted).await?,
        };
        let mut write = match located {
            Located::CannotTell => {
                return self.tell_orphan(&noted, "which cannot find it by the request").await;
            }
            Located::Found(id) => {
                let key_id = id.as_str().to_owned();
                let work = |client| async move { read_if_there(&client, &id).await };
                // Without a check value nothing is destroyed; there is nothing any more.
                let check = match self.ask_one(&server, work).await? {
                    Some(kek) => self.check(noted.vm, &key_id, &kek)?,
                    None => String::new(),
                };
                let key = KeyReference { provider: self.id, key_id, check };
                let mut write = self.store.write().await?;
                // One that became a VM's key after all is not touched.
                if !keys::is_known(&mut write, self.id, &key.key_id).await? {
                    keys::set_unwanted(&mut write, noted.vm, &key).await?;
                }
                write
            }
            Located::Nothing => self.store.write().await?,
        };
        key_requests::delete(&mut write, self.id, noted.request).await?;
        Ok(write.commit().await?)
    }
}

/// Whether a problem is one key's, and not the KMS's.
fn is_about_the_key(problem: &Problem) -> bool {
    matches!(
        problem.reason,
        Some(
            KeyFault::KmsDenies
                | KeyFault::KmsRefuses
                | KeyFault::KeyMissing
                | KeyFault::KeyMismatch
        )
    )
}

/// A key, whatever its state; none when it is destroyed, or not there.
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

/// Takes a key out of use and destroys it; false when there is none any more.
async fn revoke_and_destroy(client: &Arc<Client>, id: &KeyId) -> Result<bool, Error> {
    let gone = |error: &Error| error.refusal() == Some(ResultReason::ItemNotFound);
    match client.key_state(id).await {
        Ok(State::Destroyed | State::DestroyedCompromised) => return Ok(false),
        Ok(State::Active) => client.revoke(id, RevocationReason::CessationOfOperation).await?,
        Ok(_) => {}
        Err(error) if gone(&error) => return Ok(false),
        Err(error) => return Err(error),
    }
    match client.destroy(id).await {
        Err(error) if gone(&error) => Ok(false),
        other => other.map(|()| true),
    }
}
