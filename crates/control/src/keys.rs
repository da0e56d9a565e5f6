//! Keys on their way: from a provider to the host of their VM, sealed, and each use on record.
//!
//! A KEK is in the server's memory from the provider's answer until it is sealed to the agent's key
//! box, in [`SecretBytes`](vmseal_secret::SecretBytes) alone.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::host::{HostAgent, SealedKey, key_info};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::sealed_box;

use crate::providers::Providers;
use crate::store::Store;
use crate::store::events::NewEvent;
use crate::store::vms::Vm;

/// Gives a VM's key to the agent whose key box this is. A VM without one needs nothing.
///
/// # Errors
/// The provider's or the agent's problem; `wrong-state` when the agent has restarted since it
/// announced the key box.
pub async fn deliver(
    store: &Store,
    providers: &Providers,
    agent: &dyn HostAgent,
    key_box: &str,
    vm: &Vm,
) -> Result<(), Problem> {
    let Some(key) = &vm.key else { return Ok(()) };
    let public: [u8; 32] =
        STANDARD.decode(key_box).ok().and_then(|bytes| bytes.try_into().ok()).ok_or_else(|| {
            let detail = format!("host '{}' announced something that is no key box", vm.host_name);
            Problem::new(ErrorCode::Internal, detail)
        })?;
    let sealed = {
        let kek = providers.get(key.provider)?.get_key(vm.id, key).await?;
        sealed_box::seal(&public, &key_info(vm.id, key), &kek)
            .map_err(|error| crate::internal(&error))?
    };
    // On record before it leaves: no use of a key without its event, whatever happens next.
    let detail = format!("key '{}' to host '{}'", key.key_id, vm.host_name);
    tell(store, "key.delivered", vm, &detail).await?;
    let offer =
        SealedKey { key_box: key_box.to_owned(), sealed: STANDARD.encode(sealed.as_bytes()) };
    let answer = agent.offer_key(vm.id, offer).await;
    if let Err(problem) = &answer {
        tell(store, "key.delivery-failed", vm, &format!("{detail}: {problem}")).await?;
    }
    answer
}

async fn tell(store: &Store, kind: &str, vm: &Vm, detail: &str) -> Result<(), Problem> {
    let mut write = store.write().await?;
    write.event(NewEvent { kind, actor: crate::SELF, target: &vm.name, detail }).await?;
    Ok(write.commit().await?)
}
