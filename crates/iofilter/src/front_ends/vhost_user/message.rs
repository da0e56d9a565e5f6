//! Waiting for a whole message of a VMM.
//!
//! Whoever reads a message reads its header and its body to their ends, however long that takes. A VMM that stops in
//! the middle would have the disk's thread for ever, also when it is told to stop. So it is looked, without taking
//! anything, whether all of a message is there, before it is read.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};

use crate::stack::stop::Stop;

/// The length of a header: request, flags, size of the body.
const HEADER: usize = 12;

/// The longest message that is waited for: what the protocol's largest has, and more. Of a longer one the header is
/// refused by whoever reads it.
const MESSAGE_MAX: usize = HEADER + 4096;

/// How long a VMM may take for the rest of a message. It sends each by one call.
const REST_MAX: Duration = Duration::from_secs(5);

/// How soon to look again for the rest: what has come already makes the socket readable.
const LOOK_AGAIN_MILLISECONDS: u8 = 5;

/// What there is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// A message can be read without waiting, or the connection's end or trouble.
    Message,
    /// We are to stop.
    Stop,
    /// A part of a message, whose rest does not come.
    Part,
}

/// Waits for a whole message.
///
/// # Errors
/// What `poll` says.
pub(super) fn wait(stream: &UnixStream, stop: &Stop) -> io::Result<Arrival> {
    let mut since = None;
    while stop.wait_or_readable(stream.as_fd())? {
        if is_whole(stream) {
            return Ok(Arrival::Message);
        }
        if since.get_or_insert_with(Instant::now).elapsed() > REST_MAX {
            return Ok(Arrival::Part);
        }
        let mut stopping = [PollFd::new(stop.event(), PollFlags::POLLIN)];
        match poll(&mut stopping, PollTimeout::from(LOOK_AGAIN_MILLISECONDS)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Arrival::Stop)
}

/// Whether reading a message does not wait: it is there, or what is there is followed by the connection's end.
fn is_whole(stream: &UnixStream) -> bool {
    let mut bytes = [0; MESSAGE_MAX];
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let there = match recv(stream.as_raw_fd(), &mut bytes, peek) {
        Ok(there) => there,
        Err(Errno::EAGAIN | Errno::EINTR) => return false,
        // Whoever reads is told the same.
        Err(_) => return true,
    };
    let header = bytes.first_chunk::<HEADER>().filter(|_| there >= HEADER);
    let size = header.map(|header| {
        let [.., a, b, c, d] = *header;
        u32::from_ne_bytes([a, b, c, d]) as usize
    });
    let whole = size.is_some_and(|size| there >= HEADER + size || HEADER + size > MESSAGE_MAX);
    there == 0 || whole || is_hung_up(stream)
}

fn is_hung_up(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream.as_fd(), PollFlags::POLLHUP)];
    let _ = poll(&mut fds, PollTimeout::ZERO);
    fds[0].any().unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::Arc;
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// What comes of waiting while `then` is done.
    fn waiting(then: impl FnOnce(&mut UnixStream, &Stop)) -> Option<Arrival> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let stop = Arc::new(Stop::new().unwrap());
        let stopping = Arc::clone(&stop);
        let (send, receive) = mpsc::channel();
        thread::spawn(move || send.send(wait(&ours, &stopping).unwrap()));
        then(&mut theirs, &stop);
        let arrival = receive.recv_timeout(REST_MAX * 4).ok();
        drop(theirs);
        arrival
    }

    fn message(size: u32) -> Vec<u8> {
        [&1u32.to_ne_bytes()[..], &1u32.to_ne_bytes(), &size.to_ne_bytes(), &[0; 8]].concat()
    }

    #[test]
    fn a_vmm_that_sends_half_a_message_does_not_keep_the_thread_from_stopping() {
        for half in [1, HEADER - 1, HEADER, HEADER + 7] {
            let stopped = waiting(|vmm, stop| {
                vmm.write_all(&message(8)[..half]).unwrap();
                thread::sleep(Duration::from_millis(20));
                stop.ask();
            });
            assert_eq!(stopped, Some(Arrival::Stop), "after {half} bytes");
        }
        let given_up = waiting(|vmm, _| vmm.write_all(&message(8)[..HEADER]).unwrap());
        assert_eq!(given_up, Some(Arrival::Part));
    }

    #[test]
    fn a_message_is_waited_for_until_all_of_it_is_there_or_nothing_more_comes() {
        let slow = waiting(|vmm, _| {
            for byte in message(8) {
                vmm.write_all(&[byte]).unwrap();
            }
        });
        assert_eq!(slow, Some(Arrival::Message));
        let long = waiting(|vmm, _| vmm.write_all(&message(u32::MAX)[..HEADER]).unwrap());
        assert_eq!(long, Some(Arrival::Message), "refused by whoever reads the header");
        let ended = waiting(|vmm, _| {
            vmm.write_all(&message(8)[..HEADER]).unwrap();
            vmm.shutdown(std::net::Shutdown::Both).unwrap();
        });
        assert_eq!(ended, Some(Arrival::Message), "whoever reads learns of the end");
    }
}
