//! Whatever guests do, a disk behaves as an array of bytes: random requests of odd sizes, many at
//! once, on several queues, over every backend, encrypted and not, reopened in between.

mod ask;
mod faults;
mod possible;
mod short;
mod store;
mod torn;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use vmseal_api::filter::{Direct, Holes};
use vmseal_iofilter::disk::{Disk, DiskStorage};
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::request::{IoError, Operation};
use vmseal_iofilter::storage::file::FileDisk;
use vmseal_iofilter::storage::mem::MemDisk;

use crate::model::ask::{Ask, What, asks, drain, submit};
use crate::model::store::{OFFSET, OFFSET_QCOW2, PLACES, Place, Store};
use crate::replicated;
use crate::seed;

const SIZE: u64 = 1 << 20;
const BLOCK: u64 = 512;

/// Submits requests that do not touch the same 512-byte blocks together (as guests do), and waits
/// for a batch before one that would.
fn run(chain: &mut Chain, asks: &[Ask], model: &mut [u8]) {
    let mut rest = asks;
    while !rest.is_empty() {
        let (batch, later) = rest.split_at(ask::apart(rest));
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

/// After a discard each block is as before or zeroes; the model takes what is found.
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
    let mut model = content(&store, holes);
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
        assert_image(&store, holes, &model);
    }
}

/// The content of a disk before its first request.
fn content(store: &Store, holes: Option<Holes>) -> Vec<u8> {
    let mut model = vec![0; SIZE as usize];
    if let Some(images) = &store.images {
        model.copy_from_slice(&images.content[OFFSET_QCOW2 as usize..]);
        if holes.is_some() {
            // The stored bytes decrypt to something.
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
    model
}

/// QEMU reads the same, and the bytes outside the disk are unchanged.
fn assert_image(store: &Store, holes: Option<Holes>, model: &[u8]) {
    if let Some(images) = &store.images {
        let raw = images.checked();
        assert!(holes.is_some() || raw[OFFSET_QCOW2 as usize..] == *model);
        assert!(raw[..OFFSET_QCOW2 as usize] == images.content[..OFFSET_QCOW2 as usize]);
    }
}

/// Changed parts are in the replica, and the others are still the zeroes that it began with.
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
        cases: seed::rounds(256),
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
fn requests_beyond_the_disk_or_not_in_blocks_are_refused() {
    let disk = Disk::new(SIZE, true, None, DiskStorage::Mem(MemDisk::new(SIZE as usize)), 1);
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
        ask::finish(&mut chain, |done| {
            assert_eq!(done.result, Err(IoError::Truncated), "{place:?}");
        });
        let file = File::options().read(true).write(true).open(store.file.path()).unwrap();
        let refused = FileDisk::open(OwnedFd::from(file), OFFSET, SIZE, Direct::Auto, false);
        assert!(refused.unwrap_err().to_string().contains("truncated"));
    }
}

/// The outcome of a request alone.
fn outcome(chain: &mut Chain, what: What, buffer: &mut [u8]) -> Result<(), IoError> {
    let ask = Ask { what, start: 64, blocks: 32, fill: 0, cut: 16384 };
    submit(chain, &ask, buffer, 0);
    let mut outcome = None;
    ask::finish(chain, |done| outcome = Some(done.result));
    outcome.expect("it is answered")
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
        // The last check of its length must be an old one.
        thread::sleep(Duration::from_millis(2));
        for what in changes {
            let cut = outcome(&mut chain, what, &mut buffer);
            assert_eq!(cut, Err(IoError::Truncated), "{place:?} {what:?}");
        }
        assert_eq!(store.file.as_file().metadata().unwrap().len(), short, "{place:?}");
    }
}

/// However soon after the truncation: writes may be lost with it, but no flush says that they are not, and from then
/// on no read returns bytes that might be zeroes in place of data.
#[test]
fn no_flush_is_good_after_an_image_was_cut_and_its_end_does_not_come_back() {
    for place in [Place::Memory, Place::Storage] {
        for last in [false, true] {
            let store = Store::new(place, Some(Holes::Zero), false, false, false);
            let mut chain = store.open().chain().unwrap();
            let mut buffer = vec![7; 16384];
            assert_eq!(outcome(&mut chain, What::Write, &mut buffer), Ok(()), "{place:?}");
            store.file.as_file().set_len(OFFSET + 8192).unwrap();
            let start = if last { SIZE / BLOCK - 32 } else { 96 };
            let ask = Ask { what: What::Write, start, blocks: 32, fill: 0, cut: 16384 };
            submit(&mut chain, &ask, &mut buffer, 0);
            let mut written = None;
            ask::finish(&mut chain, |done| written = Some(done.result));
            assert!(
                !last || written == Some(Err(IoError::Truncated)),
                "{place:?}: the end is back"
            );
            for what in [What::Flush, What::Flush, What::Write, What::Read] {
                let cut = outcome(&mut chain, what, &mut buffer);
                assert_eq!(cut, Err(IoError::Truncated), "{place:?} {what:?}");
            }
            let length = store.file.as_file().metadata().unwrap().len();
            assert!(length < OFFSET + SIZE, "{place:?}");
        }
    }
}
