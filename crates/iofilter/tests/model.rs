//! Whatever guests ask, a disk behaves as an array of bytes: random requests of odd sizes, many at
//! once, on several queues, over every backend, encrypted and not, reopened in between.

#![allow(clippy::unwrap_used)] // a test

mod replicated;
mod seed;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use vmseal_api::filter::{Budget, CacheSpec, DelaySpec, Direct, FilterSpec, Holes, LimitSpec};
use vmseal_api::transfer::ImageFormat;
use vmseal_iofilter::backend::file::FileDisk;
use vmseal_iofilter::backend::mem::MemDisk;
use vmseal_iofilter::backend::qcow2::Qcow2Disk;
use vmseal_iofilter::chain::Chain;
use vmseal_iofilter::disk::{Disk, Encryption, Rest};
use vmseal_iofilter::layer::{self, Layer};
use vmseal_iofilter::memory::Segment;
use vmseal_iofilter::request::{IoError, Operation};
use vmseal_secret::SecretBytes;

use crate::replicated::Replicated;

const SIZE: u64 = 1 << 20;
const BLOCK: u64 = 512;
const OFFSET: u64 = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Mem,
    /// tmpfs: synchronous calls.
    Memory,
    /// The build directory's file system: io_uring, direct where it can be.
    Storage,
    /// A memfd.
    Gone,
    /// qcow2 as it is usual.
    Qcow2,
    /// qcow2 whose tables are many and grow.
    SmallClusters,
    /// qcow2 that cannot mark zeroes.
    Version2,
    /// qcow2 on qcow2 on a raw file, all of them with data.
    Overlay,
    /// A qcow2 image with compressed clusters.
    Compressed,
}

const PLACES: [Place; 9] = [
    Place::Mem,
    Place::Memory,
    Place::Storage,
    Place::Gone,
    Place::Qcow2,
    Place::SmallClusters,
    Place::Version2,
    Place::Overlay,
    Place::Compressed,
];

/// Where the disk begins in a qcow2 image: its last cluster is not whole.
const OFFSET_QCOW2: u64 = 4096;

impl Place {
    fn options(self) -> Option<&'static str> {
        match self {
            Self::Mem | Self::Memory | Self::Storage | Self::Gone => None,
            Self::Qcow2 | Self::Overlay | Self::Compressed => Some("cluster_size=64k"),
            Self::SmallClusters => Some("cluster_size=512"),
            Self::Version2 => Some("compat=0.10,cluster_size=4k"),
        }
    }
}

fn qemu_img(at: &Path, arguments: &[&str]) -> String {
    let ran = Command::new("qemu-img").args(arguments).current_dir(at).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    assert!(ran.status.success(), "{arguments:?}: {said}{}", String::from_utf8_lossy(&ran.stderr));
    said
}

/// An image and what it holds.
struct Images {
    directory: tempfile::TempDir,
    content: Vec<u8>,
}

impl Images {
    fn new(place: Place, options: &str) -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = directory.path();
        let all = OFFSET_QCOW2 + SIZE;
        let size = all.to_string();
        let mut content = vec![0; all as usize];
        match place {
            Place::Overlay => {
                content[100_000..700_000]
                    .iter_mut()
                    .enumerate()
                    .for_each(|(n, b)| *b = n as u8 | 1);
                // Shorter than what lies on it.
                std::fs::write(at.join("base"), &content[..800_000]).unwrap();
                let below = ["-f", "qcow2", "-o", "cluster_size=4k", "-b", "base", "-F", "raw"];
                qemu_img(at, &[&["create"], &below[..], &["middle", &size]].concat());
                let mut middle = content.clone();
                middle[600_000..900_000].fill(7);
                write_by_qemu(&at.join("middle"), &middle[600_064..899_072], 600_064);
                content[600_064..899_072].fill(7);
                let above = ["-f", "qcow2", "-o", options, "-b", "middle", "-F", "qcow2"];
                qemu_img(at, &[&["create"], &above[..], &["image", &size]].concat());
            }
            Place::Compressed => {
                content[100_000..700_000].fill(7);
                std::fs::write(at.join("base"), &content).unwrap();
                let convert = ["convert", "-c", "-f", "raw", "-O", "qcow2", "-o", options];
                qemu_img(at, &[&convert[..], &["base", "image"]].concat());
            }
            _ => {
                qemu_img(at, &["create", "-f", "qcow2", "-o", options, "image", &size]);
            }
        }
        Self { directory, content }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn open(&self, place: Place) -> Qcow2Disk {
        let open = |name, write| {
            OwnedFd::from(File::options().read(true).write(write).open(self.path(name)).unwrap())
        };
        let below = if place == Place::Overlay {
            let (middle, base) = (open("middle", false), open("base", false));
            vec![(middle, ImageFormat::Qcow2), (base, ImageFormat::Raw)]
        } else {
            Vec::new()
        };
        Qcow2Disk::open(open("image", true), below, OFFSET_QCOW2, SIZE, false).unwrap()
    }

    /// QEMU finds nothing to complain of, no leaks either; what it reads, all of it.
    fn checked(&self) -> Vec<u8> {
        qemu_img(self.directory.path(), &["check", "-f", "qcow2", "image"]);
        qemu_img(self.directory.path(), &["convert", "-f", "qcow2", "-O", "raw", "image", "raw"]);
        std::fs::read(self.path("raw")).unwrap()
    }
}

fn write_by_qemu(image: &Path, content: &[u8], at: usize) {
    let ask = format!("write -P {} {at} {}", content[0], content.len());
    let ran =
        Command::new("qemu-io").args(["-f", "qcow2", "-c", &ask]).arg(image).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
}

struct Store {
    place: Place,
    mem: MemDisk,
    gone: FileDisk,
    images: Option<Images>,
    file: tempfile::NamedTempFile,
    holes: Option<Holes>,
    /// Whether requests wait for a budget above encryption, and overtake each other below it.
    holds_back: bool,
    /// Whether what is read is kept, right below encryption.
    caches: bool,
    /// Whether it has a replica.
    replicates: bool,
}

impl Store {
    fn new(
        place: Place,
        holes: Option<Holes>,
        holds_back: bool,
        caches: bool,
        replicates: bool,
    ) -> Self {
        let directory =
            if place == Place::Storage { env!("CARGO_TARGET_TMPDIR") } else { "/dev/shm" };
        let file = tempfile::NamedTempFile::new_in(directory).unwrap();
        file.as_file().set_len(OFFSET + SIZE).unwrap();
        let images = place.options().map(|options| Images::new(place, options));
        let (mem, gone) = (MemDisk::new(SIZE as usize), FileDisk::in_memory(SIZE).unwrap());
        Self { place, mem, gone, images, file, holes, holds_back, caches, replicates }
    }

    fn open(&self) -> Disk {
        self.open_replicated().0
    }

    /// The disk, and its layer with a replica if it has one.
    fn open_replicated(&self) -> (Disk, Option<Replicated>) {
        let mut key: Vec<u8> = (0..64).collect();
        let key = SecretBytes::from_wiped(&mut key).unwrap();
        let encryption = self.holes.map(|holes| Encryption { key, holes });
        let rest = match (&self.images, self.place) {
            (Some(images), place) => Rest::Qcow2(images.open(place)),
            (None, Place::Mem) => Rest::Mem(self.mem.clone()),
            (None, Place::Gone) => Rest::File(self.gone.clone()),
            (None, _) => {
                let file = File::options().read(true).write(true).open(self.file.path()).unwrap();
                let file = OwnedFd::from(file);
                Rest::File(FileDisk::open(file, OFFSET, SIZE, Direct::Auto, false).unwrap())
            }
        };
        // As if 100 queues shared the budget: buffers run out, and requests have to wait for them.
        let disk = Disk::new(SIZE, false, encryption, rest, 100);
        let replicated = self.replicates.then(|| Replicated::new(SIZE));
        let mut below = if self.caches { vec![cache()] } else { Vec::new() };
        let layer = |replicated: &Replicated| Arc::new(replicated.clone()) as Arc<dyn Layer>;
        below.extend(replicated.iter().map(layer));
        if self.holds_back {
            below.push(jitter());
            return (disk.with_layers(vec![limit()], below), replicated);
        }
        (disk.with_layers(Vec::new(), below), replicated)
    }
}

/// Fast enough for a test, and short enough for many to wait.
fn limit() -> Arc<dyn Layer> {
    let requests = Some(Budget { per_second: 50_000, burst: 4 });
    layer::of(&FilterSpec::Limit(LimitSpec { requests, bytes: None })).unwrap()
}

/// Less than the disk: blocks have to go for others.
fn cache() -> Arc<dyn Layer> {
    layer::of(&FilterSpec::Cache(CacheSpec { bytes: 0 })).unwrap()
}

fn jitter() -> Arc<dyn Layer> {
    let delay = DelaySpec {
        operations: Vec::new(),
        microseconds: 0,
        jitter_microseconds: 50,
        reorders: false,
        seed: 0,
    };
    layer::of(&FilterSpec::Delay(delay)).unwrap()
}

/// One request: where, how long (in 512-byte blocks), what, and how its memory is cut.
#[derive(Clone, Debug)]
struct Ask {
    what: What,
    start: u64,
    blocks: u64,
    fill: u8,
    cut: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum What {
    Read,
    Write,
    Flush,
    Discard,
    Zero,
    Unmap,
}

fn asks() -> impl Strategy<Value = Vec<Ask>> {
    let what = prop_oneof![
        4 => Just(What::Read), 6 => Just(What::Write), 1 => Just(What::Flush),
        1 => Just(What::Discard), 1 => Just(What::Zero), 1 => Just(What::Unmap),
    ];
    let blocks = prop_oneof![4 => 1u64..20, 1 => 1u64..600];
    let ask = (what, 0..SIZE / BLOCK, blocks, any::<u8>(), 1usize..9000).prop_map(
        |(what, start, blocks, fill, cut)| Ask {
            what,
            start,
            blocks: blocks.min(SIZE / BLOCK - start),
            fill,
            // At most 1000 segments, as a request may have 1024.
            cut: cut.max((blocks as usize * 512).div_ceil(1000)),
        },
    );
    prop::collection::vec(ask, 1..60)
}

impl Ask {
    fn range(&self) -> std::ops::Range<usize> {
        (self.start * BLOCK) as usize..((self.start + self.blocks) * BLOCK) as usize
    }

    fn operation(&self) -> Operation {
        match self.what {
            What::Read => Operation::Read,
            What::Write => Operation::Write,
            What::Flush => Operation::Flush,
            What::Discard => Operation::Discard,
            What::Zero => Operation::WriteZeroes { unmap: false },
            What::Unmap => Operation::WriteZeroes { unmap: true },
        }
    }

    fn content(&self) -> Vec<u8> {
        self.range().map(|at| (at as u8).wrapping_mul(31) ^ self.fill).collect()
    }
}

/// Submits `buffer` as the request's memory, cut into segments of `cut` bytes.
fn submit(chain: &mut Chain, ask: &Ask, buffer: &mut [u8], tag: u64) {
    let id = chain.begin().expect("few enough are under way");
    if matches!(ask.what, What::Read | What::Write) {
        for part in buffer.chunks_mut(ask.cut) {
            // SAFETY: the buffers live until the chain has completed everything.
            chain.data_mut(id).push(unsafe { Segment::new(part.as_mut_ptr(), part.len()) });
        }
    }
    chain.submit(id, ask.operation(), ask.start * BLOCK, ask.blocks * BLOCK, tag);
}

fn drain(chain: &mut Chain) {
    while chain.in_flight() > 0 {
        chain.poll();
        while let Some(done) = chain.next_done() {
            done.result.unwrap();
        }
        thread::yield_now();
    }
}

/// Submits requests that do not touch the same 512-byte blocks together (as guests do), and waits
/// for a batch before one that would.
fn run(chain: &mut Chain, asks: &[Ask], model: &mut [u8]) {
    let mut rest = asks;
    while !rest.is_empty() {
        let mut count = 0;
        while count < rest.len() {
            let next = rest[count].range();
            let apart =
                |other: &Ask| other.range().end <= next.start || next.end <= other.range().start;
            if !rest[..count].iter().all(apart) {
                break;
            }
            count += 1;
        }
        let (batch, later) = rest.split_at(count.max(1));
        let mut buffers: Vec<Vec<u8>> = batch.iter().map(Ask::content).collect();
        for (tag, (ask, buffer)) in batch.iter().zip(&mut buffers).enumerate() {
            submit(chain, ask, buffer, tag as u64);
        }
        drain(chain);
        for (ask, buffer) in batch.iter().zip(&buffers) {
            let range = ask.range();
            match ask.what {
                What::Read => assert!(buffer[..] == model[range.clone()], "read of {range:?}"),
                What::Write => {
                    assert!(*buffer == ask.content(), "a write changed the guest's memory");
                    model[range].copy_from_slice(buffer);
                }
                What::Zero | What::Unmap => model[range].fill(0),
                What::Flush => {}
                What::Discard => follow_discard(chain, ask, model),
            }
        }
        rest = later;
    }
}

/// After a discard each block is as before or zeroes; the model takes what it is.
fn follow_discard(chain: &mut Chain, ask: &Ask, model: &mut [u8]) {
    let mut now = vec![1; ask.range().len()];
    submit(chain, &Ask { what: What::Read, cut: 4096, ..ask.clone() }, &mut now, 0);
    drain(chain);
    for (old, new) in model[ask.range()].chunks_mut(512).zip(now.chunks(512)) {
        assert!(old == new || new.iter().all(|&byte| byte == 0), "discard made something else");
        old.copy_from_slice(new);
    }
}

fn check(
    place: Place,
    holes: Option<Holes>,
    (holds_back, caches, replicates): (bool, bool, bool),
    batches: &[Vec<Ask>],
) {
    let store = Store::new(place, holes, holds_back, caches, replicates);
    let mut model = vec![0; SIZE as usize];
    if let Some(images) = &store.images {
        model.copy_from_slice(&images.content[OFFSET_QCOW2 as usize..]);
        if holes.is_some() {
            // What lies there decrypts to something.
            let all = Ask { what: What::Read, start: 0, blocks: SIZE / BLOCK, fill: 0, cut: 9000 };
            let mut chain = store.open().chain().unwrap();
            submit(&mut chain, &all, &mut model, 0);
            drain(&mut chain);
        }
    }
    if holes == Some(Holes::Ciphertext) {
        let all = Ask { what: What::Zero, start: 0, blocks: SIZE / BLOCK, fill: 0, cut: 1 };
        let mut chain = store.open().chain().unwrap();
        submit(&mut chain, &all, &mut [], 0);
        drain(&mut chain);
        model.fill(0);
    }
    for asks in batches {
        let (disk, replicated) = store.open_replicated();
        let before = replicated.as_ref().map(|_| replicated::below(&disk));
        let mut chain = disk.chain().unwrap();
        run(&mut chain, asks, &mut model);
        let all = Ask { what: What::Read, start: 0, blocks: SIZE / BLOCK, fill: 0, cut: 9000 };
        run(&mut chain, &[all], &mut model);
        drop(chain);
        if let (Some(replicated), Some(before)) = (replicated, before) {
            replicated.copy(&disk);
            assert_replica(&replicated.bytes(), &before, &replicated::below(&disk));
        }
        drop(disk);
        if let Some(images) = &store.images {
            let raw = images.checked();
            assert!(holes.is_some() || raw[OFFSET_QCOW2 as usize..] == model[..]);
            assert!(raw[..OFFSET_QCOW2 as usize] == images.content[..OFFSET_QCOW2 as usize]);
        }
    }
}

/// What has changed is in the replica, and what has not is still the zeroes that it began with.
fn assert_replica(replica: &[u8], before: &[u8], now: &[u8]) {
    for (at, ((replica, before), now)) in
        replica.chunks(4096).zip(before.chunks(4096)).zip(now.chunks(4096)).enumerate()
    {
        let unasked = before == now && replica.iter().all(|&byte| byte == 0);
        assert!(replica == now || unasked, "sector {at} of the replica is not what was written");
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 256,
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(seed::seed()),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_disk_is_an_array_of_bytes(
        batches in prop::collection::vec(asks(), 1..4),
        place in prop::sample::select(&PLACES[..]),
        holes in prop_oneof![Just(None), Just(Some(Holes::Zero)), Just(Some(Holes::Ciphertext))],
        layers in any::<(bool, bool, bool)>(),
    ) {
        check(place, holes, layers, &batches);
    }
}

/// Several queues write their own 512-byte blocks of the same sectors at the same time, some by whole
/// sectors: nobody's block is lost.
#[test]
fn neighbours_in_one_sector_do_not_lose_each_other() {
    for place in PLACES {
        let store = Store::new(place, Some(Holes::Zero), false, true, false);
        let disk = store.open();
        thread::scope(|scope| {
            for writer in 0..4u64 {
                let disk = &disk;
                scope.spawn(move || write_own_blocks(disk, writer));
            }
        });
        let mut chain = disk.chain().unwrap();
        let mut all = vec![0; 64 * 4096];
        let ask = Ask { what: What::Read, start: 0, blocks: 64 * 8, fill: 0, cut: 4096 };
        submit(&mut chain, &ask, &mut all, 0);
        drain(&mut chain);
        for (block, bytes) in all.chunks(512).enumerate() {
            let expected = 50 + (block as u8 / 2) % 4;
            assert!(
                bytes.iter().all(|&byte| byte == expected),
                "{place:?}: block {block} was lost"
            );
        }
    }
}

/// Writer `n` owns the blocks 2n and 2n+1 of each sector; ends with 50 + n in all of them.
fn write_own_blocks(disk: &Disk, writer: u64) {
    let mut chain = disk.chain().unwrap();
    for round in 0..8u64 {
        let fill = if round == 7 { 50 + writer as u8 } else { round as u8 };
        let mut buffers = vec![vec![fill; 1024]; 64];
        for (sector, buffer) in buffers.iter_mut().enumerate() {
            let start = sector as u64 * 8 + writer * 2;
            let ask = Ask { what: What::Write, start, blocks: 2, fill, cut: 4096 };
            submit(&mut chain, &ask, buffer, 0);
        }
        drain(&mut chain);
    }
}

#[test]
fn what_is_not_on_the_disk_or_not_in_blocks_is_refused() {
    let disk = Disk::new(SIZE, true, None, Rest::Mem(MemDisk::new(SIZE as usize)), 1);
    let mut chain = disk.chain().unwrap();
    let cases = [
        (Operation::Discard, SIZE, 512, IoError::OutOfRange),
        (Operation::Discard, u64::MAX - 511, 512, IoError::OutOfRange),
        (Operation::WriteZeroes { unmap: true }, 0, SIZE + 512, IoError::OutOfRange),
        (Operation::WriteZeroes { unmap: true }, 1, 512, IoError::OutOfRange),
        (Operation::Discard, 0, 100, IoError::OutOfRange),
        (Operation::Discard, 0, 512, IoError::ReadOnly),
    ];
    for (operation, offset, length, refusal) in cases {
        let id = chain.begin().unwrap();
        chain.submit(id, operation, offset, length, 7);
        chain.poll();
        let done = chain.next_done().unwrap();
        assert_eq!((done.result, done.tag), (Err(refusal), 7), "{operation:?} {offset} {length}");
    }
}

#[test]
fn a_truncated_image_is_an_error_and_never_zeroes() {
    for place in [Place::Memory, Place::Storage] {
        let store = Store::new(place, Some(Holes::Zero), false, false, false);
        let disk = store.open();
        store.file.as_file().set_len(OFFSET + 8192).unwrap();
        let mut chain = disk.chain().unwrap();
        let mut buffer = vec![7; 16384];
        let ask = Ask { what: What::Read, start: 0, blocks: 32, fill: 0, cut: 16384 };
        submit(&mut chain, &ask, &mut buffer, 0);
        while chain.in_flight() > 0 {
            chain.poll();
            if let Some(done) = chain.next_done() {
                assert_eq!(done.result, Err(IoError::Truncated), "{place:?}");
            }
        }
        let file = File::options().read(true).write(true).open(store.file.path()).unwrap();
        let refused = FileDisk::open(OwnedFd::from(file), OFFSET, SIZE, Direct::Auto, false);
        assert!(refused.unwrap_err().to_string().contains("truncated"));
    }
}

/// The outcome of a request alone.
fn outcome(chain: &mut Chain, what: What, buffer: &mut [u8]) -> Result<(), IoError> {
    let ask = Ask { what, start: 64, blocks: 32, fill: 0, cut: 16384 };
    submit(chain, &ask, buffer, 0);
    loop {
        chain.poll();
        if let Some(done) = chain.next_done() {
            return done.result;
        }
    }
}

#[test]
fn an_image_cut_while_in_use_is_not_made_longer_by_what_the_guest_writes() {
    for place in [Place::Memory, Place::Storage] {
        let store = Store::new(place, Some(Holes::Zero), false, false, false);
        let mut chain = store.open().chain().unwrap();
        let mut buffer = vec![7; 16384];
        let changes = [What::Write, What::Discard, What::Zero, What::Unmap, What::Flush];
        for what in changes {
            assert_eq!(outcome(&mut chain, what, &mut buffer), Ok(()), "{place:?} {what:?}");
        }
        let short = OFFSET + 8192;
        store.file.as_file().set_len(short).unwrap();
        for what in changes {
            let cut = outcome(&mut chain, what, &mut buffer);
            assert_eq!(cut, Err(IoError::Truncated), "{place:?} {what:?}");
        }
        assert_eq!(store.file.as_file().metadata().unwrap().len(), short, "{place:?}");
    }
}
