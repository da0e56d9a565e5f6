//! Filters with defects: nothing hangs, nothing is completed twice, and no memory is used after it was given back.

use std::sync::{Arc, Mutex};

use super::*;

type Step = Box<dyn FnMut(RequestId, &mut Io<'_>) + Send>;

/// A filter whose behaviour the test sets.
struct By {
    children: usize,
    down: Step,
    up: Step,
}

impl Filter for By {
    fn limits(&self) -> Limits {
        Limits { children: self.children }
    }

    fn prepare(&mut self, _capacity: usize) {}

    fn down(&mut self, id: RequestId, io: &mut Io<'_>) {
        (self.down)(id, io);
    }

    fn up(&mut self, id: RequestId, io: &mut Io<'_>) {
        (self.up)(id, io);
    }
}

/// How a filter without a defect handles a request that comes up.
fn finish(id: RequestId, io: &mut Io<'_>) {
    match io.parent(id) {
        None => io.complete(id, io.request(id).result),
        Some(parent) => {
            let result = io.request(id).result;
            io.release(id);
            io.complete(parent, result);
        }
    }
}

fn by(
    children: usize,
    down: impl FnMut(RequestId, &mut Io<'_>) + Send + 'static,
    up: impl FnMut(RequestId, &mut Io<'_>) + Send + 'static,
) -> Box<dyn Filter> {
    Box::new(By { children, down: Box::new(down), up: Box::new(up) })
}

/// Storage that keeps all requests until it is opened.
#[derive(Default)]
struct Gate {
    open: Arc<Mutex<bool>>,
    waiting: Vec<RequestId>,
}

impl Storage for Gate {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, _io: &mut Io<'_>) {
        self.waiting.push(id);
    }

    fn poll(&mut self, io: &mut Io<'_>) {
        if *self.open.lock().unwrap() {
            self.waiting.drain(..).for_each(|id| io.complete(id, Ok(())));
        }
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Storage that finds its requests done only when the thread is to sleep.
#[derive(Default)]
struct Late(Vec<RequestId>);

impl Storage for Late {
    fn prepare(&mut self, _capacity: usize) {}

    fn submit(&mut self, id: RequestId, _io: &mut Io<'_>) {
        self.0.push(id);
    }

    fn poll(&mut self, _io: &mut Io<'_>) {}

    fn before_sleep(&mut self, io: &mut Io<'_>) {
        self.0.drain(..).for_each(|id| io.complete(id, Ok(())));
    }

    fn wait_handle(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_thread_does_not_sleep_where_storage_finds_work_when_it_looks_for_the_last_time() {
    // One part after the other: each is found done in a look of its own.
    let mut left = 3;
    let parts = by(
        1,
        |id, io| {
            let first = part(id, io).unwrap();
            io.pass(first);
        },
        move |id, io| {
            let whole = io.parent(id).unwrap();
            io.release(id);
            left -= 1;
            if left == 0 {
                return io.complete(whole, Ok(()));
            }
            let next = part(whole, io).unwrap();
            io.pass(next);
        },
    );
    let mut chain = Chain::new(1 << 20, false, vec![parts], Box::new(Late::default())).unwrap();
    flush(&mut chain);
    assert!(results(&mut chain).is_empty(), "it is done without a last look");
    assert!(!chain.arm(), "it sleeps, and its request is done");
    chain.disarm(false);
    assert_eq!(results(&mut chain), [Ok(())]);
    assert!(chain.arm(), "there is nothing left");
    chain.disarm(false);
}

fn chain(filters: Vec<Box<dyn Filter>>) -> (Chain, Arc<Mutex<bool>>) {
    let gate = Gate::default();
    let open = Arc::clone(&gate.open);
    (Chain::new(1 << 20, false, filters, Box::new(gate)).unwrap(), open)
}

fn flush(chain: &mut Chain) {
    let id = chain.begin().unwrap();
    chain.submit(id, Operation::Flush, 0, 0, 0);
}

fn results(chain: &mut Chain) -> Vec<Result<(), IoError>> {
    chain.poll();
    std::iter::from_fn(|| chain.next_done()).map(|done| done.result).collect()
}

fn part(id: RequestId, io: &mut Io<'_>) -> Option<RequestId> {
    io.child(id, Operation::Flush, 0, 0)
}

#[test]
fn a_request_that_a_filter_forgets_fails_and_is_counted() {
    let forgetful: [(&str, Box<dyn Filter>); 4] = [
        ("on its way down", by(0, |_, _| {}, finish)),
        ("on its way up", by(0, |id, io| io.pass(id), |_, _| {})),
        ("when it was split", by(1, |id, io| _ = part(id, io), finish)),
        (
            "when its part came up",
            by(
                1,
                |id, io| {
                    let part = part(id, io).unwrap();
                    io.pass(part);
                },
                |_, _| {},
            ),
        ),
    ];
    for (when, filter) in forgetful {
        let (mut chain, open) = chain(vec![filter]);
        *open.lock().unwrap() = true;
        for round in 1..4 {
            flush(&mut chain);
            assert_eq!(results(&mut chain), [Err(IoError::Forgotten)], "{when}");
            assert!(chain.forgotten() >= round, "{when}");
        }
        assert_eq!(chain.in_flight(), 0, "{when}");
    }
}

#[test]
fn a_held_request_is_not_forgotten() {
    let kept = Arc::new(Mutex::new(None));
    let keeps = Arc::clone(&kept);
    let keep = move |id, io: &mut Io<'_>| {
        if let Some(before) = keeps.lock().unwrap().replace(id) {
            io.pass(before);
        }
        io.hold(id);
    };
    let (mut chain, open) = chain(vec![by(0, keep, finish)]);
    *open.lock().unwrap() = true;
    flush(&mut chain);
    assert_eq!(results(&mut chain), []);
    flush(&mut chain);
    assert_eq!(results(&mut chain), [Ok(())], "the first, when the second arrives");
    assert_eq!((chain.in_flight(), chain.forgotten()), (1, 0));
}

#[test]
fn a_filter_that_makes_more_parts_than_it_declared_gets_none_and_takes_none_from_others() {
    let made = Arc::new(Mutex::new(Vec::new()));
    let notes = Arc::clone(&made);
    let greedy = move |id, io: &mut Io<'_>| {
        let parts: Vec<_> = (0..5).map_while(|_| part(id, io)).collect();
        notes.lock().unwrap().push(parts.len());
        match parts.is_empty() {
            true => io.complete(id, Err(IoError::Overload)),
            false => parts.into_iter().for_each(|part| io.pass(part)),
        }
    };
    let splits = |id, io: &mut Io<'_>| match part(id, io) {
        Some(part) => io.pass(part),
        None => io.complete(id, Err(IoError::Overload)),
    };
    let last = |id, io: &mut Io<'_>| {
        let parent = io.parent(id);
        let result = io.request(id).result;
        io.release(id);
        if let Some(parent) = parent.filter(|parent| io.parts(*parent) == 0) {
            io.complete(parent, result);
        }
    };
    let (mut chain, open) = chain(vec![by(2, greedy, last), by(2, splits, finish)]);
    flush(&mut chain);
    flush(&mut chain);
    assert_eq!(results(&mut chain), [Err(IoError::Overload)], "it may have two parts");
    assert_eq!(*made.lock().unwrap(), [2, 0]);
    *open.lock().unwrap() = true;
    assert_eq!(results(&mut chain), [Ok(())], "the layer below has its own");
    flush(&mut chain);
    assert_eq!(results(&mut chain), [Ok(())], "what was released may be made again");
    assert_eq!(*made.lock().unwrap(), [2, 0, 2]);
}

#[test]
fn a_request_goes_up_when_its_last_part_is_released_and_not_before() {
    let early = |id, io: &mut Io<'_>| {
        let part = part(id, io).unwrap();
        io.pass(part);
        io.complete(id, Err(IoError::Cipher));
    };
    let (mut chain, open) = chain(vec![by(1, early, |id, io| io.release(id))]);
    flush(&mut chain);
    assert_eq!(results(&mut chain), [], "storage may still use its memory");
    *open.lock().unwrap() = true;
    assert_eq!(results(&mut chain), [Err(IoError::Cipher)]);
    assert_eq!((chain.in_flight(), chain.forgotten()), (0, 0));
}

#[test]
fn a_request_is_completed_once_and_only_by_the_layer_that_has_it() {
    let twice = |id, io: &mut Io<'_>| {
        io.complete(id, Ok(()));
        io.complete(id, Err(IoError::Cipher));
        io.pass(id);
        assert_eq!(part(id, io), None);
        io.release(id);
    };
    let (mut one, _) = chain(vec![by(1, twice, finish)]);
    flush(&mut one);
    assert_eq!(results(&mut one), [Ok(())]);
    let passed = |id, io: &mut Io<'_>| {
        io.pass(id);
        io.complete(id, Ok(()));
        io.hold(id);
    };
    let (mut other, open) = chain(vec![by(0, passed, finish)]);
    flush(&mut other);
    assert_eq!(results(&mut other), [], "storage has it");
    *open.lock().unwrap() = true;
    assert_eq!(results(&mut other), [Ok(())]);
    flush(&mut other);
    assert_eq!(results(&mut other), [Ok(())]);
}
