//! The layers of the copy that is to take a disk's place ([`crate::storage::mirror`]), and those of what the disk was before.
//!
//! ```text
//!  no note ─ the image copied ─► note without layers ─ a layer copied ─► note with one more ─► … ─► with an empty active one:
//!                                                                                                  whole; takes its place
//! ```
//! The note is `DISK.copy-layers`, of the same form as that of the disk. Its layers are in the order of [`Layers::frozen`] of the
//! disk's, so it says by itself which are copied. A layer is copied as a whole, flushed, and then noted; what is on no note is
//! debris. Nobody writes to what is copied: that is the disk's without its active layer.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use vmseal_api::atomic_file;
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::files::{make_layer, open_layer, open_unlocked, remove_debris};
use super::{Kept, Layer, LayerId, Layers, note};
use crate::storage::builder::internal;
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::locked::{Access, open_locked};
use crate::storage::sharing;

/// What is to be copied next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextCopy {
    /// The image that is below all layers.
    Image,
    /// This layer of the disk, which nobody writes.
    Layer(LayerId),
    /// All files are copied. The active layer of the copy, which is empty, is made next.
    Active,
    /// Nothing at all.
    Nothing,
}

/// The layers of a copy, as far as they are there.
#[derive(Debug)]
pub struct CopiedLayers {
    /// The home of the copy.
    home: Home,
    disk: DiskId,
    /// Those of the disk.
    of: Layers,
    /// None before the image is copied.
    copied: Option<Layers>,
}

/// A layer that is being copied: debris until it is noted.
#[derive(Debug)]
pub struct NewCopy {
    layer: Option<Layer>,
    /// The files of the copy above its image, the one to be written first, whose lock is held.
    pub files: Vec<File>,
}

impl CopiedLayers {
    /// Those of a disk's copy, whose homes are these; none where the disk has no layers. Blocks.
    ///
    /// # Errors
    /// `damaged` when a note cannot be understood, or the two do not belong together.
    pub fn read(from: &Home, to: &Home, disk: DiskId) -> Result<Option<Self>, Problem> {
        let of = note::read(from, disk)?;
        if of.is_empty() {
            return Ok(None);
        }
        let path = to.copy_layers_note(disk);
        let copied = note::read_at(&path)?;
        let all = of.frozen().len() + usize::from(of.active.is_some());
        if of.active.is_none() || copied.as_ref().is_some_and(|it| it.layers.len() > all) {
            let what = format!(
                "the layers of disk {disk} are not those that were copied to {}: cancel the task that copies it",
                path.display()
            );
            return Err(Problem::new(ErrorCode::Damaged, what));
        }
        Ok(Some(Self { home: to.clone(), disk, of, copied }))
    }

    /// How many files are copied one after the other, and how many of them are.
    #[must_use]
    pub fn progress(&self) -> (usize, usize) {
        let done = self.copied.as_ref().map_or(0, |copied| 1 + copied.layers.len());
        (done, 1 + self.of.frozen().len())
    }

    /// What is to be done next.
    #[must_use]
    pub fn next(&self) -> NextCopy {
        let Some(copied) = &self.copied else { return NextCopy::Image };
        match self.of.frozen().get(copied.layers.len()) {
            _ if copied.active.is_some() => NextCopy::Nothing,
            Some(layer) => NextCopy::Layer(layer.layer),
            None => NextCopy::Active,
        }
    }

    /// The copy of a layer that is copied; of none, the image, that is the copy of the image.
    fn copy_of(&self, layer: Option<LayerId>) -> Result<Option<LayerId>, Problem> {
        let Some(layer) = layer else { return Ok(None) };
        let place = self.of.frozen().iter().position(|known| known.layer == layer);
        let copied = self.copied.iter().flat_map(|copied| &copied.layers);
        let copy = place.and_then(|place| copied.clone().nth(place));
        copy.map(|copy| Some(copy.layer)).ok_or_else(|| {
            let what = "a layer was to be copied before the one below it".to_owned();
            Problem::new(ErrorCode::Internal, what)
        })
    }

    /// Makes an empty file for the copy of a layer, or of none, the image, which is there, above the copies of those below.
    /// `length` is that of the image's copy. Blocks.
    ///
    /// # Errors
    /// `no-space`; those of the file system.
    pub fn begin(&self, layer: Option<LayerId>, length: u64) -> Result<NewCopy, Problem> {
        let Some(layer) = layer else { return Ok(NewCopy { layer: None, files: Vec::new() }) };
        // What an earlier attempt has left.
        remove_debris(&self.home, self.disk, &note::read(&self.home, self.disk)?);
        let below = self.copy_of(self.of.layer(layer).and_then(|layer| layer.below))?;
        let (layer, file) = make_layer(&self.home, self.disk, below, length)?;
        let mut files = vec![file];
        for below in self.copied.iter().flat_map(|copied| copied.chain(below)) {
            files.push(open_unlocked(&self.home, self.disk, below, false)?);
        }
        Ok(NewCopy { layer: Some(layer), files })
    }

    /// Notes that a layer, or the image, is copied and flushed. Blocks.
    ///
    /// # Errors
    /// Those of the note.
    pub fn note(self, copy: Option<Layer>) -> Result<(), Problem> {
        let mut copied = self.copied.unwrap_or_default();
        copied.layers.extend(copy);
        note::write_at(self.home.copy_layers_note(self.disk), &copied)
    }

    /// Makes the active layer, which is empty, and notes it: the copy is whole then, but for what the active layer of the disk
    /// has. Blocks.
    ///
    /// # Errors
    /// As [`CopiedLayers::begin`]; those of the note.
    pub fn finish(self, length: u64) -> Result<(), Problem> {
        match self.next() {
            NextCopy::Active => {}
            NextCopy::Nothing => return Ok(()),
            NextCopy::Image | NextCopy::Layer(_) => {
                let what = "a copy was to be finished before its layers were there".to_owned();
                return Err(Problem::new(ErrorCode::Internal, what));
            }
        }
        let NewCopy { layer, .. } = self.begin(self.of.active, length)?;
        let kept = |kept: &Kept| Ok(Kept { layer: self.copy_of(kept.layer)?, ..kept.clone() });
        let snapshots = self.of.snapshots.iter().map(kept).collect::<Result<_, Problem>>()?;
        let mut copied = self.copied.unwrap_or_default();
        copied.active = layer.as_ref().map(|layer| layer.layer);
        copied.layers.extend(layer);
        copied.snapshots = snapshots;
        note::write_at(self.home.copy_layers_note(self.disk), &copied)
    }

    /// Opens the layers of a copy that is whole, the active one first and locked; none of one that is not. Blocks.
    ///
    /// # Errors
    /// As [`super::open`].
    pub fn open(&self) -> Result<Option<Vec<File>>, Problem> {
        let Some(copied) = self.copied.as_ref().filter(|copied| copied.active.is_some()) else {
            return Ok(None);
        };
        let open = |(depth, layer): (usize, &&Layer)| {
            let access = if depth == 0 { Access::Write } else { Access::Read };
            open_layer(&self.home, self.disk, layer, access)
        };
        copied.chain(copied.active).iter().enumerate().map(open).collect::<Result<_, _>>().map(Some)
    }
}

impl NewCopy {
    /// What is to be noted when it is copied.
    #[must_use]
    pub fn layer(&self) -> Option<Layer> {
        self.layer.clone()
    }
}

/// Removes the layers of a copy that is given up, and their note first. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn drop_copies(home: &Home, disk: DiskId) -> Result<(), Problem> {
    home.remove_note(&home.copy_layers_note(disk))?;
    remove_debris(home, disk, &note::read(home, disk)?);
    Ok(())
}

/// Gives the note of the layers of a disk that has pivoted another name. `moved`: the copy is in another home. Blocks.
///
/// # Errors
/// Those of the file system.
pub fn set_aside(home: &Home, disk: DiskId, moved: bool) -> Result<(), Problem> {
    // Afterwards the name is that of the copy's.
    if !moved && !home.copy_layers_note(disk).exists() {
        return Ok(());
    }
    rename_if_there(&home.layers_note(disk), &home.source_layers_note(disk)).map(drop)
}

/// Gives the note of a copy's layers the name of the disk's; what had that is set aside. Blocks.
///
/// # Errors
/// `damaged` when there is no note; those of the file system.
pub fn take_place(home: &Home, disk: DiskId) -> Result<(), Problem> {
    let (copies, layers) = (home.copy_layers_note(disk), home.layers_note(disk));
    if rename_if_there(&copies, &layers)? || layers.exists() {
        return Ok(());
    }
    let what = format!("{}, which says which files are the disk, is not there", copies.display());
    Err(Problem::new(ErrorCode::Damaged, what))
}

/// Returns whether the file was there.
fn rename_if_there(from: &Path, to: &Path) -> Result<bool, Problem> {
    match std::fs::rename(from, to) {
        Ok(()) => {
            atomic_file::flush_directory_of(to).map_err(|error| failed(from, "renamed", &error))?;
            Ok(true)
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(from, "renamed", &error)),
    }
}

/// Removes the layers of what a disk was before, and their note last. `overwrite` gets each file before it is removed; `overwrite_base` each
/// of those that a linked clone stood on, where it has no name anywhere else, and whether it begins with the header. `left` gets the inodes
/// of those that have. Blocks.
///
/// # Errors
/// `in-use`; those of the file system and of what overwrites.
pub fn drop_sources(
    home: &Home,
    disk: DiskId,
    mut overwrite: impl FnMut(&Path, &File) -> Result<(), Problem>,
    overwrite_base: impl FnMut(&File, bool) -> Result<(), Problem>,
    left: &mut Vec<u64>,
) -> Result<(), Problem> {
    let path = home.source_layers_note(disk);
    let Some(layers) = note::read_at(&path)? else { return Ok(()) };
    for layer in &layers.layers {
        let path = home.layer(disk, layer.layer.0);
        let Some(file) = open_locked(&path, Access::Write)? else { continue };
        overwrite(&path, &file)?;
        home.remove_locked(&path)?;
    }
    if let Some(base) = layers.base() {
        drop_base(home, disk, base.files.len(), overwrite_base, left)?;
    }
    home.remove_note(&path)
}

/// Removes a linked clone's names of the files that it shared. A file that the other VM, or another clone, still uses only loses its name
/// here. A file without a further name is overwritten first: the other VM has been deleted or copied, and this was the last clone of it. The
/// file's lock is held meanwhile, so that two clones that end at once do not both take the other for the last one.
fn drop_base(
    home: &Home,
    disk: DiskId,
    count: usize,
    mut overwrite: impl FnMut(&File, bool) -> Result<(), Problem>,
    left: &mut Vec<u64>,
) -> Result<(), Problem> {
    for place in 0..count {
        let path = home.base(disk, place, count);
        match open_locked(&path, Access::Write) {
            Ok(None) => {}
            Ok(Some(file)) => {
                if sharing::has_other_names(&file).map_err(internal)? {
                    left.push(file.metadata().map_err(internal)?.ino());
                } else {
                    overwrite(&file, place + 1 == count)?;
                }
                home.remove_locked(&path)?;
            }
            Err(problem) if problem.code == ErrorCode::InUse => {
                let found = path.symlink_metadata();
                let found = found.map_err(|error| failed(&path, "looked at", &error))?;
                if found.nlink() < 2 {
                    return Err(problem);
                }
                // The filter of the other VM has it, under its name there.
                left.push(found.ino());
                home.remove_locked(&path)?;
            }
            Err(problem) => return Err(problem),
        }
    }
    home.remove_base(disk)
}
