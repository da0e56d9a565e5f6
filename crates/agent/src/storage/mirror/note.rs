//! The note of a copy that is to take a disk's place (docs/formats/mirror-note.md).

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{DatastoreSpec, DiskFacts};
use vmseal_api::id::{DiskId, TaskId};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::json_file;

/// The version of notes of a copy on the disk's own datastore.
const VERSION: u32 = 1;

/// The version of notes of a copy on another one. There is one beside the disk's image, and one beside the copy.
const VERSION_OF_MOVE: u32 = 2;

/// The version of notes of a disk with layers, which are copied as well, on the same datastore or another one.
const VERSION_OF_LAYERS: u32 = 3;

/// The version of notes of a disk with memories that snapshots keep beside it, which follow; with layers or without.
const VERSION_OF_MEMORY: u32 = 4;

/// The version of notes of a disk beside which is the memory of a VM that is suspended, or core dumps, which follow as well.
const VERSION_OF_BESIDE: u32 = 5;

/// The version of notes of the disk that has the key of a TPM: what that keeps follows.
const VERSION_OF_TPM: u32 = 6;

/// The longest note: several times as long as vmseal's, with as many core dumps as a VM has.
const NOTE_MAX: u64 = 8192;

/// How the sealed files beside a disk are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryForm {
    /// Under the VM's key.
    Sealed,
    /// As those of a VM without a key.
    InTheClear,
}

/// What tells a file from a later one with the same inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Written {
    length: u64,
    /// When its content was changed last, in seconds and nanoseconds since 1970.
    modified: (i64, i64),
}

impl Written {
    /// What is known of a file.
    pub fn in_metadata(metadata: &Metadata) -> Self {
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        Self { length: metadata.len(), modified }
    }
}

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
    /// In the note beside the image: the datastore of the copy, where that is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<DatastoreSpec>,
    /// In the note beside the copy: the datastore of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<DatastoreSpec>,
    /// Whether the disk has layers, and the copy gets them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub layers: bool,
    /// How what follows from beside the disk is to be, if there is anything: the memory that snapshots keep, and what is below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemoryForm>,
    /// The memory of the VM, if it was suspended when the copy was begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended: Option<FileIdentity>,
    /// How that memory was, where its file system does not say when a file was created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended_written: Option<Written>,
    /// The core dumps that were there then, by what their names have behind `vm.core-`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cores: Vec<String>,
    /// Whether the disk has the key of a TPM, and what that keeps is beside it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tpm: bool,
}

/// What is beside a disk and follows its copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Following {
    /// How all of it is to be.
    pub form: MemoryForm,
    /// The memory of the VM, if it is suspended.
    pub suspended: Option<FileIdentity>,
    /// How that memory is, where its identity alone could be another file's later.
    pub suspended_written: Option<Written>,
    /// The core dumps, by what their names have behind `vm.core-`.
    pub cores: Vec<String>,
}

impl Note {
    /// A note of this version; each file with its facts.
    pub fn new(
        task: TaskId,
        (source, source_facts): (FileIdentity, DiskFacts),
        (copy, copy_facts): (FileIdentity, DiskFacts),
    ) -> Self {
        Self {
            version: VERSION,
            task,
            source,
            source_facts,
            copy,
            copy_facts,
            to: None,
            from: None,
            layers: false,
            memory: None,
            suspended: None,
            suspended_written: None,
            cores: Vec::new(),
            tpm: false,
        }
    }

    /// The note of a disk with layers.
    pub fn of_layers(self) -> Self {
        Self { version: VERSION_OF_LAYERS, layers: true, ..self }
    }

    /// The note of a disk with this beside it.
    pub fn with_beside(self, following: Following) -> Self {
        let Following { form, suspended, suspended_written, cores } = following;
        let note = Self { memory: Some(form), suspended, suspended_written, cores, ..self };
        let version = if note.has_more() { VERSION_OF_BESIDE } else { VERSION_OF_MEMORY };
        Self { version, ..note }
    }

    /// The note of a disk that has the key of a TPM, whatever is beside it besides.
    pub fn of_tpm(self) -> Self {
        Self { version: VERSION_OF_TPM, tpm: true, ..self }
    }

    /// Whether more than the memory of snapshots follows.
    fn has_more(&self) -> bool {
        self.suspended.is_some() || !self.cores.is_empty()
    }

    /// The two notes of a copy on another datastore: that beside the image, and that beside the copy.
    pub fn of_move(self, from: DatastoreSpec, to: DatastoreSpec) -> (Self, Self) {
        let version = match (self.layers, self.memory) {
            _ if self.tpm => self.version,
            (_, Some(_)) => self.version,
            (true, None) => VERSION_OF_LAYERS,
            (false, None) => VERSION_OF_MOVE,
        };
        let note = Self { version, ..self };
        (Self { to: Some(to), ..note.clone() }, Self { from: Some(from), ..note })
    }

    /// Whether it says where both files are.
    fn is_whole(&self) -> bool {
        let places = usize::from(self.to.is_some()) + usize::from(self.from.is_some());
        match self.version {
            _ if self.suspended_written.is_some() && self.suspended.is_none() => false,
            VERSION_OF_TPM => {
                places <= 1 && self.tpm && (self.memory.is_some() || !self.has_more())
            }
            _ if self.tpm => false,
            VERSION_OF_BESIDE => places <= 1 && self.memory.is_some() && self.has_more(),
            _ if self.has_more() => false,
            VERSION_OF_MEMORY => places <= 1 && self.memory.is_some(),
            _ if self.memory.is_some() => false,
            VERSION => places == 0 && !self.layers,
            VERSION_OF_MOVE => places == 1 && !self.layers,
            VERSION_OF_LAYERS => places <= 1 && self.layers,
            _ => false,
        }
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
    let Some(text) = json_file::read(&path, NOTE_MAX)? else { return Ok(None) };
    match serde_json::from_slice::<Note>(&text) {
        Ok(note) if note.is_whole() => Ok(Some(note)),
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
    json_file::write(&path, note)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;
    use vmseal_api::host::DatastoreLocation;
    use vmseal_api::id::DatastoreId;

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
        let place = |number: u128, path: &str| DatastoreSpec {
            datastore: DatastoreId(Uuid::from_u128(number)),
            location: DatastoreLocation::Dir { path: path.into() },
        };
        let whole = note.clone().of_move(place(1, "/a"), place(2, "/b"));
        let end = r#""to":{"datastore":"00000000-0000-0000-0000-000000000002","location":{"kind":"dir","path":"/b"}}}"#;
        let text = serde_json::to_string(&whole.0).unwrap();
        assert!(text.starts_with(r#"{"version":2,"#) && text.ends_with(end), "{text}");
        assert!(whole.0.is_whole() && whole.1.is_whole() && note.is_whole());
        let layered = note.clone().of_layers();
        let of_layers = serde_json::to_string(&layered).unwrap();
        assert!(of_layers.starts_with(r#"{"version":3,"#), "{of_layers}");
        assert!(of_layers.ends_with(r#","layers":true}"#), "{of_layers}");
        let moved = layered.clone().of_move(place(1, "/a"), place(2, "/b"));
        assert!([&layered, &moved.0, &moved.1].iter().all(|it| it.version == 3 && it.is_whole()));
        assert!(!Note { version: 1, ..layered.clone() }.is_whole());
        let layered_again = layered.clone();
        assert!(!Note { layers: false, ..layered }.is_whole());
        let following =
            |form, suspended, cores| Following { form, suspended, suspended_written: None, cores };
        let clear = MemoryForm::InTheClear;
        let remembered = layered_again.with_beside(following(clear, None, vec![]));
        let text = serde_json::to_string(&remembered).unwrap();
        assert!(text.starts_with(r#"{"version":4,"#), "{text}");
        assert!(text.ends_with(r#","layers":true,"memory":"in-the-clear"}"#), "{text}");
        let moved = remembered.clone().of_move(place(1, "/a"), place(2, "/b"));
        assert!(
            [&remembered, &moved.0, &moved.1].iter().all(|it| it.version == 4 && it.is_whole())
        );
        assert!(!Note { version: 3, ..remembered.clone() }.is_whole());
        assert!(!Note { memory: None, ..remembered }.is_whole());
        let sealed =
            following(MemoryForm::Sealed, Some(identity(9, Some(1))), vec!["d".to_owned()]);
        let suspended = note.clone().with_beside(sealed);
        let text = serde_json::to_string(&suspended).unwrap();
        assert!(text.starts_with(r#"{"version":5,"#), "{text}");
        let end = r#","memory":"sealed","suspended":{"inode":9,"born":1},"cores":["d"]}"#;
        assert!(text.ends_with(end), "{text}");
        assert_eq!(serde_json::from_str::<Note>(&text).unwrap(), suspended);
        let moved = suspended.clone().of_move(place(1, "/a"), place(2, "/b"));
        assert!([&suspended, &moved.0, &moved.1].iter().all(|it| it.version == 5 && it.is_whole()));
        let written = Some(Written { length: 7, modified: (8, 9) });
        let written = Note { suspended_written: written, ..suspended.clone() };
        let text = serde_json::to_string(&written).unwrap();
        let end = r#""suspended_written":{"length":7,"modified":[8,9]},"cores":["d"]}"#;
        assert!(text.ends_with(end), "{text}");
        assert_eq!(serde_json::from_str::<Note>(&text).unwrap(), written);
        for wrong in [
            Note { suspended: None, ..written },
            Note { version: 4, ..suspended.clone() },
            Note { memory: None, ..suspended.clone() },
            Note { suspended: None, cores: vec![], ..suspended },
        ] {
            assert!(!wrong.is_whole(), "{wrong:?}");
        }
        let of_tpm = note.clone().of_tpm();
        let text = serde_json::to_string(&of_tpm).unwrap();
        assert!(
            text.starts_with(r#"{"version":6,"#) && text.ends_with(r#","tpm":true}"#),
            "{text}"
        );
        let moved = of_tpm.clone().of_move(place(1, "/a"), place(2, "/b"));
        assert!([&of_tpm, &moved.0, &moved.1].iter().all(|it| it.version == 6 && it.is_whole()));
        assert!(!Note { version: 1, ..of_tpm.clone() }.is_whole());
        assert!(!Note { tpm: false, ..of_tpm }.is_whole());
        let neither = [Note { from: whole.1.from, ..whole.0 }, Note { version: 2, ..note.clone() }];
        assert!(neither.iter().chain([&Note { version: 3, ..note }]).all(|it| !it.is_whole()));
    }
}
