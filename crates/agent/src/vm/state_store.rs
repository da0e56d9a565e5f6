//! The state that the server reads: the owner of each VM publishes its state here, and readers wait for
//! changes.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use vmseal_api::host::{HostState, STATE_WAIT_MAX, StateChange, VmState};
use vmseal_api::id::{Incarnation, VmId};

/// The most ended VMs that are remembered: as many as a host can have. A reader that is further behind gets
/// the full state.
const GONE_MAX: usize = 1024;

/// The state of all VMs, with a generation that grows with every change.
pub struct StateStore {
    incarnation: Incarnation,
    known: Mutex<Known>,
    generation: watch::Sender<u64>,
}

#[derive(Default)]
struct Known {
    /// Each VM's state, and the generation of its last change.
    vms: BTreeMap<VmId, (u64, VmState)>,
    /// The generations at which VMs were removed.
    gone: BTreeMap<u64, VmId>,
    /// A reader with an earlier generation gets the full state: a later removal is forgotten.
    oldest: u64,
}

impl StateStore {
    /// An empty store of this run of the agent.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self { incarnation, known: Mutex::default(), generation: watch::Sender::new(1) }
    }

    /// The run of the agent that it belongs to.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// Replaces a VM's state; none removes it.
    pub fn publish(&self, vm: VmId, state: Option<VmState>) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let next = *self.generation.borrow() + 1;
        match state {
            Some(state) if known.vms.get(&vm).is_some_and(|(_, old)| *old == state) => return,
            Some(state) => {
                known.vms.insert(vm, (next, state));
                known.gone.retain(|_, gone| *gone != vm);
            }
            None => {
                if known.vms.remove(&vm).is_none() {
                    return;
                }
                known.gone.insert(next, vm);
                while known.gone.len() > GONE_MAX
                    && let Some((forgotten, _)) = known.gone.pop_first()
                {
                    known.oldest = forgotten;
                }
            }
        }
        // Under the lock: no reader sees the new state with the old generation.
        self.generation.send_replace(next);
    }

    fn read(&self, after: Option<u64>) -> StateChange {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let generation = *self.generation.borrow();
        let since = after.filter(|after| (known.oldest..=generation).contains(after));
        let is_news = |then: u64| since.is_none_or(|since| then > since);
        let changed = known.vms.values().filter(|(then, _)| is_news(*then));
        StateChange {
            incarnation: self.incarnation,
            generation,
            since,
            vms: changed.map(|(_, state)| state.clone()).collect(),
            gone: since.map_or_else(Vec::new, |since| {
                known.gone.range(since + 1..).map(|(_, vm)| *vm).collect()
            }),
        }
    }

    /// The changes since `after`, as soon as there are any, at the latest after `wait`.
    pub async fn state(&self, after: Option<(Incarnation, u64)>, wait: Duration) -> StateChange {
        let after = after.filter(|(incarnation, _)| *incarnation == self.incarnation);
        if let Some((_, generation)) = after {
            let mut changes = self.generation.subscribe();
            let news = changes.wait_for(|now| *now > generation);
            // On a time-out the answer is that nothing has changed.
            let _ = timeout(wait.min(STATE_WAIT_MAX), news).await;
        }
        self.read(after.map(|(_, generation)| generation))
    }

    /// The state of all VMs now.
    #[must_use]
    pub fn now(&self) -> HostState {
        let StateChange { incarnation, generation, vms, .. } = self.read(None);
        HostState { incarnation, generation, vms }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{KeyState, Power};

    use super::*;

    fn off(vm: VmId) -> VmState {
        VmState::new(vm, Power::Off, KeyState::Missing)
    }

    #[tokio::test(start_paused = true)]
    async fn a_reader_waits_for_news_and_no_longer_than_it_may() {
        let store = std::sync::Arc::new(StateStore::new(Incarnation::new()));
        let vm = VmId::new();
        let first = store.now();
        let seen = Some(first.known());

        let started = tokio::time::Instant::now();
        let none = store.state(seen, Duration::from_secs(3600)).await;
        assert_eq!(HostState::changed(Some(&first), none), Some(first.clone()));
        assert_eq!(started.elapsed(), STATE_WAIT_MAX);

        let publisher = store.clone();
        let late = async move {
            tokio::time::sleep(Duration::from_secs(2)).await;
            publisher.publish(vm, Some(off(vm)));
        };
        let (news, ()) = tokio::join!(store.state(seen, STATE_WAIT_MAX), late);
        assert_eq!((news.generation, news.vms.len()), (first.generation + 1, 1));

        store.publish(vm, Some(off(vm)));
        assert_eq!(
            store.now().generation,
            news.generation,
            "an equal state was published as a change"
        );
        let stranger = Some((Incarnation::new(), 99));
        let started = tokio::time::Instant::now();
        let all = store.state(stranger, STATE_WAIT_MAX).await;
        assert_eq!((all.since, &all.vms), (None, &news.vms));
        assert_eq!(started.elapsed(), Duration::ZERO);
    }

    #[tokio::test]
    async fn a_reader_gets_the_changes_and_the_full_state_when_it_is_too_far_behind() {
        let store = StateStore::new(Incarnation::new());
        let [one, two, three] = [(); 3].map(|()| VmId::new());
        for vm in [one, two, three] {
            store.publish(vm, Some(off(vm)));
        }
        let before = store.now();
        store.publish(one, Some(VmState { power: Power::Running, ..off(one) }));
        store.publish(two, None);
        let change = store.state(Some(before.known()), Duration::ZERO).await;
        assert_eq!(change.since, Some(before.generation));
        assert_eq!(change.vms.iter().map(|state| state.vm).collect::<Vec<_>>(), [one]);
        assert_eq!(change.gone, [two]);
        assert_eq!(HostState::changed(Some(&before), change), Some(store.now()));
        // A VM that comes back is not removed.
        store.publish(two, Some(off(two)));
        let change = store.state(Some(before.known()), Duration::ZERO).await;
        assert!(change.gone.is_empty() && change.vms.len() == 2, "{change:?}");
        let later = Some((store.incarnation(), store.now().generation + 1));
        let beyond = store.read(later.map(|(_, generation)| generation));
        assert_eq!(beyond.since, None, "the generation is unknown");
        for _ in 0..=GONE_MAX {
            let vm = VmId::new();
            store.publish(vm, Some(off(vm)));
            store.publish(vm, None);
        }
        let all = store.state(Some(before.known()), Duration::ZERO).await;
        assert_eq!((all.since, all.vms.len()), (None, 3));
    }
}
