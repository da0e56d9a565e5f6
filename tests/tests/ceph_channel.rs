//! `vmseal-rbd` on a real Ceph cluster: who has a file open reads and writes its image by queues in shared memory, as the file was opened,
//! and nobody else does.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket, socketpair};
use vmseal_api::datastore::Messenger;
use vmseal_api::rbd::{ASK_TICKET, MOUNTED_ATTRIBUTE, Mounted};
use vmseal_channel::{
    Operation, Piece, RING_BYTES, Requester, SLOTS, SharedMemory, TICKET_BYTES, ToFilter, ToServer,
    ZEROES_BYTES_MAX, receive, send,
};
use vmseal_tests::ceph::is_installed;
use vmseal_tests::ceph_pool::Pool;
use vmseal_tests::{TIMEOUT, eventually};

use crate::ceph_files::{Mount, attribute, lock, make, open, random};

/// The length of files here: an image.
const LONG: u64 = 16 << 20;

/// How much memory a client shares.
const REGION: usize = 8 << 20;

pub(crate) type Ticket = [u8; TICKET_BYTES];

/// A queue, as a filter has it.
pub(crate) struct Queue {
    socket: OwnedFd,
    requester: Requester,
    /// The ring, to look at.
    ring: SharedMemory,
    region: SharedMemory,
}

fn connection(mount: &Mount) -> OwnedFd {
    connection_at(&mount.path(""))
}

/// A connection to the process that serves the pool which is mounted there.
pub(crate) fn connection_at(mounted: &Path) -> OwnedFd {
    let mounted = attribute(mounted, MOUNTED_ATTRIBUTE).unwrap();
    let mounted: Mounted = serde_json::from_str(&mounted).unwrap();
    // As the library has it in force.
    assert_eq!(mounted.messenger, Some(Messenger::Crc));
    let path = mounted.channel.expect("it has a socket");
    assert!(Path::new(&path).is_absolute(), "{path}");
    let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
    let client = socket(AddressFamily::Unix, kind, flags, None).unwrap();
    connect(client.as_raw_fd(), &UnixAddr::new(path.as_str()).unwrap()).unwrap();
    client
}

pub(crate) fn ticket(file: &File) -> nix::Result<Ticket> {
    let mut ticket: Ticket = [0; TICKET_BYTES];
    // SAFETY: the request writes as many bytes as the ticket has, which outlives the call.
    let asked = unsafe { libc::ioctl(file.as_raw_fd(), ASK_TICKET.into(), ticket.as_mut_ptr()) };
    Errno::result(asked).map(|_| ticket)
}

fn is_ready(socket: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::try_from(TIMEOUT).unwrap()).unwrap() == 1
}

/// What `vmseal-rbd` says; none: it has dropped the queue.
fn hear(socket: &OwnedFd) -> Option<ToFilter> {
    assert!(is_ready(socket), "nothing is said");
    receive::<ToFilter>(socket.as_fd(), true).unwrap().map(|(message, _)| message)
}

/// Asks for a queue: its socket, its ring and that to look at, and what is said; none where the queue ends at once.
fn ask_for(
    connection: &OwnedFd,
    ticket: Ticket,
) -> (OwnedFd, Requester, OwnedFd, Option<ToFilter>) {
    let (kind, flags) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
    let (here, there) = socketpair(AddressFamily::Unix, kind, None, flags).unwrap();
    let ring = SharedMemory::create(RING_BYTES).unwrap();
    let looked_at = ring.fd().try_clone_to_owned().unwrap();
    let requester = Requester::new(ring);
    let fds = [there.as_fd(), requester.fd()];
    send(connection.as_fd(), &ToServer::Attach { ticket }, &fds).unwrap();
    drop(there);
    let said = hear(&here);
    (here, requester, looked_at, said)
}

/// Why no queue is attached; none where one is, or was and has ended.
fn refusal(connection: &OwnedFd, ticket: Ticket) -> Option<i32> {
    match ask_for(connection, ticket).3 {
        Some(ToFilter::Attached { errno, .. }) => Some(errno).filter(|errno| *errno != 0),
        None => None,
        other => panic!("{other:?}"),
    }
}

/// Attaches a queue; it, and the file's length, or why not.
pub(crate) fn attach(connection: &OwnedFd, ticket: Ticket) -> Result<(Queue, u64), i32> {
    let (socket, requester, looked_at, said) = ask_for(connection, ticket);
    let Some(ToFilter::Attached { errno, size }) = said else { panic!("no answer") };
    if errno != 0 {
        return Err(errno);
    }
    let queue = Queue {
        socket,
        requester,
        ring: SharedMemory::map(looked_at, RING_BYTES).unwrap(),
        region: SharedMemory::create(REGION).unwrap(),
    };
    assert_eq!(queue.share(queue.region.fd(), 0, REGION as u64), 0);
    Ok((queue, size))
}

impl Queue {
    /// Shares memory; 0, or why it is refused.
    fn share(&self, memory: BorrowedFd<'_>, region: u32, bytes: u64) -> i32 {
        send(self.socket.as_fd(), &ToServer::Share { region, bytes }, &[memory]).unwrap();
        loop {
            match hear(&self.socket) {
                Some(ToFilter::Shared { errno }) => return errno,
                Some(ToFilter::Doorbell) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        let place = self.region.part(at as u64, bytes.len()).unwrap();
        // SAFETY: the place is as long, and nobody else has it meanwhile.
        unsafe { place.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn get(&self, at: usize, length: usize) -> Vec<u8> {
        let (place, mut bytes) = (self.region.part(at as u64, length).unwrap(), vec![0; length]);
        // SAFETY: as above.
        unsafe { place.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), length) };
        bytes
    }

    pub(crate) fn submit(
        &mut self,
        slot: u32,
        operation: Operation,
        offset: u64,
        pieces: &[Piece],
    ) {
        let length = pieces.iter().map(|piece| u64::from(piece.length)).sum();
        assert!(self.requester.push(slot, operation, offset, length, pieces));
        self.publish();
    }

    fn publish(&mut self) {
        if self.requester.publish() {
            send(self.socket.as_fd(), &ToServer::Doorbell, &[]).unwrap();
        }
    }

    /// The next answer; none: the queue is dropped.
    pub(crate) fn answer(&mut self) -> Option<(u32, i32)> {
        loop {
            if let Some(answer) = self.requester.next().unwrap() {
                return Some(answer);
            }
            assert_eq!(hear(&self.socket)?, ToFilter::Doorbell);
        }
    }

    /// Does a request, and returns its error number.
    pub(crate) fn ask(&mut self, operation: Operation, offset: u64, pieces: &[Piece]) -> i32 {
        self.submit(7, operation, offset, pieces);
        let (slot, errno) = self.answer().expect("the queue is dropped");
        assert_eq!(slot, 7);
        errno
    }

    /// The same for what has no data.
    fn ask_of(&mut self, operation: Operation, part: (u64, u64)) -> i32 {
        assert!(self.requester.push(9, operation, part.0, part.1, &[]));
        self.publish();
        let (slot, errno) = self.answer().expect("the queue is dropped");
        assert_eq!(slot, 9);
        errno
    }

    /// Waits until `vmseal-rbd` has dropped it: doorbells may have come before.
    fn is_dropped(&self) {
        while let Some(message) = hear(&self.socket) {
            assert_eq!(message, ToFilter::Doorbell);
        }
    }

    /// How many requests `vmseal-rbd` has begun: the ring says so when it has looked for more.
    fn taken(&self) -> u64 {
        let word = self.ring.part(64, 8).unwrap().cast::<AtomicU64>();
        // SAFETY: the word is within the ring and aligned, and is accessed as an atomic one alone.
        unsafe { word.as_ref() }.load(Ordering::Acquire)
    }
}

pub(crate) fn piece(offset: usize, length: usize) -> Piece {
    Piece { region: 0, offset: offset as u64, length: length as u32 }
}

#[test]
fn who_has_a_file_open_reads_and_writes_its_image_by_queues() {
    if !is_installed() {
        return;
    }
    let pool = Pool::of_shared_cluster("channel", "crc");
    let mut mount = Mount::new(&pool);
    data(&mount);
    rights(&mount);
    breaches(&mount);
    gives_room_back(&pool, &mount);
    a_lock_outlasts_the_requests(&pool, &mount);
    the_server_dies(&mut mount);
    is_forced_off(&mut mount);
}

/// What one way writes the other reads, wherever it is in memory.
fn data(mount: &Mount) {
    // Not the length of pages, and more than an object has.
    const PIECE: usize = 130_001;
    const COUNT: usize = 40;
    let file = make(&mount.path("data")).unwrap();
    file.set_len(LONG).unwrap();
    let connection = connection(mount);
    let (mut queue, size) = attach(&connection, ticket(&file).unwrap()).unwrap();
    assert_eq!(size, LONG);
    // The last one first in memory.
    let pieces: Vec<_> =
        (0..COUNT).map(|index| piece((COUNT - 1 - index) * PIECE, PIECE)).collect();
    let content = random((PIECE * COUNT) as u64);
    for (part, piece) in content.chunks(PIECE).zip(&pieces) {
        queue.put(piece.offset as usize, part);
    }
    assert_eq!(queue.ask(Operation::Write, 777, &pieces), 0);
    let mut read = vec![0; content.len()];
    file.read_exact_at(&mut read, 777).unwrap();
    assert!(read == content, "the file does not have what was written by the queue");
    let other = random(content.len() as u64);
    file.write_all_at(&other, 1 << 20).unwrap();
    assert_eq!(queue.ask(Operation::Read, 1 << 20, &pieces), 0);
    let read: Vec<u8> =
        pieces.iter().flat_map(|piece| queue.get(piece.offset as usize, PIECE)).collect();
    assert!(read == other, "the queue does not read what was written to the file");
    for (operation, at) in [(Operation::Zero, 2 << 20), (Operation::ZeroKeepingRoom, 4 << 20)] {
        assert_eq!(queue.ask_of(operation, (at + 3, 70_000)), 0);
        let mut zeroes = vec![1; 70_002];
        file.read_exact_at(&mut zeroes, at + 2).unwrap();
        let before = other[(at + 2) as usize - (1 << 20)];
        assert_eq!((zeroes[0], zeroes[1..70_001].iter().any(|byte| *byte != 0)), (before, false));
    }
    assert_eq!(queue.ask_of(Operation::Flush, (0, 0)), 0);
    // The end of the file is the end.
    for operation in [Operation::Read, Operation::Write] {
        assert_eq!(queue.ask(operation, LONG - 10, &[piece(0, 10)]), 0);
        assert_eq!(queue.ask(operation, LONG - 10, &[piece(0, 11)]), libc::EFBIG);
    }
    assert_eq!(queue.ask_of(Operation::Zero, (LONG, 1)), libc::EFBIG);
    for operation in [Operation::Zero, Operation::ZeroKeepingRoom] {
        assert_eq!(queue.ask_of(operation, (0, ZEROES_BYTES_MAX)), libc::EFBIG);
        assert_eq!(queue.ask_of(operation, (0, ZEROES_BYTES_MAX + 1)), libc::EINVAL);
    }
    assert_eq!(file.metadata().unwrap().len(), LONG);
    many_at_once(&file, &mut queue);
    // Another queue of the same ticket.
    let (mut second, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
    assert_eq!(second.ask(Operation::Read, 0, &[piece(0, 4096)]), 0);
    let mut expected = vec![0; 4096];
    file.read_exact_at(&mut expected, 0).unwrap();
    assert!(second.get(0, 4096) == expected && expected.iter().any(|byte| *byte != 0));
}

/// As many requests as a queue has slots, in flight together.
fn many_at_once(file: &File, queue: &mut Queue) {
    let content = random((SLOTS * 4096) as u64);
    queue.put(0, &content);
    for slot in 0..SLOTS {
        let (at, offset) = (slot * 4096, ((SLOTS - 1 - slot) * 8192) as u64);
        queue.submit(slot as u32, Operation::Write, offset, &[piece(at, 4096)]);
    }
    let mut left: BTreeSet<u32> = (0..SLOTS as u32).collect();
    while !left.is_empty() {
        let (slot, errno) = queue.answer().unwrap();
        assert_eq!(errno, 0);
        assert!(left.remove(&slot), "slot {slot} is answered twice");
    }
    let mut read = vec![0; 4096];
    for (slot, expected) in content.chunks(4096).enumerate() {
        file.read_exact_at(&mut read, ((SLOTS - 1 - slot) * 8192) as u64).unwrap();
        assert!(read == expected, "slot {slot}");
    }
}

/// A ticket gives what its handle may, and no more, for as long as that is open.
fn rights(mount: &Mount) {
    let file = make(&mount.path("rights")).unwrap();
    let connection = connection(mount);
    let refused = |ticket| refusal(&connection, ticket);
    assert_eq!(refused(ticket(&file).unwrap()), Some(libc::EOPNOTSUPP), "it is an object");
    file.set_len(LONG).unwrap();
    file.write_all_at(b"as it was", 0).unwrap();
    let reader = File::open(mount.path("rights")).unwrap();
    let (own, of_reader) = (ticket(&file).unwrap(), ticket(&reader).unwrap());
    assert_eq!(ticket(&file), Ok(own));
    assert_ne!(own, of_reader);
    let (mut queue, _) = attach(&connection, of_reader).unwrap();
    assert_eq!(queue.ask(Operation::Read, 0, &[piece(0, 9)]), 0);
    assert_eq!(queue.get(0, 9), b"as it was");
    assert_eq!(queue.ask(Operation::Write, 0, &[piece(9, 9)]), libc::EBADF);
    assert_eq!(queue.ask_of(Operation::Zero, (0, 9)), libc::EBADF);
    assert_eq!(queue.ask_of(Operation::ZeroKeepingRoom, (0, 9)), libc::EBADF);
    let mut read = [0; 9];
    file.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"as it was");
    let writer = File::options().write(true).open(mount.path("rights")).unwrap();
    let (mut writes, _) = attach(&connection, ticket(&writer).unwrap()).unwrap();
    writes.put(0, b"only read");
    assert_eq!(writes.ask(Operation::Read, 0, &[piece(0, 9)]), libc::EBADF);
    assert_eq!(writes.get(0, 9), b"only read", "it reads by a handle that is for writing alone");
    assert_eq!(writes.ask(Operation::Write, 0, &[piece(0, 9)]), 0);
    file.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"only read");
    let mut wrong = own;
    wrong[15] ^= 1;
    assert_eq!(refused(wrong), Some(libc::EACCES));
    let directory = File::open(mount.path("")).unwrap();
    assert_eq!(ticket(&directory), Err(Errno::ENOTTY));
    drop(reader);
    eventually("a ticket ends with its handle", || {
        (refused(of_reader) == Some(libc::EACCES)).then_some(())
    })
    .unwrap();
    // So do its queues.
    queue.is_dropped();
    attach(&connection, own).unwrap();
}

/// Who breaks the protocol is refused, or loses the queue; others go on.
fn breaches(mount: &Mount) {
    /// How many queues of a connection may be refused.
    const REFUSALS: usize = 64;
    let file = make(&mount.path("breaches")).unwrap();
    file.set_len(LONG).unwrap();
    let connection = connection(mount);
    let (mut queue, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
    let (mut beside, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
    let loose = File::from(memfd_create(c"loose", MFdFlags::MFD_CLOEXEC).unwrap());
    loose.set_len(4096).unwrap();
    assert_eq!(queue.share(loose.as_fd(), 1, 4096), libc::EINVAL, "it could shrink");
    let more = SharedMemory::create(4096).unwrap();
    assert_eq!(queue.share(more.fd(), 0, 4096), libc::EINVAL, "region 0 is there");
    assert_eq!(queue.share(more.fd(), 1, 8192), libc::EINVAL, "it is shorter");
    assert_eq!(queue.share(more.fd(), 1, 4096), 0);
    assert_eq!(queue.ask(Operation::Read, 0, &[Piece { region: 1, length: 4096, offset: 0 }]), 0);
    queue.submit(0, Operation::Read, 0, &[Piece { region: 1, length: 4096, offset: 1 }]);
    assert_eq!(queue.answer(), None, "it reads beyond what is shared");
    assert_eq!(beside.ask(Operation::Read, 0, &[piece(0, 4096)]), 0);
    // A ring that says that it has more requests than slots.
    let word = beside.ring.part(0, 8).unwrap().cast::<AtomicU64>();
    // SAFETY: the word is within the ring and aligned, and is accessed as an atomic one alone.
    unsafe { word.as_ref() }.store(u64::MAX, Ordering::Release);
    send(beside.socket.as_fd(), &ToServer::Doorbell, &[]).unwrap();
    beside.is_dropped();
    let (mut again, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
    assert_eq!(again.ask(Operation::Read, 0, &[piece(0, 4096)]), 0);
    assert!(mount.log().contains("is dropped"), "{}", mount.log());
    // Who is refused again and again can attach no more, and keeps the queues that it has.
    let mut wrong = ticket(&file).unwrap();
    wrong[0] ^= 1;
    for _ in 0..REFUSALS {
        assert_eq!(attach(&connection, wrong).err(), Some(libc::EACCES));
    }
    assert_eq!(hear(&connection), None);
    assert_eq!(again.ask(Operation::Read, 0, &[piece(0, 4096)]), 0);
}

/// Whole objects that are made zeroes are gone from the cluster, by the queue and by the file, unless they are to keep their room.
fn gives_room_back(pool: &Pool, mount: &Mount) {
    /// The length of an object, in bytes.
    const OBJECT: u64 = 4 << 20;
    let before = pool.images();
    let file = make(&mount.path("room")).unwrap();
    file.set_len(LONG).unwrap();
    let image = pool.images().into_iter().find(|image| !before.contains(image)).unwrap();
    let has = |objects: &[u64], what: &str| {
        let wanted: BTreeSet<u64> = objects.iter().copied().collect();
        assert_eq!(pool.objects(&image), wanted, "{what}");
    };
    let connection = connection(mount);
    let (mut queue, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
    has(&[], "nothing is written");
    file.write_all_at(&random(LONG), 0).unwrap();
    has(&[0, 1, 2, 3], "all is written");
    assert_eq!(queue.ask_of(Operation::Zero, (0, OBJECT - 4096)), 0);
    has(&[0, 1, 2, 3], "an object has data behind the zeroes");
    assert_eq!(queue.ask_of(Operation::ZeroKeepingRoom, (OBJECT, OBJECT)), 0);
    has(&[0, 1, 2, 3], "zeroes are to keep their room");
    assert_eq!(queue.ask_of(Operation::Zero, (2 * OBJECT, OBJECT)), 0);
    has(&[0, 1, 3], "the queue gives no room back");
    let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(&file, punch, (3 * OBJECT) as i64, OBJECT as i64).unwrap();
    has(&[0, 1], "the file gives no room back");
    let mut read = vec![1; LONG as usize];
    file.read_exact_at(&mut read, 0).unwrap();
    let data = (OBJECT - 4096) as usize..OBJECT as usize;
    assert!(read[..data.start].iter().chain(&read[data.end..]).all(|byte| *byte == 0));
    assert!(read[data].iter().any(|byte| *byte != 0));
}

/// Who had a file open and is gone has its lock until all that it wrote by the queue has landed.
fn a_lock_outlasts_the_requests(pool: &Pool, mount: &Mount) {
    // Twelve seconds in all: most of them are left when all have begun, however busy the machine is.
    const WRITES: usize = 24;
    let before = pool.images();
    let file = make(&mount.path("slow")).unwrap();
    file.set_len(LONG).unwrap();
    drop(file);
    // Its writes take their time in librbd, which nothing else does: two each second.
    let image = pool.images().into_iter().find(|image| !before.contains(image)).unwrap();
    let slow = ["config", "image", "set", &image, "rbd_qos_write_iops_limit", "2"];
    // Once the image is closed: until then its lock keeps others from changing it.
    let is_slow = || pool.cluster.rbd(&slow).status.success().then_some(());
    eventually("writes are slow", is_slow).unwrap();
    let (file, next) = (open(&mount.path("slow")).unwrap(), open(&mount.path("slow")).unwrap());
    assert!(lock(&file, libc::F_WRLCK) && !lock(&next, libc::F_WRLCK));
    let connection = connection(mount);
    let (mut queue, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
    let content = random((WRITES * 4096) as u64);
    queue.put(0, &content);
    for slot in 0..WRITES {
        let at = slot * 4096;
        queue.submit(slot as u32, Operation::Write, at as u64, &[piece(at, 4096)]);
    }
    eventually("all have begun", || (queue.taken() == WRITES as u64).then_some(())).unwrap();
    let since = Instant::now();
    drop((queue, connection, file));
    eventually("the lock is free", || lock(&next, libc::F_WRLCK).then_some(())).unwrap();
    let mut read = vec![0; content.len()];
    next.read_exact_at(&mut read, 0).unwrap();
    assert!(read == content, "the lock was given up with writes in flight");
    let took = since.elapsed();
    assert!(
        took > Duration::from_secs(2),
        "the writes were not slow, which shows nothing: {took:?}"
    );
}

/// Queues end with the process that serves them, and its successor has its socket at the same place.
fn the_server_dies(mount: &mut Mount) {
    let path = mount.path("data");
    let file = open(&path).unwrap();
    let former = connection(mount);
    let (queue, _) = attach(&former, ticket(&file).unwrap()).unwrap();
    mount.dies();
    queue.is_dropped();
    drop((queue, file));
    let file = open(&path).unwrap();
    let connection = connection(mount);
    let (mut queue, size) = attach(&connection, ticket(&file).unwrap()).unwrap();
    assert_eq!(size, LONG);
    assert_eq!(queue.ask(Operation::Read, 0, &[piece(0, 4096)]), 0);
}

/// How often a mount is taken away, at most: until the cluster is fast enough for all images to be closed in time.
const TAKEN_AWAY_MAX: usize = 3;

/// A mount that is taken away by force with a queue attached: the process closes the images, and ends.
fn is_forced_off(mount: &mut Mount) {
    let has_closed_images = (0..TAKEN_AWAY_MAX).any(|_| {
        let file = open(&mount.path("data")).unwrap();
        let connection = connection(mount);
        let (queue, _) = attach(&connection, ticket(&file).unwrap()).unwrap();
        let has_closed = mount.is_forced_off();
        queue.is_dropped();
        drop((queue, connection, file));
        if !has_closed {
            mount.dies();
        }
        has_closed
    });
    assert!(has_closed_images, "it never closes the images: {}", mount.log());
}
