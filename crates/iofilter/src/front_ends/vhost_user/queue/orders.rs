//! What the protocol's thread tells a queue's thread while that runs.
//!
//! ```text
//!  protocol: order into the list ──> bell, eventfd          ... waits for `taken`, if it must
//!  queue:    bell? ──> takes the orders, between two passes ──> taken
//! ```
//! Between two passes every write so far to the guest's memory is marked in the former log, and none after is. A thread
//! that dies drops its list, so that nobody waits for it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::front_ends::vhost_user::memory_log::RingLog;

/// An order to a queue's thread.
#[derive(Debug)]
pub(super) enum Order {
    /// Finish what is in flight, and end.
    Stop,
    /// Mark in this log from now on; in none if there is none.
    Log {
        /// The log.
        log: Option<RingLog>,
        /// Where to say that it is so.
        taken: SyncSender<()>,
    },
}

#[derive(Debug)]
struct Bell {
    rung: AtomicBool,
    event: EventFd,
}

/// The protocol's side.
#[derive(Debug)]
pub(super) struct OrderSender {
    bell: Arc<Bell>,
    orders: Sender<Order>,
}

/// The queue's side.
#[derive(Debug)]
pub(super) struct OrderReceiver {
    bell: Arc<Bell>,
    orders: Receiver<Order>,
}

/// Both sides, for a new thread: one that ended has left orders behind.
pub(super) fn channel() -> io::Result<(OrderSender, OrderReceiver)> {
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let event = EventFd::from_value_and_flags(0, flags)?;
    let bell = Arc::new(Bell { rung: AtomicBool::new(false), event });
    let (send, receive) = mpsc::channel();
    let sender = OrderSender { bell: Arc::clone(&bell), orders: send };
    Ok((sender, OrderReceiver { bell, orders: receive }))
}

impl OrderSender {
    /// Gives an order; lost if the thread is dead.
    pub(super) fn give(&self, order: Order) {
        let _ = self.orders.send(order);
        self.bell.rung.store(true, Ordering::Release);
        // Fails only when the counter is full, and then it is readable anyway.
        let _ = self.bell.event.write(1);
    }
}

impl OrderReceiver {
    /// The next order. Costs one load when there is none.
    pub(super) fn next(&self) -> Option<Order> {
        if !self.bell.rung.load(Ordering::Acquire) {
            return None;
        }
        // Before the list is read, so that the bell of an order that comes meanwhile stays.
        self.bell.rung.swap(false, Ordering::AcqRel);
        let order = self.orders.try_recv().ok()?;
        self.bell.rung.store(true, Ordering::Release);
        Some(order)
    }

    /// Becomes readable with an order.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.bell.event.as_fd()
    }

    /// The thread has found the descriptor readable.
    pub(super) fn woken(&self) {
        let _ = self.bell.event.read();
    }
}
