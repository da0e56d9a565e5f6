//! How a chain's thread is woken: if it slept without the news, its eventfd is readable in the end.

use std::sync::Arc;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use shuttle::sync::atomic::{AtomicBool, Ordering::Relaxed};
use shuttle::thread;

use crate::every_order;
use crate::locks::SectorLocks;
use crate::stack::waker::Waker;

const SECTOR: u64 = 4096;

fn is_woken(waker: &Waker) -> bool {
    let mut fds = [PollFd::new(waker.event(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
}

/// Goes to sleep as a chain's thread does, unless it gets what it waits for; true if it sleeps.
fn sleeps(waker: &Waker, mut gets: impl FnMut() -> bool) -> bool {
    if gets() {
        return false;
    }
    waker.arm();
    let sleeps = !gets();
    if !sleeps {
        waker.disarm(false);
    }
    sleeps
}

pub fn a_chain_that_sleeps_is_woken_by_news() {
    every_order(|| {
        let (waker, news) = (Waker::new().unwrap(), Arc::new(AtomicBool::new(false)));
        let (others, publish) = (waker.clone(), Arc::clone(&news));
        let publisher = thread::spawn(move || {
            publish.store(true, Relaxed);
            others.wake();
        });
        let slept = sleeps(&waker, || news.load(Relaxed));
        publisher.join().unwrap();
        assert!(!slept || is_woken(&waker), "it sleeps, and has news");
    });
}

pub fn a_chain_that_waits_for_a_sector_lock_is_woken_when_it_is_free() {
    every_order(|| {
        let (waker, locks) = (Waker::new().unwrap(), Arc::new(SectorLocks::default()));
        assert!(locks.claim(0));
        let holder = Arc::clone(&locks);
        let holder = thread::spawn(move || holder.release_exclusive(0));
        let slept = sleeps(&waker, || {
            locks.try_shared(0, SECTOR) || {
                locks.wait(&waker);
                locks.try_shared(0, SECTOR)
            }
        });
        holder.join().unwrap();
        assert!(!slept || is_woken(&waker), "it sleeps, and the lock is free");
    });
}

pub fn a_chain_that_waits_for_the_last_writer_is_woken_when_it_leaves() {
    every_order(|| {
        let (waker, locks) = (Waker::new().unwrap(), Arc::new(SectorLocks::default()));
        assert!(locks.try_shared(0, SECTOR));
        let writer = Arc::clone(&locks);
        let writer = thread::spawn(move || writer.release_shared(0, SECTOR));
        assert!(locks.claim(0));
        let slept = sleeps(&waker, || {
            locks.is_exclusive(0) || {
                locks.wait(&waker);
                locks.is_exclusive(0)
            }
        });
        writer.join().unwrap();
        assert!(!slept || is_woken(&waker), "it sleeps, and the stretch is its own");
    });
}
