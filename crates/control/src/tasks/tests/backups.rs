//! Backups that are made, verified, restored and deleted.

use jiff::Timestamp;
use vmseal_api::host::KeyReference;
use vmseal_api::id::{BackupId, SnapshotId};
use vmseal_api::model::{BackupState, SnapshotState};

use super::*;
use crate::store::{backups, keys, snapshots};

/// What is done with backups.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Backup {
    /// Of a VM that runs, above a full one.
    Create,
    Verify,
    /// Of a VM that is off.
    Restore,
    /// Of a VM that was deleted.
    RestoreDeleted,
    /// The second of two.
    Delete,
}

const DIRECTORY: &str = "/backups";

async fn rows(fixture: &Fixture, vm: VmId) -> Vec<backups::Backup> {
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
    };
    let kept = snapshots::Snapshot {
        memory: false,
        id: snapshot,
        vm,
        name: crate::tasks::backups::snapshot_name(snapshot),
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

async fn made(fixture: &Fixture, vm: VmId, name: &str) {
    fixture.done(reserve(fixture, vm, name).await, "web").await;
}

async fn living_keys(fixture: &Fixture, vm: VmId) -> Vec<KeyReference> {
    keys::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

impl Backup {
    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let vm = match self {
            Self::Create | Self::Verify => fixture.running("web").await,
            _ => fixture.made("web", "encrypted").await,
        };
        made(fixture, vm, "first").await;
        if self != Self::Create {
            made(fixture, vm, "second").await;
        }
        if self == Self::RestoreDeleted {
            fixture.done(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
            assert_eq!(living_keys(fixture, vm).await.len(), 1, "the backups' key is destroyed");
        }
        vm
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        if self == Self::Create {
            return reserve(fixture, vm, "second").await;
        }
        let rows = rows(fixture, vm).await;
        let backup = rows.iter().find(|row| row.name == "second").unwrap();
        let disks = fixture.disks(vm).await.iter().map(|disk| disk.id).collect();
        match self {
            Self::Verify => Operation::VerifyBackup { vm, backup: backup.id },
            Self::Restore => Operation::RestoreBackup { vm, backup: backup.id, disks },
            Self::RestoreDeleted => fixture.restoring_deleted(backup).await,
            _ => Operation::DeleteBackup { vm, backup: backup.id },
        }
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        let (vm, backup, disks) = (VmId::new(), BackupId::new(), Vec::new());
        steps::of(&match self {
            Self::Create => {
                let snapshot = SnapshotId::new();
                Operation::BackUpVm { vm, backup, snapshot, quiesce: true }
            }
            Self::Verify => Operation::VerifyBackup { vm, backup },
            Self::Restore => Operation::RestoreBackup { vm, backup, disks },
            Self::RestoreDeleted => {
                Operation::RestoreDeletedVm { vm, backup, disks, manifest: String::new() }
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
            Self::Create => {
                assert_eq!(last.parent, Some(rows[0].id), "{what}");
                assert!(last.bytes.is_some() && last.key.is_some(), "{what}: {last:?}");
            }
            Self::Verify => assert!(last.verified.is_some(), "{what}"),
            Self::Restore | Self::RestoreDeleted => {
                for disk in fixture.disks(vm).await {
                    assert_eq!(fixture.agent.restored(disk.id), (Some(last.id), false), "{what}");
                }
            }
            Self::Delete => assert_eq!(living_keys(fixture, vm).await.len(), 1, "{what}"),
        }
    }

    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        let expected: &[&str] =
            if self == Self::Create { &["first"] } else { &["first", "second"] };
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
        let again = match (self, kept.first()) {
            (Self::Create, Some(kept)) => Some(Operation::DeleteSnapshot { vm, snapshot: kept.id }),
            (Self::Create, None) => None,
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

impl Fixture {
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
async fn a_backup_is_verified_or_not() {
    matrix(Kind::Backup(Backup::Verify)).await;
}

#[tokio::test]
async fn a_restore_is_done_or_nothing_has_changed() {
    matrix(Kind::Backup(Backup::Restore)).await;
}

#[tokio::test]
async fn a_deleted_vm_is_restored_or_nothing_of_it_is_there() {
    matrix(Kind::Backup(Backup::RestoreDeleted)).await;
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
