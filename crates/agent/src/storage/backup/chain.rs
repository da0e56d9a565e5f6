//! The files that a disk of a backup is in: its own, and those of the backups below it.

use std::fs::File;
use std::os::fd::AsFd;

use vmseal_api::filter::SUM_LEN;
use vmseal_api::host::backup::{BackedUpDisk, BackupManifest, BackupPlace};
use vmseal_api::id::{BackupId, DiskId};
use vmseal_api::limits::BACKUP_CHAIN_MAX;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::digest::Sha256;

use super::directory::{Backups, absent};
use crate::filter::{Disk, Shared, Sums, Volume, Work};
use crate::storage::builder::internal;
use crate::storage::transfer::TransferDirectories;

fn damaged(what: String) -> Problem {
    Problem::new(ErrorCode::Damaged, what)
}

/// A backup, open.
pub struct Opened {
    pub backups: Backups,
    pub manifest: BackupManifest,
}

impl Opened {
    /// Opens a backup. Blocks.
    ///
    /// # Errors
    /// `not-found`, `damaged`.
    pub fn open(place: &BackupPlace, allowed: &TransferDirectories) -> Result<Self, Problem> {
        let backups = Backups::find(place, allowed)?.ok_or_else(|| absent(place))?;
        let manifest = backups.manifest(place.backup)?.ok_or_else(|| absent(place))?;
        if manifest.vm.vm != place.vm {
            return Err(damaged(format!(
                "the manifest of backup '{}' is of another VM",
                manifest.name
            )));
        }
        Ok(Self { backups, manifest })
    }

    /// A disk of it.
    ///
    /// # Errors
    /// `not-found`.
    pub fn disk(&self, disk: DiskId) -> Result<&BackedUpDisk, Problem> {
        self.manifest.disks.iter().find(|it| it.disk == disk).ok_or_else(|| {
            let what = format!("backup '{}' has no disk {disk}", self.manifest.name);
            Problem::new(ErrorCode::NotFound, what)
        })
    }

    /// The files of a disk: the image, and the overlays above it, the topmost first.
    ///
    /// # Errors
    /// `damaged` where one is not there, or cut off.
    pub fn files(&self, of: &BackedUpDisk) -> Result<(File, Vec<File>), Problem> {
        let mut overlays = Vec::new();
        let (mut manifest, mut disk) = (self.manifest.clone(), of.clone());
        loop {
            let file = self.backups.file(manifest.backup, &disk.file)?;
            if disk.format == ImageFormat::Raw {
                let length = file.metadata().map_err(internal)?.len();
                if length < of.length {
                    let what = format!(
                        "{} has {length} bytes of {}: it was cut off",
                        self.shown(&manifest, &disk),
                        of.length
                    );
                    return Err(damaged(what));
                }
                return Ok((file, overlays));
            }
            overlays.push(file);
            if overlays.len() >= BACKUP_CHAIN_MAX {
                return Err(damaged(format!(
                    "more than {BACKUP_CHAIN_MAX} backups are above each other"
                )));
            }
            manifest = self.parent_of(&manifest)?;
            let below = manifest.disks.iter().find(|it| it.disk == of.disk).cloned();
            disk = below.ok_or_else(|| {
                damaged(format!(
                    "backup '{}', which others are above, has no disk '{}'",
                    manifest.name, of.name
                ))
            })?;
        }
    }

    fn parent_of(&self, manifest: &BackupManifest) -> Result<BackupManifest, Problem> {
        let parent = |id: BackupId| self.backups.manifest(id);
        let found = manifest.parent.map(parent).transpose()?.flatten();
        found.ok_or_else(|| {
            let id = manifest.parent.map(|id| id.to_string()).unwrap_or_default();
            damaged(format!("backup '{}' is above backup {id}, which is not there", manifest.name))
        })
    }

    fn shown(&self, manifest: &BackupManifest, disk: &BackedUpDisk) -> String {
        self.backups.shown(manifest.backup).join(&disk.file).display().to_string()
    }

    /// The first `length` bytes of a disk, for a filter that writes them to `target`.
    ///
    /// # Errors
    /// `damaged`.
    pub fn to_read(
        &self,
        of: &BackedUpDisk,
        length: u64,
        (target, format): (&File, Volume),
        sums: Option<&File>,
    ) -> Result<Disk, Problem> {
        let (file, layers) = self.files(of)?;
        let written = sums.map(File::try_clone).transpose().map_err(internal)?;
        Ok(Disk {
            disk: of.disk,
            size: length,
            file,
            layers,
            offset: 0,
            key: None,
            shared: Shared::default(),
            keeps_room: true,
            work: Work::Export {
                target: target.as_fd().try_clone_to_owned().map_err(internal)?.into(),
                format,
                sums: Sums { written, ..Sums::default() },
            },
            beside: None,
            replica: None,
            mirror: None,
        })
    }

    /// Checks the sums that a filter has found in a disk against those in its manifest.
    ///
    /// # Errors
    /// `damaged`, with the first block that differs.
    pub fn compare(&self, of: &BackedUpDisk, found: &File) -> Result<(), Problem> {
        if sha256_of(found)? == of.sums_sha256 {
            return Ok(());
        }
        let what = format!("disk '{}' of backup '{}' is damaged", of.name, self.manifest.name);
        let Ok(noted) = self.backups.file(self.manifest.backup, &of.sums) else {
            return Err(damaged(format!("{what}, and so is the file of its sums")));
        };
        if sha256_of(&noted)? != of.sums_sha256 {
            return Err(damaged(format!("{what}, or the file of its sums is")));
        }
        let at = first_difference(found, &noted)?;
        Err(damaged(format!("{what}: the first block that is not as it was is at byte {at}")))
    }
}

/// The SHA-256 of a file, from its beginning, in hexadecimal. Blocks.
///
/// # Errors
/// Those of reading it.
pub fn sha256_of(file: &File) -> Result<String, Problem> {
    let mut digest = Sha256::new();
    each_part(file, |part| {
        digest.update(part);
        true
    })?;
    Ok(digest.finish().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn first_difference(one: &File, other: &File) -> Result<u64, Problem> {
    use std::os::unix::fs::FileExt;
    let (mut at, mut differs) = (0_u64, None);
    let mut same = vec![0; PART];
    each_part(one, |part| {
        let read = other.read_exact_at(&mut same[..part.len()], at);
        let unlike = match read {
            Ok(()) => part.iter().zip(&same).position(|(one, other)| one != other),
            Err(_) => Some(0),
        };
        differs = unlike.map(|byte| at + byte as u64);
        at += part.len() as u64;
        differs.is_none()
    })?;
    Ok(differs.unwrap_or(at) / SUM_LEN as u64 * vmseal_api::filter::SUM_BLOCK as u64)
}

/// How much of a file of sums is read at a time: whole sums.
const PART: usize = 1 << 20;

/// Calls `see` with each part of a file while it returns true.
fn each_part(file: &File, mut see: impl FnMut(&[u8]) -> bool) -> Result<(), Problem> {
    use std::os::unix::fs::FileExt;
    let (mut buffer, mut at) = (vec![0; PART], 0);
    loop {
        let mut filled = 0;
        while filled < PART {
            match file.read_at(&mut buffer[filled..], at + filled as u64).map_err(internal)? {
                0 => break,
                read => filled += read,
            }
        }
        if filled == 0 || !see(&buffer[..filled]) {
            return Ok(());
        }
        at += filled as u64;
    }
}
