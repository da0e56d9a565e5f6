//! What has changed since when: the dirty bitmaps of a disk, for backups.
//!
//! ```text
//!  slot:   free --start: all clean--> named ⇄ clear: all clean (refused while it is read)
//!           ^────────remove───────────┘      (refused while it is read)
//! ```
//! A bit stands for a granule. It is set before a change is submitted to the chain, and again when the
//! change has come back, before it is answered. The second time is for bitmaps that were started
//! while the change was in flight: every change that lands after the start is marked. A change that
//! failed is marked too, as parts of it may have been done.
//!
//! Bitmaps are in memory. Where the disk has a file for them, that memory is the file's (`kept`): they outlive the process, however
//! it ends, and the next one goes on with them. Else they end with it, and nothing is reported as clean: a client that asks for a
//! missing bitmap gets none.
//!
//! The queues of a disk mark without locks (`marks`).

pub mod growing;
mod kept;
mod longer;
mod marks;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use jiff::Timestamp;
use vmseal_api::bitmap::{self, BitmapError};
use vmseal_api::filter::{
    BITMAP_BYTES_MAX, BITMAP_GRANULE, BITMAPS_BYTES_MAX, BITMAPS_MAX, BitmapChange, BitmapStatus,
    EXTENTS_MAX, Extent,
};

use self::kept::Kept;
use self::marks::Marks;

/// The limit for the bitmaps of all disks of the process, in bytes.
static TAKEN: BitmapMemory = BitmapMemory(AtomicUsize::new(0));

/// Memory in use, in bytes; at most [`BITMAPS_BYTES_MAX`].
#[derive(Debug)]
struct BitmapMemory(AtomicUsize);

impl BitmapMemory {
    fn take(&self, bytes: usize) -> bool {
        let fits = self.0.fetch_add(bytes, SeqCst) + bytes <= BITMAPS_BYTES_MAX;
        if !fits {
            self.give(bytes);
        }
        fits
    }

    fn give(&self, bytes: usize) {
        self.0.fetch_sub(bytes, SeqCst);
    }
}

/// A named bitmap.
#[derive(Debug)]
struct NamedBitmap {
    name: String,
    /// Changes after this time are dirty.
    since: Timestamp,
    /// How many clients have it in use.
    readers: usize,
}

/// The dirty bitmaps of one disk; shared by its queues.
#[derive(Debug)]
pub struct Bitmaps {
    marks: Marks,
    /// The size of one bitmap's words, in bytes.
    bytes: usize,
    names: Mutex<[Option<NamedBitmap>; BITMAPS_MAX]>,
    taken: &'static BitmapMemory,
    kept: Option<Kept>,
    /// Whether they become those of a longer disk (`growing`), or have: nobody reads or changes them. It changes while `names` is
    /// locked.
    closed: AtomicBool,
}

impl Bitmaps {
    /// No bitmap yet, of a disk of `size` bytes. Granules are [`BITMAP_GRANULE`] bytes, or a power of two of them on
    /// disks so large that a bitmap would not fit [`BITMAP_BYTES_MAX`].
    #[must_use]
    pub fn new(size: u64) -> Self {
        Self::within(size, &TAKEN)
    }

    /// Those that a file keeps of a disk of `size` bytes, or of the disk when it was shorter; none where it is empty or of another disk.
    ///
    /// # Errors
    /// Those of the file.
    pub fn kept_in(file: File, size: u64) -> io::Result<Self> {
        Self::kept_within(file, size, &TAKEN)
    }

    fn kept_within(file: File, size: u64, taken: &'static BitmapMemory) -> io::Result<Self> {
        let mut bitmaps = Self::within(size, taken);
        let kept = Kept::open(file, size, bitmaps.granule().trailing_zeros(), bitmaps.bytes)?;
        bitmaps.go_on_with(&kept);
        bitmaps.kept = Some(kept);
        Ok(bitmaps)
    }

    fn within(size: u64, taken: &'static BitmapMemory) -> Self {
        let mut shift = BITMAP_GRANULE.trailing_zeros();
        while marks::bytes(size, shift) > BITMAP_BYTES_MAX {
            shift += 1;
        }
        let (marks, bytes) = (Marks::new(size, shift), marks::bytes(size, shift));
        let closed = AtomicBool::new(false);
        Self { marks, bytes, names: Mutex::default(), taken, kept: None, closed }
    }

    /// Has the bitmaps that a file keeps.
    fn go_on_with(&self, kept: &Kept) {
        let mut names = self.names();
        for (slot, named) in names.iter_mut().enumerate() {
            let Some((name, since)) = kept.noted(slot) else { continue };
            if !self.taken.take(self.bytes) {
                // It would not be marked.
                kept.forget(slot);
                continue;
            }
            // A copy of the file lacks pages that are clean.
            if let Err(error) = kept.reserve(slot) {
                tracing::warn!(%error, "the file of the dirty bitmaps has no room for one that it kept");
                self.taken.give(self.bytes);
                kept.forget(slot);
                continue;
            }
            self.marks.place(slot, kept.words(slot));
            self.marks.use_slot(slot);
            *named = Some(NamedBitmap { name, since, readers: 0 });
        }
    }

    /// The size of a granule, in bytes.
    #[must_use]
    pub fn granule(&self) -> u64 {
        self.marks.granule()
    }

    /// This range of the disk changes, or has changed. `length` is not 0 and the range is on the disk.
    #[inline]
    pub fn changed(&self, offset: u64, length: u64) {
        self.marks.changed(offset, length);
    }

    /// Starts, clears or removes a bitmap.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub fn change(&self, name: &str, change: BitmapChange) -> Result<(), BitmapError> {
        let mut names = self.names();
        if self.closed.load(SeqCst) {
            return Err(BitmapError::Grows);
        }
        bitmap::check(names.iter().flatten().map(|named| &*named.name), name, change)?;
        if change == BitmapChange::Start {
            return self.start(&mut names, name);
        }
        let slot = find(&names, name).ok_or_else(|| BitmapError::Unknown(name.into()))?;
        let Some(named) = &mut names[slot] else { return Ok(()) };
        if named.readers > 0 {
            return Err(BitmapError::Read(name.into()));
        }
        if let Some(kept) = &self.kept {
            // Who is killed in the middle leaves none, instead of one that is partly clear.
            kept.forget(slot);
        }
        if change == BitmapChange::Clear {
            self.marks.clear(slot);
            named.since = Timestamp::now();
            self.note(slot, named);
        } else {
            self.marks.stop(slot);
            names[slot] = None;
        }
        Ok(())
    }

    /// Has the file, if there is one, name a bitmap that is marked from now on.
    fn note(&self, slot: usize, named: &NamedBitmap) {
        if let Some(kept) = &self.kept {
            kept.note(slot, &named.name, named.since);
        }
    }

    fn start(
        &self,
        names: &mut [Option<NamedBitmap>; BITMAPS_MAX],
        name: &str,
    ) -> Result<(), BitmapError> {
        let slot = names.iter().position(Option::is_none).ok_or(BitmapError::TooMany)?;
        let made = self.marks.is_made(slot);
        if !made && !self.taken.take(self.bytes) {
            return Err(BitmapError::Memory);
        }
        if let Some(kept) = self.kept.as_ref().filter(|_| !made) {
            if let Err(error) = kept.reserve(slot) {
                tracing::warn!(%error, "the file of the dirty bitmaps has no room for another one");
                self.taken.give(self.bytes);
                return Err(BitmapError::NoRoom);
            }
            self.marks.place(slot, kept.words(slot));
        }
        self.marks.start(slot);
        // Afterwards: every change after that time is marked.
        let named = NamedBitmap { name: name.into(), since: Timestamp::now(), readers: 0 };
        self.note(slot, &named);
        names[slot] = Some(named);
        Ok(())
    }

    /// The bitmaps, and how much each calls dirty.
    #[must_use]
    pub fn status(&self) -> Vec<BitmapStatus> {
        let names = self.names();
        let named = names.iter().enumerate().filter_map(|(slot, named)| {
            let NamedBitmap { name, since, .. } = named.as_ref()?;
            let (name, since) = (name.clone(), *since);
            let (granularity, dirty_bytes) = (self.granule(), self.marks.dirty_bytes(slot));
            Some(BitmapStatus { name, since, granularity, dirty_bytes })
        });
        named.collect()
    }

    /// The bitmaps' names.
    #[must_use]
    pub fn all_names(&self) -> Vec<String> {
        self.names().iter().flatten().map(|named| named.name.clone()).collect()
    }

    /// A bitmap to read: it cannot be cleared or removed meanwhile. None if none has that name, and while the disk gets longer.
    #[must_use]
    pub fn read(self: &Arc<Self>, name: &str) -> Option<Reader> {
        let mut names = self.names();
        if self.closed.load(SeqCst) {
            return None;
        }
        let slot = find(&names, name)?;
        names[slot].as_mut()?.readers += 1;
        Some(Reader { bitmaps: Arc::clone(self), slot })
    }

    fn names(&self) -> MutexGuard<'_, [Option<NamedBitmap>; BITMAPS_MAX]> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_memory(&self) {
        let made = (0..BITMAPS_MAX).filter(|slot| self.marks.is_made(*slot));
        self.taken.give(made.count() * self.bytes);
    }
}

impl Drop for Bitmaps {
    fn drop(&mut self) {
        // Those that have become another disk's gave it then.
        if !self.closed.load(SeqCst) {
            self.give_memory();
        }
    }
}

fn find(names: &[Option<NamedBitmap>; BITMAPS_MAX], name: &str) -> Option<usize> {
    names.iter().position(|named| named.as_ref().is_some_and(|named| named.name == name))
}

/// A bitmap in use by a reader.
#[derive(Debug)]
pub struct Reader {
    bitmaps: Arc<Bitmaps>,
    slot: usize,
}

impl Reader {
    /// Whether the disk's byte at `at` is in a dirty granule, and where the next granule of the other kind begins, at
    /// `end` at the latest.
    #[must_use]
    pub fn extent(&self, at: u64, end: u64) -> (bool, u64) {
        self.bitmaps.marks.extent(self.slot, at, end)
    }

    /// Writes the dirty extents to a file, in order.
    ///
    /// # Errors
    /// Those of the file; `FileTooLarge` for more than [`EXTENTS_MAX`].
    pub fn write_to(&self, file: &File) -> io::Result<()> {
        let size = self.bitmaps.marks.size;
        let (mut at, mut extents) = (0, Vec::new());
        while at < size {
            let (dirty, end) = self.extent(at, size);
            if dirty {
                extents.extend(Extent { offset: at, length: end - at }.to_bytes());
            }
            at = end;
        }
        if extents.len() > EXTENTS_MAX * Extent::LEN {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        file.write_all_at(&extents, 0)
    }

    /// The bitmap's name.
    #[must_use]
    pub fn name(&self) -> String {
        let names = self.bitmaps.names();
        names[self.slot].as_ref().map_or_else(String::new, |named| named.name.clone())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(named) = self.bitmaps.names()[self.slot].as_mut() {
            named.readers -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use proptest::prelude::*;
    use vmseal_api::bitmap::file::{HEADER, stride};
    use vmseal_api::filter::BitmapChange::{Clear, Remove, Start};

    use super::*;
    use crate::stack::chain::Chain;
    use crate::stack::request::Operation;
    use crate::storage::mem::MemDisk;

    const GRANULE: u64 = BITMAP_GRANULE;

    fn extents(reader: &Reader, size: u64) -> Vec<(bool, u64)> {
        let (mut at, mut extents) = (0, Vec::new());
        while at < size {
            let (dirty, end) = reader.extent(at, size);
            assert!(end > at);
            extents.push((dirty, end));
            at = end;
        }
        extents
    }

    #[test]
    fn what_changed_is_dirty_to_the_granule_from_the_start_on() {
        let size = 300 * GRANULE + 4096;
        let bitmaps = Arc::new(Bitmaps::new(size));
        bitmaps.changed(0, size);
        bitmaps.change("one", Start).unwrap();
        let reader = bitmaps.read("one").unwrap();
        assert_eq!(extents(&reader, size), [(false, size)]);
        bitmaps.changed(2 * GRANULE - 512, 1024);
        bitmaps.changed(60 * GRANULE, 140 * GRANULE);
        bitmaps.changed(300 * GRANULE, 512);
        let at = |granule| granule * GRANULE;
        let expected = [
            (false, at(1)),
            (true, at(3)),
            (false, at(60)),
            (true, at(200)),
            (false, at(300)),
            (true, size),
        ];
        assert_eq!(extents(&reader, size), expected);
        assert_eq!(reader.extent(at(2) + 512, at(2) + 1024), (true, at(2) + 1024));
        let status = bitmaps.status();
        assert_eq!(status[0].dirty_bytes, at(143));
        assert_eq!((status[0].name.as_str(), status[0].granularity), ("one", GRANULE));
    }

    #[test]
    fn bitmaps_are_limited_named_and_not_changed_while_they_are_read() {
        let bitmaps = Arc::new(Bitmaps::new(1 << 20));
        assert_eq!(bitmaps.change("a/b", Start), Err(BitmapError::Name));
        for slot in 0..BITMAPS_MAX {
            bitmaps.change(&format!("b{slot}"), Start).unwrap();
        }
        assert_eq!(bitmaps.change("more", Start), Err(BitmapError::TooMany));
        assert_eq!(bitmaps.change("b0", Start), Err(BitmapError::Exists("b0".into())));
        assert_eq!(bitmaps.change("more", Remove), Err(BitmapError::Unknown("more".into())));
        let reader = bitmaps.read("b0").unwrap();
        bitmaps.changed(0, 512);
        for change in [Clear, Remove] {
            assert_eq!(bitmaps.change("b0", change), Err(BitmapError::Read("b0".into())));
        }
        drop(reader);
        let since = || bitmaps.status()[0].since;
        let (begun, before) = (since(), Timestamp::now());
        bitmaps.change("b0", Clear).unwrap();
        assert!(begun <= before && before <= since(), "what is dirty is so since it was cleared");
        let dirty = |name: &str| bitmaps.read(name).unwrap().extent(0, 1 << 20).0;
        assert!(!dirty("b0") && dirty("b1"));
        bitmaps.change("b1", Remove).unwrap();
        assert!(bitmaps.read("b1").is_none());
        bitmaps.change("b1", Start).unwrap();
        assert!(!dirty("b1"), "a slot that is used again begins clean");
    }

    #[test]
    fn a_change_is_dirty_before_it_is_done_and_in_what_starts_while_it_is_under_way() {
        let disk = MemDisk::new(1 << 20);
        let bitmaps = Arc::new(Bitmaps::new(1 << 20));
        let mut chain = Chain::new(1 << 20, false, Vec::new(), disk.queue()).unwrap();
        chain = chain.marking(Arc::clone(&bitmaps));
        let dirty = |name: &str| bitmaps.read(name).unwrap().extent(1 << 19, 1 << 20).0;
        for operation in [Operation::Discard, Operation::WriteZeroes { unmap: false }] {
            bitmaps.change("before", Start).unwrap();
            let id = chain.begin().unwrap();
            chain.submit(id, operation, 1 << 19, 4096, 0);
            assert!(dirty("before"), "{operation:?} is under way and may be done");
            bitmaps.change("during", Start).unwrap();
            assert!(!dirty("during"));
            chain.poll();
            assert!(chain.next_done().unwrap().result.is_ok());
            assert!(dirty("during"), "{operation:?} was done after the start");
            bitmaps.change("after", Start).unwrap();
            assert!(!dirty("after"));
            for name in ["before", "during", "after"] {
                bitmaps.change(name, Remove).unwrap();
            }
        }
    }

    #[test]
    fn what_a_killed_process_has_marked_is_dirty_for_the_next_one() {
        let size = 300 * GRANULE;
        let file = tempfile::tempfile().unwrap();
        let open = |size| Arc::new(Bitmaps::kept_in(file.try_clone().unwrap(), size).unwrap());
        // Nothing is done when a process is killed.
        let killed = |bitmaps: Arc<Bitmaps>| std::mem::forget(bitmaps);

        let first = open(size);
        for name in ["one", "two", "gone"] {
            first.change(name, Start).unwrap();
        }
        first.changed(0, 1);
        first.change("two", Clear).unwrap();
        first.change("gone", Remove).unwrap();
        first.changed(299 * GRANULE, GRANULE);
        let before = first.status();
        killed(first);

        let second = open(size);
        assert_eq!(second.status(), before);
        let one = [(true, GRANULE), (false, 299 * GRANULE), (true, size)];
        assert_eq!(extents(&second.read("one").unwrap(), size), one);
        let two = [(false, 299 * GRANULE), (true, size)];
        assert_eq!(extents(&second.read("two").unwrap(), size), two);
        second.change("gone", Start).unwrap();
        second.changed(100 * GRANULE, 1);
        killed(second);

        let third = open(size);
        let gone = [(false, 100 * GRANULE), (true, 101 * GRANULE), (false, size)];
        assert_eq!(extents(&third.read("gone").unwrap(), size), gone);
        assert_eq!(third.status().len(), 3);
        killed(third);

        let (copy, mut header) = (tempfile::tempfile().unwrap(), vec![0; HEADER]);
        copy.set_len(file.metadata().unwrap().len()).unwrap();
        file.read_exact_at(&mut header, 0).unwrap();
        copy.write_all_at(&header, 0).unwrap();
        let copied = Bitmaps::kept_in(copy.try_clone().unwrap(), size).unwrap();
        let room = copy.metadata().unwrap().blocks() * 512;
        assert!(room >= (HEADER + 3 * stride(copied.bytes)) as u64, "{room}: a mark may find none");
        assert!(open(size - GRANULE).status().is_empty(), "those of a disk of another size");
    }

    #[test]
    fn what_is_new_of_a_disk_that_has_grown_is_dirty_beside_what_was() {
        let file = tempfile::tempfile().unwrap();
        let open = |size| Arc::new(Bitmaps::kept_in(file.try_clone().unwrap(), size).unwrap());
        let (size, grown) = (100 * GRANULE + 4096, 300 * GRANULE);
        let bitmaps = open(size);
        for name in ["gone", "one", "two"] {
            bitmaps.change(name, Start).unwrap();
        }
        bitmaps.change("gone", Remove).unwrap();
        bitmaps.changed(70 * GRANULE, GRANULE);
        bitmaps.change("two", Clear).unwrap();
        let before = bitmaps.status();
        drop(bitmaps);

        let bitmaps = open(grown);
        let told = |all: Vec<BitmapStatus>| -> Vec<_> {
            all.into_iter().map(|it| (it.name, it.since)).collect()
        };
        assert_eq!(told(bitmaps.status()), told(before));
        let at = |granule| granule * GRANULE;
        let one = [(false, at(70)), (true, at(71)), (false, at(100)), (true, grown)];
        assert_eq!(extents(&bitmaps.read("one").unwrap(), grown), one);
        let two = [(false, at(100)), (true, grown)];
        assert_eq!(extents(&bitmaps.read("two").unwrap(), grown), two);
        bitmaps.change("gone", Start).unwrap();
        bitmaps.changed(at(299), 1);
        let gone = [(false, at(299)), (true, grown)];
        assert_eq!(extents(&bitmaps.read("gone").unwrap(), grown), gone);
        drop(bitmaps);

        // Beyond the limit of a bitmap granules are larger.
        let (grown, bitmaps) = (600 << 30, open(600 << 30));
        let at = |granule| granule * bitmaps.granule();
        assert_eq!(bitmaps.granule(), 2 * GRANULE);
        let one = [(false, at(35)), (true, at(36)), (false, at(50)), (true, grown)];
        assert_eq!(extents(&bitmaps.read("one").unwrap(), grown), one);
    }

    #[test]
    fn large_disks_have_larger_granules_and_no_disk_has_all_the_memory() {
        let granule = |size| Bitmaps::new(size).granule();
        assert_eq!(granule(512 << 30), GRANULE);
        assert_eq!(granule((512 << 30) + 4096), 2 * GRANULE);
        assert_eq!(granule(1 << 62), (1 << 62) / (BITMAP_BYTES_MAX as u64 * 8));
        let taken: &'static BitmapMemory = Box::leak(Box::new(BitmapMemory(AtomicUsize::new(0))));
        let disks: Vec<Bitmaps> = (0..4).map(|_| Bitmaps::within(1 << 40, taken)).collect();
        let mut started = 0;
        let refused = disks.iter().flat_map(|disk| (0..4).map(move |name| (disk, name))).find_map(
            |(disk, name)| {
                let outcome = disk.change(&name.to_string(), Start);
                started += usize::from(outcome.is_ok());
                outcome.err()
            },
        );
        assert_eq!(refused, Some(BitmapError::Memory));
        assert!(started * BITMAP_BYTES_MAX <= BITMAPS_BYTES_MAX, "{started}");
        drop(disks);
        assert!(Bitmaps::within(1 << 40, taken).change("again", Start).is_ok(), "given back");
    }

    proptest! {
        #[test]
        fn what_is_dirty_is_what_a_simple_model_says(
            changes in prop::collection::vec((0u64..200, 1u64..300, 0u64..512), 0..20),
            granules in 1u64..200, rest in 0u64..16,
        ) {
            let size = granules * GRANULE + rest * 4096;
            let bitmaps = Arc::new(Bitmaps::new(size));
            bitmaps.change("a", Start).unwrap();
            let mut model = vec![false; size.div_ceil(GRANULE) as usize];
            for (granule, length, blocks) in changes {
                let (offset, length) = (granule * GRANULE / 2 + blocks * 512, length * GRANULE / 4);
                if offset + length <= size {
                    bitmaps.changed(offset, length);
                    let last = (offset + length - 1) / GRANULE;
                    (offset / GRANULE..=last).for_each(|at| model[at as usize] = true);
                }
            }
            let reader = bitmaps.read("a").unwrap();
            let mut at = 0;
            for (dirty, end) in extents(&reader, size) {
                for granule in at / GRANULE..end.div_ceil(GRANULE) {
                    prop_assert_eq!(model[granule as usize], dirty, "granule {}", granule);
                }
                at = end;
            }
        }
    }
}
