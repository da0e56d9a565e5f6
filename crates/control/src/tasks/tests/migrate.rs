//! VMs that move to another host while they run: at every point exactly one host runs the guest, or none while a task decides, and the
//! inventory says where it is, and its disks.

use std::collections::BTreeSet;
use std::time::Duration;

use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::host::version::MIGRATE_SHARED_TPM;
use vmseal_api::host::{MigrationProgress, StopReason};
use vmseal_api::id::{DatastoreId, HostId};
use vmseal_api::migration::{Migration, MigrationPhase};
use vmseal_api::request::{MigrateVm, SetTask};
use vmseal_api::transfer::Progress;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{self, Caller, Outcome, create_vm};
use crate::store::{datastores, hosts};
use crate::tasks::pacing::PaceChange;
use crate::tasks::run::{LiveProgress, Seen};

/// The name of the other host.
pub(super) const OTHER_HOST: &str = "there";

/// The name of that host's own datastore.
const FAR: &str = "far";

/// Whether the other host has the VM's datastore.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Disks {
    /// It has.
    Shared,
    /// It gets copies.
    Copied,
    /// It gets copies, with what a snapshot keeps.
    WithSnapshot,
}

pub(super) async fn other(fixture: &Fixture) -> HostId {
    let found = hosts::find(&mut fixture.store.read().await.unwrap(), OTHER_HOST).await;
    found.unwrap().unwrap().id
}

async fn far(fixture: &Fixture) -> Option<DatastoreId> {
    let found = datastores::find(&mut fixture.store.read().await.unwrap(), FAR).await;
    found.unwrap().map(|found| found.id)
}

/// The disks of the VM of which an agent has files.
pub(super) fn files(agent: &SimulatedHost, vm: VmId) -> BTreeSet<DiskId> {
    agent.disks().into_iter().filter(|(_, it)| it.vm == vm).map(|(disk, _)| disk).collect()
}

impl Disks {
    fn are_copied(self) -> bool {
        self != Self::Shared
    }

    /// A VM that runs, and another host.
    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let (other, _) = fixture.add_host(OTHER_HOST).await;
        match self {
            Self::Shared => fixture.share_datastore(other, OTHER_HOST).await,
            Self::Copied | Self::WithSnapshot => {
                fixture.add_datastore(other, OTHER_HOST, FAR).await;
            }
        }
        let vm = fixture.running("web").await;
        if self == Self::WithSnapshot {
            let snapshot = snapshots::taken(fixture, vm, "kept").await;
            for disk in fixture.disks(vm).await {
                fixture.agent_of(OTHER_HOST).will_receive(disk.id, vec![snapshot]);
            }
        }
        vm
    }

    /// Where the disks are, they have the snapshot, and where they are not, nothing of it is left.
    async fn assert_snapshots(self, fixture: &Fixture, vm: VmId, at_other: bool, what: &str) {
        let rows = snapshots::rows(fixture, vm).await;
        let known: Vec<_> = rows.iter().map(|row| row.id).collect();
        assert_eq!(known.len(), usize::from(self == Self::WithSnapshot), "{what}");
        let there = fixture.agent_of(OTHER_HOST);
        let (has, lacks) =
            if at_other { (&there, &fixture.agent) } else { (&fixture.agent, &there) };
        for disk in fixture.disks(vm).await {
            assert_eq!(has.snapshots(disk.id), known, "{what}");
            assert_eq!(lacks.snapshots(disk.id), [], "{what}: what is left");
        }
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        let (to, datastore) = (other(fixture).await, far(fixture).await);
        Operation::MigrateVm {
            vm,
            from: fixture.host,
            to,
            encrypted: true,
            datastore,
            downtime_milliseconds: None,
            compresses: false,
            given_up: false,
        }
    }

    /// The guest runs at the other host, which has its key and, where it gets copies, its disks; nothing of it is left at the first.
    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        assert_eq!(fixture.vm(vm).await.unwrap().host, other(fixture).await, "{what}");
        let there = fixture.agent_of(OTHER_HOST);
        assert!(there.runs(vm) && !fixture.agent.runs(vm), "{what}: where it runs");
        fixture
            .eventually("the first host has forgotten it", async || {
                (!fixture.agent.registered().contains(&vm)).then_some(())
            })
            .await;
        fixture
            .eventually("the other host has its key", async || {
                there.keys_held().contains(&vm).then_some(())
            })
            .await;
        if self == Self::Shared {
            // On a datastore that both hosts have, a disk that is removed at one of them is gone.
            let disks = fixture.disks(vm).await.iter().map(|disk| disk.id).collect();
            assert_eq!(files(&fixture.agent, vm), disks, "{what}: the shared disks");
        }
        if self.are_copied() {
            let disks = fixture.disks(vm).await;
            let far = far(fixture).await.unwrap();
            for disk in &disks {
                assert_eq!(disk.datastore.datastore, far, "{what}: {disk:?}");
                assert!(disk.facts.is_some(), "{what}: {disk:?}");
            }
            let all: BTreeSet<_> = disks.iter().map(|disk| disk.id).collect();
            assert_eq!(files(&there, vm), all, "{what}: the copies");
            fixture
                .eventually("the former images are removed", async || {
                    files(&fixture.agent, vm).is_empty().then_some(())
                })
                .await;
            self.assert_snapshots(fixture, vm, true, what).await;
        }
    }

    /// It runs at the other host, and the task says so; what is left of it is removed.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        assert!(problem.detail.contains("runs on the other host"), "{what}: {problem}");
        self.assert_done(fixture, vm, what).await;
    }

    /// The guest runs where it was, and the other host knows nothing of it.
    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        fixture.assert_whole(vm, Power::Running, what).await;
        let there = fixture.agent_of(OTHER_HOST);
        assert!(fixture.agent.runs(vm) && !there.runs(vm), "{what}: where it runs");
        fixture
            .eventually("the other host has forgotten it", async || {
                (!there.registered().contains(&vm)).then_some(())
            })
            .await;
        fixture
            .eventually("no copy is left", async || files(&there, vm).is_empty().then_some(()))
            .await;
        if self.are_copied() {
            let far = far(fixture).await.unwrap();
            let disks = fixture.disks(vm).await;
            assert!(disks.iter().all(|disk| disk.datastore.datastore != far), "{what}: {disks:?}");
            self.assert_snapshots(fixture, vm, false, what).await;
        }
    }
}

pub(super) fn any(vm: VmId) -> Operation {
    let (from, to) = (HostId::new(), HostId::new());
    Operation::MigrateVm {
        vm,
        from,
        to,
        encrypted: true,
        datastore: None,
        downtime_milliseconds: None,
        compresses: false,
        given_up: false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_is_done_or_undone_at_every_step() {
    matrix(Kind::Migrate(Disks::Shared)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_with_copies_of_disks_is_done_or_undone_at_every_step() {
    matrix(Kind::Migrate(Disks::Copied)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_with_snapshots_is_done_or_undone_at_every_step() {
    matrix(Kind::Migrate(Disks::WithSnapshot)).await;
}

/// An agent that restarts after it has ended the VM's processes does not know the VM any more, and has its images still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_images_are_removed_whenever_the_source_s_agent_restarts() {
    for call in [Call::CommitJob, Call::DeleteDisk, Call::UnregisterVm] {
        for fault in [HostFault::LoseAnswer, HostFault::Crash, HostFault::CrashAfter] {
            let fixture = Fixture::new().await;
            let vm = Disks::Copied.before(&fixture).await;
            fixture.agent.inject(call, 1, fault);
            fixture.done(Disks::Copied.operation(&fixture, vm).await, "web").await;
            Disks::Copied.assert_done(&fixture, vm, &format!("{call:?} {fault:?}")).await;
        }
    }
}

/// The server looks at the first host when the guest has ended there already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_whose_qemu_dies_once_all_of_it_is_sent_goes_on_at_the_other_host() {
    for disks in [Disks::Shared, Disks::Copied] {
        let what = format!("{disks:?}, its former QEMU has died");
        let mut fixture = Fixture::new().await;
        let vm = disks.before(&fixture).await;
        let (faults, done) = at("transfer", TaskState::Running, FaultPoint::After, Fault::Crash, 1);
        fixture.restart(|engine: &mut Engine| engine.environment.faults = Some(faults)).await;
        let task = fixture.begin(disks.operation(&fixture, vm).await, "web").await;
        let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
        fixture.eventually(&what, crashed).await;
        fixture.agent.stop_guest(vm, StopReason::QemuDied);
        fixture.restart(|_| {}).await;
        fixture.ends_well(task).await;
        disks.assert_done(&fixture, vm, &what).await;
    }
}

/// A VM with a TPM that runs.
async fn with_tpm(fixture: &Fixture) -> VmId {
    let services = fixture.services(Recipient::generate().unwrap());
    let (me, wanted) = (Caller::administrator("me"), tpm::request("encrypted"));
    let begun = create_vm::create(&services, &me, wanted, false);
    let Outcome::Done(task) = begun.await.unwrap() else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    vm
}

#[tokio::test]
async fn the_disk_of_a_tpm_stays_on_a_datastore_that_both_hosts_have() {
    let fixture = Fixture::new().await;
    let (there, agent) = fixture.add_host(OTHER_HOST).await;
    fixture.share_datastore(there, OTHER_HOST).await;
    let vm = with_tpm(&fixture).await;
    let before = fixture.disks(vm).await;
    fixture.done(Disks::Shared.operation(&fixture, vm).await, "web").await;
    Disks::Shared.assert_done(&fixture, vm, "with a TPM").await;
    let after = fixture.disks(vm).await;
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(before.datastore.datastore, after.datastore.datastore);
    }
    let all = before.iter().map(|disk| disk.id).collect();
    assert_eq!(files(&fixture.agent, vm), all, "both are where they were");
    assert_eq!(files(&agent, vm), BTreeSet::new(), "no copy");
}

/// The plan was made with other agents, and named no datastore for a copy.
#[tokio::test]
async fn the_disk_of_a_tpm_does_not_stay_where_an_agent_is_of_an_earlier_version() {
    let fixture = Fixture::new().await;
    let (there, agent) = fixture.add_host(OTHER_HOST).await;
    fixture.share_datastore(there, OTHER_HOST).await;
    let vm = with_tpm(&fixture).await;
    agent.lack_features(&[MIGRATE_SHARED_TPM]);
    let task = fixture.begin(Disks::Shared.operation(&fixture, vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Failed);
    assert!(fixture.agent.runs(vm) && !agent.runs(vm));
}

#[tokio::test]
async fn the_disk_of_a_tpm_goes_to_a_datastore_that_is_named_and_shared_ones_stay() {
    let fixture = Fixture::new().await;
    let (there, _) = fixture.add_host(OTHER_HOST).await;
    fixture.share_datastore(there, OTHER_HOST).await;
    fixture.add_datastore(there, OTHER_HOST, FAR).await;
    let vm = with_tpm(&fixture).await;
    let before = fixture.disks(vm).await;
    fixture.done(Disks::Shared.operation(&fixture, vm).await, "web").await;
    let after = fixture.disks(vm).await;
    assert_eq!(after[0].datastore.datastore, before[0].datastore.datastore);
    assert_eq!(Some(after[1].datastore.datastore), far(&fixture).await);
    assert_eq!(files(&fixture.agent, vm), [before[0].id].into(), "the shared one");
    assert_eq!(files(&fixture.agent_of(OTHER_HOST), vm), [before[1].id].into(), "the copy");
}

#[tokio::test]
async fn a_task_shows_how_far_a_migration_is_and_tells_how_it_went() {
    let fixture = Fixture::new().await;
    let vm = Disks::Shared.before(&fixture).await;
    fixture.agent.set_work(LONG);
    let task = fixture.begin(Disks::Shared.operation(&fixture, vm).await, "web").await;
    let shown = async |task| fixture.engine.shown(&fixture.task(task).await);
    let in_memory = async || {
        let migration = shown(task).await.migration?;
        migration.progress.filter(|_| migration.phase == MigrationPhase::Memory)
    };
    let progress = fixture.eventually("its memory is sent", in_memory).await;
    assert_eq!((progress.passes, progress.all_sent), (1, false));
    assert_eq!(progress.sent * 3, progress.remaining);
    assert!(progress.rate > 0 && progress.dirty_rate > 0 && progress.downtime_milliseconds > 0);
    assert!(progress.sealing.is_some_and(|sealing| sealing.cpu_percent > 0), "{progress:?}");
    assert_eq!(shown(task).await.percent, Some(25));
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    let ended = shown(task).await;
    assert_eq!((ended.migration, ended.migrated), (None, None), "it was cancelled");

    fixture.agent.set_work(Duration::ZERO);
    let task = fixture.begin(Disks::Shared.operation(&fixture, vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    let ended = shown(task).await;
    let migrated = ended.migrated.unwrap();
    assert_eq!((ended.migration, migrated.sent, migrated.passes), (None, progress.sent * 4, 3));
    assert_eq!((migrated.downtime_milliseconds, migrated.sealing_milliseconds), (20, Some(40)));
    assert!(migrated.switch_milliseconds.is_some_and(|it| it <= migrated.milliseconds));
    assert_eq!((migrated.memory_milliseconds, migrated.disks), (Some(400), None));
    assert_eq!(migrated.placed, Some(migrated.sent), "the destination has said so");
    let events = fixture.events("vm.migrated").await;
    let told = format!("from host 'here' to host 'there', encrypted: {migrated}");
    assert_eq!(events.iter().map(|event| &event.detail).collect::<Vec<_>>(), [&told]);
}

#[tokio::test]
async fn how_long_a_guest_stood_still_is_what_its_hosts_say() {
    #[derive(Clone, Copy, Debug)]
    enum Silent {
        Nobody,
        Source,
        Destination,
    }
    for fault in [HostFault::LoseRequest, HostFault::Refuse(ErrorCode::NotFound)] {
        for silent in [Silent::Nobody, Silent::Source, Silent::Destination] {
            let what = format!("{fault:?}: {silent:?}");
            let fixture = Fixture::new().await;
            let vm = Disks::Shared.before(&fixture).await;
            fixture.agent.set_stood_still(Duration::from_secs(10));
            match silent {
                Silent::Nobody => {}
                Silent::Source => fixture.agent.inject(Call::Job, 1, fault),
                Silent::Destination => fixture.agent_of(OTHER_HOST).inject(Call::Job, 1, fault),
            }
            let task = fixture.begin(Disks::Shared.operation(&fixture, vm).await, "web").await;
            assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
            let migrated = fixture.engine.shown(&fixture.task(task).await).migrated.unwrap();
            let switch = migrated.switch_milliseconds.unwrap();
            let all = migrated.milliseconds;
            match silent {
                // By its own clock.
                Silent::Source => assert!(switch <= all, "{what}: {switch} of {all} ms"),
                // Whole milliseconds are told.
                _ => assert!(switch >= 9_990, "{what}: {switch} ms"),
            }
        }
    }
}

#[tokio::test]
async fn a_task_tells_apart_what_was_sent_of_the_memory_and_of_disks() {
    let fixture = Fixture::new().await;
    let vm = Disks::Copied.before(&fixture).await;
    let task = fixture.begin(Disks::Copied.operation(&fixture, vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    let migrated = fixture.engine.shown(&fixture.task(task).await).migrated.unwrap();
    let size: u64 = fixture.disks(vm).await.iter().map(|disk| disk.size).sum();
    let disks = migrated.disks.unwrap();
    assert!(size > 0 && migrated.sent > 0);
    assert_eq!((disks.bytes, disks.milliseconds, disks.later_bytes), (size, 500, 0));
    assert_eq!(disks.bytes_per_second(), Some(size * 2));
    // Not of the whole time, of which most went into the disks.
    assert_eq!(migrated.memory_milliseconds, Some(400));
    assert_eq!(migrated.bytes_per_second(), Some(migrated.sent * 1000 / 400));
    let events = fixture.events("vm.migrated").await;
    assert!(events[0].detail.contains(&format!("; disks {disks}; ")), "{}", events[0].detail);
}

/// The source has handed the guest over. Only the missing job at the destination shows that the guest will not run there.
#[tokio::test]
async fn a_destination_whose_agent_restarts_while_the_guest_stands_still_is_tried_again() {
    let fixture = Fixture::new().await;
    let vm = Disks::Shared.before(&fixture).await;
    let there = fixture.agent_of(OTHER_HOST);
    there.set_work(LONG);
    let task = fixture.begin(Disks::Shared.operation(&fixture, vm).await, "web").await;
    let stands_still = async || {
        let migration = fixture.engine.shown(&fixture.task(task).await).migration?;
        (migration.phase == MigrationPhase::SwitchOver).then_some(())
    };
    fixture.eventually("the guest is handed over", stands_still).await;
    there.set_work(Duration::ZERO);
    there.restart();
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    Disks::Shared.assert_done(&fixture, vm, "after the restart").await;
}

/// Each host may be the one that has failed, and each may be heard first.
#[tokio::test]
async fn a_task_tells_what_happened_first_whichever_host_is_heard_first() {
    for (source_failed, source_is_first) in
        [(false, false), (false, true), (true, false), (true, true)]
    {
        let what = format!("{source_failed} {source_is_first}");
        let fixture = Fixture::new().await;
        let vm = Disks::Shared.before(&fixture).await;
        let there = fixture.agent_of(OTHER_HOST);
        fixture.agent.set_work(LONG);
        there.set_work(LONG);
        let task = fixture.begin(Disks::Shared.operation(&fixture, vm).await, "web").await;
        let sends = async || fixture.agent.departure(vm, task).map(drop);
        fixture.eventually("it is sent", sends).await;
        let full = Problem::new(ErrorCode::NoSpace, "the disk is full");
        let lost = Problem::new(ErrorCode::Internal, "the connection is lost");
        let lost = Problem { of_other_host: true, ..lost };
        for of_source in [source_is_first, !source_is_first] {
            let host = if of_source { &fixture.agent } else { &there };
            let problem = if of_source == source_failed { &full } else { &lost };
            host.fail_migration(vm, task, problem.clone());
        }
        let problem = fixture.ended(task).await.problem.unwrap();
        assert_eq!((problem.code, &*problem.detail), (full.code, &*full.detail), "{what}");
        Disks::Shared.assert_undone(&fixture, vm, &what).await;
    }
}

#[tokio::test]
async fn a_host_that_is_called_by_a_name_is_sent_a_vm_at_its_address() {
    let fixture = Fixture::new().await;
    let vm = Disks::Shared.before(&fixture).await;
    fixture.agent.set_work(LONG);
    let there = fixture.agent_of(OTHER_HOST);
    let expected = fixture.call_by_name(other(&fixture).await, &there).await;
    let task = fixture.begin(Disks::Shared.operation(&fixture, vm).await, "web").await;
    let sent = async || fixture.agent.departure(vm, task);
    assert_eq!(fixture.eventually("it is sent", sent).await.to, expected);
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
}

#[tokio::test]
async fn a_migration_is_sent_as_fast_as_the_task_says_and_the_guest_stands_still_as_long() {
    let fixture = Fixture::new().await;
    let vm = Disks::Shared.before(&fixture).await;
    fixture.agent.set_work(LONG);
    let services = fixture.services(Recipient::generate().unwrap());
    let caller = Caller::administrator("me");
    let begun = async |rate, downtime_milliseconds| {
        let request = MigrateVm { rate, downtime_milliseconds, ..MigrateVm::default() };
        services::migrate::migrate(&services, &caller, "web", request, false).await
    };
    for (rate, downtime, field) in
        [(Some(1), None, "rate"), (None, Some(9), "downtime_milliseconds")]
    {
        let refused = begun(rate, downtime).await.map(drop).unwrap_err();
        assert_eq!(refused.field.as_deref(), Some(field), "{refused}");
    }
    let Ok(Outcome::Done(task)) = begun(Some(5 << 20), Some(80)).await else {
        panic!("it does not begin");
    };
    let sends_at = async |rate: Option<u64>| {
        let so = async || {
            let departure = fixture.agent.departure(vm, task.id)?;
            (departure.bytes_per_second == rate).then_some(departure.downtime_milliseconds)
        };
        fixture.eventually(&format!("it is sent at {rate:?}"), so).await
    };
    assert_eq!((sends_at(Some(5 << 20)).await, task.rate), (80, Some(5 << 20)));
    // Slower, and then as fast as it can.
    let id = task.id.to_string();
    for rate in [2 << 20, 0] {
        services::tasks::set(&services, &caller, &id, SetTask { rate }, false).await.unwrap();
        assert_eq!(sends_at(Some(rate).filter(|rate| *rate > 0)).await, 80);
    }
    let pause = fixture.engine.change_pace(&id, PaceChange::Pause, "me").await;
    assert!(pause.unwrap_err().detail.contains("only tasks that copy disks"));
    fixture.engine.cancel(&id, "me").await.unwrap();
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Cancelled);
}

#[tokio::test]
async fn a_server_that_has_restarted_still_tells_how_a_migration_went() {
    // Before it knows that the guest runs there: how long the guest stood still includes the restart.
    let (faults, done) = at("switch", TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
    let (fixture, _, task) = carry_out(Kind::Migrate(Disks::Shared), faults, &done, true).await;
    let migrated = fixture.engine.shown(&fixture.task(task).await).migrated.unwrap();
    assert_eq!((migrated.passes, migrated.switch_milliseconds.is_some()), (3, true));
    // After it: it does not know how long that was.
    let (faults, done) = at("switch", TaskState::Running, FaultPoint::After, Fault::Crash, 1);
    let (fixture, _, task) = carry_out(Kind::Migrate(Disks::Shared), faults, &done, true).await;
    let migrated = fixture.engine.shown(&fixture.task(task).await).migrated.unwrap();
    assert_eq!((migrated.passes, migrated.switch_milliseconds), (3, None));
}

#[test]
fn people_are_told_of_another_phase_at_once_and_of_rates_after_a_while() {
    let live = LiveProgress::default();
    let show = |phase, rate| {
        let progress = Some(MigrationProgress { rate, ..MigrationProgress::default() });
        let migration = Some(Migration { phase, progress, encrypted: None });
        live.show(Some(Seen { progress: Progress::default(), bytes_per_second: None, migration }))
    };
    assert!(show(MigrationPhase::Connecting, 0), "the first");
    assert!(!show(MigrationPhase::Connecting, 1), "too early");
    assert!(show(MigrationPhase::Memory, 1), "another phase");
    assert!(!show(MigrationPhase::Memory, 2), "too early");
    assert_eq!(live.read().unwrap().migration.unwrap().progress.unwrap().rate, 2);
}
