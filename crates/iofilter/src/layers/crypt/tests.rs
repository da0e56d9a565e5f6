//! The cipher against the standard's vector and against XTS built by hand from AES blocks; and the size of the writes
//! that storage gets.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use super::*;
use crate::stack::chain::{Chain, Storage};

fn hex(text: &str) -> Vec<u8> {
    (0..text.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap())
        .collect()
}

fn encrypt(key: &[u8], offset: u64, data: &mut [u8]) {
    let mut cipher = Xts::new(key, Direction::Encrypt).unwrap();
    // SAFETY: the slice is whole sectors, in place.
    unsafe { cipher.sectors(offset, data.as_ptr(), data.as_mut_ptr(), data.len() / SECTOR) }
        .unwrap();
}

/// IEEE 1619-2007, vector 10: data unit 0xff, plaintext 00 01 02 …
fn vector_key() -> Vec<u8> {
    hex(concat!(
        "2718281828459045235360287471352662497757247093699959574966967627",
        "3141592653589793238462643383279502884197169399375105820974944592"
    ))
}

#[test]
fn a_sector_begins_as_the_standards_vector() {
    // XTS works block by block, so our 4096-byte sector begins as the vector's 512-byte unit.
    let mut data: Vec<u8> = (0..SECTOR).map(|at| at as u8).collect();
    encrypt(&vector_key(), 0xff * 512, &mut data);
    assert_eq!(data[..32], hex("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b"));
}

fn aes(key: &[u8], block: [u8; 16]) -> [u8; 16] {
    let (mut schedule, mut out) = (aws_lc_sys::AES_KEY::default(), [0; 16]);
    // SAFETY: a 32-byte key, and blocks of 16 bytes.
    unsafe {
        assert_eq!(aws_lc_sys::AES_set_encrypt_key(key.as_ptr(), 256, &raw mut schedule), 0);
        aws_lc_sys::AES_encrypt(block.as_ptr(), out.as_mut_ptr(), &raw const schedule);
    }
    out
}

fn xor(one: [u8; 16], other: [u8; 16]) -> [u8; 16] {
    std::array::from_fn(|at| one[at] ^ other[at])
}

/// IEEE 1619-2007 §5.3, written out.
fn by_hand(key: &[u8], unit: u64, data: &[u8]) -> Vec<u8> {
    let mut tweak = aes(&key[32..], u128::from(unit).to_le_bytes());
    let mut out = Vec::new();
    for block in data.chunks(16) {
        let sealed = aes(&key[..32], xor(block.try_into().unwrap(), tweak));
        out.extend(xor(sealed, tweak));
        let value = u128::from_le_bytes(tweak);
        let carry = if value >> 127 == 1 { 0x87 } else { 0 };
        tweak = ((value << 1) ^ carry).to_le_bytes();
    }
    out
}

#[test]
fn the_tweak_counts_512_byte_units_although_sectors_have_4096() {
    let key: Vec<u8> = (0..64u8).map(|at| at * 3 + 1).collect();
    let plain: Vec<u8> = (0..3 * SECTOR).map(|at| ((at * at) >> 5) as u8).collect();
    let offset = 5_000_000 * SECTOR as u64;
    let mut sealed = plain.clone();
    encrypt(&key, offset, &mut sealed);
    for sector in 0..3 {
        let range = sector * SECTOR..(sector + 1) * SECTOR;
        let unit = offset / 512 + 8 * sector as u64;
        assert_eq!(sealed[range.clone()], by_hand(&key, unit, &plain[range])[..]);
    }
    let mut cipher = Xts::new(&key, Direction::Decrypt).unwrap();
    // SAFETY: three whole sectors, in place.
    unsafe { cipher.sectors(offset, sealed.as_ptr(), sealed.as_mut_ptr(), 3) }.unwrap();
    assert_eq!(sealed, plain);
}

#[test]
fn bad_keys_are_refused() {
    assert_eq!(Xts::new(&[1; 32], Direction::Encrypt).err(), Some(XtsError::KeyLength));
    assert_eq!(Xts::new(&[1; 64], Direction::Encrypt).err(), Some(XtsError::Key));
}

/// Storage that only notes the lengths of its requests.
struct Lengths(Arc<Mutex<Vec<u64>>>);

impl Storage for Lengths {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.0.lock().unwrap().push(io.request(id).length);
        io.complete(id, Ok(()));
    }

    fn poll(&mut self, _io: &mut Io<'_>) {}

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_device_is_given_a_large_write_whole_and_what_works_at_once_in_parts_that_stay_in_its_cache() {
    for (chunk, wanted) in [(Chunk::Large, vec![512 << 10]), (Chunk::Small, vec![64 << 10; 8])] {
        let key = SecretBytes::from_wiped(&mut vector_key()).unwrap();
        let lengths = Arc::new(Mutex::new(Vec::new()));
        let crypt = Crypt::new(&key, Holes::Zero, chunk, 1 << 20, Arc::default()).unwrap();
        let backend = Box::new(Lengths(Arc::clone(&lengths)));
        let mut chain = Chain::new(1 << 20, false, vec![Box::new(crypt)], backend).unwrap();
        let mut data = vec![7; 512 << 10];
        let id = chain.begin().unwrap();
        // SAFETY: the data outlives the request, which is done when `poll` returns.
        chain.data_mut(id).push(unsafe { Segment::new(data.as_mut_ptr(), data.len()) });
        chain.submit(id, Operation::Write, 0, 0, 0);
        chain.poll();
        assert_eq!(chain.next_done().unwrap().result, Ok(()));
        assert_eq!(*lengths.lock().unwrap(), wanted, "{chunk:?}");
    }
}

/// What storage was asked.
#[derive(Debug, Default)]
struct Asked {
    /// The lengths of its requests, in their order.
    lengths: Vec<u64>,
    /// The most that it had at a time.
    most: usize,
}

/// Storage that ends one request in each pass.
#[derive(Default)]
struct OneByOne {
    held: VecDeque<RequestId>,
    asked: Arc<Mutex<Asked>>,
}

impl Storage for OneByOne {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        self.held.push_back(id);
        let mut asked = self.asked.lock().unwrap();
        asked.lengths.push(io.request(id).length);
        asked.most = asked.most.max(self.held.len());
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        if let Some(id) = self.held.pop_front() {
            io.complete(id, Ok(()));
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

fn crypt(chunk: Chunk, pool_bytes: usize) -> Crypt {
    let key = SecretBytes::from_wiped(&mut vector_key()).unwrap();
    Crypt::new(&key, Holes::Zero, chunk, pool_bytes, Arc::default()).unwrap()
}

/// Writes of these lengths, one after the other, are submitted at once and succeed. Returns what storage was asked.
fn written(crypt: Crypt, lengths: &[usize]) -> Asked {
    let storage = OneByOne::default();
    let asked = Arc::clone(&storage.asked);
    let mut data: Vec<Vec<u8>> = lengths.iter().map(|length| vec![7; *length]).collect();
    let size = lengths.iter().sum::<usize>() as u64;
    let filters: Vec<Box<dyn Filter>> = vec![Box::new(crypt)];
    let mut chain = Chain::new(size, false, filters, Box::new(storage)).unwrap();
    let mut at = 0;
    for data in &mut data {
        let id = chain.begin().unwrap();
        // SAFETY: the data outlives the request, which is done when `poll` returns.
        chain.data_mut(id).push(unsafe { Segment::new(data.as_mut_ptr(), data.len()) });
        chain.submit(id, Operation::Write, at, 0, 0);
        at += data.len() as u64;
    }
    chain.poll();
    for _ in lengths {
        assert_eq!(chain.next_done().unwrap().result, Ok(()));
    }
    std::mem::take(&mut *asked.lock().unwrap())
}

#[test]
fn no_more_chunks_are_under_way_than_there_are_tables_for_and_further_ones_wait() {
    assert_eq!(crypt(Chunk::Shared, SHARED_POOL_BYTES).limits().children, SHARED_CHILDREN_MAX);
    assert_eq!(crypt(Chunk::Shared, 1 << 20).limits().children, 256);
    assert_eq!(crypt(Chunk::Large, 1 << 20).limits().children, 256);
    let few = Crypt { children_max: 2, ..crypt(Chunk::Shared, 1 << 20) };
    // Short ones, and some that are several chunks.
    let asked = written(few, &[SECTOR, 600 << 10, SECTOR, SECTOR, 300 << 10, SECTOR]);
    assert_eq!(asked.most, 2);
    assert_eq!(asked.lengths.iter().sum::<u64>(), (4 * SECTOR as u64) + (900 << 10));
}

#[test]
fn a_long_write_leaves_a_quarter_of_the_shared_buffers_to_others() {
    let (chunk, short) = (1 << 20, SECTOR as u64);
    let asked = written(crypt(Chunk::Shared, 4 << 20), &[8 << 20, SECTOR]);
    assert_eq!(asked.lengths[..4], [chunk, chunk, chunk, short], "the short one waits");
    assert_eq!(asked.lengths.iter().sum::<u64>(), (8 << 20) + short);
    assert_eq!(asked.most, 4);
}

/// Storage that leaves what is read in memory of its own, where it is asked to.
struct Lends(Vec<u8>);

impl Storage for Lends {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        assert!(request.takes_lent, "it is not asked to lend");
        let (start, length) = (request.offset as usize, request.length as usize);
        // In parts that are not the guest's.
        for part in self.0[start..start + length].chunks_mut(3 * SECTOR) {
            // SAFETY: the bytes stay where they are as long as the chain has its storage.
            io.show_lent(id, unsafe { Segment::new(part.as_mut_ptr(), part.len()) });
        }
        io.complete(id, Ok(()));
    }

    fn poll(&mut self, _io: &mut Io<'_>) {}

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn what_storage_has_left_in_its_buffers_is_decrypted_from_there() {
    let key = vector_key();
    let plain: Vec<u8> = (0..16 * SECTOR).map(|at| ((at * 7) >> 3) as u8 | 1).collect();
    let mut sealed = plain.clone();
    encrypt(&key, 0, &mut sealed);
    // A hole.
    sealed[5 * SECTOR..6 * SECTOR].fill(0);
    let mut expected = plain;
    expected[5 * SECTOR..6 * SECTOR].fill(0);
    let key = SecretBytes::from_wiped(&mut key.clone()).unwrap();
    let crypt = Crypt::new(&key, Holes::Zero, Chunk::Shared, 1 << 20, Arc::default()).unwrap();
    let filters: Vec<Box<dyn Filter>> = vec![Box::new(crypt.taking_lent(true))];
    let kept = sealed.clone();
    let storage = Box::new(Lends(sealed));
    let mut chain = Chain::new(kept.len() as u64, false, filters, storage).unwrap();
    for (begin, end) in [(0, 16), (3, 8), (5, 6)] {
        for pieces in [1000, 2 * SECTOR, 16 * SECTOR] {
            let (begin, end) = (begin * SECTOR, end * SECTOR);
            let mut data = vec![0xee; end - begin];
            let id = chain.begin().unwrap();
            for piece in data.chunks_mut(pieces) {
                // SAFETY: the data outlives the request, which is done when `poll` returns.
                let segment = unsafe { Segment::new(piece.as_mut_ptr(), piece.len()) };
                chain.data_mut(id).push(segment);
            }
            chain.submit(id, Operation::Read, begin as u64, 0, 0);
            chain.poll();
            assert_eq!(chain.next_done().unwrap().result, Ok(()));
            assert!(data == expected[begin..end], "{begin} to {end}, pieces of {pieces}");
        }
    }
}

#[test]
fn chunks_in_shared_memory_are_longer_and_no_more_than_a_quarter_of_it() {
    let mib = 1 << 20;
    assert_eq!(Chunk::Shared.bytes(SHARED_POOL_BYTES), 4 << 20);
    assert_eq!(Chunk::Shared.bytes(4 * mib), 1 << 20);
    assert_eq!(Chunk::Shared.bytes(2 * mib), 512 << 10);
    assert_eq!(Chunk::Shared.bytes(0), (BLOCKS_MAX * BLOCK) as u64);
    assert_eq!(Chunk::Large.bytes(0), 512 << 10);
}
