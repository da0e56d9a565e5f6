//! A pool of a real Ceph cluster, and the user that a test has for it: in a cluster of the test's own, or in one that tests share which
//! run at the same time.
//!
//! ```text
//!  the first test of a shared cluster ─► it comes up, while others wait ─┐
//!  each test of it ◄────────────────── a pool and a user of its own ◄────┘
//!  the end of each, also by a panic ─► its pool and its user go ─► with those of the last one the cluster ends
//! ```
//! A cluster is shared by tests that leave its daemons alone: none of them kills, stops or configures any. Each that runs adds 32
//! placement groups in three copies on three OSDs, of which one may have 500 (`mon_max_pg_per_osd`).
//!
//! Tests begin in the order of their names, so modules whose tests share a cluster have names beside each other.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use serde_json::Value;

use crate::ceph::{Cluster, said};

/// The pool that every cluster has from its beginning.
const USUAL: &str = "vmseal";

/// The erasure-coded pool of a cluster, for data.
const CODED: &str = "coded";

/// A cluster that tests share, as long as one of them has it. Who holds this may change which pools it has: `pool add` and `lab run`
/// refuse to run beside each other, and wait for as many placement groups as the cluster had when they began.
type Shared = Mutex<Weak<Cluster>>;

/// One for each mode of the messenger, which is an option of a cluster.
static CRC: Shared = Mutex::new(Weak::new());
static SECURE: Shared = Mutex::new(Weak::new());

/// A pool, and a user who has rights in it and in no other one. In a cluster that is shared both go with this.
pub struct Pool {
    /// Its cluster.
    pub cluster: Arc<Cluster>,
    /// Its name.
    pub name: String,
    /// The user, such as `client.vmseal`.
    pub user: String,
    /// The erasure-coded pool that has the data, if one does.
    pub data_pool: Option<&'static str>,
    /// What its cluster is shared by; none: the test has the cluster for itself.
    shared: Option<&'static Shared>,
}

impl Pool {
    /// The usual pool of a cluster that has just come up, whose daemons the test may kill and configure. Its data may be in an
    /// erasure-coded one of two and one.
    #[must_use]
    pub fn of_own_cluster(messenger: &str, erasure_coded: bool) -> Self {
        let mut pool = Self::usual_of(up(messenger));
        if erasure_coded {
            let added = pool.cluster.run(&["pool", "add", CODED, "--erasure", "2+1"]);
            assert!(added.status.success(), "{}", said(&added));
            pool.data_pool = Some(CODED);
        }
        pool
    }

    /// The usual pool of a cluster that is up, which the test has for itself.
    #[must_use]
    pub fn usual_of(cluster: Cluster) -> Self {
        let (name, user) = (USUAL.to_owned(), format!("client.{USUAL}"));
        Self { cluster: Arc::new(cluster), name, user, data_pool: None, shared: None }
    }

    /// A pool of this name, which no other test has, in the cluster of this messenger that tests share.
    #[must_use]
    pub fn of_shared_cluster(name: &str, messenger: &str) -> Self {
        let shared = shared(messenger);
        let cluster = joined(&mut hold(shared), messenger);
        let pools = cluster.ask(&["osd", "pool", "ls"]);
        let is_there = pools.as_array().unwrap().iter().any(|it| it == name);
        assert!(!is_there, "another test has pool '{name}'");
        let (name, user) = (name.to_owned(), format!("client.{name}"));
        // From here on it is removed, whatever of it is there.
        let pool = Self { cluster, name, user, data_pool: None, shared: Some(shared) };
        let held = hold(shared);
        let added = pool.cluster.run(&["pool", "add", &pool.name]);
        drop(held);
        assert!(added.status.success(), "{}: {}", pool.name, said(&added));
        pool
    }

    /// The keyring of its user, who is made if he is not there.
    #[must_use]
    pub fn keyring(&self) -> PathBuf {
        let pools: Vec<_> = [Some(&*self.name), self.data_pool].into_iter().flatten().collect();
        self.cluster.user(&self.user, &pools)
    }

    /// Its images, with its name before theirs.
    #[must_use]
    pub fn images(&self) -> Vec<String> {
        let listed = self.cluster.rbd(&["ls", &self.name]);
        assert!(listed.status.success(), "{}", said(&listed));
        let names = String::from_utf8(listed.stdout).unwrap();
        names.lines().map(|image| format!("{}/{image}", self.name)).collect()
    }

    /// What `rbd info` says of an image, which has the pool's name before its own.
    #[must_use]
    pub fn info(&self, image: &str) -> Value {
        let told = self.cluster.rbd(&["info", "--format", "json", image]);
        assert!(told.status.success(), "{image}: {}", said(&told));
        serde_json::from_slice(&told.stdout).unwrap()
    }

    /// The numbers of the objects that an image has, as the cluster lists them: those parts of its length take room.
    #[must_use]
    pub fn objects(&self, image: &str) -> BTreeSet<u64> {
        let info = self.info(image);
        let prefix = info["block_name_prefix"].as_str().unwrap();
        let names = self.cluster.rados(&["-p", self.data_pool.unwrap_or(&self.name), "ls"]);
        let numbers = names.lines().filter_map(|it| it.strip_prefix(prefix)?.strip_prefix('.'));
        numbers.map(|number| u64::from_str_radix(number, 16).unwrap()).collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let Some(shared) = self.shared else { return };
        let _held = hold(shared);
        let name = &*self.name;
        let pool = ["osd", "pool", "rm", name, name, "--yes-i-really-really-mean-it"];
        let user = ["auth", "rm", &*self.user];
        let removed = [&pool[..], &user[..]].map(|words| self.cluster.try_ceph(words));
        // A test that fails has said why, and a second panic would end all others.
        if std::thread::panicking() {
            return;
        }
        for output in removed {
            let output = output.unwrap();
            assert!(output.status.success(), "{name} stays: {}", said(&output));
        }
    }
}

/// Does something with the cluster of this messenger that tests share, while none of them makes or removes a pool.
pub fn while_pools_stay<T>(messenger: &str, what: impl FnOnce(&Cluster) -> T) -> T {
    let mut held = hold(shared(messenger));
    let cluster = joined(&mut held, messenger);
    what(&cluster)
}

fn shared(messenger: &str) -> &'static Shared {
    match messenger {
        "crc" => &CRC,
        "secure" => &SECURE,
        other => panic!("no cluster has the messenger '{other}'"),
    }
}

/// A test that has failed meanwhile leaves the cluster as it is, or none.
fn hold(shared: &'static Shared) -> MutexGuard<'static, Weak<Cluster>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The cluster that others have, or a new one.
fn joined(shared: &mut Weak<Cluster>, messenger: &str) -> Arc<Cluster> {
    if let Some(cluster) = shared.upgrade() {
        return cluster;
    }
    let cluster = Arc::new(up(messenger));
    *shared = Arc::downgrade(&cluster);
    cluster
}

fn up(messenger: &str) -> Cluster {
    let cluster = Cluster::new();
    cluster.up_with(&["--messenger", messenger]);
    cluster
}
