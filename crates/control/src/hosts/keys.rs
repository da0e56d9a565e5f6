//! The delivery of keys: from a provider to the host of their VM, sealed, with an event for each use.
//!
//! A KEK is in the server's memory from the provider's answer until it is sealed to the agent's key box, and only
//! in [`SecretBytes`].

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

/// The purpose of a VM's key. A key that its KMS has deactivated, or marked as compromised, opens existing data
/// but encrypts nothing new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To create disks, or to start a VM that is off, which writes: only with an active key.
    Encrypt,
    /// To keep a VM running, or to migrate its data (to another key, or by an export): with any key that opens it.
    Open,
}

/// A VM's key from its provider.
///
/// # Errors
/// `locked`, with the provider's reason, or because the key is not allowed for this purpose; `timed-out`, `unreachable` and `busy`
/// if it is not known whether the key is available.
pub async fn fetch(
    providers: &Providers,
    vm: &Vm,
    key: &KeyReference,
    purpose: Purpose,
) -> Result<SecretBytes, Problem> {
    let provider = providers.get(key.provider).map_err(locked)?;
    let given = provider.get_key(vm.id, key).await.map_err(locked)?;
    match given.fault {
        Some(fault) if purpose == Purpose::Encrypt => Err(locked(fault)),
        _ => Ok(given.kek),
    }
}

/// What it means for a VM's key that a provider has this problem.
fn locked(problem: Problem) -> Problem {
    match problem.code {
        // The provider was not asked, or did not answer: a retry may succeed.
        ErrorCode::TimedOut | ErrorCode::Unreachable | ErrorCode::Busy
            if problem.reason.is_none() =>
        {
            problem
        }
        _ => Problem {
            reason: problem.reason,
            inventory: problem.inventory,
            ..Problem::new(ErrorCode::Locked, problem.detail)
        },
    }
}

/// Whether the key that a host holds may be used although the provider did not give it, for this reason: to run
/// the VM while the provider gives no keys at all, and to replace a key that no provider has any more.
#[must_use]
pub fn may_use_held(problem: &Problem, purpose: Purpose) -> bool {
    match problem.reason {
        Some(KeyFault::KeyDestroyed | KeyFault::KeyMissing) => purpose == Purpose::Open,
        Some(fault) => fault.is_of_provider(),
        None => false,
    }
}

/// Records the use of the key that the VM's host holds, and why.
///
/// # Errors
/// The inventory's.
pub async fn tell_held(store: &Store, vm: &Vm, why: &Problem) -> Result<(), Problem> {
    let id = vm.key.as_ref().map_or("", |key| key.key_id.as_str());
    let detail = format!("key '{id}' that host '{}' holds: {why}", vm.host_name);
    tell(store, "key.held-used", vm, &detail).await
}

/// Delivers a VM's key to the agent with this key box.
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
    let sealed = seal(store, key_box, vm, key, kek).await?;
    offer(store, agent, vm, sealed).await
}

/// Offers a VM's key, which is sealed to the agent and on record as delivered.
///
/// # Errors
/// As [`hand_over`].
pub(super) async fn offer(
    store: &Store,
    agent: &dyn HostAgent,
    vm: &Vm,
    sealed: SealedKey,
) -> Result<(), Problem> {
    let answer = agent.offer_key(vm.id, sealed).await;
    if let Err(problem) = &answer {
        tell_failed(store, vm, problem).await?;
    }
    answer
}

/// Records that a VM's key, which is on record as delivered, has not come to its host, and why.
///
/// # Errors
/// The inventory's.
pub(super) async fn tell_failed(store: &Store, vm: &Vm, why: &Problem) -> Result<(), Problem> {
    let Some(key) = &vm.key else { return Ok(()) };
    let detail = format!("{}: {why}", on_its_way(vm, key));
    tell(store, "key.delivery-failed", vm, &detail).await
}

fn on_its_way(vm: &Vm, key: &KeyReference) -> String {
    format!("key '{}' to host '{}'", key.key_id, vm.host_name)
}

/// Seals a VM's key to the agent with this key box, and records its delivery.
///
/// # Errors
/// The inventory's; it is not a key box.
pub async fn seal(
    store: &Store,
    key_box: &str,
    vm: &Vm,
    key: &KeyReference,
    kek: SecretBytes,
) -> Result<SealedKey, Problem> {
    let public = public_key(key_box, &vm.host_name)?;
    let sealed = sealed_box::seal(&public, &key_info(vm.id, key), &kek)
        .map_err(|error| crate::internal(&error))?;
    drop(kek);
    // Recorded before the key leaves: no use of a key without its event, whatever happens next.
    tell(store, "key.delivered", vm, &on_its_way(vm, key)).await?;
    Ok(SealedKey { key_box: key_box.to_owned(), sealed: STANDARD.encode(sealed.as_bytes()) })
}

/// The public key of a key box, which the host of this name announced.
///
/// # Errors
/// `internal`: it is not one.
pub fn public_key(key_box: &str, host: &str) -> Result<[u8; 32], Problem> {
    STANDARD.decode(key_box).ok().and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
        let detail = format!("host '{host}' announced something that is no key box");
        Problem::new(ErrorCode::Internal, detail)
    })
}

async fn tell(store: &Store, kind: &str, vm: &Vm, detail: &str) -> Result<(), Problem> {
    let mut write = store.write().await?;
    write.event(NewEvent { kind, actor: crate::SELF, target: &vm.name, detail }).await?;
    Ok(write.commit().await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::StoreError;

    /// Nothing is known of the key: it is asked for again, and nobody is sent to look for it.
    #[test]
    fn a_busy_inventory_is_no_key_that_is_not_available() {
        let busy = locked(StoreError::from(sqlx::Error::PoolTimedOut).into());
        assert_eq!((busy.code, busy.inventory), (ErrorCode::Busy, true), "{busy}");
        let sealed = Problem::new(ErrorCode::Busy, "sealed").because(KeyFault::ProviderSealed);
        assert_eq!(locked(sealed).code, ErrorCode::Locked);
        let full = Problem { inventory: true, ..Problem::new(ErrorCode::Internal, "full") };
        let full = locked(full);
        assert_eq!((full.code, full.inventory), (ErrorCode::Locked, true), "{full}");
    }
}
