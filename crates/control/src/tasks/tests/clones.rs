//! VMs that are cloned: one that is off, one that runs, each also to another datastore and for another host, one that is suspended, and as a
//! clone that is linked to a snapshot.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::host::DiskRole;
use vmseal_api::id::{DatastoreId, HostId, SnapshotId, TaskId};
use vmseal_api::model::SnapshotState;

use super::mirror::{one_of, second};
use super::snapshots::{on_host, rows, taken};
use super::*;
use crate::operation::{Copies, Elsewhere, SentDisks, Temporary};
use crate::store::vms::Vm;
use crate::store::{datastores, disks, hosts, links, snapshots, vms};
use crate::tasks::pacing::PaceChange;
use crate::tasks::temporary_snapshot::Purpose;

/// The name of the other host.
const OTHER_HOST: &str = "there";

/// The name of that host's own datastore.
const FAR: &str = "far";

/// What is cloned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Cloned {
    /// A VM that is off.
    Off,
    /// A VM that runs: a snapshot is taken, and dropped.
    Running,
    /// A VM that is suspended: a snapshot is taken, and dropped.
    Suspended,
    /// A VM that is off, to another datastore.
    OffElsewhere,
    /// A VM that runs, to another datastore.
    RunningElsewhere,
    /// A snapshot, on which the clone stands.
    Linked,
    /// A VM that is off, for another host, which has its datastore.
    OffHandedOver,
    /// A VM that runs, for another host, which has its datastore.
    RunningHandedOver,
    /// A VM that is off, for another host, to which the disks are sent.
    OffSent,
    /// A VM that runs, for another host, to which the disks are sent.
    RunningSent,
}

async fn origin(fixture: &Fixture) -> Vm {
    let mut read = fixture.store.read().await.unwrap();
    vms::find(&mut read, "origin").await.unwrap().unwrap()
}

/// The row of the snapshot that is taken of a VM that is not off.
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
        matches!(
            self,
            Self::Running | Self::RunningElsewhere | Self::RunningHandedOver | Self::RunningSent
        )
    }

    fn takes_snapshot(self) -> bool {
        self.runs() || self == Self::Suspended
    }

    fn is_sent(self) -> bool {
        matches!(self, Self::OffSent | Self::RunningSent)
    }

    fn is_for_other_host(self) -> bool {
        self.is_sent() || matches!(self, Self::OffHandedOver | Self::RunningHandedOver)
    }

    /// The other host that it is for, as the task has it.
    fn elsewhere_on(self, from: HostId, to: HostId, far: DatastoreId) -> Option<Elsewhere> {
        let sent = self.is_sent().then_some(SentDisks { datastore: far, encrypted: true });
        self.is_for_other_host().then_some(Elsewhere { from, to, sent })
    }

    async fn elsewhere(self, fixture: &Fixture) -> Option<Elsewhere> {
        if !self.is_for_other_host() {
            return None;
        }
        let mut read = fixture.store.read().await.unwrap();
        let to = hosts::find(&mut read, OTHER_HOST).await.unwrap().unwrap().id;
        let far = datastores::find(&mut read, FAR).await.unwrap();
        self.elsewhere_on(fixture.host, to, far.map_or_else(DatastoreId::new, |far| far.id))
    }

    fn goes_elsewhere(self) -> bool {
        matches!(self, Self::OffElsewhere | Self::RunningElsewhere)
    }

    pub(super) async fn before(self, fixture: &Fixture) {
        if self.is_for_other_host() {
            let (other, _) = fixture.add_host(OTHER_HOST).await;
            if self.is_sent() {
                fixture.add_datastore(other, OTHER_HOST, FAR).await;
            } else {
                fixture.share_datastore(other, OTHER_HOST).await;
            }
        }
        let origin = match self.takes_snapshot() {
            true => fixture.running("origin").await,
            false => fixture.made("origin", "encrypted").await,
        };
        if self == Self::Suspended {
            fixture.done(Operation::SuspendVm { vm: origin }, "origin").await;
        }
        if self == Self::Linked {
            taken(fixture, origin, "base").await;
        }
    }

    fn temporary(self) -> Option<Temporary> {
        let suspended = self == Self::Suspended;
        self.takes_snapshot().then_some(Temporary { quiesce: true, suspended })
    }

    /// Begins to clone the VM `origin`, as a linked one of its last snapshot: the rows of the clone are there.
    pub(super) async fn begin(self, fixture: &Fixture) -> (VmId, TaskId) {
        let place = match self.goes_elsewhere() {
            true => Some(second(fixture).await),
            false => None,
        };
        let elsewhere = self.elsewhere(fixture).await;
        let mut write = fixture.store.write().await.unwrap();
        let origin = vms::find(&mut write, "origin").await.unwrap().unwrap();
        let (id, lifecycle) = (VmId::new(), Lifecycle::Creating);
        let vm = Vm { id, name: "web".to_owned(), key: None, lifecycle, ..origin.clone() };
        vms::insert(&mut write, &vm).await.unwrap();
        let known = disks::of_vm(&mut write, origin.id).await.unwrap();
        let base = match self {
            Self::Off | Self::OffElsewhere | Self::OffHandedOver | Self::OffSent => None,
            Self::Running
            | Self::Suspended
            | Self::RunningElsewhere
            | Self::RunningHandedOver
            | Self::RunningSent => {
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
        let (vm, disks) = (origin.id, copies);
        let copies = Some(Copies { vm, snapshot, temporary, disks, linked, elsewhere });
        let operation = Operation::CreateVm { vm: id, cloud_init: None, copies };
        (id, fixture.begin(operation, "web").await)
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        let (disks, linked) = (BTreeMap::new(), BTreeSet::new());
        let snapshot = (self.takes_snapshot() || self == Self::Linked).then(SnapshotId::new);
        let temporary = self.temporary();
        let elsewhere = self.elsewhere_on(HostId::new(), HostId::new(), DatastoreId::new());
        let vm = VmId::new();
        let copies = Some(Copies { vm, snapshot, temporary, disks, linked, elsewhere });
        steps::of(&Operation::CreateVm { vm: VmId::new(), cloud_init: None, copies })
    }

    /// From the commit step on, if the disks are sent: that is done until the other host answers.
    pub(super) fn is_past_commit(self, step: &str) -> bool {
        (self.is_sent() && step == "switch") || is_past_commit(self.steps(), step)
    }

    /// The VM that is cloned is as before, and no snapshot is left that was not there.
    async fn assert_origin(self, fixture: &Fixture, what: &str) {
        let origin = origin(fixture).await;
        let power = match self {
            Self::Suspended => Power::Suspended,
            _ if self.runs() => Power::Running,
            _ => Power::Off,
        };
        fixture.assert_whole(origin.id, power, what).await;
        assert_on(fixture, origin.id, "local", what).await;
        let expected = usize::from(self == Self::Linked);
        assert_eq!(rows(fixture, origin.id).await.len(), expected, "{what}");
        assert_eq!(on_host(fixture, origin.id).await.len(), expected, "{what}");
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        if self.is_for_other_host() {
            self.assert_there(fixture, vm, what).await;
            return self.assert_origin(fixture, what).await;
        }
        fixture.assert_whole(vm, Power::Off, what).await;
        let place = if self.goes_elsewhere() { "second" } else { "local" };
        assert_on(fixture, vm, place, what).await;
        self.assert_origin(fixture, what).await;
        if self == Self::Linked {
            assert_linked(fixture, vm, what).await;
        }
    }

    /// The other host alone has it, with its key and its disks, and can start it.
    async fn assert_there(self, fixture: &Fixture, vm: VmId, what: &str) {
        let (there, row) = (fixture.agent_of(OTHER_HOST), fixture.vm(vm).await.expect(what));
        assert_eq!(
            (row.lifecycle, row.host_name.as_str()),
            (Lifecycle::Ready, OTHER_HOST),
            "{what}"
        );
        let alone = async || {
            let only = there.keys_held().contains(&vm) && !fixture.agent.registered().contains(&vm);
            only.then_some(())
        };
        fixture.eventually("the other host alone knows it and has its key", alone).await;
        let (disks, place) = (fixture.disks(vm).await, if self.is_sent() { FAR } else { "local" });
        assert_eq!(disks.len(), 2, "{what}");
        for disk in &disks {
            assert_eq!(disk.datastore_name, place, "{what}: {disk:?}");
            let image = &there.disks()[&disk.id];
            assert_eq!(image.datastore, disk.datastore.datastore, "{what}: {disk:?} {image:?}");
            assert_eq!(Some(&image.facts), disk.facts.as_ref(), "{what}: {disk:?} {image:?}");
        }
        if self.is_sent() {
            let gone = async || has_nothing_of(&fixture.agent, vm).then_some(());
            fixture.eventually("what was sent is removed where it was made", gone).await;
        }
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        assert!(there.runs(vm) && !fixture.agent.runs(vm), "{what}: where it runs");
        fixture.done(Operation::StopVm { vm, force: true, timeout_seconds: 1 }, "web").await;
    }

    /// Nothing is left of the clone.
    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        assert!(fixture.vm(vm).await.is_none(), "{what}: its row is left");
        assert!(fixture.disks(vm).await.is_empty(), "{what}: rows of disks are left");
        let origin = origin(fixture).await.id;
        assert_eq!(fixture.agent.registered(), [origin], "{what}: the host knows the clone");
        assert_eq!(fixture.agent.disks().len(), 2, "{what}: disks are left");
        if self.is_for_other_host() {
            let there = fixture.agent_of(OTHER_HOST);
            let forgotten = async || there.registered().is_empty().then_some(());
            fixture.eventually("the other host has forgotten it", forgotten).await;
            // Of disks on a datastore that both have, each simulated host has a record of its own.
            let gone = async || (!self.is_sent() || there.disks().is_empty()).then_some(());
            fixture.eventually("no copy is left", gone).await;
        }
        self.assert_origin(fixture, what).await;
    }

    /// Past its commit step the clone is whole: an alarm says what may be left, and deleting a snapshot that is left finishes it.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &mut Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        let mut says = vec!["VM 'web' is complete"];
        if problem.detail.contains("from the host that made it failed") {
            assert!(self.is_sent(), "{what}: {problem}");
            says.extend(["vmseal vm delete web", "vmseal datastore scan"]);
            says.extend(self.takes_snapshot().then_some("which it was copied from, is left"));
        } else if problem.detail.contains("could not be undone any more") {
            says.push("vmseal vm delete web");
            assert!(self.is_sent(), "{what}: {problem}");
            assert!(has_nothing_of(&fixture.agent, vm), "{what}: {problem}");
        } else {
            // Only the snapshot is left: what was sent is removed before that.
            says.push("then delete the snapshot");
            assert!(has_nothing_of(&fixture.agent, vm) || !self.is_sent(), "{what}: {problem}");
        }
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

/// Whether a host has no file of a VM.
fn has_nothing_of(agent: &SimulatedHost, vm: VmId) -> bool {
    agent.disks().values().all(|disk| disk.vm != vm)
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
async fn a_vm_that_is_off_runs_or_is_suspended_is_cloned_or_nothing_of_the_clone_is_left() {
    let those = [Cloned::Off, Cloned::Running, Cloned::Suspended, Cloned::Linked];
    one_of(&those, Kind::Clone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_on_another_datastore_is_whole_or_nothing_of_it_is_left_there() {
    one_of(&[Cloned::OffElsewhere, Cloned::RunningElsewhere], Kind::Clone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_for_a_host_with_the_datastore_is_whole_there_or_nothing_of_it_is_left() {
    one_of(&[Cloned::OffHandedOver, Cloned::RunningHandedOver], Kind::Clone).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clone_that_is_sent_to_a_host_is_whole_there_or_nothing_of_it_is_left() {
    one_of(&[Cloned::OffSent, Cloned::RunningSent], Kind::Clone).await;
}

/// Either agent ends, or does not answer, while it is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_that_end_leave_a_clone_at_the_other_host_or_nothing_of_it() {
    let of = Cloned::OffSent;
    for (is_source, call, nth) in [
        // The first job of the source makes the disks.
        (true, Call::PutJob, 2),
        (false, Call::PutJob, 1),
        (false, Call::CommitJob, 1),
        (false, Call::RegisterVm, 1),
        (true, Call::CommitJob, 1),
        (true, Call::DeleteDisk, 1),
        (true, Call::UnregisterVm, 1),
    ] {
        for fault in
            [HostFault::LoseRequest, HostFault::LoseAnswer, HostFault::Crash, HostFault::CrashAfter]
        {
            let what = format!("source {is_source} {call:?} {fault:?}");
            let fixture = Fixture::new().await;
            of.before(&fixture).await;
            let there = fixture.agent_of(OTHER_HOST);
            let agent = if is_source { fixture.agent.clone() } else { there };
            // What it had received was not kept yet, and is lost with it.
            let is_lost = (is_source, call, fault) == (false, Call::CommitJob, HostFault::Crash);
            agent.inject(call, nth, fault);
            let (vm, task) = of.begin(&fixture).await;
            let ended = fixture.ended(task).await;
            match ended.state {
                TaskState::Done if !is_lost => of.assert_done(&fixture, vm, &what).await,
                TaskState::Failed if is_lost => of.assert_undone(&fixture, vm, &what).await,
                other => panic!("{what}: {other:?} {:?}", ended.problem),
            }
        }
    }
}

/// The rate of its task is that of what is sent, a pause ends that for a while, and a cancelled one leaves nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_sent_of_a_clone_is_given_a_rate_paused_and_cancelled() {
    const RATE: u64 = 5 << 20;
    let (fixture, of) = (Fixture::new().await, Cloned::OffSent);
    of.before(&fixture).await;
    let there = fixture.agent_of(OTHER_HOST);
    there.set_work(LONG);
    let (vm, task) = of.begin(&fixture).await;
    let receives = |does: bool| {
        let there = there.clone();
        async move || (there.registered().contains(&vm) == does).then_some(())
    };
    fixture.eventually("it is received", receives(true)).await;
    let id = task.to_string();
    let change =
        async |change| fixture.engine.change_pace(&id, change, "me").await.map(drop).unwrap();
    let rate = || fixture.agent.departure(vm, task)?.bytes_per_second;
    fixture.eventually("it is sent", async || fixture.agent.departure(vm, task)).await;
    assert_eq!(rate(), None);
    change(PaceChange::Rate(Some(RATE))).await;
    fixture.eventually("it has its rate", async || rate().filter(|rate| *rate == RATE)).await;

    change(PaceChange::Pause).await;
    fixture.eventually("nothing is sent", receives(false)).await;
    let waits = async || (fixture.task(task).await.state == TaskState::Waiting).then_some(());
    fixture.eventually("the task waits", waits).await;
    change(PaceChange::Resume).await;
    fixture.eventually("it is received again", receives(true)).await;

    fixture.engine.cancel(&id, "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    of.assert_undone(&fixture, vm, "cancelled").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_is_called_by_a_name_is_sent_a_clone_at_its_address() {
    let (fixture, of) = (Fixture::new().await, Cloned::OffSent);
    of.before(&fixture).await;
    let there = fixture.agent_of(OTHER_HOST);
    there.set_work(LONG);
    let found = hosts::find(&mut fixture.store.read().await.unwrap(), OTHER_HOST).await;
    let expected = fixture.call_by_name(found.unwrap().unwrap().id, &there).await;
    let (vm, task) = of.begin(&fixture).await;
    let sent = async || fixture.agent.departure(vm, task);
    assert_eq!(fixture.eventually("it is sent", sent).await.to, expected);
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
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
