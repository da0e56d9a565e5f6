//! Clones for another host: how they get there, what the dry run says, and which requests are refused.

use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::host::Allocation;
use vmseal_api::host::version::{MIGRATE_APART, MIGRATE_AT_REST};
use vmseal_api::id::{DiskId, HostId};
use vmseal_api::model::{Plan, Replication, Task as Shown};
use vmseal_api::request::{CloneVm, DrainHost};
use vmseal_secret::sealed_box::Recipient;

use super::mirror::second;
use super::*;
use crate::services::{Caller, Outcome, Privilege, Services, clone_vm, create_vm, drain};
use crate::store::disks::Disk;
use crate::store::{datastores, disks, policies};

/// The name of the other host.
const OTHER_HOST: &str = "there";

/// Two hosts; the first has the VM `web`, which is off.
struct Bench {
    fixture: Fixture,
    services: Services,
    me: Caller,
    origin: VmId,
    other: HostId,
    there: SimulatedHost,
}

impl Bench {
    async fn new() -> Self {
        Self::with_policy(|policy| policy).await
    }

    /// The same with this change of the policy `encrypted`.
    async fn with_policy(changed: impl FnOnce(policies::Policy) -> policies::Policy) -> Self {
        let fixture = Fixture::new().await;
        let mut write = fixture.store.write().await.unwrap();
        let policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
        policies::set(&mut write, &changed(policy)).await.unwrap();
        write.commit().await.unwrap();
        let origin = fixture.made("web", "encrypted").await;
        let (other, there) = fixture.add_host(OTHER_HOST).await;
        let services = fixture.services(Recipient::generate().unwrap());
        Self { fixture, services, me: Caller::administrator("me"), origin, other, there }
    }

    async fn add_datastore(&self, name: &str) {
        self.fixture.add_datastore(self.other, OTHER_HOST, name).await;
    }

    async fn ask(&self, request: CloneVm, dry_run: bool) -> Result<Outcome<Shown>, Problem> {
        clone_vm::clone(&self.services, &self.me, "web", request, dry_run).await
    }

    async fn planned(&self, request: CloneVm) -> Plan {
        let planned = self.ask(request, true).await;
        let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
        plan
    }

    /// A clone of the VM `web` that is made.
    async fn cloned(&self, request: CloneVm) -> (VmId, Vec<Disk>) {
        let begun = self.ask(request, false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
        assert_eq!(task.kind, "vm.clone");
        self.fixture.ends_well(task.id).await;
        let vm = self.fixture.task(task.id).await.operation.vm().unwrap();
        assert_eq!(self.fixture.vm(vm).await.unwrap().host, self.other);
        (vm, self.fixture.disks(vm).await)
    }

    /// A clone there is refused, by a dry run as well, with this field, and this is why.
    async fn refused(&self, request: impl Fn() -> CloneVm, field: &str, why: &str) -> Problem {
        let [tried, done] = [true, false].map(|dry_run| self.ask(request(), dry_run));
        let (tried, done) = (tried.await.unwrap_err(), done.await.unwrap_err());
        assert_eq!(tried, done);
        assert_eq!(tried.field.as_deref(), Some(field), "{tried}");
        assert!(tried.detail.contains(why), "{tried}");
        tried
    }
}

fn to_host(name: &str) -> CloneVm {
    CloneVm {
        name: name.to_owned(),
        snapshot: None,
        host: Some(OTHER_HOST.to_owned()),
        datastore: None,
        linked: false,
        cloud_init: None,
        quiesce: true,
        rate: None,
    }
}

fn on(datastore: &str, name: &str) -> CloneVm {
    CloneVm { datastore: Some(datastore.to_owned()), ..to_host(name) }
}

fn places(disks: &[Disk]) -> Vec<&str> {
    disks.iter().map(|disk| disk.datastore_name.as_str()).collect()
}

fn has_step(plan: &Plan, step: &str) -> bool {
    plan.steps.iter().any(|it| it == step)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_way_follows_from_the_datastores_that_the_hosts_have() {
    let bench = Bench::new().await;
    bench.refused(|| to_host("copy"), "host", "it has no datastore for the disks").await;

    bench.add_datastore("far").await;
    let plan = bench.planned(to_host("copy")).await;
    assert!(plan.steps[0].contains("choose host 'there'"), "{plan:?}");
    assert!(plan.steps[0].contains("disk0 (1 MiB on datastore 'far')"), "{plan:?}");
    assert!(plan.steps[1].contains("on host 'here' first"), "{plan:?}");
    assert!(plan.steps[1].contains("disk1 (on datastore 'local')"), "{plan:?}");
    assert!(plan.steps[1].contains("what is sent is encrypted"), "{plan:?}");
    assert!(has_step(&plan, "send the disks to the other host"), "{plan:?}");
    let (vm, disks) = bench.cloned(to_host("sent")).await;
    assert_eq!(places(&disks), ["far"; 2]);
    let told = bench.fixture.events("vm.created").await.pop().unwrap();
    assert!(told.detail.starts_with("on host 'there', policy 'encrypted'"), "{told:?}");
    assert!(told.detail.contains("sent from the host that made it, encrypted"), "{told:?}");
    assert_ne!(
        bench.fixture.vm(vm).await.unwrap().key,
        bench.fixture.vm(bench.origin).await.unwrap().key
    );

    // One that both have comes before one that the other host has alone.
    let second = second(&bench.fixture).await;
    let mut write = bench.fixture.store.write().await.unwrap();
    let shared = datastores::OnHost {
        host: bench.other,
        host_name: OTHER_HOST.to_owned(),
        ..second.hosts[0].clone()
    };
    datastores::insert_host(&mut write, &second, &shared).await.unwrap();
    write.commit().await.unwrap();
    let plan = bench.planned(to_host("copy")).await;
    assert!(plan.steps[1].contains("nothing is sent to the other host"), "{plan:?}");
    assert!(!has_step(&plan, "send the disks to the other host"), "{plan:?}");
    assert_eq!(places(&bench.cloned(to_host("shared")).await.1), ["second"; 2]);

    // Those of the VM's disks come before that, and one that is named before all.
    bench.fixture.share_datastore(bench.other, OTHER_HOST).await;
    assert_eq!(places(&bench.cloned(to_host("beside")).await.1), ["local"; 2]);
    assert_eq!(places(&bench.cloned(on("second", "named")).await.1), ["second"; 2]);
    assert_eq!(places(&bench.cloned(on("far", "named-far")).await.1), ["far"; 2]);
    assert_eq!(places(&bench.fixture.disks(bench.origin).await), ["local"; 2]);
}

/// The host of the VM itself is no other one.
#[tokio::test]
async fn the_host_of_the_vm_may_be_named_as_well() {
    let bench = Bench::new().await;
    let here = || CloneVm { host: Some("here".to_owned()), ..to_host("copy") };
    let plan = bench.planned(here()).await;
    assert!(plan.steps[0].contains("choose host 'here'"), "{plan:?}");
    let Ok(Outcome::Done(task)) = bench.ask(here(), false).await else { panic!("not begun") };
    bench.fixture.ends_well(task.id).await;
    let vm = bench.fixture.task(task.id).await.operation.vm().unwrap();
    assert_eq!(bench.fixture.vm(vm).await.unwrap().host, bench.fixture.host);
}

/// A new TPM, and what cloud-init is told, go there, too; and a VM that runs is cloned.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_that_a_clone_of_a_vm_that_runs_has_is_sent() {
    let bench = Bench::new().await;
    bench.add_datastore("far").await;
    let wanted =
        vmseal_api::request::CreateVm { name: "whole".to_owned(), ..tpm::request("encrypted") };
    let begun = create_vm::create(&bench.services, &bench.me, wanted, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    bench.fixture.ends_well(task.id).await;
    let origin = bench.fixture.task(task.id).await.operation.vm().unwrap();
    bench.fixture.done(Operation::StartVm { vm: origin, boot_once: None }, "whole").await;
    let user_data = Some("#!".to_owned().into());
    let told = vmseal_api::cloud_init::CloudInit { user_data, ..Default::default() };
    let request = CloneVm { cloud_init: Some(told), ..to_host("copy") };
    let begun = clone_vm::clone(&bench.services, &bench.me, "whole", request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    bench.fixture.ends_well(task.id).await;
    let vm = bench.fixture.task(task.id).await.operation.vm().unwrap();
    let disks = bench.fixture.disks(vm).await;
    let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
    assert_eq!(names, ["disk0", "cloud-init", "tpm"]);
    assert_eq!(places(&disks), ["far"; 3]);
    assert!(bench.fixture.agent.runs(origin), "the guest goes on");
    bench.fixture.done(Operation::StartVm { vm, boot_once: None }, "copy").await;
    assert!(bench.there.runs(vm));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_at_the_other_host_is_refused() {
    let bench = Bench::new().await;
    let nowhere = || CloneVm { host: Some("nowhere".to_owned()), ..to_host("copy") };
    let refused = bench.refused(nowhere, "host", "nowhere").await;
    assert_eq!(refused.code, ErrorCode::NotFound);
    bench.add_datastore("far").await;
    bench.refused(|| on("local", "copy"), "datastore", "the clone is for host 'there'").await;

    super::snapshots::taken(&bench.fixture, bench.origin, "base").await;
    let linked = |datastore: Option<&str>| CloneVm {
        snapshot: Some("base".to_owned()),
        linked: true,
        datastore: datastore.map(str::to_owned),
        ..to_host("copy")
    };
    bench.refused(|| linked(None), "host", "does not have datastore 'local'").await;
    bench.refused(|| linked(Some("far")), "host", "a linked clone shares the files").await;

    let without = Privilege::ALL.into_iter().filter(|it| *it != Privilege::Migrate).collect();
    let caller = Caller::new("you", without);
    let asked = clone_vm::clone(&bench.services, &caller, "web", to_host("copy"), true);
    let forbidden = asked.await.unwrap_err();
    assert_eq!(forbidden.code, ErrorCode::Forbidden);
    assert!(forbidden.detail.contains("'migrate'"), "{forbidden}");

    // What is looked at first is taken last.
    for feature in [MIGRATE_APART, MIGRATE_AT_REST] {
        bench.there.lack_features(&[feature]);
        bench.there.restart();
        let lacks = async || {
            let refused = bench.ask(to_host("copy"), true).await.err()?;
            let says = refused.code == ErrorCode::Unsupported && refused.detail.contains(feature);
            says.then_some(())
        };
        bench.fixture.eventually("the server sees it", lacks).await;
    }
    assert_eq!(bench.fixture.agent.disks().len(), 2, "something was made");
}

/// It is not cloned: where it is does not matter.
#[tokio::test]
async fn a_disk_that_the_snapshot_does_not_keep_decides_nothing() {
    let bench = Bench::new().await;
    super::snapshots::taken(&bench.fixture, bench.origin, "base").await;
    let second = second(&bench.fixture).await;
    bench.fixture.share_datastore(bench.other, OTHER_HOST).await;
    let added = Disk {
        id: DiskId::new(),
        name: "later".to_owned(),
        datastore: second.spec_on(bench.fixture.host).unwrap(),
        datastore_name: second.name.clone(),
        ..bench.fixture.disks(bench.origin).await.remove(1)
    };
    let mut write = bench.fixture.store.write().await.unwrap();
    disks::insert(&mut write, bench.origin, 2, &added).await.unwrap();
    write.commit().await.unwrap();
    let snapshot = Some("base".to_owned());
    let request = CloneVm { snapshot, linked: true, ..to_host("copy") };
    let plan = bench.planned(request).await;
    assert!(plan.steps[1].contains("nothing is sent to the other host"), "{plan:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_in_maintenance_makes_and_gets_no_clone() {
    for host in [OTHER_HOST, "here"] {
        let bench = Bench::new().await;
        bench.add_datastore("far").await;
        let drained = drain::drain(&bench.services, &bench.me, host, DrainHost::default(), false);
        drained.await.map(drop).unwrap();
        let refused = bench.ask(to_host("copy"), true).await.unwrap_err();
        assert!(refused.detail.contains(&format!("host '{host}' is")), "{refused}");
        assert!(refused.detail.contains("vmseal host undrain"), "{refused}");
    }
}

#[tokio::test]
async fn a_datastore_without_room_for_what_is_allocated_at_once_is_refused() {
    let bench = Bench::with_policy(|policy| policies::Policy {
        allocation: Allocation::Preallocated,
        ..policy
    });
    let bench = bench.await;
    bench.add_datastore("far").await;
    bench.there.set_full(true);
    let refused = bench.refused(|| to_host("copy"), "datastore", "of host 'there'").await;
    assert_eq!(refused.code, ErrorCode::NoSpace);
    bench.there.set_full(false);
    bench.planned(to_host("copy")).await;
    // The host that makes it needs the same room, and is asked before there is a task as by a dry run.
    bench.fixture.agent.set_full(true);
    for dry_run in [true, false] {
        let refused = bench.ask(to_host("copy"), dry_run).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::NoSpace, "dry run {dry_run}: {refused}");
        assert!(refused.detail.contains("datastore 'local'"), "dry run {dry_run}: {refused}");
    }
    bench.fixture.agent.set_full(false);
    // Where nothing is sent, the other host says what is left of the datastore that both have.
    bench.fixture.share_datastore(bench.other, OTHER_HOST).await;
    bench.there.set_full(true);
    let refused = bench.refused(|| to_host("copy"), "datastore", "datastore 'local'").await;
    assert_eq!(refused.code, ErrorCode::NoSpace);
    bench.there.set_full(false);
    // Neither refusal has left a task or a name that is taken.
    assert_eq!(places(&bench.cloned(to_host("copy")).await.1), ["local"; 2]);
}

/// A replica is not sent.
#[tokio::test]
async fn a_clone_with_replicas_goes_only_where_both_hosts_have_their_datastore() {
    let bench = Bench::new().await;
    second(&bench.fixture).await;
    bench.add_datastore("far").await;
    let mut write = bench.fixture.store.write().await.unwrap();
    let policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
    let (datastore, bytes_per_second) = ("second".to_owned(), 5 << 20);
    let replica = Some(Replication { datastore, bytes_per_second });
    policies::set(&mut write, &policies::Policy { replica, ..policy }).await.unwrap();
    write.commit().await.unwrap();
    let wanted = vmseal_api::request::CreateVm {
        name: "kept".to_owned(),
        hardware: Default::default(),
        ..tpm::request("encrypted")
    };
    let begun = create_vm::create(&bench.services, &bench.me, wanted, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    bench.fixture.ends_well(task.id).await;
    let ask = async || {
        let asked = clone_vm::clone(&bench.services, &bench.me, "kept", to_host("copy"), true);
        asked.await
    };
    let refused = ask().await.unwrap_err();
    assert!(refused.detail.contains("without their replicas"), "{refused}");
    // The datastore of the disks alone is not enough.
    bench.fixture.share_datastore(bench.other, OTHER_HOST).await;
    let refused = ask().await.unwrap_err();
    assert!(refused.detail.contains("does not have datastore 'second'"), "{refused}");
}

/// As long as a task sends disks to a datastore, it stays with that host.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_datastore_to_which_disks_are_sent_is_not_taken_away() {
    let bench = Bench::new().await;
    bench.add_datastore("far").await;
    bench.there.set_work(LONG);
    let Ok(Outcome::Done(task)) = bench.ask(to_host("copy"), false).await else {
        panic!("it is not begun")
    };
    let remove = crate::services::datastores::remove(&bench.services, &bench.me, "far", true);
    let refused = remove.await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::InUse);
    assert!(refused.detail.contains(&task.id.to_string()), "{refused}");
    bench.fixture.engine.cancel(&task.id.to_string(), "me").await.unwrap();
    assert_eq!(bench.fixture.ended(task.id).await.state, TaskState::Cancelled);
    crate::services::datastores::remove(&bench.services, &bench.me, "far", false).await.unwrap();
}
