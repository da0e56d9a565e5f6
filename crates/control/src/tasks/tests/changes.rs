//! VMs that are changed: rebooted, started because their host has rebooted, given disks and network cards.

use vmseal_api::drain::OnDrain;
use vmseal_api::hardware::{TPM_DISK, TPM_DISK_SIZE};
use vmseal_api::host::{DiskRole, Exposing, HEADER_AREA, NicSpec};
use vmseal_api::id::NicId;
use vmseal_api::nic::{MacAddress, NicBackend, NicLink, PortForward};
use vmseal_api::request::{AddDisk, CreateNic, CreateVm, ResizeDisk, SetNic, SetVm, StopVm};
use vmseal_secret::sealed_box::Recipient;

use super::*;
use crate::services::{self, Caller, Outcome, create_vm, set_nic, set_vm, vm_devices};
use crate::store::{disks, nics, vms};

/// What is changed; of VMs that run, but for a start.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Change {
    Reboot,
    Autostart,
    AddDisk,
    RemoveDisk,
    GrowDisk,
    AddTpm,
    RemoveTpm,
    AddNic,
    RemoveNic,
}

/// The size of the disks of these tests, and what one grows to.
const SIZE: u64 = 1 << 20;
const GROWN: u64 = 4 << 20;

fn card() -> NicSpec {
    NicSpec {
        nic: NicId::new(),
        name: "nic0".to_owned(),
        mac: "02:00:00:00:00:01".parse().unwrap(),
        model: Default::default(),
        backend: NicBackend::User { forwards: vec![] },
        link: Default::default(),
    }
}

/// A disk that is asked for: its row is there.
async fn reserve(fixture: &Fixture, vm: VmId) -> DiskId {
    let mut write = fixture.store.write().await.unwrap();
    let disk = fixture.disks(vm).await.remove(0);
    let name = "more".to_owned();
    let disk = disks::Disk { id: DiskId::new(), name, facts: None, detached: true, ..disk };
    let position = disks::next_position(&mut write, vm).await.unwrap();
    disks::insert(&mut write, vm, position, &disk).await.unwrap();
    write.commit().await.unwrap();
    disk.id
}

/// The disk of a TPM that is asked for.
pub(super) async fn reserve_tpm(fixture: &Fixture, vm: VmId) -> DiskId {
    let mut write = fixture.store.write().await.unwrap();
    let disk = fixture.disks(vm).await.remove(0);
    let disk = disks::Disk {
        id: DiskId::new(),
        name: TPM_DISK.to_owned(),
        size: TPM_DISK_SIZE,
        role: DiskRole::Tpm,
        facts: None,
        detached: true,
        ..disk
    };
    let position = disks::next_position(&mut write, vm).await.unwrap();
    disks::insert(&mut write, vm, position, &disk).await.unwrap();
    write.commit().await.unwrap();
    disk.id
}

impl Change {
    pub(super) async fn before(self, fixture: &Fixture) -> VmId {
        let vm = match self {
            Self::Autostart => return fixture.made("web", "encrypted").await,
            Self::RemoveDisk | Self::AddTpm | Self::RemoveTpm => {
                fixture.made("web", "encrypted").await
            }
            _ => fixture.running("web").await,
        };
        if self == Self::RemoveNic {
            let task = self_made(fixture, vm, Operation::AddNic { vm, nic: card(), position: 0 });
            task.await;
        }
        if self == Self::RemoveTpm {
            let disk = reserve_tpm(fixture, vm).await;
            self_made(fixture, vm, Operation::AddTpm { vm, disk }).await;
        }
        vm
    }

    pub(super) async fn operation(self, fixture: &Fixture, vm: VmId) -> Operation {
        match self {
            Self::Reboot => Operation::RebootVm { vm, timeout_seconds: 10 },
            Self::Autostart => Operation::AutostartVm { vm },
            Self::AddDisk => Operation::AddDisk { vm, disk: reserve(fixture, vm).await },
            Self::RemoveDisk => Operation::RemoveDisk { vm, disk: fixture.disks(vm).await[1].id },
            Self::GrowDisk => {
                Operation::GrowDisk { vm, disk: fixture.disks(vm).await[1].id, size: GROWN }
            }
            Self::AddTpm => Operation::AddTpm { vm, disk: reserve_tpm(fixture, vm).await },
            Self::RemoveTpm => Operation::RemoveTpm { vm, disk: fixture.disks(vm).await[2].id },
            Self::AddNic => Operation::AddNic { vm, nic: card(), position: 0 },
            Self::RemoveNic => {
                let nic = cards(fixture, vm).await.remove(0);
                Operation::RemoveNic { vm, nic, position: 0 }
            }
        }
    }

    fn any(self) -> Operation {
        let (vm, disk) = (VmId::new(), DiskId::new());
        match self {
            Self::Reboot => Operation::RebootVm { vm, timeout_seconds: 10 },
            Self::Autostart => Operation::AutostartVm { vm },
            Self::AddDisk => Operation::AddDisk { vm, disk },
            Self::RemoveDisk => Operation::RemoveDisk { vm, disk },
            Self::GrowDisk => Operation::GrowDisk { vm, disk, size: GROWN },
            Self::AddTpm => Operation::AddTpm { vm, disk },
            Self::RemoveTpm => Operation::RemoveTpm { vm, disk },
            Self::AddNic => Operation::AddNic { vm, nic: card(), position: 0 },
            Self::RemoveNic => Operation::RemoveNic { vm, nic: card(), position: 0 },
        }
    }

    pub(super) fn steps(self) -> &'static [&'static dyn Step] {
        steps::of(&self.any())
    }

    pub(super) fn is_past_commit(self, step: &str) -> bool {
        is_past_commit(self.steps(), step)
    }

    pub(super) async fn assert_done(self, fixture: &Fixture, vm: VmId, what: &str) {
        let power = match self {
            Self::RemoveDisk | Self::AddTpm | Self::RemoveTpm => Power::Off,
            _ => Power::Running,
        };
        let count = match self {
            Self::AddDisk | Self::AddTpm => 3,
            Self::RemoveDisk => 1,
            _ => 2,
        };
        fixture.assert_whole_with(vm, power, count, what).await;
        let disks = fixture.disks(vm).await;
        match self {
            Self::Reboot | Self::Autostart => {}
            Self::AddDisk => {
                assert!(disks.len() == 3 && !disks[2].detached, "{what}: {disks:?}");
                let in_use = fixture.agent.disks_in_use(vm);
                assert!(in_use.contains(&disks[2].id), "{what}: the guest does not have it");
            }
            Self::RemoveDisk => assert_eq!((disks.len(), fixture.agent.disks().len()), (1, 1)),
            Self::GrowDisk => {
                assert_eq!(disks[1].size, GROWN, "{what}");
                let runs_with = fixture.agent.runs_with(vm).unwrap();
                assert_eq!(runs_with.disk(disks[1].id).unwrap().size, GROWN, "{what}");
            }
            Self::AddTpm => self.assert_tpm(fixture, vm, true, what).await,
            Self::RemoveTpm => self.assert_tpm(fixture, vm, false, what).await,
            Self::AddNic => self.assert_cards(fixture, vm, 1, what).await,
            Self::RemoveNic => self.assert_cards(fixture, vm, 0, what).await,
        }
    }

    async fn assert_cards(self, fixture: &Fixture, vm: VmId, expected: usize, what: &str) {
        let has = fixture.agent.runs_with(vm).unwrap().nics().count();
        let mut read = fixture.store.read().await.unwrap();
        let all = nics::all_of_vm(&mut read, vm).await.unwrap().len();
        drop(read);
        let known = cards(fixture, vm).await.len();
        assert_eq!((known, all, has), (expected, expected, expected), "{what}");
    }

    /// The inventory and the host both have the TPM with its disk, or neither.
    async fn assert_tpm(self, fixture: &Fixture, vm: VmId, expected: bool, what: &str) {
        let disks = fixture.disks(vm).await;
        let of_tpm: Vec<_> = disks.iter().filter(|disk| disk.role == DiskRole::Tpm).collect();
        assert_eq!(of_tpm.len(), usize::from(expected), "{what}: {disks:?}");
        assert!(of_tpm.iter().all(|disk| !disk.detached && disk.facts.is_some()), "{what}");
        let known = vms::get(&mut fixture.store.read().await.unwrap(), vm).await.unwrap().unwrap();
        let registered = fixture.agent.registered_as(vm).unwrap();
        let has = (known.hardware.tpm, registered.hardware.tpm);
        assert_eq!(has, (expected, expected), "{what}");
        assert_eq!(fixture.agent.disks().len(), 2 + usize::from(expected), "{what}");
    }

    pub(super) async fn assert_undone(self, fixture: &Fixture, vm: VmId, what: &str) {
        let power = match self {
            // A guest that has shut down is not brought back; the server shows the real state.
            Self::Reboot if !fixture.agent.running().contains(&vm) => Power::Off,
            Self::Autostart | Self::RemoveDisk | Self::AddTpm | Self::RemoveTpm => Power::Off,
            _ => Power::Running,
        };
        if self == Self::RemoveTpm {
            fixture.assert_whole_with(vm, power, 3, what).await;
            return self.assert_tpm(fixture, vm, true, what).await;
        }
        fixture.assert_whole(vm, power, what).await;
        let disks = fixture.disks(vm).await;
        assert_eq!((disks.len(), fixture.agent.disks().len()), (2, 2), "{what}");
        assert!(disks.iter().all(|disk| disk.size == SIZE && !disk.detached), "{what}: {disks:?}");
        match self {
            Self::AddTpm => self.assert_tpm(fixture, vm, false, what).await,
            Self::AddNic => self.assert_cards(fixture, vm, 0, what).await,
            Self::RemoveNic => self.assert_cards(fixture, vm, 1, what).await,
            _ => {}
        }
    }

    /// The problem says what is left, and the same again once the cause is gone finishes it.
    pub(super) async fn assert_unfinished(
        self,
        fixture: &mut Fixture,
        vm: VmId,
        problem: &Problem,
        what: &str,
    ) {
        let told = match self {
            Self::RemoveDisk => "remove the disk again",
            Self::RemoveTpm => "remove the TPM again",
            Self::GrowDisk => "resize it again",
            _ => panic!("{what}: {problem}"),
        };
        assert!(problem.detail.contains(told), "{what}: {problem}");
        fixture.restart(|_| {}).await;
        let disks = fixture.disks(vm).await;
        let place = if self == Self::RemoveTpm { 2 } else { 1 };
        if let Some(disk) = disks.get(place) {
            let (disk, size) = (disk.id, GROWN);
            let again = match self {
                Self::RemoveTpm => Operation::RemoveTpm { vm, disk },
                Self::RemoveDisk => Operation::RemoveDisk { vm, disk },
                _ => Operation::GrowDisk { vm, disk, size },
            };
            self_made(fixture, vm, again).await;
        }
        self.assert_done(fixture, vm, what).await;
    }
}

async fn cards(fixture: &Fixture, vm: VmId) -> Vec<NicSpec> {
    nics::of_vm(&mut fixture.store.read().await.unwrap(), vm).await.unwrap()
}

async fn self_made(fixture: &Fixture, vm: VmId, operation: Operation) {
    let task = fixture.begin(operation, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Done, "{vm}: {:?}", ended.problem);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reboots_survive_every_fault_at_every_step() {
    matrix(Kind::Change(Change::Reboot)).await;
    matrix(Kind::Change(Change::Autostart)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_that_come_and_go_survive_every_fault_at_every_step() {
    matrix(Kind::Change(Change::AddDisk)).await;
    matrix(Kind::Change(Change::RemoveDisk)).await;
    matrix(Kind::Change(Change::GrowDisk)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tpms_that_come_and_go_survive_every_fault_at_every_step() {
    matrix(Kind::Change(Change::AddTpm)).await;
    matrix(Kind::Change(Change::RemoveTpm)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn network_cards_that_come_and_go_survive_every_fault_at_every_step() {
    matrix(Kind::Change(Change::AddNic)).await;
    matrix(Kind::Change(Change::RemoveNic)).await;
}

/// A guest that does not let a device go keeps it, and the inventory says so.
#[tokio::test]
async fn a_device_that_a_guest_keeps_is_not_removed() {
    let fixture = Fixture::new().await;
    let vm = Change::RemoveNic.before(&fixture).await;
    let operation = Change::AddDisk.operation(&fixture, vm).await;
    self_made(&fixture, vm, operation).await;
    fixture.agent.set_releases_devices(false);
    let disk = fixture.disks(vm).await[2].id;
    let nic = Change::RemoveNic.operation(&fixture, vm).await;
    for operation in [Operation::RemoveDisk { vm, disk }, nic] {
        let task = fixture.begin(operation, "web").await;
        let ended = fixture.ended(task).await;
        assert_eq!(ended.state, TaskState::Failed, "{:?}", ended.problem);
        assert!(ended.problem.unwrap().detail.contains("does not let"));
    }
    assert_eq!((fixture.disks(vm).await.len(), cards(&fixture, vm).await.len()), (3, 1));
    assert!(fixture.agent.disks_in_use(vm).contains(&disk));
    // A disk that it was started with stays in any case.
    fixture.agent.set_releases_devices(true);
    let first = fixture.disks(vm).await[0].id;
    let task = fixture.begin(Operation::RemoveDisk { vm, disk: first }, "web").await;
    let ended = fixture.ended(task).await;
    assert!(ended.problem.unwrap().detail.contains("Stop it first"));
    self_made(&fixture, vm, Operation::RemoveDisk { vm, disk }).await;
    assert_eq!(fixture.agent.disks().len(), 2);
}

/// A VM with a card of this address.
fn with_address_of(nic: &NicSpec) -> CreateVm {
    with_cards("other", vec![(nic.backend.clone(), Some(nic.mac))])
}

fn with_cards(name: &str, cards: Vec<(NicBackend, Option<MacAddress>)>) -> CreateVm {
    let cards = cards.into_iter().map(|(backend, mac)| CreateNic {
        name: None,
        mac,
        model: Default::default(),
        backend,
        link: Default::default(),
    });
    CreateVm { nics: cards.collect(), ..Fixture::request(name, "plain") }
}

/// Nobody else gets the address of a card that a guest may still have, and the card is shown.
#[tokio::test]
async fn a_card_has_its_address_until_its_guest_has_let_it_go() {
    let mut fixture = Fixture::new().await;
    let vm = Change::RemoveNic.before(&fixture).await;
    let removal = Change::RemoveNic.operation(&fixture, vm).await;
    let nic = cards(&fixture, vm).await.remove(0);
    let me = Caller::administrator("me");
    let mut task = None;
    for point in [FaultPoint::Before, FaultPoint::After] {
        let (faults, done) = at("plug-out", TaskState::Running, point, Fault::Crash, 1);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        if task.is_none() {
            task = Some(fixture.begin(removal.clone(), "web").await);
        }
        let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
        fixture.eventually("it crashes", crashed).await;
        let services = fixture.services(Recipient::generate().unwrap());
        let request = with_address_of(&nic);
        let refused = create_vm::create(&services, &me, request, false).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::AlreadyExists, "{point:?}: {refused}");
        let shown = services::vms::show(&services, &me, "web").await.unwrap();
        assert_eq!(shown.nics.len(), 1, "{point:?}");
        let down = SetNic { link: NicLink::Down };
        let refused = set_nic::set(&services, &me, "web", "nic0", down, false).await.unwrap_err();
        assert!(refused.detail.contains("is being taken"), "{point:?}: {refused}");
        assert!(cards(&fixture, vm).await.is_empty(), "{point:?}: its host is told of it");
    }
    fixture.restart(|_| {}).await;
    fixture.ends_well(task.unwrap()).await;
    Change::RemoveNic.assert_done(&fixture, vm, "its guest has let it go").await;
    let told = fixture.events("vm.changed").await;
    let removed = told.iter().filter(|it| it.detail == "network card 'nic0' is removed");
    assert_eq!(removed.count(), 1, "{told:?}");
    let services = fixture.services(Recipient::generate().unwrap());
    fixture.requested(&services, with_address_of(&nic)).await;
}

/// Its host would forget a disk that is being made. What only reads the VM is no reason to refuse.
#[tokio::test]
async fn a_link_is_set_beside_a_proof_and_not_while_a_disk_is_added() {
    let mut fixture = Fixture::new().await;
    let vm = Change::RemoveNic.before(&fixture).await;
    let me = Caller::administrator("me");
    for (step, refuses) in [("create-disk", true), ("prove", false)] {
        let (faults, done) = at(step, TaskState::Running, FaultPoint::After, Fault::Crash, 1);
        fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
        let operation = match refuses {
            true => Change::AddDisk.operation(&fixture, vm).await,
            false => Operation::ProveVm { vm, all: false, seed: 1 },
        };
        let task = fixture.begin(operation, "web").await;
        let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
        fixture.eventually("it crashes", crashed).await;
        let services = fixture.services(Recipient::generate().unwrap());
        for dry_run in [true, false] {
            let down = SetNic { link: NicLink::Down };
            let set = set_nic::set(&services, &me, "web", "nic0", down, dry_run).await;
            if refuses {
                let refused = set.unwrap_err();
                assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
                assert!(refused.detail.contains(&task.to_string()), "{refused}");
            } else {
                set.unwrap();
            }
        }
        let expected = if refuses { NicLink::Up } else { NicLink::Down };
        assert_eq!(cards(&fixture, vm).await[0].link, expected, "{step}");
        assert_eq!(links(&fixture, vm), [expected], "{step}");
        let registered = fixture.agent.registered_as(vm).unwrap();
        let disks = fixture.disks(vm).await;
        assert!(disks.iter().all(|disk| registered.disk(disk.id).is_some()), "{step}");
        fixture.restart(|_| {}).await;
        fixture.ends_well(task).await;
    }
}

/// How the guest of a VM has its cards plugged in.
fn links(fixture: &Fixture, vm: VmId) -> Vec<NicLink> {
    fixture.agent.runs_with(vm).unwrap().nics().map(|nic| nic.link).collect()
}

/// Its host is told again: it may not have done it.
#[tokio::test]
async fn a_link_that_is_set_as_it_is_already_is_no_change() {
    let fixture = Fixture::new().await;
    let vm = Change::RemoveNic.before(&fixture).await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let before = fixture.events("vm.changed").await.len();
    for _ in 0..2 {
        let down = SetNic { link: NicLink::Down };
        set_nic::set(&services, &me, "web", "nic0", down, false).await.unwrap();
        assert_eq!(links(&fixture, vm), [NicLink::Down]);
    }
    assert_eq!(fixture.events("vm.changed").await.len(), before + 1);
}

/// Whether its agent has restarted meanwhile or not: the guest runs on, with its cable as it was.
#[tokio::test]
async fn a_host_that_was_away_plugs_a_card_in_and_out_when_it_is_back() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let card = || (NicBackend::User { forwards: vec![] }, None);
    let begun = async |name: &'static str| {
        let vm = fixture.requested(&services, with_cards(name, vec![card(), card()])).await;
        fixture.done(Operation::StartVm { vm, boot_once: None }, name).await;
        vm
    };
    let (changing, vm) = (begun("changing").await, begun("web").await);
    let set = async |name: &'static str, link| {
        set_nic::set(&services, &me, name, "nic0", SetNic { link }, false).await.unwrap();
    };
    let becomes = async |vm: VmId, expected: [NicLink; 2]| {
        let is_so = async || (links(&fixture, vm) == expected).then_some(());
        fixture.eventually("the links of the guest", is_so).await;
    };
    // A card is being taken from one of them, which the monitor comes to first.
    let leaves = async |leaving| {
        let mut read = fixture.store.read().await.unwrap();
        let nic = nics::all_of_vm(&mut read, changing).await.unwrap().remove(1).nic;
        drop(read);
        let mut write = fixture.store.write().await.unwrap();
        nics::set_leaving(&mut write, nic, leaving).await.unwrap();
        write.commit().await.unwrap();
    };
    fixture.agent.set_reachable(false);
    leaves(true).await;
    set("changing", NicLink::Down).await;
    set("web", NicLink::Down).await;
    let up = [NicLink::Up, NicLink::Up];
    assert_eq!(links(&fixture, vm), up, "it was told while it was away");
    fixture.agent.set_reachable(true);
    becomes(vm, [NicLink::Down, NicLink::Up]).await;
    assert_eq!(links(&fixture, changing), up, "a guest loses a card that a task takes from it");
    leaves(false).await;
    fixture.hosts.look_again(fixture.host);
    becomes(changing, [NicLink::Down, NicLink::Up]).await;

    fixture.agent.set_reachable(false);
    set("web", NicLink::Up).await;
    fixture.agent.restart();
    fixture.agent.set_reachable(true);
    becomes(vm, up).await;
}

/// A guest that has got a card, and keeps it when that is undone, has its address until it is removed.
#[tokio::test]
async fn an_addition_that_cannot_be_undone_leaves_the_card_to_be_removed() {
    let mut fixture = Fixture::new().await;
    let vm = Change::AddNic.before(&fixture).await;
    let addition = Change::AddNic.operation(&fixture, vm).await;
    let (faults, _) =
        at("plug-in", TaskState::Running, FaultPoint::After, Fault::Fail(refused()), 1);
    fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
    fixture.agent.set_releases_devices(false);
    let task = fixture.begin(addition, "web").await;
    let ended = fixture.ended(task).await;
    assert_eq!(ended.state, TaskState::Unknown, "{:?}", ended.problem);
    let me = Caller::administrator("me");
    let services = fixture.services(Recipient::generate().unwrap());
    let request = with_address_of(&card());
    let refused = create_vm::create(&services, &me, request, false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::AlreadyExists, "{refused}");
    fixture.agent.set_releases_devices(true);
    let begun = vm_devices::remove_nic(&services, &me, "web", "nic0", false).await;
    let Ok(Outcome::Done(task)) = begun else { panic!("{begun:?}") };
    fixture.ends_well(task.id).await;
    Change::RemoveNic.assert_done(&fixture, vm, "removed").await;
}

/// A card that is to leave is not in what the host was told last: the dry run does not ask the host about it.
#[tokio::test]
async fn a_dry_run_removes_a_card_that_its_host_no_longer_knows() {
    let fixture = Fixture::new().await;
    let vm = Change::RemoveNic.before(&fixture).await;
    let nic = cards(&fixture, vm).await.remove(0);
    let mut write = fixture.store.write().await.unwrap();
    nics::set_leaving(&mut write, nic.nic, true).await.unwrap();
    write.commit().await.unwrap();
    crate::hosts::register(&fixture.store, &fixture.hosts, vm).await.unwrap();
    assert_eq!(fixture.agent.registered_as(vm).unwrap().nics().count(), 0);
    let me = Caller::administrator("me");
    let services = fixture.services(Recipient::generate().unwrap());
    let planned = vm_devices::remove_nic(&services, &me, "web", "nic0", true).await;
    assert!(matches!(planned, Ok(Outcome::Planned(_))), "{planned:?}");
}

/// Versions before removed the row at the first step, and had no third one.
#[tokio::test]
async fn a_removal_of_an_earlier_version_goes_on_or_is_undone() {
    for (step, point) in [
        ("record", FaultPoint::After),
        ("plug-out", FaultPoint::Before),
        ("plug-out", FaultPoint::After),
    ] {
        for lets_go in [true, false] {
            let what = format!("{step} {point:?} {lets_go}");
            let mut fixture = Fixture::new().await;
            let vm = Change::RemoveNic.before(&fixture).await;
            let removal = Change::RemoveNic.operation(&fixture, vm).await;
            let nic = cards(&fixture, vm).await.remove(0);
            let (faults, done) = at(step, TaskState::Running, point, Fault::Crash, 1);
            fixture.restart(|engine| engine.environment.faults = Some(faults)).await;
            let task = fixture.begin(removal, "web").await;
            let crashed = async || (done.load(Ordering::SeqCst) > 0).then_some(());
            fixture.eventually("it crashes", crashed).await;
            let mut write = fixture.store.write().await.unwrap();
            nics::delete(&mut write, nic.nic).await.unwrap();
            write.commit().await.unwrap();
            fixture.agent.set_releases_devices(lets_go);
            fixture.restart(|_| {}).await;
            let ended = fixture.ended(task).await;
            let is_out = lets_go || (step, point) == ("plug-out", FaultPoint::After);
            let expected = if is_out { TaskState::Done } else { TaskState::Failed };
            assert_eq!(ended.state, expected, "{what}: {:?}", ended.problem);
            match is_out {
                true => Change::RemoveNic.assert_done(&fixture, vm, &what).await,
                false => Change::RemoveNic.assert_undone(&fixture, vm, &what).await,
            }
        }
    }
}

/// What a host lacks for a card refuses the VM before anything of it is on record.
#[tokio::test]
async fn a_vm_whose_cards_cannot_be_connected_is_not_made() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let forward: PortForward = "tcp:62000:80".parse().unwrap();
    let user = || NicBackend::User { forwards: vec![forward.clone()] };
    let tap = |tap: &str| NicBackend::Tap { tap: tap.to_owned() };
    let first = with_cards("first", vec![(user(), None), (tap("lan0"), None)]);
    let first = fixture.requested(&services, first).await;
    // One that is off has nothing yet.
    fixture.requested(&services, with_cards("second", vec![(user(), None)])).await;
    fixture.done(Operation::StartVm { vm: first, boot_once: None }, "first").await;
    let begun = fixture.events("task.begun").await.len();
    let none = || NicBackend::User { forwards: vec![] };
    for (backend, code) in [
        (NicBackend::Bridge { bridge: "missing0".to_owned() }, ErrorCode::WrongState),
        (tap("missing0"), ErrorCode::WrongState),
        (tap("lan0"), ErrorCode::WrongState),
        (user(), ErrorCode::InUse),
    ] {
        for dry_run in [true, false] {
            let request = with_cards("web", vec![(none(), None), (backend.clone(), None)]);
            let refused = create_vm::create(&services, &me, request, dry_run).await.unwrap_err();
            assert_eq!(refused.code, code, "{backend}: {refused}");
            assert_eq!(refused.field.as_deref(), Some("nics[1].backend"), "{backend}");
        }
    }
    let found = vms::find(&mut fixture.store.read().await.unwrap(), "web").await.unwrap();
    assert!(found.is_none() && fixture.events("task.begun").await.len() == begun);
    // Who repeats a request is told that there is such a VM, not that its own guest has the port.
    let again = with_cards("first", vec![(user(), None)]);
    let refused = create_vm::create(&services, &me, again, false).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::AlreadyExists, "{refused}");
    // A host that does not answer says nothing of a card.
    fixture.inject(Call::ExamineNic, HostFault::LoseRequest, 1);
    let request = with_cards("web", vec![(none(), None)]);
    let refused = create_vm::create(&services, &me, request, false).await.unwrap_err();
    assert_eq!((refused.code, refused.field), (ErrorCode::Unreachable, None));
}

/// VMs with autostart are started once after a reboot of their host, others are not, and a restart of the agent is none.
#[tokio::test]
async fn vms_start_after_their_host_has_rebooted() {
    let fixture = Fixture::new().await;
    let (starts, stays) = (fixture.running("web").await, fixture.made("db", "plain").await);
    let mut write = fixture.store.write().await.unwrap();
    let vm = vms::get(&mut write, starts).await.unwrap().unwrap();
    vms::set(&mut write, &vms::Vm { autostart: true, ..vm }).await.unwrap();
    write.commit().await.unwrap();
    fixture.agent.restart();
    fixture.connected().await;
    super::super::autostart::begin_due(&fixture.engine).await.unwrap();
    assert!(fixture.events("task.begun").await.iter().all(|it| !it.detail.contains("autostart")));
    fixture.agent.reboot();
    let due = async || {
        let due = vms::starts_due(&mut fixture.store.read().await.unwrap()).await.unwrap();
        (!due.is_empty()).then_some(due)
    };
    let due = fixture.eventually("the start is due", due).await;
    assert_eq!(due.iter().map(|vm| vm.id).collect::<Vec<_>>(), [starts]);
    for _ in 0..2 {
        super::super::autostart::begin_due(&fixture.engine).await.unwrap();
    }
    fixture.assert_runs(starts).await;
    let begun = fixture.events("task.begun").await;
    let autostarts = begun.iter().filter(|it| it.detail.contains("vm.autostart")).count();
    assert_eq!(autostarts, 1);
    assert!(!fixture.agent.running().contains(&stays));
}

/// What the host does not know of does not have it look at a guest that runs: an inventory that was restored may lack
/// devices that the guest has.
#[tokio::test]
async fn a_label_registers_no_running_vm_anew_that_has_a_disk_more() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let set = async |request: SetVm| {
        let before = fixture.calls(Call::RegisterVm);
        set_vm::set(&services, &me, "web", request, false).await.unwrap();
        fixture.calls(Call::RegisterVm) - before
    };
    // What changes nothing of the guest goes into its descriptors.
    let request = SetVm { description: Some("the shop".to_owned()), ..SetVm::default() };
    assert_eq!(set(request).await, 1);
    let told = fixture.agent.registered_as(vm).unwrap().about.unwrap();
    assert_eq!(told.description, "the shop");
    let request = SetVm { on_drain: Some(OnDrain::Leave), ..SetVm::default() };
    assert_eq!(set(request).await, 1);
    let told = fixture.agent.registered_as(vm).unwrap().about.unwrap();
    assert_eq!(told.on_drain, OnDrain::Leave);
    // It lacks a disk of the guest's.
    let disk = fixture.disks(vm).await[1].id;
    let mut write = fixture.store.write().await.unwrap();
    disks::delete(&mut write, disk).await.unwrap();
    write.commit().await.unwrap();
    let labels = [("tier".to_owned(), Some("gold".to_owned()))].into();
    assert_eq!(set(SetVm { labels, ..SetVm::default() }).await, 0);
    assert_eq!(set(SetVm { autostart: Some(true), ..SetVm::default() }).await, 0);
    assert!(fixture.agent.disks_in_use(vm).contains(&disk));
    assert_eq!(set(SetVm { vcpus: Some(2), ..SetVm::default() }).await, 1);
}

/// A user who stops the VM meanwhile does not want it started.
#[tokio::test]
async fn a_start_that_is_due_is_not_made_up_for_after_a_stop() {
    let fixture = Fixture::new().await;
    let vm = fixture.running("web").await;
    let mut write = fixture.store.write().await.unwrap();
    let known = vms::get(&mut write, vm).await.unwrap().unwrap();
    vms::set(&mut write, &vms::Vm { autostart: true, ..known }).await.unwrap();
    vms::set_starts_due(&mut write, fixture.host).await.unwrap();
    write.commit().await.unwrap();
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = StopVm { force: true, ..StopVm::default() };
    let stop = services::vms::stop(&services, &me, "web", request, false).await.unwrap();
    let services::Outcome::Done(task) = stop else { panic!("{stop:?}") };
    assert_eq!(fixture.ended(task.id).await.state, TaskState::Done);
    super::super::autostart::begin_due(&fixture.engine).await.unwrap();
    let begun = fixture.events("task.begun").await;
    assert!(begun.iter().all(|it| !it.detail.contains("vm.autostart")), "{begun:?}");
    fixture.assert_whole(vm, Power::Off, "it stays off").await;
}

#[tokio::test]
async fn the_end_of_an_exposure_is_an_event_as_its_begin_is() {
    let fixture = Fixture::new().await;
    let vm = fixture.made("web", "encrypted").await;
    let disk = fixture.disks(vm).await[0].name.clone();
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let hold = Exposing::Hold { writable: false };
    let held = services::disks::expose(&services, &me, "web", &disk, hold).await.unwrap();
    assert_eq!(fixture.events("disk.exposed").await.len(), 1);
    assert!(fixture.events("disk.unexposed").await.is_empty());
    drop(held);
    let ended = async || fixture.events("disk.unexposed").await.pop();
    let event = fixture.eventually("its end is recorded", ended).await;
    assert!(event.detail.contains(&format!("'{disk}'")) && event.detail.contains("seconds"));
    // A server that is killed writes none: the next one does, once.
    fixture.made("db", "encrypted").await;
    let held = services::disks::expose(&services, &me, "db", &disk, hold).await.unwrap();
    std::mem::forget(held);
    for _ in 0..2 {
        services::disks::end_exposures(&fixture.store).await.unwrap();
        let ended = fixture.events("disk.unexposed").await;
        assert_eq!(ended.len(), 2, "{ended:?}");
        assert_eq!((ended[1].actor.as_str(), ended[1].target.as_str()), (crate::SELF, "db"));
        assert!(ended[1].detail.contains("exposed by 'me': the server ended"), "{ended:?}");
    }
}

/// The host is asked about the machine of a new VM while nobody is kept from writing to the inventory.
#[tokio::test]
async fn no_transaction_is_held_while_a_host_is_asked() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let request = serde_json::from_value(serde_json::json!({
        "name": "web", "policy": "encrypted", "memory": 32 << 20,
        "hardware": { "cpu_model": "max" },
        "disks": [{ "name": "d", "datastore": "local", "size": SIZE }],
        "nics": [{ "backend": { "kind": "user" } }],
    }));
    // It waits for this one when its own begins.
    let held = fixture.store.write().await.unwrap();
    let create = services::create_vm::create(&services, &me, request.unwrap(), false);
    tokio::pin!(create);
    let asked = fixture.eventually("the host is asked", async || {
        // The last question.
        (fixture.calls(Call::ExamineNic) > 0).then_some(())
    });
    tokio::select! {
        _ = &mut create => panic!("two transactions at a time"),
        () = asked => {}
    }
    drop(held);
    create.await.unwrap();
}

/// What is warned of is not refused: the room may be there when the guest writes.
#[tokio::test]
async fn a_dry_run_says_where_a_thin_disk_may_not_have_room() {
    let fixture = Fixture::new().await;
    let services = fixture.services(Recipient::generate().unwrap());
    let me = Caller::administrator("me");
    let vm = fixture.made("web", "encrypted").await;
    let disk = fixture.disks(vm).await.remove(0).name;
    let added = async || {
        let request = AddDisk {
            name: "more".to_owned(),
            datastore: None,
            size: GROWN,
            image: None,
            format: None,
            force: false,
            encrypted: None,
        };
        let planned = vm_devices::add_disk(&services, &me, "web", request, true).await;
        let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
        plan.warnings.join("\n")
    };
    let grown = async || {
        let request = ResizeDisk { size: GROWN };
        let planned = vm_devices::resize_disk(&services, &me, "web", &disk, request, true).await;
        let Ok(Outcome::Planned(plan)) = planned else { panic!("{planned:?}") };
        plan.warnings.join("\n")
    };
    // With its header.
    let whole = GROWN + HEADER_AREA;
    fixture.agent.set_free(whole);
    let said = added().await;
    assert!(!said.contains("are free"), "{said}");
    fixture.agent.set_free(whole - 1);
    let said = added().await;
    assert!(said.contains("disk 'more' may grow to 20 MiB on datastore 'local', and "), "{said}");
    fixture.agent.set_free(GROWN - SIZE);
    let said = grown().await;
    assert!(!said.contains("are free"), "{said}");
    fixture.agent.set_free(GROWN - SIZE - 1);
    let said = grown().await;
    let told = format!("disk '{disk}' may take up to 3 MiB more on datastore 'local', and ");
    assert!(said.contains(&told), "{said}");
    assert_eq!(fixture.disks(vm).await[0].size, SIZE, "it has grown");
}
