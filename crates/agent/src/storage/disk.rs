//! Making a disk: header, key, image, and the facts pinned in the inventory.
//!
//! ```text
//! begin (sparse, locked, *.creating) ─► LUKS2 header ─► import through a filter ─► flush ─► rename
//! ```
//! A kill at any point leaves debris, which the next attempt, a delete or a probe removes. Once an import has
//! noted its progress ([`crate::storage::filling`]), the next attempt continues from there.

use std::fs::File;
use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use vmseal_api::hardware::Firmware;
use vmseal_api::host::{DiskFacts, DiskRole, DiskSpec, ImageSource, KeyReference, VmSpec};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_luks::{Facts, Identity};
use vmseal_secret::{DEK_LEN, LockedFile, SecretBytes};

use crate::hypervisor::firmware::FirmwareFiles;
use crate::hypervisor::tpm::Swtpm;
use crate::keys;
use crate::process::users::Slot;
use crate::storage::builder::{DiskBuilder, internal, is_preallocated, too_many};
use crate::storage::cloning::{Lent, Target};
use crate::storage::cloud_init;
use crate::storage::facts::{role_of, to_api};
use crate::storage::filling::Filling;
use crate::storage::home::Home;
use crate::storage::image::Image;
use crate::storage::image_notes::Noted;
use crate::storage::linking::Link;
use crate::storage::opening::{check_length, data_offset, header_problem};
use crate::storage::preallocation;
use crate::storage::replica;
use crate::storage::tpm_disk::{self, MakeTpm};
use crate::storage::tpm_import;
use crate::storage::transfer::TransferDirectories;
use crate::storage::variables;
use crate::timed;

// Servers, which do not know what a header is, count the room for one.
const _: () = assert!(vmseal_luks::DATA_OFFSET == vmseal_api::host::HEADER_AREA);

/// How much room is allocated in one step, in bytes: a moment's work on most file systems.
const ALLOCATION_STEP: u64 = 1 << 30;

/// A disk to make.
pub struct NewDisk {
    /// The VM.
    pub spec: VmSpec,
    /// The disk, one of the VM's.
    pub disk: DiskSpec,
    /// The VM's KEK, where the disk will be encrypted.
    pub kek: Option<SecretBytes>,
    /// What it is filled from.
    pub source: Option<Source>,
}

/// What a new disk is filled from.
pub enum Source {
    /// An image of the host's.
    Image(ImageSource),
    /// Documents for cloud-init, packed; or why they cannot be had. A disk that is made already does not need them.
    CloudInit(Result<SecretBytes, Problem>),
    /// What the variables of this firmware begin with.
    Variables(FirmwareFiles, Firmware),
    /// Variables of this firmware, of a file of the host's.
    TakenVariables(ImageSource, Firmware),
    /// Nothing; beside it is made what the VM's TPM keeps, of a file of the host's where one is named.
    Tpm(Swtpm, Option<ImageSource>),
    /// A disk of another VM; of one for cloud-init, its documents.
    Copy(Box<Lent>),
}

impl Source {
    /// Whether the new disk stands on another one.
    fn is_linked(&self) -> bool {
        matches!(self, Self::Copy(lent) if lent.linked)
    }
}

/// Makes a disk, or finds it made. `progress` receives the bytes done and the total. Cancelling ends an
/// import; the short steps before and after it run to their end, so that nothing is written after the caller
/// has gone on.
///
/// # Errors
/// The problem; nothing half-made is left then.
pub async fn create(
    new_disk: NewDisk,
    builder: &DiskBuilder,
    progress: impl Fn(u64, u64) + Send,
    cancelled: oneshot::Receiver<()>,
) -> Result<DiskFacts, Problem> {
    let (vm, made, place) =
        (new_disk.spec.vm, new_disk.disk.clone(), new_disk.disk.datastore.clone());
    let path = place.location.path().to_owned();
    let home = timed::call(&path, move || Home::of(&place, vm)).await?;
    // The users are released only after this attempt's process has ended.
    let slot = builder.users.take().ok_or_else(too_many)?;
    let result = make(new_disk, &home, builder, &slot, progress, cancelled).await;
    if result.is_err() {
        discard(&home, builder, vm, &made).await;
    }
    result
}

/// Removes what an attempt has left; first the filter, which holds the image's lock.
async fn discard(home: &Home, builder: &DiskBuilder, vm: VmId, made: &DiskSpec) {
    let disk = made.disk;
    if let Err(error) = builder.directory.sweep().await {
        tracing::warn!(%vm, %disk, %error, "cannot remove an import's directory");
    }
    let image = home.clone();
    let discarded = async {
        spawn_blocking(move || image.discard(disk)).await.map_err(internal)??;
        replica::discard(home, vm, made).await
    };
    if let Err(problem) = discarded.await {
        tracing::warn!(%vm, %disk, %problem, "a half-made disk is left");
    }
}

async fn make(
    mut new_disk: NewDisk,
    home: &Home,
    builder: &DiskBuilder,
    slot: &Slot,
    progress: impl Fn(u64, u64) + Send,
    mut cancelled: oneshot::Receiver<()>,
) -> Result<DiskFacts, Problem> {
    if let Some(Source::Copy(lent)) = new_disk.source.take_if(|it| it.is_linked()) {
        let home = home.clone();
        let link = move || {
            let NewDisk { spec, disk, kek, .. } = &new_disk;
            Link { spec, disk, kek: kek.as_ref(), lent: &lent }.make(&home)
        };
        return spawn_blocking(link).await.map_err(internal)?;
    }
    let (mut tpm, mut lent) = (None, None);
    let (image, lost) = match new_disk.source.take() {
        None => (None, None),
        Some(Source::Image(source)) => {
            (open_source(Some(source), &new_disk.disk, &builder.transfer).await?, None)
        }
        Some(Source::CloudInit(Ok(packed))) => {
            let size = new_disk.disk.size;
            let made = spawn_blocking(move || cloud_init::image(&packed, size));
            (Some(made.await.map_err(internal)??), None)
        }
        Some(Source::CloudInit(Err(problem))) => (None, Some(problem)),
        Some(Source::Copy(of)) if of.disk.role == DiskRole::CloudInit => {
            let (spec, size) = (new_disk.spec.clone(), new_disk.disk.size);
            let made = spawn_blocking(move || cloud_init::copied(&of, &spec, size));
            match made.await.map_err(internal)? {
                Ok(image) => (Some(image), None),
                // A disk that is made already does not need it.
                Err(problem) => (None, Some(problem)),
            }
        }
        Some(Source::Copy(of)) => {
            lent = Some(of);
            (None, None)
        }
        Some(Source::Tpm(swtpm, None)) => {
            tpm = Some((swtpm, None));
            (None, None)
        }
        Some(Source::Tpm(swtpm, Some(from))) => {
            match tpm_import::take(from.path, &builder.transfer).await {
                Ok(taken) => {
                    tpm = Some((swtpm, Some(taken)));
                    (None, None)
                }
                // A disk that is made already does not need it.
                Err(problem) => (None, Some(problem)),
            }
        }
        Some(Source::Variables(files, firmware)) => {
            let template = spawn_blocking(move || files.variables(firmware));
            of_variables(template.await.map_err(internal)?)
        }
        Some(Source::TakenVariables(source, firmware)) => {
            of_variables(variables::take(source.path, firmware, &builder.transfer).await.map(Some))
        }
    };
    let (spec, disk) = (new_disk.spec.clone(), new_disk.disk.clone());
    let vm = spec.vm;
    let place = home.clone();
    let (begun, image) = spawn_blocking(move || {
        begin(&new_disk, &place, image.as_ref()).map(|attempt| (attempt, image))
    })
    .await
    .map_err(internal)??;
    let Begun { file, facts, key, from } = match begun {
        Attempt::Whole(facts) => return Ok(facts),
        Attempt::Begun(begun) => begun,
    };
    if let Some(problem) = lost {
        return Err(problem);
    }
    // Before the long work, which would be in vain.
    replica::examine(&disk).await?;
    if is_preallocated(&disk) {
        let file = file.try_clone().map_err(internal)?;
        take_room(home, disk.disk, file, &progress, &mut cancelled).await?;
    }
    let fill = async {
        let (key, offset) = (key.as_ref(), data_offset(&facts));
        let (disk, file) = (&disk, &file);
        match (&image, lent) {
            (Some(image), _) => {
                let filling = Filling { vm, disk, home, file, offset, key, image };
                filling.run(from, builder, slot, progress).await
            }
            (None, Some(lent)) => {
                let target = Target { vm, disk, file, offset, key };
                target.fill(*lent, builder, slot, progress).await
            }
            (None, None) => Ok(()),
        }
    };
    tokio::select! {
        filled = fill => filled.map_err(|problem| explained_if_full(home, problem))?,
        Ok(()) = cancelled => return Err(removed_meanwhile()),
    }
    if let Some((swtpm, taken)) = tpm {
        let wanted = MakeTpm { swtpm, disk: &disk, home, file: &file, dek: key.as_ref(), taken };
        tpm_disk::make(wanted, builder, slot).await?;
    }
    // It was filled without its replica, so no map may be believed. A replica that cannot be made
    // now is made by the next writer: that is not worth failing a long import.
    drop(replica::for_writer(&spec, &disk, &file, data_offset(&facts)).await?);
    let place = home.clone();
    spawn_blocking(move || place.finish(disk.disk, &file)).await.map_err(internal)??;
    Ok(facts)
}

/// The image of variables in memory, or why there is none: a disk that is made already does not need them.
fn of_variables(memory: Result<Option<LockedFile>, Problem>) -> (Option<Image>, Option<Problem>) {
    let image = memory.and_then(|memory| {
        memory.map(|it| Image::in_memory(it, "the firmware's variables")).transpose()
    });
    match image {
        Ok(image) => (image, None),
        Err(problem) => (None, Some(problem)),
    }
}

fn removed_meanwhile() -> Problem {
    Problem::new(ErrorCode::Cancelled, "the disk was removed while it was being made")
}

/// Allocates the whole image, part by part: where that is slow, progress is visible and it can be cancelled.
async fn take_room(
    home: &Home,
    disk: DiskId,
    file: File,
    progress: &(impl Fn(u64, u64) + Send),
    cancelled: &mut oneshot::Receiver<()>,
) -> Result<(), Problem> {
    let (home, file) = (home.clone(), Arc::new(file));
    let (mut done, total) = (0, file.metadata().map_err(internal)?.len());
    while done < total {
        if cancelled.try_recv().is_ok() {
            return Err(removed_meanwhile());
        }
        let part = done..total.min(done + ALLOCATION_STEP);
        let (home, file, to) = (home.clone(), Arc::clone(&file), part.end);
        spawn_blocking(move || home.allocate(disk, &file, part)).await.map_err(internal)??;
        done = to;
        progress(done, total);
    }
    Ok(())
}

fn explained_if_full(home: &Home, problem: Problem) -> Problem {
    if !home.is_full() {
        return problem;
    }
    let what = format!("{} is full: make room. {problem}", home.datastore().display());
    Problem::new(ErrorCode::NoSpace, what)
}

/// Checks that a disk could be made now; makes nothing.
///
/// # Errors
/// The error that [`create`] would return, as far as that can be known before.
pub async fn examine(
    disk: DiskSpec,
    source: Option<ImageSource>,
    transfer: &TransferDirectories,
) -> Result<(), Problem> {
    let path = disk.datastore.location.path().to_owned();
    let place = disk.datastore.clone();
    let home = timed::call(&path, move || Home::of(&place, VmId::new())).await?;
    let image = open_source(source, &disk, transfer).await?;
    replica::examine(&disk).await?;
    timed::call(&path, move || check_room(&home, &disk, image.as_ref())).await
}

async fn open_source(
    source: Option<ImageSource>,
    disk: &DiskSpec,
    transfer: &TransferDirectories,
) -> Result<Option<Image>, Problem> {
    let Some(source) = source else { return Ok(None) };
    let (path, disk, transfer) = (source.path.clone(), disk.clone(), transfer.clone());
    timed::call(&path, move || Image::open(&source, &disk, &transfer).map(Some)).await
}

/// Checks that there is the room that making a disk needs.
fn check_room(home: &Home, disk: &DiskSpec, image: Option<&Image>) -> Result<(), Problem> {
    let header = if disk.encrypted { vmseal_luks::DATA_OFFSET } else { 0 };
    match image {
        _ if is_preallocated(disk) => home.check_room(header + disk.size),
        Some(image) => home.check_room(image.allocated),
        None => Ok(()),
    }
}

struct Begun {
    file: File,
    facts: DiskFacts,
    key: Option<SecretBytes>,
    /// The bytes before it are there already, from an earlier attempt.
    from: u64,
}

enum Attempt {
    /// The disk is made already.
    Whole(DiskFacts),
    Begun(Begun),
}

fn begin(new_disk: &NewDisk, home: &Home, image: Option<&Image>) -> Result<Attempt, Problem> {
    let (spec, disk) = (&new_disk.spec, &new_disk.disk);
    let encryption = match (disk.encrypted, &new_disk.kek, &spec.key) {
        (false, ..) => None,
        (true, Some(kek), Some(reference)) => Some((kek, reference)),
        _ => return Err(internal("an encrypted disk was begun without its key")),
    };
    if let Some(file) = home.open(disk.disk)? {
        let (facts, _) = check_whole(&file, spec.vm, disk, encryption)?;
        return Ok(Attempt::Whole(facts));
    }
    if let Some(image) = image {
        match go_on(spec.vm, disk, home, image, encryption) {
            Ok(Some(begun)) => return Ok(Attempt::Begun(begun)),
            Ok(None) => {}
            // It is made again from the beginning. If another process works on it, that shows then.
            Err(problem) => {
                tracing::info!(vm = %spec.vm, disk = %disk.disk, %problem, "an interrupted import cannot be continued");
            }
        }
    }
    check_room(home, disk, image)?;
    let Some((kek, reference)) = encryption else {
        let file = home.begin(spec, disk, disk.size)?;
        let here = &disk.datastore;
        Noted { here, vm: spec.vm, disk: disk.disk, encrypted: false }.note(&file);
        return Ok(Attempt::Begun(Begun { file, facts: DiskFacts::Raw, key: None, from: 0 }));
    };
    let mut file = home.begin(spec, disk, vmseal_luks::DATA_OFFSET + disk.size)?;
    let dek = SecretBytes::random(DEK_LEN).map_err(internal)?;
    let context = keys::context(spec.vm, reference);
    let identity = Identity {
        disk: disk.disk.0,
        holes: vmseal_luks::Holes::Zero,
        shared: false,
        role: role_of(spec, disk),
    };
    let facts = vmseal_luks::create(&mut file, disk.size, &dek, kek, &context, identity)
        .map_err(|error| header_problem(&disk.name, &error))?;
    let here = &disk.datastore;
    Noted { here, vm: spec.vm, disk: disk.disk, encrypted: true }.note(&file);
    Ok(Attempt::Begun(Begun { file, facts: to_api(&facts), key: Some(dek), from: 0 }))
}

/// Begins a disk that reads as zeroes and will be written whole, zeroes too: its half-made image with its lock, its facts and its DEK. A
/// preallocated one gets all of its room now in a directory. On a pool it gets that of its header now and the rest as it is written,
/// because the host that sends the disk waits for this call. Blocks.
///
/// # Errors
/// As [`create`].
pub fn begin_empty(
    spec: &VmSpec,
    disk: &DiskSpec,
    kek: Option<&SecretBytes>,
    home: &Home,
) -> Result<(File, DiskFacts, Option<SecretBytes>), Problem> {
    let kek = kek.map(SecretBytes::try_clone).transpose().map_err(internal)?;
    let new_disk = NewDisk { spec: spec.clone(), disk: disk.clone(), kek, source: None };
    let Attempt::Begun(Begun { file, facts, key, .. }) = begin(&new_disk, home, None)? else {
        let what = format!("{} is there already", home.image(disk.disk).display());
        return Err(Problem::new(ErrorCode::AlreadyExists, what));
    };
    let header = data_offset(&facts);
    let length = header + disk.size;
    let ahead = if disk.role == DiskRole::Tpm {
        // Nothing is written to it.
        length
    } else {
        preallocation::ahead(&disk.datastore.location, header, length)
    };
    if is_preallocated(disk) && ahead > 0 {
        home.allocate(disk.disk, &file, 0..ahead)?;
    }
    Ok((file, facts, key))
}

/// The unfinished disk of an interrupted import of the same image, if its progress was noted.
fn go_on(
    vm: VmId,
    disk: &DiskSpec,
    home: &Home,
    image: &Image,
    encryption: Option<(&SecretBytes, &KeyReference)>,
) -> Result<Option<Begun>, Problem> {
    let Some((file, note)) = home.noted(disk.disk)? else { return Ok(None) };
    if note.image != image.identity {
        let what = "the image was replaced or changed since its import was interrupted";
        return Err(Problem::new(ErrorCode::WrongState, what));
    }
    let (facts, key) = check_whole(&file, vm, disk, encryption)?;
    tracing::info!(%vm, disk = %disk.disk, from = note.durable, "an interrupted import continues");
    Ok(Some(Begun { file, facts, key, from: note.durable }))
}

/// Checks that a disk that exists is the one that would have been made. Returns its DEK.
fn check_whole(
    file: &File,
    vm: VmId,
    disk: &DiskSpec,
    encryption: Option<(&SecretBytes, &KeyReference)>,
) -> Result<(DiskFacts, Option<SecretBytes>), Problem> {
    let Some((kek, reference)) = encryption else {
        check_length(file, disk, 0)?;
        return Ok((DiskFacts::Raw, None));
    };
    let facts =
        Facts::new(disk.disk.0, disk.size).map_err(|error| header_problem(&disk.name, &error))?;
    check_length(file, disk, facts.data_offset)?;
    let opened = vmseal_luks::open(file, &facts, kek, &keys::context(vm, reference))
        .map_err(|error| header_problem(&disk.name, &error))?;
    Ok((to_api(&facts), Some(opened.dek)))
}

#[cfg(test)]
mod tests;
