use std::path::Path;

use vmseal_api::host::{Device, DiskRole};
use vmseal_api::id::DiskId;

use super::*;
use crate::storage::datastore::{self, tests::unmarked};
use crate::storage::locked::{make_locked, share_lock};

/// A VM with a disk, and that of a TPM which keeps `before`, on one datastore.
struct Bench {
    _directory: tempfile::TempDir,
    spec: VmSpec,
}

impl Bench {
    fn new() -> Self {
        let (directory, place) = unmarked();
        datastore::probe(&place).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        for (name, role) in [("system", DiskRole::Data), ("tpm", DiskRole::Tpm)] {
            let disk = crate::rules::tests::disk(name);
            spec.devices.push(Device::Disk(DiskSpec { datastore: place.clone(), role, ..disk }));
        }
        let this = Self { _directory: directory, spec };
        std::fs::create_dir(this.home().path()).unwrap();
        drop(make_locked(&this.home().image(this.id())).unwrap());
        keep(&this.plain(), "before");
        this
    }

    fn disk(&self) -> &DiskSpec {
        self.spec.disks().nth(1).unwrap()
    }

    fn id(&self) -> DiskId {
        self.disk().disk
    }

    fn home(&self) -> Home {
        Home::of(&self.disk().datastore, self.spec.vm).unwrap()
    }

    fn plain(&self) -> PathBuf {
        self.home().tpm_state(self.id())
    }

    fn of(&self, migration: MigrationId) -> PathBuf {
        self.home().arriving_tpm(self.id(), migration)
    }

    /// What the TPM keeps, as the next start of the VM finds it.
    fn kept(&self) -> String {
        let state = tpm_state::read(&of(&self.spec, self.disk()).unwrap()).unwrap();
        String::from_utf8(state).unwrap()
    }

    fn arriving(&self) -> usize {
        self.home().arriving_tpms(self.id()).unwrap().len()
    }
}

/// Has a directory keep this.
fn keep(path: &Path, what: &str) {
    drop(tpm_state::make_of(path, what.as_bytes(), None).unwrap());
}

/// An agent dies after each of the steps by which what came takes its place, and the next one goes on.
#[test]
fn what_the_tpm_keeps_is_whole_whatever_step_of_the_switch_was_the_last() {
    for done in 0..=5 {
        let bench = Bench::new();
        let (disk, migration) = (bench.disk(), MigrationId::new());
        let (plain, arrived) = (bench.plain(), bench.of(migration));
        // The destination's swtpm has made its directory, and not written to it yet.
        drop(tpm_state::make(&arrived, None).unwrap());
        if done >= 1 {
            keep(&arrived, "after");
        }
        if done >= 2 {
            lease::take_with_tpm(&bench.spec, 8, migration).unwrap();
        }
        if done >= 3 {
            std::fs::remove_file(plain.join("tpm2-00.permall")).unwrap();
        }
        if done >= 4 {
            tpm_state::remove(&plain).unwrap();
        }
        if done >= 5 {
            std::fs::rename(&arrived, &plain).unwrap();
        }
        let expected = if done >= 2 { "after" } else { "before" };
        assert_eq!(bench.kept(), expected, "{done}");
        for _ in 0..2 {
            settle_at_rest(&bench.spec, disk).unwrap();
            assert_eq!((bench.kept(), bench.arriving()), (expected.to_owned(), 0), "{done}");
            assert_eq!(tpm_state::read(&plain).unwrap(), expected.as_bytes(), "{done}");
        }
    }
}

#[test]
fn a_commit_takes_the_lease_and_leaves_one_directory_and_none_takes_it_without_what_came() {
    let bench = Bench::new();
    let (disk, migration, failed) = (bench.disk(), MigrationId::new(), MigrationId::new());
    keep(&bench.of(failed), "failed");
    let refused = take(&bench.spec, disk, 8, migration).unwrap_err();
    assert_eq!((refused.code, lease::read(&bench.spec).unwrap()), (ErrorCode::Damaged, 0));
    assert_eq!(bench.kept(), "before");
    keep(&bench.of(migration), "after");
    take(&bench.spec, disk, 8, migration).unwrap();
    assert_eq!(lease::read(&bench.spec).unwrap(), 8);
    assert_eq!((bench.kept().as_str(), bench.arriving()), ("after", 0));
    // It is on its way again. The name that the lease has is that of no directory any more.
    let next = MigrationId::new();
    keep(&bench.of(next), "later");
    assert_eq!(bench.kept(), "after");
    take(&bench.spec, disk, 9, next).unwrap();
    assert_eq!(bench.kept(), "later");
    // What a destination removes late is nothing that others use.
    give_up(&bench.spec, disk, migration).unwrap();
    assert_eq!(bench.kept(), "later");
}

#[test]
fn a_migration_that_fails_leaves_nothing_and_takes_nothing() {
    let bench = Bench::new();
    let (disk, migrations) = (bench.disk(), [MigrationId::new(), MigrationId::new()]);
    let [gone, other] = migrations;
    for migration in migrations {
        keep(&bench.of(migration), "failed");
    }
    give_up(&bench.spec, disk, gone).unwrap();
    give_up(&bench.spec, disk, gone).unwrap();
    assert_eq!((bench.of(gone).exists(), bench.of(other).exists()), (false, true));
    // The guest runs there.
    lease::take_with_tpm(&bench.spec, 8, other).unwrap();
    give_up(&bench.spec, disk, other).unwrap();
    drop_debris(&bench.spec, disk).unwrap();
    assert_eq!(bench.kept(), "failed", "what the lease names");
    keep(&bench.of(gone), "debris");
    drop_debris(&bench.spec, disk).unwrap();
    assert!(!bench.of(gone).exists());
    // The lease has lost the name of all that is left.
    lease::take(&bench.spec, 9).unwrap();
    tpm_state::remove(&bench.plain()).unwrap();
    settle_at_rest(&bench.spec, disk).unwrap();
    assert!(bench.of(other).exists());
    keep(&bench.plain(), "restored");
    settle_at_rest(&bench.spec, disk).unwrap();
    assert_eq!((bench.kept().as_str(), bench.arriving()), ("restored", 0));
}

#[test]
fn before_a_guest_is_sent_its_directory_has_its_name() {
    let bench = Bench::new();
    let (disk, came, failed) = (bench.disk(), MigrationId::new(), MigrationId::new());
    keep(&bench.of(failed), "failed");
    before_sent(&bench.spec, disk, None).unwrap();
    assert_eq!((bench.kept().as_str(), bench.arriving()), ("before", 0));
    keep(&bench.of(came), "after");
    lease::take_with_tpm(&bench.spec, 8, came).unwrap();
    // Of a guest that came with an earlier lease it is not this host's to rename.
    before_sent(&bench.spec, disk, Some(7)).unwrap();
    assert_eq!((bench.kept().as_str(), bench.arriving()), ("after", 1));
    before_sent(&bench.spec, disk, Some(8)).unwrap();
    assert_eq!((bench.kept().as_str(), bench.arriving()), ("after", 0));
    // The next one takes the lease without a name, and nothing is lost.
    lease::take(&bench.spec, 9).unwrap();
    assert_eq!(bench.kept(), "after");
}

#[test]
fn two_tpms_have_the_disk_while_its_guest_moves_and_nobody_else_has() {
    let bench = Bench::new();
    let (disk, image) = (bench.disk(), bench.home().image(bench.id()));
    let source = open_locked(&image, Access::Write).unwrap().unwrap();
    // As an earlier version had it.
    let refused = before_sent(&bench.spec, disk, None).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    assert!(refused.detail.contains("--datastore"), "{refused}");
    share_lock(&source).unwrap();
    before_sent(&bench.spec, disk, None).unwrap();
    let destination = open_locked(&image, Access::Read).unwrap().unwrap();
    keep(&bench.of(MigrationId::new()), "arriving");
    let in_use = || settle_at_rest(&bench.spec, disk).is_err_and(|it| it.code == ErrorCode::InUse);
    assert!(in_use());
    drop(source);
    assert!(in_use(), "the destination's TPM still has it");
    drop(destination);
    settle_at_rest(&bench.spec, disk).unwrap();
    assert_eq!(bench.arriving(), 0);
}
