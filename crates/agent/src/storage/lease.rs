//! The lease of a VM's disks: which placement of the VM last used them.
//!
//! ```text
//! <datastore>/<vm id>/vm.lease   {"version":1,"generation":7}
//! <datastore>/<vm id>/vm.lease   {"version":1,"generation":8,"tpm":"0197…"}   what the TPM keeps came with that migration
//! ```
//! A host that receives a running VM takes the lease before the guest runs there. A host that has handed the guest over lets it
//! go on only if the lease is as it was then: otherwise the guest has run elsewhere, and its memory no longer belongs to the
//! disks. The lock of each image keeps two processes from one disk at a time; the lease keeps a stale guest from it afterwards.
//! It also says which of two directories has what the VM's TPM keeps, from the same instant on ([`crate::storage::tpm_place`]); earlier
//! versions skip that.
//! The file is beside the VM's first disk. A VM without disks has none, and nothing that could be harmed.

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

fn generation_in(path: &Path) -> Result<u64, Problem> {
    Ok(read_at(path)?.map_or(0, |stored| stored.generation))
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
        take(&spec, 5).unwrap();
        assert_eq!(tpm(&spec).unwrap(), None);
        std::fs::write(path(&spec).unwrap().unwrap(), "{").unwrap();
        assert_eq!(read(&spec).unwrap_err().code, ErrorCode::Damaged);
        assert_eq!(take(&spec, 6).unwrap_err().code, ErrorCode::Damaged);
    }
}
