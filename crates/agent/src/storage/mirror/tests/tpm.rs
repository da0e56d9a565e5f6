//! What a TPM keeps beside a mirrored disk, from each state that a process may leave.

use std::path::Path;

use super::*;
use crate::storage::tpm_state;

/// The disk is that of a TPM, which keeps something.
fn with_tpm(mut bench: Bench) -> Bench {
    bench.spec.disks_mut().for_each(|disk| disk.role = DiskRole::Tpm);
    keep(&bench.home().tpm_state(bench.disk().disk), "former");
    bench
}

fn keep(path: &Path, what: &str) {
    drop(tpm_state::make_of(path, what.as_bytes(), None).unwrap());
}

#[test]
fn what_a_tpm_keeps_gets_its_name_wherever_that_was_interrupted() {
    for done in 0..=2 {
        let bench = with_tpm(bench());
        let (home, disk) = (bench.home(), bench.disk().disk);
        // Of an attempt that has left it.
        keep(&home.source_tpm(disk), "older");
        bench.begin().unwrap();
        keep(&home.copy_tpm(disk), "new");
        let kept = home.tpm_state(disk);
        as_it_is(&bench.spec, bench.disk(), &DiskFacts::Raw, Access::Read).unwrap();
        assert_eq!(tpm_state::read(&kept).unwrap(), b"former", "before the disk pivots");
        bench.pivot();
        let names = [(kept.clone(), home.source_tpm(disk)), (home.copy_tpm(disk), kept.clone())];
        for (from, to) in &names[..done] {
            rename(from, to).unwrap();
        }
        for _ in 0..2 {
            as_it_is(&bench.spec, bench.disk(), &DiskFacts::Raw, Access::Read).unwrap();
            assert_eq!(tpm_state::read(&kept).unwrap(), b"new", "{done}");
            assert_eq!(tpm_state::read(&home.source_tpm(disk)).unwrap(), b"former", "{done}");
        }
        bench.remove_source().unwrap();
        assert_eq!(bench.files(), ["json", "raw", "tpm"], "{done}");
        assert_eq!(tpm_state::read(&kept).unwrap(), b"new", "{done}");
    }
}

#[test]
fn a_tpm_that_moves_leaves_nothing_behind_and_one_that_does_not_no_copy() {
    let (bench, target, _directory) = moving();
    let bench = with_tpm(bench);
    let disk = bench.disk().disk;
    // A directory of this name that vmseal has not made is not replaced.
    std::fs::create_dir_all(target.path()).unwrap();
    keep(&target.tpm_state(disk), "another's");
    assert_eq!(bench.begin().unwrap_err().code, ErrorCode::AlreadyExists);
    tpm_state::remove(&target.tpm_state(disk)).unwrap();
    bench.begin().unwrap();
    keep(&target.copy_tpm(disk), "new");
    keep(&target.unfinished_tpm(disk), "half of it");
    bench.give_up(Some(bench.task)).unwrap();
    assert_eq!((bench.files(), target.path().exists()), (vec_of(["json", "raw", "tpm"]), false));

    bench.begin().unwrap();
    keep(&target.copy_tpm(disk), "new");
    bench.pivot();
    let moved = bench.moved_disk();
    bench.remove_source().unwrap();
    assert_eq!(files_of(&target), ["json", "raw", "tpm"]);
    assert_eq!(tpm_state::read(&target.tpm_state(disk)).unwrap(), b"new");
    assert!(!bench.home().path().exists(), "something is left");
    assert!(of_disk(bench.spec.vm, &moved).unwrap().is_none());
}

fn vec_of<const COUNT: usize>(names: [&str; COUNT]) -> Vec<String> {
    names.map(str::to_owned).to_vec()
}
