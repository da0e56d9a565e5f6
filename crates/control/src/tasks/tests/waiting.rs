//! Tasks that wait: for a passphrase, for a provider, for the inventory, for a time.

use std::time::Duration;

use jiff::{Timestamp, ToSpan};
use vmseal_api::kmip::KeyFault;
use vmseal_api::model::WaitingOn;

use super::*;
use crate::tasks::engine::Plan;

/// Waits until a task waits for this.
async fn waits(plant: &Plant, task: vmseal_api::id::TaskId, on: WaitingOn) -> Task {
    plant
        .eventually("it waits", async || {
            let task = plant.task(task).await;
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
        let mut plant = Plant::new().await;
        let (faults, done) = at(step, TaskState::Running, Moment::Before, Fault::Crash, 1);
        plant.restart(|engine| engine.environment.faults = Some(faults)).await;
        let (vm, task) = plant.create("web", "encrypted").await;
        plant
            .eventually("it crashes", async || (done.load(Ordering::SeqCst) > 0).then_some(()))
            .await;
        plant.restart_sealed().await;
        let seen = waits(&plant, task, WaitingOn::Passphrase).await;
        let waiting = seen.waiting.unwrap();
        assert_eq!(waiting.name, "keys");
        assert!(waiting.to_string().contains("vmseal provider unlock keys"), "{waiting}");
        // However long: more often than a step is tried.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(plant.task(task).await.ended.is_none(), "it was given up");
        plant.unlock("keys").await;
        let ended = plant.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{step}: {:?}", ended.problem);
        assert_eq!(ended.waiting, None);
        plant.assert_whole(vm, Power::Off, step).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_creation_that_waits_for_its_provider_can_be_cancelled_and_leaves_nothing() {
    let mut plant = Plant::new().await;
    let (faults, _) = at(
        "make-key",
        TaskState::Running,
        Moment::Before,
        Fault::Fail(provider_is_away()),
        u32::MAX,
    );
    plant.restart(|engine| engine.environment.faults = Some(faults)).await;
    let (vm, task) = plant.create("web", "encrypted").await;
    waits(&plant, task, WaitingOn::Provider).await;
    plant.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(plant.ended(task).await.state, TaskState::Cancelled);
    plant.assert_nothing_left(vm, "cancelled").await;
}

/// A start tells at once what is wrong: somebody waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_does_not_wait_for_a_passphrase() {
    let mut plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    // Its host does not hold the key either.
    plant.agent.restart();
    plant.restart_sealed().await;
    let task = plant.begin(Operation::StartVm { vm }, "web").await;
    let ended = plant.ended(task).await;
    let problem = ended.problem.unwrap();
    assert_eq!((ended.state, problem.code), (TaskState::Failed, ErrorCode::Locked), "{problem}");
}

/// The provider is away at each step of a recryption for longer than a step is tried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_waits_for_its_provider_at_every_step() {
    for step in recrypt::steps() {
        for moment in [Moment::Before, Moment::After] {
            let what = format!("away {moment:?} {step}");
            let mut plant = Plant::new().await;
            let vm = plant.made("web", "encrypted").await;
            let fault = Fault::Fail(provider_is_away());
            let (faults, _) = at(step, TaskState::Running, moment, fault, 4 * ATTEMPTS);
            plant.restart(|engine| engine.environment.faults = Some(faults)).await;
            let task = plant.begin(plant.recryption(vm).await, "web").await;
            let ended = plant.ended(task).await;
            // Before anything is done it is told at once, and the commit step asks nothing of the provider.
            let told = ["check-key", "switch-key"].contains(&step);
            let expected = if told { TaskState::Failed } else { TaskState::Done };
            assert_eq!(ended.state, expected, "{what}: {:?}", ended.problem);
        }
    }
}

/// The disk below the inventory is full for longer than a step is tried.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_is_not_given_up_because_the_inventory_fails() {
    for step in Kind::Create.steps() {
        let full = Problem { inventory: true, ..Problem::new(ErrorCode::Internal, "full") };
        let mut plant = Plant::new().await;
        let fault = Fault::Fail(full);
        let (faults, _) = at(step, TaskState::Running, Moment::After, fault, 4 * ATTEMPTS);
        plant.restart(|engine| engine.environment.faults = Some(faults)).await;
        let (vm, task) = plant.create("web", "encrypted").await;
        assert_eq!(plant.ended(task).await.state, TaskState::Done, "{step}");
        plant.assert_whole(vm, Power::Off, step).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_does_not_begin_before_its_time_and_is_cancelled_with_what_it_is_a_part_of() {
    let plant = Plant::new().await;
    let (first, second) = (plant.made("web", "plain").await, plant.made("db", "plain").await);
    let record = async |vm, name, plan| {
        let mut write = plant.store.write().await.unwrap();
        let start = Operation::StartVm { vm };
        let task = Engine::record_planned(&mut write, start, name, "me", plan).await.unwrap();
        write.commit().await.unwrap();
        let id = task.id;
        plant.engine.begin(task);
        id
    };
    let later = Some(Timestamp::now() + 1.hour());
    let parent = record(first, "web", Plan { parent: None, not_before: later }).await;
    let part = record(second, "db", Plan { parent: Some(parent), not_before: later }).await;
    waits(&plant, parent, WaitingOn::Time).await;
    waits(&plant, part, WaitingOn::Time).await;
    assert_eq!(plant.calls(Call::PowerOn), 0);
    plant.engine.cancel(&parent.to_string(), "me").await.unwrap();
    for task in [parent, part] {
        assert_eq!(plant.ended(task).await.state, TaskState::Cancelled);
    }
    assert_eq!(plant.calls(Call::PowerOn), 0);
    let soon = Some(Timestamp::now() + 50.milliseconds());
    let begun = record(first, "web", Plan { parent: None, not_before: soon }).await;
    assert_eq!(plant.ended(begun).await.state, TaskState::Done);
    assert!(Some(Timestamp::now()) >= soon);
}
