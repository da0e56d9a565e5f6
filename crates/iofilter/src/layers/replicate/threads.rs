//! The two threads of a replica: the marker, which queues may wait for, and the copier, which nobody waits for.
//!
//! ```text
//!  marker  sleeps ── asked ──> marks, again and again until it is on record ──> sleeps
//!  copier  sleeps ── something is marked ──> passes, a second apart ──> sleeps
//!                                              │ an error: 1 s, 2 s, … 60 s, then the next chunk
//! ```
//! A mirror's copier passes more often, and its marker pauses after each mark while the guest changes the disk faster than
//! it is copied.
//!
//! They end when told to. A copier that hangs because the replica's storage hangs is not waited for.

use std::io;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::layers::replicate::chunks::Span;
use crate::layers::replicate::copier::{Batch, Copier, CopyError};
use crate::layers::replicate::format::Purpose;
use crate::layers::replicate::{ReplicaState, Replicate, lock};

/// The stack size of each thread; it is locked memory.
const STACK: usize = 128 * 1024;

/// The time between passes: a chunk that a guest changes again and again is copied once in this time.
const PASS_EVERY: Duration = Duration::from_secs(1);

/// The same for a mirror, which is to come to an end.
const MIRROR_PASS_EVERY: Duration = Duration::from_millis(100);

/// The pause after an error; it doubles with each error that follows.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);

/// The same for the map, which the guest may wait for.
const MARK_RETRY_FIRST: Duration = Duration::from_millis(10);
const MARK_RETRY_MAX: Duration = Duration::from_secs(1);

/// How long to wait for threads that were told to end.
const END_WITHIN: Duration = Duration::from_secs(2);

/// How often to check whether they have ended.
const END_LOOKED_EVERY: Duration = Duration::from_millis(5);

/// The running threads; they end when this is dropped.
pub struct Replicating {
    shared: Arc<ReplicaState>,
    threads: Vec<JoinHandle<()>>,
}

impl Replicating {
    /// Starts them. Nothing is marked or copied before that.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn start(replicate: &Replicate, mut copier: Copier) -> io::Result<Self> {
        let shared = Arc::clone(&replicate.0);
        let mut replicating = Self { shared, threads: Vec::new() };
        let marker = Arc::clone(&replicate.0);
        replicating.spawn("marker", move || mark(&marker))?;
        let shared = Arc::clone(&replicate.0);
        replicating.spawn("copier", move || copy(&shared, &mut copier))?;
        Ok(replicating)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let (span, builder) = (tracing::Span::current(), std::thread::Builder::new());
        let run = move || span.in_scope(run);
        self.threads.push(builder.name(name.into()).stack_size(STACK).spawn(run)?);
        Ok(())
    }
}

impl Drop for Replicating {
    fn drop(&mut self) {
        lock(&self.shared.inbox).closed = true;
        self.shared.news.notify_all();
        let until = Instant::now() + END_WITHIN;
        while self.threads.iter().any(|thread| !thread.is_finished()) {
            if Instant::now() > until {
                return tracing::warn!("the storage of the copy hangs; the copy is abandoned");
            }
            std::thread::sleep(END_LOOKED_EVERY);
        }
    }
}

/// Sleeps until chunks are to be marked; none at the end.
fn asked(shared: &ReplicaState) -> Option<Vec<Span>> {
    let mut inbox = lock(&shared.inbox);
    while inbox.spans.is_empty() {
        if inbox.closed {
            return None;
        }
        inbox = shared.news.wait(inbox).unwrap_or_else(PoisonError::into_inner);
    }
    Some(std::mem::take(&mut inbox.spans))
}

fn mark(shared: &ReplicaState) {
    while let Some(spans) = asked(shared) {
        // One flush for all who wait, unless they are to be slowed.
        let at_once = if shared.mark_pause.pause().is_zero() { spans.len() } else { 1 };
        for spans in spans.chunks(at_once.max(1)) {
            let mut wait = MARK_RETRY_FIRST;
            while !shared.mark(spans) {
                if !shared.sleep(wait) {
                    return;
                }
                wait = (wait * 2).min(MARK_RETRY_MAX);
            }
            if !shared.sleep(shared.mark_pause.pause()) {
                return;
            }
        }
    }
}

/// Sleeps until something is marked, and the copy is not paused; false at the end.
fn is_dirty(shared: &ReplicaState) -> bool {
    let mut inbox = lock(&shared.inbox);
    while (shared.chunks.marked() == 0 || inbox.is_paused()) && !inbox.closed {
        inbox = shared.news.wait(inbox).unwrap_or_else(PoisonError::into_inner);
    }
    !inbox.closed
}

fn copy(shared: &ReplicaState, copier: &mut Copier) {
    let (mut wait, mut well) = (RETRY_FIRST, true);
    let mut begun = Instant::now();
    let mirror = shared.geometry.purpose() == Purpose::Mirror;
    let pass_every = if mirror { MIRROR_PASS_EVERY } else { PASS_EVERY };
    let most = shared.geometry.slowed_chunks();
    while is_dirty(shared) {
        let pause = match copier.batch() {
            Ok(Batch::More) => Duration::ZERO,
            Ok(Batch::Pass) => {
                if well {
                    shared.tell(|troubles| &mut troubles.copy, None);
                    wait = RETRY_FIRST;
                }
                if mirror && well {
                    shared.mark_pause.adjust(shared.chunks.marked(), most);
                }
                let rest = pass_every.saturating_sub(begun.elapsed());
                (begun, well) = (Instant::now() + rest, true);
                rest
            }
            Err(CopyError::Stopped) => return,
            Err(error) => {
                shared.counters.failed.add(1);
                shared.tell(|troubles| &mut troubles.copy, Some(error.to_string()));
                well = false;
                let pause = wait;
                wait = (wait * 2).min(RETRY_MAX);
                pause
            }
        };
        if !shared.sleep(pause) {
            return;
        }
    }
}
