//! Power that is cut while a task waits for the guest, and failures before any request to a host.

use super::*;

#[tokio::test]
async fn a_forced_stop_cuts_the_power_of_a_vm_whose_guest_is_being_waited_for() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    fixture.agent.set_heeds_shutdown(false);
    assert!(fixture.engine.force_stop(vm, "me").await.unwrap().is_none(), "there is no task");
    let stop = Operation::StopVm { vm, force: false, timeout_seconds: 600 };
    let task = fixture.begin(stop, "web").await;
    fixture
        .eventually("it is asked", async || (fixture.calls(Call::PowerOff) > 0).then_some(()))
        .await;
    let forced = fixture.engine.force_stop(vm, "me").await.unwrap().unwrap();
    assert_eq!(forced.id, task);
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_whole(vm, Power::Off, "forced").await;
    assert_eq!(fixture.events("task.forced").await.len(), 1);
}

/// The request is in the inventory: after a restart the server cuts the power.
#[tokio::test]
async fn a_forced_stop_is_not_forgotten_in_a_crash() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    fixture.agent.set_heeds_shutdown(false);
    let stop = Operation::StopVm { vm, force: false, timeout_seconds: 600 };
    let task = fixture.begin(stop, "web").await;
    fixture
        .eventually("it is asked", async || (fixture.calls(Call::PowerOff) > 0).then_some(()))
        .await;
    fixture.engine.stop();
    fixture.engine.force_stop(vm, "me").await.unwrap().unwrap();
    fixture.restart(|_| {}).await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_whole(vm, Power::Off, "forced").await;
}

/// No host received the request: that is known, and the VM is unchanged.
#[tokio::test]
async fn a_stop_that_never_reached_the_host_has_failed_and_is_not_unknown() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    fixture.agent.set_reachable(false);
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
    let ended = fixture.ended(fixture.begin(stop, "web").await).await;
    assert_eq!(ended.state, TaskState::Failed, "{:?}", ended.problem);
    assert_eq!(fixture.calls(Call::PowerOff), 0);
    fixture.agent.set_reachable(true);
    fixture.connected().await;
    fixture.assert_whole(vm, Power::Running, "it runs on").await;
}
