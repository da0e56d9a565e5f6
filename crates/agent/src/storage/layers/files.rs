//! The files of a disk's layers.

use std::fs::File;
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use uuid::Uuid;
use vmseal_api::atomic_file;
use vmseal_api::filter::DiskFile;
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_qcow2::Below;

use super::note::PreparedNote;
use super::{Base, Layer, LayerId, Layers, note};
use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::locked::{Access, make_locked, open_locked, open_once};
use crate::storage::sharing;

/// The open files of a disk, from some layer downwards.
#[derive(Debug)]
pub struct Files {
    /// The layers above the lowest file, the uppermost first.
    pub layers: Vec<File>,
    /// The lowest file: the disk's image, or that of a linked clone's base.
    pub image: File,
    /// The image with the header and the lock, of a linked clone.
    pub own: Option<File>,
    /// How many of the layers, the last ones, are its base's.
    pub of_base: usize,
}

impl Files {
    /// Those of a disk with this image and these layers, and what its base has.
    fn new(
        home: &Home,
        disk: DiskId,
        known: &Layers,
        (image, mut layers): (File, Vec<File>),
    ) -> Result<Self, Problem> {
        let Some(mut base) = open_base(home, disk, known)? else {
            return Ok(Self { layers, image, own: None, of_base: 0 });
        };
        // A note that names no file is refused.
        let lowest = base.pop().ok_or_else(|| internal("a linked clone without a base"))?;
        let of_base = base.len();
        layers.extend(base);
        Ok(Self { layers, image: lowest, own: Some(image), of_base })
    }

    /// The file that is written.
    #[must_use]
    pub fn written(&self) -> &File {
        self.layers.first().unwrap_or(&self.image)
    }

    /// The file with the disk's header and lock.
    #[must_use]
    pub fn own(&self) -> &File {
        self.own.as_ref().unwrap_or(&self.image)
    }
}

/// Opens the layers of a disk whose image is open, the active one first: none where the disk is its image alone. For a writer
/// the active layer is locked against all others; the others are only read. Blocks.
///
/// # Errors
/// `damaged` when one is not there or is another file; `in-use`.
pub fn open(home: &Home, disk: DiskId, image: File, access: Access) -> Result<Files, Problem> {
    let layers = note::read(home, disk)?;
    let chain = layers.chain(layers.active);
    let open = |(depth, layer): (usize, &&Layer)| {
        // A layer that was active until a snapshot was taken may have the lock of its writer still.
        let access = match access {
            Access::BesideGuest | Access::ReadBesideGuest => access,
            _ if depth == 0 => access,
            _ => Access::Read,
        };
        open_layer(home, disk, layer, access)
    };
    let above = chain.iter().enumerate().map(open).collect::<Result<_, _>>()?;
    Files::new(home, disk, &layers, (image, above))
}

/// Opens the files of a linked clone's base for reading, each before the next one below it. They need no lock, as nobody writes
/// them.
fn open_base(home: &Home, disk: DiskId, layers: &Layers) -> Result<Option<Vec<File>>, Problem> {
    let Some(base) = &layers.base else { return Ok(None) };
    let open = |(place, known): (usize, &FileIdentity)| {
        let path = home.base(disk, place, base.files.len());
        let opened = File::options()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
            .open(&path);
        let file = opened.map_err(|error| failed(&path, "opened", &error))?;
        let found = file.metadata().map_err(|error| failed(&path, "read", &error))?;
        if found.is_file() && FileIdentity::in_metadata(&found) == *known {
            return Ok(file);
        }
        Err(gone(&path))
    };
    base.files.iter().enumerate().map(open).collect::<Result<_, _>>().map(Some)
}

/// Checks that no linked clone stands on what a disk has itself, its image and its layers. Blocks.
///
/// # Errors
/// `wrong-state`, with their names; those of the note.
pub fn check_unshared(home: &Home, disk: DiskId) -> Result<(), Problem> {
    let known = note::read(home, disk)?;
    let layers = known.layers.iter().map(|layer| home.layer(disk, layer.layer.0));
    let files: Vec<_> = layers.chain([home.image(disk)]).collect();
    sharing::check_alone(home, &files)
}

/// Checks that no linked clone stands on what a snapshot keeps of a disk. Blocks.
///
/// # Errors
/// As [`check_unshared`].
pub fn check_droppable(home: &Home, disk: DiskId, snapshot: SnapshotId) -> Result<(), Problem> {
    let Some(kept) = note::read(home, disk)?.layer_of(snapshot) else { return Ok(()) };
    let path = kept.map_or_else(|| home.image(disk), |layer| home.layer(disk, layer.0));
    sharing::check_alone(home, &[path])
}

/// What a linked clone of what a snapshot keeps is above of: the places of the files, each above the next, with what they are. None
/// without the snapshot. Blocks.
///
/// # Errors
/// `damaged` when one is not there or is another file; those of the note.
pub fn base_of(
    home: &Home,
    disk: DiskId,
    snapshot: SnapshotId,
) -> Result<Option<Vec<(PathBuf, FileIdentity)>>, Problem> {
    let known = note::read(home, disk)?;
    let Some(kept) = known.layer_of(snapshot) else { return Ok(None) };
    let chain = known.chain(kept);
    let mut files: Vec<_> = chain
        .into_iter()
        .map(|layer| (home.layer(disk, layer.layer.0), Some(layer.file.clone())))
        .collect();
    match &known.base {
        None => files.push((home.image(disk), None)),
        Some(base) => {
            let known = base.files.iter().enumerate();
            let place = |place| home.base(disk, place, base.files.len());
            files.extend(known.map(|(at, file)| (place(at), Some(file.clone()))));
        }
    }
    let checked = files.into_iter().map(|(path, known)| {
        let found = path.symlink_metadata().map_err(|error| failed(&path, "read", &error))?;
        let identity = FileIdentity::in_metadata(&found);
        match known {
            _ if !found.is_file() => Err(gone(&path)),
            Some(known) if known != identity => Err(gone(&path)),
            _ => Ok((path, identity)),
        }
    });
    checked.collect::<Result<_, _>>().map(Some)
}

/// Makes the first layer of a linked clone, which is empty, and writes the note: the disk is as its base is, when its image gets
/// its name. `length` is that of the image. Blocks.
///
/// # Errors
/// `no-space`; those of the file system.
pub fn put_linked(home: &Home, disk: DiskId, base: Base, length: u64) -> Result<(), Problem> {
    let format = if base.files.len() > 1 { "qcow2" } else { "raw" };
    let (layer, _) = make_layer_above(
        home,
        disk,
        None,
        length,
        (&home.base(disk, 0, base.files.len()), format),
    )?;
    note::write(home, disk, &Layers::linked(base, layer))
}

pub(super) fn open_layer(
    home: &Home,
    disk: DiskId,
    layer: &Layer,
    access: Access,
) -> Result<File, Problem> {
    let path = home.layer(disk, layer.layer.0);
    let file = open_locked(&path, access)?.ok_or_else(|| gone(&path))?;
    same(&file, layer, &path).map(|()| file)
}

/// The same without its lock, for a merge: those who hold it only read what is not changed.
pub(super) fn open_unlocked(
    home: &Home,
    disk: DiskId,
    layer: &Layer,
    write: bool,
) -> Result<File, Problem> {
    let path = home.layer(disk, layer.layer.0);
    let file = File::options().read(true).write(write).open(&path);
    let file = file.map_err(|error| failed(&path, "opened", &error))?;
    same(&file, layer, &path).map(|()| file)
}

fn same(file: &File, layer: &Layer, path: &Path) -> Result<(), Problem> {
    match FileIdentity::of(file) {
        Ok(identity) if identity == layer.file => Ok(()),
        Ok(_) => Err(gone(path)),
        Err(error) => Err(failed(path, "read", &error)),
    }
}

fn gone(path: &Path) -> Problem {
    let what = format!(
        "{}, a layer of the disk, is not there, or another file has taken its place: put it back",
        path.display()
    );
    Problem::new(ErrorCode::Damaged, what)
}

/// Makes an empty layer above another one, or above the image, and flushes it. It is debris until it is put on the note.
/// Blocks.
///
/// # Errors
/// `no-space`; those of the file system.
pub fn begin_layer(home: &Home, disk: DiskId, below: Option<LayerId>) -> Result<Layer, Problem> {
    let image = home.image(disk);
    let metadata = image.metadata().map_err(|error| failed(&image, "read", &error))?;
    let (layer, _) = make_layer(home, disk, below, metadata.len())?;
    Ok(layer)
}

/// The same above an image of this length, which may not have its name yet. The file's lock is held.
pub(super) fn make_layer(
    home: &Home,
    disk: DiskId,
    below: Option<LayerId>,
    length: u64,
) -> Result<(Layer, File), Problem> {
    let lower = below.map_or_else(|| home.image(disk), |below| home.layer(disk, below.0));
    let format = if below.is_some() { "qcow2" } else { "raw" };
    make_layer_above(home, disk, below, length, (&lower, format))
}

/// The same with a file of this format below it.
fn make_layer_above(
    home: &Home,
    disk: DiskId,
    below: Option<LayerId>,
    length: u64,
    (lower, format): (&Path, &str),
) -> Result<(Layer, File), Problem> {
    let layer = LayerId::new();
    let path = home.layer(disk, layer.0);
    let name = lower.file_name().map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_default();
    let file = make_locked(&path)?;
    vmseal_qcow2::create_overlay(&file, length, Below { name: &name, format })
        .and_then(|()| file.sync_all())
        .and_then(|()| atomic_file::flush_directory_of(&path))
        .map_err(|error| failed(&path, "made", &error))?;
    let identity = FileIdentity::of(&file).map_err(|error| failed(&path, "read", &error))?;
    Ok((Layer { layer, below, file: identity }, file))
}

/// Makes a layer active that was begun: a snapshot keeps what was before, if one is named. Blocks.
///
/// # Errors
/// Those of the note.
pub fn put_active(
    home: &Home,
    disk: DiskId,
    next: Layer,
    keep: Option<(SnapshotId, Uuid)>,
) -> Result<(), Problem> {
    let note = prepare_active(home, disk, next, keep)?;
    flush_active(home, disk)?;
    note.put()
}

/// Flushes what is written until now. Nobody flushes it once another layer is written, and a filter that was killed has not: what
/// a guest then flushes, or a replica relies on, would not be durable. One that is not there has nothing to be flushed.
fn flush_active(home: &Home, disk: DiskId) -> Result<(), Problem> {
    let active = note::read(home, disk)?.active;
    let path = active.map_or_else(|| home.image(disk), |layer| home.layer(disk, layer.0));
    let opened =
        File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(&path);
    match opened.and_then(|file| file.sync_data()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(failed(&path, "flushed", &error))
        }
        _ => Ok(()),
    }
}

/// Does the part of [`put_active`] that takes long. Blocks.
///
/// # Errors
/// Those of the note.
pub fn prepare_active(
    home: &Home,
    disk: DiskId,
    next: Layer,
    keep: Option<(SnapshotId, Uuid)>,
) -> Result<PreparedNote, Problem> {
    let mut layers = note::read(home, disk)?;
    match keep {
        Some((snapshot, attempt)) => layers.keep(snapshot, attempt, next),
        None => layers.stack(next),
    }
    note::prepare(home, disk, &layers)
}

/// Opens a layer that was begun, locked against all others, and what is below it for reading: the image, and the layers
/// from the new one downwards. Those below need no lock: who writes them now has it, and keeps it. Blocks.
///
/// # Errors
/// As [`open_upper`].
pub fn open_above(home: &Home, disk: DiskId, next: &Layer) -> Result<Files, Problem> {
    let known = note::read(home, disk)?;
    let mut files = open_chain(home, disk, &known, next.below, false)?;
    files.layers.insert(0, open_layer(home, disk, next, Access::Write)?);
    Ok(files)
}

/// The file that is written, of a disk that has layers: none of one that has none, or whose file is not there. Blocks.
///
/// # Errors
/// Those of the note.
pub fn written(home: &Home, disk: DiskId) -> Result<Option<DiskFile>, Problem> {
    let Some(active) = note::read(home, disk)?.active else { return Ok(None) };
    let metadata = home.layer(disk, active.0).metadata().ok();
    Ok(metadata.map(|there| DiskFile { device: there.dev(), inode: there.ino() }))
}

/// Forgets a snapshot, if one is named, and removes the files of layers that nothing needs, and those that are not on the
/// note. A file that is in use is removed later. Returns what is left. Blocks.
///
/// # Errors
/// Those of the note.
pub fn remove_unneeded(
    home: &Home,
    disk: DiskId,
    forgotten: Option<SnapshotId>,
) -> Result<Layers, Problem> {
    let before = note::read(home, disk)?;
    let mut layers = before.clone();
    if let Some(snapshot) = forgotten {
        layers.forget(snapshot);
    }
    while let Some(layer) = layers.unneeded() {
        layers.layers.retain(|known| known.layer != layer);
    }
    if layers != before {
        note::write(home, disk, &layers)?;
    }
    remove_debris(home, disk, &layers);
    Ok(layers)
}

/// Removes the files of layers that are on no note: not on that of the disk, of its copy, or of what it was before.
pub(super) fn remove_debris(home: &Home, disk: DiskId, layers: &Layers) {
    let others = [home.copy_layers_note(disk), home.source_layers_note(disk)];
    let others = others.iter().map(|path| note::read_at(path)).collect::<Result<Vec<_>, _>>();
    let others = match others {
        Ok(others) => others,
        Err(problem) => {
            tracing::warn!(%disk, %problem, "no layer is removed, as one may still be needed");
            return;
        }
    };
    for (layer, path) in home.layer_files(disk) {
        let names = |layers: &Layers| layers.layer(LayerId(layer)).is_some();
        if names(layers) || others.iter().flatten().any(names) {
            continue;
        }
        // One that a filter still reads goes with the next attempt.
        let removed = match open_once(&path, Access::Write) {
            Ok(Some(_lock)) => home.remove_locked(&path),
            Ok(None) => Ok(()),
            Err(problem) => Err(problem),
        };
        if let Err(problem) = removed {
            tracing::info!(%disk, %problem, "a layer that nothing needs is removed later");
        }
    }
}

/// How much room a layer takes, in bytes; 0 where it cannot be seen. Blocks.
#[must_use]
pub fn room(home: &Home, disk: DiskId, layer: LayerId) -> u64 {
    let metadata = home.layer(disk, layer.0).metadata();
    metadata.map_or(0, |metadata| metadata.blocks().saturating_mul(512))
}

/// How much room all layers of a disk take, in bytes. Blocks.
#[must_use]
pub fn room_of_all(home: &Home, disk: DiskId, layers: &Layers) -> u64 {
    layers.layers.iter().map(|layer| room(home, disk, layer.layer)).sum()
}

/// The lock that a merge of the disk's layers holds: a process of an earlier agent may still write. Blocks.
///
/// # Errors
/// `in-use`; those of the file system.
pub fn lock_merge(home: &Home, disk: DiskId) -> Result<File, Problem> {
    let path = home.merge_lock(disk);
    match open_locked(&path, Access::Write)? {
        Some(file) => Ok(file),
        None => make_locked(&path),
    }
}

/// Opens a layer and all below it for reading: the image, and the layers above it from this one downwards. Blocks.
///
/// # Errors
/// `damaged`; those of the file system.
pub fn open_upper(
    home: &Home,
    disk: DiskId,
    layers: &Layers,
    upper: LayerId,
) -> Result<(File, Vec<File>), Problem> {
    open_chain(home, disk, layers, Some(upper), false).map(|files| (files.image, files.layers))
}

/// The same from a layer that nobody writes downwards, or of the image alone. Blocks.
///
/// # Errors
/// As [`open_upper`]; those of the note.
pub fn open_from(home: &Home, disk: DiskId, from: Option<LayerId>) -> Result<Files, Problem> {
    open_chain(home, disk, &note::read(home, disk)?, from, false)
}

/// Opens what a snapshot keeps, for reading and without a lock, as [`open_upper`] does; none without the snapshot. Blocks.
///
/// # Errors
/// As [`open_upper`]; those of the note.
pub fn open_kept(
    home: &Home,
    disk: DiskId,
    snapshot: SnapshotId,
) -> Result<Option<Files>, Problem> {
    let layers = note::read(home, disk)?;
    let kept = layers.layer_of(snapshot);
    kept.map(|layer| open_chain(home, disk, &layers, layer, false)).transpose()
}

/// Opens what is below a layer, to be written. Blocks.
///
/// # Errors
/// As [`open_upper`]; `wrong-state` when linked clones stand on that file.
pub fn open_lower(
    home: &Home,
    disk: DiskId,
    layers: &Layers,
    upper: LayerId,
) -> Result<Files, Problem> {
    let below = layers.layer(upper).and_then(|layer| layer.below);
    let path = below.map_or_else(|| home.image(disk), |below| home.layer(disk, below.0));
    sharing::check_alone(home, &[path])?;
    open_chain(home, disk, layers, below, true)
}

/// Opens the disk to be served on by a filter that holds its locks: the image, and the layers above it. Blocks.
///
/// # Errors
/// As [`open_upper`].
pub fn open_served(home: &Home, disk: DiskId, layers: &Layers) -> Result<Files, Problem> {
    open_chain(home, disk, layers, layers.active, true)
}

fn open_chain(
    home: &Home,
    disk: DiskId,
    layers: &Layers,
    from: Option<LayerId>,
    write: bool,
) -> Result<Files, Problem> {
    let chain = layers.chain(from);
    let open =
        |(depth, layer): (usize, &&Layer)| open_unlocked(home, disk, layer, write && depth == 0);
    let above = chain.iter().enumerate().map(open).collect::<Result<Vec<_>, _>>()?;
    let path: PathBuf = home.image(disk);
    let image = File::options().read(true).write(write && above.is_empty()).open(&path);
    let image = image.map_err(|error| failed(&path, "opened", &error))?;
    Files::new(home, disk, layers, (image, above))
}

/// Notes that a layer has been merged into the one below it, and removes its file. Blocks.
///
/// # Errors
/// Those of the note.
pub fn note_merged(home: &Home, disk: DiskId, upper: LayerId) -> Result<Layers, Problem> {
    prepare_merged(home, disk, upper)?.put()?;
    remove_merged(home, disk)
}

/// Does the part of [`note_merged`] that takes long, and not the rest. Blocks.
///
/// # Errors
/// Those of the note.
pub fn prepare_merged(home: &Home, disk: DiskId, upper: LayerId) -> Result<PreparedNote, Problem> {
    let mut layers = note::read(home, disk)?;
    layers.merged(upper);
    note::prepare(home, disk, &layers)
}

/// Removes the files of layers that were merged, and the lock of merges after the last one. Blocks.
///
/// # Errors
/// Those of the note.
pub fn remove_merged(home: &Home, disk: DiskId) -> Result<Layers, Problem> {
    let layers = note::read(home, disk)?;
    remove_debris(home, disk, &layers);
    if layers.next_merge().is_none() {
        home.remove_note(&home.merge_lock(disk))?;
    }
    Ok(layers)
}
