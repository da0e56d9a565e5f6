//! Delivers the keys that a host lacks, concurrently with its monitor, and retries those that were unavailable:
//! with backoff, so that neither a KMS nor a host is overloaded.
//!
//! ```text
//!   lacked ──► in flight ──► delivered
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

/// How many deliveries to a host are in flight at a time.
const IN_FLIGHT_MAX: usize = 4;

/// How long the monitor waits for keys before it shows the host's state: keys of a provider that answers have
/// arrived by then, so a VM is not shown as locked for a moment.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause before an unavailable key is requested again, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(300));

/// The context of a delivery.
pub(super) struct Delivery {
    pub(super) vm: VmId,
    pub(super) purpose: Purpose,
    pub(super) key_box: String,
    pub(super) store: Arc<Store>,
    pub(super) providers: Arc<Providers>,
    pub(super) agent: Arc<dyn HostAgent>,
    pub(super) locks: Arc<Locks<VmId>>,
}

/// Why a key was not delivered.
enum DeliveryError {
    /// The key is unavailable, or the host refuses it.
    Problem(Problem),
    /// The host does not answer.
    Silence(Problem),
}

impl<E: Into<Problem>> From<E> for DeliveryError {
    fn from(error: E) -> Self {
        Self::Problem(error.into())
    }
}

struct FailedDelivery {
    problem: Problem,
    /// In a row.
    failures: u32,
    again: Instant,
}

/// The deliveries to one host, in one run of its agent.
pub(super) struct KeyDeliveries {
    work: JoinSet<(VmId, Result<(), DeliveryError>)>,
    in_flight: HashSet<VmId>,
    failed: HashMap<VmId, FailedDelivery>,
    places: Arc<Semaphore>,
}

impl Default for KeyDeliveries {
    fn default() -> Self {
        Self {
            work: JoinSet::new(),
            in_flight: HashSet::new(),
            failed: HashMap::new(),
            places: Arc::new(Semaphore::new(IN_FLIGHT_MAX)),
        }
    }
}

impl KeyDeliveries {
    /// Whether a delivery of a VM's key may start now.
    pub(super) fn may_begin(&self, vm: VmId) -> bool {
        let waits = self.failed.get(&vm).is_some_and(|failure| failure.again > Instant::now());
        !waits && !self.in_flight.contains(&vm)
    }

    /// Starts the delivery of a VM's key.
    pub(super) fn begin(&mut self, delivery: Delivery) {
        let places = Arc::clone(&self.places);
        self.in_flight.insert(delivery.vm);
        self.work.spawn(async move {
            let _place = places.acquire_owned().await;
            (delivery.vm, delivery.deliver().await)
        });
    }

    /// Records that a VM's key could not be delivered.
    pub(super) fn failed(&mut self, vm: VmId, problem: Problem) {
        let failures = self.failed.get(&vm).map_or(0, |failure| failure.failures).saturating_add(1);
        let again = Instant::now() + backoff::pause(RETRY.0, RETRY.1, failures);
        self.failed.insert(vm, FailedDelivery { problem, failures, again });
    }

    /// Forgets failures of VMs that have their key now.
    pub(super) fn keep_only(&mut self, lacking: &HashSet<VmId>) {
        self.failed.retain(|vm, _| lacking.contains(vm));
    }

    /// Forgets the failure of a VM, so that it is retried now.
    pub(super) fn try_again(&mut self, vm: VmId) {
        self.failed.remove(&vm);
    }

    /// Forgets all failures, so that they are retried now.
    pub(super) fn try_all_again(&mut self) {
        self.failed.clear();
    }

    /// Why keys could not be delivered.
    pub(super) fn problems(&self) -> HashMap<VmId, Problem> {
        self.failed.iter().map(|(vm, failure)| (*vm, failure.problem.clone())).collect()
    }

    /// Waits for the end of a delivery, or until one is due for a retry.
    ///
    /// # Errors
    /// The host does not answer.
    pub(super) async fn next(&mut self) -> Result<(), Problem> {
        let due = self.failed.iter().filter(|(vm, _)| !self.in_flight.contains(vm));
        let due = due.map(|(_, failure)| failure.again).min();
        let time = async {
            match due {
                Some(due) => sleep_until(due).await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            Some(ended) = self.work.join_next() => ended,
            () = time => return Ok(()),
        };
        match ended {
            Ok((vm, outcome)) => {
                self.in_flight.remove(&vm);
                match outcome {
                    Ok(()) => drop(self.failed.remove(&vm)),
                    Err(DeliveryError::Silence(problem)) => return Err(problem),
                    Err(DeliveryError::Problem(problem)) => {
                        tracing::warn!(%vm, %problem, "it stays locked");
                        self.failed(vm, problem);
                    }
                }
            }
            // It panicked, which is in the log; the key is not delivered again in this run of the agent.
            Err(error) => tracing::error!(%error, "a delivery ended"),
        }
        Ok(())
    }

    /// Whether no delivery is in flight.
    pub(super) fn are_done(&self) -> bool {
        self.work.is_empty()
    }

    /// Waits until no delivery is in flight, but not for long.
    ///
    /// # Errors
    /// The host does not answer.
    pub(super) async fn settle(&mut self) -> Result<(), Problem> {
        let all = async {
            while !self.are_done() {
                self.next().await?;
            }
            Ok(())
        };
        timeout(SETTLE_TIMEOUT, all).await.unwrap_or(Ok(()))
    }
}

impl Delivery {
    async fn deliver(&self) -> Result<(), DeliveryError> {
        let Some(vm) = vms::get(&mut *self.store.read().await?, self.vm).await? else {
            return Ok(());
        };
        let Some(key) = vm.key.clone() else { return Ok(()) };
        let provider = self.providers.get(key.provider)?;
        // Its watch reports when it can be used again.
        if let Some(fault) = provider.known_fault() {
            return Err(fault.into());
        }
        let kek = keys::fetch(&self.providers, &vm, &key, self.purpose).await?;
        let _unchanged = self.locks.lock(self.vm).await;
        // A task may have begun to remove the VM since, or to give it another key or another host.
        let now = registration::read(&self.store, self.vm).await?;
        let same = now.is_some_and(|(now, _)| {
            now.lifecycle == Lifecycle::Ready
                && now.key.as_ref() == Some(&key)
                && now.host == vm.host
        });
        if !same {
            return Ok(());
        }
        let (store, agent) = (&self.store, &*self.agent);
        keys::hand_over(store, agent, &self.key_box, &vm, &key, kek).await.map_err(|problem| {
            if is_silence(&problem) {
                DeliveryError::Silence(problem)
            } else {
                DeliveryError::Problem(problem)
            }
        })
    }
}
