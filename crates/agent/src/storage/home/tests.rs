use std::os::unix::fs::{MetadataExt, PermissionsExt};

use vmseal_api::host::{DatastoreLocation, Device};
use vmseal_api::id::DatastoreId;

use super::*;
use crate::process::run_dir;
use crate::storage::mark;

fn datastore() -> (tempfile::TempDir, DatastoreSpec) {
    let directory = tempfile::tempdir().unwrap();
    let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
    let spec = DatastoreSpec { datastore: DatastoreId::new(), location };
    (directory, spec)
}

fn directory_of(spec: &DatastoreSpec) -> &Path {
    spec.location.path()
}

/// A VM with two disks, and their home.
fn home(place: &DatastoreSpec) -> (Home, VmSpec) {
    let mut spec = run_dir::tests::spec();
    spec.devices = [4096, 1 << 30]
        .map(|size| {
            let disk = run_dir::tests::disk("d", place);
            Device::Disk(DiskSpec { size, encrypted: false, ..disk })
        })
        .into();
    (Home::of(place, spec.vm).unwrap(), spec)
}

fn begin(home: &Home, spec: &VmSpec, index: usize) -> Result<File, Problem> {
    home.begin(spec, spec.disk_at(index).unwrap(), spec.disk_at(index).unwrap().size)
}

#[test]
fn a_descriptor_that_two_write_at_once_is_that_of_one_of_them() {
    let (_directory, here) = datastore();
    mark::put(directory_of(&here), &here).unwrap();
    let (home, spec) = home(&here);
    home.describe(&spec, &here, None).unwrap();
    std::thread::scope(|scope| {
        for name in ["one", "two"] {
            let (spec, home, here) =
                (VmSpec { name: name.to_owned(), ..spec.clone() }, &home, &here);
            scope.spawn(move || {
                for round in 0..100 {
                    let written = match round % 2 {
                        0 => home.describe(&spec, here, None),
                        _ => home.describe_again(&spec, here, None),
                    };
                    written.unwrap();
                }
            });
        }
    });
    let written = std::fs::read(home.path.join(DESCRIPTOR)).unwrap();
    let written: serde_json::Value = serde_json::from_slice(&written).unwrap();
    assert!(["one", "two"].contains(&written["name"].as_str().unwrap()), "{written}");
}

#[test]
fn a_disk_appears_whole_and_one_at_a_time_has_it() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    let disk = vm.disk_at(1).unwrap().disk;
    let file = begin(&home, &vm, 1).unwrap();
    assert!(home.open(disk).unwrap().is_none(), "the disk was there before it was complete");
    assert_eq!(begin(&home, &vm, 1).unwrap_err().code, ErrorCode::InUse);
    home.finish(disk, &file).unwrap();
    assert_eq!(home.open(disk).unwrap_err().code, ErrorCode::InUse);
    assert_eq!(home.delete(disk).unwrap_err().code, ErrorCode::InUse);
    drop(file);
    let file = home.open(disk).unwrap().unwrap();
    let metadata = file.metadata().unwrap();
    assert_eq!((metadata.len(), metadata.permissions().mode() & 0o777), (1 << 30, 0o600));
    assert_eq!(metadata.blocks(), 0, "it is not sparse");
    drop(file);
    home.delete(disk).unwrap();
    home.delete(disk).unwrap();
    assert!(!home.path.exists());
}

#[test]
fn readers_share_an_image_and_keep_writers_out() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    let disk = vm.disk_at(0).unwrap().disk;
    home.finish(disk, &begin(&home, &vm, 0).unwrap()).unwrap();
    let readers = [home.open_to_read(disk).unwrap(), home.open_to_read(disk).unwrap()];
    assert!(readers.iter().all(Option::is_some));
    assert_eq!(home.open(disk).unwrap_err().code, ErrorCode::InUse);
    let reader = readers[0].as_ref().unwrap();
    assert!(reader.set_len(0).is_err(), "it is open for writing");
    drop(readers);
    let writer = home.open(disk).unwrap();
    assert_eq!(home.open_to_read(disk).unwrap_err().code, ErrorCode::InUse);
    drop(writer);
}

#[test]
fn a_lock_is_kept_by_a_process_that_inherited_the_file() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    let disk = vm.disk_at(0).unwrap().disk;
    let file = begin(&home, &vm, 0).unwrap();
    let mut child = std::process::Command::new("sleep")
        .arg("60")
        .stdin(file.try_clone().unwrap())
        .spawn()
        .unwrap();
    drop(file);
    assert_eq!(home.discard(disk).unwrap_err().code, ErrorCode::InUse);
    child.kill().unwrap();
    child.wait().unwrap();
    home.discard(disk).unwrap();
}

#[test]
fn what_is_no_regular_file_is_refused() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, _) = home(&spec);
    std::fs::create_dir(&home.path).unwrap();
    let (link, pipe) = (DiskId::new(), DiskId::new());
    std::os::unix::fs::symlink("/etc/passwd", home.image(link)).unwrap();
    nix::unistd::mkfifo(&home.image(pipe), nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert_eq!(home.open(link).unwrap_err().code, ErrorCode::Damaged);
    assert_eq!(home.open(pipe).unwrap_err().code, ErrorCode::Damaged);
}

#[test]
fn debris_is_swept_and_work_under_way_is_not() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    let (dead, alive) = (vm.disk_at(0).unwrap().disk, vm.disk_at(1).unwrap().disk);
    drop(begin(&home, &vm, 0).unwrap());
    let file = begin(&home, &vm, 1).unwrap();
    // The memory of a guest that is being suspended has no lock.
    let memory = home.path.join("vm.memory.creating");
    std::fs::write(&memory, "half of it").unwrap();
    sweep_until(home.datastore(), &|| !home.creating(dead).exists());
    assert!(!home.creating(dead).exists());
    assert!(home.creating(alive).exists());
    assert!(memory.exists(), "a memory that is being saved is removed");
    std::fs::remove_file(memory).unwrap();
    assert_eq!(home.check_room(u64::MAX).unwrap_err().code, ErrorCode::NoSpace);
    home.check_room(1).unwrap();
    // A VM that was to come from another host has nothing else here.
    drop(file);
    sweep_until(home.datastore(), &|| !home.path.exists());
    assert!(!home.path.exists(), "a home without a disk is left");
    home.describe(&vm, &spec, None).unwrap();
    sweep(home.datastore(), &|_| true);
    assert!(!home.path.exists(), "a home without a disk is left");
}

/// As in docs/formats/import-note.md.
const NOTE: &str = r#"{"version":2,"image":{"format":"qcow2","path":"/srv/old/web.qcow2","inode":131,"length":1048576,"modified":1700000000,"modified_nanoseconds":5},"durable":4194304}"#;

/// Sweeps while a disk is made again and again: a disk is never removed while it is being made.
#[test]
fn a_sweep_removes_nothing_that_is_being_made() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    make_while_swept(&home, &vm, home.datastore());
}

/// Another host sweeps: the locks within this process do not keep it away, as they do not by another path.
#[test]
fn a_sweep_of_another_host_removes_nothing_that_is_being_made() {
    let (directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    let link = tempfile::tempdir().unwrap();
    let other = link.path().join("other");
    std::os::unix::fs::symlink(directory.path(), &other).unwrap();
    make_while_swept(&home, &vm, &other);
}

fn make_while_swept(home: &Home, vm: &VmSpec, swept: &Path) {
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(std::sync::atomic::Ordering::Relaxed) {
                sweep(swept, &|_| true);
            }
        });
        for _ in 0..300 {
            // Left by an attempt that died; the sweep may be about to remove it.
            drop(begin(home, vm, 0));
            // The sweep may hold its lock for a moment.
            let Ok(file) = begin(home, vm, 0) else { continue };
            std::thread::yield_now();
            let there = home.creating(vm.disk_at(0).unwrap().disk).metadata().map(|it| it.ino());
            assert_eq!(there.ok(), Some(file.metadata().unwrap().ino()));
        }
        done.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

#[test]
fn an_interrupted_import_is_kept_for_a_while_and_goes_with_its_disk() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    let disk = vm.disk_at(0).unwrap().disk;
    let note: Note = serde_json::from_str(NOTE).unwrap();
    assert_eq!(serde_json::to_string(&note).unwrap(), NOTE);
    drop(begin(&home, &vm, 0).unwrap());
    assert!(home.noted(disk).unwrap().is_none());
    home.note(disk, &note).unwrap();
    sweep(home.datastore(), &|_| true);
    let (file, found) = home.noted(disk).unwrap().unwrap();
    assert_eq!((&found.image, found.durable), (&note.image, 4 << 20));
    drop(file);
    let path = home.importing(disk);
    for damaged in ["", "{}", &NOTE.replace("\"version\":2", "\"version\":1"), &NOTE[1..]] {
        std::fs::write(&path, damaged).unwrap();
        assert_eq!(home.noted(disk).unwrap_err().code, ErrorCode::Damaged, "{damaged:?}");
    }
    // Too old for its import to continue.
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::now() - INTERRUPTED_KEPT).unwrap();
    sweep_until(home.datastore(), &|| !home.creating(disk).exists());
    assert!(!home.creating(disk).exists() && !path.exists(), "a half-made disk is kept for ever");
    home.describe(&vm, &spec, None).unwrap();
    home.note(disk, &note).unwrap();
    drop(begin(&home, &vm, 0).unwrap());
    assert!(!path.exists(), "a new import with an old note");
    home.note(disk, &note).unwrap();
    home.discard(disk).unwrap();
    assert!(!home.path.exists(), "something is left");
}

#[test]
fn disks_of_one_vm_come_and_go_beside_each_other() {
    let (_directory, spec) = datastore();
    mark::put(directory_of(&spec), &spec).unwrap();
    let (home, vm) = home(&spec);
    std::thread::scope(|scope| {
        for index in [0, 1] {
            let (home, vm) = (&home, &vm);
            scope.spawn(move || {
                for _ in 0..100 {
                    drop(begin(home, vm, index).unwrap());
                    home.discard(vm.disk_at(index).unwrap().disk).unwrap();
                }
            });
        }
    });
    assert!(!home.path.exists());
}
