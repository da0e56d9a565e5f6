//! A host that is away for longer than a step is tried: what takes hours on it waits.

use std::time::Duration;

use vmseal_api::host::HostAgent;

use super::*;

/// Much longer than a step is tried here.
const AWAY: Duration = Duration::from_millis(400);

const SOON: Duration = Duration::from_millis(1);

async fn shown_step(plant: &Plant, task: vmseal_api::id::TaskId) -> String {
    plant.engine.shown(&plant.task(task).await).at()
}

/// Takes the host away while it works on a task, until the task has waited for it for long.
async fn leave(plant: &Plant, task: vmseal_api::id::TaskId) {
    let works = async || {
        let known = plant.agent.state_now().await.ok()?;
        let mut jobs = known.vms.into_iter().flat_map(|vm| vm.jobs);
        jobs.find(|job| job.task == task).map(drop)
    };
    plant.eventually("it works", works).await;
    plant.agent.set_reachable(false);
    plant
        .eventually("it is said what is waited for", async || {
            shown_step(plant, task).await.ends_with("waiting for host 'here'").then_some(())
        })
        .await;
    tokio::time::sleep(AWAY).await;
    assert!(plant.task(task).await.ended.is_none(), "it was given up");
}

async fn come_back(plant: &Plant) {
    plant.agent.set_work(SOON);
    plant.agent.restart();
    plant.agent.set_reachable(true);
}

#[tokio::test]
async fn an_import_and_an_export_wait_for_their_host_and_go_on() {
    let plant = Plant::new().await;
    plant.agent.set_work(LONG);
    let (vm, task) = plant.create("web", "encrypted").await;
    leave(&plant, task).await;
    come_back(&plant).await;
    assert_eq!(plant.ended(task).await.state, TaskState::Done);
    Kind::Create.assert_done(&plant, vm, "created").await;

    plant.agent.set_work(LONG);
    let disk = plant.disks(vm).await[0].id;
    let task = plant.begin(exporting(vm, disk), "web").await;
    leave(&plant, task).await;
    come_back(&plant).await;
    assert_eq!(plant.ended(task).await.state, TaskState::Done);
    assert!(!shown_step(&plant, task).await.contains("waiting"));
    Kind::Export.assert_done(&plant, vm, "exported").await;
}

#[tokio::test]
async fn a_task_that_waits_for_its_host_can_be_cancelled() {
    let plant = Plant::new().await;
    plant.agent.set_work(LONG);
    let (vm, task) = plant.create("web", "encrypted").await;
    leave(&plant, task).await;
    plant.engine.cancel(&task.to_string(), "me").await.unwrap();
    let ended = plant.ended(task).await;
    let problem = ended.problem.unwrap();
    // What it has begun cannot be undone while the host is away, and that is said.
    assert_eq!(ended.state, TaskState::Unknown, "{problem}");
    assert!(problem.detail.contains("was cancelled"), "{problem}");
    assert_eq!(plant.vm(vm).await.unwrap().lifecycle, Lifecycle::Creating);
}
