//! The network between a host and a real Ceph cluster is cut, while all daemons of the cluster live: packets are lost, and nobody is told.
//! Requests wait or fail, as the policy says, with alarms; they go on when the network is back, and no acknowledged write is lost. Two of
//! the cuts last until the cluster takes the host for dead: nobody has its images open any more, and the leases of its locks have run out.

#![allow(clippy::unwrap_used)] // a test that cannot go on ends

use serde_json::Value;
use vmseal_tests::cable::Cable;
use vmseal_tests::ceph::{is_installed, said};
use vmseal_tests::ceph_datastore::{CephInstallation, Options};
use vmseal_tests::ceph_pool::Pool;
use vmseal_tests::eventually;
use vmseal_tests::network::own_namespace;

use crate::ceph_files::Mount;
use crate::ceph_stall::{VM, gets_errors, starts, starts_with_errors, waits};
use crate::ceph_stall_filter::{channel, fails_and_serves_again};

/// The lock of a file's object in the pool.
const LOCK: &str = "vmseal.lock";

#[test]
fn a_host_that_is_cut_off_from_its_cluster_goes_on_by_itself_and_has_lost_no_write() {
    if !is_installed() || !own_namespace().unwrap() {
        return;
    }
    let options = Options { messenger: "crc", erasure_coded: true, key_at_server: false };
    let cable = Cable::lay();
    let pool = cable.at_far_end(|| Pool::of_own_cluster(options.messenger, options.erasure_coded));
    cable.add_route(pool.cluster.address());
    let mut bench = CephInstallation::on(pool, options);
    let mut console = starts(&mut bench);
    let (here, pool) = (&bench.here, &bench.pool);
    let cut = || cable.cut();
    let until_given_up = || {
        let is_given_up = || {
            let images = pool.images();
            let none_is_had = images.iter().all(|it| !is_watched(pool, it) && !is_locked(pool, it));
            none_is_had.then_some(())
        };
        let given_up = || eventually("the cluster takes the host for dead", is_given_up);
        cable.at_far_end(given_up).unwrap();
    };
    let only_one = || <[String; 1]>::try_from(pool.images()).ok();
    let [image] = eventually("the pool has the guest's image alone", only_one).unwrap();
    let is_had = || is_watched(pool, &image) && is_locked(pool, &image);

    assert!(is_had(), "the cluster does not know that the host has the image");
    waits(&bench, &mut console, cut, || {
        let alarm = here.wait_alarm("ceph", "datastore-unavailable").unwrap();
        assert!(alarm.contains("does not respond"), "{alarm}");
        until_given_up();
    });
    here.wait_no_alarm("ceph", "datastore-unavailable").unwrap();
    eventually("the host has its image again", || is_had().then_some(())).unwrap();

    drop(console);
    let mut console = starts_with_errors(&bench);
    gets_errors(&bench, &mut console, cut);
    drop(console);
    here.vmseal(&["vm", "stop", VM, "--force"]).unwrap();

    // A client that writes each block again after an error, at a filter alone.
    let mount = Mount::new(pool);
    let socket = channel(&mount);
    fails_and_serves_again(&mount, "shared-memory", Some(socket.as_path()), cut, until_given_up);
}

/// Whether somebody has an image open to be written, and has said so lately.
fn is_watched(pool: &Pool, image: &str) -> bool {
    let status = pool.cluster.rbd(&["status", image]);
    assert!(status.status.success(), "{image}: {}", said(&status));
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("Watchers:"), "{image}: {status}");
    !status.contains("Watchers: none")
}

/// Whether somebody has locked the file of an image, and has renewed that lately.
fn is_locked(pool: &Pool, image: &str) -> bool {
    let (_, inode) = image.split_once("/vmseal.").unwrap();
    let file = format!("vmseal.file.{inode}");
    let lock = pool.cluster.rados(&["-p", &pool.name, "lock", "info", &file, LOCK]);
    let lock: Value = serde_json::from_str(&lock).unwrap();
    !lock["lockers"].as_array().unwrap().is_empty()
}
