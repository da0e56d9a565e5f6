//! Backups that are made, verified, restored and deleted.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use vmseal_api::cloud_init::CloudInit;
use vmseal_api::host::KeyReference;
use vmseal_api::host::backup::BackupPart;
use vmseal_api::host::version::{BACKUP_SUSPENDED, WHOLE_BACKUP};
use vmseal_api::id::{BackupId, SnapshotId};
use vmseal_api::model::{self, BackupState, SnapshotState};
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::{CreateBackup, CreateVm, MigrateVm, RestoreBackup};
use vmseal_secret::sealed_box::Recipient;

use super::mirror::one_of;
use super::*;
use crate::services::{Caller, Outcome, Services, backups as service, create_vm, migrate, vm_tpm};
use crate::store::disks::Disk;
use crate::store::vms::{self, Vm};
use crate::store::{backups, keys, snapshots};

/// What is done with backups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Backup {
    /// Of a VM that runs, above a full one.
    Create,
    /// Of a VM that has been suspended since.
    CreateSuspended,
    Verify,
    /// Of a VM that is off.
    Restore,
    /// Of a VM that was deleted.
    RestoreDeleted,
    /// Of one with a TPM, as another one beside it.
    RestoreAs,
    /// The second of two.
    Delete,
}

const DIRECTORY: &str = "/backups";

/// The VM that a backup is restored as.
pub(super) const OTHER: &str = "other";

pub(super) async fn rows(fixture: &Fixture, vm: VmId) -> Vec<backups::Backup> {
    backups::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

/// A backup that is asked for: its row is there, and that of its snapshot.
async fn reserve(fixture: &Fixture, vm: VmId, name: &str) -> Operation {
    let row = fixture.vm(vm).await.unwrap();
    let (backup, snapshot) = (BackupId::new(), SnapshotId::new());
    let parent = rows(fixture, vm).await.last().map(|it| it.id);
    let backup_row = backups::Backup {
        id: backup,
        vm,
        vm_name: row.name.clone(),
        host: row.host,
        host_name: row.host_name.clone(),
        name: name.to_owned(),
        directory: DIRECTORY.into(),
        created: Timestamp::now(),
        state: BackupState::Creating,
        parent,
        quiesced: None,
        bytes: None,
        read_bytes: None,
        verified: None,
        failed: None,
        key: row.key.clone(),
        contents: None,
    };
    let kept = snapshots::Snapshot {
        memory: false,
        id: snapshot,
        vm,
        name: crate::tasks::temporary_snapshot::Purpose::Backup.name(snapshot),
        description: String::new(),
        parent: None,
        created: Timestamp::now(),
        state: SnapshotState::Taking,
        quiesced: None,
        current: false,
        disks: fixture.disks(vm).await.iter().map(|disk| disk.id).collect(),
    };
    let mut write = fixture.store.write().await.unwrap();
    snapshots::insert(&mut write, &kept).await.unwrap();
    backups::insert(&mut write, &backup_row).await.unwrap();
    write.commit().await.unwrap();
    Operation::BackUpVm { vm, backup, snapshot, quiesce: true }
}

pub(super) async fn made(fixture: &Fixture, vm: VmId, name: &str) {
    fixture.done(reserve(fixture, vm, name).await, "web").await;
}

pub(super) async fn living_keys(fixture: &Fixture, vm: VmId) -> Vec<KeyReference> {
    keys::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

impl Backup {
    fn creates(self) -> bool {
        matches!(self, Self::Create | Self::CreateSuspended)
    }

    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        if self == Self::RestoreAs {
            return with_tpm(fixture).await;
        }
        let vm = match self {
            Self::Create | Self::CreateSuspended | Self::Verify => fixture.running("web").await,
            _ => fixture.made("web", "encrypted").await,
        };
        made(fixture, vm, "first").await;
        match self {
            Self::Create => {}
            Self::CreateSuspended => fixture.done(Operation::SuspendVm { vm }, "web").await,
            _ => made(fixture, vm, "second").await,
        }
        if self == Self::RestoreDeleted {
            fixture.done(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
            assert_eq!(living_keys(fixture, vm).await.len(), 1, "the backups' key is destroyed");
        }
        vm
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        if self.creates() {
            return reserve(fixture, vm, "second").await;
        }
        let rows = rows(fixture, vm).await;
        let backup = rows.iter().find(|row| row.name == "second").unwrap();
        let disks = fixture.disks(vm).await.iter().map(|disk| disk.id).collect();
        match self {
            Self::Verify => Operation::VerifyBackup { vm, backup: backup.id },
            Self::Restore => Operation::RestoreBackup { vm, backup: backup.id, disks },
            Self::RestoreDeleted => fixture.restoring_deleted(backup).await,
            Self::RestoreAs => fixture.restoring_as(backup, OTHER).await,
            _ => Operation::DeleteBackup { vm, backup: backup.id },
        }
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        let (vm, backup, disks) = (VmId::new(), BackupId::new(), Vec::new());
        steps::of(&match self {
            Self::Create | Self::CreateSuspended => {
                let snapshot = SnapshotId::new();
                Operation::BackUpVm { vm, backup, snapshot, quiesce: true }
            }
            Self::Verify => Operation::VerifyBackup { vm, backup },
            Self::Restore => Operation::RestoreBackup { vm, backup, disks },
            Self::RestoreDeleted => {
                Operation::RestoreDeletedVm { vm, backup, disks, manifest: String::new() }
            }
            Self::RestoreAs => {
                let (disks, manifest) = (BTreeMap::new(), String::new());
                Operation::RestoreNewVm { vm, backup, disks, manifest }
            }
            Self::Delete => Operation::DeleteBackup { vm, backup },
        })
    }

    pub(super) fn is_past_commit(self, step: &str) -> bool {
        is_past_commit(self.steps(), step)
    }

    fn power(self) -> Power {
        match self {
            Self::Create | Self::Verify => Power::Running,
            Self::CreateSuspended => Power::Suspended,
            _ => Power::Off,
        }
    }

    /// The host and the inventory have these backups, and no snapshot is left.
    async fn assert_backups(fixture: &Fixture, vm: VmId, names: &[&str], what: &str) {
        let rows = rows(fixture, vm).await;
        let known: Vec<_> = rows.iter().map(|row| row.name.as_str()).collect();
        assert_eq!(known, names, "{what}");
        assert!(rows.iter().all(|row| row.state == BackupState::Ready), "{what}: {rows:?}");
        let (mut whole, unfinished) = fixture.agent.backups();
        whole.sort();
        let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
        assert_eq!((whole, unfinished), (ids, 0), "{what}");
        for disk in fixture.disks(vm).await {
            assert_eq!(fixture.agent.snapshots(disk.id), [], "{what}: a snapshot is left");
        }
        let kept = snapshots::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap();
        assert_eq!(kept, [], "{what}");
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        fixture.assert_whole(vm, self.power(), what).await;
        let expected: &[&str] =
            if self == Self::Delete { &["first"] } else { &["first", "second"] };
        Self::assert_backups(fixture, vm, expected, what).await;
        let rows = rows(fixture, vm).await;
        let last = rows.last().unwrap();
        match self {
            Self::Create | Self::CreateSuspended => {
                assert_eq!(last.parent, Some(rows[0].id), "{what}");
                assert!(last.bytes.is_some() && last.key.is_some(), "{what}: {last:?}");
                let said = last.contents.as_ref().map(|contents| contents.suspended);
                assert_eq!(said, Some(self == Self::CreateSuspended), "{what}");
            }
            Self::Verify => assert!(last.verified.is_some(), "{what}"),
            Self::Restore | Self::RestoreDeleted => {
                for disk in fixture.disks(vm).await {
                    assert_eq!(fixture.agent.restored(disk.id), (Some(last.id), false), "{what}");
                }
            }
            Self::RestoreAs => assert_restored_as(fixture, vm, last, what).await,
            Self::Delete => assert_eq!(living_keys(fixture, vm).await.len(), 1, "{what}"),
        }
    }

    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        let expected: &[&str] = if self.creates() { &["first"] } else { &["first", "second"] };
        Self::assert_backups(fixture, vm, expected, what).await;
        let rows = rows(fixture, vm).await;
        assert!(rows.iter().all(|row| row.verified.is_none()), "{what}");
        if self == Self::RestoreDeleted {
            assert!(fixture.vm(vm).await.is_none(), "{what}: its row is left");
            assert!(fixture.agent.disks().is_empty(), "{what}: disks are left");
            assert!(fixture.agent.registered().is_empty(), "{what}: the host knows it");
            assert_eq!(living_keys(fixture, vm).await.len(), 1, "{what}: the key is destroyed");
            return;
        }
        fixture.assert_whole(vm, self.power(), what).await;
        for disk in fixture.disks(vm).await {
            assert_eq!(fixture.agent.restored(disk.id), (None, false), "{what}");
        }
        if self == Self::RestoreAs {
            assert!(named(fixture, OTHER).await.is_none(), "{what}: its row is left");
            assert_eq!(fixture.agent.disks().len(), 2, "{what}: disks are left");
            assert_eq!(fixture.agent.registered(), [vm], "{what}: the host knows it");
            assert_eq!(all_living_keys(fixture).await, 1, "{what}: its key is not destroyed");
        }
    }

    /// Past its commit step: an alarm says so, and the same again finishes it.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &mut Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        assert!(problem.detail.contains("once the cause is fixed"), "{what}: {problem}");
        let alarm = "task-unfinished web".to_owned();
        assert!(fixture.alarms().await.contains(&alarm), "{what}");
        // The fault is still there.
        fixture.restart(|_| {}).await;
        let kept = snapshots::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap();
        let again = match kept.first() {
            Some(kept) if self.creates() => {
                Some(Operation::DeleteSnapshot { vm, snapshot: kept.id })
            }
            None if self.creates() => None,
            _ => {
                let known = rows(fixture, vm).await;
                let there = known.iter().any(|row| row.name == "second");
                if there { Some(self.operation(fixture, vm).await) } else { None }
            }
        };
        if let Some(operation) = again {
            let task = fixture.begin(operation, "web").await;
            assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
        }
        self.assert_done(fixture, vm, what).await;
    }
}

/// The request for another VM.
pub(super) fn as_another(name: &str) -> RestoreBackup {
    RestoreBackup { new_vm: Some(name.to_owned()), ..RestoreBackup::default() }
}

/// A VM with a disk and a TPM, and two backups.
async fn with_tpm(fixture: &Fixture) -> VmId {
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = super::tpm::request("encrypted");
    done(fixture, create_vm::create(&services, &me, request, false).await).await;
    back_up(fixture, &services, "first").await;
    back_up(fixture, &services, "second").await.vm_id
}

pub(super) async fn named(fixture: &Fixture, name: &str) -> Option<Vm> {
    vms::find(&mut fixture.store.read().await.unwrap(), name).await.unwrap()
}

async fn all_living_keys(fixture: &Fixture) -> i64 {
    let mut read = fixture.store.read().await.unwrap();
    let count = sqlx::query_scalar("SELECT COUNT(*) FROM keys WHERE destroyed = 0");
    count.fetch_one(&mut *read).await.unwrap()
}

/// There is another VM, whose disk holds what the backup has, under a key of its own; its TPM is new. That of the backup is as it was.
async fn assert_restored_as(fixture: &Fixture, vm: VmId, backup: &backups::Backup, what: &str) {
    for disk in fixture.disks(vm).await {
        assert_eq!(fixture.agent.restored(disk.id), (None, false), "{what}");
    }
    let other = named(fixture, OTHER).await.unwrap();
    fixture.assert_whole(other.id, Power::Off, what).await;
    assert!(other.hardware.tpm && other.key != backup.key, "{what}");
    let disks = fixture.disks(other.id).await;
    let from: Vec<_> = disks.iter().map(|it| fixture.agent.restored(it.id)).collect();
    assert_eq!(from, [(Some(backup.id), false), (None, false)], "{what}");
    let checks: BTreeSet<_> = other.key.iter().map(|key| key.check.clone()).collect();
    for disk in &disks {
        assert_eq!(fixture.agent.disks()[&disk.id].checks, checks, "{what}");
    }
    assert_eq!(all_living_keys(fixture).await, 2, "{what}");
}

impl Fixture {
    /// The restore of a backup as another VM: its rows are there.
    async fn restoring_as(&self, backup: &backups::Backup, name: &str) -> Operation {
        let services = self.services(Recipient::generate().unwrap());
        let agent: &dyn vmseal_api::host::HostAgent = &self.agent;
        let manifest = agent.read_backup(crate::tasks::backups::place(backup)).await.unwrap();
        let request = as_another(name);
        let mut write = self.store.write().await.unwrap();
        let reserved =
            service::as_new::reserve(&services, &mut write, backup, &manifest, &request).await;
        let (_, operation) = reserved.unwrap();
        write.commit().await.unwrap();
        operation
    }

    /// The restore of a VM that was deleted: its rows are there.
    async fn restoring_deleted(&self, backup: &backups::Backup) -> Operation {
        let place = crate::tasks::backups::place(backup);
        let agent: &dyn vmseal_api::host::HostAgent = &self.agent;
        let manifest = agent.read_backup(place).await.unwrap();
        let digest = crate::tasks::backups::digest_of(&manifest);
        let mut write = self.store.write().await.unwrap();
        let definition =
            crate::services::backups::define(&mut write, backup, &manifest, &Default::default())
                .await
                .unwrap();
        let row = crate::tasks::adopt_vm::row(&definition);
        let vm = crate::store::vms::Vm { lifecycle: Lifecycle::Creating, ..row };
        crate::tasks::adopt_vm::insert_rows(&mut write, &definition, &vm).await.unwrap();
        write.commit().await.unwrap();
        let disks = definition.spec.disks().map(|disk| disk.disk).collect();
        Operation::RestoreDeletedVm { vm: vm.id, backup: backup.id, disks, manifest: digest }
    }
}

#[tokio::test]
async fn a_backup_is_made_or_nothing_of_it_is_left() {
    matrix(Kind::Backup(Backup::Create)).await;
}

#[tokio::test]
async fn a_suspended_vm_is_backed_up_or_nothing_of_the_backup_is_left() {
    matrix(Kind::Backup(Backup::CreateSuspended)).await;
}

#[tokio::test]
async fn a_backup_is_verified_or_not() {
    matrix(Kind::Backup(Backup::Verify)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_is_restored_or_nothing_has_changed() {
    let kinds = [Backup::Restore, Backup::RestoreDeleted, Backup::RestoreAs];
    one_of(&kinds, Kind::Backup).await;
}

/// Fails the last step permanently, and injects a fault into the undoing of every step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undoing_a_restore_as_another_vm_survives_every_fault_at_every_step() {
    let kind = Kind::Backup(Backup::RestoreAs);
    for step in kind.steps() {
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
                at("record-vm", TaskState::Running, FaultPoint::After, Fault::Fail(refused()), 1);
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

#[tokio::test]
async fn a_backup_is_deleted_or_stays() {
    matrix(Kind::Backup(Backup::Delete)).await;
}

#[tokio::test]
async fn a_key_lives_as_long_as_a_backup_needs_it() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    made(&fixture, vm, "first").await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    fixture.done(fixture.recryption(vm).await, "web").await;
    assert!(living_keys(&fixture, vm).await.contains(&old), "the backup's key is destroyed");
    made(&fixture, vm, "second").await;
    // With the key of that time.
    let first = rows(&fixture, vm).await[0].id;
    let disks = fixture.disks(vm).await.iter().map(|disk| disk.id).collect();
    for operation in [
        Operation::VerifyBackup { vm, backup: first },
        Operation::RestoreBackup { vm, backup: first, disks },
    ] {
        fixture.done(operation, "web").await;
    }
    let all = rows(&fixture, vm).await;
    for (number, backup) in all.iter().rev().enumerate() {
        fixture.done(Operation::DeleteBackup { vm, backup: backup.id }, "web").await;
        let there = living_keys(&fixture, vm).await.contains(&old);
        assert_eq!(there, number == 0, "after {} deletions", number + 1);
    }
    let current = fixture.vm(vm).await.unwrap().key.unwrap();
    assert_eq!(living_keys(&fixture, vm).await, [current]);
}

/// Does what a service has begun.
pub(super) async fn done(fixture: &Fixture, begun: Result<Outcome<model::Task>, Problem>) {
    let Outcome::Done(task) = begun.unwrap() else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
}

pub(super) async fn back_up(fixture: &Fixture, services: &Services, name: &str) -> model::VmBackup {
    let me = Caller::administrator("me");
    let (name, directory) = (Some(name.to_owned()), Some(DIRECTORY.into()));
    let request =
        CreateBackup { name: name.clone(), directory, full: true, quiesce: false, rate: None };
    done(fixture, service::create(services, &me, "web", request, false).await).await;
    service::show(services, &me, "web", &name.unwrap()).await.unwrap()
}

fn names(parts: &[BackupPart]) -> Vec<&str> {
    parts.iter().map(|part| part.name.as_str()).collect()
}

/// A VM with a TPM and a disk for cloud-init is backed up as a whole, and made again as a whole; of a backup by an agent of before
/// it is said what it lacks.
#[tokio::test]
async fn what_no_guest_writes_is_in_a_backup_and_comes_back() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let user_data = Some("#cloud-config\n".to_owned().into());
    let documents = CloudInit { user_data, ..CloudInit::default() };
    let request = CreateVm { cloud_init: Some(documents), ..super::tpm::request("encrypted") };
    done(&fixture, create_vm::create(&services, &me, request, false).await).await;
    let all = ["disk0", "cloud-init", "tpm"];
    let whole = back_up(&fixture, &services, "whole").await;
    let contents = whole.contents.unwrap();
    assert_eq!((names(&contents.disks), names(&contents.lacks)), (all.to_vec(), vec![]));
    assert!(contents.disks.iter().all(|part| part.encrypted == Some(true)), "{contents:?}");

    fixture.restart_agent_without(&[WHOLE_BACKUP]).await;
    let old = back_up(&fixture, &services, "old").await;
    let of_old = old.contents.clone().unwrap();
    assert_eq!((names(&of_old.disks), names(&of_old.lacks)), (vec!["disk0"], all[1..].to_vec()));
    // What a server of before has not noted, the host says, and the next verification notes.
    let mut write = fixture.store.write().await.unwrap();
    sqlx::query("UPDATE backups SET contents = NULL").execute(&mut *write).await.unwrap();
    write.commit().await.unwrap();
    let shown = service::show(&services, &me, "web", "old").await.unwrap();
    assert_eq!(shown.contents.as_ref(), Some(&of_old));
    done(&fixture, service::verify(&services, &me, "web", "old", false).await).await;
    let noted = rows(&fixture, old.vm_id).await.pop().unwrap().contents;
    assert_eq!(noted, Some(of_old));

    let vm = old.vm_id;
    let restore = async |name, dry_run| {
        service::restore(&services, &me, "web", name, RestoreBackup::default(), dry_run).await
    };
    let planned = async |name| match restore(name, true).await.unwrap() {
        Outcome::Planned(plan) => plan.warnings,
        Outcome::Done(_) => panic!("it was begun"),
    };
    let disks = fixture.disks(vm).await;
    assert!(planned("whole").await.is_empty());
    let warned = planned("old").await;
    assert!(
        warned.len() == 2 && warned[1] == "'tpm' is not in it, and stays as it is",
        "{warned:?}"
    );
    for (name, restored) in [("whole", &disks[..]), ("old", &disks[..1])] {
        done(&fixture, restore(name, false).await).await;
        let from = rows(&fixture, vm).await.into_iter().find(|row| row.name == name).unwrap().id;
        let of = disks.iter().filter(|disk| fixture.agent.restored(disk.id).0 == Some(from));
        assert_eq!(of.count(), restored.len(), "{name}");
    }
    for (name, expected) in [("old", &all[..1]), ("whole", &all[..])] {
        fixture.done(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
        done(&fixture, restore(name, false).await).await;
        let made = fixture.disks(vm).await;
        let roles = |disks: &[Disk]| disks.iter().map(|disk| disk.role).collect::<Vec<_>>();
        assert_eq!(roles(&made), roles(&disks[..expected.len()]), "{name}");
        let hardware = fixture.vm(vm).await.unwrap().hardware;
        assert_eq!(hardware.tpm, name == "whole");
        assert_eq!(fixture.agent.registered_as(vm).unwrap().hardware, hardware);
    }
}

/// A VM that is suspended is backed up and stays suspended; that its memory is not in the backup is said wherever that is made, shown and
/// restored. Nothing is put under the guest that is to go on.
#[tokio::test]
async fn a_suspended_vm_is_backed_up_without_its_memory_and_goes_on() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.running("web").await;
    let of_running = back_up(&fixture, &services, "running").await;
    assert!(!of_running.contents.unwrap().suspended);
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let generation = fixture.agent.memory_generation(vm);
    let create = |name: &str| {
        let (name, directory) = (Some(name.to_owned()), Some(DIRECTORY.into()));
        CreateBackup { name, directory, ..CreateBackup::default() }
    };
    let says = |warnings: &[String]| warnings.iter().any(|it| it.contains("as after a power cut"));
    let planned = service::create(&services, &me, "web", create("second"), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    assert!(says(&plan.warnings), "{plan:?}");
    let begun = service::create(&services, &me, "web", create("second"), false).await;
    done(&fixture, begun).await;
    let full = back_up(&fixture, &services, "full").await;
    let second = service::show(&services, &me, "web", "second").await.unwrap();
    let parents = (second.parent.as_deref(), full.parent.as_deref());
    assert_eq!(parents, (Some("running"), None));
    for backup in [&second, &full] {
        assert!(backup.contents.as_ref().unwrap().suspended, "{backup:?}");
        done(&fixture, service::verify(&services, &me, "web", &backup.name, false).await).await;
    }
    let told = fixture.events("backup.created").await;
    let told: Vec<_> = told.iter().map(|it| it.detail.contains("as after a power cut")).collect();
    assert_eq!(told, [false, true, true]);

    let restore = async |request: RestoreBackup, dry_run: bool| {
        service::restore(&services, &me, "web", "second", request, dry_run).await
    };
    let refused = restore(RestoreBackup::default(), false).await.unwrap_err();
    let ways = ["vmseal vm resume web", "--discard-memory"];
    assert!(ways.iter().all(|way| refused.detail.contains(way)), "{refused}");
    let planned = restore(as_another(OTHER), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    assert!(says(&plan.warnings), "{plan:?}");
    done(&fixture, restore(as_another(OTHER), false).await).await;
    fixture.assert_whole(vm, Power::Suspended, "it is backed up").await;
    assert_eq!(fixture.agent.memory_generation(vm), generation, "its memory is another one");
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    fixture.assert_whole(vm, Power::Running, "it goes on").await;
    let other = named(&fixture, OTHER).await.unwrap().id;
    fixture.done(Operation::StartVm { vm: other, boot_once: None }, OTHER).await;
    fixture.assert_whole(other, Power::Running, "it starts").await;

    fixture.done(Operation::StopVm { vm, force: true, timeout_seconds: 1 }, "web").await;
    let planned = restore(RestoreBackup::default(), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    assert!(says(&plan.warnings), "{plan:?}");
}

/// An agent of before would refuse it at its first step.
#[tokio::test]
async fn an_agent_of_before_does_not_back_up_a_suspended_vm() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.running("web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    fixture.restart_agent_without(&[BACKUP_SUSPENDED]).await;
    let request = CreateBackup { directory: Some(DIRECTORY.into()), ..CreateBackup::default() };
    let refused = service::create(&services, &me, "web", request, false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
    assert!(refused.detail.contains("cannot back up VMs that are suspended"), "{refused}");
}

/// What was removed since is not put back under a VM that is there.
#[tokio::test]
async fn a_tpm_that_was_removed_is_not_restored_into_its_vm() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = super::tpm::request("encrypted");
    done(&fixture, create_vm::create(&services, &me, request, false).await).await;
    back_up(&fixture, &services, "whole").await;
    done(&fixture, vm_tpm::remove(&services, &me, "web", false).await).await;
    let restored = RestoreBackup::default();
    let refused = service::restore(&services, &me, "web", "whole", restored, false).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(
        refused.detail.contains("'tpm'") && refused.detail.contains("was removed"),
        "{refused}"
    );
}

/// The file system of the directory is unmounted while a backup is written: nothing stays that keeps the VM from being restored, and
/// what is left in the directory goes with the next backup there.
#[tokio::test]
async fn a_backup_whose_directory_goes_away_leaves_no_snapshot() {
    for (at, left) in [("write", 0), ("name", 1)] {
        let mut fixture = Fixture::new().await;
        let vm = fixture.running("web").await;
        made(&fixture, vm, "first").await;
        let operation = reserve(&fixture, vm, "second").await;
        let agent = fixture.agent.clone();
        let unmount: Faults = Arc::new(move |step, state, point| {
            if (step, state, point) == (at, TaskState::Running, FaultPoint::Before) {
                agent.set_directory(DIRECTORY.as_ref(), false);
            }
            Fault::None
        });
        fixture.restart(|engine| engine.environment.faults = Some(unmount)).await;
        let ended = fixture.ended(fixture.begin(operation, "web").await).await;
        assert_eq!(ended.state, TaskState::Failed, "{at}: {:?}", ended.problem);
        fixture.restart(|_| {}).await;
        fixture.agent.set_directory(DIRECTORY.as_ref(), true);
        assert_eq!(fixture.agent.backups().1, left, "{at}");
        assert_eq!(super::snapshots::rows(&fixture, vm).await, [], "{at}");
        assert_eq!(super::snapshots::on_host(&fixture, vm).await, [], "{at}");
        made(&fixture, vm, "third").await;
        Backup::assert_backups(&fixture, vm, &["first", "third"], at).await;
    }
}

/// A host that refuses to drop a snapshot, for whatever reason, drops it before the next backup.
#[tokio::test]
async fn a_backup_drops_the_snapshot_that_one_before_has_left() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    made(&fixture, vm, "first").await;
    let operation = reserve(&fixture, vm, "second").await;
    // To take the snapshot, to write the backup, to drop the snapshot.
    for nth in [2, 3] {
        fixture.agent.inject(Call::PutJob, nth, HostFault::Refuse(ErrorCode::Internal));
    }
    let ended = fixture.ended(fixture.begin(operation, "web").await).await;
    assert_eq!(ended.state, TaskState::Unknown, "{:?}", ended.problem);
    assert_eq!(super::snapshots::on_host(&fixture, vm).await.len(), 1);
    let left = rows(&fixture, vm).await.pop().unwrap().id;
    fixture.done(Operation::DeleteBackup { vm, backup: left }, "web").await;
    made(&fixture, vm, "third").await;
    Backup::assert_backups(&fixture, vm, &["first", "third"], "the next one").await;
    assert_eq!(fixture.alarms().await, Vec::<String>::new());
}

/// The VM changes its host, and then the host that read its backups is gone: another one that has their directory mounted goes on.
#[tokio::test]
async fn another_host_reads_the_backups_of_a_directory_that_it_has_too() {
    let fixture = Fixture::new().await;
    let (there, other) = fixture.add_host("there").await;
    fixture.share_datastore(there, "there").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("web", "encrypted").await;
    let first = back_up(&fixture, &services, "first").await;
    assert_eq!(first.host, "here");
    let moved = migrate::migrate(&services, &me, "web", MigrateVm::default(), false).await;
    done(&fixture, moved).await;

    let verify = async || service::verify(&services, &me, "web", "first", false).await;
    let Err(problem) = verify().await else { panic!("it is not there") };
    assert!(problem.detail.contains("host 'there' does not find it in /backups"), "{problem:?}");
    let hosts = async || {
        let rows = rows(&fixture, vm).await;
        rows.into_iter().map(|row| row.host_name).collect::<Vec<_>>()
    };
    assert_eq!(hosts().await, ["here"]);

    other.mount_backups_of(&fixture.agent);
    let planned = service::verify(&services, &me, "web", "first", true).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))));
    assert_eq!(hosts().await, ["here"], "a plan changes nothing");
    let create =
        |name: &str| CreateBackup { name: Some(name.to_owned()), ..CreateBackup::default() };
    let begun = service::create(&services, &me, "web", create("second"), false).await;
    done(&fixture, begun).await;
    let second = service::show(&services, &me, "web", "second").await.unwrap();
    assert_eq!(second.parent.as_deref(), Some("first"), "it is a full one");
    assert_eq!(hosts().await, ["there", "there"]);
    done(&fixture, verify().await).await;
    assert_eq!(fixture.events("backup.read-by").await.len(), 1);

    fixture.done(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    fixture.agent.mount_backups_of(&other);
    let request = RestoreBackup { host: Some("here".to_owned()), ..RestoreBackup::default() };
    let begun = service::restore(&services, &me, "web", "second", request.clone(), false).await;
    done(&fixture, begun).await;
    assert_eq!(fixture.vm(vm).await.unwrap().host_name, "here");
    assert_eq!(hosts().await, ["here", "here"]);
    let Err(problem) = service::restore(&services, &me, "web", "second", request, false).await
    else {
        panic!("its disks are where they are")
    };
    assert!(problem.detail.contains("another name, host, datastore or policy"), "{problem:?}");
}
