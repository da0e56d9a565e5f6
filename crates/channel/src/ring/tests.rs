use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::thread;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

use super::*;
use crate::message::{Message, ToFilter, ToServer, receive, ring_doorbell};

fn both() -> (Requester, Answerer) {
    let ring = SharedMemory::create(RING_BYTES).unwrap();
    let file = ring.fd().try_clone_to_owned().unwrap();
    let answerer = Answerer::new(SharedMemory::map(file, RING_BYTES).unwrap()).unwrap();
    (Requester::new(ring), answerer)
}

/// The words of a ring as a hostile process writes them.
fn words_of(requester: &Requester) -> Words {
    let file = requester.fd().try_clone_to_owned().unwrap();
    Words(SharedMemory::map(file, RING_BYTES).unwrap())
}

fn piece(length: u32) -> Piece {
    Piece { region: 3, length, offset: u64::from(length) << 33 }
}

#[test]
fn requests_come_as_they_were_pushed_and_answers_in_any_order() {
    let (mut requester, answerer) = both();
    let pieces: Vec<Piece> = (1..=PIECES_MAX as u32).map(piece).collect();
    let length = pieces.iter().map(|piece| u64::from(piece.length)).sum();
    assert!(requester.push(255, Operation::Write, 1 << 40, length, &pieces));
    assert!(requester.push(0, Operation::Flush, 0, 0, &[]));
    assert_eq!(answerer.next(), Ok(None), "not visible yet");
    assert!(requester.publish());
    assert!(!requester.publish(), "nothing new");
    let write = Submission {
        slot: 255,
        operation: Operation::Write,
        offset: 1 << 40,
        length,
        pieces: pieces.clone(),
    };
    assert_eq!(answerer.next(), Ok(Some(write)));
    let flush = answerer.next().unwrap().unwrap();
    assert_eq!((flush.slot, flush.operation), (0, Operation::Flush));
    assert_eq!(answerer.next(), Ok(None));
    assert_eq!(requester.next(), Ok(None));
    assert!(answerer.answer(0, libc::EIO));
    assert!(!answerer.answer(0, 0), "answered already");
    assert!(!answerer.answer(255, 0), "the requester has not taken the one before");
    assert_eq!(requester.next(), Ok(Some((0, libc::EIO))));
    assert_eq!(requester.next(), Ok(Some((255, 0))));
    assert_eq!(requester.next(), Ok(None));
    for operation in [Operation::Read, Operation::Zero, Operation::ZeroKeepingRoom] {
        assert!(requester.push(7, operation, 5, 0, &[]));
        assert!(requester.publish());
        assert_eq!(answerer.next().unwrap().unwrap().operation, operation);
        assert_eq!(answerer.next(), Ok(None));
        assert!(answerer.answer(7, 0));
        assert_eq!(requester.next(), Ok(Some((7, 0))));
        assert_eq!(requester.next(), Ok(None));
    }
}

#[test]
fn a_slot_has_one_request_at_a_time() {
    let (mut requester, answerer) = both();
    for slot in 0..SLOTS as u32 {
        assert!(requester.push(slot, Operation::Flush, 0, 0, &[]));
    }
    assert!(!requester.push(9, Operation::Flush, 0, 0, &[]));
    assert!(!requester.push(SLOTS as u32, Operation::Flush, 0, 0, &[]));
    assert!(requester.publish());
    while let Some(request) = answerer.next().unwrap() {
        let _ = answerer.answer(request.slot, 0);
    }
    assert_eq!(requester.next(), Ok(Some((0, 0))));
    assert!(!requester.push(9, Operation::Flush, 0, 0, &[]), "its answer is not taken");
    assert!(requester.push(0, Operation::Flush, 0, 0, &[]));
    let too_many = [piece(1); PIECES_MAX + 1];
    assert_eq!(requester.next(), Ok(Some((1, 0))));
    assert!(!requester.push(1, Operation::Read, 0, too_many.len() as u64, &too_many));
}

#[test]
fn doorbells_are_due_where_the_other_side_may_sleep() {
    let (mut requester, answerer) = both();
    let mut push = |slot| {
        assert!(requester.push(slot, Operation::Flush, 0, 0, &[]));
        requester.publish()
    };
    assert!(push(0), "it has not looked yet");
    assert!(!push(1), "a doorbell is on its way");
    answerer.next().unwrap().unwrap();
    assert!(!push(2), "it has not taken all that it saw");
    answerer.next().unwrap().unwrap();
    answerer.next().unwrap().unwrap();
    assert_eq!(answerer.next(), Ok(None));
    assert!(push(3), "it sleeps");
}

#[test]
fn no_doorbell_is_due_for_a_requester_that_looks_by_itself() {
    let (mut requester, answerer) = both();
    for slot in 0..4 {
        assert!(requester.push(slot, Operation::Flush, 0, 0, &[]));
    }
    assert!(requester.publish());
    while answerer.next().unwrap().is_some() {}
    assert_eq!(requester.next(), Ok(None));
    assert!(answerer.answer(0, 0), "it may sleep");
    assert_eq!(requester.try_next(), Ok(Some((0, 0))));
    assert_eq!(requester.try_next(), Ok(None));
    assert!(!answerer.answer(1, 0), "it looks again");
    assert_eq!(requester.try_next(), Ok(Some((1, 0))));
    assert_eq!(requester.try_next(), Ok(None));
    assert!(!answerer.answer(2, 0), "it looks again");
    assert_eq!(requester.next(), Ok(Some((2, 0))), "it looks before it sleeps");
    assert_eq!(requester.next(), Ok(None));
    assert!(answerer.answer(3, 0), "it may sleep");
    assert_eq!(requester.try_next(), Ok(Some((3, 0))));
}

fn sleep(socket: &OwnedFd) {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    let ready = poll(&mut fds, PollTimeout::from(30_000_u16)).unwrap();
    assert_eq!(ready, 1, "no doorbell comes for what is in the ring");
}

/// Takes the doorbells from a socket; false: the other side is gone.
fn drain<M: Message>(socket: &OwnedFd) -> bool {
    loop {
        match receive::<M>(socket.as_fd(), false) {
            Ok(Some(_)) => {}
            Ok(None) => return false,
            Err(error) => {
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                return true;
            }
        }
    }
}

/// What a request is answered by, of its offset.
fn errno_of(offset: u64) -> i32 {
    (offset % 4096) as i32
}

/// Serves until the other side is gone: answers late, in another order, and partly by another thread.
fn serve(answerer: &Arc<Answerer>, socket: &Arc<OwnedFd>, mut random: fastrand::Rng) {
    let (late, mut here) = (mpsc::channel::<Submission>(), Vec::<Submission>::new());
    let answer = |answerer: &Answerer, socket: &OwnedFd, request: &Submission| {
        if answerer.answer(request.slot, errno_of(request.offset)) {
            // The other side may have all that it wants, and be gone.
            let _ = ring_doorbell(socket.as_fd(), &ToFilter::Doorbell);
        }
    };
    let (answerer_there, socket_there) = (Arc::clone(answerer), Arc::clone(socket));
    let (give, take) = late;
    let there = thread::spawn(move || {
        for request in take {
            answer(&answerer_there, &socket_there, &request);
        }
    });
    loop {
        let mut slept = false;
        match answerer.next().unwrap() {
            Some(request) => {
                let bytes: u64 = request.pieces.iter().map(|piece| u64::from(piece.length)).sum();
                assert_eq!((request.length, bytes), (request.offset % 64, request.offset % 64));
                match random.bool() {
                    true => give.send(request).unwrap(),
                    false => here.push(request),
                }
            }
            None if here.is_empty() => {
                sleep(socket);
                slept = true;
            }
            None => {}
        }
        if slept && !drain::<ToServer>(socket) {
            break;
        }
        if random.u8(..) < 8 {
            thread::yield_now();
        }
        while !here.is_empty() && random.u8(..) < 160 {
            let request = here.swap_remove(random.usize(..here.len()));
            answer(answerer, socket, &request);
        }
    }
    drop(give);
    there.join().unwrap();
}

/// How a requester takes its next answer: none only if it need not wait for one.
type Takes = fn(&mut Requester, &OwnedFd, bool) -> Option<(u32, i32)>;

/// Has requests answered by another thread, until all are.
fn all_are_answered(takes: Takes) {
    const REQUESTS: u64 = 1_000_000;
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut requester, answerer) = both();
    let kind = SockType::SeqPacket;
    let (here, there) =
        socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let of_server = random.fork();
    let server = thread::spawn(move || serve(&Arc::new(answerer), &Arc::new(there), of_server));
    let (mut pushed, mut answered) = (0, 0);
    let mut free: Vec<u32> = (0..SLOTS as u32).collect();
    let mut offsets = [0; SLOTS];
    while answered < REQUESTS {
        let burst = random.usize(..=free.len());
        while pushed < REQUESTS && free.len() > burst {
            let slot = free.swap_remove(random.usize(..free.len()));
            offsets[slot as usize] = pushed;
            let length = pushed % 64;
            let pieces = [piece(length as u32 / 2), piece(length as u32 - length as u32 / 2)];
            assert!(requester.push(slot, Operation::Read, pushed, length, &pieces));
            pushed += 1;
        }
        if requester.publish() {
            ring_doorbell(here.as_fd(), &ToServer::Doorbell).unwrap();
        }
        loop {
            let waits = (pushed == REQUESTS || free.is_empty()) && answered < REQUESTS;
            let Some((slot, errno)) = takes(&mut requester, &here, waits) else { break };
            assert_eq!(errno, errno_of(offsets[slot as usize]));
            free.push(slot);
            answered += 1;
            if random.u8(..) < 8 {
                thread::yield_now();
            }
        }
    }
    drop(here);
    server.join().unwrap();
}

#[test]
fn two_threads_lose_no_request_and_no_doorbell() {
    all_are_answered(|requester, socket, waits| {
        loop {
            let next = requester.next().unwrap();
            if next.is_some() || !waits {
                return next;
            }
            sleep(socket);
            assert!(drain::<ToFilter>(socket), "the server has ended");
        }
    });
}

/// The order of a filter's queue: it looks by itself while it is awake, and before it sleeps it asks for doorbells, reads those that
/// have come, and looks once more.
#[test]
fn a_requester_that_looks_by_itself_while_it_is_awake_loses_no_doorbell_when_it_sleeps() {
    all_are_answered(|requester, socket, waits| {
        loop {
            let looked = requester.try_next().unwrap();
            if looked.is_some() || !waits {
                return looked;
            }
            if let Some(answer) = requester.next().unwrap() {
                return Some(answer);
            }
            assert!(drain::<ToFilter>(socket), "the server has ended");
            if let Some(answer) = requester.next().unwrap() {
                return Some(answer);
            }
            sleep(socket);
        }
    });
}

#[test]
fn what_a_hostile_filter_writes_is_refused() {
    let refused = |change: &dyn Fn(&Words)| {
        let (mut requester, answerer) = both();
        let pieces = [piece(10), piece(20)];
        assert!(requester.push(5, Operation::Read, 0, 30, &pieces));
        assert!(requester.publish());
        change(&words_of(&requester));
        answerer.next().unwrap_err()
    };
    let request = |what: &'static str| Broken::Request { slot: 5, what };
    let count = |waiting| Broken::Count { waiting, possible: SLOTS as u64 };
    assert_eq!(refused(&|words| words.write(SUBMITTED, 257)), count(257));
    assert_eq!(refused(&|words| words.write(SUBMITTED, u64::MAX)), count(u64::MAX));
    let slot =
        |slot, operation: u32| refused(&move |words| words.write(REQUESTS, pair(slot, operation)));
    assert_eq!(slot(SLOTS as u32, 1), Broken::Slot(SLOTS as u32));
    assert_eq!(slot(u32::MAX, 1), Broken::Slot(u32::MAX));
    assert_eq!(slot(5, 0), request("no such operation"));
    assert_eq!(slot(5, 6), request("no such operation"));
    assert_eq!(slot(5, Operation::Zero.number()), request("it has no data, but pieces"));
    let no_end = refused(&|words| words.write(REQUESTS + 1, u64::MAX));
    assert_eq!(no_end, request("it has no end"));
    let length = refused(&|words| words.write(REQUESTS + 2, 29));
    assert_eq!(length, request("its pieces have another length"));
    for pieces in [PIECES_MAX as u64 + 1, u64::MAX] {
        let many = refused(&|words| words.write(REQUESTS + 3, pieces));
        assert_eq!(many, request("too many pieces"));
    }
    let (mut requester, answerer) = both();
    assert!(requester.push(1, Operation::Flush, 0, 0, &[]));
    assert!(requester.push(2, Operation::Flush, 0, 0, &[]));
    assert!(requester.publish());
    let words = words_of(&requester);
    words.write(REQUESTS + REQUEST_WORDS, words.read(REQUESTS));
    answerer.next().unwrap().unwrap();
    assert_eq!(answerer.next(), Err(Broken::Slot(1)), "in flight already");
    let small = SharedMemory::create(RING_BYTES - 1).unwrap();
    assert_eq!(Answerer::new(small).err(), Some(Broken::Size(RING_BYTES - 1)));
}

#[test]
fn what_a_hostile_server_writes_is_refused() {
    let refused = |change: &dyn Fn(&Words)| {
        let (mut requester, answerer) = both();
        assert!(requester.push(5, Operation::Flush, 0, 0, &[]));
        assert!(requester.publish());
        answerer.next().unwrap().unwrap();
        let _ = answerer.answer(5, 0);
        change(&words_of(&requester));
        requester.next().unwrap_err()
    };
    let count = |waiting| Broken::Count { waiting, possible: 1 };
    assert_eq!(refused(&|words| words.write(ANSWERED, 2)), count(2));
    assert_eq!(refused(&|words| words.write(ANSWERED, u64::MAX)), count(u64::MAX));
    let answer = |slot, errno: i32| {
        refused(&move |words| words.write(ANSWERS, pair(slot, errno.cast_unsigned())))
    };
    assert_eq!(answer(6, 0), Broken::Answer(6));
    assert_eq!(answer(SLOTS as u32, 0), Broken::Answer(SLOTS as u32));
    assert_eq!(answer(u32::MAX, 0), Broken::Answer(u32::MAX));
    assert_eq!(answer(5, -1), Broken::Errno(5, -1));
    assert_eq!(answer(5, ERRNO_MAX + 1), Broken::Errno(5, ERRNO_MAX + 1));
}

/// Random words, often ones that mean something, at all places: neither side panics, and all that comes out keeps what is promised.
#[test]
fn random_rings_harm_neither_side() {
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    for _ in 0..2000 {
        let (mut requester, answerer) = both();
        let words = words_of(&requester);
        let (mut taken, mut broken) = (Vec::new(), (false, false));
        for _ in 0..random.usize(1..40) {
            for _ in 0..random.usize(..20) {
                let index = match random.u8(..4) {
                    0 => [SUBMITTED, TAKEN, ANSWERED, READ][random.usize(..4)],
                    1 => REQUESTS + random.usize(..2 * REQUEST_WORDS),
                    2 => ANSWERS + random.usize(..4),
                    _ => random.usize(..WORDS),
                };
                let value = match random.u8(..4) {
                    0 => random.u64(..),
                    1 => pair(random.u32(..260), random.u32(..8)),
                    _ => random.u64(..6),
                };
                words.write(index, value);
            }
            let _ = requester.push(random.u32(..300), Operation::Flush, 0, 0, &[]);
            let _ = requester.publish();
            // Who has found the other broken asks no more.
            match answerer.next() {
                Ok(Some(request)) if !broken.0 => {
                    assert!((request.slot as usize) < SLOTS && request.pieces.len() <= PIECES_MAX);
                    assert!(!taken.contains(&request.slot));
                    assert!(request.offset.checked_add(request.length).is_some());
                    taken.push(request.slot);
                }
                Ok(_) => {}
                Err(_) => broken.0 = true,
            }
            if !taken.is_empty() && random.bool() {
                let _ = answerer.answer(taken.swap_remove(0), 0);
            }
            let next = if random.bool() { requester.next() } else { requester.try_next() };
            match next {
                Ok(Some((slot, errno))) if !broken.1 => {
                    assert!((slot as usize) < SLOTS && (0..=ERRNO_MAX).contains(&errno));
                }
                Ok(_) => {}
                Err(_) => broken.1 = true,
            }
        }
    }
}
