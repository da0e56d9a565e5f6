//! The VMs of a host. Registering and unregistering one VM are serialized; a VM whose owner is busy delays no
//! other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::OwnedMutexGuard;
use vmseal_api::host::VmSpec;
use vmseal_api::id::VmId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::rules;
use crate::vm::receiving::{Expected, Receiving};
use crate::vm::{Call, Initial, Shared, Vm};

/// The most VMs that a host takes.
const VMS_MAX: usize = 1024;

type Changing = Arc<tokio::sync::Mutex<()>>;

/// The handles of their owners.
#[derive(Default)]
pub struct Vms {
    known: Mutex<HashMap<VmId, Vm>>,
    /// The VMs that are being registered or unregistered.
    changing: Mutex<HashMap<VmId, Changing>>,
}

impl Vms {
    /// From these VMs.
    pub fn of(vms: impl IntoIterator<Item = (VmId, Vm)>) -> Self {
        Self { known: Mutex::new(vms.into_iter().collect()), changing: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, HashMap<VmId, Vm>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn lock(&self, vm: VmId) -> OwnedMutexGuard<()> {
        let lock = {
            let mut changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
            // Those without a holder or waiter.
            changing.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(changing.entry(vm).or_default())
        };
        lock.lock_owned().await
    }

    /// The handle of a VM's owner.
    ///
    /// # Errors
    /// `not-found`.
    pub fn get(&self, vm: VmId) -> Result<Vm, Problem> {
        self.known().get(&vm).cloned().ok_or_else(|| rules::unknown(vm))
    }

    /// Whether a VM is registered with this host, for those who work beside the owners.
    pub fn is_known(self: &Arc<Self>) -> impl Fn(VmId) -> bool + Send + 'static {
        let this = Arc::clone(self);
        move |vm| this.known().contains_key(&vm)
    }

    /// Registers a VM with its owner; a new VM gets its owner from `own`.
    ///
    /// # Errors
    /// Those of the owner; `limit-exceeded`.
    pub async fn register(
        &self,
        vm: VmId,
        spec: VmSpec,
        own: impl FnOnce(VmSpec) -> Vm,
    ) -> Result<(), Problem> {
        let _alone = self.lock(vm).await;
        if let Ok(known) = self.get(vm) {
            return known.ask(vm, |reply| Call::Register(spec, reply)).await;
        }
        let mut known = self.known();
        if known.len() >= VMS_MAX {
            return Err(too_many());
        }
        known.insert(vm, own(spec));
        Ok(())
    }

    /// Waits for a VM that is not known, which comes from another host.
    ///
    /// # Errors
    /// `conflict` where it is known; `limit-exceeded`; those of beginning to wait.
    pub async fn receive(
        &self,
        vm: VmId,
        expected: Expected,
        shared: &Arc<Shared>,
    ) -> Result<(), Problem> {
        let _alone = self.lock(vm).await;
        let mut known = self.known();
        if known.contains_key(&vm) {
            let what = format!("VM {vm} has just been registered on this host");
            return Err(Problem::new(ErrorCode::Conflict, what));
        }
        if known.len() >= VMS_MAX {
            return Err(too_many());
        }
        let spec = expected.vm.clone();
        let receiving = Receiving::new(shared.clone(), expected)?;
        let initial = Initial::Receiving(Box::new(receiving));
        known.insert(vm, Vm::own(shared.clone(), spec, initial));
        Ok(())
    }

    /// Unregisters a VM; an unknown one counts as unregistered.
    ///
    /// # Errors
    /// Those of the owner.
    pub async fn forget(&self, vm: VmId) -> Result<(), Problem> {
        let _alone = self.lock(vm).await;
        let Ok(known) = self.get(vm) else { return Ok(()) };
        known.ask(vm, Call::Unregister).await?;
        self.known().remove(&vm);
        Ok(())
    }
}

fn too_many() -> Problem {
    let what = format!("a host takes at most {VMS_MAX} VMs: place it on another one");
    Problem::new(ErrorCode::LimitExceeded, what)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    fn spec() -> VmSpec {
        crate::process::run_dir::tests::spec()
    }

    #[tokio::test]
    async fn an_owner_that_does_not_answer_holds_up_its_own_vm_alone() {
        let soon = Duration::from_millis(100);
        let (stuck, other) = (spec(), spec());
        // Nothing receives its calls.
        let (hung, _calls) = Vm::unheard();
        let (answers, mut calls) = Vm::unheard();
        tokio::spawn(async move {
            while let Some((_, call)) = calls.recv().await {
                match call {
                    Call::Register(_, reply) | Call::Unregister(reply) => drop(reply.send(Ok(()))),
                    _ => unreachable!("nothing else is asked"),
                }
            }
        });
        let vms = Arc::new(Vms::of([(stuck.vm, hung), (other.vm, answers)]));
        let own = |_| unreachable!("both are known");
        let registering = {
            let (vms, stuck) = (Arc::clone(&vms), stuck.clone());
            tokio::spawn(async move { vms.register(stuck.vm, stuck.clone(), own).await })
        };
        tokio::time::sleep(Duration::from_millis(20)).await;
        timeout(soon, vms.register(other.vm, other.clone(), own)).await.unwrap().unwrap();
        // Unregistering it waits for earlier calls.
        assert!(timeout(soon, vms.forget(stuck.vm)).await.is_err());
        assert!(vms.get(stuck.vm).is_ok());
        timeout(soon, vms.forget(other.vm)).await.unwrap().unwrap();
        assert!(vms.get(other.vm).is_err());
        registering.abort();
    }
}
