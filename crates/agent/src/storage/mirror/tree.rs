//! The layers of a mirrored disk, which the copy gets as well, and the files beside it, memory and core dumps, which are copied first.
//!
//! ```text
//!  begun ─► room ─► the image copied ─► each layer that nobody writes copied, those below first ─► an empty active layer: whole
//!                   └──────────── by filters that serve nobody, beside the guest ───────────┘           │
//!                                             the guest's filter, or one of its own, copies the active layer, and pivots
//! ```
//! Room is taken here only for a preallocated image on a pool, where zeroes are written for it. Each file of the copy has what its
//! original has, decrypted and encrypted anew, and nothing else: so it is as sparse, and a snapshot keeps in the copy what it keeps in
//! the disk.

use std::fs::File;
use std::sync::Arc;

use vmseal_api::filter::Direct;
use vmseal_api::host::{DiskFacts, DiskSpec, VmSpec};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;

use super::{Mirror, beside, copy_key};
use crate::filter::{self, Lower, Shared, Sums, Volume};
use crate::rules;
use crate::storage::builder::{internal, is_preallocated};
use crate::storage::file_error::failed;
use crate::storage::gate::Gate;
use crate::storage::home::{Beside, Home};
use crate::storage::layers::{self, CopiedLayers, Layer, NextCopy};
use crate::storage::locked::{Access, open_locked};
use crate::storage::opening::{self, Open, data_offset};
use crate::storage::preallocation;

/// How many steps it takes to get the room of a copy, as files are counted.
fn room_steps(mirror: &Mirror, disk: &DiskSpec) -> usize {
    let place = mirror.note.to.as_ref().unwrap_or(&disk.datastore);
    usize::from(mirror.note.layers && preallocation::is_written(&place.location, disk))
}

/// The layers of a disk and of its copy; none where the disk has none, or has pivoted.
fn layers_of(mirror: &Mirror) -> Result<Option<CopiedLayers>, Problem> {
    if !mirror.note.layers || mirror.pivoted {
        return Ok(None);
    }
    CopiedLayers::read(&mirror.source()?, &mirror.target()?, mirror.disk)
}

/// Whether what nobody writes of a disk is still being copied, or a file beside it. Blocks.
///
/// # Errors
/// Those of the notes.
pub fn is_incomplete(mirror: &Mirror) -> Result<bool, Problem> {
    if beside::next(mirror)?.is_some() {
        return Ok(true);
    }
    let layers = layers_of(mirror)?;
    Ok(layers.is_some_and(|layers| layers.next() != NextCopy::Nothing))
}

/// Opens the layers of a copy, the active one first and locked; none where the disk has no layers. Blocks.
///
/// # Errors
/// `timed-out` while they are not copied; those of the files.
pub(super) fn open(mirror: &Mirror) -> Result<Vec<File>, Problem> {
    let not_yet = || {
        let what = format!("the snapshots of disk {} are not copied yet", mirror.disk);
        Problem::new(ErrorCode::TimedOut, what)
    };
    if beside::next(mirror)?.is_some() {
        return Err(not_yet());
    }
    let Some(layers) = layers_of(mirror)? else { return Ok(Vec::new()) };
    layers.open()?.ok_or_else(not_yet)
}

/// The mirror of a disk whose copy is being made.
fn under_way(spec: &VmSpec, disk: &DiskSpec) -> Result<Mirror, Problem> {
    Mirror::find(&Home::of(&disk.datastore, spec.vm)?, disk.disk)?.ok_or_else(|| {
        let what = format!("disk '{}' is not copied any more", disk.name);
        Problem::new(ErrorCode::Cancelled, what)
    })
}

/// A file beside a mirrored disk that is to be copied.
pub struct FileBeside {
    mirror: Mirror,
    what: Beside,
    /// How many steps follow that take room.
    room: usize,
}

/// The file beside a disk to copy next, if there is one. Blocks.
///
/// # Errors
/// Those of the notes.
pub fn next_beside(spec: &VmSpec, disk: &DiskSpec) -> Result<Option<FileBeside>, Problem> {
    let mirror = under_way(spec, disk)?;
    let next = beside::next(&mirror)?;
    let room = room_steps(&mirror, disk);
    Ok(next.map(|what| FileBeside { mirror, what, room }))
}

impl FileBeside {
    /// How many files were copied before this one, and how many are to be copied in all; to take room counts as one.
    ///
    /// # Errors
    /// Those of the notes.
    pub fn place(&self) -> Result<(usize, usize), Problem> {
        let (copied, beside) = beside::progress(&self.mirror)?;
        let files = layers_of(&self.mirror)?.map_or(0, |layers| layers.progress().1);
        Ok((copied, beside + self.room + files))
    }

    /// Copies it as fast as `gate` lets it. `show` gets how many bytes are done, and the total. Blocks.
    ///
    /// # Errors
    /// `damaged`, `locked`, `no-space`; `cancelled` when the gate is closed.
    pub fn copy(
        &self,
        disk: (&VmSpec, &DiskSpec),
        kek: Option<&SecretBytes>,
        gate: &Gate,
        show: impl Fn(u64, u64),
    ) -> Result<(), Problem> {
        beside::copy(&self.mirror, disk, kek, &self.what, gate, show)
    }
}

/// The image of a copy, which has its room to get before it is copied.
pub struct Room {
    room: preallocation::Room,
    /// How many files were copied before, and how many are to be copied in all.
    place: (usize, usize),
}

/// The image of a mirrored disk's copy that has its room to get, also where some was taken before; none where it needs none, or is copied. No
/// filter of an earlier attempt may be left. Blocks.
///
/// # Errors
/// Those of the notes and the copy.
pub fn next_room(spec: &VmSpec, disk: &DiskSpec) -> Result<Option<Room>, Problem> {
    let mirror = under_way(spec, disk)?;
    let room = room_steps(&mirror, disk);
    let Some(layers) = layers_of(&mirror)? else { return Ok(None) };
    if room == 0 || layers.next() != NextCopy::Image {
        return Ok(None);
    }
    let (beside, _) = beside::progress(&mirror)?;
    let (done, files) = layers.progress();
    let home = mirror.target()?;
    let image = open_image(&home, disk, Access::Write)?;
    let place = (beside + done, beside + room + files);
    let room = preallocation::Room { home, disk: disk.disk, image };
    Ok(Some(Room { room, place }))
}

impl Room {
    /// Where it is among the files of the copy, as [`FileBeside::place`].
    #[must_use]
    pub fn place(&self) -> (usize, usize) {
        self.place
    }

    /// See [`preallocation::Room::take`].
    ///
    /// # Errors
    /// `no-space`; `cancelled` when the gate is closed.
    pub async fn take(
        self,
        gate: &Arc<Gate>,
        show: impl Fn(u64, u64) + Send,
    ) -> Result<(), Problem> {
        self.room.take(gate, show).await
    }
}

/// The image of a copy, open and locked.
fn open_image(target: &Home, disk: &DiskSpec, access: Access) -> Result<File, Problem> {
    let path = target.copy(disk.disk);
    open_locked(&path, access)?.ok_or_else(|| {
        let what = format!("{}, the copy of disk '{}', is not there", path.display(), disk.name);
        Problem::new(ErrorCode::Damaged, what)
    })
}

/// A file of the copy that is to be written.
pub struct Part {
    disk: filter::Disk,
    layers: CopiedLayers,
    copy: Option<Layer>,
    /// How many files beside the disk were copied before; to take room counts as one.
    beside: usize,
}

/// What to copy next of the layers of a mirrored disk that nobody writes; none if that is nothing. Blocks.
///
/// # Errors
/// Those of the disk and its copy.
pub fn next(
    spec: &VmSpec,
    disk: &DiskSpec,
    facts: &DiskFacts,
    kek: Option<&SecretBytes>,
) -> Result<Option<Part>, Problem> {
    let (home, mirror) = (Home::of(&disk.datastore, spec.vm)?, under_way(spec, disk)?);
    let Some(layers) = layers_of(&mirror)? else { return Ok(None) };
    let beside = beside::progress(&mirror)?.0 + room_steps(&mirror, disk);
    let layer = match layers.next() {
        NextCopy::Image => None,
        NextCopy::Layer(layer) => Some(layer),
        NextCopy::Active | NextCopy::Nothing => return Ok(None),
    };
    let lock = layers::lock_merge(&home, disk.disk)?;
    let target = mirror.target()?;
    // Layers of the copy are written while others have it open: only its own copying changes it.
    let access = if layer.is_none() { Access::Write } else { Access::Read };
    let image = open_image(&target, disk, access)?;
    let key = copy_key(&mirror.note, spec, disk, kek, &image)?;
    let length = image.metadata();
    let length = length.map_err(|error| failed(&target.copy(disk.disk), "read", &error))?.len();
    let new = layers.begin(layer, length)?;
    let Open { file, layers: above, offset, key: own_key, .. } =
        opening::open_layer(spec, disk, facts, kek, layer)?;
    let (copy, files, keeps_room) = (new.layer(), new.files, is_preallocated(disk));
    let at = data_offset(&mirror.note.copy_facts);
    let work = if layer.is_none() && !above.is_empty() {
        // What a linked clone stands on, in several files, becomes its image.
        filter::Work::Export {
            target: image,
            format: Volume::Disk { key, offset: at, keeps_room },
            sums: Sums::default(),
        }
    } else {
        let lower = Lower { file: image, layers: files, offset: at, key, direct: Direct::Auto };
        filter::Work::Merge { lower, lock }
    };
    let disk = filter::Disk {
        disk: disk.disk,
        size: disk.size,
        file,
        layers: above,
        offset,
        key: own_key,
        shared: Shared::default(),
        keeps_room,
        work,
        beside: None,
        replica: None,
        mirror: None,
    };
    Ok(Some(Part { disk, layers, copy, beside }))
}

/// What is to be noted when a part is copied.
pub struct ToNote {
    layers: CopiedLayers,
    copy: Option<Layer>,
    beside: usize,
}

impl Part {
    /// What the filter gets, and what is noted afterwards.
    #[must_use]
    pub fn split(self) -> (filter::Disk, ToNote) {
        let Self { disk, layers, copy, beside } = self;
        (disk, ToNote { layers, copy, beside })
    }
}

impl ToNote {
    /// How many files were copied before this one, and how many are to be copied in all.
    #[must_use]
    pub fn place(&self) -> (usize, usize) {
        let (done, all) = self.layers.progress();
        (self.beside + done, self.beside + all)
    }

    /// Notes that the part is copied and flushed. Blocks.
    ///
    /// # Errors
    /// Those of the note.
    pub fn note(self) -> Result<(), Problem> {
        self.layers.note(self.copy)
    }
}

/// Makes the active layer of a copy all of whose other layers are there: from now on a filter keeps the copy. Blocks.
///
/// # Errors
/// `already-exists` when the disk has pivoted; those of the files.
pub fn finish(spec: &VmSpec, disk: &DiskSpec) -> Result<(), Problem> {
    let home = Home::of(&disk.datastore, spec.vm)?;
    let Some(mirror) = Mirror::find(&home, disk.disk)? else {
        return Err(internal("a disk that is not copied was to be finished"));
    };
    if mirror.pivoted {
        return Err(rules::is_mirrored(spec));
    }
    let Some(layers) = layers_of(&mirror)? else { return Ok(()) };
    let path = mirror.target()?.copy(disk.disk);
    let metadata = path.metadata().map_err(|error| failed(&path, "read", &error))?;
    layers.finish(metadata.len())?;
    home.remove_note(&home.merge_lock(disk.disk))
}
