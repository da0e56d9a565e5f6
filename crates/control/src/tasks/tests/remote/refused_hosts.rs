//! Hosts of the other control plane that lack what a VM needs: each is refused by its name, with what it lacks, and nothing is changed.

use vmseal_agent::simulated::SimulatedHost;
use vmseal_api::host::{Accelerator, AcceleratorKind};
use vmseal_api::id::HostId;
use vmseal_api::processor::Processor;
use vmseal_api::request::CreateVm;

use super::*;

/// The VM that is to go there.
const VM: &str = "connected";

/// What its network card is connected to.
const BRIDGE: &str = "br0";

/// What guests run by on its host, and on all of the others but one.
const QEMU: &str = "9.2.0";

/// What the processor of its host can, and those of all of the others but one.
const FEATURES: &[&str] = &["aes", "avx512f"];

/// What is looked at of a host there that lacks it, and what people are told of it.
type Lacks = (&'static str, &'static str, &'static str);

/// The hosts there, of which each lacks one thing.
const LACKING: [Lacks; 5] = [
    ("here", "network", "network card 'nic0': there is no 'br0'"),
    ("emulating", "accelerator", "its guests run by Tcg, and those of the VM's host by Kvm"),
    (
        "weaker",
        "accelerator",
        "its processor lacks what the guest may use: avx512f. Give the VM a processor model by name",
    ),
    ("older", "versions", "its QEMU 8.2.2 is older than QEMU 9.2.0 of the VM's host"),
    ("small", "memory", "16 MiB free, 32 MiB needed"),
];

fn accelerator(kind: AcceleratorKind, features: &[&str]) -> Accelerator {
    let features = features.iter().map(|&name| name.to_owned()).collect();
    let processor = Some(Processor { vendor: "GenuineIntel".to_owned(), features });
    Accelerator { kind, reason: "for this test".to_owned(), processor }
}

/// Gives an agent what the VM's host has, except what it lacks by its name.
async fn equip(fixture: &Fixture, name: &str, host: HostId, agent: &SimulatedHost) {
    agent.set_qemu(QEMU);
    agent.set_accelerator(accelerator(AcceleratorKind::Kvm, FEATURES));
    match name {
        "here" => agent.lack_network(BRIDGE),
        "emulating" => agent.set_accelerator(accelerator(AcceleratorKind::Tcg, FEATURES)),
        "weaker" => agent.set_accelerator(accelerator(AcceleratorKind::Kvm, &["aes"])),
        "older" => agent.set_qemu("8.2.2"),
        "small" => agent.set_memory(16 << 20),
        _ => {}
    }
    fixture.restart_agent(host, agent).await;
}

/// Adds a host to the second control plane.
async fn add(two: &Two, name: &str) {
    let (host, agent) = two.east.add_host(name).await;
    two.east.share_datastore(host, name).await;
    equip(&two.east, name, host, &agent).await;
}

/// Two control planes, the first of which runs a VM with a network card, and the second of which has these hosts.
async fn bench() -> (Two, VmId) {
    let two = Two::new().await;
    equip(&two.west, "", two.west.host, &two.west.agent).await;
    let nics = vec![Fixture::card(BRIDGE)];
    let request = CreateVm { nics, ..Fixture::request(VM, "encrypted") };
    let vm = two.west.requested(&two.services(), request).await;
    two.west.done(Operation::StartVm { vm, boot_once: None }, VM).await;
    for (name, ..) in LACKING {
        match name {
            "here" => equip(&two.east, name, two.east.host, &two.east.agent).await,
            other => add(&two, other).await,
        }
    }
    (two, vm)
}

/// What a dry run, or the command, says: the steps, or why it is refused.
async fn asked(two: &Two, host: Option<&str>, dry_run: bool) -> Result<String, Problem> {
    let (remote, host) = (Some("east".to_owned()), host.map(str::to_owned));
    let request = MigrateVm { remote, host, ..MigrateVm::default() };
    let me = Caller::administrator("me");
    match migrate::migrate(&two.services(), &me, VM, request, dry_run).await? {
        Outcome::Planned(plan) => Ok(plan.steps.join("\n")),
        Outcome::Done(task) => panic!("it was begun: {task:?}"),
    }
}

/// Why the VM cannot go to a host, or to any where none is named: a dry run and the command say the same.
async fn refusal(two: &Two, host: Option<&str>) -> String {
    let refused = asked(two, host, false).await.unwrap_err();
    let tried = asked(two, host, true).await.unwrap_err();
    assert_eq!((&tried.detail, tried.code), (&refused.detail, refused.code));
    assert_eq!((refused.code, refused.field.as_deref()), (ErrorCode::WrongState, Some("remote")));
    let place = format!("VM '{VM}' cannot go to remote 'east'. ");
    refused.detail.strip_prefix(&place).unwrap().to_owned()
}

/// Asserts that of each of these hosts it is said what it lacks, and that nothing else is wrong.
fn assert_said(told: &str, lacking: &[Lacks]) {
    for (host, what, why) in lacking {
        let said = format!("no: {what} of host '{host}': {why}");
        assert!(told.contains(&said), "{said}: {told}");
    }
    let wrong = told.split("; ").filter(|it| it.starts_with("no: ")).count();
    assert_eq!(wrong, lacking.len(), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_there_that_lacks_what_a_guest_needs_is_refused_and_nothing_is_changed() {
    let (two, vm) = bench().await;
    let begun = two.west.events("task.begun").await.len();
    for lacks in LACKING {
        assert_said(&refusal(&two, Some(lacks.0)).await, &[lacks]);
    }
    // Where the other control plane chooses, it says it of all.
    assert_said(&refusal(&two, None).await, &LACKING);
    assert_eq!(two.west.events("task.begun").await.len(), begun, "something was begun");
    assert_eq!(two.west.plane.calls("begin"), 0, "the other control plane has begun something");
    assert_eq!(two.east.events("task.begun").await.len(), 0);
    two.west.assert_whole(vm, Power::Running, "refused").await;
    assert!(two.west.agent.runs(vm), "it does not run any more");
    assert!(two.east.vm(vm).await.is_none(), "the other inventory has it");

    add(&two, "fit").await;
    let told = asked(&two, None, true).await.unwrap();
    assert!(told.contains("choose host 'fit' of remote 'east'"), "{told}");
    assert!(!told.contains("no: "), "{told}");
}
