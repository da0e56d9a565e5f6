//! The key that a host holds, where no provider gives it.

use vmseal_api::kmip::KeyFault;
use vmseal_kmip::RevocationReason;
use vmseal_kmip::operation::KeyId;

use super::revoked::WithKms;
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_key_its_host_holds_starts_while_the_provider_is_sealed() {
    let mut plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    plant.restart_sealed().await;
    let start = Operation::StartVm { vm };
    let ended = plant.ended(plant.begin(start, "web").await).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    let used = plant.events("key.held-used").await;
    assert!(used.len() == 1 && used[0].detail.contains("provider unlock"), "{used:?}");
    // A stop, and a start again.
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
    plant.ended(plant.begin(stop, "web").await).await;
    let ended = plant.ended(plant.begin(Operation::StartVm { vm }, "web").await).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_key_its_host_holds_starts_while_the_kms_is_away() {
    let here = WithKms::new().await;
    let vm = here.plant.made("web", "encrypted").await;
    here.kms.lock().unwrap().kill();
    here.done(Operation::StartVm { vm }, "web").await;
    here.plant.assert_runs(vm).await;
}

/// The host has the last copy of a key that was destroyed at the KMS (PyKMIP forgets such keys): it opens the disks for another key and for an
/// export, an alarm says so, and nothing new is run with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_key_was_destroyed_at_the_kms_is_led_away_from_it() {
    let here = WithKms::new().await;
    let plant = &here.plant;
    let vm = plant.running("web").await;
    let old = plant.vm(vm).await.unwrap().key.unwrap();
    let id = KeyId::new(old.key_id.clone()).unwrap();
    here.client.revoke(&id, RevocationReason::CessationOfOperation).await.unwrap();
    here.client.destroy(&id).await.unwrap();
    // It asks for the state, and wakes the watch.
    plant.providers.get(old.provider).unwrap().get_key(vm, &old).await.unwrap_err();
    here.until("key-on-host-only", "web", Some(KeyFault::KeyMissing)).await;
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
    here.done(stop, "web").await;
    here.until("key-on-host-only", "web", Some(KeyFault::KeyMissing)).await;
    assert!(plant.agent.keys_held().contains(&vm), "the last copy is gone");

    let refused = plant.ended(plant.begin(Operation::StartVm { vm }, "web").await).await;
    let problem = refused.problem.unwrap();
    assert_eq!((refused.state, problem.code), (TaskState::Failed, ErrorCode::Locked), "{problem}");
    let disk = plant.disks(vm).await[0].id;
    here.done(exporting(vm, disk), "web").await;
    let recrypt = Operation::RecryptVm { vm, old, provider: here.provider };
    here.done(recrypt, "web").await;
    here.until("key-on-host-only", "web", None).await;
    here.done(Operation::StartVm { vm }, "web").await;
}
