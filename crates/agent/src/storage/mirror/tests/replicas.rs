//! The replica of a mirrored disk: the former one stays until the copy is used, and goes with the former image.

use vmseal_api::replica::ReplicaPlace;

use super::*;

/// A disk with a replica that has all of it, as its map says; and the home of that.
async fn replicated(mut bench: Bench) -> (Bench, Home, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let location = DatastoreLocation::Dir { path: directory.path().to_owned() };
    let place = DatastoreSpec { datastore: DatastoreId::new(), location };
    datastore::probe(&place).unwrap();
    let there = Home::of(&place, bench.spec.vm).unwrap();
    let replica = ReplicaPlace { datastore: place, bytes_per_second: 1 << 20 };
    bench.spec.disk_at_mut(0).unwrap().replica = Some(replica);
    let path = bench.home().image(bench.disk().disk);
    make_replica(&bench.spec, &as_raw(bench.disk()), &File::open(&path).unwrap()).await.unwrap();
    std::fs::copy(&path, there.replica(bench.disk().disk)).unwrap();
    (bench, there, directory)
}

fn as_raw(disk: &DiskSpec) -> DiskSpec {
    DiskSpec { facts: Some(DiskFacts::Raw), ..disk.clone() }
}

/// Prepares the replica of the disk as the copy that it is.
async fn prepared(bench: &Bench) {
    let (disk, image) = take_place(bench.spec.vm, bench.disk()).unwrap().unwrap();
    make_replica(&bench.spec, &disk, &image).await.unwrap();
}

#[tokio::test]
async fn a_replica_of_the_copy_is_made_and_the_former_one_overwritten_at_the_end() {
    for moves in [false, true] {
        let (bench, _kept) = match moves {
            true => {
                let (bench, _, directory) = moving();
                (bench, Some(directory))
            }
            false => (bench(), None),
        };
        let (mut bench, there, _directory) = replicated(bench).await;
        let disk = bench.disk().disk;
        let (replica, former) = (there.replica(disk), there.former_replica(disk));
        let before = std::fs::read(&replica).unwrap();
        // One that is given up has changed nothing.
        bench.begin().unwrap();
        bench.give_up(Some(bench.task)).unwrap();
        assert_eq!((std::fs::read(&replica).unwrap(), former.exists()), (before.clone(), false));

        bench.begin().unwrap();
        bench.pivot();
        // A filter may open the disk before its new image is on record.
        let opened = bench.open().unwrap().open;
        let served = replica_for_writer(&bench.spec, bench.disk(), &opened.file, opened.offset);
        assert!(served.await.unwrap().is_some());
        assert_eq!(std::fs::read(&former).unwrap(), before, "the former replica has changed");
        let made = std::fs::read(&replica).unwrap();
        assert_eq!(made.len() as u64, vmseal_luks::DATA_OFFSET + bench.disk().size);
        assert_eq!(made[..4], *b"LUKS");
        drop(opened);
        let identity = || FileIdentity::of(&File::open(&replica).unwrap()).unwrap();
        let new = identity();
        prepared(&bench).await;
        assert_eq!(identity(), new, "the new replica is set aside as well");

        if moves {
            *bench.spec.disk_at_mut(0).unwrap() = bench.moved_disk();
        }
        let kept = former.with_extension("kept");
        std::fs::hard_link(&former, &kept).unwrap();
        let mut removed = Removed::default();
        if moves {
            // A filter has it still.
            let held = open_locked(&former, Access::Write).unwrap().unwrap();
            assert_eq!(bench.remove_more(&mut removed).unwrap_err().code, ErrorCode::InUse);
            drop(held);
        }
        // The image went before its replica did.
        let told = bench.remove_more(&mut removed).unwrap().unwrap();
        assert_eq!(told.fate, FormerFate::Overwritten);
        assert_eq!(bench.remove_source().unwrap(), None);
        assert!(std::fs::read(&kept).unwrap().iter().all(|byte| *byte == 0), "plaintext is left");
        std::fs::remove_file(&kept).unwrap();
        assert_eq!(files_of(&there), ["json", "pair", "replica"]);
        assert_eq!(identity(), new);
        assert_eq!(files_of(&bench.home()), ["json", "map", "pair", "raw"]);
    }
}

#[tokio::test]
async fn a_disk_that_was_left_without_its_replica_is_copied_to_it_as_a_whole() {
    let (bench, _there, _directory) = replicated(bench()).await;
    let (vm, disk) = (bench.spec.vm, bench.disk());
    // As a filter leaves it that has copied something.
    std::fs::write(bench.home().map(disk.disk), [1; 1024]).unwrap();
    assert!(!has_left_replica(vm, disk).unwrap());
    for _ in 0..2 {
        leave_replica(vm, disk).unwrap();
        assert!(has_left_replica(vm, disk).unwrap());
    }
    let image = File::open(bench.home().image(disk.disk)).unwrap();
    let served = replica_for_writer(&bench.spec, &as_raw(disk), &image, 0).await.unwrap().unwrap();
    assert_eq!(served.map.metadata().unwrap().len(), 0, "a former map is believed");
    assert!(!has_left_replica(vm, disk).unwrap(), "it is looked for again and again");
    // Who still has the map writes with the replica.
    assert_eq!(leave_replica(vm, disk).unwrap_err().code, ErrorCode::InUse);
    drop(served);
    let without = DiskSpec { replica: None, ..disk.clone() };
    leave_replica(vm, &without).unwrap();
    assert!(!has_left_replica(vm, &without).unwrap());
    assert!(bench.home().map(disk.disk).exists());
}

/// Its datastore is away when the copy is used: the former replica is neither taken for the copy's, nor left.
#[tokio::test]
async fn a_former_replica_that_was_away_at_the_exchange_goes_when_it_is_back() {
    let (bench, there, directory) = replicated(bench()).await;
    let (disk, away) = (bench.disk().disk, directory.path().with_extension("away"));
    bench.begin().unwrap();
    bench.pivot();
    std::fs::rename(directory.path(), &away).unwrap();
    prepared(&bench).await;
    assert!(bench.remove_source().is_err(), "the former replica is still there");
    std::fs::rename(&away, directory.path()).unwrap();
    let kept = there.path().join("kept.kept");
    std::fs::hard_link(there.replica(disk), &kept).unwrap();
    bench.remove_source().unwrap();
    assert!(std::fs::read(&kept).unwrap().iter().all(|byte| *byte == 0), "plaintext is left");
    assert!(!there.replica(disk).exists() && !there.former_replica(disk).exists());
    assert!(of_disk(bench.spec.vm, bench.disk()).unwrap().is_none());
}
