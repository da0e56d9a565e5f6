//! A key made at one server to see whether that works, and destroyed again.
//!
//! It is a request like any other, which nobody wants from the outset: whatever is lost on the way, also this
//! process, the watch finds the key and destroys it.

use std::sync::{Arc, PoisonError};

use jiff::Timestamp;
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::problem::Problem;
use vmseal_kmip::operation::KeyId;

use super::{KmipProvider, Server};
use crate::store::events::NewEvent;
use crate::store::key_requests::{self, KeyRequest};
use crate::store::keys;

impl KmipProvider {
    /// Makes a key at a server, reads it, destroys it, and tells of it.
    pub(super) async fn try_key(&self, server: &Arc<Server>, actor: &str) -> Result<(), Problem> {
        let noted = KeyRequest {
            request: Uuid::new_v4(),
            mark: Uuid::new_v4(),
            sent: Timestamp::now(),
            // There is none.
            vm: VmId::new(),
            server: server.row.alias.clone(),
            marked: true,
            key_id: None,
            abandoned: true,
        };
        // The watch leaves it alone while it is used here.
        let trials = || self.trials.lock().unwrap_or_else(PoisonError::into_inner);
        trials().insert(noted.request);
        let tried = self.make_read_destroy(server, &noted).await;
        trials().remove(&noted.request);
        self.wake.notify_one();
        let alias = &server.row.alias;
        let detail = match &tried {
            Ok(id) => {
                format!("key '{id}' was made, read and destroyed at server '{alias}'")
            }
            Err(problem) => format!("a key at server '{alias}': {problem}"),
        };
        let mut write = self.store.write().await?;
        let (kind, target) = ("provider.key-tested", self.name.as_str());
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        write.commit().await?;
        tried.map(drop)
    }

    /// Whether a request is that of a test which is under way.
    pub(super) fn is_on_trial(&self, request: Uuid) -> bool {
        self.trials.lock().unwrap_or_else(PoisonError::into_inner).contains(&request)
    }

    async fn make_read_destroy(
        &self,
        server: &Arc<Server>,
        noted: &KeyRequest,
    ) -> Result<KeyId, Problem> {
        let id = self.create_at(server, noted.clone()).await?;
        let named = |problem: Problem| {
            let detail = format!(
                "{} The key '{id}' was made for this test and is destroyed as soon as the KMS does it",
                problem.detail.trim_end_matches('.').to_owned() + "."
            );
            Problem { detail, ..problem }
        };
        let kek = self.put_to_use(server, &id).await.map_err(named)?;
        let key_id = id.as_str().to_owned();
        let check = self.check(noted.vm, &key_id, &kek)?;
        drop(kek);
        let key = KeyReference { provider: self.id, key_id, check };
        let mut write = self.store.write().await?;
        keys::set_unwanted(&mut write, noted.vm, &key).await?;
        key_requests::delete(&mut write, self.id, noted.request).await?;
        write.commit().await?;
        self.destroy_at(server, noted.vm, &key).await.map_err(named)?;
        Ok(id)
    }
}
