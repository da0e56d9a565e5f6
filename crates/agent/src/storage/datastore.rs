//! Directory datastores: the mark that identifies one, its free room, and debris in it.
//!
//! ```text
//! <path>/vmseal-datastore.json   which datastore this is
//! <path>/<vm id>/                the disks of a VM ([`crate::storage::home`])
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::unistd::{AccessFlags, faccessat};
use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::{DatastoreSpec, DatastoreUsage};
use vmseal_api::id::{DatastoreId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::rbd::Mounted;

use crate::storage::file_error::failed;
use crate::storage::home;
use crate::storage::mark::{
    MARKER, check_marker, directory, marked, marker, put, put_shared, usage, with_mark,
};
use crate::storage::pool::{facts, fencing, mounted, osds};

/// How deep a new datastore is searched for others below it.
const BELOW_DEPTH_MAX: usize = 5;

/// How many entries are searched: in a full file system that takes seconds.
const BELOW_ENTRIES_MAX: usize = 200_000;

/// One lock per datastore, held while it is swept and while it is marked as shared.
static SWEEPING: Mutex<BTreeMap<DatastoreId, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

fn sweeping(datastore: DatastoreId) -> Arc<Mutex<()>> {
    let mut all = SWEEPING.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(all.entry(datastore).or_default())
}

/// Removes half-made disks that no process works on: in a shared datastore those of this host's own VMs alone, as the
/// others' may be another host's work. Blocks.
///
/// # Errors
/// `wrong-state` when the place does not carry its mark.
pub fn sweep(spec: &DatastoreSpec, is_own: &dyn Fn(VmId) -> bool) -> Result<(), Problem> {
    let sweeping = sweeping(spec.datastore);
    // The mark is read under the lock: who marks it as shared waits for the sweeps that have not seen that.
    let _sweeping = sweeping.lock().unwrap_or_else(PoisonError::into_inner);
    let (path, mark) = with_mark(spec)?;
    if mark.is_shared() {
        home::sweep(path, is_own);
    } else {
        home::sweep(path, &|_| true);
    }
    Ok(())
}

/// Marks a datastore as shared, for good. Blocks while it is being swept.
///
/// # Errors
/// `wrong-state` when the place does not carry its mark; those of the file system.
pub fn mark_shared(spec: &DatastoreSpec) -> Result<(), Problem> {
    let sweeping = sweeping(spec.datastore);
    let _sweeping = sweeping.lock().unwrap_or_else(PoisonError::into_inner);
    let (path, mark) = with_mark(spec)?;
    if mark.is_shared() {
        return Ok(());
    }
    put_shared(path, spec)
}

/// Makes a datastore known: marks it at the first use, and measures it.
///
/// # Errors
/// `wrong-state` when it carries another datastore's mark; `invalid-request` without the directory.
pub fn probe(spec: &DatastoreSpec) -> Result<DatastoreUsage, Problem> {
    let path = directory(spec)?;
    match marker(path)? {
        Some(marker) => check_marker(path, &marker, spec)?,
        None => {
            check_alone(path)?;
            put(path, spec)?;
        }
    }
    usage(path)
}

/// Like [`probe`], without changing anything.
///
/// # Errors
/// Those of [`probe`].
pub fn examine(spec: &DatastoreSpec) -> Result<DatastoreUsage, Problem> {
    let path = directory(spec)?;
    match marker(path)? {
        Some(marker) => check_marker(path, &marker, spec)?,
        None => {
            check_alone(path)?;
            faccessat(AT_FDCWD, path, AccessFlags::W_OK | AccessFlags::X_OK, AtFlags::AT_EACCESS)
                .map_err(|error| failed(&path.join(MARKER), "written", &error.into()))?
        }
    }
    usage(path)
}

/// Checks that no datastore is above or below a new one: each would take the other's disks for its own.
fn check_alone(place: &Path) -> Result<(), Problem> {
    let nested = |other: &Path| {
        let what = format!(
            "{} is a datastore, and one datastore must not be inside another: name a directory beside it",
            other.display()
        );
        Err(Problem::invalid("location.path", what))
    };
    let real = place.canonicalize().map_err(|error| failed(place, "read", &error))?;
    let is_marked = |path: &Path| path.join(MARKER).symlink_metadata().is_ok();
    if let Some(above) = real.ancestors().skip(1).find(|above| is_marked(above)) {
        return nested(above);
    }
    let (mut todo, mut entries) = (vec![(real, 0)], 0);
    while let Some((directory, depth)) = todo.pop() {
        // An unreadable directory is not ours: our directories belong to the agent.
        for entry in std::fs::read_dir(&directory).into_iter().flatten().flatten() {
            entries += 1;
            if entries > BELOW_ENTRIES_MAX {
                return Ok(());
            }
            // Links are not followed.
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if is_marked(&entry.path()) {
                return nested(&entry.path());
            }
            if depth < BELOW_DEPTH_MAX {
                todo.push((entry.path(), depth + 1));
            }
        }
    }
    Ok(())
}

/// Measures a datastore. Blocks, and for long where a file system hangs.
#[must_use]
pub fn condition(spec: &DatastoreSpec) -> DatastoreCondition {
    match available(spec) {
        Ok(available) => available,
        Err(problem) if problem.code == ErrorCode::WrongState => {
            DatastoreCondition::WrongMark { detail: problem.detail }
        }
        Err(problem) => DatastoreCondition::Unavailable { detail: problem.detail },
    }
}

fn available(spec: &DatastoreSpec) -> Result<DatastoreCondition, Problem> {
    let usage = marked(spec).and_then(usage)?;
    let (pools, osds) = (facts(&spec.location), osds(&spec.location));
    let fencing = fencing(&spec.location);
    // Last: what served the pool until here has given the other answers, or none.
    let mounted = mounted(&spec.location)?;
    let mount = mounted.as_ref().and_then(Mounted::facts);
    let mounted_key = mounted.and_then(|it| it.key);
    Ok(DatastoreCondition::Available { usage, pools, mounted_key, mount, osds, fencing })
}

#[cfg(test)]
pub(super) mod tests {
    use vmseal_api::host::DatastoreLocation;
    use vmseal_api::id::DiskId;

    use super::*;
    use crate::storage::home::Home;

    /// A directory that is not a datastore yet.
    pub fn unmarked() -> (tempfile::TempDir, DatastoreSpec) {
        let directory = tempfile::tempdir().unwrap();
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
        (directory, spec)
    }

    #[test]
    fn a_datastore_is_marked_once_and_another_ones_place_is_refused() {
        let (directory, spec) = unmarked();
        assert_eq!(Home::of(&spec, VmId::new()).unwrap_err().code, ErrorCode::WrongState);
        let looked_at = examine(&spec).unwrap();
        assert!(!directory.path().join(MARKER).exists(), "examining it has marked it");
        let usage = probe(&spec).unwrap();
        assert_eq!(looked_at.capacity, usage.capacity);
        examine(&spec).unwrap();
        assert!(usage.capacity >= usage.free && usage.free > 0);
        probe(&spec).unwrap();
        let other = DatastoreSpec { datastore: DatastoreId::new(), ..spec.clone() };
        assert_eq!(probe(&other).unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(examine(&other).unwrap_err().code, ErrorCode::WrongState);
        assert_eq!(Home::of(&other, VmId::new()).unwrap_err().code, ErrorCode::WrongState);
        std::fs::write(directory.path().join(MARKER), "{").unwrap();
        assert_eq!(probe(&spec).unwrap_err().code, ErrorCode::Damaged);
        for path in ["relative", "/no/such/place", "/dev/null"] {
            let location = DatastoreLocation::Dir { path: path.into() };
            let place = DatastoreSpec { location, ..spec.clone() };
            for problem in [probe(&place).unwrap_err(), examine(&place).unwrap_err()] {
                assert_eq!(problem.code, ErrorCode::InvalidRequest, "{path}");
            }
        }
    }

    /// What an agent left that died while it made a disk.
    fn debris(datastore: &Path, vm: VmId) -> std::path::PathBuf {
        let home = datastore.join(vm.to_string());
        std::fs::create_dir_all(&home).unwrap();
        let path = home.join(format!("{}.raw.creating", DiskId::new()));
        std::fs::write(&path, "half of it").unwrap();
        path
    }

    #[test]
    fn of_a_shared_datastore_a_host_sweeps_its_own_vms_alone() {
        let (directory, spec) = unmarked();
        assert_eq!(mark_shared(&spec).unwrap_err().code, ErrorCode::WrongState);
        probe(&spec).unwrap();
        let (own, other) = (VmId::new(), VmId::new());
        let mine = |vm| vm == own;
        let removed = [debris(directory.path(), own), debris(directory.path(), other)];
        sweep(&spec, &mine).unwrap();
        assert!(removed.iter().all(|path| !path.exists()), "of one host it is all its own");
        for _ in 0..2 {
            mark_shared(&spec).unwrap();
            let (removed, kept) = (debris(directory.path(), own), debris(directory.path(), other));
            sweep(&spec, &mine).unwrap();
            assert!(!removed.exists() && kept.exists());
            // It is still shared when it is added again.
            probe(&spec).unwrap();
            sweep(&spec, &|_| false).unwrap();
            assert!(kept.exists());
        }
        let mark = std::fs::read_to_string(directory.path().join(MARKER)).unwrap();
        assert!(mark.contains("\"version\":2"), "agents of before would sweep it: {mark}");
    }

    #[test]
    fn a_datastore_within_another_is_refused_from_above_and_below() {
        let (directory, spec) = unmarked();
        let at = |path: &Path| {
            let location = DatastoreLocation::Dir { path: path.to_owned() };
            DatastoreSpec { datastore: DatastoreId::new(), location }
        };
        let below = directory.path().join("deep/inner");
        std::fs::create_dir_all(&below).unwrap();
        let inner = at(&below);
        probe(&inner).unwrap();
        for refused in [probe(&spec).unwrap_err(), examine(&spec).unwrap_err()] {
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
            assert!(refused.detail.contains("deep/inner"), "{refused}");
        }
        assert!(!directory.path().join(MARKER).exists());
        std::fs::remove_file(below.join(MARKER)).unwrap();
        probe(&spec).unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&below, &link).unwrap();
        for place in [&below, &link] {
            for refused in [probe(&at(place)).unwrap_err(), examine(&at(place)).unwrap_err()] {
                assert_eq!(refused.code, ErrorCode::InvalidRequest, "{}", place.display());
            }
        }
        assert!(!below.join(MARKER).exists());
        // One that is a datastore already stays one.
        probe(&spec).unwrap();
    }
}
