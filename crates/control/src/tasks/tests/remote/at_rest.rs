//! VMs that are off and go to another control plane: at the end one inventory has the VM with all of its disks, and the other one
//! nothing of it. It has snapshots, one of them with memory, which go along. What is killed at which step is a part in a run.

use vmseal_api::host::HostAgent;

use super::with_snapshots::{Known, assert_kept, assert_own_memory, prepared};
use super::*;

/// A VM that is off at the first control plane, and how that has its snapshots.
async fn off() -> (Two, Vec<Known>) {
    let (two, before) = prepared().await;
    let stop = Operation::StopVm { vm: two.vm, force: true, timeout_seconds: 1 };
    two.west.done(stop, "web").await;
    (two, before)
}

impl Two {
    /// The VM is off at one of both, with its snapshots; nothing is left at the other.
    async fn assert_off_at_one(&self, before: &[Known], arrived: bool, what: &str) {
        let (at, other) = if arrived { (&self.east, &self.west) } else { (&self.west, &self.east) };
        at.assert_whole(self.vm, Power::Off, what).await;
        other
            .eventually("the other one has forgotten it", async || {
                let gone = other.vm(self.vm).await.is_none() && other.agent.disks().is_empty();
                (gone && other.agent.registered().is_empty()).then_some(())
            })
            .await;
        other.assert_nothing_left(self.vm, what).await;
        assert_kept(self, before, arrived, what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_is_off_goes_there_with_its_snapshots_and_starts_there() {
    let (two, before) = off().await;
    let key = two.west.vm(two.vm).await.unwrap().key.unwrap();
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_off_at_one(&before, true, "it is done").await;
    assert_own_memory(&two, &before).await;
    let after = two.east.vm(two.vm).await.unwrap();
    assert_ne!(after.key.unwrap().key_id, key.key_id, "the key is another one");
    let told = two.west.events("vm.migrated").await;
    assert!(told[0].detail.contains("to remote 'east', encrypted, while it was off"), "{told:?}");
    let shown = two.west.engine.shown(&two.west.task(task).await);
    assert!(shown.migrated.is_none(), "no guest stood still");
    two.east.done(Operation::StartVm { vm: two.vm, boot_once: None }, "web").await;
    two.east.assert_runs(two.vm).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_is_suspended_stays_and_the_refusal_says_what_to_do() {
    let two = Two::new().await;
    two.west.done(Operation::SuspendVm { vm: two.vm }, "web").await;
    let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
    let me = Caller::administrator("me");
    let refused = migrate::migrate(&two.services(), &me, "web", request, false).await;
    let refused = refused.map(drop).unwrap_err();
    assert!(refused.detail.contains("vmseal vm resume web"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_may_be_killed_at_every_step_while_it_is_off() {
    let mut part = Part::of_run();
    let sides = [(true, away()), (false, arriving())];
    for (at_source, step) in
        sides.into_iter().flat_map(|(side, steps)| steps.into_iter().map(move |it| (side, it)))
    {
        for point in [FaultPoint::Before, FaultPoint::After] {
            if !part.has_next() {
                continue;
            }
            let what = format!("killed {point:?} {step:?}, the source's server: {at_source}");
            let (mut two, before) = off().await;
            let (faults, done) = at(step, TaskState::Running, point, Fault::Crash, 1);
            match at_source {
                true => two.restart_west(Some(faults)).await,
                false => two.restart_east(Some(faults)).await,
            }
            let (task, arrival) = two.begin().await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            two.west.eventually(&what, crashed).await;
            match at_source {
                true => two.restart_west(None).await,
                false => {
                    two.west.plane.set(None);
                    two.restart_east(None).await;
                }
            }
            two.west.ends_well(task).await;
            two.east.ends_well(arrival).await;
            two.assert_off_at_one(&before, true, &what).await;
        }
    }
}

/// An agent that restarts does not know a VM that is off: the lease of its disks says whether it had come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_destination_s_agent_may_be_killed_at_the_commit() {
    let faults = [HostFault::Crash, HostFault::LoseAnswer, HostFault::CrashAfter];
    for (fault, arrives) in faults.into_iter().zip([false, true, true]) {
        let what = format!("{fault:?}");
        let (two, before) = off().await;
        two.east.agent.inject(Call::CommitJob, 1, fault);
        let (task, arrival) = two.begin().await;
        let expected = if arrives { TaskState::Done } else { TaskState::Failed };
        assert_eq!(two.west.ended(task).await.state, expected, "{what}");
        assert_eq!(two.east.ended(arrival).await.state, expected, "{what}");
        two.assert_off_at_one(&before, arrives, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_it_is_sent_nothing_starts_it_and_it_may_be_cancelled() {
    let (two, before) = off().await;
    two.west.agent.set_work(LONG);
    let (task, arrival) = two.begin().await;
    let sends = async || two.west.agent.departure(two.vm, task).map(drop);
    two.west.eventually("it is sent", sends).await;
    let refused = two.west.agent.power_on(two.vm).await.unwrap_err();
    assert!(refused.detail.contains("is being sent to another host"), "{refused}");
    two.west.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(two.west.ended(task).await.state, TaskState::Cancelled);
    assert_eq!(two.east.ended(arrival).await.state, TaskState::Cancelled);
    two.assert_off_at_one(&before, false, "cancelled").await;
}
