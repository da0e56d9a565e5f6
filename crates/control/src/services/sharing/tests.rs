use std::path::Path;

use vmseal_agent::simulated::{Call, Fault, SimulatedHost};
use vmseal_api::id::{DatastoreId, HostId};
use vmseal_api::model::TaskState;
use vmseal_api::request::{CreateDisk, CreateVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{create_vm, vms};
use crate::testing::Fixture;

/// Where the datastore is on the other host.
const PLACE: &str = "/there/store";

/// Host `here` with datastore `local`, and host `there`, which has its file system mounted.
struct Bench {
    fixture: Fixture,
    services: Services,
    caller: Caller,
    host: HostId,
    there: SimulatedHost,
    datastore: DatastoreId,
}

impl Bench {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let (host, there) = fixture.add_host("there").await;
        let services = fixture.services(Recipient::generate().unwrap());
        let datastore = find(&services, "local").await.unwrap().id;
        there.mount(Path::new(PLACE), datastore);
        Self { services, caller: Caller::administrator("me"), host, there, datastore, fixture }
    }

    async fn share(&self, dry_run: bool) -> Result<Outcome<Datastore>, Problem> {
        let location = Some(DatastoreLocation::Dir { path: PLACE.into() });
        let request = ShareDatastore { host: "there".to_owned(), location };
        share(&self.services, &self.caller, "local", request, dry_run).await
    }

    async fn unshare(&self, host: &str) -> Result<Outcome<()>, Problem> {
        unshare(&self.services, &self.caller, "local", host, false).await
    }

    async fn hosts(&self) -> Vec<String> {
        let known = find(&self.services, "local").await.unwrap();
        known.hosts.into_iter().map(|on| on.host_name).collect()
    }

    /// Makes a VM with one disk; gives its row.
    async fn create(
        &self,
        name: &str,
        datastore: &str,
        host: Option<&str>,
    ) -> Result<crate::store::vms::Vm, Problem> {
        let disk = CreateDisk {
            name: "root".to_owned(),
            datastore: datastore.to_owned(),
            size: 1 << 20,
            image: None,
            format: None,
            force: false,
            encrypted: None,
        };
        let request = CreateVm {
            name: name.to_owned(),
            policy: "encrypted".to_owned(),
            vcpus: 1,
            memory: 32 << 20,
            host: host.map(str::to_owned),
            disks: vec![disk],
            description: String::new(),
            labels: Default::default(),
            autostart: false,
            migration_encryption: Default::default(),
            nics: Vec::new(),
            hardware: Default::default(),
            cloud_init: None,
            uefi_variables: None,
            tpm_state: None,
        };
        let begun = create_vm::create(&self.services, &self.caller, request, false).await?;
        let Outcome::Done(task) = begun else { panic!("nothing was begun") };
        let ended = self.fixture.ended(task.id).await;
        assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
        Ok(self.fixture.vm(ended.operation.vm().unwrap()).await.unwrap())
    }
}

#[tokio::test]
async fn vms_of_both_hosts_have_disks_on_a_shared_datastore() {
    let bench = Bench::new().await;
    let Outcome::Planned(plan) = bench.share(true).await.unwrap() else { panic!("it was done") };
    assert_eq!(plan.steps.len(), 3, "{plan:?}");
    assert!(!bench.there.is_marked_shared(bench.datastore));
    let Outcome::Done(shown) = bench.share(false).await.unwrap() else { panic!("not done") };
    let hosts: Vec<_> = shown.hosts.iter().map(|on| on.host.as_str()).collect();
    assert_eq!(hosts, ["here", "there"]);
    assert!(bench.there.is_marked_shared(bench.datastore));
    let again = bench.share(false).await.unwrap_err();
    assert_eq!(again.code, ErrorCode::AlreadyExists, "{again}");

    // Each agent is told of its own place.
    let there = bench.create("one", "local", Some("there")).await.unwrap();
    assert_eq!(there.host, bench.host);
    let disks = bench.fixture.disks(there.id).await;
    assert_eq!(disks[0].datastore.location, DatastoreLocation::Dir { path: PLACE.into() });
    assert!(bench.there.disks().contains_key(&disks[0].id), "it is not on its host");
    let here = bench.create("two", "here:local", None).await.unwrap();
    assert_eq!(here.host, bench.fixture.host);
    let disks = bench.fixture.disks(here.id).await;
    assert!(bench.fixture.agent.disks().contains_key(&disks[0].id));
    let nowhere = bench.create("three", "here:local", Some("there")).await.unwrap_err();
    assert_eq!(nowhere.field.as_deref(), Some("host"), "{nowhere}");

    // A disk is added where its VM is.
    let (_, known) = vms::find(&bench.services, "one").await.unwrap();
    assert_eq!(known.len(), 1);
    let used = bench.unshare("there").await.unwrap_err();
    assert_eq!(used.code, ErrorCode::InUse);
    assert!(used.detail.contains("'one'") && !used.detail.contains("'two'"), "{used}");
}

#[tokio::test]
async fn a_vm_is_placed_on_a_host_that_answers() {
    let bench = Bench::new().await;
    bench.share(false).await.unwrap();
    bench.fixture.agent.set_reachable(false);
    bench
        .fixture
        .eventually("the first host is away", async || {
            bench.fixture.hosts.connected(bench.fixture.host).is_err().then_some(())
        })
        .await;
    let placed = bench.create("one", "local", None).await.unwrap();
    assert_eq!(placed.host, bench.host);
    // It is looked at where it can be.
    let (on, _) = reached(&bench.services, &find(&bench.services, "local").await.unwrap(), "local")
        .map(|(on, agent)| (on.host_name.clone(), agent))
        .unwrap();
    assert_eq!(on, "there");
    let named = bench.create("two", "here:local", None).await.unwrap_err();
    assert_eq!(named.code, ErrorCode::Unreachable, "{named}");
}

#[tokio::test]
async fn hosts_that_do_not_see_each_others_locks_share_nothing() {
    let bench = Bench::new().await;
    bench.there.set_local_locks(true);
    let refused = bench.share(false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
    assert!(refused.detail.contains("host 'there'"), "{refused}");
    bench.there.set_local_locks(false);
    bench.there.change_mark(Path::new(PLACE));
    for dry_run in [true, false] {
        let refused = bench.share(dry_run).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    }
    assert_eq!(bench.hosts().await, ["here"]);
    assert!(!bench.there.is_marked_shared(bench.datastore));
}

#[tokio::test]
async fn an_agent_of_before_shares_nothing() {
    let bench = Bench::new().await;
    bench.fixture.restart_agent_without(&[SHARED_DATASTORES]).await;
    let refused = bench.share(false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
    assert!(refused.detail.contains("'here'"), "{refused}");
}

/// Whatever is lost on the way, nothing is shared without the mark, and a second attempt succeeds.
#[tokio::test]
async fn a_check_that_is_interrupted_is_made_again() {
    for fault in [Fault::LoseRequest, Fault::LoseAnswer, Fault::Crash, Fault::CrashAfter] {
        // Hold, release and mark are asked of the first host, in between the other one tries.
        for (on_first, nth) in [(true, 1), (true, 2), (true, 3), (false, 1)] {
            let bench = Bench::new().await;
            let agent = if on_first { &bench.fixture.agent } else { &bench.there };
            agent.inject(Call::ShareDatastore, nth, fault);
            let first = bench.share(false).await;
            let is_shared = bench.there.is_marked_shared(bench.datastore);
            assert!(first.is_err() || is_shared, "{fault:?} {on_first} {nth}");
            assert_eq!(bench.hosts().await.len(), if first.is_ok() { 2 } else { 1 });
            if first.is_err() {
                bench
                    .fixture
                    .eventually("the second attempt", async || bench.share(false).await.ok())
                    .await;
            }
            assert_eq!(bench.hosts().await, ["here", "there"]);
        }
    }
}

#[tokio::test]
async fn the_last_host_of_a_datastore_stays() {
    let bench = Bench::new().await;
    let last = bench.unshare("here").await.unwrap_err();
    assert_eq!(last.code, ErrorCode::InUse, "{last}");
    bench.share(false).await.unwrap();
    let stranger = bench.unshare("nobody").await.unwrap_err();
    assert_eq!(stranger.code, ErrorCode::NotFound, "{stranger}");
    bench.unshare("here").await.unwrap();
    assert_eq!(bench.hosts().await, ["there"]);
    let kinds = ["datastore.shared", "datastore.unshared"];
    for kind in kinds {
        assert_eq!(bench.fixture.events(kind).await.len(), 1, "{kind}");
    }
}

/// The server takes the key of a pool over from its hosts while another host gets it.
#[tokio::test]
async fn a_pool_is_not_shared_by_a_way_that_is_the_former_one_by_then() {
    let bench = Bench::new().await;
    bench.fixture.add_pool("ceph", Vec::new()).await;
    let before = find(&bench.services, "ceph").await.unwrap();
    let with = ShareDatastore { host: "there".to_owned(), location: None };
    let there = new_host(&bench.services, &before, with).await.unwrap();
    let (id, here) = (before.id, before.hosts[0].clone());
    let mut location = here.location;
    let DatastoreLocation::Rbd { pool, .. } = &mut location else { unreachable!() };
    pool.keyring = None;
    let mut write = bench.fixture.store.write().await.unwrap();
    datastores::set_location(&mut write, id, here.host, &location).await.unwrap();
    write.commit().await.unwrap();
    let shared = share_with(&bench.services, &bench.caller, before, &there, false).await;
    let refused = shared.map(drop).unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    assert!(refused.detail.contains("it is not shared. Try again"), "{refused}");
    assert_eq!(find(&bench.services, "ceph").await.unwrap().hosts.len(), 1);
}
