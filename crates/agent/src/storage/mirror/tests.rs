use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use vmseal_api::host::{Allocation, DatastoreLocation, DatastoreSpec, Device};
use vmseal_api::id::DatastoreId;
use vmseal_secret::KEK_LEN;

use super::*;
use crate::storage::datastore;

/// Stands for what the guest has written.
const MARKER: &[u8] = b"VMSEAL-MARKER-IN-THE-CLEAR";

struct Bench {
    _directory: tempfile::TempDir,
    spec: VmSpec,
    kek: SecretBytes,
    task: TaskId,
}

/// A VM with a plain disk of 1 MiB that holds the marker.
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
    let bench = Bench { _directory: directory, spec, kek, task: TaskId::new() };
    let file = bench.home().begin(&bench.spec, bench.disk(), bench.disk().size).unwrap();
    file.write_all_at(MARKER, 64 << 10).unwrap();
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

    fn begin(&self) -> Result<(), Problem> {
        self.begin_of(self.task)
    }

    fn begin_of(&self, task: TaskId) -> Result<(), Problem> {
        let wanted = DiskToMirror { disk: self.disk().disk, encrypted: true };
        let (spec, disk, facts) = (&self.spec, self.disk(), &DiskFacts::Raw);
        let new = NewMirror { spec, disk, facts, kek: Some(&self.kek), wanted: &wanted, task };
        new.begin(|_| Ok(()))
    }

    fn open(&self) -> Result<GuestDisk, Problem> {
        open_for_guest(&self.spec, self.disk(), &DiskFacts::Raw, Some(&self.kek))
    }

    /// Pivots, as a filter does.
    fn pivot(&self) {
        let block = pivot_mark::tests::block(self.disk().disk, 1);
        std::fs::write(self.home().mirror_map(self.disk().disk), block).unwrap();
    }

    fn files(&self) -> Vec<String> {
        let image = self.home().image(self.disk().disk);
        let there = std::fs::read_dir(image.parent().unwrap()).unwrap();
        let name = |entry: std::io::Result<std::fs::DirEntry>| {
            let name = PathBuf::from(entry.unwrap().file_name());
            name.extension().unwrap().to_string_lossy().into_owned()
        };
        let mut names: Vec<_> = there.map(name).collect();
        names.sort();
        names
    }

    fn remove_source(&self) -> Result<(), Problem> {
        source::remove(&self.spec, self.disk(), |_, _| {}, || false)
    }
}

#[test]
fn a_copy_is_begun_once_and_opened_with_its_disk() {
    let bench = bench();
    bench.begin().unwrap();
    assert_eq!(bench.files(), ["copy", "json", "mirror", "mirror-map", "raw"]);
    let note = std::fs::read(bench.home().mirror_note(bench.disk().disk)).unwrap();
    bench.begin().unwrap();
    assert_eq!(std::fs::read(bench.home().mirror_note(bench.disk().disk)).unwrap(), note);
    assert_eq!(bench.begin_of(TaskId::new()).unwrap_err().code, ErrorCode::WrongState);
    let opened = bench.open().unwrap();
    let copy = opened.mirror.as_ref().expect("its copy");
    assert!(copy.key.is_some() && copy.offset == vmseal_luks::DATA_OFFSET);
    assert!(opened.open.key.is_none() && !opened.has_pivoted);
    drop(opened);
    // Nobody else writes to the disk: the copy would not see it.
    let open = |access| {
        crate::storage::open::open(
            &bench.spec,
            bench.disk(),
            &DiskFacts::Raw,
            Some(&bench.kek),
            access,
        )
    };
    assert_eq!(open(Access::Write).unwrap_err().code, ErrorCode::InUse);
    drop(open(Access::Read).unwrap());
    give_up(&bench.spec, bench.disk(), Some(TaskId::new())).unwrap();
    assert!(bench.open().unwrap().mirror.is_some(), "given up for another task");
    give_up(&bench.spec, bench.disk(), Some(bench.task)).unwrap();
    give_up(&bench.spec, bench.disk(), Some(bench.task)).unwrap();
    assert_eq!(bench.files(), ["json", "raw"]);
    drop(open(Access::Write).unwrap());
}

#[test]
fn debris_of_a_beginning_is_removed_and_nothing_is_begun_without_room() {
    let mut bench = bench();
    std::fs::write(bench.home().copy(bench.disk().disk), "x").unwrap();
    std::fs::write(bench.home().mirror_map(bench.disk().disk), "x").unwrap();
    bench.begin().unwrap();
    give_up(&bench.spec, bench.disk(), None).unwrap();
    let disk = bench.spec.disk_at_mut(0).unwrap();
    (disk.allocation, disk.size) = (Allocation::Preallocated, 1 << 60);
    assert_eq!(bench.begin().unwrap_err().code, ErrorCode::NoSpace);
    assert_eq!(bench.files(), ["json", "raw"]);
}

/// A copy that cannot be opened keeps no guest from its disk; one whose key is not here yet does.
#[test]
fn a_lost_copy_is_given_up_and_a_locked_one_is_not() {
    let bench = bench();
    bench.begin().unwrap();
    let locked = open_for_guest(&bench.spec, bench.disk(), &DiskFacts::Raw, None);
    assert_eq!(locked.err().unwrap().code, ErrorCode::Locked);
    let copy = bench.home().copy(bench.disk().disk);
    std::fs::remove_file(&copy).unwrap();
    std::fs::write(&copy, "another file").unwrap();
    assert!(bench.open().unwrap().mirror.is_none());
    // It stays given up: what the guest has written meanwhile is missing in it.
    assert!(of_disk(bench.spec.vm, bench.disk()).unwrap().is_none());
}

#[test]
fn where_the_data_is_must_be_certain() {
    let bench = bench();
    bench.begin().unwrap();
    let map = bench.home().mirror_map(bench.disk().disk);
    let mut block = pivot_mark::tests::block(bench.disk().disk, 1);
    block[100] ^= 1;
    std::fs::write(&map, block).unwrap();
    assert_eq!(bench.open().err().unwrap().code, ErrorCode::Damaged);
    std::fs::remove_file(&map).unwrap();
    assert_ne!(bench.open().err().unwrap().code, ErrorCode::NotFound);
    std::fs::write(&map, "").unwrap();
    bench.open().unwrap();
    std::fs::write(bench.home().mirror_note(bench.disk().disk), "{}").unwrap();
    assert_eq!(bench.open().err().unwrap().code, ErrorCode::Damaged);
}

/// After a pivot the names are put right from each state that a process may leave, and the copy is the disk.
#[test]
fn a_disk_that_has_pivoted_is_its_copy_from_every_state_of_the_names() {
    for renamed in 0..3 {
        let bench = bench();
        bench.begin().unwrap();
        bench.pivot();
        let (home, disk) = (bench.home(), bench.disk().disk);
        if renamed > 0 {
            std::fs::rename(home.image(disk), home.source(disk)).unwrap();
        }
        if renamed > 1 {
            std::fs::rename(home.copy(disk), home.image(disk)).unwrap();
        }
        assert_eq!(
            give_up(&bench.spec, bench.disk(), Some(bench.task)).unwrap_err().code,
            ErrorCode::AlreadyExists
        );
        let opened = bench.open().unwrap();
        assert!(opened.has_pivoted && opened.mirror.is_none() && opened.open.key.is_some());
        drop(opened);
        let (taken, _) = take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
        assert!(taken.encrypted && taken.facts.is_some());
        assert_eq!(bench.files(), ["json", "mirror", "mirror-map", "raw", "source"]);
        assert_eq!(bench.begin_of(TaskId::new()).unwrap_err().code, ErrorCode::WrongState);
        bench.remove_source().unwrap();
        bench.remove_source().unwrap();
        assert_eq!(bench.files(), ["json", "raw"]);
    }
}

#[test]
fn a_copy_that_is_lost_after_the_pivot_is_no_reason_to_serve_the_former_image() {
    let bench = bench();
    bench.begin().unwrap();
    bench.pivot();
    std::fs::remove_file(bench.home().copy(bench.disk().disk)).unwrap();
    assert_eq!(bench.open().err().unwrap().code, ErrorCode::Damaged);
}

#[test]
fn what_was_in_the_clear_is_overwritten_before_it_is_removed() {
    let bench = bench();
    bench.begin().unwrap();
    assert_eq!(bench.remove_source().unwrap_err().code, ErrorCode::WrongState);
    bench.pivot();
    take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
    let path = bench.home().source(bench.disk().disk);
    // Under another name, too, it can be read what becomes of it.
    let kept = path.with_extension("kept");
    std::fs::hard_link(&path, &kept).unwrap();
    let held = open_locked(&path, Access::Write).unwrap().unwrap();
    assert_eq!(bench.remove_source().unwrap_err().code, ErrorCode::InUse);
    drop(held);
    let stopped = source::remove(&bench.spec, bench.disk(), |_, _| {}, || true);
    assert_eq!(stopped.unwrap_err().code, ErrorCode::Cancelled);
    assert!(path.exists());
    bench.remove_source().unwrap();
    assert!(!path.exists() && std::fs::read(&kept).unwrap().iter().all(|byte| *byte == 0));
}

/// The header is what opens the former image of a disk that was encrypted before.
#[test]
fn of_what_was_encrypted_the_header_is_overwritten() {
    let bench = bench();
    bench.begin().unwrap();
    let (home, disk) = (bench.home(), bench.disk().disk);
    let mut note = note::read(&home, disk).unwrap().unwrap();
    note.source_facts = DiskFacts::Luks2 {
        version: 1,
        cipher: String::new(),
        key_bits: 512,
        sector_size: 4096,
        data_offset: 32 << 10,
    };
    let image = File::options().write(true).open(home.image(disk)).unwrap();
    image.write_all_at(MARKER, 0).unwrap();
    note::write(&home, disk, &note).unwrap();
    bench.pivot();
    take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
    let (path, kept) = (home.source(disk), home.source(disk).with_extension("kept"));
    std::fs::hard_link(&path, &kept).unwrap();
    bench.remove_source().unwrap();
    let left = std::fs::read(&kept).unwrap();
    assert!(left[..32 << 10].iter().all(|byte| *byte == 0));
    assert_eq!(&left[64 << 10..][..MARKER.len()], MARKER, "ciphertext without a key stays");
}
