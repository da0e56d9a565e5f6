//! Which hosts are offered for a VM that runs, and what people are told of the others.

use std::net::SocketAddr;

use vmseal_api::boot::Cdrom;
use vmseal_api::host::version::{EXAMINE_MIGRATION_PORT, MEASURE_MEDIUM};
use vmseal_api::host::{Accelerator, AcceleratorKind, GuestControl};
use vmseal_api::key_fault::KeyFault;
use vmseal_api::migration::MigrationEncryption;
use vmseal_api::model::Plan;
use vmseal_api::processor::Processor;
use vmseal_api::request::{MigrateVm, SetPolicy, SetVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{guests, set_policy, set_vm};
use crate::testing::Fixture;

mod refused_hosts;

async fn plan(fixture: &Fixture, host: Option<&str>, place: Option<&str>) -> Result<Plan, Problem> {
    let services = fixture.services(Recipient::generate().unwrap());
    let (host, datastore) = (host.map(str::to_owned), place.map(str::to_owned));
    let request = MigrateVm { host, datastore, ..MigrateVm::default() };
    match migrate(&services, &Caller::administrator("me"), "web", request, true).await? {
        Outcome::Planned(plan) => Ok(plan),
        Outcome::Done(_) => panic!("it is not only planned"),
    }
}

/// What a dry run says: the host and the copies, or why not.
pub(super) async fn planned(fixture: &Fixture, host: Option<&str>, place: Option<&str>) -> String {
    match plan(fixture, host, place).await {
        Ok(plan) => plan.steps[0].clone(),
        Err(problem) => problem.detail,
    }
}

/// Sets the mode of the VM.
async fn encrypts(fixture: &Fixture, mode: MigrationEncryption) {
    let services = fixture.services(Recipient::generate().unwrap());
    let request = SetVm { migration_encryption: Some(mode), ..SetVm::default() };
    let caller = Caller::administrator("me");
    set_vm::set(&services, &caller, "web", request, false).await.unwrap();
}

#[test]
fn an_older_qemu_is_one_with_lower_numbers() {
    assert!(older("7.2.22", "8.0.0") && older("9.2.0", "10.0.1"));
    assert!(!older("7.2.1", "7.2.22") && !older("10.0", "9.2") && !older("8.1-rc1", "8.1"));
}

#[tokio::test]
async fn a_vm_without_a_key_goes_in_the_clear_where_its_mode_allows_it() {
    let fixture = Fixture::new().await;
    let (old, agent) = fixture.add_host("old").await;
    fixture.share_datastore(old, "old").await;
    agent.lack_features(&[MIGRATE_ENCRYPTED]);
    agent.restart();
    let made = fixture.made("web", "plain").await;
    fixture.done(Operation::StartVm { vm: made, boot_once: None }, "web").await;
    fixture
        .eventually("the server sees it", async || {
            let told = plan(&fixture, Some("old"), None).await.ok()?;
            told.steps[0].contains("is not encrypted").then_some(())
        })
        .await;
    let told = plan(&fixture, None, None).await.unwrap();
    assert!(told.warnings.iter().any(|it| it.contains("in the clear")), "{told:?}");
    encrypts(&fixture, MigrationEncryption::Disabled).await;
    let told = plan(&fixture, None, None).await.unwrap();
    assert!(told.steps[0].contains("is not encrypted"), "{told:?}");
    assert!(told.warnings.is_empty(), "{told:?}");
    encrypts(&fixture, MigrationEncryption::Required).await;
    let told = planned(&fixture, None, None).await;
    assert!(told.contains("cannot encrypt what is sent: upgrade vmseal there"), "{told}");

    // What was sent in the clear is said of the task, and by the event.
    encrypts(&fixture, MigrationEncryption::Opportunistic).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let (caller, request) = (Caller::administrator("me"), MigrateVm::default());
    let Ok(Outcome::Done(task)) = migrate(&services, &caller, "web", request, false).await else {
        panic!("nothing was begun")
    };
    fixture.ends_well(task.id).await;
    let shown = fixture.engine.shown(&fixture.task(task.id).await);
    assert_eq!(shown.migrated.unwrap().encrypted, Some(false));
    let told = fixture.events("vm.migrated").await;
    let [event] = &told[..] else { panic!("{told:?}") };
    assert_eq!(event.target, "web");
    let said = "from host 'here' to host 'old', not encrypted";
    assert!(event.detail.starts_with(said), "{event:?}");
}

#[tokio::test]
async fn a_host_that_encrypts_is_preferred_and_others_are_explained() {
    let fixture = Fixture::new().await;
    for name in ["old", "new", "far"] {
        let (host, agent) = fixture.add_host(name).await;
        if name != "far" {
            fixture.share_datastore(host, name).await;
        }
        if name == "old" {
            agent.lack_features(&[MIGRATE_ENCRYPTED]);
            agent.restart();
        }
    }
    let made = fixture.made("web", "plain").await;
    fixture.done(Operation::StartVm { vm: made, boot_once: None }, "web").await;
    fixture
        .eventually("the server sees the old one", async || {
            planned(&fixture, Some("old"), None).await.contains("not encrypted").then_some(())
        })
        .await;
    let told = plan(&fixture, None, None).await.unwrap();
    assert!(told.steps[0].contains("choose host 'new'"), "{told:?}");
    let other =
        |it: &String| it == "not offered: host 'far': it has no datastore for copies of the disks";
    assert!(told.warnings.iter().any(other), "{told:?}");
}

#[tokio::test]
async fn a_guest_with_its_hosts_processor_goes_where_that_can_as_much() {
    let fixture = Fixture::new().await;
    let (there, agent) = fixture.add_host("there").await;
    fixture.share_datastore(there, "there").await;
    let runs_by_kvm = |features: &[&str]| Accelerator {
        kind: AcceleratorKind::Kvm,
        reason: "for this test".to_owned(),
        processor: Some(Processor {
            vendor: "GenuineIntel".to_owned(),
            features: features.iter().map(|&name| name.to_owned()).collect(),
        }),
    };
    fixture.running("web").await;
    for (host, features) in [(&fixture.agent, &["aes", "avx512f"][..]), (&agent, &["aes"])] {
        host.set_accelerator(runs_by_kvm(features));
        host.restart();
    }
    let refused = async || {
        let told = planned(&fixture, Some("there"), None).await;
        told.contains("lacks what the guest may use: avx512f. Give the VM").then_some(())
    };
    fixture.eventually("it is refused", refused).await;
    agent.set_accelerator(runs_by_kvm(&["aes", "avx512f", "amx"]));
    agent.restart();
    let goes = async || {
        planned(&fixture, Some("there"), None).await.contains("choose host 'there'").then_some(())
    };
    fixture.eventually("it can go", goes).await;
}

#[tokio::test]
async fn a_vm_whose_key_no_provider_gives_is_refused_before_anything_is_begun() {
    let mut fixture = Fixture::new().await;
    let (there, _) = fixture.add_host("there").await;
    fixture.share_datastore(there, "there").await;
    let vm = fixture.running("web").await;
    fixture.restart_sealed().await;
    for is_off in [false, true] {
        if is_off {
            fixture.done(Operation::StopVm { vm, force: true, timeout_seconds: 5 }, "web").await;
        }
        let tasks = fixture.events("task.begun").await.len();
        let is_sealed = |problem: &Problem| problem.reason == Some(KeyFault::ProviderSealed);
        let told = fixture
            .eventually("it is refused", async || {
                plan(&fixture, Some("there"), None).await.err().filter(is_sealed)
            })
            .await;
        assert!(told.detail.contains("stays on host 'here'"), "{told}");
        let services = fixture.services(Recipient::generate().unwrap());
        let (caller, request) = (Caller::administrator("me"), MigrateVm::default());
        let refused = migrate(&services, &caller, "web", request, false).await.unwrap_err();
        assert!(is_sealed(&refused), "{refused}");
        assert_eq!(fixture.events("task.begun").await.len(), tasks, "something was begun");
        assert!(fixture.agent.keys_held().contains(&vm), "the host holds the key nevertheless");
    }
    fixture.unlock("keys").await;
    let told = planned(&fixture, Some("there"), None).await;
    assert!(told.contains("choose host 'there'"), "{told}");
}

#[tokio::test]
async fn a_guest_that_is_paused_is_sent_by_a_qemu_that_can() {
    let fixture = Fixture::new().await;
    let (there, agent) = fixture.add_host("there").await;
    fixture.share_datastore(there, "there").await;
    fixture.running("web").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    guests::control(&services, &me, "web", GuestControl::Pause, false).await.unwrap();
    for (qemu, goes) in [("8.2.2", false), ("9.0.0", true), ("10.1.0", true)] {
        // The other one first: it must not be the older one.
        for host in [&agent, &fixture.agent] {
            host.set_qemu(qemu);
            host.restart();
        }
        let told = fixture
            .eventually("the server sees it", async || {
                let here = fixture.hosts.view(fixture.host).description?;
                let told = planned(&fixture, Some("there"), None).await;
                let settled = told.contains("is paused") || told.contains("choose host");
                (here.qemu == qemu && settled).then_some(told)
            })
            .await;
        assert_eq!(told.contains("choose host 'there'"), goes, "{qemu}: {told}");
        if !goes {
            assert!(told.contains("has QEMU 8.2.2: QEMU before 9.0"), "{told}");
            guests::control(&services, &me, "web", GuestControl::Unpause, false).await.unwrap();
            let runs = async || {
                let told = planned(&fixture, Some("there"), None).await;
                told.contains("choose host 'there'").then_some(())
            };
            fixture.eventually("it can go while it runs", runs).await;
            guests::control(&services, &me, "web", GuestControl::Pause, false).await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_host_whose_port_is_not_reached_is_refused_before_anything_is_begun() {
    let fixture = Fixture::new().await;
    let port = SocketAddr::from(([192, 0, 2, 7], 8446));
    for name in ["there", "far"] {
        let (host, agent) = fixture.add_host(name).await;
        fixture.share_datastore(host, name).await;
        if name == "far" {
            agent.set_migration_address(port);
            agent.restart();
        }
    }
    fixture.running("web").await;
    fixture.agent.cut_off_from(port);
    let told = fixture
        .eventually("the server sees where it waits", async || {
            let told = planned(&fixture, Some("far"), None).await;
            told.contains("192.0.2.7:8446").then_some(told)
        })
        .await;
    for said in [
        "VM 'web' cannot go to host 'far'",
        "is not reached from the VM's host 'here': it is cut off",
        "vmseal agent --migration-listen",
    ] {
        assert!(told.contains(said), "{told}");
    }

    let begun = fixture.events("task.begun").await.len();
    let services = fixture.services(Recipient::generate().unwrap());
    let request = MigrateVm { host: Some("far".to_owned()), ..MigrateVm::default() };
    let me = Caller::administrator("me");
    let refused = migrate(&services, &me, "web", request, false).await.unwrap_err();
    assert_eq!((refused.detail, refused.field.as_deref()), (told, Some("host")));
    assert_eq!(fixture.events("task.begun").await.len(), begun, "something was begun");

    let told = plan(&fixture, None, None).await.unwrap();
    assert!(told.steps[0].contains("choose host 'there'"), "{told:?}");
    let other = |it: &String| it.starts_with("not offered: host 'far': its port for VMs");
    assert!(told.warnings.iter().any(other), "{told:?}");

    fixture.agent.lack_features(&[EXAMINE_MIGRATION_PORT]);
    fixture.agent.restart();
    let goes = async || {
        planned(&fixture, Some("far"), None).await.contains("choose host 'far'").then_some(())
    };
    fixture.eventually("an agent of an earlier version is not asked", goes).await;
}

#[tokio::test]
async fn a_medium_goes_where_the_same_file_is() {
    let (fixture, files) = (Fixture::new().await, tempfile::tempdir().unwrap());
    let (there, agent) = fixture.add_host("there").await;
    fixture.share_datastore(there, "there").await;
    let vm = fixture.running("web").await;
    let path = files.path().join("tools.iso");
    std::fs::write(&path, [7; 4096]).unwrap();
    let mut row = fixture.vm(vm).await.unwrap();
    row.hardware.cdrom = Some(Cdrom { medium: Some(path.clone()) });
    let mut write = fixture.store.write().await.unwrap();
    vms::set(&mut write, &row).await.unwrap();
    write.commit().await.unwrap();
    let told = async || planned(&fixture, Some("there"), None).await;

    agent.set_other_media(true);
    let refused = told().await;
    let why = "host 'there' has another file there, with other content";
    assert!(refused.contains(why), "{refused}");
    let remedy = format!("place the same file at {} on host 'there'", path.display());
    assert!(
        refused.contains("vmseal vm cdrom eject web") && refused.contains(&remedy),
        "{refused}"
    );
    agent.set_other_media(false);
    assert!(told().await.contains("choose host 'there'"), "{}", told().await);
    std::fs::remove_file(&path).unwrap();
    let refused = told().await;
    assert!(refused.contains("on host 'here' it cannot be compared"), "{refused}");
    std::fs::write(&path, [7; 4096]).unwrap();

    agent.lack_features(&[MEASURE_MEDIUM]);
    agent.restart();
    let is_refused = async || {
        let why = "the agent of host 'there' cannot say whether both hosts have it";
        told().await.contains(why).then_some(())
    };
    fixture.eventually("an earlier version is refused", is_refused).await;

    // Something else may be put in between the comparison and the task.
    let mut write = fixture.store.write().await.unwrap();
    require_medium_kept(&mut write, &row).await.unwrap();
    row.hardware.cdrom = Some(Cdrom::default());
    let refused = require_medium_kept(&mut write, &row).await.unwrap_err();
    assert!(refused.detail.contains("was changed meanwhile"), "{refused}");
}

#[tokio::test]
async fn the_policy_says_how_long_a_guest_stands_still_unless_the_command_does() {
    let fixture = Fixture::new().await;
    let (there, _) = fixture.add_host("there").await;
    fixture.share_datastore(there, "there").await;
    fixture.running("web").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let set = async |downtime| {
        let request = SetPolicy { downtime_milliseconds: Some(downtime), ..SetPolicy::default() };
        set_policy::set(&services, &me, "encrypted", request, false).await.map(drop)
    };
    let refused = set(5).await.unwrap_err();
    assert_eq!(refused.field.as_deref(), Some("downtime_milliseconds"));
    set(120).await.unwrap();
    let moved = async |downtime_milliseconds| {
        let request = MigrateVm { downtime_milliseconds, ..MigrateVm::default() };
        let Ok(Outcome::Done(task)) = migrate(&services, &me, "web", request, false).await else {
            panic!("nothing was begun")
        };
        fixture.ends_well(task.id).await;
        match fixture.task(task.id).await.operation {
            Operation::MigrateVm { downtime_milliseconds, .. } => downtime_milliseconds,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(moved(None).await, Some(120));
    assert_eq!(moved(Some(50)).await, Some(50));
    set(0).await.unwrap();
    assert_eq!(moved(None).await, None);
}
