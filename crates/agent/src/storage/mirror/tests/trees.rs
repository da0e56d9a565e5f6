//! Disks with layers.

use uuid::Uuid;
use vmseal_api::id::SnapshotId;

use super::*;
use crate::storage::layers::{LayerId, Layers};

/// How many layers a copy has.
fn layers_of(copy: &filter::Mirror) -> usize {
    match &copy.to {
        CopyPlace::Image { layers, .. } => layers.len(),
        CopyPlace::OtherHost { .. } => 0,
    }
}

/// The disk gets three layers: two above each other, and an active one above the image. Returns its snapshots.
pub(super) fn layered(bench: &Bench) -> [SnapshotId; 3] {
    let (home, disk) = (bench.home(), bench.disk().disk);
    let snapshots = std::array::from_fn(|_| SnapshotId::new());
    let above = |below: Option<LayerId>, keep: Option<SnapshotId>| {
        let layer = layers::begin_layer(&home, disk, below).unwrap();
        let keep = keep.map(|snapshot| (snapshot, Uuid::now_v7()));
        layers::put_active(&home, disk, layer, keep).unwrap();
        layers::read(&home, disk).unwrap().active()
    };
    let first = above(None, Some(snapshots[0]));
    let second = above(first, Some(snapshots[1]));
    // The second one is kept, and then the image is gone back to.
    above(second, Some(snapshots[2]));
    above(None, None);
    layers::remove_unneeded(&home, disk, None).unwrap();
    assert_eq!(layers::read(&home, disk).unwrap().count(), 3);
    snapshots
}

/// Does what filters do, but for the data; up to `parts` files.
fn copy_parts(bench: &Bench, parts: usize) -> usize {
    let mut copied = 0;
    while copied < parts {
        let next = tree::next(&bench.spec, bench.disk(), &DiskFacts::Raw, Some(&bench.kek));
        let Some(part) = next.unwrap() else { break };
        let (disk, to_note) = part.split();
        drop(disk);
        to_note.note().unwrap();
        copied += 1;
    }
    copied
}

pub(super) fn copy_tree(bench: &Bench) {
    copy_parts(bench, usize::MAX);
    tree::finish(&bench.spec, bench.disk()).unwrap();
}

fn is_incomplete(bench: &Bench) -> bool {
    let mirror = of_disk(bench.spec.vm, bench.disk()).unwrap().unwrap();
    tree::is_incomplete(&mirror).unwrap()
}

/// The kinds of files in a home, and how many layers are among them.
fn kinds(home: &Home) -> (Vec<String>, usize) {
    let mut names = files_of(home);
    let all = names.len();
    names.retain(|name| !name.starts_with("layer-"));
    let layers = all - names.len();
    (names, layers)
}

/// The layers are those of the copy: as many, in the same places, and others.
fn is_copy(before: &Layers, after: &Layers, snapshots: &[SnapshotId]) {
    assert_eq!(after.count(), before.count());
    let depth = |layers: &Layers, from| layers.chain(from).len();
    for snapshot in snapshots {
        let [one, other] = [before, after].map(|it| it.layer_of(*snapshot).unwrap());
        assert_eq!(depth(before, one), depth(after, other), "{snapshot}");
        assert_eq!(before.attempt(*snapshot), after.attempt(*snapshot));
        assert!(one.is_none() || one != other, "it is the same file");
    }
    assert_eq!(depth(before, before.active()), depth(after, after.active()));
    assert_ne!(before.active(), after.active());
}

#[test]
fn the_layers_of_a_disk_are_copied_before_its_filter_keeps_a_copy() {
    let bench = bench();
    layered(&bench);
    bench.begin().unwrap();
    // The image, and two layers that nobody writes. The process that copies may die after each.
    for _ in 0..3 {
        assert!(is_incomplete(&bench));
        let opened = bench.open().unwrap();
        assert!(opened.mirror.is_none() && !opened.has_pivoted && opened.open.layers.len() == 1);
        let premature = open_to_copy(&bench.spec, bench.disk(), &DiskFacts::Raw, Some(&bench.kek));
        drop(opened);
        assert!(premature.is_err());
        assert!(tree::finish(&bench.spec, bench.disk()).is_err());
        // One that is not noted is copied again.
        let next = tree::next(&bench.spec, bench.disk(), &DiskFacts::Raw, Some(&bench.kek));
        drop(next.unwrap().unwrap());
        assert_eq!(copy_parts(&bench, 1), 1);
    }
    assert_eq!(copy_parts(&bench, 1), 0);
    assert!(is_incomplete(&bench));
    tree::finish(&bench.spec, bench.disk()).unwrap();
    tree::finish(&bench.spec, bench.disk()).unwrap();
    assert!(!is_incomplete(&bench));
    let opened = bench.open().unwrap();
    let copy = opened.mirror.expect("its copy");
    assert_eq!((opened.open.layers.len(), layers_of(&copy)), (1, 1));
    // What is left of parts that were copied twice goes with the next merge of layers, and nothing that is needed.
    drop(copy);
    layers::remove_unneeded(&bench.home(), bench.disk().disk, None).unwrap();
    let all = ["copy", "copy-layers", "json", "layers", "mirror", "mirror-map", "raw"];
    assert_eq!(kinds(&bench.home()), (all.map(str::to_owned).to_vec(), 6));
}

#[test]
fn a_copy_with_layers_is_given_up_from_every_state() {
    for parts in 0..5 {
        let bench = bench();
        layered(&bench);
        let before = files_of(&bench.home());
        bench.begin().unwrap();
        copy_parts(&bench, parts);
        if parts > 3 {
            tree::finish(&bench.spec, bench.disk()).unwrap();
        }
        bench.give_up(Some(bench.task)).unwrap();
        bench.give_up(Some(bench.task)).unwrap();
        assert_eq!(files_of(&bench.home()), before);
        bench.begin().unwrap();
        copy_tree(&bench);
    }
}

/// After a pivot the names are put right from each state that a process may leave, and the copy with its layers is the disk.
#[test]
fn a_tree_that_has_pivoted_is_its_copy_from_every_state_of_the_names() {
    for moves in [false, true] {
        for renamed in 0..5 {
            let (mut bench, target, _directory) = moving();
            if !moves {
                bench.to = None;
            }
            let target = if moves { target } else { bench.home() };
            let snapshots = layered(&bench);
            let (home, disk) = (bench.home(), bench.disk().disk);
            let before = layers::read(&home, disk).unwrap();
            bench.begin().unwrap();
            copy_tree(&bench);
            bench.pivot();
            let names = [
                (home.image(disk), home.source(disk)),
                (home.layers_note(disk), home.source_layers_note(disk)),
                (target.copy_layers_note(disk), target.layers_note(disk)),
                (target.copy(disk), target.image(disk)),
            ];
            names[..renamed].iter().for_each(|(from, to)| std::fs::rename(from, to).unwrap());
            let opened = bench.open().unwrap();
            assert!(opened.has_pivoted && opened.mirror.is_none() && opened.open.key.is_some());
            assert_eq!(opened.open.layers.len(), 1);
            drop(opened);
            take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
            is_copy(&before, &layers::read(&target, disk).unwrap(), &snapshots);
            // Nothing of what was before counts as debris: it is overwritten first.
            layers::remove_unneeded(&target, disk, None).unwrap();
            let former = before.active().map(|layer| home.layer(disk, layer.0)).unwrap();
            assert!(former.exists());
            *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
            bench.remove_source().unwrap();
            bench.remove_source().unwrap();
            let all = ["json", "layers", "raw"].map(str::to_owned).to_vec();
            assert_eq!(kinds(&target), (all, 3));
            assert!(!moves || !home.path().exists());
        }
    }
}

#[test]
fn layers_that_were_in_the_clear_are_overwritten_before_they_are_removed() {
    let bench = bench();
    layered(&bench);
    let (home, disk) = (bench.home(), bench.disk().disk);
    let active = layers::read(&home, disk).unwrap().active().unwrap();
    let path = home.layer(disk, active.0);
    let length = path.metadata().unwrap().len();
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(MARKER, length).unwrap();
    let kept = File::open(&path).unwrap();
    bench.begin().unwrap();
    copy_tree(&bench);
    bench.switch();
    bench.remove_source().unwrap();
    assert!(!path.exists() && content(&kept).iter().all(|byte| *byte == 0));
}

/// A datastore that is away gives the copy up, and keeps no guest from its disk, however far the copy is.
#[test]
fn a_copy_with_layers_on_a_datastore_that_is_away_is_given_up() {
    for parts in [1, usize::MAX] {
        let (bench, _, directory) = moving();
        layered(&bench);
        bench.begin().unwrap();
        copy_parts(&bench, parts);
        if parts > 1 {
            tree::finish(&bench.spec, bench.disk()).unwrap();
        }
        let away = directory.path().with_extension("away");
        std::fs::rename(directory.path(), &away).unwrap();
        let opened = bench.open().unwrap();
        assert!(opened.mirror.is_none() && opened.open.layers.len() == 1);
        drop(opened);
        std::fs::rename(&away, directory.path()).unwrap();
        assert!(of_disk(bench.spec.vm, bench.disk()).unwrap().is_none());
        bench.begin().unwrap();
        copy_tree(&bench);
    }
}
