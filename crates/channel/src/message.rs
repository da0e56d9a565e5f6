//! What goes over the sockets: one datagram for each message, on `SOCK_SEQPACKET` sockets, with descriptors (`SCM_RIGHTS`).
//!
//! ```text
//!  0        4        8                                24
//!  | kind   | number | body                            |   little-endian
//! ```
//! A doorbell says that the ring has something; its loss does no harm where the socket is full, as the other side then has others to read.

use std::io::{self, IoSlice};
use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};

/// The version of the protocol; a filter of another one is not served.
pub const VERSION: u32 = 1;

/// The bytes of a ticket.
pub const TICKET_BYTES: usize = 16;

/// The bytes of a message.
pub const MESSAGE_BYTES: usize = 24;

/// The most descriptors of a message.
const DESCRIPTORS_MAX: usize = 2;

/// Room for the descriptors of a message: for more than it may have, so that surplus ones come, and are closed.
const CONTROL_WORDS: usize = 8;

/// A descriptor of the sender's process (linux/socket.h), which comes with each message once somebody has asked for that (`SO_PASSPIDFD`,
/// Linux 6.5) on a socket that is then passed on.
const SCM_PIDFD: libc::c_int = 4;

const ATTACH: u32 = 1;
const SHARE: u32 = 2;
const DOORBELL: u32 = 3;
const ATTACHED: u32 = 4;
const SHARED: u32 = 5;

/// What a filter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToServer {
    /// On the connection: a new queue, for the file whose handle has this ticket. With the server's end of the queue's sockets, and the
    /// ring.
    Attach {
        /// The ticket.
        ticket: [u8; TICKET_BYTES],
    },
    /// On a queue's socket: a region, with its memfd.
    Share {
        /// Its number: they are 0, 1 and so on.
        region: u32,
        /// How long it is.
        bytes: u64,
    },
    /// On a queue's socket: there are requests.
    Doorbell,
}

/// What `vmseal-rbd` says, on a queue's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToFilter {
    /// The answer to [`ToServer::Attach`].
    Attached {
        /// Why not, or 0.
        errno: i32,
        /// The file's length in bytes.
        size: u64,
    },
    /// The answer to [`ToServer::Share`].
    Shared {
        /// Why not, or 0.
        errno: i32,
    },
    /// There are answers.
    Doorbell,
}

/// What is sent as one datagram.
pub trait Message: Sized {
    /// As bytes.
    fn encode(&self) -> [u8; MESSAGE_BYTES];

    /// From bytes; none if they are no such message.
    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self>;
}

fn encoded(kind: u32, number: u32, body: [u8; 16]) -> [u8; MESSAGE_BYTES] {
    let mut bytes = [0; MESSAGE_BYTES];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[4..8].copy_from_slice(&number.to_le_bytes());
    bytes[8..].copy_from_slice(&body);
    bytes
}

fn decoded(bytes: &[u8; MESSAGE_BYTES]) -> (u32, u32, [u8; 16]) {
    let number =
        |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let mut body = [0; 16];
    body.copy_from_slice(&bytes[8..]);
    (number(0), number(4), body)
}

/// A body that is one number.
fn body(of: u64) -> [u8; 16] {
    u128::from(of).to_le_bytes()
}

fn number(body: [u8; 16]) -> Option<u64> {
    u64::try_from(u128::from_le_bytes(body)).ok()
}

impl Message for ToServer {
    fn encode(&self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Attach { ticket } => encoded(ATTACH, VERSION, *ticket),
            Self::Share { region, bytes } => encoded(SHARE, *region, body(*bytes)),
            Self::Doorbell => encoded(DOORBELL, 0, [0; 16]),
        }
    }

    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        match decoded(bytes) {
            (ATTACH, VERSION, ticket) => Some(Self::Attach { ticket }),
            (SHARE, region, body) => Some(Self::Share { region, bytes: number(body)? }),
            (DOORBELL, 0, body) if body == [0; 16] => Some(Self::Doorbell),
            _ => None,
        }
    }
}

impl Message for ToFilter {
    fn encode(&self) -> [u8; MESSAGE_BYTES] {
        match self {
            Self::Attached { errno, size } => encoded(ATTACHED, errno.cast_unsigned(), body(*size)),
            Self::Shared { errno } => encoded(SHARED, errno.cast_unsigned(), [0; 16]),
            Self::Doorbell => encoded(DOORBELL, 0, [0; 16]),
        }
    }

    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Option<Self> {
        match decoded(bytes) {
            (ATTACHED, errno, body) => {
                Some(Self::Attached { errno: errno.cast_signed(), size: number(body)? })
            }
            (SHARED, errno, body) if body == [0; 16] => {
                Some(Self::Shared { errno: errno.cast_signed() })
            }
            (DOORBELL, 0, body) if body == [0; 16] => Some(Self::Doorbell),
            _ => None,
        }
    }
}

/// Sends a message, with descriptors. It never waits.
///
/// # Errors
/// `WouldBlock` where the socket is full, `BrokenPipe` or `ConnectionReset` where the other side is gone; the system's.
pub fn send(
    socket: BorrowedFd<'_>,
    message: &impl Message,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let bytes = message.encode();
    let parts = [IoSlice::new(&bytes)];
    let numbers: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&numbers)];
    let rights: &[ControlMessage<'_>] = if numbers.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    loop {
        match sendmsg::<()>(socket.as_raw_fd(), &parts, rights, flags, None) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends a doorbell. Where the socket is full, the other side has doorbells to read, and looks into the ring after that.
///
/// # Errors
/// As [`send`], but for `WouldBlock`.
pub fn ring_doorbell(socket: BorrowedFd<'_>, doorbell: &impl Message) -> io::Result<()> {
    match send(socket, doorbell, &[]) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        sent => sent,
    }
}

/// Receives a message, with its descriptors; none: the other side is gone.
///
/// # Errors
/// `WouldBlock` where there is none and it is not to wait; `InvalidData` for what is no message; the system's.
pub fn receive<M: Message>(
    socket: BorrowedFd<'_>,
    wait: bool,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut bytes = [0; MESSAGE_BYTES];
    let datagram = match receive_datagram(socket, &mut bytes, wait) {
        // It has left without reading all that was sent to it.
        Err(error) if error.raw_os_error() == Some(libc::ECONNRESET) => return Ok(None),
        received => received?,
    };
    if datagram.bytes == 0 {
        return Ok(None);
    }
    let whole = datagram.flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0
        && datagram.bytes == MESSAGE_BYTES
        && datagram.fds.len() <= DESCRIPTORS_MAX;
    match M::decode(&bytes) {
        Some(message) if whole => Ok(Some((message, datagram.fds))),
        _ => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            format!("what came over the channel is no message of version {VERSION}"),
        )),
    }
}

struct Datagram {
    bytes: usize,
    flags: libc::c_int,
    fds: Vec<OwnedFd>,
}

/// Not by nix, which drops the numbers of descriptors where more came than there is room for: they would stay open.
fn receive_datagram(socket: BorrowedFd<'_>, bytes: &mut [u8], wait: bool) -> io::Result<Datagram> {
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // Words: a control message begins at a multiple of eight.
    let mut control = [0_u64; CONTROL_WORDS];
    // SAFETY: all zeroes is a header without anything.
    let mut header: libc::msghdr = unsafe { mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = control.as_mut_ptr().cast();
    header.msg_controllen = CONTROL_WORDS * size_of::<u64>();
    let flags = libc::MSG_CMSG_CLOEXEC | if wait { 0 } else { libc::MSG_DONTWAIT };
    let received = loop {
        // SAFETY: the header names buffers that outlive the call and are as long as it says.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
        match usize::try_from(received) {
            Ok(received) => break received,
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    };
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled the header and the control messages that it names; each has as many descriptors as its length
    // says, which the kernel has just made for this process, so that nobody else has their numbers.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(&raw const header);
        while let Some(control) = next.as_ref() {
            let of_socket = control.cmsg_level == libc::SOL_SOCKET;
            if of_socket && matches!(control.cmsg_type, libc::SCM_RIGHTS | SCM_PIDFD) {
                let length = control.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let numbers = libc::CMSG_DATA(control).cast::<RawFd>();
                for index in 0..length / size_of::<RawFd>() {
                    let number = numbers.add(index).read_unaligned();
                    // In the place of a process that is gone stands an error.
                    if number < 0 {
                        continue;
                    }
                    let fd = OwnedFd::from_raw_fd(number);
                    // That of a process is no part of any message: it is closed here.
                    if control.cmsg_type == libc::SCM_RIGHTS {
                        fds.push(fd);
                    }
                }
            }
            next = libc::CMSG_NXTHDR(&raw const header, control);
        }
    }
    Ok(Datagram { bytes: received, flags: header.msg_flags, fds })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        let (kind, flag) = (SockType::SeqPacket, SockFlag::SOCK_CLOEXEC);
        socketpair(AddressFamily::Unix, kind, None, flag).unwrap()
    }

    #[test]
    fn messages_have_these_bytes() {
        let ticket: [u8; 16] = std::array::from_fn(|index| index as u8 + 0xa0);
        let mut attach = [0; MESSAGE_BYTES];
        attach[0] = 1;
        attach[4] = 1;
        attach[8..].copy_from_slice(&ticket);
        let share = [2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let doorbell = [3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let attached = [4, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let shared = [5, 0, 0, 0, 22, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        for (message, bytes) in [
            (ToServer::Attach { ticket }, attach),
            (ToServer::Share { region: 3, bytes: 0x1_0400_0000 }, share),
            (ToServer::Doorbell, doorbell),
        ] {
            assert_eq!(message.encode(), bytes, "{message:?}");
            assert_eq!(ToServer::decode(&bytes), Some(message));
        }
        for (message, bytes) in [
            (ToFilter::Attached { errno: 0, size: 0x0102_0304_0506_0708 }, attached),
            (ToFilter::Shared { errno: libc::EINVAL }, shared),
            (ToFilter::Doorbell, doorbell),
        ] {
            assert_eq!(message.encode(), bytes, "{message:?}");
            assert_eq!(ToFilter::decode(&bytes), Some(message));
        }
        attach[4] = 2;
        assert_eq!(ToServer::decode(&attach), None, "another version");
        assert_eq!(ToServer::decode(&attached), None, "of the other side");
        assert_eq!(ToFilter::decode(&attach), None, "of the other side");
    }

    #[test]
    fn descriptors_come_along_and_a_peer_that_leaves_is_seen() {
        let (one, other) = pair();
        let file = File::open("/dev/null").unwrap();
        let message = ToServer::Attach { ticket: [7; 16] };
        send(one.as_fd(), &message, &[file.as_fd(), one.as_fd()]).unwrap();
        let (received, fds) = receive::<ToServer>(other.as_fd(), true).unwrap().unwrap();
        assert_eq!((received, fds.len()), (message, 2));
        let empty = receive::<ToServer>(other.as_fd(), false).unwrap_err();
        assert_eq!(empty.kind(), io::ErrorKind::WouldBlock);
        drop(fds);
        drop(one);
        assert!(receive::<ToServer>(other.as_fd(), true).unwrap().is_none());
        let gone = send(other.as_fd(), &ToFilter::Doorbell, &[]).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn what_is_no_message_is_refused_and_its_descriptors_are_closed() {
        let (one, other) = pair();
        let sent_with = |bytes: &[u8], count: usize| {
            let (kept, given) = pair();
            let numbers = vec![given.as_raw_fd(); count];
            let rights = [ControlMessage::ScmRights(&numbers)];
            let part = [IoSlice::new(bytes)];
            let flags = MsgFlags::empty();
            sendmsg::<()>(one.as_raw_fd(), &part, &rights, flags, None).unwrap();
            drop(given);
            let refused = receive::<ToServer>(other.as_fd(), true).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
            // All copies of the given end are closed: the one that is kept sees it.
            assert!(receive::<ToServer>(kept.as_fd(), false).unwrap().is_none());
        };
        sent_with(&[0; MESSAGE_BYTES], 1);
        sent_with(&ToServer::Doorbell.encode()[..MESSAGE_BYTES - 1], 1);
        sent_with(&[3; MESSAGE_BYTES + 1], 1);
        sent_with(&ToServer::Doorbell.encode(), DESCRIPTORS_MAX + 1);
        sent_with(&ToServer::Doorbell.encode(), 4 * CONTROL_WORDS);
    }

    /// How many descriptors of processes this one has.
    fn pidfds() -> usize {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let names = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        names.filter(|name| name.to_string_lossy().contains("pidfd")).count()
    }

    #[test]
    fn a_descriptor_that_the_kernel_adds_is_closed() {
        /// asm-generic/socket.h
        const SO_PASSPIDFD: libc::c_int = 76;
        let (one, other) = pair();
        let asks: libc::c_int = 1;
        // SAFETY: the value outlives the call, and is as long as is said.
        let asked = unsafe {
            let (value, length) = ((&raw const asks).cast(), size_of_val(&asks) as u32);
            libc::setsockopt(other.as_raw_fd(), libc::SOL_SOCKET, SO_PASSPIDFD, value, length)
        };
        if asked < 0 {
            let error = io::Error::last_os_error();
            assert_eq!(error.raw_os_error(), Some(libc::ENOPROTOOPT), "{error}");
            // Not by a macro, whose output the harness hides when a test passes.
            let message = b"skipped: the kernel has no SO_PASSPIDFD\n";
            return io::Write::write_all(&mut io::stderr(), message).unwrap();
        }
        for count in 0..=DESCRIPTORS_MAX {
            let fds = vec![one.as_fd(); count];
            send(one.as_fd(), &ToServer::Doorbell, &fds).unwrap();
            let (message, fds) = receive::<ToServer>(other.as_fd(), true).unwrap().unwrap();
            assert_eq!((message, fds.len()), (ToServer::Doorbell, count));
        }
        assert_eq!(pidfds(), 0);
    }

    #[test]
    fn a_doorbell_is_dropped_where_the_socket_is_full() {
        let (one, other) = pair();
        let full = loop {
            match send(one.as_fd(), &ToServer::Doorbell, &[]) {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        ring_doorbell(one.as_fd(), &ToServer::Doorbell).unwrap();
        drop(other);
        ring_doorbell(one.as_fd(), &ToServer::Doorbell).unwrap_err();
    }
}
