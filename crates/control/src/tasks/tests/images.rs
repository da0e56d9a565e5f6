//! Disks that are filled from images: their host looks at an image before anything is on record, and in no transaction.

use std::path::PathBuf;

use vmseal_api::cloud_init::CloudInit;
use vmseal_api::host::DiskRole;
use vmseal_api::request::{AddDisk, CreateVm};
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{Caller, Outcome, create_vm, vm_devices};
use crate::store::vms;

fn image(fixture: &Fixture) -> PathBuf {
    let path = fixture.directory.path().join("image.raw");
    std::fs::write(&path, [0x5a; 4096]).unwrap();
    path
}

/// A request for the VM `web`, whose first disk is filled from an image.
fn filled(fixture: &Fixture) -> CreateVm {
    let mut request = Fixture::request("web", "encrypted");
    request.disks[0].image = Some(image(fixture));
    request.disks[0].format = Some(ImageFormat::Raw);
    request
}

/// What a guest is told is sealed for one disk.
#[tokio::test]
async fn a_vm_from_an_image_is_told_what_was_sealed_for_the_disk_that_is_made() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let user_data = Some("#cloud-config\n".to_owned().into());
    let cloud_init = Some(CloudInit { user_data, ..CloudInit::default() });
    let request = CreateVm { cloud_init, ..filled(&fixture) };
    let begun = create_vm::create(&services, &Caller::administrator("me"), request, false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
    let vm = fixture.task(task.id).await.operation.vm().unwrap();
    let disks = fixture.disks(vm).await;
    assert!(disks[0].image.is_some());
    assert_eq!(disks[2].role, DiskRole::CloudInit);
}

/// Each may find the name free, and finds it taken when its host has answered.
#[tokio::test]
async fn of_two_requests_for_one_name_one_makes_a_vm_and_the_other_is_refused() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = filled(&fixture);
    let before = fixture.events("task.begun").await.len();
    let create = || create_vm::create(&services, &me, request.clone(), false);
    let (begun, refused) = match tokio::join!(create(), create()) {
        (Ok(begun), Err(refused)) | (Err(refused), Ok(begun)) => (begun, refused),
        both => panic!("{both:?}"),
    };
    assert_eq!(refused.code, ErrorCode::AlreadyExists, "{refused}");
    let Outcome::Done(task) = begun else { panic!("nothing was begun") };
    fixture.ends_well(task.id).await;
    assert_eq!(fixture.events("task.begun").await.len(), before + 1);
}

#[tokio::test]
async fn a_host_that_does_not_answer_about_an_image_leaves_nothing_and_no_doubt() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let db = fixture.made("db", "encrypted").await;
    let before = fixture.events("task.begun").await.len();
    let add = || {
        let (name, image, format) =
            ("more".to_owned(), Some(image(&fixture)), Some(ImageFormat::Raw));
        let (datastore, size, force, encrypted) = (None, 1 << 20, false, None);
        let request = AddDisk { name, datastore, size, image, format, force, encrypted };
        vm_devices::add_disk(&services, &me, "db", request, false)
    };
    for fault in [HostFault::LoseAnswer, HostFault::LoseRequest] {
        fixture.inject(Call::ExamineDisk, fault, 1);
        let refused = create_vm::create(&services, &me, filled(&fixture), false).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable, "{fault:?}: {refused}");
        fixture.inject(Call::ExamineDisk, fault, 1);
        let refused = add().await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable, "{fault:?}: {refused}");
    }
    assert_eq!(fixture.events("task.begun").await.len(), before);
    let mut read = fixture.store.read().await.unwrap();
    assert!(vms::find(&mut read, "web").await.unwrap().is_none());
    drop(read);
    assert_eq!(fixture.disks(db).await.len(), 2);
    // The same request again is carried out.
    let begun = add().await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
    assert_eq!(fixture.disks(db).await.len(), 3);
}
