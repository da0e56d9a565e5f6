//! A former image is destroyed when its copy opens, and at the pace of its task.

use std::cell::RefCell;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::trees::{copy_tree, layered};
use super::*;

/// How long nothing may happen that must not: too short, it only lets the test pass wrongly.
const QUIET: Duration = Duration::from_millis(200);

/// A disk that has changed to its copy.
fn switched() -> Bench {
    let bench = bench();
    bench.begin().unwrap();
    bench.switch();
    bench
}

impl Bench {
    /// The former image is as the guest had it.
    fn has_its_source(&self) -> bool {
        let source = File::open(self.home().source(self.disk().disk)).unwrap();
        content(&source)[64 << 10..].starts_with(MARKER)
    }

    /// The removal of the former image is refused, and says where both are.
    fn is_kept(&self, code: ErrorCode) {
        let (home, disk) = (self.home(), self.disk().disk);
        let before = self.files();
        let refused = self.remove_source().unwrap_err();
        assert_eq!(refused.code, code, "{refused}");
        for path in [home.image(disk), home.source(disk)] {
            assert!(refused.detail.contains(&path.display().to_string()), "{refused}");
        }
        assert_eq!(self.files(), before);
        assert!(self.has_its_source());
    }
}

/// Puts other bytes in the place of a file's first ones, and returns those.
fn damage(path: &Path, length: u64) -> Vec<u8> {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut before = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut before, 0).unwrap();
    file.write_all_at(&vec![0x55; before.len()], 0).unwrap();
    before
}

#[test]
fn a_header_that_is_damaged_after_the_switch_keeps_the_former_image() {
    let bench = switched();
    let image = bench.home().image(bench.disk().disk);
    let header = damage(&image, vmseal_luks::DATA_OFFSET);
    bench.is_kept(ErrorCode::Damaged);
    // Again, as a task does that is begun again.
    bench.is_kept(ErrorCode::Damaged);
    File::options().write(true).open(&image).unwrap().write_all_at(&header, 0).unwrap();
    assert_eq!(bench.fate(), FormerFate::Overwritten);
    assert_eq!(bench.files(), ["json", "raw"]);
}

/// The key counts that the VM has now, and not that which the copy was begun with.
#[test]
fn a_former_image_is_kept_without_the_key_of_its_copy() {
    let mut bench = switched();
    let gate = Gate::new(CopyPace::default());
    let guest_runs = AtomicBool::new(false);
    let speed = Speed { gate: &gate, guest_runs: &guest_runs, sleep: &sleep };
    let mut removed = Removed::default();
    let locked = source::remove(&bench.spec, bench.disk(), None, &mut removed, |_, _| {}, speed);
    assert_eq!(locked.unwrap_err().code, ErrorCode::Locked);
    assert!(bench.has_its_source());
    let other = SecretBytes::random(KEK_LEN).unwrap();
    let other_reference = keys::reference_of(&other, bench.spec.vm, "other");
    let reference = bench.spec.key.replace(other_reference);
    let key = std::mem::replace(&mut bench.kek, other);
    bench.is_kept(ErrorCode::KeyMismatch);
    (bench.spec.key, bench.kek) = (reference, key);
    assert_eq!(bench.fate(), FormerFate::Overwritten);
}

#[test]
fn a_layer_that_is_lost_after_the_switch_keeps_the_former_image() {
    let bench = bench();
    let snapshots = layered(&bench);
    bench.begin().unwrap();
    copy_tree(&bench);
    bench.switch();
    let (home, disk) = (bench.home(), bench.disk().disk);
    let layers = layers::read(&home, disk).unwrap();
    // The one that a snapshot alone needs: the active layer is not above it.
    let needed = layers.chain(layers.active()).len();
    let kept = snapshots.map(|snapshot| layers.layer_of(snapshot).unwrap());
    let kept = kept.into_iter().flatten().find(|layer| layers.chain(Some(*layer)).len() > needed);
    let path = home.layer(disk, kept.unwrap().0);
    let away = path.with_extension("away");
    std::fs::rename(&path, &away).unwrap();
    let refused = bench.remove_source().unwrap_err();
    // Nobody calls the VM whole then.
    assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
    assert!(refused.detail.contains(&home.source(disk).display().to_string()), "{refused}");
    assert!(bench.has_its_source());
    std::fs::rename(&away, &path).unwrap();
    bench.remove_source().unwrap();
    assert!(!home.source(disk).exists());
}

/// A disk in the clear has no header: it is as long as it is to be.
#[test]
fn a_copy_in_the_clear_that_is_cut_off_keeps_the_former_image() {
    let bench = bench();
    let wanted = DiskToMirror { encrypted: false, ..bench.wanted() };
    let (spec, disk, facts) = (&bench.spec, bench.disk(), &DiskFacts::Raw);
    let (kek, task, pace) = (Some(&bench.kek), bench.task, bench.pace);
    let new = NewMirror { spec, disk, facts, kek, wanted: &wanted, task, pace, forgets_key: false };
    new.begin(|_| Ok(())).unwrap();
    bench.switch();
    let image = File::options().write(true).open(bench.home().image(disk.disk)).unwrap();
    image.set_len(disk.size - 1).unwrap();
    bench.is_kept(ErrorCode::Damaged);
    image.set_len(disk.size).unwrap();
    assert_eq!(bench.fate(), FormerFate::Overwritten);
}

/// A removal that is begun again may find it gone.
#[test]
fn a_former_image_that_is_gone_is_not_named() {
    let bench = switched();
    let (home, disk) = (bench.home(), bench.disk().disk);
    std::fs::remove_file(home.source(disk)).unwrap();
    damage(&home.image(disk), vmseal_luks::DATA_OFFSET);
    let refused = bench.remove_source().unwrap_err();
    assert_eq!(refused.code, ErrorCode::Damaged, "{refused}");
    assert!(refused.detail.contains(&home.image(disk).display().to_string()), "{refused}");
    assert!(!refused.detail.contains(&home.source(disk).display().to_string()), "{refused}");
    assert!(!refused.detail.contains("as the disk was"), "{refused}");
}

/// It may have been off when the removal began.
#[test]
fn a_removal_rests_from_when_the_guest_starts_until_it_goes_off() {
    let gate = Gate::new(CopyPace::default());
    let guest_runs = AtomicBool::new(false);
    let speed = Speed { gate: &gate, guest_runs: &guest_runs, sleep: &sleep };
    let took = Duration::from_millis(20);
    assert_eq!(speed.rest_after(took), Duration::ZERO);
    guest_runs.store(true, Ordering::Relaxed);
    assert_eq!(speed.rest_after(took), took);
    assert_eq!(speed.rest_after(Duration::from_secs(60)), Duration::from_secs(1));
    guest_runs.store(false, Ordering::Relaxed);
    assert_eq!(speed.rest_after(took), Duration::ZERO);
}

/// All data of the former image is one piece.
#[test]
fn a_removal_rests_after_each_piece_while_the_guest_runs() {
    for runs in [false, true] {
        let bench = switched();
        let (rests, guest_runs) = (RefCell::new(Vec::new()), AtomicBool::new(runs));
        let gate = Gate::new(CopyPace::default());
        let sleep = |rest: Duration| rests.borrow_mut().push(rest);
        let speed = Speed { gate: &gate, guest_runs: &guest_runs, sleep: &sleep };
        bench.remove_with(&mut Removed::default(), speed).unwrap().unwrap();
        let rests = rests.into_inner();
        assert_eq!(rests.len(), 1, "{rests:?}");
        assert_eq!(rests[0] > Duration::ZERO, runs, "{rests:?}");
    }
}

#[test]
fn a_former_image_is_overwritten_at_the_pace_of_its_task() {
    let bench = switched();
    let gate = Gate::new(CopyPace { paused: true, ..CopyPace::default() });
    let removed = std::thread::scope(|scope| {
        let (tell, told) = channel();
        let (bench, gate) = (&bench, &gate);
        scope.spawn(move || tell.send(bench.remove_at(&mut Removed::default(), gate)));
        let early = told.recv_timeout(QUIET);
        let is_whole = bench.has_its_source();
        // Before anything is asserted: the thread is waited for.
        gate.set(CopyPace::default());
        assert_eq!(early.err(), Some(RecvTimeoutError::Timeout));
        assert!(is_whole, "it is overwritten while its task is paused");
        told.recv().unwrap()
    });
    assert_eq!(removed.unwrap().unwrap().fate, FormerFate::Overwritten);
}
