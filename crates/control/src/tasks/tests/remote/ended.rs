//! The guest ends at its host, as its QEMU dies: while it is sent, and once all of it is at the other control plane's host.

use vmseal_api::host::StopReason;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_ends_while_it_is_sent_is_off_here_and_its_task_says_why() {
    let two = Two::new().await;
    two.west.agent.set_work(LONG);
    let (task, arrival) = two.begin().await;
    let sends = async || two.west.agent.departure(two.vm, task).map(drop);
    two.west.eventually("it is sent", sends).await;
    two.west.agent.stop_guest(two.vm, StopReason::QemuDied);
    let ended = two.west.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let why = ended.problem.unwrap().detail;
    assert!(why.contains("VM 'web' ended while it was sent"), "{why}");
    assert_eq!(two.east.ended(arrival).await.state, TaskState::Cancelled);
    two.west.assert_whole(two.vm, Power::Off, "it has ended").await;
    two.east.assert_nothing_left(two.vm, "it has ended").await;
}

/// The server looks at its host when the guest has ended there already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_whose_qemu_dies_once_all_of_it_is_sent_goes_on_there() {
    let mut two = Two::new().await;
    let (faults, done) = at("transfer", TaskState::Running, FaultPoint::After, Fault::Crash, 1);
    two.restart_west(Some(faults)).await;
    let (task, arrival) = two.begin().await;
    let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
    two.west.eventually("the server ends", crashed).await;
    two.west.agent.stop_guest(two.vm, StopReason::QemuDied);
    two.restart_west(None).await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_gone("its former QEMU has died").await;
}
