//! Tests that share a real Ceph cluster do not see each other: each has a pool and a user of its own there, which go with it, also where it
//! fails.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use vmseal_tests::ceph::{Cluster, is_installed, said};
use vmseal_tests::ceph_pool::Pool;

/// What a test panics with that fails on purpose.
struct Failed;

/// Whether the cluster has a pool of this name, and the user for it.
fn has(cluster: &Cluster, name: &str) -> (bool, bool) {
    let (pools, users) = (cluster.ask(&["osd", "pool", "ls"]), cluster.ask(&["auth", "ls"]));
    let user = format!("client.{name}");
    let has_pool = pools.as_array().unwrap().iter().any(|it| it.as_str() == Some(name));
    let mut users = users["auth_dump"].as_array().unwrap().iter();
    (has_pool, users.any(|it| it["entity"] == user))
}

/// Lists a pool's images as the user of this one or another one; why that is refused.
fn listed(user_of: &Pool, pool: &Pool) -> Result<(), String> {
    let keyring = user_of.keyring();
    let user = ["--name", &*user_of.user, "--keyring", keyring.to_str().unwrap()];
    let output = user_of.cluster.rbd(&[&user[..], &["ls", &*pool.name]].concat());
    if output.status.success() { Ok(()) } else { Err(said(&output)) }
}

#[test]
fn each_test_of_a_shared_cluster_has_a_pool_and_a_user_that_go_with_it() {
    if !is_installed() {
        return;
    }
    let kept = Pool::of_shared_cluster("apart", "crc");
    let cluster = Arc::clone(&kept.cluster);
    listed(&kept, &kept).unwrap();
    let ended: std::thread::Result<()> = catch_unwind(AssertUnwindSafe(|| {
        let failing = Pool::of_shared_cluster("apart-failing", "crc");
        assert!(Arc::ptr_eq(&failing.cluster, &cluster), "it has another cluster");
        listed(&failing, &failing).unwrap();
        for (one, other) in [(&kept, &failing), (&failing, &kept)] {
            let refused = listed(one, other).unwrap_err();
            assert!(refused.contains("Operation not permitted"), "{refused}");
        }
        assert_eq!(has(&cluster, "apart-failing"), (true, true));
        // As an assertion does that fails, but for what that prints.
        resume_unwind(Box::new(Failed));
    }));
    let why = ended.unwrap_err();
    if !why.is::<Failed>() {
        resume_unwind(why);
    }
    assert_eq!(has(&cluster, "apart-failing"), (false, false));
    assert_eq!(has(&cluster, "apart"), (true, true));
    listed(&kept, &kept).unwrap();
    drop(kept);
    assert_eq!(has(&cluster, "apart"), (false, false));
}
