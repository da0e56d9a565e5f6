//! A host that is unreachable for longer than a step is retried: work that takes hours waits.

use std::time::Duration;

use vmseal_api::host::HostAgent;

use super::*;

/// Much longer than a step is retried here.
const AWAY: Duration = Duration::from_millis(400);

const SOON: Duration = Duration::from_millis(1);

async fn shown_step(fixture: &Fixture, task: vmseal_api::id::TaskId) -> String {
    fixture.engine.shown(&fixture.task(task).await).at()
}

/// Makes the host unreachable while it works on a task, until the task has waited for it for long.
async fn leave(fixture: &Fixture, task: vmseal_api::id::TaskId) {
    let works = async || {
        let known = fixture.agent.state_now().await.ok()?;
        let mut jobs = known.vms.into_iter().flat_map(|vm| vm.jobs);
        jobs.find(|job| job.task == task).map(drop)
    };
    fixture.eventually("it works", works).await;
    fixture.agent.set_reachable(false);
    fixture
        .eventually("the task shows what it waits for", async || {
            shown_step(fixture, task).await.ends_with("waiting for host 'here'").then_some(())
        })
        .await;
    tokio::time::sleep(AWAY).await;
    assert!(fixture.task(task).await.ended.is_none(), "it was given up");
}

async fn come_back(fixture: &Fixture) {
    fixture.agent.set_work(SOON);
    fixture.agent.restart();
    fixture.agent.set_reachable(true);
}

#[tokio::test]
async fn an_import_and_an_export_wait_for_their_host_and_go_on() {
    let fixture = Fixture::new().await;
    fixture.agent.set_work(LONG);
    let (vm, task) = fixture.create("web", "encrypted").await;
    leave(&fixture, task).await;
    come_back(&fixture).await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    Kind::Create.assert_done(&fixture, vm, "created").await;

    fixture.agent.set_work(LONG);
    let disk = fixture.disks(vm).await[0].id;
    let task = fixture.begin(exporting(vm, disk), "web").await;
    leave(&fixture, task).await;
    come_back(&fixture).await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    assert!(!shown_step(&fixture, task).await.contains("waiting"));
    Kind::Export.assert_done(&fixture, vm, "exported").await;
}

#[tokio::test]
async fn a_task_that_waits_for_its_host_can_be_cancelled() {
    let fixture = Fixture::new().await;
    fixture.agent.set_work(LONG);
    let (vm, task) = fixture.create("web", "encrypted").await;
    leave(&fixture, task).await;
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    let ended = fixture.ended(task).await;
    let problem = ended.problem.unwrap();
    // Its work cannot be undone while the host is unreachable, and the problem says so.
    assert_eq!(ended.state, TaskState::Unknown, "{problem}");
    assert!(problem.detail.contains("was cancelled"), "{problem}");
    assert_eq!(fixture.vm(vm).await.unwrap().lifecycle, Lifecycle::Creating);
}
