//! What a VM's TPM keeps, in backups: copied as swtpm has encrypted it, and loaded by a swtpm of its own where a backup is
//! verified.
//!
//! ```text
//!   disks drained for the snapshot ─► read (TpmToKeep) ─► disks served ─► ... ─► written beside the images
//!                                         └── not, as the agent has restarted: read when the backup is written, and marked so
//! ```

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::OnceLock;

use tokio::task::spawn_blocking;
use vmseal_api::host::backup::{BackedUpDisk, BackedUpTpm, TPM_STATE_MAX};
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;
use vmseal_secret::digest::sha256;

use super::chain::Opened;
use super::directory::{Unfinished, in_memory};
use crate::hypervisor::tpm::{self, Swtpm};
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::{tpm_disk, tpm_place, tpm_state};

/// The directory, in that of the processes of a verification, of what a TPM kept.
const SCRATCH: &str = "tpm-state";

/// What a VM's TPM keeps at the instant of a snapshot that a backup is of.
#[derive(Debug)]
pub struct TpmToKeep {
    path: PathBuf,
    kept: OnceLock<Vec<u8>>,
}

impl TpmToKeep {
    /// That of the TPM that has this disk. Blocks.
    ///
    /// # Errors
    /// `wrong-state` where the datastore is not there.
    pub fn of(vm: &VmSpec, disk: &DiskSpec) -> Result<Self, Problem> {
        Ok(Self { path: tpm_place::of(vm, disk)?, kept: OnceLock::new() })
    }

    /// It is the instant. What cannot be read now is read again when the backup is written. Blocks.
    pub fn take(&self) {
        match tpm_state::read(&self.path) {
            Ok(state) => drop(self.kept.set(state)),
            Err(problem) => tracing::warn!(%problem, "what a TPM keeps is not of a snapshot"),
        }
    }
}

/// Writes what the TPM of a disk keeps into a backup, and flushes it: what was taken with the snapshot, else what it keeps now.
/// Blocks.
///
/// # Errors
/// `damaged` where it is missing; those of the file system.
pub(super) fn write(
    files: &Unfinished,
    vm: &VmSpec,
    disk: &DiskSpec,
    taken: Option<&TpmToKeep>,
) -> Result<BackedUpTpm, Problem> {
    let taken = taken.and_then(|taken| taken.kept.get());
    let later = taken.is_none();
    let state = match taken {
        Some(state) => state.clone(),
        None => tpm_state::read(&tpm_place::of(vm, disk)?)?,
    };
    let name = format!("{}.tpm", disk.name);
    let mut file = files.make(&name)?;
    let written = file.write_all(&state).and_then(|()| file.sync_all());
    written.map_err(|error| failed(&files.shown(&name), "written", &error))?;
    Ok(BackedUpTpm { file: name, bytes: state.len() as u64, sha256: hexadecimal(&state), later })
}

fn hexadecimal(state: &[u8]) -> String {
    sha256(state).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What a TPM kept, as a backup has it; none where the disk is no TPM's. Blocks.
///
/// # Errors
/// `damaged` where it is missing, or not as it was.
pub(super) fn read(opened: &Opened, of: &BackedUpDisk) -> Result<Option<Vec<u8>>, Problem> {
    let Some(tpm) = &of.tpm else { return Ok(None) };
    let backup = opened.manifest.backup;
    let file = opened.backups.file(backup, &tpm.file)?;
    let mut state = Vec::new();
    let read = file.take(TPM_STATE_MAX + 1).read_to_end(&mut state);
    let shown = opened.backups.shown(backup).join(&tpm.file);
    read.map_err(|error| failed(&shown, "read", &error))?;
    if hexadecimal(&state) == tpm.sha256 {
        return Ok(Some(state));
    }
    let what = format!(
        "what the VM's TPM kept, in backup '{}', is damaged: {} is not as it was",
        opened.manifest.name,
        shown.display()
    );
    Err(Problem::new(ErrorCode::Damaged, what))
}

/// A TPM of a backup, to be tried.
pub(super) struct Trying {
    pub swtpm: Swtpm,
    /// The disk that has its key.
    pub disk: BackedUpDisk,
    /// That disk's key.
    pub dek: SecretBytes,
    /// What it kept.
    pub state: Vec<u8>,
}

impl Trying {
    /// Has swtpm load it, in a directory of its own that is gone with `directory`.
    ///
    /// # Errors
    /// `damaged` where it does not; `unsupported` without the program.
    pub async fn run(self, directory: &ProcessDir, slot: &Slot) -> Result<(), Problem> {
        directory.renew().await.map_err(internal)?;
        let (inside, user) = (directory.clone(), slot.tpm());
        let load = move || {
            let key = tpm_disk::key_of(&self.dek, self.disk.disk)?;
            let kept = tpm_state::make_of(&inside.inside(SCRATCH), &self.state, user)?;
            // No image is locked: this is a copy of nobody else's.
            let lock = in_memory().map_err(internal)?;
            let state = tpm::State { directory: &kept, lock: &lock, key: &key, user };
            let started =
                self.swtpm.start(&inside, &state).map_err(|problem| match problem.code {
                    ErrorCode::Damaged => {
                        Problem { detail: format!("in the backup: {}", problem.detail), ..problem }
                    }
                    _ => problem,
                })?;
            started.shut_down().map_err(internal)
        };
        let process = spawn_blocking(load).await.map_err(internal)??;
        process.end_within(tpm::END_TIMEOUT).await;
        directory.sweep().await.map_err(internal)
    }
}
