//! Whether a task will have the VM's key: from the host, or for most tasks from the provider. If neither has it, request and dry run are
//! refused.

use vmseal_api::host::KeyState;
use vmseal_api::problem::{ErrorCode, Problem};

use super::Services;
use crate::hosts::keys::{self, Purpose};
use crate::store::vms::Vm;

fn is_missing(services: &Services, vm: &Vm) -> bool {
    services.hosts.view(vm.host).vm(vm.id).is_some_and(|seen| seen.key == KeyState::Missing)
}

/// Refuses what the host does with the key that it holds alone: the task does not fetch it.
pub(super) fn require_held(services: &Services, vm: &Vm) -> Result<(), Problem> {
    if !is_missing(services, vm) {
        return Ok(());
    }
    let detail = format!("the key of VM '{}' is not on its host (vmseal alarms says why)", vm.name);
    Err(Problem::new(ErrorCode::Locked, detail))
}

/// Refuses a VM whose host lacks the key, and whose provider does not give it for this purpose now. The provider is asked, as
/// the task would ask it: the last delivery may have failed for a reason that is gone, or with a key that opens the disks and
/// may encrypt nothing new. No transaction may be held.
pub(super) async fn require_available(
    services: &Services,
    vm: &Vm,
    purpose: Purpose,
) -> Result<(), Problem> {
    let Some(key) = vm.key.as_ref().filter(|_| is_missing(services, vm)) else { return Ok(()) };
    match keys::fetch(&services.providers, vm, key, purpose).await {
        Ok(kek) => {
            drop(kek);
            Ok(())
        }
        Err(why) => {
            let (name, host) = (&vm.name, &vm.host_name);
            let detail = format!(
                "the key of VM '{name}' is not on host '{host}', and its provider does not give it now: {}",
                why.detail
            );
            Err(Problem { detail, ..why })
        }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_agent::simulated::{Call, Fault};
    use vmseal_api::id::VmId;
    use vmseal_api::request::{RecryptVm, ResumeVm, StartVm};
    use vmseal_secret::sealed_box::Recipient;

    use super::*;
    use crate::operation::Operation;
    use crate::services::caller::Caller;
    use crate::services::{Outcome, recrypt, suspend, vms};
    use crate::store;
    use crate::testing::Fixture;

    /// More deliveries than a monitor tries during a test.
    const DELIVERIES: u32 = 100;

    /// The agent of the host restarts, and is not given the key again.
    async fn loses_key(fixture: &Fixture, vm: VmId) {
        fixture.inject(Call::OfferKey, Fault::Refuse(ErrorCode::Internal), DELIVERIES);
        fixture.agent.restart();
        let is_locked = async || {
            let view = fixture.hosts.view(fixture.host);
            view.vm(vm).is_some_and(|seen| seen.key == KeyState::Missing).then_some(())
        };
        fixture.eventually("the host is shown without the key", is_locked).await;
    }

    fn recrypting(deep: bool) -> RecryptVm {
        RecryptVm { deep, ..RecryptVm::default() }
    }

    #[tokio::test]
    async fn a_vm_whose_host_lacks_the_key_is_planned_for_as_its_tasks_fetch_it() {
        let fixture = Fixture::new().await;
        let vm = fixture.made("web", "encrypted").await;
        loses_key(&fixture, vm).await;
        let (services, me) =
            (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
        for deep in [false, true] {
            let planned = recrypt::recrypt(&services, &me, "web", recrypting(deep), true).await;
            assert!(matches!(planned, Ok(Outcome::Planned(_))), "deep: {deep}: {planned:?}");
        }
        let planned = vms::start(&services, &me, "web", StartVm::default(), true).await;
        assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
        // It is as they say.
        fixture.agent.forget_faults();
        let begun = recrypt::recrypt(&services, &me, "web", recrypting(false), false).await;
        let Outcome::Done(task) = begun.unwrap() else { panic!("nothing was begun") };
        fixture.ends_well(task.id).await;
    }

    #[tokio::test]
    async fn a_suspended_vm_whose_host_lacks_the_key_is_resumed_with_it() {
        let fixture = Fixture::new().await;
        let vm = fixture.running("web").await;
        fixture.done(Operation::SuspendVm { vm }, "web").await;
        loses_key(&fixture, vm).await;
        let (services, me) =
            (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
        let planned = suspend::resume(&services, &me, "web", ResumeVm::default(), true).await;
        assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
        fixture.agent.forget_faults();
        let begun = suspend::resume(&services, &me, "web", ResumeVm::default(), false).await;
        let Outcome::Done(task) = begun.unwrap() else { panic!("nothing was begun") };
        fixture.ends_well(task.id).await;
    }

    #[tokio::test]
    async fn a_key_that_nobody_gives_refuses_the_plan_in_the_providers_words() {
        let fixture = Fixture::new().await;
        let vm = fixture.made("web", "encrypted").await;
        let key = fixture.vm(vm).await.unwrap().key.unwrap();
        let mut write = fixture.store.write().await.unwrap();
        store::keys::destroy(&mut write, vm, &key).await.unwrap();
        write.commit().await.unwrap();
        loses_key(&fixture, vm).await;
        let (services, me) =
            (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
        for deep in [false, true] {
            let planned = recrypt::recrypt(&services, &me, "web", recrypting(deep), true).await;
            let refused = planned.unwrap_err();
            assert_eq!(refused.code, ErrorCode::Locked, "deep: {deep}: {refused}");
            for words in ["does not give it now", "is destroyed"] {
                assert!(refused.detail.contains(words), "deep: {deep}: {refused}");
            }
        }
        let refused = vms::start(&services, &me, "web", StartVm::default(), true).await;
        assert_eq!(refused.unwrap_err().code, ErrorCode::Locked);
    }
}
