//! Using a chain from a thread that may sleep: import, shutdown.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use crate::chain::Chain;
use crate::request::{IoError, Operation};

/// Waits for everything that is under way; the first error, if there was one.
///
/// # Errors
/// [`IoError`].
pub fn drain(chain: &mut Chain) -> Result<(), IoError> {
    let mut result = Ok(());
    loop {
        chain.poll();
        while let Some(done) = chain.next_done() {
            result = result.and(done.result);
        }
        if chain.in_flight() == 0 {
            return result;
        }
        wait(chain)?;
    }
}

/// Makes durable what was written.
///
/// # Errors
/// [`IoError`].
pub fn flush(chain: &mut Chain) -> Result<(), IoError> {
    let id = chain.begin().ok_or(IoError::Overload)?;
    chain.submit(id, Operation::Flush, 0, 0, 0);
    drain(chain)
}

/// Sleeps until the backend has something, or the chain wants to be looked at.
fn wait(chain: &Chain) -> Result<(), IoError> {
    let handle = chain.wait_handle();
    let mut fds: Vec<PollFd<'_>> =
        handle.iter().map(|handle| PollFd::new(*handle, PollFlags::POLLIN)).collect();
    let timeout = chain.wake_after().map(TimeSpec::from);
    match ppoll(&mut fds, timeout, None) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(error) => Err(IoError::Device(error as i32)),
    }
}
