//! VMs that are cloned: one that is off, one that runs, each also to another datastore, and as a clone that is linked to a snapshot.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use vmseal_api::host::DiskRole;
use vmseal_api::id::{SnapshotId, TaskId};
use vmseal_api::model::SnapshotState;

use super::mirror::{one_of, second};
use super::snapshots::{on_host, rows, taken};
use super::*;
use crate::operation::{Copies, Temporary};
use crate::store::vms::Vm;
use crate::store::{disks, links, snapshots, vms};
use crate::tasks::temporary_snapshot::Purpose;

/// What is cloned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cloned {
    /// A VM that is off.
    Off,
    /// A VM that runs: a snapshot is taken, and dropped.
    Running,
    /// A VM that is off, to another datastore.
    OffElsewhere,
    /// A VM that runs, to another datastore.
    RunningElsewhere,
    /// A snapshot, on which the clone stands.
    Linked,
}

async fn origin(fixture: &Fixture) -> Vm {
    let mut read = fixture.store.read().await.unwrap();
    vms::find(&mut read, "origin").await.unwrap().unwrap()
}

/// The row of the snapshot that is taken of a VM that runs.
fn kept(of: &Vm, known: &[disks::Disk]) -> snapshots::Snapshot {
    let id = SnapshotId::new();
    snapshots::Snapshot {
        id,
        vm: of.id,
        name: Purpose::Clone.name(id),
        description: String::new(),
        parent: None,
        created: Timestamp::now(),
        state: SnapshotState::Taking,
        quiesced: None,
        current: false,
        memory: false,
        disks: known.iter().map(|disk| disk.id).collect(),
    }
}

impl Cloned {
    fn runs(self) -> bool {
        matches!(self, Self::Running | Self::RunningElsewhere)
    }

    fn goes_elsewhere(self) -> bool {
        matches!(self, Self::OffElsewhere | Self::RunningElsewhere)
    }

    pub(super) async fn before(self, fixture: &Fixture) {
        let origin = match self.runs() {
            true => fixture.running("origin").await,
            false => fixture.made("origin", "encrypted").await,
        };
        if self == Self::Linked {
            taken(fixture, origin, "base").await;
        }
    }

    fn temporary(self) -> Option<Temporary> {
        self.runs().then_some(Temporary { quiesce: true })
    }

    /// Begins to clone the VM `origin`, as a linked one of its last snapshot: the rows of the clone are there.
    pub(super) async fn begin(self, fixture: &Fixture) -> (VmId, TaskId) {
        let place = match self.goes_elsewhere() {
            true => Some(second(fixture).await),
            false => None,
        };
        let mut write = fixture.store.write().await.unwrap();
        let origin = vms::find(&mut write, "origin").await.unwrap().unwrap();
        let (id, lifecycle) = (VmId::new(), Lifecycle::Creating);
        let vm = Vm { id, name: "web".to_owned(), key: None, lifecycle, ..origin.clone() };
        vms::insert(&mut write, &vm).await.unwrap();
        let known = disks::of_vm(&mut write, origin.id).await.unwrap();
        let base = match self {
            Self::Off | Self::OffElsewhere => None,
            Self::Running | Self::RunningElsewhere => {
                let kept = kept(&origin, &known);
                snapshots::insert(&mut write, &kept).await.unwrap();
                Some(kept)
            }
            Self::Linked => {
                snapshots::of_vm(&mut write, origin.id).await.unwrap().into_iter().next_back()
            }
        };
        let (mut copies, mut linked) = (BTreeMap::new(), BTreeSet::new());
        for (position, from) in known.into_iter().enumerate() {
            let mut disk = disks::Disk { id: DiskId::new(), facts: None, ..from.clone() };
            if let Some(place) = &place {
                disk.datastore = place.spec_on(fixture.host).unwrap();
                disk.datastore_name.clone_from(&place.name);
            }
            disks::insert(&mut write, id, position, &disk).await.unwrap();
            copies.insert(disk.id, from.id);
            let stands = self == Self::Linked && disk.role == DiskRole::Data;
            if let Some(base) = base.as_ref().filter(|_| stands) {
                let (vm_name, snapshot_name) = (origin.name.clone(), base.name.clone());
                let link = links::Link { vm: origin.id, vm_name, snapshot: base.id, snapshot_name };
                links::insert(&mut write, disk.id, &link, Some(from.id)).await.unwrap();
                linked.insert(disk.id);
            }
        }
        write.commit().await.unwrap();
        let (snapshot, temporary) = (base.map(|base| base.id), self.temporary());
        let copies = Some(Copies { vm: origin.id, snapshot, temporary, disks: copies, linked });
        let operation = Operation::CreateVm { vm: id, cloud_init: None, copies };
        (id, fixture.begin(operation, "web").await)
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        let (disks, linked) = (BTreeMap::new(), BTreeSet::new());
        let snapshot = (self.runs() || self == Self::Linked).then(SnapshotId::new);
        let temporary = self.temporary();
        let copies = Some(Copies { vm: VmId::new(), snapshot, temporary, disks, linked });
        steps::of(&Operation::CreateVm { vm: VmId::new(), cloud_init: None, copies })
    }

    pub(super) fn is_past_commit(self, step: &str) -> bool {
        is_past_commit(self.steps(), step)
    }

    /// The VM that is cloned is as before, and no snapshot is left that was not there.
    async fn assert_origin(self, fixture: &Fixture, what: &str) {
        let origin = origin(fixture).await;
        let power = if self.runs() { Power::Running } else { Power::Off };
        fixture.assert_whole(origin.id, power, what).await;
        assert_on(fixture, origin.id, "local", what).await;
        let expected = usize::from(self == Self::Linked);
        assert_eq!(rows(fixture, origin.id).await.len(), expected, "{what}");
        assert_eq!(on_host(fixture, origin.id).await.len(), expected, "{what}");
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        fixture.assert_whole(vm, Power::Off, what).await;
        let place = if self.goes_elsewhere() { "second" } else { "local" };
        assert_on(fixture, vm, place, what).await;
        self.assert_origin(fixture, what).await;
        if self == Self::Linked {
            assert_linked(fixture, vm, what).await;
        }
    }

    /// Nothing is left of the clone.
    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        assert!(fixture.vm(vm).await.is_none(), "{what}: its row is left");
        assert!(fixture.disks(vm).await.is_empty(), "{what}: rows of disks are left");
        let origin = origin(fixture).await.id;
        assert_eq!(fixture.agent.registered(), [origin], "{what}: the host knows the clone");
        assert_eq!(fixture.agent.disks().len(), 2, "{what}: disks are left");
        self.assert_origin(fixture, what).await;
    }

    /// Past its commit step the clone is whole: an alarm says that the snapshot is left, and deleting that finishes it.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &mut Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        let says = ["VM 'web' is complete", "then delete the snapshot"];
        assert!(says.iter().all(|said| problem.detail.contains(said)), "{what}: {problem}");
        let alarm = "task-unfinished web".to_owned();
        assert!(fixture.alarms().await.contains(&alarm), "{what}");
        // The fault is still there.
        fixture.restart(|_| {}).await;
        let origin = origin(fixture).await.id;
        if let Some(left) = rows(fixture, origin).await.first() {
            let delete = Operation::DeleteSnapshot { vm: origin, snapshot: left.id };
            fixture.done(delete, "origin").await;
        }
        self.assert_done(fixture, vm, what).await;
    }
}

/// All disks are on this datastore, for the inventory and on the host.
async fn assert_on(fixture: &Fixture, vm: VmId, datastore: &str, what: &str) {
    let images = fixture.agent.disks();
    for disk in fixture.disks(vm).await {
        assert_eq!(disk.datastore_name, datastore, "{what}: {disk:?}");
        let image = &images[&disk.id];
        assert_eq!(image.datastore, disk.datastore.datastore, "{what}: {disk:?} {image:?}");
    }
}

/// The clone stands on the snapshot, which cannot be deleted, until its disks are of their own.
async fn assert_linked(fixture: &Fixture, vm: VmId, what: &str) {
    let (origin, base) = {
        let mut read = fixture.store.read().await.unwrap();
        let link = links::of_vm(&mut read, vm).await.unwrap().expect(what);
        let clones = links::clones_of(&mut read, link.vm, Some(link.snapshot)).await.unwrap();
        assert_eq!(clones, ["web"], "{what}");
        (link.vm, link.snapshot)
    };
    let delete = || Operation::DeleteSnapshot { vm: origin, snapshot: base };
    let refused = fixture.begin(delete(), "origin").await;
    assert_eq!(fixture.ended(refused).await.state, TaskState::Failed, "{what}");
    let task =
        fixture.begin(Operation::DeepRecryptVm { vm, in_place: false, disks: vec![] }, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
    let mut read = fixture.store.read().await.unwrap();
    assert_eq!(links::of_vm(&mut read, vm).await.unwrap(), None, "{what}");
    drop(read);
    let task = fixture.begin(delete(), "origin").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_is_off_or_runs_is_cloned_or_nothing_of_the_clone_is_left() {
    one_of(&[Cloned::Off, Cloned::Running, Cloned::Linked], Kind::Clone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_on_another_datastore_is_whole_or_nothing_of_it_is_left_there() {
    one_of(&[Cloned::OffElsewhere, Cloned::RunningElsewhere], Kind::Clone).await;
}

/// Fails the commit step permanently, and injects a fault into the undoing of every step before it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undoing_the_clone_of_a_vm_that_runs_survives_every_fault_at_every_step() {
    let kind = Kind::Clone(Cloned::Running);
    for step in kind.steps().into_iter().filter(|step| !kind.is_past_commit(step)) {
        for (point, fault) in [
            (FaultPoint::Before, Fault::Crash),
            (FaultPoint::After, Fault::Crash),
            (FaultPoint::After, Fault::Fail(silent())),
            (FaultPoint::After, Fault::Twice),
        ] {
            let what = format!("{fault:?} {point:?} undoing {step:?}");
            let crashes = matches!(fault, Fault::Crash);
            let (undoing, done) = at(step, TaskState::RollingBack, point, fault, 1);
            let (failing, _) =
                at("record", TaskState::Running, FaultPoint::After, Fault::Fail(refused()), 1);
            let both: Faults =
                Arc::new(move |step, state, point| match failing(step, state, point) {
                    Fault::None => undoing(step, state, point),
                    fault => fault,
                });
            let (fixture, vm, task) = carry_out(kind, both, &done, crashes).await;
            assert_eq!(fixture.task(task).await.state, TaskState::Failed, "{what}");
            kind.assert_undone(&fixture, vm, &what).await;
        }
    }
}

/// What an earlier task could not drop goes with the next clone.
#[tokio::test]
async fn what_an_earlier_clone_has_left_is_dropped() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("origin").await;
    let row = fixture.vm(vm).await.unwrap();
    let left = kept(&row, &fixture.disks(vm).await);
    let mut write = fixture.store.write().await.unwrap();
    snapshots::insert(&mut write, &left).await.unwrap();
    write.commit().await.unwrap();
    let (clone, task) = Cloned::Running.begin(&fixture).await;
    fixture.ends_well(task).await;
    Cloned::Running.assert_done(&fixture, clone, "the next clone").await;
}
