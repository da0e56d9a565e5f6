//! The thread that owns an image, and the queues' end of it.
//!
//! ```text
//!  queue ── poll: jobs ──> [Working] ── batch done, tables committed ──> answers, waker ──> queue
//!                             │ a defect of the library (panic)
//!                             v
//!                          [Failed]: every job fails
//! ```
//! An image has one owner for all of a disk's queues, as queues cannot share its tables. Requests are
//! done one after the other, in the order of their arrival ([`super::exchange`]). The first request
//! starts the thread: a queue's thread does so, and it gets that one's restrictions ([`crate::process::confinement`]).

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use std::{fmt, io, mem};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::exchange::{End, Event, Exchange, Job, Work};
use super::image::{Found, Qcow2Image};
use super::known::KnownClusters;
use super::storage::ImageFile;
use crate::stack::chain::{Io, Storage};
use crate::stack::contained;
use crate::stack::memory::{Cursor, Segments};
use crate::stack::request::{IoError, Operation, RequestId, Requests};
use crate::stack::waker::Waker;
use crate::storage::extent::{Extent, OwnExtent};
use crate::storage::sync;
use crate::storage::target::{LOOK_EVERY, Place};
use crate::storage::uring::UringFile;

/// imago recurses a frame or two for each layer.
const STACK: usize = 512 * 1024;

/// A question or request to the image.
enum ImageQuery {
    /// Do this.
    Operation(Operation),
    /// What is there; and the answer.
    Extent(Option<Found>),
    /// What the image itself has there; and the answer.
    Own(Option<OwnExtent>),
    /// Leave it in its file as if it were closed.
    Settle,
}

/// A request to the image, and its result.
struct Request {
    id: RequestId,
    asked: ImageQuery,
    offset: u64,
    length: u64,
    /// The list is reused for the next one.
    data: Segments,
    /// What of a read is left to the queue.
    places: Vec<Place>,
    result: Result<(), IoError>,
}

/// The most requests of the first batch, and of all after some: each batch may have twice as many as the one before. A guest
/// whose disk has just got an empty layer has waited for that, and the first batch needs more of the storage than others: new
/// tables.
const FIRST_BATCH: usize = 2;
const BATCH: usize = 16;

/// An image; none after a defect.
struct ImageOwner {
    image: Option<Qcow2Image>,
    batch: usize,
}

impl ImageOwner {
    fn new(image: Option<Qcow2Image>) -> Self {
        Self { image, batch: FIRST_BATCH }
    }

    /// After a batch of so many requests: no more than those waited.
    fn grow(&mut self, requests: usize) {
        if requests >= self.batch {
            self.batch = (self.batch * 2).min(BATCH);
        }
    }
}

impl Work for ImageOwner {
    type Request = Request;
    type Event = Waker;

    fn batch(&self) -> usize {
        self.batch
    }

    fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
        let span = tracing::Span::current();
        let builder = std::thread::Builder::new().name("qcow2".into()).stack_size(STACK);
        builder.spawn(move || span.in_scope(run))
    }

    fn perform(&mut self, batch: &mut [Job<Self>]) {
        if let Some(sound) = self.image.take() {
            self.image = contain(sound, |image| do_batch(image, batch)).0;
        }
        self.grow(batch.len());
        if self.image.is_none() {
            batch.iter_mut().for_each(|job| job.request.result = Err(IoError::Defect));
        }
    }

    fn close(self) {
        if let Some(image) = self.image
            && let Some(Err(error)) = contain(image, |image| image.close()).1
        {
            tracing::error!(%error, "the image could not be closed well; it is sound, but has leaked clusters");
        }
    }
}

fn do_batch(image: &mut Qcow2Image, batch: &mut [Job<ImageOwner>]) {
    image.fetch(batch.iter().map(|job| &job.request).filter_map(|request| match request.asked {
        ImageQuery::Operation(Operation::Write) => Some((request.offset, request.length)),
        _ => None,
    }));
    for Job { request, .. } in batch.iter_mut() {
        let Request { asked, offset, length, data, places, .. } = request;
        request.result = match asked {
            ImageQuery::Operation(operation) => {
                image.perform(*operation, (*offset, *length), data, places)
            }
            ImageQuery::Extent(found) => {
                image.extent(*offset, *length).map(|there| *found = Some(there))
            }
            ImageQuery::Own(found) => {
                image.own(*offset, *length).map(|extent| *found = Some(extent))
            }
            ImageQuery::Settle => image.settle_for_readers(),
        };
    }
    if let Err(error) = image.commit() {
        // Nothing points to the data that was written.
        let requests = batch.iter_mut().map(|job| &mut job.request);
        let changes = |request: &&mut Request| match request.asked {
            ImageQuery::Operation(operation) => operation != Operation::Read,
            ImageQuery::Extent(_) | ImageQuery::Own(_) => false,
            ImageQuery::Settle => true,
        };
        requests.filter(changes).for_each(|request| request.result = Err(error));
    }
}

/// Runs code of the library on the image, which is not used again if that panics: held-back tables are then
/// not written.
fn contain<T>(
    mut image: Qcow2Image,
    run: impl FnOnce(&mut Qcow2Image) -> T,
) -> (Option<Qcow2Image>, Option<T>) {
    match contained::run(|| run(&mut image)) {
        Some(outcome) => (Some(image), Some(outcome)),
        None => {
            tracing::error!("a defect in the reader of qcow2 images; the disk has failed");
            mem::forget(image);
            (None, None)
        }
    }
}

impl Event for Waker {
    fn set(&self) {
        self.wake();
    }

    /// Nothing to clear: the chain that slept has disarmed it.
    fn clear(&self) {}
}

/// The owner of an image, shared by all users of the disk. It ends, and the image is closed, when the last is gone.
#[derive(Clone)]
pub(super) struct ImageWorker {
    exchange: Arc<Exchange<ImageOwner>>,
    known: Arc<KnownClusters>,
    offset: u64,
}

impl ImageWorker {
    pub(super) fn new(image: Qcow2Image) -> Self {
        let (known, offset) = (image.known(), image.offset());
        let exchange = Arc::new(Exchange::new(ImageOwner::new(Some(image))));
        Self { exchange, known, offset }
    }

    /// A backend for one queue, which moves data of known places in the image's files, itself first, by itself.
    pub(super) fn queue(&self, files: &Arc<[ImageFile]>, data: DataFiles) -> Box<dyn Storage> {
        Box::new(ImageQueue {
            exchange: Arc::clone(&self.exchange),
            end: None,
            capacity: 0,
            lists: Vec::new(),
            known: Arc::clone(&self.known),
            offset: self.offset,
            files: Arc::clone(files),
            data,
            places: Vec::new(),
            left: Vec::new(),
            looked: None,
        })
    }

    /// For callers that ask where the disk's zeroes are, and may sleep. `raw` is the file below all others, if it is a raw one.
    pub(super) fn extents(&self, raw: Option<ImageFile>) -> io::Result<Extents> {
        let id = Requests::new(1).take().ok_or(io::ErrorKind::Other)?;
        let end = Mutex::new(self.exchange.end(Waker::new()?));
        Ok(Extents { end, id, raw, data: Mutex::new(0..0) })
    }
}

/// Finds an image's zeroes: asks its thread, one question at a time. Holes of a raw file below it are looked for by who asks: where
/// a network has the file, that takes long, and guests wait for the thread.
pub struct Extents {
    end: Mutex<End<ImageOwner>>,
    /// The only request there is.
    id: RequestId,
    raw: Option<ImageFile>,
    /// The data of that file that was found last: many small clusters of layers may lie over it. If there is a hole by now, it is read.
    data: Mutex<Range<u64>>,
}

impl fmt::Debug for Extents {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Extents")
    }
}

impl Extents {
    /// The content at `at`, which is below `end`, up to `end` at most.
    ///
    /// # Errors
    /// [`IoError`] of the image's tables, in an error of the kind `Other`; or a system error.
    pub fn extent(&self, at: u64, end: u64) -> io::Result<Extent> {
        let ImageQuery::Extent(Some(found)) = self.ask(ImageQuery::Extent(None), at, end)? else {
            return Err(io::ErrorKind::Other.into());
        };
        let Some((raw, place)) = self.raw.as_ref().zip(found.in_raw) else {
            return Ok(found.extent);
        };
        let there = self.in_raw(raw, place, place + (found.extent.end - at))?;
        Ok(Extent { data: there.data, end: at + (there.end - place) })
    }

    /// What the raw file has at `place`, up to `end` at most. Data is remembered, and a hole is not: it may get data.
    fn in_raw(&self, raw: &ImageFile, place: u64, end: u64) -> io::Result<Extent> {
        let known = self.data.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if known.contains(&place) {
            return Ok(Extent { data: true, end: known.end.min(end) });
        }
        let found = raw.extent(place, raw.length().max(end))?;
        if found.data {
            *self.data.lock().unwrap_or_else(PoisonError::into_inner) = place..found.end;
        }
        Ok(Extent { end: found.end.min(end), ..found })
    }

    /// What the image itself has at `at`, without the files below it, up to `end` at most.
    ///
    /// # Errors
    /// As [`Extents::extent`].
    pub fn own(&self, at: u64, end: u64) -> io::Result<OwnExtent> {
        match self.ask(ImageQuery::Own(None), at, end)? {
            ImageQuery::Own(Some(extent)) => Ok(extent),
            _ => Err(io::ErrorKind::Other.into()),
        }
    }

    /// Has the image left in its file as if it were closed.
    ///
    /// # Errors
    /// As [`Extents::extent`].
    pub(super) fn settle(&self) -> io::Result<()> {
        self.ask(ImageQuery::Settle, 0, 0).map(drop)
    }

    fn ask(&self, asked: ImageQuery, at: u64, end: u64) -> io::Result<ImageQuery> {
        let mut queue = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let (id, data, places) = (self.id, Segments::default(), Vec::new());
        let (offset, length, result) = (at, end - at, Ok(()));
        queue.push(Request { id, asked, offset, length, data, places, result });
        if let Err(error) = queue.hand_over() {
            // The request is taken back.
            queue.refuse(|_| ());
            drop(queue.collect());
            return Err(error);
        }
        let Request { asked, result, .. } = answer(&mut queue)?;
        result.map_err(io::Error::other)?;
        Ok(asked)
    }
}

/// Sleeps until the one request is answered.
fn answer(queue: &mut End<ImageOwner>) -> io::Result<Request> {
    loop {
        queue.event().arm();
        let answered = queue.collect().next();
        let mut woken = [PollFd::new(queue.event().event(), PollFlags::POLLIN)];
        let slept = match answered {
            Some(_) => Ok(0),
            None => poll(&mut woken, PollTimeout::NONE),
        };
        let woken = woken[0].any().unwrap_or(true);
        queue.event().disarm(woken);
        match (answered, slept) {
            (Some(answered), _) => return Ok(answered),
            (None, Ok(_) | Err(Errno::EINTR)) => {}
            (None, Err(error)) => return Err(error.into()),
        }
    }
}

/// One queue's end of the image.
struct ImageQueue {
    exchange: Arc<Exchange<ImageOwner>>,
    /// From the first request on: only then is the waker known.
    end: Option<End<ImageOwner>>,
    capacity: usize,
    /// Lists of memory, by request, kept so that none is allocated.
    lists: Vec<(Segments, Vec<Place>)>,
    known: Arc<KnownClusters>,
    /// Where the guest's first byte is in the image's disk.
    offset: u64,
    files: Arc<[ImageFile]>,
    data: DataFiles,
    /// Where the data of the request at hand is.
    places: Vec<Place>,
    /// Requests whose data the thread has left to the queue, while they are taken up.
    left: Vec<RequestId>,
    /// When the file's length was last checked.
    looked: Option<Instant>,
}

/// How a queue moves data itself.
pub(super) enum DataFiles {
    /// By a ring.
    Ring(Box<UringFile>),
    /// By system calls, where the files' pages are in memory or there is no ring.
    Calls(Segments),
}

impl ImageQueue {
    /// Finds where the request's data is; false if the queue cannot move it itself.
    fn find(&mut self, request: &crate::stack::request::Request) -> bool {
        let (operation, offset, length) = (request.operation, request.offset, request.length);
        if !matches!(operation, Operation::Read | Operation::Write)
            || !self.known.places(self.offset + offset, length, &mut self.places)
        {
            return false;
        }
        let there = |place: &Place| self.files[place.file].holds(place.at, place.length as u64);
        if !self.places.iter().all(there) {
            return false;
        }
        if operation == Operation::Write {
            let own = self.places.iter().all(|place| place.file == 0);
            if !own || self.files[0].is_lost() {
                return false;
            }
            // As often as with a raw file: a file that was cut is not made longer again.
            if self.looked.is_none_or(|looked| looked.elapsed() > LOOK_EVERY) {
                if self.files[0].intact().is_err() {
                    return false;
                }
                self.looked = Some(Instant::now());
            }
        }
        true
    }

    /// Hands requests over to the thread, and takes its answers; data that these leave to the queue is moved.
    fn take_answers(&mut self, io: &mut Io<'_>) {
        let Some(end) = &mut self.end else { return };
        if let Err(error) = end.hand_over() {
            tracing::error!(%error, "no thread for an image: its requests fail");
            let failed = IoError::Device(error.raw_os_error().unwrap_or(libc::EAGAIN));
            end.refuse(|request| request.result = Err(failed));
        }
        let mut left = mem::take(&mut self.left);
        for Request { id, result, data, places, .. } in end.collect() {
            let moves = result.is_ok() && !places.is_empty();
            self.lists[id.index()] = (data, places);
            if moves {
                left.push(id);
            } else {
                io.complete(id, result);
            }
        }
        for id in left.drain(..) {
            let places = mem::take(&mut self.lists[id.index()].1);
            self.transfer(id, &places, io);
            self.lists[id.index()].1 = places;
        }
        self.left = left;
    }

    /// Moves the request's data.
    fn transfer(&mut self, id: RequestId, places: &[Place], io: &mut Io<'_>) {
        match &mut self.data {
            DataFiles::Ring(ring) => ring.transfer_at(id, places, io),
            DataFiles::Calls(rest) => {
                let moved = places.iter().try_for_each(|place| {
                    let target = self.files[place.file].target();
                    sync::transfer_part(target, io.request(id), place, rest)
                });
                io.complete(id, moved);
            }
        }
    }
}

impl Storage for ImageQueue {
    fn prepare(&mut self, capacity: usize) {
        self.lists.resize_with(capacity, Default::default);
        self.left.reserve(capacity);
        self.capacity = capacity;
        if let DataFiles::Ring(ring) = &mut self.data {
            ring.prepare(capacity);
        }
    }

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        if self.find(io.request(id)) {
            let places = mem::take(&mut self.places);
            self.transfer(id, &places, io);
            self.places = places;
            return;
        }
        let request = io.request(id);
        let (mut data, mut places) = mem::take(&mut self.lists[id.index()]);
        data.clear();
        places.clear();
        data.push_from(&request.data, &mut Cursor::default(), request.data.bytes());
        let (operation, offset, length) = (request.operation, request.offset, request.length);
        let asked = ImageQuery::Operation(operation);
        let end = self.end.get_or_insert_with(|| {
            let mut end = self.exchange.end(io.waker().clone());
            end.reserve(self.capacity);
            end
        });
        end.push(Request { id, asked, offset, length, data, places, result: Ok(()) });
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.take_answers(io);
        // Last, as answers leave data to it.
        if let DataFiles::Ring(ring) = &mut self.data {
            ring.poll(io);
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        match &self.data {
            DataFiles::Ring(ring) => ring.wait_handle(),
            DataFiles::Calls(..) => None,
        }
    }

    fn works_at_once(&self) -> bool {
        false
    }

    fn deadline(&self) -> Option<Instant> {
        match &self.data {
            DataFiles::Ring(ring) => ring.deadline(),
            DataFiles::Calls(..) => None,
        }
    }

    fn finish(&mut self) -> bool {
        match &mut self.data {
            DataFiles::Ring(ring) => ring.finish(),
            DataFiles::Calls(..) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::transfer::ImageFormat;

    use super::*;

    fn image(at: &std::path::Path) -> Qcow2Image {
        let create = ["create", "-q", "-f", "qcow2"];
        let made = std::process::Command::new("qemu-img").args(create).arg(at).arg("1M").status();
        assert!(made.unwrap().success());
        let file = std::fs::File::options().read(true).write(true).open(at).unwrap();
        let below: Vec<(_, ImageFormat)> = Vec::new();
        super::super::open(file.into(), below, 0, 1 << 20, false).unwrap()
    }

    #[test]
    fn batches_of_an_image_begin_small_and_grow_only_when_they_are_full() {
        let mut owner = ImageOwner::new(None);
        owner.grow(FIRST_BATCH - 1);
        let sizes = std::iter::repeat_with(|| {
            let size = owner.batch();
            owner.grow(size);
            size
        });
        assert_eq!(sizes.take(5).collect::<Vec<_>>(), [2, 4, 8, 16, 16]);
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
            data.push(unsafe {
                crate::stack::memory::Segment::new(bytes.as_mut_ptr(), bytes.len())
            });
            image.perform(Operation::Write, (0, 65536), &data, &mut Vec::new()).unwrap();
            panic!("a defect");
        });
        let outcome: Option<()> = outcome;
        assert!(kept.is_none() && outcome.is_none());
        assert_eq!(std::fs::read(&path).unwrap()[..before.len()], before, "tables were written");

        let exchange = Arc::new(Exchange::new(ImageOwner::new(None)));
        let mut end = exchange.end(Waker::new().unwrap());
        end.push(Request {
            id: crate::stack::request::Requests::new(1).take().unwrap(),
            asked: ImageQuery::Operation(Operation::Flush),
            offset: 0,
            length: 0,
            data: Segments::default(),
            places: Vec::new(),
            result: Ok(()),
        });
        end.hand_over().unwrap();
        assert_eq!(answer(&mut end).unwrap().result, Err(IoError::Defect));
    }
}
