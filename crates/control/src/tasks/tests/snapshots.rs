//! Snapshots that are taken, reverted to and deleted.

use jiff::Timestamp;
use vmseal_api::host::Exposing;
use vmseal_api::id::SnapshotId;
use vmseal_api::model::SnapshotState;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, Outcome, disks, snapshots as service};
use crate::store::snapshots;

/// What is done with a snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Snapshot {
    /// Of a VM that runs.
    Take,
    /// To the first of two, of a VM that is off.
    Revert,
    /// The same of a VM that runs, and runs afterwards.
    RevertRunning,
    /// The first of two, of a VM that runs.
    Delete,
}

pub(super) async fn rows(fixture: &Fixture, vm: VmId) -> Vec<snapshots::Snapshot> {
    snapshots::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

/// A snapshot that is asked for: its row is there.
async fn reserve(fixture: &Fixture, vm: VmId, name: &str) -> SnapshotId {
    let disks = fixture.disks(vm).await.iter().map(|disk| disk.id).collect();
    let parent = rows(fixture, vm).await.into_iter().find(|it| it.current).map(|it| it.id);
    let snapshot = snapshots::Snapshot {
        memory: false,
        id: SnapshotId::new(),
        vm,
        name: name.to_owned(),
        description: String::new(),
        parent,
        created: Timestamp::now(),
        state: SnapshotState::Taking,
        quiesced: None,
        current: false,
        disks,
    };
    let mut write = fixture.store.write().await.unwrap();
    snapshots::insert(&mut write, &snapshot).await.unwrap();
    write.commit().await.unwrap();
    snapshot.id
}

/// Takes a snapshot, with no faults.
pub(super) async fn taken(fixture: &Fixture, vm: VmId, name: &str) -> SnapshotId {
    let snapshot = reserve(fixture, vm, name).await;
    let operation = Operation::TakeSnapshot { vm, snapshot, quiesce: true };
    fixture.done(operation, "web").await;
    snapshot
}

/// The snapshots that the host has of all disks of a VM.
pub(super) async fn on_host(fixture: &Fixture, vm: VmId) -> Vec<SnapshotId> {
    let mut all = fixture.disks(vm).await.into_iter().map(|it| fixture.agent.snapshots(it.id));
    let first = all.next().unwrap();
    assert!(all.all(|other| other == first), "the disks have different snapshots");
    first
}

/// The names of a VM's snapshots, and the current one.
async fn names(fixture: &Fixture, vm: VmId) -> (Vec<String>, Option<String>) {
    let rows = rows(fixture, vm).await;
    let current = rows.iter().find(|row| row.current).map(|row| row.name.clone());
    (rows.into_iter().map(|row| row.name).collect(), current)
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

impl Snapshot {
    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let vm = match self {
            Self::Revert => fixture.made("web", "encrypted").await,
            Self::Take | Self::RevertRunning | Self::Delete => fixture.running("web").await,
        };
        if self != Self::Take {
            taken(fixture, vm, "first").await;
            taken(fixture, vm, "second").await;
        }
        vm
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        if self == Self::Take {
            let snapshot = reserve(fixture, vm, "first").await;
            return Operation::TakeSnapshot { vm, snapshot, quiesce: true };
        }
        let rows = rows(fixture, vm).await;
        let snapshot = rows.iter().find(|row| row.name == "first").unwrap().id;
        match self {
            Self::Revert => Operation::RevertSnapshot { vm, snapshot, running: false },
            Self::RevertRunning => Operation::RevertSnapshot { vm, snapshot, running: true },
            _ => Operation::DeleteSnapshot { vm, snapshot },
        }
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        let (vm, snapshot) = (VmId::new(), SnapshotId::new());
        steps::of(&match self {
            Self::Take => Operation::TakeSnapshot { vm, snapshot, quiesce: true },
            Self::Revert => Operation::RevertSnapshot { vm, snapshot, running: false },
            Self::RevertRunning => Operation::RevertSnapshot { vm, snapshot, running: true },
            Self::Delete => Operation::DeleteSnapshot { vm, snapshot },
        })
    }

    pub(super) fn is_past_commit(self, step: &str) -> bool {
        is_past_commit(self.steps(), step)
    }

    fn power(self) -> Power {
        if self == Self::Revert { Power::Off } else { Power::Running }
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        fixture.assert_whole(vm, self.power(), what).await;
        let (expected, current): (&[&str], _) = match self {
            Self::Take => (&["first"], "first"),
            Self::Revert | Self::RevertRunning => (&["first", "second"], "first"),
            Self::Delete => (&["second"], "second"),
        };
        let (known, now) = names(fixture, vm).await;
        assert_eq!((known, now.as_deref()), (owned(expected), Some(current)), "{what}");
        assert_eq!(on_host(fixture, vm).await.len(), expected.len(), "{what}");
        let rows = rows(fixture, vm).await;
        assert!(rows.iter().all(|row| row.state == SnapshotState::Ready), "{what}: {rows:?}");
        if self == Self::Delete {
            assert_eq!(rows[0].parent, None, "{what}: its parent is gone");
        }
    }

    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        // A power cut cannot be undone; the server must show the real state.
        let was_cut = self == Self::RevertRunning && !fixture.agent.running().contains(&vm);
        fixture.assert_whole(vm, if was_cut { Power::Off } else { self.power() }, what).await;
        let (expected, current): (&[&str], _) = match self {
            Self::Take => (&[], None),
            Self::Revert | Self::RevertRunning | Self::Delete => {
                (&["first", "second"], Some("second"))
            }
        };
        let (known, now) = names(fixture, vm).await;
        assert_eq!((known, now.as_deref()), (owned(expected), current), "{what}");
        assert_eq!(on_host(fixture, vm).await.len(), expected.len(), "{what}");
    }

    /// Past its commit step: an alarm says so, and the same again finishes it.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &mut Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        assert!(problem.detail.contains("again once the cause is fixed"), "{what}: {problem}");
        if self == Self::RevertRunning {
            // One that is suspended then is not reverted again.
            assert!(problem.detail.contains("vmseal vm resume web"), "{what}: {problem}");
        }
        let alarm = "task-unfinished web".to_owned();
        assert!(fixture.alarms().await.contains(&alarm), "{what}");
        // The fault is still there.
        fixture.restart(|_| {}).await;
        let known = names(fixture, vm).await.0;
        if known.contains(&"first".to_owned()) {
            let operation = self.operation(fixture, vm).await;
            let task = fixture.begin(operation, "web").await;
            assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
        }
        self.assert_done(fixture, vm, what).await;
    }
}

#[tokio::test]
async fn a_snapshot_is_taken_or_nothing_of_it_is_left() {
    matrix(Kind::Snapshot(Snapshot::Take)).await;
}

#[tokio::test]
async fn a_revert_is_done_or_nothing_has_changed() {
    matrix(Kind::Snapshot(Snapshot::Revert)).await;
}

#[tokio::test]
async fn a_vm_that_runs_is_reverted_and_runs_again() {
    matrix(Kind::Snapshot(Snapshot::RevertRunning)).await;
}

#[tokio::test]
async fn a_snapshot_is_deleted_or_stays() {
    matrix(Kind::Snapshot(Snapshot::Delete)).await;
}

/// What is linked to the second snapshot stands on what the first one keeps, too, as only the host knows.
#[tokio::test]
async fn a_snapshot_before_one_that_clones_stand_on_is_not_deleted_and_no_task_begins() {
    let fixture = Fixture::new().await;
    let origin = fixture.made("origin", "encrypted").await;
    for name in ["first", "second"] {
        taken(&fixture, origin, name).await;
    }
    let (clone, made) = clones::Cloned::Linked.begin(&fixture).await;
    fixture.ends_well(made).await;
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    for (name, dry_run) in [("first", true), ("first", false), ("second", false)] {
        let refused = service::delete(&services, &me, "origin", name, dry_run).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{name}: {refused}");
        let said = [&format!("snapshot '{name}' of VM 'origin'"), "linked clones stand on"];
        assert!(said.iter().all(|said| refused.detail.contains(said)), "{name}: {refused}");
    }
    assert_eq!(names(&fixture, origin).await.0, ["first", "second"]);
    fixture
        .done(Operation::DeepRecryptVm { vm: clone, in_place: false, disks: vec![] }, "web")
        .await;
    let begun = service::delete(&services, &me, "origin", "first", false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    assert_eq!(names(&fixture, origin).await.0, ["second"]);
}

/// What is exposed of a snapshot stays while it is; and only what is of one instant is exposed as ciphertext.
#[tokio::test]
async fn a_snapshot_that_is_exposed_is_not_deleted_and_stays_as_it_is() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let first = taken(&fixture, vm, "first").await;
    let disk = fixture.disks(vm).await[0].name.clone();
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    let refused = disks::expose(&services, &me, "web", &disk, Exposing::HoldSealed).await;
    let refused = refused.err().unwrap();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    assert!(refused.detail.contains("vmseal snapshot create web NAME"), "{refused}");
    let none = Exposing::HoldKept { snapshot: "none", sealed: true };
    let absent = disks::expose(&services, &me, "web", &disk, none).await.err().unwrap();
    assert_eq!(absent.code, ErrorCode::NotFound, "{absent}");
    assert!(fixture.events("disk.exposed").await.is_empty(), "nothing is exposed yet");

    for (sealed, told) in [(false, "IN THE CLEAR"), (true, "still under the VM's key")] {
        let what = Exposing::HoldKept { snapshot: "first", sealed };
        let held = disks::expose(&services, &me, "web", &disk, what).await.unwrap();
        let event = fixture.events("disk.exposed").await.pop().unwrap();
        assert!(event.detail.contains("at snapshot 'first'"), "{event:?}");
        assert!(event.detail.contains("read-only") && event.detail.ends_with(told), "{event:?}");
        for dry_run in [true, false] {
            let refused = service::delete(&services, &me, "web", "first", dry_run).await;
            let refused = refused.unwrap_err();
            assert_eq!(refused.code, ErrorCode::InUse, "{refused}");
            assert!(refused.detail.contains("vmseal disk expose"), "{refused}");
        }
        let task = fixture.begin(Operation::DeleteSnapshot { vm, snapshot: first }, "web").await;
        assert_eq!(fixture.ended(task).await.problem.unwrap().code, ErrorCode::InUse);
        assert_eq!(rows(&fixture, vm).await[0].state, SnapshotState::Ready, "it is marked");
        drop(held);
        fixture
            .eventually("it is free", async || {
                service::delete(&services, &me, "web", "first", true).await.ok()
            })
            .await;
    }
    fixture.made("open", "plain").await;
    let plain = disks::expose(&services, &me, "open", &disk, Exposing::HoldSealed).await;
    let plain = plain.err().unwrap();
    assert_eq!(plain.field.as_deref(), Some("sealed"), "{plain}");
}
