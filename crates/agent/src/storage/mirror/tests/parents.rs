//! A disk that linked clones stand on is copied: they keep the files that they share, as they are.

use vmseal_api::id::SnapshotId;

use super::trees::{copy_tree, layered};
use super::*;
use crate::storage::cloning::Lent;
use crate::storage::linking::{self, Link};

/// A linked clone of what a snapshot keeps of the disk, which is in the clear.
fn clone_of(bench: &Bench, snapshot: SnapshotId) -> VmSpec {
    let disk = DiskSpec { disk: DiskId::new(), ..bench.disk().clone() };
    let devices = vec![Device::Disk(disk)];
    let (vm, name) = (VmId::new(), "clone".to_owned());
    let clone = VmSpec { vm, name, key: None, devices, ..bench.spec.clone() };
    let lent = Lent {
        spec: bench.spec.clone(),
        disk: bench.disk().clone(),
        facts: DiskFacts::Raw,
        kek: None,
        snapshot: Some(snapshot),
        linked: true,
    };
    let disk = clone.disk_at(0).unwrap();
    let link = Link { spec: &clone, disk, kek: None, lent: &lent };
    link.make(&Home::of(&disk.datastore, clone.vm).unwrap()).unwrap();
    clone
}

#[test]
fn a_former_file_that_has_further_names_is_not_overwritten_and_the_others_are() {
    for renamed in [false, true] {
        let mut bench = bench();
        let [_, second, third] = layered(&bench);
        let (home, disk) = (bench.home(), bench.disk().disk);
        let known = layers::read(&home, disk).unwrap();
        let layer = |snapshot| home.layer(disk, known.layer_of(snapshot).flatten().unwrap().0);
        let (shared, own) = (layer(second), layer(third));
        for path in [&shared, &own] {
            let file = File::options().write(true).open(path).unwrap();
            file.write_all_at(MARKER, path.metadata().unwrap().len()).unwrap();
        }
        // It stands on the layer of the second snapshot, and on the image.
        let mut clone = clone_of(&bench, second);
        clone.key = Some(keys::reference_of(&bench.kek, clone.vm, "k"));
        let former = [&home.image(disk), &shared, &own].map(|path| File::open(path).unwrap());
        let before = [content(&former[0]), std::fs::read(&shared).unwrap()];
        let inode = |file: &File| file.metadata().unwrap().ino();
        let mut inodes = vec![inode(&former[0]), inode(&former[1])];
        inodes.sort_unstable();
        assert!(layers::check_unshared(&home, disk).is_err());

        bench.begin().unwrap();
        copy_tree(&bench);
        bench.switch();
        let to = clone.disk_at(0).unwrap();
        let theirs = Home::of(&to.datastore, clone.vm).unwrap();
        // Nobody finds the clone there, and its files are its own nevertheless.
        let aside = theirs.path().with_extension("aside");
        if renamed {
            std::fs::rename(theirs.path(), &aside).unwrap();
        }
        *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        let clones = if renamed { vec![] } else { vec!["clone".to_owned()] };
        assert_eq!(bench.fate(), FormerFate::Shared { in_the_clear: true, clones, inodes });
        assert_eq!(bench.remove_source().unwrap(), None);
        if renamed {
            std::fs::rename(&aside, theirs.path()).unwrap();
        }

        assert!(!home.source(disk).exists() && !shared.exists() && !own.exists());
        let [image, layer] = [0, 1].map(|place| theirs.base(to.disk, 1 - place, 2));
        assert!(std::fs::read(&image).unwrap() == before[0], "the image was overwritten");
        assert!(std::fs::read(&layer).unwrap() == before[1], "the layer was overwritten");
        assert!(content(&former[2]).iter().all(|byte| *byte == 0), "it is in the clear");
        for path in [&image, &layer] {
            assert_eq!(path.metadata().unwrap().nlink(), 1, "the former name is left");
        }
        drop(opening::open(&clone, to, &DiskFacts::Raw, None, Access::Write).unwrap());
        // What the disk is now is shared with nobody.
        layers::check_unshared(&home, disk).unwrap();

        // When the clone is copied as well nobody has these files any more.
        let files = [&image, &layer].map(|path| File::open(path).unwrap());
        let to = to.disk;
        let mut bench = Bench { spec: clone, task: TaskId::new(), ..bench };
        let other = theirs.path().join("other");
        if renamed {
            // Unless somebody has.
            std::fs::hard_link(&image, &other).unwrap();
        }
        bench.begin().unwrap();
        copy_tree(&bench);
        bench.switch();
        *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        let told = match renamed {
            true => FormerFate::Shared {
                in_the_clear: true,
                clones: vec![],
                inodes: vec![inode(&files[0])],
            },
            false => FormerFate::Overwritten,
        };
        assert_eq!(bench.fate(), told);
        assert!(theirs.base_files(Some(to)).unwrap().is_empty(), "a name is left");
        let [image, layer] = files.map(|file| content(&file));
        assert!(layer.iter().all(|byte| *byte == 0), "the layer is left in the clear");
        assert_eq!(image.iter().all(|byte| *byte == 0), !renamed, "the image");
    }
}

/// A clone that was begun before the copy took its place does not stand on what may have been overwritten.
#[test]
fn a_clone_of_files_that_a_copy_has_replaced_is_not_made() {
    let bench = bench();
    let [_, second, _] = layered(&bench);
    bench.begin().unwrap();
    copy_tree(&bench);
    let (home, disk) = (bench.home(), bench.disk().disk);
    let files = layers::base_of(&home, disk, second).unwrap().unwrap();
    let files: Vec<_> = files.into_iter().map(|(_, identity)| identity).collect();
    assert!(linking::keeps(&home, disk, second, &files).unwrap());
    bench.switch();
    assert!(!linking::keeps(&home, disk, second, &files).unwrap());
}
