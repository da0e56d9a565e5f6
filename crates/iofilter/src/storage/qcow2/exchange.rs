//! How a disk's queues send jobs to the thread that owns the image, and get the answers.
//!
//! ```text
//!  queue                                               thread
//!  push: outgoing ── hand_over ──> inbox ── next: a batch ──> perform
//!  incoming <────────── collect ── list, event <──── answer ────┘
//!
//!  thread   none ──first hand_over──> [working] <──> [waiting for jobs]
//!             └──────────┬────────────────┘
//!             the last holder is dropped
//!                        v
//!                    [closed]
//! ```
//! A queue's event is set after its list has the answers, and cleared before they are taken: a queue that finds
//! nothing and sleeps until the event is set misses none. The event of a chain is its waker. A queue that is dropped
//! waits for the jobs that it has handed over, as the thread uses their memory; so the inbox is empty when the last
//! queue is gone.

use std::sync::{Arc, PoisonError};
use std::vec::Drain;
use std::{io, mem};

use crate::sync::{Condvar, JoinHandle, Mutex, MutexGuard};

/// The work that the thread does.
pub(super) trait Work: Send + Sized + 'static {
    /// A job; once it is done it is also the answer.
    type Request: Send;
    type Event: Event;

    /// The most jobs of the next batch: answers wait for no more than these.
    fn batch(&self) -> usize;

    /// Starts a thread.
    fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>>;

    /// Does jobs, one after the other.
    fn perform(&mut self, batch: &mut [Job<Self>]);

    /// There will be no more.
    fn close(self);
}

/// The event that a queue sleeps on.
pub(super) trait Event: Send + Sync {
    fn set(&self);
    fn clear(&self);
}

/// A job on its way, and its queue.
pub(super) struct Job<W: Work> {
    pub(super) request: W::Request,
    answers: Arc<Answers<W>>,
}

/// The answers for a queue.
struct Answers<W: Work> {
    list: Mutex<Vec<W::Request>>,
    event: W::Event,
    /// For a caller that waits without `event`.
    arrived: Condvar,
}

struct Inbox<W: Work> {
    jobs: Vec<Job<W>>,
    /// The disk is no longer in use.
    closed: bool,
}

struct Shared<W: Work> {
    /// Until the thread has it.
    work: Mutex<Option<W>>,
    inbox: Mutex<Inbox<W>>,
    arrived: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The shared part. The thread ends, and the work is closed, when the last holder is gone.
pub(super) struct Exchange<W: Work> {
    shared: Arc<Shared<W>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl<W: Work> Exchange<W> {
    pub(super) fn new(work: W) -> Self {
        let inbox = Mutex::new(Inbox { jobs: Vec::new(), closed: false });
        let (work, arrived) = (Mutex::new(Some(work)), Condvar::new());
        Self { shared: Arc::new(Shared { work, inbox, arrived }), thread: Mutex::new(None) }
    }

    /// Starts the thread if there is none.
    fn start(&self) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let shared = Arc::clone(&self.shared);
            *thread = Some(W::spawn(move || work(&shared))?);
        }
        Ok(())
    }

    /// A queue's end, which is notified through `event`.
    pub(super) fn end(self: &Arc<Self>, event: W::Event) -> End<W> {
        let (list, arrived) = (Mutex::new(Vec::new()), Condvar::new());
        End {
            exchange: Arc::clone(self),
            answers: Arc::new(Answers { list, event, arrived }),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            under_way: 0,
        }
    }
}

impl<W: Work> Drop for Exchange<W> {
    fn drop(&mut self) {
        lock(&self.shared.inbox).closed = true;
        self.shared.arrived.notify_one();
        match lock(&self.thread).take() {
            Some(thread) => drop(thread.join()),
            // There was no job.
            None => work(&self.shared),
        }
    }
}

fn work<W: Work>(shared: &Shared<W>) {
    let Some(mut work) = lock(&shared.work).take() else {
        return;
    };
    let mut batch = Vec::new();
    while next(shared, work.batch(), &mut batch) {
        work.perform(&mut batch);
        answer(&mut batch);
    }
    work.close();
}

/// Waits for jobs; false when there will be none.
fn next<W: Work>(shared: &Shared<W>, most: usize, batch: &mut Vec<Job<W>>) -> bool {
    let mut inbox = lock(&shared.inbox);
    loop {
        if !inbox.jobs.is_empty() {
            let count = inbox.jobs.len().min(most);
            batch.extend(inbox.jobs.drain(..count));
            return true;
        }
        if inbox.closed {
            return false;
        }
        inbox = shared.arrived.wait(inbox).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Gives each queue its answers.
fn answer<W: Work>(batch: &mut Vec<Job<W>>) {
    let mut told: Vec<Arc<Answers<W>>> = Vec::new();
    for Job { request, answers } in batch.drain(..) {
        lock(&answers.list).push(request);
        if !told.iter().any(|other| Arc::ptr_eq(other, &answers)) {
            told.push(answers);
        }
    }
    for answers in told {
        answers.arrived.notify_one();
        answers.event.set();
    }
}

/// One queue's end of the exchange.
pub(super) struct End<W: Work> {
    exchange: Arc<Exchange<W>>,
    answers: Arc<Answers<W>>,
    outgoing: Vec<Job<W>>,
    incoming: Vec<W::Request>,
    under_way: usize,
}

impl<W: Work> End<W> {
    /// Reserves room for this many jobs, so that none allocates.
    pub(super) fn reserve(&mut self, capacity: usize) {
        self.outgoing.reserve(capacity);
        self.incoming.reserve(capacity);
    }

    /// Takes a job, for [`End::hand_over`].
    pub(super) fn push(&mut self, request: W::Request) {
        self.outgoing.push(Job { request, answers: Arc::clone(&self.answers) });
    }

    /// Hands over all jobs taken.
    ///
    /// # Errors
    /// There is no thread: the jobs are still here.
    pub(super) fn hand_over(&mut self) -> io::Result<()> {
        if self.outgoing.is_empty() {
            return Ok(());
        }
        self.exchange.start()?;
        self.under_way += self.outgoing.len();
        lock(&self.exchange.shared.inbox).jobs.append(&mut self.outgoing);
        self.exchange.shared.arrived.notify_one();
        Ok(())
    }

    /// Answers the jobs that were not handed over, after `fail` has put the failure in them; for [`End::collect`], at
    /// once: the event is not set.
    pub(super) fn refuse(&mut self, mut fail: impl FnMut(&mut W::Request)) {
        self.under_way += self.outgoing.len();
        lock(&self.answers.list).extend(self.outgoing.drain(..).map(
            |Job { mut request, .. }| {
                fail(&mut request);
                request
            },
        ));
    }

    /// The answers.
    pub(super) fn collect(&mut self) -> Drain<'_, W::Request> {
        if self.under_way > 0 {
            self.answers.event.clear();
            mem::swap(&mut *lock(&self.answers.list), &mut self.incoming);
            self.under_way -= self.incoming.len();
        }
        self.incoming.drain(..)
    }

    /// Set when [`End::collect`] has something.
    pub(super) fn event(&self) -> &W::Event {
        &self.answers.event
    }
}

impl<W: Work> Drop for End<W> {
    /// The thread may still use the jobs' memory: wait for it.
    fn drop(&mut self) {
        let mut list = lock(&self.answers.list);
        while list.len() < self.under_way {
            list = self.answers.arrived.wait(list).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
