//! The disk of a VM's TPM: empty itself, with the key of what the TPM keeps ([`crate::storage::tpm_state`]).

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::host::DiskSpec;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::Problem;
use vmseal_secret::SecretBytes;

use crate::hypervisor::tpm::{self, Swtpm};
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal};
use crate::storage::home::Home;
use crate::storage::tpm_import::TakenTpm;
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
    /// What it is to keep; none is what a new TPM keeps, with keys of its own.
    pub taken: Option<TakenTpm>,
}

/// What swtpm uses to make it.
struct Making {
    directory: File,
    lock: File,
    key: SecretBytes,
    user: Option<u32>,
}

impl Making {
    fn state(&self) -> tpm::State<'_> {
        let Self { directory, lock, key, user } = self;
        tpm::State { directory, lock, key, user: *user }
    }
}

/// Makes what a TPM keeps, or stores what it was given to keep, before the disk gets its name.
///
/// # Errors
/// Those of the file system, and of swtpm; those of [`TakenTpm::give`].
pub async fn make(wanted: MakeTpm<'_>, builder: &DiskBuilder, slot: &Slot) -> Result<(), Problem> {
    let MakeTpm { swtpm, disk, home, file, dek, taken } = wanted;
    let dek = dek.ok_or_else(|| internal("a TPM's disk was begun without its key"))?;
    let key = key_of(dek, disk.disk)?;
    let (path, user) = (home.tpm_state(disk.disk), slot.tpm());
    let lock = file.try_clone().map_err(internal)?;
    builder.directory.renew().await.map_err(internal)?;
    let begin = move || {
        let directory = tpm_state::make(&path, user)?;
        Ok::<_, Problem>((path, Arc::new(Making { directory, lock, key, user })))
    };
    let (path, making) = spawn_blocking(begin).await.map_err(internal)??;
    if let Some(taken) = taken {
        let (of, program, place) = (Arc::clone(&making), swtpm.clone(), builder.directory.clone());
        let give = move || taken.give(&program, &place, &of.state());
        spawn_blocking(give).await.map_err(internal)??.end_within(tpm::END_TIMEOUT).await;
        // swtpm would make a new TPM where nothing is.
        let (of, path) = (Arc::clone(&making), path.clone());
        let flush = move || tpm_state::flush(&path, &of.directory);
        spawn_blocking(flush).await.map_err(internal)??;
    }
    // As at the VM's next start: what was stored is loaded, and made where nothing is.
    let (of, place) = (Arc::clone(&making), builder.directory.clone());
    let load = move || swtpm.start(&place, &of.state())?.shut_down().map_err(internal);
    spawn_blocking(load).await.map_err(internal)??.end_within(tpm::END_TIMEOUT).await;
    let flush = move || tpm_state::flush(&path, &making.directory);
    spawn_blocking(flush).await.map_err(internal)??;
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
