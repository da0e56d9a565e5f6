//! Concurrency limits: long work on each host, calls of each key provider.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use super::step::Limit;

/// Long work (filling or writing disks) on one host: more at a time slow down each other and the guests.
pub const HOST_WORK: usize = 4;

/// Calls of one key provider: enough to keep a KMS busy, and few enough to leave capacity for other tasks of the
/// server and other clients of the KMS.
pub const PROVIDER_CALLS: usize = 16;

/// The permits of hosts and providers.
#[derive(Default)]
pub(super) struct Limits(Mutex<HashMap<(&'static str, Uuid), Arc<Semaphore>>>);

impl Limits {
    /// The permits of a host or a provider.
    pub(super) fn of(&self, limit: Limit, whose: Uuid) -> Arc<Semaphore> {
        let (kind, shares) = match limit {
            Limit::HostWork => ("host", HOST_WORK),
            Limit::Provider => ("provider", PROVIDER_CALLS),
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry((kind, whose)).or_insert_with(|| Arc::new(Semaphore::new(shares))))
    }
}

/// Takes a permit if one is left.
pub(super) fn try_take(shares: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    Arc::clone(shares).try_acquire_owned().ok()
}
