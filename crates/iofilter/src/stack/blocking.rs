//! Using a chain from a thread that may sleep: import, shutdown.

use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, ppoll};
use nix::sys::signal::SigSet;
use nix::sys::time::TimeSpec;

use crate::stack::chain::Chain;
use crate::stack::memory::Segment;
use crate::stack::request::{IoError, Operation};

/// How long to sleep between two checks when the system refuses to wait for requests in flight.
pub const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Waits for all requests in flight; returns the first error, if there was one. Nothing is in flight when it
/// returns, even after an error: the memory of requests may be freed.
///
/// # Errors
/// [`IoError`].
pub fn drain(chain: &mut Chain) -> Result<(), IoError> {
    drain_by(chain, ppoll)
}

/// As [`drain`], with `sleep` as the system call.
fn drain_by(
    chain: &mut Chain,
    sleep: impl Fn(&mut [PollFd<'_>], Option<TimeSpec>, Option<SigSet>) -> Result<i32, Errno>,
) -> Result<(), IoError> {
    let mut result = Ok(());
    let has_drained = |chain: &mut Chain| {
        while let Some(done) = chain.next_done() {
            result = result.and(done.result);
        }
        chain.is_idle()
    };
    wait_by(chain, has_drained, sleep);
    result
}

/// Waits until `has_come` says that what the caller waits for has come. It fetches what is done ([`Chain::next_done`]), and says yes at
/// the latest when nothing is in flight.
pub fn wait_until(chain: &mut Chain, has_come: impl FnMut(&mut Chain) -> bool) {
    wait_by(chain, has_come, ppoll);
}

/// As [`wait_until`], with `sleep` as the system call.
fn wait_by(
    chain: &mut Chain,
    mut has_come: impl FnMut(&mut Chain) -> bool,
    sleep: impl Fn(&mut [PollFd<'_>], Option<TimeSpec>, Option<SigSet>) -> Result<i32, Errno>,
) {
    let mut failed = false;
    loop {
        chain.poll();
        if has_come(chain) {
            return;
        }
        if let Err(error) = chain.wait_by([], None, &sleep)
            && error != Errno::EINTR
        {
            if !std::mem::replace(&mut failed, true) {
                tracing::error!(%error, "cannot wait for the disk; checking every millisecond");
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

/// Makes earlier writes durable, for this process: what a guest asks for is submitted by its front end.
///
/// # Errors
/// [`IoError`].
pub fn flush(chain: &mut Chain) -> Result<(), IoError> {
    let id = chain.begin().ok_or(IoError::Overload)?;
    chain.set_internal(id);
    chain.submit(id, Operation::Flush, 0, 0, 0);
    drain(chain)
}

/// Has a range read as zeroes, and waits until that is done. `unmap`: whether its room may be given back.
///
/// # Errors
/// [`IoError`].
pub fn write_zeroes(chain: &mut Chain, at: u64, length: u64, unmap: bool) -> Result<(), IoError> {
    let id = chain.begin().ok_or(IoError::Overload)?;
    chain.submit(id, Operation::WriteZeroes { unmap }, at, length, 0);
    drain(chain)
}

/// Reads or writes bytes at `at`, and waits until that is done.
///
/// # Errors
/// [`IoError`].
pub fn move_bytes(
    chain: &mut Chain,
    operation: Operation,
    bytes: &mut [u8],
    at: u64,
) -> Result<(), IoError> {
    let id = chain.begin().ok_or(IoError::Overload)?;
    // SAFETY: the bytes stay borrowed until `drain` has seen the request complete.
    let segment = unsafe { Segment::new(bytes.as_mut_ptr(), bytes.len()) };
    chain.data_mut(id).push(segment);
    chain.submit(id, operation, at, 0, 0);
    drain(chain)
}

/// How much one request of a large read takes, in bytes: the first is decrypted while storage reads the next. A device's own best is not
/// much larger.
const READ_PART: usize = 256 << 10;

/// Reads into `bytes` from `at` on, by several requests at a time.
///
/// # Errors
/// [`IoError`].
pub fn read_in_parts(chain: &mut Chain, bytes: &mut [u8], at: u64) -> Result<(), IoError> {
    let mut result = Ok(());
    for (number, part) in bytes.chunks_mut(READ_PART).enumerate() {
        let Some(id) = chain.begin() else {
            result = Err(IoError::Overload);
            break;
        };
        // SAFETY: the bytes stay borrowed until `drain` has seen all requests complete.
        let segment = unsafe { Segment::new(part.as_mut_ptr(), part.len()) };
        chain.data_mut(id).push(segment);
        chain.submit(id, Operation::Read, at + (number * READ_PART) as u64, 0, 0);
    }
    drain(chain).and(result)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::delay::Delay;
    use crate::stack::layer::{Layer, Place};
    use crate::storage::mem::MemDisk;

    #[test]
    fn nothing_is_under_way_when_waiting_for_it_has_failed() {
        let delay = vmseal_api::filter::DelaySpec {
            operations: Vec::new(),
            microseconds: 20_000,
            jitter_microseconds: 0,
            reorders: false,
            seed: 0,
        };
        let filter = Delay::new(delay).filter(&Place::simple(1 << 20)).unwrap();
        let mut chain = Chain::new(1 << 20, false, vec![filter], MemDisk::new(0).queue()).unwrap();
        let id = chain.begin().unwrap();
        chain.submit(id, Operation::Flush, 0, 0, 0);
        let drained = drain_by(&mut chain, |_, _, _| Err(Errno::ENOMEM));
        assert_eq!((drained, chain.in_flight()), (Ok(()), 0));
    }
}
