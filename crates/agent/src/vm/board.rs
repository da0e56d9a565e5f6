//! The state that the server reads: every VM's owner posts its VM here, and readers wait for news.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use vmseal_api::host::{HostState, STATE_WAIT_MAX, VmState};
use vmseal_api::id::{Incarnation, VmId};

/// What is known of all VMs, with a version that grows with every change.
pub struct Board {
    incarnation: Incarnation,
    vms: Mutex<BTreeMap<VmId, VmState>>,
    version: watch::Sender<u64>,
}

impl Board {
    /// An empty board of this life of the agent.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, vms: Mutex::default(), version: watch::Sender::new(1) }
    }

    /// Whose board it is.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Replaces what is known of a VM; none forgets it.
    pub fn post(&self, vm: VmId, state: Option<VmState>) {
        let mut vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = match state {
            Some(state) if vms.get(&vm) == Some(&state) => false,
            Some(state) => {
                vms.insert(vm, state);
                true
            }
            None => vms.remove(&vm).is_some(),
        };
        if changed {
            // Under the lock: no reader sees the new state under the old version.
            self.version.send_modify(|version| *version += 1);
        }
    }

    fn read(&self) -> HostState {
        let vms = self.vms.lock().unwrap_or_else(PoisonError::into_inner);
        HostState {
            incarnation: self.incarnation,
            version: *self.version.borrow(),
            vms: vms.values().cloned().collect(),
        }
    }

    /// The state, as soon as it is newer than `after`, at the latest after `wait`.
    pub async fn state(&self, after: Option<(Incarnation, u64)>, wait: Duration) -> HostState {
        if let Some((incarnation, version)) = after
            && incarnation == self.incarnation
        {
            let mut changes = self.version.subscribe();
            let news = changes.wait_for(|now| *now > version);
            // Without news in time the state as it is, is the answer.
            let _ = timeout(wait.min(STATE_WAIT_MAX), news).await;
        }
        self.read()
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{KeyState, Power};

    use super::*;

    fn off(vm: VmId) -> VmState {
        VmState {
            vm,
            power: Power::Off,
            key: KeyState::Missing,
            stopped: None,
            died: None,
            disks: vec![],
            notices: vec![],
            exports: vec![],
            request_id: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_for_news_and_no_longer_than_it_may() {
        let board = std::sync::Arc::new(Board::new(Incarnation::new()));
        let vm = VmId::new();
        let first = board.state(None, STATE_WAIT_MAX).await;
        let seen = Some((first.incarnation, first.version));

        let started = tokio::time::Instant::now();
        assert_eq!(board.state(seen, Duration::from_secs(3600)).await, first);
        assert_eq!(started.elapsed(), STATE_WAIT_MAX);

        let poster = board.clone();
        let late = async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            poster.post(vm, Some(off(vm)));
        };
        let (news, ()) = tokio::join!(board.state(seen, STATE_WAIT_MAX), late);
        assert_eq!((news.version, news.vms.len()), (first.version + 1, 1));

        board.post(vm, Some(off(vm)));
        assert_eq!(board.state(None, STATE_WAIT_MAX).await, news, "the same is no news");
        let stranger = Some((Incarnation::new(), 99));
        let started = tokio::time::Instant::now();
        assert_eq!(board.state(stranger, STATE_WAIT_MAX).await, news);
        assert_eq!(started.elapsed(), Duration::ZERO);
    }
}
