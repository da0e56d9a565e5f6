//! The status of a disk: written by its threads, read by the control socket.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmseal_api::filter::{
    DiskActivity, DiskCounters, DiskFigures, DiskFile, DiskStatus, DiskWaits, LatencyFigures,
};
use vmseal_api::id::DiskId;
use vmseal_log::Seldom;

use crate::disk::pacing::{Paced, WorkPace};
use crate::layers;
use crate::layers::replicate::Replicate;
use crate::layers::replicate::mirror::Mirror;
use crate::stack::chain::Done;
use crate::stack::dirty::Bitmaps;
use crate::stack::figures::{CipherTime, Latencies};
use crate::stack::flight::Flight;
use crate::stack::layer::Layer;
use crate::stack::request::{IoError, Operation};
use crate::stack::tally::Tally;

/// The counters of one queue. Only its own thread writes; a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Counters {
    reads: Tally,
    read_bytes: Tally,
    writes: Tally,
    written_bytes: Tally,
    flushes: Tally,
    discards: Tally,
    errors: Tally,
    latencies: Latencies,
}

impl Counters {
    /// Counts a request that succeeded.
    pub fn succeeded(&self, operation: Operation, bytes: u64) {
        match operation {
            Operation::Read => {
                self.reads.add(1);
                self.read_bytes.add(bytes);
            }
            Operation::Write => {
                self.writes.add(1);
                self.written_bytes.add(bytes);
            }
            Operation::Flush => self.flushes.add(1),
            Operation::Discard | Operation::WriteZeroes { .. } => self.discards.add(1),
        }
    }

    /// Notes the duration of a request that succeeded.
    pub fn took(&self, operation: Operation, took: Duration) {
        self.latencies.took(operation, took);
    }

    /// Counts a request that failed.
    pub fn failed(&self) {
        self.errors.add(1);
    }
}

/// The status of one disk.
#[derive(Debug)]
pub struct DiskState {
    disk: DiskId,
    activity: Mutex<DiskActivity>,
    last_error: Mutex<Option<String>>,
    /// When failed requests are logged: a guest can cause them at will.
    failed: Seldom,
    /// The same for queues that a guest breaks: it can set one up again and break it again as fast as it likes.
    broken: Seldom,
    queues: Vec<Counters>,
    /// By queue: what a guest has asked there and is in flight.
    flights: Mutex<BTreeMap<usize, Arc<Flight>>>,
    cipher: Mutex<Option<Arc<CipherTime>>>,
    layers: Mutex<Vec<Arc<dyn Layer>>>,
    waits: Mutex<Option<DiskWaits>>,
    file: Mutex<Option<DiskFile>>,
    bitmaps: Mutex<Option<Arc<Bitmaps>>>,
    replica: Option<Replicate>,
    mirror: Mutex<Option<Arc<Mirror>>>,
    /// The pace of its work, where the work copies the disk and no guest waits for it.
    pace: Option<Arc<WorkPace>>,
    /// Of the readers beside its front end.
    beside: Option<Arc<DiskState>>,
    front_end: Mutex<FrontEnd>,
}

/// What is known of the VMM that is connected.
#[derive(Default)]
struct FrontEnd {
    /// Tells it that the disk has another size.
    announce: Option<Announce>,
    /// Whether its guest's driver uses the disk.
    driver: bool,
}

impl fmt::Debug for FrontEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrontEnd").field("driver", &self.driver).finish_non_exhaustive()
    }
}

/// Tells a VMM that the disk has another size than before.
pub type Announce = Box<dyn Fn() -> io::Result<()> + Send>;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl DiskState {
    /// An idle disk with this many queues.
    #[must_use]
    pub fn new(disk: DiskId, queues: usize) -> Self {
        Self {
            disk,
            activity: Mutex::new(DiskActivity::Idle),
            last_error: Mutex::default(),
            failed: Seldom::default(),
            broken: Seldom::default(),
            queues: (0..queues.max(1)).map(|_| Counters::default()).collect(),
            flights: Mutex::default(),
            cipher: Mutex::default(),
            layers: Mutex::default(),
            waits: Mutex::default(),
            file: Mutex::default(),
            bitmaps: Mutex::default(),
            replica: None,
            mirror: Mutex::default(),
            pace: None,
            beside: None,
            front_end: Mutex::default(),
        }
    }

    /// Sets how the VMM is told of another size.
    pub fn set_announce(&self, announce: Option<Announce>) {
        lock(&self.front_end).announce = announce;
    }

    /// Sets whether the guest's driver uses the disk.
    pub fn set_driver(&self, driver: bool) {
        lock(&self.front_end).driver = driver;
    }

    /// Tells the VMM that the disk has another size than before.
    ///
    /// # Errors
    /// Why it cannot be told now.
    pub fn announce_size(&self) -> Result<(), String> {
        let front_end = lock(&self.front_end);
        let announce = front_end.announce.as_ref().ok_or("its VMM has given no channel for it")?;
        if !front_end.driver {
            return Err("no driver uses the disk, and its VMM would not look".to_owned());
        }
        announce().map_err(|error| error.to_string())
    }

    /// The same, of a disk that is read beside its front end: errors there are reported with the disk's own.
    #[must_use]
    pub fn with_beside(self, beside: Option<Arc<Self>>) -> Self {
        Self { beside, ..self }
    }

    /// The last error of a request of the guest or, if there is none, of the readers beside it.
    fn last_error(&self) -> Option<String> {
        let own = lock(&self.last_error).clone();
        own.or_else(|| self.beside.as_ref().and_then(|beside| beside.last_error()))
    }

    /// The same, of a disk that has these dirty bitmaps.
    #[must_use]
    pub fn with_bitmaps(self, bitmaps: Arc<Bitmaps>) -> Self {
        self.set_bitmaps(bitmaps);
        self
    }

    /// The disk has these dirty bitmaps from now on.
    pub fn set_bitmaps(&self, bitmaps: Arc<Bitmaps>) {
        *lock(&self.bitmaps) = Some(bitmaps);
    }

    /// The same, of a disk that has a replica.
    #[must_use]
    pub fn with_replica(self, replica: Option<Replicate>) -> Self {
        Self { replica, ..self }
    }

    /// The same, of a disk that is mirrored.
    #[must_use]
    pub fn with_mirror(self, mirror: Option<Arc<Mirror>>) -> Self {
        self.set_mirror(mirror);
        self
    }

    /// The same, of a disk whose work goes at this pace.
    #[must_use]
    pub fn with_pace(self, pace: Option<Arc<WorkPace>>) -> Self {
        Self { pace, ..self }
    }

    /// How fast the disk's work goes; none where nothing holds it back.
    #[must_use]
    pub fn pace(&self) -> Option<&Arc<WorkPace>> {
        self.pace.as_ref()
    }

    /// Holds a piece of the disk's work to its pace.
    #[must_use]
    pub fn paced(&self) -> Paced {
        Paced::new(self.pace.clone())
    }

    /// The disk is mirrored from now on, or is not.
    pub fn set_mirror(&self, mirror: Option<Arc<Mirror>>) {
        *lock(&self.mirror) = mirror;
    }

    /// The disk's dirty bitmaps; none where nobody marks them.
    #[must_use]
    pub fn bitmaps(&self) -> Option<Arc<Bitmaps>> {
        lock(&self.bitmaps).clone()
    }

    /// The same, of a disk whose cipher's time is measured here.
    #[must_use]
    pub fn with_cipher(self, cipher: Option<Arc<CipherTime>>) -> Self {
        self.set_cipher(cipher);
        self
    }

    /// The time of the disk's cipher is measured here from now on, if it has one.
    pub fn set_cipher(&self, cipher: Option<Arc<CipherTime>>) {
        *lock(&self.cipher) = cipher;
    }

    /// The same, of a disk with these layers.
    #[must_use]
    pub fn with_layers(self, layers: Vec<Arc<dyn Layer>>) -> Self {
        self.set_layers(layers);
        self
    }

    /// The disk has these layers from now on.
    pub fn set_layers(&self, layers: Vec<Arc<dyn Layer>>) {
        *lock(&self.layers) = layers;
    }

    /// Sets what the disk's requests wait for.
    pub fn set_waits(&self, waits: Option<DiskWaits>) {
        *lock(&self.waits) = waits;
    }

    /// Sets the file that is written.
    pub fn set_file(&self, file: Option<DiskFile>) {
        *lock(&self.file) = file;
    }

    /// Which disk.
    #[must_use]
    pub fn disk(&self) -> DiskId {
        self.disk
    }

    /// The counters of one queue.
    #[must_use]
    pub fn counters(&self, queue: usize) -> &Counters {
        &self.queues[queue]
    }

    /// Sets the disk's activity.
    pub fn set(&self, activity: DiskActivity) {
        *lock(&self.activity) = activity;
    }

    /// Notes and logs (rate-limited) that a request failed because of us or the storage below us,
    /// or that the guest asked for something impossible.
    pub fn note(&self, done: &Done, error: IoError) {
        if !matches!(error, IoError::OutOfRange | IoError::Scattered | IoError::ReadOnly) {
            *lock(&self.last_error) = Some(error.to_string());
        }
        if let Some(unlogged) = self.failed.due() {
            tracing::error!(
                operation = ?done.operation, offset = done.offset, length = done.length, %error, unlogged,
                "a request failed; the guest or tool that made it gets an I/O error"
            );
        }
    }

    /// Notes and logs (rate-limited) that a queue is stopped because the guest broke its ring.
    pub fn note_broken(&self, queue: usize, error: &dyn std::error::Error) {
        if let Some(unlogged) = self.broken.due() {
            tracing::error!(queue, %error, unlogged, "the guest's queue is stopped");
        }
    }

    /// What is in flight of a queue is noted here from now on.
    pub fn set_flight(&self, queue: usize, flight: Arc<Flight>) {
        lock(&self.flights).insert(queue, flight);
    }

    /// For how long the oldest request of the guest is in flight.
    #[must_use]
    pub fn oldest_request(&self) -> Option<Duration> {
        let now = Instant::now();
        lock(&self.flights).values().filter_map(|flight| flight.oldest(now)).max()
    }

    /// For how long storage has not answered a request, where requests of the disk fail for that.
    fn fails_for(&self) -> Option<Duration> {
        lock(&self.layers).iter().find_map(|layer| layer.fails_for())
    }

    /// The sum over all queues.
    #[must_use]
    pub fn totals(&self) -> DiskCounters {
        let sum = |field: fn(&Counters) -> &Tally| {
            self.queues.iter().map(|queue| field(queue).get()).sum()
        };
        DiskCounters {
            reads: sum(|queue| &queue.reads),
            read_bytes: sum(|queue| &queue.read_bytes),
            writes: sum(|queue| &queue.writes),
            written_bytes: sum(|queue| &queue.written_bytes),
            flushes: sum(|queue| &queue.flushes),
            discards: sum(|queue| &queue.discards),
            errors: sum(|queue| &queue.errors),
        }
    }

    /// The measurements of the disk.
    #[must_use]
    pub fn figures(&self) -> DiskFigures {
        let mut latencies = LatencyFigures::default();
        self.queues.iter().for_each(|queue| queue.latencies.add_to(&mut latencies));
        DiskFigures {
            disk: self.disk,
            counters: self.totals(),
            latencies,
            cipher: lock(&self.cipher).as_ref().map(|cipher| cipher.figures()),
            layers: lock(&self.layers).iter().map(|layer| layers::figures(&**layer)).collect(),
            replica: self.replica.as_ref().map(Replicate::status),
        }
    }

    /// The control socket's view of the disk.
    #[must_use]
    pub fn status(&self) -> DiskStatus {
        // What has failed to the guest is in flight no more, and yet in storage.
        let fails_for = self.fails_for();
        let oldest = self.oldest_request().max(fails_for);
        DiskStatus {
            disk: self.disk,
            driver: Some(lock(&self.front_end).driver),
            state: lock(&self.activity).clone(),
            waits: *lock(&self.waits),
            file: *lock(&self.file),
            oldest_milliseconds: oldest
                .map(|age| u64::try_from(age.as_millis()).unwrap_or(u64::MAX)),
            fails: fails_for.is_some(),
            counters: self.totals(),
            last_error: self.last_error(),
            bitmaps: self.bitmaps().map(|bitmaps| bitmaps.status()).unwrap_or_default(),
            replica: self.replica.as_ref().map(Replicate::status),
            mirror: lock(&self.mirror).as_ref().map(|mirror| mirror.status()),
        }
    }
}
