//! Opening a disk's image and its layers as the inventory pins them. [`super::disk`] makes them, [`super::open`] opens a disk
//! that may be its copy.

use std::fs::File;

use vmseal_api::filter::Holes;
use vmseal_api::host::{DiskFacts, DiskSpec, Notice, NoticeCode, VmSpec};
use vmseal_api::id::SnapshotId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::size::Size;
use vmseal_luks::{Facts, HeaderError};
use vmseal_secret::{SecretBytes, SecretFd};

use crate::filter::{self, Shared, Work};
use crate::keys;
use crate::rules;
use crate::storage::builder::{internal, is_preallocated};
use crate::storage::conversion;
use crate::storage::facts::from_api;
use crate::storage::home::Home;
use crate::storage::image_notes::{Noted, is_encrypted};
use crate::storage::layers::{self, Files, LayerId};
use crate::storage::locked::Access;
use crate::storage::sharing;

/// Where the guest's first byte is in the image, in bytes.
pub(crate) fn data_offset(facts: &DiskFacts) -> u64 {
    match facts {
        DiskFacts::Raw => 0,
        DiskFacts::Luks2 { data_offset, .. } => *data_offset,
    }
}

/// Checks that an image is long enough for a disk whose first byte is at `offset`.
pub(crate) fn check_length(file: &File, disk: &DiskSpec, offset: u64) -> Result<(), Problem> {
    let found = file.metadata().map_err(internal)?.len();
    let needed = offset.saturating_add(disk.size);
    if found >= needed {
        return Ok(());
    }
    Err(Problem::new(
        ErrorCode::Damaged,
        format!(
            "disk '{}' is truncated: its image has {} and needs {}; restore it from a backup",
            disk.name,
            Size(found),
            Size(needed)
        ),
    ))
}

/// The API's error for a header's error.
pub(crate) fn header_problem(disk: &str, error: &HeaderError) -> Problem {
    let code = match error {
        HeaderError::OtherKey { .. } | HeaderError::WrongKek(_) => ErrorCode::KeyMismatch,
        HeaderError::Truncated { .. }
        | HeaderError::BothCopies { .. }
        | HeaderError::Refused(_)
        | HeaderError::SlotDamaged(_)
        | HeaderError::ReadBackFailed(_)
        | HeaderError::Occupied(_) => ErrorCode::Damaged,
        HeaderError::UnknownFacts(_) => ErrorCode::Unsupported,
        HeaderError::Write(error)
            if matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT)) =>
        {
            ErrorCode::NoSpace
        }
        _ => ErrorCode::Internal,
    };
    let mut detail = format!("disk '{disk}': {error}");
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let more = error.to_string();
        if !detail.contains(&more) {
            detail = format!("{detail}: {more}");
        }
        cause = error.source();
    }
    Problem::new(code, detail)
}

/// A disk, open for a guest.
#[derive(Debug)]
pub struct Open {
    /// The image, its lock held.
    pub file: File,
    /// The layers above it, the active one first.
    pub layers: Vec<File>,
    /// Where the guest's first byte is, in bytes.
    pub offset: u64,
    /// The DEK as a descriptor, and what holes mean; none for a plain disk.
    pub key: Option<(SecretFd, Holes)>,
    /// A notice for operators.
    pub notice: Option<Notice>,
    /// What it has in common with disks of other VMs.
    pub shared: Shared,
}

impl Open {
    /// The file with the disk's header and lock.
    #[must_use]
    pub fn own(&self) -> &File {
        self.shared.own.as_ref().unwrap_or(&self.file)
    }

    /// The same, and none of the others.
    #[must_use]
    pub fn into_own(self) -> File {
        self.shared.own.unwrap_or(self.file)
    }

    /// As a filter gets it, with nothing beside it.
    #[must_use]
    pub fn into_disk(self, disk: &DiskSpec, work: Work) -> filter::Disk {
        filter::Disk {
            disk: disk.disk,
            size: disk.size,
            file: self.file,
            layers: self.layers,
            offset: self.offset,
            key: self.key,
            shared: self.shared,
            keeps_room: is_preallocated(disk),
            work,
            beside: None,
            replica: None,
            mirror: None,
        }
    }

    fn plain(files: Files, shared: bool) -> Self {
        let Files { layers, image, own, .. } = files;
        let shared = Shared { key: shared || own.is_some(), own };
        Self { file: image, layers, offset: 0, key: None, notice: None, shared }
    }
}

fn open_image(spec: &VmSpec, disk: &DiskSpec, access: Access) -> Result<File, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let file = match access {
        Access::Read => home.open_to_read(disk.disk)?,
        Access::Write => home.open(disk.disk)?,
        Access::BesideGuest => home.open_beside_guest(disk.disk)?,
        Access::ReadBesideGuest => home.read_beside_guest(disk.disk)?,
    };
    if file.is_none()
        && let Some(problem) = conversion::refusal(&home, &spec.name, disk)?
    {
        return Err(problem);
    }
    file.ok_or_else(|| {
        let path = home.image(disk.disk);
        let (name, path) = (&disk.name, path.display());
        let what =
            format!("disk '{name}' has no image: {path} is not there; restore it from a backup");
        Problem::new(ErrorCode::NotFound, what)
    })
}

fn open_layers(
    spec: &VmSpec,
    disk: &DiskSpec,
    image: File,
    access: Access,
) -> Result<Files, Problem> {
    layers::open(&Home::of(&disk.datastore, spec.vm)?, disk.disk, image, access)
}

/// Opens the image of an encrypted disk for reading, without its key, and the layers above it: the whole image, with its header.
/// Also returns its length in bytes. Blocks.
///
/// # Errors
/// `damaged`, `in-use`, `not-found`.
pub fn open_sealed(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
) -> Result<(Open, u64), Problem> {
    let file = open_image(spec, disk, Access::Read)?;
    whole(disk, facts, open_layers(spec, disk, file, Access::Read)?)
}

/// The same of what a snapshot keeps, without a lock: nobody writes there but to the header, which opens at any instant. Blocks.
///
/// # Errors
/// As [`open_sealed`]; `not-found` without the snapshot.
pub fn open_sealed_kept(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    snapshot: SnapshotId,
) -> Result<(Open, u64), Problem> {
    whole(disk, facts, open_files_kept(spec, disk, snapshot)?)
}

/// The same of a disk that no guest writes to, as it is now. Blocks.
///
/// # Errors
/// As [`open_sealed`].
pub fn open_sealed_beside(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
) -> Result<(Open, u64), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let active = layers::read(&home, disk.disk)?.active();
    whole(disk, facts, layers::open_from(&home, disk.disk, active)?)
}

fn whole(disk: &DiskSpec, facts: &DiskFacts, mut files: Files) -> Result<(Open, u64), Problem> {
    let offset = data_offset(facts);
    check_length(&files.image, disk, offset)?;
    let length = offset + disk.size;
    if let (Some(own), true) = (&files.own, offset > 0) {
        // The base begins with the header of another VM.
        let header = sharing::header_layer(own, offset, length)?;
        files.layers.insert(files.layers.len() - files.of_base, header);
    }
    Ok((Open::plain(files, false), length))
}

fn open_files_kept(spec: &VmSpec, disk: &DiskSpec, snapshot: SnapshotId) -> Result<Files, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let kept = layers::open_kept(&home, disk.disk, snapshot)?;
    kept.ok_or_else(|| rules::no_snapshot(&spec.name, disk, snapshot))
}

/// Opens the image that has the disk's name as one with these facts. Blocks.
///
/// # Errors
/// `damaged`, `key-mismatch`, `in-use`, `not-found`, `locked`; nothing is written.
pub fn open(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
    access: Access,
) -> Result<Open, Problem> {
    let file = open_image(spec, disk, access)?;
    let Some(pinned) = from_api(disk, facts) else {
        // An encrypted disk is never opened as a plain one, whatever the datastore holds.
        if disk.encrypted {
            return Err(must_be_encrypted(disk));
        }
        check_length(&file, disk, 0)?;
        note(spec, (disk, facts), &file, access);
        return Ok(Open::plain(open_layers(spec, disk, file, access)?, false));
    };
    let unlocked = unlock(spec, disk, (file, &pinned), kek)?;
    let Unlocked { file, dek, holes, shared, notice } = unlocked;
    note(spec, (disk, facts), &file, access);
    let files = open_layers(spec, disk, file, access)?;
    check_length(&files.image, disk, pinned.data_offset)?;
    let shared = shared || sharing::has_other_names(&files.image).map_err(internal)?;
    let (dek, offset) = (dek.to_memfd().map_err(internal)?, pinned.data_offset);
    Ok(Open { offset, key: Some((dek, holes)), notice, ..Open::plain(files, shared) })
}

/// Has an image in a pool say which keys open it, where it is opened to be written.
fn note(spec: &VmSpec, (disk, facts): (&DiskSpec, &DiskFacts), file: &File, access: Access) {
    if access == Access::Write {
        let (here, encrypted) = (&disk.datastore, is_encrypted(facts));
        Noted { here, vm: spec.vm, disk: disk.disk, encrypted }.note(file);
    }
}

fn must_be_encrypted(disk: &DiskSpec) -> Problem {
    let what = format!(
        "disk '{}' must be encrypted, and the inventory says that its image is raw: was an old inventory restored?",
        disk.name
    );
    Problem::new(ErrorCode::Damaged, what)
}

/// The DEK of a disk that may be in use, and what holes mean; none of a plain one. Blocks.
///
/// # Errors
/// As [`open`].
pub fn key_of(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<Option<(SecretBytes, vmseal_luks::Holes)>, Problem> {
    let file = open_image(spec, disk, Access::BesideGuest)?;
    let Some(pinned) = from_api(disk, facts) else { return Ok(None) };
    let unlocked = unlock(spec, disk, (file, &pinned), kek)?;
    let holes = match unlocked.holes {
        Holes::Zero => vmseal_luks::Holes::Zero,
        Holes::Ciphertext => vmseal_luks::Holes::Ciphertext,
    };
    Ok(Some((unlocked.dek, holes)))
}

/// Opens what a disk holds without its layers above this one, or without any, for reading and without a lock: nobody writes
/// there. Blocks.
///
/// # Errors
/// As [`open`].
pub fn open_layer(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
    layer: Option<LayerId>,
) -> Result<Open, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let files = layers::open_from(&home, disk.disk, layer)?;
    with_key(spec, disk, facts, kek, files)
}

/// Opens a disk that no guest writes to, as it is now, for reading and without a lock: its guest may run. Blocks.
///
/// # Errors
/// As [`open`].
pub fn open_beside(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<Open, Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let active = layers::read(&home, disk.disk)?.active();
    let open = with_key(spec, disk, facts, kek, layers::open_from(&home, disk.disk, active)?)?;
    if disk.encrypted && open.key.is_none() {
        return Err(must_be_encrypted(disk));
    }
    check_length(&open.file, disk, open.offset)?;
    Ok(open)
}

/// Opens what a snapshot keeps of a disk, for reading and without a lock: nobody writes there. Blocks.
///
/// # Errors
/// As [`open`]; `not-found` without the snapshot.
pub fn open_kept(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
    snapshot: SnapshotId,
) -> Result<Open, Problem> {
    with_key(spec, disk, facts, kek, open_files_kept(spec, disk, snapshot)?)
}

fn with_key(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
    files: Files,
) -> Result<Open, Problem> {
    let Some(pinned) = from_api(disk, facts) else { return Ok(Open::plain(files, false)) };
    let own = files.own().try_clone().map_err(internal)?;
    let Unlocked { dek, holes, notice, .. } = unlock(spec, disk, (own, &pinned), kek)?;
    let (dek, offset) = (dek.to_memfd().map_err(internal)?, pinned.data_offset);
    Ok(Open { offset, key: Some((dek, holes)), notice, ..Open::plain(files, false) })
}

/// An encrypted disk, and its key.
pub struct Unlocked {
    /// The image, its lock held.
    pub file: File,
    /// The DEK.
    pub dek: SecretBytes,
    /// What holes mean.
    holes: Holes,
    /// Whether others may have the DEK.
    shared: bool,
    /// A notice for operators.
    pub notice: Option<Notice>,
}

/// Opens the disk of a TPM as the inventory pins it, for its key. Blocks.
///
/// # Errors
/// As [`open`].
pub fn open_for_key(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<Unlocked, Problem> {
    open_for_key_with(spec, (disk, facts), kek, Access::Write)
}

/// The same of one that the TPM of another host has, too, until the guest has moved here: with a lock that both can have, and not to be
/// written. Blocks.
///
/// # Errors
/// As [`open_for_key`].
pub fn open_for_key_beside(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<Unlocked, Problem> {
    open_for_key_with(spec, (disk, facts), kek, Access::Read)
}

fn open_for_key_with(
    spec: &VmSpec,
    (disk, facts): (&DiskSpec, &DiskFacts),
    kek: Option<&SecretBytes>,
    access: Access,
) -> Result<Unlocked, Problem> {
    let file = open_image(spec, disk, access)?;
    let Some(pinned) = from_api(disk, facts) else {
        let what = format!("disk '{}' is not encrypted, and has no key", disk.name);
        return Err(Problem::new(ErrorCode::Damaged, what));
    };
    unlock(spec, disk, (file, &pinned), kek)
}

fn unlock(
    spec: &VmSpec,
    disk: &DiskSpec,
    (file, pinned): (File, &Facts),
    kek: Option<&SecretBytes>,
) -> Result<Unlocked, Problem> {
    check_length(&file, disk, pinned.data_offset)?;
    let (Some(kek), Some(reference)) = (kek, &spec.key) else {
        let what = format!("disk '{}' is locked: its key is not on this host", disk.name);
        return Err(Problem::new(ErrorCode::Locked, what));
    };
    let opened = vmseal_luks::open(&file, pinned, kek, &keys::context(spec.vm, reference))
        .map_err(|error| header_problem(&disk.name, &error))?;
    let holes = match opened.holes {
        vmseal_luks::Holes::Zero => Holes::Zero,
        vmseal_luks::Holes::Ciphertext => Holes::Ciphertext,
    };
    let notice = opened.notice.map(|notice| Notice {
        code: NoticeCode::HeaderCopyDamaged,
        disk: Some(disk.disk),
        detail: format!(
            "disk '{}': {notice}. Give the VM a new key, which writes both copies again: vmseal vm recrypt {}",
            disk.name, spec.name
        ),
    });
    Ok(Unlocked { file, dek: opened.dek, holes, shared: opened.shared, notice })
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, Device};
    use vmseal_luks::Identity;
    use vmseal_secret::{DEK_LEN, KEK_LEN};

    use super::*;
    use crate::storage::facts::to_api;

    #[test]
    fn a_disk_whose_header_says_that_others_have_its_key_is_opened_as_such() {
        for shared in [false, true] {
            let directory = tempfile::tempdir().unwrap();
            let mut disk = crate::rules::tests::disk("data");
            disk.datastore.location = DatastoreLocation::Dir { path: directory.path().to_owned() };
            disk.encrypted = true;
            crate::storage::datastore::probe(&disk.datastore).unwrap();
            let kek = SecretBytes::random(KEK_LEN).unwrap();
            let mut spec = crate::process::run_dir::tests::spec();
            spec.key = Some(keys::reference_of(&kek, spec.vm, "key"));
            spec.devices = vec![Device::Disk(disk.clone())];
            let home = Home::of(&disk.datastore, spec.vm).unwrap();
            let length = vmseal_luks::DATA_OFFSET + disk.size;
            let mut file = home.begin(&spec, &disk, length).unwrap();
            let dek = SecretBytes::random(DEK_LEN).unwrap();
            let context = keys::context(spec.vm, spec.key.as_ref().unwrap());
            let holes = vmseal_luks::Holes::Zero;
            let identity = Identity { disk: disk.disk.0, holes, shared, role: Default::default() };
            let made = vmseal_luks::create(&mut file, disk.size, &dek, &kek, &context, identity);
            home.finish(disk.disk, &file).unwrap();
            drop(file);
            let facts = to_api(&made.unwrap());
            let opened = open(&spec, &disk, &facts, Some(&kek), Access::Write).unwrap();
            assert_eq!(opened.shared.key, shared);
        }
    }
}
