//! VMs that go to another control plane while they run: at every point exactly one of both runs the guest, or none while a task
//! decides; at the end one inventory has the VM, and the other one nothing of it.

mod at_rest;
mod ended;
mod in_the_clear;
mod killed;
mod left;
mod rebooted;
mod refused_hosts;
mod with_snapshots;
mod with_tpm;

use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use vmseal_api::host::version::{MIGRATE_COMPRESSED, MIGRATE_ENCRYPTED};
use vmseal_api::id::{RemoteId, TaskId};
use vmseal_api::migration::MigrationEncryption;
use vmseal_api::remote::ARRIVALS_COMPRESSED;
use vmseal_api::request::{MigrateVm, SetVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, Outcome, Services, migrate, set_vm};
use crate::store::remotes;
use crate::testing::Lost;

/// A control plane whose VM goes to another one.
struct Two {
    west: Fixture,
    east: Fixture,
    vm: VmId,
}

impl Two {
    /// The VM runs at the first one, which knows the second one.
    async fn new() -> Self {
        let (west, east) = (Fixture::new().await, Fixture::new().await);
        let remote = remotes::Remote {
            id: RemoteId::new(),
            name: "east".to_owned(),
            url: "https://east:8443".to_owned(),
            authority: String::new(),
        };
        let mut write = west.store.write().await.unwrap();
        remotes::insert(&mut write, &remote).await.unwrap();
        write.commit().await.unwrap();
        west.remotes.keep_token(remote.id, "token").unwrap();
        let vm = west.running("web").await;
        let this = Self { west, east, vm };
        this.connect();
        this
    }

    /// Calls of the first reach the second as it is now.
    fn connect(&self) {
        let services = self.east.services(Recipient::generate().unwrap());
        self.west.plane.set(Some(Arc::new(services)));
    }

    fn services(&self) -> Services {
        self.west.services(Recipient::generate().unwrap())
    }

    /// Begins the migration; the tasks of both sides.
    async fn begin(&self) -> (TaskId, TaskId) {
        let remote = Some("east".to_owned());
        let request = MigrateVm { remote, ..MigrateVm::default() };
        let me = Caller::administrator("me");
        let begun = migrate::migrate(&self.services(), &me, "web", request, false).await;
        let Outcome::Done(task) = begun.unwrap() else { panic!("it is only planned") };
        let begun = self.west.task(task.id).await;
        let Operation::MigrateAway { arrival, .. } = begun.operation else { panic!("{begun:?}") };
        (task.id, arrival)
    }

    /// Restarts the first one, with these faults.
    async fn restart_west(&mut self, faults: Option<Faults>) {
        self.west.restart(|engine: &mut Engine| engine.environment.faults = faults).await;
    }

    /// Restarts the second one, with these faults.
    async fn restart_east(&mut self, faults: Option<Faults>) {
        self.east.restart(|engine: &mut Engine| engine.environment.faults = faults).await;
        self.connect();
    }

    /// The guest runs at the second one, with a key of its provider; nothing is left at the first.
    async fn assert_gone(&self, what: &str) {
        let vm = self.vm;
        self.east.assert_whole(vm, Power::Running, what).await;
        assert!(self.east.agent.runs(vm) && !self.west.agent.runs(vm), "{what}: where it runs");
        self.west.assert_nothing_left(vm, what).await;
    }

    /// The guest runs at the first one; nothing is left at the second.
    async fn assert_stays(&self, what: &str) {
        let vm = self.vm;
        self.west.assert_whole(vm, Power::Running, what).await;
        assert!(self.west.agent.runs(vm) && !self.east.agent.runs(vm), "{what}: where it runs");
        self.east
            .eventually("the other control plane has forgotten it", async || {
                let gone = self.east.vm(vm).await.is_none() && self.east.agent.disks().is_empty();
                (gone && self.east.agent.registered().is_empty()).then_some(())
            })
            .await;
        self.east.assert_nothing_left(vm, what).await;
    }

    /// One of both runs it, as its inventory says.
    async fn assert_one(&self, arrived: bool, what: &str) {
        if arrived { self.assert_gone(what).await } else { self.assert_stays(what).await }
    }
}

/// The names of the steps.
fn names(steps: &[&'static dyn Step]) -> Vec<&'static str> {
    steps.iter().map(|step| step.name()).collect()
}

fn away() -> Vec<&'static str> {
    names(crate::tasks::migrate_vm::away::STEPS)
}

fn arriving() -> Vec<&'static str> {
    names(crate::tasks::receive_vm::STEPS)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_goes_to_another_control_plane() {
    let two = Two::new().await;
    let before = two.west.vm(two.vm).await.unwrap().key.unwrap();
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    two.assert_gone("it is done").await;
    let after = two.east.vm(two.vm).await.unwrap();
    assert_ne!(after.key.unwrap().key_id, before.key_id, "the key is another one");
    let told = two.west.events("vm.migrated").await;
    assert!(told[0].detail.contains("to remote 'east', encrypted"), "{told:?}");
    assert_eq!(two.east.events("vm.arrived").await.len(), 1);
    let migrated = two.west.engine.shown(&two.west.task(task).await).migrated.unwrap();
    assert_eq!(migrated.placed, Some(migrated.sent), "the other control plane has said so");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_without_a_key_goes_in_the_clear_only_where_a_host_cannot_encrypt_and_that_is_told() {
    let two = Two::new().await;
    let vm = two.west.made("open", "plain").await;
    two.west.done(Operation::StartVm { vm, boot_once: None }, "open").await;
    let (services, me) = (two.services(), Caller::administrator("me"));
    let asked = async |dry_run| {
        let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
        migrate::migrate(&services, &me, "open", request, dry_run).await
    };
    let planned = async || match asked(true).await {
        Ok(Outcome::Planned(plan)) => Ok((plan.steps.join("\n"), plan.warnings)),
        Ok(Outcome::Done(task)) => panic!("it is not only planned: {task:?}"),
        Err(problem) => Err(problem.detail),
    };
    let sets = async |mode| {
        let request = SetVm { migration_encryption: Some(mode), ..SetVm::default() };
        set_vm::set(&services, &me, "open", request, false).await.map(drop).unwrap();
    };
    let (steps, warnings) = planned().await.unwrap();
    assert!(steps.contains("all that is sent is encrypted") && warnings.is_empty(), "{steps}");

    two.east.agent.lack_features(&[MIGRATE_ENCRYPTED]);
    two.east.agent.restart();
    let in_the_clear = async || {
        let (steps, warnings) = planned().await.ok()?;
        let is_told = warnings.iter().any(|it| it.contains("goes over the network in the clear"));
        (steps.contains("is not encrypted: its agent cannot") && is_told).then_some(())
    };
    two.west.eventually("its older agent is told", in_the_clear).await;
    sets(MigrationEncryption::Required).await;
    let refused = planned().await.unwrap_err();
    assert!(refused.contains("(job-migrate-encrypted)"), "{refused}");
    sets(MigrationEncryption::Opportunistic).await;
    // Another host there can.
    let (new, agent) = two.east.add_host("new").await;
    two.east.share_datastore(new, "new").await;
    let (steps, _) = planned().await.unwrap();
    assert!(steps.contains("choose host 'new'") && steps.contains("is encrypted"), "{steps}");
    agent.lack_features(&[MIGRATE_ENCRYPTED]);
    agent.restart();
    two.west.eventually("no host there can", in_the_clear).await;

    let Outcome::Done(task) = asked(false).await.unwrap() else { panic!("it is only planned") };
    two.west.ends_well(task.id).await;
    let told = two.west.events("vm.migrated").await;
    assert!(told[0].detail.contains("to remote 'east', not encrypted"), "{told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_compressed_on_its_way_where_that_is_asked_and_both_sides_can() {
    let two = Two::new().await;
    let me = Caller::administrator("me");
    let asked = async |dry_run| {
        let remote = Some("east".to_owned());
        let request = MigrateVm { remote, compress: true, ..MigrateVm::default() };
        migrate::migrate(&two.services(), &me, "web", request, dry_run).await
    };
    two.west.plane.lack_features(&[ARRIVALS_COMPRESSED]);
    let refused = asked(true).await.map(drop).unwrap_err();
    assert!(refused.detail.contains("(arrivals-compressed)"), "{refused}");
    two.west.plane.lack_features(&[]);

    two.west.agent.set_work(LONG);
    let Outcome::Done(task) = asked(false).await.unwrap() else { panic!("it is only planned") };
    let sent = async || two.west.agent.departure(two.vm, task.id);
    assert!(two.west.eventually("it is sent", sent).await.compresses);
    two.west.engine.cancel(&task.id.to_string(), "me").await.unwrap();
    assert_eq!(two.west.ended(task.id).await.state, TaskState::Cancelled);
    two.assert_stays("cancelled").await;

    two.east.agent.lack_features(&[MIGRATE_COMPRESSED]);
    two.east.agent.restart();
    let named = async || {
        let refused = asked(true).await.map(drop).err()?;
        refused.detail.contains("(job-migrate-compressed)").then_some(())
    };
    two.east.eventually("the other control plane sees its older agent", named).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_that_the_other_server_calls_by_a_name_is_sent_a_vm_at_its_address() {
    let two = Two::new().await;
    two.west.agent.set_work(LONG);
    let expected = two.east.call_by_name(two.east.host, &two.east.agent).await;
    let (task, _) = two.begin().await;
    let sent = async || two.west.agent.departure(two.vm, task);
    assert_eq!(two.west.eventually("it is sent", sent).await.to, expected);
    two.west.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(two.west.ended(task).await.state, TaskState::Cancelled);
    two.assert_stays("cancelled").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_there_whose_port_is_not_reached_is_refused_before_anything_is_begun() {
    let two = Two::new().await;
    let port = SocketAddr::from(([192, 0, 2, 7], 8446));
    two.east.agent.set_migration_address(port);
    two.east.agent.restart();
    two.west.agent.cut_off_from(port);
    let (services, me) = (two.services(), Caller::administrator("me"));
    let refused = async |dry_run| {
        let request = MigrateVm { remote: Some("east".to_owned()), ..MigrateVm::default() };
        let asked = migrate::migrate(&services, &me, "web", request, dry_run).await;
        asked.map(drop).err().map(|problem| problem.detail)
    };
    let named = async || refused(true).await.filter(|told| told.contains("192.0.2.7:8446"));
    let told = two.west.eventually("it is refused", named).await;
    let place = "VM 'web' cannot go to host 'here' of remote 'east': its port for VMs";
    assert!(told.contains(place) && told.contains("from the VM's host 'here'"), "{told}");
    let begun = two.west.events("task.begun").await.len();
    assert_eq!(refused(false).await, Some(told));
    assert_eq!(two.west.events("task.begun").await.len(), begun, "something was begun");
    assert_eq!(two.west.plane.calls("begin"), 0, "the other control plane has begun something");
    two.assert_stays("refused").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_may_be_killed_at_every_step() {
    for step in away() {
        for point in [FaultPoint::Before, FaultPoint::After] {
            let what = format!("the source's server is killed {point:?} {step:?}");
            let mut two = Two::new().await;
            let (faults, done) = at(step, TaskState::Running, point, Fault::Crash, 1);
            two.restart_west(Some(faults)).await;
            let (task, arrival) = two.begin().await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            two.west.eventually(&what, crashed).await;
            two.restart_west(None).await;
            two.west.ends_well(task).await;
            two.east.ends_well(arrival).await;
            two.assert_gone(&what).await;
        }
    }
    for step in arriving() {
        for point in [FaultPoint::Before, FaultPoint::After] {
            let what = format!("the destination's server is killed {point:?} {step:?}");
            let mut two = Two::new().await;
            let (faults, done) = at(step, TaskState::Running, point, Fault::Crash, 1);
            two.restart_east(Some(faults)).await;
            let (task, arrival) = two.begin().await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            two.west.eventually(&what, crashed).await;
            two.west.plane.set(None);
            two.restart_east(None).await;
            two.west.ends_well(task).await;
            two.east.ends_well(arrival).await;
            two.assert_gone(&what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_restarts_before_it_gets_the_key_of_a_session_gets_another_one() {
    let two = Two::new().await;
    let earlier = Recipient::generate().unwrap();
    two.west.plane.restart_before_session(STANDARD.encode(earlier.public_key()));
    let (task, arrival) = two.begin().await;
    two.west.ends_well(task).await;
    two.east.ends_well(arrival).await;
    assert!(two.west.plane.calls("session") >= 2, "the first key was sealed to what is gone");
    two.assert_gone("the server has restarted").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_fails_leaves_the_guest_where_it_was() {
    for step in away() {
        let what = format!("step {step:?} of the source is refused");
        let mut two = Two::new().await;
        let before = FaultPoint::Before;
        let (faults, _) = at(step, TaskState::Running, before, Fault::Fail(refused()), 1);
        two.restart_west(Some(faults)).await;
        let (task, _) = two.begin().await;
        let ended = two.west.ended(task).await;
        if is_past_commit(crate::tasks::migrate_vm::away::STEPS, step) {
            assert_eq!(ended.state, TaskState::Unknown, "{what}");
            assert!(two.east.agent.runs(two.vm) && !two.west.agent.runs(two.vm), "{what}");
            if let Some(row) = two.west.vm(two.vm).await {
                assert_eq!(row.lifecycle, Lifecycle::Deleting, "{what}: it may be started here");
            }
            // Nobody's task has it any more: what is left at its former host ends, and never goes on.
            two.restart_west(None).await;
            let ended = async || two.west.agent.runs_with(two.vm).is_none().then_some(());
            two.west.eventually(&what, ended).await;
            assert!(two.east.agent.runs(two.vm) && !two.west.agent.runs(two.vm), "{what}: later");
            continue;
        }
        assert_eq!(ended.state, TaskState::Failed, "{what}");
        two.assert_stays(&what).await;
    }
    for step in arriving() {
        let what = format!("step {step:?} of the destination is refused");
        let mut two = Two::new().await;
        let before = FaultPoint::Before;
        let (faults, _) = at(step, TaskState::Running, before, Fault::Fail(refused()), 1);
        two.restart_east(Some(faults)).await;
        let (task, _) = two.begin().await;
        assert_eq!(two.west.ended(task).await.state, TaskState::Failed, "{what}");
        two.assert_stays(&what).await;
    }
}

/// An agent that restarts after it has ended the VM's processes does not know the VM any more, and has its images still.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_images_are_removed_whenever_the_source_s_agent_restarts() {
    for call in [Call::CommitJob, Call::DeleteDisk, Call::UnregisterVm] {
        for fault in [HostFault::LoseAnswer, HostFault::Crash, HostFault::CrashAfter] {
            let two = Two::new().await;
            two.west.agent.inject(call, 1, fault);
            let (task, _) = two.begin().await;
            two.west.ends_well(task).await;
            two.assert_gone(&format!("{call:?} {fault:?}")).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_asked_for_until_it_is_known() {
    for how in [Lost::Answers, Lost::Calls] {
        let two = Two::new().await;
        let times = 3 * ATTEMPTS;
        two.west.plane.lose("commit", how, times);
        let (task, arrival) = two.begin().await;
        two.west.ends_well(task).await;
        two.east.ends_well(arrival).await;
        assert!(two.west.plane.calls("commit") > usize::try_from(times).unwrap(), "{how:?}");
        two.assert_gone(&format!("{how:?} lost")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_is_cancelled_while_nobody_answers_waits_for_the_answer() {
    for (how, arrives) in [(Lost::Answers, true), (Lost::Calls, false)] {
        let what = format!("cancelled while {how:?} are lost");
        let two = Two::new().await;
        two.west.plane.lose("commit", how, u32::MAX);
        let (task, arrival) = two.begin().await;
        let asked = async || (two.west.plane.calls("commit") > 1).then_some(());
        two.west.eventually("it is asked", asked).await;
        if how == Lost::Answers {
            two.east.ends_well(arrival).await;
        }
        assert!(!two.west.agent.runs(two.vm), "{what}: it goes on before that is decided");
        two.west.engine.cancel(&task.to_string(), "me").await.unwrap();
        let ended = two.west.ended(task).await;
        let expected = if arrives { TaskState::Unknown } else { TaskState::Cancelled };
        assert_eq!(ended.state, expected, "{what}: {:?}", ended.problem);
        two.assert_one(arrives, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arrival_that_is_asked_to_commit_cannot_be_cancelled_there() {
    let two = Two::new().await;
    // The simulated hosts share nothing: once a session has begun, the guest arrives there without being sent.
    two.west.plane.lose("session", Lost::Calls, u32::MAX);
    let (task, arrival) = two.begin().await;
    let receives = async || {
        let arrival = two.east.find_task(arrival).await?;
        (arrival.step == crate::tasks::receive_vm::RECEIVES).then_some(())
    };
    two.east.eventually("it is prepared", receives).await;
    two.east.engine.commit_arrival(arrival).await.unwrap();
    let refused = two.east.engine.cancel(&arrival.to_string(), "me").await.unwrap_err();
    assert!(refused.detail.contains("has asked to let the guest go"), "{refused}");
    // The source does not send any more: the guest goes on there.
    let _ = two.west.engine.cancel(&task.to_string(), "me").await;
    two.west.ended(task).await;
    two.assert_stays("it was not sent").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_side_may_cancel_while_the_guest_is_sent() {
    for there in [false, true] {
        let two = Two::new().await;
        two.west.agent.set_work(LONG);
        let (task, arrival) = two.begin().await;
        let sends = async || two.west.agent.departure(two.vm, task).map(drop);
        two.west.eventually("it is sent", sends).await;
        let (side, of) = if there { (&two.east, arrival) } else { (&two.west, task) };
        side.engine.cancel(&of.to_string(), "me").await.unwrap();
        let state = two.west.ended(task).await.state;
        assert_eq!(state, TaskState::Cancelled, "cancelled there: {there}");
        assert_eq!(two.east.ended(arrival).await.state, TaskState::Cancelled);
        two.assert_stays(&format!("cancelled there: {there}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_answer_when_a_migration_is_undone_is_told_again_for_a_while() {
    for (times, is_told) in [(ATTEMPTS - 1, true), (u32::MAX, false)] {
        let what = format!("{times} calls are lost");
        let two = Two::new().await;
        two.west.agent.set_work(LONG);
        let (task, arrival) = two.begin().await;
        let sends = async || two.west.agent.departure(two.vm, task).map(drop);
        two.west.eventually("it is sent", sends).await;
        two.west.plane.lose("cancel", Lost::Calls, times);
        two.west.engine.cancel(&task.to_string(), "me").await.unwrap();
        assert_eq!(two.west.ended(task).await.state, TaskState::Cancelled, "{what}");
        assert_eq!(two.west.plane.calls("cancel"), ATTEMPTS as usize, "{what}");
        if is_told {
            assert_eq!(two.east.ended(arrival).await.state, TaskState::Cancelled, "{what}");
            two.assert_stays(&what).await;
        } else {
            // It gives the arrival up by itself, much later.
            two.west.assert_whole(two.vm, Power::Running, &what).await;
            assert!(two.west.agent.runs(two.vm), "{what}: it stands still");
            assert!(two.east.task(arrival).await.ended.is_none(), "{what}");
        }
    }
}
