//! Suspending VMs, and resuming them.

use vmseal_api::host::version::SUSPEND;
use vmseal_api::host::{Power, VmChange};
use vmseal_api::model::Task;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::ResumeVm;

use super::caller::{Caller, Privilege};
use super::vm_key::{require_available, require_held};
use super::vms::{begin, find, power, require_ready, word};
use super::{Outcome, Services, examine_change, features, saved_memory};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::events::NewEvent;
use crate::store::{memory_generations, vms};

/// Saves the memory of a guest that runs or is paused, and stops its VM.
pub async fn suspend(
    services: &Services,
    caller: &Caller,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmPower)?;
    let (vm, _) = find(services, name).await?;
    require_ready(&vm)?;
    features::require(services, &vm, SUSPEND, "suspend VMs")?;
    let now = power(services, &vm).await?.unwrap_or(Power::Off);
    if now == Power::Suspended {
        let name = &vm.name;
        let detail =
            format!("VM '{name}' is suspended already: resume it (vmseal vm resume {name})");
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    // A host goes on with it when the server that asked for it has ended.
    if !matches!(now, Power::Running | Power::Paused | Power::Suspending) {
        let detail = format!(
            "VM '{}' is {}: only a VM that runs or is paused can be suspended",
            vm.name,
            word(now)
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    require_held(services, &vm)?;
    let mut write = services.store.write().await?;
    // A start that is due because its host has rebooted would undo it.
    vms::set_start_done(&mut write, vm.id).await?;
    begin(services, write, Operation::SuspendVm { vm: vm.id }, &vm, caller, dry_run).await
}

/// Has the guest of a suspended VM go on.
pub async fn resume(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: ResumeVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmPower)?;
    let (vm, _) = find(services, name).await?;
    require_ready(&vm)?;
    let now = power(services, &vm).await?.unwrap_or(Power::Off);
    if now != Power::Suspended {
        let remedy = match now {
            Power::Off => format!(": start it (vmseal vm start {})", vm.name),
            Power::Paused => format!(": unpause it (vmseal vm unpause {})", vm.name),
            _ => String::new(),
        };
        let detail = format!("VM '{}' is {}, not suspended{remedy}", vm.name, word(now));
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    require_available(services, &vm, Purpose::Encrypt).await?;
    let ResumeVm { accept_memory } = request;
    let generation = match accept_memory {
        true => None,
        false => saved_memory::expected(services, &vm).await?,
    };
    let mut write = services.store.write().await?;
    if accept_memory {
        memory_generations::accept_any(&mut write, vm.id).await?;
        let (kind, actor, target) = ("vm.memory-accepted", caller.name(), vm.name.as_str());
        write.event(NewEvent { kind, actor, target, detail: "" }).await?;
    }
    let operation = Operation::StartVm { vm: vm.id, boot_once: None };
    let begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    let change = VmChange::Start { first: None, discard_memory: false, generation };
    examine_change::of_plan(services, &vm, change, begun).await
}

#[cfg(test)]
mod tests {
    use vmseal_secret::sealed_box::Recipient;

    use super::*;
    use crate::testing::Fixture;

    #[tokio::test]
    async fn what_is_suspended_is_not_suspended_again_and_what_runs_is_not_resumed() {
        let fixture = Fixture::new().await;
        let vm = fixture.running("web").await;
        let (services, me) =
            (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
        let refused = resume(&services, &me, "web", ResumeVm::default(), false).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        let Outcome::Done(task) = suspend(&services, &me, "web", false).await.unwrap() else {
            panic!("nothing was begun")
        };
        fixture.ends_well(task.id).await;
        let seen = fixture.hosts.view(fixture.host).vm(vm).map(|seen| seen.power);
        assert_eq!(seen, Some(Power::Suspended));
        for dry_run in [true, false] {
            let refused = suspend(&services, &me, "web", dry_run).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
            assert!(refused.detail.contains("suspended already"), "{refused}");
        }
    }

    #[tokio::test]
    async fn a_memory_that_is_not_the_expected_one_is_only_taken_on_an_operators_word() {
        let fixture = Fixture::new().await;
        let vm = fixture.running("web").await;
        let (services, me) =
            (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
        let expected = async || {
            let mut read = services.store.read().await.unwrap();
            memory_generations::expected(&mut read, vm).await.unwrap()
        };
        let since_its_start = expected().await;
        fixture.done(Operation::SuspendVm { vm }, "web").await;
        let saved = expected().await;
        assert!(since_its_start.is_some() && saved > since_its_start, "{saved:?}");
        // Its memory was saved again, and what is there is the one of before.
        let mut write = services.store.write().await.unwrap();
        memory_generations::renew(&mut write, vm).await.unwrap();
        write.commit().await.unwrap();
        let resume = |accept_memory, dry_run| {
            resume(&services, &me, "web", ResumeVm { accept_memory }, dry_run)
        };
        let foretold = resume(false, true).await.unwrap_err();
        assert_eq!(foretold.code, ErrorCode::Damaged, "{foretold}");
        assert!(foretold.detail.contains("--accept-memory"), "{foretold}");
        let Outcome::Done(task) = resume(false, false).await.unwrap() else {
            panic!("nothing was begun")
        };
        fixture.ended(task.id).await;
        let problem = fixture.task(task.id).await.problem.unwrap();
        assert_eq!(problem.code, ErrorCode::Damaged, "{problem}");
        fixture.assert_whole(vm, Power::Suspended, "it is not resumed").await;
        resume(true, true).await.unwrap();
        assert!(expected().await > saved, "a dry run has changed what is expected");
        let Outcome::Done(task) = resume(true, false).await.unwrap() else {
            panic!("nothing was begun")
        };
        fixture.ends_well(task.id).await;
        fixture.assert_whole(vm, Power::Running, "it is resumed").await;
        assert!(expected().await > saved, "the memory that was used up is taken again");
    }
}
