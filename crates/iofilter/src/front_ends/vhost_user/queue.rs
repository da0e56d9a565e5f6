//! One request queue: a thread that takes requests from the guest's ring, runs them through its chain
//! and answers.
//!
//! ```text
//!            pass: take some from the ring → chain → answer all that is done → one notification
//!   Serving ──stop──> Draining ──nothing in flight──> ended: the chain and the ring's position go back
//!      └──malformed──> Broken ──nothing in flight, then stop──> ended
//!
//!   progress:                 pass again
//!   no progress:              poll for the polling window; then enable the guest's kicks, check once
//!                             more, and sleep on kick, orders and the backend's completions
//! ```
//! The polling window adapts: it grows while sleeps are short and drops to nothing after a long
//! one, so an idle disk costs no CPU.

mod marker;
mod orders;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use crate::disk::status::DiskState;
use crate::front_ends::vhost_user::inflight::{InflightError, Record};
use crate::front_ends::vhost_user::memory_log::{LogError, RingLog};
use crate::front_ends::vhost_user::queue::marker::Marker;
use crate::front_ends::vhost_user::queue::orders::{Order, OrderReceiver, OrderSender};
use crate::front_ends::vhost_user::replay::{Replay, ReplayError};
use crate::front_ends::vhost_user::request::{GuestCommand, Malformed, Parsed, Parser};
use crate::stack::chain::{Chain, Done};
use crate::stack::memory::{Cursor, Segment, Segments};
use crate::stack::request::{Operation, RequestId};

/// The most requests that are taken from the ring in one pass.
#[derive(Clone, Copy, Debug)]
struct PassLimit {
    requests: usize,
    bytes: usize,
}

/// Few, so that the guest works on the first answers and on new requests while the next are done, instead of each
/// waiting for the other (docs/decisions/044).
impl PassLimit {
    /// Where a device works on many at a time: it begins with the first of them, and must not wait until the next large
    /// write is encrypted, too (docs/decisions/045).
    const DEVICE: Self = Self { requests: 6, bytes: 512 * 1024 };

    /// Where each is done before the next is read.
    const AT_ONCE: Self = Self { requests: 4, bytes: usize::MAX };
}

/// The longest time to poll before sleeping: about what a sleep and wake-up cost.
const WINDOW_MAX: Duration = Duration::from_micros(32);

/// The first polling window after a short sleep.
const WINDOW_MIN: Duration = Duration::from_micros(4);

/// The stack size of a worker: its frames are small, and the process's memory is locked.
const STACK: usize = 256 * 1024;

/// The parts of a queue.
pub struct Setup {
    /// The number of the queue.
    pub index: usize,
    /// The ring.
    pub queue: Queue,
    /// The guest's memory.
    pub memory: GuestMemoryMmap,
    /// The guest's notifications.
    pub kick: Arc<OwnedFd>,
    /// Where to notify the guest.
    pub call: Option<Arc<OwnedFd>>,
    /// Where to report to the VMM that the ring is broken.
    pub error: Option<Arc<OwnedFd>>,
    /// Whether to flush each write, because the guest's driver does not send flushes.
    pub write_through: bool,
    /// The device id.
    pub serial: Arc<str>,
    /// The counters.
    pub state: Arc<DiskState>,
    /// The record of requests in flight.
    pub record: Option<Record>,
    /// Heads that an earlier filter began and did not answer, in order: done first.
    pub begun: Vec<u16>,
    /// The log of what is written into the guest's memory.
    pub log: Option<RingLog>,
}

/// A running queue.
pub struct RunningQueue {
    thread: JoinHandle<(Chain, u16)>,
    orders: OrderSender,
}

impl RunningQueue {
    /// Starts the thread.
    ///
    /// # Errors
    /// Returns the chain, with the reason.
    pub fn start(setup: Setup, chain: Chain) -> Result<Self, (Box<Chain>, std::io::Error)> {
        let (orders, ordered) = match orders::channel() {
            Ok(both) => both,
            Err(error) => return Err((Box::new(chain), error)),
        };
        // The chain is sent by channel, so that it is not lost if the thread cannot start.
        let (send, receive) = sync_channel::<Chain>(1);
        let span = tracing::Span::current();
        let spawned = std::thread::Builder::new()
            .name(format!("queue{}", setup.index))
            .stack_size(STACK)
            .spawn(move || {
                let _entered = span.entered();
                let Ok(chain) = receive.recv() else {
                    unreachable!("the chain is sent once the thread exists")
                };
                let mut worker = QueueWorker::new(setup, chain, ordered);
                worker.start_ring();
                worker.run()
            });
        match spawned {
            Err(error) => Err((Box::new(chain), error)),
            Ok(thread) => {
                let _ = send.send(chain);
                Ok(Self { thread, orders })
            }
        }
    }

    /// Stops taking requests, waits for those in flight, and returns the chain and the ring's next
    /// available index; none if the thread panicked.
    #[must_use]
    pub fn stop(self) -> Option<(Chain, u16)> {
        self.orders.give(Order::Stop);
        self.thread.join().ok()
    }

    /// Has the ring marked in this log, or in none, while it runs. When that is so, a message arrives, or the end of the
    /// channel if the thread is dead: then nothing is marked in the former log any more.
    #[must_use]
    pub fn log(&self, log: Option<RingLog>) -> Receiver<()> {
        let (taken, receive) = sync_channel(1);
        self.orders.give(Order::Log { log, taken });
        receive
    }
}

/// Does on the caller's thread what a queue's thread does, until there is no progress or for that many passes;
/// then ends in the same way. For the fuzz targets.
///
/// # Errors
/// No eventfd is available.
#[doc(hidden)]
pub fn serve_now(setup: Setup, chain: Chain, passes: usize) -> std::io::Result<(Chain, u16)> {
    let (orders, ordered) = orders::channel()?;
    let mut worker = QueueWorker::new(setup, chain, ordered);
    worker.start_ring();
    for _ in 0..passes {
        if worker.pass() == 0 {
            break;
        }
    }
    orders.give(Order::Stop);
    Ok(worker.run())
}

/// After how many requests, taken and answered, a thread lets others run that wait for its processor: those of other disks,
/// whose requests would wait as long as the scheduler's slices else. 32 requests, about a tenth of a millisecond; the call
/// takes a thousandth of that (docs/decisions/153).
const TURN: usize = 64;

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Pending {
    head: u16,
    status: Segment,
    written: u32,
    /// When it was taken from the ring, to the accuracy of a pass.
    began: Instant,
    /// The guest's operation, while the flush that follows it is in flight.
    flushed: Option<(Operation, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    Draining,
    Broken,
}

struct QueueWorker {
    setup: Setup,
    chain: Chain,
    orders: OrderReceiver,
    phase: Phase,
    parser: Parser,
    pending: Vec<Option<Pending>>,
    batch: PassLimit,
    replay: Option<Replay>,
    marker: Option<Marker>,
    window: Duration,
    /// How many requests were taken and answered since the thread last slept or let others run.
    moved: usize,
}

/// Why a queue stops.
#[derive(Debug, thiserror::Error)]
enum QueueError {
    #[error("{0}")]
    Malformed(#[from] Malformed),
    #[error("the ring is invalid: {0}")]
    Ring(#[from] virtio_queue::Error),
    #[error("{0}")]
    Inflight(#[from] InflightError),
    #[error("the requests of an earlier filter cannot be repeated: {0}")]
    Replay(#[from] ReplayError),
    #[error("{0}")]
    Log(#[from] LogError),
}

impl QueueWorker {
    fn new(mut setup: Setup, chain: Chain, orders: OrderReceiver) -> Self {
        let log = setup.log.take();
        setup.state.set_flight(setup.index, Arc::clone(chain.flight()));
        let pending = vec![None; chain.capacity()];
        let (phase, parser) = (Phase::Serving, Parser::default());
        let batch = if chain.works_at_once() { PassLimit::AT_ONCE } else { PassLimit::DEVICE };
        let (replay, marker, window, moved) = (None, None, Duration::ZERO, 0);
        let mut worker = Self {
            setup,
            chain,
            orders,
            phase,
            parser,
            pending,
            batch,
            replay,
            marker,
            window,
            moved,
        };
        worker.log_in(log);
        worker
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Stop => {
                self.phase = Phase::Draining;
                self.chain.hasten(true);
            }
            Order::Log { log, taken } => {
                self.log_in(log);
                // The protocol's thread waits for it.
                let _ = taken.send(());
            }
        }
    }

    /// From now on what is written into the guest's memory is marked in this log.
    fn log_in(&mut self, log: Option<RingLog>) {
        let Setup { queue, memory, .. } = &self.setup;
        let marker = log.map(|log| Marker::new(log, queue.size(), memory)).transpose();
        self.marker = marker.unwrap_or_else(|error| {
            self.broken(&error.into());
            None
        });
    }

    /// Marks what was written into the guest's memory, if there is a log. It has room for all of that memory, else the
    /// ring is broken.
    fn mark(&mut self, written: impl FnOnce(&mut Marker, &Chain) -> Result<(), LogError>) {
        let marked = self.marker.as_mut().map(|marker| written(marker, &self.chain));
        if let Some(Err(error)) = marked {
            self.broken(&error.into());
        }
    }

    /// What comes once, before anything is taken from the ring.
    fn start_ring(&mut self) {
        self.notify_of_earlier_answers();
        self.check_ring();
    }

    fn check_ring(&mut self) {
        let Setup { queue, memory, begun, .. } = &self.setup;
        if !queue.is_valid(memory) {
            self.broken(&QueueError::Ring(virtio_queue::Error::QueueNotReady));
        } else if !begun.is_empty() {
            tracing::info!(
                queue = self.setup.index,
                requests = begun.len(),
                "begun before, done again"
            );
            match Replay::new(queue, memory, begun) {
                Ok(replay) => self.replay = Some(replay),
                Err(error) => self.broken(&error.into()),
            }
        }
    }

    fn run(mut self) -> (Chain, u16) {
        loop {
            while let Some(order) = self.orders.next() {
                self.obey(order);
            }
            let moved = self.pass() > 0;
            // What an earlier filter has taken is answered, too.
            let idle = self.chain.is_idle() && self.replay.is_none();
            if self.phase == Phase::Draining && idle {
                self.chain.hasten(false);
                return (self.chain, self.setup.queue.next_avail());
            }
            if !moved && !self.poll_window() {
                self.sleep();
                self.moved = 0;
            } else if self.moved >= TURN {
                // Nothing where no other thread waits for the processor.
                std::thread::yield_now();
                self.moved = 0;
            }
        }
    }

    /// Notifies the guest once, needed or not: a filter that died between an answer and its notification leaves a guest that
    /// waits for it, with nothing in flight that would bring another.
    fn notify_of_earlier_answers(&self) {
        if let Some(call) = &self.setup.call {
            signal(call.as_fd());
        }
    }

    /// The ring can no longer be trusted: nothing is taken from it until the guest sets it up again.
    fn broken(&mut self, error: &QueueError) {
        // Also where it is being drained.
        self.replay = None;
        if self.phase == Phase::Serving {
            self.setup.state.note_broken(self.setup.index, error);
            self.setup.state.counters(self.setup.index).failed();
            self.phase = Phase::Broken;
            if let Some(event) = &self.setup.error {
                signal(event.as_fd());
            }
        }
    }

    /// One round; how many requests were taken and answered.
    fn pass(&mut self) -> usize {
        let takes = match self.phase {
            Phase::Serving => true,
            Phase::Draining => self.replay.is_some(),
            Phase::Broken => false,
        };
        let taken = if takes { self.take() } else { Ok(0) };
        self.chain.poll();
        let answered = self.answer_all();
        if let Some(marker) = &mut self.marker {
            marker.announce();
        }
        match (taken, answered) {
            (Ok(taken), Ok(answered)) => {
                self.moved += taken + answered;
                taken + answered
            }
            (Err(error), _) | (_, Err(error)) => {
                self.broken(&error);
                1
            }
        }
    }

    /// Takes the requests that the guest has made available.
    fn take(&mut self) -> Result<usize, QueueError> {
        let (mut taken, mut bytes) = (0, 0);
        // Read once, and only by a pass that takes requests.
        let mut began = None;
        while taken < self.batch.requests && bytes < self.batch.bytes {
            let Some(id) = self.chain.begin() else { break };
            match self.next(id) {
                Ok(Some((head, parsed))) => {
                    let began = *began.get_or_insert_with(Instant::now);
                    bytes += self.chain.data_mut(id).bytes();
                    self.begin(id, head, &parsed, began)?;
                }
                Ok(None) => {
                    self.chain.cancel(id);
                    break;
                }
                Err(error) => {
                    self.chain.cancel(id);
                    return Err(error);
                }
            }
            taken += 1;
        }
        self.replay.take_if(|replay| replay.is_done());
        Ok(taken)
    }

    /// The next request, with the memory of its data in the slot: first those of an earlier filter, then the ring's.
    fn next(&mut self, id: RequestId) -> Result<Option<(u16, Parsed)>, QueueError> {
        let memory = &self.setup.memory;
        let again = self.replay.as_mut().map(Replay::take).transpose()?.flatten();
        let chain = match again {
            Some(chain) => Some(chain),
            None if self.phase == Phase::Draining => None,
            None => self.setup.queue.iter(memory)?.next(),
        };
        let Some(chain) = chain else { return Ok(None) };
        let head = chain.head_index();
        // Before it is parsed and before the next one is taken: the ring's position follows from it.
        if let Some(record) = &mut self.setup.record {
            record.begin(head)?;
        }
        let parsed = self.parser.parse(chain, memory, self.chain.data_mut(id))?;
        Ok(Some((head, parsed)))
    }

    fn begin(
        &mut self,
        id: RequestId,
        head: u16,
        parsed: &Parsed,
        began: Instant,
    ) -> Result<(), QueueError> {
        let written = match parsed.asked {
            GuestCommand::Io { operation: Operation::Read, .. } => parsed.writable + 1,
            _ => 1,
        };
        let pending = Pending { head, status: parsed.status, written, began, flushed: None };
        match parsed.asked {
            GuestCommand::Io { operation, offset, length } => {
                self.pending[id.index()] = Some(pending);
                self.chain.began(id, began);
                self.chain.submit(id, operation, offset, length, id.index() as u64);
                return Ok(());
            }
            GuestCommand::Id => {
                let mut text = [0; vmseal_api::filter::SERIAL_MAX];
                let serial = self.setup.serial.as_bytes();
                let length = serial.len().min(text.len());
                text[..length].copy_from_slice(&serial[..length]);
                let put = Cursor::default().scatter(self.chain.data_mut(id), &text);
                self.mark(|marker, chain| marker.segments(chain.data(id).as_slice()));
                let written = u32::try_from(put).unwrap_or(0) + 1;
                self.answer(Pending { written, ..pending }, VIRTIO_BLK_S_OK as u8)?;
            }
            GuestCommand::Refused(status) => {
                self.setup.state.counters(self.setup.index).failed();
                self.answer(pending, status)?;
            }
        }
        self.chain.cancel(id);
        // Answered outside of `answer_all`, so it must notify here.
        self.notify()
    }

    fn answer_all(&mut self) -> Result<usize, QueueError> {
        let mut answered = 0;
        let mut now = None;
        loop {
            // As long as the request has its memory, and before it is in the used ring.
            self.mark(|marker, chain| {
                marker.segments(chain.next_filled().map_or(&[], Segments::as_slice))
            });
            let Some(done) = self.chain.next_done() else { break };
            let index = usize::try_from(done.tag).unwrap_or(usize::MAX);
            let Some(pending) = self.pending.get_mut(index).and_then(Option::take) else {
                continue;
            };
            if self.flush_instead(&done, pending) {
                continue;
            }
            let now = *now.get_or_insert_with(Instant::now);
            let status = self.count(&done, &pending, now);
            self.answer(pending, status)?;
            answered += 1;
        }
        if answered > 0 {
            self.notify()?;
        }
        Ok(answered)
    }

    /// For a driver that does not flush: makes a write durable before it is answered.
    fn flush_instead(&mut self, done: &Done, pending: Pending) -> bool {
        let needed = self.setup.write_through
            && done.operation.changes()
            && done.result.is_ok()
            && pending.flushed.is_none();
        if !needed {
            return false;
        }
        let Some(id) = self.chain.begin() else {
            unreachable!("the slot of the request that is done is free")
        };
        let flushed = Some((done.operation, done.length));
        self.pending[id.index()] = Some(Pending { flushed, ..pending });
        // Not since the write began: a limit may have kept that back, for which storage is not to blame.
        self.chain.began(id, Instant::now());
        self.chain.submit(id, Operation::Flush, 0, 0, id.index() as u64);
        self.chain.poll();
        true
    }

    fn count(&self, done: &Done, pending: &Pending, now: Instant) -> u8 {
        let counters = self.setup.state.counters(self.setup.index);
        match done.result {
            Ok(()) => {
                let (operation, length) = pending.flushed.unwrap_or((done.operation, done.length));
                counters.succeeded(operation, length);
                counters.took(operation, now - pending.began);
                VIRTIO_BLK_S_OK as u8
            }
            Err(error) => {
                counters.failed();
                self.setup.state.note(done, error);
                VIRTIO_BLK_S_IOERR as u8
            }
        }
    }

    fn answer(&mut self, pending: Pending, status: u8) -> Result<(), QueueError> {
        pending.status.copy_from(&[status]);
        self.mark(|marker, _| marker.segments(&[pending.status]));
        let Setup { queue, memory, record, .. } = &mut self.setup;
        if let Some(record) = record {
            record.answering(pending.head);
        }
        let position = queue.next_used();
        queue.add_used(memory, pending.head, pending.written)?;
        if let Some(record) = record {
            record.answered(pending.head, queue.next_used());
        }
        self.mark(|marker, _| marker.answer(position));
        Ok(())
    }

    fn notify(&mut self) -> Result<(), QueueError> {
        let needed = self.setup.queue.needs_notification(&self.setup.memory)?;
        if let (true, Some(call)) = (needed, &self.setup.call) {
            signal(call.as_fd());
        }
        Ok(())
    }

    /// Polls for the polling window; true if there is work.
    fn poll_window(&mut self) -> bool {
        if self.window.is_zero() || self.phase != Phase::Serving {
            return false;
        }
        let start = Instant::now();
        while start.elapsed() < self.window {
            if self.pass() > 0 {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Sleeps until there may be work.
    fn sleep(&mut self) {
        if self.phase == Phase::Serving {
            let enabled = self.setup.queue.enable_notification(&self.setup.memory);
            self.mark(|marker, _| marker.wish());
            match enabled {
                Ok(false) => {}
                Ok(true) => return,
                Err(error) => return self.broken(&error.into()),
            }
        }
        let start = Instant::now();
        self.wait();
        let slept = start.elapsed();
        self.window = if slept > WINDOW_MAX * 2 {
            Duration::ZERO
        } else {
            (self.window * 2).clamp(WINDOW_MIN, WINDOW_MAX)
        };
        if self.phase == Phase::Serving {
            let disabled = self.setup.queue.disable_notification(&self.setup.memory);
            self.mark(|marker, _| marker.wish());
            if let Err(error) = disabled {
                self.broken(&error.into());
            }
        }
    }

    fn wait(&mut self) {
        let (none, readable) = (PollFlags::empty(), PollFlags::POLLIN);
        let orders = self.orders.event();
        // Once stopping or broken, the queue ignores kicks.
        let others = match self.phase {
            Phase::Serving => [(self.setup.kick.as_fd(), readable), (orders, readable)],
            Phase::Broken | Phase::Draining => [(orders, none), (orders, readable)],
        };
        let Ok([kicked, ordered]) = self.chain.wait(others, None) else { return };
        if self.phase == Phase::Serving && kicked.contains(readable) {
            let _ = nix::unistd::read(&self.setup.kick, &mut [0; 8]);
        }
        if ordered.contains(readable) {
            self.orders.woken();
        }
    }
}

/// Adds one to an eventfd.
fn signal(event: BorrowedFd<'_>) {
    if let Err(error) = nix::unistd::write(event, &1u64.to_ne_bytes()) {
        tracing::debug!(fd = event.as_raw_fd(), %error, "an event could not be signalled");
    }
}

#[cfg(test)]
mod tests;
