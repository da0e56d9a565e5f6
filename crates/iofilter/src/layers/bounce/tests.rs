//! What a guest's memory holds while a read is under way.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Mutex;

use vmseal_api::filter::Holes;
use vmseal_secret::SecretBytes;
use vmseal_secret::xts::{Direction, SECTOR, Xts};

use super::*;
use crate::layers::crypt::{Chunk, Crypt};
use crate::stack::chain::{Chain, Storage};
use crate::stack::memory::Segment;

const SIZE: usize = 4 << 20;

/// Ciphertext, and where reads of it were put. One sector cannot be read.
struct Noting {
    ciphertext: Vec<u8>,
    bad: Option<u64>,
    put: Arc<Mutex<Vec<Range<usize>>>>,
}

impl Storage for Noting {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let request = io.request(id);
        let mut at = request.offset as usize;
        let bad = self
            .bad
            .is_some_and(|bad| (request.offset..request.offset + request.length).contains(&bad));
        for segment in request.data.as_slice() {
            let base = segment.base() as usize;
            self.put.lock().unwrap().push(base..base + segment.len());
            segment.copy_from(&self.ciphertext[at..at + segment.len()]);
            at += segment.len();
        }
        io.complete(id, if bad { Err(IoError::Device(5)) } else { Ok(()) });
    }

    fn poll(&mut self, _io: &mut Io<'_>) {}

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

struct Bench {
    plain: Vec<u8>,
    put: Arc<Mutex<Vec<Range<usize>>>>,
    chain: Chain,
}

fn bench(bounces: bool, bad: Option<u64>) -> Bench {
    let mut key: Vec<u8> = (0..64).collect();
    let key = SecretBytes::from_wiped(&mut key).unwrap();
    let plain: Vec<u8> = (0..SIZE).map(|at| (at / 16 * 7 + at) as u8).collect();
    let mut ciphertext = plain.clone();
    let mut cipher = Xts::new(key.expose(), Direction::Encrypt).unwrap();
    let bytes = ciphertext.as_mut_ptr();
    // SAFETY: whole sectors of one buffer, in place.
    unsafe { cipher.sectors(0, bytes, bytes, SIZE / SECTOR) }.unwrap();
    let put = Arc::default();
    let storage = Box::new(Noting { ciphertext, bad, put: Arc::clone(&put) });
    let crypt = Crypt::new(&key, Holes::Zero, Chunk::Small, 1 << 20, Arc::default()).unwrap();
    let mut filters: Vec<Box<dyn Filter>> = vec![Box::new(crypt)];
    if bounces {
        filters.insert(0, Bounce::default().filter(&Place::simple(SIZE as u64)).unwrap());
    }
    Bench { plain, put, chain: Chain::new(SIZE as u64, false, filters, storage).unwrap() }
}

impl Bench {
    /// Submits reads of these lengths, one after the other, into memory in odd pieces; returns how they ended.
    fn read(&mut self, memory: &mut [u8], lengths: &[usize]) -> Vec<Result<(), IoError>> {
        let mut at = 0;
        for length in lengths {
            let id = self.chain.begin().unwrap();
            let mut rest = &mut memory[at..at + length];
            while !rest.is_empty() {
                let (piece, after) = rest.split_at_mut(rest.len().min(3 * SECTOR / 2));
                // SAFETY: the memory outlives the requests, which are done when this returns.
                let piece = unsafe { Segment::new(piece.as_mut_ptr(), piece.len()) };
                self.chain.data_mut(id).push(piece);
                rest = after;
            }
            self.chain.submit(id, Operation::Read, at as u64, 0, at as u64);
            at += length;
        }
        let mut ended = vec![None; lengths.len()];
        while ended.iter().any(Option::is_none) {
            self.chain.poll();
            while let Some(done) = self.chain.next_done() {
                let mut begun = 0;
                let place = lengths.iter().position(|length| {
                    begun += length;
                    begun - length == done.tag as usize
                });
                ended[place.unwrap()] = Some(done.result);
            }
        }
        ended.into_iter().flatten().collect()
    }
}

/// Whether any read of storage went to the guest's memory.
fn reached(bench: &Bench, memory: &[u8]) -> bool {
    let (from, to) = (memory.as_ptr() as usize, memory.as_ptr() as usize + memory.len());
    bench.put.lock().unwrap().iter().any(|put| put.start < to && put.end > from)
}

#[test]
fn no_ciphertext_is_ever_in_the_guests_memory() {
    // More at once than there are buffers.
    let lengths = [2 << 20, SECTOR, 64 << 10, 1 << 20, 5 * SECTOR];
    for bounces in [false, true] {
        let mut bench = bench(bounces, None);
        let mut memory = vec![0; lengths.iter().sum()];
        assert!(bench.read(&mut memory, &lengths).iter().all(Result::is_ok));
        assert!(memory == bench.plain[..memory.len()], "other data was read");
        assert_eq!(reached(&bench, &memory), !bounces);
    }
}

#[test]
fn a_read_that_fails_fails_alone_and_gives_its_buffers_back() {
    let lengths = [256 << 10, 512 << 10, 256 << 10];
    let mut bench = bench(true, Some(300 << 10));
    for _ in 0..8 {
        let mut memory = vec![0; lengths.iter().sum()];
        let ended = bench.read(&mut memory, &lengths);
        assert!(ended[0].is_ok() && ended[1].is_err() && ended[2].is_ok(), "{ended:?}");
        assert!(memory[768 << 10..] == bench.plain[768 << 10..memory.len()]);
    }
}
