//! The note of a disk that is converted in its own file (docs/formats/in-place.md), and that such a disk is not used meanwhile.
//! [`super::in_place`] has the work.

use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{DiskFacts, DiskSpec};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::file_error::failed;
use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::json_file;

/// The version of notes.
const VERSION: u32 = 1;

/// The longest note: several times as long as vmseal's.
const NOTE_MAX: u64 = 4096;

/// How far a conversion is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Its data moves, or is about to: the journal says how far that is.
    Moving,
    /// All data has moved: the header, or the end of the file, is put right.
    Sealing,
    /// It is as it is to be, and has opened with its key.
    Finished,
}

/// What is noted of a conversion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    version: u32,
    /// The task that began it, or goes on with it.
    pub task: TaskId,
    /// The image of the disk.
    pub image: FileIdentity,
    /// The file with the header: of the disk as it is to be, or of one that is decrypted as it was.
    pub header: FileIdentity,
    /// The journal.
    pub journal: FileIdentity,
    /// The size of the disk, in bytes.
    pub size: u64,
    /// What the disk was.
    pub source_facts: DiskFacts,
    /// What it is to be.
    pub target_facts: DiskFacts,
    /// How far it is.
    pub stage: Stage,
}

impl Note {
    /// The note of a conversion that is about to begin.
    pub fn new(
        task: TaskId,
        [image, header, journal]: [FileIdentity; 3],
        size: u64,
        (source_facts, target_facts): (DiskFacts, DiskFacts),
    ) -> Self {
        let (version, stage) = (VERSION, Stage::Moving);
        Self { version, task, image, header, journal, size, source_facts, target_facts, stage }
    }

    /// Whether the disk is encrypted when it is finished.
    pub fn encrypts(&self) -> bool {
        self.target_facts != DiskFacts::Raw
    }

    /// What is done, for people.
    pub fn what(&self) -> &'static str {
        match (&self.source_facts, &self.target_facts) {
            (DiskFacts::Raw, _) => "encrypted",
            (_, DiskFacts::Raw) => "decrypted",
            _ => "encrypted anew",
        }
    }
}

/// Reads a note.
///
/// # Errors
/// Why it cannot be understood.
pub fn parse(text: &[u8]) -> Result<Note, String> {
    match serde_json::from_slice::<Note>(text) {
        Ok(note) if note.version != VERSION => Err(format!("it has version {}", note.version)),
        // Nothing would have to be converted.
        Ok(note)
            if (&note.source_facts, &note.target_facts) == (&DiskFacts::Raw, &DiskFacts::Raw) =>
        {
            Err("it is of no conversion".to_owned())
        }
        Ok(note) => Ok(note),
        Err(error) => Err(error.to_string()),
    }
}

/// The note of a disk; none when there is none.
///
/// # Errors
/// `damaged` when it cannot be understood: how the disk's data is stored is then unknown.
pub fn read(home: &Home, disk: DiskId) -> Result<Option<Note>, Problem> {
    let path = home.in_place_note(disk);
    let Some(text) = json_file::read(&path, NOTE_MAX)? else { return Ok(None) };
    parse(&text).map(Some).map_err(|why| {
        let what = format!(
            "{}, which says how the disk's data is stored, cannot be read: {why}. A newer vmseal may have written it",
            path.display()
        );
        Problem::new(ErrorCode::Damaged, what)
    })
}

/// Writes the note of a disk, durably.
///
/// # Errors
/// Those of the file system.
pub fn write(home: &Home, disk: DiskId, note: &Note) -> Result<(), Problem> {
    let path = home.in_place_note(disk);
    json_file::write(&path, note)
}

/// Whether a file has this name.
///
/// # Errors
/// It cannot be told.
pub fn is_there(path: &Path) -> Result<bool, Problem> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(failed(path, "looked at", &error)),
    }
}

/// Why a disk cannot be used for anything: it is being converted. None where it is not. Blocks.
///
/// # Errors
/// As [`read`].
pub fn refusal(home: &Home, vm: &str, disk: &DiskSpec) -> Result<Option<Problem>, Problem> {
    let Some(note) = read(home, disk.disk)? else { return Ok(None) };
    if !is_there(&home.converting(disk.disk))? {
        return Ok(None);
    }
    let verb = match (&note.source_facts, &note.target_facts) {
        (DiskFacts::Raw, _) => "encrypt",
        (_, DiskFacts::Raw) => "decrypt",
        _ => "recrypt --deep",
    };
    let (name, what, task) = (&disk.name, note.what(), note.task);
    let detail = format!(
        "disk '{name}' of VM '{vm}' is being {what} in place by task {task}, and is no disk until that has ended: wait for it (vmseal task watch {task}); where that task is not at work any more, begin the same again, which goes on (vmseal vm {verb} {vm} --in-place)"
    );
    Ok(Some(Problem::new(ErrorCode::WrongState, detail)))
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn the_note_matches_its_description() {
        let identity = |inode| FileIdentity { inode, born: None };
        let luks = DiskFacts::Luks2 {
            version: 1,
            cipher: "aes-xts-plain64".to_owned(),
            key_bits: 512,
            sector_size: 4096,
            data_offset: 16 << 20,
        };
        let files = [5, 6, 7].map(identity);
        let task = TaskId(Uuid::from_u128(7));
        let note = Note::new(task, files, 1 << 30, (DiskFacts::Raw, luks));
        let text = include_str!("../../tests/golden/in-place-note-v1.json").trim_end();
        assert_eq!(serde_json::to_string(&note).unwrap(), text);
        assert_eq!(parse(text.as_bytes()).unwrap(), note);
        let newer = text.replace("\"version\":1,\"task\"", "\"version\":2,\"task\"");
        assert!(parse(newer.as_bytes()).is_err());
    }
}
