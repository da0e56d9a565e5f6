//! How others wake the thread that has a chain: by one eventfd a chain.
//!
//! ```text
//!  the chain's thread                          a thread with news for it
//!  arms the waker                              publishes the news: a lock is free, an answer is in a list
//!  looks once more for news                    wakes: armed? ── yes ──> disarms it, writes the eventfd
//!  sleeps until the eventfd is readable                  └─── no ───> nothing to do
//!  disarms the waker
//! ```
//! Either that last look finds the news, or the other thread finds the waker armed. Nobody writes the eventfd of a
//! thread that is awake.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::sync::atomic::{AtomicBool, Ordering::SeqCst, fence};
use crate::sync::{Mutex, MutexGuard};

/// Wakes the thread of one chain; see the module.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// The thread sleeps, or is about to.
    armed: AtomicBool,
    event: EventFd,
}

impl Waker {
    /// A waker of a thread that is awake.
    ///
    /// # Errors
    /// The system has no eventfd.
    pub fn new() -> io::Result<Self> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        let event = EventFd::from_value_and_flags(0, flags)?;
        Ok(Self(Arc::new(Shared { armed: AtomicBool::new(false), event })))
    }

    /// Wakes the thread if it sleeps. Call it after the news is published.
    pub fn wake(&self) {
        // Orders the news before this load, as `arm` orders its store before the thread's last look for news.
        fence(SeqCst);
        if self.0.armed.load(SeqCst) && self.0.armed.swap(false, SeqCst) {
            // Fails only when the counter is full, and then it is readable anyway.
            let _ = self.0.event.write(1);
        }
    }

    /// The thread is about to sleep. It looks for news once more before it does.
    pub fn arm(&self) {
        self.0.armed.store(true, SeqCst);
        fence(SeqCst);
    }

    /// The thread is awake; `woken` is whether it found the eventfd readable.
    pub fn disarm(&self, woken: bool) {
        self.0.armed.store(false, SeqCst);
        if woken {
            // The count does not matter.
            let _ = self.0.event.read();
        }
    }

    /// The descriptor that becomes readable when the thread is woken.
    #[must_use]
    pub fn event(&self) -> BorrowedFd<'_> {
        self.0.event.as_fd()
    }
}

/// The chains that wait for something shared: a lock, a mark.
#[derive(Debug, Default)]
pub struct Waiters {
    /// Whether the list is not empty.
    any: AtomicBool,
    wakers: Mutex<Vec<Waker>>,
}

impl Waiters {
    /// Adds this chain. It must check once more afterwards whether it still has to wait.
    pub fn add(&self, waker: &Waker) {
        let mut wakers = self.wakers();
        if !wakers.iter().any(|other| Arc::ptr_eq(&other.0, &waker.0)) {
            wakers.push(waker.clone());
        }
        self.any.store(true, SeqCst);
        drop(wakers);
        fence(SeqCst);
    }

    /// Wakes all waiting chains; one that must wait longer registers again. Call it after the news is published.
    pub fn wake(&self) {
        fence(SeqCst);
        if !self.any.load(SeqCst) {
            return;
        }
        let mut wakers = self.wakers();
        self.any.store(false, SeqCst);
        wakers.drain(..).for_each(|waker| waker.wake());
    }

    fn wakers(&self) -> MutexGuard<'_, Vec<Waker>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
