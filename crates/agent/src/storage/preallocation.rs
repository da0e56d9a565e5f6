//! When the image of a preallocated disk gets its room.
//!
//! In a directory that is when the image is made: `fallocate(2)` is a moment's work. A pool of Ceph takes room by having zeroes written, and
//! writing all of an image takes as long as copying a disk. So there
//!
//! | an image that is | gets its room |
//! |---|---|
//! | written whole, zeroes too, by a filter | as it is written; ahead of that its header alone ([`ahead`]) |
//! | written where its disk has data | before that or after it, step by step ([`Room`]) |
//!
//! Only what has no data yet is written for room, and what is there stays as it is.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use tokio::task::spawn_blocking;
use vmseal_api::host::{DatastoreLocation, DiskSpec};
use vmseal_api::id::DiskId;
use vmseal_api::problem::Problem;

use crate::storage::builder::{internal, is_preallocated};
use crate::storage::gate::Gate;
use crate::storage::holes::next_data;
use crate::storage::home::Home;

/// How much room is taken at a time, in bytes: progress is shown, and a stop noticed, after each of these.
const STEP: u64 = 64 << 20;

/// Whether an image of this disk at `location` gets its room by being written.
#[must_use]
pub fn is_written(location: &DatastoreLocation, disk: &DiskSpec) -> bool {
    is_preallocated(disk) && matches!(location, DatastoreLocation::Rbd { .. })
}

/// How much of an image that will be written whole gets its room when it is made: `length` bytes, which begin with a header of `header` bytes.
#[must_use]
pub fn ahead(location: &DatastoreLocation, header: u64, length: u64) -> u64 {
    match location {
        DatastoreLocation::Rbd { .. } => header,
        DatastoreLocation::Dir { .. } => length,
    }
}

/// The parts of an image of this length, in the order in which they get their room.
fn steps(length: u64) -> impl Iterator<Item = Range<u64>> {
    let starts = (0..length).step_by(usize::try_from(STEP).unwrap_or(usize::MAX));
    starts.map(move |at| at..length.min(at.saturating_add(STEP)))
}

/// An image, locked, that is to get all of its room. Nobody else writes it meanwhile.
pub struct Room {
    /// Where it is.
    pub home: Home,
    /// The disk that it is of.
    pub disk: DiskId,
    /// The image.
    pub image: File,
}

impl Room {
    fn length(&self) -> Result<u64, Problem> {
        self.image.metadata().map(|metadata| metadata.len()).map_err(internal)
    }

    /// Takes that of one part when `gate` lets it. Blocks.
    fn step(&self, gate: &Gate, part: Range<u64>) -> Result<(), Problem> {
        // What has data is not written, and its writing was held to the rate before. The gate is asked also where all has data: it may be
        // closed, or paused.
        gate.pass(holes(&self.image, &part).map_err(internal)?)?;
        self.home.allocate(self.disk, &self.image, part)
    }

    /// Takes it as fast as `gate` lets it, by other threads: nothing is written any more when this has returned. `show` gets how many bytes
    /// have their room, and the total. What was taken by an attempt before this one is passed over.
    ///
    /// # Errors
    /// `no-space`; `cancelled` when the gate is closed.
    pub async fn take(
        self,
        gate: &Arc<Gate>,
        show: impl Fn(u64, u64) + Send,
    ) -> Result<(), Problem> {
        let total = self.length()?;
        let this = Arc::new(self);
        for part in steps(total) {
            let (room, passes, done) = (Arc::clone(&this), Arc::clone(gate), part.end);
            spawn_blocking(move || room.step(&passes, part)).await.map_err(internal)??;
            show(done, total);
        }
        Ok(())
    }
}

/// How many bytes of a part of a file have no data, as far as its file system says.
fn holes(file: &File, part: &Range<u64>) -> io::Result<u64> {
    let (mut at, mut left) = (part.start, part.end - part.start);
    while let Some(data) = next_data(file, at, part.end)? {
        left -= data.end - data.start;
        at = data.end;
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::pin::pin;
    use std::sync::Mutex;
    use std::time::Duration;

    use tokio::time::timeout;
    use vmseal_api::host::{Allocation, DatastoreSpec};
    use vmseal_api::id::{DatastoreId, VmId};
    use vmseal_api::pace::CopyPace;
    use vmseal_api::problem::ErrorCode;

    use super::*;
    use crate::storage::datastore;

    /// More than one step.
    const LENGTH: u64 = STEP + 4096;

    /// How long a stop may take to be noticed, or what waits for nothing.
    const STOPS_WITHIN: Duration = Duration::from_secs(30);

    /// An image without any room.
    fn image(directory: &tempfile::TempDir) -> Room {
        let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        let home = Home::of(&place, VmId::new()).unwrap();
        let image = tempfile::tempfile_in(directory.path()).unwrap();
        image.set_len(LENGTH).unwrap();
        Room { home, disk: DiskId::new(), image }
    }

    fn taken(image: &File) -> u64 {
        image.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn room_is_taken_at_once_in_a_directory_and_is_written_on_a_pool() {
        let path = std::path::PathBuf::from("/ceph");
        let pool = Box::new(crate::storage::pool::tests::pool());
        let directory = DatastoreLocation::Dir { path: path.clone() };
        let ceph = DatastoreLocation::Rbd { path, pool };
        let (header, length) = (16 << 20, 1 << 40);
        assert_eq!(ahead(&directory, header, length), length);
        assert_eq!(ahead(&ceph, header, length), header);
        let thick =
            DiskSpec { allocation: Allocation::Preallocated, ..crate::rules::tests::disk("data") };
        let thin = DiskSpec { allocation: Allocation::Thin, ..thick.clone() };
        assert!(is_written(&ceph, &thick));
        assert!(!is_written(&ceph, &thin) && !is_written(&directory, &thick));
    }

    #[test]
    fn the_steps_are_all_of_an_image_one_after_the_other() {
        assert_eq!(steps(0).count(), 0);
        assert_eq!(steps(1).collect::<Vec<_>>(), [Range { start: 0, end: 1 }]);
        assert_eq!(steps(STEP).collect::<Vec<_>>(), [Range { start: 0, end: STEP }]);
        assert_eq!(steps(LENGTH).collect::<Vec<_>>(), [0..STEP, STEP..LENGTH]);
    }

    #[tokio::test]
    async fn room_is_taken_step_by_step_as_far_as_it_is_not_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let room = image(&directory);
        let (home, disk) = (room.home.clone(), room.disk);
        let file = room.image.try_clone().unwrap();
        let gate = Arc::new(Gate::new(CopyPace::default()));
        let shown = Mutex::new(Vec::new());
        // It is closed after the first step.
        let show = |done, all| {
            shown.lock().unwrap().push((done, all));
            gate.close();
        };
        let stopped = room.take(&gate, show).await.unwrap_err();
        assert_eq!(stopped.code, ErrorCode::Cancelled, "{stopped}");
        assert_eq!(*shown.lock().unwrap(), [(STEP, LENGTH)]);
        assert!(taken(&file) >= STEP, "{}", taken(&file));
        // Another attempt begins anew, and keeps what there is.
        let room = Room { home, disk, image: file.try_clone().unwrap() };
        let shown = Mutex::new(Vec::new());
        let gate = Arc::new(Gate::new(CopyPace::default()));
        room.take(&gate, |done, all| shown.lock().unwrap().push((done, all))).await.unwrap();
        assert_eq!(*shown.lock().unwrap(), [(STEP, LENGTH), (LENGTH, LENGTH)]);
        assert!(taken(&file) >= LENGTH, "{}", taken(&file));
    }

    #[tokio::test]
    async fn what_is_written_stays_and_all_else_gets_its_room() {
        let directory = tempfile::tempdir().unwrap();
        let room = image(&directory);
        room.image.write_all_at(b"data", STEP - 2).unwrap();
        let file = room.image.try_clone().unwrap();
        let gate = Arc::new(Gate::new(CopyPace::default()));
        let shown = Mutex::new(Vec::new());
        let show = |done, all| shown.lock().unwrap().push((done, all));
        room.take(&gate, show).await.unwrap();
        assert_eq!(*shown.lock().unwrap(), [(STEP, LENGTH), (LENGTH, LENGTH)]);
        assert!(taken(&file) >= LENGTH, "{}", taken(&file));
        let mut read = [0; 8];
        file.read_exact_at(&mut read, STEP - 4).unwrap();
        assert_eq!(&read, b"\0\0data\0\0");
    }

    #[tokio::test]
    async fn what_is_paused_ends_with_its_gate() {
        let directory = tempfile::tempdir().unwrap();
        let room = image(&directory);
        let file = room.image.try_clone().unwrap();
        let gate = Arc::new(Gate::new(CopyPace { paused: true, bytes_per_second: None }));
        let mut taking = pin!(room.take(&gate, |_, _| {}));
        tokio::select! {
            biased;
            ended = &mut taking => panic!("{ended:?}"),
            () = tokio::task::yield_now() => gate.close(),
        }
        let ended = timeout(STOPS_WITHIN, taking).await;
        assert_eq!(ended.unwrap().unwrap_err().code, ErrorCode::Cancelled);
        assert!(taken(&file) < STEP, "{}", taken(&file));
    }

    #[tokio::test]
    async fn what_has_data_does_not_wait_for_the_rate_again() {
        let directory = tempfile::tempdir().unwrap();
        let room = image(&directory);
        let data = 0..1 << 20;
        room.image.write_all_at(&vec![1; 1 << 20], 0).unwrap();
        assert_eq!(holes(&room.image, &data).unwrap(), 0);
        assert_eq!(holes(&room.image, &(STEP..LENGTH)).unwrap(), LENGTH - STEP);
        // Days for this much.
        let gate = Arc::new(Gate::new(CopyPace { paused: false, bytes_per_second: Some(1) }));
        let passes = Arc::clone(&gate);
        let twice = move || (0..2).try_for_each(|_| room.step(&passes, data.clone()));
        let ended = timeout(STOPS_WITHIN, spawn_blocking(twice)).await;
        // A thread that is left would hold up the end of the test.
        gate.close();
        ended.unwrap().unwrap().unwrap();
    }
}
