//! VMs with a TPM that are encrypted, decrypted and moved: what the TPM keeps is always encrypted, and follows a VM that is off.

use vmseal_api::hardware::Firmware;
use vmseal_api::host::DiskRole;
use vmseal_api::request::{CloneVm, DecryptVm, MoveVm, RecryptVm};
use vmseal_secret::sealed_box::Recipient;

use super::mirror::{Mirror, What, assert_agrees, done, second};
use super::*;
use crate::services::{Caller, Outcome, clone_vm, create_vm, mirror, recrypt};

/// The disk of a TPM is encrypted in any case, and keeps the VM's key; what UEFI keeps is copied as any other disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tpm_keeps_its_disk_and_its_key() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let mut request = super::tpm::request("encrypted");
    request.hardware.firmware = Firmware::Uefi;
    let begun = create_vm::create(&services, &Caller::administrator("me"), request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Done);
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    let key = fixture.vm(vm).await.unwrap().key;
    let encrypted = async || {
        assert_eq!(fixture.vm(vm).await.unwrap().key, key);
        assert_agrees(&fixture, vm, "with a TPM").await;
        let disks = fixture.disks(vm).await.into_iter();
        disks.map(|disk| (disk.role, disk.encrypted)).collect::<Vec<_>>()
    };
    let roles = [DiskRole::Data, DiskRole::UefiVariables, DiskRole::Tpm];
    let expected = |guests: bool| roles.map(|role| (role, guests || role == DiskRole::Tpm));
    let mut before = encrypted().await;
    before.sort_by_key(|(role, _)| roles.iter().position(|known| known == role));
    assert_eq!(before, expected(true));
    for (what, is_encrypted) in [
        (What::DeepRecrypt, true),
        (What::Decrypt, false),
        (What::Encrypt, true),
        (What::Decrypt, false),
    ] {
        let kind = Mirror { what, runs: false, in_place: false };
        done(&fixture, kind.operation(&fixture, vm).await).await;
        let mut after = encrypted().await;
        after.sort_by_key(|(role, _)| roles.iter().position(|known| known == role));
        assert_eq!(after, expected(is_encrypted), "{what:?}");
        assert!(fixture.events("key.destroyed").await.is_empty(), "{what:?}");
    }
    // There is nothing to be decrypted any more, and the key is no reason to begin.
    let request = DecryptVm::default();
    let me = Caller::administrator("me");
    let refused = mirror::decrypt(&services, &me, "web", request, false).await.unwrap_err();
    assert!(refused.detail.contains("is not encrypted"), "{refused}");
    // Its policy gives a clone no key, which the clone's TPM would need.
    for dry_run in [true, false] {
        let copy = CloneVm {
            name: "copy".to_owned(),
            snapshot: None,
            host: None,
            datastore: None,
            linked: false,
            cloud_init: None,
            quiesce: true,
            rate: None,
        };
        let refused = clone_vm::clone(&services, &me, "web", copy, dry_run).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        assert!(refused.detail.contains("no key for what that keeps"), "{refused}");
    }
    // Of a guest that runs nothing is left to be encrypted again but what its TPM keeps.
    done(&fixture, Operation::StartVm { vm, boot_once: None }).await;
    let deep = RecryptVm { deep: true, ..Default::default() };
    let refused = recrypt::recrypt(&services, &me, "web", deep, true).await.unwrap_err();
    assert!(refused.detail.contains("keeps stays under the data key"), "{refused}");
}

/// The state of a TPM moves with the disks of a VM that is off. While the guest runs it stays, and the dry run and the event say so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tpm_follows_the_disks_of_a_vm_that_is_off() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let begun = create_vm::create(&services, &me, super::tpm::request("encrypted"), false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Done);
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    second(&fixture).await;
    let to = async |datastore: &str, disk: Option<&str>, dry_run: bool| {
        let disks = disk.map(str::to_owned).into_iter().collect();
        let request = MoveVm { datastore: datastore.to_owned(), disks, rate: None };
        mirror::move_disks(&services, &me, "web", request, dry_run).await
    };
    let moved = async || {
        let begun = to("second", None, false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
        let ended = fixture.ended(task.id).await;
        assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
        let disks = fixture.disks(vm).await.into_iter();
        disks.map(|disk| disk.datastore_name).collect::<Vec<_>>()
    };
    done(&fixture, Operation::StartVm { vm, boot_once: None }).await;
    let Ok(Outcome::Planned(plan)) = to("second", None, true).await else { panic!("no plan") };
    let stays = "stays on datastore 'local', as its guest runs";
    assert!(plan.warnings.iter().any(|it| it.contains(stays)), "{plan:?}");
    assert_eq!(moved().await, ["second", "local"]);
    let told = fixture.events("vm.moved").await;
    assert!(told.iter().any(|event| event.detail.contains("its TPM keeps stays")), "{told:?}");
    for disk in [Some("tpm"), None] {
        let refused = to("second", disk, false).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains("TPM"), "{refused}");
    }

    done(&fixture, Operation::StopVm { vm, force: true, timeout_seconds: 1 }).await;
    assert_eq!(moved().await, ["second", "second"]);
    assert_eq!(fixture.agent.mirrored(), (Vec::new(), Vec::new()), "something is left");
    let deep = RecryptVm { deep: true, ..Default::default() };
    let planned = recrypt::recrypt(&services, &me, "web", deep, true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    assert!(plan.steps[0].contains("tpm (") && plan.steps[0].contains("goes along"), "{plan:?}");
    fixture.agent.lack_features(&[vmseal_api::host::version::MIRROR_TPM]);
    fixture.agent.restart();
    let lacks = async || {
        let moved = to("local", None, true).await;
        moved.err().filter(|it| it.code == ErrorCode::Unsupported)
    };
    fixture.eventually("its agent cannot", lacks).await;
}
