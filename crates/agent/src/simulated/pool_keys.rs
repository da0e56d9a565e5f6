//! The keys of pools that the server has given: as the real host, it mounts no pool without.

use std::path::Path;

use vmseal_api::host::{DatastoreLocation, PoolKey};
use vmseal_api::problem::Problem;

use super::{Inside, SimulatedHost};
use crate::storage::pool::without_key;

impl Inside {
    pub fn hold_pool_key(&mut self, offered: PoolKey) -> Result<(), Problem> {
        match self.agent.key_box.open_pool_key(&offered)? {
            Some(key) => drop(self.agent.pool_keys.insert(offered.path, key)),
            None => drop(self.agent.pool_keys.remove(&offered.path)),
        }
        Ok(())
    }

    /// Checks that a pool could be mounted, where the place is one.
    pub fn may_mount(&self, location: &DatastoreLocation) -> Result<(), Problem> {
        match location.pool() {
            Some(pool)
                if pool.keyring.is_none()
                    && !self.agent.pool_keys.contains_key(location.path()) =>
            {
                Err(without_key(pool))
            }
            _ => Ok(()),
        }
    }
}

impl SimulatedHost {
    /// The key of the pool that is mounted there, if this agent has it.
    #[must_use]
    pub fn pool_key(&self, path: &Path) -> Option<Vec<u8>> {
        self.inside().agent.pool_keys.get(path).map(|key| key.expose().to_vec())
    }
}
