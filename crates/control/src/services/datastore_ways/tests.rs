use std::path::{Path, PathBuf};

use vmseal_agent::simulated::{Call, Fault, SimulatedHost};
use vmseal_api::datastore::{Messenger, MountedWay};
use vmseal_api::host::HostAgent;
use vmseal_api::model;
use vmseal_api::request::{AddDatastore, MigrateVm, MoveVm, SetPolicy, ShareDatastore, StartVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::operation::Operation;
use crate::services::datastore_keys::tests::{a_key, request, sealed};
use crate::services::{
    create_vm, datastores as service, migrate, mirror, remount, set_policy, sharing, vms,
};
use crate::store::{hosts, policies};
use crate::testing::Fixture;

/// Another monitor of the cluster.
const MONITORS: &str = "v2:10.0.0.2:3300";

/// Hosts `here` and `there`, which have the pool `ceph`, whose key the server holds, over connections in the clear.
struct Bench {
    fixture: Fixture,
    services: Services,
    me: Caller,
    there: SimulatedHost,
}

impl Bench {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        let (_, there) = fixture.add_host("there").await;
        let mut add = request(Some(sealed(&services, "ceph", &a_key(0x5a))));
        let DatastoreLocation::Rbd { pool, .. } = &mut add.location else { unreachable!() };
        pool.messenger = Messenger::Crc;
        service::add(&services, &me, add, false).await.unwrap();
        let with = ShareDatastore { host: "there".to_owned(), location: None };
        sharing::share(&services, &me, "ceph", with, false).await.unwrap();
        Self { fixture, services, me, there }
    }

    async fn set(&self, request: SetDatastore, dry_run: bool) -> Result<Outcome<()>, Problem> {
        let set = service::set(&self.services, &self.me, "ceph", request, dry_run).await;
        set.map(|outcome| outcome.map(drop))
    }

    async fn refused(&self, request: SetDatastore) -> Problem {
        self.set(request.clone(), true).await.map(drop).unwrap_err();
        self.set(request, false).await.map(drop).unwrap_err()
    }

    async fn shown(&self) -> model::Datastore {
        service::show(&self.services, &self.me, "ceph").await.unwrap()
    }

    async fn pools(&self) -> Vec<RbdPool> {
        let hosts = self.shown().await.hosts.into_iter();
        hosts.map(|on| on.location.pool().unwrap().clone()).collect()
    }

    async fn mounted_here(&self) -> MountedWay {
        let mut hosts = self.shown().await.hosts.into_iter();
        hosts.find(|on| on.host == "here").unwrap().mounted.unwrap()
    }

    async fn remount_here(&self) {
        self.remount_on("here").await;
    }

    async fn remount_on(&self, host: &str) {
        remount::remount(&self.services, &self.me, "ceph", host, false).await.unwrap();
    }
}

fn secure() -> SetDatastore {
    SetDatastore { messenger: Some(Messenger::Secure), ..SetDatastore::default() }
}

#[tokio::test]
async fn a_way_is_kept_once_each_host_has_tried_it_and_used_from_the_next_mount_on() {
    let bench = Bench::new().await;
    let (before, mounted) = (bench.shown().await, bench.mounted_here().await);
    let pools = bench.pools().await;
    assert!(mounted.current && mounted.messenger == Messenger::Crc, "{mounted:?}");
    let wanted = || SetDatastore {
        monitors: Some(MONITORS.to_owned()),
        user: Some("client.other".to_owned()),
        key: Some(sealed(&bench.services, "ceph", &a_key(0xa5))),
        ..secure()
    };
    let Ok(Outcome::Planned(plan)) = bench.set(wanted(), true).await else { panic!("no plan") };
    let said = plan.steps.concat();
    for part in [MONITORS, "client.other", "'secure'", "another key", "'here', 'there'"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let now = bench.shown().await;
    assert_eq!((now.key, bench.pools().await), (before.key.clone(), pools));

    bench.set(wanted(), false).await.unwrap();
    let after = bench.shown().await;
    assert_eq!(after.id, before.id);
    assert_ne!(after.key, before.key);
    for pool in bench.pools().await {
        assert_eq!((pool.monitors.as_str(), pool.user.as_str()), (MONITORS, "client.other"));
        assert_eq!(pool.messenger, Messenger::Secure);
        assert!(pool.changed.is_some());
    }
    let told = bench.fixture.events("datastore.set").await.pop().unwrap().detail;
    assert!(told.contains(MONITORS) && told.ends_with("tried on hosts 'here', 'there'"), "{told}");
    for agent in [&bench.fixture.agent, &bench.there] {
        let held = agent.pool_key(Path::new("/ceph"));
        assert_eq!(held.as_deref(), Some(a_key(0xa5).as_bytes()));
    }

    // The mount stays until it is made anew.
    let now = bench.mounted_here().await;
    assert_eq!(now, MountedWay { current: false, ..mounted.clone() });
    let planned = remount::remount(&bench.services, &bench.me, "ceph", "here", true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("no plan") };
    assert!(plan.steps[0].contains("client.other by v2:10.0.0.2:3300"), "{plan:?}");
    bench.remount_here().await;
    let now = bench.mounted_here().await;
    assert_eq!(now, MountedWay { messenger: Messenger::Secure, ..mounted });

    // Later ones are later, and the same one changes nothing.
    let first = bench.pools().await[0].changed;
    let user = Some("client.third".to_owned());
    bench.set(SetDatastore { user, ..SetDatastore::default() }, false).await.unwrap();
    let second = bench.pools().await[0].changed;
    assert!(second > first, "{second:?}");
    bench.set(secure(), false).await.unwrap();
    assert_eq!(bench.pools().await[0].changed, second);
    let Ok(Outcome::Planned(plan)) = bench.set(secure(), true).await else { panic!("no plan") };
    assert!(plan.steps[0].contains("do nothing"), "{plan:?}");
    assert_eq!(bench.fixture.events("datastore.set").await.len(), 2);
}

#[tokio::test]
async fn a_way_that_one_host_cannot_use_or_to_another_cluster_changes_nothing() {
    let bench = Bench::new().await;
    let before = bench.pools().await;
    let elsewhere = SetDatastore { monitors: Some(MONITORS.to_owned()), ..secure() };
    bench.there.set_other_cluster(MONITORS, "e7b4c8ee-0000-4000-8000-000000000000");
    let refused = bench.refused(elsewhere).await;
    assert_eq!(refused.code, ErrorCode::Unreachable);
    assert!(refused.detail.contains("nothing is changed, as host 'there' cannot"), "{refused}");
    assert!(refused.detail.contains("another cluster"), "{refused}");

    let key = a_key(0xa5);
    bench.there.refuse_pool_keys(&[key.as_str()]);
    let key = Some(sealed(&bench.services, "ceph", &key));
    let refused = bench.refused(SetDatastore { key, ..secure() }).await;
    assert!(refused.detail.contains("host 'there' cannot use the pool so"), "{refused}");
    assert_eq!(bench.pools().await, before);

    // A host that cannot try it.
    bench.there.lack_features(&[POOL_WAYS]);
    bench.there.restart();
    let is_old = async || {
        let refused = bench.set(secure(), true).await.err()?;
        (refused.code == ErrorCode::Unsupported).then_some(refused)
    };
    let refused = bench.fixture.eventually("the old agent is refused", is_old).await;
    assert!(refused.detail.contains("the agent of host 'there'"), "{refused}");
    bench.there.set_reachable(false);
    let is_gone = async || {
        let refused = bench.set(secure(), true).await.err()?;
        refused.detail.contains("has the pool has to try it").then_some(refused)
    };
    let refused = bench.fixture.eventually("the host is gone", is_gone).await;
    assert_eq!(refused.code, ErrorCode::Unreachable);
    assert_eq!(bench.pools().await, before);
    assert!(bench.fixture.events("datastore.set").await.is_empty());
}

#[tokio::test]
async fn what_is_not_of_such_a_pool_is_refused() {
    let bench = Bench::new().await;
    let nothing = bench.refused(SetDatastore::default()).await;
    assert_eq!(nothing.code, ErrorCode::InvalidRequest);
    let key = Some(sealed(&bench.services, "ceph", &a_key(0xa5)));
    let both = SetDatastore { keyring: Some("/k".into()), key, ..SetDatastore::default() };
    for keyring in [both, SetDatastore { keyring: Some("k".into()), ..SetDatastore::default() }] {
        assert_eq!(bench.refused(keyring).await.field.as_deref(), Some("keyring"));
    }
    let user = SetDatastore { user: Some("admin".to_owned()), ..SetDatastore::default() };
    assert_eq!(bench.refused(user).await.field.as_deref(), Some("user"));
    let of_directory = service::set(&bench.services, &bench.me, "local", secure(), false).await;
    let refused = of_directory.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("is a directory"), "{refused}");
    // The key alone is what it was before.
    let key = Some(sealed(&bench.services, "ceph", &a_key(0xa5)));
    bench.set(SetDatastore { key, ..SetDatastore::default() }, false).await.unwrap();
    assert_eq!(bench.fixture.events("datastore.key-set").await.len(), 1);
}

/// Adds the pool `rings`, whose key is in a file on the host `here`.
async fn add_rings(bench: &Bench) {
    let AddDatastore { mut location, .. } = request(None);
    let DatastoreLocation::Rbd { path, pool } = &mut location else { unreachable!() };
    *path = "/rings".into();
    pool.keyring = Some("/etc/ceph/keyring".into());
    pool.pool = "rings".to_owned();
    let add = AddDatastore { name: "rings".to_owned(), location, ..request(None) };
    service::add(&bench.services, &bench.me, add, false).await.unwrap();
}

fn with_keyring(path: &str) -> SetDatastore {
    SetDatastore { keyring: Some(path.into()), ..SetDatastore::default() }
}

fn with_key(bench: &Bench, key: &str) -> SetDatastore {
    let key = Some(sealed(&bench.services, "rings", key));
    SetDatastore { key, ..SetDatastore::default() }
}

/// The keyring of the pool `rings`, and the fingerprint of the key that the server holds.
async fn keyring_and_key(bench: &Bench) -> (Option<PathBuf>, Option<String>) {
    let shown = service::show(&bench.services, &bench.me, "rings").await.unwrap();
    (shown.hosts[0].location.pool().unwrap().keyring.clone(), shown.key)
}

#[tokio::test]
async fn a_pool_with_keyrings_gets_another_keyring() {
    let bench = Bench::new().await;
    add_rings(&bench).await;
    let other = with_keyring("/etc/other");
    service::set(&bench.services, &bench.me, "rings", other, false).await.unwrap();
    assert_eq!(keyring_and_key(&bench).await, (Some(PathBuf::from("/etc/other")), None));
    // The mount is by the same way: which key it uses is said apart from that.
    let shown = service::show(&bench.services, &bench.me, "rings").await.unwrap();
    assert!(shown.hosts[0].mounted.as_ref().unwrap().current);
}

#[tokio::test]
async fn the_server_takes_the_key_over_from_keyrings_and_gives_it_up_for_them() {
    let bench = Bench::new().await;
    add_rings(&bench).await;
    let (agent, place) = (&bench.fixture.agent, Path::new("/rings"));
    let set = async |request, dry_run| {
        service::set(&bench.services, &bench.me, "rings", request, dry_run).await
    };
    let key = a_key(0xa5);
    let ring = PathBuf::from("/etc/ceph/keyring");

    // What a host cannot use, and what none is to try, leaves it as it is.
    agent.refuse_pool_keys(&[key.as_str()]);
    let refused = set(with_key(&bench, &key), false).await.map(drop).unwrap_err();
    let told = "nothing is changed, as host 'here' cannot use the pool so";
    assert!(refused.detail.contains(told), "{refused}");
    agent.refuse_pool_keys(&[]);
    let untried = SetDatastoreKey { key: sealed(&bench.services, "rings", &key), force: true };
    let untried = service::set_key(&bench.services, &bench.me, "rings", untried, false).await;
    let refused = untried.map(drop).unwrap_err();
    assert!(refused.detail.contains("leave out --force"), "{refused}");
    let planned = set(with_key(&bench, &key), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("no plan") };
    assert!(plan.steps[0].contains("in place of keyring /etc/ceph/keyring"), "{plan:?}");
    assert_eq!(keyring_and_key(&bench).await, (Some(ring.clone()), None));
    assert_eq!(agent.pool_key(place), None);

    set(with_key(&bench, &key), false).await.unwrap();
    let (keyring, held) = keyring_and_key(&bench).await;
    assert!(keyring.is_none() && held.is_some(), "{keyring:?}");
    assert_eq!(agent.pool_key(place).as_deref(), Some(key.as_bytes()));
    remount::remount(&bench.services, &bench.me, "rings", "here", false).await.unwrap();
    let shown = service::show(&bench.services, &bench.me, "rings").await.unwrap();
    assert!(shown.hosts[0].mounted_key.as_ref().unwrap().current);

    // And back.
    set(with_keyring("/etc/ceph/keyring"), false).await.unwrap();
    assert_eq!(keyring_and_key(&bench).await, (Some(ring), None));
    let mut read = bench.fixture.store.read().await.unwrap();
    let id = datastores::find(&mut read, "rings").await.unwrap().unwrap().id;
    assert!(store_keys::get(&mut read, id).await.unwrap().is_none(), "the server has kept it");
    drop(read);

    // Each later agent of the host gets a key that was taken over.
    set(with_key(&bench, &key), false).await.unwrap();
    agent.restart();
    let given = async || agent.pool_key(place).map(drop);
    bench.fixture.eventually("the next agent gets the key", given).await;
    let told = bench.fixture.events("datastore.set").await;
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told.iter().all(|event| !event.detail.contains(&key)), "{told:?}");
}

/// The same where the server dies after it has kept the key, and before it has given it.
#[tokio::test]
async fn a_key_that_was_taken_over_and_not_given_yet_is_given_to_the_next_agent() {
    let bench = Bench::new().await;
    add_rings(&bench).await;
    let (agent, place, key) = (&bench.fixture.agent, Path::new("/rings"), a_key(0xa5));
    agent.inject(Call::OfferPoolKey, 1, Fault::Refuse(ErrorCode::Internal));
    let set = service::set(&bench.services, &bench.me, "rings", with_key(&bench, &key), false);
    let refused = set.await.map(drop).unwrap_err();
    assert!(refused.detail.contains("host 'here' has not got it"), "{refused}");
    let (keyring, held) = keyring_and_key(&bench).await;
    assert!(keyring.is_none() && held.is_some(), "{keyring:?}");
    assert_eq!(agent.pool_key(place), None);
    agent.restart();
    let given = async || agent.pool_key(place);
    let given = bench.fixture.eventually("the next agent gets the key", given).await;
    assert_eq!(given, key.as_bytes());
}

#[tokio::test]
async fn a_policy_that_insists_is_kept_once_the_pool_is_mounted_anew() {
    let bench = Bench::new().await;
    bench.fixture.made("web", "encrypted").await;
    let mut write = bench.fixture.store.write().await.unwrap();
    let mut policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
    policy.messenger = Some(Messenger::Secure);
    policies::set(&mut write, &policy).await.unwrap();
    write.commit().await.unwrap();
    let moves = async || {
        let request = MoveVm { datastore: "ceph".to_owned(), disks: Vec::new(), rate: None };
        mirror::move_disks(&bench.services, &bench.me, "web", request, true).await.map(drop)
    };
    let refused = moves().await.unwrap_err();
    assert!(refused.detail.contains("datastore set ceph --messenger secure"), "{refused}");
    bench.set(secure(), false).await.unwrap();
    let refused = moves().await.unwrap_err();
    assert!(refused.detail.contains("host 'here' still has datastore 'ceph'"), "{refused}");
    assert!(refused.detail.contains("vmseal datastore remount ceph"), "{refused}");
    bench.remount_here().await;
    moves().await.unwrap();
}

#[tokio::test]
async fn a_policy_that_insists_is_kept_for_replicas_as_well() {
    let bench = Bench::new().await;
    let set = async |request, dry_run| {
        set_policy::set(&bench.services, &bench.me, "encrypted", request, dry_run).await.unwrap()
    };
    let to = SetPolicy { replicate_to: Some("ceph".to_owned()), ..SetPolicy::default() };
    set(to, false).await;
    let web = Fixture::request("web", "encrypted");
    bench.fixture.requested(&bench.services, web).await;
    let insists = SetPolicy { messenger: Some(Messenger::Secure), ..SetPolicy::default() };
    let Outcome::Planned(plan) = set(insists.clone(), true).await else { panic!("no plan") };
    let planned = plan.steps.concat();
    let told = "VM 'web': the replica of its disk 'disk0' is in datastore 'ceph'";
    assert!(planned.contains(told) && planned.contains("messenger 'crc'"), "{planned}");
    set(insists, false).await;
    let starts = async || {
        let start = vms::start(&bench.services, &bench.me, "web", StartVm::default(), true);
        start.await.map(drop)
    };
    let creates = async || {
        let request = Fixture::request("other", "encrypted");
        create_vm::create(&bench.services, &bench.me, request, true).await.map(drop)
    };
    for refused in [starts().await, creates().await].map(Result::unwrap_err) {
        assert!(refused.detail.contains("the replica of disk 'disk0' is in pool"), "{refused}");
        assert!(refused.detail.contains("datastore set ceph --messenger secure"), "{refused}");
    }
    bench.set(secure(), false).await.unwrap();
    for refused in [starts().await, creates().await].map(Result::unwrap_err) {
        let told = "host 'here' still has datastore 'ceph' mounted with messenger 'crc'";
        assert!(refused.detail.contains(told), "{refused}");
    }
    bench.remount_here().await;
    starts().await.unwrap();
    creates().await.unwrap();
}

/// A guest that goes to another host with its memory alone has its disks by the connections of that host's mount from then on.
#[tokio::test]
async fn a_guest_goes_only_to_a_host_whose_mount_is_as_its_policy_has_it() {
    let bench = Bench::new().await;
    let fixture = &bench.fixture;
    let vm = fixture.made("web", "encrypted").await;
    fixture.move_disks(&bench.services, "web", "ceph").await;
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    let mut write = fixture.store.write().await.unwrap();
    let there = hosts::find(&mut write, "there").await.unwrap().unwrap().id;
    let pool = datastores::find(&mut write, "ceph").await.unwrap().unwrap();
    let mut policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
    policy.messenger = Some(Messenger::Secure);
    policies::set(&mut write, &policy).await.unwrap();
    write.commit().await.unwrap();
    // Both hosts have it mounted as it was added.
    bench.there.measure_datastore(pool.spec_on(there).unwrap()).await.unwrap();
    let planned = async || {
        let request = MigrateVm { host: Some("there".to_owned()), ..MigrateVm::default() };
        migrate::migrate(&bench.services, &bench.me, "web", request, true).await.map(drop)
    };
    let (from, encrypted) = (fixture.host, true);
    let (datastore, downtime_milliseconds, compresses) = (None, None, false);
    let operation = || Operation::MigrateVm {
        vm,
        from,
        to: there,
        encrypted,
        datastore,
        downtime_milliseconds,
        compresses,
        given_up: false,
    };
    let refused = async |told: &str| {
        let refused = planned().await.unwrap_err();
        assert!(refused.detail.contains(told), "{refused}");
        let ended = fixture.ended(fixture.begin(operation(), "web").await).await;
        assert_eq!(ended.state, model::TaskState::Failed);
        let problem = ended.problem.unwrap();
        assert!(problem.detail.contains(told), "{problem}");
        assert!(fixture.agent.runs(vm) && !bench.there.runs(vm), "where it runs");
    };
    refused("datastore set ceph --messenger secure").await;
    bench.set(secure(), false).await.unwrap();
    bench.remount_here().await;
    let former = "host 'there' still has datastore 'ceph' mounted with messenger 'crc': mount it anew (vmseal datastore remount ceph --host there)";
    refused(former).await;
    bench.remount_on("there").await;
    planned().await.unwrap();
    fixture.done(operation(), "web").await;
    assert!(!fixture.agent.runs(vm) && bench.there.runs(vm), "where it runs");
}
