//! Sleeps between two passes of chains exactly as the threads that serve them do: on the wait set of each, until its
//! deadline. A test that polled would not notice that a request is lost.

use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use vmseal_iofilter::stack::chain::Chain;

/// A chain that takes longer is stuck.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Sleeps until one of the chains has work; does not if nothing is in flight, or a request is finished.
pub fn sleep<'a>(chains: impl IntoIterator<Item = &'a mut Chain>) {
    let mut busy: Vec<_> = chains.into_iter().filter(|chain| chain.in_flight() > 0).collect();
    // All are armed before the first sleeps: one may have news for another.
    let idle = busy.iter_mut().fold(true, |idle, chain| chain.arm() & idle);
    if !busy.is_empty() && idle {
        let sets: Vec<_> = busy.iter().map(|chain| chain.wait_set()).collect();
        let events = sets.iter().map(|(event, _)| (*event, PollFlags::POLLIN));
        let handles = sets.iter().filter_map(|(_, handle)| *handle);
        let mut fds: Vec<_> =
            events.chain(handles).map(|(fd, events)| PollFd::new(fd, events)).collect();
        let due = busy.iter().filter_map(|chain| chain.deadline()).min();
        let timeout = due.map_or(TIMEOUT, |at| at.saturating_duration_since(Instant::now()));
        let woken = ppoll(&mut fds, Some(TimeSpec::from(timeout)), None).unwrap();
        assert!(woken > 0 || due.is_some(), "requests are in flight, and nothing woke their owner");
    }
    busy.into_iter().for_each(|chain| chain.disarm(true));
}
