//! What is beside a VM's first disk when its disks are copied: the memory of one that is suspended, and core dumps.

use vmseal_api::host::version::MIRROR_BESIDE;
use vmseal_api::request::{DecryptVm, EncryptVm, MoveVm};
use vmseal_secret::sealed_box::Recipient;

use super::mirror::{Mirror, What};
use super::*;
use crate::services::{Caller, Outcome, mirror};
use crate::store::dumps;

async fn rows(fixture: &Fixture, vm: VmId) -> Vec<dumps::Dump> {
    dumps::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

fn copies(what: What) -> Mirror {
    Mirror { what, runs: false, in_place: false }
}

async fn done(fixture: &Fixture, vm: VmId, what: What) {
    fixture.done(copies(what).operation(fixture, vm).await, "web").await;
}

/// A VM that is suspended is copied as one that is off, stays suspended, and goes on as what it is then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_suspended_vm_is_copied_and_stays_suspended() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("web", "plain").await;
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let encrypt = |in_place| {
        let request = EncryptVm { in_place, ..EncryptVm::default() };
        mirror::encrypt(&services, &me, "web", request, true)
    };
    let Ok(Outcome::Planned(_)) = encrypt(false).await else { panic!("it is not planned") };
    let refused = encrypt(true).await.unwrap_err();
    assert!(refused.detail.contains("is suspended"), "{refused}");
    for what in [What::Encrypt, What::DeepRecrypt, What::Move, What::Decrypt] {
        if what == What::Decrypt {
            let planned = mirror::decrypt(&services, &me, "web", DecryptVm::default(), true).await;
            let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
            let warns = |text: &String| text.contains("the saved memory of its guest will be");
            assert!(plan.warnings.iter().any(warns), "{plan:?}");
        }
        done(&fixture, vm, what).await;
        fixture.assert_whole(vm, Power::Suspended, &format!("{what:?}")).await;
        let row = fixture.vm(vm).await.unwrap();
        assert_eq!(row.key.is_some(), what != What::Decrypt, "{what:?}");
        assert_eq!(fixture.agent.mirrored(), (vec![], vec![]), "{what:?}: images are left");
    }
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    let runs_with = fixture.agent.runs_with(vm).unwrap();
    assert_eq!(runs_with.key, None);
    assert!(runs_with.disks().all(|disk| !disk.encrypted), "{runs_with:?}");
}

/// An agent of before would leave behind what is beside the first disk.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_of_before_does_not_copy_a_suspended_vm_nor_one_with_core_dumps() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.running("web").await;
    fixture.add_dump(vm, "first").await;
    fixture.agent.lack_features(&[MIRROR_BESIDE]);
    fixture.agent.restart();
    let lacks = async || {
        let request = DecryptVm::default();
        let decrypted = mirror::decrypt(&services, &me, "web", request, true).await;
        decrypted.err().filter(|it| it.code == ErrorCode::Unsupported)
    };
    let refused = fixture.eventually("its agent cannot", lacks).await;
    assert!(refused.detail.contains("core dumps"), "{refused}");
    fixture.assert_whole(vm, Power::Running, "its agent has restarted").await;
    let dump = rows(&fixture, vm).await[0].id;
    fixture.done(Operation::DeleteDump { vm, dump }, "web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    let request = MoveVm { datastore: "local".to_owned(), disks: vec![], rate: None };
    let moved = mirror::move_disks(&services, &me, "web", request, true).await.unwrap_err();
    assert!(moved.detail.contains("memory of a suspended VM"), "{moved}");
}

/// Core dumps are as the VM is, and its key stays while one is under it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn core_dumps_follow_and_a_key_that_one_is_under_is_not_destroyed() {
    let mut fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.running("web").await;
    let dump = fixture.add_dump(vm, "first").await;
    fixture.done(Operation::DumpVm { vm, dump, to: None }, "web").await;
    let planned = mirror::decrypt(&services, &me, "web", DecryptVm::default(), true).await;
    let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
    assert!(plan.warnings.iter().any(|it| it.contains("what its core dumps hold")), "{plan:?}");
    for (what, encrypted) in [(What::Decrypt, false), (What::Encrypt, true), (What::Move, true)] {
        done(&fixture, vm, what).await;
        assert_eq!(rows(&fixture, vm).await[0].encrypted, encrypted, "{what:?}");
        assert_eq!(fixture.agent.dumps(), [dump]);
    }

    let forgetting = copies(What::Decrypt).operation(&fixture, vm).await;
    let fault = Fault::Fail(refused());
    let (failing, _) = at("forget-key", TaskState::Running, FaultPoint::Before, fault, 1);
    fixture.restart(|engine| engine.environment.faults = Some(failing)).await;
    let task = fixture.begin(forgetting.clone(), "web").await;
    assert_eq!(fixture.ended(task).await.state, TaskState::Unknown);
    fixture.restart(|engine| engine.environment.faults = None).await;
    let late = fixture.add_dump(vm, "late").await;
    fixture.done(Operation::DumpVm { vm, dump: late, to: None }, "web").await;
    assert!(fixture.vm(vm).await.unwrap().key.is_some());
    let destroyed = fixture.events("key.destroyed").await.len();
    // Begun again, it takes the core dump along that came meanwhile.
    fixture.done(forgetting, "web").await;
    assert_eq!(fixture.agent.dumps().len(), 2);
    assert_eq!(fixture.vm(vm).await.unwrap().key, None);
    assert_eq!(fixture.events("key.destroyed").await.len(), destroyed + 1);
}

/// A conversion in place leaves core dumps as they are. Its refusal says what removes them: decrypting does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversion_in_place_that_core_dumps_keep_from_beginning_says_how_to_remove_them() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.running("web").await;
    let dump = fixture.add_dump(vm, "first").await;
    fixture.done(Operation::DumpVm { vm, dump, to: None }, "web").await;
    fixture.done(Operation::StopVm { vm, force: true, timeout_seconds: 1 }, "web").await;
    let decrypt = || {
        let request = DecryptVm { in_place: true, ..DecryptVm::default() };
        mirror::decrypt(&services, &me, "web", request, true)
    };
    let refused = decrypt().await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    for said in [
        "leave out --in-place",
        "delete all of them (vmseal dump delete web first)",
        "(vmseal dump decrypt web first --to FILE)",
    ] {
        assert!(refused.detail.contains(said), "{refused}");
    }
    fixture.done(Operation::DeleteDump { vm, dump }, "web").await;
    let planned = decrypt().await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
}
