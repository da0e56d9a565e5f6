//! Errors of replicas and maps in files, and configurations that are refused before anything is served.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmseal_api::filter::{BackendSpec, Direct, Handle, ReplicaStatus, ReplicateSpec, StackSpec};
use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::{Disk, DiskStorage};
use vmseal_iofilter::handle::Handles;
use vmseal_iofilter::layers::leg::LegChain;
use vmseal_iofilter::layers::replicate::chunks::Span;
use vmseal_iofilter::layers::replicate::copier::{Batch, Copier, CopyError};
use vmseal_iofilter::layers::replicate::format::{BLOCK, Geometry, Image};
use vmseal_iofilter::layers::replicate::open::{OpenedReplica, ReplicaError};
use vmseal_iofilter::layers::replicate::threads::Replicating;
use vmseal_iofilter::layers::replicate::{KIND, Replicate};
use vmseal_iofilter::process::{StartError, replica};
use vmseal_iofilter::stack::chain::{Chain, Filter, Io, Limits};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation, RequestId};
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_iofilter::storage::mem::MemDisk;

use crate::platter::{Fault, Platter};
use crate::waiting;

const SIZE: u64 = (8 << 20) + 4096;
const OFFSET: u64 = 8192;
const TIMEOUT: Duration = Duration::from_secs(30);

fn disk_id() -> DiskId {
    "01890a5d-ac96-774b-bcce-b302099a8058".parse().unwrap()
}

/// Three files.
struct Files {
    directory: tempfile::TempDir,
    /// Whether the replica never gives room back.
    keeps_room: bool,
}

impl Files {
    fn new() -> Self {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let files = Self { directory, keeps_room: false };
        files.make("image", SIZE);
        files.make("replica", OFFSET + SIZE);
        files.make("map", 0);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn make(&self, name: &str, length: u64) {
        File::create(self.path(name)).unwrap().set_len(length).unwrap();
    }

    fn file(&self, name: &str) -> File {
        File::options().read(true).write(true).open(self.path(name)).unwrap()
    }

    fn image(&self) -> DiskStorage {
        let image = OwnedFd::from(self.file("image"));
        DiskStorage::File(FileDisk::open(image, 0, SIZE, Direct::Off, false).unwrap())
    }

    fn open_named(&self, replica: &str, map: &str) -> Result<OpenedReplica, StartError> {
        let handle = |name| Handle::Path(self.path(name));
        self.open_at(handle(replica), handle(map), &mut Handles::default())
    }

    /// As an agent has them opened, which keeps their locks.
    fn open_passed(&self) -> Result<OpenedReplica, StartError> {
        let passed = ["replica", "map"].map(|name| self.file(name).into()).into();
        self.open_at(Handle::Fd(0), Handle::Fd(1), &mut Handles::passed(passed))
    }

    fn open_at(
        &self,
        file: Handle,
        map: Handle,
        handles: &mut Handles,
    ) -> Result<OpenedReplica, StartError> {
        let (offset, direct) = (OFFSET, Direct::Auto);
        let (keeps_room, channel) = (self.keeps_room, None);
        let backend = BackendSpec::File { file, offset, direct, keeps_room, channel };
        let to = StackSpec { chain: vec![], backend };
        let spec = ReplicateSpec { to, map, bytes_per_second: u64::MAX };
        replica::open(disk_id(), SIZE, &spec, &self.image(), handles)
    }

    /// The disk with its replica, and the copier.
    fn open(&self) -> (Disk, Replicate, Copier) {
        let opened = self.open_named("replica", "map").unwrap();
        let replicate = opened.replicate.clone();
        let layers: Vec<Arc<dyn Layer>> = vec![Arc::new(replicate.clone())];
        let disk = Disk::new(SIZE, false, None, self.image(), 1);
        let disk = disk.with_layers(layers, Vec::new());
        let copier = opened.copier(disk.below(KIND).unwrap(), disk.file().cloned());
        (disk, replicate, copier.unwrap())
    }

    fn is_equal(&self) -> bool {
        let read = |name: &str| std::fs::read(self.path(name)).unwrap();
        read("image") == read("replica")[OFFSET as usize..]
    }
}

fn submit(chain: &mut Chain, at: u64, bytes: &mut [u8]) {
    let id = chain.begin().unwrap();
    // SAFETY: every test drains the chain before its buffers go.
    chain.data_mut(id).push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    chain.submit(id, Operation::Write, at, 0, 0);
}

/// Writes, while another thread marks.
fn write(chain: &mut Chain, at: u64, fill: u8, length: usize, mut mark: impl FnMut()) {
    let mut bytes = vec![fill; length];
    submit(chain, at, &mut bytes);
    let until = Instant::now() + TIMEOUT;
    loop {
        chain.poll();
        if let Some(done) = chain.next_done() {
            return done.result.unwrap();
        }
        assert!(Instant::now() < until, "the write waits for ever");
        mark();
        waiting::sleep([&mut *chain]);
    }
}

/// Waits for the threads.
fn becomes_equal(replicate: &Replicate) {
    let until = Instant::now() + TIMEOUT;
    while replicate.status().dirty_bytes > 0 {
        assert!(Instant::now() < until, "{:?}", replicate.status());
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn copy_all(replicate: &Replicate, copier: &mut Copier) {
    for _ in 0..1000 {
        if replicate.status().dirty_bytes == 0 {
            return;
        }
        copier.batch().unwrap();
    }
    panic!("it is copied and stays marked: {:?}", replicate.status());
}

#[test]
fn files_that_cannot_be_a_replica_are_refused_with_what_to_do() {
    let files = Files::new();
    let refused = |replica: &str, map: &str| match files.open_named(replica, map) {
        Ok(_) => panic!("{replica} and {map} are taken"),
        Err(error) => error.to_string(),
    };
    for length in [0, OFFSET + SIZE - 4096, OFFSET + SIZE + 4096] {
        files.make("other", length);
        let said = refused("other", "map");
        assert!(said.contains(&format!("has {length} bytes where the disk has")), "{said}");
    }
    files.make("image2", OFFSET + SIZE);
    std::fs::hard_link(files.path("replica"), files.path("link")).unwrap();
    assert!(refused("replica", "link").contains("three files"));
    assert!(refused("replica", "image").contains("three files"));
    assert!(refused("replica", "none").contains("the map of its replica: cannot open"));
    assert!(refused("none", "map").contains("its replica: cannot open"));
}

#[test]
fn the_threads_copy_what_is_written_keep_holes_and_leave_when_told() {
    let files = Files::new();
    let (disk, replicate, copier) = files.open();
    let mut chain = disk.chain().unwrap();
    let running = Replicating::start(&replicate, copier).unwrap();
    let equal = || becomes_equal(&replicate);
    equal();
    assert_eq!(replicate.status().lag_milliseconds, Some(0));
    for (at, fill) in [(0, 1), ((1 << 20) - 512, 2), (5 << 20, 3), (SIZE - 4096, 4)] {
        write(&mut chain, at, fill, 4096, || ());
        assert!(replicate.status().dirty_bytes > 0, "it is on the disk and not marked");
    }
    equal();
    drop(running);
    assert!(files.is_equal());
    let replica = files.path("replica").metadata().unwrap();
    assert!(replica.blocks() * 512 < 2 << 20, "holes became data: {} blocks", replica.blocks());
    // The next process has nothing to copy.
    drop((chain, disk, replicate));
    assert_eq!(files.open().1.status().dirty_bytes, 0);
}

/// Copies of preallocated disks on pools, and those at other hosts, get their room by that alone.
#[test]
fn a_copy_that_keeps_its_room_has_all_of_it_when_it_is_whole() {
    let files = Files { keeps_room: true, ..Files::new() };
    // One of its chunks has data, and zeroes beside it; all others are holes.
    files.file("image").write_all_at(&[7; 4096], 1 << 20).unwrap();
    let (_disk, replicate, mut copier) = files.open();
    copy_all(&replicate, &mut copier);
    assert!(files.is_equal());
    let taken = files.path("replica").metadata().unwrap().blocks() * 512;
    assert!(taken >= SIZE, "{taken} of {SIZE} bytes have room");
}

#[test]
fn several_queues_write_while_it_is_copied_and_all_of_it_arrives() {
    let files = Files::new();
    let (disk, replicate, copier) = files.open();
    let running = Replicating::start(&replicate, copier).unwrap();
    std::thread::scope(|scope| {
        for writer in 0..4u8 {
            let mut chain = disk.chain().unwrap();
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(writer.into());
                for round in 0..150u8 {
                    let length = random.usize(1..16) * 4096;
                    let at = random.u64(..(SIZE - length as u64) / 4096) * 4096;
                    write(&mut chain, at, round | 1, length, || ());
                    if round % 50 == 0 {
                        // After a pass of the copier: chunks become clean, and then change again.
                        std::thread::sleep(Duration::from_millis(400));
                    }
                }
            });
        }
    });
    becomes_equal(&replicate);
    drop(running);
    assert!(files.is_equal());
    let held = replicate.counters().into_iter().find(|(name, _)| *name == "held_requests");
    assert!(held.unwrap().1 > 0, "nothing ever became clean: the test proves little");
}

#[test]
fn a_replica_that_is_cut_is_not_made_longer_and_is_copied_whole_when_it_has_its_length_again() {
    let files = Files::new();
    let (disk, replicate, mut copier) = files.open();
    let mut chain = disk.chain().unwrap();
    let mark = || {
        let _ = replicate.mark_waiting();
    };
    write(&mut chain, 6 << 20, 7, 8192, mark);
    copy_all(&replicate, &mut copier);
    assert!(files.is_equal());
    files.file("replica").set_len(OFFSET + (1 << 20)).unwrap();
    write(&mut chain, 0, 8, 8192, mark);
    for _ in 0..3 {
        assert_eq!(copier.batch(), Err(CopyError::Cut));
    }
    assert_eq!(files.path("replica").metadata().unwrap().len(), OFFSET + (1 << 20));
    let status = replicate.status();
    assert_eq!((status.dirty_bytes, status.lag_milliseconds), (SIZE, None));
    assert!(matches!(
        files.open_passed(),
        Err(StartError::Replica { error: ReplicaError::Size { .. }, .. })
    ));
    files.file("replica").set_len(OFFSET + SIZE).unwrap();
    copy_all(&replicate, &mut copier);
    assert!(files.is_equal(), "the truncated part is not there again");
}

#[test]
fn an_image_that_is_cut_does_not_erase_its_replica() {
    let files = Files::new();
    files.file("image").write_all_at(&vec![7; SIZE as usize], 0).unwrap();
    let (disk, replicate, mut copier) = files.open();
    let mut chain = disk.chain().unwrap();
    copy_all(&replicate, &mut copier);
    assert!(files.is_equal());
    let whole = std::fs::read(files.path("replica")).unwrap();
    files.file("image").set_len(3 << 20).unwrap();
    let mut bytes = vec![8; 4096];
    submit(&mut chain, 6 << 20, &mut bytes);
    let until = Instant::now() + TIMEOUT;
    let done = loop {
        chain.poll();
        let _ = replicate.mark_waiting();
        if let Some(done) = chain.next_done() {
            break done;
        }
        assert!(Instant::now() < until, "the write waits for ever");
    };
    assert_eq!(done.result, Err(IoError::Truncated));
    assert!(replicate.status().dirty_bytes > 0, "the test asks for no copy");
    for _ in 0..3 {
        assert_eq!(copier.batch(), Err(CopyError::Source(IoError::Truncated)));
        // The next batch begins with the first chunk again.
        assert_eq!(copier.batch(), Ok(Batch::Pass));
    }
    assert!(std::fs::read(files.path("replica")).unwrap() == whole, "the last copy is erased");
    assert!(replicate.status().dirty_bytes > 0, "it is taken for copied");
}

#[test]
fn a_damaged_map_has_everything_copied_again_and_one_of_another_disk_too() {
    let files = Files::new();
    let sound = |files: &Files| {
        let (_disk, replicate, mut copier) = files.open();
        copy_all(&replicate, &mut copier);
    };
    let dirty = || files.open().1.status().dirty_bytes;
    sound(&files);
    assert_eq!(dirty(), 0);
    for at in [0, 10, 40, 511, 1024, 1535] {
        let map = files.file("map");
        let mut byte = [0];
        map.read_exact_at(&mut byte, at).unwrap();
        map.write_all_at(&[byte[0] ^ 1], at).unwrap();
        assert_eq!(dirty(), SIZE, "byte {at}");
        sound(&files);
    }
    let other = Image::new(Geometry::new(DiskId::new(), SIZE));
    files.file("map").write_all_at(other.bytes(), 0).unwrap();
    assert_eq!(dirty(), SIZE);
}

/// Fails changes from this offset on; lower ones succeed.
struct Breaks(Arc<AtomicU64>);

impl Filter for Breaks {
    fn limits(&self) -> Limits {
        Limits { children: 0 }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let broken = request.offset + request.length > self.0.load(Ordering::Relaxed);
        match broken && request.operation == Operation::Write {
            true => io.complete(id, Err(IoError::Device(libc::EIO))),
            false => io.pass(id),
        }
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        io.complete(id, io.request(id).result);
    }
}

/// A disk and a replica in memory, and a map that can fail.
struct Memory {
    map: MemDisk,
    geometry: Geometry,
    replicate: Replicate,
    chain: Chain,
    copier: Copier,
    works_below: Arc<AtomicU64>,
}

impl Memory {
    fn new() -> Self {
        let geometry = Geometry::new(disk_id(), SIZE);
        let map = MemDisk::new(geometry.map_bytes());
        let works_below = Arc::new(AtomicU64::new(u64::MAX));
        let breaks: Box<dyn Filter> = Box::new(Breaks(Arc::clone(&works_below)));
        let place =
            Chain::new(geometry.map_bytes() as u64, false, vec![breaks], map.queue()).unwrap();
        let (replicate, _) = Replicate::new(geometry, LegChain::new(place));
        let (source, replica) = (MemDisk::new(SIZE as usize), MemDisk::new(SIZE as usize));
        let chain = Chain::new(
            SIZE,
            false,
            vec![replicate.filter(&Place::simple(SIZE)).unwrap()],
            source.queue(),
        )
        .unwrap();
        let place = |disk: &MemDisk| Chain::new(SIZE, false, vec![], disk.queue()).unwrap();
        let leg = LegChain::new(place(&replica));
        let copier = Copier::new(&replicate, place(&source), None, leg);
        let mut memory = Self { map, geometry, replicate, chain, copier, works_below };
        copy_all(&memory.replicate, &mut memory.copier);
        memory
    }

    fn next_process(&self) -> ReplicaStatus {
        let map =
            Chain::new(self.geometry.map_bytes() as u64, false, vec![], self.map.queue()).unwrap();
        Replicate::new(self.geometry, LegChain::new(map)).0.status()
    }

    fn next_process_copies(&self) -> u64 {
        self.next_process().dirty_bytes
    }
}

#[test]
fn the_lag_is_that_of_the_oldest_change_and_a_restart_makes_it_no_younger() {
    let mut memory = Memory::new();
    let lag = |memory: &Memory| memory.replicate.status().lag_milliseconds.unwrap();
    let pause = || std::thread::sleep(Duration::from_millis(60));
    pause();
    assert_eq!((lag(&memory), memory.next_process().lag_milliseconds), (0, Some(0)));
    let begun = Instant::now();
    for at in [0, 2 << 20] {
        let replicate = memory.replicate.clone();
        write(&mut memory.chain, at, 1, 4096, || {
            let _ = replicate.mark_waiting();
        });
        pause();
    }
    let (now, next) = (lag(&memory), memory.next_process().lag_milliseconds.unwrap());
    // Not since the last copy, which was before the first pause. Times are cut to milliseconds.
    let most = begun.elapsed().as_millis() as u64 + 2;
    assert!(now >= 118 && now <= most, "{now} ms of {most}");
    assert!(next + 2 >= now, "{now} ms, then {next} ms");
    copy_all(&memory.replicate, &mut memory.copier);
    assert_eq!(lag(&memory), 0);
    // There is no value for a disk that was never copied.
    let empty = Chain::new(memory.geometry.map_bytes() as u64, false, vec![], {
        MemDisk::new(memory.geometry.map_bytes()).queue()
    })
    .unwrap();
    let fresh = Replicate::new(memory.geometry, LegChain::new(empty)).0;
    assert_eq!(fresh.status().lag_milliseconds, None);
}

#[test]
fn while_the_map_cannot_be_written_at_all_first_changes_wait_and_others_do_not() {
    let mut memory = Memory::new();
    let mark = || {
        let _ = memory.replicate.mark_waiting();
    };
    write(&mut memory.chain, 0, 1, 4096, mark);
    memory.works_below.store(0, Ordering::Relaxed);
    write(&mut memory.chain, 8192, 2, 4096, || panic!("a marked chunk waits"));
    let mut bytes = vec![3; 4096];
    submit(&mut memory.chain, 2 << 20, &mut bytes);
    for _ in 0..5 {
        memory.chain.poll();
        assert!(!memory.replicate.mark_waiting());
        assert!(memory.chain.next_done().is_none(), "on the disk, and not recorded");
        assert_eq!(memory.chain.deadline(), None, "it is tried again by time");
    }
    let last_error = memory.replicate.status().last_error.unwrap();
    assert!(
        last_error.contains("map") && last_error.contains("waits until it can"),
        "{last_error}"
    );
    assert_eq!(memory.next_process_copies(), 1 << 20, "nothing else is on record");
    memory.works_below.store(u64::MAX, Ordering::Relaxed);
    assert!(memory.replicate.mark_waiting());
    memory.chain.poll();
    assert_eq!(memory.chain.next_done().unwrap().result, Ok(()));
    assert_eq!(memory.replicate.status().last_error, None);
    assert_eq!(memory.next_process_copies(), 2 << 20);
}

#[test]
fn a_map_that_is_partly_broken_is_wiped_so_that_the_guest_goes_on_and_nothing_is_believed() {
    let mut memory = Memory::new();
    memory.works_below.store(512, Ordering::Relaxed);
    let mark = || {
        let _ = memory.replicate.mark_waiting();
    };
    write(&mut memory.chain, 2 << 20, 3, 4096, mark);
    let last_error = memory.replicate.status().last_error.unwrap();
    assert!(last_error.contains("the disk goes on"), "{last_error}");
    copy_all(&memory.replicate, &mut memory.copier);
    assert_eq!(memory.map.bytes()[..512], [0; 512]);
    memory.works_below.store(u64::MAX, Ordering::Relaxed);
    write(&mut memory.chain, 0, 3, 4096, || {
        let _ = memory.replicate.mark_waiting();
    });
    assert_eq!(memory.replicate.status().last_error, None);
    assert_eq!(memory.next_process_copies(), 1 << 20, "it is kept again");
}

/// What a process has written to a map when it is killed before its flush.
#[derive(Clone, Copy, Debug)]
enum Left {
    /// The mark of the third chunk.
    Mark,
    /// Zeroes for the first block.
    Wiped,
}

/// A map that durably calls every chunk clean, and shows something else to readers.
fn unflushed(geometry: Geometry, left: Left, seed: u64) -> Platter {
    let random = fastrand::Rng::with_seed(seed);
    let map = Platter::new(geometry.map_bytes(), BLOCK, Fault::Nothing, random);
    let chain = Chain::new(geometry.map_bytes() as u64, false, vec![], map.queue()).unwrap();
    let mut file = LegChain::new(chain);
    let put = |file: &mut LegChain, mut bytes: Vec<u8>| {
        // SAFETY: the write is over when the call returns.
        file.write(0, unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) }).unwrap();
    };
    let mut image = Image::new(geometry);
    image.set(geometry.all(), false);
    image.seal(2);
    put(&mut file, image.bytes().to_vec());
    file.flush().unwrap();
    match left {
        Left::Mark => {
            image.set(Span { first: 2, last: 2 }, true);
            image.seal(2);
            put(&mut file, image.bytes().to_vec());
        }
        Left::Wiped => put(&mut file, vec![0; BLOCK]),
    }
    map
}

/// The previous process was killed between a write of the map and its flush, and then the power fails: the guest's
/// changes in between are recorded nevertheless.
#[test]
fn what_a_killed_process_left_in_the_map_is_durable_before_anything_changes() {
    let geometry = Geometry::new(disk_id(), SIZE);
    for left in [Left::Mark, Left::Wiped] {
        // The seed decides how much of an unflushed write survives.
        for seed in 0..20 {
            // With a map that completes writes at once, and one that does so later.
            changes_after_a_kill(geometry, left, seed, u64::MAX);
            changes_after_a_kill(geometry, left, seed, 0);
        }
    }
}

fn changes_after_a_kill(geometry: Geometry, left: Left, seed: u64, works_below: u64) {
    let map = unflushed(geometry, left, seed);
    let works = Arc::new(AtomicU64::new(works_below));
    let breaks: Box<dyn Filter> = Box::new(Breaks(Arc::clone(&works)));
    let file = Chain::new(geometry.map_bytes() as u64, false, vec![breaks], map.queue()).unwrap();
    let (replicate, _) = Replicate::new(geometry, LegChain::new(file));
    assert!(replicate.status().dirty_bytes > 0, "{left:?}: it is not copied");
    let disk = MemDisk::new(SIZE as usize);
    let filters = vec![replicate.filter(&Place::simple(SIZE)).unwrap()];
    let mut chain = Chain::new(SIZE, false, filters, disk.queue()).unwrap();
    let mut bytes = vec![3; 4096];
    submit(&mut chain, 2 << 20, &mut bytes);
    chain.poll();
    if works_below == 0 {
        for _ in 0..5 {
            assert!(!replicate.mark_waiting());
            chain.poll();
            assert!(chain.next_done().is_none(), "{left:?}: on the disk, and not recorded");
            assert_eq!(chain.deadline(), None, "it is tried again by time");
        }
        let last_error = replicate.status().last_error.unwrap();
        assert!(last_error.contains("what the guest changes waits"), "{last_error}");
        works.store(u64::MAX, Ordering::Relaxed);
        assert!(replicate.mark_waiting());
        chain.poll();
    }
    let done = chain.next_done().expect("what is on record does not wait");
    assert_eq!(done.result, Ok(()));
    map.cut();
    let known = Image::read(geometry, &map.bytes());
    let copied = known.map_or(true, |(image, _)| image.is_dirty(2));
    assert!(copied, "{left:?}, seed {seed}: the chunk has changed and counts as equal");
}

#[test]
fn a_chain_that_goes_with_changes_under_way_leaves_nothing_that_is_never_equal() {
    let mut memory = Memory::new();
    let mut bytes = vec![3; 4096];
    submit(&mut memory.chain, 0, &mut bytes);
    memory.chain.poll();
    memory.chain = Chain::new(SIZE, false, Vec::new(), MemDisk::new(0).queue()).unwrap();
    assert!(memory.replicate.mark_waiting());
    copy_all(&memory.replicate, &mut memory.copier);
}
