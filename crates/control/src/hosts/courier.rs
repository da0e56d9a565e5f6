//! Brings the keys that a host lacks, beside its monitor, and tries again those that could not be had:
//! after pauses that grow, so that neither a KMS nor a host is hammered.
//!
//! ```text
//!   lacked ──► under way ──► brought
//!                │   ▲
//!                ▼   │ after a pause, or when a provider can be used again
//!              failed
//! ```

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};
use vmseal_api::host::HostAgent;
use vmseal_api::id::VmId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use super::keys::{self, Purpose};
use super::{is_silence, registration};
use crate::backoff;
use crate::locks::Locks;
use crate::providers::Providers;
use crate::store::{Store, vms};

/// How many keys are under way to a host at a time.
const AT_ONCE: usize = 4;

/// How long the monitor waits for keys before it shows what is: those of a provider that answers are
/// there by then, and nobody sees a VM locked for the blink of an eye.
const PATIENCE: Duration = Duration::from_secs(2);

/// How soon a key that could not be had is asked for again, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));

/// What a delivery needs.
pub(super) struct Delivery {
    pub(super) vm: VmId,
    pub(super) purpose: Purpose,
    pub(super) key_box: String,
    pub(super) store: Arc<Store>,
    pub(super) providers: Arc<Providers>,
    pub(super) agent: Arc<dyn HostAgent>,
    pub(super) locks: Arc<Locks<VmId>>,
}

/// Why a key was not brought.
enum Undelivered {
    /// There is no key to be had, or the host does not take it.
    Problem(Problem),
    /// The host does not answer.
    Silence(Problem),
}

impl<E: Into<Problem>> From<E> for Undelivered {
    fn from(error: E) -> Self {
        Self::Problem(error.into())
    }
}

struct Failure {
    problem: Problem,
    /// In a row.
    failures: u32,
    again: Instant,
}

/// The deliveries to one host, in one life of its agent.
pub(super) struct Courier {
    under_way: JoinSet<(VmId, Result<(), Undelivered>)>,
    whose: HashSet<VmId>,
    failed: HashMap<VmId, Failure>,
    places: Arc<Semaphore>,
}

impl Default for Courier {
    fn default() -> Self {
        Self {
            under_way: JoinSet::new(),
            whose: HashSet::new(),
            failed: HashMap::new(),
            places: Arc::new(Semaphore::new(AT_ONCE)),
        }
    }
}

impl Courier {
    /// Whether a VM's key may be sent for now.
    pub(super) fn may_begin(&self, vm: VmId) -> bool {
        let waits = self.failed.get(&vm).is_some_and(|failure| failure.again > Instant::now());
        !waits && !self.whose.contains(&vm)
    }

    /// Sends for a VM's key.
    pub(super) fn begin(&mut self, delivery: Delivery) {
        let places = Arc::clone(&self.places);
        self.whose.insert(delivery.vm);
        self.under_way.spawn(async move {
            let _place = places.acquire_owned().await;
            (delivery.vm, delivery.bring().await)
        });
    }

    /// Notes that a VM's key could not be brought.
    pub(super) fn failed(&mut self, vm: VmId, problem: Problem) {
        let failures = self.failed.get(&vm).map_or(0, |failure| failure.failures).saturating_add(1);
        let again = Instant::now() + backoff::pause(RETRY.0, RETRY.1, failures);
        self.failed.insert(vm, Failure { problem, failures, again });
    }

    /// Forgets what failed for VMs that lack no key any more.
    pub(super) fn keep_only(&mut self, lacking: &HashSet<VmId>) {
        self.failed.retain(|vm, _| lacking.contains(vm));
    }

    /// Forgets what failed: it may go better now.
    pub(super) fn try_all_again(&mut self) {
        self.failed.clear();
    }

    /// Why keys could not be brought.
    pub(super) fn problems(&self) -> HashMap<VmId, Problem> {
        self.failed.iter().map(|(vm, failure)| (*vm, failure.problem.clone())).collect()
    }

    /// Waits for the end of a delivery, or until it is time to try one again.
    ///
    /// # Errors
    /// The host does not answer.
    pub(super) async fn next(&mut self) -> Result<(), Problem> {
        let due = self.failed.iter().filter(|(vm, _)| !self.whose.contains(vm));
        let due = due.map(|(_, failure)| failure.again).min();
        let time = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            Some(ended) = self.under_way.join_next() => ended,
            () = time => return Ok(()),
        };
        match ended {
            Ok((vm, outcome)) => {
                self.whose.remove(&vm);
                match outcome {
                    Ok(()) => drop(self.failed.remove(&vm)),
                    Err(Undelivered::Silence(problem)) => return Err(problem),
                    Err(Undelivered::Problem(problem)) => {
                        tracing::warn!(%vm, %problem, "it stays locked");
                        self.failed(vm, problem);
                    }
                }
            }
            // It panicked, which is in the log; the VM is not sent for again in this life of the agent.
            Err(error) => tracing::error!(%error, "a delivery ended"),
        }
        Ok(())
    }

    /// Waits until nothing is under way, but not for long.
    ///
    /// # Errors
    /// The host does not answer.
    pub(super) async fn patiently(&mut self) -> Result<(), Problem> {
        let all = async {
            while !self.under_way.is_empty() {
                self.next().await?;
            }
            Ok(())
        };
        timeout(PATIENCE, all).await.unwrap_or(Ok(()))
    }
}

impl Delivery {
    async fn bring(&self) -> Result<(), Undelivered> {
        let Some(vm) = vms::get(&mut *self.store.read().await?, self.vm).await? else {
            return Ok(());
        };
        let Some(key) = vm.key.clone() else { return Ok(()) };
        let provider = self.providers.get(key.provider)?;
        // It has a watch, which tells when it can be used again.
        if let Some(fault) = provider.known_fault() {
            return Err(fault.into());
        }
        let kek = keys::fetch(&self.providers, &vm, &key, self.purpose).await?;
        let _unchanged = self.locks.lock(self.vm).await;
        // A task may have begun to remove it since, or to give it another key.
        let now = registration::read(&self.store, self.vm).await?;
        let same = now.is_some_and(|(now, _)| {
            now.lifecycle == Lifecycle::Ready && now.key.as_ref() == Some(&key)
        });
        if !same {
            return Ok(());
        }
        let (store, agent) = (&self.store, &*self.agent);
        keys::hand_over(store, agent, &self.key_box, &vm, &key, kek).await.map_err(|problem| {
            if is_silence(&problem) {
                Undelivered::Silence(problem)
            } else {
                Undelivered::Problem(problem)
            }
        })
    }
}
