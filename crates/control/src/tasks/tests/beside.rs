//! VMs that are stopped and started while another task works on their disks: in the middle of its work, and at each of its steps with
//! the server dying there, all of them end well, and the disks are whole.

use std::time::Duration;

use vmseal_api::host::{HostAgent, JobKind, JobSpec, JobState, JobStatus};
use vmseal_api::id::TaskId;
use vmseal_api::model::WaitingOn;
use vmseal_api::request::{StartVm, StopVm};
use vmseal_secret::sealed_box::Recipient;

use super::backups::Backup;
use super::clones::Cloned;
use super::dumps::Dump;
use super::limits::{copied, vms_to_copy};
use super::migrate::Disks;
use super::mirror::{Mirror, What};
use super::snapshots::Snapshot;
use super::*;
use crate::services::{Caller, Outcome, create_vm, vms};
use crate::tasks::limits::{PROVIDER_CALLS, Share};

const fn mirror(what: What, runs: bool) -> Kind {
    Kind::Mirror(Mirror { what, runs, in_place: false })
}

/// A VM is stopped and started beside these.
const BOTH: [Kind; 11] = [
    mirror(What::Encrypt, false),
    mirror(What::Encrypt, true),
    mirror(What::Decrypt, false),
    mirror(What::Decrypt, true),
    mirror(What::DeepRecrypt, false),
    mirror(What::DeepRecrypt, true),
    mirror(What::Move, false),
    mirror(What::Move, true),
    Kind::Prove,
    Kind::Backup(Backup::Verify),
    Kind::Snapshot(Snapshot::Delete),
];

/// A VM is only stopped beside these.
const STOPPED: [Kind; 3] =
    [Kind::Backup(Backup::Create), Kind::Clone(Cloned::Running), Kind::Clone(Cloned::RunningSent)];

/// Each of these needs the power as it is, or changes it.
const ALONE: [Kind; 8] = [
    Kind::Suspend,
    Kind::Recrypt,
    Kind::Snapshot(Snapshot::Take),
    Kind::Snapshot(Snapshot::RevertRunning),
    Kind::Backup(Backup::Restore),
    Kind::Migrate(Disks::Shared),
    Kind::Dump(Dump::Take),
    Kind::Mirror(Mirror { what: What::Encrypt, runs: false, in_place: true }),
];

/// As long as a caller sees work begin.
const SHORT: Duration = Duration::from_millis(5);

/// Longer than the server takes to come back.
const WHILE_RESTARTED: Duration = Duration::from_secs(1);

/// How long a task is watched that is not to end.
const WATCHED: Duration = Duration::from_millis(300);

fn stop(vm: VmId) -> Operation {
    Operation::StopVm { vm, force: true, timeout_seconds: 5 }
}

/// The guest is asked.
fn shutdown(vm: VmId) -> Operation {
    Operation::StopVm { vm, force: false, timeout_seconds: 600 }
}

fn start(vm: VmId) -> Operation {
    Operation::StartVm { vm, boot_once: None }
}

/// The job at which the host works longest.
fn job_of(kind: Kind) -> JobKind {
    match kind {
        Kind::Mirror(_) => JobKind::Mirror,
        Kind::Backup(Backup::Create) => JobKind::Backup,
        Kind::Backup(_) => JobKind::VerifyBackup,
        Kind::Clone(_) => JobKind::Create,
        Kind::Snapshot(_) => JobKind::DropSnapshot,
        _ => JobKind::Prove,
    }
}

/// The VM whose power a task leaves to others.
async fn subject(fixture: &Fixture, task: TaskId) -> VmId {
    fixture.task(task).await.operation.leaves_power().unwrap().0
}

async fn refusal(fixture: &Fixture, operation: Operation) -> Problem {
    let mut write = fixture.store.write().await.unwrap();
    Engine::record(&mut write, operation, "web", "me").await.unwrap_err()
}

/// Begins an operation, and waits until the host works at its job, which has no end until the agent restarts.
async fn in_the_middle(kind: Kind, fixture: &Fixture) -> (VmId, TaskId) {
    let before = kind.before(fixture).await;
    // Some have another job before.
    fixture.agent.set_work_of(job_of(kind), LONG);
    let (vm, task) = kind.begin(fixture, before).await;
    let works = async || {
        let state = fixture.agent.state_now().await.unwrap();
        let mut jobs = state.vms.iter().flat_map(|vm| &vm.jobs);
        let is_it = |job: &JobStatus| job.task == task && job.kind == job_of(kind);
        jobs.any(|job| is_it(job) && job.state == JobState::Running).then_some(())
    };
    fixture.eventually("its host works", works).await;
    fixture.agent.set_work(SHORT);
    (vm, task)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_stopped_and_started_in_the_middle_of_a_copy() {
    for kind in BOTH.into_iter().chain(STOPPED) {
        let what = format!("{kind:?}");
        let fixture = Fixture::new().await;
        let (vm, task) = in_the_middle(kind, &fixture).await;
        let of = subject(&fixture, task).await;
        let (ran, both) = (fixture.agent.runs(of), BOTH.contains(&kind));
        let first = if ran { stop(of) } else { start(of) };
        fixture.done(first, "web").await;
        assert_ne!(fixture.agent.runs(of), ran, "{what}");
        let second = if ran { start(of) } else { stop(of) };
        if both {
            fixture.done(second.clone(), "web").await;
        } else {
            let refused = refusal(&fixture, second.clone()).await;
            assert_eq!(refused.code, ErrorCode::WrongState, "{what}: {refused}");
            let told = [format!("vmseal task cancel {task}"), "can be stopped".to_owned()];
            assert!(told.iter().all(|it| refused.detail.contains(it)), "{what}: {refused}");
        }
        assert!(fixture.task(task).await.ended.is_none(), "{what}: it did not go on");
        // The job is put again, and comes to its end.
        fixture.agent.restart();
        fixture.ends_well(task).await;
        if !both {
            fixture.done(second, "web").await;
        }
        kind.assert_done(&fixture, vm, &what).await;
    }
}

/// At each step, a part of which a run has: the server dies there, and then once more while the VM is stopped or started.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_stopped_and_started_at_each_step_while_the_server_dies() {
    let mut part = Part::of_run();
    for kind in BOTH.into_iter().chain(STOPPED) {
        for step in kind.steps() {
            for point in [FaultPoint::Before, FaultPoint::After] {
                if part.has_next() {
                    changed_at(kind, step, point).await;
                }
            }
        }
    }
}

async fn changed_at(kind: Kind, step: &'static str, point: FaultPoint) {
    let what = format!("{kind:?}, {point:?} {step:?}");
    println!("{what}");
    let mut fixture = Fixture::new().await;
    let (vm, task) = died_at(kind, step, point, &mut fixture).await;
    let of = subject(&fixture, task).await;
    let ran = fixture.agent.runs(of);
    let (first, second) = if ran { (stop(of), start(of)) } else { (start(of), stop(of)) };
    let first = fixture.begin(first, "web").await;
    fixture.restart(|_| {}).await;
    fixture.ends_well(first).await;
    if !BOTH.contains(&kind) {
        fixture.ends_well(task).await;
    }
    fixture.done(second, "web").await;
    fixture.ends_well(task).await;
    kind.assert_done(&fixture, vm, &what).await;
}

/// Begins an operation whose task stands still at a step, as if the server had died; other tasks run.
async fn died_at(
    kind: Kind,
    step: &'static str,
    point: FaultPoint,
    fixture: &mut Fixture,
) -> (VmId, TaskId) {
    let before = kind.before(fixture).await;
    let (faults, done) = at(step, TaskState::Running, point, Fault::Crash, 1);
    fixture.restart(|engine: &mut Engine| engine.environment.faults = Some(faults)).await;
    let begun = kind.begin(fixture, before).await;
    let died = async || (done.load(Ordering::SeqCst) > 0).then_some(());
    fixture.eventually("it dies", died).await;
    begun
}

/// The server died when the host had been told to use the copies, and had not recorded that: a start with what the inventory has would
/// be one with other images.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_not_started_with_images_that_its_host_uses_no_more() {
    for of in [What::Encrypt, What::Decrypt, What::DeepRecrypt, What::Move] {
        let what = format!("{of:?}");
        let kind = Mirror { what: of, runs: false, in_place: false };
        let mut fixture = Fixture::new().await;
        let (vm, task) =
            died_at(Kind::Mirror(kind), "switch", FaultPoint::Before, &mut fixture).await;
        let (operation, disks) = (fixture.task(task).await.operation, fixture.disks(vm).await);
        let ids: Vec<_> = disks.iter().map(|disk| disk.id).collect();
        let mut job = crate::tasks::mirror_vm::mirror(&operation, &ids, &disks);
        if let JobSpec::Mirror(job) = &mut job {
            job.forgets_key = operation.gives_up_key();
        }
        fixture.agent.commit_job(vm, task, job).await.unwrap();
        let started = fixture.begin(start(vm), "web").await;
        waits_for(&fixture, started, task).await;
        assert!(!fixture.agent.runs(vm), "{what}");
        fixture.restart(|_| {}).await;
        fixture.ends_well(task).await;
        fixture.ends_well(started).await;
        Mirror { runs: true, ..kind }.assert_done(&fixture, vm, &what).await;
    }
}

/// The test holds the lock that a step of a start holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_used_only_after_the_step_of_a_start_that_is_being_done() {
    let kind = Mirror { what: What::Encrypt, runs: false, in_place: false };
    let fixture = Fixture::new().await;
    let vm = kind.before(&fixture).await;
    let commits = fixture.calls(Call::CommitJob);
    let step_of_start = fixture.engine.environment.definitions.lock(vm).await;
    let (_, task) = Kind::Mirror(kind).begin(&fixture, Some(vm)).await;
    let at_switch = async || (fixture.task(task).await.step == "switch").then_some(());
    fixture.eventually("the copy is to be used", at_switch).await;
    let early = tokio::time::timeout(WATCHED, fixture.ended(task)).await;
    assert!(early.is_err(), "it did not wait: {early:?}");
    assert_eq!(fixture.calls(Call::CommitJob), commits, "the host was told to use the copy");
    drop(step_of_start);
    fixture.ends_well(task).await;
    kind.assert_done(&fixture, vm, "after a step of a start").await;
}

/// Waits until a start is shown to wait for another task.
async fn waits_for(fixture: &Fixture, started: TaskId, task: TaskId) {
    let shown = async || {
        let seen = fixture.task(started).await;
        let waiting = seen.waiting.filter(|_| seen.state == TaskState::Waiting)?;
        (waiting.on == WaitingOn::Task && waiting.name == task.to_string()).then_some(())
    };
    fixture.eventually("it is shown to wait", shown).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_waits_for_a_copy_holds_no_permit_and_is_cancelled() {
    let kind = Mirror { what: What::DeepRecrypt, runs: false, in_place: false };
    let mut fixture = Fixture::new().await;
    let (vm, task) = died_at(Kind::Mirror(kind), "switch", FaultPoint::Before, &mut fixture).await;
    let started = fixture.begin(start(vm), "web").await;
    waits_for(&fixture, started, task).await;
    let provider = fixture.vm(vm).await.unwrap().provider.unwrap();
    let permits = fixture.engine.environment.limits.of(Share::ProviderCalls, provider.0);
    assert_eq!(permits.available_permits(), PROVIDER_CALLS);
    fixture.engine.cancel(&started.to_string(), "me").await.unwrap();
    let ended = fixture.ended(started).await;
    assert_eq!(ended.state, TaskState::Cancelled, "{:?}", ended.problem);
    assert!(!fixture.agent.runs(vm));
    fixture.restart(|_| {}).await;
    fixture.ends_well(task).await;
    kind.assert_done(&fixture, vm, "cancelled").await;
}

/// A copy that is queued has changed nothing on the host, and may be so for hours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_started_while_a_copy_of_it_is_queued() {
    let kind = Mirror { what: What::Encrypt, runs: false, in_place: false };
    let fixture = Fixture::new().await;
    let vm = kind.before(&fixture).await;
    let others = vms_to_copy(&fixture).await;
    fixture.agent.set_work(LONG);
    let others = copied(&fixture, &others).await;
    let (_, task) = Kind::Mirror(kind).begin(&fixture, Some(vm)).await;
    let is_queued = async || {
        let seen = fixture.task(task).await;
        (seen.state == TaskState::Queued && seen.step == "clear").then_some(())
    };
    fixture.eventually("the copy is queued", is_queued).await;
    fixture.agent.set_work(SHORT);
    fixture.done(start(vm), "web").await;
    assert_eq!(fixture.task(task).await.state, TaskState::Queued);
    for other in others {
        fixture.engine.cancel(&other.to_string(), "me").await.unwrap();
        assert_eq!(fixture.ended(other).await.state, TaskState::Cancelled);
    }
    fixture.ends_well(task).await;
    Mirror { runs: true, ..kind }.assert_done(&fixture, vm, "started").await;
}

/// The first step of a copy may have those of an earlier one used, which could be neither finished nor undone. After a restart of the server it
/// is not known whether it has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_not_started_while_copies_of_an_earlier_task_may_be_put_into_use() {
    let kind = Mirror { what: What::Encrypt, runs: false, in_place: false };
    let mut fixture = Fixture::new().await;
    let vm = kind.before(&fixture).await;
    // Done or undone.
    let faults: Faults = Arc::new(|step, _, point| match (step, point) {
        ("copy", FaultPoint::Before) => Fault::Fail(refused()),
        _ => Fault::None,
    });
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let (_, earlier) = Kind::Mirror(kind).begin(&fixture, Some(vm)).await;
    assert_eq!(fixture.ended(earlier).await.state, TaskState::Unknown);
    let (faults, done) = at("clear", TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let (_, task) = Kind::Mirror(kind).begin(&fixture, Some(vm)).await;
    let died = async || (done.load(Ordering::SeqCst) > 0).then_some(());
    fixture.eventually("it dies", died).await;
    let started = fixture.begin(start(vm), "web").await;
    waits_for(&fixture, started, task).await;
    assert!(!fixture.agent.runs(vm));
    fixture.restart(|_| {}).await;
    fixture.ends_well(task).await;
    fixture.ends_well(started).await;
    Mirror { runs: true, ..kind }.assert_done(&fixture, vm, "started").await;
}

/// The host refuses as the VM is stopping, and the stop has ended when the task that is refused looks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_outlasts_a_refusal_also_where_the_stop_has_ended_since() {
    let kind = Mirror { what: What::Encrypt, runs: true, in_place: false };
    let mut fixture = Fixture::new().await;
    let (vm, task) = died_at(Kind::Mirror(kind), "copy", FaultPoint::Before, &mut fixture).await;
    fixture.agent.set_heeds_shutdown(false);
    let asked = fixture.begin(shutdown(vm), "web").await;
    let is_asked = async || (fixture.calls(Call::PowerOff) > 0).then_some(());
    fixture.eventually("the guest is asked", is_asked).await;
    let (refuses, refused_now) =
        at("copy", TaskState::Running, FaultPoint::Before, Fault::Fail(refused()), 1);
    let (answer, answers) = std::sync::mpsc::channel::<()>();
    let answers = Mutex::new(answers);
    let faults: Faults = Arc::new(move |step, state, point| {
        let fault = refuses(step, state, point);
        if matches!(fault, Fault::Fail(_)) {
            // It comes once the stop has ended; none comes where the test has failed.
            let _ = tokio::task::block_in_place(|| answers.lock().unwrap().recv());
        }
        fault
    });
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let is_refused = async || (refused_now.load(Ordering::SeqCst) > 0).then_some(());
    fixture.eventually("the copy is refused", is_refused).await;
    assert_eq!(fixture.engine.force_stop(vm, "me").await.unwrap().unwrap().id, asked);
    fixture.ends_well(asked).await;
    answer.send(()).unwrap();
    fixture.ends_well(task).await;
    Mirror { runs: false, ..kind }.assert_done(&fixture, vm, "stopped").await;
}

/// Hosts take the key from no VM that is starting: what undoes the copy waits for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_undone_while_the_vm_starts() {
    for of in [What::Encrypt, What::Move] {
        let what = format!("{of:?}");
        let kind = Mirror { what: of, runs: false, in_place: false };
        let fixture = Fixture::new().await;
        let (vm, task) = in_the_middle(Kind::Mirror(kind), &fixture).await;
        fixture.agent.set_work(WHILE_RESTARTED);
        let started = fixture.begin(start(vm), "web").await;
        is_starting(&fixture, vm).await;
        fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Cancelled, "{what}: {:?}", ended.problem);
        fixture.ends_well(started).await;
        Mirror { runs: true, ..kind }.assert_undone(&fixture, vm, &what).await;
    }
}

async fn is_starting(fixture: &Fixture, vm: VmId) {
    let starts = async || {
        let state = fixture.agent.state_now().await.unwrap();
        let mut seen = state.vms.iter().filter(|seen| seen.vm == vm);
        seen.any(|seen| seen.power == Power::Starting).then_some(())
    };
    fixture.eventually("it starts", starts).await;
}

/// Hosts do not switch disks while a guest is asked to shut down, which may last: the copy is not lost for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_copy_is_used_when_the_guest_has_shut_down_or_runs_on() {
    let kind = Mirror { what: What::Encrypt, runs: true, in_place: false };
    let mut fixture = Fixture::new().await;
    let (vm, task) = died_at(Kind::Mirror(kind), "switch", FaultPoint::Before, &mut fixture).await;
    fixture.agent.set_heeds_shutdown(false);
    let asked = fixture.begin(shutdown(vm), "web").await;
    let is_asked = async || (fixture.calls(Call::PowerOff) > 0).then_some(());
    fixture.eventually("the guest is asked", is_asked).await;
    let commits = fixture.calls(Call::CommitJob);
    fixture.restart(|_| {}).await;
    let switches = async || (fixture.calls(Call::CommitJob) > commits).then_some(());
    fixture.eventually("it is to be switched", switches).await;
    let early = tokio::time::timeout(WATCHED, fixture.ended(task)).await;
    assert!(early.is_err(), "it did not wait: {early:?}");
    assert_eq!(fixture.engine.force_stop(vm, "me").await.unwrap().unwrap().id, asked);
    fixture.ends_well(asked).await;
    fixture.ends_well(task).await;
    Mirror { runs: false, ..kind }.assert_done(&fixture, vm, "stopped").await;
}

/// Hosts refuse to begin with the former images of a VM that is starting: the task, which only goes forward, waits for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_images_are_removed_when_the_vm_has_started() {
    let kind = Mirror { what: What::Encrypt, runs: false, in_place: false };
    let mut fixture = Fixture::new().await;
    let (vm, task) =
        died_at(Kind::Mirror(kind), "drop-source", FaultPoint::Before, &mut fixture).await;
    fixture.agent.set_work(WHILE_RESTARTED);
    let started = fixture.begin(start(vm), "web").await;
    is_starting(&fixture, vm).await;
    fixture.agent.set_work(SHORT);
    fixture.restart(|_| {}).await;
    fixture.ends_well(started).await;
    fixture.ends_well(task).await;
    Mirror { runs: true, ..kind }.assert_done(&fixture, vm, "started").await;
}

/// What a TPM keeps is copied of a VM that is at rest: it stays so until the copy is used.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_is_not_started_while_what_its_tpm_keeps_is_copied() {
    let mut fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let begun = create_vm::create(&services, &me, super::tpm::request("encrypted"), false).await;
    let Ok(Outcome::Done(made)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(made.id).await;
    let vm = fixture.task(made.id).await.operation.vm().unwrap();
    let deep = || Operation::DeepRecryptVm { vm, in_place: false, disks: vec![] };
    for (step, runs) in [("check", false), ("copy", false), ("copy", true)] {
        let what = format!("{step}, runs: {runs}");
        if runs {
            fixture.done(start(vm), "web").await;
        }
        let (faults, done) = at(step, TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let task = fixture.begin(deep(), "web").await;
        let died = async || (done.load(Ordering::SeqCst) > 0).then_some(());
        fixture.eventually("it dies", died).await;
        fixture.done(stop(vm), "web").await;
        if runs {
            // It has found the guest running, and leaves what the TPM keeps as it is.
            fixture.done(start(vm), "web").await;
        } else {
            for operation in [start(vm), Operation::RebootVm { vm, timeout_seconds: 5 }] {
                let refused = refusal(&fixture, operation).await;
                assert_eq!(refused.code, ErrorCode::WrongState, "{what}: {refused}");
                assert!(refused.detail.contains("TPM"), "{what}: {refused}");
            }
        }
        fixture.restart(|_| {}).await;
        fixture.ends_well(task).await;
        let power = if runs { Power::Running } else { Power::Off };
        fixture.assert_whole(vm, power, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_that_need_the_power_as_it_is_keep_it_and_say_how_to_end_them() {
    for kind in ALONE {
        let mut fixture = Fixture::new().await;
        let (vm, task) = died_at(kind, kind.steps()[0], FaultPoint::Before, &mut fixture).await;
        for operation in [stop(vm), start(vm), Operation::RebootVm { vm, timeout_seconds: 5 }] {
            let refused = refusal(&fixture, operation).await;
            assert_eq!(refused.code, ErrorCode::WrongState, "{kind:?}: {refused}");
            for command in ["show", "wait", "cancel"] {
                let command = format!("vmseal task {command} {task}");
                assert!(refused.detail.contains(&command), "{kind:?}: {refused}");
            }
        }
    }
}

/// A guest that is asked to shut down while its disks are moved has its VM to itself when the move has ended first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_that_outlives_the_copy_beside_it_keeps_other_tasks_away() {
    let fixture = Fixture::new().await;
    fixture.agent.set_heeds_shutdown(false);
    let (vm, task) = in_the_middle(mirror(What::Move, true), &fixture).await;
    let asked = fixture.begin(shutdown(vm), "web").await;
    let other = refusal(&fixture, start(vm)).await;
    assert!(other.detail.contains(&asked.to_string()), "one changes the power at a time: {other}");
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    for operation in [Operation::SuspendVm { vm }, proving(vm), start(vm)] {
        let refused = refusal(&fixture, operation).await;
        assert!(refused.detail.contains(&asked.to_string()), "{refused}");
    }
    assert_eq!(fixture.engine.force_stop(vm, "me").await.unwrap().unwrap().id, asked);
    fixture.ends_well(asked).await;
    fixture.done(proving(vm), "web").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_beside_a_backup_answers_as_the_request_does() {
    let fixture = Fixture::new().await;
    let (_, task) = in_the_middle(Kind::Backup(Backup::Create), &fixture).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let forced = || StopVm { force: true, timeout_seconds: None };
    let planned = vms::stop(&services, &me, "web", forced(), true).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
    let Ok(Outcome::Done(stopped)) = vms::stop(&services, &me, "web", forced(), false).await else {
        panic!("it is not stopped")
    };
    fixture.ends_well(stopped.id).await;
    for dry_run in [true, false] {
        let refused = vms::start(&services, &me, "web", StartVm::default(), dry_run).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        assert!(refused.detail.contains(&format!("vmseal task cancel {task}")), "{refused}");
    }
    assert!(fixture.task(task).await.ended.is_none());
}
