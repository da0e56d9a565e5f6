//! Recryption: whatever happens, the VM's key opens all its disks, and in the end it is the only one.

use super::*;
use crate::store::keys;

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

/// From here on it goes only forward.
const COMMIT: &str = "switch-key";

/// The VM is whole and has a key of the first or the other provider, the only one that there is of it.
async fn assert_one_key(plant: &Plant, vm: VmId, recrypted: bool, what: &str) {
    plant.assert_whole(vm, Power::Off, what).await;
    let key = plant.vm(vm).await.unwrap().key.unwrap();
    assert_eq!(key.provider != plant.provider(), recrypted, "{what}");
    for disk in plant.agent.disks().values() {
        assert_eq!(disk.checks, [key.check.clone()].into(), "{what}: another key opens a disk");
    }
    let mut read = plant.store.read().await.unwrap();
    assert_eq!(keys::of_vm(&mut read, vm).await.unwrap(), [key], "{what}: keys are left");
}

pub async fn assert_done(plant: &Plant, vm: VmId, what: &str) {
    assert_one_key(plant, vm, true, what).await;
    assert_eq!(plant.events("vm.recrypted").await.len(), 1, "{what}");
    assert_eq!(plant.events("key.destroyed").await.len(), 1, "{what}");
}

pub async fn assert_undone(plant: &Plant, vm: VmId, what: &str) {
    assert_one_key(plant, vm, false, what).await;
}

/// Between any two steps, and whatever has failed: what the inventory names opens every disk, and its
/// provider gives it.
async fn assert_opens(plant: &Plant, vm: VmId, what: &str) {
    let key = plant.vm(vm).await.unwrap().key.unwrap();
    for disk in plant.agent.disks().values() {
        assert!(disk.checks.contains(&key.check), "{what}: a disk does not open: {disk:?}");
    }
    plant.providers.get(key.provider).unwrap().get_key(vm, &key).await.unwrap();
}

/// Gives a VM another key, under no faults; its disks open with that alone.
pub async fn recrypt_again(plant: &mut Plant, vm: VmId, what: &str) {
    plant.restart(|engine| engine.environment.faults = None).await;
    let task = plant.begin(plant.recryption(vm).await, "web").await;
    let ended = plant.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{what}: {:?}", ended.problem);
    assert_one_key(plant, vm, true, what).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recrypt_survives_every_fault_at_every_step() {
    matrix(Kind::Recrypt).await;
}

/// Where nothing goes on from a crash yet, the disks open.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_at_any_step_the_key_of_the_inventory_opens_every_disk() {
    for step in steps() {
        for moment in [Moment::Before, Moment::After] {
            let what = format!("crash {moment:?} {step:?}");
            let mut plant = Plant::new().await;
            let vm = plant.made("web", "encrypted").await;
            let (faults, done) = at(step, TaskState::Running, moment, Fault::Crash, 1);
            plant.restart(|engine| engine.environment.faults = Some(faults)).await;
            plant.begin(plant.recryption(vm).await, "web").await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            plant.eventually("it crashes", crashed).await;
            assert_opens(&plant, vm, &what).await;
        }
    }
}

/// Fails the commit step, and interferes with the undoing of every step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn undoing_a_recryption_survives_every_fault_at_every_step() {
    for step in undone_steps() {
        for (moment, fault) in [
            (Moment::Before, Fault::Crash),
            (Moment::After, Fault::Crash),
            (Moment::Before, Fault::Fail(silent())),
            (Moment::After, Fault::Fail(silent())),
            (Moment::After, Fault::Twice),
        ] {
            let what = format!("{fault:?} {moment:?} undoing {step:?}");
            let crashes = matches!(fault, Fault::Crash);
            let (undoing, done) = at(step, TaskState::RollingBack, moment, fault, 1);
            let (failing, _) =
                at(COMMIT, TaskState::Running, Moment::Before, Fault::Fail(refused()), 1);
            let both: Faults =
                Arc::new(move |step, state, moment| match failing(step, state, moment) {
                    Fault::None => undoing(step, state, moment),
                    fault => fault,
                });
            let (plant, vm, task) = carry_out(Kind::Recrypt, both, &done, crashes).await;
            let ended = plant.task(task).await;
            assert_eq!(ended.state, TaskState::Failed, "{what}: {:?}", ended.problem);
            assert_undone(&plant, vm, &what).await;
        }
    }
}

/// What can be neither finished nor undone is whole, says so, and is finished by recrypting again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_that_is_stuck_leaves_a_whole_vm_and_another_one_leaves_one_key() {
    for step in undone_steps() {
        let what = format!("undoing {step:?} fails for good");
        let mut plant = Plant::new().await;
        let vm = plant.made("web", "encrypted").await;
        let (failing, _) =
            at(COMMIT, TaskState::Running, Moment::Before, Fault::Fail(refused()), 1);
        let (stuck, _) =
            at(step, TaskState::RollingBack, Moment::Before, Fault::Fail(refused()), u32::MAX);
        let both: Faults =
            Arc::new(move |step, state, moment| match failing(step, state, moment) {
                Fault::None => stuck(step, state, moment),
                fault => fault,
            });
        plant.restart(|engine| engine.environment.faults = Some(both)).await;
        let task = plant.begin(plant.recryption(vm).await, "web").await;
        assert_eq!(plant.ended(task).await.state, TaskState::Unknown, "{what}");
        assert_opens(&plant, vm, &what).await;
        recrypt_again(&mut plant, vm, &what).await;
        let start = plant.begin(Operation::StartVm { vm }, "web").await;
        assert_eq!(plant.ended(start).await.state, TaskState::Done, "{what}");
    }
}

/// The calls to the host lost, or their answers, or the agent restarting, also between two disks.
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
    for call in calls {
        for fault in [
            HostFault::LoseRequest,
            HostFault::LoseAnswer,
            HostFault::Crash,
            HostFault::CrashHalfway,
            HostFault::CrashAfter,
        ] {
            for nth in [1, 2] {
                let what = format!("{call:?} {fault:?}, the {nth}th time");
                let plant = Plant::new().await;
                let vm = plant.made("web", "encrypted").await;
                plant.agent.inject(call, nth, fault);
                let task = plant.begin(plant.recryption(vm).await, "web").await;
                let ended = plant.ended(task).await;
                assert_eq!(ended.state, TaskState::Done, "{what} {:?}", ended.problem);
                assert_done(&plant, vm, &what).await;
            }
        }
    }
}

/// The agent dies between two disks, and does not come back for this task: the VM opens all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_dies_between_two_disks_for_good_leaves_a_whole_vm() {
    for call in [Call::AddKey] {
        let what = format!("{call:?}");
        let mut plant = Plant::new().await;
        let vm = plant.made("web", "encrypted").await;
        plant.agent.inject(call, 1, HostFault::CrashHalfway);
        // Every further attempt, and every attempt to undo it.
        for call in [Call::AddKey, Call::DropOtherKeys] {
            (1..20).for_each(|nth| plant.agent.inject(call, nth, HostFault::LoseRequest));
        }
        let task = plant.begin(plant.recryption(vm).await, "web").await;
        let ended = plant.ended(task).await;
        assert_eq!(ended.state, TaskState::Unknown, "{what}");
        let detail = ended.problem.unwrap().detail;
        assert!(detail.contains("is whole") && detail.contains("recrypt it again"), "{detail}");
        assert_opens(&plant, vm, &what).await;
        plant.agent.forget_faults();
        recrypt_again(&mut plant, vm, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recryption_can_be_cancelled_until_the_vm_has_its_new_key() {
    for step in steps() {
        let what = format!("cancelled at {step:?}");
        let mut plant = Plant::new().await;
        let vm = plant.made("web", "encrypted").await;
        let (faults, done) = at(step, TaskState::Running, Moment::Before, Fault::Crash, 1);
        plant.restart(|engine| engine.environment.faults = Some(faults)).await;
        let task = plant.begin(plant.recryption(vm).await, "web").await;
        let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
        plant.eventually("it crashes", crashed).await;
        let cancelled = plant.engine.cancel(&task.to_string(), "me").await;
        plant.restart(|_| {}).await;
        let ended = plant.ended(task).await;
        if !undone_steps().contains(&step) {
            assert_eq!(cancelled.unwrap_err().code, ErrorCode::WrongState, "{what}");
            assert_eq!(ended.state, TaskState::Done, "{what}: {:?}", ended.problem);
            assert_done(&plant, vm, &what).await;
            continue;
        }
        assert_eq!(ended.state, TaskState::Cancelled, "{what}: {:?}", ended.problem);
        assert_eq!(ended.problem.unwrap().code, ErrorCode::Cancelled);
        assert_undone(&plant, vm, &what).await;
    }
}

/// A recryption that has to be refused: nothing is made, nothing changed.
async fn assert_refused(plant: &Plant, vm: VmId, code: ErrorCode) {
    let (before, row) = (plant.agent.disks(), plant.vm(vm).await.unwrap());
    let created = plant.events("key.created").await.len();
    let task = plant.begin(plant.recryption(vm).await, "web").await;
    let ended = plant.ended(task).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert_eq!(problem.code, code, "{problem}");
    assert_eq!(plant.agent.disks(), before);
    assert_eq!(plant.vm(vm).await.unwrap().key, row.key);
    assert_eq!(plant.events("key.created").await.len(), created, "a key was made");
}

#[tokio::test]
async fn a_vm_that_runs_is_refused() {
    let plant = Plant::new().await;
    let vm = plant.running("web").await;
    assert_refused(&plant, vm, ErrorCode::WrongState).await;
    assert_eq!(plant.agent.running(), [vm]);
    assert_eq!(plant.calls(Call::AddKey), 0);
}

#[tokio::test]
async fn a_vm_whose_key_cannot_be_had_is_refused() {
    let plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    let key = plant.vm(vm).await.unwrap().key.unwrap();
    let mut write = plant.store.write().await.unwrap();
    keys::destroy(&mut write, vm, &key).await.unwrap();
    write.commit().await.unwrap();
    plant.agent.restart();
    assert_refused(&plant, vm, ErrorCode::Locked).await;
}

#[tokio::test]
async fn a_disk_that_cannot_be_reached_refuses_the_recryption_of_the_vm() {
    let plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    plant.agent.change_mark(std::path::Path::new("/store"));
    assert_refused(&plant, vm, ErrorCode::WrongState).await;
}

/// A datastore that goes away when the old key is about to be destroyed: it is not, as nobody knows any more
/// what opens the disks.
#[tokio::test]
async fn the_old_key_is_not_destroyed_while_a_disk_cannot_be_opened() {
    let mut plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    let agent = plant.agent.clone();
    let faults: Faults = Arc::new(move |step, state, moment| {
        let here = (step, state, moment);
        if here == ("destroy-old-key", TaskState::Running, Moment::Before) {
            agent.change_mark(std::path::Path::new("/store"));
        }
        Fault::None
    });
    plant.restart(|engine| engine.environment.faults = Some(faults)).await;
    let old = plant.vm(vm).await.unwrap().key.unwrap();
    let task = plant.begin(plant.recryption(vm).await, "web").await;
    assert_eq!(plant.ended(task).await.state, TaskState::Unknown);
    assert_eq!(plant.events("key.destroyed").await.len(), 0);
    assert_opens(&plant, vm, "the new key").await;
    plant.providers.get(old.provider).unwrap().get_key(vm, &old).await.unwrap();
}

#[tokio::test]
async fn a_vm_that_is_deleted_with_two_keys_leaves_none() {
    let mut plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    plant.agent.inject(Call::DropOtherKeys, 1, HostFault::Refuse(ErrorCode::Damaged));
    plant.agent.inject(Call::AddKey, 2, HostFault::Refuse(ErrorCode::Damaged));
    let task = plant.begin(plant.recryption(vm).await, "web").await;
    assert_eq!(plant.ended(task).await.state, TaskState::Unknown);
    assert_opens(&plant, vm, "two keys").await;
    plant.restart(|_| {}).await;
    let task = plant.begin(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    assert_eq!(plant.ended(task).await.state, TaskState::Done);
    plant.assert_nothing_left(vm, "deleted").await;
}

#[tokio::test]
async fn a_rotation_stays_with_the_provider_and_every_use_of_a_key_is_an_event() {
    let plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    let old = plant.vm(vm).await.unwrap().key.unwrap();
    let rotation = Operation::RecryptVm { vm, old: old.clone(), provider: old.provider };
    let task = plant.begin(rotation, "web").await;
    let ended = plant.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    assert_one_key(&plant, vm, false, "rotated").await;
    let new = plant.vm(vm).await.unwrap().key.unwrap();
    assert_ne!(new.key_id, old.key_id);
    let delivered = plant.events("key.delivered").await;
    let new_ones = delivered.iter().filter(|event| event.detail.contains(&new.key_id)).count();
    assert!(new_ones >= 2, "sealed to the host beside the old one, and then as the VM's");
    assert_eq!(plant.calls(Call::AddKey), 1);
    assert_eq!(delivered.len(), plant.calls(Call::OfferKey) + plant.calls(Call::AddKey));
    let told = plant.events("vm.recrypted").await;
    assert!(told[0].detail.contains(&old.key_id) && told[0].detail.contains(&new.key_id));
    let destroyed = plant.events("key.destroyed").await;
    assert!(destroyed.len() == 1 && destroyed[0].detail.contains(&old.key_id));
    let gone = plant.providers.get(old.provider).unwrap().get_key(vm, &old).await.unwrap_err();
    assert_eq!(gone.code, ErrorCode::NotFound);
}
