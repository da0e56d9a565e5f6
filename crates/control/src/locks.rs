//! One lock for each key.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

/// One lock for each `K`.
pub struct Locks<K>(Mutex<HashMap<K, Arc<tokio::sync::Mutex<()>>>>);

impl<K> Default for Locks<K> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash> Locks<K> {
    /// Waits for the lock of `of`, after those that waited before.
    pub async fn lock(&self, of: K) -> OwnedMutexGuard<()> {
        self.of(of).lock_owned().await
    }

    /// Takes the lock of `of` if nobody has it.
    pub fn try_lock(&self, of: K) -> Option<OwnedMutexGuard<()>> {
        self.of(of).try_lock_owned().ok()
    }

    fn of(&self, of: K) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that are neither held nor waited for.
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        Arc::clone(locks.entry(of).or_default())
    }
}
