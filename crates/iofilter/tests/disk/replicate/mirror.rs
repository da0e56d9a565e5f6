//! What a mirror does beside copying: it yields to its guest, keeps to its pace, and a pivot that cannot be done changes
//! nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use vmseal_api::filter::{
    DelaySpec, FaultKind, FaultRule, FaultSpec, FilterSpec, Handle, OperationKind, PIVOT_BYTES_MAX,
};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_iofilter::disk::DiskStorage;
use vmseal_iofilter::layers::delay::Delay;
use vmseal_iofilter::layers::leg::{Leg, LegChain};
use vmseal_iofilter::layers::replicate::Replicate;
use vmseal_iofilter::layers::replicate::chunks::Chunks;
use vmseal_iofilter::layers::replicate::copier::Copier;
use vmseal_iofilter::layers::replicate::format::Geometry;
use vmseal_iofilter::layers::replicate::map::{Copied, Map, MapLoad, PivotError};
use vmseal_iofilter::layers::replicate::mirror::{NotPivoted, OpenedMirror, Pivot};
use vmseal_iofilter::layers::replicate::open::ReplicaError;
use vmseal_iofilter::layers::stack::Stack;
use vmseal_iofilter::stack::chain::{Chain, Filter, Io, Limits};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{Operation, RequestId};
use vmseal_iofilter::storage::mem::MemDisk;

use super::faults;
use vmseal_iofilter::layers;

const SIZE: u64 = 8 << 20;

pub(super) fn chain(size: u64, disk: &MemDisk, filters: Vec<Box<dyn Filter>>) -> Chain {
    Chain::new(size, false, filters, disk.queue()).unwrap()
}

pub(super) fn noise(size: u64) -> MemDisk {
    let disk = MemDisk::new(size as usize);
    let mut random = fastrand::Rng::with_seed(7);
    let mut bytes = vec![0; size as usize];
    random.fill(&mut bytes);
    let mut place = LegChain::new(chain(size, &disk, vec![]));
    // SAFETY: the bytes outlive the write, which is over when the call returns.
    place.write(0, unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) }).unwrap();
    disk
}

fn mirror(size: u64) -> Replicate {
    let geometry = Geometry::new(DiskId::new(), size).of_mirror();
    let map_bytes = geometry.map_bytes();
    let map = LegChain::new(chain(map_bytes as u64, &MemDisk::new(map_bytes), vec![]));
    Replicate::new(geometry, map).0
}

/// Counts the reads in flight below it, and makes a request of the guest at each, if there is one.
struct Busy {
    now: usize,
    most: Arc<AtomicUsize>,
    guest: Option<Chain>,
}

impl Filter for Busy {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.now += 1;
        self.most.fetch_max(self.now, Ordering::Relaxed);
        if let Some(guest) = &mut self.guest {
            let request = guest.begin().unwrap();
            guest.submit(request, Operation::Flush, 0, 0, 0);
            guest.poll();
            while guest.next_done().is_some() {}
        }
        io.pass(id);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.now -= 1;
        io.complete(id, io.request(id).result);
    }
}

/// The most pieces that were read at a time.
fn pieces_at_a_time(busy: bool) -> usize {
    let (replicate, source, copy) = (mirror(SIZE), noise(SIZE), MemDisk::new(SIZE as usize));
    let guest =
        busy.then(|| chain(SIZE, &source, vec![replicate.filter(&Place::simple(SIZE)).unwrap()]));
    let most = Arc::new(AtomicUsize::new(0));
    let counting: Box<dyn Filter> = Box::new(Busy { now: 0, most: Arc::clone(&most), guest });
    let slow = DelaySpec {
        operations: vec![OperationKind::Read],
        microseconds: 500,
        jitter_microseconds: 0,
        reorders: false,
        seed: 0,
    };
    let filters = vec![counting, Delay::new(slow).filter(&Place::simple(SIZE)).unwrap()];
    let from = chain(SIZE, &source, filters);
    let to = LegChain::new(chain(SIZE, &copy, vec![]));
    let mut copier = Copier::new(&replicate, from, None, to);
    while replicate.status().dirty_bytes > 0 {
        copier.batch().unwrap();
    }
    assert_eq!(source.bytes(), copy.bytes());
    most.load(Ordering::Relaxed)
}

#[test]
fn a_mirror_has_several_pieces_in_flight_beside_an_idle_guest_and_one_beside_a_busy_one() {
    assert!(pieces_at_a_time(false) > 1);
    assert_eq!(pieces_at_a_time(true), 1);
}

fn open(map: &std::path::Path, disk: DiskId, size: u64) -> Result<OpenedMirror, ReplicaError> {
    let map = Handle::Path(map.into());
    let leg = Leg::new(Stack::new(vec![], DiskStorage::Mem(MemDisk::new(0)), size), vec![]);
    open_with(&map, disk, size, leg)
}

/// The same with this leg.
fn open_with(
    map: &Handle,
    disk: DiskId,
    size: u64,
    leg: Leg,
) -> Result<OpenedMirror, ReplicaError> {
    let (pace, image) = (CopyPace::default(), DiskStorage::Mem(MemDisk::new(0)));
    OpenedMirror::open(disk, size, map, pace, &image, leg, &mut Default::default())
}

#[test]
fn a_map_that_does_not_tell_where_the_data_is_is_refused_and_left_as_it_is() {
    let place = tempfile::tempdir().unwrap();
    let (map, disk) = (place.path().join("map"), DiskId::new());
    std::fs::File::create(&map).unwrap();
    drop(open(&map, disk, SIZE).unwrap());
    drop(open(&map, disk, SIZE).unwrap());
    let sound = std::fs::read(&map).unwrap();
    let refused = |bytes: &[u8], disk, size| {
        std::fs::write(&map, bytes).unwrap();
        let refused = open(&map, disk, size).map(drop);
        assert!(matches!(refused, Err(ReplicaError::NoPlace(_))), "{refused:?}");
        assert_eq!(std::fs::read(&map).unwrap()[..bytes.len()], *bytes, "it was written to");
    };
    for place in [0, 20, 40, 511] {
        let mut damaged = sound.clone();
        damaged[place] ^= 1;
        refused(&damaged, disk, SIZE);
    }
    refused(&sound, DiskId::new(), SIZE);
    refused(&sound, disk, SIZE * 2);
    std::fs::write(&map, vec![0; sound.len()]).unwrap();
    drop(open(&map, disk, SIZE).unwrap());
}

/// How a pivot ends whose map fails after this many writes, this often, and what the next process reads of it.
fn pivot_with_a_broken_map(after: u64, times: Option<u64>) -> (Result<bool, PivotError>, MapLoad) {
    let geometry = Geometry::new(DiskId::new(), SIZE).of_mirror();
    let (memory, chunks) = (MemDisk::new(geometry.map_bytes()), Chunks::new(geometry.chunks()));
    let error = FaultKind::Error { errno: libc::EIO };
    let operations = vec![OperationKind::Write, OperationKind::Flush];
    let rule = FaultRule { kind: error, operations, range: None, one_in: 1, after, times };
    let broken = FilterSpec::Fault(FaultSpec { seed: 1, rules: vec![rule] });
    let broken = layers::of(&broken).unwrap().filter(&Place::simple(SIZE)).unwrap();
    let size = geometry.map_bytes() as u64;
    let map = |filters| LegChain::new(chain(size, &memory, filters));
    let (mut of_disk, _) = Map::open(map(vec![broken]), geometry, &chunks);
    let copied: Vec<_> = (0..geometry.chunks())
        .map(|chunk| Copied { chunk, ticket: chunks.ticket(chunk), began: 1 })
        .collect();
    of_disk.unmark(&chunks, &copied, 1);
    let pivoted = of_disk.pivot(&chunks);
    if pivoted == Ok(true) {
        // A mark that comes too late changes nothing, whether the map can be written or not.
        assert!(of_disk.mark(&chunks, &[geometry.all()], 2));
        of_disk.unmark(&chunks, &copied, 3);
    }
    drop(of_disk);
    (pivoted, Map::open(map(vec![]), geometry, &Chunks::new(geometry.chunks())).1)
}

#[test]
fn a_pivot_is_on_record_or_is_not_whenever_the_map_fails() {
    let (mut pivoted, mut not, mut unknown) = (0, 0, 0);
    for times in [Some(1), Some(2), Some(3), None] {
        for after in 0..16 {
            let (outcome, read) = pivot_with_a_broken_map(after, times);
            let case = format!("{times:?} after {after}: {outcome:?}, {read:?}");
            match outcome {
                Ok(true) => {
                    assert_eq!(read, MapLoad::Pivoted, "{case}");
                    pivoted += 1;
                }
                Err(PivotError::NotRecorded(_)) => {
                    assert!(read != MapLoad::Pivoted && read.tells_the_place(), "{case}");
                    not += 1;
                }
                Err(PivotError::Unknown(_)) => unknown += 1,
                Ok(false) => panic!("{case}"),
            }
        }
    }
    assert!(pivoted > 0 && not > 0 && unknown > 0, "{pivoted}, {not}, {unknown}");
}

/// A mirror of a disk of this size, whose copy has these faults.
fn pivot(size: u64, broken: bool) -> (Pivot, Vec<Chain>) {
    let place = tempfile::tempdir().unwrap();
    let map = place.path().join("map");
    std::fs::File::create(&map).unwrap();
    let (source, copy) = (MemDisk::new(size as usize), MemDisk::new(size as usize));
    let error = FaultKind::Error { errno: libc::EIO };
    let errors = if broken { faults(&[error], &[OperationKind::Discard], 1) } else { vec![] };
    let errors = errors.iter().map(|spec| layers::of(spec).unwrap()).collect();
    let leg = Leg::new(Stack::new(errors, DiskStorage::Mem(copy.clone()), size), vec![]);
    let opened = open_with(&Handle::Path(map), DiskId::new(), size, leg).unwrap();
    let own =
        vec![chain(size, &source, vec![opened.replicate.filter(&Place::simple(SIZE)).unwrap()])];
    let of_copy = vec![chain(size, &copy, vec![])];
    let source = chain(size, &source, vec![]);
    (opened.between(source, None, of_copy, &Arc::default()).unwrap(), own)
}

#[test]
fn a_pivot_that_cannot_be_done_changes_nothing() {
    let (far, _) = pivot(PIVOT_BYTES_MAX + (1 << 20), false);
    assert!(matches!(far.pivot(), Err(NotPivoted::TooMuch(..))), "nothing is copied yet");
    assert!(!far.mirror().status().pivoted);

    let (broken, _) = pivot(SIZE, true);
    broken.start().unwrap();
    match broken.pivot() {
        Err(NotPivoted::Copy(why)) => assert!(why.contains("cannot be written"), "{why}"),
        other => panic!("{:?}", other.map(|_| "pivoted")),
    }
    let status = broken.mirror().status();
    assert!(!status.pivoted && status.dirty_bytes > 0, "{status:?}");
}

#[test]
fn a_pivot_copies_the_rest_first_and_is_done_once() {
    let (pivot, _) = pivot(SIZE, false);
    pivot.start().unwrap();
    assert_eq!(pivot.pivot().unwrap().map(|pivoted| pivoted.chains.len()), Some(1));
    let status = pivot.mirror().status();
    assert!(status.pivoted && status.dirty_bytes == 0, "{status:?}");
    assert!(pivot.pivot().unwrap().is_none(), "once");
    pivot.end();
}

/// Copies nothing.
const PAUSED: CopyPace = CopyPace { bytes_per_second: None, paused: true };

/// Longer than a copy of [`SIZE`] in memory takes.
const LONG: Duration = Duration::from_millis(300);

fn wait_until(what: &str, is: impl Fn() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(30);
    while !is() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Changes a sector of the disk.
fn change(guest: &mut Chain, offset: u64) {
    let request = guest.begin().unwrap();
    guest.submit(request, Operation::Discard, offset, 4096, 0);
    let give_up = Instant::now() + Duration::from_secs(30);
    loop {
        guest.poll();
        if guest.next_done().is_some() {
            return;
        }
        assert!(Instant::now() < give_up, "the guest waits for a copy that is paused");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_paused_copy_gets_nothing_and_what_the_guest_changes_is_copied_when_it_goes_on() {
    let (pivot, mut own) = pivot(SIZE, false);
    let status = || pivot.mirror().status();
    pivot.set_pace(PAUSED);
    pivot.start().unwrap();
    std::thread::sleep(LONG);
    assert_eq!((status().dirty_bytes, status().pace), (SIZE, Some(PAUSED)));
    assert!(matches!(pivot.pivot(), Err(NotPivoted::Paused)), "the guest would wait for it");
    pivot.set_pace(CopyPace::default());
    wait_until("it does not go on", || status().dirty_bytes == 0);

    pivot.set_pace(PAUSED);
    change(&mut own[0], 3 << 20);
    std::thread::sleep(LONG);
    assert!(status().dirty_bytes > 0, "it is copied while it is paused");
    pivot.set_pace(CopyPace::default());
    wait_until("it does not go on", || status().dirty_bytes == 0);
    assert!(pivot.pivot().unwrap().is_some());
    pivot.end();
}

#[test]
fn a_copy_keeps_to_its_rate_until_that_changes_and_the_guest_that_waits_for_it_has_none() {
    const RATE: u64 = 1 << 20;
    let rate = CopyPace { bytes_per_second: Some(RATE), paused: false };
    for pivots in [false, true] {
        let (pivot, _own) = pivot(SIZE, false);
        let status = || pivot.mirror().status();
        pivot.set_pace(rate);
        let begun = Instant::now();
        pivot.start().unwrap();
        for _ in 0..3 {
            std::thread::sleep(LONG);
            let copied = status().copied_bytes;
            // What is taken ahead of the rate is one piece.
            let most = (begun.elapsed().as_secs_f64() * RATE as f64) as u64 + (512 << 10);
            assert!(copied > 0 && copied <= most, "{copied} of {most}");
            assert!(status().dirty_bytes > 0);
        }
        // Seconds at that rate are left.
        match pivots {
            true => assert!(pivot.pivot().unwrap().is_some()),
            false => {
                pivot.set_pace(CopyPace::default());
                wait_until("it keeps the former rate", || status().dirty_bytes == 0);
            }
        }
        assert!(begun.elapsed().as_secs_f64() < SIZE as f64 / RATE as f64, "it took all its time");
        pivot.end();
    }
}

/// A guest that changes a little, here and there, does not keep a slow copy from its end, nor does the copy go on without a rate.
#[test]
fn what_changes_after_the_first_pass_of_a_copy_goes_ahead_of_its_rate_up_to_a_limit() {
    // A chunk takes two minutes.
    let rate = CopyPace { bytes_per_second: Some(8 << 10), paused: false };
    let (pivot, mut own) = pivot(SIZE, false);
    let status = || pivot.mirror().status();
    pivot.start().unwrap();
    wait_until("it is not copied", || status().dirty_bytes == 0);
    pivot.set_pace(rate);
    let is_copied = || {
        let give_up = Instant::now() + Duration::from_secs(5);
        while status().dirty_bytes > 0 && Instant::now() < give_up {
            std::thread::sleep(Duration::from_millis(1));
        }
        status().dirty_bytes == 0
    };
    let (most, mut ahead) = (PIVOT_BYTES_MAX >> 20, 0);
    loop {
        change(&mut own[0], 3 << 20);
        if ahead > most || !is_copied() {
            break;
        }
        ahead += 1;
    }
    // One may go before the rate is seen.
    assert!((most..=most + 1).contains(&ahead), "{ahead} MiB went ahead of the rate");
    std::thread::sleep(LONG);
    assert!(status().dirty_bytes > 0, "it has no rate any more");
    pivot.set_pace(CopyPace::default());
    wait_until("it keeps the former rate", || status().dirty_bytes == 0);
    // Nor does it go on while it is paused.
    pivot.set_pace(CopyPace { paused: true, ..rate });
    change(&mut own[0], 3 << 20);
    std::thread::sleep(LONG);
    assert!(status().dirty_bytes > 0, "it is copied while it is paused");
    pivot.end();
}

/// A copy that is paused while it is under way makes durable what it has, and goes on with the rest.
#[test]
fn a_copy_that_is_paused_half_way_goes_on_where_it_was() {
    let (pivot, _own) = pivot(SIZE, false);
    let status = || pivot.mirror().status();
    pivot.set_pace(CopyPace { bytes_per_second: Some(16 << 20), paused: false });
    pivot.start().unwrap();
    wait_until("nothing is copied", || status().copied_bytes >= 2 << 20);
    pivot.set_pace(PAUSED);
    wait_until("what is copied still lacks", || status().dirty_bytes < SIZE);
    let (copied, dirty) = (status().copied_bytes, status().dirty_bytes);
    assert!(dirty > 0, "it is copied to its end");
    std::thread::sleep(LONG);
    assert_eq!((status().copied_bytes, status().dirty_bytes), (copied, dirty));
    pivot.set_pace(CopyPace::default());
    wait_until("it does not go on", || status().dirty_bytes == 0);
    // The chunk that was interrupted is copied again, and no other.
    assert!(status().copied_bytes <= SIZE + (1 << 20), "{}", status().copied_bytes);
    pivot.end();
}
