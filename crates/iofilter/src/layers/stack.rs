//! What chains are made of, those of a disk and those of a leg: layers over storage.
//!
//! ```text
//!  boundary 0    what the guest sees: size, 512-byte blocks, memory of any alignment
//!  layers[0]     ── asked what it presents, given boundary 1
//!  boundary 1
//!  …
//!  storage       ── what it presents is given
//! ```
//! Encryption and alignment are layers as all others. Which layers stand where is up to who makes the stack, but for `align`: that
//! stands wherever what is below takes other blocks or memory than a guest gives, above the encryption or else above
//! storage.

use std::io;
use std::sync::Arc;

use crate::layers::align::{self, Alignment};
use crate::layers::crypt;
use crate::stack::chain::{Chain, Filter, Storage};
use crate::stack::figures::CipherTime;
use crate::stack::layer::{Boundary, Layer, Place};
use crate::storage::DiskStorage;

/// Layers, from the guest downwards, over storage.
#[derive(Clone, Debug)]
pub struct Stack {
    layers: Vec<Arc<dyn Layer>>,
    storage: DiskStorage,
    /// Of the storage, in bytes.
    size: u64,
}

impl Stack {
    /// These layers over storage of `size` bytes.
    #[must_use]
    pub fn new(layers: Vec<Arc<dyn Layer>>, storage: DiskStorage, size: u64) -> Self {
        let mut stack = Self { layers, storage, size };
        let present = stack.layers.iter().position(|layer| layer.kind() == align::KIND);
        let kept = present.map(|index| stack.layers.remove(index));
        let at = stack.lowest();
        if !stack.boundary(at).suits_guests() {
            // With its locks, which all chains of a disk share.
            let layer = kept.unwrap_or_else(|| Arc::new(Alignment::default()));
            stack.layers.insert(at, layer);
        }
        stack
    }

    /// Above which layer whole blocks are needed: the encryption, or storage.
    fn lowest(&self) -> usize {
        let is_crypt = |layer: &Arc<dyn Layer>| layer.kind() == crypt::KIND;
        self.layers.iter().position(is_crypt).unwrap_or(self.layers.len())
    }

    /// The same layers over other storage of `size` bytes.
    #[must_use]
    pub fn over(&self, storage: DiskStorage, size: u64) -> Self {
        Self::new(self.layers.clone(), storage, size)
    }

    /// The same below further layers, from the guest downwards.
    #[must_use]
    pub fn under(&self, above: Vec<Arc<dyn Layer>>) -> Self {
        Self::new([above, self.layers.clone()].concat(), self.storage.clone(), self.size)
    }

    /// The same with one more layer, which this many stand above.
    #[must_use]
    pub fn with(&self, above: usize, layer: Arc<dyn Layer>) -> Self {
        let mut layers = self.layers.clone();
        layers.insert(above, layer);
        Self::new(layers, self.storage.clone(), self.size)
    }

    /// The same without the layers of this kind.
    #[must_use]
    pub fn without(&self, kind: &str) -> Self {
        let layers = self.layers.iter().filter(|layer| layer.kind() != kind).cloned().collect();
        Self::new(layers, self.storage.clone(), self.size)
    }

    /// All layers, from the guest downwards.
    #[must_use]
    pub fn layers(&self) -> &[Arc<dyn Layer>] {
        &self.layers
    }

    /// Where the data is stored.
    #[must_use]
    pub fn storage(&self) -> &DiskStorage {
        &self.storage
    }

    /// Of the storage, in bytes.
    #[must_use]
    pub fn storage_size(&self) -> u64 {
        self.size
    }

    /// What the layers from this one on present to what is above them.
    #[must_use]
    pub fn boundary(&self, from: usize) -> Boundary {
        let layers = self.layers.iter().skip(from).rev();
        layers.fold(self.storage.boundary(self.size), |below, layer| layer.presents(below))
    }

    /// Whether filters that were made for this stack give the storage of `other` what it takes, as it likes it.
    #[must_use]
    pub fn filters_suit(&self, other: &Self) -> bool {
        let (own, others) = (self.boundary(self.lowest()), other.boundary(other.lowest()));
        // They work without shared memory, too, but at the price of copies.
        let share = self.storage.shares_memory() || !other.storage.shares_memory();
        own.block >= others.block && own.memory >= others.memory && share
    }

    /// Whether zeroes in storage are zeroes to the guest.
    #[must_use]
    pub fn keeps_zeroes(&self) -> bool {
        self.layers.iter().all(|layer| layer.keeps_zeroes())
    }

    /// Whether it is encrypted.
    #[must_use]
    pub fn encrypts(&self) -> bool {
        self.lowest() < self.layers.len()
    }

    /// Whether its chains have many requests in flight at a time, as over a device: a layer may imitate one.
    #[must_use]
    pub fn is_a_device(&self) -> bool {
        self.storage.is_a_device() || self.hold_back(0)
    }

    /// Whether a layer from this one on holds back requests.
    fn hold_back(&self, from: usize) -> bool {
        self.layers.iter().skip(from).any(|layer| layer.holds_back())
    }

    /// A chain of the layers from this one on over this storage, with buffers of so many bytes in all.
    ///
    /// # Errors
    /// The system refuses what a layer needs, or a key is not usable.
    pub fn chain(
        &self,
        from: usize,
        read_only: bool,
        pool_bytes: usize,
        cipher_time: &Arc<CipherTime>,
        storage: Box<dyn Storage>,
    ) -> io::Result<Chain> {
        let (at_once, shares) = (storage.works_at_once(), storage.shares_memory());
        let filter = |index: usize| -> io::Result<Box<dyn Filter>> {
            let (below, cipher_time) = (self.boundary(index + 1), Arc::clone(cipher_time));
            let works_at_once = at_once && !self.hold_back(index + 1);
            let lends = shares && index + 1 == self.layers.len();
            let place = Place { below, works_at_once, shares, lends, pool_bytes, cipher_time };
            self.layers[index].filter(&place)
        };
        let filters = (from..self.layers.len()).map(filter).collect::<io::Result<_>>()?;
        let chain = Chain::new(self.boundary(from).size, read_only, filters, storage)?;
        Ok(chain.holding_back(self.hold_back(from)))
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::filter::{CRYPT_SECTOR, Holes};
    use vmseal_secret::SecretBytes;

    use super::*;
    use crate::layers::crypt::Encryption;
    use crate::stack::chain::Limits;
    use crate::stack::request::{Operation, RequestId};
    use crate::storage::mem::MemDisk;

    const SIZE: u64 = 1 << 20;

    /// A layer that keeps the end of what is below it to itself.
    #[derive(Debug)]
    struct Keeps(u64);

    struct Passes;

    impl Layer for Keeps {
        fn kind(&self) -> &'static str {
            "keeps"
        }

        fn presents(&self, below: Boundary) -> Boundary {
            Boundary { size: below.size - self.0, ..below }
        }

        fn filter(&self, place: &Place) -> io::Result<Box<dyn Filter>> {
            assert_eq!(place.below.size, SIZE, "it is told of what is below it");
            Ok(Box::new(Passes))
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    impl Filter for Passes {
        fn limits(&self) -> Limits {
            Limits { children: 0 }
        }

        fn prepare(&mut self, _capacity: usize) {}

        fn down(&mut self, id: RequestId, io: &mut crate::stack::chain::Io<'_>) {
            io.pass(id);
        }

        fn up(&mut self, id: RequestId, io: &mut crate::stack::chain::Io<'_>) {
            let result = io.request(id).result;
            io.complete(id, result);
        }
    }

    fn encryption(holes: Holes) -> Arc<dyn Layer> {
        let mut key: Vec<u8> = (0..64).collect();
        Arc::new(Encryption { key: SecretBytes::from_wiped(&mut key).unwrap(), holes })
    }

    fn kinds(stack: &Stack) -> Vec<&'static str> {
        stack.layers().iter().map(|layer| layer.kind()).collect()
    }

    #[test]
    fn a_layer_says_what_size_it_presents_and_the_chain_ends_there() {
        let storage = DiskStorage::Mem(MemDisk::new(SIZE as usize));
        let stack = Stack::new(vec![Arc::new(Keeps(4096))], storage, SIZE);
        assert_eq!((stack.boundary(0).size, stack.boundary(1).size), (SIZE - 4096, SIZE));
        let chain = |from| {
            let storage = stack.storage().queue().unwrap();
            stack.chain(from, false, 1 << 20, &Arc::default(), storage).unwrap()
        };
        for (from, end) in [(0, SIZE - 4096), (1, SIZE)] {
            let mut chain = chain(from);
            let zero = Operation::WriteZeroes { unmap: false };
            for (at, fits) in [(end - 512, true), (end, false)] {
                let id = chain.begin().unwrap();
                chain.submit(id, zero, at, 512, 0);
                assert_eq!(crate::stack::blocking::drain(&mut chain).is_ok(), fits, "{from}: {at}");
            }
        }
    }

    /// Notes where it is to stand.
    #[derive(Debug, Default)]
    struct Notes(std::sync::Mutex<Vec<Place>>);

    impl Notes {
        fn of<T>(&self, what: impl Fn(&Place) -> T) -> Vec<T> {
            self.0.lock().unwrap().iter().map(what).collect()
        }
    }

    impl Layer for Notes {
        fn kind(&self) -> &'static str {
            "notes"
        }

        fn filter(&self, place: &Place) -> io::Result<Box<dyn Filter>> {
            self.0.lock().unwrap().push(place.clone());
            Ok(Box::new(Passes))
        }

        fn counters(&self) -> Vec<(&'static str, u64)> {
            Vec::new()
        }
    }

    struct Shares(Box<dyn Storage>);

    impl Storage for Shares {
        fn prepare(&mut self, capacity: usize) {
            self.0.prepare(capacity);
        }

        fn submit(&mut self, id: RequestId, io: &mut crate::stack::chain::Io<'_>) {
            self.0.submit(id, io);
        }

        fn poll(&mut self, io: &mut crate::stack::chain::Io<'_>) {
            self.0.poll(io);
        }

        fn wait_handle(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            self.0.wait_handle()
        }

        fn shares_memory(&self) -> bool {
            true
        }
    }

    #[test]
    fn only_the_filter_directly_above_storage_is_lent_what_it_reads() {
        let notes = Arc::new(Notes::default());
        let layers: Vec<Arc<dyn Layer>> = vec![Arc::clone(&notes) as _, Arc::clone(&notes) as _];
        let stack = Stack::new(layers, DiskStorage::Mem(MemDisk::new(SIZE as usize)), SIZE);
        let storage = || stack.storage().queue().unwrap();
        stack.chain(0, false, 1 << 20, &Arc::default(), storage()).unwrap();
        let shares = Box::new(Shares(storage()));
        stack.chain(0, false, 1 << 20, &Arc::default(), shares).unwrap();
        let noted = notes.of(|place| (place.shares, place.lends));
        assert_eq!(noted, [(false, false), (false, false), (true, false), (true, true)]);
    }

    #[test]
    fn what_is_above_a_layer_that_holds_back_works_as_above_a_device() {
        let delay = |microseconds| {
            let spec = vmseal_api::filter::DelaySpec {
                operations: Vec::new(),
                microseconds,
                jitter_microseconds: 0,
                reorders: false,
                seed: 0,
            };
            Arc::new(crate::layers::delay::Delay::new(spec))
        };
        for (microseconds, is_a_device) in [(0, false), (300, true)] {
            let notes = Arc::new(Notes::default());
            let (above, below) = (Arc::clone(&notes) as _, Arc::clone(&notes) as _);
            let layers: Vec<Arc<dyn Layer>> = vec![above, delay(microseconds), below];
            let stack = Stack::new(layers, DiskStorage::Mem(MemDisk::new(SIZE as usize)), SIZE);
            let storage = stack.storage().queue().unwrap();
            let chain = stack.chain(0, false, 1 << 20, &Arc::default(), storage).unwrap();
            let noted = notes.of(|place| place.works_at_once);
            assert_eq!(noted, [!is_a_device, true], "{microseconds}");
            assert_eq!(stack.is_a_device(), is_a_device, "{microseconds}");
            assert_eq!(chain.works_at_once(), !is_a_device, "{microseconds}");
        }
    }

    #[test]
    fn alignment_stands_where_blocks_are_larger_than_a_guests_and_is_kept_when_storage_changes() {
        let mem = || DiskStorage::Mem(MemDisk::new(SIZE as usize));
        let plain = Stack::new(vec![Arc::new(Keeps(0))], mem(), SIZE);
        assert_eq!(kinds(&plain), ["keeps"]);
        let layers = vec![Arc::new(Keeps(0)), encryption(Holes::Zero), Arc::new(Keeps(0))];
        let sealed = Stack::new(layers, mem(), SIZE);
        assert_eq!(kinds(&sealed), ["keeps", align::KIND, crypt::KIND, "keeps"]);
        assert!(sealed.boundary(0).suits_guests() && sealed.boundary(1).suits_guests());
        assert_eq!(sealed.boundary(2).block, CRYPT_SECTOR);
        let moved = sealed.over(mem(), SIZE);
        assert!(Arc::ptr_eq(&moved.layers()[1], &sealed.layers()[1]), "its locks are others");
        assert!(sealed.filters_suit(&plain) && !plain.filters_suit(&sealed));
        let full = Stack::new(vec![encryption(Holes::Ciphertext)], mem(), SIZE);
        assert!(sealed.keeps_zeroes() && !full.keeps_zeroes() && plain.keeps_zeroes());
        assert!(sealed.encrypts() && !plain.encrypts());
    }
}
