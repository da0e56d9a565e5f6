//! Keys on their way: from a provider to the host of their VM, sealed, and each use on record.
//!
//! A KEK is in the server's memory from the provider's answer until it is sealed to the agent's key
//! box, in [`SecretBytes`] alone.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::host::{HostAgent, KeyReference, SealedKey, key_info};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::{SecretBytes, sealed_box};

use crate::providers::Providers;
use crate::store::Store;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;

/// What a VM's key is wanted for. A key that its KMS has deactivated, or calls compromised, opens what there
/// is and encrypts nothing new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To make disks, or to run a VM that is off, which writes: only with a key in force.
    Encrypt,
    /// To keep what runs running, or to lead away from what there is (another key, an export): with any key
    /// that opens it.
    Open,
}

/// A VM's key from its provider.
///
/// # Errors
/// `locked`, with the provider's reason, or that of a key which is not for this purpose; `timed-out` and
/// `unreachable` where that says nothing of the key.
pub async fn fetch(
    providers: &Providers,
    vm: &Vm,
    key: &KeyReference,
    purpose: Purpose,
) -> Result<SecretBytes, Problem> {
    let locked = |problem: Problem| match problem.code {
        // Nobody was asked, or nothing is known: it may be had when it is asked for again.
        ErrorCode::TimedOut | ErrorCode::Unreachable if problem.reason.is_none() => problem,
        _ => Problem {
            reason: problem.reason,
            inventory: problem.inventory,
            ..Problem::new(ErrorCode::Locked, problem.detail)
        },
    };
    let provider = providers.get(key.provider).map_err(locked)?;
    let given = provider.get_key(vm.id, key).await.map_err(locked)?;
    match given.fault {
        Some(fault) if purpose == Purpose::Encrypt => Err(locked(fault)),
        _ => Ok(given.kek),
    }
}

/// Whether the key that a host holds may serve in place of the provider's, which was not given for this reason: to
/// run the VM while the provider gives no keys at all, and to lead away from a key that no provider has any more.
#[must_use]
pub fn may_use_held(problem: &Problem, purpose: Purpose) -> bool {
    match problem.reason {
        Some(KeyFault::KeyDestroyed | KeyFault::KeyMissing) => purpose == Purpose::Open,
        Some(fault) => fault.is_of_provider(),
        None => false,
    }
}

/// Puts on record that the key is used which the VM's host holds, and why.
///
/// # Errors
/// The inventory's.
pub async fn tell_held(store: &Store, vm: &Vm, why: &Problem) -> Result<(), Problem> {
    let id = vm.key.as_ref().map_or("", |key| key.key_id.as_str());
    let detail = format!("key '{id}' that host '{}' holds: {why}", vm.host_name);
    tell(store, "key.held-used", vm, &detail).await
}

/// Gives a VM's key to the agent whose key box this is.
///
/// # Errors
/// The agent's problem; `wrong-state` when it has restarted since it announced the key box.
pub async fn hand_over(
    store: &Store,
    agent: &dyn HostAgent,
    key_box: &str,
    vm: &Vm,
    key: &KeyReference,
    kek: SecretBytes,
) -> Result<(), Problem> {
    let offer = seal(store, key_box, vm, key, kek).await?;
    let answer = agent.offer_key(vm.id, offer).await;
    if let Err(problem) = &answer {
        let detail = format!("{}: {problem}", on_its_way(vm, key));
        tell(store, "key.delivery-failed", vm, &detail).await?;
    }
    answer
}

fn on_its_way(vm: &Vm, key: &KeyReference) -> String {
    format!("key '{}' to host '{}'", key.key_id, vm.host_name)
}

/// Seals a VM's key to the agent whose key box this is, and puts on record that it leaves.
///
/// # Errors
/// The inventory's; it is no key box.
pub async fn seal(
    store: &Store,
    key_box: &str,
    vm: &Vm,
    key: &KeyReference,
    kek: SecretBytes,
) -> Result<SealedKey, Problem> {
    let public: [u8; 32] =
        STANDARD.decode(key_box).ok().and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
            let detail = format!("host '{}' announced something that is no key box", vm.host_name);
            Problem::new(ErrorCode::Internal, detail)
        })?;
    let sealed = sealed_box::seal(&public, &key_info(vm.id, key), &kek)
        .map_err(|error| crate::internal(&error))?;
    drop(kek);
    // On record before it leaves: no use of a key without its event, whatever happens next.
    tell(store, "key.delivered", vm, &on_its_way(vm, key)).await?;
    Ok(SealedKey { key_box: key_box.to_owned(), sealed: STANDARD.encode(sealed.as_bytes()) })
}

async fn tell(store: &Store, kind: &str, vm: &Vm, detail: &str) -> Result<(), Problem> {
    let mut write = store.write().await?;
    write.event(NewEvent { kind, actor: crate::SELF, target: &vm.name, detail }).await?;
    Ok(write.commit().await?)
}
