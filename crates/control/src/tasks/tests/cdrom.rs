//! CD-ROM drives and boot orders: what is refused before anything changes, and what hosts are told.

use std::path::PathBuf;

use vmseal_api::boot::{BootDevice, Cdrom};
use vmseal_api::host::version::CDROM;
use vmseal_api::id::TaskId;
use vmseal_api::problem::ErrorCode;
use vmseal_api::request::{SetVm, StartVm, StopVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{self, Caller, Outcome, Services, set_vm};
use crate::store::vms;

fn insert(medium: &std::path::Path) -> SetVm {
    SetVm { cdrom: Some(Cdrom { medium: Some(medium.to_owned()) }), ..SetVm::default() }
}

fn order(order: &[BootDevice]) -> SetVm {
    SetVm { boot: Some(order.to_vec()), ..SetVm::default() }
}

fn medium(directory: &tempfile::TempDir, name: &str) -> PathBuf {
    let path = directory.path().join(name);
    std::fs::write(&path, [0; 4096]).unwrap();
    path
}

async fn set(services: &Services, request: SetVm) -> Result<vmseal_api::model::Vm, Problem> {
    let me = Caller::administrator("me");
    match set_vm::set(services, &me, "web", request, false).await? {
        Outcome::Done(vm) => Ok(vm),
        Outcome::Planned(plan) => panic!("{plan:?}"),
    }
}

async fn start(services: &Services, first: BootDevice) -> Result<TaskId, Problem> {
    let request = StartVm { boot_once: Some(first), ..StartVm::default() };
    match services::vms::start(services, &Caller::administrator("me"), "web", request, false)
        .await?
    {
        Outcome::Done(task) => Ok(task.id),
        Outcome::Planned(plan) => panic!("{plan:?}"),
    }
}

#[tokio::test]
async fn a_medium_is_put_in_at_once_and_a_start_from_it_is_for_once() {
    let (fixture, files) = (Fixture::new().await, tempfile::tempdir().unwrap());
    let vm = fixture.made("web", "encrypted").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let (first, second) = (medium(&files, "first.iso"), medium(&files, "second.iso"));
    let shown = set(&services, insert(&first)).await.unwrap();
    assert_eq!(shown.hardware.medium(), Some(first.as_path()));
    let task = start(&services, BootDevice::Cdrom).await.unwrap();
    assert_eq!(fixture.ended(task).await.state, TaskState::Done);
    assert_eq!(fixture.agent.booted_once_from(vm), Some(BootDevice::Cdrom));

    let runs_with = || fixture.agent.runs_with(vm).unwrap().hardware;
    set(&services, insert(&second)).await.unwrap();
    assert_eq!(runs_with().medium(), Some(second.as_path()));
    let shown = set(&services, order(&[BootDevice::Cdrom])).await.unwrap();
    assert_eq!((shown.at_next_start, runs_with().boot), (vec!["boot".to_owned()], vec![]));
    // A medium that has gone keeps nobody from changing something else.
    std::fs::remove_file(&second).unwrap();
    set(&services, order(&[BootDevice::Disk, BootDevice::Cdrom])).await.unwrap();
    let gone = set(&services, insert(&second)).await.unwrap_err();
    assert_eq!(gone.field.as_deref(), Some("cdrom.medium"), "{gone}");
    let eject = SetVm { cdrom: Some(Cdrom::default()), ..SetVm::default() };
    set(&services, eject).await.unwrap();
    assert_eq!((runs_with().medium(), runs_with().cdrom), (None, Some(Cdrom::default())));

    let request = StopVm { force: true, ..StopVm::default() };
    let me = Caller::administrator("me");
    let stop = services::vms::stop(&services, &me, "web", request, false).await.unwrap();
    let Outcome::Done(task) = stop else { panic!("{stop:?}") };
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Done);
    let again = fixture.begin(Operation::StartVm { vm, boot_once: None }, "web").await;
    assert_eq!(fixture.ended(again).await.state, TaskState::Done);
    assert_eq!(fixture.agent.booted_once_from(vm), None);
    assert_eq!(runs_with().boot, [BootDevice::Disk, BootDevice::Cdrom]);
}

#[tokio::test]
async fn what_an_agent_or_a_vm_lacks_is_refused_and_nothing_changes() {
    let (fixture, files) = (Fixture::new().await, tempfile::tempdir().unwrap());
    let vm = fixture.running("web").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let good = medium(&files, "good.iso");
    let refused = set(&services, insert(&good)).await.unwrap_err();
    assert_eq!((refused.code, refused.field.as_deref()), (ErrorCode::WrongState, Some("cdrom")));
    for wrong in [vec![BootDevice::Cdrom], vec![BootDevice::Network], vec![BootDevice::Disk; 2]] {
        let refused = set(&services, order(&wrong)).await.unwrap_err();
        assert_eq!(refused.field.as_deref(), Some("boot"), "{wrong:?}: {refused}");
    }
    let refused = start(&services, BootDevice::Cdrom).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("boot_once"), "{refused}");

    fixture.agent.lack_features(&[CDROM]);
    let asked = [
        set(&services, insert(&good)).await.map(drop),
        set(&services, order(&[BootDevice::Disk])).await.map(drop),
        start(&services, BootDevice::Disk).await.map(drop),
    ];
    for refused in asked.map(Result::unwrap_err) {
        assert_eq!(refused.code, ErrorCode::Unsupported, "{refused}");
        assert!(refused.detail.contains("no CD-ROM drive") && refused.detail.contains("upgrade"));
    }
    let mut read = fixture.store.read().await.unwrap();
    assert!(vms::get(&mut read, vm).await.unwrap().unwrap().hardware.is_usual());
}
