//! VMs whose variables of UEFI come from a file of the host: what is taken, and what is refused with nothing left.

use std::path::Path;

use vmseal_api::hardware::{Firmware, Hardware};
use vmseal_api::host::DiskRole;
use vmseal_api::host::version::TAKE_VARIABLES;
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::CreateVm;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, Outcome, create_vm};
use crate::store::vms;

/// Variables without keys of secure boot, of the package that VMs with UEFI need.
const PLAIN: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

fn request(firmware: Firmware, file: &Path) -> CreateVm {
    CreateVm {
        hardware: Hardware { firmware, ..Hardware::default() },
        uefi_variables: Some(file.to_owned()),
        ..super::tpm::request("encrypted")
    }
}

#[tokio::test]
async fn variables_of_a_file_become_the_encrypted_disk_of_the_firmware() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let asked = || request(Firmware::Uefi, Path::new(PLAIN));
    let planned = create_vm::create(&services, &me, asked(), true).await.unwrap();
    assert!(matches!(planned, Outcome::Planned(_)));
    let begun = create_vm::create(&services, &me, asked(), false).await.unwrap();
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    let disks = fixture.disks(vm).await;
    let disk = disks.iter().find(|disk| disk.role == DiskRole::UefiVariables).unwrap();
    assert!(disk.encrypted && disk.facts.is_some());
    assert_eq!(disk.image.as_ref().unwrap().path, Path::new(PLAIN));
}

/// This creation is refused because of this field, also where it is only tried, and nothing is made.
pub(super) async fn refused_and_not_made(
    fixture: &Fixture,
    request: impl Fn() -> CreateVm,
    field: &str,
    told: &str,
) {
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let begun = fixture.events("task.begun").await.len();
    for dry_run in [true, false] {
        let refused = create_vm::create(&services, &me, request(), dry_run).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some(field), "{refused}");
        assert!(refused.detail.contains(told), "{refused}");
    }
    assert_eq!(fixture.events("task.begun").await.len(), begun, "{told}");
    let mut read = fixture.store.read().await.unwrap();
    assert!(vms::find(&mut read, &request().name).await.unwrap().is_none(), "{told}");
}

#[tokio::test]
async fn what_the_firmware_does_not_read_is_refused_and_nothing_is_made() {
    let fixture = Fixture::new().await;
    let short = fixture.directory.path().join("short.fd");
    std::fs::write(&short, [0; 4096]).unwrap();
    let missing = fixture.directory.path().join("missing.fd");
    for (firmware, file, told) in [
        (Firmware::Uefi, short.as_path(), "has 4096 bytes"),
        (Firmware::Uefi, missing.as_path(), "No such file"),
        (Firmware::UefiSecureBoot, Path::new(PLAIN), "no keys of secure boot"),
    ] {
        refused_and_not_made(&fixture, || request(firmware, file), "uefi_variables", told).await;
    }
}

#[tokio::test]
async fn what_cannot_have_them_is_refused_before_anything_is_made() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    for dry_run in [true, false] {
        for (firmware, file, told) in [
            (Firmware::Bios, PLAIN, "a BIOS has no variables"),
            (Firmware::Uefi, "web_VARS.fd", "must be an absolute path"),
        ] {
            let asked = request(firmware, Path::new(file));
            let refused = create_vm::create(&services, &me, asked, dry_run).await.unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
            assert_eq!(refused.field.as_deref(), Some("uefi_variables"), "{refused}");
            assert!(refused.detail.contains(told), "{refused}");
        }
    }
    fixture.agent.lack_features(&[TAKE_VARIABLES]);
    for dry_run in [true, false] {
        let asked = request(Firmware::Uefi, Path::new(PLAIN));
        let refused = create_vm::create(&services, &me, asked, dry_run).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
        assert_eq!(refused.field.as_deref(), Some("uefi_variables"));
        assert!(refused.detail.contains("begins with new variables"), "{refused}");
    }
}
