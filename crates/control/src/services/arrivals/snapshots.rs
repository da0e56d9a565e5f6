//! The snapshots of a VM that comes from another control plane. They are in the inventory as soon as the VM is: nobody can revert to one or
//! delete it before the guest runs here, and where the VM does not arrive they go with it.

use std::collections::BTreeMap;

use sqlx::SqliteConnection;
use vmseal_api::id::{SnapshotId, VmId, check_name};
use vmseal_api::limits::SNAPSHOTS_MAX;
use vmseal_api::model::SnapshotState;
use vmseal_api::problem::Problem;
use vmseal_api::remote::{ArrivingVm, GENERATION_MAX, SnapshotOfArrival};
use vmseal_api::request::DESCRIPTION_MAX;

use crate::store::snapshots::{self, Snapshot};
use crate::store::{StoreError, memory_generations};

/// Checks what another control plane says of them: each keeps disks of the VM, and together they are trees.
pub(super) fn check(vm: &ArrivingVm) -> Result<(), Problem> {
    let wrong = |what: String| Err(Problem::invalid("vm.snapshots", what));
    let all = &vm.snapshots;
    if all.len() > SNAPSHOTS_MAX {
        return wrong(format!("a VM has {SNAPSHOTS_MAX} snapshots at most"));
    }
    let parents: BTreeMap<_, _> = all.iter().map(|it| (it.id, it.parent)).collect();
    if parents.len() != all.len() {
        return wrong("two of them have one id".to_owned());
    }
    if all.iter().filter(|it| it.current).count() > 1 {
        return wrong("two of them are the current one".to_owned());
    }
    for snapshot in all {
        let name = &snapshot.name;
        check_name(name).map_err(|error| Problem::invalid("vm.snapshots", error.to_string()))?;
        if snapshot.description.len() > DESCRIPTION_MAX {
            return wrong(format!("'{name}' has a description of over {DESCRIPTION_MAX} bytes"));
        }
        if !snapshot.disks.iter().all(|kept| vm.disks.iter().any(|disk| disk.id == *kept)) {
            return wrong(format!("'{name}' keeps a disk that the VM does not have"));
        }
        if snapshot.memory_generation.is_some_and(|number| number > GENERATION_MAX) {
            return wrong(format!("'{name}' has a memory of a generation that there cannot be"));
        }
        if !is_rooted(snapshot, &parents) {
            return wrong(format!(
                "'{name}' was taken after one that is not told, or after itself"
            ));
        }
    }
    Ok(())
}

/// Whether one has a first of its tree: no way to it is longer than there are snapshots.
fn is_rooted(of: &SnapshotOfArrival, parents: &BTreeMap<SnapshotId, Option<SnapshotId>>) -> bool {
    let mut next = of.parent;
    for _ in 0..parents.len() {
        let Some(id) = next else { return true };
        let Some(parent) = parents.get(&id) else { return false };
        next = *parent;
    }
    next.is_none()
}

/// Adds them to the inventory, with their VM.
///
/// # Errors
/// [`StoreError::Taken`]: two have one name.
pub(super) async fn insert(
    to: &mut SqliteConnection,
    vm: VmId,
    all: Vec<SnapshotOfArrival>,
) -> Result<(), StoreError> {
    for told in all {
        let generation = told.memory_generation;
        let snapshot = Snapshot {
            id: told.id,
            vm,
            name: told.name,
            description: told.description,
            parent: told.parent,
            created: told.created,
            state: SnapshotState::Ready,
            quiesced: told.quiesced,
            current: told.current,
            memory: told.memory,
            disks: told.disks,
        };
        snapshots::insert(&mut *to, &snapshot).await?;
        if let Some(generation) = generation {
            memory_generations::take_over(&mut *to, &snapshot, generation).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;
    use vmseal_api::hardware::Hardware;
    use vmseal_api::host::DiskRole;
    use vmseal_api::id::DiskId;
    use vmseal_api::remote::DiskOfArrival;

    use super::*;

    /// A snapshot of one disk.
    fn snapshot(name: &str, parent: Option<SnapshotId>, disk: DiskId) -> SnapshotOfArrival {
        SnapshotOfArrival {
            id: SnapshotId::new(),
            name: name.to_owned(),
            description: String::new(),
            parent,
            created: Timestamp::now(),
            quiesced: None,
            current: false,
            memory: false,
            memory_generation: None,
            disks: vec![disk],
        }
    }

    /// A VM with a disk and two snapshots, one after the other.
    fn vm() -> ArrivingVm {
        let disk = DiskOfArrival {
            id: DiskId::new(),
            name: "system".to_owned(),
            size: 1 << 20,
            encrypted: true,
            role: DiskRole::default(),
        };
        let one = snapshot("one", None, disk.id);
        let two = snapshot("two", Some(one.id), disk.id);
        ArrivingVm {
            id: VmId::new(),
            name: "web".to_owned(),
            description: String::new(),
            labels: Default::default(),
            autostart: false,
            migration_encryption: Default::default(),
            on_drain: Default::default(),
            has_key: true,
            vcpus: 1,
            memory: 32 << 20,
            hardware: Hardware::default(),
            disks: vec![disk],
            nics: Vec::new(),
            snapshots: vec![one, two],
            kept: None,
        }
    }

    #[test]
    fn snapshots_that_are_no_trees_of_the_vms_disks_are_refused() {
        check(&vm()).unwrap();
        let refused = |change: &dyn Fn(&mut Vec<SnapshotOfArrival>)| {
            let mut vm = vm();
            change(&mut vm.snapshots);
            check(&vm).unwrap_err().detail
        };
        let circle = refused(&|all| all[0].parent = Some(all[1].id));
        assert!(circle.contains("after itself"), "{circle}");
        let unknown = refused(&|all| all[1].parent = Some(SnapshotId::new()));
        assert!(unknown.contains("not told"), "{unknown}");
        let twice = refused(&|all| all[1].id = all[0].id);
        assert!(twice.contains("one id"), "{twice}");
        let current = refused(&|all| all.iter_mut().for_each(|it| it.current = true));
        assert!(current.contains("the current one"), "{current}");
        let other = refused(&|all| all[0].disks.push(DiskId::new()));
        assert!(other.contains("does not have"), "{other}");
        let number = refused(&|all| all[0].memory_generation = Some(u64::MAX));
        assert!(number.contains("generation"), "{number}");
    }
}
