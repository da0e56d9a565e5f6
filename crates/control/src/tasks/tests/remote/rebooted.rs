//! The destination's host reboots after it ran the guest, and before its control plane has heard of that: what the guest has done there is
//! on its copies alone.

use std::time::Duration;

use vmseal_api::host::{Fence, HostAgent};

use super::*;
use crate::store::{hosts, placements};
use crate::tasks::tests::migrate::files;

/// Much longer than a step is retried here.
const LATER: Duration = Duration::from_millis(300);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_there_that_reboots_after_the_guest_ran_leaves_the_decision_to_an_operator_there() {
    let two = Two::new().await;
    two.east.agent.inject(Call::CommitJob, 1, HostFault::FallSilentAfter);
    let (task, arrival) = two.begin().await;
    let connected = || two.east.hosts.connected(two.east.host).is_ok();
    let runs = async || (two.east.agent.runs(two.vm) && !connected()).then_some(());
    two.east.eventually("it runs there, and its host is silent", runs).await;
    let refused = two.east.engine.give_up(&arrival.to_string(), "me").await.unwrap_err();
    assert!(refused.detail.contains("may run there: wait for it"), "{refused}");

    two.east.agent.reboot();
    two.east.agent.set_reachable(true);
    let found = hosts::find(&mut two.east.store.read().await.unwrap(), "here").await;
    two.east.hosts.add(&found.unwrap().unwrap()).unwrap();
    let told = async || {
        let waiting = two.east.engine.shown(&two.east.task(arrival).await).waiting?;
        let known = connected() && waiting.detail.contains("or its agent has restarted");
        known.then_some(waiting.detail)
    };
    let told = two.east.eventually("it says what is known", told).await;
    assert!(told.contains(&format!("vmseal task cancel {arrival} --force")), "{told}");
    tokio::time::sleep(LATER).await;
    assert!(two.east.task(arrival).await.ended.is_none(), "that was taken for an answer");
    assert!(!two.west.agent.runs(two.vm), "what it has done there is lost");

    two.east.engine.give_up(&arrival.to_string(), "me").await.unwrap();
    let undone = [TaskState::Cancelled, TaskState::Failed];
    for ended in [two.east.ended(arrival).await, two.west.ended(task).await] {
        assert!(undone.contains(&ended.state), "{:?} {:?}", ended.state, ended.problem);
    }
    two.west.assert_whole(two.vm, Power::Running, "given up").await;
    assert!(two.west.agent.runs(two.vm), "it stands still");
    assert!(two.east.vm(two.vm).await.is_none(), "its row is left");
    assert!(!files(&two.east.agent, two.vm).is_empty(), "what it has done there is removed");
    let next = placements::next_generation(&mut two.west.store.read().await.unwrap(), two.vm).await;
    let taken = two.east.agent.lease(two.vm).unwrap();
    assert!(next.unwrap() > taken, "the copies there count as those of a next migration");
}

/// The lease is taken when the host is asked, and not before: no operator is needed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_there_that_loses_the_guest_before_it_takes_it_over_says_that_it_does_not_run_there()
{
    let two = Two::new().await;
    two.east.agent.inject(Call::CommitJob, 1, HostFault::Crash);
    let (task, arrival) = two.begin().await;
    assert_eq!(two.west.ended(task).await.state, TaskState::Failed);
    assert_eq!(two.east.ended(arrival).await.state, TaskState::Failed);
    two.assert_stays("it was not taken over").await;
}

/// Its lease, as late as this migration, says nothing of this one: a source of an earlier version comes with the same generation again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arrival_that_finds_copies_of_an_earlier_one_is_refused_and_undone() {
    let two = Two::new().await;
    let vm = two.west.agent.runs_with(two.vm).unwrap();
    two.east.agent.fence_vm(Fence { vm, generation: 1000 }).await.unwrap();
    let (task, arrival) = two.begin().await;
    let ended = two.west.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed, "{:?}", ended.problem);
    let problem = ended.problem.unwrap();
    assert!(problem.detail.contains("with its copied disks"), "{problem}");
    let ended = two.east.ended(arrival).await;
    let undone = [TaskState::Cancelled, TaskState::Failed];
    assert!(undone.contains(&ended.state), "{:?} {:?}", ended.state, ended.problem);
    two.assert_stays("refused").await;
}
