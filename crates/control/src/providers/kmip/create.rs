//! Creates a key exactly once, even if answers are lost: KMIP's Create makes another key every time.
//!
//! ```text
//!              note the request                 Create answered
//!   nothing ────────────────────► asked ─────────────────────────► known ──► Active, read, checked
//!                                   │ ▲ no answer, or a crash
//!                                   ▼ │
//!                            Locate by the request's mark ── found ──► known
//!                                   │
//!                                   ├─ the server has none ──► asked again
//!                                   ├─ the server has none yet ──► abandoned, settled later; asked again
//!                                   ├─ the server was moved, and has none ──► key.orphaned, asked again
//!                                   └─ the server cannot tell ──► key.orphaned, asked again
//! ```
//!
//! The mark, another one each time, is sent as ApplicationSpecificInformation (namespace `vmseal`), which not every
//! server has. A server without such a key may still create it: its answer counts only after some minutes. What
//! Locate finds is trusted only if the server finds nothing for an id that never existed. If the server's address has
//! changed since the request, the key is found by its mark alone: its id may be another key's at the new address.

use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use uuid::Uuid;
use vmseal_api::host::KeyReference;
use vmseal_api::id::VmId;
use vmseal_api::key_fault::KeyFault;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_kmip::client::{Client, Error};
use vmseal_kmip::message::Outcome;
use vmseal_kmip::operation::{ApplicationInformation, Create, KeyId, Locate, Text};
use vmseal_kmip::{ResultReason, State};
use vmseal_secret::SecretBytes;

use super::ask::{ServerFailure, Silent};
use super::{KmipProvider, ServerState, problem};
use crate::store::events::NewEvent;
use crate::store::key_requests::{self, KeyRequest};
use crate::store::keys;

/// The namespace of the requests' marks.
const NAMESPACE: &str = "vmseal";

/// How long after a request was sent a server may still execute it: requests wait in its queue, or in that of a
/// proxy or a hardware module in front of it. Timeouts of those are minutes at most.
const LATE: SignedDuration = SignedDuration::from_mins(5);

/// Why the key of a request is not found at the new address of its server.
pub(super) const LEFT_BEHIND: &str =
    "whose address was changed since, and which does not have it at the new one";

/// A server's answer about a key that may have been created.
pub(super) enum LocateResult {
    /// It exists.
    Found(KeyId),
    /// It does not exist.
    NotFound,
    /// The server cannot distinguish it from others.
    Ambiguous,
}

impl KmipProvider {
    pub(super) async fn create(
        &self,
        vm: VmId,
        request: Uuid,
    ) -> Result<(KeyReference, SecretBytes), Problem> {
        // In this order: of a server that is asked at its new address, the request says that it was moved.
        let servers = self.servers();
        let noted = key_requests::get(&mut *self.store.read().await?, self.id, request).await?;
        let (server, id) = match noted {
            None => self.make(vm, request).await?,
            Some(noted) => self.make_again(noted, servers).await?,
        };
        let kek = match self.put_to_use(&server, &id).await {
            Ok(kek) => kek,
            Err(ServerFailure::NoAnswer(problem)) => return Err(problem),
            Err(ServerFailure::Refused(problem)) => {
                if will_stay_so(&problem) {
                    self.discard(&server, &id, vm, request).await;
                }
                return Err(problem);
            }
        };
        say_whose(&server, &id, vm).await;
        let key_id = id.as_str().to_owned();
        if keys::is_known(&mut *self.store.read().await?, self.id, &key_id).await? {
            let what = format!("was made a second time, by server '{}'", server.row.alias);
            let fault = KeyFault::KeyMismatch;
            return Err(self.wrong_key(ErrorCode::KeyMismatch, fault, &key_id, &what));
        }
        let check = self.check(vm, &key_id, &kek)?;
        Ok((KeyReference { provider: self.id, key_id, check }, kek))
    }

    async fn note_request(&self, request: &KeyRequest) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        key_requests::put(&mut write, self.id, request).await?;
        Ok(write.commit().await?)
    }

    /// Goes on without an answer that may still come: its key, if there will be one, is found by its mark.
    async fn leave(&self, noted: &KeyRequest) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        key_requests::delete(&mut write, self.id, noted.request).await?;
        let left = KeyRequest { request: Uuid::new_v4(), abandoned: true, ..noted.clone() };
        key_requests::put(&mut write, self.id, &left).await?;
        Ok(write.commit().await?)
    }

    pub(super) async fn forget_request(&self, request: Uuid) -> Result<(), Problem> {
        let mut write = self.store.write().await?;
        key_requests::delete(&mut write, self.id, request).await?;
        Ok(write.commit().await?)
    }

    /// Creates a key at the first server that answers.
    async fn make(&self, vm: VmId, request: Uuid) -> Result<(Arc<ServerState>, KeyId), Problem> {
        self.make_at_one_of(self.by_health(), vm, request).await
    }

    async fn make_at_one_of(
        &self,
        servers: Vec<Arc<ServerState>>,
        vm: VmId,
        request: Uuid,
    ) -> Result<(Arc<ServerState>, KeyId), Problem> {
        // Asked first whether it is there: a question that changes nothing, so that what follows is rarely
        // in doubt.
        let ready = self.ask_any_of(servers, |server| async move {
            let discover = |client: Arc<Client>| async move { client.discover().await };
            self.ask_one(&server, discover).await
        });
        let (server, _) = ready.await.map_err(|said| self.nobody_answers(said))?;
        let noted = KeyRequest {
            request,
            mark: Uuid::new_v4(),
            sent: Timestamp::now(),
            vm,
            server: server.row.alias.clone(),
            marked: true,
            key_id: None,
            abandoned: false,
            moved: false,
        };
        let id = self.create_at(&server, noted).await?;
        Ok((server, id))
    }

    /// The failure at the most promising server, which is the first.
    fn nobody_answers(&self, said: Vec<(Arc<ServerState>, Option<ServerFailure>)>) -> Problem {
        match said.into_iter().next() {
            Some((_, Some(answer))) => answer.into(),
            Some((server, None)) => self.too_late(&format!("server '{}'", server.row.alias)),
            None => Problem::not_found("provider", &self.name),
        }
    }

    /// Whether another server than this one answered its last request.
    fn another_answers(&self, than: &ServerState) -> bool {
        let answers =
            |server: &Arc<ServerState>| server.seen().is_some() && server.fault().is_none();
        self.servers().iter().any(|server| server.row.alias != than.row.alias && answers(server))
    }

    /// Destroys a key that was created for a request and cannot be used, so that the next attempt does not leave
    /// one more. If that fails now, it is done when the request is abandoned.
    async fn discard(&self, server: &ServerState, id: &KeyId, vm: VmId, request: Uuid) {
        let discarded = async {
            if !keys::is_known(&mut *self.store.read().await?, self.id, id.as_str()).await? {
                self.destroy_by_id(server, vm, id).await?;
                self.forget_request(request).await?;
            }
            Ok::<_, Problem>(())
        };
        if let Err(problem) = discarded.await {
            tracing::warn!(provider = self.name, key = id.as_str(), %problem, "an unusable key stays");
        }
    }

    /// Creates a key at a server. Records the request and its outcome.
    pub(super) async fn create_at(
        &self,
        server: &ServerState,
        mut noted: KeyRequest,
    ) -> Result<KeyId, Problem> {
        let client = server.client.as_ref().map_err(Clone::clone)?;
        noted.sent = Timestamp::now();
        self.note_request(&noted).await?;
        let created = client.create(Create { name: None, application: mark(noted.mark) }).await;
        let created = match created {
            Err(error) if does_not_know_marks(&error) => {
                noted.marked = false;
                self.note_request(&noted).await?;
                client.create(Create::default()).await
            }
            other => other,
        };
        match created {
            Ok(id) => {
                noted.key_id = Some(id.as_str().to_owned());
                self.note_request(&noted).await?;
                Ok(id)
            }
            Err(error @ Error::OutcomeUnknown { .. }) => {
                let problem = problem::of(&self.name, &error);
                if problem::is_silence(&error) {
                    self.note(server, Some(problem.clone()));
                }
                Err(problem)
            }
            Err(error) => {
                // Certainly not created.
                self.forget_request(noted.request).await?;
                Err(problem::of(&self.name, &error))
            }
        }
    }

    /// Resumes a request whose outcome is unknown.
    async fn make_again(
        &self,
        noted: KeyRequest,
        servers: Vec<Arc<ServerState>>,
    ) -> Result<(Arc<ServerState>, KeyId), Problem> {
        let server = servers.into_iter().find(|server| server.row.alias == noted.server);
        let Some(server) = server else {
            self.tell_orphan(&noted, "which the provider does not have any more").await?;
            return self.make(noted.vm, noted.request).await;
        };
        if let Some(id) = noted.key_id.as_ref().filter(|_| !noted.moved) {
            if server.fault().is_some() && self.another_answers(&server) {
                return self.make_elsewhere(&noted).await;
            }
            return Ok((server, self.key_id(id)?));
        }
        let located = match self.locate(&server, &noted, &mut Silent::default()).await {
            Err(ServerFailure::NoAnswer(_)) if self.another_answers(&server) => {
                return self.make_elsewhere(&noted).await;
            }
            located => located?,
        };
        match located {
            LocateResult::Found(id) => {
                let key_id = Some(id.as_str().to_owned());
                self.note_request(&KeyRequest { key_id, ..noted }).await?;
                Ok((server, id))
            }
            LocateResult::NotFound if is_left_behind(&noted) => {
                self.tell_orphan(&noted, LEFT_BEHIND).await?;
                self.make(noted.vm, noted.request).await
            }
            LocateResult::NotFound => {
                if may_be_late(&noted) {
                    self.leave(&noted).await?;
                }
                self.make(noted.vm, noted.request).await
            }
            LocateResult::Ambiguous => {
                self.tell_orphan(&noted, "which cannot find it by the request").await?;
                self.make(noted.vm, noted.request).await
            }
        }
    }

    /// Abandons a request to a server that does not answer: when it does, the watch destroys its key.
    async fn make_elsewhere(
        &self,
        noted: &KeyRequest,
    ) -> Result<(Arc<ServerState>, KeyId), Problem> {
        self.leave(noted).await?;
        let mut others = self.by_health();
        others.retain(|server| server.row.alias != noted.server);
        self.make_at_one_of(others, noted.vm, noted.request).await
    }

    /// Looks for the key of a request.
    pub(super) async fn locate(
        &self,
        server: &ServerState,
        noted: &KeyRequest,
        silent: &mut Silent,
    ) -> Result<LocateResult, ServerFailure> {
        if !noted.marked {
            return Ok(LocateResult::Ambiguous);
        }
        let Some(found) = self.find(server, noted.mark, silent).await? else {
            return Ok(LocateResult::Ambiguous);
        };
        let [id] = found.as_slice() else {
            return Ok(if found.is_empty() {
                LocateResult::NotFound
            } else {
                LocateResult::Ambiguous
            });
        };
        // A server that ignores unknown attributes finds something for every id.
        match self.find(server, Uuid::new_v4(), silent).await? {
            Some(others) if others.is_empty() => Ok(LocateResult::Found(id.clone())),
            _ => Ok(LocateResult::Ambiguous),
        }
    }

    /// The keys that a server finds by a mark; `None` if it does not support marks.
    async fn find(
        &self,
        server: &ServerState,
        marked: Uuid,
        silent: &mut Silent,
    ) -> Result<Option<Vec<KeyId>>, ServerFailure> {
        let work = |client: Arc<Client>| async move {
            let application = mark(marked);
            match client.locate(Locate { application, name: None }).await {
                Err(error) if does_not_know_marks(&error) => Ok(None),
                other => other.map(Some),
            }
        };
        self.ask_unless(silent, server, work).await
    }

    /// Writes an event that a server may have created a key which nobody will use.
    pub(super) async fn tell_orphan(&self, noted: &KeyRequest, why: &str) -> Result<(), Problem> {
        let detail = orphan(noted, why);
        let mut write = self.store.write().await?;
        key_requests::delete(&mut write, self.id, noted.request).await?;
        let (kind, actor, target) = ("key.orphaned", crate::SELF, self.name.as_str());
        write.event(NewEvent { kind, actor, target, detail: &detail }).await?;
        Ok(write.commit().await?)
    }

    /// Activates a key if necessary, and reads it.
    pub(super) async fn put_to_use(
        &self,
        server: &ServerState,
        id: &KeyId,
    ) -> Result<SecretBytes, ServerFailure> {
        let asked = self.ask_one(server, |client: Arc<Client>| {
            let id = id.clone();
            async move {
                let mut state = client.key_state(&id).await?;
                if state == State::PreActive {
                    client.activate(&id).await?;
                    state = client.key_state(&id).await?;
                }
                Ok((state, client.get_key(&id).await?))
            }
        });
        let (state, kek) = asked.await?;
        match problem::of_state(state) {
            None => Ok(kek),
            Some(fault) => {
                let what = format!("is {state} at server '{}'", server.row.alias);
                let why = self.wrong_key(ErrorCode::WrongState, fault, id.as_str(), &what);
                Err(ServerFailure::Refused(why))
            }
        }
    }
}

/// Whether a key that was just made cannot be used, now or later. One that the server does not have yet may
/// still come to the member of its cluster that was asked.
fn will_stay_so(problem: &Problem) -> bool {
    problem.reason.is_some_and(|reason| reason != KeyFault::KeyMissing)
}

/// Adds the key's VM as attributes at the server, like vCenter does for its keys: an operator finds the key
/// by them. Many servers do not support that, and the key is usable without.
async fn say_whose(server: &ServerState, id: &KeyId, vm: VmId) {
    let Ok(client) = &server.client else { return };
    let said = [
        ("Product", "vmseal".to_owned()),
        ("Product_Version", env!("CARGO_PKG_VERSION").to_owned()),
        ("VM", vm.to_string()),
    ];
    let said =
        said.into_iter().map(|(name, value)| Some((Text::new(name).ok()?, Text::new(value).ok()?)));
    match client.add_attributes(id, said.flatten().collect()).await {
        Ok(answers) => {
            let taken = answers.iter().filter(|answer| matches!(answer, Outcome::Done(()))).count();
            tracing::debug!(
                key = id.as_str(),
                taken,
                asked = answers.len(),
                "added the attributes of the key's VM"
            );
        }
        Err(error) => {
            tracing::debug!(key = id.as_str(), %error, "the attributes of the key's VM could not be added")
        }
    }
}

/// The event text about a key that vmseal cannot destroy itself.
pub(in crate::providers) fn orphan(noted: &KeyRequest, why: &str) -> String {
    let KeyRequest { vm, server, mark, sent, .. } = noted;
    match &noted.key_id {
        Some(key_id) => {
            format!(
                "key '{key_id}' for VM {vm} was made by server '{server}', {why}: destroy it there"
            )
        }
        None => format!(
            "a key for VM {vm} may have been made by server '{server}', {why}: look there for an AES-256 key that no VM uses (asked for at {sent}; {NAMESPACE} {mark} where the server keeps that)"
        ),
    }
}

/// Whether a request's key, which the server does not have, is at the server's former address: a key that was made, or
/// may have been made, is there.
pub(super) fn is_left_behind(noted: &KeyRequest) -> bool {
    noted.moved && (noted.key_id.is_some() || !may_be_late(noted))
}

/// Whether a server that has no key of a request may still create it.
pub(super) fn may_be_late(noted: &KeyRequest) -> bool {
    Timestamp::now().duration_since(noted.sent) < LATE
}

fn mark(mark: Uuid) -> Option<ApplicationInformation> {
    let namespace = Text::new(NAMESPACE).ok()?;
    Some(ApplicationInformation { namespace, data: Text::new(mark.to_string()).ok()? })
}

/// Whether a refusal is that of a server which does not have ApplicationSpecificInformation, or not this
/// namespace. In that case nothing was done.
fn does_not_know_marks(error: &Error) -> bool {
    matches!(
        error.refusal(),
        Some(
            ResultReason::InvalidField
                | ResultReason::InvalidMessage
                | ResultReason::FeatureNotSupported
                | ResultReason::OperationNotSupported
                | ResultReason::ApplicationNamespaceNotSupported
                | ResultReason::GeneralFailure
        )
    )
}
