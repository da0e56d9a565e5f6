//! Moves scatter lists through a socket without waiting.

use std::io;
use std::os::fd::AsRawFd;

use crate::stack::memory::{SEGMENTS_MAX, Segment};

/// The result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// This many bytes, not 0.
    Bytes(usize),
    /// Nothing; the call would have to wait.
    Nothing,
    /// The peer sends no more.
    Closed,
}

/// Receives into the segments, in their order. There is room in at least one of them.
///
/// # Errors
/// The connection is broken.
pub fn receive(stream: &impl AsRawFd, to: &[Segment]) -> io::Result<Moved> {
    transfer(to, |message| {
        // SAFETY: the message describes segments, whose makers promised their memory.
        unsafe { libc::recvmsg(stream.as_raw_fd(), message, libc::MSG_DONTWAIT) }
    })
}

/// Sends the segments, in their order. There is something in at least one of them.
///
/// # Errors
/// The connection is broken.
pub fn send(stream: &impl AsRawFd, from: &[Segment]) -> io::Result<Moved> {
    transfer(from, |message| {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: as in `receive`; the kernel only reads.
        unsafe { libc::sendmsg(stream.as_raw_fd(), message, flags) }
    })
}

fn transfer(
    list: &[Segment],
    mut call: impl FnMut(&mut libc::msghdr) -> isize,
) -> io::Result<Moved> {
    let list = &list[..list.len().min(SEGMENTS_MAX)];
    // SAFETY: all-zero is a valid value of the structure: no name, no list, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    // `Segment` is an iovec (transparent); the kernel does not change the list.
    message.msg_iov = list.as_ptr().cast::<libc::iovec>().cast_mut();
    message.msg_iovlen = list.len();
    loop {
        let moved = call(&mut message);
        if moved > 0 {
            return Ok(Moved::Bytes(moved as usize));
        }
        if moved == 0 {
            return Ok(Moved::Closed);
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock => return Ok(Moved::Nothing),
            _ => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn what_is_sent_from_pieces_arrives_in_others_and_nobody_waits() {
        let (one, other) = UnixStream::pair().unwrap();
        let (mut from, mut to) = ([1u8, 2, 3, 4], [0u8; 4]);
        // SAFETY: both arrays outlive the segments and are not used through references meanwhile.
        let (from, into) =
            unsafe { (Segment::new(from.as_mut_ptr(), 4), Segment::new(to.as_mut_ptr(), 4)) };
        assert_eq!(receive(&one, &[into]).unwrap(), Moved::Nothing);
        assert_eq!(send(&other, &[from.part(2, 2), from.part(0, 1)]).unwrap(), Moved::Bytes(3));
        assert_eq!(receive(&one, &[into.part(3, 1), into.part(0, 3)]).unwrap(), Moved::Bytes(3));
        assert_eq!(to, [4, 1, 0, 3]);
        drop(other);
        assert_eq!(receive(&one, &[into]).unwrap(), Moved::Closed);
        assert!(send(&one, &[into]).is_err(), "an error, not a signal");
    }
}
