//! A memory of a VM that its guest has gone on from, or beside which it has gone on, is not taken later: its disks have changed since, and who
//! writes to the datastore may have kept it.

use vmseal_api::host::StopReason;

use super::*;

/// How long the host takes where a test does not wait for it.
const SOON: std::time::Duration = std::time::Duration::from_millis(5);

async fn is_seen(fixture: &Fixture, vm: VmId, power: Power) {
    let seen = async || {
        let seen = fixture.hosts.view(fixture.host).vm(vm)?.power;
        (seen == power).then_some(())
    };
    fixture.eventually(&format!("it is seen as {power:?}"), seen).await;
}

/// Begins to save the memory of a guest; its generation.
async fn being_saved(fixture: &Fixture, vm: VmId) -> (vmseal_api::id::TaskId, u64) {
    fixture.agent.set_work(LONG);
    let task = fixture.begin(Operation::SuspendVm { vm }, "web").await;
    is_seen(fixture, vm, Power::Suspending).await;
    (task, fixture.agent.memory_generation(vm).unwrap())
}

async fn has_failed(fixture: &Fixture, task: vmseal_api::id::TaskId, why: &str) {
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert!(problem.detail.contains(why), "{problem}");
    fixture.agent.set_work(SOON);
}

/// The VM is off, and somebody puts the memory back.
async fn is_not_taken(fixture: &Fixture, vm: VmId, generation: u64) {
    is_seen(fixture, vm, Power::Off).await;
    fixture.agent.put_memory_back(vm, generation);
    let start = Operation::StartVm { vm, boot_once: None };
    let ended = fixture.ended(fixture.begin(start, "web").await).await;
    assert_eq!(ended.state, TaskState::Failed, "an older memory is taken");
    let problem = ended.problem.unwrap();
    assert_eq!(problem.code, ErrorCode::Damaged, "{problem}");
    assert!(problem.detail.contains(&generation.to_string()), "{problem}");
    assert!(fixture.agent.running().is_empty());
}

#[tokio::test]
async fn a_memory_that_could_not_be_saved_is_not_taken_when_its_guest_has_gone_on() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let (task, generation) = being_saved(&fixture, vm).await;
    fixture.agent.fail_to_save(vm, "there is no room");
    has_failed(&fixture, task, "it runs on: there is no room").await;
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
    fixture.done(stop, "web").await;
    is_not_taken(&fixture, vm, generation).await;
}

#[tokio::test]
async fn the_memory_of_a_guest_that_died_while_it_was_saved_is_not_taken() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let (task, generation) = being_saved(&fixture, vm).await;
    fixture.agent.stop_guest(vm, StopReason::QemuDied);
    has_failed(&fixture, task, "its memory was not saved").await;
    is_not_taken(&fixture, vm, generation).await;
}

#[tokio::test]
async fn a_memory_that_is_used_up_is_not_taken_where_nobody_saw_its_guest_run() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let generation = fixture.agent.memory_generation(vm).unwrap();
    fixture.agent.set_work(LONG);
    let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    is_seen(&fixture, vm, Power::Starting).await;
    fixture.agent.end_resumed(vm);
    has_failed(&fixture, task, "it did not start").await;
    is_not_taken(&fixture, vm, generation).await;
}

/// The server sees it starting, and its guest goes on before the host is told to end the start: its memory is nowhere else then.
#[tokio::test]
async fn a_guest_that_has_just_gone_on_from_its_memory_outlives_a_cancelled_resume() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    fixture.agent.set_work(LONG);
    let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    is_seen(&fixture, vm, Power::Starting).await;
    fixture.agent.start_before_it_is_cancelled(vm);
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Cancelled, "{:?}", ended.problem);
    is_seen(&fixture, vm, Power::Running).await;
    assert_eq!(fixture.agent.running(), [vm]);
}

/// Its disks hold what the snapshot keeps, which a guest with this memory would destroy.
#[tokio::test]
async fn a_memory_that_was_given_up_by_a_revert_is_not_taken() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let snapshot = snapshots::taken(&fixture, vm, "first").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let generation = fixture.agent.memory_generation(vm).unwrap();
    let (running, discard_memory) = (false, true);
    let revert = Operation::RevertSnapshot { vm, snapshot, running, discard_memory };
    fixture.done(revert, "web").await;
    is_not_taken(&fixture, vm, generation).await;
}
