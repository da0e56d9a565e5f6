//! The images on a host which a migration has left there, and which the VM does not use any more: copies for a destination that did not get
//! it, or former images at its source.
//!
//! That a host says another datastore of a disk than the inventory is not enough to delete it there. A VM may have been evacuated from the
//! host, or may have changed its host with the datastores that both have, and have been moved to another datastore since: what such a host
//! knows is old, and beside it may be the note of that move, by which a deletion finds the image that is in use. So only what a
//! migration has noted is deleted, and nothing where a move leads from one of the two datastores to the other.

use sqlx::SqliteConnection;
use vmseal_api::host::{ArrivingCopy, DiskState, VmState};
use vmseal_api::id::{DatastoreId, DiskId, HostId};

use crate::operation::migration::{CHECK, CheckedClone, CheckedMigration};
use crate::operation::{Elsewhere, Operation};
use crate::store::disks::Disk;
use crate::store::tasks::Task;
use crate::store::{StoreError, evacuations, placements, tasks};

/// The copies of the migration whose destination this host was when it was given up; none where the VM was evacuated from it.
pub(super) async fn of_given_up(
    from: &mut SqliteConnection,
    disks: &[Disk],
    (host, seen): (HostId, &VmState),
) -> Result<Vec<DiskId>, StoreError> {
    let Some(taken) = evacuations::generation(&mut *from, seen.vm, host).await? else {
        return Ok(Vec::new());
    };
    let tasks = tasks::moves_of_vm(from, seen.vm).await?;
    let was_for = |task: &Task, generation: u64| {
        let given_up = matches!(
            task.operation,
            Operation::MigrateVm { to, given_up: true, .. } if to == host
        );
        given_up && generation == taken
    };
    Ok(left_by(&tasks, disks, (host, seen), was_for))
}

/// The images of migrations after which the VM got no other host. Of earlier ones, and of those of an inventory that was restored, nothing is
/// deleted: the host may have got the VM, with these images, once more.
pub(super) async fn of_migrations(
    from: &mut SqliteConnection,
    disks: &[Disk],
    (host, seen): (HostId, &VmState),
) -> Result<Vec<DiskId>, StoreError> {
    if placements::owner(&mut *from, seen.vm).await?.is_none() {
        return Ok(Vec::new());
    }
    let now = placements::generation(&mut *from, seen.vm).await?;
    let tasks = tasks::moves_of_vm(from, seen.vm).await?;
    Ok(left_by(&tasks, disks, (host, seen), |_, generation| generation >= now))
}

/// The disks that the host has where one of these tasks has left an image; `counts` says whether a migration with this generation counts.
fn left_by(
    tasks: &[Task],
    disks: &[Disk],
    (host, seen): (HostId, &VmState),
    counts: impl Fn(&Task, u64) -> bool,
) -> Vec<DiskId> {
    let mut left: Vec<ArrivingCopy> = Vec::new();
    for task in tasks {
        if let Some((generation, images)) = images_at(task, host)
            && counts(task, generation)
        {
            left.extend(images);
        }
    }
    let is_left = |disk: &&Disk| {
        left.iter().filter(|image| image.disk == disk.id).any(|image| {
            let (there, now) = (image.datastore.datastore, disk.datastore.datastore);
            let is_there = |it: &&DiskState| it.disk == disk.id;
            let said = seen.disks.iter().find(is_there).and_then(|it| it.datastore);
            said == Some(there) && there != now && !may_lead(tasks, there, now)
        })
    };
    disks.iter().filter(is_left).map(|disk| disk.id).collect()
}

/// The generation of the placement that a migration, or the sending of a clone, makes, or was to make, and the images on one of its
/// hosts that are none of the VM when it is at the other one: the copies at the destination, the former images at the source. None for
/// other tasks, and before the check is done.
fn images_at(task: &Task, host: HostId) -> Option<(u64, Vec<ArrivingCopy>)> {
    let output = task.outputs.get(CHECK)?.clone();
    let ((from, to), generation, copies, former) = match &task.operation {
        Operation::MigrateVm { from, to, .. } => {
            let noted: CheckedMigration = serde_json::from_value(output).ok()?;
            ((*from, *to), noted.generation, noted.copies, noted.former)
        }
        other => {
            let Elsewhere { from, to, .. } = other.elsewhere()?;
            let noted: CheckedClone = serde_json::from_value(output).ok()?;
            ((from, to), noted.generation, noted.copies, noted.former)
        }
    };
    let images = if host == to {
        copies
    } else if host == from {
        former
    } else {
        return None;
    };
    Some((generation, images))
}

/// Whether beside an image on one of two datastores there may be the note of a move from or to the other.
fn may_lead(tasks: &[Task], one: DatastoreId, other: DatastoreId) -> bool {
    tasks.iter().any(|task| match &task.operation {
        Operation::MoveVm { from, to, .. } => {
            (from.contains(&one) && to.datastore == other)
                || (from.contains(&other) && to.datastore == one)
        }
        // Of another version: it may be one.
        Operation::Unreadable { .. } => true,
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use vmseal_api::host::{DatastoreSpec, KeyState, Power};
    use vmseal_api::id::TaskId;

    use super::*;
    use crate::testing::Fixture;

    /// A VM, and another host that says that it has the VM's first disk on a datastore of its own.
    struct Bench {
        fixture: Fixture,
        disks: Vec<Disk>,
        /// The task that has made the VM.
        made: Task,
        to: HostId,
        there: DatastoreId,
        seen: VmState,
    }

    impl Bench {
        async fn new() -> Self {
            let fixture = Fixture::new().await;
            let (vm, task) = fixture.create("web", "encrypted").await;
            fixture.ends_well(task).await;
            let (disks, made) = (fixture.disks(vm).await, fixture.task(task).await);
            let there = DatastoreId::new();
            let (disk, facts) = (disks[0].id, disks[0].facts.clone().unwrap());
            let copy = DiskState { disk, facts, datastore: Some(there) };
            let seen = VmState::new(vm, Power::Off, KeyState::Missing);
            let seen = VmState { disks: vec![copy], ..seen };
            Self { fixture, disks, made, to: HostId::new(), there, seen }
        }

        fn at(&self, datastore: DatastoreId) -> DatastoreSpec {
            DatastoreSpec { datastore, location: self.disks[0].datastore.location.clone() }
        }

        /// A task that has ended.
        fn task(&self, operation: Operation) -> Task {
            Task { id: TaskId::new(), operation, ..self.made.clone() }
        }

        /// The migration that has left the copy on the other host.
        fn migrated(&self, generation: u64) -> Task {
            let disk = self.disks[0].id;
            let noted = CheckedMigration {
                disks: vec![disk],
                generation,
                copies: vec![ArrivingCopy { disk, datastore: self.at(self.there) }],
                former: Vec::new(),
                began: None,
            };
            let noted = serde_json::to_value(noted).unwrap();
            let task = self.task(Operation::MigrateVm {
                vm: self.seen.vm,
                from: self.fixture.host,
                to: self.to,
                encrypted: true,
                datastore: Some(self.there),
                downtime_milliseconds: None,
                compresses: false,
                given_up: false,
            });
            Task { outputs: BTreeMap::from([(CHECK.to_owned(), noted)]), ..task }
        }

        fn moved(&self, from: DatastoreId, to: DatastoreId) -> Task {
            self.task(Operation::MoveVm {
                vm: self.seen.vm,
                disks: vec![self.disks[0].id],
                all: false,
                from: vec![from],
                to: self.at(to),
            })
        }
    }

    #[tokio::test]
    async fn an_image_stays_where_a_move_may_have_left_its_note_beside_it() {
        let bench = Bench::new().await;
        let (there, now) = (bench.there, bench.disks[0].datastore.datastore);
        let other = DatastoreId::new();
        let left = |task: Task| {
            let tasks = [bench.migrated(1), task];
            left_by(&tasks, &bench.disks, (bench.to, &bench.seen), |_, _| true)
        };
        for task in [
            bench.made.clone(),
            bench.moved(other, DatastoreId::new()),
            bench.moved(other, now),
            bench.moved(there, other),
        ] {
            let what = format!("{:?}", task.operation);
            assert_eq!(left(task), [bench.disks[0].id], "{what}");
        }
        let unreadable = Operation::Unreadable {
            kind: "vm.move".to_owned(),
            vm: Some(bench.seen.vm),
            why: "a newer version began it".to_owned(),
        };
        for task in [bench.moved(there, now), bench.moved(now, there), bench.task(unreadable)] {
            let what = format!("{:?}", task.operation);
            assert_eq!(left(task), [], "{what}");
        }
    }

    #[tokio::test]
    async fn copies_of_a_migration_stay_once_the_vm_has_had_another_host() {
        let bench = Bench::new().await;
        let (vm, host) = (bench.seen.vm, bench.fixture.host);
        let mut write = bench.fixture.store.write().await.unwrap();
        let now = placements::generation(&mut write, vm).await.unwrap();
        let migrated = bench.migrated(now);
        tasks::insert(&mut write, &migrated).await.unwrap();
        tasks::update(&mut write, &migrated).await.unwrap();
        for (generation, left) in [(now, 1), (now + 1, 0)] {
            placements::set_owner(&mut write, vm, host, generation).await.unwrap();
            let found = of_migrations(&mut write, &bench.disks, (bench.to, &bench.seen)).await;
            assert_eq!(found.unwrap().len(), left, "generation {generation}");
        }
    }
}
