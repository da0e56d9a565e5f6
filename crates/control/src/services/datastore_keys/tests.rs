use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vmseal_agent::simulated::{Call, SimulatedHost};
use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::id::DatastoreId;
use vmseal_api::passphrase::passphrase_info;
use vmseal_api::request::ShareDatastore;
use vmseal_secret::sealed_box::{self, Recipient};

use super::*;
use crate::services::{datastores as service, sharing};
use crate::store::Part;
use crate::testing::Fixture;

/// Where the pool is mounted on each host.
pub(in crate::services) const PLACE: &str = "/ceph";

/// The key of a Ceph user that is not there.
pub(in crate::services) fn a_key(secret: u8) -> String {
    let mut key = vec![1, 0];
    key.extend([0; 8]);
    key.extend([16, 0]);
    key.extend([secret; 16]);
    STANDARD.encode(key)
}

pub(in crate::services) fn sealed(services: &Services, name: &str, key: &str) -> SealedPassphrase {
    let public = services.recipient.public_key();
    let key = SecretBytes::from_wiped(&mut key.as_bytes().to_vec()).unwrap();
    let sealed = sealed_box::seal(&public, &passphrase_info(&of_datastore(name)), &key).unwrap();
    let sealed = STANDARD.encode(sealed.as_bytes());
    SealedPassphrase { passphrase_box: STANDARD.encode(public), sealed }
}

/// Adds the datastore `ceph`.
pub(in crate::services) fn request(key: Option<SealedPassphrase>) -> AddDatastore {
    let pool = RbdPool {
        monitors: "v2:10.0.0.1:3300".to_owned(),
        user: "client.vmseal".to_owned(),
        keyring: None,
        pool: "vms".to_owned(),
        namespace: None,
        data_pool: None,
        messenger: Messenger::Secure,
        create: None,
        changed: None,
    };
    let location = DatastoreLocation::Rbd { path: PLACE.into(), pool: Box::new(pool) };
    AddDatastore {
        name: "ceph".to_owned(),
        host: "here".to_owned(),
        location,
        existing: false,
        key,
        osd_encryption: None,
        create_for_policy: None,
    }
}

/// All that the inventory has of keys, and the events, as text.
async fn told(fixture: &Fixture) -> String {
    let mut read = fixture.store.read().await.unwrap();
    let kept: Vec<String> = sqlx::query_scalar("SELECT wrapped FROM datastore_keys")
        .fetch_all(&mut *read)
        .await
        .unwrap();
    let events: Vec<(String, String)> =
        sqlx::query_as("SELECT kind, detail FROM events").fetch_all(&mut *read).await.unwrap();
    let all = datastores::list(&mut read, &Part::all()).await.unwrap();
    format!("{kept:?} {events:?} {all:?}")
}

#[tokio::test]
async fn the_server_holds_the_key_of_a_pool_and_gives_it_to_each_agent_of_its_hosts() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let (first, second) = (a_key(0x5a), a_key(0xa5));

    // Without a key, with something else, and with that of another datastore.
    let refused = service::add(&services, &me, request(None), false).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("location.pool.keyring"));
    let wrong = request(Some(sealed(&services, "ceph", "secret")));
    let refused = service::add(&services, &me, wrong, false).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("key.sealed"));
    let other = request(Some(sealed(&services, "other", &first)));
    assert!(service::add(&services, &me, other, false).await.is_err());

    let good = || request(Some(sealed(&services, "ceph", &first)));
    let tried = service::add(&services, &me, good(), true).await.unwrap();
    assert!(matches!(tried, Outcome::Planned(_)));
    let held = |agent: &SimulatedHost| agent.pool_key(Path::new(PLACE));
    assert_eq!(held(&fixture.agent), None, "a dry run has left it");
    let added = service::add(&services, &me, good(), false).await.unwrap();
    let Outcome::Done(added) = added else { panic!("it is not added") };
    assert_eq!(held(&fixture.agent).as_deref(), Some(first.as_bytes()));

    // Another host gets it with the datastore, and a later agent of the first one when it is there.
    let (_, there) = fixture.add_host("there").await;
    let with = ShareDatastore { host: "there".to_owned(), location: None };
    sharing::share(&services, &me, "ceph", with, false).await.unwrap();
    assert_eq!(held(&there).as_deref(), Some(first.as_bytes()));
    let (old, agent) = fixture.add_host("old").await;
    agent.lack_features(&[POOL_KEYS]);
    agent.restart();
    let hosts = &services.hosts;
    let is_old =
        async || (hosts.connected(old).is_ok() && !hosts.view(old).has(POOL_KEYS)).then_some(());
    fixture.eventually("the old agent is connected", is_old).await;
    let with = ShareDatastore { host: "old".to_owned(), location: None };
    let refused = sharing::share(&services, &me, "ceph", with, false).await.unwrap_err();
    assert!(refused.detail.contains("host 'old' takes no keys"), "{refused}");
    fixture.agent.restart();
    fixture.eventually("the next agent has the key", async || held(&fixture.agent)).await;
    fixture.connected().await;

    // Another key.
    let change = SetDatastoreKey { key: sealed(&services, "ceph", &second), force: false };
    service::set_key(&services, &me, "ceph", change, false).await.unwrap();
    for agent in [&fixture.agent, &there] {
        assert_eq!(held(agent).as_deref(), Some(second.as_bytes()));
    }
    let answers = serde_json::to_string(&added).unwrap() + &told(&fixture).await;
    for key in [&first, &second] {
        assert!(!answers.contains(key.as_str()), "{answers}");
    }
    assert_eq!(fixture.events("datastore.key-set").await.len(), 1);

    service::remove(&services, &me, "ceph", false).await.unwrap();
    for agent in [&fixture.agent, &there] {
        assert_eq!(held(agent), None, "a host holds the key of what it does not have");
    }
    assert!(told(&fixture).await.starts_with("[]"), "the inventory keeps it");
}

#[tokio::test]
async fn a_key_is_kept_once_a_host_has_tried_it() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let (first, second) = (a_key(0x5a), a_key(0xa5));
    let add = request(Some(sealed(&services, "ceph", &first)));
    service::add(&services, &me, add, false).await.unwrap();
    let set = async |force: bool, dry_run: bool| {
        let change = SetDatastoreKey { key: sealed(&services, "ceph", &second), force };
        service::set_key(&services, &me, "ceph", change, dry_run).await
    };
    let done = async |force: bool| match set(force, false).await {
        Ok(Outcome::Done(rekeyed)) => rekeyed.warnings,
        other => panic!("the key is not kept: {other:?}"),
    };
    let held = || fixture.agent.pool_key(Path::new(PLACE));
    let recorded = async || fixture.events("datastore.key-set").await.pop().unwrap().detail;

    // The cluster refuses it.
    fixture.agent.refuse_pool_keys(&[second.as_str()]);
    for dry_run in [true, false] {
        let refused = set(false, dry_run).await.map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable);
        assert!(refused.detail.contains("host 'here' cannot use it"), "{refused}");
        assert!(refused.detail.contains("--force"), "{refused}");
    }
    assert_eq!(held().as_deref(), Some(first.as_bytes()));
    assert!(fixture.events("datastore.key-set").await.is_empty());
    assert!(done(true).await.is_empty());
    assert_eq!(held().as_deref(), Some(second.as_bytes()));
    assert!(recorded().await.ends_with("untried"));

    // The cluster takes it.
    fixture.agent.refuse_pool_keys(&[first.as_str()]);
    let Ok(Outcome::Planned(plan)) = set(false, true).await else { panic!("it is not planned") };
    assert!(plan.steps[0].contains("has taken on host 'here'"), "{plan:?}");
    assert!(done(false).await.is_empty());
    assert!(recorded().await.ends_with("tried on host 'here'"));

    // An agent of an earlier version cannot tell.
    fixture.agent.lack_features(&[TRY_POOL_KEYS]);
    fixture.agent.restart();
    let (hosts, here) = (&services.hosts, fixture.host);
    let is_old = async || {
        (hosts.connected(here).is_ok() && !hosts.view(here).has(TRY_POOL_KEYS)).then_some(())
    };
    fixture.eventually("the old agent is connected", is_old).await;
    let Ok(Outcome::Planned(plan)) = set(false, true).await else { panic!("it is not planned") };
    for (warnings, is_kept) in [(plan.warnings, false), (done(false).await, true)] {
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(warnings[0].contains("host 'here' is of an earlier version"), "{warnings:?}");
        // It would try the former key.
        assert_eq!(warnings[0].contains("datastore remount"), is_kept, "{warnings:?}");
    }
    assert!(recorded().await.ends_with("untried"));

    // Nobody can.
    fixture.agent.set_reachable(false);
    let is_gone = async || hosts.connected(here).is_err().then_some(());
    fixture.eventually("the host is gone", is_gone).await;
    let refused = set(false, false).await.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unreachable);
    assert!(refused.detail.contains("no host of datastore 'ceph' can try it"), "{refused}");
    assert!(done(true).await.is_empty());
}

#[tokio::test]
async fn a_host_that_cannot_use_a_key_does_not_speak_for_the_others() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let (first, second) = (a_key(0x5a), a_key(0xa5));
    let add = request(Some(sealed(&services, "ceph", &first)));
    service::add(&services, &me, add, false).await.unwrap();
    let mut agents = vec![fixture.agent.clone()];
    // They are asked in the order of their names.
    for name in ["later-1", "later-2", "later-3"] {
        agents.push(fixture.add_host(name).await.1);
        let with = ShareDatastore { host: name.to_owned(), location: None };
        sharing::share(&services, &me, "ceph", with, false).await.unwrap();
    }
    let trials = || {
        let of = |agent: &SimulatedHost| agent.requests(Call::RemountDatastore).len();
        agents.iter().map(of).collect::<Vec<_>>()
    };
    let set = async || {
        let change = SetDatastoreKey { key: sealed(&services, "ceph", &second), force: false };
        service::set_key(&services, &me, "ceph", change, false).await.map(drop)
    };

    // Three are enough, and the first of them is named.
    for agent in &agents[..3] {
        agent.refuse_pool_keys(&[second.as_str()]);
    }
    let refused = set().await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unreachable);
    assert!(refused.detail.contains("host 'here' cannot use it"), "{refused}");
    assert_eq!(trials(), [1, 1, 1, 0]);
    assert!(fixture.events("datastore.key-set").await.is_empty());

    agents[1].refuse_pool_keys(&[]);
    set().await.unwrap();
    assert_eq!(trials(), [2, 2, 1, 0]);
    let recorded = fixture.events("datastore.key-set").await.pop().unwrap().detail;
    assert!(recorded.ends_with("tried on host 'later-1'"), "{recorded}");
}

#[test]
fn only_of_a_key_that_the_server_holds_it_says_whether_it_is_the_current_one() {
    let on = |keyring: Option<&str>| {
        let mut location = request(None).location;
        if let DatastoreLocation::Rbd { pool, .. } = &mut location {
            pool.keyring = keyring.map(Into::into);
        }
        let (host, host_name) = (HostId::new(), "here".to_owned());
        let mounted_key = Some("3fa9c1d2".to_owned());
        OnHost { host, host_name, location, mounted_key, mount: None }
    };
    let shown = service::shown(datastores::Datastore {
        id: DatastoreId::new(),
        name: "ceph".to_owned(),
        hosts: vec![on(None), on(Some("/etc/ceph/keyring"))],
        usage: None,
        pools: Vec::new(),
        key: Some("3fa9c1d2".to_owned()),
        osds: Default::default(),
    });
    let current: Vec<_> =
        shown.hosts.into_iter().map(|on| on.mounted_key.unwrap().current).collect();
    assert_eq!(current, [true, false]);
}
