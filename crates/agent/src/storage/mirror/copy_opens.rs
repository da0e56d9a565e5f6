//! Whether a disk that has changed to its copy opens there, before its former image is destroyed.
//!
//! A copy's header is opened when copying begins, and hours may pass until the former image goes. Until then that is the only other copy
//! of the disk. So the header is opened once more with the key that the VM has now, as the datastore has it: a copy that was damaged
//! meanwhile leaves the former image, and the task says where both are.

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use vmseal_api::host::{DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::{Mirror, beside, identity, tpm};
use crate::storage::layers;
use crate::storage::locked::{Access, open_locked};
use crate::storage::opening::{self, Open, data_offset};

/// Opens what has taken the place of a disk's former files: its image with its header, or of a disk in the clear with its length, all
/// of its layers, and the headers of what is beside it. `disk` may be as it was before. Its names are right. Blocks.
///
/// # Errors
/// `locked` without the key; else that of what does not open, which says where both images are.
pub(super) fn require(
    mirror: &Mirror,
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
) -> Result<(), Problem> {
    let opened = open_image(mirror, spec, disk, kek)
        .and_then(|()| open_layers(mirror))
        .and_then(|()| beside::require_open(mirror, spec, kek))
        .and_then(|()| tpm::require_kept(mirror));
    opened.map_err(|problem| match (problem.code, kek) {
        // The server is to give the VM's key first.
        (ErrorCode::Locked, None) => problem,
        _ => kept(mirror, disk, problem),
    })
}

/// Opens the image, and the layers from the active one on.
fn open_image(
    mirror: &Mirror,
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
) -> Result<(), Problem> {
    read_from_storage(mirror)?;
    let copy = mirror.pivoted_disk(disk);
    let Open { notice, .. } = opening::open_beside(spec, &copy, &mirror.facts(), kek)?;
    if let Some(notice) = notice {
        // The other copy of the header opens.
        tracing::warn!(vm = %spec.vm, disk = %disk.disk, detail = %notice.detail, "the new header is damaged in part");
    }
    Ok(())
}

/// Has the header read from the storage: what the page cache has of it is what was written, whatever has become of that. A file system
/// may keep the pages nevertheless; then the check sees what was written, not what is stored.
fn read_from_storage(mirror: &Mirror) -> Result<(), Problem> {
    let path = mirror.target()?.image(mirror.disk);
    let Some(image) = open_locked(&path, Access::ReadBesideGuest)? else { return Ok(()) };
    let header = i64::try_from(data_offset(&mirror.note.copy_facts)).unwrap_or(i64::MAX);
    if header > 0 {
        let advised = posix_fadvise(&image, 0, header, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        if let Err(error) = advised {
            tracing::debug!(path = %path.display(), %error, "the header may be read from memory");
        }
    }
    Ok(())
}

/// Opens each layer, also those that only snapshots need. They have no header of their own: their data key is in that of the image.
fn open_layers(mirror: &Mirror) -> Result<(), Problem> {
    let home = mirror.target()?;
    let mut each = layers::read(&home, mirror.disk)?.uppermost().into_iter();
    each.try_for_each(|layer| layers::open_from(&home, mirror.disk, Some(layer)).map(drop))
}

/// The problem of a copy that does not open.
fn kept(mirror: &Mirror, disk: &DiskSpec, problem: Problem) -> Problem {
    let (Ok(source), Ok(target)) = (mirror.source(), mirror.target()) else { return problem };
    let code = match problem.code {
        // A sealed file is locked for another key, too.
        ErrorCode::Locked => ErrorCode::KeyMismatch,
        // A file that cannot be read counts as damaged: the server must not report the VM as whole.
        ErrorCode::Internal => ErrorCode::Damaged,
        code => code,
    };
    let (name, cause) = (&disk.name, &problem.detail);
    let (copy, former) = (target.image(mirror.disk), source.source(mirror.disk));
    let copy = copy.display();
    let does_not_open =
        format!("as its copy, which the disk uses now, does not open: {cause}. The copy is {copy}");
    let what = if matches!(identity(&former), Ok(None)) {
        format!(
            "what is left of the former image of disk '{name}' is kept, {does_not_open}. Keep that"
        )
    } else {
        format!(
            "the former image of disk '{name}' is kept, {does_not_open}; the former image is {}. Unless an earlier removal has overwritten a part of it, it is as the disk was when it changed to the copy. Keep both",
            former.display()
        )
    };
    let detail = format!(
        "{what}. A guest that runs still has its data, but may not start again: copy its data elsewhere first"
    );
    Problem::new(code, detail)
}
