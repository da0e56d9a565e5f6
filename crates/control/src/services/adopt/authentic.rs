//! Whether a descriptor was made with the key of its VM.

use vmseal_api::adopt::AdoptVms;
use vmseal_api::host::KeyReference;
use vmseal_api::host::descriptor::VmDescriptor;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{KeyContext, Purpose, derive};
use vmseal_secret::mac;

use super::super::Services;
use super::super::caller::Caller;
use crate::store::events::NewEvent;

/// Asks the provider for the key, and checks with it who made the descriptor.
pub(super) async fn check_key(
    services: &Services,
    caller: &Caller,
    request: &AdoptVms,
    descriptor: &VmDescriptor,
) -> Result<&'static str, Problem> {
    let Some(key) = &descriptor.key else { return Ok("") };
    if is_made_with(services, caller, descriptor, key).await? {
        return Ok("");
    }
    let changed = match descriptor.mac {
        Some(_) => "its descriptor was changed by somebody who does not have its key",
        None => {
            "its descriptor is not authenticated: it is of an earlier vmseal, or somebody changed it"
        }
    };
    if request.unauthenticated {
        return Ok("its descriptor is not authenticated");
    }
    let what = format!(
        "{changed}. Look at {}/vm.json, and give --unauthenticated to take it as it is",
        descriptor.vm
    );
    Err(Problem::new(ErrorCode::Damaged, what))
}

/// Whether a descriptor was made with this key, for which its provider is asked.
pub(super) async fn is_made_with(
    services: &Services,
    caller: &Caller,
    descriptor: &VmDescriptor,
    key: &KeyReference,
) -> Result<bool, Problem> {
    let provider = services.providers.get(key.provider)?;
    // Recorded before the key is there: no use of a key without its event.
    let mut write = services.store.write().await?;
    let detail = format!("key '{}', to check the descriptor of VM {}", key.key_id, descriptor.vm);
    let (kind, target) = ("key.read", descriptor.name.as_str());
    write.event(NewEvent { kind, actor: caller.name(), target, detail: &detail }).await?;
    write.commit().await?;
    let given = provider.get_key(descriptor.vm, key).await?;
    is_authentic(descriptor, &given.kek)
}

fn is_authentic(descriptor: &VmDescriptor, kek: &SecretBytes) -> Result<bool, Problem> {
    let (Some(key), Some(code)) = (&descriptor.key, &descriptor.mac) else { return Ok(false) };
    let context = KeyContext {
        vm: descriptor.vm.0.into_bytes(),
        provider: key.provider.0.into_bytes(),
        key_id: &key.key_id,
    };
    let derived =
        derive(kek, &context, Purpose::Descriptor).map_err(|error| crate::internal(&error))?;
    let text = descriptor.authenticated().map_err(|error| crate::internal(&error))?;
    let digit = |at: usize| u8::from_str_radix(code.get(at..at + 2).unwrap_or(""), 16);
    let code: Result<Vec<u8>, _> = (0..code.len()).step_by(2).map(digit).collect();
    Ok(code.is_ok_and(|code| mac::verify(&derived, &[&text], &code).is_ok()))
}
