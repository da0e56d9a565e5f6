//! Sleeping between two looks at a chain exactly as those do who serve one: until its descriptor is readable, or the
//! time has come that it named. A test that looked again by itself would not see that a request is lost.

use std::time::Duration;

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use vmseal_iofilter::stack::chain::Chain;

/// How long a chain may take that is not stuck.
const PATIENCE: Duration = Duration::from_secs(120);

/// Sleeps until one of the chains has something to do; does not if nothing is under way.
pub fn sleep<'a>(chains: impl IntoIterator<Item = &'a Chain>) {
    let busy: Vec<&Chain> = chains.into_iter().filter(|chain| chain.in_flight() > 0).collect();
    let mut fds: Vec<PollFd<'_>> = busy
        .iter()
        .filter_map(|chain| chain.wait_handle())
        .map(|handle| PollFd::new(handle, PollFlags::POLLIN))
        .collect();
    let due = busy.iter().filter_map(|chain| chain.wake_after()).min();
    let something = !fds.is_empty() || due.is_some();
    assert!(busy.is_empty() || something, "requests are under way, and nothing wakes their owner");
    if !busy.is_empty() {
        let woken = ppoll(&mut fds, Some(TimeSpec::from(due.unwrap_or(PATIENCE))), None).unwrap();
        assert!(woken > 0 || due.is_some(), "requests are under way, and nothing woke their owner");
    }
}
