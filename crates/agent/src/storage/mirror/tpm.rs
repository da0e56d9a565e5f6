//! What a TPM keeps, which follows the disk that has its key when that is copied.
//!
//! ```text
//!  VM off: DISK.tpm ─ one swtpm loads it, another one encrypts it anew ─► DISK.copy-tpm.new ─ flushed ─► DISK.copy-tpm
//!          ── at once after that the disk pivots: its map says so ──
//!          DISK.tpm ─► DISK.source-tpm ;  DISK.copy-tpm ─► DISK.tpm
//!                          └─► removed after the header of the former image, which has its key
//! ```
//! swtpm has its directory and its key for as long as its guest runs. So it is copied of a VM that is at rest, and last of all: what is done
//! with the TPM before that is in the copy, and nothing is done with it afterwards, as the VM's owner, who lets the disk pivot, starts no
//! guest meanwhile. Of a copy on another datastore the former directory keeps its name, where nobody looks for it any more.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DiskFacts, DiskRole, DiskSpec, VmSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::{Mirror, copy_dek, identity, image_of_copy, of_disk, rename};
use crate::hypervisor::tpm::Swtpm;
use crate::process::run_dir::ProcessDir;
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal, too_many};
use crate::storage::home::Home;
use crate::storage::tpm_disk::key_of;
use crate::storage::tpm_handover::Side;
use crate::storage::{opening, tpm_place, tpm_state};

/// What a TPM keeps, to be copied.
pub struct CopyTpm {
    /// The VM, which is at rest.
    pub spec: VmSpec,
    /// The disk that has the TPM's key, with its copy noted.
    pub disk: DiskSpec,
    /// Its facts.
    pub facts: DiskFacts,
    /// The VM's KEK.
    pub kek: Option<SecretBytes>,
    /// The program that encrypts it.
    pub swtpm: Swtpm,
}

/// What a TPM keeps, and where that is encrypted anew.
struct Both {
    former: Arc<Side>,
    new: Arc<Side>,
    /// The new directory, before and after it is whole.
    begun: PathBuf,
    whole: PathBuf,
}

impl CopyTpm {
    /// Copies it, durably; the disk is to pivot next. Where it has, nothing is done.
    ///
    /// # Errors
    /// `damaged`, `locked`, `in-use`, those of the file system and of swtpm: all is as it was.
    pub async fn run(self, builder: &DiskBuilder) -> Result<(), Problem> {
        let slot = Arc::new(builder.users.take().ok_or_else(too_many)?);
        // A filter of an earlier attempt is ended, which releases the images; it may have had the disk pivot before.
        builder.directory.renew().await.map_err(internal)?;
        let (of, swtpm) = (Arc::clone(&slot), self.swtpm.clone());
        let opened = spawn_blocking(move || self.open(&of)).await.map_err(internal)?;
        let copied = match opened {
            Ok(Some(both)) => both.encrypt_anew(swtpm, &builder.directory).await,
            Ok(None) => Ok(()),
            Err(problem) => Err(problem),
        };
        // Its processes have ended, or end with it, before another one has their user.
        let swept = builder.directory.sweep().await.map_err(internal);
        drop(slot);
        copied.and(swept)
    }

    /// Opens both; none where the disk has pivoted. Blocks.
    fn open(&self, slot: &Arc<Slot>) -> Result<Option<Both>, Problem> {
        let Self { spec, disk, facts, kek, .. } = self;
        let mirror = of_disk(spec.vm, disk)?;
        let Some(mirror) = mirror.filter(|mirror| !mirror.pivoted) else { return Ok(None) };
        let (source, target, id) = (mirror.source()?, mirror.target()?, disk.disk);
        let former = opening::open_for_key(spec, disk, facts, kek.as_ref())?;
        tpm_place::settle(spec, disk)?;
        let copy = image_of_copy(&mirror, disk)?;
        let dek = copy_dek(&mirror.note, spec, disk, kek.as_ref(), &copy)?;
        let dek = dek.ok_or_else(|| internal("the copy of a TPM's disk has no key"))?;
        drop_copies(&target, id)?;
        let (begun, whole) = (target.unfinished_tpm(id), target.copy_tpm(id));
        let former = Side {
            directory: tpm_state::open(&source.tpm_state(id), slot.tpm())?,
            lock: former.file,
            key: key_of(&former.dek, id)?,
            slot: Arc::clone(slot),
        };
        let new = Side {
            directory: tpm_state::make(&begun, slot.tpm())?,
            lock: copy,
            key: key_of(&dek, id)?,
            slot: Arc::clone(slot),
        };
        Ok(Some(Both { former: Arc::new(former), new: Arc::new(new), begun, whole }))
    }
}

impl Both {
    /// Fills the new directory, and gives it the name that says that it is whole.
    async fn encrypt_anew(self, swtpm: Swtpm, directory: &ProcessDir) -> Result<(), Problem> {
        let permanent = self.former.take(&swtpm, directory).await?;
        self.new.give(&swtpm, directory, permanent).await?;
        let finish = move || {
            tpm_state::flush(&self.begun, &self.new.directory)?;
            rename(&self.begun, &self.whole)
        };
        spawn_blocking(finish).await.map_err(internal)?
    }
}

/// Refuses a datastore where a directory has the name that is to be that of what the TPM keeps.
pub(super) fn require_room(target: &Home, disk: &DiskSpec) -> Result<(), Problem> {
    let path = target.tpm_state(disk.disk);
    if disk.role != DiskRole::Tpm || !is_there(&path)? {
        return Ok(());
    }
    let what = format!(
        "{} is there already, and is not what the VM's TPM keeps: remove it if it is not wanted",
        path.display()
    );
    Err(Problem::new(ErrorCode::AlreadyExists, what))
}

/// Removes what was to take its place, whole or not, and what an earlier copy has left: no disk here has pivoted.
pub(super) fn drop_copies(target: &Home, disk: DiskId) -> Result<(), Problem> {
    [target.copy_tpm(disk), target.unfinished_tpm(disk), target.source_tpm(disk)]
        .iter()
        .try_for_each(|path| tpm_state::remove(path))
}

/// Gives what was encrypted anew the name of what the TPM keeps, which is set aside where it has that.
pub(super) fn take_place(mirror: &Mirror) -> Result<(), Problem> {
    if !mirror.note.tpm {
        return Ok(());
    }
    let (target, disk) = (mirror.target()?, mirror.disk);
    let (kept, copy, former) =
        (target.tpm_state(disk), target.copy_tpm(disk), target.source_tpm(disk));
    if !is_there(&copy)? {
        // It has its name, or is lost, which the start of the TPM says.
        return Ok(());
    }
    // Where it is there, this has been done: nothing has the name.
    if !mirror.moves() && is_there(&kept)? && !is_there(&former)? {
        rename(&kept, &former)?;
    }
    rename(&copy, &kept)
}

/// Checks that what the TPM keeps under the key of the copy is there. It opens with the data key of the disk, whose header is opened.
///
/// # Errors
/// `damaged`; those of the file system.
pub(super) fn require_kept(mirror: &Mirror) -> Result<(), Problem> {
    let path = mirror.target()?.tpm_state(mirror.disk);
    if !mirror.note.tpm || is_there(&path)? {
        return Ok(());
    }
    let what = format!("{}, what the VM's TPM keeps, is not there", path.display());
    Err(Problem::new(ErrorCode::Damaged, what))
}

/// Removes what the TPM kept under the key of the former image, whose header is gone.
pub(super) fn drop_sources(mirror: &Mirror) -> Result<(), Problem> {
    if !mirror.note.tpm {
        return Ok(());
    }
    let (source, disk) = (mirror.source()?, mirror.disk);
    tpm_state::remove(&source.source_tpm(disk))?;
    if mirror.moves() { tpm_state::remove(&source.tpm_state(disk)) } else { Ok(()) }
}

fn is_there(path: &Path) -> Result<bool, Problem> {
    identity(path).map(|found| found.is_some())
}
