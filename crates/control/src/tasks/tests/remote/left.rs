//! What does not go along with a VM to another control plane: core dumps that its host writes meanwhile keep it here; its backups stay
//! here, listed, with the key that opens them.

use std::time::Duration;

use vmseal_api::dump::DumpReason;
use vmseal_api::hardware::OnCrash;

use super::with_snapshots::{planned, refused_for};
use super::*;
use crate::services::{PageRequest, backups as service};
use crate::store::dumps;
use crate::tasks::tests::backups::{OTHER, as_another, living_keys, made, named, rows};

/// Has this done when its guest panics.
async fn set(two: &Two, on_crash: OnCrash) {
    let request = SetVm { on_crash: Some(on_crash), ..SetVm::default() };
    let me = Caller::administrator("me");
    set_vm::set(&two.services(), &me, "web", request, false).await.map(drop).unwrap();
}

/// The tasks of a migration in which it is being sent, for long.
async fn sends(two: &Two) -> (TaskId, TaskId) {
    two.west.agent.set_work(LONG);
    let (task, arrival) = two.begin().await;
    let sends = async || two.west.agent.departure(two.vm, task).map(drop);
    two.west.eventually("it is sent", sends).await;
    (task, arrival)
}

/// The core dumps of its VM, at the first control plane.
async fn dumps_of(two: &Two) -> Vec<dumps::Dump> {
    dumps::of_vm(&mut two.west.store.read().await.unwrap(), two.vm).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_panics_while_it_is_sent_stays_with_its_core_dump() {
    let two = Two::new().await;
    set(&two, OnCrash::CoredumpRestart).await;
    let (task, arrival) = sends(&two).await;
    two.west.agent.panic_guest(two.vm);
    let ended = two.west.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let why = ended.problem.unwrap().detail;
    assert!(why.contains("has panicked") && why.contains("vmseal dump list web"), "{why}");
    assert_eq!(two.east.ended(arrival).await.state, TaskState::Cancelled);
    two.assert_stays("it has panicked").await;

    let listed = async || dumps_of(&two).await.into_iter().next();
    let dump = two.west.eventually("its core dump is listed", listed).await;
    assert_eq!((&*dump.name, dump.reason), ("panic-1", DumpReason::Panic));
    let told = refused_for(&two).await.unwrap();
    assert!(told.contains("vmseal dump decrypt web panic-1 --to FILE"), "{told}");
    two.west.agent.set_work(Duration::from_millis(1));
    let (vm, dump) = (two.vm, dump.id);
    two.west.done(Operation::DecryptDump { vm, dump, to: "/exports/core".into() }, "web").await;
    two.west.done(Operation::DeleteDump { vm, dump }, "web").await;
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_gone("without its core dump").await;
    assert!(two.west.agent.dumps().is_empty(), "a core dump is left");
}

/// Nothing is written of it: its host ends the migration, as the other one would have it go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_is_left_as_it_panicked_while_it_was_sent_stays() {
    let two = Two::new().await;
    set(&two, OnCrash::Preserve).await;
    let (task, arrival) = sends(&two).await;
    two.west.agent.panic_guest(two.vm);
    let ended = two.west.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let why = ended.problem.unwrap().detail;
    assert!(why.contains("panicked while it was sent"), "{why}");
    assert_eq!(two.east.ended(arrival).await.state, TaskState::Cancelled);
    two.west.assert_whole(two.vm, Power::Paused, "it is left as it is").await;
    assert!(two.west.agent.runs(two.vm) && !two.east.agent.runs(two.vm), "where it runs");
}

/// A core dump that was asked for after the other control plane was asked whether it takes the VM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_has_got_a_core_dump_when_its_migration_begins_stays() {
    let mut two = Two::new().await;
    let (faults, done) = at("check", TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
    two.restart_west(Some(faults)).await;
    let (task, _) = two.begin().await;
    let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
    two.west.eventually("the server ends", crashed).await;
    two.west.add_dump(two.vm, "late").await;
    two.restart_west(None).await;
    let ended = two.west.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let why = ended.problem.unwrap().detail;
    assert!(why.contains("has core dumps now"), "{why}");
    two.assert_stays("it has a core dump").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn backups_stay_listed_and_their_key_opens_them_until_the_last_is_deleted() {
    let two = Two::new().await;
    for name in ["one", "two"] {
        made(&two.west, two.vm, name).await;
    }
    let key = two.west.vm(two.vm).await.unwrap().key.unwrap();
    let told = planned(&two).await;
    let expected = format!("'one', 'two' under key '{}' of '", key.key_id);
    assert!(told.contains(&expected) && told.contains("vmseal backup list web"), "{told}");

    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    assert!(two.west.vm(two.vm).await.is_none() && two.east.agent.runs(two.vm));
    let events = two.west.events("vm.migrated").await;
    assert!(events[0].detail.contains(&expected), "{events:?}");
    let (services, me) = (two.services(), Caller::administrator("me"));
    let listed = service::list(&services, &me, "web", PageRequest::default()).await.unwrap();
    let listed: Vec<_> = listed.items.iter().map(|it| (&*it.name, it.vm_deleted)).collect();
    assert_eq!(listed, [("one", true), ("two", true)]);
    assert_eq!(living_keys(&two.west, two.vm).await, [key]);

    let request = as_another(OTHER);
    let restored = service::restore(&services, &me, "web", "two", request, false).await;
    let Outcome::Done(task) = restored.unwrap() else { panic!("it is only planned") };
    two.west.ends_well(task.id).await;
    let other = named(&two.west, OTHER).await.unwrap();
    two.west.assert_whole(other.id, Power::Off, "restored").await;

    // Each above the one before.
    for backup in rows(&two.west, two.vm).await.into_iter().rev() {
        let operation = Operation::DeleteBackup { vm: two.vm, backup: backup.id };
        two.west.done(operation, "web").await;
    }
    assert_eq!(living_keys(&two.west, two.vm).await, [], "the key of no backup is kept");
}
