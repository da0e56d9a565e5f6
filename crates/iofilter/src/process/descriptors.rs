//! Reads a stream with the descriptors that come with it (SCM_RIGHTS, unix(7)).
//!
//! The kernel gives the descriptors with the first byte that was sent with them, and lets no call read beyond the bytes
//! of one message that has some. So when a line is read, its descriptors are here; a peer that sends the next line before
//! the answer may find them taken for this one's.

use std::cell::RefCell;
use std::io::{self, BufReader, IoSliceMut, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use vmseal_api::filter::DESCRIPTORS_MAX;

/// The most descriptors of one message (`SCM_MAX_FD` of Linux).
const MESSAGE_MAX: usize = 253;

/// The descriptors that have come and were not taken yet.
#[derive(Clone, Default)]
pub(super) struct Descriptors(Rc<RefCell<Vec<OwnedFd>>>);

impl Descriptors {
    /// Takes them, in the order in which they were sent.
    pub(super) fn take(&self) -> Vec<OwnedFd> {
        self.0.take()
    }
}

/// A stream, and where the descriptors are that come with it.
pub(super) struct Received<'a> {
    stream: &'a UnixStream,
    space: Vec<u8>,
    descriptors: Descriptors,
}

/// Reads a stream, and keeps the descriptors that come with it.
pub(super) fn reader(stream: &UnixStream) -> (BufReader<Received<'_>>, Descriptors) {
    let descriptors = Descriptors::default();
    let space = nix::cmsg_space!([RawFd; MESSAGE_MAX]);
    let received = Received { stream, space, descriptors: descriptors.clone() };
    (BufReader::new(received), descriptors)
}

impl Read for Received<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut parts = [IoSliceMut::new(bytes)];
        let (fd, flags) = (self.stream.as_raw_fd(), MsgFlags::MSG_CMSG_CLOEXEC);
        let message = loop {
            match recvmsg::<()>(fd, &mut parts, Some(&mut self.space), flags) {
                Err(Errno::EINTR) => {}
                other => break other?,
            }
        };
        let mut here = self.descriptors.0.borrow_mut();
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = part {
                // SAFETY: the kernel has just made them for this process, and nobody else has their numbers.
                here.extend(fds.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        if here.len() > DESCRIPTORS_MAX || message.flags.contains(MsgFlags::MSG_CTRUNC) {
            here.clear();
            return Err(io::Error::other("more descriptors came than a request can have"));
        }
        Ok(message.bytes)
    }
}
