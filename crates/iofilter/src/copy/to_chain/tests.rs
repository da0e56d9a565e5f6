use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use proptest::prelude::*;
use vmseal_api::filter::Holes;
use vmseal_secret::{DEK_LEN, SecretBytes};

use super::*;
use crate::copy::engine::UNIT;
use crate::copy::filled::Buffer;
use crate::layers::crypt::{Chunk, Crypt};
use crate::stack::chain::{Filter, Io, Storage};
use crate::stack::memory::Cursor;
use crate::stack::request::RequestId;

/// What is where nothing was written.
const BEFORE: u8 = 0xee;

/// What storage has, and how many requests it has not ended.
struct Stored {
    bytes: Vec<u8>,
    waiting: usize,
    /// How many these were when the last flush came.
    at_flush: Option<usize>,
}

/// Takes what a request has in its memory when it ends it: after some passes, in any order. Each second pass ends nothing, so that the
/// chain, which goes on as long as something ends, does not wait for all of them.
struct Late {
    stored: Arc<Mutex<Stored>>,
    random: fastrand::Rng,
    ends: bool,
    /// With the passes that each has left.
    waiting: Vec<(RequestId, u32)>,
    /// A write to this place fails.
    fails_at: Option<u64>,
}

impl Late {
    fn perform(&self, id: RequestId, io: &Io<'_>) -> Result<(), IoError> {
        let (request, mut stored) = (io.request(id), self.stored.lock().unwrap());
        let range = request.offset as usize..(request.offset + request.length) as usize;
        if self.fails_at.is_some_and(|place| range.contains(&(place as usize))) {
            return Err(IoError::NoSpace);
        }
        let mut cursor = Cursor::default();
        match request.operation {
            Operation::Write => _ = cursor.gather(&request.data, &mut stored.bytes[range]),
            Operation::Read => _ = cursor.scatter(&request.data, &stored.bytes[range]),
            Operation::WriteZeroes { .. } | Operation::Discard => stored.bytes[range].fill(0),
            Operation::Flush => {}
        }
        Ok(())
    }
}

impl Storage for Late {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, io: &mut Io<'_>) {
        let mut stored = self.stored.lock().unwrap();
        if io.request(id).operation == Operation::Flush {
            stored.at_flush = Some(stored.waiting);
        }
        stored.waiting += 1;
        // Not in the first pass that ends any.
        self.waiting.push((id, self.random.u32(2..8)));
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        self.ends = !self.ends;
        if !self.ends {
            return;
        }
        self.waiting.iter_mut().for_each(|(_, passes)| *passes -= 1);
        let ended = self.waiting.extract_if(.., |(_, passes)| *passes == 0).collect::<Vec<_>>();
        for (id, _) in ended {
            let result = self.perform(id, io);
            self.stored.lock().unwrap().waiting -= 1;
            io.complete(id, result);
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn works_at_once(&self) -> bool {
        false
    }

    fn deadline(&self) -> Option<Instant> {
        (!self.waiting.is_empty()).then(Instant::now)
    }
}

/// A chain of this size to storage that ends requests late.
fn late(
    size: usize,
    before: u8,
    seed: u64,
    fails_at: Option<u64>,
    filters: Vec<Box<dyn Filter>>,
) -> (Chain, Arc<Mutex<Stored>>) {
    let stored = Stored { bytes: vec![before; size], waiting: 0, at_flush: None };
    let stored = Arc::new(Mutex::new(stored));
    let (random, waiting) = (fastrand::Rng::with_seed(seed), Vec::new());
    let storage = Late { stored: Arc::clone(&stored), random, ends: true, waiting, fails_at };
    (Chain::new(size as u64, false, filters, Box::new(storage)).unwrap(), stored)
}

/// A piece at `at`, whose units have data or zeroes, and its bytes. No two units near each other have the same data.
fn piece(at: u64, units: &[bool]) -> (Filled, Vec<u8>) {
    let length = units.len() * UNIT as usize;
    let mut piece = Filled::new(Buffer::new(length), at, length);
    let in_units = piece.bytes_mut().chunks_mut(UNIT as usize);
    for (number, (unit, data)) in in_units.zip(units).enumerate() {
        let byte = (at / UNIT + number as u64) % 251 + 1;
        unit.fill(if *data { byte as u8 } else { 0 });
    }
    let bytes = piece.bytes().to_vec();
    (piece, bytes)
}

/// Data and zeroes in turn.
fn in_turn(units: usize) -> Vec<bool> {
    (0..units).map(|unit| unit % 2 == 0).collect()
}

/// Has two pieces in flight, one behind the other; their bytes.
fn begin_two(sink: &mut ToChain<&mut Chain>, units: &[bool]) -> [Vec<u8>; 2] {
    let at = [0, units.len() as u64 * UNIT];
    at.map(|at| {
        let (piece, bytes) = piece(at, units);
        assert!(sink.begin(piece).unwrap().is_none(), "storage has not ended anything");
        bytes
    })
}

#[test]
fn a_piece_comes_back_when_all_its_requests_have_ended_and_in_order() {
    let units = in_turn(8);
    let length = 8 * UNIT as usize;
    let (mut chain, stored) = late(2 * length, BEFORE, 1, None, Vec::new());
    let mut sink = ToChain::new(&mut chain, Zeroes::Unmap);
    let [first, second] = begin_two(&mut sink, &units);
    assert!(stored.lock().unwrap().waiting > 0);
    let back = sink.finish().unwrap().unwrap();
    assert_eq!((back.at(), back.bytes() == first), (0, true));
    assert!(stored.lock().unwrap().bytes[..length] == first, "it came back too early");
    drop(back);
    let back = sink.finish().unwrap().unwrap();
    assert_eq!((back.at(), back.bytes() == second), (length as u64, true));
    assert!(stored.lock().unwrap().bytes == [first, second].concat());
    assert!(sink.finish().unwrap().is_none(), "nothing is in flight");
}

#[test]
fn nothing_is_in_flight_when_the_sink_is_dropped() {
    let units = in_turn(8);
    let length = 8 * UNIT as usize;
    let (mut chain, stored) = late(2 * length, BEFORE, 2, None, Vec::new());
    let mut sink = ToChain::new(&mut chain, Zeroes::Unmap);
    let [first, second] = begin_two(&mut sink, &units);
    drop(sink);
    let stored = stored.lock().unwrap();
    assert_eq!((stored.waiting, chain.in_flight()), (0, 0));
    // A buffer that was freed first would have been wiped.
    assert!(stored.bytes == [first, second].concat());
}

#[test]
fn a_flush_comes_after_the_pieces_in_flight() {
    let units = in_turn(8);
    let length = 8 * UNIT as usize;
    let (mut chain, stored) = late(length, BEFORE, 3, None, Vec::new());
    let mut sink = ToChain::new(&mut chain, Zeroes::Unmap);
    let (one, first) = piece(0, &units);
    assert!(sink.begin(one).unwrap().is_none());
    sink.flush().unwrap();
    assert_eq!(stored.lock().unwrap().at_flush, Some(0));
    assert!(stored.lock().unwrap().bytes == first);
    assert!(sink.finish().unwrap().is_some(), "it is not given back");
}

#[test]
fn an_error_is_that_of_its_piece_whichever_is_in_flight_beside_it() {
    let units = in_turn(8);
    let length = 8 * UNIT;
    for failing in [0, 1] {
        let place = failing * length + 2 * UNIT;
        let size = 2 * length as usize;
        let (mut chain, stored) = late(size, BEFORE, 4, Some(place), Vec::new());
        let mut sink = ToChain::new(&mut chain, Zeroes::Unmap);
        for at in [0, length] {
            assert!(sink.begin(piece(at, &units).0).unwrap().is_none());
        }
        for number in [0, 1] {
            let expected = if number == failing { Err(IoError::NoSpace) } else { Ok(true) };
            assert_eq!(sink.finish().map(|back| back.is_some()), expected, "piece {number}");
        }
        drop(sink);
        assert_eq!((stored.lock().unwrap().waiting, chain.in_flight()), (0, 0));
    }
}

#[test]
fn a_piece_of_more_runs_than_a_chain_has_requests_waits_for_them() {
    let units = in_turn(ROOTS_MAX + 10);
    let length = units.len() * UNIT as usize;
    let (mut chain, stored) = late(2 * length, BEFORE, 5, None, Vec::new());
    let mut sink = ToChain::new(&mut chain, Zeroes::Unmap);
    let [first, second] = begin_two(&mut sink, &units);
    assert!(sink.finish().unwrap().is_some());
    assert!(sink.finish().unwrap().is_some());
    assert!(stored.lock().unwrap().bytes == [first, second].concat());
}

#[test]
fn pieces_that_need_more_buffers_to_be_encrypted_than_there_are_wait_for_them() {
    let units = vec![true; 64];
    let length = units.len() * UNIT as usize;
    let key = SecretBytes::random(DEK_LEN).unwrap();
    // A quarter of one piece.
    let pool_bytes = length / 4;
    let crypt = Crypt::new(&key, Holes::Zero, Chunk::Large, pool_bytes, Arc::default()).unwrap();
    let filters: Vec<Box<dyn Filter>> = vec![Box::new(crypt)];
    let (mut chain, stored) = late(2 * length, 0, 6, None, filters);
    let mut sink = ToChain::new(&mut chain, Zeroes::Skip);
    let [first, second] = begin_two(&mut sink, &units);
    assert!(sink.finish().unwrap().is_some());
    assert!(sink.finish().unwrap().is_some());
    drop(sink);
    let expected = [first, second].concat();
    assert!(stored.lock().unwrap().bytes != expected, "it is in the clear");
    let mut read = vec![0; 2 * length];
    blocking::move_bytes(&mut chain, Operation::Read, &mut read, 0).unwrap();
    assert!(read == expected);
}

proptest! {
    #[test]
    fn what_was_in_flight_is_stored_as_it_was_read(
        pieces in prop::collection::vec(prop::collection::vec(any::<bool>(), 1..24), 1..8),
        zeroes in prop_oneof![Just(Zeroes::Unmap), Just(Zeroes::Skip), Just(Zeroes::Write)],
        in_flight in 1usize..4,
        seed in any::<u64>(),
    ) {
        let size = pieces.iter().map(Vec::len).sum::<usize>() * UNIT as usize;
        let before = if zeroes == Zeroes::Skip { 0 } else { BEFORE };
        let (mut chain, stored) = late(size, before, seed, None, Vec::new());
        let mut sink = ToChain::new(&mut chain, zeroes);
        let (mut expected, mut begun, mut complete) = (Vec::new(), VecDeque::new(), 0);
        let mut at = 0;
        for units in &pieces {
            let (next, bytes) = piece(at, units);
            at += bytes.len() as u64;
            expected.extend(bytes);
            match sink.begin(next).unwrap() {
                // All of it is zeroes that are left out.
                Some(_) => complete = at as usize,
                None => begun.push_back(at as usize),
            }
            while begun.len() >= in_flight {
                prop_assert!(sink.finish().unwrap().is_some());
                complete = begun.pop_front().unwrap();
            }
            // Those behind it may be stored, too.
            prop_assert!(stored.lock().unwrap().bytes[..complete] == expected[..complete]);
        }
        while let Some(back) = sink.finish().unwrap() {
            let end = back.at() as usize + back.bytes().len();
            prop_assert_eq!(begun.pop_front(), Some(end));
        }
        prop_assert!(begun.is_empty());
        prop_assert!(stored.lock().unwrap().bytes == expected);
    }
}
