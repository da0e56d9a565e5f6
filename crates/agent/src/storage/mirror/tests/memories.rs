//! The memory and the core dumps beside a mirrored disk, from each state that a process may leave.

use std::io::{Read, Write};

use vmseal_api::id::{DumpId, SnapshotId};
use vmseal_seal::file::{HEADER_LEN, Identity as SealedIdentity, Kind, Wanted};

use super::*;
use crate::storage::home::Beside;
use crate::storage::memory::MemoryFiles;
use crate::storage::mirror::beside::kind_of;
use crate::storage::sealed::vm_key;

/// More than a frame, so that there are several.
const LENGTH: usize = 700 << 10;

/// The number of each file, which its copy has as well.
const GENERATION: u64 = 7;

fn content() -> Vec<u8> {
    MARKER.iter().cycle().take(LENGTH).copied().collect()
}

/// The VM as it is without a key.
fn without_key(spec: &VmSpec) -> VmSpec {
    VmSpec { key: None, ..spec.clone() }
}

impl Bench {
    /// Has a snapshot keep a memory, sealed or not.
    fn keep(&self, sealed: bool) -> SnapshotId {
        let snapshot = SnapshotId::new();
        self.write(&Beside::SnapshotMemory(snapshot), sealed);
        snapshot
    }

    /// Writes a file beside the disk, sealed or not.
    fn write(&self, what: &Beside, sealed: bool) {
        let file = File::create(self.home().beside(what)).unwrap();
        let key = vm_key(&self.spec, Some(&self.kek)).unwrap().filter(|_| sealed);
        let (vm, kind, generation) = (self.spec.vm.0, kind_of(what), GENERATION);
        let identity = SealedIdentity { vm, kind, generation };
        let mut to = vmseal_seal::file::create(file, identity, key.as_ref()).unwrap();
        to.write_all(&content()).unwrap();
        to.finish().unwrap();
    }

    fn begin_with(&self, forgets_key: bool) {
        let (spec, disk, facts) = (&self.spec, self.disk(), &DiskFacts::Raw);
        let (wanted, kek) = (self.wanted(), Some(&self.kek));
        let (task, pace) = (self.task, self.pace);
        let new = NewMirror { spec, disk, facts, kek, wanted: &wanted, task, pace, forgets_key };
        new.begin(|_| Ok(())).unwrap();
    }

    fn mirror(&self) -> Mirror {
        of_disk(self.spec.vm, self.disk()).unwrap().unwrap()
    }

    fn copy_next(&self) -> Result<bool, Problem> {
        let Some(memory) = tree::next_beside(&self.spec, self.disk())? else { return Ok(false) };
        let gate = crate::storage::gate::Gate::new(CopyPace::default());
        memory.copy((&self.spec, self.disk()), Some(&self.kek), &gate, |_, _| {}).map(|()| true)
    }

    fn copy_all(&self) {
        while self.copy_next().unwrap() {}
    }

    /// Copies what is beside the disk, and pivots.
    fn pivot_with(&self, forgets_key: bool) {
        self.begin_with(forgets_key);
        self.copy_all();
        self.pivot();
    }

    /// The same; the copies take their places.
    fn switch_with(&self, forgets_key: bool) {
        self.begin_with(forgets_key);
        self.copy_all();
        self.switch();
    }
}

/// What a memory holds, opened with the key of a VM, or as one of a VM without.
fn read(path: &Path, spec: &VmSpec, kek: &SecretBytes) -> Result<Vec<u8>, String> {
    read_as(Kind::Memory, path, spec, kek)
}

fn read_as(kind: Kind, path: &Path, spec: &VmSpec, kek: &SecretBytes) -> Result<Vec<u8>, String> {
    let key = vm_key(spec, Some(kek)).unwrap();
    let file = File::open(path).map_err(|error| error.to_string())?;
    let wanted = Wanted { vm: spec.vm.0, kind, generation: Some(GENERATION) };
    let opened = vmseal_seal::file::open_wanted(file, wanted, key.as_ref());
    let mut content = Vec::new();
    opened
        .map_err(|error| error.to_string())?
        .read_to_end(&mut content)
        .map_err(|error| error.to_string())?;
    Ok(content)
}

/// The names in a home, without those of the disk and of the snapshot.
fn names(home: &Home, disk: DiskId) -> Vec<String> {
    let entries = std::fs::read_dir(home.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let disk = disk.to_string();
    let kind = |name: std::ffi::OsString| {
        let name = name.into_string().unwrap().replace(&disk, "D");
        match name.split_once("memory-") {
            Some((kind, _)) => format!("{kind}memory"),
            None if name.starts_with("vm.memory.snapshot-") => "memory".to_owned(),
            None => name,
        }
    };
    let mut names: Vec<_> = entries.map(kind).collect();
    names.sort();
    names
}

#[test]
fn a_memory_in_the_clear_is_sealed_before_the_copy_counts_and_stays_when_that_is_given_up() {
    let bench = bench();
    let (home, disk) = (bench.home(), bench.disk().disk);
    let kept = [bench.keep(false), bench.keep(false)];
    let before = kept.map(|snapshot| std::fs::read(home.snapshot_memory(snapshot)).unwrap());
    bench.begin_with(false);
    for _ in kept {
        assert!(tree::is_incomplete(&bench.mirror()).unwrap());
        assert!(bench.open().unwrap().mirror.is_none(), "a filter keeps a copy that is not whole");
        let opened = open_to_copy(&bench.spec, bench.disk(), &DiskFacts::Raw, Some(&bench.kek));
        assert_eq!(opened.err().unwrap().code, ErrorCode::TimedOut);
        assert!(bench.copy_next().unwrap());
    }
    assert!(!bench.copy_next().unwrap() && !tree::is_incomplete(&bench.mirror()).unwrap());
    assert!(bench.open().unwrap().mirror.is_some());
    for (snapshot, before) in kept.into_iter().zip(before) {
        let copy = home.copy_memory(disk, snapshot);
        assert_eq!(read(&copy, &bench.spec, &bench.kek).unwrap(), content());
        assert!(read(&copy, &without_key(&bench.spec), &bench.kek).is_err(), "it is in the clear");
        assert_eq!(std::fs::read(home.snapshot_memory(snapshot)).unwrap(), before);
    }
    bench.give_up(Some(bench.task)).unwrap();
    assert_eq!(names(&home, disk), ["D.raw", "memory", "memory", "vm.json"]);
}

#[test]
fn the_memory_is_that_of_the_copy_from_every_state_of_the_names() {
    for renamed in 0..5 {
        let bench = bench();
        let (home, disk) = (bench.home(), bench.disk().disk);
        let snapshot = bench.keep(false);
        bench.pivot_with(false);
        let renames = [
            (home.image(disk), home.source(disk)),
            (
                home.snapshot_memory(snapshot),
                home.source_beside(disk, &Beside::SnapshotMemory(snapshot)),
            ),
            (home.copy_memory(disk, snapshot), home.snapshot_memory(snapshot)),
            (home.copy(disk), home.image(disk)),
        ];
        for (from, to) in &renames[..renamed] {
            std::fs::rename(from, to).unwrap();
        }
        // Whatever opens the disk puts them right; again it changes nothing.
        drop(bench.open().unwrap());
        take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
        let memory = home.snapshot_memory(snapshot);
        assert_eq!(read(&memory, &bench.spec, &bench.kek).unwrap(), content(), "{renamed}");
        let former = home.source_beside(disk, &Beside::SnapshotMemory(snapshot));
        assert_eq!(read(&former, &without_key(&bench.spec), &bench.kek).unwrap(), content());
        let kept = former.with_extension("kept");
        std::fs::hard_link(&former, &kept).unwrap();
        bench.remove_source().unwrap();
        let left = std::fs::read(&kept).unwrap();
        assert!(left.len() > LENGTH && left.iter().all(|byte| *byte == 0), "{renamed}");
        std::fs::remove_file(kept).unwrap();
        assert_eq!(names(&home, disk), ["D.raw", "memory", "vm.json"]);
    }
}

#[test]
fn what_was_sealed_gets_a_key_of_its_own_and_the_former_key_is_lost() {
    let bench = bench();
    let (home, disk) = (bench.home(), bench.disk().disk);
    let snapshot = bench.keep(true);
    let path = home.snapshot_memory(snapshot);
    let before = std::fs::read(&path).unwrap();
    bench.switch_with(false);
    let kept = home.path().join("kept");
    std::fs::hard_link(home.source_beside(disk, &Beside::SnapshotMemory(snapshot)), &kept).unwrap();
    bench.remove_source().unwrap();
    let left = std::fs::read(&kept).unwrap();
    assert!(left[..HEADER_LEN].iter().all(|byte| *byte == 0));
    assert!(left[HEADER_LEN..] == before[HEADER_LEN..], "more than the header was overwritten");
    let after = std::fs::read(&path).unwrap();
    let frames = before[HEADER_LEN..].chunks(64).zip(after[HEADER_LEN..].chunks(64));
    assert_eq!(frames.filter(|(one, other)| one == other).count(), 0, "it has the former key");
    assert_eq!(read(&path, &bench.spec, &bench.kek).unwrap(), content());
}

/// What is beside the copy opens, too, before what was there is lost.
#[test]
fn a_memory_whose_new_header_does_not_open_keeps_the_former_one() {
    let bench = bench();
    let (home, disk) = (bench.home(), bench.disk().disk);
    let snapshot = bench.keep(false);
    bench.switch_with(false);
    let path = home.snapshot_memory(snapshot);
    let whole = std::fs::read(&path).unwrap();
    let mut damaged = whole.clone();
    damaged[..HEADER_LEN].fill(0);
    let former = home.source_beside(disk, &Beside::SnapshotMemory(snapshot));
    // One in the clear does not open with the VM's key, which it is to be sealed with.
    let in_the_clear = std::fs::read(&former).unwrap();
    for (bad, code) in [(damaged, ErrorCode::Damaged), (in_the_clear, ErrorCode::KeyMismatch)] {
        std::fs::write(&path, bad).unwrap();
        let refused = bench.remove_source().unwrap_err();
        assert_eq!(refused.code, code, "{refused}");
        assert!(refused.detail.contains(&path.display().to_string()), "{refused}");
        assert!(home.source(disk).exists());
        assert_eq!(read(&former, &without_key(&bench.spec), &bench.kek).unwrap(), content());
    }
    std::fs::write(&path, whole).unwrap();
    bench.remove_source().unwrap();
    assert_eq!(names(&home, disk), ["D.raw", "memory", "vm.json"]);
}

/// A VM that is suspended with what a snapshot keeps: one file has both names.
#[test]
fn a_memory_of_two_names_is_two_files_then_and_its_former_key_alone_is_overwritten() {
    let bench = bench();
    let (home, disk) = (bench.home(), bench.disk().disk);
    let memories = [home.snapshot_memory(bench.keep(true)), home.memory()];
    std::fs::hard_link(&memories[0], &memories[1]).unwrap();
    let before = std::fs::read(&memories[0]).unwrap();
    bench.switch_with(false);
    let kept = home.path().join("kept");
    std::fs::hard_link(home.source_beside(disk, &Beside::Memory), &kept).unwrap();
    bench.remove_source().unwrap();
    let left = std::fs::read(&kept).unwrap();
    assert!(left[..HEADER_LEN].iter().all(|byte| *byte == 0));
    assert!(left[HEADER_LEN..] == before[HEADER_LEN..], "more than the header was overwritten");
    for path in &memories {
        assert_eq!(read(path, &bench.spec, &bench.kek).unwrap(), content());
    }
    let [one, other] = memories.map(|path| std::fs::read(path).unwrap());
    assert!(one != other, "both have one key");
}

#[test]
fn a_vm_that_loses_its_key_has_its_memory_in_the_clear() {
    let bench = bench();
    let snapshot = bench.keep(true);
    bench.switch_with(true);
    bench.remove_source().unwrap();
    let path = bench.home().snapshot_memory(snapshot);
    assert_eq!(read(&path, &without_key(&bench.spec), &bench.kek).unwrap(), content());
    // As a VM has it that never had a key.
    assert!(read(&path, &bench.spec, &bench.kek).is_err());
}

#[test]
fn a_memory_in_the_clear_beside_an_encrypted_disk_is_not_taken_for_the_vms_own() {
    let bench = bench();
    let snapshot = bench.keep(false);
    bench.begin_with(false);
    let (home, disk) = (bench.home(), bench.disk().disk);
    let mut note = note::read(&home, disk).unwrap().unwrap();
    note.source_facts = note.copy_facts.clone();
    note::write(&home, disk, &note).unwrap();
    let refused = bench.copy_next().unwrap_err();
    assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
    assert!(refused.detail.contains("snapshot delete"), "{refused}");
    assert!(!home.copy_memory(disk, snapshot).exists());
}

/// The first disk of a VM of which others are encrypted: what is beside it was sealed with the key that these have.
#[test]
fn a_memory_in_the_clear_beside_a_plain_disk_of_an_encrypted_vm_is_not_taken_for_its_own() {
    let mut bench = bench();
    bench.keep(false);
    let other = DiskSpec { encrypted: true, ..crate::rules::tests::disk("other") };
    bench.spec.devices.push(Device::Disk(other));
    bench.begin_with(false);
    let refused = bench.copy_next().unwrap_err();
    assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
}

#[test]
fn a_memory_that_is_damaged_or_of_another_key_is_named_and_nothing_is_lost() {
    let bench = bench();
    let snapshot = bench.keep(true);
    let path = bench.home().snapshot_memory(snapshot);
    let whole = std::fs::read(&path).unwrap();
    bench.begin_with(false);
    let mut damaged = whole.clone();
    damaged[LENGTH / 2] ^= 1;
    for (bytes, code) in [
        (&damaged[..], ErrorCode::Damaged),
        (&whole[..whole.len() - 32], ErrorCode::Damaged),
        (&[0; 5000], ErrorCode::Damaged),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let refused = bench.copy_next().unwrap_err();
        assert_eq!(refused.code, code, "{refused}");
        assert!(refused.detail.contains(path.to_str().unwrap()), "{refused}");
    }
    std::fs::write(&path, &whole).unwrap();
    let other = SecretBytes::random(KEK_LEN).unwrap();
    let memory = tree::next_beside(&bench.spec, bench.disk()).unwrap().unwrap();
    let gate = crate::storage::gate::Gate::new(CopyPace::default());
    let refused = memory.copy((&bench.spec, bench.disk()), Some(&other), &gate, |_, _| {});
    assert_eq!(refused.unwrap_err().code, ErrorCode::Locked);
    // What is left of the attempts is replaced.
    bench.copy_all();
    assert!(std::fs::read(&path).unwrap() == whole);
    bench.give_up(None).unwrap();
    assert_eq!(names(&bench.home(), bench.disk().disk), ["D.raw", "memory", "vm.json"]);
}

#[test]
fn a_copy_that_is_stopped_in_the_middle_is_made_again_or_given_up() {
    for again in [false, true] {
        let bench = bench();
        let (home, disk) = (bench.home(), bench.disk().disk);
        let snapshot = bench.keep(false);
        bench.begin_with(false);
        let memory = tree::next_beside(&bench.spec, bench.disk()).unwrap().unwrap();
        let gate = crate::storage::gate::Gate::new(CopyPace::default());
        gate.close();
        let stopped = memory.copy((&bench.spec, bench.disk()), Some(&bench.kek), &gate, |_, _| {});
        assert_eq!(stopped.unwrap_err().code, ErrorCode::Cancelled);
        assert!(!home.copy_memory(disk, snapshot).exists());
        assert!(tree::is_incomplete(&bench.mirror()).unwrap());
        if again {
            bench.copy_all();
            let copy = home.copy_memory(disk, snapshot);
            assert_eq!(read(&copy, &bench.spec, &bench.kek).unwrap(), content());
        }
        bench.give_up(None).unwrap();
        assert_eq!(names(&home, disk), ["D.raw", "memory", "vm.json"]);
    }
}

#[test]
fn a_memory_moves_with_its_disk_from_every_state_of_the_names() {
    for renamed in 0..5 {
        let (mut bench, target, _directory) = moving();
        let (home, disk) = (bench.home(), bench.disk().disk);
        let snapshot = bench.keep(true);
        bench.begin_with(false);
        bench.copy_all();
        assert_eq!(names(&target, disk), ["D.copy", "D.copy-memory", "D.mirror", "vm.json"]);
        bench.pivot();
        let renames = [
            (home.image(disk), home.source(disk)),
            (
                home.snapshot_memory(snapshot),
                home.source_beside(disk, &Beside::SnapshotMemory(snapshot)),
            ),
            (target.copy_memory(disk, snapshot), target.snapshot_memory(snapshot)),
            (target.copy(disk), target.image(disk)),
        ];
        for (from, to) in &renames[..renamed] {
            std::fs::rename(from, to).unwrap();
        }
        take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
        *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        let memory = target.snapshot_memory(snapshot);
        assert_eq!(read(&memory, &bench.spec, &bench.kek).unwrap(), content(), "{renamed}");
        bench.remove_source().unwrap();
        assert!(!home.path().exists(), "{renamed}: {:?}", names(&home, disk));
        assert_eq!(names(&target, disk), ["D.raw", "memory", "vm.json"]);
    }
}

#[test]
fn a_disk_that_is_deleted_goes_with_the_memory_beside_it_and_its_copy() {
    for pivoted in [false, true] {
        let (mut bench, target, _directory) = moving();
        bench.keep(true);
        bench.begin_with(false);
        bench.copy_all();
        let home = bench.home();
        if pivoted {
            bench.switch();
            *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        }
        MemoryFiles::discard_with(&bench.spec, bench.disk().disk).unwrap();
        delete_elsewhere(bench.spec.vm, bench.disk()).unwrap();
        bench.home().delete(bench.disk().disk).unwrap();
        assert!(!target.path().exists() && !home.path().exists(), "{pivoted}");
    }
}

#[test]
fn a_disk_that_the_memory_is_not_beside_leaves_it() {
    let mut bench = bench();
    let (home, first) = (bench.home(), bench.disk().disk);
    let snapshot = bench.keep(true);
    bench.begin_with(false);
    bench.copy_all();
    // Another disk of the VM, on the same datastore.
    let second = DiskSpec { disk: DiskId::new(), name: "more".to_owned(), ..bench.disk().clone() };
    std::fs::copy(home.image(first), home.image(second.disk)).unwrap();
    bench.spec.devices.push(Device::Disk(second.clone()));
    let wanted = DiskToMirror { disk: second.disk, encrypted: true, datastore: None };
    let (spec, facts, kek) = (&bench.spec, &DiskFacts::Raw, Some(&bench.kek));
    let (task, pace, disk) = (bench.task, bench.pace, &second);
    let new = NewMirror { spec, disk, facts, kek, wanted: &wanted, task, pace, forgets_key: false };
    new.begin(|_| Ok(())).unwrap();
    assert_eq!(note::read(&home, second.disk).unwrap().unwrap().memory, None);
    give_up(spec, disk, &wanted, Some(task)).unwrap();
    assert!(home.copy_memory(first, snapshot).exists(), "it went with another disk's copy");
}

/// The memory of a suspended VM, and core dumps of both kinds.
fn of_a_vm() -> [Beside; 3] {
    let (asked, own) = (DumpId::new().to_string(), format!("{}.panic-kdump", DumpId::new()));
    [Beside::Memory, Beside::Core(asked), Beside::Core(own)]
}

#[test]
fn the_memory_of_a_suspended_vm_and_core_dumps_are_those_of_the_copy_from_every_state() {
    for renamed in 0..10 {
        let bench = bench();
        let (home, disk) = (bench.home(), bench.disk().disk);
        let mut all = of_a_vm();
        all.sort();
        all.iter().for_each(|what| bench.write(what, false));
        assert!(is_suspended(&bench.spec).unwrap());
        bench.begin_with(false);
        assert_eq!(
            tree::next_beside(&bench.spec, bench.disk()).unwrap().unwrap().place().unwrap(),
            (0, 3)
        );
        bench.copy_all();
        assert!(is_suspended(&bench.spec).unwrap());
        bench.pivot();
        let each = all.iter().flat_map(|what| {
            let kept = home.beside(what);
            [(kept.clone(), home.source_beside(disk, what)), (home.copy_beside(disk, what), kept)]
        });
        let renames: Vec<_> = [(home.image(disk), home.source(disk))]
            .into_iter()
            .chain(each)
            .chain([(home.copy(disk), home.image(disk))])
            .collect();
        for (from, to) in &renames[..renamed.min(renames.len())] {
            std::fs::rename(from, to).unwrap();
            // Who only looks sees it suspended all the time.
            assert!(is_suspended(&bench.spec).unwrap(), "{renamed}");
        }
        let first = with_first_disk_as_it_is(&bench.spec).unwrap();
        assert!(first.disk_at(0).unwrap().encrypted);
        for what in &all {
            let read = |path: &Path, spec: &VmSpec| read_as(kind_of(what), path, spec, &bench.kek);
            assert_eq!(read(&home.beside(what), &bench.spec).unwrap(), content(), "{what:?}");
            let former = home.source_beside(disk, what);
            assert_eq!(read(&former, &without_key(&bench.spec)).unwrap(), content(), "{what:?}");
        }
        let former = home.source_beside(disk, &Beside::Memory);
        let kept = former.with_extension("kept");
        std::fs::hard_link(&former, &kept).unwrap();
        bench.remove_source().unwrap();
        assert!(std::fs::read(&kept).unwrap().iter().all(|byte| *byte == 0), "{renamed}");
        std::fs::remove_file(kept).unwrap();
        assert_eq!(home.all_beside().unwrap().into_keys().collect::<Vec<_>>(), all);
        assert_eq!(names(&home, disk).len(), 2 + all.len());
        assert!(is_suspended(&bench.spec).unwrap());
    }
}

#[test]
fn they_move_with_the_first_disk_from_every_state_of_the_names() {
    for renamed in 0..9 {
        let (mut bench, target, _directory) = moving();
        let (home, disk) = (bench.home(), bench.disk().disk);
        let all = of_a_vm();
        all.iter().for_each(|what| bench.write(what, true));
        bench.pivot_with(false);
        let aside = all.iter().map(|what| (home.beside(what), home.source_beside(disk, what)));
        let placed = all.iter().map(|what| (target.copy_beside(disk, what), target.beside(what)));
        let renames: Vec<_> = [(home.image(disk), home.source(disk))]
            .into_iter()
            .chain(aside)
            .chain(placed)
            .chain([(target.copy(disk), target.image(disk))])
            .collect();
        for (from, to) in &renames[..renamed.min(renames.len())] {
            std::fs::rename(from, to).unwrap();
            // The inventory names the former datastore still.
            assert!(is_suspended(&bench.spec).unwrap(), "{renamed}");
        }
        let moved = with_first_disk_as_it_is(&bench.spec).unwrap();
        assert_eq!(moved.disk_at(0).unwrap().datastore, bench.moved_disk().datastore);
        assert!(MemoryFiles::of(&moved).unwrap().is_saved().unwrap());
        *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        for what in &all {
            let path = target.beside(what);
            let read = read_as(kind_of(what), &path, &bench.spec, &bench.kek);
            assert_eq!(read.unwrap(), content(), "{renamed} {what:?}");
        }
        bench.remove_source().unwrap();
        assert!(!home.path().exists(), "{renamed}: {:?}", names(&home, disk));
        assert!(is_suspended(&bench.spec).unwrap());
    }
}

/// A guest has gone on from the memory, or a core dump was removed, before the disk pivots.
#[test]
fn what_is_gone_before_the_disk_pivots_does_not_come_back() {
    for (moves, copied) in [(false, false), (false, true), (true, false), (true, true)] {
        let (mut bench, target, _directory) = if moves {
            let (bench, target, directory) = moving();
            (bench, target, Some(directory))
        } else {
            let bench = bench();
            let home = bench.home();
            (bench, home, None)
        };
        let (home, disk) = (bench.home(), bench.disk().disk);
        let [memory, core, _] = of_a_vm();
        bench.write(&memory, true);
        bench.write(&core, true);
        bench.begin_with(false);
        if copied {
            bench.copy_all();
        }
        MemoryFiles::of(&bench.spec).unwrap().use_up().unwrap();
        MemoryFiles::of(&bench.spec).unwrap().sweep().unwrap();
        std::fs::remove_file(home.beside(&core)).unwrap();
        assert!(!tree::is_incomplete(&bench.mirror()).unwrap());
        assert!(bench.open().unwrap().mirror.is_some(), "its filter does not keep the copy");
        bench.pivot();
        assert!(!is_suspended(&bench.spec).unwrap());
        take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
        assert!(!is_suspended(&bench.spec).unwrap());
        if moves {
            *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        }
        bench.remove_source().unwrap();
        assert_eq!(names(&target, disk), ["D.raw", "vm.json"], "moves {moves}, copied {copied}");
    }
}

#[test]
fn a_memory_in_the_same_inode_is_another_one_where_its_time_is_noted() {
    let bench = bench();
    let (home, disk) = (bench.home(), bench.disk().disk);
    let [memory, ..] = of_a_vm();
    bench.write(&memory, true);
    bench.begin_with(false);
    let path = home.beside(&memory);
    // As on a file system that does not say when files were created.
    let mut noted = note::read(&home, disk).unwrap().unwrap();
    noted.suspended_written = Some(note::Written::in_metadata(&path.metadata().unwrap()));
    note::write(&home, disk, &noted).unwrap();
    assert!(!bench.mirror().leaves_memory().unwrap());
    File::options().append(true).open(&path).unwrap().write_all(b"later").unwrap();
    assert!(bench.mirror().leaves_memory().unwrap());
}

#[test]
fn what_came_after_the_copy_was_begun_is_told_of_and_stays() {
    let bench = bench();
    let [memory, core, late] = of_a_vm();
    bench.write(&core, false);
    bench.begin_with(false);
    assert!(!bench.mirror().leaves_memory().unwrap());
    assert_eq!(bench.mirror().leaves_core(true).unwrap(), None);
    bench.copy_all();
    // One that is as the VM's are to be may stay.
    bench.write(&late, true);
    assert_eq!(bench.mirror().leaves_core(true).unwrap(), None);
    bench.write(&late, false);
    assert_eq!(bench.mirror().leaves_core(true).unwrap(), Some(bench.home().beside(&late)));
    bench.write(&memory, true);
    assert!(bench.mirror().leaves_memory().unwrap());
    assert!(!tree::is_incomplete(&bench.mirror()).unwrap());
    bench.give_up(None).unwrap();
    let left: Vec<_> = bench.home().all_beside().unwrap().into_keys().collect();
    assert_eq!(left.len(), 3, "{left:?}");

    let (bench, _, _directory) = moving();
    bench.begin_with(false);
    bench.write(&late, true);
    assert_eq!(bench.mirror().leaves_core(true).unwrap(), Some(bench.home().beside(&late)));
}
