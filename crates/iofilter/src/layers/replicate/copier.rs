//! Copies the marked chunks from the disk to the replica.
//!
//! ```text
//!  batch: [ticket, read, write] of marked chunks ──> disk flushed, copy flushed ──> unmarked
//!           │ on error: logged, tried again after the others
//! ```
//! On a long line a flush takes as long as many pieces. So a copy elsewhere is flushed while the next batch is copied:
//! ```text
//!  batch 1: copied ──> [in flight: written] ──> [both sides flushed] ──> unmarked
//!  batch 2:            copied ────────────────────────────────────────────────> [in flight: written] ──> …
//! ```
//! The pipe knows how far the flush of the former batch is ([`Pipe::begin_flush`]). One batch at a time waits for it, and none
//! at the end of a pass, when the copy is paused or ends, and after an error. A failed flush may have lost what was written
//! of either batch, so both stay marked.
//!
//! A chunk may change while it is copied; then it stays marked, and the torn copy does no harm. A chunk that
//! changes all the time is still copied once a pass, so the replica has a version of it as old as that pass.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::layers::leg::LegChain;
use crate::layers::replicate::busy_piece::BusyPiece;
use crate::layers::replicate::format::Purpose;
use crate::layers::replicate::map::Copied;
use crate::layers::replicate::pace::Bucket;
use crate::layers::replicate::pipe::{DEPTH, PIECE, Pipe, PipeError, REMOTE_DEPTH};
use crate::layers::replicate::{Replicate, Waited};
use crate::stack::chain::Chain;
use crate::stack::request::IoError;
use crate::storage::extent::Own;
use crate::storage::file::FileDisk;
use crate::storage::own::LayerParts;

/// How long a copy rests beside a busy guest, in times of what a piece took: the copy has a fifth of storage's time.
const REST: u32 = 4;

/// The longest rest: storage that hangs for a while does not stop the copy for a multiple of that.
const REST_MAX: Duration = Duration::from_secs(1);

/// How much is copied before both sides are flushed, in bytes: small against what a device writes in a second, large
/// against the cost of a flush.
const BATCH_BYTES: u64 = 32 << 20;

/// The same of a mirror, whose copy is waited for: nothing is copied while both sides are flushed, some ten milliseconds.
const MIRROR_BATCH_BYTES: u64 = 128 << 20;

/// The same of a copy at a server elsewhere: a flush takes at least as long as the way there and back, and a batch is to take
/// several times as long.
const REMOTE_BATCH_BYTES: u64 = 1 << 30;
const REMOTE_BATCH_TIME: Duration = Duration::from_secs(8);
const REMOTE_BATCH_CHUNKS: usize = 4096;

/// The same limit in chunks: zeroes are quick.
const BATCH_CHUNKS: usize = 256;

/// The same limit in time: at a low rate a long batch would make the replica lag.
const BATCH_TIME: Duration = Duration::from_secs(1);

/// Why a copy was not made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The disk cannot be read or flushed.
    #[error("the disk cannot be read for its copy: {0}")]
    Source(IoError),
    /// The replica cannot be written or flushed.
    #[error("the copy falls behind, it cannot be written: {0}")]
    Replica(IoError),
    /// Somebody made its file shorter.
    #[error(
        "the copy was truncated while it was in use: find out by whom, then stop and start the VM; the whole disk is then copied again"
    )]
    Cut,
    /// The process ends.
    #[error("the copy was interrupted")]
    Stopped,
}

impl From<PipeError> for CopyError {
    fn from(error: PipeError) -> Self {
        match error {
            PipeError::Source(error) => Self::Source(error),
            PipeError::Copy(error) => Self::Replica(error),
        }
    }
}

/// How far the copy got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// There may be more to copy.
    More,
    /// It reached the end of the disk: the next one begins a new pass.
    Pass,
}

/// How much is copied before both sides are flushed.
#[derive(Clone, Copy, Debug)]
pub struct BatchLimits {
    /// In bytes.
    pub bytes: u64,
    /// In chunks.
    pub chunks: usize,
    /// For how long.
    pub time: Duration,
    /// Whether the next batch is copied while this one is flushed.
    pub overlap: bool,
}

impl BatchLimits {
    const MIRROR: Self =
        Self { bytes: MIRROR_BATCH_BYTES, chunks: BATCH_CHUNKS, time: BATCH_TIME, overlap: false };
    const REMOTE: Self = Self {
        bytes: REMOTE_BATCH_BYTES,
        chunks: REMOTE_BATCH_CHUNKS,
        time: REMOTE_BATCH_TIME,
        overlap: true,
    };
}

/// The batch whose chunks are being copied.
struct Present {
    begun: Instant,
    bytes: u64,
    copied: Vec<Copied>,
}

impl Present {
    fn begin() -> Self {
        Self { begun: Instant::now(), bytes: 0, copied: Vec::new() }
    }

    fn add(&mut self, copied: Copied, bytes: u64) {
        self.copied.push(copied);
        self.bytes += bytes;
    }

    /// Whether it is to be flushed.
    fn is_full(&self, limits: &BatchLimits) -> bool {
        let long = self.bytes >= limits.bytes || self.copied.len() >= limits.chunks;
        long || self.begun.elapsed() > limits.time
    }
}

/// Chunks with errors.
type Failed = [(usize, PipeError)];

/// Those of these chunks of which no piece has failed.
fn whole(mut copied: Vec<Copied>, failed: &Failed) -> Vec<Copied> {
    copied.retain(|copied| failed.iter().all(|(chunk, _)| *chunk != copied.chunk));
    copied
}

/// Why a chunk was not copied to its end.
enum Held {
    /// The process ends.
    Stopped,
    /// The copy is paused.
    Paused,
}

/// See the module.
pub struct Copier {
    replicate: Replicate,
    pipe: Pipe,
    /// The file of the disk, where its holes can be found without reading them.
    holes: Option<FileDisk>,
    /// What the disk's own image has, where the copy shows the same as the disk wherever that has nothing.
    layer: Option<LayerParts>,
    /// The next chunk of the pass.
    next: usize,
    /// How much may go ahead of the rate, in bytes.
    ahead: u64,
    bucket: Bucket,
    /// The guest's requests when the last piece began.
    requests: u64,
    /// When the piece began that was the last, while nothing else was done since.
    begun: Option<Instant>,
    /// The length of that piece, if it was copied beside a busy guest.
    beside_guest: Option<usize>,
    busy_piece: BusyPiece,
    /// The replica was truncated, and the map does not say so yet.
    cut: bool,
    /// The copy is at a server elsewhere: what that takes is not taken from the guest's storage.
    remote: bool,
    limits: BatchLimits,
    /// The chunks of the batch before the present one, which waits for its flush.
    former: Vec<Copied>,
}

impl Copier {
    /// Copies from `source`, a chain of what is below the layer, to its leg.
    #[must_use]
    pub fn new(
        replicate: &Replicate,
        source: Chain,
        holes: Option<FileDisk>,
        leg: LegChain,
    ) -> Self {
        // A replica is copied for good, so it must not be felt.
        let (pieces, limits) = match replicate.0.geometry.purpose() {
            Purpose::Replica => (1, BatchLimits { bytes: BATCH_BYTES, ..BatchLimits::MIRROR }),
            Purpose::Mirror if leg.is_remote() => (REMOTE_DEPTH, BatchLimits::REMOTE),
            Purpose::Mirror => (DEPTH, BatchLimits::MIRROR),
        };
        Self::in_batches(replicate, source, holes, leg, pieces, limits)
    }

    /// The same with this many pieces in flight, in these batches: for tests, whose disks are small.
    #[must_use]
    pub fn in_batches(
        replicate: &Replicate,
        source: Chain,
        holes: Option<FileDisk>,
        leg: LegChain,
        pieces: usize,
        limits: BatchLimits,
    ) -> Self {
        Self {
            remote: leg.is_remote(),
            limits,
            former: Vec::new(),
            replicate: replicate.clone(),
            pipe: Pipe::new(source, leg, pieces),
            holes,
            layer: None,
            next: 0,
            ahead: 0,
            bucket: Bucket::new(Instant::now()),
            requests: 0,
            begun: None,
            beside_guest: None,
            busy_piece: BusyPiece::default(),
            cut: false,
        }
    }

    /// Copies only what the disk's own image has: below it the copy has the same. An image never gives up what it has, so
    /// nothing that was copied shows from below again.
    #[must_use]
    pub fn of_layer(self, layer: Option<LayerParts>) -> Self {
        Self { layer, ..self }
    }

    /// Copies marked chunks and makes them durable: a batch, or, where batches overlap, what is left of the pass. Nothing is
    /// in flight when it returns, and no batch waits for its flush.
    ///
    /// # Errors
    /// [`CopyError`]; chunks copied before it count.
    pub fn batch(&mut self) -> Result<Batch, CopyError> {
        let shared = self.replicate.0.clone();
        if self.cut && !shared.mark_all() {
            return Err(CopyError::Cut);
        }
        self.cut = false;
        let mut present = Present::begin();
        let outcome = self.copy_marked(&mut present);
        self.pipe.drain();
        self.begun = None;
        shared.counters.copied.add(self.pipe.take_written());
        let failed = self.pipe.take_failed();
        let cut = failed.iter().any(|(_, error)| *error == PipeError::Copy(IoError::Truncated));
        let (former, flushed) = (std::mem::take(&mut self.former), self.pipe.take_flushed());
        if cut {
            outcome?;
            return Err(self.found_cut());
        }
        if let Some(flushed) = flushed {
            flushed.map_err(|error| self.not_flushed(error))?;
            self.unmark(&whole(former, &failed));
        }
        let batch = outcome?;
        let copied = whole(present.copied, &failed);
        if !copied.is_empty() {
            // After a power cut the disk may be older than the data that was read from it, unless it was flushed.
            self.pipe.flush().map_err(|error| self.not_flushed(error))?;
            self.unmark(&copied);
        }
        match failed.first() {
            Some((_, error)) => Err((*error).into()),
            None => Ok(batch),
        }
    }

    /// Copies marked chunks until the present batch is to be flushed and nothing may be copied meanwhile.
    fn copy_marked(&mut self, present: &mut Present) -> Result<Batch, CopyError> {
        let shared = self.replicate.0.clone();
        loop {
            let Some(chunk) = shared.chunks.next_marked(self.next) else {
                self.next = 0;
                // The chunks of the former batch are not among those that the copy lacks.
                self.finish_former();
                self.let_go_ahead();
                return Ok(Batch::Pass);
            };
            self.next = chunk + 1;
            let (began, ticket) = (shared.clock.now(), shared.chunks.ticket(chunk));
            match self.copy(chunk) {
                Ok(()) => {}
                Err(Held::Stopped) => return Err(CopyError::Stopped),
                // What was copied before is made durable now.
                Err(Held::Paused) => {
                    self.next = chunk;
                    return Ok(Batch::More);
                }
            }
            present.add(Copied { chunk, ticket, began }, shared.geometry.chunk());
            self.unmark_former();
            if present.is_full(&self.limits) {
                if !self.limits.overlap {
                    return Ok(Batch::More);
                }
                self.begin_flush(present);
            }
            if self.pipe.has_failed() {
                return Ok(Batch::More);
            }
        }
    }

    /// Has the present batch flushed while the next one is copied.
    fn begin_flush(&mut self, present: &mut Present) {
        self.finish_former();
        if !self.pipe.has_failed() {
            self.former = std::mem::replace(present, Present::begin()).copied;
            self.pipe.begin_flush();
        }
    }

    /// Waits until no batch waits for its flush.
    fn finish_former(&mut self) {
        self.pipe.finish_flush();
        self.unmark_former();
    }

    /// Unmarks the former batch, if its flush has ended well. Where anything has failed, [`Self::batch`] does what is to be done.
    fn unmark_former(&mut self) {
        if !self.pipe.has_failed() && self.pipe.take_flushed().is_some() {
            self.replicate.0.counters.copied.add(self.pipe.take_written());
            let former = std::mem::take(&mut self.former);
            self.unmark(&former);
        }
    }

    /// These chunks are durable on both sides.
    fn unmark(&self, copied: &[Copied]) {
        if !copied.is_empty() {
            self.replicate.0.unmark(copied);
        }
    }

    /// A flush has failed, and nothing is in flight. What was copied since the last good one stays marked, so it is written
    /// again.
    fn not_flushed(&mut self, error: PipeError) -> CopyError {
        match error {
            PipeError::Source(_) => {}
            PipeError::Copy(error) => {
                self.pipe.forget_failed_flush();
                if error == IoError::Truncated {
                    return self.found_cut();
                }
            }
        }
        error.into()
    }

    /// Marks everything: nothing in the replica can be relied on.
    fn found_cut(&mut self) -> CopyError {
        self.pipe.forget_cut();
        self.cut = !self.replicate.0.mark_all();
        CopyError::Cut
    }

    /// Begins to copy a chunk.
    fn copy(&mut self, chunk: usize) -> Result<(), Held> {
        let (mut at, end) = self.replicate.0.geometry.range(chunk);
        while at < end {
            self.may_go_on()?;
            let (content, part) = self.part(at, end);
            if content == Own::Nothing {
                at = part;
                continue;
            }
            if content == Own::Zeroes {
                let hole = part;
                // Where holes cannot be punched, zeroes are written like data.
                if !self.pipe.punches() {
                    self.wait_for_the_rate(hole - at)?;
                }
                self.pipe.zero(chunk, at, hole - at);
                at = hole;
                continue;
            }
            let busy = self.yield_to_the_guest()?;
            let most = if busy { self.busy_piece.next() } else { PIECE };
            let length = usize::try_from(part - at).unwrap_or(most).min(most);
            self.wait_for_the_rate(length as u64)?;
            self.beside_guest = busy.then_some(length);
            self.begun = Some(Instant::now());
            self.pipe.piece(chunk, at, length);
            if self.remote {
                // Without the time that it has waited for the line.
                self.begun = Some(Instant::now());
            }
            at += length as u64;
        }
        Ok(())
    }

    /// What is to be done with the disk from `at` on, and up to where: nothing, zeroes, or data to be copied.
    fn part(&self, at: u64, end: u64) -> (Own, u64) {
        if let Some(layer) = &self.layer {
            // What cannot be told is copied, and a damaged table is found by that.
            let found = layer.at(at, end).ok().filter(|found| found.end > at);
            return found.map_or((Own::Data, end), |found| (found.content, found.end.min(end)));
        }
        match self.hole(at, end) {
            hole if hole > at => (Own::Zeroes, hole),
            _ => (Own::Data, end),
        }
    }

    /// Where the hole at `at` ends; `at` itself if there is none, or it is not known.
    fn hole(&self, at: u64, end: u64) -> u64 {
        let extent = self.holes.as_ref().and_then(|file| file.extent(at, end).ok());
        let hole = extent.filter(|extent| !extent.data);
        // Direct I/O takes whole blocks only.
        hole.map_or(at, |hole| if hole.end == end { end } else { hole.end / 4096 * 4096 })
    }

    /// A mirror is copied as fast as storage works while the guest is idle, or is slowed itself. Where it has made requests
    /// since the last piece, the next one is small, and waits for the end of that one and for [`REST`] times as long. True
    /// if so.
    fn yield_to_the_guest(&mut self) -> Result<bool, Held> {
        let requests = self.replicate.0.requests.load(Ordering::Relaxed);
        let busy = std::mem::replace(&mut self.requests, requests) != requests;
        let yields = busy && self.replicate.0.mark_pause.pause().is_zero();
        if yields {
            if self.remote {
                self.pipe.finish_reads();
            } else {
                self.pipe.drain();
            }
            let took = self.begun.take().map_or(Duration::ZERO, |begun| begun.elapsed());
            if let Some(length) = self.beside_guest.take().filter(|_| !took.is_zero()) {
                self.busy_piece.timed(length, took);
            }
            let rest = (took * REST).min(REST_MAX);
            if !self.replicate.0.sleep(rest) {
                return Err(Held::Stopped);
            }
        }
        Ok(yields)
    }

    /// Whether neither the process ends nor the copy is paused.
    fn may_go_on(&self) -> Result<(), Held> {
        match self.replicate.0.look() {
            Waited::Closed => Err(Held::Stopped),
            Waited::Paused => Err(Held::Paused),
            Waited::Over | Waited::Changed => Ok(()),
        }
    }

    /// After a pass a mirror may copy ahead of its rate as much as a guest could wait for, if it lacks no more, and has kept to the
    /// rate since it last did so. At a low rate a guest that writes a little, here and there, would keep it from its end: each write
    /// marks a whole chunk.
    fn let_go_ahead(&mut self) {
        let geometry = self.replicate.0.geometry;
        let keeps_to_it = self.bucket.wait(self.replicate.0.rate(), Instant::now()).is_zero();
        if geometry.purpose() == Purpose::Mirror && keeps_to_it && self.replicate.is_near().is_ok()
        {
            self.ahead = geometry.pivot_chunks() * geometry.chunk();
        }
    }

    /// Sleeps until this many bytes may be read. A rate that changes meanwhile counts at once.
    fn wait_for_the_rate(&mut self, bytes: u64) -> Result<(), Held> {
        if let Some(left) = self.ahead.checked_sub(bytes) {
            self.ahead = left;
            // They are owed.
            self.bucket.take(bytes);
            self.replicate.0.counters.paced.add(bytes);
            return Ok(());
        }
        loop {
            let rate = self.replicate.0.rate();
            let wait = self.bucket.wait(rate, Instant::now());
            if !wait.is_zero() && self.pipe.is_flushing() {
                // Nothing looks after it while this sleeps, which may be for minutes.
                self.finish_former();
                continue;
            }
            match self.replicate.0.sleep_at(rate, wait) {
                Waited::Closed => return Err(Held::Stopped),
                Waited::Paused => return Err(Held::Paused),
                Waited::Changed => {}
                Waited::Over => break,
            }
        }
        self.bucket.take(bytes);
        self.replicate.0.counters.paced.add(bytes);
        Ok(())
    }
}
