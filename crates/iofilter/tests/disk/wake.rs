//! The wake contract: a chain that waits for another chain or thread has no deadline, and is woken by that one alone.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmseal_api::filter::Holes;
use vmseal_api::id::DiskId;
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers::leg::LegChain;
use vmseal_iofilter::layers::replicate::Replicate;
use vmseal_iofilter::layers::replicate::format::Geometry;
use vmseal_iofilter::stack::chain::{Chain, Io, Storage};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{Operation, RequestId};
use vmseal_iofilter::storage::mem::MemDisk;
use vmseal_secret::SecretBytes;

const SIZE: u64 = 4 << 20;

/// Storage that keeps all requests until it is opened. Its owner is the test, which polls then.
struct Gate {
    open: Arc<Mutex<bool>>,
    waiting: Vec<RequestId>,
}

impl Storage for Gate {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, _io: &mut Io<'_>) {
        self.waiting.push(id);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        if *self.open.lock().unwrap() {
            self.waiting.drain(..).for_each(|id| io.complete(id, Ok(())));
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn disk() -> Disk {
    let mut key: Vec<u8> = (0..64).collect();
    let key = SecretBytes::from_wiped(&mut key).unwrap();
    let encryption = Some(Encryption { key, holes: Holes::Zero });
    Disk::new(SIZE, false, encryption, DiskStorage::Mem(MemDisk::new(SIZE as usize)), 1)
}

fn write(chain: &mut Chain, offset: u64, bytes: &mut [u8]) {
    let id = chain.begin().unwrap();
    // SAFETY: every test drains the chain before its buffers go.
    chain.data_mut(id).push(unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) });
    chain.submit(id, Operation::Write, offset, 0, 0);
    chain.poll();
}

fn is_woken(chain: &Chain) -> bool {
    let mut fds = [PollFd::new(chain.wait_set().0, PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
}

/// The chain's thread goes to sleep, and only news wakes it.
fn sleeps(chain: &mut Chain) {
    assert!(chain.arm(), "there is something to do");
    assert!(chain.deadline().is_none(), "it tries again by time");
    assert!(!is_woken(chain), "nobody has news");
}

/// There is news: the thread wakes and makes progress.
fn wakes_and_is_done(chain: &mut Chain) {
    assert!(is_woken(chain), "there is news, and its thread sleeps");
    chain.disarm(true);
    assert!(!is_woken(chain));
    chain.poll();
    assert_eq!(chain.next_done().map(|done| done.result), Some(Ok(())));
}

/// The one chain has the lock that the other needs: a write of `first` bytes, then one of `then`.
fn one_waits_for_the_other(first: usize, then: usize) {
    let (disk, open) = (disk(), Arc::new(Mutex::new(false)));
    let gate = Gate { open: Arc::clone(&open), waiting: Vec::new() };
    let (mut holder, mut waiter) =
        (disk.chain_over(Box::new(gate)).unwrap(), disk.chain().unwrap());
    let (mut one, mut other) = (vec![1; first], vec![2; then]);
    write(&mut holder, 0, &mut one);
    write(&mut waiter, 4096, &mut other);
    assert_eq!((holder.in_flight(), waiter.in_flight()), (1, 1));
    sleeps(&mut waiter);
    *open.lock().unwrap() = true;
    while holder.next_done().is_none() {
        holder.poll();
    }
    wakes_and_is_done(&mut waiter);
}

#[test]
fn a_whole_write_is_woken_by_the_change_of_a_part_that_it_waits_for() {
    one_waits_for_the_other(512, 4096);
}

#[test]
fn the_change_of_a_part_is_woken_by_the_last_whole_write() {
    one_waits_for_the_other(4096, 512);
}

#[test]
fn the_change_of_a_part_is_woken_by_the_one_before_it() {
    one_waits_for_the_other(512, 512);
}

#[test]
fn a_thread_that_is_awake_costs_no_system_call() {
    let (disk, open) = (disk(), Arc::new(Mutex::new(false)));
    let gate = Gate { open: Arc::clone(&open), waiting: Vec::new() };
    let (mut holder, mut waiter) =
        (disk.chain_over(Box::new(gate)).unwrap(), disk.chain().unwrap());
    let (mut one, mut other) = (vec![1; 512], vec![2; 4096]);
    write(&mut holder, 0, &mut one);
    write(&mut waiter, 4096, &mut other);
    *open.lock().unwrap() = true;
    while holder.next_done().is_none() {
        holder.poll();
    }
    assert!(!is_woken(&waiter), "written for a thread that looks by itself");
    waiter.poll();
    assert!(waiter.next_done().is_some());
}

#[test]
fn the_first_change_of_a_chunk_is_woken_by_the_mark() {
    let geometry = Geometry::new(DiskId::new(), SIZE);
    let map = MemDisk::new(geometry.map_bytes());
    let map = Chain::new(geometry.map_bytes() as u64, false, Vec::new(), map.queue()).unwrap();
    let (replicate, _) = Replicate::new(geometry, LegChain::new(map));
    // Chunks that were never copied are marked. For this test the replica has all of them from here on.
    let filters = vec![replicate.filter(&Place::simple(SIZE)).unwrap()];
    let source = MemDisk::new(SIZE as usize);
    let mut chain = Chain::new(SIZE, false, filters, source.queue()).unwrap();
    let place = || Chain::new(SIZE, false, Vec::new(), source.queue()).unwrap();
    let copier = vmseal_iofilter::layers::replicate::copier::Copier::new;
    let mut copier = copier(&replicate, place(), None, LegChain::new(place()));
    while replicate.status().dirty_bytes > 0 {
        copier.batch().unwrap();
    }
    let mut bytes = vec![3; 4096];
    write(&mut chain, 0, &mut bytes);
    sleeps(&mut chain);
    assert!(replicate.mark_waiting());
    wakes_and_is_done(&mut chain);
}
