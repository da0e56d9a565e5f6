//! Linked clones: a disk that is above files of another VM which nobody writes any more, those of a snapshot.
//!
//! ```text
//!   the other VM's home                          the clone's home
//!   DISK.raw ◄── layer-1 ◄── layer-2             CLONE.raw    its header and lock: nothing else is in it
//!      │            │        (written)           CLONE.base ◄── CLONE.base-0 ◄── CLONE.layer-…  (written)
//!      │            └─ the same file as ──────────────────────────┘
//!      └────────────── the same file as ─────────────┘
//! ```
//! The files get further names (hard links) in the home of the clone, so each VM has all it needs in its own directory, whatever
//! becomes of the other, and a note names no path. What has a name in another home is not written: a merge into it is
//! refused ([`super::sharing`]). Where the other VM's disk is copied to other files, which take its place, only the names there go
//! ([`super::mirror`]), and the clone keeps the files as it does when the other VM is deleted.
//!
//! The clone has a header of its own, under its own key, with the other's data key (DEK). It is made like any disk:
//!
//! ```text
//!   CLONE.raw.creating ─► names of the base ─► header ─► layer ─► note ─► CLONE.raw
//! ```
//! Until it has its name, all of that is debris, which goes with it.

use std::path::Path;

use vmseal_api::atomic_file;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_luks::Identity;
use vmseal_secret::SecretBytes;

use crate::keys;
use crate::rules;
use crate::storage::builder::internal;
use crate::storage::cloning::Lent;
use crate::storage::facts::{role_of, to_api};
use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::image_notes::{Noted, is_encrypted};
use crate::storage::layers::{self, Base};
use crate::storage::locked::Access;
use crate::storage::opening::{self, data_offset, header_problem};

/// The most files of a base: a clone can then have snapshots of its own, as a read looks into each file.
pub const BASE_FILES_MAX: usize = 5;

/// What a linked clone is made of: its VM's key, where it is encrypted.
pub struct Link<'a> {
    /// The clone.
    pub spec: &'a VmSpec,
    /// Its disk, which is not there yet.
    pub disk: &'a DiskSpec,
    /// Its VM's KEK.
    pub kek: Option<&'a SecretBytes>,
    /// The disk that it stands on.
    pub lent: &'a Lent,
}

impl Link<'_> {
    /// Makes the disk. Blocks.
    ///
    /// # Errors
    /// `invalid-request` where the two are not alike; `unsupported` where a file cannot have another name; `limit-exceeded`;
    /// those of the other disk and of the file system.
    pub fn make(&self, home: &Home) -> Result<DiskFacts, Problem> {
        let Self { spec, disk, lent, .. } = *self;
        if home.image(disk.disk).exists() {
            return check_made(self);
        }
        let (of, facts) = (&lent.disk, &lent.facts);
        let Some(snapshot) = lent.snapshot else {
            return Err(internal("a linked clone was begun of what is still written"));
        };
        let alike = of.size == disk.size && of.encrypted == disk.encrypted;
        if !alike || of.datastore.datastore != disk.datastore.datastore {
            let what = format!(
                "disk '{}': a linked clone has the size, the encryption and the datastore of what it stands on",
                disk.name
            );
            return Err(Problem::new(ErrorCode::InvalidRequest, what));
        }
        let source = Home::of(&of.datastore, lent.spec.vm)?;
        let base = layers::base_of(&source, of.disk, snapshot)?
            .ok_or_else(|| rules::no_snapshot(&lent.spec.name, of, snapshot))?;
        if base.len() > BASE_FILES_MAX {
            let what = format!(
                "disk '{}' of VM '{}' has {} files up to this snapshot, and a linked clone stands on {BASE_FILES_MAX} at most: clone an earlier snapshot, delete snapshots in between, or make a full clone",
                of.name,
                lent.spec.name,
                base.len()
            );
            return Err(Problem::new(ErrorCode::LimitExceeded, what));
        }
        let key = opening::key_of(&lent.spec, of, facts, lent.kek.as_ref())?;
        let length = data_offset(facts).saturating_add(disk.size);
        let mut file = home.begin(spec, disk, length)?;
        let count = base.len();
        let files = base.into_iter().enumerate().map(|(place, (path, identity))| {
            link(&path, &home.base(disk.disk, place, count), &identity)?;
            Ok(identity)
        });
        let files = files.collect::<Result<Vec<_>, Problem>>()?;
        self.is_still_of(&source, snapshot, &files)?;
        let made = match (key, self.kek, &spec.key) {
            (None, ..) => DiskFacts::Raw,
            (Some((dek, holes)), Some(kek), Some(reference)) => {
                let context = keys::context(spec.vm, reference);
                // That its key is shared is told by what it stands on.
                let identity =
                    Identity { disk: disk.disk.0, holes, shared: false, role: role_of(spec, disk) };
                let made = vmseal_luks::create(&mut file, disk.size, &dek, kek, &context, identity);
                to_api(&made.map_err(|error| header_problem(&disk.name, &error))?)
            }
            _ => return Err(internal("an encrypted disk was begun without its key")),
        };
        if data_offset(&made) != data_offset(facts) {
            return Err(internal("the header of a linked clone has another length"));
        }
        let (here, encrypted) = (&disk.datastore, is_encrypted(&made));
        Noted { here, vm: spec.vm, disk: disk.disk, encrypted }.note(&file);
        let base = Base { vm: lent.spec.vm, disk: of.disk, files };
        layers::put_linked(home, disk.disk, base, length)?;
        home.finish(disk.disk, &file)?;
        Ok(made)
    }

    /// Checks that the files which have got further names are still those of the snapshot. Where a copy of the disk has taken its place
    /// meanwhile, they may have been overwritten before they had these names ([`super::mirror`]). From here on they are not: what looks
    /// how many names they have does so after its note is changed.
    fn is_still_of(
        &self,
        source: &Home,
        snapshot: SnapshotId,
        files: &[FileIdentity],
    ) -> Result<(), Problem> {
        let Lent { spec, disk, .. } = self.lent;
        if keeps(source, disk.disk, snapshot, files)? {
            return Ok(());
        }
        let what = format!(
            "disk '{}' of VM '{}' was copied to other files meanwhile: try again",
            disk.name, spec.name
        );
        Err(Problem::new(ErrorCode::WrongState, what))
    }
}

/// Whether these files are what a snapshot keeps of a disk. Blocks.
///
/// # Errors
/// As [`layers::base_of`].
pub(super) fn keeps(
    home: &Home,
    disk: DiskId,
    snapshot: SnapshotId,
    files: &[FileIdentity],
) -> Result<bool, Problem> {
    let now = layers::base_of(home, disk, snapshot)?.unwrap_or_default();
    Ok(now.iter().map(|(_, identity)| identity).eq(files))
}

/// Gives a file another name, and checks that it is still that file.
fn link(from: &Path, to: &Path, identity: &FileIdentity) -> Result<(), Problem> {
    let linked = std::fs::hard_link(from, to).map_err(|error| match error.raw_os_error() {
        Some(libc::EPERM | libc::EOPNOTSUPP | libc::EMLINK | libc::EXDEV) => {
            let what = format!(
                "{} cannot have another name ({error}), which a linked clone needs: make a full clone",
                from.display()
            );
            Problem::new(ErrorCode::Unsupported, what)
        }
        _ => failed(to, "made", &error),
    });
    linked?;
    let found = to.symlink_metadata().map_err(|error| failed(to, "read", &error))?;
    if !found.is_file() || FileIdentity::in_metadata(&found) != *identity {
        let what = format!("{} was replaced meanwhile: try again", from.display());
        return Err(Problem::new(ErrorCode::Damaged, what));
    }
    atomic_file::flush_directory_of(to).map_err(|error| failed(to, "made", &error))
}

/// Checks that a disk which is there already is the one that would have been made. Blocks.
///
/// # Errors
/// `damaged`, `key-mismatch`.
fn check_made(link: &Link<'_>) -> Result<DiskFacts, Problem> {
    let Link { spec, disk, kek, .. } = link;
    let facts = if disk.encrypted {
        let facts = vmseal_luks::Facts::new(disk.disk.0, disk.size);
        to_api(&facts.map_err(|error| header_problem(&disk.name, &error))?)
    } else {
        DiskFacts::Raw
    };
    opening::open(spec, disk, &facts, *kek, Access::Read)?;
    Ok(facts)
}

#[cfg(test)]
mod tests;
