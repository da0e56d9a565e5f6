//! The keys of pools that the server has given: as the real host, it mounts no pool without, and a mount goes on with the one that it was
//! made with.

use std::path::Path;

use vmseal_api::datastore::{BetweenOsds, Messenger, MountFacts, RbdPool};
use vmseal_api::host::{DatastoreLocation, PoolKey, Remount};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_secret::SecretBytes;
use vmseal_secret::derive::{DeriveError, pool_key_fingerprint};

use super::{Inside, SimulatedHost};
use crate::storage::pool::{check_messenger, without_key};
use crate::storage::remount::{key_to_try, not_a_pool};

/// The fsid of the cluster that all pools are in, if it is not said that they are in another one.
const CLUSTER: &str = "3b9e0f5c-1a52-4d0b-8a53-2f7b7f3f2f11";

impl Inside {
    /// The pool is mounted at once.
    pub fn hold_pool_key(&mut self, offered: PoolKey) -> Result<(), Problem> {
        match self.agent.key_box.open_pool_key(&offered)? {
            Some(key) => {
                let fingerprint = pool_key_fingerprint(&key).map_err(|error| internal(&error))?;
                self.mounted_keys.entry(offered.path.clone()).or_insert(fingerprint);
                self.agent.pool_keys.insert(offered.path, key);
            }
            None => {
                self.mounted_keys.remove(&offered.path);
                self.mounts.remove(&offered.path);
                self.agent.pool_keys.remove(&offered.path);
            }
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

    /// Refuses a pool that somebody has mounted over connections in the clear, as the real host does.
    pub fn check_mounted_messenger(&self, location: &DatastoreLocation) -> Result<(), Problem> {
        let Some(pool) = location.pool() else { return Ok(()) };
        let path = location.path();
        check_messenger(path, pool, self.mounted_messengers.get(path).copied())
    }

    /// The fingerprint of the key that the mount of a pool uses.
    pub fn mounted_key(&self, location: &DatastoreLocation) -> Option<String> {
        location.pool()?;
        self.mounted_keys.get(location.path()).cloned()
    }

    /// How a pool is mounted: from now on as it is told, if nobody has asked before.
    pub fn mount(&mut self, location: &DatastoreLocation) -> Option<MountFacts> {
        let facts = self.facts_of(location.pool()?);
        Some(self.mounts.entry(location.path().to_owned()).or_insert(facts).clone())
    }

    fn facts_of(&self, pool: &RbdPool) -> MountFacts {
        let cluster = self.other_clusters.get(&pool.monitors);
        let cluster = cluster.map_or_else(|| CLUSTER.to_owned(), Clone::clone);
        MountFacts {
            way: pool.way(),
            messenger: pool.messenger,
            cluster,
            between_osds: Some(BetweenOsds::MayBeClear),
        }
    }

    pub fn remount(&mut self, remount: &Remount) -> Result<Option<String>, Problem> {
        let location = &remount.datastore.location;
        let Some(pool) = location.pool() else {
            return Err(not_a_pool(location.path()));
        };
        let facts = self.facts_of(pool);
        let key = key_to_try(&self.agent.key_box, remount)?;
        if let Some(cluster) = &remount.cluster
            && facts.cluster != *cluster
        {
            let what = format!("this is another cluster, with fsid {}", facts.cluster);
            return Err(Problem::new(ErrorCode::Unreachable, what));
        }
        if let Some(key) = key {
            return self.take_key(Some(&key)).map(|()| None);
        }
        self.may_mount(location)?;
        self.take_key(self.agent.pool_keys.get(location.path()))?;
        if !remount.only_try {
            self.mounted_messengers.remove(location.path());
        }
        let held = self.agent.pool_keys.get(location.path()).filter(|_| !remount.only_try);
        if let Some(key) = held {
            let fingerprint = pool_key_fingerprint(key).map_err(|error| internal(&error))?;
            self.mounted_keys.insert(location.path().to_owned(), fingerprint);
        }
        if !remount.only_try {
            self.mounts.insert(location.path().to_owned(), facts);
        }
        Ok(self.mounted_key(location))
    }

    /// Has the cluster look at a key.
    fn take_key(&self, key: Option<&SecretBytes>) -> Result<(), Problem> {
        if key.is_some_and(|key| self.refused_keys.iter().any(|refused| refused == key.expose())) {
            return Err(Problem::new(ErrorCode::Unreachable, "the cluster refuses the key"));
        }
        Ok(())
    }
}

fn internal(error: &DeriveError) -> Problem {
    Problem::new(ErrorCode::Internal, error.to_string())
}

impl SimulatedHost {
    /// The key of the pool that is mounted there, if this agent has it.
    #[must_use]
    pub fn pool_key(&self, path: &Path) -> Option<Vec<u8>> {
        self.inside().agent.pool_keys.get(path).map(|key| key.expose().to_vec())
    }

    /// Says that these monitors are of another cluster.
    pub fn set_other_cluster(&self, monitors: &str, fsid: &str) {
        self.inside().other_clusters.insert(monitors.to_owned(), fsid.to_owned());
    }

    /// Sets the keys that the cluster refuses.
    pub fn refuse_pool_keys(&self, keys: &[&str]) {
        self.inside().refused_keys = keys.iter().map(|key| key.as_bytes().to_vec()).collect();
    }

    /// Sets which key the mount of a pool uses: none is that of an earlier version, which does not say it.
    pub fn set_mounted_key(&self, path: &Path, fingerprint: Option<&str>) {
        let mut inside = self.inside();
        match fingerprint {
            Some(key) => drop(inside.mounted_keys.insert(path.to_owned(), key.to_owned())),
            None => drop(inside.mounted_keys.remove(path)),
        }
    }

    /// Somebody mounts a pool by hand, with this messenger.
    pub fn set_mounted_messenger(&self, path: &Path, messenger: Messenger) {
        self.inside().mounted_messengers.insert(path.to_owned(), messenger);
    }
}
