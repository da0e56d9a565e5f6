//! What a linked clone shares, and what is left of one that is not finished.

use std::path::PathBuf;

use uuid::Uuid;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device};
use vmseal_api::id::{DatastoreId, VmId};
use vmseal_luks::Holes;
use vmseal_secret::{DEK_LEN, KEK_LEN};

use super::*;
use crate::process::run_dir;
use crate::storage::datastore;
use crate::storage::layers::{begin_layer, put_active};

const SIZE: u64 = 1 << 20;

/// A VM with a disk in two layers, of which a snapshot keeps the lower one, and the VM that is to be its clone.
struct Bench {
    _directory: tempfile::TempDir,
    source: VmSpec,
    source_kek: SecretBytes,
    facts: DiskFacts,
    clone: VmSpec,
    clone_kek: SecretBytes,
    first: SnapshotId,
    second: SnapshotId,
}

fn vm(name: &str, place: &DatastoreSpec, kek: &SecretBytes) -> VmSpec {
    let mut spec = run_dir::tests::spec();
    (spec.vm, spec.name) = (VmId::new(), name.to_owned());
    spec.key = Some(keys::reference_of(kek, spec.vm, name));
    spec.devices = vec![Device::Disk(DiskSpec { size: SIZE, ..run_dir::tests::disk("d", place) })];
    spec
}

fn home(spec: &VmSpec) -> (Home, DiskId) {
    let disk = spec.disk_at(0).unwrap();
    (Home::of(&disk.datastore, spec.vm).unwrap(), disk.disk)
}

impl Bench {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        std::fs::create_dir(&path).unwrap();
        let location = DatastoreLocation::Dir { path };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        datastore::probe(&place).unwrap();
        let key = || SecretBytes::random(KEK_LEN).unwrap();
        let (source_kek, clone_kek) = (key(), key());
        let (source, clone) = (vm("web", &place, &source_kek), vm("copy", &place, &clone_kek));
        let (at, disk) = home(&source);
        let length = vmseal_luks::DATA_OFFSET + SIZE;
        let mut file = at.begin(&source, source.disk_at(0).unwrap(), length).unwrap();
        let dek = SecretBytes::random(DEK_LEN).unwrap();
        let context = keys::context(source.vm, source.key.as_ref().unwrap());
        let identity =
            Identity { disk: disk.0, holes: Holes::Zero, shared: false, role: Default::default() };
        let facts =
            vmseal_luks::create(&mut file, SIZE, &dek, &source_kek, &context, identity).unwrap();
        at.finish(disk, &file).unwrap();
        drop(file);
        let [first, second] = [1, 2].map(|number| SnapshotId(Uuid::from_u128(number)));
        for snapshot in [first, second] {
            let below = layers::read(&at, disk).unwrap().active();
            let layer = begin_layer(&at, disk, below).unwrap();
            put_active(&at, disk, layer, Some((snapshot, Uuid::now_v7()))).unwrap();
        }
        let facts = to_api(&facts);
        Self { _directory: directory, source, source_kek, facts, clone, clone_kek, first, second }
    }

    fn lent(&self, snapshot: SnapshotId) -> Lent {
        Lent {
            spec: self.source.clone(),
            disk: self.source.disk_at(0).unwrap().clone(),
            facts: self.facts.clone(),
            kek: Some(self.source_kek.try_clone().unwrap()),
            snapshot: Some(snapshot),
            linked: true,
        }
    }

    fn make(&self, snapshot: SnapshotId) -> Result<DiskFacts, Problem> {
        let (spec, lent) = (&self.clone, self.lent(snapshot));
        let disk = spec.disk_at(0).unwrap();
        let link = Link { spec, disk, kek: Some(&self.clone_kek), lent: &lent };
        link.make(&home(spec).0)
    }

    fn open(&self, spec: &VmSpec, facts: &DiskFacts, kek: &SecretBytes) -> opening::Open {
        let disk = spec.disk_at(0).unwrap();
        opening::open(spec, disk, facts, Some(kek), Access::Write).unwrap()
    }

    /// The files of the clone.
    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(home(&self.clone).0.path());
        entries.into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
    }
}

#[test]
fn a_clone_has_the_files_and_the_data_key_of_the_other_and_a_header_of_its_own() {
    let bench = Bench::new();
    let facts = bench.make(bench.second).unwrap();
    assert_eq!(bench.make(bench.second).unwrap(), facts, "it is there");
    let ours = bench.open(&bench.clone, &facts, &bench.clone_kek);
    let theirs = bench.open(&bench.source, &bench.facts, &bench.source_kek);
    // Its own layer, that of the snapshot, and the image; of the other there is a layer more.
    assert_eq!((ours.layers.len(), theirs.layers.len()), (2, 2));
    let identity = |file: &std::fs::File| FileIdentity::of(file).unwrap();
    assert_eq!(identity(&ours.layers[1]), identity(&theirs.layers[1]));
    assert_eq!(identity(&ours.file), identity(&theirs.file));
    assert_ne!(identity(ours.own()), identity(&ours.file));
    assert!(ours.shared.key && theirs.shared.key, "a guest would see ciphertext");
    let (spec, disk) = (&bench.clone, bench.clone.disk_at(0).unwrap());
    let key = |spec: &VmSpec, facts, kek| {
        let key = opening::key_of(spec, spec.disk_at(0).unwrap(), facts, Some(kek)).unwrap();
        key.unwrap().0
    };
    let dek = key(spec, &facts, &bench.clone_kek);
    assert!(dek == key(&bench.source, &bench.facts, &bench.source_kek), "another data key");
    let other = opening::open(spec, disk, &facts, Some(&bench.source_kek), Access::BesideGuest);
    assert_eq!(other.unwrap_err().code, ErrorCode::KeyMismatch, "the other VM's key opens it");
    drop((ours, theirs));

    // The other VM's files stay as they are.
    let (at, of) = home(&bench.source);
    for refused in [
        layers::check_droppable(&at, of, bench.second),
        layers::check_droppable(&at, of, bench.first),
        layers::check_unshared(&at, of),
        {
            let known = layers::remove_unneeded(&at, of, Some(bench.second)).unwrap();
            let merge = known.next_merge().unwrap();
            layers::open_lower(&at, of, &known, merge.upper).map(drop)
        },
    ] {
        let problem = refused.unwrap_err();
        assert!(
            problem.code == ErrorCode::WrongState && problem.detail.contains("'copy'"),
            "{problem}"
        );
    }
    // The clone is not merged into what it stands on, and needs nothing in the other's directory.
    let (home, disk) = home(&bench.clone);
    assert!(layers::read(&home, disk).unwrap().next_merge().is_none());
    at.delete(of).unwrap();
    drop(bench.open(&bench.clone, &facts, &bench.clone_kek));
    home.delete(disk).unwrap();
    assert!(!home.path().exists(), "{:?}", bench.files());
}

#[test]
fn what_an_interrupted_attempt_leaves_goes_with_it() {
    // The steps of making it, from the last one back: as many of them are undone as a kill would have left undone.
    for undone in 0..6 {
        for again in [false, true] {
            let bench = Bench::new();
            bench.make(bench.second).unwrap();
            let (at, disk) = home(&bench.clone);
            let image = at.image(disk);
            let half_made = image.with_extension("raw.creating");
            std::fs::rename(&image, &half_made).unwrap();
            let mut later = vec![at.layers_note(disk)];
            later.extend(at.layer_files(disk).into_iter().map(|(_, path)| path));
            later.extend([at.base(disk, 1, 2), at.base(disk, 0, 2)]);
            for path in later.iter().take(undone) {
                std::fs::remove_file(path).unwrap();
            }
            if undone > 2 {
                std::fs::File::create(&half_made).unwrap();
            }
            if again {
                let facts = bench.make(bench.first).unwrap();
                let open = bench.open(&bench.clone, &facts, &bench.clone_kek);
                assert_eq!(open.layers.len(), 1, "undone {undone}");
                continue;
            }
            let left = || {
                let files = bench.files().into_iter();
                files.filter(|it| !it.ends_with("vm.json")).collect::<Vec<_>>()
            };
            crate::storage::home::sweep_until(at.datastore(), &|| left().is_empty());
            let left = left();
            assert!(left.is_empty(), "undone {undone}: {left:?}");
            let (source, of) = home(&bench.source);
            layers::check_unshared(&source, of).unwrap();
        }
    }
}

#[test]
fn what_is_not_alike_is_not_linked_and_another_file_is_not_opened() {
    let mut bench = Bench::new();
    let absent = bench.make(SnapshotId(Uuid::from_u128(9))).unwrap_err();
    assert_eq!(absent.code, ErrorCode::NotFound);
    for disk in bench.clone.disks_mut() {
        disk.size *= 2;
    }
    assert_eq!(bench.make(bench.first).unwrap_err().code, ErrorCode::InvalidRequest);
    for disk in bench.clone.disks_mut() {
        disk.size /= 2;
    }
    let facts = bench.make(bench.first).unwrap();
    let (at, disk) = home(&bench.clone);
    let base = at.base(disk, 0, 1);
    let away = base.with_extension("away");
    std::fs::rename(&base, &away).unwrap();
    for put in [None, Some(&away)] {
        if put.is_some() {
            std::fs::copy(&away, &base).unwrap();
        }
        let spec = bench.clone.disk_at(0).unwrap();
        let opened =
            opening::open(&bench.clone, spec, &facts, Some(&bench.clone_kek), Access::Read);
        assert!(opened.is_err(), "another file, or none, is opened");
        let _ = std::fs::remove_file(&base);
    }
    // A link to a file elsewhere.
    std::os::unix::fs::symlink(&away, &base).unwrap();
    let spec = bench.clone.disk_at(0).unwrap();
    let opened = opening::open(&bench.clone, spec, &facts, Some(&bench.clone_kek), Access::Read);
    assert!(opened.is_err(), "a symbolic link is followed");
}
