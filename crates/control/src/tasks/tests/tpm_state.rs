//! VMs whose TPM keeps what is in a file of the host: what is taken, and what is refused with nothing left.

use std::path::{Path, PathBuf};

use vmseal_api::hardware::Hardware;
use vmseal_api::host::DiskRole;
use vmseal_api::host::version::{TAKE_TPM_STATE, TAKE_VARIABLES};
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::CreateVm;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, Outcome, create_vm};

/// What a file of swtpm's begins with, whose length is 32 bytes: its header, a tag, and what a TPM 2.0 keeps at first. The simulated host
/// does not have swtpm load it.
const STATE: [u8; 32] = [
    2, 1, 0, 10, 0, 0, 0, 0, 0, 32, 0, 1, 0, 0, 0, 16, 0, 3, 0xab, 0x36, 0x47, 0x23, 0, 3, 0, 0, 0,
    0, 0, 0, 0, 0,
];

fn request(file: &Path) -> CreateVm {
    CreateVm { tpm_state: Some(file.to_owned()), ..super::tpm::request("encrypted") }
}

fn state(fixture: &Fixture, content: &[u8]) -> PathBuf {
    let path = fixture.directory.path().join("tpm2-00.permall");
    std::fs::write(&path, content).unwrap();
    path
}

#[tokio::test]
async fn a_state_becomes_what_the_encrypted_disk_of_the_tpm_is_made_of() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let path = state(&fixture, &STATE);
    let planned = create_vm::create(&services, &me, request(&path), true).await.unwrap();
    assert!(matches!(planned, Outcome::Planned(_)));
    let begun = create_vm::create(&services, &me, request(&path), false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    let disks = fixture.disks(vm).await;
    let disk = disks.iter().find(|disk| disk.role == DiskRole::Tpm).unwrap();
    assert!(disk.encrypted && disk.facts.is_some());
    assert_eq!(disk.image.as_ref().unwrap().path, path);
}

#[tokio::test]
async fn what_is_no_state_is_refused_and_nothing_is_made() {
    let fixture = Fixture::new().await;
    let mut encrypted = STATE;
    encrypted[5] = 9;
    for (content, told) in [
        (Some(&encrypted[..]), "is encrypted"),
        (Some(&STATE[..31]), "no state of a TPM 2.0"),
        (None, "No such file"),
    ] {
        let path = state(&fixture, content.unwrap_or_default());
        if content.is_none() {
            std::fs::remove_file(&path).unwrap();
        }
        uefi_variables::refused_and_not_made(&fixture, || request(&path), "tpm_state", told).await;
    }
}

#[tokio::test]
async fn what_cannot_have_it_is_refused_before_anything_is_made() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let path = state(&fixture, &STATE);
    for dry_run in [true, false] {
        let without = CreateVm { hardware: Hardware::default(), ..request(&path) };
        for (asked, told) in [
            (without, "and this one has none"),
            (request(Path::new("tpm2-00.permall")), "must be an absolute path"),
        ] {
            let refused = create_vm::create(&services, &me, asked, dry_run).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
            assert_eq!(refused.field.as_deref(), Some("tpm_state"), "{refused}");
            assert!(refused.detail.contains(told), "{refused}");
        }
    }
    // What the request does not ask for need not be known.
    fixture.agent.lack_features(&[TAKE_VARIABLES]);
    let planned = create_vm::create(&services, &me, request(&path), true).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
    fixture.agent.lack_features(&[TAKE_TPM_STATE]);
    for dry_run in [true, false] {
        let refused = create_vm::create(&services, &me, request(&path), dry_run).await;
        let refused = refused.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
        assert_eq!(refused.field.as_deref(), Some("tpm_state"));
        assert!(refused.detail.contains("an empty TPM in any case"), "{refused}");
    }
}
