//! The thread that has an image, and what queues have of it.
//!
//! ```text
//!  queue ── poll: jobs ──> [Working] ── batch done, tables committed ──> answers, eventfd ──> queue
//!                             │ a defect of the library (panic)
//!                             v
//!                          [Failed]: every job fails
//! ```
//! An image has one owner for all of a disk's queues: its tables are not the queues' to share. Requests are
//! done one after the other, in the order of their arrival. The thread begins with the first of them: a queue's
//! thread starts it, and it is confined as that one is ([`crate::confinement`]).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::{io, mem};

use nix::errno::Errno;
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::image::Image;
use crate::chain::{Backend, Io};
use crate::contained;
use crate::memory::{Cursor, Segments};
use crate::request::{IoError, Operation, RequestId};

/// The most requests of one batch: answers do not wait for more than these.
const BATCH: usize = 64;

/// imago goes down a frame or two for each layer.
const STACK: usize = 512 * 1024;

/// A request on its way to the image.
struct Job {
    id: RequestId,
    operation: Operation,
    offset: u64,
    length: u64,
    data: Segments,
    answers: Arc<Answers>,
}

/// A request on its way back; the list is for the next one.
struct Answer {
    id: RequestId,
    result: Result<(), IoError>,
    data: Segments,
}

/// What a queue gets back.
struct Answers {
    list: Mutex<Vec<Answer>>,
    event: EventFd,
    /// For whoever waits without looking at `event`.
    arrived: Condvar,
}

#[derive(Default)]
struct Inbox {
    jobs: Vec<Job>,
    /// Nobody has the disk any more.
    closed: bool,
}

struct Shared {
    /// Until the thread has it.
    image: Mutex<Option<Image>>,
    inbox: Mutex<Inbox>,
    arrived: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The owner of an image. It ends, and the image is closed, when the last queue is gone.
pub(super) struct Worker {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Worker {
    pub(super) fn new(image: Image) -> Self {
        let (image, inbox, arrived) = (Mutex::new(Some(image)), Mutex::default(), Condvar::new());
        Self { shared: Arc::new(Shared { image, inbox, arrived }), thread: Mutex::default() }
    }

    /// Starts the thread if there is none.
    fn start(&self) -> io::Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_none() {
            let (shared, span) = (Arc::clone(&self.shared), tracing::Span::current());
            let builder = std::thread::Builder::new().name("qcow2".into()).stack_size(STACK);
            *thread = Some(builder.spawn(move || span.in_scope(|| work(&shared)))?);
        }
        Ok(())
    }

    /// A backend for one queue.
    pub(super) fn queue(self: &Arc<Self>) -> io::Result<Box<dyn Backend>> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let (list, arrived) = (Mutex::default(), Condvar::new());
        Ok(Box::new(Queue {
            worker: Arc::clone(self),
            answers: Arc::new(Answers { list, event, arrived }),
            lists: Vec::new(),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            under_way: 0,
        }))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        lock(&self.shared.inbox).closed = true;
        self.shared.arrived.notify_one();
        match lock(&self.thread).take() {
            Some(thread) => drop(thread.join()),
            // Nobody has asked for anything.
            None => work(&self.shared),
        }
    }
}

fn work(shared: &Shared) {
    let mut image = lock(&shared.image).take();
    let mut batch = Vec::new();
    while next(shared, &mut batch) {
        do_batch(&mut image, &mut batch);
    }
    if let Some(image) = image
        && let Some(Err(error)) = contain(image, |image| image.close()).1
    {
        tracing::error!(%error, "the image could not be closed well; it is sound, but has leaked clusters");
    }
}

/// Waits for jobs; false when there will be none.
fn next(shared: &Shared, batch: &mut Vec<Job>) -> bool {
    let mut inbox = lock(&shared.inbox);
    loop {
        if !inbox.jobs.is_empty() {
            let count = inbox.jobs.len().min(BATCH);
            batch.extend(inbox.jobs.drain(..count));
            return true;
        }
        if inbox.closed {
            return false;
        }
        inbox = shared.arrived.wait(inbox).unwrap_or_else(PoisonError::into_inner);
    }
}

/// Runs a defective library's code on the image, which is not touched again if that panics: what it held
/// back is then not written.
fn contain<T>(mut image: Image, run: impl FnOnce(&mut Image) -> T) -> (Option<Image>, Option<T>) {
    match contained::run(|| run(&mut image)) {
        Some(outcome) => (Some(image), Some(outcome)),
        None => {
            tracing::error!("a defect in the reader of qcow2 images; the disk has failed");
            mem::forget(image);
            (None, None)
        }
    }
}

fn do_batch(image: &mut Option<Image>, batch: &mut Vec<Job>) {
    let mut results = Vec::with_capacity(BATCH);
    if let Some(sound) = image.take() {
        let (kept, _) = contain(sound, |image| {
            for Job { operation, offset, length, data, .. } in batch.iter() {
                results.push(image.perform(*operation, *offset, *length, data));
            }
            if let Err(error) = image.commit() {
                // Nothing leads to what was written.
                let written = batch.iter().zip(&mut results);
                written
                    .filter(|(job, _)| job.operation != Operation::Read)
                    .for_each(|(_, result)| *result = Err(error));
            }
        });
        if kept.is_none() {
            results.clear();
        }
        *image = kept;
    }
    let results = results.into_iter().chain(std::iter::repeat(Err(IoError::Defect)));
    let mut told: Vec<Arc<Answers>> = Vec::new();
    for (Job { id, data, answers, .. }, result) in batch.drain(..).zip(results) {
        lock(&answers.list).push(Answer { id, result, data });
        if !told.iter().any(|other| Arc::ptr_eq(other, &answers)) {
            told.push(answers);
        }
    }
    for answers in told {
        answers.arrived.notify_one();
        // It cannot be full: the queue empties it each time that it looks.
        let _ = answers.event.write(1);
    }
}

/// What one queue has of the image.
struct Queue {
    worker: Arc<Worker>,
    answers: Arc<Answers>,
    /// Lists of memory, by request, kept so that none is allocated.
    lists: Vec<Segments>,
    outgoing: Vec<Job>,
    incoming: Vec<Answer>,
    under_way: usize,
}

impl Queue {
    fn hand_over(&mut self) {
        if self.outgoing.is_empty() {
            return;
        }
        self.under_way += self.outgoing.len();
        if let Err(error) = self.worker.start() {
            tracing::error!(%error, "no thread for an image: its requests fail");
            let failed = Err(IoError::Device(error.raw_os_error().unwrap_or(libc::EAGAIN)));
            let answers = self.outgoing.drain(..);
            let answers = answers.map(|Job { id, data, .. }| Answer { id, result: failed, data });
            return lock(&self.answers.list).extend(answers);
        }
        lock(&self.worker.shared.inbox).jobs.append(&mut self.outgoing);
        self.worker.shared.arrived.notify_one();
    }
}

impl Backend for Queue {
    fn prepare(&mut self, capacity: usize) {
        self.lists.resize_with(capacity, Segments::default);
        self.outgoing.reserve(capacity);
        self.incoming.reserve(capacity);
    }

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let mut data = mem::take(&mut self.lists[id.index()]);
        data.clear();
        data.push_from(&request.data, &mut Cursor::default(), request.data.bytes());
        let (operation, offset, length) = (request.operation, request.offset, request.length);
        let answers = Arc::clone(&self.answers);
        self.outgoing.push(Job { id, operation, offset, length, data, answers });
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.hand_over();
        if self.under_way == 0 {
            return;
        }
        match self.answers.event.read() {
            Ok(_) | Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(error) => tracing::error!(%error, "an event of the image cannot be read"),
        }
        mem::swap(&mut *lock(&self.answers.list), &mut self.incoming);
        self.under_way -= self.incoming.len();
        for Answer { id, result, data } in self.incoming.drain(..) {
            self.lists[id.index()] = data;
            io.complete(id, result);
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        Some(self.answers.event.as_fd())
    }
}

impl Drop for Queue {
    /// The image may still use requests' memory: wait for it.
    fn drop(&mut self) {
        let mut list = lock(&self.answers.list);
        while list.len() < self.under_way {
            list = self.answers.arrived.wait(list).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::transfer::ImageFormat;

    use super::*;

    fn image(at: &std::path::Path) -> Image {
        let create = ["create", "-q", "-f", "qcow2"];
        let made = std::process::Command::new("qemu-img").args(create).arg(at).arg("1M").status();
        assert!(made.unwrap().success());
        let file = std::fs::File::options().read(true).write(true).open(at).unwrap();
        let below: Vec<(_, ImageFormat)> = Vec::new();
        super::super::open(file.into(), below, 0, 1 << 20, false).unwrap()
    }

    #[test]
    fn after_a_defect_of_the_library_every_request_fails_and_nothing_is_written() {
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = directory.path().join("image");
        let image = image(&path);
        let before = std::fs::read(&path).unwrap();
        let (kept, outcome) = contain(image, |image| {
            let mut bytes = vec![7; 65536];
            let mut data = Segments::default();
            // SAFETY: `bytes` lives until the request is done.
            data.push(unsafe { crate::memory::Segment::new(bytes.as_mut_ptr(), bytes.len()) });
            image.perform(Operation::Write, 0, 65536, &data).unwrap();
            panic!("a defect");
        });
        let outcome: Option<()> = outcome;
        assert!(kept.is_none() && outcome.is_none());
        assert_eq!(std::fs::read(&path).unwrap()[..before.len()], before, "tables were written");

        let event = EventFd::from_flags(EfdFlags::EFD_NONBLOCK).unwrap();
        let (list, arrived) = (Mutex::default(), Condvar::new());
        let answers = Arc::new(Answers { list, event, arrived });
        let mut requests = crate::request::Requests::new(1);
        let job = Job {
            id: requests.take().unwrap(),
            operation: Operation::Flush,
            offset: 0,
            length: 0,
            data: Segments::default(),
            answers: Arc::clone(&answers),
        };
        do_batch(&mut None, &mut vec![job]);
        let list = lock(&answers.list);
        assert_eq!((list.len(), list[0].result), (1, Err(IoError::Defect)));
        assert_eq!(answers.event.read(), Ok(1));
    }
}
