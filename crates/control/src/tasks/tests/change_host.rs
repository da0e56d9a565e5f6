//! VMs that are off or suspended and get another host: at every point one host has the VM, or none while a task decides, and it can
//! be started where the inventory says that it is.

use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::id::HostId;
use vmseal_api::request::MigrateVm;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::caller::Caller;
use crate::services::migrate::migrate;
use crate::services::{Outcome, Services};
use crate::store::{hosts, placements};

/// The name of the other host.
const OTHER_HOST: &str = "there";

/// How the VM is meanwhile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Rest {
    Off,
    Suspended,
}

async fn other(fixture: &Fixture) -> HostId {
    let found = hosts::find(&mut fixture.store.read().await.unwrap(), OTHER_HOST).await;
    found.unwrap().unwrap().id
}

pub(super) async fn operation(fixture: &Fixture, vm: VmId) -> Operation {
    Operation::ChangeHost { vm, from: fixture.host, to: other(fixture).await }
}

pub(super) fn any(vm: VmId) -> Operation {
    Operation::ChangeHost { vm, from: HostId::new(), to: HostId::new() }
}

impl Rest {
    fn power(self) -> Power {
        match self {
            Self::Off => Power::Off,
            Self::Suspended => Power::Suspended,
        }
    }

    /// A VM that is so, and another host, which has its datastore.
    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let (other, _) = fixture.add_host(OTHER_HOST).await;
        fixture.share_datastore(other, OTHER_HOST).await;
        match self {
            Self::Off => fixture.made("web", "encrypted").await,
            Self::Suspended => {
                let vm = fixture.running("web").await;
                fixture.done(Operation::SuspendVm { vm }, "web").await;
                vm
            }
        }
    }

    /// The other host has it, and the first one knows nothing of it.
    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        let (here, there) = (fixture.agent.clone(), fixture.agent_of(OTHER_HOST));
        self.assert_only_at(fixture, vm, (other(fixture).await, &there), &here, what).await;
        let mut read = fixture.store.read().await.unwrap();
        let next = placements::next_generation(&mut read, vm).await.unwrap();
        assert_eq!(next, 3, "{what}: it has its second placement");
    }

    /// The first host has it, and the other one knows nothing of it.
    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        let (here, there) = (fixture.agent.clone(), fixture.agent_of(OTHER_HOST));
        self.assert_only_at(fixture, vm, (fixture.host, &here), &there, what).await;
    }

    /// One host has the VM with its key and can start it, whose guest goes on if its memory is saved; the other does not know it.
    async fn assert_only_at(
        self,
        fixture: &Fixture,
        vm: VmId,
        (host, agent): (HostId, &SimulatedHost),
        former: &SimulatedHost,
        what: &str,
    ) {
        assert_eq!(fixture.vm(vm).await.unwrap().host, host, "{what}");
        fixture
            .eventually("its host alone knows it and has its key", async || {
                let only = agent.keys_held().contains(&vm) && !former.registered().contains(&vm);
                only.then_some(())
            })
            .await;
        let seen = async || fixture.hosts.view(host).vm(vm).map(|seen| seen.power);
        fixture
            .eventually("the server sees how it is", async || {
                (seen().await == Some(self.power())).then_some(())
            })
            .await;
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        assert!(agent.runs(vm) && !former.runs(vm), "{what}: where it runs");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_is_off_changes_its_host_or_stays_at_every_step() {
    matrix(Kind::ChangeHost(Rest::Off)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspended_vm_changes_its_host_or_stays_at_every_step() {
    matrix(Kind::ChangeHost(Rest::Suspended)).await;
}

/// Either agent ends, or does not answer, while it is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_that_end_in_the_middle_do_not_matter() {
    for rest in [Rest::Off, Rest::Suspended] {
        for (is_source, call) in
            [(true, Call::UnregisterVm), (false, Call::RegisterVm), (false, Call::OfferKey)]
        {
            for fault in [
                HostFault::LoseRequest,
                HostFault::LoseAnswer,
                HostFault::Crash,
                HostFault::CrashAfter,
            ] {
                let what = format!("{rest:?} {call:?} {fault:?}");
                let fixture = Fixture::new().await;
                let vm = rest.before(&fixture).await;
                let agent =
                    if is_source { fixture.agent.clone() } else { fixture.agent_of(OTHER_HOST) };
                agent.inject(call, 1, fault);
                fixture.done(operation(&fixture, vm).await, "web").await;
                rest.assert_done(&fixture, vm, &what).await;
            }
        }
    }
}

#[tokio::test]
async fn what_was_changed_is_told() {
    for (rest, word) in [(Rest::Off, "off"), (Rest::Suspended, "suspended")] {
        let fixture = Fixture::new().await;
        let vm = rest.before(&fixture).await;
        fixture.done(operation(&fixture, vm).await, "web").await;
        let told = fixture.events("vm.migrated").await;
        let told: Vec<_> = told.iter().map(|event| event.detail.as_str()).collect();
        let expected = format!("from host 'here' to host 'there', while it was {word}");
        assert_eq!(told, [expected.as_str()]);
    }
}

/// A datastore that the other host has lost since is found before the inventory names that host.
#[tokio::test]
async fn a_host_that_has_lost_the_datastore_gets_nothing() {
    let fixture = Fixture::new().await;
    let vm = Rest::Off.before(&fixture).await;
    let operation = operation(&fixture, vm).await;
    let disks = fixture.disks(vm).await;
    let mut write = fixture.store.write().await.unwrap();
    let local = disks[0].datastore.datastore;
    crate::store::datastores::delete_host(&mut write, local, other(&fixture).await).await.unwrap();
    write.commit().await.unwrap();
    let task = fixture.begin(operation, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    assert!(ended.problem.unwrap().detail.contains("does not have any more"));
    assert_eq!(fixture.disks(vm).await.len(), disks.len());
    Rest::Off.assert_undone(&fixture, vm, "the datastore is gone").await;
}

fn services(fixture: &Fixture) -> Services {
    fixture.services(Recipient::generate().unwrap())
}

async fn asked(fixture: &Fixture, request: MigrateVm, dry_run: bool) -> Result<String, Problem> {
    let (services, me) = (services(fixture), Caller::administrator("me"));
    match migrate(&services, &me, "web", request, dry_run).await? {
        Outcome::Planned(plan) => Ok(plan.steps.join("\n")),
        Outcome::Done(task) => {
            fixture.ends_well(task.id).await;
            Ok(task.kind)
        }
    }
}

fn to(host: Option<&str>) -> MigrateVm {
    MigrateVm { host: host.map(str::to_owned), ..MigrateVm::default() }
}

#[tokio::test]
async fn a_dry_run_says_what_would_be_done_and_changes_nothing() {
    for rest in [Rest::Off, Rest::Suspended] {
        let fixture = Fixture::new().await;
        let vm = rest.before(&fixture).await;
        for host in [None, Some(OTHER_HOST)] {
            let plan = asked(&fixture, to(host), true).await.unwrap();
            assert!(plan.contains("choose host 'there'; the VM is "), "{plan}");
            assert!(plan.contains("unregister from the former host"), "{plan}");
        }
        assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host);
        assert_eq!(asked(&fixture, to(None), false).await.unwrap(), "vm.migrate");
        rest.assert_done(&fixture, vm, "asked for").await;
    }
}

#[tokio::test]
async fn a_host_without_the_datastore_is_refused_with_what_can_be_done() {
    for (rest, remedy) in [(Rest::Off, "vmseal vm move web"), (Rest::Suspended, "resume the VM")] {
        let fixture = Fixture::new().await;
        let vm = rest.before(&fixture).await;
        let (far, _) = fixture.add_host("far").await;
        fixture.add_datastore(far, "far", "own").await;
        let refused = asked(&fixture, to(Some("far")), true).await.unwrap_err();
        assert!(refused.detail.contains("does not have datastore 'local'"), "{refused}");
        assert!(refused.detail.contains(remedy), "{refused}");
        let named = MigrateVm { datastore: Some("own".to_owned()), ..to(Some("far")) };
        let refused = asked(&fixture, named, true).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("datastore"));
        let refused = asked(&fixture, to(Some("here")), true).await.unwrap_err();
        assert!(refused.detail.contains("it is there already"), "{refused}");
        rest.assert_undone(&fixture, vm, "refused").await;
    }
}

#[tokio::test]
async fn a_vm_of_a_host_that_does_not_answer_stays() {
    let fixture = Fixture::new().await;
    Rest::Off.before(&fixture).await;
    fixture.agent.set_reachable(false);
    let refused = fixture
        .eventually("the server has noticed", async || {
            asked(&fixture, to(Some(OTHER_HOST)), true).await.err()
        })
        .await;
    assert!(refused.detail.contains("may run on its host 'here'"), "{refused}");
}
