//! Every operation, with every step failing, unanswered, repeated, and the server crashing before and after it: at
//! the end the VM is complete or completely removed, and the server shows the real state.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use vmseal_agent::simulated::{Call, Fault as HostFault};
use vmseal_api::host::Power;
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::model::{Lifecycle, TaskState};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id::{self, RequestId};
use vmseal_api::transfer::ExportFormat;

mod adopt;
mod adopt_newer;
mod away;
mod backups;
mod beside;
mod cdrom;
mod change_host;
mod changes;
mod clones;
mod clones_elsewhere;
mod clones_on_hosts;
mod cloud_init;
mod defects;
mod dumps;
mod evacuate;
mod forced;
mod held;
mod images;
mod limits;
mod matrix;
mod migrate;
mod mirror;
mod mirror_beside;
mod mirror_tpm;
mod older_memories;
mod outage;
mod pacing;
mod parents;
mod part;
mod proofs;
mod recrypt;
mod remote;
mod restored_as;
mod revoked;
mod single_disks;
mod snapshots;
mod switch;
mod tpm;
mod tpm_state;
mod uefi_variables;
mod upgrade;
mod waiting;

use self::matrix::matrix;
use self::part::Part;
use super::Engine;
use super::environment::{Fault, FaultPoint, Faults};
use super::step::Step;
use crate::operation::Operation;
use crate::store::tasks::Task;
use crate::tasks::steps;
use crate::testing::Fixture;

/// Injects a fault at one point, a given number of times; counts how often it did.
fn at(
    step: &'static str,
    state: TaskState,
    point: FaultPoint,
    fault: Fault,
    times: u32,
) -> (Faults, Arc<AtomicU32>) {
    let done = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&done);
    let faults: Faults = Arc::new(move |at_step, at_state, at_moment| {
        let here = (at_step, at_state, at_moment) == (step, state, point);
        if here && count.fetch_add(1, Ordering::SeqCst) < times {
            fault.clone()
        } else {
            Fault::None
        }
    });
    (faults, done)
}

/// How often a step is tried in these tests.
const ATTEMPTS: u32 = crate::testing::ATTEMPTS;

/// Longer than any test.
const LONG: std::time::Duration = std::time::Duration::from_secs(600);

fn refused() -> Problem {
    Problem::new(ErrorCode::WrongState, "refused on purpose")
}

fn silent() -> Problem {
    Problem::new(ErrorCode::Unreachable, "silent on purpose")
}

/// Where disks are exported to.
const OUT: &str = "/exports/out.raw";

/// Whether a step is behind the one from which these only go on.
fn is_past_commit(steps: &[&dyn Step], step: &str) -> bool {
    steps.iter().take_while(|it| it.name() != step).any(|before| before.commits())
}

fn exporting(vm: VmId, disk: DiskId) -> Operation {
    Operation::ExportDisk {
        vm,
        disk,
        to: OUT.into(),
        format: ExportFormat::Raw,
        passphrase: None,
        snapshot: None,
    }
}

fn proving(vm: VmId) -> Operation {
    Operation::ProveVm { vm, all: false, seed: 1 }
}

/// The operations of the matrix, from a VM in the state that each needs.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Create,
    FirstBoot,
    Start,
    Stop,
    Suspend,
    Resume,
    Delete,
    Export,
    Prove,
    Recrypt,
    Mirror(mirror::Mirror),
    Change(changes::Change),
    Snapshot(snapshots::Snapshot),
    Dump(dumps::Dump),
    Backup(backups::Backup),
    Clone(clones::Cloned),
    Adopt,
    AdoptNewer,
    Migrate(migrate::Disks),
    ChangeHost(change_host::Rest),
    Evacuate(evacuate::Was),
}

impl Kind {
    /// Sets up the state that the operation needs, with no faults.
    async fn before(self, fixture: &Fixture) -> Option<VmId> {
        match self {
            Self::Create | Self::FirstBoot => None,
            Self::Clone(what) => {
                what.before(fixture).await;
                None
            }
            Self::Start | Self::Delete | Self::Export | Self::Prove | Self::Recrypt => {
                Some(fixture.made("web", "encrypted").await)
            }
            Self::Stop | Self::Suspend => Some(fixture.running("web").await),
            Self::Resume => {
                let vm = fixture.running("web").await;
                fixture.done(Operation::SuspendVm { vm }, "web").await;
                Some(vm)
            }
            Self::Mirror(mirror) => Some(mirror.before(fixture).await),
            Self::Change(change) => Some(change.before(fixture).await),
            Self::Snapshot(what) => Some(what.before(fixture).await),
            Self::Dump(what) => Some(what.before(fixture).await),
            Self::Backup(what) => Some(what.before(fixture).await),
            Self::Adopt => Some(adopt::lost(fixture, "web").await),
            Self::AdoptNewer => Some(adopt_newer::older(fixture, "web").await),
            Self::Migrate(disks) => Some(disks.before(fixture).await),
            Self::ChangeHost(rest) => Some(rest.before(fixture).await),
            Self::Evacuate(was) => Some(was.before(fixture).await),
        }
    }

    async fn begin(self, fixture: &Fixture, vm: Option<VmId>) -> (VmId, vmseal_api::id::TaskId) {
        let Some(vm) = vm else {
            return match self {
                Self::FirstBoot => cloud_init::create(fixture, "web").await,
                Self::Clone(what) => what.begin(fixture).await,
                _ => fixture.create("web", "encrypted").await,
            };
        };
        let operation = match self {
            Self::Create | Self::FirstBoot | Self::Clone(_) => {
                unreachable!("it has no VM yet")
            }
            Self::Adopt | Self::AdoptNewer => return (vm, adopt::begin(fixture).await),
            Self::Start | Self::Resume => Operation::StartVm { vm, boot_once: None },
            Self::Suspend => Operation::SuspendVm { vm },
            Self::Stop => Operation::StopVm { vm, force: true, timeout_seconds: 10 },
            Self::Prove => proving(vm),
            Self::Delete => Operation::DeleteVm { vm, was: Lifecycle::Ready },
            Self::Export => exporting(vm, fixture.disks(vm).await[0].id),
            Self::Recrypt => fixture.recryption(vm).await,
            Self::Mirror(mirror) => mirror.operation(fixture, vm).await,
            Self::Change(change) => change.operation(fixture, vm).await,
            Self::Snapshot(what) => what.operation(fixture, vm).await,
            Self::Dump(what) => what.operation(fixture, vm).await,
            Self::Backup(what) => what.operation(fixture, vm).await,
            Self::Migrate(disks) => disks.operation(fixture, vm).await,
            Self::ChangeHost(_) => change_host::operation(fixture, vm).await,
            Self::Evacuate(was) => was.operation(fixture, vm).await,
        };
        (vm, fixture.begin(operation, "web").await)
    }

    fn steps(self) -> Vec<&'static str> {
        let vm = VmId::new();
        let steps = match self {
            Self::Create | Self::FirstBoot => {
                steps::of(&Operation::CreateVm { vm, cloud_init: None, copies: None })
            }
            Self::Clone(what) => what.steps(),
            Self::Start | Self::Resume => steps::of(&Operation::StartVm { vm, boot_once: None }),
            Self::Suspend => steps::of(&Operation::SuspendVm { vm }),
            Self::Prove => steps::of(&proving(vm)),
            Self::Stop => steps::of(&Operation::StopVm { vm, force: true, timeout_seconds: 1 }),
            Self::Delete => steps::of(&Operation::DeleteVm { vm, was: Lifecycle::Ready }),
            Self::Export => steps::of(&exporting(vm, DiskId::new())),
            Self::Recrypt => return recrypt::steps(),
            Self::Mirror(mirror) => return mirror.steps(),
            Self::Change(change) => change.steps(),
            Self::Snapshot(what) => what.steps(),
            Self::Dump(what) => what.steps(),
            Self::Backup(what) => what.steps(),
            Self::Adopt | Self::AdoptNewer => return adopt::steps(),
            Self::Migrate(_) => steps::of(&migrate::any(vm)),
            Self::ChangeHost(_) => steps::of(&change_host::any(vm)),
            Self::Evacuate(was) => was.steps(),
        };
        steps.iter().map(|step| step.name()).collect()
    }

    /// Whether a step comes after the commit step.
    fn is_past_commit(self, step: &str) -> bool {
        let vm = VmId::new();
        let operation = match self {
            Self::Delete => Operation::DeleteVm { vm, was: Lifecycle::Ready },
            Self::Recrypt => recrypt::operation(vm),
            Self::Migrate(_) => migrate::any(vm),
            Self::ChangeHost(_) => change_host::any(vm),
            Self::Evacuate(_) => evacuate::any(vm),
            Self::Mirror(mirror) => return mirror.is_past_commit(step),
            Self::Change(change) => return change.is_past_commit(step),
            Self::Snapshot(what) => return what.is_past_commit(step),
            Self::Dump(what) => return what.is_past_commit(step),
            Self::Backup(what) => return what.is_past_commit(step),
            Self::Clone(what) => return what.is_past_commit(step),
            _ => return false,
        };
        let before = steps::of(&operation).iter().take_while(|it| it.name() != step);
        before.into_iter().any(|step| step.commits())
    }

    /// Whether a step is done until another host has answered.
    fn insists(self, step: &str) -> bool {
        let Self::Migrate(_) = self else { return false };
        let operation = migrate::any(VmId::new());
        let mut insist = steps::of(&operation).iter().filter(|step| step.insists());
        insist.any(|it| it.name() == step)
    }

    /// Checks the state after the operation has succeeded.
    async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        match self {
            Self::Create | Self::FirstBoot | Self::Stop | Self::Prove => {
                fixture.assert_whole(vm, Power::Off, what).await
            }
            Self::Clone(of) => of.assert_done(fixture, vm, what).await,
            Self::Start | Self::Resume => fixture.assert_whole(vm, Power::Running, what).await,
            Self::Suspend => fixture.assert_whole(vm, Power::Suspended, what).await,
            Self::Delete => fixture.assert_nothing_left(vm, what).await,
            Self::Export => {
                fixture.assert_whole(vm, Power::Off, what).await;
                assert_eq!(fixture.agent.exports(), (vec![OUT.into()], 0), "{what}");
            }
            Self::Recrypt => recrypt::assert_done(fixture, vm, what).await,
            Self::Mirror(mirror) => mirror.assert_done(fixture, vm, what).await,
            Self::Change(change) => change.assert_done(fixture, vm, what).await,
            Self::Snapshot(of) => of.assert_done(fixture, vm, what).await,
            Self::Dump(of) => of.assert_done(fixture, vm, what).await,
            Self::Backup(of) => of.assert_done(fixture, vm, what).await,
            Self::Adopt => fixture.assert_whole(vm, Power::Off, what).await,
            Self::AdoptNewer => adopt_newer::assert_newer(fixture, vm, what).await,
            Self::Migrate(disks) => disks.assert_done(fixture, vm, what).await,
            Self::ChangeHost(rest) => rest.assert_done(fixture, vm, what).await,
            Self::Evacuate(was) => was.assert_done(fixture, vm, what).await,
        }
    }

    /// Checks the state after the operation has failed.
    async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        match self {
            Self::Create | Self::FirstBoot => fixture.assert_nothing_left(vm, what).await,
            Self::Clone(of) => of.assert_undone(fixture, vm, what).await,
            Self::Start | Self::Delete | Self::Prove => {
                fixture.assert_whole(vm, Power::Off, what).await
            }
            Self::Export => {
                fixture.assert_whole(vm, Power::Off, what).await;
                assert_eq!(fixture.agent.exports(), (vec![], 0), "{what}");
            }
            Self::Recrypt => recrypt::assert_undone(fixture, vm, what).await,
            Self::Mirror(mirror) => mirror.assert_undone(fixture, vm, what).await,
            Self::Change(change) => change.assert_undone(fixture, vm, what).await,
            Self::Snapshot(of) => of.assert_undone(fixture, vm, what).await,
            Self::Dump(of) => of.assert_undone(fixture, vm, what).await,
            Self::Backup(of) => of.assert_undone(fixture, vm, what).await,
            Self::Adopt => adopt::assert_undone(fixture, vm, what).await,
            Self::AdoptNewer => adopt_newer::assert_older(fixture, vm, what).await,
            Self::Migrate(disks) => disks.assert_undone(fixture, vm, what).await,
            Self::ChangeHost(rest) => rest.assert_undone(fixture, vm, what).await,
            Self::Evacuate(was) => was.assert_undone(fixture, vm, what).await,
            // Neither a stop is undone nor what a guest goes on from; the server must show the real state.
            Self::Stop | Self::Suspend | Self::Resume => {
                let runs = fixture.agent.running().contains(&vm);
                let stands = if self == Self::Stop { Power::Off } else { Power::Suspended };
                fixture.assert_whole(vm, if runs { Power::Running } else { stands }, what).await;
            }
        }
    }
}

/// Runs an operation under a fault; after a crash of the server, starts it without faults.
async fn carry_out(
    kind: Kind,
    faults: Faults,
    done: &AtomicU32,
    crashes: bool,
) -> (Fixture, VmId, vmseal_api::id::TaskId) {
    let mut fixture = Fixture::new().await;
    let before = kind.before(&fixture).await;
    fixture.restart(|engine: &mut Engine| engine.environment.faults = Some(faults)).await;
    let (vm, task) = kind.begin(&fixture, before).await;
    if crashes {
        fixture
            .eventually("it crashes", async || (done.load(Ordering::SeqCst) > 0).then_some(()))
            .await;
        assert!(fixture.task(task).await.ended.is_none());
        fixture.restart(|_| {}).await;
    }
    fixture.ended(task).await;
    (fixture, vm, task)
}

/// A step after the commit step is retried until there is an answer, and so is one that insists on one.
async fn goes_on_until_answered(kind: Kind, faults: Faults, done: &AtomicU32, what: &str) {
    let mut fixture = Fixture::new().await;
    let before = kind.before(&fixture).await;
    fixture.restart(|engine: &mut Engine| engine.environment.faults = Some(faults)).await;
    let (vm, task) = kind.begin(&fixture, before).await;
    fixture
        .eventually(what, async || (done.load(Ordering::SeqCst) > 3 * ATTEMPTS).then_some(()))
        .await;
    let waits = fixture.task(task).await;
    assert!(waits.ended.is_none(), "{what}: it was given up");
    if steps::is_committed(&waits) {
        let refused = fixture.engine.cancel(&task.to_string(), "me").await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{what}: it can be cancelled");
    }
    fixture.restart(|_| {}).await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
    kind.assert_done(&fixture, vm, what).await;
}

/// Either nothing of it is left, or the problem says that something is, and deleting again removes it.
async fn assert_failed_truly(
    kind: Kind,
    fixture: &mut Fixture,
    vm: VmId,
    task: vmseal_api::id::TaskId,
    what: &str,
) {
    let ended = fixture.task(task).await;
    let problem = ended.problem.clone().unwrap();
    match ended.state {
        TaskState::Failed => kind.assert_undone(fixture, vm, what).await,
        TaskState::Unknown => {
            if kind == Kind::Export {
                // It had its name already: the problem says so, and the file is left.
                assert!(problem.detail.contains(OUT) && problem.detail.contains("is whole"));
                assert_eq!(fixture.agent.exports(), (vec![OUT.into()], 0), "{what}");
                return;
            }
            if kind == Kind::Recrypt {
                // Past its commit step: the problem says so, an alarm is active, and another recryption finishes it.
                assert!(problem.detail.contains("has its new key"), "{what}: {problem}");
                let alarm = "task-unfinished web".to_owned();
                assert!(fixture.alarms().await.contains(&alarm), "{what}");
                recrypt::recrypt_again(fixture, vm, what).await;
                assert!(
                    !fixture.alarms().await.contains(&alarm),
                    "{what}: the alarm is still active"
                );
                return;
            }
            if let Kind::Mirror(mirror) = kind {
                return mirror.assert_unfinished(fixture, vm, &problem, what).await;
            }
            if let Kind::Snapshot(of) = kind {
                return of.assert_unfinished(fixture, vm, &problem, what).await;
            }
            if let Kind::Dump(of) = kind {
                return of.assert_unfinished(fixture, vm, &problem, what).await;
            }
            if let Kind::Clone(of) = kind {
                return of.assert_unfinished(fixture, vm, &problem, what).await;
            }
            if let Kind::Backup(of) = kind {
                return of.assert_unfinished(fixture, vm, &problem, what).await;
            }
            if let Kind::Change(change) = kind {
                return change.assert_unfinished(fixture, vm, &problem, what).await;
            }
            if let Kind::Migrate(disks) = kind {
                return disks.assert_unfinished(fixture, vm, &problem, what).await;
            }
            if let Kind::ChangeHost(rest) = kind {
                assert!(problem.detail.contains("is on the other host"), "{what}: {problem}");
                return rest.assert_done(fixture, vm, what).await;
            }
            if let Kind::Evacuate(was) = kind {
                return was.assert_unfinished(fixture, vm, &problem, what).await;
            }
            assert_eq!(kind, Kind::Delete, "{what}: {problem}");
            assert!(problem.detail.contains("delete it again"), "{what}: {problem}");
            if let Some(row) = fixture.vm(vm).await {
                assert_eq!(row.lifecycle, Lifecycle::Deleting, "{what}");
                // The fault is still there: without it, deleting again succeeds.
                fixture.engine.stop();
            }
        }
        other => panic!("{what}: {other:?} {problem}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn create_survives_every_fault_at_every_step() {
    matrix(Kind::Create).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_survives_every_fault_at_every_step() {
    matrix(Kind::Start).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_survives_every_fault_at_every_step() {
    matrix(Kind::Stop).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proof_survives_every_fault_at_every_step() {
    matrix(Kind::Prove).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn suspend_and_resume_survive_every_fault_at_every_step() {
    matrix(Kind::Suspend).await;
    matrix(Kind::Resume).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn export_survives_every_fault_at_every_step() {
    matrix(Kind::Export).await;
}

#[tokio::test]
async fn an_export_that_is_called_off_or_fails_leaves_nothing() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let disk = fixture.disks(vm).await[0].id;
    fixture.agent.set_work(LONG);
    let before = fixture.calls(Call::PutJob);
    let task = fixture.begin(exporting(vm, disk), "web").await;
    fixture
        .eventually("it writes", async || (fixture.calls(Call::PutJob) > before).then_some(()))
        .await;
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    let ended = fixture.ended(task).await;
    assert_eq!(ended.problem.unwrap().code, ErrorCode::Cancelled);
    Kind::Export.assert_undone(&fixture, vm, "cancelled").await;

    fixture.agent.set_work(std::time::Duration::from_millis(1));
    fixture.agent.set_full(true);
    let task = fixture.begin(exporting(vm, disk), "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.problem.unwrap().code, ErrorCode::NoSpace);
    Kind::Export.assert_undone(&fixture, vm, "full").await;

    fixture.agent.set_full(false);
    let task = fixture.begin(exporting(vm, disk), "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    let task = fixture.begin(exporting(vm, disk), "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.problem.unwrap().code, ErrorCode::AlreadyExists);
    Kind::Export.assert_done(&fixture, vm, "it was there").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delete_survives_every_fault_at_every_step() {
    matrix(Kind::Delete).await;
}

/// Fails the last step permanently, and injects a fault into the undoing of every step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undoing_a_creation_survives_every_fault_at_every_step() {
    let mut part = Part::of_run();
    for step in Kind::Create.steps() {
        for (point, fault) in [
            (FaultPoint::Before, Fault::Crash),
            (FaultPoint::After, Fault::Crash),
            (FaultPoint::Before, Fault::Fail(silent())),
            (FaultPoint::After, Fault::Fail(silent())),
            (FaultPoint::After, Fault::Twice),
        ] {
            if !part.has_next() {
                continue;
            }
            let what = format!("{fault:?} {point:?} undoing {step:?}");
            let crashes = matches!(fault, Fault::Crash);
            let (undoing, done) = at(step, TaskState::RollingBack, point, fault, 1);
            let (failing, _) =
                at("finish", TaskState::Running, FaultPoint::After, Fault::Fail(refused()), 1);
            let both: Faults =
                Arc::new(move |step, state, point| match failing(step, state, point) {
                    Fault::None => undoing(step, state, point),
                    fault => fault,
                });
            let (fixture, vm, task) = carry_out(Kind::Create, both, &done, crashes).await;
            assert_eq!(fixture.task(task).await.state, TaskState::Failed, "{what}");
            fixture.assert_nothing_left(vm, &what).await;
        }
    }
}

#[tokio::test]
async fn a_failed_undo_is_reported_and_the_rest_can_be_deleted() {
    let mut fixture = Fixture::new().await;
    fixture.inject(Call::DeleteDisk, HostFault::LoseRequest, ATTEMPTS);
    let (failing, _) =
        at("finish", TaskState::Running, FaultPoint::Before, Fault::Fail(refused()), 1);
    fixture.restart(|engine| engine.environment.faults = Some(failing)).await;
    let (vm, task) = fixture.create("web", "encrypted").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Unknown);
    let detail = ended.problem.unwrap().detail;
    assert!(
        detail.contains("refused on purpose") && detail.contains("create the disks"),
        "{detail}"
    );
    assert_eq!(fixture.vm(vm).await.unwrap().lifecycle, Lifecycle::Creating);
    let delete = Operation::DeleteVm { vm, was: Lifecycle::Creating };
    let task = fixture.begin(delete, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_nothing_left(vm, "after deletion").await;
}

#[tokio::test]
async fn a_deletion_that_was_cut_short_can_be_repeated() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.inject(Call::UnregisterVm, HostFault::Refuse(ErrorCode::Internal), 1);
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Unknown);
    assert_eq!(fixture.vm(vm).await.unwrap().lifecycle, Lifecycle::Deleting);
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Deleting }, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_nothing_left(vm, "after the second deletion").await;
}

/// Faults of calls to the host: the request is lost, or the answer is lost, or the agent restarts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_calls_lost_answers_and_crashes_of_the_agent_do_not_matter() {
    let mut part = Part::of_run();
    let calls = Call::CHANGING.into_iter().chain([Call::Describe, Call::State]);
    for call in calls.filter(|call| *call != Call::ProbeDatastore) {
        for fault in
            [HostFault::LoseRequest, HostFault::LoseAnswer, HostFault::Crash, HostFault::CrashAfter]
        {
            if !part.has_next() {
                continue;
            }
            let fixture = Fixture::new().await;
            let what = format!("{call:?} {fault:?}");
            fixture.inject(call, fault, 1);
            let vm = fixture.made("web", "encrypted").await;
            fixture.assert_whole(vm, Power::Off, &what).await;
            fixture.inject(call, fault, 1);
            let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
            assert_eq!(fixture.ended(task).await.state, TaskState::Done, "{what}");
            fixture.assert_whole(vm, Power::Running, &what).await;
            fixture.inject(call, fault, 1);
            let stop = Operation::StopVm { vm, force: false, timeout_seconds: 10 };
            let task = fixture.begin(stop, "web").await;
            let ended = fixture.ended(task).await;
            assert_eq!(ended.state, TaskState::Done, "{what} {:?}", ended.problem);
            fixture.inject(call, fault, 1);
            let task =
                fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
            let ended = fixture.ended(task).await;
            assert_eq!(ended.state, TaskState::Done, "{what} {:?}", ended.problem);
            fixture.assert_nothing_left(vm, &what).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_restarts_in_the_middle_of_any_step_gets_the_vm_again() {
    for step in ["register", "deliver-key", "create-disks", "finish"] {
        let mut fixture = Fixture::new().await;
        let agent = fixture.agent.clone();
        let restarted = Mutex::new(false);
        let faults: Faults = Arc::new(move |at_step, _, point| {
            let mut restarted = restarted.lock().unwrap();
            if at_step == step && point == FaultPoint::Before && !*restarted {
                *restarted = true;
                agent.restart();
            }
            Fault::None
        });
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let (vm, task) = fixture.create("web", "encrypted").await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Done, "{step:?} {:?}", ended.problem);
        fixture.assert_whole(vm, Power::Off, &format!("{step:?}")).await;
    }
}

#[tokio::test]
async fn a_cancelled_creation_leaves_nothing() {
    let fixture = Fixture::new().await;
    fixture.agent.set_work(LONG);
    let (vm, task) = fixture.create("web", "encrypted").await;
    fixture.eventually("disks", async || (fixture.calls(Call::PutJob) > 0).then_some(())).await;
    let tried = fixture.engine.check_cancel(&task.to_string()).await.unwrap();
    assert_eq!(tried.state, TaskState::Running);
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Cancelled);
    assert_eq!(ended.problem.unwrap().code, ErrorCode::Cancelled);
    fixture.assert_nothing_left(vm, "cancelled").await;
    let tried = fixture.engine.check_cancel(&task.to_string()).await.unwrap_err();
    assert_eq!(tried.code, ErrorCode::WrongState);
    let again = fixture.engine.cancel(&task.to_string(), "me").await.unwrap_err();
    assert_eq!(again.code, ErrorCode::WrongState);
}

#[tokio::test]
async fn a_task_that_was_cancelled_before_a_crash_is_undone_after_it() {
    let mut fixture = Fixture::new().await;
    fixture.agent.set_work(LONG);
    let (vm, task) = fixture.create("web", "encrypted").await;
    fixture.eventually("disks", async || (fixture.calls(Call::PutJob) > 0).then_some(())).await;
    fixture.engine.stop();
    fixture.engine.cancel(&task.to_string(), "me").await.unwrap();
    fixture.restart(|_| {}).await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Cancelled);
    fixture.assert_nothing_left(vm, "cancelled before a crash").await;
}

#[tokio::test]
async fn one_task_works_on_a_vm_at_a_time() {
    let fixture = Fixture::new().await;
    fixture.agent.set_work(std::time::Duration::from_millis(200));
    let (vm, task) = fixture.create("web", "encrypted").await;
    let mut write = fixture.store.write().await.unwrap();
    let second =
        Engine::record(&mut write, Operation::StartVm { vm, boot_once: None }, "web", "me").await;
    assert_eq!(second.unwrap_err().code, ErrorCode::WrongState);
    drop(write);
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    let mut write = fixture.store.write().await.unwrap();
    Engine::record(&mut write, Operation::StartVm { vm, boot_once: None }, "web", "me")
        .await
        .unwrap();
}

#[tokio::test]
async fn a_guest_that_does_not_shut_down_goes_on_and_is_shown_so() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    fixture.agent.set_heeds_shutdown(false);
    let stop = Operation::StopVm { vm, force: false, timeout_seconds: 1 };
    let task = fixture.begin(stop, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert!(problem.detail.contains("--force"), "{problem}");
    assert_eq!(fixture.calls(Call::PowerOff), 1, "it was asked more than once");
    assert_eq!(fixture.agent.running(), [vm]);
    let view = fixture.hosts.view(fixture.host);
    assert_eq!(view.vm(vm).unwrap().power, Power::Running, "it is shown to be stopping");
}

#[tokio::test]
async fn every_use_of_a_key_is_an_event() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let key = fixture.vm(vm).await.unwrap().key.unwrap();
    let created = fixture.events("key.created").await;
    assert!(created.len() == 1 && created[0].detail.contains(&key.key_id), "{created:?}");
    let delivered = fixture.events("key.delivered").await.len();
    assert_eq!(delivered, fixture.calls(Call::OfferKey));
    assert!(delivered > 0);
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 1 };
    let task = fixture.begin(stop, "web").await;
    fixture.ended(task).await;
    // It is on its way while the VM is registered, and has not come where that is refused.
    fixture.inject(Call::RegisterVm, HostFault::Refuse(ErrorCode::Internal), 1);
    let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Failed);
    let of = async |kind: &str| fixture.events(kind).await.len();
    assert_eq!(of("key.delivered").await, delivered + 1);
    assert_eq!((of("key.delivery-failed").await, fixture.calls(Call::OfferKey)), (1, delivered));
    // An agent that has restarted since it answered has another key box: the key is sealed to that one, too.
    fixture.inject(Call::OfferKey, HostFault::Refuse(ErrorCode::WrongState), 1);
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    assert_eq!((of("key.delivered").await, of("key.delivery-failed").await), (delivered + 3, 2));
    fixture.done(Operation::StopVm { vm, force: true, timeout_seconds: 1 }, "web").await;
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    fixture.ended(task).await;
    let destroyed = fixture.events("key.destroyed").await;
    assert!(destroyed.len() == 1 && destroyed[0].detail.contains(&key.key_id), "{destroyed:?}");
}

#[tokio::test]
async fn a_plain_vm_has_no_key_and_needs_none() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("open", "plain").await;
    assert_eq!(fixture.vm(vm).await.unwrap().key, None);
    assert_eq!((fixture.calls(Call::OfferKey), fixture.events("key.created").await.len()), (0, 0));
    let task = fixture.begin(Operation::StartVm { vm, boot_once: None }, "open").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
}

#[tokio::test]
async fn a_disk_that_cannot_be_made_fails_the_creation_with_the_hosts_words() {
    let fixture = Fixture::new().await;
    fixture.agent.set_full(true);
    let (vm, task) = fixture.create("web", "encrypted").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    assert_eq!(ended.problem.as_ref().unwrap().code, ErrorCode::NoSpace);
    assert_eq!(steps::title(&ended), "create the disks", "where it failed is not shown");
    fixture.assert_nothing_left(vm, "no room").await;
}

#[tokio::test]
async fn a_deletion_that_the_host_refuses_leaves_the_vm_whole() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.inject(Call::DeleteDisk, HostFault::Refuse(ErrorCode::InUse), 1);
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    assert_eq!(ended.problem.unwrap().code, ErrorCode::InUse);
    fixture.assert_whole(vm, Power::Off, "refused").await;

    // The first disk is gone when the second is refused: the problem says so, and the rest can be deleted.
    fixture.agent.inject(Call::DeleteDisk, 2, HostFault::Refuse(ErrorCode::InUse));
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Unknown);
    assert!(ended.problem.unwrap().detail.contains("delete it again"));
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Deleting }, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_nothing_left(vm, "deleted again").await;
}

#[tokio::test]
async fn a_task_that_goes_on_after_a_crash_is_still_for_the_request_that_asked_for_it() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let (faults, crashed) = at("power-on", TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
    fixture.restart(|engine: &mut Engine| engine.environment.faults = Some(faults)).await;
    let request = RequestId::new();
    let begin = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web");
    let task = request_id::during(Some(request.clone()), begin).await;
    fixture
        .eventually("it crashes", async || (crashed.load(Ordering::SeqCst) > 0).then_some(()))
        .await;
    assert_eq!(fixture.calls(Call::PowerOn), 0);
    fixture.restart(|_| {}).await;
    let ended = fixture.ended(task).await;
    assert_eq!((ended.state, ended.request_id), (TaskState::Done, Some(request.clone())));
    assert_eq!(fixture.agent.requests(Call::PowerOn), [Some(request.clone())]);
    for kind in ["vm.started", "task.done"] {
        let caused = fixture.events(kind).await.pop().unwrap();
        assert_eq!(caused.request_id.as_deref(), Some(request.as_str()), "{kind}");
    }
}
