//! Opening a disk for anything but its guest: as it is, which may be as its copy ([`super::mirror`]).

use vmseal_api::host::{DiskFacts, DiskRole, DiskSpec, VmSpec};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use crate::storage::locked::Access;
use crate::storage::mirror::{as_it_is, has_its_names};
use crate::storage::opening::{self, Open};
use crate::storage::{tpm_place, tpm_state};

/// Opens a disk as the inventory pins it, or as its copy if it has pivoted. Blocks.
///
/// # Errors
/// As [`opening::open`]; `in-use` for a writer while a copy follows the disk.
pub fn open(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
    access: Access,
) -> Result<Open, Problem> {
    let (disk, facts) = as_it_is(spec, disk, facts, access)?;
    opening::open(spec, &disk, &facts, kek, access)
}

/// The same of an encrypted disk for reading, without its key: the whole image as it is. Also returns its length in bytes. Blocks.
///
/// # Errors
/// As [`opening::open_sealed`].
pub fn open_sealed(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
) -> Result<(Open, u64), Problem> {
    let (disk, facts) = as_it_is(spec, disk, facts, Access::Read)?;
    opening::open_sealed(spec, &disk, &facts)
}

/// Checks that a disk of a VM that is off is there, that nobody writes it, and that it opens with its key; and of that of a
/// TPM that what the TPM keeps is there. Blocks.
///
/// # Errors
/// As [`opening::open`].
pub fn examine(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<(), Problem> {
    if !has_its_names(spec, disk)? {
        return Ok(());
    }
    let (disk, facts) = as_it_is(spec, disk, facts, Access::Read)?;
    if disk.role != DiskRole::Tpm {
        return opening::open(spec, &disk, &facts, kek, Access::Read).map(drop);
    }
    // TPMs share the lock, and each start wants it alone for a moment.
    opening::open(spec, &disk, &facts, kek, Access::Write)?;
    tpm_state::read(&tpm_place::of(spec, &disk)?).map(drop)
}
