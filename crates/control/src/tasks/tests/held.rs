//! The key that a host holds while no provider gives it.

use vmseal_api::host::KeyReference;
use vmseal_api::key_fault::KeyFault;
use vmseal_kmip::RevocationReason;
use vmseal_kmip::operation::KeyId;

use super::revoked::WithKms;
use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_key_its_host_holds_starts_while_the_provider_is_sealed() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.restart_sealed().await;
    let start = Operation::StartVm { vm, boot_once: None };
    let ended = fixture.ended(fixture.begin(start, "web").await).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    let used = fixture.events("key.held-used").await;
    assert!(used.len() == 1 && used[0].detail.contains("provider unlock"), "{used:?}");
    // A stop, and a start again.
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
    fixture.ended(fixture.begin(stop, "web").await).await;
    let ended =
        fixture.ended(fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await).await;
    assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_key_its_host_holds_starts_while_the_kms_is_away() {
    let here = WithKms::new().await;
    let vm = here.fixture.made("web", "encrypted").await;
    here.kms.lock().unwrap().kill();
    here.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    here.fixture.assert_runs(vm).await;
}

/// A VM that runs, and its key, which was destroyed at the KMS: an alarm says that its host has the last copy.
async fn with_destroyed_key(here: &WithKms) -> (VmId, KeyReference) {
    let fixture = &here.fixture;
    let vm = fixture.running("web").await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    let id = KeyId::new(old.key_id.clone()).unwrap();
    here.client.revoke(&id, RevocationReason::CessationOfOperation).await.unwrap();
    here.client.destroy(&id).await.unwrap();
    // This reads the key's state, and wakes the watch.
    fixture.providers.get(old.provider).unwrap().get_key(vm, &old).await.unwrap_err();
    here.until("key-on-host-only", "web", Some(KeyFault::KeyMissing)).await;
    (vm, old)
}

/// The host has the last copy of a key that was destroyed at the KMS (PyKMIP forgets such keys): it opens the disks for
/// a recryption and for an export, an alarm says so, and no VM is started with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_key_was_destroyed_at_the_kms_can_get_another() {
    let here = WithKms::new().await;
    let fixture = &here.fixture;
    let (vm, old) = with_destroyed_key(&here).await;
    let stop = Operation::StopVm { vm, force: true, timeout_seconds: 5 };
    here.done(stop, "web").await;
    here.until("key-on-host-only", "web", Some(KeyFault::KeyMissing)).await;
    assert!(fixture.agent.keys_held().contains(&vm), "the last copy is gone");

    let refused =
        fixture.ended(fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await).await;
    let problem = refused.problem.unwrap();
    assert_eq!((refused.state, problem.code), (TaskState::Failed, ErrorCode::Locked), "{problem}");
    let disk = fixture.disks(vm).await[0].id;
    here.done(exporting(vm, disk), "web").await;
    let recrypt = Operation::RecryptVm { vm, old, provider: here.provider };
    here.done(recrypt, "web").await;
    here.until("key-on-host-only", "web", None).await;
    here.done(Operation::StartVm { vm, boot_once: None }, "web").await;
}

/// Its guest need not be stopped for that, as the alarm says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_vm_whose_key_was_destroyed_at_the_kms_gets_another_while_it_runs() {
    let here = WithKms::new().await;
    let (vm, old) = with_destroyed_key(&here).await;
    let mut read = here.fixture.store.read().await.unwrap();
    let alarms = crate::store::alarms::list(&mut read).await.unwrap();
    drop(read);
    let alarm = alarms.iter().find(|alarm| alarm.code == "key-on-host-only").unwrap();
    assert!(alarm.detail.contains("also while it runs (vmseal vm recrypt web)"), "{alarm:?}");
    let recrypt = Operation::RecryptVm { vm, old: old.clone(), provider: here.provider };
    here.done(recrypt, "web").await;
    here.until("key-on-host-only", "web", None).await;
    assert_eq!(here.fixture.agent.running(), [vm]);
    assert_ne!(here.fixture.vm(vm).await.unwrap().key, Some(old));
}
