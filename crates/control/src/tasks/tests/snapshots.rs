//! Snapshots that are taken, reverted to and deleted.

use jiff::Timestamp;
use vmseal_api::host::version::PAUSED_SNAPSHOTS;
use vmseal_api::host::{Exposing, GuestControl};
use vmseal_api::id::SnapshotId;
use vmseal_api::model::{self, SnapshotState};
use vmseal_api::request::{ExportDisk, RevertSnapshot, TakeSnapshot};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, Outcome, disks, guests, snapshots as service};
use crate::store::{memory_generations, snapshots};

/// What is done with a snapshot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Snapshot {
    /// Of a VM that runs.
    Take,
    /// With its memory, of a VM that is suspended.
    TakeSuspended,
    /// To the first of two, of a VM that is off.
    Revert,
    /// The same of a VM that runs, and runs afterwards.
    RevertRunning,
    /// The same of a VM that is suspended, and is off afterwards.
    RevertSuspended,
    /// The same of a VM that is suspended, to a snapshot with memory.
    RevertAsleep,
    /// The first of two, of a VM that runs.
    Delete,
    /// The same of a VM that is suspended.
    DeleteSuspended,
}

pub(super) async fn rows(fixture: &Fixture, vm: VmId) -> Vec<snapshots::Snapshot> {
    snapshots::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

/// A snapshot that is asked for: its row is there.
async fn reserve(fixture: &Fixture, vm: VmId, name: &str, memory: bool) -> SnapshotId {
    let disks = fixture.disks(vm).await.iter().map(|disk| disk.id).collect();
    insert(fixture, vm, (name, memory), (SnapshotState::Taking, disks)).await
}

/// A snapshot of the disks of its guest that the inventory has, and no host.
pub(super) async fn noted(fixture: &Fixture, vm: VmId, name: &str, memory: bool) {
    let disks = fixture.disks(vm).await;
    let disks = disks.iter().filter(|disk| disk.role.is_data()).map(|disk| disk.id).collect();
    insert(fixture, vm, (name, memory), (SnapshotState::Ready, disks)).await;
}

async fn insert(
    fixture: &Fixture,
    vm: VmId,
    (name, memory): (&str, bool),
    (state, disks): (SnapshotState, Vec<DiskId>),
) -> SnapshotId {
    let parent = rows(fixture, vm).await.into_iter().find(|it| it.current).map(|it| it.id);
    let snapshot = snapshots::Snapshot {
        memory,
        id: SnapshotId::new(),
        vm,
        name: name.to_owned(),
        description: String::new(),
        parent,
        created: Timestamp::now(),
        state,
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
    taken_with(fixture, vm, name, false).await
}

/// The same; with the memory of its guest, or without.
pub(super) async fn taken_with(
    fixture: &Fixture,
    vm: VmId,
    name: &str,
    memory: bool,
) -> SnapshotId {
    let snapshot = reserve(fixture, vm, name, memory).await;
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
    /// Whether the VM is suspended before.
    fn is_of_suspended(self) -> bool {
        matches!(
            self,
            Self::TakeSuspended
                | Self::RevertSuspended
                | Self::RevertAsleep
                | Self::DeleteSuspended
        )
    }

    fn takes(self) -> bool {
        matches!(self, Self::Take | Self::TakeSuspended)
    }

    fn deletes(self) -> bool {
        matches!(self, Self::Delete | Self::DeleteSuspended)
    }

    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let vm = match self {
            Self::Revert => fixture.made("web", "encrypted").await,
            _ => fixture.running("web").await,
        };
        if !self.takes() {
            taken_with(fixture, vm, "first", self == Self::RevertAsleep).await;
            taken(fixture, vm, "second").await;
        }
        if self.is_of_suspended() {
            fixture.done(Operation::SuspendVm { vm }, "web").await;
        }
        vm
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        if self.takes() {
            let memory = self == Self::TakeSuspended;
            return self.of(vm, reserve(fixture, vm, "first", memory).await);
        }
        let rows = rows(fixture, vm).await;
        self.of(vm, rows.iter().find(|row| row.name == "first").unwrap().id)
    }

    fn of(self, vm: VmId, snapshot: SnapshotId) -> Operation {
        let revert = |running, discard_memory| Operation::RevertSnapshot {
            vm,
            snapshot,
            running,
            discard_memory,
        };
        match self {
            Self::Take | Self::TakeSuspended => {
                Operation::TakeSnapshot { vm, snapshot, quiesce: true }
            }
            Self::Revert => revert(false, false),
            Self::RevertRunning => revert(true, false),
            Self::RevertSuspended | Self::RevertAsleep => revert(false, true),
            Self::Delete | Self::DeleteSuspended => Operation::DeleteSnapshot { vm, snapshot },
        }
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        steps::of(&self.of(VmId::new(), SnapshotId::new()))
    }

    pub(super) fn is_past_commit(self, step: &str) -> bool {
        is_past_commit(self.steps(), step)
    }

    /// The power of the VM before.
    fn power_before(self) -> Power {
        if self == Self::Revert {
            return Power::Off;
        }
        if self.is_of_suspended() { Power::Suspended } else { Power::Running }
    }

    /// The power of the VM afterwards.
    fn power(self) -> Power {
        if self == Self::RevertSuspended { Power::Off } else { self.power_before() }
    }

    /// A VM that is suspended has the memory that is expected, and which one that is.
    async fn assert_memory(self, fixture: &Fixture, vm: VmId, is_done: bool, what: &str) {
        let first = rows(fixture, vm).await.into_iter().find(|row| row.name == "first");
        let mut read = fixture.store.read().await.unwrap();
        let expected = memory_generations::expected(&mut read, vm).await.unwrap();
        let kept = match first {
            Some(first) => memory_generations::of_snapshot(&mut read, first.id).await.unwrap(),
            None => None,
        };
        drop(read);
        let saved = fixture.agent.memory_generation(vm);
        if self == Self::RevertSuspended && is_done {
            assert_eq!(saved, None, "{what}: its memory is there");
            return;
        }
        assert!(saved.is_some() && saved == expected, "{what}: {saved:?}, {expected:?}");
        let is_the_snapshots = match self {
            Self::RevertAsleep | Self::TakeSuspended => is_done,
            _ => false,
        };
        assert_eq!(saved == kept, is_the_snapshots, "{what}: {saved:?}, {kept:?}");
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        fixture.assert_whole(vm, self.power(), what).await;
        if self.is_of_suspended() {
            self.assert_memory(fixture, vm, true, what).await;
        }
        let (expected, current): (&[&str], _) = match (self.takes(), self.deletes()) {
            (true, _) => (&["first"], "first"),
            (_, true) => (&["second"], "second"),
            _ => (&["first", "second"], "first"),
        };
        let (known, now) = names(fixture, vm).await;
        assert_eq!((known, now.as_deref()), (owned(expected), Some(current)), "{what}");
        assert_eq!(on_host(fixture, vm).await.len(), expected.len(), "{what}");
        let rows = rows(fixture, vm).await;
        assert!(rows.iter().all(|row| row.state == SnapshotState::Ready), "{what}: {rows:?}");
        if self.deletes() {
            assert_eq!(rows[0].parent, None, "{what}: its parent is gone");
        }
    }

    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        // A power cut cannot be undone; the server must show the real state.
        let was_cut = self == Self::RevertRunning && !fixture.agent.running().contains(&vm);
        let power = if was_cut { Power::Off } else { self.power_before() };
        fixture.assert_whole(vm, power, what).await;
        if self.is_of_suspended() {
            self.assert_memory(fixture, vm, false, what).await;
        }
        let (expected, current): (&[&str], _) =
            if self.takes() { (&[], None) } else { (&["first", "second"], Some("second")) };
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

#[tokio::test]
async fn a_suspended_vm_and_its_memory_are_kept_by_a_snapshot_or_nothing_of_it_is_left() {
    matrix(Kind::Snapshot(Snapshot::TakeSuspended)).await;
}

#[tokio::test]
async fn a_suspended_vm_is_reverted_and_off_or_as_it_was() {
    matrix(Kind::Snapshot(Snapshot::RevertSuspended)).await;
}

#[tokio::test]
async fn a_suspended_vm_has_the_memory_of_a_snapshot_or_its_own() {
    matrix(Kind::Snapshot(Snapshot::RevertAsleep)).await;
}

#[tokio::test]
async fn a_snapshot_of_a_suspended_vm_is_deleted_or_stays() {
    matrix(Kind::Snapshot(Snapshot::DeleteSuspended)).await;
}

#[tokio::test]
async fn the_memory_of_a_suspended_vm_is_lost_on_an_operators_word_alone() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    let revert = |to: &'static str, running, discard_memory, dry_run| {
        let request = RevertSnapshot { running, discard_memory };
        service::revert(&services, &me, "web", to, request, dry_run)
    };
    let is_done = async |begun: Outcome<model::Task>| {
        let Outcome::Done(task) = begun else { panic!("nothing was begun") };
        fixture.ends_well(task.id).await;
    };
    taken(&fixture, vm, "before").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    for (running, dry_run) in [(false, true), (false, false), (true, true), (true, false)] {
        let refused = revert("before", running, false, dry_run).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        let said = ["revert web before --discard-memory", "snapshot create web --memory"];
        assert!(said.iter().all(|said| refused.detail.contains(said)), "{refused}");
    }
    let Outcome::Planned(plan) = revert("before", false, true, true).await.unwrap() else {
        panic!("a dry run has begun something")
    };
    assert!(plan.warnings.iter().any(|it| it.contains("will be lost")), "{:?}", plan.warnings);
    fixture.assert_whole(vm, Power::Suspended, "a dry run").await;
    // A snapshot keeps it: nothing is lost.
    let name = Some("asleep".to_owned());
    let request = TakeSnapshot { name, memory: true, ..TakeSnapshot::default() };
    is_done(service::take(&services, &me, "web", request, false).await.unwrap()).await;
    let Outcome::Planned(plan) = revert("before", false, false, true).await.unwrap() else {
        panic!("a dry run has begun something")
    };
    assert!(plan.warnings.is_empty(), "{:?}", plan.warnings);
    is_done(revert("before", false, false, false).await.unwrap()).await;
    fixture.assert_whole(vm, Power::Off, "reverted").await;
    for _ in 0..2 {
        is_done(revert("asleep", false, false, false).await.unwrap()).await;
        fixture.assert_whole(vm, Power::Suspended, "reverted to what was kept").await;
    }
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let refused = revert("asleep", true, false, false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "another memory is lost: {refused}");
    is_done(revert("asleep", true, true, false).await.unwrap()).await;
    fixture.assert_whole(vm, Power::Running, "it goes on").await;
    assert_eq!(fixture.events("vm.memory-discarded").await.len(), 3);
}

/// It stays paused when it is kept, and is paused again when it goes on from that. Its host saves it once before it has run.
#[tokio::test]
async fn a_paused_vm_is_kept_with_its_memory_and_is_paused_again_after_a_revert() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    let control = |what| guests::control(&services, &me, "web", what, false);
    control(GuestControl::Pause).await.unwrap();
    let take = |name: &str, dry_run| {
        let name = Some(name.to_owned());
        let request = TakeSnapshot { name, memory: true, ..TakeSnapshot::default() };
        service::take(&services, &me, "web", request, dry_run)
    };
    let begun = async |name: &str| {
        let Ok(Outcome::Done(task)) = take(name, false).await else { panic!("nothing was begun") };
        fixture.ended(task.id).await
    };
    let planned = take("still", true).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
    let taken = begun("still").await;
    assert_eq!(taken.state, TaskState::Done, "{:?}", taken.problem);
    fixture.assert_whole(vm, Power::Paused, "kept").await;
    let refused = begun("again").await;
    assert_eq!(refused.state, TaskState::Failed);
    let problem = refused.problem.unwrap();
    assert!(problem.detail.contains("vmseal vm unpause web"), "{problem}");
    assert_eq!(names(&fixture, vm).await.0, ["still"]);
    assert_eq!(on_host(&fixture, vm).await.len(), 1);
    fixture.assert_whole(vm, Power::Paused, "not kept again").await;
    control(GuestControl::Unpause).await.unwrap();

    let snapshot = rows(&fixture, vm).await[0].id;
    let revert = Operation::RevertSnapshot { vm, snapshot, running: true, discard_memory: false };
    fixture.done(revert, "web").await;
    fixture.assert_whole(vm, Power::Paused, "reverted").await;
    fixture.restart_agent_without(&[PAUSED_SNAPSHOTS]).await;
    let refused = take("other", true).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
    assert!(refused.detail.contains("with memory of VMs that are paused"), "{refused}");
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

/// Nothing writes to the disks of a suspended VM, and it cannot be stopped: the refusal of an export says what can be done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_of_a_suspended_vm_is_exported_from_a_snapshot() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    let disk = fixture.disks(vm).await[0].name.clone();
    let export = |snapshot: Option<&str>| {
        let request = ExportDisk {
            to: OUT.into(),
            format: ExportFormat::Raw,
            plaintext: true,
            passphrase: None,
            snapshot: snapshot.map(str::to_owned),
            rate: None,
        };
        disks::export(&services, &me, "web", &disk, request, true)
    };
    let refused = export(None).await.unwrap_err();
    assert!(refused.detail.contains("or stop it first"), "{refused}");
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let refused = export(None).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    assert!(!refused.detail.contains("written to"), "{refused}");
    for said in ["vmseal snapshot create web NAME", "vmseal vm resume web", "vmseal vm stop web"] {
        assert!(refused.detail.contains(said), "{refused}");
    }
    taken(&fixture, vm, "asleep").await;
    let planned = export(Some("asleep")).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
}
