//! How fast the copy of a disk goes, on record beside the image (docs/formats/mirror-note.md): what opens the disk next, after
//! the death of whatever, has it copied at that pace.

use std::fs::File;
use std::io::{self, Read};

use vmseal_api::atomic_file::{self, PRIVATE};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;

use crate::storage::home::Home;

/// The longest record: several times as long as vmseal's.
const RECORD_MAX: u64 = 1024;

/// The pace of the copy of a disk; `home` is that of its image. One that cannot be read is none: no data depends on it, and
/// the task says it again.
pub fn read(home: &Home, disk: DiskId) -> CopyPace {
    let path = home.mirror_pace(disk);
    let mut text = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(RECORD_MAX).read_to_end(&mut text));
    let pace = match read {
        Ok(_) => serde_json::from_slice(&text).map_err(io::Error::from),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return CopyPace::default(),
        Err(error) => Err(error),
    };
    let sound = pace.and_then(|pace: CopyPace| match pace.check() {
        Ok(()) => Ok(pace),
        Err(wrong) => Err(io::Error::other(wrong)),
    });
    sound.unwrap_or_else(|error| {
        tracing::warn!(path = %path.display(), %error, "the pace of a copy is not known: it is not held back");
        CopyPace::default()
    })
}

/// Puts the pace of the copy of a disk on record, durably; `home` is that of its image. Where the datastore is full the copy
/// goes on at that pace nevertheless, until its filter is started again: a task is not to end because it was slowed.
pub fn record(home: &Home, disk: DiskId, pace: CopyPace) {
    let path = home.mirror_pace(disk);
    let recorded = if pace.is_free() {
        home.remove_note(&path).map_err(|problem| io::Error::other(problem.detail))
    } else {
        let json = serde_json::to_vec(&pace).map_err(io::Error::from);
        json.and_then(|json| atomic_file::write(&path, &json, PRIVATE))
    };
    if let Err(error) = recorded {
        tracing::warn!(path = %path.display(), %error, "the pace of a copy is not on record");
    }
}
