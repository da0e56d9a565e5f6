//! What the TPM of a VM kept elsewhere: the file in which swtpm has it for libvirt, or what swtpm has saved of it.
//!
//! swtpm takes what it gives when a guest moves ([`crate::hypervisor::tpm::Permanent`]), and that is what it has in its file, in another
//! frame (swtpm's `swtpm_nvstore.c`; all numbers are big-endian):
//!
//! ```text
//! tpm2-00.permall        header, flags 0    tag 1, length, what the TPM keeps
//! saved, or on its way   header, flags 4    tag 4, length ─┬─ tag 1, length, what the TPM keeps
//! encrypted              header, flags 1 or 2              └─ the bytes of the file, but for its header
//!
//! header   0 version 2, 1 least version of a reader, 2 its length (10), 4 flags, 6 length of all
//! tag      0 number, 2 length of what follows
//! a TPM 2.0 keeps at first: version, magic
//! ```
//! So the file is read into locked memory and gets that frame there: no other copy of it is made in the clear. swtpm examines it and
//! stores it under the key of the VM's disk.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, fcntl};
use vmseal_api::host::backup::TPM_STATE_MAX;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;

use super::image::{byte_lock, open_unused};
use super::transfer::TransferDirectories;
use crate::hypervisor::tpm::{Permanent, State, Swtpm};
use crate::process::Process;
use crate::process::run_dir::ProcessDir;
use crate::timed;

/// The field of a request that a refusal is about.
const FIELD: &str = "tpm_state";

/// What else can be done than to take a file.
const INSTEAD: &str = "or begin with an empty TPM (without --tpm-state, and with --reset-tpm if it is a libvirt domain): what the guest has sealed to the former one stays closed then";

/// The file that swtpm holds a lock of as long as it uses its directory.
const LOCK: &str = ".lock";

/// The version of frames, and their header's length, in bytes.
pub(super) const VERSION: u8 = 2;
pub(super) const HEADER: usize = 10;

/// The length of a tag with its length, in bytes.
pub(super) const TAG: usize = 6;

/// The flags of what is on its way from one swtpm to another, and those of what is encrypted, in a file or on its way.
const MOVES: u16 = 4;
const ENCRYPTED: u16 = 1 | 2;

/// The tag of what a TPM keeps, and that of what is on its way.
const KEPT: u16 = 1;
const MOVED: u16 = 4;

/// What a TPM 2.0 of libtpms keeps begins with, after a version (`PERSISTENT_ALL_MAGIC`).
const MAGIC: [u8; 4] = [0xab, 0x36, 0x47, 0x23];

/// How much of the longer form says what it is, in bytes. It has no secret of the TPM's.
const BEGIN: usize = HEADER + 2 * TAG + 2 + MAGIC.len();

/// What a TPM is to keep, in locked memory, as swtpm takes it.
#[derive(Debug)]
pub struct TakenTpm {
    path: PathBuf,
    permanent: Permanent,
}

impl TakenTpm {
    /// What it is to keep.
    #[cfg(test)]
    pub(super) fn permanent(&self) -> &Permanent {
        &self.permanent
    }

    /// Has swtpm store it under this key, in a directory that is empty. Blocks.
    ///
    /// # Errors
    /// `invalid-request` where swtpm does not take it; as [`Swtpm::give`].
    pub fn give(
        &self,
        swtpm: &Swtpm,
        directory: &ProcessDir,
        state: &State<'_>,
    ) -> Result<Process, Problem> {
        swtpm.give_unless_refused(directory, state, &self.permanent, |said| {
            let what = format!(
                "this host's swtpm does not load it ({said}): it is damaged, or of a later version of swtpm. Give a copy that is whole"
            );
            refused(&self.path, &what)
        })
    }
}

/// Reads from a file what a TPM is to keep.
///
/// # Errors
/// `invalid-request`: the file is outside of the directories for imports, not there, encrypted, or no state of a TPM 2.0. `in-use`:
/// something writes to it, or a swtpm uses it.
pub async fn take(path: PathBuf, allowed: &TransferDirectories) -> Result<TakenTpm, Problem> {
    let (place, allowed) = (path.clone(), allowed.clone());
    timed::call(&place, move || read(&path, &allowed)).await
}

/// The same. Blocks.
///
/// # Errors
/// Those of [`take`].
pub fn read(path: &Path, allowed: &TransferDirectories) -> Result<TakenTpm, Problem> {
    let unread = |error: io::Error| refused(path, &error.to_string());
    let mut file = open_unused(path, allowed).map_err(|problem| {
        let detail = match problem.code {
            // It can be taken later: an empty TPM would lose what it holds.
            ErrorCode::InUse => problem.detail,
            _ => format!("{}; {INSTEAD}", problem.detail),
        };
        Problem { field: Some(FIELD.to_owned()), detail, ..problem }
    })?;
    if is_used(path, allowed) {
        return Err(in_use(path, "is in use by a swtpm: stop the domain first"));
    }
    let before = file.metadata().map_err(unread)?;
    if before.len() > TPM_STATE_MAX {
        let what = format!("has more than {}, which no TPM keeps", Size(TPM_STATE_MAX));
        return Err(refused(path, &what));
    }
    let mut begin = [0; BEGIN];
    let filled = usize::try_from(before.len()).map_or(BEGIN, |length| length.min(BEGIN));
    file.read_exact_at(&mut begin[..filled], 0).map_err(unread)?;
    let frame = frame(&begin[..filled], before.len()).map_err(|what| refused(path, &what))?;
    let from = if frame.is_some() { HEADER as u64 } else { 0 };
    file.seek(SeekFrom::Start(from)).map_err(unread)?;
    let frame = frame.unwrap_or_default();
    let permanent = Permanent::read_from(&mut frame.chain(&file)).map_err(unread)?;
    let after = file.metadata().map_err(unread)?;
    let version = |of: &std::fs::Metadata| (of.len(), of.mtime(), of.mtime_nsec());
    if version(&before) != version(&after) {
        return Err(in_use(path, "was changed while it was read: try again"));
    }
    Ok(TakenTpm { path: path.to_owned(), permanent })
}

/// The frame that the content of a file of this length needs in place of its header; none where it has that already. `begin` is what
/// the file begins with.
fn frame(begin: &[u8], length: u64) -> Result<Option<io::Cursor<Vec<u8>>>, String> {
    let known = Beginning::of(begin, length).ok_or_else(|| {
        "holds no state of a TPM 2.0 of swtpm's: give the file tpm2-00.permall of the domain's TPM"
            .to_owned()
    })?;
    match known {
        Beginning::Encrypted => Err(
            "is encrypted, as libvirt has it where the domain's <backend> has <encryption>. vmseal does not have that key: have swtpm save the TPM without it (swtpm_ioctl --save permanent FILE) and give what it has saved".to_owned(),
        ),
        Beginning::Moved => Ok(None),
        Beginning::Kept => {
            let content = length - HEADER as u64;
            let number = |value: u64| u32::try_from(value).map_err(|error| error.to_string());
            let mut frame = vec![VERSION, 1];
            frame.extend((HEADER as u16).to_be_bytes());
            frame.extend(MOVES.to_be_bytes());
            frame.extend(number((HEADER + TAG) as u64 + content)?.to_be_bytes());
            frame.extend(MOVED.to_be_bytes());
            frame.extend(number(content)?.to_be_bytes());
            Ok(Some(io::Cursor::new(frame)))
        }
    }
}

/// What a file begins as.
pub(super) enum Beginning {
    Kept,
    Moved,
    Encrypted,
}

impl Beginning {
    /// None where it is nothing that swtpm writes of a TPM 2.0.
    pub(super) fn of(begin: &[u8], length: u64) -> Option<Self> {
        let is_frame = *begin.first()? == VERSION
            && *begin.get(1)? <= VERSION
            && usize::from(u16_at(begin, 2)?) == HEADER
            && u64::from(u32_at(begin, 6)?) == length;
        let flags = u16_at(begin, 4).filter(|_| is_frame)?;
        if flags & ENCRYPTED != 0 {
            return Some(Self::Encrypted);
        }
        let (kind, kept) = match (flags, u16_at(begin, HEADER)?) {
            (0, KEPT) => (Self::Kept, HEADER),
            (MOVES, MOVED) => (Self::Moved, HEADER + TAG),
            _ => return None,
        };
        let magic = kept + TAG + 2;
        let is_tpm_2 = u16_at(begin, kept)? == KEPT && begin.get(magic..magic + 4)? == MAGIC;
        is_tpm_2.then_some(kind)
    }
}

/// Whether a swtpm has the lock of the directory that the file is in; false where there is none.
fn is_used(path: &Path, allowed: &TransferDirectories) -> bool {
    let Ok(file) = allowed.image(&path.with_file_name(LOCK)) else { return false };
    is_locked(&file).unwrap_or_else(|error| {
        // A file system without locks.
        tracing::debug!(path = %path.display(), %error, "swtpm's lock cannot be checked");
        false
    })
}

/// Whether a process has a lock of a file. swtpm's is one of the whole file.
fn is_locked(file: &File) -> io::Result<bool> {
    let mut lock = byte_lock(0, libc::F_WRLCK);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
    Ok(lock.l_type != libc::F_UNLCK as libc::c_short)
}

fn refused(path: &Path, what: &str) -> Problem {
    Problem::invalid(FIELD, format!("{}: {what}, {INSTEAD}", path.display()))
}

fn in_use(path: &Path, what: &str) -> Problem {
    let problem = Problem::new(ErrorCode::InUse, format!("{} {what}", path.display()));
    Problem { field: Some(FIELD.to_owned()), ..problem }
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
pub(crate) mod tests;
