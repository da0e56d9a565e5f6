//! VMs with a TPM: a disk of its own, and what is refused before anything is made.

use vmseal_api::hardware::Hardware;
use vmseal_api::host::DiskRole;
use vmseal_api::host::version::TPM;
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::{CreateDisk, CreateVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, Outcome, create_vm};

pub(super) fn request(policy: &str) -> CreateVm {
    let disk = CreateDisk {
        force: false,
        name: "disk0".to_owned(),
        datastore: "local".to_owned(),
        size: 1 << 20,
        image: None,
        format: None,
    };
    CreateVm {
        description: String::new(),
        labels: Default::default(),
        autostart: false,
        name: "web".to_owned(),
        policy: policy.to_owned(),
        vcpus: 1,
        memory: 32 << 20,
        disks: vec![disk],
        nics: Vec::new(),
        hardware: Hardware { tpm: true, ..Hardware::default() },
        cloud_init: None,
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
