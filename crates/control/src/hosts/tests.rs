//! The monitor, against a host in memory.

use vmseal_agent::simulated::{Call, Fault};
use vmseal_api::host::{
    ContractRange, HostAgent, KeyReference, Notice, NoticeCode, Power, StopReason, VmSpec,
};
use vmseal_api::id::VmId;
use vmseal_api::model::Connection;

use crate::testing::Fixture;

async fn alarm(fixture: &Fixture, wanted: &str) {
    fixture
        .eventually(wanted, async || {
            fixture.alarms().await.iter().any(|alarm| alarm == wanted).then_some(())
        })
        .await;
}

async fn no_alarms(fixture: &Fixture) {
    fixture.eventually("no alarms", async || fixture.alarms().await.is_empty().then_some(())).await;
}

#[tokio::test]
async fn a_host_that_restarts_gets_its_vms_and_keys_again() {
    let fixture = Fixture::new().await;
    let (off, on) = (fixture.made("off", "encrypted").await, fixture.running("on").await);
    fixture.agent.restart();
    fixture.assert_whole(off, Power::Off, "off").await;
    fixture.assert_whole(on, Power::Running, "on").await;
    no_alarms(&fixture).await;
}

#[tokio::test]
async fn a_host_that_is_away_is_an_alarm_until_it_is_back() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    fixture.agent.set_reachable(false);
    alarm(&fixture, "host-disconnected here").await;
    let view = fixture.hosts.view(fixture.host);
    assert_eq!(view.connection, Connection::Disconnected);
    assert_eq!(view.vm(vm), None, "what is not known is shown");
    fixture.agent.set_reachable(true);
    fixture.connected().await;
    no_alarms(&fixture).await;
    let told: Vec<_> = fixture.events("alarm.cleared").await;
    assert!(told.iter().any(|event| event.detail == "host-disconnected"), "{told:?}");
}

#[tokio::test]
async fn a_vm_whose_key_is_unavailable_is_locked_until_the_provider_is_unlocked() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    // Another run of the server, with its provider sealed.
    let sealed = crate::providers::Providers::open(
        std::sync::Arc::clone(&fixture.store),
        fixture.directory.path(),
        None,
    );
    fixture.providers = std::sync::Arc::new(sealed.await.unwrap());
    fixture.agent.restart();
    fixture.restart(|_| {}).await;
    alarm(&fixture, "vm-locked web").await;
    assert_eq!((fixture.agent.registered(), fixture.agent.keys_held()), (vec![vm], vec![]));
    let mut read = fixture.store.read().await.unwrap();
    let raised = crate::store::alarms::list(&mut read).await.unwrap();
    let provider = crate::store::providers::find(&mut read, "keys").await.unwrap().unwrap();
    drop(read);
    assert!(raised[0].detail.contains("vmseal provider unlock keys"), "{raised:?}");
    let passphrase =
        vmseal_secret::SecretBytes::from_wiped(&mut b"pass, as in the tests".to_vec()).unwrap();
    fixture.providers.unlock(&provider, passphrase, "me").await.unwrap();
    no_alarms(&fixture).await;
    fixture.assert_whole(vm, Power::Off, "unlocked").await;
}

/// As in a recryption: the host is told of another key, and gets it a moment later.
#[tokio::test]
async fn a_vm_whose_key_comes_at_once_is_not_shown_as_locked() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let (_, spec) = super::definition(&fixture.store, vm).await.unwrap().unwrap();
    let key = spec.key.clone().map(|key| KeyReference { key_id: "another".to_owned(), ..key });
    let agent: &dyn HostAgent = &fixture.agent;
    agent.register_vm(VmSpec { key, ..spec }).await.unwrap();
    fixture
        .eventually("its key is there", async || (fixture.agent.keys_held() == [vm]).then_some(()))
        .await;
    let state = agent.state_now().await.unwrap();
    fixture.hosts.until_shown(fixture.host, &state).await;
    let raised = fixture.events("alarm.raised").await;
    assert!(!raised.iter().any(|it| it.target == "web"), "{raised:?}");
}

#[tokio::test]
async fn a_dead_filter_and_a_damaged_header_are_alarms() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let detail = "the first header copy is damaged".to_owned();
    fixture.agent.notice(vm, Notice { code: NoticeCode::HeaderCopyDamaged, disk: None, detail });
    alarm(&fixture, "header-copy-damaged web").await;
    fixture.agent.kill_filter(vm);
    alarm(&fixture, "filter-restarted web").await;
    assert!(fixture.events("vm.stopped").await.is_empty(), "its guest goes on");
    fixture.agent.stop_guest(vm, StopReason::FilterDied);
    alarm(&fixture, "filter-died web").await;
    let stopped = fixture.events("vm.stopped").await;
    assert_eq!(stopped.last().unwrap().detail, "the simulated guest has stopped");
    // The host keeps the cause of the stop, and reports it again when its agent restarts.
    fixture.agent.restart();
    fixture.connected().await;
    fixture.assert_whole(vm, Power::Off, "after a restart").await;
    alarm(&fixture, "filter-died web").await;
    assert!(!fixture.events("alarm.cleared").await.iter().any(|told| told.detail == "filter-died"));
    let task =
        fixture.begin(crate::operation::Operation::StartVm { vm, boot_once: None }, "web").await;
    fixture.ended(task).await;
    fixture
        .eventually("the alarm is gone", async || {
            let alarms = fixture.alarms().await;
            (!alarms.contains(&"filter-died web".to_owned())).then_some(())
        })
        .await;
}

#[tokio::test]
async fn a_disk_that_stalls_is_an_alarm_until_it_goes_on() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let (_, spec) = super::definition(&fixture.store, vm).await.unwrap().unwrap();
    let disk = spec.disk_at(0).unwrap();
    let stalled = |detail: &str| Notice {
        code: NoticeCode::DiskStalled,
        disk: Some(disk.disk),
        detail: detail.to_owned(),
    };
    fixture.agent.notice(vm, stalled("a request has not ended"));
    let target = format!("web/{}", disk.name);
    alarm(&fixture, &format!("disk-stalled {target}")).await;
    let raised = fixture.events("alarm.raised").await;
    let told = raised.iter().find(|event| event.target == target).unwrap();
    assert_eq!(told.detail, "disk-stalled: a request has not ended");
    fixture.agent.withdraw(vm, NoticeCode::DiskStalled);
    no_alarms(&fixture).await;
    let cleared = fixture.events("alarm.cleared").await;
    let ended = |target: &str| {
        cleared.iter().any(|event| event.target == target && event.detail == "disk-stalled")
    };
    assert!(ended(&target), "{cleared:?}");
}

#[tokio::test]
async fn starts_and_stops_have_one_event_even_across_restarts_of_the_server() {
    let mut fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    fixture.restart(|_| {}).await;
    fixture.agent.restart();
    fixture.assert_whole(vm, Power::Running, "after restarts").await;
    assert_eq!(fixture.events("vm.started").await.len(), 1);
    fixture.agent.stop_guest(vm, StopReason::FilterDied);
    alarm(&fixture, "filter-died web").await;
    fixture.restart(|_| {}).await;
    assert_eq!(fixture.events("vm.stopped").await.len(), 1);
    assert_eq!(fixture.alarms().await, ["filter-died web"]);
}

#[tokio::test]
async fn vms_that_the_inventory_does_not_have_are_unregistered() {
    let fixture = Fixture::new().await;
    let spec = VmSpec {
        vm: VmId::new(),
        name: "ghost".to_owned(),
        vcpus: 1,
        memory: 1 << 25,
        policy: None,
        key: None,
        hardware: Default::default(),
        devices: Vec::new(),
        snapshots: Vec::new(),
        images: None,
        about: None,
    };
    let ghost = spec.vm;
    fixture.agent.register_vm(spec).await.unwrap();
    fixture
        .eventually("it is forgotten", async || {
            (!fixture.agent.registered().contains(&ghost)).then_some(())
        })
        .await;
}

#[tokio::test]
async fn lost_calls_in_settling_are_repeated() {
    for call in [Call::Describe, Call::State, Call::RegisterVm, Call::OfferKey] {
        for fault in [Fault::LoseRequest, Fault::LoseAnswer, Fault::Crash, Fault::CrashAfter] {
            let fixture = Fixture::new().await;
            let vm = fixture.made("web", "encrypted").await;
            fixture.inject(call, fault, 1);
            fixture.agent.restart();
            fixture.assert_whole(vm, Power::Off, &format!("{call:?} {fault:?}")).await;
        }
    }
}

#[tokio::test]
async fn a_host_without_a_common_version_is_not_used_until_it_is_upgraded() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    for (min, max) in [(1, 1), (7, 9)] {
        fixture.agent.set_contract(ContractRange { min, max });
        fixture.agent.restart();
        alarm(&fixture, "host-disconnected here").await;
        assert!(fixture.agent.registered().is_empty(), "it gets VMs");
        // An agent that also speaks later versions works.
        fixture.agent.set_contract(ContractRange { min: 1, max: 9 });
        fixture.assert_whole(vm, Power::Off, "after the upgrade").await;
    }
}
