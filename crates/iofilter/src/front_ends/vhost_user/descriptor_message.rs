//! Messages that are one descriptor, which the crate `vhost` would not take or not use; so they are handled here, before
//! the crate reads them:
//!
//! - the channel on which a disk speaks to its VMM first (vhost-user, "Backend communication"), here only to say that the
//!   disk has another size than before. The crate cannot send that message.
//! - the eventfd on which a VMM wants to be told that written memory was logged. The crate does not know that message.

use std::io::{self, IoSliceMut, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recv, recvmsg};

/// The length of a header: request, flags, size of the body.
const HEADER: usize = 12;

/// The VMM gives an eventfd for its log of written memory (`VHOST_USER_SET_LOG_FD`).
const SET_LOG_FD: u32 = 7;

/// The VMM gives the channel (`VHOST_USER_SET_BACKEND_REQ_FD`).
const SET_BACKEND_REQ_FD: u32 = 21;

/// The disk's configuration has changed (`VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`).
const CONFIG_CHANGE_MSG: u32 = 2;

/// The version of the protocol, in every message's flags.
const VERSION: u32 = 1;

/// The message is a reply.
const REPLY: u32 = 1 << 2;

/// The sender waits for a reply.
const NEED_REPLY: u32 = 1 << 3;

/// The most that may be written while nobody reads, before the channel counts as broken: the VMM reads it in its main
/// loop.
const SEND: MsgFlags = MsgFlags::MSG_DONTWAIT;

fn header(request: u32, flags: u32, size: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    for (part, value) in header.chunks_exact_mut(4).zip([request, flags, size]) {
        part.copy_from_slice(&value.to_ne_bytes());
    }
    header
}

fn number(header: &[u8; HEADER], index: usize) -> u32 {
    header[4 * index..].first_chunk().map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

/// What a message's descriptor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Given {
    /// The channel to the VMM.
    Channel,
    /// The eventfd of the log.
    LogEvent,
}

/// What the next message, which has arrived, gives; none if it is another kind of message.
pub(super) fn next(connection: &UnixStream) -> Option<Given> {
    let mut bytes = [0; HEADER];
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let there = recv(connection.as_raw_fd(), &mut bytes, peek);
    match number(&bytes, 0) {
        _ if there != Ok(HEADER) => None,
        SET_BACKEND_REQ_FD => Some(Given::Channel),
        SET_LOG_FD => Some(Given::LogEvent),
        _ => None,
    }
}

/// Reads that message; [`answer`] answers it.
///
/// # Errors
/// The connection's, and of a message that is not as the protocol has it: the connection is of no use then.
pub(super) fn take(connection: &UnixStream) -> io::Result<(OwnedFd, Answer)> {
    let mut bytes = [0; HEADER];
    let mut descriptors = nix::cmsg_space!([RawFd; 8]);
    let descriptor = {
        let mut part = [IoSliceMut::new(&mut bytes)];
        let fd = connection.as_raw_fd();
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = recvmsg::<()>(fd, &mut part, Some(&mut descriptors), flags)?;
        let whole = message.bytes == HEADER;
        let mut taken = Vec::new();
        for control in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = control {
                // SAFETY: the kernel has made these descriptors for this message, and nobody else has them.
                taken.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        match (whole, taken.len()) {
            (true, 1) => taken.pop(),
            _ => None,
        }
    };
    let wrong = || io::Error::new(io::ErrorKind::InvalidData, "not one descriptor");
    let descriptor = descriptor.filter(|_| number(&bytes, 2) == 0).ok_or_else(wrong)?;
    let wanted = number(&bytes, 1) & NEED_REPLY != 0;
    Ok((descriptor, Answer { request: wanted.then(|| number(&bytes, 0)) }))
}

/// The answer that a VMM waits for, if it does.
#[must_use]
#[derive(Debug)]
pub(super) struct Answer {
    request: Option<u32>,
}

impl Answer {
    /// Says that it is done.
    ///
    /// # Errors
    /// The connection's.
    pub(super) fn send(self, mut connection: &UnixStream) -> io::Result<()> {
        let Some(request) = self.request else { return Ok(()) };
        let mut reply = header(request, VERSION | REPLY, 8).to_vec();
        reply.extend(0u64.to_ne_bytes());
        connection.write_all(&reply)
    }
}

/// Says that the configuration has changed; the VMM asks for it then.
///
/// # Errors
/// The channel's.
pub fn announce(channel: &UnixStream) -> io::Result<()> {
    let message = header(CONFIG_CHANGE_MSG, VERSION, 0);
    match nix::sys::socket::send(channel.as_raw_fd(), &message, SEND | MsgFlags::MSG_NOSIGNAL) {
        Ok(HEADER) => Ok(()),
        Ok(_) => Err(io::Error::from(Errno::EAGAIN)),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Read};

    use nix::sys::socket::{ControlMessage, sendmsg};

    use super::*;

    fn give(vmm: &UnixStream, request: u32, flags: u32, descriptors: &[RawFd]) {
        let message = header(request, VERSION | flags, 0);
        let rights = [ControlMessage::ScmRights(descriptors)];
        let control = if descriptors.is_empty() { &[][..] } else { &rights };
        let part = [IoSlice::new(&message)];
        sendmsg::<()>(vmm.as_raw_fd(), &part, control, MsgFlags::empty(), None).unwrap();
    }

    #[test]
    fn a_channel_is_taken_answered_and_spoken_on() {
        let (ours, mut vmm) = UnixStream::pair().unwrap();
        let (theirs, mut kept) = UnixStream::pair().unwrap();
        assert_eq!(next(&ours), None, "nothing has arrived");
        give(&vmm, SET_BACKEND_REQ_FD, NEED_REPLY, &[theirs.as_raw_fd()]);
        assert_eq!(next(&ours), Some(Given::Channel));
        let (channel, answer) = take(&ours).unwrap();
        let channel = UnixStream::from(channel);
        answer.send(&ours).unwrap();
        let mut reply = [0; HEADER + 8];
        vmm.read_exact(&mut reply).unwrap();
        assert_eq!(reply[..HEADER], header(SET_BACKEND_REQ_FD, VERSION | REPLY, 8));
        assert_eq!(reply[HEADER..], [0; 8]);
        announce(&channel).unwrap();
        let mut told = [0; HEADER];
        kept.read_exact(&mut told).unwrap();
        assert_eq!(told, header(CONFIG_CHANGE_MSG, VERSION, 0));
        drop((kept, theirs));
        assert!(announce(&channel).is_err(), "nobody is there");
    }

    #[test]
    fn a_message_without_a_descriptor_or_with_two_is_refused() {
        let (ours, vmm) = UnixStream::pair().unwrap();
        give(&vmm, SET_BACKEND_REQ_FD, 0, &[]);
        assert!(take(&ours).is_err());
        give(&vmm, SET_LOG_FD, 0, &[vmm.as_raw_fd(), ours.as_raw_fd()]);
        assert_eq!(next(&ours), Some(Given::LogEvent));
        assert!(take(&ours).is_err());
    }
}
