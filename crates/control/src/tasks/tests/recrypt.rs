//! Recryption: at every point the VM's key opens all its disks, and in the end it is the only one that does.

use super::*;
use crate::store::keys;
use vmseal_api::host::{HostAgent, VmSpec};

pub fn operation(vm: VmId) -> Operation {
    let provider = vmseal_api::id::ProviderId::new();
    let old =
        vmseal_api::host::KeyReference { provider, key_id: String::new(), check: String::new() };
    Operation::RecryptVm { vm, old, provider }
}

pub fn steps() -> Vec<&'static str> {
    steps::of(&operation(VmId::new())).iter().map(|step| step.name()).collect()
}

/// The steps that can be undone: up to the commit step.
fn undone_steps() -> Vec<&'static str> {
    let mut steps = steps();
    steps.truncate(4);
    assert_eq!(steps.last(), Some(&COMMIT));
    steps
}

/// The steps after the commit step.
const COMMIT: &str = "switch-key";

/// The VM is complete and has a key of the first or the other provider, and no other key of it exists.
async fn assert_one_key(fixture: &Fixture, vm: VmId, recrypted: bool, what: &str) {
    let runs = fixture.agent.running().contains(&vm);
    fixture.assert_whole(vm, if runs { Power::Running } else { Power::Off }, what).await;
    let key = fixture.vm(vm).await.unwrap().key.unwrap();
    assert_eq!(key.provider != fixture.provider(), recrypted, "{what}");
    for disk in fixture.agent.disks().values() {
        assert_eq!(disk.checks, [key.check.clone()].into(), "{what}: another key opens a disk");
    }
    let mut read = fixture.store.read().await.unwrap();
    assert_eq!(keys::of_vm(&mut read, vm).await.unwrap(), [key], "{what}: keys are left");
}

pub async fn assert_done(fixture: &Fixture, vm: VmId, what: &str) {
    assert_one_key(fixture, vm, true, what).await;
    assert_eq!(fixture.events("vm.recrypted").await.len(), 1, "{what}");
    assert_eq!(fixture.events("key.destroyed").await.len(), 1, "{what}");
}

pub async fn assert_undone(fixture: &Fixture, vm: VmId, what: &str) {
    assert_one_key(fixture, vm, false, what).await;
}

/// Between any two steps, and after any failure: the key in the inventory opens every disk, and its provider
/// gives it.
async fn assert_opens(fixture: &Fixture, vm: VmId, what: &str) {
    let key = fixture.vm(vm).await.unwrap().key.unwrap();
    for disk in fixture.agent.disks().values() {
        assert!(disk.checks.contains(&key.check), "{what}: a disk does not open: {disk:?}");
    }
    fixture.providers.get(key.provider).unwrap().get_key(vm, &key).await.unwrap();
}

/// Gives a VM another key, without faults; afterwards only that opens its disks.
pub async fn recrypt_again(fixture: &mut Fixture, vm: VmId, what: &str) {
    fixture.restart(|engine| engine.environment.faults = None).await;
    let task = fixture.begin(fixture.recryption(vm).await, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{what}: {:?}", ended.problem);
    assert_one_key(fixture, vm, true, what).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recrypt_survives_every_fault_at_every_step() {
    matrix(Kind::Recrypt).await;
}

/// After a crash, before the task resumes, the disks open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_at_any_step_the_key_of_the_inventory_opens_every_disk() {
    for step in steps() {
        for point in [FaultPoint::Before, FaultPoint::After] {
            let what = format!("crash {point:?} {step:?}");
            let mut fixture = Fixture::new().await;
            let vm = fixture.made("web", "encrypted").await;
            let (faults, done) = at(step, TaskState::Running, point, Fault::Crash, 1);
            fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
            fixture.begin(fixture.recryption(vm).await, "web").await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            fixture.eventually("it crashes", crashed).await;
            assert_opens(&fixture, vm, &what).await;
        }
    }
}

/// Fails the commit step, and injects a fault into the undoing of every step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undoing_a_recryption_survives_every_fault_at_every_step() {
    let mut part = Part::of_run();
    for step in undone_steps() {
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
                at(COMMIT, TaskState::Running, FaultPoint::Before, Fault::Fail(refused()), 1);
            let both: Faults =
                Arc::new(move |step, state, point| match failing(step, state, point) {
                    Fault::None => undoing(step, state, point),
                    fault => fault,
                });
            let (fixture, vm, task) = carry_out(Kind::Recrypt, both, &done, crashes).await;
            let ended = fixture.task(task).await;
            assert_eq!(ended.state, TaskState::Failed, "{what}: {:?}", ended.problem);
            assert_undone(&fixture, vm, &what).await;
        }
    }
}

/// If the task can be neither finished nor undone, the VM is complete, the problem says so, and another recryption
/// finishes it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_that_is_stuck_leaves_a_whole_vm_and_another_one_leaves_one_key() {
    for step in undone_steps() {
        let what = format!("undoing {step:?} fails for good");
        let mut fixture = Fixture::new().await;
        let vm = fixture.made("web", "encrypted").await;
        let (failing, _) =
            at(COMMIT, TaskState::Running, FaultPoint::Before, Fault::Fail(refused()), 1);
        let (stuck, _) =
            at(step, TaskState::RollingBack, FaultPoint::Before, Fault::Fail(refused()), u32::MAX);
        let both: Faults = Arc::new(move |step, state, point| match failing(step, state, point) {
            Fault::None => stuck(step, state, point),
            fault => fault,
        });
        fixture.restart(|engine| engine.environment.faults = Some(both)).await;
        let task = fixture.begin(fixture.recryption(vm).await, "web").await;
        assert_eq!(fixture.ended(task).await.state, TaskState::Unknown, "{what}");
        assert_opens(&fixture, vm, &what).await;
        recrypt_again(&mut fixture, vm, &what).await;
        let start = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
        assert_eq!(fixture.ended(start).await.state, TaskState::Done, "{what}");
    }
}

/// Lost calls to the host, lost answers, and restarts of the agent, also between two disks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_survives_what_happens_to_its_calls() {
    let calls = [
        Call::RegisterVm,
        Call::OfferKey,
        Call::CheckKey,
        Call::AddKey,
        Call::DropOtherKeys,
        Call::Describe,
    ];
    let mut part = Part::of_run();
    for call in calls {
        for fault in [
            HostFault::LoseRequest,
            HostFault::LoseAnswer,
            HostFault::Crash,
            HostFault::CrashHalfway,
            HostFault::CrashAfter,
        ] {
            for (nth, runs) in part.of(&[(1, false), (2, false), (1, true), (2, true)]) {
                let what = format!("{call:?} {fault:?}, the {nth}th time, running: {runs}");
                let fixture = Fixture::new().await;
                let vm = match runs {
                    true => fixture.running("web").await,
                    false => fixture.made("web", "encrypted").await,
                };
                fixture.agent.inject(call, nth, fault);
                let task = fixture.begin(fixture.recryption(vm).await, "web").await;
                let ended = fixture.ended(task).await;
                assert_eq!(ended.state, TaskState::Done, "{what} {:?}", ended.problem);
                assert_done(&fixture, vm, &what).await;
                assert_eq!(fixture.agent.running().contains(&vm), runs, "{what}");
            }
        }
    }
}

/// The agent dies between two disks, and does not come back for this task: the VM's key still opens all disks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_dies_between_two_disks_for_good_leaves_a_whole_vm() {
    for call in [Call::AddKey] {
        let what = format!("{call:?}");
        let mut fixture = Fixture::new().await;
        let vm = fixture.made("web", "encrypted").await;
        fixture.agent.inject(call, 1, HostFault::CrashHalfway);
        // Every further attempt, and every attempt to undo it.
        for call in [Call::AddKey, Call::DropOtherKeys] {
            (1..20).for_each(|nth| fixture.agent.inject(call, nth, HostFault::LoseRequest));
        }
        let task = fixture.begin(fixture.recryption(vm).await, "web").await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Unknown, "{what}");
        let detail = ended.problem.unwrap().detail;
        assert!(detail.contains("is whole") && detail.contains("recrypt it again"), "{detail}");
        assert_opens(&fixture, vm, &what).await;
        fixture.agent.forget_faults();
        recrypt_again(&mut fixture, vm, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_can_be_cancelled_until_the_vm_has_its_new_key() {
    for step in steps() {
        let what = format!("cancelled at {step:?}");
        let mut fixture = Fixture::new().await;
        let vm = fixture.made("web", "encrypted").await;
        let (faults, done) = at(step, TaskState::Running, FaultPoint::Before, Fault::Crash, 1);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let task = fixture.begin(fixture.recryption(vm).await, "web").await;
        let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
        fixture.eventually("it crashes", crashed).await;
        let cancelled = fixture.engine.cancel(&task.to_string(), "me").await;
        fixture.restart(|_| {}).await;
        let ended = fixture.ended(task).await;
        if !undone_steps().contains(&step) {
            assert_eq!(cancelled.unwrap_err().code, ErrorCode::WrongState, "{what}");
            assert_eq!(ended.state, TaskState::Done, "{what}: {:?}", ended.problem);
            assert_done(&fixture, vm, &what).await;
            continue;
        }
        assert_eq!(ended.state, TaskState::Cancelled, "{what}: {:?}", ended.problem);
        assert_eq!(ended.problem.unwrap().code, ErrorCode::Cancelled);
        assert_undone(&fixture, vm, &what).await;
    }
}

/// A recryption that must be refused: no key is created, nothing is changed.
async fn assert_refused(fixture: &Fixture, vm: VmId, code: ErrorCode) {
    let (before, row) = (fixture.agent.disks(), fixture.vm(vm).await.unwrap());
    let created = fixture.events("key.created").await.len();
    let task = fixture.begin(fixture.recryption(vm).await, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert_eq!(problem.code, code, "{problem}");
    assert_eq!(fixture.agent.disks(), before);
    assert_eq!(fixture.vm(vm).await.unwrap().key, row.key);
    assert_eq!(fixture.events("key.created").await.len(), created, "a key was made");
}

/// What the guest has of its key, the filter has: the VM stops and starts with the new one.
#[tokio::test]
async fn a_vm_that_runs_gets_another_key_and_runs_on() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let task = fixture.begin(fixture.recryption(vm).await, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    assert_eq!(fixture.agent.running(), [vm]);
    assert_done(&fixture, vm, "running").await;
    let key = fixture.vm(vm).await.unwrap().key;
    assert_eq!(fixture.agent.runs_with(vm).unwrap().key, key, "it runs with the former key");
}

/// A key that its disks do not have is not taken by a host for a VM that runs.
#[tokio::test]
async fn a_vm_that_runs_is_not_registered_with_a_key_that_opens_nothing() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let with = fixture.agent.runs_with(vm).unwrap();
    let other =
        vmseal_api::host::KeyReference { key_id: "other".to_owned(), ..with.key.clone().unwrap() };
    let refused = fixture.agent.register_vm(VmSpec { key: Some(other), ..with }).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
}

#[tokio::test]
async fn a_vm_whose_key_is_unavailable_is_refused() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let key = fixture.vm(vm).await.unwrap().key.unwrap();
    let mut write = fixture.store.write().await.unwrap();
    keys::destroy(&mut write, vm, &key).await.unwrap();
    write.commit().await.unwrap();
    fixture.agent.restart();
    assert_refused(&fixture, vm, ErrorCode::Locked).await;
}

#[tokio::test]
async fn a_disk_that_cannot_be_reached_refuses_the_recryption_of_the_vm() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.agent.change_mark(std::path::Path::new("/store"));
    assert_refused(&fixture, vm, ErrorCode::WrongState).await;
}

/// A datastore becomes unavailable when the old key is about to be destroyed: the key is kept, as it is unknown
/// which key opens the disks.
#[tokio::test]
async fn the_old_key_is_not_destroyed_while_a_disk_cannot_be_opened() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let agent = fixture.agent.clone();
    let faults: Faults = Arc::new(move |step, state, point| {
        let here = (step, state, point);
        if here == ("destroy-old-key", TaskState::Running, FaultPoint::Before) {
            agent.change_mark(std::path::Path::new("/store"));
        }
        Fault::None
    });
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    let task = fixture.begin(fixture.recryption(vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Unknown);
    assert_eq!(fixture.events("key.destroyed").await.len(), 0);
    assert_opens(&fixture, vm, "the new key").await;
    fixture.providers.get(old.provider).unwrap().get_key(vm, &old).await.unwrap();
}

#[tokio::test]
async fn a_vm_that_is_deleted_with_two_keys_leaves_none() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.agent.inject(Call::DropOtherKeys, 1, HostFault::Refuse(ErrorCode::Damaged));
    fixture.agent.inject(Call::AddKey, 2, HostFault::Refuse(ErrorCode::Damaged));
    let task = fixture.begin(fixture.recryption(vm).await, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Unknown);
    assert_opens(&fixture, vm, "two keys").await;
    fixture.restart(|_| {}).await;
    let task = fixture.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    fixture.assert_nothing_left(vm, "deleted").await;
}

#[tokio::test]
async fn a_rotation_stays_with_the_provider_and_every_use_of_a_key_is_an_event() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    let rotation = Operation::RecryptVm { vm, old: old.clone(), provider: old.provider };
    let task = fixture.begin(rotation, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    assert_one_key(&fixture, vm, false, "rotated").await;
    let new = fixture.vm(vm).await.unwrap().key.unwrap();
    assert_ne!(new.key_id, old.key_id);
    let delivered = fixture.events("key.delivered").await;
    let new_ones = delivered.iter().filter(|event| event.detail.contains(&new.key_id)).count();
    assert!(new_ones >= 2, "sealed to the host beside the old one, and then as the VM's");
    assert_eq!(fixture.calls(Call::AddKey), 1);
    assert_eq!(delivered.len(), fixture.calls(Call::OfferKey) + fixture.calls(Call::AddKey));
    let told = fixture.events("vm.recrypted").await;
    assert!(told[0].detail.contains(&old.key_id) && told[0].detail.contains(&new.key_id));
    let destroyed = fixture.events("key.destroyed").await;
    assert!(destroyed.len() == 1 && destroyed[0].detail.contains(&old.key_id));
    let gone = fixture.providers.get(old.provider).unwrap().get_key(vm, &old).await.unwrap_err();
    assert_eq!(gone.code, ErrorCode::NotFound);
}
