//! Which directory has what a VM's TPM keeps, where its guest moves between two hosts that both have the datastore.
//!
//! ```text
//!  DISK.tpm             the source's swtpm writes it, and goes on with it if the guest stays
//!  DISK.tpm-MIGRATION   the destination's swtpm writes it, from the load of the guest's memory on
//!
//!  flushed ─► the lease is taken, and names the migration ─► DISK.tpm removed ─► DISK.tpm-MIGRATION renamed to DISK.tpm
//!                     │ from here on it is what the TPM keeps
//! ```
//! The lease ([`crate::storage::lease`]) is one file that is replaced as a whole, and decides where the guest runs, too: after a crash at any
//! instruction the directory and the host belong together. What a crash leaves undone is done by the next agent that has the VM: when it
//! adopts the guest, when it sends it, or when it works on what the TPM of a VM at rest keeps. A directory that the lease does not name is
//! debris of a migration that has failed.
//!
//! swtpm has its directory as a descriptor, and does not notice that it is renamed.

use std::io;
use std::path::PathBuf;

use vmseal_api::atomic_file;
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::id::MigrationId;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::rules;
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::lease;
use crate::storage::locked::{Access, open_locked};
use crate::storage::tpm_state;

/// The directory of what the VM's TPM keeps that has this disk. Nothing is changed. Blocks.
///
/// # Errors
/// Those of the lease, and of the file system.
pub fn of(spec: &VmSpec, disk: &DiskSpec) -> Result<PathBuf, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let arrived = named(&home, disk, lease::tpm(spec)?)?;
    Ok(arrived.unwrap_or_else(|| home.tpm_state(disk.disk)))
}

/// The directory that the lease names, if it is still there. It is looked for by its name, which no host has asked for before it was made: what a
/// client of NFS remembers of the home may be older.
fn named(
    home: &Home,
    disk: &DiskSpec,
    tpm: Option<MigrationId>,
) -> Result<Option<PathBuf>, Problem> {
    let Some(migration) = tpm else { return Ok(None) };
    let path = home.arriving_tpm(disk.disk, migration);
    match path.symlink_metadata() {
        Ok(_) => Ok(Some(path)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(&path, "looked at", &error)),
    }
}

/// Has it be in the directory that is named after the disk alone, and removes debris. The caller has the lock of the disk's image against
/// all others, or the lease of the VM that its own swtpm runs for. Can be repeated. Blocks.
///
/// # Errors
/// As [`of`]; what the TPM keeps is whole, and found by that.
pub fn settle(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    if let Some(path) = named(&home, disk, lease::tpm(spec)?)? {
        let kept = home.tpm_state(disk.disk);
        // As long as the other one is there, that is what the TPM keeps, whatever is left of this.
        tpm_state::remove(&kept)?;
        std::fs::rename(&path, &kept)
            .and_then(|()| atomic_file::flush_directory_of(&kept))
            .map_err(|error| failed(&path, "renamed", &error))?;
    }
    drop_debris(spec, disk)
}

/// The same of a VM that is off, with the lock of the disk's image where there is something to do. Blocks.
///
/// # Errors
/// As [`settle`]; `in-use` while a TPM uses it.
pub fn settle_at_rest(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    settle_with(spec, disk, Access::Write)
}

/// The same of a VM whose guest has come to this host and has the lease, after the agent ended that had it come. Blocks.
///
/// # Errors
/// As [`settle`].
pub fn settle_arrived(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    settle_with(spec, disk, Access::Read)
}

fn settle_with(spec: &VmSpec, disk: &DiskSpec, access: Access) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let named = named(&home, disk, lease::tpm(spec)?)?;
    if named.is_none() && home.arriving_tpms(disk.disk)?.is_empty() {
        return Ok(());
    }
    // The lock of a reader keeps the starts of other hosts' TPMs out meanwhile, too.
    let _lock = open_locked(&home.image(disk.disk), access)?;
    settle(spec, disk)
}

/// Has nothing be there of earlier migrations, before the guest of this host's TPM is sent to another one with the same datastore. `received` is
/// the generation that the guest came with, if it came from another host. Blocks.
///
/// # Errors
/// `wrong-state` where an earlier version started the TPM, and its lock could not be shared; as [`settle`].
pub fn before_sent(spec: &VmSpec, disk: &DiskSpec, received: Option<u64>) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let image = home.image(disk.disk);
    match open_locked(&image, Access::Read) {
        Err(problem) if problem.code == ErrorCode::InUse => {
            let what = "has a TPM that an earlier version of vmseal has started, whose disk no other host can have beside this one. Stop the VM and start it again first; or, where that host has the datastores of all disks, name another one of its datastores for a copy (--datastore)";
            return Err(rules::wrong_state(spec, what));
        }
        other => drop(other?),
    }
    // Of a guest that came, what the TPM keeps may still be named after the migration: the next one to take the lease does not name that.
    if received.is_some() && received == Some(lease::read(spec)?) {
        return settle(spec, disk);
    }
    drop_debris(spec, disk)
}

/// Removes what destinations have made of migrations that have failed. Blocks.
///
/// # Errors
/// As [`of`].
pub fn drop_debris(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let arriving = home.arriving_tpms(disk.disk)?;
    // Where nothing else is left of what the TPM keeps, one of them may be that: the lease is beside the VM's first disk, and its name was
    // lost where an earlier version moved that.
    if arriving.is_empty() || tpm_state::read(&home.tpm_state(disk.disk)).is_err() {
        return Ok(());
    }
    let named = lease::tpm(spec)?;
    let mut debris = arriving.into_iter().filter(|(migration, _)| Some(*migration) != named);
    debris.try_for_each(|(_, path)| tpm_state::remove(&path))
}

/// Removes what was made for a guest that does not come with this migration. Blocks.
///
/// # Errors
/// As [`of`].
pub fn give_up(spec: &VmSpec, disk: &DiskSpec, migration: MigrationId) -> Result<(), Problem> {
    let path = Home::of(&disk.datastore, spec.vm)?.arriving_tpm(disk.disk, migration);
    if path.symlink_metadata().is_err() || lease::tpm(spec)? == Some(migration) {
        return Ok(());
    }
    tpm_state::remove(&path)
}

/// Takes the lease of a VM whose guest is here; what came with this migration is what its TPM keeps from then on. Blocks.
///
/// # Errors
/// Those of [`lease::take`]; `damaged` where swtpm has written nothing.
pub fn take(
    spec: &VmSpec,
    disk: &DiskSpec,
    generation: u64,
    migration: MigrationId,
) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    tpm_state::flush_beside(&home.arriving_tpm(disk.disk, migration))?;
    lease::take_with_tpm(spec, generation, migration)?;
    if let Err(problem) = settle(spec, disk) {
        // It is found where it is, and this is done later.
        tracing::error!(vm = %spec.vm, %problem, "what the VM's TPM keeps does not have its name yet");
    }
    Ok(())
}

#[cfg(test)]
mod tests;
