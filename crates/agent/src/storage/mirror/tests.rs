mod copy_opens;
mod memories;
mod parents;
mod replicas;
mod tpm;
mod trees;

use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::thread::sleep;

use vmseal_api::former_image::{FormerFate, FormerImage};
use vmseal_api::host::{Allocation, DatastoreLocation, DatastoreSpec, Device};
use vmseal_api::id::DatastoreId;
use vmseal_secret::KEK_LEN;

use super::source::{Removed, Speed};
use super::*;
use crate::storage::datastore;
use crate::storage::gate::Gate;

/// Stands for what the guest has written.
const MARKER: &[u8] = b"VMSEAL-MARKER-IN-THE-CLEAR";

struct Bench {
    _directory: tempfile::TempDir,
    spec: VmSpec,
    kek: SecretBytes,
    task: TaskId,
    /// The datastore of the copy, where that is another one.
    to: Option<DatastoreSpec>,
    /// How fast it is copied.
    pace: CopyPace,
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
    let (task, to, pace) = (TaskId::new(), None, CopyPace::default());
    let bench = Bench { _directory: directory, spec, kek, task, to, pace };
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

    fn wanted(&self) -> DiskToMirror {
        DiskToMirror { disk: self.disk().disk, encrypted: true, datastore: self.to.clone() }
    }

    fn give_up(&self, task: Option<TaskId>) -> Result<(), Problem> {
        give_up(&self.spec, self.disk(), &self.wanted(), task)
    }

    fn begin_of(&self, task: TaskId) -> Result<(), Problem> {
        let wanted = self.wanted();
        let (spec, disk, facts) = (&self.spec, self.disk(), &DiskFacts::Raw);
        let (kek, pace) = (Some(&self.kek), self.pace);
        let new =
            NewMirror { spec, disk, facts, kek, wanted: &wanted, task, pace, forgets_key: false };
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

    /// Pivots, and has the copy take the disk's place.
    fn switch(&self) {
        self.pivot();
        take_place(self.spec.vm, self.disk()).unwrap().unwrap();
    }

    fn files(&self) -> Vec<String> {
        files_of(&self.home())
    }

    fn remove_source(&self) -> Result<Option<FormerImage>, Problem> {
        self.remove_more(&mut Removed::default())
    }

    /// The same of a removal that has been begun.
    fn remove_more(&self, removed: &mut Removed) -> Result<Option<FormerImage>, Problem> {
        self.remove_at(removed, &Gate::new(CopyPace::default()))
    }

    /// The same at the pace of a gate, beside a guest.
    fn remove_at(
        &self,
        removed: &mut Removed,
        gate: &Gate,
    ) -> Result<Option<FormerImage>, Problem> {
        let guest_runs = AtomicBool::new(true);
        self.remove_with(removed, Speed { gate, guest_runs: &guest_runs, sleep: &sleep })
    }

    fn remove_with(
        &self,
        removed: &mut Removed,
        speed: Speed<'_>,
    ) -> Result<Option<FormerImage>, Problem> {
        let kek = Some(&self.kek);
        source::remove(&self.spec, self.disk(), kek, removed, |_, _| {}, speed)
    }

    /// Removes the former image: what has become of it.
    fn fate(&self) -> FormerFate {
        let former = self.remove_source().unwrap().unwrap();
        assert_eq!((former.disk, &former.name), (self.disk().disk, &self.disk().name));
        former.fate
    }
}

/// What a file holds, whatever has become of its name.
fn content(mut file: &File) -> Vec<u8> {
    let mut content = Vec::new();
    file.read_to_end(&mut content).unwrap();
    content
}

fn files_of(home: &Home) -> Vec<String> {
    let name = |entry: std::io::Result<std::fs::DirEntry>| {
        let name = PathBuf::from(entry.unwrap().file_name());
        name.extension().unwrap().to_string_lossy().into_owned()
    };
    let mut names: Vec<_> = std::fs::read_dir(home.path()).unwrap().map(name).collect();
    names.sort();
    names
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
    let CopyPlace::Image { offset, .. } = &copy.to else { panic!("{copy:?}") };
    assert!(copy.key.is_some() && *offset == vmseal_luks::DATA_OFFSET);
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
    bench.give_up(Some(TaskId::new())).unwrap();
    assert!(bench.open().unwrap().mirror.is_some(), "given up for another task");
    bench.give_up(Some(bench.task)).unwrap();
    bench.give_up(Some(bench.task)).unwrap();
    assert_eq!(bench.files(), ["json", "raw"]);
    drop(open(Access::Write).unwrap());
}

#[test]
fn debris_of_a_beginning_is_removed_and_nothing_is_begun_without_room() {
    let mut bench = bench();
    std::fs::write(bench.home().copy(bench.disk().disk), "x").unwrap();
    std::fs::write(bench.home().mirror_map(bench.disk().disk), "x").unwrap();
    bench.begin().unwrap();
    bench.give_up(None).unwrap();
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
        assert_eq!(bench.give_up(Some(bench.task)).unwrap_err().code, ErrorCode::AlreadyExists);
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
    bench.switch();
    let path = bench.home().source(bench.disk().disk);
    // It can be read what becomes of it.
    let kept = File::open(&path).unwrap();
    let held = open_locked(&path, Access::Write).unwrap().unwrap();
    assert_eq!(bench.remove_source().unwrap_err().code, ErrorCode::InUse);
    drop(held);
    let gate = Gate::new(CopyPace::default());
    gate.close();
    let stopped = bench.remove_at(&mut Removed::default(), &gate);
    assert_eq!(stopped.unwrap_err().code, ErrorCode::Cancelled);
    assert!(path.exists());
    assert_eq!(bench.fate(), FormerFate::Overwritten);
    assert_eq!(bench.remove_source().unwrap(), None, "it was removed before");
    assert!(!path.exists() && content(&kept).iter().all(|byte| *byte == 0));
}

/// An agent that dies between the end of the image and that of its notes takes along what it knew.
#[test]
fn of_an_image_that_is_gone_nobody_says_that_it_was_overwritten() {
    let bench = bench();
    bench.begin().unwrap();
    bench.switch();
    std::fs::remove_file(bench.home().source(bench.disk().disk)).unwrap();
    assert_eq!(bench.fate(), FormerFate::NotKnown);
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
    bench.switch();
    let kept = File::open(home.source(disk)).unwrap();
    assert_eq!(bench.fate(), FormerFate::HeaderOverwritten);
    let left = content(&kept);
    assert!(left[..32 << 10].iter().all(|byte| *byte == 0));
    assert_eq!(&left[64 << 10..][..MARKER.len()], MARKER, "ciphertext without a key stays");
}

/// The same with a second datastore, to which the disk moves.
fn moving() -> (Bench, Home, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
    let to = DatastoreSpec { datastore: DatastoreId::new(), location };
    datastore::probe(&to).unwrap();
    let mut bench = bench();
    let target = Home::of(&to, bench.spec.vm).unwrap();
    bench.to = Some(to);
    (bench, target, directory)
}

impl Bench {
    /// The disk as an inventory has it that knows of the move.
    fn moved_disk(&self) -> DiskSpec {
        let mirror = of_disk(self.spec.vm, self.disk()).unwrap().unwrap();
        mirror.pivoted_disk(self.disk())
    }
}

#[test]
fn a_move_is_begun_and_given_up_on_both_datastores() {
    let (bench, target, _directory) = moving();
    // What an earlier beginning has left beside the copy means nothing.
    std::fs::create_dir_all(target.path()).unwrap();
    std::fs::write(target.copy(bench.disk().disk), "x").unwrap();
    bench.begin().unwrap();
    bench.begin().unwrap();
    assert_eq!(bench.files(), ["json", "mirror", "mirror-map", "raw"]);
    assert_eq!(files_of(&target), ["copy", "json", "mirror"]);
    let opened = bench.open().unwrap();
    assert!(opened.mirror.is_some() && !opened.has_pivoted);
    drop(opened);
    bench.give_up(Some(bench.task)).unwrap();
    bench.give_up(Some(bench.task)).unwrap();
    assert_eq!(bench.files(), ["json", "raw"]);
    assert!(!target.path().exists(), "{:?}", files_of(&target));
    // A file in the place that the image is to have is not overwritten.
    std::fs::create_dir_all(target.path()).unwrap();
    std::fs::write(target.image(bench.disk().disk), "another's").unwrap();
    assert_eq!(bench.begin().unwrap_err().code, ErrorCode::AlreadyExists);
}

/// The host that the VM is on now does not have the other datastore: what is beside the image is removed, and nothing else is looked for.
#[test]
fn a_move_is_given_up_by_a_host_that_does_not_have_the_other_datastore() {
    let (mut bench, target, directory) = moving();
    bench.begin().unwrap();
    let away = directory.path().with_extension("away");
    std::fs::rename(directory.path(), &away).unwrap();
    bench.give_up(Some(bench.task)).unwrap_err();
    let to = bench.to.take();
    bench.give_up(Some(bench.task)).unwrap();
    bench.give_up(Some(bench.task)).unwrap();
    assert_eq!(bench.files(), ["json", "raw"]);
    std::fs::rename(&away, directory.path()).unwrap();
    assert_eq!(files_of(&target), ["copy", "json", "mirror"]);
    // Where it is there again, another copy takes the place of what was left.
    bench.to = to;
    bench.begin().unwrap();
    assert!(bench.open().unwrap().mirror.is_some());
}

/// From each state of the names, and known at either place, the disk is its copy, and nothing is left where it was.
#[test]
fn a_disk_that_has_moved_is_found_from_both_datastores() {
    for (renamed, knows) in [(0, false), (1, false), (2, false), (2, true)] {
        let (mut bench, target, _directory) = moving();
        bench.begin().unwrap();
        bench.pivot();
        let (home, disk) = (bench.home(), bench.disk().disk);
        if renamed > 0 {
            std::fs::rename(home.image(disk), home.source(disk)).unwrap();
        }
        if renamed > 1 {
            std::fs::rename(target.copy(disk), target.image(disk)).unwrap();
        }
        assert_eq!(bench.give_up(None).unwrap_err().code, ErrorCode::AlreadyExists);
        if knows {
            *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        }
        let opened = bench.open().unwrap();
        assert!(opened.has_pivoted && opened.mirror.is_none() && opened.open.key.is_some());
        drop(opened);
        let (taken, _) = take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
        assert_eq!(Some(taken.datastore), bench.to);
        assert_eq!(files_of(&target), ["json", "mirror", "raw"]);
        assert_eq!(files_of(&home), ["json", "mirror", "mirror-map", "source"]);
        bench.remove_source().unwrap();
        assert_eq!(files_of(&target), ["json", "raw"]);
        assert!(!home.path().exists());
    }
}

/// The removal can end between any two of its files, and is done again then.
#[test]
fn a_removal_after_a_move_goes_on_where_it_was() {
    for removed in 0..4 {
        let (mut bench, target, _directory) = moving();
        bench.begin().unwrap();
        bench.switch();
        let (home, disk) = (bench.home(), bench.disk().disk);
        *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        let files = [home.source(disk), home.mirror_map(disk), home.mirror_note(disk)];
        files[..removed].iter().for_each(|path| std::fs::remove_file(path).unwrap());
        assert!(of_disk(bench.spec.vm, bench.disk()).unwrap().unwrap().pivoted);
        bench.remove_source().unwrap();
        bench.remove_source().unwrap();
        assert_eq!(files_of(&target), ["json", "raw"]);
        assert!(!home.source(disk).exists() && !home.mirror_note(disk).exists());
    }
}

/// What is away keeps nobody from a disk that does not need it.
#[test]
fn a_datastore_that_is_away_is_not_needed_where_the_disk_is_not() {
    let (mut bench, target, directory) = moving();
    bench.begin().unwrap();
    let away = directory.path().with_extension("away");
    std::fs::rename(directory.path(), &away).unwrap();
    // Before the pivot: the copy is given up, and what is left of it means nothing.
    assert!(bench.open().unwrap().mirror.is_none());
    std::fs::rename(&away, directory.path()).unwrap();
    assert!(bench.open().unwrap().mirror.is_none());
    bench.begin().unwrap();
    bench.switch();
    let former = bench.home();
    *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
    let away = former.datastore().with_extension("away");
    std::fs::rename(former.datastore(), &away).unwrap();
    assert!(bench.open().unwrap().has_pivoted);
    assert!(bench.remove_source().is_err(), "the former image is still there");
    assert_eq!(files_of(&target), ["json", "mirror", "raw"]);
    std::fs::rename(&away, former.datastore()).unwrap();
    bench.remove_source().unwrap();
}

/// A disk that is deleted goes with its copy, and with its former image.
#[test]
fn a_disk_that_is_deleted_leaves_nothing_elsewhere() {
    for pivoted in [false, true] {
        let (bench, target, _directory) = moving();
        bench.begin().unwrap();
        if pivoted {
            bench.switch();
        }
        delete_elsewhere(bench.spec.vm, bench.disk()).unwrap();
        bench.home().delete(bench.disk().disk).unwrap();
        assert!(!target.path().exists() && !bench.home().path().exists(), "{pivoted}");
    }
}

#[test]
fn the_pace_of_a_copy_is_on_record_until_it_is_gone() {
    let mut bench = bench();
    let paused = CopyPace { bytes_per_second: Some(4 << 20), paused: true };
    let seen = |bench: &Bench| bench.open().unwrap().mirror.expect("its copy").pace;
    bench.pace = paused;
    bench.begin().unwrap();
    assert_eq!(bench.files(), ["copy", "json", "mirror", "mirror-map", "mirror-pace", "raw"]);
    assert_eq!(seen(&bench), paused);
    let rate = CopyPace { paused: false, ..paused };
    record_pace(bench.spec.vm, bench.disk(), rate).unwrap();
    assert_eq!(seen(&bench), rate);
    // The same task begins it again.
    bench.begin().unwrap();
    assert_eq!(seen(&bench), paused);
    // What cannot be read holds nothing back, and is no reason to keep the disk from its guest.
    for text in ["", "x", r#"{"bytes_per_second":5}"#, r#"{"paused":true,"more":1}"#] {
        std::fs::write(bench.home().mirror_pace(bench.disk().disk), text).unwrap();
        assert_eq!(seen(&bench), CopyPace::default(), "{text}");
    }
    bench.give_up(Some(bench.task)).unwrap();
    assert_eq!(bench.files(), ["json", "raw"]);
    bench.begin().unwrap();
    bench.pivot();
    bench.remove_source().unwrap();
    assert_eq!(bench.files(), ["json", "raw"]);
}
