//! Tasks that copy disks go slower, pause and go on: over restarts of server and agent, and not when it is too late.

use vmseal_api::host::version::{PACE, PACE_OF_PROOFS, PACE_OF_REMOVALS, PACE_OF_WORK};
use vmseal_api::host::{HostAgent, JobKind};
use vmseal_api::id::TaskId;
use vmseal_api::pace::CopyPace;
use vmseal_api::request::{EncryptVm, ExportDisk, RecryptVm, SetTask};
use vmseal_api::transfer::Progress;
use vmseal_secret::sealed_box::Recipient;

use super::limits::{copied, vms_to_copy};
use super::mirror::{Mirror, What};
use super::*;
use crate::services::{self, Caller, Outcome};
use crate::tasks::pacing::PaceChange;
use crate::tasks::run::Seen;

const ENCRYPT: Mirror = Mirror { what: What::Encrypt, runs: true, in_place: false };
const PAUSED: CopyPace = CopyPace { bytes_per_second: None, paused: true };

impl Fixture {
    /// A task that copies disks, which lasts.
    async fn copying(&self, kind: Mirror) -> (VmId, TaskId) {
        let vm = kind.before(self).await;
        self.agent.set_work(LONG);
        let task = self.begin(kind.operation(self, vm).await, "web").await;
        self.change_pace(task, PaceChange::Pause).await.unwrap();
        self.until_it_copies(task, PAUSED).await;
        self.change_pace(task, PaceChange::Resume).await.unwrap();
        self.copies_at(CopyPace::default()).await;
        (vm, task)
    }

    /// Lets a paused task, whose first step lasts, do its steps until it copies: from then on work lasts.
    async fn until_it_copies(&self, task: TaskId, pace: CopyPace) {
        self.agent.set_work(std::time::Duration::ZERO);
        // Its jobs are put again.
        self.agent.restart();
        self.copies_at(pace).await;
        self.is_paused(task).await;
        self.agent.set_work(LONG);
    }

    /// Waits until the host copies all disks at this pace.
    async fn copies_at(&self, pace: CopyPace) {
        let so = async || {
            let paces = self.agent.paces();
            (!paces.is_empty() && paces.iter().all(|it| *it == pace)).then_some(())
        };
        self.eventually(&format!("the host copies at {pace:?}"), so).await;
    }

    async fn change_pace(&self, task: TaskId, change: PaceChange) -> Result<Task, Problem> {
        self.engine.check_change_pace(&task.to_string(), change).await?;
        self.engine.change_pace(&task.to_string(), change, "me").await
    }

    /// Waits until a task shows that it is paused.
    async fn is_paused(&self, task: TaskId) {
        let so = async || {
            let task = self.task(task).await;
            let shown = self.engine.shown(&task);
            let told = shown.at().contains(&format!("vmseal task resume {}", task.id));
            (task.state == TaskState::Waiting && shown.paused && told).then_some(())
        };
        self.eventually("it is paused", so).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_copy_waits_whatever_is_started_again_and_is_then_done() {
    for what in [What::Encrypt, What::Decrypt, What::DeepRecrypt, What::Move] {
        let kind = Mirror { what, runs: what != What::Decrypt, in_place: false };
        let mut fixture = Fixture::new().await;
        let (vm, task) = fixture.copying(kind).await;
        fixture.change_pace(task, PaceChange::Pause).await.unwrap();
        fixture.copies_at(PAUSED).await;
        fixture.is_paused(task).await;
        fixture.change_pace(task, PaceChange::Pause).await.unwrap();
        assert_eq!(fixture.events("task.paused").await.len(), 2, "the same again is an event");
        fixture.restart(|_| {}).await;
        fixture.is_paused(task).await;
        fixture.agent.restart();
        fixture.connected().await;
        // A rate that is set meanwhile counts when it goes on.
        fixture.change_pace(task, PaceChange::Rate(Some(5 << 20))).await.unwrap();
        fixture.restart(|_| {}).await;
        fixture.is_paused(task).await;
        fixture.change_pace(task, PaceChange::Resume).await.unwrap();
        fixture.copies_at(CopyPace { bytes_per_second: Some(5 << 20), paused: false }).await;
        fixture.agent.set_work(std::time::Duration::ZERO);
        fixture.change_pace(task, PaceChange::Rate(None)).await.unwrap();
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{kind:?} {:?}", ended.problem);
        assert!(!fixture.engine.shown(&ended).paused);
        kind.assert_done(&fixture, vm, &format!("{kind:?}")).await;
        let late = fixture.change_pace(task, PaceChange::Pause).await.unwrap_err();
        assert!(late.detail.contains("has ended"), "{late}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_copy_can_be_cancelled_and_leaves_nothing() {
    let fixture = Fixture::new().await;
    let (vm, task) = fixture.copying(ENCRYPT).await;
    fixture.change_pace(task, PaceChange::Pause).await.unwrap();
    fixture.is_paused(task).await;
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    ENCRYPT.assert_undone(&fixture, vm, "cancelled while it was paused").await;
}

/// One that is paused before it copies begins paused, and one that is paused when its copies are complete does not use them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_is_paused_at_every_step_before_the_copies_are_used() {
    for step in ENCRYPT.steps().into_iter().take_while(|step| *step != "drop-source") {
        let mut fixture = Fixture::new().await;
        let vm = ENCRYPT.before(&fixture).await;
        let (faults, done) = at(step, TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let task = fixture.begin(ENCRYPT.operation(&fixture, vm).await, "web").await;
        let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
        fixture.eventually("the server crashes", crashed).await;
        let paused = fixture.change_pace(task, PaceChange::Pause).await;
        if step == "switch" {
            let refused = paused.unwrap_err();
            assert!(refused.detail.contains("has copied the disks"), "{refused}");
            fixture.change_pace(task, PaceChange::Rate(None)).await.unwrap_err();
            // As if it had been asked an instant before.
            let mut write = fixture.store.write().await.unwrap();
            let task = Task { pace: PAUSED, ..fixture.task(task).await };
            crate::store::tasks::set_pace(&mut write, &task).await.unwrap();
            write.commit().await.unwrap();
        } else {
            paused.unwrap();
        }
        fixture.restart(|engine| engine.environment.faults = None).await;
        fixture.is_paused(task).await;
        assert!(fixture.events("vm.encrypted").await.is_empty(), "{step}");
        fixture.change_pace(task, PaceChange::Resume).await.unwrap();
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{step}: {:?}", ended.problem);
        ENCRYPT.assert_done(&fixture, vm, step).await;
    }
}

/// So is one whose copies are in use, while it overwrites the former images, where the agent knows that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_removal_of_former_images_is_paused_and_is_then_done() {
    let mut fixture = Fixture::new().await;
    let vm = ENCRYPT.before(&fixture).await;
    let (faults, done) = at("drop-source", TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let task = fixture.begin(ENCRYPT.operation(&fixture, vm).await, "web").await;
    let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
    fixture.eventually("the server crashes", crashed).await;
    fixture.agent.set_work(LONG);
    fixture.change_pace(task, PaceChange::Rate(Some(5 << 20))).await.unwrap();
    fixture.change_pace(task, PaceChange::Pause).await.unwrap();
    fixture.restart(|engine| engine.environment.faults = None).await;
    let is_held = async |fixture: &Fixture| {
        let so = async || {
            let job = fixture.agent.job(vm, task).await.ok()?;
            (job.kind == JobKind::DropSources && job.paused).then_some(())
        };
        fixture.eventually("the host has paused the overwriting", so).await;
    };
    is_held(&fixture).await;
    fixture.agent.lack_features(&[PACE_OF_REMOVALS]);
    fixture.agent.restart();
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let lacks = async || {
        let refused = services::tasks::pause(&services, &me, &task.to_string(), true).await;
        refused.err().filter(|it| it.code == ErrorCode::Unsupported)
    };
    fixture.eventually("its agent cannot", lacks).await;
    // Its agent has begun it again.
    is_held(&fixture).await;
    fixture.agent.set_work(std::time::Duration::ZERO);
    fixture.change_pace(task, PaceChange::Resume).await.unwrap();
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    ENCRYPT.assert_done(&fixture, vm, "paused").await;
}

/// Others have the turn of a task that is paused.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paused_copy_lets_other_copies_on_its_host_go_first() {
    let fixture = Fixture::new().await;
    let others = vms_to_copy(&fixture).await;
    let (_, task) = fixture.copying(ENCRYPT).await;
    fixture.change_pace(task, PaceChange::Pause).await.unwrap();
    fixture.is_paused(task).await;
    copied(&fixture, &others).await;
}

#[tokio::test]
async fn what_is_no_copy_cannot_be_paused() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.agent.set_work(LONG);
    let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    for change in [PaceChange::Pause, PaceChange::Resume, PaceChange::Rate(None)] {
        let refused = fixture.change_pace(task, change).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains("vm.start cannot be"), "{refused}");
    }
    let none = fixture.change_pace(TaskId::new(), PaceChange::Pause).await.unwrap_err();
    assert_eq!(none.code, ErrorCode::NotFound);
}

/// What makes, reads and merges disks without a guest is slowed and paused, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_without_a_guest_is_paused_whatever_is_started_again_and_is_then_done() {
    let mut fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("web", "encrypted").await;
    let disk = fixture.disks(vm).await[0].clone();
    fixture.agent.set_work(LONG);
    let export = |rate| ExportDisk {
        to: OUT.into(),
        format: ExportFormat::Raw,
        plaintext: true,
        passphrase: None,
        snapshot: None,
        rate,
    };
    let of_disk = async |rate, dry_run| {
        let request = export(rate);
        services::disks::export(&services, &me, "web", &disk.name, request, dry_run).await
    };
    let refused = of_disk(Some(1), true).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("rate"), "{refused}");
    let Ok(Outcome::Done(task)) = of_disk(Some(5 << 20), false).await else {
        panic!("it is not begun")
    };
    let id = task.id.to_string();
    services::tasks::pause(&services, &me, &id, false).await.unwrap();
    let is_paused = async |fixture: &Fixture| {
        let so = async || {
            let job = fixture.agent.job(vm, task.id).await.ok()?;
            let shown = fixture.engine.shown(&fixture.task(task.id).await);
            (job.paused && shown.paused && shown.rate == Some(5 << 20)).then_some(())
        };
        fixture.eventually("the host has paused it", so).await;
    };
    is_paused(&fixture).await;
    fixture.restart(|_| {}).await;
    fixture.agent.restart();
    is_paused(&fixture).await;
    fixture.agent.set_work(std::time::Duration::ZERO);
    fixture.change_pace(task.id, PaceChange::Resume).await.unwrap();
    let ended = fixture.ended(task.id).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    Kind::Export.assert_done(&fixture, vm, "paused").await;
    fixture.agent.lack_features(&[PACE_OF_WORK]);
    fixture.agent.restart();
    let services = fixture.services(Recipient::generate().unwrap());
    let lacks = async || {
        let refused =
            services::disks::export(&services, &me, "web", &disk.name, export(Some(5 << 20)), true)
                .await;
        refused.err().filter(|it| it.code == ErrorCode::Unsupported)
    };
    fixture.eventually("its agent cannot", lacks).await;
}

/// So is the reading for a proof, where the agent knows that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proof_is_paused_and_is_then_done() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("web", "encrypted").await;
    fixture.agent.set_work(LONG);
    let task = fixture.begin(Operation::ProveVm { vm, all: true, seed: 1 }, "web").await;
    services::tasks::pause(&services, &me, &task.to_string(), false).await.unwrap();
    let is_paused = async || {
        let so = async || fixture.agent.job(vm, task).await.ok()?.paused.then_some(());
        fixture.eventually("the host has paused it", so).await;
    };
    is_paused().await;
    fixture.agent.lack_features(&[PACE_OF_PROOFS]);
    fixture.agent.restart();
    let lacks = async || {
        let id = task.to_string();
        let refused = services::tasks::pause(&services, &me, &id, true).await;
        refused.err().filter(|it| it.code == ErrorCode::Unsupported)
    };
    fixture.eventually("its agent cannot", lacks).await;
    // Its agent has begun it again.
    is_paused().await;
    fixture.agent.set_work(std::time::Duration::ZERO);
    fixture.change_pace(task, PaceChange::Resume).await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
}

/// A rate is given with the request, and refused where the agent knows none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rate_is_given_with_the_request_and_changed_while_it_copies() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    ENCRYPT.before(&fixture).await;
    fixture.agent.set_work(LONG);
    let me = Caller::administrator("me");
    let request = |rate| EncryptVm { rate, ..EncryptVm::default() };
    let slow = request(Some(1));
    let refused = services::mirror::encrypt(&services, &me, "web", slow, true).await.unwrap_err();
    assert_eq!((refused.code, refused.field.as_deref()), (ErrorCode::InvalidRequest, Some("rate")));
    let shallow = RecryptVm { rate: Some(5 << 20), ..RecryptVm::default() };
    let refused = services::recrypt::recrypt(&services, &me, "web", shallow, true).await;
    assert_eq!(refused.unwrap_err().field.as_deref(), Some("rate"));

    let rate = Some(5 << 20);
    let planned = services::mirror::encrypt(&services, &me, "web", request(rate), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    assert!(plan.steps[0].contains("at 5 MiB a second at most"), "{plan:?}");
    let begun = services::mirror::encrypt(&services, &me, "web", request(rate), false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    assert_eq!(task.rate, rate);
    let id = task.id.to_string();
    services::tasks::pause(&services, &me, &id, false).await.unwrap();
    fixture.until_it_copies(task.id, CopyPace { bytes_per_second: rate, paused: true }).await;
    services::tasks::resume(&services, &me, &id, false).await.unwrap();
    fixture.copies_at(CopyPace { bytes_per_second: rate, paused: false }).await;
    let set = async |rate: u64| {
        services::tasks::set(&services, &me, &id, SetTask { rate }, false).await.map(drop)
    };
    set(7 << 20).await.unwrap();
    fixture.copies_at(CopyPace { bytes_per_second: Some(7 << 20), paused: false }).await;
    assert_eq!(set(5).await.unwrap_err().field.as_deref(), Some("rate"));
    set(0).await.unwrap();
    fixture.copies_at(CopyPace::default()).await;
    let told: Vec<_> =
        fixture.events("task.rate-set").await.into_iter().map(|event| event.detail).collect();
    assert!(told.iter().any(|it| it.ends_with(": 7340032 bytes a second")), "{told:?}");
    assert!(told.iter().any(|it| it.ends_with(": no limit")), "{told:?}");

    fixture.agent.lack_features(&[PACE]);
    fixture.agent.restart();
    let lacks = async || {
        let paused = services::tasks::pause(&services, &me, &id, true).await;
        (paused.err()?.code == ErrorCode::Unsupported).then_some(())
    };
    fixture.eventually("the server sees that the agent cannot do it", lacks).await;
}

#[test]
fn the_time_that_is_left_follows_from_the_speed() {
    let seen = |done, bytes_per_second| Seen {
        progress: Progress { done, total: 1000 },
        bytes_per_second,
        migration: None,
    };
    assert_eq!(seen(100, Some(300)).seconds_left(), Some(3));
    assert_eq!(seen(100, None).seconds_left(), None);
    assert_eq!(seen(100, Some(0)).seconds_left(), None);
    assert_eq!(seen(1000, Some(10)).seconds_left(), Some(0));
}
