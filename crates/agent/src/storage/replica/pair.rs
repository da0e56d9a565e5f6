//! Which image and which replica a map is about: the same note beside both (docs/formats/replica-map.md).
//!
//! A restored image, another replica, a datastore that was away and comes back: each brings a file under the
//! same name that the map is not about.

use std::fs::File;
use std::io::Read;

use serde::{Deserialize, Serialize};
use uuid::Uuid;
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use crate::storage::file_identity::FileIdentity;
use crate::storage::home::Home;
use crate::storage::json_file;

/// The version of the note.
const VERSION: u32 = 1;

/// The longest note: several times as long as vmseal's.
const NOTE_MAX: u64 = 4096;

/// The note.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    version: u32,
    id: Uuid,
    image: FileIdentity,
    replica: FileIdentity,
}

impl Pair {
    /// A new pair, different from every other note.
    pub fn new(image: FileIdentity, replica: FileIdentity) -> Self {
        Self { version: VERSION, id: Uuid::new_v4(), image, replica }
    }

    /// Whether the note is about these two.
    pub fn is_of(&self, image: &FileIdentity, replica: &FileIdentity) -> bool {
        self.version == VERSION && self.image == *image && self.replica == *replica
    }
}

/// The note in a home; none where it is missing or cannot be read, as everything is copied then.
pub fn read(home: &Home, disk: DiskId) -> Option<Pair> {
    let mut text = Vec::new();
    File::open(home.pair(disk)).ok()?.take(NOTE_MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Writes the note to a home, durably.
///
/// # Errors
/// Those of the file system.
pub fn write(home: &Home, disk: DiskId, pair: &Pair) -> Result<(), Problem> {
    let path = home.pair(disk);
    json_file::write(&path, pair)
}

/// Removes the note from a home, durably.
///
/// # Errors
/// Those of the file system.
pub fn remove(home: &Home, disk: DiskId) -> Result<(), Problem> {
    home.remove_note(&home.pair(disk))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_matches_its_description() {
        let identity = |inode, born| FileIdentity { inode, born };
        let id = Uuid::from_u128(7);
        let pair = Pair { version: 1, id, image: identity(5, Some(6)), replica: identity(8, None) };
        let text = r#"{"version":1,"id":"00000000-0000-0000-0000-000000000007","image":{"inode":5,"born":6},"replica":{"inode":8}}"#;
        assert_eq!(serde_json::to_string(&pair).unwrap(), text);
        assert_eq!(serde_json::from_str::<Pair>(text).unwrap(), pair);
    }

    #[test]
    fn a_copy_is_another_file_and_a_file_with_another_name_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let identity = |name: &str| FileIdentity::of(&File::open(path(name)).unwrap()).unwrap();
        std::fs::write(path("a"), "1").unwrap();
        let first = identity("a");
        std::fs::rename(path("a"), path("b")).unwrap();
        std::fs::write(path("b"), "22").unwrap();
        assert_eq!(identity("b"), first);
        std::fs::copy(path("b"), path("a")).unwrap();
        let copy = identity("a");
        assert_ne!(copy, first);
        let pair = Pair::new(first.clone(), copy.clone());
        assert!(pair.is_of(&first, &copy) && !pair.is_of(&copy, &first));
        assert!(!Pair { version: 2, ..pair.clone() }.is_of(&first, &copy));
        assert_ne!(pair, Pair::new(first, copy));
    }
}
