use jiff::Timestamp;
use vmseal_api::datastore::{BetweenOsds, MountFacts};
use vmseal_api::host::DatastoreLocation;
use vmseal_api::image_layout::ImageLayout;
use vmseal_api::model::Vm;
use vmseal_api::osd_encryption::AskedOsds;
use vmseal_api::redundancy::{Layout, PoolFacts, PoolLayout, Redundancy};
use vmseal_api::request::SetPolicy;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::caller::Caller;
use crate::services::{Outcome, Services, set_policy, vms as service};
use crate::testing::Fixture;

/// A VM with two disks in a pool of two copies, over connections in the clear.
struct Bench {
    fixture: Fixture,
    services: Services,
    me: Caller,
}

impl Bench {
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        let layout = PoolLayout::Mirroring { copies: 2, copies_min: 1 };
        let (pool, failure_domain) = ("vms".to_owned(), "host".to_owned());
        let facts = PoolFacts { pool, layout, failure_domain, compression: None, fullness: None };
        let pools = vec![facts];
        fixture.add_pool("ceph", pools).await;
        fixture.made("web", "encrypted").await;
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        fixture.move_disks(&services, "web", "ceph").await;
        Self { fixture, services, me }
    }

    /// Changes the policy; what a dry run says, if it is one.
    async fn asks(&self, request: SetPolicy, dry_run: bool) -> String {
        let set = set_policy::set(&self.services, &self.me, "encrypted", request, dry_run);
        match set.await.unwrap() {
            Outcome::Planned(plan) => plan.steps.join("\n"),
            Outcome::Done(_) => String::new(),
        }
    }

    /// What is shown of the VM, alone and in the list.
    async fn shown(&self) -> Compliance {
        let shown = service::show(&self.services, &self.me, "web").await.unwrap();
        let page = service::list(&self.services, &self.me, Default::default(), None).await;
        let is_same = |vm: &Vm| vm.compliance == shown.compliance;
        assert!(page.unwrap().items.iter().all(is_same), "{shown:?}");
        shown.compliance.unwrap()
    }
}

/// What a policy can require, apart from encryption.
fn everything() -> SetPolicy {
    SetPolicy {
        messenger: Some(Messenger::Secure),
        osd_encryption: Some(AskedOsds::Required),
        redundancy: Some(Redundancy { failures: 2, ..Redundancy::default() }),
        object_size: Some(1 << 20),
        ..SetPolicy::default()
    }
}

/// What asks for nothing again.
fn nothing() -> SetPolicy {
    SetPolicy {
        messenger: Some(Messenger::Crc),
        osd_encryption: Some(AskedOsds::Any),
        redundancy: Some(Redundancy::default()),
        object_size: Some(0),
        ..SetPolicy::default()
    }
}

#[tokio::test]
async fn a_vm_is_shown_with_what_of_its_storage_is_not_as_its_policy_requires() {
    let bench = Bench::new().await;
    let compliant = Compliance { compliant: true, deviations: Vec::new() };
    assert_eq!(bench.shown().await, compliant);

    let planned = bench.asks(everything(), true).await;
    assert_eq!(bench.shown().await, compliant, "by a dry run");
    bench.asks(everything(), false).await;
    let shown = bench.shown().await;
    assert!(!shown.compliant);
    let of_disk = [
        Requirement::Redundancy,
        Requirement::ImageLayout,
        Requirement::OsdEncryption,
        Requirement::Messenger,
    ];
    assert_eq!(shown.lacking(), of_disk);
    for disk in ["disk0", "disk1"] {
        let its = shown.deviations.iter().filter(|it| it.disk == disk);
        let its: Vec<_> = its.map(|it| it.requirement).collect();
        assert_eq!(its, of_disk, "{disk}");
    }

    // The plan has said the same, and the alarms do.
    let mut read = bench.fixture.store.read().await.unwrap();
    let raised = alarms(&mut read, bench.fixture.host).await.unwrap();
    drop(read);
    let codes: Vec<_> = raised.iter().map(|it| (it.code, it.target.as_str())).collect();
    let expected = ["less-redundant", "osd-not-encrypted", "messenger-not-secure"];
    assert_eq!(codes, expected.map(|code| (code, "web")));
    for it in shown.deviations.iter().filter(|it| it.disk == "disk0") {
        assert!(it.datastore == "ceph" && !it.replica, "{it:?}");
        let (_, why) = it.detail.split_once("datastore 'ceph': ").unwrap();
        assert!(planned.contains(why), "{why}: {planned}");
        let is_told = raised.iter().any(|alarm| alarm.detail.contains(why));
        assert_eq!(is_told, it.requirement != Requirement::ImageLayout, "{why}: {raised:?}");
    }

    bench.asks(nothing(), false).await;
    assert_eq!(bench.shown().await, compliant);
}

#[tokio::test]
async fn each_requirement_is_judged_alone() {
    let bench = Bench::new().await;
    let fixture = &bench.fixture;
    let mut read = fixture.store.read().await.unwrap();
    let policy = policies::find(&mut read, "encrypted").await.unwrap().unwrap();
    let web = vms::find(&mut read, "web").await.unwrap().unwrap();
    let places = by_id(datastores::of_host(&mut read, fixture.host).await.unwrap());
    let mut layouts = disks::image_layouts(&mut read, web.id, web.id).await.unwrap();
    drop(read);
    let mut disks = fixture.disks(web.id).await;
    let judged = |policy: &Policy, disks: &[Disk], layouts: &HashMap<DiskId, Layouts>| {
        let found = deviations(policy, fixture.host, disks, &places, layouts);
        let told = found.into_iter().map(|it| (it.requirement, it.part.disk().to_owned()));
        told.collect::<Vec<_>>()
    };
    assert!(judged(&policy, &disks, &layouts).is_empty());

    let both = |what| [(what, "disk0".to_owned()), (what, "disk1".to_owned())];
    let secure = Policy { messenger: Some(Messenger::Secure), ..policy.clone() };
    assert_eq!(judged(&secure, &disks, &layouts), both(Requirement::Messenger));
    let required = Policy { osd_encryption: Some(AskedOsds::Required), ..policy.clone() };
    assert_eq!(judged(&required, &disks, &layouts), both(Requirement::OsdEncryption));
    let redundancy = Redundancy { failures: 2, ..Redundancy::default() };
    let redundant = Policy { redundancy, ..policy.clone() };
    assert_eq!(judged(&redundant, &disks, &layouts), both(Requirement::Redundancy));
    let image_layout = ImageLayout { object_size: Some(1 << 20), ..ImageLayout::default() };
    let small = Policy { image_layout, ..policy.clone() };
    assert_eq!(judged(&small, &disks, &layouts), both(Requirement::ImageLayout));
    // Of an image of an earlier version it is not known how it was cut.
    layouts.clear();
    assert!(judged(&small, &disks, &layouts).is_empty());

    disks[1].encrypted = false;
    let clear = vec![(Requirement::Encryption, "disk1".to_owned())];
    assert_eq!(judged(&policy, &disks, &layouts), clear);
    let plain = Policy { encryption: false, ..policy };
    assert!(judged(&plain, &disks, &layouts).is_empty());
}

#[tokio::test]
async fn data_chunks_are_judged_by_those_that_the_pool_has() {
    let bench = Bench::new().await;
    let fixture = &bench.fixture;
    let mut read = fixture.store.read().await.unwrap();
    let policy = policies::find(&mut read, "encrypted").await.unwrap().unwrap();
    let web = vms::find(&mut read, "web").await.unwrap().unwrap();
    let mut ceph = datastores::find(&mut read, "ceph").await.unwrap().unwrap();
    drop(read);
    let disks = fixture.disks(web.id).await;
    ceph.pools[0].layout = PoolLayout::Mirroring { copies: 3, copies_min: 1 };
    let layout = PoolLayout::ErasureCoding { data: 2, coding: 2, parts_min: 2 };
    let data = PoolFacts { pool: "ec".to_owned(), layout, ..ceph.pools[0].clone() };
    ceph.pools.push(data);
    let places = by_id(vec![ceph]);
    for (data_chunks, deviating) in [(None, 0), (Some(2), 0), (Some(4), 2)] {
        let layout = Some(Layout::ErasureCoding);
        let redundancy = Redundancy { failures: 2, layout, data_chunks, failure_domain: None };
        let policy = Policy { redundancy, ..policy.clone() };
        let found = deviations(&policy, fixture.host, &disks, &places, &HashMap::new());
        assert_eq!(found.len(), deviating, "{data_chunks:?}: {found:?}");
        for it in found {
            assert_eq!(it.requirement, Requirement::Redundancy);
            assert_eq!(
                it.why,
                "pool 'ec' has k=2 m=2, not k=4 (data chunks). Policy 'encrypted' asks for 2 failures, erasure-coding, 4 data chunks"
            );
        }
    }
}

/// A mount stays as it was when its pool is set to another messenger.
#[tokio::test]
async fn connections_are_judged_by_the_mount_that_is_there() {
    let bench = Bench::new().await;
    let fixture = &bench.fixture;
    let mut read = fixture.store.read().await.unwrap();
    let policy = policies::find(&mut read, "encrypted").await.unwrap().unwrap();
    let web = vms::find(&mut read, "web").await.unwrap().unwrap();
    let known = datastores::find(&mut read, "ceph").await.unwrap().unwrap();
    drop(read);
    let disks = fixture.disks(web.id).await;
    let secure = Policy { messenger: Some(Messenger::Secure), ..policy };
    // It is the cluster's own, and no part of what a policy requires of a host's connections.
    let between_osds = Some(BetweenOsds::MayBeClear);
    let mounted = |messenger| MountFacts {
        way: "a".to_owned(),
        messenger,
        cluster: "b".to_owned(),
        between_osds,
    };
    let now = Some(Timestamp::now());
    for (mount, changed, deviating) in [
        (Some(mounted(Messenger::Crc)), None, 2),
        (Some(mounted(Messenger::Crc)), now, 2),
        (Some(mounted(Messenger::Secure)), now, 0),
        (None, now, 2),
        (None, None, 0),
    ] {
        let what = format!("{mount:?}, changed: {changed:?}");
        let mut ceph = known.clone();
        let on = &mut ceph.hosts[0];
        let DatastoreLocation::Rbd { pool, .. } = &mut on.location else { panic!("{what}") };
        pool.messenger = Messenger::Secure;
        pool.changed = changed;
        on.mount = mount;
        let found = deviations(&secure, fixture.host, &disks, &by_id(vec![ceph]), &HashMap::new());
        let lacking: Vec<_> = found.into_iter().map(|it| it.requirement).collect();
        assert_eq!(lacking, vec![Requirement::Messenger; deviating], "{what}");
    }
}
