//! The note of a copy that is to take a disk's place (docs/formats/mirror-note.md).

use std::fs::File;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};
use vmseal_api::atomic_file::{self, PRIVATE};
use vmseal_api::host::DiskFacts;
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::mark::failed;

/// The version of notes.
const VERSION: u32 = 1;

/// The longest note: several times as long as vmseal's.
const NOTE_MAX: u64 = 4096;

/// What is noted of a copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    version: u32,
    /// The task that the copy is of.
    pub task: TaskId,
    /// The image that the disk has.
    pub source: FileIdentity,
    /// The facts of that image.
    pub source_facts: DiskFacts,
    /// The image that it is to have.
    pub copy: FileIdentity,
    /// The facts of that one.
    pub copy_facts: DiskFacts,
}

impl Note {
    /// A note of this version; each file with its facts.
    pub fn new(
        task: TaskId,
        (source, source_facts): (FileIdentity, DiskFacts),
        (copy, copy_facts): (FileIdentity, DiskFacts),
    ) -> Self {
        Self { version: VERSION, task, source, source_facts, copy, copy_facts }
    }

    /// Whether the copy is encrypted.
    pub fn encrypts(&self) -> bool {
        self.copy_facts != DiskFacts::Raw
    }
}

/// The note of a disk; none when there is none.
///
/// # Errors
/// `damaged` when it cannot be understood: whether the disk's data is in the image or in the copy is then unknown.
pub fn read(home: &Home, disk: DiskId) -> Result<Option<Note>, Problem> {
    let path = home.mirror_note(disk);
    let mut text = Vec::new();
    match File::open(&path).and_then(|file| file.take(NOTE_MAX).read_to_end(&mut text)) {
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(&path, "read", &error)),
    }
    match serde_json::from_slice::<Note>(&text) {
        Ok(note) if note.version == VERSION => Ok(Some(note)),
        understood => {
            let why = match understood {
                Ok(note) => format!("it has version {}", note.version),
                Err(error) => error.to_string(),
            };
            let what = format!(
                "{}, which says where the disk's data is, cannot be read: {why}. A newer vmseal may have written it",
                path.display()
            );
            Err(Problem::new(ErrorCode::Damaged, what))
        }
    }
}

/// Writes the note of a disk, durably.
///
/// # Errors
/// Those of the file system.
pub fn write(home: &Home, disk: DiskId, note: &Note) -> Result<(), Problem> {
    let path = home.mirror_note(disk);
    serde_json::to_vec(note)
        .map_err(io::Error::from)
        .and_then(|json| atomic_file::write(&path, &json, PRIVATE))
        .map_err(|error| failed(&path, "written", &error))
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_note_matches_its_description() {
        let identity = |inode, born| FileIdentity { inode, born };
        let luks = DiskFacts::Luks2 {
            version: 1,
            cipher: "aes-xts-plain64".to_owned(),
            key_bits: 512,
            sector_size: 4096,
            data_offset: 16 << 20,
        };
        let note = Note::new(
            TaskId(Uuid::from_u128(7)),
            (identity(5, Some(6)), DiskFacts::Raw),
            (identity(8, None), luks),
        );
        let text = r#"{"version":1,"task":"00000000-0000-0000-0000-000000000007","source":{"inode":5,"born":6},"source_facts":{"format":"raw"},"copy":{"inode":8},"copy_facts":{"format":"luks2","version":1,"cipher":"aes-xts-plain64","key_bits":512,"sector_size":4096,"data_offset":16777216}}"#;
        assert_eq!(serde_json::to_string(&note).unwrap(), text);
        assert_eq!(serde_json::from_str::<Note>(text).unwrap(), note);
        assert!(note.encrypts());
    }
}
