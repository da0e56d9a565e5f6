//! A policy that has images cut into objects of another size.

use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::host::Power;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
use vmseal_api::id::{DatastoreId, VmId};
use vmseal_api::model::{self, Connection};
use vmseal_api::request::MoveVm;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::caller::Caller;
use crate::services::{Outcome, mirror, set_policy, vms};
use crate::store::policies;
use crate::testing::Fixture;

const SMALL: u64 = 1 << 20;

fn objects(size: u64) -> ImageLayout {
    ImageLayout { object_size: Some(size), ..ImageLayout::default() }
}

struct Bench {
    fixture: Fixture,
    services: Services,
    me: Caller,
}

impl Bench {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        fixture.add_pool("ceph", Vec::new()).await;
        let services = fixture.services(Recipient::generate().unwrap());
        Self { fixture, services, me: Caller::administrator("me") }
    }

    async fn asks(&self, request: SetPolicy, dry_run: bool) -> Result<String, Problem> {
        let set = set_policy::set(&self.services, &self.me, "encrypted", request, dry_run);
        Ok(match set.await? {
            Outcome::Planned(plan) => plan.steps.concat(),
            Outcome::Done(policy) => policy.image_layout.to_string(),
        })
    }

    async fn moved(&self, to: &str) -> Result<(), Problem> {
        let request = MoveVm { datastore: to.to_owned(), disks: Vec::new(), rate: None };
        match mirror::move_disks(&self.services, &self.me, "web", request, false).await? {
            Outcome::Done(task) => self.fixture.ends_well(task.id).await,
            Outcome::Planned(_) => panic!("it is not asked for a plan"),
        }
        Ok(())
    }

    async fn shown(&self) -> model::Disk {
        let vm = vms::show(&self.services, &self.me, "web").await.unwrap();
        vm.disks.into_iter().next().unwrap()
    }
}

fn size(object_size: u64) -> SetPolicy {
    SetPolicy { object_size: Some(object_size), ..SetPolicy::default() }
}

#[tokio::test]
async fn images_are_cut_as_the_policy_asks_when_they_are_made_and_stay_so() {
    let bench = Bench::new().await;
    let vm = bench.fixture.made("web", "encrypted").await;
    assert_eq!(bench.asks(size(3 << 20), false).await.unwrap_err().field.unwrap(), "object_size");
    let stripes = SetPolicy { stripe_unit: Some(SMALL), ..SetPolicy::default() };
    assert_eq!(bench.asks(stripes, false).await.unwrap_err().field.unwrap(), "stripe_unit");

    // In a directory it means nothing.
    assert!(bench.asks(size(SMALL), true).await.unwrap().contains("no VM needs anything"));
    assert_eq!(bench.asks(size(SMALL), false).await.unwrap(), "objects of 1 MiB");
    assert_eq!(bench.shown().await.image_layout, None);

    bench.moved("ceph").await.unwrap();
    let told = bench.fixture.agent.registered_as(vm).unwrap().images;
    assert_eq!(told, Some(objects(SMALL)), "the host is not told");
    let shown = bench.shown().await;
    assert_eq!((shown.image_layout, shown.wanted_image_layout), (Some(objects(SMALL)), None));

    // A policy that changes later does not change the image.
    let planned = bench.asks(size(2 << 20), true).await.unwrap();
    assert!(planned.contains("its image is in objects of 1 MiB"), "{planned}");
    bench.asks(size(2 << 20), false).await.unwrap();
    let shown = bench.shown().await;
    assert_eq!(shown.image_layout, Some(objects(SMALL)));
    assert_eq!(shown.wanted_image_layout, Some(objects(2 << 20)));
    let page = vms::list(&bench.services, &bench.me, Default::default(), None).await.unwrap();
    assert_eq!(page.items[0].disks[0], shown);
    bench.moved("local").await.unwrap();
    assert_eq!(bench.shown().await.image_layout, None);
    bench.moved("ceph").await.unwrap();
    let shown = bench.shown().await;
    assert_eq!((shown.image_layout, shown.wanted_image_layout), (Some(objects(2 << 20)), None));
    bench.fixture.assert_whole(vm, Power::Off, "it was moved").await;

    // Where a VM arrives, as where it is made.
    let mut read = bench.fixture.store.read().await.unwrap();
    let policy = policies::find(&mut read, "encrypted").await.unwrap().unwrap();
    let place = DatastoreSpec { datastore: DatastoreId::new(), location: pool() };
    let takes = |knows, size| takes(knows, &policy, &place, [size].into_iter());
    assert_eq!(takes(true, SMALL), Ok(()));
    assert!(takes(false, SMALL).unwrap_err().contains("upgrade vmseal there"));
    assert!(takes(true, u64::MAX).unwrap_err().contains("choose larger objects"));
}

#[tokio::test]
async fn an_agent_of_an_earlier_version_is_refused_by_name() {
    let bench = Bench::new().await;
    let vm = bench.fixture.made("web", "encrypted").await;
    bench.fixture.agent.lack_features(&[IMAGE_LAYOUTS]);
    bench.fixture.agent.restart();
    let seen = bench.fixture.eventually("the server sees it", async || {
        let view = bench.services.hosts.view(bench.fixture.host);
        let connected = view.connection == Connection::Connected;
        (connected && !view.has(IMAGE_LAYOUTS)).then_some(())
    });
    seen.await;
    bench.asks(size(SMALL), false).await.unwrap();
    let refused = bench.moved("ceph").await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported);
    assert!(refused.detail.contains("the agent of host 'here' cannot cut images"), "{refused}");
    // What it does not know it is not told, and usual images it makes.
    bench.asks(size(0), false).await.unwrap();
    bench.moved("ceph").await.unwrap();
    assert_eq!(bench.fixture.agent.registered_as(vm).unwrap().images, None);
}

#[test]
fn parts_of_a_layout_change_alone() {
    let striped = ImageLayout { stripe_unit: Some(SMALL), stripe_count: Some(4), ..objects(SMALL) };
    let asks = |request: SetPolicy| changed(striped, &request).unwrap();
    assert_eq!(asks(size(2 << 20)).striping(), Some((SMALL, 4)));
    let count = SetPolicy { stripe_count: Some(8), ..SetPolicy::default() };
    assert_eq!(asks(count).striping(), Some((SMALL, 8)));
    let none = SetPolicy { stripe_count: Some(0), ..SetPolicy::default() };
    assert_eq!(asks(none), objects(SMALL));
    assert_eq!(changed(striped, &size(4096)).unwrap_err().field.unwrap(), "stripe_unit");
}

#[test]
fn copies_in_pools_need_an_agent_that_can_cut_them() {
    let spec = |images| VmSpec {
        vm: VmId::new(),
        name: "web".to_owned(),
        vcpus: 1,
        memory: 1 << 25,
        policy: None,
        key: None,
        hardware: Default::default(),
        devices: Vec::new(),
        snapshots: Vec::new(),
        images,
        about: None,
    };
    let directory = || DatastoreLocation::Dir { path: "/srv".into() };
    let copy = |location| {
        let datastore = DatastoreSpec { datastore: DatastoreId::new(), location };
        [ArrivingCopy { disk: DiskId::new(), datastore }]
    };
    let small = || spec(Some(objects(SMALL)));
    assert!(fits(false, &small(), &copy(pool())).unwrap_err().contains("upgrade vmseal there"));
    for (knows, spec, location) in [
        (true, small(), pool()),
        (false, small(), directory()),
        (false, spec(Some(ImageLayout::default())), pool()),
        (false, spec(None), pool()),
    ] {
        assert_eq!(fits(knows, &spec, &copy(location)), Ok(()));
    }
}

fn pool() -> DatastoreLocation {
    let pool = RbdPool {
        monitors: "v2:10.0.0.1:3300".to_owned(),
        user: "client.vmseal".to_owned(),
        keyring: Some("/etc/ceph/keyring".into()),
        pool: "vms".to_owned(),
        namespace: None,
        data_pool: None,
        messenger: Messenger::Crc,
        create: None,
        changed: None,
    };
    DatastoreLocation::Rbd { path: "/ceph".into(), pool: Box::new(pool) }
}
