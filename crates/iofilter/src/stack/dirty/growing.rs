//! The dirty bitmaps of a disk that gets longer while it is served. As with those that a file keeps of a shorter disk
//! (`longer`), each calls dirty what it called dirty, and all that is new.
//!
//! ```text
//!  open ──close, nobody reads──> closed: neither read nor changed ──longer, no request in flight──> forgotten by the file ──> others
//!    ^                              │
//!    └──────────dropped─────────────┘
//! ```
//! The file is written anew under the mapping of the former bitmaps, which nobody touches from then on. A process that is killed
//! meanwhile leaves a file that has no bitmap, or some of them.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use vmseal_api::filter::BITMAPS_MAX;

use super::{Bitmaps, NamedBitmap, longer};

/// Bitmaps that nobody reads or changes; they are as before when this is dropped. The disk's chains mark them on.
#[derive(Debug)]
pub struct Closed(Option<Arc<Bitmaps>>);

/// A client reads a bitmap, or the disk gets longer already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUse;

impl Closed {
    /// Closes the bitmaps of a disk.
    ///
    /// # Errors
    /// [`InUse`].
    pub fn close(bitmaps: Arc<Bitmaps>) -> Result<Self, InUse> {
        let names = bitmaps.names();
        let is_read = names.iter().flatten().any(|named| named.readers > 0);
        if is_read || bitmaps.closed.load(SeqCst) {
            return Err(InUse);
        }
        bitmaps.closed.store(true, SeqCst);
        drop(names);
        Ok(Self(Some(bitmaps)))
    }

    /// The bitmaps of the disk now that it has `size` bytes, more than before. Nothing marks the former ones any more. One that
    /// there is no room for is lost.
    #[must_use]
    pub fn longer(mut self, size: u64) -> Bitmaps {
        // The former ones stay closed.
        let Some(former) = self.0.take() else { return Bitmaps::new(size) };
        let names = std::mem::take(&mut *former.names()).into_iter().enumerate();
        let named = names.filter_map(|(slot, named)| Some((slot, named?)));
        // Before the file has other content.
        let kept: Vec<_> = named.map(|(slot, it)| (slot, it, former.marks.bits(slot))).collect();
        for slot in 0..BITMAPS_MAX {
            former.marks.stop(slot);
            if let Some(file) = &former.kept {
                // The file never says of the longer disk what it said of the shorter one, without what is marked since.
                file.forget(slot);
            }
        }
        former.give_memory();
        let bitmaps = former.emptied(size);
        let then = (former.marks.size, former.marks.shift());
        let now = (bitmaps.marks.size, bitmaps.marks.shift());
        for (slot, named, bits) in kept {
            bitmaps.go_on_as(slot, named, &longer::bits(&bits, then, now));
        }
        bitmaps
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        if let Some(bitmaps) = &self.0 {
            let _names = bitmaps.names();
            bitmaps.closed.store(false, SeqCst);
        }
    }
}

impl Bitmaps {
    /// No bitmap yet, of the disk when it has `size` bytes, kept where these are kept.
    fn emptied(&self, size: u64) -> Self {
        let none = || Self::within(size, self.taken);
        let Some(kept) = &self.kept else { return none() };
        kept.file().and_then(|file| Self::kept_within(file, size, self.taken)).unwrap_or_else(
            |error| {
                tracing::warn!(%error, "the dirty bitmaps of a disk that grew end with this process");
                none()
            },
        )
    }

    /// Has a slot, which was not used yet, go on with these bits.
    fn go_on_as(&self, slot: usize, named: NamedBitmap, bits: &[u8]) {
        if !self.taken.take(self.bytes) {
            tracing::warn!(
                name = named.name,
                "a dirty bitmap of a disk that grew is lost: all memory for them is taken"
            );
            return;
        }
        if let Some(kept) = &self.kept {
            if let Err(error) = kept.reserve(slot) {
                tracing::warn!(%error, name = named.name, "a dirty bitmap of a disk that grew is lost: its file has no room");
                return self.taken.give(self.bytes);
            }
            self.marks.place(slot, kept.words(slot));
        }
        self.marks.start_with(slot, bits);
        self.note(slot, &named);
        self.names()[slot] = Some(named);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::sync::atomic::AtomicUsize;

    use vmseal_api::bitmap::BitmapError;
    use vmseal_api::filter::BITMAP_GRANULE as GRANULE;
    use vmseal_api::filter::BitmapChange::Start;

    use super::super::BitmapMemory;
    use super::*;

    fn dirty(bitmaps: &Arc<Bitmaps>, name: &str, size: u64) -> Vec<(bool, u64)> {
        let (reader, mut at, mut extents) = (bitmaps.read(name).unwrap(), 0, Vec::new());
        while at < size {
            let (dirty, end) = reader.extent(at, size);
            extents.push((dirty, end / GRANULE));
            at = end;
        }
        extents
    }

    #[test]
    fn what_was_dirty_of_a_disk_that_grows_while_it_is_served_is_and_all_that_is_new() {
        let (size, grown) = (100 * GRANULE + 4096, 300 * GRANULE);
        for file in [None, Some(tempfile::tempfile().unwrap())] {
            let open = |file: &File, size| Bitmaps::kept_in(file.try_clone().unwrap(), size);
            let bitmaps = match &file {
                Some(file) => open(file, size).unwrap(),
                None => Bitmaps::new(size),
            };
            let bitmaps = Arc::new(bitmaps);
            for name in ["one", "two"] {
                bitmaps.change(name, Start).unwrap();
            }
            bitmaps.changed(70 * GRANULE, 1);
            let reader = bitmaps.read("two");
            assert_eq!(Closed::close(Arc::clone(&bitmaps)).unwrap_err(), InUse);
            drop(reader);

            // Given up: what is marked meanwhile counts.
            let closed = Closed::close(Arc::clone(&bitmaps)).unwrap();
            assert_eq!(bitmaps.change("three", Start), Err(BitmapError::Grows));
            assert!(bitmaps.read("one").is_none() && bitmaps.status().len() == 2);
            bitmaps.changed(80 * GRANULE, 1);
            drop(closed);
            bitmaps.change("three", Start).unwrap();

            let told = |bitmaps: &Bitmaps| -> Vec<_> {
                bitmaps.status().into_iter().map(|it| (it.name, it.since)).collect()
            };
            let before = told(&bitmaps);
            let longer = Arc::new(Closed::close(Arc::clone(&bitmaps)).unwrap().longer(grown));
            assert_eq!(told(&longer), before);
            assert_eq!(bitmaps.change("four", Start), Err(BitmapError::Grows), "the former ones");
            drop(bitmaps);
            longer.changed(299 * GRANULE, 1);
            let one = [(false, 70), (true, 71), (false, 80), (true, 81), (false, 100), (true, 300)];
            let three = [(false, 100), (true, 300)];
            let holds = |bitmaps: &Arc<Bitmaps>| {
                assert_eq!(dirty(bitmaps, "one", grown), one);
                assert_eq!(dirty(bitmaps, "three", grown), three);
            };
            holds(&longer);
            longer.change("four", Start).unwrap();
            longer.changed(5 * GRANULE, 1);
            if let Some(file) = file {
                // Nothing is done when a process is killed.
                std::mem::forget(longer);
                let next = Arc::new(open(&file, grown).unwrap());
                assert_eq!(next.status().len(), 4);
                assert_eq!(dirty(&next, "four", grown)[..2], [(false, 5), (true, 6)]);
            }
        }
    }

    #[test]
    fn the_memory_of_the_former_bitmaps_is_given_back_before_that_of_the_new_ones_is_taken() {
        let taken: &'static BitmapMemory = Box::leak(Box::new(BitmapMemory(AtomicUsize::new(0))));
        let bitmaps = Arc::new(Bitmaps::within(1 << 40, taken));
        for name in ["one", "two", "three", "four"] {
            bitmaps.change(name, Start).unwrap();
        }
        let all = taken.0.load(SeqCst);
        let longer = Closed::close(Arc::clone(&bitmaps)).unwrap().longer(1 << 41);
        assert_eq!(longer.status().len(), 4, "they took all memory that there is");
        drop(bitmaps);
        assert_eq!(taken.0.load(SeqCst), all);
        drop(longer);
        assert_eq!(taken.0.load(SeqCst), 0);
    }
}
