//! What a monitor sees to, against a host in memory.

use vmseal_agent::simulated::{Call, Fault};
use vmseal_api::host::{HostAgent, Notice, NoticeCode, Power, StopReason, VmSpec};
use vmseal_api::id::VmId;
use vmseal_api::model::Connection;

use crate::testing::Plant;

async fn alarm(plant: &Plant, wanted: &str) {
    plant
        .eventually(wanted, async || {
            plant.alarms().await.iter().any(|alarm| alarm == wanted).then_some(())
        })
        .await;
}

async fn no_alarms(plant: &Plant) {
    plant.eventually("no alarms", async || plant.alarms().await.is_empty().then_some(())).await;
}

#[tokio::test]
async fn a_host_that_restarts_gets_its_vms_and_keys_again() {
    let plant = Plant::new().await;
    let (off, on) = (plant.made("off", "encrypted").await, plant.running("on").await);
    plant.agent.restart();
    plant.assert_whole(off, Power::Off, "off").await;
    plant.assert_whole(on, Power::Running, "on").await;
    no_alarms(&plant).await;
}

#[tokio::test]
async fn a_host_that_is_away_is_an_alarm_until_it_is_back() {
    let plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    plant.agent.set_reachable(false);
    alarm(&plant, "host-disconnected here").await;
    let view = plant.hosts.view(plant.host);
    assert_eq!(view.connection, Connection::Disconnected);
    assert_eq!(view.vm(vm), None, "what is not known is shown");
    plant.agent.set_reachable(true);
    plant.connected().await;
    no_alarms(&plant).await;
    let told: Vec<_> = plant.events("alarm.cleared").await;
    assert!(told.iter().any(|event| event.detail == "host-disconnected"), "{told:?}");
}

#[tokio::test]
async fn a_vm_whose_key_cannot_be_had_is_locked_until_the_provider_is_unlocked() {
    let mut plant = Plant::new().await;
    let vm = plant.made("web", "encrypted").await;
    // Another life of the server, whose provider is sealed.
    let sealed = crate::providers::Providers::open(
        std::sync::Arc::clone(&plant.store),
        plant.directory.path(),
        None,
    );
    plant.providers = std::sync::Arc::new(sealed.await.unwrap());
    plant.agent.restart();
    plant.restart(|_| {}).await;
    alarm(&plant, "vm-locked web").await;
    assert_eq!((plant.agent.registered(), plant.agent.keys_held()), (vec![vm], vec![]));
    let mut read = plant.store.read().await.unwrap();
    let standing = crate::store::alarms::list(&mut read).await.unwrap();
    let provider = crate::store::providers::find(&mut read, "keys").await.unwrap().unwrap();
    drop(read);
    assert!(standing[0].detail.contains("vmseal provider unlock keys"), "{standing:?}");
    let passphrase =
        vmseal_secret::SecretBytes::from_wiped(&mut b"pass, as in the tests".to_vec()).unwrap();
    plant.providers.unlock(&provider, passphrase, "me").await.unwrap();
    no_alarms(&plant).await;
    plant.assert_whole(vm, Power::Off, "unlocked").await;
}

#[tokio::test]
async fn a_dead_filter_and_a_damaged_header_are_alarms() {
    let plant = Plant::new().await;
    let vm = plant.running("web").await;
    let detail = "the first header copy is damaged".to_owned();
    plant.agent.notice(vm, Notice { code: NoticeCode::HeaderCopyDamaged, disk: None, detail });
    alarm(&plant, "header-copy-damaged web").await;
    plant.agent.kill_filter(vm);
    alarm(&plant, "filter-restarted web").await;
    assert!(plant.events("vm.stopped").await.is_empty(), "its guest goes on");
    plant.agent.stop_guest(vm, StopReason::FilterDied);
    alarm(&plant, "filter-died web").await;
    let stopped = plant.events("vm.stopped").await;
    assert_eq!(stopped.last().unwrap().detail, "the simulated guest has stopped");
    // The host keeps the death, and tells it again when its agent restarts.
    plant.agent.restart();
    plant.connected().await;
    plant.assert_whole(vm, Power::Off, "after a restart").await;
    alarm(&plant, "filter-died web").await;
    assert!(!plant.events("alarm.cleared").await.iter().any(|told| told.detail == "filter-died"));
    let task = plant.begin(crate::operation::Operation::StartVm { vm }, "web").await;
    plant.ended(task).await;
    plant
        .eventually("the alarm is gone", async || {
            let alarms = plant.alarms().await;
            (!alarms.contains(&"filter-died web".to_owned())).then_some(())
        })
        .await;
}

#[tokio::test]
async fn starts_and_stops_are_told_once_also_across_restarts_of_the_server() {
    let mut plant = Plant::new().await;
    let vm = plant.running("web").await;
    plant.restart(|_| {}).await;
    plant.agent.restart();
    plant.assert_whole(vm, Power::Running, "after restarts").await;
    assert_eq!(plant.events("vm.started").await.len(), 1);
    plant.agent.stop_guest(vm, StopReason::FilterDied);
    alarm(&plant, "filter-died web").await;
    plant.restart(|_| {}).await;
    assert_eq!(plant.events("vm.stopped").await.len(), 1);
    assert_eq!(plant.alarms().await, ["filter-died web"]);
}

#[tokio::test]
async fn what_the_inventory_does_not_have_the_host_is_to_forget() {
    let plant = Plant::new().await;
    let spec = VmSpec {
        vm: VmId::new(),
        name: "ghost".to_owned(),
        vcpus: 1,
        memory: 1 << 25,
        key: None,
        disks: Vec::new(),
    };
    let ghost = spec.vm;
    plant.agent.register_vm(spec).await.unwrap();
    plant
        .eventually("it is forgotten", async || {
            (!plant.agent.registered().contains(&ghost)).then_some(())
        })
        .await;
}

#[tokio::test]
async fn whatever_is_lost_in_settling_is_mended() {
    for call in [Call::Describe, Call::State, Call::RegisterVm, Call::OfferKey] {
        for fault in [Fault::LoseRequest, Fault::LoseAnswer, Fault::Crash, Fault::CrashAfter] {
            let plant = Plant::new().await;
            let vm = plant.made("web", "encrypted").await;
            plant.inject(call, fault, 1);
            plant.agent.restart();
            plant.assert_whole(vm, Power::Off, &format!("{call:?} {fault:?}")).await;
        }
    }
}
