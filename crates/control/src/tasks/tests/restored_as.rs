//! Backups that become other VMs, beside those that were backed up.

use std::time::Duration;

use vmseal_api::host::NicSpec;
use vmseal_api::host::version::{RESTORE_AS, SHARE_DATA_KEYS};
use vmseal_api::id::PolicyId;
use vmseal_api::nic::NicBackend;
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::{CreateNic, CreateVm, RestoreBackup};
use vmseal_secret::sealed_box::Recipient;

use super::backups::{OTHER, as_another, back_up, done, living_keys, named, rows};
use super::*;
use crate::services::{Caller, Outcome, Privilege, backups as service, create_vm};
use crate::store::{nics, policies};

async fn policy_of(fixture: &Fixture, name: &str) -> PolicyId {
    policies::find(&mut fixture.store.read().await.unwrap(), name).await.unwrap().unwrap().id
}

async fn cards(fixture: &Fixture, vm: VmId) -> Vec<NicSpec> {
    nics::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

/// A VM in the clear with a network card, backed up as `clear`; encrypted since, and backed up as `sealed`.
async fn encrypted_since(fixture: &Fixture) -> VmId {
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let backend = NicBackend::User { forwards: Vec::new() };
    let (model, link) = Default::default();
    let card = CreateNic { name: None, mac: None, model, backend, link };
    let hardware = Default::default();
    let request = CreateVm { hardware, nics: vec![card], ..super::tpm::request("plain") };
    done(fixture, create_vm::create(&services, &me, request, false).await).await;
    let vm = back_up(fixture, &services, "clear").await.vm_id;
    let (policy, provider) = (policy_of(fixture, "encrypted").await, Some(fixture.provider()));
    let encrypt = Operation::EncryptVm { vm, policy, provider, in_place: false, disks: vec![] };
    fixture.done(encrypt, "web").await;
    back_up(fixture, &services, "sealed").await;
    vm
}

/// What does not fit into the VM that was backed up says what is possible.
#[tokio::test]
async fn what_cannot_be_restored_in_place_can_be_beside_it() {
    let fixture = Fixture::new().await;
    let vm = encrypted_since(&fixture).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let refusal = async |name: &str, request: RestoreBackup| {
        service::restore(&services, &me, "web", name, request, false).await.unwrap_err()
    };
    let refused = refusal("clear", RestoreBackup::default()).await;
    let says = ["was in the clear", "is encrypted now", "backup restore web clear --as NAME"];
    assert!(says.iter().all(|said| refused.detail.contains(said)), "{refused}");
    super::snapshots::taken(&fixture, vm, "kept").await;
    let refused = refusal("sealed", RestoreBackup::default()).await;
    let says = ["vmseal snapshot delete web kept", "--as NAME"];
    assert!(says.iter().all(|said| refused.detail.contains(said)), "{refused}");
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    let refused = refusal("sealed", RestoreBackup::default()).await;
    let says = ["stop it first", "--as NAME"];
    assert!(says.iter().all(|said| refused.detail.contains(said)), "{refused}");

    let of_policy =
        |policy: &str| RestoreBackup { policy: Some(policy.to_owned()), ..as_another(OTHER) };
    for (name, policy, says) in [
        ("clear", "encrypted", "encrypts, and the backup is in the clear"),
        ("sealed", "plain", "does not encrypt, and the backup is encrypted"),
        ("sealed", "none", "is not there"),
    ] {
        let refused = refusal(name, of_policy(policy)).await;
        assert!(refused.detail.contains(says), "{refused}");
        assert_eq!(refused.field.as_deref(), Some("policy"));
    }
    assert_eq!(refusal("clear", as_another("web")).await.code, ErrorCode::AlreadyExists);
    assert_eq!(refusal("clear", as_another("a b")).await.field.as_deref(), Some("new_vm"));
    let both = RestoreBackup { name: Some("again".to_owned()), ..as_another(OTHER) };
    assert_eq!(refusal("clear", both).await.field.as_deref(), Some("name"));
    assert!(named(&fixture, OTHER).await.is_none());
}

/// While the VM that was backed up runs, and when it is deleted, with all of its keys.
#[tokio::test]
async fn backups_become_other_vms_whatever_becomes_of_the_first() {
    let fixture = Fixture::new().await;
    let vm = encrypted_since(&fixture).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let restore = async |name: &str, other: &str, dry_run: bool| {
        service::restore(&services, &me, "web", name, as_another(other), dry_run).await
    };
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    for (backup, name, encrypted, policy) in
        [("clear", "then", false, "plain"), ("sealed", "since", true, "encrypted")]
    {
        let planned = restore(backup, name, true).await;
        let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
        let warns = |of: &str| plan.warnings.iter().any(|said| said.contains(of));
        assert_eq!(warns("has the same data keys"), encrypted, "{plan:?}");
        assert!(warns("new addresses"), "{plan:?}");
        assert!(named(&fixture, name).await.is_none(), "a plan changes nothing");

        done(&fixture, restore(backup, name, false).await).await;
        let made = named(&fixture, name).await.unwrap();
        fixture.assert_whole_with(made.id, Power::Off, 1, name).await;
        assert_eq!((made.key.is_some(), made.policy_name.as_str()), (encrypted, policy));
        let (old, new) = (cards(&fixture, vm).await, cards(&fixture, made.id).await);
        assert!(old.len() == 1 && new.len() == 1 && old[0].mac != new[0].mac, "{new:?}");
        assert!(fixture.agent.running().contains(&vm), "the VM that was backed up was stopped");
        let disks = fixture.agent.disks();
        let mut of_either = disks.values().filter(|it| it.vm == vm || it.vm == made.id);
        assert!(of_either.all(|it| it.shared == encrypted), "{name}: {disks:?}");
    }
    let told = fixture.events("backup.restored").await;
    assert!(told[0].detail.starts_with("backup 'clear' of VM 'web' of "), "{told:?}");
    assert!(told[1].detail.ends_with(", with the data keys in it"), "{told:?}");

    fixture.done(Operation::StopVm { vm, force: true, timeout_seconds: 1 }, "web").await;
    // In place the header of before comes back, which has no mark: it gets one.
    let in_place = service::restore(&services, &me, "web", "sealed", Default::default(), false);
    done(&fixture, in_place.await).await;
    let disks = fixture.agent.disks();
    assert!(disks.values().filter(|it| it.vm == vm).all(|it| it.shared), "{disks:?}");
    fixture.done(Operation::DeleteVm { vm, was: Lifecycle::Ready }, "web").await;
    done(&fixture, restore("sealed", "later", false).await).await;
    for backup in rows(&fixture, vm).await.into_iter().rev() {
        fixture.done(Operation::DeleteBackup { vm, backup: backup.id }, "web").await;
    }
    assert_eq!(living_keys(&fixture, vm).await, []);
    for name in ["since", "later"] {
        let made = named(&fixture, name).await.unwrap();
        fixture.assert_whole_with(made.id, Power::Off, 1, name).await;
    }
}

/// While a VM is made of a backup, that is not deleted, and the VM that was backed up is free.
#[tokio::test]
async fn a_backup_that_becomes_another_vm_is_not_deleted_meanwhile() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("web", "encrypted").await;
    back_up(&fixture, &services, "first").await;
    let she = Caller::new("she", [Privilege::VmConfigure].into_iter().collect());
    let refused = service::restore(&services, &she, "web", "first", as_another(OTHER), true).await;
    assert_eq!(refused.unwrap_err().code, ErrorCode::Forbidden);

    let before = fixture.calls(Call::PutJob);
    fixture.agent.set_work(LONG);
    let begun = service::restore(&services, &me, "web", "first", as_another(OTHER), false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture
        .eventually("it writes", async || (fixture.calls(Call::PutJob) > before).then_some(()))
        .await;
    fixture.agent.set_work(Duration::from_millis(1));
    let delete = async || service::delete(&services, &me, "web", "first", false).await;
    let refused = delete().await.unwrap_err();
    assert!(refused.detail.contains("restores this backup as another VM"), "{refused}");
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    fixture.engine.cancel(&task.id.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Cancelled);
    assert!(named(&fixture, OTHER).await.is_none());
    done(&fixture, delete().await).await;
}

/// A restore in place that began before brings the header of before, without the mark.
#[tokio::test]
async fn the_first_vm_is_not_marked_while_it_is_restored_itself() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    fixture.made("web", "encrypted").await;
    back_up(&fixture, &services, "first").await;
    fixture.agent.set_work(LONG);
    let begin = async |request: RestoreBackup| {
        let begun = service::restore(&services, &me, "web", "first", request, false).await;
        let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
        task.id
    };
    let (in_place, other) = (begin(Default::default()).await, begin(as_another(OTHER)).await);
    let ended = fixture.ended(other).await;
    assert_eq!(ended.state, TaskState::Failed);
    let problem = ended.problem.unwrap();
    assert!(problem.detail.contains("it is being restored now"), "{problem}");
    assert_eq!(fixture.calls(Call::ShareDataKeys), 0);
    fixture.engine.cancel(&in_place.to_string(), "me").await.unwrap();
    assert_eq!(fixture.ended(in_place).await.state, TaskState::Cancelled);
}

/// Another host that has the directory, too; an agent that does not know how is named.
#[tokio::test]
async fn another_host_makes_another_vm_of_a_backup() {
    let fixture = Fixture::new().await;
    let (there, other) = fixture.add_host("there").await;
    fixture.share_datastore(there, "there").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("web", "encrypted").await;
    back_up(&fixture, &services, "first").await;
    let request = RestoreBackup { host: Some("there".to_owned()), ..as_another(OTHER) };
    let restore = async |request: RestoreBackup| {
        service::restore(&services, &me, "web", "first", request, false).await
    };
    let refused = restore(request.clone()).await.unwrap_err();
    assert!(refused.detail.contains("host 'there' does not find it"), "{refused}");
    other.mount_backups_of(&fixture.agent);
    // The answer that the first VM's disks are marked is lost, and their host's agent has restarted when it is asked again.
    fixture.agent.inject(Call::ShareDataKeys, 1, HostFault::CrashAfter);
    done(&fixture, restore(request).await).await;
    assert!(fixture.calls(Call::ShareDataKeys) > 1);
    let disks = fixture.agent.disks();
    assert!(disks.values().filter(|it| it.vm == vm).all(|it| it.shared), "{disks:?}");
    let made = named(&fixture, OTHER).await.unwrap();
    assert_eq!((made.host_name.as_str(), made.lifecycle), ("there", Lifecycle::Ready));
    assert!(other.registered().contains(&made.id));
    let reader = rows(&fixture, vm).await.pop().unwrap().host_name;
    assert_eq!(reader, "here", "another host reads the VM's backups from now on");

    for (feature, says) in [
        (SHARE_DATA_KEYS, "host 'here' cannot mark disks whose data keys other VMs have"),
        (RESTORE_AS, "host 'here' cannot restore a backup as another VM"),
    ] {
        fixture.restart_agent_without(&[feature]).await;
        let refused = restore(as_another("third")).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
        assert!(refused.detail.contains(says), "{refused}");
    }
}
