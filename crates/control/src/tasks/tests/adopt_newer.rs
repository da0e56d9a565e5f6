//! A VM that the inventory has as it was at a backup gets the disks, network cards and snapshots that its authentic descriptor says.

use vmseal_api::adopt::{AdoptStatus, AdoptVms, AdoptedVm};
use vmseal_api::drain::OnDrain;
use vmseal_api::host::version::COMPARE_RESTORED;
use vmseal_api::host::{Device, HostAgent, NicSpec, VmSpec};
use vmseal_api::id::NicId;
use vmseal_api::nic::{NicBackend, NicLink};
use vmseal_api::request::SetVm;
use vmseal_api::size::Size;
use vmseal_secret::sealed_box::Recipient;

use super::adopt::{asked, begin, describe_snapshot};
use super::*;
use crate::hosts::restored;
use crate::operation::Copies;
use crate::retention;
use crate::services::{Caller, set_vm};
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::{disks, keys, nics, snapshots, vms};

/// The address of the card that the VM had at the backup.
const OLD_CARD: &str = "02:00:00:00:00:01";

/// The address of the card that it has got since.
const NEW_CARD: &str = "02:00:00:00:00:02";

fn card(mac: &str) -> NicSpec {
    NicSpec {
        nic: NicId::new(),
        name: "nic0".to_owned(),
        mac: mac.parse().unwrap(),
        model: Default::default(),
        backend: NicBackend::User { forwards: vec![] },
        link: Default::default(),
    }
}

async fn tell(fixture: &Fixture, kind: &str, target: &str) {
    let mut write = fixture.store.write().await.unwrap();
    write.event(NewEvent { kind, actor: "me", target, detail: "" }).await.unwrap();
    write.commit().await.unwrap();
}

/// The inventory is as it was at a backup: it had no snapshot.
async fn forget_snapshots(fixture: &Fixture, vm: VmId) {
    let mut write = fixture.store.write().await.unwrap();
    for taken in snapshots::of_vm(&mut write, vm).await.unwrap() {
        snapshots::delete(&mut write, &taken).await.unwrap();
    }
    write.commit().await.unwrap();
}

/// The inventory is as it was at a backup: the first disk was shorter, the second one was not there, and there was another card.
async fn go_back(fixture: &Fixture, vm: VmId) {
    let known = fixture.disks(vm).await;
    let mut write = fixture.store.write().await.unwrap();
    disks::delete(&mut write, known[1].id).await.unwrap();
    disks::set_size(&mut write, known[0].id, known[0].size / 2).await.unwrap();
    for nic in nics::of_vm(&mut write, vm).await.unwrap() {
        nics::delete(&mut write, nic.nic).await.unwrap();
    }
    nics::insert(&mut write, vm, 0, &card(OLD_CARD)).await.unwrap();
    write.commit().await.unwrap();
}

/// A VM that has got a disk, more of another one, and a card in place of another, before its inventory goes back.
async fn made(fixture: &Fixture, name: &str) -> VmId {
    let vm = fixture.made(name, "encrypted").await;
    fixture.done(Operation::AddNic { vm, nic: card(NEW_CARD), position: 0 }, name).await;
    vm
}

/// A VM of a restored inventory, which is newer on the datastore.
pub async fn older(fixture: &Fixture, name: &str) -> VmId {
    let vm = made(fixture, name).await;
    describe_snapshot(fixture, vm).await;
    forget_snapshots(fixture, vm).await;
    go_back(fixture, vm).await;
    tell(fixture, "server.restored", "server").await;
    vm
}

async fn cards(fixture: &Fixture, vm: VmId) -> Vec<String> {
    let nics = nics::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap();
    nics.iter().map(|nic| nic.mac.to_string()).collect()
}

async fn spec(fixture: &Fixture, vm: VmId) -> VmSpec {
    crate::hosts::definition(&fixture.store, vm).await.unwrap().unwrap().1
}

async fn told(fixture: &Fixture) -> AdoptedVm {
    asked(fixture, AdoptVms::default(), true).await.remove(0)
}

/// It has what its descriptor says, and its host knows it so.
pub async fn assert_newer(fixture: &Fixture, vm: VmId, what: &str) {
    fixture.assert_whole(vm, Power::Off, what).await;
    let sizes: Vec<u64> = fixture.disks(vm).await.iter().map(|disk| disk.size).collect();
    assert_eq!(sizes, [1 << 20, 1 << 20], "{what}");
    assert_eq!(cards(fixture, vm).await, [NEW_CARD], "{what}");
    let registered = fixture.agent.registered_as(vm).unwrap();
    let known = spec(fixture, vm).await;
    assert_eq!((registered.devices, registered.snapshots), (known.devices, known.snapshots));
    assert_eq!(fixture.events("vm.devices-adopted").await.len(), 1, "{what}");
}

/// Whether its descriptors may know more of it than the inventory.
async fn is_uncertain(fixture: &Fixture, vm: VmId) -> bool {
    let row = fixture.vm(vm).await.unwrap();
    let mut read = fixture.store.read().await.unwrap();
    restored::require_certain(&mut read, &row).await.is_err()
}

/// It is as it was at the backup, its host is not told of it so, and it can be adopted again.
pub async fn assert_older(fixture: &Fixture, vm: VmId, what: &str) {
    let sizes: Vec<u64> = fixture.disks(vm).await.iter().map(|disk| disk.size).collect();
    assert_eq!(sizes, [1 << 19], "{what}");
    assert_eq!(cards(fixture, vm).await, [OLD_CARD], "{what}");
    assert_eq!(fixture.agent.disks().len(), 2, "{what}: a disk is gone");
    let key = fixture.vm(vm).await.unwrap().key.unwrap();
    let mut read = fixture.store.read().await.unwrap();
    assert_eq!(keys::of_vm(&mut read, vm).await.unwrap(), [key], "{what}: its key was forgotten");
    assert!(snapshots::of_vm(&mut read, vm).await.unwrap().is_empty(), "{what}");
    drop(read);
    assert!(is_uncertain(fixture, vm).await, "{what}: its descriptor may be written over");
    let told = told(fixture).await;
    assert_eq!(told.status, AdoptStatus::Possible, "{what}: {told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn taking_what_is_newer_survives_every_fault_at_every_step() {
    matrix(Kind::AdoptNewer).await;
}

#[tokio::test]
async fn a_vm_gets_the_disks_and_cards_of_its_descriptor_and_starts_with_them() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let (before, all) = (spec(&fixture, vm).await, fixture.disks(vm).await);
    go_back(&fixture, vm).await;
    tell(&fixture, "server.restored", "server").await;
    let tried = told(&fixture).await;
    assert_eq!((tried.status, tried.task), (AdoptStatus::Possible, None), "{tried:?}");
    let lines = [
        "'disk0' has grown from 512 KiB to 1 MiB",
        "'disk1' of 1 MiB was added",
        NEW_CARD,
        OLD_CARD,
    ];
    assert_eq!(tried.newer.len(), lines.len(), "{tried:?}");
    for (said, line) in tried.newer.iter().zip(lines) {
        assert!(said.contains(line), "{line}: {said}");
    }
    assert_older(&fixture, vm, "a dry run").await;
    // A disk that its key does not open is not taken, and nothing else is.
    let check = before.key.as_ref().unwrap().check.clone();
    fixture.agent.exchange_image(all[1].id);
    let ended = fixture.ended(begin(&fixture).await).await;
    assert_eq!(ended.problem.unwrap().code, ErrorCode::KeyMismatch);
    assert_older(&fixture, vm, "another key").await;
    fixture.agent.exchange_image_for(all[1].id, &check);
    fixture.ends_well(begin(&fixture).await).await;
    assert_newer(&fixture, vm, "adopted").await;
    assert_eq!(spec(&fixture, vm).await, before);
    assert_eq!(format!("{:?}", fixture.disks(vm).await), format!("{all:?}"));
    let again = told(&fixture).await;
    assert_eq!((again.status, again.newer.len()), (AdoptStatus::Known, 0), "{again:?}");
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    assert_eq!(fixture.agent.runs_with(vm).unwrap().disks().count(), 2);
}

/// Its agent has restarted before anybody has looked: the descriptor would be written over.
#[tokio::test]
async fn a_vm_gets_the_snapshots_that_were_taken_since_or_the_operator_gives_them_up() {
    for discard in [false, true] {
        let fixture = Fixture::new().await;
        let vm = made(&fixture, "web").await;
        describe_snapshot(&fixture, vm).await;
        let rows = async || {
            let mut read = fixture.store.read().await.unwrap();
            snapshots::of_vm(&mut read, vm).await.unwrap()
        };
        let before = rows().await;
        forget_snapshots(&fixture, vm).await;
        tell(&fixture, "server.restored", "server").await;
        fixture.agent.restart();
        fixture.eventually("it is an alarm", async || is_alarm(&fixture).await.then_some(())).await;
        fixture.connected().await;
        assert!(!fixture.agent.registered().contains(&vm));
        let tried = told(&fixture).await;
        assert_eq!((tried.status, tried.newer.len()), (AdoptStatus::Possible, 1), "{tried:?}");
        assert!(tried.newer[0].contains("its snapshot 'kept'"), "{tried:?}");
        if discard {
            let vms = vec!["web".to_owned()];
            let keep = AdoptVms { vms, discard_newer: true, ..AdoptVms::default() };
            asked(&fixture, keep, false).await;
            let said = fixture.events(restored::KEPT).await.remove(0).detail;
            assert!(said.contains("snapshot 'kept'"), "{said}");
            assert!(rows().await.is_empty());
        } else {
            fixture.ends_well(begin(&fixture).await).await;
            assert_eq!(rows().await, before);
            assert_eq!(fixture.events(restored::DIFFERED).await.len(), 1);
        }
        let known = spec(&fixture, vm).await.snapshots;
        assert_eq!(fixture.agent.registered_as(vm).unwrap().snapshots, known);
        // Its host writes the descriptor once it has the key.
        let equal = async || {
            let again = told(&fixture).await;
            (again.status == AdoptStatus::Known && again.differs.is_empty()).then_some(())
        };
        fixture.eventually("the descriptor says what the inventory does", equal).await;
    }
}

/// It differs, and nothing of it can be adopted: the VM is registered, and the descriptor written anew.
#[tokio::test]
async fn what_differs_is_in_an_event_before_it_is_written_over() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let known = fixture.vm(vm).await.unwrap();
    let (memory, vcpus) = (2 * known.memory, known.vcpus + 1);
    let mut write = fixture.store.write().await.unwrap();
    vms::set(&mut write, &vms::Vm { memory, vcpus, ..known }).await.unwrap();
    write.commit().await.unwrap();
    // Nobody compares it meanwhile.
    fixture.agent.set_reachable(false);
    tell(&fixture, "server.restored", "server").await;
    fixture.agent.restart();
    fixture.agent.set_reachable(true);
    fixture.assert_whole(vm, Power::Off, "compared").await;
    fixture.connected().await;
    let mut told = fixture.events(restored::COMPARED).await;
    assert_eq!(told.len(), 1, "{told:?}");
    let said = told.remove(0).detail;
    assert!(said.contains("memory: ") && said.contains("processors: "), "{said}");
    assert!(!said.contains("nothing"), "{said}");
    assert_eq!(fixture.agent.registered_as(vm).unwrap().memory, memory);
}

/// Its name is another one in its descriptor.
#[tokio::test]
async fn a_vm_is_meant_by_its_name_here_and_by_that_in_its_descriptor() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let known = fixture.vm(vm).await.unwrap();
    let mut write = fixture.store.write().await.unwrap();
    let renamed = vms::Vm { name: "shop".to_owned(), ..known };
    vms::set(&mut write, &renamed).await.unwrap();
    write.commit().await.unwrap();
    let by = |name: String| AdoptVms { vms: vec![name], ..AdoptVms::default() };
    for name in ["web".to_owned(), "shop".to_owned(), vm.to_string()] {
        let told = asked(&fixture, by(name.clone()), true).await;
        assert_eq!(told.iter().map(|it| it.vm).collect::<Vec<_>>(), [vm], "{name}");
    }
    // The inventory has another VM of this name.
    let other = fixture.made("web", "encrypted").await;
    let told = asked(&fixture, by("web".to_owned()), true).await;
    assert_eq!(told.iter().map(|it| it.vm).collect::<Vec<_>>(), [other]);
}

/// It is for people to say again: a descriptor says it, and nothing is taken.
#[tokio::test]
async fn what_the_descriptor_says_otherwise_is_shown_until_the_inventory_says_it_too() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    describe_snapshot(&fixture, vm).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = SetVm {
        description: Some("the shop".to_owned()),
        labels: [("tier".to_owned(), Some("gold".to_owned()))].into(),
        autostart: Some(true),
        on_drain: Some(OnDrain::Leave),
        ..SetVm::default()
    };
    set_vm::set(&services, &me, "web", request.clone(), false).await.unwrap();
    let same = told(&fixture).await;
    assert_eq!((same.status, same.differs.len()), (AdoptStatus::Known, 0), "{same:?}");
    // The inventory is as it was at a backup.
    let mut read = fixture.store.read().await.unwrap();
    let taken = snapshots::of_vm(&mut read, vm).await.unwrap().remove(0);
    drop(read);
    let known = fixture.vm(vm).await.unwrap();
    let (vcpus, memory) = (known.vcpus, known.memory);
    let mut write = fixture.store.write().await.unwrap();
    snapshots::delete(&mut write, &taken).await.unwrap();
    let older = vms::Vm {
        name: "shop".to_owned(),
        vcpus: vcpus + 1,
        memory: 2 * memory,
        description: String::new(),
        labels: Default::default(),
        autostart: false,
        on_drain: OnDrain::Stop,
        ..known
    };
    vms::set(&mut write, &older).await.unwrap();
    write.commit().await.unwrap();
    let told = told(&fixture).await;
    let snapshot =
        format!("snapshot 'kept' of {}: on the datastore, and not in the inventory", taken.created);
    let (here, there) = (Size(2 * memory), Size(memory));
    let lines = [
        "name: 'web' on the datastore, 'shop' in the inventory".to_owned(),
        format!("processors: {vcpus} on the datastore, {} in the inventory", vcpus + 1),
        format!("memory: {there} on the datastore, {here} in the inventory"),
        "description: \"the shop\" on the datastore, none in the inventory".to_owned(),
        "labels: tier=gold on the datastore, none in the inventory".to_owned(),
        "autostart: on on the datastore, off in the inventory".to_owned(),
        "on-drain: leave on the datastore, stop in the inventory".to_owned(),
        snapshot,
    ];
    assert_eq!(told.differs, lines);
    assert_eq!((told.status, told.newer.len()), (AdoptStatus::Known, 0), "{told:?}");
    assert_eq!(fixture.vm(vm).await.unwrap().memory, 2 * memory, "it was taken");
    // As the page of the drill says.
    let name = Some("web".to_owned());
    let request = SetVm { name, vcpus: Some(vcpus), memory: Some(memory), ..request };
    set_vm::set(&services, &me, "shop", request, false).await.unwrap();
    let told = asked(&fixture, AdoptVms::default(), true).await.remove(0);
    assert!(told.differs.is_empty(), "{told:?}");
}

/// It gets both, where its descriptor names the new key.
#[tokio::test]
async fn a_vm_that_was_recrypted_as_well_gets_its_key_and_its_devices() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    fixture.done(fixture.recryption(vm).await, "web").await;
    let before = spec(&fixture, vm).await;
    go_back(&fixture, vm).await;
    let mut write = fixture.store.write().await.unwrap();
    crate::store::vms::set_key(&mut write, vm, &old).await.unwrap();
    write.commit().await.unwrap();
    tell(&fixture, "server.restored", "server").await;
    fixture.ends_well(begin(&fixture).await).await;
    assert_newer(&fixture, vm, "adopted").await;
    assert_eq!(spec(&fixture, vm).await, before);
    assert_eq!(fixture.events("vm.key-adopted").await.len(), 1);
}

/// What it does not get may be adopted later, so its host is not told of it, which would write over its descriptor.
#[tokio::test]
async fn a_vm_gets_no_key_alone_while_its_descriptor_has_a_snapshot_that_it_cannot_get() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let old = fixture.vm(vm).await.unwrap().key.unwrap();
    fixture.done(fixture.recryption(vm).await, "web").await;
    describe_snapshot(&fixture, vm).await;
    forget_snapshots(&fixture, vm).await;
    super::snapshots::noted(&fixture, vm, "kept", false).await;
    let mut write = fixture.store.write().await.unwrap();
    vms::set_key(&mut write, vm, &old).await.unwrap();
    write.commit().await.unwrap();
    tell(&fixture, "server.restored", "server").await;
    let ended = fixture.ended(begin(&fixture).await).await;
    assert_eq!(ended.state, TaskState::Failed, "{:?}", ended.problem);
    assert_eq!(ended.problem.unwrap().code, ErrorCode::WrongState);
    assert_eq!(fixture.vm(vm).await.unwrap().key, Some(old));
    assert!(is_uncertain(&fixture, vm).await);
    let again = told(&fixture).await;
    let is_there = again.newer.iter().any(|it| it.contains("another one of that name taken"));
    assert!(is_there, "its descriptor was written over: {again:?}");
}

/// Its host has not written that to the descriptor: the layers are merged, and the snapshot is no more.
#[tokio::test]
async fn a_snapshot_that_was_deleted_after_the_vm_was_compared_does_not_come_back() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    describe_snapshot(&fixture, vm).await;
    tell(&fixture, "server.restored", "server").await;
    tell(&fixture, restored::COMPARED, "web").await;
    forget_snapshots(&fixture, vm).await;
    let told = told(&fixture).await;
    assert_eq!((told.status, told.newer.len()), (AdoptStatus::Known, 0), "{told:?}");
    assert!(told.differs[0].contains("snapshot 'kept'"), "{told:?}");
}

/// Nothing is taken, whatever is asked for, and why is said.
#[tokio::test]
async fn what_nobody_vouches_for_is_told_and_not_taken() {
    for (case, said) in [
        ("another's", "not authenticated"),
        ("vm.changed", "changed here since the server was restored"),
        ("vm.created", "created here since the server was restored"),
        ("vm.adopted", "adopted here since the server was restored"),
        ("vm.arrived", "came here from another control plane since the server was restored"),
        ("vm.encrypted", "encrypted here since the server was restored"),
        ("backup.restored", "from a backup of its own since the server was restored"),
        ("running", "Stop it"),
        ("another's address", "has the address"),
    ] {
        let fixture = Fixture::new().await;
        let vm = made(&fixture, "web").await;
        if case == "running" {
            fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
        }
        go_back(&fixture, vm).await;
        tell(&fixture, "server.restored", "server").await;
        match case {
            "another's" => fixture.agent.change_descriptors(vm, |it| it.mac = None),
            event if event.contains('.') => tell(&fixture, event, "web").await,
            "running" => {}
            _ => {
                let other = fixture.made("other", "encrypted").await;
                let mut write = fixture.store.write().await.unwrap();
                nics::insert(&mut write, other, 0, &card(NEW_CARD)).await.unwrap();
                write.commit().await.unwrap();
            }
        }
        let request =
            AdoptVms { vms: vec![vm.to_string()], unauthenticated: true, ..AdoptVms::default() };
        let told = asked(&fixture, request, false).await.remove(0);
        assert_eq!((told.status, told.task), (AdoptStatus::Known, None), "{case}: {told:?}");
        assert!(told.newer.iter().any(|it| it.contains(said)), "{case}: {told:?}");
        assert!(
            told.newer.iter().any(|it| it.contains("not in the inventory")),
            "{case}: {told:?}"
        );
        assert_eq!(fixture.disks(vm).await.len(), 1, "{case}");
        assert_eq!(cards(&fixture, vm).await, [OLD_CARD], "{case}");
    }
}

/// Somebody who can write to the datastore has put an old descriptor back.
#[tokio::test]
async fn a_descriptor_that_lacks_a_disk_which_is_there_is_not_taken() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let all = fixture.agent.registered_as(vm).unwrap();
    let kept = |it: &&Device| matches!(it, Device::Disk(disk) if disk.name == "disk0");
    let devices = all.devices.iter().filter(kept).cloned().collect();
    fixture.agent.register_vm(VmSpec { devices, ..all }).await.unwrap();
    tell(&fixture, "server.restored", "server").await;
    let told = told(&fixture).await;
    assert_eq!(told.status, AdoptStatus::Known, "{told:?}");
    assert!(told.newer.iter().any(|it| it.contains("older than the inventory")), "{told:?}");
    assert_eq!(cards(&fixture, vm).await, [NEW_CARD]);
}

/// Its row stays, and what is said of it works.
#[tokio::test]
async fn a_disk_that_was_removed_since_is_told_and_removed_by_name() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let gone: Disk = fixture.disks(vm).await.remove(1);
    fixture.done(Operation::RemoveDisk { vm, disk: gone.id }, "web").await;
    let mut write = fixture.store.write().await.unwrap();
    disks::insert(&mut write, vm, 1, &gone).await.unwrap();
    disks::pin_facts(&mut write, gone.id, gone.facts.as_ref().unwrap()).await.unwrap();
    for nic in nics::of_vm(&mut write, vm).await.unwrap() {
        nics::delete(&mut write, nic.nic).await.unwrap();
    }
    write.commit().await.unwrap();
    tell(&fixture, "server.restored", "server").await;
    let tried = told(&fixture).await;
    assert!(tried.newer.iter().any(|it| it.contains("vmseal disk remove web disk1")), "{tried:?}");
    fixture.ends_well(begin(&fixture).await).await;
    assert_eq!(cards(&fixture, vm).await, [NEW_CARD]);
    assert_eq!(fixture.disks(vm).await.len(), 2);
    fixture.done(Operation::RemoveDisk { vm, disk: gone.id }, "web").await;
    assert_eq!(cards(&fixture, vm).await, [NEW_CARD]);
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
}

/// Whether it is told that the VM is newer on its datastore.
async fn is_alarm(fixture: &Fixture) -> bool {
    fixture.alarms().await.iter().any(|alarm| alarm == "inventory-older web")
}

/// Its agent has restarted before anybody has adopted what is newer.
#[tokio::test]
async fn a_host_is_not_told_of_a_vm_that_is_newer_until_that_is_adopted() {
    let fixture = Fixture::new().await;
    let vm = older(&fixture, "web").await;
    fixture.agent.restart();
    fixture.eventually("it is an alarm", async || is_alarm(&fixture).await.then_some(())).await;
    fixture.connected().await;
    assert!(!fixture.agent.registered().contains(&vm));
    assert_older(&fixture, vm, "restarted").await;
    // Nor by any other way.
    let registered = crate::hosts::register(&fixture.store, &fixture.hosts, vm).await;
    assert_eq!(registered.unwrap_err().code, ErrorCode::WrongState);
    assert!(fixture.events("vm.compared").await.is_empty());
    fixture.ends_well(begin(&fixture).await).await;
    assert_newer(&fixture, vm, "adopted").await;
    fixture
        .eventually("its alarm is over", async || (!is_alarm(&fixture).await).then_some(()))
        .await;
    assert_eq!(fixture.events("vm.compared").await.len(), 1);
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
}

/// Whether a task could be begun; it is not.
async fn recorded(fixture: &Fixture, operation: Operation) -> Result<(), Problem> {
    let mut write = fixture.store.write().await.unwrap();
    Engine::record(&mut write, operation, "web", "me").await.map(drop)
}

#[tokio::test]
async fn a_vm_that_is_newer_is_changed_only_when_it_is_adopted_or_kept_as_it_is() {
    let fixture = Fixture::new().await;
    let vm = older(&fixture, "web").await;
    fixture.agent.restart();
    fixture.eventually("it is an alarm", async || is_alarm(&fixture).await.then_some(())).await;
    fixture.connected().await;
    let disk = fixture.disks(vm).await[0].id;
    let start = || Operation::StartVm { vm, boot_once: None };
    let copies = Some(Copies {
        vm,
        snapshot: None,
        temporary: None,
        disks: Default::default(),
        linked: Default::default(),
        elsewhere: None,
    });
    for operation in [
        start(),
        Operation::CreateVm { vm: VmId::new(), cloud_init: None, copies },
        Operation::AddNic { vm, nic: card("02:00:00:00:00:03"), position: 1 },
        Operation::RemoveDisk { vm, disk },
        Operation::GrowDisk { vm, disk, size: 1 << 30 },
    ] {
        let refused = recorded(&fixture, operation).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        let command = format!("vmseal datastore adopt here:local --vm {vm}");
        assert!(refused.detail.contains(&command), "{refused}");
    }
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = SetVm { vcpus: Some(2), ..SetVm::default() };
    let refused = set_vm::set(&services, &me, "web", request, false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
    assert_older(&fixture, vm, "refused").await;
    // The operator wants the old state.
    let keep = || {
        let vms = vec![vm.to_string()];
        AdoptVms { vms, discard_newer: true, ..AdoptVms::default() }
    };
    asked(&fixture, keep(), true).await;
    assert_older(&fixture, vm, "a dry run").await;
    let kept = asked(&fixture, keep(), false).await.remove(0);
    assert_eq!((kept.status, kept.task), (AdoptStatus::Known, None), "{kept:?}");
    let registered = fixture.agent.registered_as(vm).unwrap();
    assert_eq!(registered.devices, spec(&fixture, vm).await.devices);
    let told = told(&fixture).await;
    assert_eq!(told.status, AdoptStatus::Known, "{told:?}");
    assert_eq!(cards(&fixture, vm).await, [OLD_CARD]);
    recorded(&fixture, start()).await.unwrap();
    fixture
        .eventually("its alarm is over", async || (!is_alarm(&fixture).await).then_some(()))
        .await;
}

/// Its host was to be told of the link before, and that was refused.
#[tokio::test]
async fn a_guest_gets_the_link_of_the_inventory_at_once_when_its_vm_is_kept_as_it_is() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
    // Nobody compares it meanwhile.
    fixture.agent.set_reachable(false);
    let mut write = fixture.store.write().await.unwrap();
    let nic = nics::of_vm(&mut write, vm).await.unwrap().remove(0).nic;
    nics::set_link(&mut write, nic, NicLink::Down).await.unwrap();
    write.commit().await.unwrap();
    tell(&fixture, "server.restored", "server").await;
    fixture.agent.set_reachable(true);
    fixture.eventually("it is an alarm", async || is_alarm(&fixture).await.then_some(())).await;
    fixture.connected().await;
    let is_down =
        || fixture.agent.runs_with(vm).unwrap().nics().all(|nic| nic.link == NicLink::Down);
    assert!(!is_down(), "its host was told of it");
    let vms = vec![vm.to_string()];
    asked(&fixture, AdoptVms { vms, discard_newer: true, ..AdoptVms::default() }, false).await;
    fixture.eventually("the link is down", async || is_down().then_some(())).await;
}

/// The task may be the one that takes what is newer.
#[tokio::test]
async fn nothing_is_discarded_while_a_task_works_on_the_vm() {
    let fixture = Fixture::new().await;
    let vm = older(&fixture, "web").await;
    // It is recorded, and nobody carries it out.
    let stop = Operation::StopVm { vm, force: false, timeout_seconds: 10 };
    let mut write = fixture.store.write().await.unwrap();
    Engine::record(&mut write, stop, "web", "me").await.unwrap();
    write.commit().await.unwrap();
    let vms = vec![vm.to_string()];
    let request = AdoptVms { vms, discard_newer: true, ..AdoptVms::default() };
    let kept = asked(&fixture, request, false).await.remove(0);
    assert_eq!(kept.status, AdoptStatus::Refused, "{kept:?}");
    assert!(kept.detail.contains("vmseal task wait"), "{kept:?}");
    assert!(fixture.events(restored::KEPT).await.is_empty());
}

/// A guest that was suspended with what is newer can go on with that alone.
#[tokio::test]
async fn a_suspended_vm_gets_what_is_newer_and_goes_on() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    let start = || Operation::StartVm { vm, boot_once: None };
    fixture.done(start(), "web").await;
    fixture.done(Operation::SuspendVm { vm }, "web").await;
    fixture.assert_whole(vm, Power::Suspended, "suspended").await;
    go_back(&fixture, vm).await;
    tell(&fixture, "server.restored", "server").await;
    recorded(&fixture, start()).await.unwrap_err();
    fixture.ends_well(begin(&fixture).await).await;
    fixture.assert_whole(vm, Power::Suspended, "adopted").await;
    assert_eq!(cards(&fixture, vm).await, [NEW_CARD]);
    fixture.done(start(), "web").await;
    fixture.assert_whole(vm, Power::Running, "resumed").await;
}

/// Each kind of event that ends it does so for its VM alone, and until the server is restored once more.
#[tokio::test]
async fn a_vm_is_uncertain_until_an_event_of_its_own_says_otherwise() {
    let fixture = Fixture::new().await;
    let (vm, other) = (made(&fixture, "web").await, fixture.made("other", "encrypted").await);
    let plain = fixture.made("plain", "plain").await;
    // Nobody compares them meanwhile.
    fixture.agent.set_reachable(false);
    assert!(!is_uncertain(&fixture, vm).await, "the server was never restored");
    let kinds = restored::KNOWN_SINCE.map(|(kind, _)| kind);
    for kind in kinds.into_iter().chain([restored::COMPARED]) {
        tell(&fixture, "server.restored", "server").await;
        assert!(is_uncertain(&fixture, vm).await, "{kind}");
        tell(&fixture, kind, "web").await;
        assert!(!is_uncertain(&fixture, vm).await, "{kind}");
        assert!(is_uncertain(&fixture, other).await, "{kind} of another VM");
        assert!(!is_uncertain(&fixture, plain).await, "{kind}: it is not encrypted");
    }
    tell(&fixture, restored::UNDONE, "web").await;
    assert!(is_uncertain(&fixture, vm).await, "its adoption was undone");
    tell(&fixture, restored::COMPARED, "web").await;
    assert!(!is_uncertain(&fixture, vm).await, "it was adopted again");
}

/// Without them, a host would be told of a VM that is newer there.
#[tokio::test]
async fn the_events_that_say_which_vms_are_uncertain_are_not_deleted_before_none_is() {
    let fixture = Fixture::new().await;
    let (vm, other) = (made(&fixture, "web").await, fixture.made("other", "encrypted").await);
    fixture.agent.set_reachable(false);
    tell(&fixture, "server.restored", "server").await;
    tell(&fixture, restored::COMPARED, "other").await;
    tell(&fixture, "vm.started", "other").await;
    let deleted = async || retention::delete_once(&fixture.store, 0, 0).await.unwrap();
    assert!(deleted().await > 0);
    assert!(fixture.events("vm.started").await.is_empty(), "nothing is deleted");
    assert!(is_uncertain(&fixture, vm).await);
    assert!(!is_uncertain(&fixture, other).await);
    tell(&fixture, restored::COMPARED, "web").await;
    deleted().await;
    assert!(fixture.events("server.restored").await.is_empty(), "they stay for ever");
    assert!(!is_uncertain(&fixture, vm).await);
}

#[tokio::test]
async fn a_vm_of_which_nothing_is_newer_is_as_before() {
    let fixture = Fixture::new().await;
    let vm = made(&fixture, "web").await;
    // Nobody compares it meanwhile.
    fixture.agent.set_reachable(false);
    tell(&fixture, "server.restored", "server").await;
    recorded(&fixture, Operation::StartVm { vm, boot_once: None }).await.unwrap_err();
    fixture.agent.restart();
    fixture.agent.set_reachable(true);
    fixture.assert_whole(vm, Power::Off, "compared").await;
    fixture.connected().await;
    assert_eq!(fixture.events("vm.compared").await.len(), 1);
    fixture.done(Operation::StartVm { vm, boot_once: None }, "web").await;
}

/// It cannot say what is newer: its VMs are registered as before.
#[tokio::test]
async fn an_agent_of_an_earlier_version_gets_its_vms_as_before() {
    let fixture = Fixture::new().await;
    let vm = older(&fixture, "web").await;
    fixture.agent.lack_features(&[COMPARE_RESTORED]);
    fixture.agent.restart();
    let registered = async || fixture.agent.registered().contains(&vm).then_some(());
    fixture.eventually("it is registered", registered).await;
    assert_eq!(fixture.events("vm.compared").await.len(), 1);
}
