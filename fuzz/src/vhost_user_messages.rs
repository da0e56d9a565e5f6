//! What a VMM sends to a disk's socket: messages with the descriptors that each kind has. Memory that it
//! shares begins with the same bytes, the log of written memory is empty. The session ends, and gives its disk back.

use std::io::{IoSlice, Read};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use vmseal_iofilter::front_ends::vhost_user::serve;
use vmseal_iofilter::handle::Socket;
use vmseal_iofilter::stack::chain::Chain;
use vmseal_iofilter::stack::orders::Orders;
use vmseal_iofilter::stack::stop::Stop;
use vmseal_iofilter::storage::mem::MemDisk;

use crate::{INPUT_MAX, disk};

const SIZE: usize = 128 * 1024;
const QUEUES: usize = 2;

/// The most messages: all their answers fit the socket's buffer, as nobody reads them meanwhile.
const MESSAGES_MAX: usize = 64;

/// The length of the memory that is shared.
const MEMORY: i64 = 64 * 1024;

/// The length of the log: for four times as much memory.
const LOG: i64 = 8;

/// The length of what precedes a message's payload: request, flags, length of the payload.
const HEADER: usize = 12;

/// Kinds of messages that come with descriptors (QEMU docs/interop/vhost-user).
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_LOG_FD: u32 = 7;
const ADD_MEM_REG: u32 = 37;
const VRING_DESCRIPTORS: std::ops::RangeInclusive<u32> = 12..=14;
/// In the payload of [`VRING_DESCRIPTORS`]: that there is none.
const NO_DESCRIPTOR: u8 = 1;

struct Server {
    socket: Socket,
    address: SocketAddr,
}

impl Server {
    fn new() -> Self {
        let thread = thread::current().id();
        let name = format!("vmseal-fuzz-vhost-user-{}-{thread:?}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        Self { socket: Socket::Listening(listener), address }
    }
}

thread_local! {
    static SERVER: Server = Server::new();
}

fn number(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// The first message of `bytes` and what is behind it.
fn message(bytes: &[u8]) -> (&[u8], &[u8]) {
    let length = HEADER.saturating_add(number(bytes.get(8..).unwrap_or_default()) as usize);
    bytes.split_at(length.min(bytes.len()))
}

/// What a VMM shares.
struct Shared {
    memory: OwnedFd,
    log: OwnedFd,
    event: EventFd,
}

impl Shared {
    fn new(bytes: &[u8]) -> Self {
        let memory = memfd_create("guest", MFdFlags::MFD_CLOEXEC).unwrap();
        nix::unistd::ftruncate(&memory, MEMORY).unwrap();
        nix::sys::uio::pwrite(&memory, bytes, 0).unwrap();
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let log = memfd_create("log", flags).unwrap();
        nix::unistd::ftruncate(&log, LOG).unwrap();
        fcntl(&log, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
        Self { memory, log, event: EventFd::new().unwrap() }
    }
}

fn send(stream: &UnixStream, message: &[u8], Shared { memory, log, event }: &Shared) {
    let payload = message.get(HEADER..).unwrap_or_default();
    let (fd, count): (BorrowedFd<'_>, usize) = match number(message) {
        SET_MEM_TABLE => (memory.as_fd(), number(payload).min(8) as usize),
        ADD_MEM_REG => (memory.as_fd(), 1),
        SET_LOG_BASE => (log.as_fd(), 1),
        SET_LOG_FD => (event.as_fd(), 1),
        kind if VRING_DESCRIPTORS.contains(&kind) => (
            event.as_fd(),
            usize::from(payload.get(1).is_none_or(|flags| flags & NO_DESCRIPTOR == 0)),
        ),
        _ => (event.as_fd(), 0),
    };
    let fds = vec![fd.as_raw_fd(); count];
    let rights = [ControlMessage::ScmRights(&fds)];
    let control = if count > 0 { &rights[..] } else { &[] };
    // The other side may have ended the connection.
    let parts = [IoSlice::new(message)];
    let _ = sendmsg::<()>(stream.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None);
}

fn vmm(address: &SocketAddr, mut bytes: &[u8]) {
    let shared = Shared::new(bytes);
    let mut stream = UnixStream::connect_addr(address).unwrap();
    for _ in 0..MESSAGES_MAX {
        if bytes.is_empty() {
            break;
        }
        let (first, rest) = message(bytes);
        send(&stream, first, &shared);
        bytes = rest;
    }
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.read_to_end(&mut Vec::new());
}

/// See the module.
pub fn run(data: &[u8]) {
    let data = &data[..data.len().min(INPUT_MAX)];
    let (disk, served) = disk(&MemDisk::new(SIZE), false, true, QUEUES);
    let chains: Vec<Chain> = (0..QUEUES).map(|_| disk.chain().unwrap()).collect();
    let (stop, uid) = (Arc::new(Stop::new().unwrap()), nix::unistd::geteuid().as_raw());
    let orders = Orders::new(Arc::clone(&stop)).unwrap();
    let chains = SERVER.with(|Server { socket, address }| {
        thread::scope(|scope| {
            let serving = scope.spawn(|| serve(socket, uid, &served, chains, &orders));
            vmm(address, data);
            stop.ask();
            serving.join().unwrap().unwrap()
        })
    });
    assert!(chains.len() == QUEUES && chains.iter().all(|chain| chain.in_flight() == 0));
}
