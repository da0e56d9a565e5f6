//! Records which requests of a guest are in flight, in memory that outlives this process: the VMM keeps
//! it and gives it to the next filter, which repeats the requests that were begun and not answered (QEMU
//! docs/interop/vhost-user, "Inflight I/O tracking", split rings).
//!
//! ```text
//!  slot of a head:  free --begin--> in flight --answering, in the used ring, answered--> free
//!
//!  killed before begin:          the guest's ring still has it: its position is counted from here
//!  while in flight:              it is repeated; reads and writes of the same bytes may be
//!  between "in the used ring"
//!  and answered:                 the used ring is one ahead of the record: the last head is freed
//! ```
//! Heads are begun in the order of the ring, each before the next one is read, so the position in
//! the available ring is the number of answered heads plus those in flight. The VMM can change everything in
//! this memory; an inconsistent record is refused.
//!
//! A ring's record: features u64 | version u16 | slots u16 | last head answered u16 | used index u16, then
//! each slot: in flight u8 | 5 unused | the head answered before u16 | counter u64. In the machine's
//! byte order, each ring's at a multiple of 64 bytes.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{AtomicAccess, Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::front_ends::vhost_user::config::RING_MAX;

/// The version of the record that we write and read.
const VERSION: u16 = 1;

const VERSION_AT: usize = 8;
const SLOTS_AT: usize = 10;
const LAST_AT: usize = 12;
const USED_AT: usize = 14;
const HEADER: usize = 16;

const UNDER_WAY_AT: usize = 0;
const BEFORE_AT: usize = 6;
const COUNTER_AT: usize = 8;
const SLOT: usize = 16;

/// The alignment of a ring's record, in bytes.
const ALIGNMENT: usize = 64;

/// Why a record is not used.
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    /// No memory.
    #[error("there is no memory for the record of requests in flight: {0}")]
    System(#[from] std::io::Error),
    /// Of another size, offset, or number of rings.
    #[error("the record of requests in flight does not fit the disk's rings")]
    Shape,
    /// Its file could be truncated while it is mapped.
    #[error(
        "the file of the record of requests in flight is not sealed: not one that a filter made"
    )]
    Unsealed,
    /// It contradicts itself or the ring.
    #[error("the record of requests in flight contradicts the ring")]
    Contradiction,
    /// Cannot be mapped.
    #[error("the record of requests in flight cannot be mapped: {0}")]
    Mapping(#[from] MmapRegionError),
}

impl From<Errno> for InflightError {
    fn from(error: Errno) -> Self {
        Self::System(error.into())
    }
}

/// The length of a ring's record, in bytes.
fn length(slots: u16) -> usize {
    (HEADER + usize::from(slots) * SLOT).next_multiple_of(ALIGNMENT)
}

/// The records of all rings of a disk.
#[derive(Clone, Debug)]
pub struct Inflight {
    memory: Arc<MmapRegion>,
    rings: u16,
    slots: u16,
}

impl Inflight {
    /// Makes empty records, for `rings` rings of `slots` entries: the description for the VMM, and their file.
    ///
    /// # Errors
    /// [`InflightError`]: a shape that no ring has, or no memory.
    pub fn make(rings: u16, slots: u16) -> Result<(VhostUserInflight, File), InflightError> {
        if rings == 0 || slots == 0 || slots > RING_MAX {
            return Err(InflightError::Shape);
        }
        let total = length(slots) * usize::from(rings);
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"inflight", flags)?);
        file.set_len(total as u64)?;
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
        let about = VhostUserInflight::new(total as u64, 0, rings, slots);
        let made = Self::map(&about, file.try_clone()?)?;
        for ring in 0..usize::from(rings) {
            made.record(ring, slots).ok_or(InflightError::Shape)?.put(SLOTS_AT, slots);
        }
        Ok((about, file))
    }

    /// Maps records that a VMM has kept.
    ///
    /// # Errors
    /// [`InflightError`]: not made by a filter for these rings.
    pub fn adopt(
        about: &VhostUserInflight,
        file: File,
        rings: usize,
    ) -> Result<Self, InflightError> {
        let seals = SealFlag::from_bits_truncate(fcntl(&file, FcntlArg::F_GET_SEALS)?);
        if !seals.contains(SealFlag::F_SEAL_SHRINK) {
            return Err(InflightError::Unsealed);
        }
        if usize::from(about.num_queues) > rings {
            return Err(InflightError::Shape);
        }
        Self::map(about, file)
    }

    fn map(about: &VhostUserInflight, file: File) -> Result<Self, InflightError> {
        let (rings, slots) = (about.num_queues, about.queue_size);
        let total = length(slots) * usize::from(rings);
        let end = about.mmap_offset.checked_add(about.mmap_size);
        let fits = slots <= RING_MAX
            && about.mmap_size >= total as u64
            && end.is_some_and(|end| file.metadata().is_ok_and(|about| end <= about.len()));
        if !fits {
            return Err(InflightError::Shape);
        }
        let memory = MmapRegion::from_file(FileOffset::new(file, about.mmap_offset), total)?;
        Ok(Self { memory: Arc::new(memory), rings, slots })
    }

    /// A ring's record, for a ring of this many entries; none if there is no such ring.
    #[must_use]
    pub fn record(&self, ring: usize, entries: u16) -> Option<Record> {
        let there = ring < usize::from(self.rings) && entries <= self.slots;
        let at = ring * length(self.slots);
        there.then(|| Record {
            memory: Arc::clone(&self.memory),
            at,
            slots: self.slots,
            counter: 0,
        })
    }
}

/// One ring's record. One thread has it at a time.
#[derive(Debug)]
pub struct Record {
    memory: Arc<MmapRegion>,
    at: usize,
    slots: u16,
    counter: u64,
}

impl Record {
    /// The heads that were begun and not answered, in the order in which they were begun; none if the record was never
    /// used. `used` is the used ring's index. From then on the record is in use.
    ///
    /// # Errors
    /// [`InflightError::Contradiction`]; [`InflightError::Shape`]: of another version.
    pub fn resume(&mut self, used: u16) -> Result<Option<Vec<u16>>, InflightError> {
        match self.get(VERSION_AT) {
            0 => {
                self.put(USED_AT, used);
                self.put(VERSION_AT, VERSION);
                return Ok(None);
            }
            VERSION if self.get(SLOTS_AT) == self.slots => {}
            _ => return Err(InflightError::Shape),
        }
        self.free_answered(used)?;
        let mut begun: Vec<(u64, u16)> = (0..self.slots)
            .filter(|&head| self.load::<u8>(self.slot(head) + UNDER_WAY_AT) == 1)
            .map(|head| (self.load(self.slot(head) + COUNTER_AT), head))
            .collect();
        begun.sort_unstable();
        self.counter = begun.last().map_or(0, |last| last.0.wrapping_add(1));
        Ok(Some(begun.into_iter().map(|(_, head)| head).collect()))
    }

    /// Frees the heads that are in the used ring and not yet free here.
    fn free_answered(&mut self, used: u16) -> Result<(), InflightError> {
        let ahead = used.wrapping_sub(self.get(USED_AT));
        if ahead > self.slots {
            return Err(InflightError::Contradiction);
        }
        let mut head = self.get(LAST_AT);
        for _ in 0..ahead {
            if head >= self.slots {
                return Err(InflightError::Contradiction);
            }
            self.store(self.slot(head) + UNDER_WAY_AT, 0u8);
            head = self.get(self.slot(head) - self.at + BEFORE_AT);
        }
        self.put(USED_AT, used);
        Ok(())
    }

    /// Records that a head was taken from the ring.
    ///
    /// # Errors
    /// [`InflightError::Contradiction`]: there is no such head.
    pub fn begin(&mut self, head: u16) -> Result<(), InflightError> {
        if head >= self.slots {
            return Err(InflightError::Contradiction);
        }
        let slot = self.slot(head);
        self.store(slot + COUNTER_AT, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.store(slot + UNDER_WAY_AT, 1u8);
        Ok(())
    }

    /// Records that a head is about to be put into the used ring.
    pub fn answering(&mut self, head: u16) {
        if head < self.slots {
            self.put(self.slot(head) - self.at + BEFORE_AT, self.get(LAST_AT));
            self.put(LAST_AT, head);
            fence(Ordering::Release);
        }
    }

    /// Records that a head is in the used ring, whose index is now `used`.
    pub fn answered(&mut self, head: u16, used: u16) {
        if head < self.slots {
            fence(Ordering::Release);
            self.store(self.slot(head) + UNDER_WAY_AT, 0u8);
            self.put(USED_AT, used);
        }
    }

    fn slot(&self, head: u16) -> usize {
        self.at + HEADER + usize::from(head) * SLOT
    }

    fn get(&self, field: usize) -> u16 {
        self.load(self.at + field)
    }

    fn put(&self, field: usize, value: u16) {
        self.store(self.at + field, value);
    }

    fn load<T: AtomicAccess>(&self, at: usize) -> T {
        let loaded = self.memory.as_volatile_slice().load(at, Ordering::Acquire);
        loaded.unwrap_or_else(|_| unreachable!("the record is mapped as a whole"))
    }

    fn store<T: AtomicAccess>(&self, at: usize, value: T) {
        let stored = self.memory.as_volatile_slice().store(value, at, Ordering::Release);
        stored.unwrap_or_else(|_| unreachable!("the record is mapped as a whole"));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOTS: u16 = 8;

    fn made() -> (VhostUserInflight, File) {
        Inflight::make(2, SLOTS).unwrap()
    }

    fn record((about, file): &(VhostUserInflight, File)) -> Record {
        let kept = Inflight::adopt(about, file.try_clone().unwrap(), 2).unwrap();
        kept.record(1, SLOTS).unwrap()
    }

    /// The steps of a filter at its ring, one memory access or a few at a time.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        Begin,
        Answering,
        InUsedRing,
        Answered,
    }

    /// A guest's ring, as in the guest's memory: it outlives every filter.
    #[derive(Default)]
    struct Ring {
        under_way: Vec<u16>,
        used: u16,
        taken: u16,
    }

    proptest! {
        /// Whenever a filter is killed, the next one finds each request that was begun and is not in the
        /// used ring, once, in order, and the ring's position.
        #[test]
        fn what_is_not_answered_is_found_once(
            picks in proptest::collection::vec((any::<bool>(), 0usize..8), 1..60),
            kills in proptest::collection::vec(0usize..240, 0..6),
        ) {
            let kept = made();
            let mut ring = Ring::default();
            let mut mine = record(&kept);
            prop_assert_eq!(mine.resume(0).unwrap(), None);
            let mut at = 0;
            for (begin, pick) in picks {
                let steps: &[Step] = match begin && ring.under_way.len() < usize::from(SLOTS) {
                    true => &[Step::Begin],
                    false if ring.under_way.is_empty() => continue,
                    false => &[Step::Answering, Step::InUsedRing, Step::Answered],
                };
                let free = (0..SLOTS).find(|head| !ring.under_way.contains(head));
                let index = pick % ring.under_way.len().max(1);
                let head = match steps[0] {
                    Step::Begin => free.unwrap(),
                    _ => ring.under_way[index],
                };
                for step in steps {
                    match step {
                        Step::Begin => {
                            mine.begin(head).unwrap();
                            ring.under_way.push(head);
                            ring.taken = ring.taken.wrapping_add(1);
                        }
                        Step::Answering => mine.answering(head),
                        Step::InUsedRing => {
                            ring.under_way.remove(index);
                            ring.used = ring.used.wrapping_add(1);
                        }
                        Step::Answered => mine.answered(head, ring.used),
                    }
                    at += 1;
                    if kills.contains(&at) {
                        mine = record(&kept);
                        let found = mine.resume(ring.used).unwrap().expect("it was on record");
                        prop_assert_eq!(&found, &ring.under_way);
                        prop_assert_eq!(ring.used.wrapping_add(found.len() as u16), ring.taken);
                        // A head whose answer is not yet in the used ring is answered by the next filter.
                        if matches!(step, Step::Answering) {
                            mine.answering(head);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_record_that_contradicts_itself_is_refused() {
        for (field, value, used) in [
            (USED_AT, 100, 0),
            (LAST_AT, SLOTS, 1),
            (VERSION_AT, VERSION + 1, 0),
            (SLOTS_AT, SLOTS + 1, 0),
        ] {
            let kept = made();
            record(&kept).resume(0).unwrap();
            record(&kept).put(field, value);
            assert!(record(&kept).resume(used).is_err(), "field at {field}");
        }
        let kept = made();
        assert!(record(&kept).begin(SLOTS).is_err());
    }

    #[test]
    fn a_file_that_could_be_cut_short_or_is_too_short_is_refused() {
        let (about, _file) = made();
        let loose = File::from(memfd_create(c"loose", MFdFlags::MFD_CLOEXEC).unwrap());
        loose.set_len(about.mmap_size).unwrap();
        let refused = Inflight::adopt(&about, loose, 2);
        assert!(matches!(refused, Err(InflightError::Unsealed)), "{refused:?}");
        for wrong in [
            VhostUserInflight { mmap_size: about.mmap_size - 1, ..about },
            VhostUserInflight { mmap_offset: 4096, ..about },
            VhostUserInflight { mmap_offset: u64::MAX, ..about },
            VhostUserInflight { num_queues: 3, ..about },
            VhostUserInflight { queue_size: u16::MAX, ..about },
        ] {
            let refused = Inflight::adopt(&wrong, made().1, 2);
            assert!(matches!(refused, Err(InflightError::Shape)), "{refused:?}");
        }
        assert!(Inflight::make(1, RING_MAX + 1).is_err());
    }
}
