//! VMs whose host does not answer get another one: before the inventory says so nothing is done, after that they get there; and the former
//! host ends what it has of them when it answers again.

use std::time::Duration;

use vmseal_api::datastore::{Messenger, RbdPool};
use vmseal_api::fencing::Fencing;
use vmseal_api::host::{DatastoreLocation, DatastoreSpec};
use vmseal_api::id::HostId;
use vmseal_api::osd_encryption::AskedOsds;
use vmseal_api::request::{EvacuateVm, StartVm};
use vmseal_secret::sealed_box::Recipient;

use super::mirror::second;
use super::*;
use crate::services::Outcome;
use crate::services::caller::Caller;
use crate::services::migrate::evacuate::{SILENCE_MIN, evacuate_after};
use crate::store::{datastores, evacuations, hosts, placements, policies};

/// The host that falls silent.
const SILENT: &str = "there";

/// The generation of the placement that an evacuation makes here: it was made, it went to the other host, and it is taken away from there.
const GENERATION: u64 = 3;

/// How the VM was when its host fell silent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Was {
    Off,
    Running,
    Suspended,
}

async fn silent_host(fixture: &Fixture) -> hosts::Host {
    hosts::find(&mut fixture.store.read().await.unwrap(), SILENT).await.unwrap().unwrap()
}

pub(super) fn any(vm: VmId) -> Operation {
    Operation::EvacuateVm { vm, from: HostId::new(), to: HostId::new(), starts: true }
}

impl Was {
    fn power(self) -> Power {
        match self {
            Self::Off => Power::Off,
            Self::Running => Power::Running,
            Self::Suspended => Power::Suspended,
        }
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        let (vm, from, to) = (VmId::new(), HostId::new(), HostId::new());
        steps::of(&Operation::EvacuateVm { vm, from, to, starts: self == Self::Running })
    }

    /// A VM on another host, which falls silent when the VM is so.
    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let vm = self.placed(fixture).await;
        self.falls_silent(fixture, vm).await;
        vm
    }

    /// A VM on another host.
    async fn placed(self, fixture: &Fixture) -> VmId {
        let (other, _) = fixture.add_host(SILENT).await;
        fixture.share_datastore(other, SILENT).await;
        let vm = fixture.made("web", "encrypted").await;
        let there = Operation::ChangeHost { vm, from: fixture.host, to: other };
        fixture.done(there, "web").await;
        if self != Self::Off {
            fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        }
        if self == Self::Suspended {
            fixture.done(Operation::SuspendVm { vm }, "web").await;
        }
        vm
    }

    /// That host falls silent.
    async fn falls_silent(self, fixture: &Fixture, vm: VmId) {
        fixture
            .eventually("what it does is recorded", async || {
                let seen = fixture.vm(vm).await?.seen_power;
                (seen == Some(self.power())).then_some(())
            })
            .await;
        let (other, agent) = (silent_host(fixture).await.id, fixture.agent_of(SILENT));
        agent.show_others(vm);
        agent.set_reachable(false);
        fixture
            .eventually("the server has noticed", async || {
                fixture.hosts.connected(other).is_err().then_some(())
            })
            .await;
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        let from = silent_host(fixture).await.id;
        Operation::EvacuateVm { vm, from, to: fixture.host, starts: self == Self::Running }
    }

    /// It is here, as it was; and its former host ends it when it is back.
    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        assert_eq!(fixture.agent.lease(vm), Some(GENERATION), "{what}: its disks were not taken");
        let starts = self == Self::Running;
        assert_eq!(fixture.agent.runs(vm), starts, "{what}: whether it runs here");
        self.assert_here(fixture, vm, what).await;
    }

    /// The problem says where it is, and it can be started there.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        assert!(problem.detail.contains("is on the other host"), "{what}: {problem}");
        self.assert_here(fixture, vm, what).await;
    }

    async fn assert_here(self, fixture: &Fixture, vm: VmId, what: &str) {
        let (here, there) = (fixture.agent.clone(), fixture.agent_of(SILENT));
        assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host, "{what}");
        fixture
            .eventually("this host has it with its key", async || {
                here.keys_held().contains(&vm).then_some(())
            })
            .await;
        assert_eq!(there.runs(vm), self == Self::Running, "{what}: somebody has ended it");
        comes_back(fixture).await;
        fixture
            .eventually("the former host has ended and forgotten it", async || {
                let gone = !there.registered().contains(&vm) && !there.runs(vm);
                let from = silent_host(fixture).await.id;
                let mut read = fixture.store.read().await.unwrap();
                let left = evacuations::of_host(&mut read, from).await.unwrap();
                (gone && left.is_empty()).then_some(())
            })
            .await;
        assert_eq!(fixture.events("vm.forgotten").await.len(), 1, "{what}");
        assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host, "{what}");
        fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        assert!(here.runs(vm) && !there.runs(vm), "{what}: where it runs");
    }

    /// It is where it was, and goes on there if it ran.
    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        let (here, there) = (fixture.agent.clone(), fixture.agent_of(SILENT));
        let from = silent_host(fixture).await.id;
        assert_eq!(fixture.vm(vm).await.unwrap().host, from, "{what}");
        assert!(!here.registered().contains(&vm) && here.lease(vm).is_none(), "{what}");
        comes_back(fixture).await;
        assert!(there.registered().contains(&vm), "{what}: its host has forgotten it");
        assert_eq!(there.runs(vm), self == Self::Running, "{what}");
    }
}

/// The silent host answers again, and the server notices at once.
async fn comes_back(fixture: &Fixture) {
    fixture.agent_of(SILENT).set_reachable(true);
    let host = silent_host(fixture).await;
    fixture.hosts.add(&host).unwrap();
    fixture
        .eventually("it is connected", async || {
            fixture.hosts.connected(host.id).is_ok().then_some(())
        })
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_that_ran_is_evacuated_or_stays_at_every_step() {
    matrix(Kind::Evacuate(Was::Running)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspended_vm_is_evacuated_or_stays_at_every_step() {
    matrix(Kind::Evacuate(Was::Suspended)).await;
}

/// The agent of the new host ends, or does not answer, while it is asked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_ends_in_the_middle_does_not_matter() {
    for call in [Call::FenceVm, Call::RegisterVm, Call::OfferKey, Call::PowerOn] {
        for fault in
            [HostFault::LoseRequest, HostFault::LoseAnswer, HostFault::Crash, HostFault::CrashAfter]
        {
            let what = format!("{call:?} {fault:?}");
            let fixture = Fixture::new().await;
            let vm = Was::Running.before(&fixture).await;
            fixture.agent.inject(call, 1, fault);
            fixture.done(Was::Running.operation(&fixture, vm).await, "web").await;
            Was::Running.assert_done(&fixture, vm, &what).await;
        }
    }
}

/// The host that comes back falls silent once more, or its agent ends, while it is told to end the VM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_comes_back_is_told_until_it_has_forgotten_the_vm() {
    for call in [Call::PowerOff, Call::UnregisterVm] {
        for fault in [HostFault::LoseRequest, HostFault::LoseAnswer, HostFault::CrashAfter] {
            let fixture = Fixture::new().await;
            let vm = Was::Running.before(&fixture).await;
            fixture.done(Was::Running.operation(&fixture, vm).await, "web").await;
            fixture.agent_of(SILENT).inject(call, 1, fault);
            Was::Running.assert_here(&fixture, vm, &format!("{call:?} {fault:?}")).await;
        }
    }
}

#[tokio::test]
async fn a_disk_that_cannot_be_taken_now_is_asked_for_again() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    for nth in 1..=2 {
        fixture.agent.inject(Call::FenceVm, nth, HostFault::Refuse(ErrorCode::Internal));
    }
    fixture.done(Was::Running.operation(&fixture, vm).await, "web").await;
    Was::Running.assert_done(&fixture, vm, "the cluster was slow").await;
}

/// The evacuation ends when the VM is at the other host, and its disks are not: the start that people are told to try takes them.
#[tokio::test]
async fn a_start_takes_the_disks_that_the_evacuation_has_not_taken() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    make_pool(&fixture).await;
    fixture.agent.inject(Call::FenceVm, 1, HostFault::Refuse(ErrorCode::Unsupported));
    let task = fixture.begin(Was::Running.operation(&fixture, vm).await, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Unknown);
    assert_eq!((fixture.agent.lease(vm), fixture.agent.runs(vm)), (None, false));
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    Was::Running.assert_done(&fixture, vm, "it was started by hand").await;
}

/// Otherwise it would end the VM when that leaves it once more, as any VM may.
#[tokio::test]
async fn a_host_that_gets_its_vm_back_is_not_to_forget_it() {
    let fixture = Fixture::new().await;
    let vm = Was::Off.before(&fixture).await;
    fixture.done(Was::Off.operation(&fixture, vm).await, "web").await;
    let from = silent_host(&fixture).await.id;
    let mut write = fixture.store.write().await.unwrap();
    assert_eq!(evacuations::of_host(&mut write, from).await.unwrap(), [vm]);
    placements::set_owner(&mut write, vm, from, GENERATION + 1).await.unwrap();
    assert!(evacuations::of_host(&mut write, from).await.unwrap().is_empty());
    assert!(!evacuations::is_awaited(&mut write, vm).await.unwrap());
}

#[tokio::test]
async fn a_host_that_answers_again_keeps_its_vms() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    let operation = Was::Running.operation(&fixture, vm).await;
    comes_back(&fixture).await;
    let task = fixture.begin(operation, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    assert!(ended.problem.unwrap().detail.contains("answers again"));
    Was::Running.assert_undone(&fixture, vm, "it answers").await;
}

/// What it knows of the disks is old. They have been moved since, from a datastore that both hosts have: beside a former image may be
/// the note of that, by which a deletion finds the image that is in use.
#[tokio::test]
async fn a_host_that_comes_back_deletes_no_disk_of_a_vm_that_was_evacuated() {
    let fixture = Fixture::new().await;
    let vm = Was::Off.placed(&fixture).await;
    let there = fixture.agent_of(SILENT);
    let recrypt = Operation::DeepRecryptVm { vm, in_place: false, disks: vec![] };
    fixture.done(recrypt, "web").await;
    let from = silent_host(&fixture).await.id;
    let lists = async || {
        let view = fixture.hosts.view(from);
        view.vm(vm).is_some_and(|seen| !seen.disks.is_empty()).then_some(())
    };
    fixture.eventually("it says where the disks are", lists).await;
    Was::Off.falls_silent(&fixture, vm).await;
    fixture.done(Was::Off.operation(&fixture, vm).await, "web").await;
    let (disks, to) = (fixture.disks(vm).await, second(&fixture).await);
    let moved = Operation::MoveVm {
        vm,
        from: vec![disks[0].datastore.datastore],
        disks: disks.iter().map(|disk| disk.id).collect(),
        all: true,
        to: to.spec_on(fixture.host).unwrap(),
    };
    fixture.done(moved, "web").await;
    comes_back(&fixture).await;
    let forgotten = async || (!there.registered().contains(&vm)).then_some(());
    fixture.eventually("it has forgotten the VM", forgotten).await;
    assert!(!there.calls().contains(&Call::DeleteDisk), "it was told to delete a disk");
    fixture.assert_whole(vm, Power::Off, "evacuated and moved").await;
}

/// Only what was evacuated is ended: an inventory may be an older copy.
#[tokio::test]
async fn a_guest_that_the_inventory_has_elsewhere_for_another_reason_runs_on() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    fixture.done(Was::Running.operation(&fixture, vm).await, "web").await;
    let from = silent_host(&fixture).await.id;
    let mut write = fixture.store.write().await.unwrap();
    evacuations::remove(&mut write, vm, from).await.unwrap();
    write.commit().await.unwrap();
    comes_back(&fixture).await;
    assert!(fixture.agent_of(SILENT).runs(vm));
}

/// The datastore is a pool on both hosts.
async fn make_pool(fixture: &Fixture) {
    let pool = RbdPool {
        monitors: "v2:10.0.0.1:3300".to_owned(),
        user: "client.vmseal".to_owned(),
        keyring: Some("/etc/ceph/keyring".into()),
        pool: "vms".to_owned(),
        namespace: None,
        data_pool: None,
        messenger: Messenger::Secure,
        create: None,
        changed: None,
    };
    let mut write = fixture.store.write().await.unwrap();
    let local = datastores::find(&mut write, "local").await.unwrap().unwrap();
    for on in &local.hosts {
        let (path, pool) = (on.location.path().to_owned(), Box::new(pool.clone()));
        let on =
            datastores::OnHost { location: DatastoreLocation::Rbd { path, pool }, ..on.clone() };
        datastores::delete_host(&mut write, local.id, on.host).await.unwrap();
        datastores::insert_host(&mut write, &local, &on).await.unwrap();
    }
    write.commit().await.unwrap();
}

async fn asked(
    fixture: &Fixture,
    request: EvacuateVm,
    (silence, dry_run): (Duration, bool),
) -> Result<(String, String), Problem> {
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    match evacuate_after(&services, &me, "web", request, (silence, dry_run)).await? {
        Outcome::Planned(plan) => Ok((plan.steps.join("\n"), plan.warnings.join("\n"))),
        Outcome::Done(task) => {
            fixture.ends_well(task.id).await;
            Ok((task.kind, String::new()))
        }
    }
}

#[tokio::test]
async fn a_dry_run_says_what_would_be_done_and_what_is_lost() {
    for (was, no_start, then) in [
        (Was::Running, false, "is started there"),
        (Was::Running, true, "is not started there"),
        (Was::Off, false, "is not started there"),
        (Was::Suspended, false, "stays suspended"),
    ] {
        let fixture = Fixture::new().await;
        let vm = was.before(&fixture).await;
        make_pool(&fixture).await;
        let request = EvacuateVm { host: None, no_start };
        let (steps, warnings) =
            asked(&fixture, request.clone(), (Duration::ZERO, true)).await.unwrap();
        assert!(steps.contains("choose host 'here'") && steps.contains(then), "{steps}");
        assert!(warnings.contains("as at a power cut"), "{warnings}");
        assert_ne!(fixture.vm(vm).await.unwrap().host, fixture.host);
        let (kind, _) = asked(&fixture, request, (Duration::ZERO, false)).await.unwrap();
        assert_eq!(kind, "vm.evacuate");
        assert_eq!(fixture.agent.runs(vm), was == Was::Running && !no_start, "{was:?}");
        was.assert_here(&fixture, vm, "asked for").await;
    }
}

#[tokio::test]
async fn what_cannot_be_fenced_or_may_be_back_soon_stays() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    let any = EvacuateVm::default();
    // Its disk is on a directory.
    let refused = asked(&fixture, any.clone(), (Duration::ZERO, true)).await.unwrap_err();
    assert!(refused.detail.contains("a directory: nothing keeps host 'there'"), "{refused}");
    make_pool(&fixture).await;
    // A moment ago it answered.
    let refused = asked(&fixture, any.clone(), (SILENCE_MIN, true)).await.unwrap_err();
    assert!(refused.detail.contains("has not answered for"), "{refused}");
    // An agent of an earlier version cannot keep anybody away.
    fixture.agent.lack_features(&["fence-vms"]);
    fixture.agent.restart();
    let refused = fixture
        .eventually("the agent has restarted", async || {
            let refused = asked(&fixture, any.clone(), (Duration::ZERO, true)).await.err();
            refused.filter(|refused| refused.detail.contains("upgrade vmseal there"))
        })
        .await;
    assert_eq!(refused.code, ErrorCode::WrongState);
    // Another host has no pool.
    let (far, _) = fixture.add_host("far").await;
    let named = EvacuateVm { host: Some("far".to_owned()), no_start: false };
    let refused = asked(&fixture, named, (Duration::ZERO, true)).await.unwrap_err();
    assert!(refused.detail.contains("does not have datastore 'local'"), "{refused}");
    assert!(fixture.hosts.connected(far).is_ok());
    // It answers.
    comes_back(&fixture).await;
    let refused = asked(&fixture, any, (Duration::ZERO, true)).await.unwrap_err();
    assert!(refused.detail.contains("vmseal vm migrate web"), "{refused}");
    assert!(fixture.agent_of(SILENT).runs(vm));
}

/// What gives the user of the pool the right to keep others from it.
const CAPS: &str = "ceph auth caps client.vmseal mon 'profile rbd' osd 'profile rbd pool=vms'";

/// Nothing has been done for an evacuation.
async fn assert_nothing_begun(fixture: &Fixture, vm: VmId) {
    let from = silent_host(fixture).await.id;
    assert_eq!(fixture.vm(vm).await.unwrap().host, from);
    let mut read = fixture.store.read().await.unwrap();
    assert!(evacuations::of_host(&mut read, from).await.unwrap().is_empty());
    assert_eq!((fixture.agent.lease(vm), fixture.calls(Call::FenceVm)), (None, 0));
}

/// It would be found when the inventory names the other host already.
#[tokio::test]
async fn a_host_that_may_keep_nobody_away_gets_no_vm() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    make_pool(&fixture).await;
    fixture.agent.set_fencing(Some(Fencing::NotAllowed));
    for no_start in [false, true] {
        let request = EvacuateVm { host: None, no_start };
        let refused = asked(&fixture, request, (Duration::ZERO, true)).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains(CAPS), "{refused}");
        let remount = "vmseal datastore remount local --host here";
        assert!(refused.detail.contains(remount), "{refused}");
    }
    // It was allowed when the task was asked for.
    let operation = Was::Running.operation(&fixture, vm).await;
    let ended = fixture.ended(fixture.begin(operation.clone(), "web").await).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert!(problem.detail.contains(CAPS), "{problem}");
    assert_nothing_begun(&fixture, vm).await;

    // A cluster that does not say it is asked when it is to be done.
    for fencing in [Fencing::Unknown, Fencing::Allowed] {
        fixture.agent.set_fencing(Some(fencing));
        asked(&fixture, EvacuateVm::default(), (Duration::ZERO, true)).await.unwrap();
    }
    fixture.done(operation, "web").await;
    Was::Running.assert_done(&fixture, vm, "it may keep others away").await;
}

/// The evacuation has ended before the disks were taken, and the right is lost before the start that is to take them.
#[tokio::test]
async fn a_start_that_may_keep_nobody_away_takes_nothing() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    make_pool(&fixture).await;
    fixture.agent.inject(Call::FenceVm, 1, HostFault::Refuse(ErrorCode::Unsupported));
    let task = fixture.begin(Was::Running.operation(&fixture, vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Unknown);
    fixture.agent.set_fencing(Some(Fencing::NotAllowed));
    let (services, me) =
        (fixture.services(Recipient::generate().unwrap()), Caller::administrator("me"));
    // Its key is delivered first.
    fixture
        .eventually("the plan says why it would not start", async || {
            let planned =
                crate::services::vms::start(&services, &me, "web", StartVm::default(), true);
            let refused = planned.await.err()?;
            refused.detail.contains(CAPS).then_some(())
        })
        .await;
    let start = Operation::StartVm { vm, boot_once: None };
    let ended = fixture.ended(fixture.begin(start.clone(), "web").await).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert!(problem.detail.contains(CAPS), "{problem}");
    assert_eq!((fixture.agent.lease(vm), fixture.agent.runs(vm)), (None, false));

    fixture.agent.set_fencing(Some(Fencing::Allowed));
    fixture.done(start, "web").await;
    Was::Running.assert_done(&fixture, vm, "it was started once that was allowed").await;
}

/// It would be at its new host, and nobody could start it there.
#[tokio::test]
async fn a_vm_that_its_policy_keeps_from_starting_is_evacuated_only_to_stay_off() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.before(&fixture).await;
    make_pool(&fixture).await;
    let mut write = fixture.store.write().await.unwrap();
    let mut policy = policies::find(&mut write, "encrypted").await.unwrap().unwrap();
    policy.osd_encryption = Some(AskedOsds::Required);
    policies::set(&mut write, &policy).await.unwrap();
    write.commit().await.unwrap();
    let any = EvacuateVm::default();
    let refused = asked(&fixture, any, (Duration::ZERO, true)).await.unwrap_err();
    assert!(refused.detail.contains("only on encrypted OSDs"), "{refused}");
    assert!(refused.detail.contains("(--no-start)"), "{refused}");
    let operation = Was::Running.operation(&fixture, vm).await;
    let ended = fixture.ended(fixture.begin(operation, "web").await).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert!(problem.detail.contains("only on encrypted OSDs"), "{problem}");
    assert_nothing_begun(&fixture, vm).await;

    let off = EvacuateVm { host: None, no_start: true };
    asked(&fixture, off, (Duration::ZERO, false)).await.unwrap();
    assert_eq!(fixture.vm(vm).await.unwrap().host, fixture.host);
    assert!(!fixture.agent.runs(vm), "it was not to be started");
}

/// A disk was on its way to a datastore that its former host has alone. What is left of that is out of reach of the other host, and is not in the way
/// of what is done with the disk there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_move_was_cut_off_moves_again_where_it_was_evacuated_to() {
    let fixture = Fixture::new().await;
    let vm = Was::Running.placed(&fixture).await;
    let (from, agent) = (silent_host(&fixture).await.id, fixture.agent_of(SILENT));
    let far = fixture.add_datastore(from, SILENT, "far").await;
    let location = DatastoreLocation::Dir { path: "/far".into() };
    let disks = fixture.disks(vm).await;
    let moves = |to| Operation::MoveVm {
        vm,
        disks: disks.iter().map(|disk| disk.id).collect(),
        all: true,
        from: vec![disks[0].datastore.datastore],
        to,
    };
    let puts = || agent.calls().iter().filter(|call| **call == Call::PutJob).count();
    let before = puts();
    agent.set_work(Duration::from_millis(100));
    let task = fixture.begin(moves(DatastoreSpec { datastore: far, location }), "web").await;
    fixture.eventually("it clears", async || (puts() > before).then_some(())).await;
    agent.set_work(LONG);
    let copies = async || (!agent.mirrored().0.is_empty()).then_some(());
    fixture.eventually("it copies", copies).await;
    Was::Running.falls_silent(&fixture, vm).await;

    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    let ended = fixture.ended(task).await;
    let problem = ended.problem.unwrap();
    assert_eq!(ended.state, TaskState::Unknown, "{problem}");
    assert!(problem.detail.contains("was cancelled"), "{problem}");
    // Hosts beside each other see the same directories here.
    fixture.agent.change_mark(std::path::Path::new("/far"));
    fixture.done(Was::Running.operation(&fixture, vm).await, "web").await;
    assert!(fixture.agent.runs(vm), "it was not started");
    let to = second(&fixture).await;
    fixture.done(moves(to.spec_on(fixture.host).unwrap()), "web").await;
    let now = fixture.disks(vm).await;
    assert!(now.iter().all(|disk| disk.datastore.datastore == to.id), "{now:?}");
    assert!(fixture.agent.runs(vm), "it runs no more");
}
