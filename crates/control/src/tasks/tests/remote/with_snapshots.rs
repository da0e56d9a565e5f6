//! VMs with snapshots, which go with them: whatever is killed or fails, the side that has the VM has all of its snapshots, and the other
//! one nothing of them. A part of it in a run.

use vmseal_agent::simulated::SNAPSHOT_ROOM;
use vmseal_api::host::version::MIGRATE_APART_SNAPSHOTS;
use vmseal_api::remote::{ARRIVALS_KEPT, ARRIVING_SNAPSHOTS};
use vmseal_api::size::Size;

use super::*;
use crate::store::links::{self, Link};
use crate::store::memory_generations;
use crate::store::snapshots::Snapshot;
use crate::tasks::tests::snapshots;

/// A snapshot as an inventory has it, and the generation of its memory.
pub(super) type Known = (Snapshot, Option<u64>);

async fn known(fixture: &Fixture, vm: VmId) -> Vec<Known> {
    let mut all = Vec::new();
    for row in snapshots::rows(fixture, vm).await {
        let mut read = fixture.store.read().await.unwrap();
        let generation = memory_generations::of_snapshot(&mut read, row.id).await.unwrap();
        all.push((row, generation));
    }
    all
}

/// A VM with two snapshots, the second one with memory: how the first control plane has them. Its agent sends what these keep.
pub(super) async fn prepared() -> (Two, Vec<Known>) {
    let two = Two::new().await;
    let first = snapshots::taken(&two.west, two.vm, "first").await;
    let second = snapshots::taken(&two.west, two.vm, "second").await;
    let mut write = two.west.store.write().await.unwrap();
    sqlx::query("UPDATE snapshots SET memory = TRUE, description = 'asleep' WHERE name = 'second'")
        .execute(&mut *write)
        .await
        .unwrap();
    memory_generations::number_snapshot(&mut write, two.vm, second).await.unwrap();
    write.commit().await.unwrap();
    for disk in two.west.disks(two.vm).await {
        two.east.agent.will_receive(disk.id, vec![first, second]);
    }
    let before = known(&two.west, two.vm).await;
    assert_eq!(before[1].0.parent, Some(first));
    assert!(before[1].0.current && before[1].0.memory && before[1].1.is_some(), "{before:?}");
    (two, before)
}

/// One side has the VM with its snapshots, and the other one nothing.
async fn assert_one(two: &Two, before: &[Known], arrived: bool, what: &str) {
    two.assert_one(arrived, what).await;
    assert_kept(two, before, arrived, what).await;
}

/// The side that has the VM has its snapshots, in the inventory and on the host, and the other one nothing of them.
pub(super) async fn assert_kept(two: &Two, before: &[Known], arrived: bool, what: &str) {
    let (has, lacks) = if arrived { (&two.east, &two.west) } else { (&two.west, &two.east) };
    assert_eq!(known(has, two.vm).await, before, "{what}");
    assert!(known(lacks, two.vm).await.is_empty(), "{what}: the other inventory has snapshots");
    let ids: Vec<_> = before.iter().map(|(row, _)| row.id).collect();
    for disk in has.disks(two.vm).await {
        assert_eq!(has.agent.snapshots(disk.id), ids, "{what}");
        assert!(lacks.agent.snapshots(disk.id).is_empty(), "{what}: the other host has layers");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_takes_its_snapshots_along_and_no_memory_of_them_is_its_own_there() {
    let (two, before) = prepared().await;
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    assert_one(&two, &before, true, "it is done").await;
    assert_own_memory(&two, &before).await;
}

/// No memory of a snapshot may be put in the place of that of the VM which has arrived.
pub(super) async fn assert_own_memory(two: &Two, before: &[Known]) {
    let mut read = two.east.store.read().await.unwrap();
    let expected = memory_generations::expected(&mut read, two.vm).await.unwrap();
    assert!(expected > before[1].1, "{expected:?}: what a snapshot keeps may be put in its place");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_is_killed_or_refused_its_snapshots_are_where_the_vm_is() {
    let mut part = Part::of_run();
    for (there, steps) in [(false, away()), (true, arriving())] {
        for step in steps {
            let all = if there {
                crate::tasks::receive_vm::STEPS
            } else {
                crate::tasks::migrate_vm::away::STEPS
            };
            let crashes = [(FaultPoint::Before, false), (FaultPoint::After, false)];
            let refusal = (!is_past_commit(all, step)).then_some((FaultPoint::Before, true));
            for (point, refuses) in crashes.into_iter().chain(refusal) {
                if !part.has_next() {
                    continue;
                }
                let what = format!("there: {there}, {point:?} {step:?}, refused: {refuses}");
                let (mut two, before) = prepared().await;
                let fault = if refuses { Fault::Fail(refused()) } else { Fault::Crash };
                let (faults, done) = at(step, TaskState::Running, point, fault, 1);
                match there {
                    true => two.restart_east(Some(faults)).await,
                    false => two.restart_west(Some(faults)).await,
                }
                let (task, arrival) = two.begin().await;
                if refuses {
                    assert_eq!(two.west.ended(task).await.state, TaskState::Failed, "{what}");
                    assert_one(&two, &before, false, &what).await;
                    continue;
                }
                let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
                two.west.eventually(&what, crashed).await;
                if there {
                    two.west.plane.set(None);
                    two.restart_east(None).await;
                } else {
                    two.restart_west(None).await;
                }
                two.west.ends_well(task).await;
                two.east.ends_well(arrival).await;
                assert_one(&two, &before, true, &what).await;
            }
        }
    }
}

/// What a dry run says against it.
pub(super) async fn refused_for(two: &Two) -> Option<String> {
    let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
    let me = Caller::administrator("me");
    let planned = migrate::migrate(&two.services(), &me, "web", request, true).await;
    planned.map(drop).map_err(|problem| problem.detail).err()
}

/// What a dry run says of it, with its warnings.
pub(super) async fn planned(two: &Two) -> String {
    let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
    let me = Caller::administrator("me");
    match migrate::migrate(&two.services(), &me, "web", request, true).await.unwrap() {
        Outcome::Planned(plan) => [plan.steps, plan.warnings].concat().join("; "),
        Outcome::Done(task) => panic!("it is begun: {task:?}"),
    }
}

#[tokio::test]
async fn what_snapshots_keep_is_named_and_counted_in_the_room_there() {
    let (two, _) = prepared().await;
    let disks = u64::try_from(two.west.disks(two.vm).await.len()).unwrap();
    let kept = 2 * SNAPSHOT_ROOM * disks;
    let told = planned(&two).await;
    let named = format!("snapshots: 2 snapshots come with it, 1 with memory: {}", Size(kept));
    assert!(told.contains(&named) && told.contains("in all with what snapshots keep"), "{told}");
    let named = format!("and what 2 snapshots keep ({}),", Size(kept));
    assert!(told.contains(&named), "{told}");
    two.east.agent.set_free(kept - 1);
    let told = refused_for(&two).await.unwrap();
    assert!(told.contains(&format!("and {} are needed at least", Size(kept))), "{told}");
    two.east.agent.set_free(kept);
    assert_eq!(refused_for(&two).await, None);

    // A server of before counts nothing, and would refuse to be told.
    two.west.plane.lack_features(&[ARRIVALS_KEPT]);
    two.east.agent.set_free(1);
    let told = planned(&two).await;
    assert!(told.contains("is not counted in the room there: the other server"), "{told}");
}

#[tokio::test]
async fn what_cannot_go_along_and_who_cannot_take_it_is_named() {
    let (two, before) = prepared().await;
    assert_eq!(refused_for(&two).await, None);
    two.west.plane.lack_features(&[ARRIVING_SNAPSHOTS]);
    let told = refused_for(&two).await.unwrap();
    assert!(told.contains("takes no VMs with snapshots (arrivals-snapshots)"), "{told}");
    two.west.plane.lack_features(&[]);

    two.east.agent.lack_features(&[MIGRATE_APART_SNAPSHOTS]);
    two.east.agent.restart();
    let named = async || {
        let told = refused_for(&two).await?;
        told.contains("(job-migrate-apart-snapshots)").then_some(())
    };
    two.east.eventually("the other control plane sees its older agent", named).await;

    let clone = two.west.made("clone", "encrypted").await;
    let snapshot = &before[0].0;
    let link = Link {
        vm: two.vm,
        vm_name: "web".to_owned(),
        snapshot: snapshot.id,
        snapshot_name: snapshot.name.clone(),
    };
    let disk = two.west.disks(clone).await[0].id;
    let mut write = two.west.store.write().await.unwrap();
    links::insert(&mut write, disk, &link, None).await.unwrap();
    write.commit().await.unwrap();
    let told = refused_for(&two).await.unwrap();
    assert!(told.contains("linked clones stand on VM 'web': 'clone'"), "{told}");

    two.west.add_dump(two.vm, "first").await;
    let told = refused_for(&two).await.unwrap();
    assert!(told.contains("vmseal dump decrypt web first --to FILE"), "{told}");
}
