//! Preparing a host that has just answered for a VM: its registration and its key's way from the provider need nothing of each
//! other, and go side by side.
//!
//! ```text
//!   the VM as the inventory has it ─┬─► registered with the host ───────────────┬─► the same key? offered to the host
//!                                   └─► key of the provider ─► sealed, on record ┘
//! ```
//! As ever, a key is on record before it leaves; one that does not leave after that is on record, too. An agent that has restarted
//! since it answered refuses it: then all is done once more, one after the other.

use vmseal_api::host::{HostState, SealedKey};
use vmseal_api::id::{HostId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::keys::{self, Purpose};
use super::{Hosts, register};
use crate::store::vms::{self, Vm};

/// A VM's key, sealed to its host and on record as delivered.
struct ReadyKey {
    /// The VM at that time.
    vm: Vm,
    sealed: SealedKey,
}

impl Hosts {
    /// Ensures the same as [`Hosts::prepare`], of a VM whose host has answered with this state.
    ///
    /// # Errors
    /// The host's or the provider's.
    pub async fn prepare_seen(
        &self,
        vm: VmId,
        purpose: Purpose,
        seen: &HostState,
    ) -> Result<(), Problem> {
        let (registered, ready) =
            tokio::join!(register(&self.store, self, vm), self.ready_key(vm, purpose, seen));
        let vm = match (registered, &ready) {
            (Ok(vm), _) => vm,
            (Err(problem), Ok(Some(ready))) => {
                keys::tell_failed(&self.store, &ready.vm, &problem).await?;
                return Err(problem);
            }
            (Err(problem), _) => return Err(problem),
        };
        let delivered = match ready {
            Ok(Some(ready)) if ready.vm.key == vm.key && ready.vm.host == vm.host => {
                match self.offer(&vm, ready.sealed).await {
                    // The agent has restarted since it answered: it has another key box, or does not know the VM.
                    Err(problem)
                        if matches!(problem.code, ErrorCode::WrongState | ErrorCode::NotFound) =>
                    {
                        return self.prepare(vm.id, purpose).await;
                    }
                    other => other,
                }
            }
            Ok(Some(ready)) => {
                let what = "the VM has got another key or host meanwhile";
                let problem = Problem::new(ErrorCode::Conflict, what);
                keys::tell_failed(&self.store, &ready.vm, &problem).await?;
                self.deliver_unless_held(&vm, purpose).await
            }
            Ok(None) => self.deliver_unless_held(&vm, purpose).await,
            Err(problem) => Err(problem),
        };
        self.or_held(&vm, purpose, delivered).await
    }

    /// Seals a VM's key to its host. None where it has none, or where its provider is known to give none: whether the host has the key
    /// is asked when it has the VM.
    async fn ready_key(
        &self,
        vm: VmId,
        purpose: Purpose,
        seen: &HostState,
    ) -> Result<Option<ReadyKey>, Problem> {
        let Some(vm) = vms::get(&mut *self.store.read().await?, vm).await? else { return Ok(None) };
        let Some(key) = vm.key.clone() else { return Ok(None) };
        if self.known_fault(&vm).is_some() {
            return Ok(None);
        }
        let kek = keys::fetch(&self.providers, &vm, &key, purpose).await?;
        let key_box = match self.known_key_box(vm.host, seen) {
            Some(known) => known,
            None => self.agent(vm.host)?.describe().await?.key_box,
        };
        let sealed = keys::seal(&self.store, &key_box, &vm, &key, kek).await?;
        Ok(Some(ReadyKey { vm, sealed }))
    }

    /// The key box of the run of the agent that has answered, if the view of the host is of that run.
    fn known_key_box(&self, host: HostId, seen: &HostState) -> Option<String> {
        let known = self.view(host).description?;
        (known.incarnation == seen.incarnation).then(|| known.key_box.clone())
    }

    async fn offer(&self, vm: &Vm, sealed: SealedKey) -> Result<(), Problem> {
        keys::offer(&self.store, &*self.agent(vm.host)?, vm, sealed).await
    }
}
