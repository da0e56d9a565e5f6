use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmseal_api::pace::CopyPace;

use super::*;
use crate::disk::pacing::WorkPace;

mod in_flight;

const PIECE_BYTES: u64 = PIECE as u64;

/// Data of ones, but for the units that are named.
#[derive(Default)]
struct Ones {
    /// Where it has something else from there on; data at first.
    parts: BTreeMap<u64, Own>,
    zeroes: Vec<u64>,
    fails_at: Option<u64>,
    reads: Arc<AtomicUsize>,
    questions: Arc<AtomicUsize>,
}

impl Source for Ones {
    type Error = &'static str;

    fn part(&mut self, at: u64, end: u64) -> Result<OwnExtent, Self::Error> {
        self.questions.fetch_add(1, Ordering::Relaxed);
        let content =
            self.parts.range(..=at).next_back().map_or(Own::Data, |(_, content)| *content);
        let next = self.parts.range(at + 1..).next().map_or(end, |(next, _)| *next);
        Ok(OwnExtent { content, end: next.min(end) })
    }

    fn read(&mut self, bytes: &mut [u8], at: u64) -> Result<(), Self::Error> {
        self.reads.fetch_add(1, Ordering::Release);
        if self.fails_at.is_some_and(|place| (at..at + bytes.len() as u64).contains(&place)) {
            return Err("unreadable");
        }
        bytes.fill(1);
        for zero in &self.zeroes {
            if let Some(start) = zero.checked_sub(at).map(|start| start as usize) {
                bytes.iter_mut().skip(start).take(UNIT as usize).for_each(|byte| *byte = 0);
            }
        }
        Ok(())
    }
}

#[derive(Debug, PartialEq)]
enum Did {
    Wrote(u64, u64),
    Zeroed(u64, u64),
    Left(u64, u64),
    Flushed,
}

#[derive(Default)]
struct Noted<'a> {
    did: Vec<Did>,
    end: u64,
    /// Up to where it was flushed.
    flushed: Rc<Cell<u64>>,
    fails_at: Option<u64>,
    /// What it does with the first piece.
    first: Option<Box<dyn FnOnce() + 'a>>,
}

impl Noted<'_> {
    fn note(&mut self, did: Did, end: u64) -> Result<(), &'static str> {
        self.first.take().into_iter().for_each(|first| first());
        if self.fails_at.is_some_and(|place| end > place) {
            return Err("unwritable");
        }
        self.did.push(did);
        self.end = end;
        Ok(())
    }
}

impl Sink for Noted<'_> {
    type Error = &'static str;

    fn write(&mut self, bytes: &mut [u8], at: u64) -> Result<(), Self::Error> {
        assert!(bytes.iter().any(|byte| *byte != 0), "zeroes are written at {at}");
        let end = at + bytes.len() as u64;
        self.note(Did::Wrote(at, end), end)
    }

    fn zero(&mut self, at: u64, length: u64) -> Result<(), Self::Error> {
        self.note(Did::Zeroed(at, at + length), at + length)
    }

    fn leave(&mut self, at: u64, length: u64) -> Result<(), Self::Error> {
        self.note(Did::Left(at, at + length), at + length)
    }

    fn flush(&mut self) -> Result<(), Self::Error> {
        self.did.push(Did::Flushed);
        self.flushed.set(self.end);
        Ok(())
    }
}

/// Copies both ways, in one thread and in two, and hands over how it ended.
fn both(
    range: Range<u64>,
    source: impl Fn() -> Ones,
    fails_at: Option<u64>,
    check: impl Fn(Result<(), CopyError<&'static str, &'static str>>, &[Did]),
) {
    for ahead in [false, true] {
        let (mut source, mut sink) = (source(), Noted { fails_at, ..Noted::default() });
        let (mut pace, stop) = (Paced::new(None), Stop::new().unwrap());
        let range = range.clone();
        let engine = Engine { range, pace: &mut pace, stop: &stop, flushes: None };
        let copied = match ahead {
            true => engine.run(&mut source, &mut sink, &mut |_| ()),
            false => engine.in_turn(&mut source, &mut sink, &mut |_| ()),
        };
        check(copied, &sink.did);
    }
}

#[test]
fn zeroes_are_not_written_and_what_is_not_data_is_not_read() {
    let end = 3 * PIECE_BYTES + 512;
    let (hole, nothing) = (PIECE_BYTES + 8 * UNIT, PIECE_BYTES + UNREAD_MAX + 12 * UNIT);
    let data = nothing + UNIT;
    let source = || Ones {
        parts: [(hole, Own::Zeroes), (nothing, Own::Nothing), (data, Own::Data)].into(),
        zeroes: vec![2 * UNIT, 3 * UNIT],
        // Reading there would fail.
        fails_at: Some(hole),
        ..Ones::default()
    };
    both(0..data + end, source, None, |copied, did| {
        copied.unwrap();
        let expected = [
            Did::Wrote(0, 2 * UNIT),
            Did::Zeroed(2 * UNIT, 4 * UNIT),
            Did::Wrote(4 * UNIT, PIECE_BYTES),
            Did::Wrote(PIECE_BYTES, hole),
            Did::Zeroed(hole, hole + UNREAD_MAX),
            Did::Zeroed(hole + UNREAD_MAX, nothing),
            Did::Left(nothing, data),
            Did::Wrote(data, data + PIECE_BYTES),
            Did::Wrote(data + PIECE_BYTES, data + 2 * PIECE_BYTES),
            Did::Wrote(data + 2 * PIECE_BYTES, data + 3 * PIECE_BYTES),
            Did::Wrote(data + 3 * PIECE_BYTES, data + end),
            Did::Flushed,
        ];
        assert_eq!(did, expected);
    });
}

#[test]
fn what_is_data_is_asked_about_once_however_long_it_is() {
    let (questions, hole) = (Arc::new(AtomicUsize::new(0)), 5 * PIECE_BYTES + UNIT);
    let data = hole + UNIT;
    let source = || Ones {
        parts: [(hole, Own::Zeroes), (data, Own::Data)].into(),
        // Reading there would fail.
        fails_at: Some(hole),
        questions: Arc::clone(&questions),
        ..Ones::default()
    };
    both(0..data + 2 * PIECE_BYTES, source, None, |copied, did| {
        copied.unwrap();
        assert_eq!(did.len(), 6 + 1 + 2 + 1, "{did:?}");
        assert_eq!(questions.swap(0, Ordering::Relaxed), 3, "data, a hole, and data");
    });
}

#[test]
fn runs_are_of_whole_units_of_the_disk() {
    let unit = UNIT as usize;
    let mut bytes = vec![0; 3 * unit];
    // From the middle of a unit on: its rest is no run of zeroes.
    let half = unit / 2;
    let at = UNIT / 2;
    assert_eq!(next_run(&bytes, 0, at), Some((half, false)));
    assert_eq!(next_run(&bytes, half, at), Some((3 * unit, true)));
    assert_eq!(next_run(&bytes, 3 * unit, at), None);
    bytes[half + unit] = 1;
    assert_eq!(next_run(&bytes, half, at), Some((half + unit, true)));
    assert_eq!(next_run(&bytes, half + unit, at), Some((half + 2 * unit, false)));
    assert_eq!(next_run(&bytes[..100], 0, at), Some((100, false)));
}

#[test]
fn an_error_names_its_side_and_its_place_and_nothing_comes_after_it() {
    let pieces = 0..8 * PIECE_BYTES;
    let place = 2 * PIECE_BYTES + 5;
    let unreadable = || Ones { fails_at: Some(place), ..Ones::default() };
    both(pieces.clone(), unreadable, None, |copied, did| {
        let error = copied.unwrap_err();
        assert!(error.to_string().contains(&format!("at byte {}", 2 * PIECE_BYTES)), "{error}");
        assert!(matches!(error, CopyError::Source { error: "unreadable", .. }));
        let before = [Did::Wrote(0, PIECE_BYTES), Did::Wrote(PIECE_BYTES, 2 * PIECE_BYTES)];
        assert_eq!(did, before, "what was read before is written, and is not called durable");
    });
    both(pieces, Ones::default, Some(place), |copied, did| {
        let error = copied.unwrap_err();
        assert!(error.to_string().contains(&format!("at byte {}", 2 * PIECE_BYTES)), "{error}");
        assert!(matches!(error, CopyError::Sink { error: "unwritable", .. }));
        assert_eq!(did.len(), 2, "{did:?}");
    });
}

#[test]
fn a_stop_ends_a_copy_after_the_piece_under_way() {
    for ahead in [false, true] {
        let stop = Stop::new().unwrap();
        let mut sink = Noted { first: Some(Box::new(|| stop.ask())), ..Noted::default() };
        let (mut source, mut pace) = (Ones::default(), Paced::new(None));
        let range = 0..8 * PIECE_BYTES;
        let engine = Engine { range, pace: &mut pace, stop: &stop, flushes: None };
        let copied = match ahead {
            true => engine.run(&mut source, &mut sink, &mut |_| ()),
            false => engine.in_turn(&mut source, &mut sink, &mut |_| ()),
        };
        assert!(matches!(copied, Err(CopyError::Stopped)), "{copied:?}");
        assert_eq!(sink.did, [Did::Wrote(0, PIECE_BYTES)]);
    }
}

/// What nobody waits for longer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until so many pieces are read, or being read.
fn wait_for_reads(reads: &AtomicUsize, count: usize) {
    let until = Instant::now() + TIMEOUT;
    while reads.load(Ordering::Acquire) < count {
        assert!(Instant::now() < until, "nothing is read ahead");
        thread::yield_now();
    }
}

#[test]
fn the_source_is_read_while_the_sink_is_written_and_not_without_end() {
    let reads = Arc::new(AtomicUsize::new(0));
    let mut source = Ones { reads: Arc::clone(&reads), ..Ones::default() };
    let first = || {
        wait_for_reads(&reads, DEPTH);
        thread::sleep(Duration::from_millis(50));
        assert_eq!(reads.load(Ordering::Relaxed), DEPTH, "more is read than has buffers");
    };
    let mut sink = Noted { first: Some(Box::new(first)), ..Noted::default() };
    let (mut pace, stop) = (Paced::new(None), Stop::new().unwrap());
    let range = 0..3 * DEPTH as u64 * PIECE_BYTES;
    let engine = Engine { range, pace: &mut pace, stop: &stop, flushes: None };
    engine.run(&mut source, &mut sink, &mut |_| ()).unwrap();
    assert_eq!(sink.did.len(), 3 * DEPTH + 1);
}

#[test]
fn the_rate_is_kept_and_what_is_not_read_does_not_count() {
    let pace = Arc::new(WorkPace::new().unwrap());
    let bytes_per_second = Some(20 * PIECE_BYTES);
    pace.set(CopyPace { paused: false, bytes_per_second });
    let (mut pace, stop) = (Paced::new(Some(pace)), Stop::new().unwrap());
    // Five pieces, and zeroes of hours at this rate.
    let hole = 5 * PIECE_BYTES;
    let mut source = Ones { parts: [(hole, Own::Zeroes)].into(), ..Ones::default() };
    let (mut sink, begun) = (Noted::default(), Instant::now());
    let range = 0..hole + (1 << 40);
    let engine = Engine { range, pace: &mut pace, stop: &stop, flushes: None };
    engine.run(&mut source, &mut sink, &mut |_| ()).unwrap();
    // The last one is waited for by what comes after it.
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(240), "five pieces took {took:?}");
    assert!(took < TIMEOUT, "{took:?}: zeroes are paced");
}

#[test]
fn nothing_is_called_durable_before_it_is_flushed() {
    for ahead in [false, true] {
        let flushed = Rc::new(Cell::new(0));
        let mut sink = Noted { flushed: Rc::clone(&flushed), ..Noted::default() };
        let (mut source, mut pace, stop) =
            (Ones::default(), Paced::new(None), Stop::new().unwrap());
        let flushes = Some(Flushes { bytes: 2 * PIECE_BYTES, every: Duration::MAX });
        let engine = Engine { range: 0..5 * PIECE_BYTES, pace: &mut pace, stop: &stop, flushes };
        let mut told = Vec::new();
        let mut report = |progress: Progress| {
            assert!(progress.durable <= flushed.get(), "{progress:?}, {} flushed", flushed.get());
            assert!(progress.durable <= progress.done);
            told.push((progress.done / PIECE_BYTES, progress.durable / PIECE_BYTES));
        };
        let copied = match ahead {
            true => engine.run(&mut source, &mut sink, &mut report),
            false => engine.in_turn(&mut source, &mut sink, &mut report),
        };
        copied.unwrap();
        assert_eq!(told, [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (5, 4), (5, 5)]);
    }
}

/// A pace with rests, as beside a guest.
fn with_rests() -> Paced {
    let pace = Arc::new(WorkPace::new().unwrap());
    pace.set_rests(true);
    Paced::new(Some(pace))
}

/// Takes a while for each piece, and notes how many were read when it had it.
struct Slow {
    reads: Arc<AtomicUsize>,
    read: Vec<usize>,
}

/// How long it takes: long enough that a source without rests has read ahead.
const SLOW_WRITE: Duration = Duration::from_millis(20);

impl Sink for Slow {
    type Error = &'static str;

    fn write(&mut self, _bytes: &mut [u8], _at: u64) -> Result<(), Self::Error> {
        thread::sleep(SLOW_WRITE);
        self.read.push(self.reads.load(Ordering::Relaxed));
        Ok(())
    }

    fn zero(&mut self, _at: u64, _length: u64) -> Result<(), Self::Error> {
        Ok(())
    }

    fn flush(&mut self) -> Result<(), Self::Error> {
        Ok(())
    }
}

#[test]
fn work_that_rests_takes_twice_as_long_and_reads_nothing_in_its_rests() {
    let pieces = 3 * DEPTH;
    for ahead in [false, true] {
        let reads = Arc::new(AtomicUsize::new(0));
        let mut source = Ones { reads: Arc::clone(&reads), ..Ones::default() };
        let mut sink = Slow { reads, read: Vec::new() };
        let (mut pace, stop, begun) = (with_rests(), Stop::new().unwrap(), Instant::now());
        let range = 0..pieces as u64 * PIECE_BYTES;
        let engine = Engine { range, pace: &mut pace, stop: &stop, flushes: None };
        let copied = match ahead {
            true => engine.run(&mut source, &mut sink, &mut |_| ()),
            false => engine.in_turn(&mut source, &mut sink, &mut |_| ()),
        };
        copied.unwrap();
        // What was read before the first piece was written is as if there were no guest.
        let one_by_one = (DEPTH + 1..=pieces).collect::<Vec<_>>();
        assert_eq!(sink.read[DEPTH..], one_by_one, "ahead: {ahead}");
        // No rest comes after the last piece.
        let least = SLOW_WRITE * (2 * pieces as u32 - 1);
        assert!(begun.elapsed() >= least, "{:?}", begun.elapsed());
    }
}

#[test]
fn what_is_written_beside_a_guest_is_flushed_in_between() {
    let pieces = FLUSHED_BESIDE_GUEST / PIECE_BYTES;
    let flushes = |mut pace: Paced| {
        let (mut source, mut sink, stop) =
            (Ones::default(), Noted::default(), Stop::new().unwrap());
        let range = 0..(pieces + 1) * PIECE_BYTES;
        let engine = Engine { range, pace: &mut pace, stop: &stop, flushes: None };
        engine.in_turn(&mut source, &mut sink, &mut |_| ()).unwrap();
        let at = sink.did.iter().enumerate().filter(|(_, did)| **did == Did::Flushed);
        at.map(|(at, _)| at as u64).collect::<Vec<_>>()
    };
    assert_eq!(flushes(Paced::new(None)), [pieces + 1], "at the end alone");
    assert_eq!(flushes(with_rests()), [pieces, pieces + 2]);
}
