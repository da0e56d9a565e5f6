//! The key of a VM that another host is to get. It comes from the VM's provider: the host that holds it gives it to nobody
//! (docs/decisions/026, 272).

use vmseal_api::problem::Problem;

use crate::hosts::keys::{self, Purpose};
use crate::services::Services;
use crate::store::vms::Vm;

/// Refuses a VM whose provider does not give its key now.
pub(super) async fn require(services: &Services, vm: &Vm, purpose: Purpose) -> Result<(), Problem> {
    let Some(key) = &vm.key else { return Ok(()) };
    match keys::fetch(&services.providers, vm, key, purpose).await {
        Ok(kek) => {
            drop(kek);
            Ok(())
        }
        Err(why) => Err(refusal(vm, why)),
    }
}

/// The same of a VM that runs, for a caller that looks again soon: a provider that is known to give no key is not asked.
pub(in crate::services) async fn require_key_or_wait(
    services: &Services,
    vm: &Vm,
) -> Result<(), Problem> {
    match fault(services, vm, Purpose::Open).await {
        Some(why) => Err(refusal(vm, why)),
        None => Ok(()),
    }
}

/// Why a VM that runs could not be started if it were off, where its key is not given for that; for the same caller.
pub(in crate::services) async fn fault_of_start(services: &Services, vm: &Vm) -> Option<Problem> {
    fault(services, vm, Purpose::Encrypt).await
}

async fn fault(services: &Services, vm: &Vm, purpose: Purpose) -> Option<Problem> {
    let key = vm.key.as_ref()?;
    let provider = services.providers.get(key.provider).ok();
    let known = provider.and_then(|provider| provider.known_fault());
    if known.is_some() {
        return known;
    }
    keys::fetch(&services.providers, vm, key, purpose).await.err()
}

fn refusal(vm: &Vm, why: Problem) -> Problem {
    let detail = format!(
        "VM '{}' stays on host '{}': another host gets its key from the provider, which does not give it now: {}",
        vm.name, vm.host_name, why.detail
    );
    Problem { detail, ..why }
}
