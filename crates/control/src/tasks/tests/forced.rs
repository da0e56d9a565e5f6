//! Power that is cut while a task waits for the guest, and refusals before anything was asked of a host.

use super::*;

#[tokio::test]
async fn a_forced_stop_cuts_the_power_of_a_vm_whose_guest_is_being_waited_for() {
    let plant = Plant::new().await;
    let vm = plant.running("web").await;
    plant.agent.set_heeds_shutdown(false);
    assert!(plant.engine.force_stop(vm, "me").await.unwrap().is_none(), "there is no task");
    let stop = Operation::StopVm { vm, force: false, timeout_seconds: 600 };
    let task = plant.begin(stop, "web").await;
    plant.eventually("it is asked", async || (plant.calls(Call::PowerOff) > 0).then_some(())).await;
    let forced = plant.engine.force_stop(vm, "me").await.unwrap().unwrap();
    assert_eq!(forced.id, task);
    assert_eq!(plant.ended(task).await.state, TaskState::Done);
    plant.assert_whole(vm, Power::Off, "forced").await;
    assert_eq!(plant.events("task.forced").await.len(), 1);
}

/// The wish is in the inventory: a server that starts again cuts the power.
#[tokio::test]
async fn a_forced_stop_is_not_forgotten_in_a_crash() {
    let mut plant = Plant::new().await;
    let vm = plant.running("web").await;
    plant.agent.set_heeds_shutdown(false);
    let stop = Operation::StopVm { vm, force: false, timeout_seconds: 600 };
    let task = plant.begin(stop, "web").await;
    plant.eventually("it is asked", async || (plant.calls(Call::PowerOff) > 0).then_some(())).await;
    plant.engine.stop();
    plant.engine.force_stop(vm, "me").await.unwrap().unwrap();
    plant.restart(|_| {}).await;
    assert_eq!(plant.ended(task).await.state, TaskState::Done);
    plant.assert_whole(vm, Power::Off, "forced").await;
}

/// Nobody has heard of it: that is known, and the VM is as it was.
#[tokio::test]
async fn a_stop_of_which_a_host_has_not_heard_has_failed_and_is_not_in_doubt() {
    let plant = Plant::new().await;
    let vm = plant.running("web").await;
    plant.agent.set_reachable(false);
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
    let ended = plant.ended(plant.begin(stop, "web").await).await;
    assert_eq!(ended.state, TaskState::Failed, "{:?}", ended.problem);
    assert_eq!(plant.calls(Call::PowerOff), 0);
    plant.agent.set_reachable(true);
    plant.connected().await;
    plant.assert_whole(vm, Power::Running, "it runs on").await;
}
