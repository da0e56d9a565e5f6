use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use vmseal_api::host::{Allocation, DatastoreLocation, DatastoreSpec, Device};
use vmseal_api::id::DatastoreId;
use vmseal_secret::KEK_LEN;

use super::*;
use crate::storage::datastore;
use crate::storage::opening;

/// Stands for what the guest has written.
const MARKER: &[u8] = b"VMSEAL-MARKER-IN-THE-CLEAR";

struct Bench {
    _directory: tempfile::TempDir,
    spec: VmSpec,
    kek: SecretBytes,
}

/// A VM with a plain disk of 1 MiB that holds the marker, and a bit more behind its end.
fn bench() -> Bench {
    let directory = tempfile::tempdir().unwrap();
    let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
    let place = DatastoreSpec { datastore: DatastoreId::new(), location };
    datastore::probe(&place).unwrap();
    let kek = SecretBytes::random(KEK_LEN).unwrap();
    let mut spec = crate::process::run_dir::tests::spec();
    spec.key = Some(keys::reference_of(&kek, spec.vm, "k"));
    let disk = DiskSpec { datastore: place, ..crate::rules::tests::disk("data") };
    spec.devices = vec![Device::Disk(DiskSpec { allocation: Allocation::Thin, ..disk })];
    let bench = Bench { _directory: directory, spec, kek };
    let file = bench.home().begin(&bench.spec, bench.disk(), bench.disk().size).unwrap();
    file.write_all_at(MARKER, 64 << 10).unwrap();
    file.write_all_at(MARKER, bench.disk().size + 4096).unwrap();
    bench.home().finish(bench.disk().disk, &file).unwrap();
    bench
}

impl Bench {
    fn disk(&self) -> &DiskSpec {
        self.spec.disk_at(0).unwrap()
    }

    fn home(&self) -> Home {
        Home::of(&self.disk().datastore, self.spec.vm).unwrap()
    }

    fn wanted(&self, task: TaskId) -> Wanted {
        Wanted {
            spec: self.spec.clone(),
            disk: self.disk().clone(),
            facts: DiskFacts::Raw,
            kek: Some(self.kek.try_clone().unwrap()),
            wanted: DiskToConvert { disk: self.disk().disk, encrypted: true },
            task,
        }
    }

    /// The endings of the names that are there.
    fn files(&self) -> Vec<String> {
        let name = |entry: io::Result<std::fs::DirEntry>| {
            let name = PathBuf::from(entry.unwrap().file_name());
            name.extension().unwrap().to_string_lossy().into_owned()
        };
        let mut names: Vec<_> = std::fs::read_dir(self.home().path()).unwrap().map(name).collect();
        names.sort();
        names
    }

    fn open(&self, facts: &DiskFacts) -> Result<(), Problem> {
        opening::open(&self.spec, self.disk(), facts, Some(&self.kek), Access::Write).map(drop)
    }
}

const UNDER_WAY: [&str; 5] =
    ["converting", "in-place", "in-place-header", "in-place-journal", "json"];

#[test]
fn until_data_moves_all_of_it_is_undone() {
    for commits in [false, true] {
        let bench = bench();
        let one = bench.wanted(TaskId::new());
        one.examine().unwrap();
        assert_eq!(bench.files(), ["json", "raw"], "examining has left something");
        assert_eq!(one.prepare().unwrap(), Position::Prepared);
        bench.open(&DiskFacts::Raw).unwrap();
        // Another task takes its place, as long as nothing has begun.
        let two = bench.wanted(TaskId::new());
        assert_eq!(two.prepare().unwrap(), Position::Prepared);
        assert_eq!(one.commit().unwrap_err().code, ErrorCode::NotFound);
        one.give_up().unwrap();
        if commits {
            two.commit().unwrap();
            two.commit().unwrap();
            assert_eq!(bench.files(), UNDER_WAY);
            let refused = bench.open(&DiskFacts::Raw).unwrap_err();
            assert!(refused.detail.contains("--in-place"), "{refused}");
            settle(&bench.spec, bench.disk()).unwrap_err();
            // Its filter has opened it, and not begun.
            drop(two.open(None).unwrap().unwrap());
            assert_eq!(two.prepare().unwrap(), Position::Begun);
        }
        two.give_up().unwrap();
        two.give_up().unwrap();
        assert_eq!(bench.files(), ["json", "raw"]);
        bench.open(&DiskFacts::Raw).unwrap();
        let image = std::fs::read(bench.home().image(bench.disk().disk)).unwrap();
        assert_eq!(&image[64 << 10..][..MARKER.len()], MARKER);
    }
}

#[test]
fn what_has_begun_only_goes_on_and_gets_its_name_when_the_inventory_has_it() {
    let mut bench = bench();
    let (task, size) = (TaskId::new(), bench.disk().size);
    let wanted = bench.wanted(task);
    wanted.prepare().unwrap();
    wanted.commit().unwrap();
    let disk = wanted.open(None).unwrap().unwrap();
    let length = disk.file.metadata().unwrap().len();
    assert_eq!(length, HEADER_AREA + size, "what was behind the disk is kept");
    drop(disk);
    // As a filter does with its first slot.
    let journal = bench.home().in_place_journal(bench.disk().disk);
    let journal = File::options().write(true).open(journal).unwrap();
    journal.write_all_at(b"begun", IN_PLACE_SLOT).unwrap();
    assert_eq!(wanted.give_up().unwrap_err().code, ErrorCode::AlreadyExists);
    wanted.seal().unwrap_err();
    let decrypts = DiskToConvert { encrypted: false, ..wanted.wanted.clone() };
    let other = Wanted { wanted: decrypts, ..bench.wanted(TaskId::new()) };
    assert_eq!(other.prepare().unwrap_err().code, ErrorCode::WrongState);
    // Another task goes on with it.
    let next = bench.wanted(TaskId::new());
    assert_eq!(next.prepare().unwrap(), Position::Begun);
    next.moved().unwrap();
    assert!(next.open(None).unwrap().is_none());
    let facts = next.seal().unwrap();
    assert_eq!(next.seal().unwrap(), facts);
    assert_eq!(bench.files(), ["converting", "in-place", "json"]);
    assert_eq!(next.prepare().unwrap(), Position::Finished(facts.clone()));
    // The inventory has it as it was.
    assert_eq!(settle(&bench.spec, bench.disk()).unwrap_err().code, ErrorCode::WrongState);
    for disk in bench.spec.disks_mut() {
        (disk.encrypted, disk.facts) = (true, Some(facts.clone()));
    }
    for _ in 0..2 {
        settle(&bench.spec, bench.disk()).unwrap();
        assert_eq!(bench.files(), ["json", "raw"]);
    }
    bench.open(&facts).unwrap();
}

#[test]
fn a_note_that_cannot_be_read_opens_nothing() {
    let bench = bench();
    let wanted = bench.wanted(TaskId::new());
    wanted.prepare().unwrap();
    wanted.commit().unwrap();
    std::fs::write(bench.home().in_place_note(bench.disk().disk), b"{\"version\":9}").unwrap();
    for refused in [
        bench.open(&DiskFacts::Raw).unwrap_err(),
        wanted.prepare().unwrap_err(),
        wanted.give_up().unwrap_err(),
        settle(&bench.spec, bench.disk()).unwrap_err(),
    ] {
        assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
    }
    assert_eq!(bench.files(), UNDER_WAY);
}
