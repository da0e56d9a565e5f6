//! VMs that are off or suspended and go to another control plane: at the end one inventory has the VM with all of its disks, and the other one
//! nothing of it. It has snapshots, one of them with memory, which go along. What is killed at which step is a part in a run.

use vmseal_api::host::version::MIGRATE_SUSPENDED;
use vmseal_api::host::{HostAgent, JobSpec, SendJob};
use vmseal_api::remote::ARRIVALS_SUSPENDED;

use super::with_snapshots::{Known, assert_kept, assert_own_memory, prepared};
use super::*;
use crate::services::vms;
use crate::store::memory_generations;

/// A VM that is off at the first control plane, and how that has its snapshots.
async fn off() -> (Two, Vec<Known>) {
    let (two, before) = prepared().await;
    let stop = Operation::StopVm { vm: two.vm, force: true, timeout_seconds: 1 };
    two.west.done(stop, "web").await;
    (two, before)
}

/// A VM that is suspended at the first control plane, and how that has its snapshots. Its agent sends the memory.
async fn suspended() -> (Two, Vec<Known>) {
    let (two, before) = prepared().await;
    two.west.done(Operation::SuspendVm { vm: two.vm }, "web").await;
    let generation = two.west.agent.memory_generation(two.vm).unwrap();
    two.east.agent.will_receive_memory(two.vm, generation);
    (two, before)
}

async fn at_rest(power: Power) -> (Two, Vec<Known>) {
    if power == Power::Suspended { suspended().await } else { off().await }
}

impl Two {
    /// The VM is off at one of both, with its snapshots; nothing is left at the other.
    async fn assert_off_at_one(&self, before: &[Known], arrived: bool, what: &str) {
        self.assert_at_one(Power::Off, before, arrived, what).await;
    }

    /// The same of one that is so.
    async fn assert_at_one(&self, power: Power, before: &[Known], arrived: bool, what: &str) {
        let (at, other) = if arrived { (&self.east, &self.west) } else { (&self.west, &self.east) };
        at.assert_whole(self.vm, power, what).await;
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
async fn a_vm_that_is_suspended_goes_there_with_its_memory_and_goes_on_there() {
    let (two, before) = suspended().await;
    let generation = two.west.agent.memory_generation(two.vm);
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_at_one(Power::Suspended, &before, true, "it is done").await;
    assert_eq!(two.west.agent.memory_generation(two.vm), None, "its memory is left");
    let mut read = two.east.store.read().await.unwrap();
    let expected = memory_generations::expected(&mut read, two.vm).await.unwrap();
    drop(read);
    assert_eq!(expected, generation, "the memory that is there is not the expected one");
    let told = two.west.events("vm.migrated").await;
    assert!(told[0].detail.contains("encrypted, while it was suspended"), "{told:?}");
    two.east.done(Operation::StartVm { vm: two.vm, boot_once: None }, "web").await;
    two.east.assert_runs(two.vm).await;
    // A memory of before is not taken any more.
    let mut read = two.east.store.read().await.unwrap();
    let now = memory_generations::expected(&mut read, two.vm).await.unwrap();
    assert!(now > generation, "{now:?}");
}

#[tokio::test]
async fn who_cannot_send_or_take_the_memory_of_a_suspended_vm_is_named_before() {
    let (two, _) = suspended().await;
    let refused = async || {
        let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
        let me = Caller::administrator("me");
        let planned = migrate::migrate(&two.services(), &me, "web", request, true).await;
        planned.map(drop).map_err(|problem| problem.detail).err()
    };
    assert_eq!(refused().await, None);
    let remote = Some("east".to_owned());
    let request = MigrateVm { remote, compress: true, ..MigrateVm::default() };
    let me = Caller::administrator("me");
    let compressed = migrate::migrate(&two.services(), &me, "web", request, true).await;
    assert_eq!(compressed.map(drop).unwrap_err().field.as_deref(), Some("compress"));
    two.west.plane.lack_features(&[ARRIVALS_SUSPENDED]);
    let told = refused().await.unwrap();
    assert!(told.contains("takes no VMs that are suspended (arrivals-suspended)"), "{told}");
    two.west.plane.lack_features(&[]);
    two.east.agent.lack_features(&[MIGRATE_SUSPENDED]);
    two.east.agent.restart();
    let named = async || refused().await?.contains("(job-migrate-suspended)").then_some(());
    two.east.eventually("the other control plane sees its older agent", named).await;
}

/// The server has seen that it is off, and it is not any more: without its memory it would be off there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_not_sent_without_the_memory_that_it_has_meanwhile() {
    let (two, before) = off().await;
    two.west.agent.set_work(LONG);
    let (task, _) = two.begin().await;
    let sends = async || two.west.agent.departure(two.vm, task).map(drop);
    two.west.eventually("it is sent", sends).await;
    two.west.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(two.west.ended(task).await.state, TaskState::Cancelled);
    two.west.agent.put_memory_back(two.vm, 7);
    let departure = two.west.agent.departure(two.vm, task).unwrap();
    let disks: Vec<_> = two.west.disks(two.vm).await.iter().map(|disk| disk.id).collect();
    let job = SendJob { disks: disks.clone(), copies: disks, begin: Some(Box::new(departure)) };
    let refused = two.west.agent.put_job(two.vm, TaskId::new(), JobSpec::Send(job)).await;
    let refused = refused.unwrap_err();
    assert!(refused.detail.contains("is suspended now"), "{refused}");
    two.assert_at_one(Power::Suspended, &before, false, "it stays").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_may_be_killed_at_every_step_while_it_is_off_or_suspended() {
    let mut part = Part::of_run();
    let sides = [(true, away()), (false, arriving())];
    let steps =
        sides.into_iter().flat_map(|(side, steps)| steps.into_iter().map(move |it| (side, it)));
    let rests = [Power::Off, Power::Suspended];
    for ((at_source, step), power) in steps.flat_map(|at| rests.map(move |power| (at, power))) {
        for point in [FaultPoint::Before, FaultPoint::After] {
            if !part.has_next() {
                continue;
            }
            let what =
                format!("{power:?}, killed {point:?} {step:?}, the source's server: {at_source}");
            let (mut two, before) = at_rest(power).await;
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
            two.assert_at_one(power, &before, true, &what).await;
        }
    }
}

/// An agent that restarts does not know a VM that is off: the lease of its disks says whether it had come.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_destination_s_agent_may_be_killed_at_the_commit() {
    let faults =
        [(HostFault::Crash, false), (HostFault::LoseAnswer, true), (HostFault::CrashAfter, true)];
    let rests = [Power::Off, Power::Suspended];
    for ((fault, arrives), power) in
        faults.into_iter().flat_map(|fault| rests.map(move |power| (fault, power)))
    {
        let what = format!("{power:?}, {fault:?}");
        let (two, before) = at_rest(power).await;
        two.east.agent.inject(Call::CommitJob, 1, fault);
        let (task, arrival) = two.begin().await;
        let expected = if arrives { TaskState::Done } else { TaskState::Failed };
        assert_eq!(two.west.ended(task).await.state, expected, "{what}");
        assert_eq!(two.east.ended(arrival).await.state, expected, "{what}");
        two.assert_at_one(power, &before, arrives, &what).await;
    }
}

/// If the source's agent restarts while it removes memory and disks, the task removes them again: the other control plane has the VM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_source_s_agent_may_be_killed_while_it_gives_up_the_memory() {
    for call in [Call::CommitJob, Call::DiscardMemory, Call::DeleteDisk] {
        for fault in [HostFault::Crash, HostFault::LoseAnswer, HostFault::CrashAfter] {
            let (two, before) = suspended().await;
            two.west.agent.inject(call, 1, fault);
            let (task, arrival) = two.begin().await;
            two.west.ends_well(task).await;
            two.east.ends_well(arrival).await;
            let what = format!("{call:?} {fault:?}");
            two.assert_at_one(Power::Suspended, &before, true, &what).await;
        }
    }
}

/// An agent that has restarted after the commit does not know the VM, and is told of it: its memory is removed all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_does_not_know_the_vm_removes_its_memory_once_it_is_told_of_it() {
    let (two, before) = suspended().await;
    two.west.agent.inject(Call::DiscardMemory, 1, HostFault::Refuse(ErrorCode::NotFound));
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_at_one(Power::Suspended, &before, true, "told again").await;
}

/// The memory cannot be removed at the source: what is left there can be deleted, though it is suspended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_left_of_a_suspended_vm_that_went_away_can_be_deleted() {
    let (two, before) = suspended().await;
    let me = Caller::administrator("me");
    let refused = vms::delete(&two.services(), &me, "web", false).await.map(drop).unwrap_err();
    assert!(refused.detail.contains("is suspended, and its memory is saved"), "{refused}");
    two.west.agent.inject(Call::DiscardMemory, 1, HostFault::Refuse(ErrorCode::Internal));
    let (task, arrival) = two.begin().await;
    let ended = two.west.ended(task).await;
    assert_ne!(ended.state, TaskState::Done, "its memory was removed");
    two.east.ends_well(arrival).await;
    vms::delete(&two.services(), &me, "web", false).await.map(drop).unwrap();
    two.assert_at_one(Power::Suspended, &before, true, "it is deleted").await;
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
