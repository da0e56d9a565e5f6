//! What a step that failed is waited for.

use vmseal_api::key_fault::KeyFault;
use vmseal_api::model::{Waiting, WaitingOn};
use vmseal_api::problem::Problem;

use super::run::{Run, StepError};
use super::step::WaitPolicy;
use crate::operation::Operation;
use crate::store::providers;

/// What becomes of a step that failed.
#[derive(Debug, PartialEq)]
pub(super) enum FailureKind {
    /// The inventory could not be read or written; it is tried until it can.
    Inventory,
    /// A provider gives no keys; it is waited for.
    Provider,
    /// Nobody answered; it is tried a few times, or the host is waited for.
    Silence,
    /// It failed, and trying again would change nothing.
    Final,
}

/// What becomes of a step that failed with this error.
pub(super) fn classify(error: &StepError, wait_policy: WaitPolicy) -> FailureKind {
    let problem = error.as_problem();
    if problem.inventory {
        return FailureKind::Inventory;
    }
    if problem.reason.is_some_and(KeyFault::is_of_provider) {
        // Somebody waits for the outcome of a step that waits for nobody: it is told at once.
        return if wait_policy.provider { FailureKind::Provider } else { FailureKind::Final };
    }
    match error {
        StepError::Again(_) => FailureKind::Silence,
        StepError::Final(_) => FailureKind::Final,
    }
}

/// The provider that is waited for, as the task shows it.
pub(super) async fn for_provider(run: &Run<'_>, problem: &Problem) -> Waiting {
    let on = match problem.reason {
        Some(KeyFault::ProviderSealed) => WaitingOn::Passphrase,
        _ => WaitingOn::Provider,
    };
    let name = faulty_provider(run).await.unwrap_or_default();
    Waiting { on, name, detail: problem.to_string() }
}

/// The name of the provider that gives no keys: that of the VM's key, or that of the new one.
async fn faulty_provider(run: &Run<'_>) -> Option<String> {
    let vm = run.find_vm().await.ok()??;
    let new = match &run.task.operation {
        Operation::RecryptVm { provider, .. } => Some(*provider),
        _ => vm.provider,
    };
    let old = vm.key.as_ref().map(|key| key.provider);
    let mut read = run.store().read().await.ok()?;
    let mut named = None;
    for id in [new, old].into_iter().flatten() {
        let found = providers::find(&mut read, &id.to_string()).await.ok()??;
        let faulty =
            run.context.providers.get(id).is_ok_and(|provider| provider.known_fault().is_some());
        if faulty {
            return Some(found.name);
        }
        named.get_or_insert(found.name);
    }
    named
}
