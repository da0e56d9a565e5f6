use std::path::Path;
use std::time::Duration;

use vmseal_agent::simulated::{Call, Fault, SimulatedHost};
use vmseal_api::datastore::{MountedKey, SetDatastoreKey};
use vmseal_api::id::HostId;
use vmseal_api::request::{MoveVm, ShareDatastore};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::operation::Operation;
use crate::services::datastore_keys::tests::{PLACE, a_key, request, sealed};
use crate::services::{datastores as service, mirror, sharing};
use crate::testing::Fixture;

/// Long enough to be seen at work.
const LONG: Duration = Duration::from_secs(1);

/// Hosts `here` and `there`, which have the pool `ceph`, whose key the server holds.
struct Bench {
    fixture: Fixture,
    services: Services,
    me: Caller,
    there: SimulatedHost,
    there_id: HostId,
}

impl Bench {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        let (there_id, there) = fixture.add_host("there").await;
        let add = request(Some(sealed(&services, "ceph", &a_key(0x5a))));
        service::add(&services, &me, add, false).await.unwrap();
        let with = ShareDatastore { host: "there".to_owned(), location: None };
        sharing::share(&services, &me, "ceph", with, false).await.unwrap();
        Self { fixture, services, me, there, there_id }
    }

    async fn change_key(&self) {
        let key = sealed(&self.services, "ceph", &a_key(0xa5));
        let change = SetDatastoreKey { key, force: false };
        service::set_key(&self.services, &self.me, "ceph", change, false).await.unwrap();
    }

    async fn shown(&self) -> Datastore {
        service::show(&self.services, &self.me, "ceph").await.unwrap()
    }

    async fn mounted_key(&self, host: &str) -> Option<MountedKey> {
        let mut hosts = self.shown().await.hosts.into_iter();
        hosts.find(|on| on.host == host).unwrap().mounted_key
    }

    async fn remount(&self, host: &str, dry_run: bool) -> Result<Outcome<Datastore>, Problem> {
        remount(&self.services, &self.me, "ceph", host, dry_run).await
    }

    async fn planned(&self, host: &str) -> String {
        match self.remount(host, true).await.unwrap() {
            Outcome::Planned(plan) => plan.steps.concat(),
            Outcome::Done(_) => panic!("a dry run has done it"),
        }
    }

    /// Has the disks of a VM of host `here` moved to the pool.
    async fn begin_move(&self, vm: &str) -> vmseal_api::id::TaskId {
        let request = MoveVm { datastore: "ceph".to_owned(), disks: Vec::new(), rate: None };
        let begun = mirror::move_disks(&self.services, &self.me, vm, request, false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("it does not move") };
        task.id
    }
}

#[tokio::test]
async fn hosts_say_which_key_they_use_and_mount_anew_with_the_one_of_now() {
    let bench = Bench::new().await;
    let first = bench.shown().await.key.unwrap();
    let uses = |fingerprint: &str, current| {
        Some(MountedKey { fingerprint: fingerprint.to_owned(), current })
    };
    assert_eq!(bench.mounted_key("here").await, uses(&first, true));

    bench.change_key().await;
    let second = bench.shown().await.key.unwrap();
    assert_ne!(first, second);
    assert_eq!(bench.mounted_key("here").await, uses(&first, false));

    // A dry run says what is done, and leaves the mount.
    let planned = bench.planned("here").await;
    assert!(planned.contains(&format!("key {second}")) && planned.contains("no VM"), "{planned}");
    assert_eq!(bench.mounted_key("here").await, uses(&first, false));

    let Ok(Outcome::Done(shown)) = bench.remount("here", false).await else { panic!("not done") };
    assert_eq!(shown.hosts[0].mounted_key, uses(&second, true));
    assert_eq!(bench.mounted_key("here").await, uses(&second, true));
    assert_ne!(bench.mounted_key("there").await, uses(&second, true), "it was not asked");
    assert_eq!(bench.fixture.events("datastore.remounted").await.len(), 1);

    // A mount outlives the agent, and goes on with its key.
    bench.there.restart();
    let has_key = async || bench.there.pool_key(Path::new(PLACE));
    bench.fixture.eventually("the next agent has the key", has_key).await;
    assert_ne!(bench.mounted_key("there").await, uses(&second, true));
    let again = async || bench.remount("there", false).await.ok();
    bench.fixture.eventually("the next agent mounts it anew", again).await;
    assert_eq!(bench.mounted_key("there").await, uses(&second, true));
}

#[tokio::test]
async fn a_key_that_the_cluster_refuses_leaves_the_mount() {
    let bench = Bench::new().await;
    bench.change_key().await;
    for dry_run in [true, false] {
        let refuses = Fault::Refuse(ErrorCode::Unreachable);
        bench.fixture.agent.inject(Call::RemountDatastore, 1, refuses);
        let refused = bench.remount("here", dry_run).await.map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable);
        assert!(refused.detail.contains("on host 'here'"), "{refused}");
        assert!(!bench.mounted_key("here").await.unwrap().current);
    }
    assert!(bench.fixture.events("datastore.remounted").await.is_empty());
    bench.remount("here", false).await.unwrap();
    assert!(bench.mounted_key("here").await.unwrap().current);
}

#[tokio::test]
async fn guests_that_wait_are_named_and_tasks_that_would_break_are_waited_for() {
    let bench = Bench::new().await;
    let fixture = &bench.fixture;
    let vm = fixture.made("web", "encrypted").await;
    fixture.agent.set_work(LONG);
    let task = bench.begin_move("web").await;
    let at_work = async || is_at_work(&fixture.task(task).await).then_some(());
    fixture.eventually("the task is at work", at_work).await;
    for dry_run in [true, false] {
        let refused = bench.remount("here", dry_run).await.map(drop).unwrap_err();
        assert_eq!(refused.code, ErrorCode::InUse, "{refused}");
        assert!(refused.detail.contains(&task.to_string()), "{refused}");
    }
    // It is of the other host.
    bench.remount("there", false).await.unwrap();
    fixture.ends_well(task).await;
    fixture.agent.set_work(Duration::ZERO);

    assert!(bench.planned("here").await.contains("no VM"));
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    let named = async || bench.planned("here").await.contains("VM 'web'").then_some(());
    fixture.eventually("its guest is named", named).await;
    assert!(bench.planned("there").await.contains("no VM"));
    bench.remount("here", false).await.unwrap();
    fixture.assert_runs(vm).await;

    // Where a VM comes to, its disks are opened before it is there.
    fixture.agent.set_work(LONG);
    let migrate = Operation::MigrateVm {
        vm,
        from: fixture.host,
        to: bench.there_id,
        encrypted: true,
        datastore: None,
        downtime_milliseconds: None,
        compresses: false,
        given_up: false,
    };
    let task = fixture.begin(migrate, "web").await;
    fixture
        .eventually("it is on its way", async || {
            is_at_work(&fixture.task(task).await).then_some(())
        })
        .await;
    for host in ["here", "there"] {
        let refused = bench.remount(host, false).await.map(drop).unwrap_err();
        assert!(refused.detail.contains(&task.to_string()), "{host}: {refused}");
    }
    fixture.ends_well(task).await;
    fixture.agent.set_work(Duration::ZERO);

    let exposed = exposures::Exposed {
        id: uuid::Uuid::new_v4(),
        vm: "web".to_owned(),
        disk: "root".to_owned(),
        actor: "me".to_owned(),
    };
    let mut write = fixture.store.write().await.unwrap();
    exposures::insert(&mut write, &exposed).await.unwrap();
    write.commit().await.unwrap();
    let refused = bench.remount("there", false).await.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::InUse);
    assert!(refused.detail.contains("exposed by 'me'"), "{refused}");
}

#[tokio::test]
async fn what_cannot_be_mounted_anew_is_refused() {
    let bench = Bench::new().await;
    let (services, me) = (&bench.services, &bench.me);
    let directory = remount(services, me, "local", "here", true).await.map(drop).unwrap_err();
    assert_eq!(directory.code, ErrorCode::WrongState);
    assert!(directory.detail.contains("is a directory"), "{directory}");
    let nobody = bench.remount("nobody", true).await.map(drop).unwrap_err();
    assert_eq!((nobody.code, nobody.field.as_deref()), (ErrorCode::NotFound, Some("host")));
    bench.there.lack_features(&[REMOUNT_POOLS]);
    bench.there.restart();
    let refused = async || {
        let refused = bench.remount("there", true).await.err()?;
        (refused.code == ErrorCode::Unsupported).then_some(refused)
    };
    let refused = bench.fixture.eventually("the old agent is connected", refused).await;
    assert!(refused.detail.contains("host 'there' does not mount pools anew"), "{refused}");
}
