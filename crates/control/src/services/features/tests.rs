//! Hosts whose agents are of an earlier version: what they do not know is refused by name, before anything is made.

use vmseal_api::guest::GuestCommand;
use vmseal_api::hardware::{Firmware, OnCrash};
use vmseal_api::host::version::{CLOUD_INIT, HARDWARE, NICS, PANIC, SCREEN_AND_GUEST};
use vmseal_api::nic::{NicBackend, NicLink, NicModel};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{CloudInit, CreateNic, CreateVm, SetVm};
use vmseal_secret::sealed_box::Recipient;

use crate::services::{Caller, Services, create_vm, guest, set_vm, vm_devices};
use crate::store::{nics, vms};
use crate::testing::Fixture;

/// What agents lack, each beside what they lacked before, and what is said of it. That they know nothing of hardware comes last: it is
/// said before anything else of a machine.
const LACKED: [(&str, &str); 5] = [
    (NICS, "knows no network cards"),
    (CLOUD_INIT, "makes no disks for cloud-init"),
    (SCREEN_AND_GUEST, "knows no screens and guest agents"),
    (PANIC, "when its guest panics"),
    (HARDWARE, "gives VMs a BIOS, its own processor model and usual memory alone"),
];

fn card() -> CreateNic {
    let backend = NicBackend::User { forwards: Vec::new() };
    CreateNic {
        name: None,
        mac: None,
        model: NicModel::default(),
        backend,
        link: NicLink::default(),
    }
}

/// Makes a VM that has something else than others.
async fn create(
    services: &Services,
    dry_run: bool,
    change: fn(&mut CreateVm),
) -> Result<(), Problem> {
    let mut request = Fixture::request("web", "encrypted");
    change(&mut request);
    let me = Caller::administrator("me");
    create_vm::create(services, &me, request, dry_run).await.map(drop)
}

/// The answers to all that needs a feature, each with the field that a refusal names.
async fn asked(
    services: &Services,
    feature: &str,
    dry_run: bool,
) -> Vec<(Option<&'static str>, Result<(), Problem>)> {
    let me = &Caller::administrator("me");
    match feature {
        NICS => {
            let added = vm_devices::add_nic(services, me, "runs", card(), dry_run).await;
            let created = create(services, dry_run, |it| it.nics.push(card())).await;
            vec![(Some("nics"), created), (Some("nics"), added.map(drop))]
        }
        CLOUD_INIT => {
            let created = create(services, dry_run, |it| {
                let user_data = Some("#cloud-config\n".to_owned().into());
                it.cloud_init = Some(CloudInit { user_data, ..CloudInit::default() });
            });
            vec![(Some("cloud_init"), created.await)]
        }
        SCREEN_AND_GUEST => {
            let screen = guest::screen(services, me, "runs").await;
            let pinged = guest::ask(services, me, "runs", GuestCommand::Ping).await;
            vec![(None, screen.map(drop)), (None, pinged.map(drop))]
        }
        PANIC => {
            let created =
                create(services, dry_run, |it| it.hardware.on_crash = OnCrash::Preserve).await;
            let preserve = SetVm { on_crash: Some(OnCrash::Preserve), ..SetVm::default() };
            let set = set_vm::set(services, me, "runs", preserve, dry_run).await;
            vec![(Some("hardware.on_crash"), created), (None, set.map(drop))]
        }
        HARDWARE => {
            let created =
                create(services, dry_run, |it| it.hardware.firmware = Firmware::Uefi).await;
            vec![(Some("hardware"), created)]
        }
        other => panic!("nothing is known that needs {other}"),
    }
}

#[tokio::test]
async fn what_an_older_agent_does_not_know_is_refused_by_name_and_nothing_is_made() {
    let fixture = Fixture::new().await;
    let runs = fixture.running("runs").await;
    let services = fixture.services(Recipient::generate().unwrap());
    for (feature, _) in LACKED {
        for (_, answer) in asked(&services, feature, true).await {
            answer.unwrap_or_else(|problem| panic!("{feature} is known: {problem}"));
        }
    }
    for (feature, said) in LACKED {
        fixture.restart_agent_without(&[feature]).await;
        for dry_run in [true, false] {
            for (field, answer) in asked(&services, feature, dry_run).await {
                let refused = answer.expect_err(feature);
                assert_eq!(refused.code, ErrorCode::Unsupported, "{feature}: {refused}");
                assert_eq!(refused.field.as_deref(), field, "{feature}: {refused}");
                let detail = &refused.detail;
                assert!(detail.contains(said) && detail.contains("upgrade"), "{feature}: {detail}");
            }
        }
    }
    let mut read = fixture.store.read().await.unwrap();
    assert!(vms::find(&mut read, "web").await.unwrap().is_none());
    assert!(nics::of_vm(&mut read, runs).await.unwrap().is_empty());
    assert!(vms::get(&mut read, runs).await.unwrap().unwrap().hardware.is_usual());
}
