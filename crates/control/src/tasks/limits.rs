//! How much of a kind happens at a time: long work on each host, calls of each key provider.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use super::step::Limit;

/// Long work (disks that are filled or written) on one host: more at a time make each other slower, and the
/// guests beside them.
pub const HOST_WORK: usize = 4;

/// Calls of one key provider: enough to keep a KMS busy, and few enough that other tasks of the server and other
/// clients of the KMS are served beside them.
pub const PROVIDER_CALLS: usize = 16;

/// The shares of hosts and providers.
#[derive(Default)]
pub(super) struct Limits(Mutex<HashMap<(&'static str, Uuid), Arc<Semaphore>>>);

impl Limits {
    /// The shares of a host or a provider.
    pub(super) fn of(&self, limit: Limit, whose: Uuid) -> Arc<Semaphore> {
        let (kind, shares) = match limit {
            Limit::HostWork => ("host", HOST_WORK),
            Limit::Provider => ("provider", PROVIDER_CALLS),
        };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(known.entry((kind, whose)).or_insert_with(|| Arc::new(Semaphore::new(shares))))
    }
}

/// Takes a share if there is one left.
pub(super) fn try_take(shares: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    Arc::clone(shares).try_acquire_owned().ok()
}
