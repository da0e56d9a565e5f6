//! The disk of a VM's TPM: empty itself, with the key of what the TPM keeps ([`crate::storage::tpm_state`]).

use std::fs::File;
use std::path::Path;

use tokio::task::spawn_blocking;
use vmseal_api::host::DiskSpec;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use crate::hypervisor::tpm::{self, Swtpm};
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal};
use crate::storage::home::Home;
use crate::storage::tpm_state;

/// What a TPM keeps, to be made.
pub struct MakeTpm<'a> {
    /// The program that makes it.
    pub swtpm: Swtpm,
    /// Its disk.
    pub disk: &'a DiskSpec,
    /// Where the disk is.
    pub home: &'a Home,
    /// The half-made disk, its lock held.
    pub file: &'a File,
    /// The disk's key.
    pub dek: Option<&'a SecretBytes>,
}

/// Makes what a TPM keeps, with keys of the TPM's own, before the disk gets its name.
///
/// # Errors
/// Those of the file system, and of swtpm.
pub async fn make(wanted: MakeTpm<'_>, builder: &DiskBuilder, slot: &Slot) -> Result<(), Problem> {
    let MakeTpm { swtpm, disk, home, file, dek } = wanted;
    let dek = dek.ok_or_else(|| internal("a TPM's disk was begun without its key"))?;
    let key = key_of(dek, disk.disk)?;
    let (path, user) = (home.tpm_state(disk.disk), slot.tpm());
    let lock = file.try_clone().map_err(internal)?;
    let directory = builder.directory.clone();
    directory.renew().await.map_err(internal)?;
    let make = move || {
        let kept = tpm_state::make(&path, user)?;
        let state = tpm::State { directory: &kept, lock: &lock, key: &key, user };
        let process = swtpm.start(&directory, &state)?.shut_down().map_err(internal)?;
        Ok::<_, Problem>((path, kept, process))
    };
    let (path, kept, process) = spawn_blocking(make).await.map_err(internal)??;
    process.end_within(tpm::END_TIMEOUT).await;
    spawn_blocking(move || tpm_state::flush(&path, &kept)).await.map_err(internal)??;
    builder.directory.sweep().await.map_err(internal)
}

/// The key of what a TPM keeps that has this disk. `dek` is the disk's.
///
/// # Errors
/// `internal`: no memory for it.
pub fn key_of(dek: &SecretBytes, disk: DiskId) -> Result<SecretBytes, Problem> {
    vmseal_secret::derive::tpm_key(dek, *disk.0.as_bytes()).map_err(internal)
}

/// What a VM's TPM keeps, open for its start.
pub struct OpenTpm {
    /// The directory of what it keeps, given to its user.
    pub directory: File,
    /// The key under which that is encrypted.
    pub key: SecretBytes,
}

/// Makes room, in this directory, for what a VM's TPM keeps, which is about to be loaded into it, for this user; none is the agent's. `dek` is
/// the key of its disk. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn empty(
    path: &Path,
    disk: DiskId,
    dek: &SecretBytes,
    user: Option<u32>,
) -> Result<OpenTpm, Problem> {
    let key = key_of(dek, disk)?;
    Ok(OpenTpm { directory: tpm_state::make(path, user)?, key })
}

/// Opens what a VM's TPM keeps, for this user; none is the agent's. `dek` is the key of its disk. Blocks.
///
/// # Errors
/// `damaged` when it is missing; those of the file system.
pub fn open(
    vm: VmId,
    disk: &DiskSpec,
    dek: &SecretBytes,
    user: Option<u32>,
) -> Result<OpenTpm, Problem> {
    let key = key_of(dek, disk.disk)?;
    let path = Home::of(&disk.datastore, vm)?.tpm_state(disk.disk);
    Ok(OpenTpm { directory: tpm_state::open(&path, user)?, key })
}
