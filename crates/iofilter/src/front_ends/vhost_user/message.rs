//! Waiting for a whole message of a VMM.
//!
//! The code that reads a message reads header and body to their ends, however long that takes. A VMM that stops in
//! the middle would block the disk's thread for ever, even when that is told to stop. So before a message is read, this
//! module checks that all of it has arrived, without taking anything.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv};

use crate::stack::orders::{Orders, Woken};

/// The length of a header: request, flags, size of the body.
const HEADER: usize = 12;

/// The longest message to wait for: more than the protocol's largest. The header of a longer one is refused by the
/// code that reads it.
const MESSAGE_MAX: usize = HEADER + 4096;

/// How long the rest of a message may take. A VMM sends each with one call.
const REST_MAX: Duration = Duration::from_secs(5);

/// How soon to check again for the rest: the part that has arrived already makes the socket readable.
const LOOK_AGAIN_MILLISECONDS: u8 = 5;

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// A message, the connection's end or an error can be read without waiting.
    Message,
    /// Stop.
    Stop,
    /// The disk's chains are to be exchanged.
    Exchange,
    /// A part of a message, whose rest does not arrive.
    Part,
}

/// Waits for a whole message.
///
/// # Errors
/// The error of `poll`.
pub(super) fn wait(stream: &UnixStream, orders: &Orders) -> io::Result<Arrival> {
    let mut since = None;
    loop {
        match orders.wait(Some(stream.as_fd()))? {
            Woken::Stop => return Ok(Arrival::Stop),
            Woken::Exchange => return Ok(Arrival::Exchange),
            Woken::Readable => {}
        }
        if is_whole(stream) {
            return Ok(Arrival::Message);
        }
        if since.get_or_insert_with(Instant::now).elapsed() > REST_MAX {
            return Ok(Arrival::Part);
        }
        let mut stopping = [PollFd::new(orders.stop().event(), PollFlags::POLLIN)];
        match poll(&mut stopping, PollTimeout::from(LOOK_AGAIN_MILLISECONDS)) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether a message can be read without waiting: it is complete, or the connection ends after it.
fn is_whole(stream: &UnixStream) -> bool {
    let mut bytes = [0; MESSAGE_MAX];
    let peek = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
    let there = match recv(stream.as_raw_fd(), &mut bytes, peek) {
        Ok(there) => there,
        Err(Errno::EAGAIN | Errno::EINTR) => return false,
        // The reader gets the same error.
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
    use crate::stack::stop::Stop;

    /// The result of waiting while `then` is done.
    fn waiting(then: impl FnOnce(&mut UnixStream, &Stop)) -> Option<Arrival> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let stop = Arc::new(Stop::new().unwrap());
        let orders = Orders::new(Arc::clone(&stop)).unwrap();
        let (send, receive) = mpsc::channel();
        thread::spawn(move || send.send(wait(&ours, &orders).unwrap()));
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
        assert_eq!(long, Some(Arrival::Message), "refused when its header is read");
        let ended = waiting(|vmm, _| {
            vmm.write_all(&message(8)[..HEADER]).unwrap();
            vmm.shutdown(std::net::Shutdown::Both).unwrap();
        });
        assert_eq!(ended, Some(Arrival::Message), "the reader sees the end");
    }
}
