//! A mirror: the copy of a disk in another stack, which the disk pivots to.
//!
//! ```text
//!  Copying ── asked to pivot: no request in flight, the rest copied, the map says so durably ──> Pivoted
//!     ^              │ an error, or it takes too long
//!     └──────────────┘
//! ```
//! The map's first block is the commit record: before it is written the former place has the disk's data, after it the
//! copy has. So a process may die at any instant, and the next one, started with the same configuration, serves the
//! right place. Only the disk's own thread pivots, with all of its queues stopped. What only the former place needed is
//! returned, for another thread to close: that takes longer than the pivot.
//!
//! A disk that stays ([`MirrorSpec::stays`](vmseal_api::filter::MirrorSpec)) is copied in the same way and never pivots: the copy
//! is complete when it is told so, with all of its queues stopped, and ends with the disk's stack.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use vmseal_api::filter::{Handle, MirrorStatus, ReplicaStatus};
use vmseal_api::id::DiskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::size::Size;

use crate::handle::Handles;
use crate::layers::leg::Leg;
use crate::layers::replicate::copier::Copier;
use crate::layers::replicate::format::Geometry;
use crate::layers::replicate::map::{MapLoad, PivotError};
use crate::layers::replicate::open::{ReplicaError, open_map};
use crate::layers::replicate::threads::Replicating;
use crate::layers::replicate::{Replicate, lock};
use crate::stack::chain::Chain;
use crate::stack::figures::CipherTime;
use crate::storage::DiskStorage;
use crate::storage::file::FileDisk;
use crate::storage::own::LayerParts;

const MAP: &str = "the map of its copy";

/// How long a guest may wait for the last of the copy, once its requests in flight have ended: a third of the time that
/// Linux gives a request.
const PIVOT_TIMEOUT: Duration = Duration::from_secs(10);

/// Why a disk was not switched to its copy. It is served as before, unless the reason says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum NotPivoted {
    /// The guest would wait too long.
    #[error("its copy lacks {} yet, more than {}; try again later", Size(*.0), Size(*.1))]
    TooMuch(u64, u64),
    /// Nothing is copied for now.
    #[error("its copy is paused; have it go on first")]
    Paused,
    /// It is copied for another host.
    #[error("its copy is for another host, and the disk stays here")]
    Stays,
    /// The copy met an error.
    #[error("{0}")]
    Copy(String),
    /// [`PIVOT_TIMEOUT`] has passed.
    #[error("the last {} were not copied within {} seconds; the disk is served as before", Size(*.0), PIVOT_TIMEOUT.as_secs())]
    Timeout(u64),
    /// The map.
    #[error("{0}")]
    Map(#[from] PivotError),
    /// The disk has no copy.
    #[error("it is not mirrored")]
    NoMirror,
    /// A reader beside the guest.
    #[error("somebody reads it beside the guest: end that first")]
    Read,
    /// Another request is there first.
    #[error("it is asked to pivot already")]
    Asked,
    /// Storage does not answer, or the disk's thread does not.
    #[error("its requests in flight do not end; it goes on where it was when they do")]
    Busy,
    /// The process ends, or the disk has failed.
    #[error("it is no longer served; the map of its copy says where its data is")]
    Ending,
}

/// What is known of a mirrored disk, for its status: none once it has pivoted, which closes the map.
#[derive(Debug)]
pub struct Mirror(Mutex<Option<Replicate>>);

impl Mirror {
    fn replicate(&self) -> MutexGuard<'_, Option<Replicate>> {
        lock(&self.0)
    }

    /// For the disk's status.
    #[must_use]
    pub fn status(&self) -> MirrorStatus {
        match &*self.replicate() {
            Some(replicate) => {
                let ReplicaStatus { dirty_bytes, last_error, .. } = replicate.status();
                let (pace, copied_bytes) = (Some(replicate.pace()), replicate.copied_bytes());
                MirrorStatus { pivoted: false, dirty_bytes, pace, copied_bytes, last_error }
            }
            None => MirrorStatus {
                pivoted: true,
                dirty_bytes: 0,
                pace: Some(CopyPace::default()),
                copied_bytes: 0,
                last_error: None,
            },
        }
    }
}

/// A mirror whose map is open.
pub struct OpenedMirror {
    /// The layer.
    pub replicate: Replicate,
    /// Its status.
    pub mirror: Arc<Mirror>,
    /// Where the copy is.
    leg: Leg,
    /// Of the disk, where the copy has the same below it.
    layer: Option<LayerParts>,
    /// Whether the disk never pivots.
    stays: bool,
}

impl OpenedMirror {
    /// Opens the map of a disk's copy, which is in `leg`; the disk itself is stored in `image`.
    ///
    /// # Errors
    /// [`ReplicaError`]: among others, the map does not tell which place has the disk's data.
    pub fn open(
        disk: DiskId,
        size: u64,
        map: &Handle,
        pace: CopyPace,
        image: &DiskStorage,
        leg: Leg,
        handles: &mut Handles,
    ) -> Result<Self, ReplicaError> {
        let geometry = Geometry::new(disk, size).of_mirror();
        let map = open_map(geometry, (MAP, map), image, &leg, handles)?;
        let (replicate, found) = Replicate::new(geometry, map);
        let pivoted = found == MapLoad::Pivoted;
        if !found.tells_the_place() {
            return Err(ReplicaError::NoPlace(found));
        }
        if pivoted && !replicate.map_is_valid() {
            return Err(ReplicaError::PivotedMap);
        }
        replicate.set_pace(pace);
        tracing::info!(%disk, pivoted, ?pace, dirty_bytes = replicate.status().dirty_bytes, "the disk is mirrored");
        let copied = (!pivoted).then(|| replicate.clone());
        let mirror = Arc::new(Mirror(Mutex::new(copied)));
        Ok(Self { replicate, mirror, leg, layer: None, stays: false })
    }

    /// Of a disk that never pivots, if `stays`.
    #[must_use]
    pub fn that_stays(self, stays: bool) -> Self {
        Self { stays, ..self }
    }

    /// Whether the disk never pivots.
    #[must_use]
    pub fn stays(&self) -> bool {
        self.stays
    }

    /// Copies only what the disk's own image has: below it the copy has the same.
    #[must_use]
    pub fn of_layer(self, layer: Option<LayerParts>) -> Self {
        Self { layer, ..self }
    }

    /// Where the copy is.
    #[must_use]
    pub fn leg(&self) -> &Leg {
        &self.leg
    }

    /// Copies from `source`, what is below the layer, with the file whose holes are zeroes, to the leg. `chains` are those
    /// of the copy, for the disk's queues, whose cipher's time is `cipher_time`.
    ///
    /// # Errors
    /// As [`Leg::chain`].
    pub fn between(
        self,
        source: Chain,
        holes: Option<FileDisk>,
        chains: Vec<Chain>,
        cipher_time: &Arc<CipherTime>,
    ) -> io::Result<Pivot> {
        let Self { replicate, mirror, leg, layer, stays } = self;
        let copier = Copier::new(&replicate, source, holes, leg.chain(cipher_time)?);
        let copier = Some(Box::new(copier.of_layer(layer)));
        let former = Former { replicate, copier, copying: None };
        Ok(Pivot { mirror, stays, place: Mutex::new(Place::Former { former, chains }) })
    }

    /// Of a disk that has pivoted before.
    #[must_use]
    pub fn pivoted(self) -> Pivot {
        Pivot { mirror: self.mirror, stays: self.stays, place: Mutex::new(Place::Copy) }
    }
}

/// Where a mirrored disk's data is.
enum Place {
    /// Where it was before.
    Former {
        /// What copies it.
        former: Former,
        /// Of the copy, for the disk's queues.
        chains: Vec<Chain>,
    },
    /// In the copy.
    Copy,
}

/// What a disk needs until it has pivoted. Its threads end when this is dropped, and its files are closed.
pub struct Former {
    replicate: Replicate,
    /// Until it is started.
    copier: Option<Box<Copier>>,
    /// The running copy.
    copying: Option<Replicating>,
}

/// A disk that has pivoted.
pub struct Pivoted {
    /// The chains of the copy.
    pub chains: Vec<Chain>,
    /// What it needs no more.
    pub former: Former,
}

/// Switches a disk to its copy; see the module.
pub struct Pivot {
    mirror: Arc<Mirror>,
    stays: bool,
    place: Mutex<Place>,
}

impl Pivot {
    /// For the disk's status.
    #[must_use]
    pub fn mirror(&self) -> Arc<Mirror> {
        Arc::clone(&self.mirror)
    }

    /// Starts the copy, unless the disk has pivoted.
    ///
    /// # Errors
    /// The system has no thread.
    pub fn start(&self) -> std::io::Result<()> {
        if let Place::Former { former, .. } = &mut *lock(&self.place)
            && let Some(copier) = former.copier.take()
        {
            former.copying = Some(Replicating::start(&former.replicate, *copier)?);
        }
        Ok(())
    }

    /// Ends the copy; the next process resumes it.
    pub fn end(&self) {
        if let Place::Former { former, .. } = &mut *lock(&self.place) {
            (former.copier, former.copying) = (None, None);
        }
    }

    /// Reports that the disk is not copied, and why.
    pub fn cannot_copy(&self, why: String) {
        if let Some(replicate) = &*self.mirror.replicate() {
            replicate.0.tell(|troubles| &mut troubles.copy, Some(why));
        }
    }

    /// Copies at most so fast from now on, or not at all, unless the disk has pivoted.
    pub fn set_pace(&self, pace: CopyPace) {
        tracing::info!(?pace, "the copy of the disk goes at another pace");
        if let Some(replicate) = &*self.mirror.replicate() {
            replicate.set_pace(pace);
        }
    }

    /// Whether the disk never pivots.
    #[must_use]
    pub fn stays(&self) -> bool {
        self.stays
    }

    /// Copies what the copy lacks. The disk has no request in flight, in none of its queues, and gets none meanwhile.
    ///
    /// # Errors
    /// [`NotPivoted`]: the copy lacks something.
    pub fn complete(&self) -> Result<(), NotPivoted> {
        let replicate = self.mirror.replicate().clone().ok_or(NotPivoted::NoMirror)?;
        replicate.is_near()?;
        replicate.copy_the_rest(Instant::now() + PIVOT_TIMEOUT)
    }

    /// Whether the disk can be asked to pivot: it has, or its copy lacks little and is not paused.
    ///
    /// # Errors
    /// [`NotPivoted::TooMuch`]; [`NotPivoted::Paused`]; [`NotPivoted::Stays`].
    pub fn is_near(&self) -> Result<(), NotPivoted> {
        if self.stays {
            return Err(NotPivoted::Stays);
        }
        match &*self.mirror.replicate() {
            Some(replicate) => replicate.is_near(),
            None => Ok(()),
        }
    }

    /// Pivots. The disk has no request in flight, in none of its queues, and gets none meanwhile. None if the disk had
    /// pivoted before.
    ///
    /// # Errors
    /// [`NotPivoted`].
    pub fn pivot(&self) -> Result<Option<Pivoted>, NotPivoted> {
        let mut place = lock(&self.place);
        let Place::Former { former: Former { replicate, .. }, .. } = &*place else {
            return Ok(None);
        };
        replicate.is_near()?;
        let until = Instant::now() + PIVOT_TIMEOUT;
        loop {
            replicate.copy_the_rest(until)?;
            if replicate.record_pivot()? {
                break;
            }
        }
        *self.mirror.replicate() = None;
        match std::mem::replace(&mut *place, Place::Copy) {
            Place::Former { former, chains } => Ok(Some(Pivoted { chains, former })),
            Place::Copy => Ok(None),
        }
    }
}

impl Replicate {
    /// Whether the copy lacks so little that a guest can wait for it.
    pub(super) fn is_near(&self) -> Result<(), NotPivoted> {
        let shared = &self.0;
        if self.pace().paused {
            return Err(NotPivoted::Paused);
        }
        let most = shared.geometry.pivot_chunks() * shared.geometry.chunk();
        match shared.dirty_bytes() {
            few if few <= most => Ok(()),
            many => Err(NotPivoted::TooMuch(many, most)),
        }
    }

    /// Whether the map is on record as it is in memory.
    fn map_is_valid(&self) -> bool {
        lock(&self.0.map).is_valid()
    }

    /// Waits until the copy lacks nothing, and has it durably. Nothing changes the disk meanwhile.
    fn copy_the_rest(&self, until: Instant) -> Result<(), NotPivoted> {
        let shared = &*self.0;
        lock(&shared.troubles).copy = None;
        let mut inbox = lock(&shared.inbox);
        // Of requests that have passed by the marks of others: nobody waits any more.
        inbox.spans.clear();
        inbox.no_pauses = true;
        shared.news.notify_all();
        let outcome = loop {
            if shared.chunks.marked() == 0 {
                break Ok(());
            }
            if let Some(trouble) = shared.copy_trouble() {
                break Err(NotPivoted::Copy(trouble));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break Err(NotPivoted::Timeout(shared.dirty_bytes()));
            }
            let woken = shared.news.wait_timeout(inbox, left);
            inbox = woken.unwrap_or_else(PoisonError::into_inner).0;
        };
        inbox.no_pauses = false;
        outcome
    }

    /// False if something was marked meanwhile.
    fn record_pivot(&self) -> Result<bool, NotPivoted> {
        let shared = &*self.0;
        let mut map = lock(&shared.map);
        let pivoted = map.pivot(&shared.chunks);
        shared.tell_of_the_map(&map);
        Ok(pivoted?)
    }
}
