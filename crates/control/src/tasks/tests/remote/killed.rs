//! The servers of both control planes are killed while one of both undoes a migration, and both at once. A part of it in a run.

use super::*;
use crate::hosts::is_silence;
use crate::remotes::{Wanted, describe};

/// The step at which a side decides: all of its steps until there are undone when it fails.
const DECIDES: &str = "switch";

const POINTS: [FaultPoint; 2] = [FaultPoint::Before, FaultPoint::After];

/// Fails the deciding step, and ends the server while it undoes this one.
fn killed_undoing(step: &'static str, point: FaultPoint) -> (Faults, Arc<AtomicU32>) {
    let (undoing, done) = at(step, TaskState::RollingBack, point, Fault::Crash, 1);
    let refuses = Fault::Fail(refused());
    let (failing, _) = at(DECIDES, TaskState::Running, FaultPoint::Before, refuses, 1);
    let both: Faults = Arc::new(move |step, state, point| match failing(step, state, point) {
        Fault::None => undoing(step, state, point),
        fault => fault,
    });
    (both, done)
}

/// The steps that a failure of the deciding one undoes, and that one.
fn undone(steps: &[&'static str]) -> Vec<&'static str> {
    let decides = steps.iter().position(|step| *step == DECIDES).unwrap();
    steps[..=decides].to_vec()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_source_s_server_may_be_killed_while_it_undoes() {
    let mut part = Part::of_run();
    for step in undone(&away()) {
        for point in POINTS {
            if !part.has_next() {
                continue;
            }
            let what = format!("the source's server is killed {point:?} undoing {step:?}");
            let mut two = Two::new().await;
            let (faults, done) = killed_undoing(step, point);
            two.restart_west(Some(faults)).await;
            let (task, _) = two.begin().await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            two.west.eventually(&what, crashed).await;
            two.restart_west(None).await;
            assert_eq!(two.west.ended(task).await.state, TaskState::Failed, "{what}");
            two.assert_stays(&what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_destination_s_server_may_be_killed_while_it_undoes() {
    let mut part = Part::of_run();
    for step in undone(&arriving()) {
        for point in POINTS {
            if !part.has_next() {
                continue;
            }
            let what = format!("the destination's server is killed {point:?} undoing {step:?}");
            let mut two = Two::new().await;
            let (faults, done) = killed_undoing(step, point);
            two.restart_east(Some(faults)).await;
            let (task, arrival) = two.begin().await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            two.west.eventually(&what, crashed).await;
            // It has not said that the guest does not run there: the source lets it stand still.
            assert!(!two.west.agent.runs(two.vm), "{what}: it goes on before that is decided");
            two.west.plane.set(None);
            two.restart_east(None).await;
            assert_eq!(two.west.ended(task).await.state, TaskState::Failed, "{what}");
            assert_eq!(two.east.ended(arrival).await.state, TaskState::Failed, "{what}");
            two.assert_stays(&what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_servers_may_be_killed_at_once() {
    let mut part = Part::of_run();
    for step in arriving() {
        for point in POINTS {
            if !part.has_next() {
                continue;
            }
            let what = format!("both servers are killed, the destination's {point:?} {step:?}");
            let mut two = Two::new().await;
            let (faults, done) = at(step, TaskState::Running, point, Fault::Crash, 1);
            two.restart_east(Some(faults)).await;
            let (task, arrival) = two.begin().await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            two.west.eventually(&what, crashed).await;
            two.west.plane.set(None);
            two.restart_west(None).await;
            two.restart_east(None).await;
            two.west.ends_well(task).await;
            two.east.ends_well(arrival).await;
            two.assert_gone(&what).await;
        }
    }
}

#[tokio::test]
async fn a_server_that_has_just_started_describes_a_vm_once_its_host_has_answered() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let vm = fixture.vm(vm).await.unwrap();
    fixture.agent.set_reachable(false);
    let hosts = fixture.hosts_of_another_server().await;
    let described = async || {
        let wanted = Wanted {
            policy: "encrypted".to_owned(),
            host: None,
            datastore: None,
            at_rest: false,
            suspended: false,
            compresses: false,
        };
        describe(&fixture.store, &hosts, &vm, wanted, 1).await
    };
    let early = described().await.map(drop).unwrap_err();
    assert!(is_silence(&early), "its task would fail: {early}");
    fixture.agent.set_reachable(true);
    fixture.eventually("it is described", async || described().await.ok().map(drop)).await;
}
