//! Sleeping between two looks at chains exactly as those do who serve one: on the wait set of each, until the time that
//! it names. A test that looked again by itself would not see that a request is lost.

use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use vmseal_iofilter::stack::chain::Chain;

/// How long a chain may take that is not stuck.
const PATIENCE: Duration = Duration::from_secs(120);

/// Sleeps until one of the chains has something to do; does not if nothing is under way, or something is done.
pub fn sleep<'a>(chains: impl IntoIterator<Item = &'a mut Chain>) {
    let mut busy: Vec<_> = chains.into_iter().filter(|chain| chain.in_flight() > 0).collect();
    // All are armed before the first sleeps: one may have news for another.
    let idle = busy.iter_mut().fold(true, |idle, chain| chain.arm() & idle);
    if !busy.is_empty() && idle {
        let sets: Vec<_> = busy.iter().map(|chain| chain.wait_set()).collect();
        let events = sets.iter().map(|(event, _)| *event);
        let handles = sets.iter().filter_map(|(_, handle)| *handle);
        let mut fds: Vec<_> =
            events.chain(handles).map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let due = busy.iter().filter_map(|chain| chain.deadline()).min();
        let timeout = due.map_or(PATIENCE, |at| at.saturating_duration_since(Instant::now()));
        let woken = ppoll(&mut fds, Some(TimeSpec::from(timeout)), None).unwrap();
        assert!(woken > 0 || due.is_some(), "requests are under way, and nothing woke their owner");
    }
    busy.into_iter().for_each(|chain| chain.disarm(true));
}
