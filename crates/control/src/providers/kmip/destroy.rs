//! Keys that nobody wants any more. That is noted first; what the KMS cannot do now is done when it can.

use std::sync::Arc;

use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::kmip::KeyFault;
use vmseal_api::problem::Problem;
use vmseal_kmip::client::{Client, Error};
use vmseal_kmip::operation::KeyId;
use vmseal_kmip::{ResultReason, RevocationReason, State};

use super::KmipProvider;
use super::create::Located;
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
        let asked = self.ask(|client| {
            let id = id.clone();
            async move { revoke_and_destroy(&client, &id).await }
        });
        let (server, was_there) = asked.await?;
        let what = if was_there { "destroyed" } else { "was destroyed already" };
        let detail = format!(
            "key '{}' of provider '{}': {what} at server '{}'",
            key.key_id, self.name, server.row.alias
        );
        let mut write = self.store.write().await?;
        if keys::destroy(&mut write, vm, key).await? {
            let (kind, actor) = ("key.destroyed", crate::SELF);
            write.event(NewEvent { kind, actor, target: vm_name, detail: &detail }).await?;
        }
        Ok(write.commit().await?)
    }

    /// Destroys what is still to be destroyed; the first server that does not answer ends it.
    pub(super) async fn destroy_unwanted(&self) -> Result<(), Problem> {
        let living = keys::living(&mut *self.store.read().await?, self.id).await?;
        for key in living.into_iter().filter(|key| key.unwanted) {
            let reference =
                KeyReference { provider: self.id, key_id: key.key_id, check: String::new() };
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
        let located = match (&noted.key_id, server) {
            (Some(id), _) => Located::Found(self.key_id(id)?),
            (None, Some(server)) => self.locate(&server, &noted).await?,
            (None, None) => Located::CannotTell,
        };
        let mut write = match located {
            Located::CannotTell => {
                return self.tell_orphan(&noted, "which cannot find it by the request").await;
            }
            Located::Found(id) => {
                let key_id = id.as_str().to_owned();
                let key = KeyReference { provider: self.id, key_id, check: String::new() };
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
        Some(KeyFault::KmsDenies | KeyFault::KmsRefuses | KeyFault::KeyMissing)
    )
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
