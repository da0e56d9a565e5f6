//! VMs with a TPM: a disk of its own, and what is refused before anything is made.

use vmseal_api::hardware::Hardware;
use vmseal_api::host::DiskRole;
use vmseal_api::host::version::TPM;
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::{CreateDisk, CreateVm, ExportDisk};
use vmseal_api::transfer::ExportFormat;
use vmseal_secret::sealed_box::Recipient;

use super::{snapshots, *};
use crate::services::{Caller, Outcome, Privilege, create_vm, disks, vm_tpm};

pub(super) fn request(policy: &str) -> CreateVm {
    let disk = CreateDisk {
        force: false,
        name: "disk0".to_owned(),
        datastore: "local".to_owned(),
        size: 1 << 20,
        image: None,
        format: None,
        encrypted: None,
    };
    CreateVm {
        description: String::new(),
        labels: Default::default(),
        autostart: false,
        migration_encryption: Default::default(),
        name: "web".to_owned(),
        policy: policy.to_owned(),
        vcpus: 1,
        memory: 32 << 20,
        host: None,
        disks: vec![disk],
        nics: Vec::new(),
        hardware: Hardware { tpm: true, ..Hardware::default() },
        cloud_init: None,
        uefi_variables: None,
        tpm_state: None,
    }
}

#[tokio::test]
async fn a_tpm_has_an_encrypted_disk_of_its_own() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let caller = Caller::administrator("me");
    let mut named = request("encrypted");
    named.disks[0].name = "tpm".to_owned();
    let refused = create_vm::create(&services, &caller, named, false).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("disks[0].name"), "{refused}");
    let begun = create_vm::create(&services, &caller, request("encrypted"), false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Done);
    let disks = fixture.disks(vm).await;
    let roles: Vec<_> = disks.iter().map(|disk| (disk.name.as_str(), disk.role)).collect();
    assert_eq!(roles, [("disk0", DiskRole::Data), ("tpm", DiskRole::Tpm)]);
    assert!(disks[1].encrypted && disks[1].replica.is_none() && disks[1].cache.is_none());
}

#[tokio::test]
async fn an_agent_from_before_tpms_is_refused_by_name() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let caller = Caller::administrator("me");
    fixture.agent.lack_features(&[TPM]);
    for dry_run in [true, false] {
        let refused = create_vm::create(&services, &caller, request("encrypted"), dry_run).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
        assert_eq!(refused.field.as_deref(), Some("hardware.tpm"));
        assert!(refused.detail.contains("no TPM: upgrade it"), "{refused}");
    }
}

#[tokio::test]
async fn a_host_without_swtpm_refuses_a_tpm_and_so_does_a_dry_run() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("old", "encrypted").await;
    fixture.agent.lack_swtpm();
    for dry_run in [true, false] {
        let created = create_vm::create(&services, &me, request("encrypted"), dry_run).await;
        let created = created.unwrap_err();
        assert_eq!(created.field.as_deref(), Some("hardware.tpm"), "{created}");
        let added = vm_tpm::add(&services, &me, "old", dry_run).await.unwrap_err();
        for refused in [created, added] {
            assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
            assert!(refused.detail.contains("install it"), "{refused}");
        }
    }
    assert_eq!(fixture.disks(vm).await.len(), 2, "a disk for its TPM was added");
}

/// What refuses it says why, and the inventory stays as it is, also with a dry run.
#[tokio::test]
async fn a_tpm_is_added_to_and_removed_from_a_vm_that_is_off() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let runs = fixture.running("runs").await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.made("open", "plain").await;
    let done = async |begun: Result<Outcome<vmseal_api::model::Task>, Problem>| {
        let Outcome::Done(task) = begun.unwrap() else { panic!("nothing was begun") };
        let ended = fixture.ended(task.id).await;
        assert_eq!(ended.state, TaskState::Done, "{:?}", ended.problem);
    };
    for dry_run in [true, false] {
        for (name, code, told) in [
            ("runs", ErrorCode::WrongState, "stop it first"),
            ("open", ErrorCode::WrongState, "policy 'plain' does not"),
        ] {
            let refused = vm_tpm::add(&services, &me, name, dry_run).await.unwrap_err();
            assert!(refused.code == code && refused.detail.contains(told), "{refused}");
        }
        let none = vm_tpm::remove(&services, &me, "web", dry_run).await.unwrap_err();
        assert_eq!(none.code, ErrorCode::NotFound, "{none}");
    }
    let planned = vm_tpm::add(&services, &me, "web", true).await.unwrap();
    let Outcome::Planned(plan) = planned else { panic!("it was begun") };
    assert_eq!((plan.kind.as_str(), plan.steps.len()), ("tpm.add", 3));
    assert_eq!(fixture.disks(vm).await.len(), 2, "a dry run has added it");

    done(vm_tpm::add(&services, &me, "web", false).await).await;
    let disks = fixture.disks(vm).await;
    let last = disks.last().unwrap();
    assert_eq!((last.name.as_str(), last.role, last.size), ("tpm", DiskRole::Tpm, 4096));
    assert!(last.encrypted && last.facts.is_some() && !last.detached, "{last:?}");
    assert!(fixture.agent.registered_as(vm).unwrap().hardware.tpm);
    let twice = vm_tpm::add(&services, &me, "web", false).await.unwrap_err();
    assert_eq!(twice.code, ErrorCode::AlreadyExists, "{twice}");

    done(vm_tpm::remove(&services, &me, "web", false).await).await;
    assert_eq!(fixture.disks(vm).await.len(), 2);
    assert!(!fixture.agent.registered_as(vm).unwrap().hardware.tpm);
    assert!(!fixture.agent.disks().contains_key(&last.id), "its key is left");
    assert!(fixture.agent.running().contains(&runs));
    fixture.agent.lack_features(&[TPM]);
    let refused = vm_tpm::add(&services, &me, "web", false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
}

/// A guest whose memory a snapshot keeps goes on with its TPM alone.
#[tokio::test]
async fn a_tpm_stays_while_a_snapshot_keeps_memory() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let begun = create_vm::create(&services, &me, request("encrypted"), false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    snapshots::noted(&fixture, vm, "disks", false).await;
    let planned = vm_tpm::remove(&services, &me, "web", true).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
    snapshots::noted(&fixture, vm, "asleep", true).await;
    for dry_run in [true, false] {
        let refused = vm_tpm::remove(&services, &me, "web", dry_run).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        assert!(refused.detail.contains("vmseal snapshot delete web asleep"), "{refused}");
    }
    assert!(fixture.disks(vm).await.iter().any(|disk| disk.role == DiskRole::Tpm));
}

/// A disk of the user's may have the name: then there is no place for that of the TPM.
#[tokio::test]
async fn a_disk_of_the_name_keeps_a_tpm_out() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let mut named = request("encrypted");
    (named.disks[0].name, named.hardware.tpm) = ("tpm".to_owned(), false);
    let begun = create_vm::create(&services, &me, named, false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Done);
    let refused = vm_tpm::add(&services, &me, "web", false).await.unwrap_err();
    assert!(refused.detail.contains("has a disk 'tpm'"), "{refused}");
}

/// In the clear: it takes the privileges for that, and is an event.
#[tokio::test]
async fn what_a_tpm_keeps_is_exported_raw_alone_and_that_is_an_event() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let begun = create_vm::create(&services, &me, request("encrypted"), false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    let export = |format: ExportFormat, snapshot: Option<&str>| ExportDisk {
        to: OUT.into(),
        format,
        plaintext: format.is_plain(),
        passphrase: None,
        snapshot: snapshot.map(str::to_owned),
        rate: None,
    };
    for (asked, field) in [
        (export(ExportFormat::Sealed, None), "format"),
        (export(ExportFormat::Qcow2, None), "format"),
        (export(ExportFormat::Raw, Some("nightly")), "snapshot"),
    ] {
        for dry_run in [true, false] {
            let refused = disks::export(&services, &me, "web", "tpm", asked.clone(), dry_run).await;
            let refused = refused.unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest, "{refused}");
            assert_eq!(refused.field.as_deref(), Some(field), "{refused}");
            assert!(refused.detail.contains("holds nothing"), "{refused}");
        }
    }
    let raw = export(ExportFormat::Raw, None);
    for missing in [Privilege::DirectAccess, Privilege::Decrypt] {
        let all = Privilege::ALL.into_iter().filter(|it| *it != missing);
        let other = Caller::new("other", all.collect());
        let refused = disks::export(&services, &other, "web", "tpm", raw.clone(), true).await;
        let refused = refused.unwrap_err();
        assert!(refused.detail.contains(missing.name()), "{refused}");
    }
    assert!(fixture.events("disk.export").await.is_empty());
    let planned = disks::export(&services, &me, "web", "tpm", raw.clone(), true).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
    let begun = disks::export(&services, &me, "web", "tpm", raw, false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    let events = fixture.events("disk.export").await;
    let told = format!("what the TPM keeps, of disk 'tpm' to {OUT}");
    assert!(events.iter().any(|it| it.detail.starts_with(&told)), "{events:?}");
    assert!(events.iter().any(|it| it.detail.ends_with("IN THE CLEAR")), "{events:?}");
}
