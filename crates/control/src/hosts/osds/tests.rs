//! A policy that asks for encrypted OSDs, and where disks are shown to be encrypted.

use vmseal_api::datastore::{MountFacts, SetDatastore};
use vmseal_api::host::{DatastoreLocation, Power};
use vmseal_api::id::VmId;
use vmseal_api::model::TaskState;
use vmseal_api::osd_encryption::{AskedOsds, OsdEncryption, OsdsUnknown, StatedOsds};
use vmseal_api::request::{MoveVm, SetPolicy, StartVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::operation::Operation;
use crate::services::caller::Caller;
use crate::services::datastores as service;
use crate::services::{Outcome, Services, create_vm, mirror, set_policy, vms};
use crate::store::datastores::OnHost;
use crate::testing::Fixture;

const ENCRYPTED: OsdEncryption = OsdEncryption::Yes { osds: 3 };
const PLAIN: OsdEncryption = OsdEncryption::No { osds: 3, plain: 1 };
const NOT_ALLOWED: OsdEncryption = OsdEncryption::Unknown { why: OsdsUnknown::NotAllowed };

/// A VM whose disks are on a directory, beside a pool.
struct Bench {
    fixture: Fixture,
    services: Services,
    me: Caller,
    vm: VmId,
}

impl Bench {
    async fn new(policy: &str) -> Self {
        let fixture = Fixture::new().await;
        fixture.add_pool("ceph", Vec::new()).await;
        let vm = fixture.made("web", policy).await;
        let services = fixture.services(Recipient::generate().unwrap());
        Self { fixture, services, me: Caller::administrator("me"), vm }
    }

    /// A VM whose disks have replicas in the pool.
    async fn replicated() -> Self {
        let fixture = Fixture::new().await;
        fixture.add_pool("ceph", Vec::new()).await;
        let services = fixture.services(Recipient::generate().unwrap());
        let me = Caller::administrator("me");
        let to = SetPolicy { replicate_to: Some("ceph".to_owned()), ..SetPolicy::default() };
        set_policy::set(&services, &me, "encrypted", to, false).await.map(drop).unwrap();
        let vm = fixture.requested(&services, Fixture::request("web", "encrypted")).await;
        Self { fixture, services, me, vm }
    }

    /// The monitors tell it the host.
    async fn told(&self, told: OsdEncryption) {
        let mut write = self.fixture.store.write().await.unwrap();
        let ceph = datastores::find(&mut write, "ceph").await.unwrap().unwrap();
        datastores::set_osds_told(&mut write, ceph.id, told, self.fixture.host).await.unwrap();
        write.commit().await.unwrap();
    }

    async fn state(&self, stated: StatedOsds) {
        let request = SetDatastore { osd_encryption: Some(stated), ..SetDatastore::default() };
        service::set(&self.services, &self.me, "ceph", request, false).await.unwrap();
    }

    /// Changes the policy; what it asks for then, or what a dry run says.
    async fn asks(&self, asked: AskedOsds, dry_run: bool) -> String {
        let request = SetPolicy { osd_encryption: Some(asked), ..SetPolicy::default() };
        let set = set_policy::set(&self.services, &self.me, "encrypted", request, dry_run);
        match set.await.unwrap() {
            Outcome::Planned(plan) => plan.steps.concat(),
            Outcome::Done(policy) => format!("{:?}", policy.osd_encryption),
        }
    }

    async fn moved(&self) -> Result<(), Problem> {
        let request = MoveVm { datastore: "ceph".to_owned(), disks: Vec::new(), rate: None };
        match mirror::move_disks(&self.services, &self.me, "web", request, false).await? {
            Outcome::Done(task) => self.fixture.ends_well(task.id).await,
            Outcome::Planned(_) => panic!("it is not asked for a plan"),
        }
        Ok(())
    }

    fn start(&self) -> Operation {
        Operation::StartVm { vm: self.vm, boot_once: None }
    }

    /// Why the VM does not start: a dry run and the task say the same.
    async fn does_not_start(&self) -> String {
        let request = StartVm::default();
        let planned = vms::start(&self.services, &self.me, "web", request, true).await;
        let refused = planned.map(drop).unwrap_err().detail;
        let ended = self.fixture.ended(self.fixture.begin(self.start(), "web").await).await;
        assert_eq!(ended.state, TaskState::Failed);
        let problem = ended.problem.unwrap();
        assert!(problem.detail.contains(&refused), "{problem}, and {refused}");
        self.fixture.assert_whole(self.vm, Power::Off, "it was not started").await;
        refused
    }

    /// Where the first disk is shown to be encrypted.
    async fn shown(&self) -> EncryptionPlace {
        let vm = vms::show(&self.services, &self.me, "web").await.unwrap();
        vm.disks[0].encrypted_at.unwrap()
    }
}

#[tokio::test]
async fn disks_of_a_policy_that_asks_for_encrypted_osds_are_on_such_alone() {
    let bench = Bench::new("encrypted").await;
    assert!(bench.asks(AskedOsds::Required, true).await.contains("no VM needs anything"));
    assert_eq!(bench.asks(AskedOsds::Required, false).await, "Some(Required)");
    for (told, why) in [
        (None, "were not asked yet"),
        (Some(NOT_ALLOWED), "ceph auth caps client.vmseal mon"),
        (Some(PLAIN), "for 1 of 3 OSDs"),
    ] {
        if let Some(told) = told {
            bench.told(told).await;
        }
        let refused = bench.moved().await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains(why), "{refused}");
        assert!(refused.detail.contains("policy set encrypted --osd-encryption any"), "{refused}");
    }
    bench.told(ENCRYPTED).await;
    bench.moved().await.unwrap();

    // An OSD in the clear is added later.
    bench.told(PLAIN).await;
    assert!(bench.does_not_start().await.contains("for 1 of 3 OSDs"));
    let planned = bench.asks(AskedOsds::Required, true).await;
    assert!(planned.contains("VM 'web': its disk") && planned.contains("'ceph'"), "{planned}");
    // It is encrypted by other means.
    bench.state(StatedOsds::Yes).await;
    bench.fixture.done(bench.start(), "web").await;
    let stop = Operation::StopVm { vm: bench.vm, force: true, timeout_seconds: 0 };
    bench.fixture.done(stop, "web").await;
    bench.state(StatedOsds::Ask).await;
    bench.does_not_start().await;
    assert_eq!(bench.asks(AskedOsds::Any, false).await, "None");
    bench.fixture.done(bench.start(), "web").await;
}

#[tokio::test]
async fn replicas_of_a_policy_that_asks_for_encrypted_osds_are_on_such_alone() {
    let bench = Bench::replicated().await;
    let created = async || {
        let request = Fixture::request("other", "encrypted");
        create_vm::create(&bench.services, &bench.me, request, true).await.map(drop)
    };
    created().await.unwrap();
    let planned = bench.asks(AskedOsds::Required, true).await;
    let told = "VM 'web': the replica of its disk 'disk0' is in datastore 'ceph'";
    assert!(planned.contains(told), "{planned}");
    assert!(planned.contains("vmseal backup restore"), "{planned}");
    assert_eq!(bench.asks(AskedOsds::Required, false).await, "Some(Required)");
    let refused = created().await.unwrap_err();
    let at = (refused.code, refused.field.as_deref());
    assert_eq!(at, (ErrorCode::WrongState, Some("disks")));
    assert!(refused.detail.contains("the replica of disk 'disk0' is in datastore"), "{refused}");
    assert!(refused.detail.contains("policy set encrypted --replicate-to"), "{refused}");
    assert!(bench.does_not_start().await.contains("the replica of disk 'disk0'"));
    bench.told(PLAIN).await;
    assert!(bench.does_not_start().await.contains("for 1 of 3 OSDs"));

    bench.told(ENCRYPTED).await;
    created().await.unwrap();
    bench.fixture.done(bench.start(), "web").await;
}

#[tokio::test]
async fn it_is_shown_where_a_disk_is_encrypted() {
    for (policy, local, unknown, plain, encrypted) in [
        (
            "encrypted",
            EncryptionPlace::Client,
            EncryptionPlace::ClientOsdUnknown,
            EncryptionPlace::Client,
            EncryptionPlace::Both,
        ),
        (
            "plain",
            EncryptionPlace::None,
            EncryptionPlace::NoneOsdUnknown,
            EncryptionPlace::None,
            EncryptionPlace::Osd,
        ),
    ] {
        let bench = Bench::new(policy).await;
        assert_eq!(bench.shown().await, local);
        bench.moved().await.unwrap();
        assert_eq!(bench.shown().await, unknown);
        for (told, place) in [(NOT_ALLOWED, unknown), (PLAIN, plain), (ENCRYPTED, encrypted)] {
            bench.told(told).await;
            assert_eq!(bench.shown().await, place);
        }
        bench.state(StatedOsds::No).await;
        assert_eq!(bench.shown().await, plain);
        let shown = service::show(&bench.services, &bench.me, "ceph").await.unwrap();
        let facts = OsdFacts { stated: Some(false), told: Some(ENCRYPTED) };
        assert_eq!(shown.osd_encryption, Some(facts));
        let directory = service::show(&bench.services, &bench.me, "local").await.unwrap();
        assert_eq!(directory.osd_encryption, None);
    }
}

#[tokio::test]
async fn nothing_is_stated_of_the_osds_of_a_directory_and_a_dry_run_states_nothing() {
    let bench = Bench::new("encrypted").await;
    let set = async |datastore, osd_encryption, dry_run| {
        let request = SetDatastore { osd_encryption, ..SetDatastore::default() };
        service::set(&bench.services, &bench.me, datastore, request, dry_run).await.map(drop)
    };
    let yes = Some(StatedOsds::Yes);
    for (datastore, stated) in [("local", yes), ("ceph", None)] {
        let refused = set(datastore, stated, false).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::InvalidRequest);
        assert_eq!(refused.field.as_deref(), Some("osd_encryption"));
    }
    let stated = async || {
        let shown = service::show(&bench.services, &bench.me, "ceph").await.unwrap();
        shown.osd_encryption.unwrap().stated
    };
    set("ceph", yes, true).await.unwrap();
    assert_eq!(stated().await, None);
    set("ceph", yes, false).await.unwrap();
    assert_eq!(stated().await, Some(true));
    assert_eq!(bench.fixture.events("datastore.changed").await.len(), 1);
}

#[tokio::test]
async fn a_pool_that_the_policy_does_not_allow_is_no_place_for_disks_that_move_with_their_vm() {
    let bench = Bench::new("encrypted").await;
    let mut read = bench.fixture.store.read().await.unwrap();
    let ceph = datastores::find(&mut read, "ceph").await.unwrap().unwrap();
    let policy = crate::store::policies::find(&mut read, "encrypted").await.unwrap().unwrap();
    let host = bench.fixture.host;
    assert_eq!(refusal(&policy, &ceph, host), None);
    let secure = Policy { messenger: Some(Messenger::Secure), ..policy.clone() };
    assert!(refusal(&secure, &ceph, host).unwrap().contains("messenger 'crc'"));
    // It is to be reached with 'secure' now, and is mounted as it was.
    let mut changed = ceph.clone();
    let DatastoreLocation::Rbd { pool, .. } = &mut changed.hosts[0].location else {
        panic!("it is a directory")
    };
    let (way, cluster) = (pool.way(), "fsid".to_owned());
    pool.messenger = Messenger::Secure;
    let mounted = MountFacts { way, messenger: Messenger::Crc, cluster, between_osds: None };
    changed.hosts[0].mount = Some(mounted);
    assert!(refusal(&secure, &changed, host).unwrap().contains("still has it mounted"));
    // Another host that shares it, at the same place, has mounted it anew.
    let there = HostId::new();
    let on = OnHost { host: there, mount: None, ..changed.hosts[0].clone() };
    changed.hosts.push(on);
    assert_eq!(refusal(&secure, &changed, there), None);
    assert!(refusal(&secure, &changed, host).is_some());
    let required = Policy { osd_encryption: Some(AskedOsds::Required), ..policy };
    assert!(refusal(&required, &ceph, host).unwrap().contains("not asked yet"));
    let mut encrypted = ceph.clone();
    encrypted.osds.facts.told = Some(ENCRYPTED);
    assert_eq!(refusal(&required, &encrypted, host), None);
    let local = datastores::find(&mut read, "local").await.unwrap().unwrap();
    assert_eq!(refusal(&required, &local, host), None);
}
