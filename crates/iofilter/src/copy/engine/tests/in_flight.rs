//! Sinks that have pieces in flight.

use std::sync::mpsc::{RecvTimeoutError, channel};

use super::*;

/// What happened to the piece, or the part, at this place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Begun(u64),
    Ended(u64),
    /// It could not be written: seen at its end.
    Failed(u64),
    /// The same, seen at its beginning.
    Refused(u64),
    Zeroed(u64),
    Left(u64),
    Flushed,
}

use Step::{Begun, Ended, Failed, Flushed, Left, Refused, Zeroed};

/// Has each piece in flight until the engine waits for it.
#[derive(Default)]
struct Later<'a> {
    in_flight: VecDeque<Filled>,
    /// By piece, not by byte.
    steps: Vec<Step>,
    fails_at: Option<u64>,
    refuses_at: Option<u64>,
    /// Where the last part ends that is complete, and where it was flushed.
    complete: Rc<Cell<u64>>,
    flushed: Rc<Cell<u64>>,
    /// What it does when a piece begins, and when one ends; it gets the number of the piece.
    begins: Option<Box<dyn Fn(u64) + 'a>>,
    ends: Option<Box<dyn Fn(u64) + 'a>>,
}

impl Later<'_> {
    fn note(&mut self, step: Step, end: u64) {
        assert!(self.in_flight.is_empty(), "{step:?} beside a piece in flight");
        self.steps.push(step);
        self.complete.set(end);
    }
}

impl Sink for Later<'_> {
    type Error = &'static str;

    fn write(&mut self, _bytes: &mut [u8], at: u64) -> Result<(), Self::Error> {
        panic!("what is at {at} does not come as a piece");
    }

    fn zero(&mut self, at: u64, length: u64) -> Result<(), Self::Error> {
        self.note(Zeroed(at / PIECE_BYTES), at + length);
        Ok(())
    }

    fn leave(&mut self, at: u64, length: u64) -> Result<(), Self::Error> {
        self.note(Left(at / PIECE_BYTES), at + length);
        Ok(())
    }

    fn begin(&mut self, piece: Filled) -> Result<Option<Filled>, Self::Error> {
        let number = piece.at() / PIECE_BYTES;
        if let Some(begins) = &self.begins {
            begins(number);
        }
        if self.refuses_at == Some(number) {
            self.steps.push(Refused(number));
            return Err("refused");
        }
        self.steps.push(Begun(number));
        self.in_flight.push_back(piece);
        assert!(self.in_flight.len() <= IN_FLIGHT, "{:?}", self.steps);
        Ok(None)
    }

    fn finish(&mut self) -> Result<Option<Filled>, Self::Error> {
        let Some(piece) = self.in_flight.pop_front() else { return Ok(None) };
        let number = piece.at() / PIECE_BYTES;
        if let Some(ends) = &self.ends {
            ends(number);
        }
        if self.fails_at == Some(number) {
            self.steps.push(Failed(number));
            return Err("failed");
        }
        self.steps.push(Ended(number));
        self.complete.set(piece.at() + piece.bytes().len() as u64);
        Ok(Some(piece))
    }

    fn flush(&mut self) -> Result<(), Self::Error> {
        let end = self.complete.get();
        self.note(Flushed, end);
        self.flushed.set(end);
        Ok(())
    }
}

/// The pieces of each copy here.
const PIECES: u64 = 6;

/// How a copy has ended, up to where it was told to be complete, in pieces, and what the sink did.
type Ran = (Result<(), CopyError<&'static str, &'static str>>, u64, Vec<Step>);

/// Copies with a reader that is so far ahead that the next piece is there, but for the last one.
fn ahead(mut source: Ones, sink: Later<'_>, stop: &Stop, also: impl Fn(u64)) -> Ran {
    let reads = Arc::clone(&source.reads);
    // One that cannot be read is the last.
    let all = source.fails_at.map_or(PIECES, |place| place / PIECE_BYTES + 1);
    let begins = |number: u64| {
        also(number);
        // The next one is there when the one after it is being read.
        wait_for_reads(&reads, (number + 3).min(all) as usize);
    };
    let mut sink = Later { begins: Some(Box::new(begins)), ..sink };
    let (mut pace, mut done) = (Paced::new(None), 0);
    let range = 0..PIECES * PIECE_BYTES;
    let engine = Engine { range, pace: &mut pace, stop, flushes: None };
    let (complete, flushed) = (Rc::clone(&sink.complete), Rc::clone(&sink.flushed));
    let copied = engine.run(&mut source, &mut sink, &mut |progress| {
        assert!(progress.done <= complete.get(), "{progress:?}, {} complete", complete.get());
        assert!(progress.durable <= flushed.get(), "{progress:?}, {} flushed", flushed.get());
        done = progress.done;
    });
    assert!(sink.in_flight.is_empty(), "{:?}", sink.steps);
    (copied, done / PIECE_BYTES, sink.steps)
}

#[test]
fn the_next_piece_begins_while_one_is_in_flight_and_no_more_are() {
    let stop = Stop::new().unwrap();
    let (copied, done, steps) = ahead(Ones::default(), Later::default(), &stop, |_| ());
    copied.unwrap();
    assert_eq!(done, PIECES);
    let expected =
        [Begun(0), Begun(1), Ended(0), Begun(2), Ended(1), Begun(3), Ended(2), Begun(4), Ended(3)];
    // Whether the last one is there in time is the reader's.
    let (first, rest) = steps.split_at(expected.len());
    assert_eq!(first, expected);
    let last = if rest[0] == Begun(5) { [Begun(5), Ended(4)] } else { [Ended(4), Begun(5)] };
    assert_eq!(rest, [last[0], last[1], Ended(5), Flushed]);
}

#[test]
fn after_an_error_nothing_is_in_flight_and_what_is_behind_it_does_not_count() {
    let stop = Stop::new().unwrap();
    let run = |sink| ahead(Ones::default(), sink, &stop, |_| ());
    let failing = |piece| Later { fails_at: Some(piece), ..Later::default() };
    let refusing = |piece| Later { refuses_at: Some(piece), ..Later::default() };
    let cases: [(Later<'_>, u64, &str, &[Step]); 4] = [
        (failing(0), 0, "failed", &[Begun(0), Begun(1), Failed(0), Ended(1)]),
        (failing(1), 1, "failed", &[Begun(0), Begun(1), Ended(0), Begun(2), Failed(1), Ended(2)]),
        (refusing(0), 0, "refused", &[Refused(0)]),
        (refusing(1), 1, "refused", &[Begun(0), Refused(1), Ended(0)]),
    ];
    for (sink, piece, said, expected) in cases {
        let (copied, done, steps) = run(sink);
        let error = copied.unwrap_err();
        let CopyError::Sink { at, error: why } = &error else { panic!("{error}") };
        assert_eq!((*at, *why), (piece * PIECE_BYTES, said));
        assert_eq!((done, &steps[..]), (piece, expected));
    }
    // The one in front of it has failed first.
    let sink = Later { fails_at: Some(0), refuses_at: Some(1), ..Later::default() };
    let (copied, done, steps) = run(sink);
    assert!(matches!(copied, Err(CopyError::Sink { at: 0, error: "failed" })), "{copied:?}");
    assert_eq!((done, &steps[..]), (0, &[Begun(0), Refused(1), Failed(0)][..]));
}

#[test]
fn a_stop_and_an_error_of_the_source_come_after_what_is_in_flight() {
    let stop = Stop::new().unwrap();
    let both = [Begun(0), Begun(1), Ended(0), Ended(1)];
    let source = Ones { fails_at: Some(2 * PIECE_BYTES), ..Ones::default() };
    let (copied, done, steps) = ahead(source, Later::default(), &stop, |_| ());
    let at = 2 * PIECE_BYTES;
    assert!(matches!(copied, Err(CopyError::Source { at: place, .. }) if place == at));
    assert_eq!((done, &steps[..]), (2, &both[..]));

    let ask = |number: u64| {
        if number == 1 {
            stop.ask();
        }
    };
    let (copied, done, steps) = ahead(Ones::default(), Later::default(), &stop, ask);
    assert!(matches!(copied, Err(CopyError::Stopped)), "{copied:?}");
    assert_eq!((done, &steps[..]), (2, &both[..]));
}

#[test]
fn nothing_is_in_flight_beside_zeroes_what_is_left_and_a_flush() {
    for ahead in [false, true] {
        let parts = [(2, Own::Zeroes), (3, Own::Data), (5, Own::Nothing), (6, Own::Data)];
        let parts = parts.map(|(piece, content)| (piece * PIECE_BYTES, content)).into();
        let (mut source, mut sink) = (Ones { parts, ..Ones::default() }, Later::default());
        let (mut pace, stop) = (Paced::new(None), Stop::new().unwrap());
        let flushes = Some(Flushes { bytes: 3 * PIECE_BYTES, every: Duration::MAX });
        let engine = Engine { range: 0..8 * PIECE_BYTES, pace: &mut pace, stop: &stop, flushes };
        let (complete, flushed) = (Rc::clone(&sink.complete), Rc::clone(&sink.flushed));
        let mut last = Progress { done: 0, durable: 0 };
        let mut report = |progress: Progress| {
            assert!(progress.done <= complete.get() && progress.durable <= flushed.get());
            assert!(progress.done >= last.done && progress.durable >= last.durable);
            last = progress;
        };
        // The sink says where something is in flight beside another thing.
        let copied = match ahead {
            true => engine.run(&mut source, &mut sink, &mut report),
            false => engine.in_turn(&mut source, &mut sink, &mut report),
        };
        copied.unwrap();
        let end = 8 * PIECE_BYTES;
        assert_eq!(last, Progress { done: end, durable: end });
        let others = |step: &Step| !matches!(step, Begun(_) | Ended(_));
        let others = sink.steps.iter().copied().filter(others).collect::<Vec<_>>();
        // It is flushed after the third piece of data, after the sixth, and at the end.
        assert_eq!(others, [Zeroed(2), Flushed, Left(5), Flushed, Flushed]);
    }
}

/// One after the other.
fn each_ends_before_the_next() -> Vec<Step> {
    (0..PIECES).flat_map(|piece| [Begun(piece), Ended(piece)]).chain([Flushed]).collect()
}

#[test]
fn nothing_is_in_flight_beyond_a_piece_where_work_rests_and_where_it_is_in_turn() {
    for (ahead, mut pace) in [(true, with_rests()), (false, Paced::new(None))] {
        let (mut source, mut sink) = (Ones::default(), Later::default());
        let stop = Stop::new().unwrap();
        let range = 0..PIECES * PIECE_BYTES;
        let engine = Engine { range, pace: &mut pace, stop: &stop, flushes: None };
        let copied = match ahead {
            true => engine.run(&mut source, &mut sink, &mut |_| ()),
            false => engine.in_turn(&mut source, &mut sink, &mut |_| ()),
        };
        copied.unwrap();
        assert_eq!(sink.steps, each_ends_before_the_next(), "ahead: {ahead}");
    }
}

#[test]
fn nothing_is_in_flight_while_a_copy_is_paused() {
    let (pace, stop) = (Arc::new(WorkPace::new().unwrap()), Stop::new().unwrap());
    let paused = |paused| CopyPace { paused, bytes_per_second: None };
    thread::scope(|scope| {
        let (ended, over) = channel::<()>();
        let stop = &stop;
        scope.spawn(move || {
            // A copy that sleeps with a piece in flight would do so without end.
            if over.recv_timeout(TIMEOUT) == Err(RecvTimeoutError::Timeout) {
                stop.ask();
            }
        });
        let mut sink = Later {
            begins: Some(Box::new(|_| pace.set(paused(true)))),
            ends: Some(Box::new(|_| pace.set(paused(false)))),
            ..Later::default()
        };
        let (mut source, mut paced) = (Ones::default(), Paced::new(Some(Arc::clone(&pace))));
        let range = 0..PIECES * PIECE_BYTES;
        let engine = Engine { range, pace: &mut paced, stop, flushes: None };
        engine.run(&mut source, &mut sink, &mut |_| ()).unwrap();
        assert_eq!(sink.steps, each_ends_before_the_next());
        drop(ended);
    });
}
