//! Tasks that wait: for a passphrase, for a provider, for the inventory, for a time.

use std::time::Duration;

use jiff::{Timestamp, ToSpan};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::model::WaitingOn;

use super::*;
use crate::tasks::engine::TaskSchedule;

/// Waits until a task waits for this.
async fn waits(fixture: &Fixture, task: vmseal_api::id::TaskId, on: WaitingOn) -> Task {
    fixture
        .eventually("it waits", async || {
            let task = fixture.task(task).await;
            let waits = task.state == TaskState::Waiting && task.waiting.as_ref()?.on == on;
            waits.then_some(task)
        })
        .await
}

fn provider_is_away() -> Problem {
    Problem::new(ErrorCode::Unreachable, "away on purpose").because(KeyFault::KmsUnreachable)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_a_creation_waits_for_the_passphrase_of_its_provider() {
    for step in ["make-key", "deliver-key"] {
        let mut fixture = Fixture::new().await;
        let (faults, done) = at(step, TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let (vm, task) = fixture.create("web", "encrypted").await;
        fixture
            .eventually("it crashes", async || (done.load(Ordering::SeqCst) > 0).then_some(()))
            .await;
        fixture.restart_sealed().await;
        let seen = waits(&fixture, task, WaitingOn::Passphrase).await;
        let waiting = seen.waiting.unwrap();
        assert_eq!(waiting.name, "keys");
        assert!(waiting.to_string().contains("vmseal provider unlock keys"), "{waiting}");
        // However long: for more attempts than a step has.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(fixture.task(task).await.ended.is_none(), "it was given up");
        fixture.unlock("keys").await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{step}: {:?}", ended.problem);
        assert_eq!(ended.waiting, None);
        fixture.assert_whole(vm, Power::Off, step).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_waits_for_its_provider_can_be_cancelled_and_leaves_nothing() {
    let mut fixture = Fixture::new().await;
    let (faults, _) = at(
        "make-key",
        TaskState::Running,
        FaultPoint::Before,
        Fault::Fail(provider_is_away()),
        u32::MAX,
    );
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let (vm, task) = fixture.create("web", "encrypted").await;
    waits(&fixture, task, WaitingOn::Provider).await;
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    fixture.assert_nothing_left(vm, "cancelled").await;
}

/// A creation that waits for a passphrase after a restart of the server, at this step.
async fn waiting_for_a_passphrase(step: &'static str) -> (Fixture, VmId, vmseal_api::id::TaskId) {
    let mut fixture = Fixture::new().await;
    let (faults, done) = at(step, TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let (vm, task) = fixture.create("web", "encrypted").await;
    fixture
        .eventually("it crashes", async || (done.load(Ordering::SeqCst) > 0).then_some(()))
        .await;
    // Its host has restarted, too, and has no key either.
    fixture.agent.restart();
    fixture.restart_sealed().await;
    waits(&fixture, task, WaitingOn::Passphrase).await;
    (fixture, vm, task)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_waits_for_a_passphrase_can_be_cancelled_and_leaves_nothing() {
    for step in ["make-key", "deliver-key", "create-disks"] {
        let (fixture, vm, task) = waiting_for_a_passphrase(step).await;
        fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Cancelled, "{step}: {:?}", ended.problem);
        fixture.assert_nothing_left(vm, step).await;
    }
}

/// After a restart of everything the host may not be up yet. No disk is begun: the host is told to forget the VM when
/// it answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_waits_for_a_passphrase_is_cancelled_without_its_host() {
    for step in ["make-key", "deliver-key"] {
        let (fixture, vm, task) = waiting_for_a_passphrase(step).await;
        if step == "deliver-key" {
            // It knows the VM from before.
            crate::hosts::register(&fixture.store, &fixture.hosts, vm).await.unwrap();
        }
        fixture.agent.set_reachable(false);
        fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Cancelled, "{step}: {:?}", ended.problem);
        assert_eq!(fixture.alarms().await.iter().find(|it| it.starts_with("task")), None);
        fixture.agent.set_reachable(true);
        fixture
            .eventually("the host forgets it", async || {
                fixture.agent.registered().is_empty().then_some(())
            })
            .await;
        fixture.assert_nothing_left(vm, step).await;
    }
}

/// A start reports at once what is wrong: a user waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_does_not_wait_for_a_passphrase() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    // Its host does not hold the key either.
    fixture.agent.restart();
    fixture.restart_sealed().await;
    let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    let ended = fixture.ended(task).await;
    let problem = ended.problem.unwrap();
    assert_eq!((ended.state, problem.code), (TaskState::Failed, ErrorCode::Locked), "{problem}");
}

/// The provider is unreachable at each step of a recryption for longer than a step is retried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_waits_for_its_provider_at_every_step() {
    for step in recrypt::steps() {
        for point in [FaultPoint::Before, FaultPoint::After] {
            let what = format!("away {point:?} {step}");
            let mut fixture = Fixture::new().await;
            let vm = fixture.made("web", "encrypted").await;
            let fault = Fault::Fail(provider_is_away());
            let (faults, _) = at(step, TaskState::Running, point, fault, 4 * ATTEMPTS);
            fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
            let task = fixture.begin(fixture.recryption(vm).await, "web").await;
            let ended = fixture.ended(task).await;
            // Before anything is done the failure is reported at once, and the commit step does not use the provider.
            let told = ["check-key", "switch-key"].contains(&step);
            let expected = if told { TaskState::Failed } else { TaskState::Done };
            assert_eq!(ended.state, expected, "{what}: {:?}", ended.problem);
        }
    }
}

/// The disk of the inventory is full for longer than a step is retried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_is_not_given_up_because_the_inventory_fails() {
    for step in Kind::Create.steps() {
        let full = Problem { inventory: true, ..Problem::new(ErrorCode::Internal, "full") };
        let mut fixture = Fixture::new().await;
        let fault = Fault::Fail(full);
        let (faults, _) = at(step, TaskState::Running, FaultPoint::After, fault, 4 * ATTEMPTS);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let (vm, task) = fixture.create("web", "encrypted").await;
        assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{step}");
        fixture.assert_whole(vm, Power::Off, step).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_does_not_begin_before_its_time_and_is_cancelled_with_what_it_is_a_part_of() {
    let fixture = Fixture::new().await;
    let (first, second) = (fixture.made("web", "plain").await, fixture.made("db", "plain").await);
    let record = async |vm, name, plan| {
        let mut write = fixture.store.write().await.unwrap();
        let start = Operation::StartVm { vm, boot_once: None };
        let task = Engine::record_scheduled(&mut write, start, name, "me", plan).await.unwrap();
        write.commit().await.unwrap();
        let id = task.id;
        fixture.engine.begin(task);
        id
    };
    let later = Some(Timestamp::now() + 1.hour());
    let parent =
        record(first, "web", TaskSchedule { parent: None, not_before: later, id: None }).await;
    let part =
        record(second, "db", TaskSchedule { parent: Some(parent), not_before: later, id: None })
            .await;
    waits(&fixture, parent, WaitingOn::Time).await;
    waits(&fixture, part, WaitingOn::Time).await;
    assert_eq!(fixture.calls(Call::PowerOn), 0);
    fixture.engine.cancel(&parent.to_string(), "me").await.unwrap();
    for task in [parent, part] {
        assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    }
    assert_eq!(fixture.calls(Call::PowerOn), 0);
    let soon = Some(Timestamp::now() + 50.milliseconds());
    let begun =
        record(first, "web", TaskSchedule { parent: None, not_before: soon, id: None }).await;
    assert_eq!(fixture.ended(begun).await.state, TaskState::Done);
    assert!(Some(Timestamp::now()) >= soon);
}
