//! The lease of a VM's disks: which placement of the VM last used them.
//!
//! ```text
//! <datastore>/<vm id>/vm.lease   {"version":1,"generation":7}
//! <datastore>/<vm id>/vm.lease   {"version":1,"generation":8,"tpm":"0197…"}   what the TPM keeps came with that migration
//! ```
//! A host that receives a running VM takes the lease before the guest runs there. A host that has handed the guest over lets it
//! go on only if the lease is as it was then: otherwise the guest has run elsewhere, and its memory no longer belongs to the
//! disks. The lock of each image keeps two processes from one disk at a time; the lease keeps a stale guest from it afterwards.
//! A host that gets a VM from one that does not answer ([`crate::storage::fence`]) takes it, too: a host that starts another filter for a guest
//! of its own checks that the lease is none that was taken since.
//! It also says which of two directories has what the VM's TPM keeps, from the same instant on ([`crate::storage::tpm_place`]); earlier
//! versions skip that.
//! The file is beside the VM's first disk, and follows it to another datastore: [`follow`] before the new place is on record, [`noted`] with it.
//! Another one may be there from when the disk was there before. A VM without disks has none, and nothing that could be harmed.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmseal_api::host::VmSpec;
use vmseal_api::id::MigrationId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::home::Home;
use crate::storage::json_file;

/// The version of the file.
const VERSION: u32 = 1;

/// The longest file, in bytes.
const LENGTH_MAX: u64 = 4096;

#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    generation: u64,
    /// The migration that what the VM's TPM keeps came with, on the datastore that both hosts have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tpm: Option<MigrationId>,
}

/// Where the lease of a VM is; none for a VM without disks.
fn path(spec: &VmSpec) -> Result<Option<PathBuf>, Problem> {
    let Some(first) = spec.disks().next() else { return Ok(None) };
    Ok(Some(Home::of(&first.datastore, spec.vm)?.lease()))
}

/// The generation of the placement that last took it; 0 where none has. Blocks.
///
/// # Errors
/// `damaged`, or those of the file system.
pub fn read(spec: &VmSpec) -> Result<u64, Problem> {
    match path(spec)? {
        Some(path) => generation_in(&path),
        None => Ok(0),
    }
}

/// The migration that what the VM's TPM keeps came with when the lease was taken last, on the datastore that both hosts have; none where it
/// came in another way, or not at all. Blocks.
///
/// # Errors
/// As [`read`].
pub fn tpm(spec: &VmSpec) -> Result<Option<MigrationId>, Problem> {
    let Some(path) = path(spec)? else { return Ok(None) };
    Ok(read_at(&path)?.and_then(|stored| stored.tpm))
}

/// The same of the VM whose first disk is in this home. Blocks.
///
/// # Errors
/// As [`read`].
pub fn generation_at(home: &Home) -> Result<u64, Problem> {
    generation_in(&home.lease())
}

/// Checks that a guest has not run elsewhere since it began to run here, when the lease was of this generation; none where that is not known.
/// Asked with the locks of the images: who takes these after that takes them from the process that has asked. Blocks.
///
/// # Errors
/// `conflict` where it has; those of [`read`].
pub fn check(spec: &VmSpec, began: Option<u64>) -> Result<(), Problem> {
    let Some(began) = began else { return Ok(()) };
    // An earlier one is that of a datastore that an earlier version has moved the first disk to.
    if read(spec)? <= began {
        return Ok(());
    }
    let what = format!(
        "VM '{}' has been given to another host since its guest began to run here, and what this one remembers no longer belongs to its disks",
        spec.name
    );
    Err(Problem::new(ErrorCode::Conflict, what))
}

/// What is on record of a guest as `began` ([`check`]) once its VM is `new`: at least the lease that is beside its first disk then. That may be later
/// than the one that it began with, though nobody has taken it since: it was left there when the disk was there before. Generations only grow, so
/// one that is taken from now on is later than both. Blocks.
///
/// # Errors
/// As [`check`], of the VM as it was: the disk's new place is not to go on record then.
pub fn noted(known: &VmSpec, new: &VmSpec, began: Option<u64>) -> Result<Option<u64>, Problem> {
    let Some(generation) = began.filter(|_| !has_same_place(known, new)) else {
        return Ok(began);
    };
    // In this order: another host that gets the VM takes the lease where the first disk was before it takes any other one. So this one is none of
    // such a host if that is as it was afterwards.
    let there = read(new)?;
    check(known, began)?;
    Ok(Some(generation.max(there)))
}

/// Has the lease beside the first disk of `new` be as late as that beside the first disk of `known`, and as what is on record of its guest, if one
/// runs; and name what that names. Else a guest that was given away would find an earlier one where the disk has come back to. Can be repeated. Blocks.
///
/// # Errors
/// As [`noted`]; those of writing it.
pub fn follow(known: &VmSpec, new: &VmSpec, began: Option<u64>) -> Result<(), Problem> {
    if has_same_place(known, new) {
        return Ok(());
    }
    let (Some(from), Some(to)) = (path(known)?, path(new)?) else { return Ok(()) };
    check(known, began)?;
    let (here, there) = (stored_in(&from)?, stored_in(&to)?);
    let later = if there.generation > here.generation { &there } else { &here };
    let generation = later.generation.max(began.unwrap_or(0));
    if (generation, later.tpm) == (there.generation, there.tpm) {
        return Ok(());
    }
    json_file::write(&to, &Stored { version: VERSION, generation, tpm: later.tpm })
}

/// Whether the lease of both is one file.
fn has_same_place(known: &VmSpec, new: &VmSpec) -> bool {
    let place = |spec: &VmSpec| spec.disks().next().map(|first| first.datastore.datastore);
    place(known) == place(new)
}

/// The lease in a file; where there is none, one that nobody has taken.
fn stored_in(path: &Path) -> Result<Stored, Problem> {
    Ok(read_at(path)?.unwrap_or(Stored { version: VERSION, generation: 0, tpm: None }))
}

fn generation_in(path: &Path) -> Result<u64, Problem> {
    Ok(stored_in(path)?.generation)
}

fn read_at(path: &Path) -> Result<Option<Stored>, Problem> {
    let Some(text) = json_file::read(path, LENGTH_MAX)? else { return Ok(None) };
    let damaged = |what: String| {
        let what = format!("{}, the lease of the VM's disks, {what}", path.display());
        Problem::new(ErrorCode::Damaged, what)
    };
    match serde_json::from_slice::<Stored>(&text) {
        Ok(stored) if stored.version == VERSION => Ok(Some(stored)),
        Ok(Stored { version, .. }) => {
            Err(damaged(format!("has version {version}: use a newer vmseal")))
        }
        Err(error) => Err(damaged(format!("is damaged: {error}"))),
    }
}

/// Takes it. When this returns, no guest that was handed over before goes on. Blocks.
///
/// # Errors
/// `conflict` where a later placement has it; those of [`read`].
pub fn take(spec: &VmSpec, generation: u64) -> Result<(), Problem> {
    take_with(spec, generation, None)
}

/// The same; from then on what the VM's TPM keeps is what came with this migration. Blocks.
///
/// # Errors
/// As [`take`].
pub fn take_with_tpm(spec: &VmSpec, generation: u64, tpm: MigrationId) -> Result<(), Problem> {
    take_with(spec, generation, Some(tpm))
}

/// The same for a VM that has not come by a migration: what its TPM keeps stays where it is. Blocks.
///
/// # Errors
/// As [`take`].
pub fn take_as_it_is(spec: &VmSpec, generation: u64) -> Result<(), Problem> {
    let tpm = tpm(spec)?;
    take_with(spec, generation, tpm)
}

fn take_with(spec: &VmSpec, generation: u64, tpm: Option<MigrationId>) -> Result<(), Problem> {
    let Some(path) = path(spec)? else { return Ok(()) };
    let before = generation_in(&path)?;
    if before > generation {
        let what = format!(
            "the disks of VM '{}' belong to a later placement of it ({before}, and this is {generation})",
            spec.name
        );
        return Err(Problem::new(ErrorCode::Conflict, what));
    }
    json_file::write(&path, &Stored { version: VERSION, generation, tpm })
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device};
    use vmseal_api::id::DatastoreId;

    use super::*;
    use crate::storage::datastore;
    use crate::storage::datastore::tests::unmarked;

    #[test]
    fn a_lease_is_taken_by_later_placements_and_by_no_earlier_one() {
        let directory = tempfile::tempdir().unwrap();
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        let mut spec = crate::process::run_dir::tests::spec();
        spec.devices.retain(|device| !matches!(device, Device::Disk(_)));
        assert_eq!(read(&spec).unwrap(), 0);
        take(&spec, 9).unwrap();
        assert_eq!(read(&spec).unwrap(), 0, "a VM without disks has none");
        let mut disk = crate::rules::tests::disk("system");
        disk.datastore = place;
        spec.devices.push(Device::Disk(disk));
        std::fs::create_dir(directory.path().join(spec.vm.to_string())).unwrap();
        assert_eq!(read(&spec).unwrap(), 0);
        for generation in [2, 2, 5] {
            take(&spec, generation).unwrap();
            assert_eq!(read(&spec).unwrap(), generation);
        }
        for began in [None, Some(5), Some(6)] {
            check(&spec, began).unwrap();
        }
        assert_eq!(check(&spec, Some(4)).unwrap_err().code, ErrorCode::Conflict);
        assert_eq!(take(&spec, 4).unwrap_err().code, ErrorCode::Conflict);
        assert_eq!(read(&spec).unwrap(), 5);
        // As earlier versions write it, and read it.
        let text = || std::fs::read_to_string(path(&spec).unwrap().unwrap()).unwrap();
        assert_eq!(
            (text().as_str(), tpm(&spec).unwrap()),
            (r#"{"version":1,"generation":5}"#, None)
        );
        let migration = MigrationId::new();
        take_with_tpm(&spec, 5, migration).unwrap();
        assert_eq!((read(&spec).unwrap(), tpm(&spec).unwrap()), (5, Some(migration)));
        take_as_it_is(&spec, 6).unwrap();
        assert_eq!((read(&spec).unwrap(), tpm(&spec).unwrap()), (6, Some(migration)));
        take(&spec, 6).unwrap();
        assert_eq!(tpm(&spec).unwrap(), None);
        std::fs::write(path(&spec).unwrap().unwrap(), "{").unwrap();
        assert_eq!(read(&spec).unwrap_err().code, ErrorCode::Damaged);
        assert_eq!(take(&spec, 7).unwrap_err().code, ErrorCode::Damaged);
    }

    /// Two datastores, and a VM with its only disk on each.
    fn on_two() -> ([tempfile::TempDir; 2], [VmSpec; 2]) {
        let places = [(); 2].map(|()| unmarked());
        let mut spec = crate::process::run_dir::tests::spec();
        let mut disk = crate::rules::tests::disk("system");
        let on_each = places.each_ref().map(|(directory, place)| {
            datastore::probe(place).unwrap();
            std::fs::create_dir(directory.path().join(spec.vm.to_string())).unwrap();
            disk.datastore = place.clone();
            spec.devices = vec![Device::Disk(disk.clone())];
            spec.clone()
        });
        (places.map(|(directory, _)| directory), on_each)
    }

    #[test]
    fn a_guest_whose_first_disk_comes_back_to_a_later_lease_is_served_until_it_is_given_away() {
        let (_directories, [one, two]) = on_two();
        // An earlier version moved the disk from two to one, where the guest began.
        take(&two, 9).unwrap();
        assert_eq!(check(&two, Some(0)).unwrap_err().code, ErrorCode::Conflict);
        let began = noted(&one, &two, Some(0)).unwrap();
        assert_eq!(began, Some(9));
        // What an agent finds that dies before the write of the run record, and after it.
        check(&one, Some(0)).unwrap();
        check(&two, began).unwrap();
        follow(&one, &two, Some(0)).unwrap();
        check(&two, began).unwrap();
        assert_eq!(noted(&two, &two, began).unwrap(), began);
        assert_eq!(noted(&one, &two, None).unwrap(), None, "an earlier version began it");
        assert_eq!(noted(&two, &one, began).unwrap(), began, "never an earlier one");
        take_as_it_is(&two, 10).unwrap();
        assert_eq!(check(&two, began).unwrap_err().code, ErrorCode::Conflict);
    }

    #[test]
    fn a_guest_that_was_given_away_is_refused_wherever_its_first_disk_goes() {
        let (_directories, [one, two]) = on_two();
        take(&two, 9).unwrap();
        // The other host takes it where the disk is, and moves it.
        take_as_it_is(&one, 10).unwrap();
        for moved in [noted(&one, &two, Some(0)).map(drop), follow(&one, &two, Some(0))] {
            assert_eq!(moved.unwrap_err().code, ErrorCode::Conflict);
        }
        assert_eq!(read(&two).unwrap(), 9, "it is not this host's to take along");
        follow(&one, &two, Some(10)).unwrap();
        assert_eq!(read(&two).unwrap(), 10);
        assert_eq!(noted(&one, &two, Some(0)).unwrap_err().code, ErrorCode::Conflict);
        // With the last disk the directory goes, and its lease; then the disk comes back.
        std::fs::remove_file(path(&one).unwrap().unwrap()).unwrap();
        follow(&two, &one, Some(10)).unwrap();
        assert_eq!(check(&one, Some(9)).unwrap_err().code, ErrorCode::Conflict);
    }

    #[test]
    fn a_lease_follows_the_first_disk_as_a_whole() {
        let (_directories, [one, two]) = on_two();
        let is = |spec: &VmSpec| (read(spec).unwrap(), tpm(spec).unwrap());
        follow(&one, &two, None).unwrap();
        assert!(!path(&two).unwrap().unwrap().exists(), "there is none to take along");
        let migration = MigrationId::new();
        take_with_tpm(&one, 7, migration).unwrap();
        for _ in 0..2 {
            follow(&one, &two, None).unwrap();
            assert_eq!(is(&two), (7, Some(migration)));
        }
        // A later one stays.
        take(&two, 8).unwrap();
        follow(&one, &two, None).unwrap();
        assert_eq!(is(&two), (8, None));
        // An earlier version has left it behind, and the guest began with it.
        follow(&one, &two, Some(11)).unwrap();
        assert_eq!(is(&two), (11, None));
        let mut none = two.clone();
        none.devices.clear();
        for (known, new) in [(&none, &two), (&two, &none)] {
            follow(known, new, Some(12)).unwrap();
            assert_eq!(is(&two), (11, None));
        }
    }
}
