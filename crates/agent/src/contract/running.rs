//! What is done to a guest that runs: it is paused, reset and woken, its VM is registered anew, its disks grow, and devices are
//! plugged in. The suite's guest knows no devices, and lets none go.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use vmseal_api::datastore::FoundImage;
use vmseal_api::host::{
    ConsoleClaim, Device, DiskFacts, DiskSpec, Exposing, GuestControl, HostAgent, Power, VmSpec,
};
use vmseal_api::id::NicId;
use vmseal_api::problem::ErrorCode;

use super::{DISK_SIZE, Session, done, refused};

/// How long a guest that may not have booted yet is given to echo a word.
const ECHO_WAIT: Duration = Duration::from_secs(2);

/// Pauses the guest and lets it go on, and resets it. It does not sleep, and is not woken.
pub async fn controlled(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    for _ in 0..2 {
        done(agent.control_guest(vm, GuestControl::Pause).await, "pausing");
        assert_eq!(session.now(agent).await.power, Power::Paused);
    }
    let paused = agent.control_guest(vm, GuestControl::Wakeup).await;
    refused(paused, ErrorCode::WrongState, "waking a paused guest");
    refused(agent.power_on(vm).await, ErrorCode::WrongState, "starting a paused VM");
    for _ in 0..2 {
        done(agent.control_guest(vm, GuestControl::Unpause).await, "unpausing");
        assert_eq!(session.now(agent).await.power, Power::Running);
    }
    done(agent.control_guest(vm, GuestControl::Reset).await, "resetting");
    let now = session.now(agent).await;
    assert_eq!((now.power, now.suspended_to_ram), (Power::Running, false));
    let awake = agent.control_guest(vm, GuestControl::Wakeup).await;
    refused(awake, ErrorCode::WrongState, "waking a guest that is awake");
    boots(agent, session).await;
}

/// Waits until a guest that was reset echoes a word as a whole: what is typed before it has booted is lost.
async fn boots(agent: &dyn HostAgent, session: &Session) {
    let answers = async { while timeout(ECHO_WAIT, echoed(agent, session)).await.is_err() {} };
    let outcome = timeout(session.fixture.timeout, answers).await;
    assert!(outcome.is_ok(), "the guest does not boot again");
}

/// Types a new word and waits for its echo.
pub async fn echoed(agent: &dyn HostAgent, session: &Session) {
    let console = agent.console(session.vm(), ConsoleClaim::TakeOver).await;
    let mut console = done(console, "the console");
    let word = NicId::new().to_string();
    console.write_all(word.as_bytes()).await.expect("typing");
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(&word) {
        let mut chunk = [0; 1024];
        let length = console.read(&mut chunk).await.expect("reading the console");
        assert!(length > 0, "the console ended: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&chunk[..length]);
    }
}

/// What a VM that runs cannot have now it gets at its next start, and says so until then.
pub async fn registered_anew(agent: &dyn HostAgent, session: &Session) {
    let spec = &session.spec;
    let mut changed = VmSpec { vcpus: 2, memory: 96 << 20, ..spec.clone() };
    changed.disk_at_mut(1).expect("two disks").limits.iops = Some(1000);
    changed.name = "renamed".to_owned();
    done(agent.register_vm(changed.clone()).await, "changing a VM that runs");
    done(agent.register_vm(changed).await, "the same again");
    let now = session.now(agent).await.started_with.expect("what it runs with");
    assert_eq!((now.vcpus, now.memory, now.disks.len()), (1, spec.memory, 2));
    assert!(now.disks.iter().all(|disk| disk.limits.iops.is_none()), "{now:?}");
    done(agent.register_vm(spec.clone()).await, "taking it back");
    let mut other = spec.clone();
    other.disk_at_mut(0).expect("two disks").size += 4096;
    refused(agent.register_vm(other).await, ErrorCode::WrongState, "a size, by registering");
    let first = VmSpec { devices: spec.devices[1..].to_vec(), ..spec.clone() };
    refused(agent.register_vm(first).await, ErrorCode::WrongState, "without its first disk");
    done(agent.register_vm(spec.clone()).await, "as before");
}

/// Disks grow and do not shrink; a guest that runs goes on.
pub async fn grown(agent: &dyn HostAgent, session: &mut Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    for wrong in [DISK_SIZE - 4096, DISK_SIZE + 512] {
        let grown = agent.grow_disk(vm, disk, wrong).await;
        refused(grown, ErrorCode::InvalidRequest, "such a size");
    }
    for _ in 0..2 {
        done(agent.grow_disk(vm, disk, DISK_SIZE + (1 << 20)).await, "growing");
    }
    let found = done(agent.scan_datastore(session.place.clone()).await, "scanning");
    let named = |of: &&FoundImage| of.named.is_some_and(|it| it.disk == disk && !it.replica);
    let image = found.images.iter().find(named).expect("its image");
    let data_offset = match session.disk(0).facts.as_ref().expect("it is made") {
        DiskFacts::Raw => 0,
        DiskFacts::Luks2 { data_offset, .. } => *data_offset,
    };
    assert_eq!(image.size, DISK_SIZE + (1 << 20) + data_offset, "the image is as long as before");
    super::survey::described_as(agent, session, "the disk's new size", |told| {
        told.disks.iter().any(|it| (it.disk, it.size) == (disk, DISK_SIZE + (1 << 20)))
    })
    .await;
    session.spec.disk_at_mut(0).expect("two disks").size = DISK_SIZE + (1 << 20);
    done(agent.register_vm(session.spec.clone()).await, "registering what has grown");
}

/// A card and a disk are plugged into a guest that runs.
pub async fn plugged(agent: &dyn HostAgent, session: &Session) -> DiskSpec {
    let spec = &session.spec;
    let mut card = super::nics::card();
    card.nic = NicId::new();
    "hot".clone_into(&mut card.name);
    card.mac = "52:54:00:00:77:01".parse().expect("an address");
    let mut disk = session.disk(1).clone();
    disk.disk = vmseal_api::id::DiskId::new();
    "hot".clone_into(&mut disk.name);
    (disk.facts, disk.replica, disk.size) = (None, None, 1 << 20);
    let with = |facts: Option<DiskFacts>, card: Option<Device>| {
        let mut spec = spec.clone();
        spec.devices.push(Device::Disk(DiskSpec { facts, ..disk.clone() }));
        spec.devices.extend(card);
        spec
    };
    done(agent.register_vm(with(None, None)).await, "a disk that is not made");
    let task =
        done(session.create(agent, disk.disk, None).await, "making a disk for a VM that runs");
    session.made(agent, task, disk.disk).await;
    let made = session.now(agent).await.disks.into_iter().find(|it| it.disk == disk.disk);
    let facts = made.map(|made| made.facts);
    let hold = Exposing::Hold { writable: false };
    let exposed = agent.expose_disk(session.vm(), disk.disk, hold).await;
    let problem = exposed.map(drop).expect_err("the guest does not have the disk");
    assert_eq!(problem.code, ErrorCode::WrongState, "{problem}");
    assert!(problem.detail.contains("without its disk 'hot'"), "{problem}");
    for _ in 0..2 {
        let all = with(facts.clone(), Some(Device::Nic(card.clone())));
        done(agent.register_vm(all).await, "plugging in");
    }
    let now = session.now(agent).await;
    assert_eq!(now.nics.len(), 2, "{now:?}");
    assert_eq!(now.started_with.expect("it runs").disks.len(), 3);
    refused(agent.delete_disk(session.vm(), disk.disk).await, ErrorCode::InUse, "a disk in use");
    disk
}

/// The disk that was plugged in is deleted once the VM is off.
pub async fn deleted(agent: &dyn HostAgent, session: &Session, disk: DiskSpec) {
    let mut with = session.spec.clone();
    with.devices.push(Device::Disk(disk.clone()));
    done(agent.register_vm(with).await, "registering to delete");
    done(agent.delete_disk(session.vm(), disk.disk).await, "deleting a disk");
    done(agent.register_vm(session.spec.clone()).await, "without it");
}
