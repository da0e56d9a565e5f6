//! Clones on another datastore: all disks of the clone are on that datastore, and a clone that may not be there is refused. Clones of suspended
//! VMs: they start without the saved memory.

use vmseal_api::datastore::Messenger;
use vmseal_api::hardware::Firmware;
use vmseal_api::host::version::SUSPENDED_SNAPSHOTS;
use vmseal_api::host::{Allocation, DiskRole};
use vmseal_api::model::{Replication, Task as Shown};
use vmseal_api::redundancy::{Layout, Redundancy};
use vmseal_api::request::{CloneVm, SetPolicy};
use vmseal_secret::sealed_box::Recipient;

use super::mirror::second;
use super::*;
use crate::services::{Caller, Outcome, Services, clone_vm, create_vm, set_policy};
use crate::store::disks::Disk;
use crate::store::{policies, vms};

struct Bench {
    fixture: Fixture,
    services: Services,
    me: Caller,
}

impl Bench {
    /// With a host that has two directories and a pool.
    async fn new() -> Self {
        let fixture = Fixture::new().await;
        second(&fixture).await;
        fixture.add_pool("ceph", Vec::new()).await;
        let services = fixture.services(Recipient::generate().unwrap());
        Self { fixture, services, me: Caller::administrator("me") }
    }

    /// Asks for a clone of the VM `web`.
    async fn ask(&self, request: CloneVm, dry_run: bool) -> Result<Outcome<Shown>, Problem> {
        clone_vm::clone(&self.services, &self.me, "web", request, dry_run).await
    }

    /// The disks of a clone of the VM `web`.
    async fn cloned(&self, request: CloneVm) -> Vec<Disk> {
        let begun = self.ask(request, false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
        self.fixture.ends_well(task.id).await;
        let vm = self.fixture.task(task.id).await.operation.vm().unwrap();
        self.fixture.disks(vm).await
    }

    /// What a dry run says: the first step, and the warnings.
    async fn planned(&self, request: CloneVm) -> (String, Vec<String>) {
        let planned = self.ask(request, true).await;
        let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
        (plan.steps[0].clone(), plan.warnings)
    }

    /// A clone there is refused, by a dry run as well, and this is why.
    async fn refused(&self, request: impl Fn() -> CloneVm) -> Problem {
        let [tried, done] = [true, false].map(|dry_run| self.ask(request(), dry_run));
        let (tried, done) = (tried.await.unwrap_err(), done.await.unwrap_err());
        assert_eq!(tried, done);
        assert_eq!(tried.field.as_deref(), Some("datastore"), "{tried}");
        tried
    }

    /// Changes the policy `encrypted` before there are VMs.
    async fn change_policy(&self, changed: impl FnOnce(policies::Policy) -> policies::Policy) {
        let mut write = self.fixture.store.write().await.unwrap();
        let policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
        policies::set(&mut write, &changed(policy)).await.unwrap();
        write.commit().await.unwrap();
    }

    async fn set_policy(&self, request: SetPolicy) {
        let set = set_policy::set(&self.services, &self.me, "encrypted", request, false);
        set.await.map(drop).unwrap();
    }
}

fn to(datastore: &str, name: &str) -> CloneVm {
    CloneVm {
        name: name.to_owned(),
        snapshot: None,
        host: None,
        datastore: Some(datastore.to_owned()),
        linked: false,
        cloud_init: None,
        quiesce: true,
        rate: None,
    }
}

fn places(disks: &[Disk]) -> Vec<&str> {
    disks.iter().map(|disk| disk.datastore_name.as_str()).collect()
}

/// Each disk's image is where the inventory has it.
fn assert_there(fixture: &Fixture, disks: &[Disk]) {
    let images = fixture.agent.disks();
    for disk in disks {
        assert_eq!(images[&disk.id].datastore, disk.datastore.datastore, "{disk:?}");
    }
}

/// From a directory to another one and to a pool, and back from there; the other VM stays where it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_that_a_clone_has_is_on_the_datastore_that_is_named() {
    let bench = Bench::new().await;
    let mut request = tpm::request("encrypted");
    request.hardware.firmware = Firmware::Uefi;
    let begun = create_vm::create(&bench.services, &bench.me, request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    bench.fixture.ends_well(task.id).await;
    let origin = bench.fixture.task(task.id).await.operation.vm().unwrap();
    let told = || {
        let user_data = Some("#!".to_owned().into());
        Some(vmseal_api::cloud_init::CloudInit { user_data, ..Default::default() })
    };

    let (step, _) = bench.planned(to("second", "planned")).await;
    assert!(step.contains("disk0 (1 MiB on datastore 'second')"), "{step}");
    assert!(!step.contains("'local'"), "{step}");
    for datastore in ["second", "ceph"] {
        let request = CloneVm { cloud_init: told(), ..to(datastore, datastore) };
        let disks = bench.cloned(request).await;
        let roles: Vec<_> = disks.iter().map(|disk| disk.role).collect();
        let expected =
            [DiskRole::Data, DiskRole::UefiVariables, DiskRole::CloudInit, DiskRole::Tpm];
        assert_eq!(roles, expected);
        assert_eq!(places(&disks), [datastore; 4]);
        assert_there(&bench.fixture, &disks);
    }
    let disks = bench.fixture.disks(origin).await;
    assert_eq!(places(&disks), ["local"; 3]);
    assert_there(&bench.fixture, &disks);

    // Its data for cloud-init is copied there as well, and from a pool to a directory.
    let begun = clone_vm::clone(&bench.services, &bench.me, "ceph", to("second", "back"), false);
    let begun = begun.await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    bench.fixture.ends_well(task.id).await;
    let back = bench.fixture.task(task.id).await.operation.vm().unwrap();
    let disks = bench.fixture.disks(back).await;
    assert_eq!(places(&disks), ["second"; 4]);
    assert_there(&bench.fixture, &disks);
    bench.fixture.done(Operation::StartVm { vm: back, boot_once: None }, "back").await;
}

#[tokio::test]
async fn a_datastore_that_the_host_does_not_have_is_refused_and_so_is_a_linked_clone_elsewhere() {
    let bench = Bench::new().await;
    let vm = bench.fixture.made("web", "encrypted").await;
    let refused = bench.refused(|| to("nowhere", "copy")).await;
    assert_eq!(refused.code, ErrorCode::NotFound);
    let (other, _) = bench.fixture.add_host("there").await;
    bench.fixture.add_datastore(other, "there", "far").await;
    let refused = bench.refused(|| to("far", "copy")).await;
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("belongs to host 'there'"), "{refused}");

    super::snapshots::taken(&bench.fixture, vm, "base").await;
    let linked = |datastore: &str| {
        let snapshot = Some("base".to_owned());
        CloneVm { snapshot, linked: true, ..to(datastore, "copy") }
    };
    let refused = bench.refused(|| linked("second")).await;
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("is on datastore 'local'"), "{refused}");
    assert!(refused.detail.contains("a linked clone shares its files there"), "{refused}");
    assert_eq!(places(&bench.cloned(linked("local")).await), ["local"; 2]);
    assert_eq!(bench.fixture.agent.disks().len(), 4);
}

/// The policy is asked as for a VM that is created there.
#[tokio::test]
async fn a_datastore_that_is_not_as_the_policy_asks_is_refused() {
    let bench = Bench::new().await;
    bench.fixture.made("web", "encrypted").await;
    bench.set_policy(SetPolicy { messenger: Some(Messenger::Secure), ..Default::default() }).await;
    let refused = bench.refused(|| to("ceph", "copy")).await;
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("with messenger 'crc'"), "{refused}");
    assert_eq!(places(&bench.cloned(to("second", "one")).await), ["second"; 2]);

    bench.set_policy(SetPolicy { messenger: Some(Messenger::Crc), ..Default::default() }).await;
    let layout = Some(Layout::Mirroring);
    let redundancy = Some(Redundancy { failures: 1, layout, ..Redundancy::default() });
    bench.set_policy(SetPolicy { redundancy, ..Default::default() }).await;
    let refused = bench.refused(|| to("second", "copy")).await;
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("a directory"), "{refused}");
    // Where its disks are is no new place, as long as none is named.
    let beside = CloneVm { datastore: None, ..to("", "two") };
    assert_eq!(places(&bench.cloned(beside).await), ["local"; 2]);
}

/// A replica is kept against the loss of the disk's own datastore.
#[tokio::test]
async fn a_clone_is_not_where_its_replicas_are() {
    let bench = Bench::new().await;
    let (datastore, bytes_per_second) = ("second".to_owned(), 5 << 20);
    let replica = Some(Replication { datastore, bytes_per_second });
    bench.change_policy(|policy| policies::Policy { replica, ..policy }).await;
    let request =
        vmseal_api::request::CreateVm { hardware: Default::default(), ..tpm::request("encrypted") };
    let begun = create_vm::create(&bench.services, &bench.me, request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    bench.fixture.ends_well(task.id).await;

    let refused = bench.refused(|| to("second", "copy")).await;
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert!(refused.detail.contains("the replica of disk 'disk0'"), "{refused}");
    let disks = bench.cloned(to("ceph", "copy")).await;
    assert_eq!(places(&disks), ["ceph"]);
    let replica = disks[0].replica.as_ref().map(|(_, name)| name.as_str());
    assert_eq!(replica, Some("second"));
}

/// The dry run looks at the room and the mark of the datastore that is named.
#[tokio::test]
async fn a_dry_run_looks_at_the_datastore_that_is_named() {
    for allocation in [Allocation::Thin, Allocation::Preallocated] {
        let bench = Bench::new().await;
        bench.change_policy(|policy| policies::Policy { allocation, ..policy }).await;
        bench.fixture.made("web", "encrypted").await;
        let (_, warnings) = bench.planned(to("second", "copy")).await;
        assert!(warnings.iter().all(|it| !it.contains("may grow")), "{warnings:?}");
        bench.fixture.agent.set_full(true);
        if allocation == Allocation::Thin {
            let (_, warnings) = bench.planned(to("second", "copy")).await;
            let grows = "on datastore 'second', and 0 bytes are free";
            assert!(warnings.iter().any(|it| it.contains(grows)), "{warnings:?}");
        } else {
            let refused = bench.ask(to("second", "copy"), true).await.unwrap_err();
            let told = (refused.code, refused.field.as_deref());
            assert_eq!(told, (ErrorCode::NoSpace, Some("datastore")), "{refused}");
        }
        bench.fixture.agent.set_full(false);

        bench.fixture.agent.change_mark(std::path::Path::new("/second"));
        let refused = bench.ask(to("second", "copy"), true).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("datastore"), "{refused}");
        assert!(refused.detail.contains("is not marked as datastore"), "{refused}");
        assert_eq!(bench.fixture.agent.disks().len(), 2, "a dry run has made something");
    }
}

/// What a suspended VM's disks hold is cloned without its memory: the clone boots, and the VM stays suspended and goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspended_vm_is_cloned_without_its_memory_and_goes_on() {
    let bench = Bench::new().await;
    let fixture = &bench.fixture;
    let vm = fixture.running("web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let generation = fixture.agent.memory_generation(vm);
    let beside = |name: &str, snapshot: Option<&str>| CloneVm {
        datastore: None,
        snapshot: snapshot.map(str::to_owned),
        ..to("", name)
    };
    let (_, warnings) = bench.planned(beside("copy", None)).await;
    let says = ["VM 'web' is suspended", "as after a power cut"];
    let told = warnings.iter().any(|it| says.iter().all(|said| it.contains(said)));
    assert!(told, "{warnings:?}");
    assert_eq!(places(&bench.cloned(beside("copy", None)).await), ["local"; 2]);
    let told = fixture.events("vm.created").await.pop().unwrap();
    let says = "of a VM that was suspended, as after a power cut";
    assert!(told.detail.contains(says), "{told:?}");
    assert_eq!(places(&bench.cloned(to("second", "there")).await), ["second"; 2]);
    assert!(super::snapshots::rows(fixture, vm).await.is_empty(), "its row is left");
    assert!(super::snapshots::on_host(fixture, vm).await.is_empty(), "a snapshot is left");
    super::snapshots::taken(fixture, vm, "asleep").await;
    for (name, linked) in [("kept", false), ("linked", true)] {
        let request = CloneVm { linked, ..beside(name, Some("asleep")) };
        assert_eq!(places(&bench.cloned(request).await), ["local"; 2], "{name}");
    }

    fixture.assert_whole(vm, Power::Suspended, "it is cloned").await;
    assert_eq!(fixture.agent.memory_generation(vm), generation, "its memory is another one");
    let copy = vms::find(&mut fixture.store.read().await.unwrap(), "copy").await;
    let copy = copy.unwrap().unwrap().id;
    for (vm, name) in [(copy, "copy"), (vm, "web")] {
        fixture.done(Operation::StartVm { vm, boot_once: None }, name).await;
        fixture.assert_whole(vm, Power::Running, name).await;
    }
}

/// An agent of before would refuse it when the task runs.
#[tokio::test]
async fn an_agent_of_before_does_not_clone_a_suspended_vm() {
    let bench = Bench::new().await;
    let vm = bench.fixture.running("web").await;
    bench.fixture.done(Operation::SuspendVm { vm }, "web").await;
    bench.fixture.restart_agent_without(&[SUSPENDED_SNAPSHOTS]).await;
    let request = CloneVm { datastore: None, ..to("", "copy") };
    let refused = bench.ask(request, true).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
    assert!(refused.detail.contains("cannot clone VMs that are suspended"), "{refused}");
}
