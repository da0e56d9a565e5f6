//! What a task waits for after a step failed.

use vmseal_api::key_fault::KeyFault;
use vmseal_api::model::{Waiting, WaitingOn};
use vmseal_api::problem::Problem;

use super::run::{Run, StepError};
use super::step::WaitPolicy;
use crate::store::providers;

/// How to continue after a step failed.
#[derive(Debug, PartialEq)]
pub(super) enum FailureKind {
    /// The inventory could not be read or written: retry until it can.
    Inventory,
    /// A provider gives no keys: wait for it.
    Provider,
    /// A user has paused the task: wait for them.
    Paused,
    /// A host or provider did not answer: retry a few times, or wait for the host.
    Silence,
    /// A retry would change nothing.
    Final,
}

/// How to continue after a step failed with this error.
pub(super) fn classify(error: &StepError, wait_policy: WaitPolicy) -> FailureKind {
    if let StepError::Paused(_) = error {
        return FailureKind::Paused;
    }
    let problem = error.as_problem();
    if problem.inventory {
        return FailureKind::Inventory;
    }
    if problem.reason.is_some_and(KeyFault::is_of_provider) {
        // A user waits for the outcome of a step that waits for nothing: report the failure at once.
        return if wait_policy.provider { FailureKind::Provider } else { FailureKind::Final };
    }
    match error {
        StepError::Again(_) => FailureKind::Silence,
        StepError::Final(_) | StepError::Paused(_) => FailureKind::Final,
    }
}

/// The provider that the task waits for, as the task shows it.
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
    let new = run.task.operation.provider_of_new_key().or(vm.provider);
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
