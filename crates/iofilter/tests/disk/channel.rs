//! Queues in memory that is shared with the server of a file: long requests, buffers that run out, servers that refuse, leave,
//! or break the protocol.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::mpsc::channel;

use nix::poll::{PollFd, PollTimeout, poll};
use vmseal_api::filter::{Budget, DelaySpec, Holes, LimitSpec};
use vmseal_channel::{
    Answerer, Operation as Asked, PIECES_MAX, ToFilter, ToServer, receive, ring_doorbell, send,
};
use vmseal_iofilter::disk::{Disk, DiskStorage, Encryption};
use vmseal_iofilter::layers::delay::Delay;
use vmseal_iofilter::layers::limit::Limit;
use vmseal_iofilter::stack::blocking;
use vmseal_iofilter::stack::chain::{Chain, Storage};
use vmseal_iofilter::stack::layer::{Layer, Place};
use vmseal_iofilter::stack::memory::Segment;
use vmseal_iofilter::stack::request::{IoError, Operation};
use vmseal_iofilter::storage::channel::BUFFER_BYTES;
use vmseal_iofilter::storage::mem::MemDisk;

use crate::channel_server::{ChannelServer, accept, disk, pair};
use crate::seed::seed;

const MIB: usize = 1 << 20;
const SIZE: usize = BUFFER_BYTES + 8 * MIB;

/// Names the test that this program is to run as a process that ends.
const CHILD: &str = "VMSEAL_TEST_CHANNEL_CHILD";

fn encrypted(holes: Option<Holes>) -> Disk {
    let mut key: Vec<u8> = (0..64).collect();
    let key = vmseal_secret::SecretBytes::from_wiped(&mut key).unwrap();
    let encryption = holes.map(|holes| Encryption { key, holes });
    Disk::new(SIZE as u64, false, encryption, DiskStorage::Mem(MemDisk::new(0)), 1)
}

fn plain_chain(storage: Box<dyn Storage>) -> Chain {
    Chain::new(SIZE as u64, false, Vec::new(), storage).unwrap()
}

/// A server of one queue over memory.
fn over_memory() -> (MemDisk, ChannelServer) {
    let memory = MemDisk::new(SIZE);
    let server = ChannelServer::start(vec![plain_chain(memory.queue())], SIZE as u64);
    (memory, server)
}

/// Begins a request whose memory is in pieces of this length.
fn begin(chain: &mut Chain, operation: Operation, at: usize, data: &mut [u8], piece: usize) {
    let id = chain.begin().unwrap();
    for piece in data.chunks_mut(piece) {
        // SAFETY: the data outlives the request, which the caller waits for.
        let segment = unsafe { Segment::new(piece.as_mut_ptr(), piece.len()) };
        chain.data_mut(id).push(segment);
    }
    chain.submit(id, operation, at as u64, 0, 0);
}

fn random_bytes(random: &mut fastrand::Rng, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    random.fill(&mut bytes);
    bytes
}

#[test]
fn requests_of_all_lengths_are_where_they_belong_encrypted_and_plain() {
    let mut random = fastrand::Rng::with_seed(seed());
    for holes in [None, Some(Holes::Zero), Some(Holes::Ciphertext)] {
        let (memory, server) = over_memory();
        let disk = encrypted(holes);
        let mut chain = disk.chain_over(server.queue()).unwrap();
        // The same disk without a channel: what is stored is the same.
        let mut direct = disk.chain_over(memory.queue()).unwrap();
        for length in [512, 4096, 5 * 4096 + 512, MIB, 4 * MIB, 4 * MIB + 4096, 9 * MIB + 512] {
            let at = random.usize(..(SIZE - length) / 4096) * 4096;
            let piece = [1000, 65536, length][random.usize(..3)].max(length.div_ceil(1000));
            let mut written = random_bytes(&mut random, length);
            let expected = written.clone();
            begin(&mut chain, Operation::Write, at, &mut written, piece);
            assert_eq!(blocking::drain(&mut chain), Ok(()));
            assert_eq!(written, expected, "a write has changed the guest's memory");
            for chain in [&mut chain, &mut direct] {
                let mut read = vec![0xee; length];
                begin(chain, Operation::Read, at, &mut read, piece);
                assert_eq!(blocking::drain(chain), Ok(()));
                assert!(read == expected, "{holes:?}: {length} at {at}, pieces of {piece}");
            }
        }
        assert_eq!(blocking::flush(&mut chain), Ok(()));
        let seen = server.seen.lock().unwrap();
        let most = |asked| seen.iter().filter(|it| it.0 == asked).map(|it| it.1).max().unwrap();
        assert_eq!(most(Asked::Read), (PIECES_MAX * 65536) as u64, "a read goes in parts");
        let by_reference = seen.iter().any(|it| it.0 == Asked::Write && it.2 > Some(0));
        assert_eq!(by_reference, holes.is_some(), "what is sealed is in shared memory");
    }
}

#[test]
fn more_than_the_buffers_hold_is_done_in_turn() {
    let mut random = fastrand::Rng::with_seed(seed());
    for holes in [None, Some(Holes::Zero)] {
        let (_memory, server) = over_memory();
        let mut chain = encrypted(holes).chain_over(server.queue()).unwrap();
        let mut all = random_bytes(&mut random, SIZE);
        begin(&mut chain, Operation::Write, 0, &mut all, MIB);
        assert_eq!(blocking::drain(&mut chain), Ok(()));
        // Twice the buffers, some of it in parts; and small ones between.
        let mut reads: Vec<(usize, Vec<u8>)> = Vec::new();
        for _ in 0..2 * BUFFER_BYTES / (4 * MIB) {
            let length = [4 * MIB, 3 * MIB, 5 * MIB][random.usize(..3)];
            reads.push((random.usize(..(SIZE - length) / 4096) * 4096, vec![0xee; length]));
            reads.extend((0..10).map(|_| (random.usize(..SIZE / 4096) * 4096, vec![0xee; 4096])));
        }
        for (at, read) in &mut reads {
            let length = read.len();
            begin(&mut chain, Operation::Read, *at, read, length);
        }
        assert_eq!(blocking::drain(&mut chain), Ok(()));
        for (at, read) in &reads {
            assert!(*read == all[*at..*at + read.len()], "{holes:?}: {} at {at}", read.len());
        }
    }
}

#[test]
fn a_read_for_which_there_are_only_short_buffers_goes_in_parts() {
    let (_memory, server) = over_memory();
    let mut chain = encrypted(Some(Holes::Zero)).chain_over(server.queue()).unwrap();
    let mut all = random_bytes(&mut fastrand::Rng::with_seed(seed()), SIZE);
    begin(&mut chain, Operation::Write, 0, &mut all, MIB);
    assert_eq!(blocking::drain(&mut chain), Ok(()));
    server.seen.lock().unwrap().clear();
    // A short one before the last has one of the 64 buffers of 64 KiB that are left, so that 63 are whole.
    let before = BUFFER_BYTES / (4 * MIB) - 1;
    let mut lengths = vec![4 * MIB; before];
    lengths.extend([4096, 4 * MIB]);
    let mut reads: Vec<_> = lengths.iter().map(|length| vec![0xee; *length]).collect();
    for (index, read) in reads.iter_mut().enumerate() {
        let length = read.len();
        begin(&mut chain, Operation::Read, index * 4 * MIB, read, length);
    }
    assert_eq!(blocking::drain(&mut chain), Ok(()));
    for (index, read) in reads.iter().enumerate() {
        let at = index * 4 * MIB;
        assert!(*read == all[at..at + read.len()], "{index}");
    }
    let asked: Vec<u64> = server.seen.lock().unwrap().iter().map(|seen| seen.1).collect();
    let (whole, short) = (4 * MIB as u64, 32 << 10);
    let mut expected = vec![whole; before];
    expected.extend([4096, whole - short, short]);
    assert_eq!(asked, expected);
}

#[test]
fn what_needs_no_buffers_goes_past_reads_that_wait_for_them() {
    let (_memory, server) = over_memory();
    let mut chain = encrypted(Some(Holes::Zero)).chain_over(server.queue()).unwrap();
    let seen = || server.seen.lock().unwrap();
    // Until the server has the memory that writes are sealed into.
    let mut data = vec![7; 4096];
    let by_reference = |seen: &[(Asked, u64, Option<u32>)]| seen.iter().any(|it| it.2 > Some(0));
    for _ in 0..100 {
        if by_reference(&seen()) {
            break;
        }
        blocking::move_bytes(&mut chain, Operation::Write, &mut data, 0).unwrap();
    }
    assert!(by_reference(&seen()), "what is sealed is always copied");
    seen().clear();
    // One more than there are buffers for.
    let mut reads = vec![vec![0; 4 * MIB]; BUFFER_BYTES / (4 * MIB) + 1];
    for (index, read) in reads.iter_mut().enumerate() {
        begin(&mut chain, Operation::Read, index * 4 * MIB, read, 4 * MIB);
    }
    begin(&mut chain, Operation::Write, SIZE - 3 * MIB, &mut data, 4096);
    for (operation, length) in [(Operation::Flush, 0), (Operation::Discard, 4096)] {
        let id = chain.begin().unwrap();
        chain.submit(id, operation, (SIZE - 2 * MIB) as u64, length, 0);
    }
    assert_eq!(blocking::drain(&mut chain), Ok(()));
    let asked: Vec<Asked> = seen().iter().map(|seen| seen.0).collect();
    let mut expected = vec![Asked::Read; BUFFER_BYTES / (4 * MIB)];
    expected.extend([Asked::Write, Asked::Flush, Asked::Zero, Asked::Read]);
    assert_eq!(asked, expected);
}

#[test]
fn zeroes_are_asked_for_and_kept_room_is_not_given_back() {
    for keeps_room in [false, true] {
        let (memory, server) = over_memory();
        if keeps_room {
            server.disk().keep_room();
        }
        let mut chain = plain_chain(server.queue());
        let mut data = vec![7; 3 * 4096];
        begin(&mut chain, Operation::Write, 0, &mut data, 4096);
        assert_eq!(blocking::drain(&mut chain), Ok(()));
        for (sector, unmap) in [(0, false), (1, true)] {
            let zeroed = blocking::write_zeroes(&mut chain, sector * 4096, 4096, unmap);
            assert_eq!(zeroed, Ok(()));
        }
        let id = chain.begin().unwrap();
        chain.submit(id, Operation::Discard, 2 * 4096, 4096, 0);
        assert_eq!(blocking::drain(&mut chain), Ok(()));
        let asked: Vec<Asked> = server.seen.lock().unwrap().iter().map(|seen| seen.0).collect();
        let (keeping, zero) = (Asked::ZeroKeepingRoom, Asked::Zero);
        if keeps_room {
            assert_eq!(asked, [Asked::Write, keeping, keeping]);
        } else {
            assert_eq!(asked, [Asked::Write, keeping, zero, zero]);
        }
        assert!(memory.bytes()[..2 * 4096].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn a_queue_that_goes_waits_for_its_requests() {
    let memory = MemDisk::new(SIZE);
    let (operations, jitter_microseconds) = (Vec::new(), 0);
    // Far more than it takes from the submission to the look at what is in flight.
    let microseconds = 2_000_000;
    let slow =
        DelaySpec { operations, microseconds, jitter_microseconds, reorders: false, seed: 0 };
    let slow = Delay::new(slow).filter(&Place::simple(SIZE as u64)).unwrap();
    let chain = Chain::new(SIZE as u64, false, vec![slow], memory.queue()).unwrap();
    let server = ChannelServer::start(vec![chain], SIZE as u64);
    let mut chain = plain_chain(server.queue());
    let mut data = vec![7; 4096];
    begin(&mut chain, Operation::Write, 4096, &mut data, 4096);
    chain.poll();
    assert_eq!(chain.in_flight(), 1);
    drop(chain);
    assert!(memory.bytes()[4096..8192].iter().all(|byte| *byte == 7), "it lands later, or never");
}

#[test]
fn what_is_beyond_the_end_is_a_truncated_image_for_good() {
    let memory = MemDisk::new(SIZE / 2);
    let short = Chain::new(SIZE as u64 / 2, false, Vec::new(), memory.queue()).unwrap();
    let server = ChannelServer::start(vec![short], SIZE as u64);
    let mut chain = plain_chain(server.queue());
    let mut data = vec![7; 4096];
    let mut at = |operation, at| blocking::move_bytes(&mut chain, operation, &mut data, at);
    assert_eq!(at(Operation::Write, 0), Ok(()));
    assert_eq!(at(Operation::Read, SIZE as u64 / 2), Err(IoError::Truncated));
    assert_eq!(at(Operation::Write, 0), Err(IoError::Truncated));
    assert_eq!(at(Operation::Read, 0), Err(IoError::Truncated), "what was written may be zeroes");
    assert_eq!(blocking::flush(&mut chain), Err(IoError::Truncated));
}

#[test]
fn a_server_that_refuses_leaves_the_file() {
    for ends in [false, true] {
        let ((connection, servers), file) = (pair(), tempfile::tempfile().unwrap());
        let disk = disk(connection, SIZE as u64, &file);
        let server = std::thread::spawn(move || {
            let (socket, _answerer) = accept(&servers).unwrap();
            if !ends {
                let refusal = ToFilter::Attached { errno: libc::EACCES, size: 0 };
                send(socket.as_fd(), &refusal, &[]).unwrap();
            }
        });
        let queue = disk.queue();
        assert!(!queue.shares_memory());
        server.join().unwrap();
        let mut chain = plain_chain(queue);
        let mut data = vec![7; 4096];
        let written = blocking::move_bytes(&mut chain, Operation::Write, &mut data, 4096);
        assert_eq!(written, Ok(()));
        let mut read = vec![0; 4096];
        file.read_exact_at(&mut read, 4096).unwrap();
        assert_eq!(read, [7; 4096]);
    }
}

#[test]
fn a_server_that_does_not_answer_is_waited_for_once() {
    let ((connection, servers), file) = (pair(), tempfile::tempfile().unwrap());
    let disk = disk(connection, SIZE as u64, &file);
    for _ in 0..3 {
        assert!(!disk.queue().shares_memory());
    }
    let heard = || receive::<ToServer>(servers.as_fd(), false).map(|heard| heard.is_some());
    assert!(heard().unwrap(), "it is not asked");
    assert_eq!(heard().unwrap_err().kind(), std::io::ErrorKind::WouldBlock, "it is asked again");
}

#[test]
fn queues_that_would_share_too_much_memory_go_through_the_file() {
    let memory = MemDisk::new(SIZE);
    let chains = (0..18).map(|_| plain_chain(memory.queue())).collect();
    let server = ChannelServer::start(chains, SIZE as u64);
    let mut queues: Vec<_> = (0..16).map(|_| server.queue()).collect();
    assert!(!server.disk().queue().shares_memory());
    // What a queue has shared is counted no more when it goes.
    queues.truncate(15);
    queues.push(server.queue());
    assert!(!server.disk().queue().shares_memory());
}

/// Attaches the next queue.
fn attach(servers: &OwnedFd) -> (OwnedFd, Answerer) {
    let (socket, answerer) = accept(servers).unwrap();
    let attached = ToFilter::Attached { errno: 0, size: SIZE as u64 };
    send(socket.as_fd(), &attached, &[]).unwrap();
    let (share, _memory) = receive::<ToServer>(socket.as_fd(), true).unwrap().unwrap();
    assert!(matches!(share, ToServer::Share { region: 0, .. }));
    send(socket.as_fd(), &ToFilter::Shared { errno: 0 }, &[]).unwrap();
    (socket, answerer)
}

/// Waits for a request; its slot.
fn next_slot(socket: &OwnedFd, answerer: &Answerer) -> u32 {
    loop {
        if let Some(request) = answerer.next().unwrap() {
            return request.slot;
        }
        assert!(receive::<ToServer>(socket.as_fd(), true).unwrap().is_some());
    }
}

/// Attaches a queue to a server that does this at the first request, with what it answers by and the request's slot.
fn with_server(file: &File, then: impl FnOnce(OwnedFd, Answerer, u32) + Send + 'static) -> Chain {
    plain_chain(queue_of_server(file, then))
}

/// The same, without a chain over the queue.
fn queue_of_server(
    file: &File,
    then: impl FnOnce(OwnedFd, Answerer, u32) + Send + 'static,
) -> Box<dyn Storage> {
    let (connection, servers) = pair();
    let disk = disk(connection, SIZE as u64, file);
    std::thread::spawn(move || {
        let (socket, answerer) = attach(&servers);
        let slot = next_slot(&socket, &answerer);
        then(socket, answerer, slot);
    });
    let queue = disk.queue();
    assert!(queue.shares_memory());
    queue
}

/// The first request is answered, and its doorbell is late: the next one waits for its turn above the queue then.
#[test]
fn a_late_doorbell_does_not_keep_the_thread_awake_that_waits_for_something_else() {
    let (ring, ringing) = channel();
    let (rang, has_rung) = channel();
    let queue = queue_of_server(&tempfile::tempfile().unwrap(), move |socket, answerer, slot| {
        let answer = |slot| {
            let _ = answerer.answer(slot, 0);
            ring_doorbell(socket.as_fd(), &ToFilter::Doorbell).unwrap();
        };
        answer(slot);
        ringing.recv().unwrap();
        ring_doorbell(socket.as_fd(), &ToFilter::Doorbell).unwrap();
        rang.send(()).unwrap();
        answer(next_slot(&socket, &answerer));
        // Until the queue is closed.
        while receive::<ToServer>(socket.as_fd(), true).is_ok_and(|message| message.is_some()) {}
    });
    let requests = Some(Budget { per_second: 2, burst: 1 });
    let limit = Limit::new(&LimitSpec { requests, bytes: None });
    let limit = limit.filter(&Place::simple(SIZE as u64)).unwrap();
    let mut chain = Chain::new(SIZE as u64, false, vec![limit], queue).unwrap();
    let mut data = [7; 4096];
    assert_eq!(blocking::move_bytes(&mut chain, Operation::Write, &mut data, 0), Ok(()));
    begin(&mut chain, Operation::Write, 4096, &mut data, 4096);
    chain.poll();
    ring.send(()).unwrap();
    has_rung.recv().unwrap();
    let (mut woken, mut done) = (0, None);
    while done.is_none() {
        chain.wait([], None).unwrap();
        woken += 1;
        chain.poll();
        done = chain.next_done();
    }
    assert_eq!(done.map(|done| done.result), Some(Ok(())));
    // By the time that it waits for, by the answer, and by few other doorbells.
    assert!(woken < 20, "woken {woken} times in half a second");
}

/// Storage that is looked at all the time sees answers by itself; a thread that sleeps is woken.
#[test]
fn the_server_rings_for_a_thread_that_sleeps_and_not_for_one_that_is_awake() {
    let (go, going) = channel();
    let (tell, told) = channel();
    let queue = queue_of_server(&tempfile::tempfile().unwrap(), move |socket, answerer, first| {
        let mut slot = first;
        for is_last in [false, false, false, true] {
            going.recv().unwrap();
            let rings = answerer.answer(slot, 0);
            if rings {
                ring_doorbell(socket.as_fd(), &ToFilter::Doorbell).unwrap();
            }
            tell.send(rings).unwrap();
            if !is_last {
                slot = next_slot(&socket, &answerer);
            }
        }
        // Until the queue is closed.
        while receive::<ToServer>(socket.as_fd(), true).is_ok_and(|message| message.is_some()) {}
    });
    let mut chain = plain_chain(queue);
    let mut data = [7; 4096];
    // Whether the thread is about to sleep when it is answered, and is rung for. Nobody knows of the first answer that it is awake.
    for (sleeps, is_rung_for) in [(false, true), (false, false), (true, true), (true, true)] {
        begin(&mut chain, Operation::Write, 0, &mut data, 4096);
        chain.poll();
        assert!(!sleeps || chain.arm(), "there is no answer yet");
        go.send(()).unwrap();
        assert_eq!(told.recv().unwrap(), is_rung_for);
        if sleeps {
            let (handle, events) = chain.wait_set().1.unwrap();
            let ready = poll(&mut [PollFd::new(handle, events)], PollTimeout::ZERO);
            assert_eq!(ready, Ok(1), "it sleeps on");
            chain.disarm(false);
        }
        chain.poll();
        assert_eq!(chain.next_done().map(|done| done.result), Some(Ok(())));
    }
}

#[test]
fn a_server_that_breaks_the_protocol_fails_the_requests_of_its_queue() {
    type Breaks = fn(&OwnedFd, &Answerer, u32);
    let ways: [(&str, Breaks); 3] = [
        ("a message that was not asked for", |socket, _, _| {
            send(socket.as_fd(), &ToFilter::Shared { errno: 0 }, &[]).unwrap();
        }),
        ("a message of the other side", |socket, _, _| {
            send(socket.as_fd(), &ToServer::Doorbell, &[]).unwrap();
            send(socket.as_fd(), &ToServer::Attach { ticket: [0; 16] }, &[]).unwrap();
        }),
        ("no error number", |socket, answerer, slot| {
            assert!(answerer.answer(slot, -1));
            send(socket.as_fd(), &ToFilter::Doorbell, &[]).unwrap();
        }),
    ];
    let lost: Result<(), IoError> = Err(IoError::Device(libc::EIO));
    for (way, breaks) in ways {
        let file = tempfile::tempfile().unwrap();
        let mut chain = with_server(&file, move |socket, answerer, slot| {
            breaks(&socket, &answerer, slot);
            // Until the queue is given up.
            while receive::<ToServer>(socket.as_fd(), true).is_ok_and(|message| message.is_some()) {
            }
        });
        let mut data = vec![vec![7; 4096]; 3];
        for (index, data) in data.iter_mut().enumerate() {
            begin(&mut chain, Operation::Write, index * 4096, data, 4096);
        }
        let (mut done, mut results) = (0, Vec::new());
        while done < 3 {
            chain.poll();
            while let Some(request) = chain.next_done() {
                results.push(request.result);
                done += 1;
            }
            crate::waiting::sleep([&mut chain]);
        }
        assert_eq!(results, [lost; 3], "{way}");
        let mut later = [0; 512];
        let read = blocking::move_bytes(&mut chain, Operation::Read, &mut later, 0);
        assert_eq!((read, blocking::flush(&mut chain)), (lost, lost), "{way}");
    }
}

#[test]
fn a_queue_whose_server_breaks_the_protocol_fails_the_whole_disk_as_its_writes_may_still_land() {
    let (connection, servers) = pair();
    let file = tempfile::tempfile().unwrap();
    let disk = disk(connection, SIZE as u64, &file);
    let server = std::thread::spawn(move || {
        let ((broken, its_answerer), (other, answerer)) = (attach(&servers), attach(&servers));
        next_slot(&broken, &its_answerer);
        send(broken.as_fd(), &ToFilter::Shared { errno: 0 }, &[]).unwrap();
        // The other one would answer.
        while receive::<ToServer>(other.as_fd(), true).is_ok_and(|message| message.is_some()) {
            while let Some(request) = answerer.next().unwrap() {
                let _ = answerer.answer(request.slot, 0);
                ring_doorbell(other.as_fd(), &ToFilter::Doorbell).unwrap();
            }
        }
    });
    let [mut broken, mut other] = [disk.queue(), disk.queue()].map(|queue| {
        assert!(queue.shares_memory());
        plain_chain(queue)
    });
    let mut beside = plain_chain(disk.blocking_queue());
    let lost: Result<(), IoError> = Err(IoError::Device(libc::EIO));
    let mut data = [7; 4096];
    for chain in [&mut broken, &mut other, &mut beside] {
        for operation in [Operation::Write, Operation::Read] {
            assert_eq!(blocking::move_bytes(chain, operation, &mut data, 0), lost);
        }
        assert_eq!(blocking::flush(chain), lost);
    }
    drop((broken, other));
    server.join().unwrap();
}

/// Run by [`a_server_that_leaves_ends_the_process`], in a process of its own.
#[test]
fn the_process_that_is_left() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let file = tempfile::tempfile().unwrap();
    let mut chain = with_server(&file, |socket, _, _| drop(socket));
    let mut data = vec![0; 4096];
    let read = blocking::move_bytes(&mut chain, Operation::Read, &mut data, 0);
    panic!("the request is answered: {read:?}");
}

#[test]
fn a_server_that_leaves_ends_the_process() {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "channel::the_process_that_is_left", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert_eq!(child.status.code(), Some(75), "{}", String::from_utf8_lossy(&child.stderr));
}

#[test]
fn two_queues_of_one_connection_are_apart() {
    let memory = MemDisk::new(SIZE);
    let chain = || plain_chain(memory.queue());
    let server = ChannelServer::start(vec![chain(), chain()], SIZE as u64);
    let threads = [0_u8, 1].map(|index| {
        let disk = server.disk().clone();
        std::thread::spawn(move || {
            let queue = disk.queue();
            assert!(queue.shares_memory());
            let mut chain = plain_chain(queue);
            let at = u64::from(index) * SIZE as u64 / 2;
            for round in 0..100 {
                let mut data = vec![round + index; 8192];
                blocking::move_bytes(&mut chain, Operation::Write, &mut data, at).unwrap();
                let mut read = vec![0; 8192];
                blocking::move_bytes(&mut chain, Operation::Read, &mut read, at).unwrap();
                assert_eq!(read, data);
            }
        })
    });
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}
