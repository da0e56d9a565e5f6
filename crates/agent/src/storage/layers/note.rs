//! The note of a disk's layers (docs/formats/layers-note.md).

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmseal_api::atomic_file::{self, PRIVATE, Prepared};
use vmseal_api::host::LAYERS_MAX;
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{Base, Kept, Layer, LayerId, Layers};
use crate::storage::file_error::failed;
use crate::storage::home::Home;
use crate::storage::json_file;

/// The version of notes.
const VERSION: u32 = 1;

/// The longest note, in bytes: thousands of layers.
const NOTE_MAX: u64 = 1 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    version: u32,
    layers: Vec<Layer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    active: Option<LayerId>,
    snapshots: Vec<Kept>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    base: Option<Base>,
}

/// The layers of a disk. Blocks.
///
/// # Errors
/// `damaged` when the note cannot be understood: which files are the disk is then unknown.
pub fn read(home: &Home, disk: DiskId) -> Result<Layers, Problem> {
    read_at(&home.layers_note(disk)).map(Option::unwrap_or_default)
}

/// The layers that the note at this place names; none where there is no note.
///
/// # Errors
/// As [`read`].
pub(super) fn read_at(path: &Path) -> Result<Option<Layers>, Problem> {
    let Some(text) = json_file::read(path, NOTE_MAX)? else { return Ok(None) };
    let damaged = |why: String| {
        let what = format!(
            "{}, which says which files are the disk, cannot be used: {why}. A newer vmseal may have written it",
            path.display()
        );
        Problem::new(ErrorCode::Damaged, what)
    };
    let note: Note = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if note.version != VERSION {
        return Err(damaged(format!("it has version {}", note.version)));
    }
    let Note { layers, active, snapshots, base, .. } = note;
    if base.as_ref().is_some_and(|base| !(1..LAYERS_MAX).contains(&base.files.len())) {
        return Err(damaged("it has no base, or too long a one".to_owned()));
    }
    let layers = Layers { layers, active, snapshots, base };
    if layers.is_sound() {
        Ok(Some(layers))
    } else {
        Err(damaged("it names layers that are not in it".to_owned()))
    }
}

/// Writes the layers of a disk, durably. A disk that is its image alone has no note.
///
/// # Errors
/// Those of the file system.
pub(super) fn write(home: &Home, disk: DiskId, layers: &Layers) -> Result<(), Problem> {
    prepare(home, disk, layers)?.put()
}

/// Writes layers, which may be none, to the note at this place, durably.
///
/// # Errors
/// Those of the file system.
pub(super) fn write_at(path: PathBuf, layers: &Layers) -> Result<(), Problem> {
    prepare_at(path, layers)?.put()
}

/// A note that is written and flushed, and not in its place yet; or that there is to be none.
#[derive(Debug)]
#[must_use]
pub struct PreparedNote {
    change: Change,
    path: PathBuf,
}

#[derive(Debug)]
enum Change {
    Put(Prepared),
    Remove(Home),
}

impl PreparedNote {
    /// Puts the note in its place, or removes the former one, durably. Blocks.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn put(self) -> Result<(), Problem> {
        match self.change {
            Change::Put(prepared) => {
                prepared.put().map_err(|error| failed(&self.path, "written", &error))
            }
            Change::Remove(home) => home.remove_note(&self.path),
        }
    }

    /// Puts several, and flushes each directory once: guests wait for it. Blocks.
    ///
    /// # Errors
    /// As [`PreparedNote::put`]; some may be in their places.
    pub fn put_all(all: Vec<Self>) -> Result<(), Problem> {
        let Some(path) = all.first().map(|note| note.path.clone()) else { return Ok(()) };
        let mut prepared = Vec::new();
        for note in all {
            match note.change {
                Change::Put(file) => prepared.push(file),
                Change::Remove(_) => note.put()?,
            }
        }
        atomic_file::put_all(prepared).map_err(|error| failed(&path, "written", &error))
    }
}

/// Does the part of [`write`] that takes long.
pub(super) fn prepare(home: &Home, disk: DiskId, layers: &Layers) -> Result<PreparedNote, Problem> {
    let path = home.layers_note(disk);
    if layers.is_empty() {
        return Ok(PreparedNote { change: Change::Remove(home.clone()), path });
    }
    prepare_at(path, layers)
}

fn prepare_at(path: PathBuf, layers: &Layers) -> Result<PreparedNote, Problem> {
    let Layers { layers, active, snapshots, base } = layers.clone();
    let note = Note { version: VERSION, layers, active, snapshots, base };
    let prepared = serde_json::to_vec(&note)
        .map_err(io::Error::from)
        .and_then(|json| atomic_file::prepare(&path, &json, PRIVATE));
    match prepared {
        Ok(prepared) => Ok(PreparedNote { change: Change::Put(prepared), path }),
        Err(error) => Err(failed(&path, "written", &error)),
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use vmseal_api::id::{SnapshotId, VmId};

    use super::*;
    use crate::storage::file_identity::FileIdentity;

    #[test]
    fn the_note_matches_its_description() {
        let id = |number| LayerId(Uuid::from_u128(number));
        let file = FileIdentity { inode: 5, born: Some(6) };
        let note = Note {
            version: VERSION,
            layers: vec![
                Layer { layer: id(1), below: None, file: file.clone() },
                Layer { layer: id(2), below: Some(id(1)), file },
            ],
            active: Some(id(2)),
            snapshots: vec![
                Kept {
                    snapshot: SnapshotId(Uuid::from_u128(3)),
                    attempt: Uuid::from_u128(4),
                    layer: None,
                },
                Kept {
                    snapshot: SnapshotId(Uuid::from_u128(5)),
                    attempt: Uuid::from_u128(6),
                    layer: Some(id(1)),
                },
            ],
            base: None,
        };
        let text = r#"{"version":1,"layers":[{"layer":"00000000-0000-0000-0000-000000000001","file":{"inode":5,"born":6}},{"layer":"00000000-0000-0000-0000-000000000002","below":"00000000-0000-0000-0000-000000000001","file":{"inode":5,"born":6}}],"active":"00000000-0000-0000-0000-000000000002","snapshots":[{"snapshot":"00000000-0000-0000-0000-000000000003","attempt":"00000000-0000-0000-0000-000000000004"},{"snapshot":"00000000-0000-0000-0000-000000000005","attempt":"00000000-0000-0000-0000-000000000006","layer":"00000000-0000-0000-0000-000000000001"}]}"#;
        assert_eq!(serde_json::to_string(&note).unwrap(), text);
        assert!(serde_json::from_str::<Note>(text).is_ok());
        let linked = Note {
            layers: vec![Layer {
                layer: id(1),
                below: None,
                file: FileIdentity { inode: 5, born: None },
            }],
            active: Some(id(1)),
            snapshots: Vec::new(),
            base: Some(Base {
                vm: VmId(Uuid::from_u128(7)),
                disk: DiskId(Uuid::from_u128(8)),
                files: vec![FileIdentity { inode: 9, born: Some(10) }],
            }),
            ..note
        };
        let text = r#"{"version":1,"layers":[{"layer":"00000000-0000-0000-0000-000000000001","file":{"inode":5}}],"active":"00000000-0000-0000-0000-000000000001","snapshots":[],"base":{"vm":"00000000-0000-0000-0000-000000000007","disk":"00000000-0000-0000-0000-000000000008","files":[{"inode":9,"born":10}]}}"#;
        assert_eq!(serde_json::to_string(&linked).unwrap(), text);
        // A base of no file, and of too many.
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("note");
        let file = r#"{"inode":9,"born":10}"#;
        let written = |files: &str| {
            std::fs::write(&path, text.replace(file, files)).unwrap();
            read_at(&path)
        };
        assert!(written(file).unwrap().is_some_and(|layers| layers.base().is_some()));
        assert!(written("").is_err() && written(&[file; LAYERS_MAX].join(",")).is_err());
    }
}
