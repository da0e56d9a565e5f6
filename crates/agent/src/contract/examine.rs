//! A change that a host is only asked about: the answer is that of the change itself, and nothing is changed.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use vmseal_api::boot::BootDevice;
use vmseal_api::expose::LET_GO;
use vmseal_api::host::{
    Allocation, ConsoleStream, DatastoreSpec, Device, DiskSpec, Exposing, HostAgent, NicSpec,
    Power, StopReason, VmChange, VmSpec,
};
use vmseal_api::id::{DatastoreId, DiskId, NicId, VmId};
use vmseal_api::nic::{NicBackend, NicLink};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::DISK_SIZE_MAX;

use super::{DISK_SIZE, Session, done, nics, refused};

/// Asks about a start.
pub async fn start(agent: &dyn HostAgent, vm: VmId) -> Result<(), Problem> {
    start_with(agent, vm, None).await
}

/// Asks about a start from memory that is saved, and must be of this generation.
pub async fn start_with(
    agent: &dyn HostAgent,
    vm: VmId,
    generation: Option<u64>,
) -> Result<(), Problem> {
    let start = VmChange::Start { first: None, discard_memory: false, generation };
    agent.examine_change(vm, start).await
}

/// Both are refused, with the same words.
pub fn alike(
    (examined, answer): (Result<(), Problem>, Result<(), Problem>),
    code: ErrorCode,
    what: &str,
) {
    let told =
        |result: Result<(), Problem>| result.map_err(|problem| (problem.code, problem.detail));
    let (examined, answer) = (told(examined), told(answer));
    assert_eq!(examined, answer, "{what}");
    assert_eq!(answer.map_err(|(code, _)| code), Err(code), "{what}");
}

/// A disk that the suite's VM does not have.
fn another(session: &Session) -> DiskSpec {
    let (disk, name) = (DiskId::new(), "more".to_owned());
    DiskSpec { disk, name, facts: None, replica: None, ..session.disk(1).clone() }
}

/// A card that the suite's VM does not have.
fn another_card(backend: NicBackend) -> NicSpec {
    let mac = "02:00:00:00:00:02".parse().expect("an address");
    NicSpec { name: "more".to_owned(), mac, backend, ..nics::card() }
}

fn missing_bridge() -> NicBackend {
    NicBackend::Bridge { bridge: "missing0".to_owned() }
}

fn forwarding(port: &str) -> NicBackend {
    NicBackend::User { forwards: vec![port.parse().expect("a forwarded port")] }
}

async fn exposed(agent: &dyn HostAgent, session: &Session) -> ConsoleStream {
    let hold = Exposing::Hold { writable: false };
    done(agent.expose_disk(session.vm(), session.disk(0).disk, hold).await, "exposing a disk")
}

async fn let_go(mut held: ConsoleStream) {
    held.write_all(&[LET_GO]).await.expect("releasing the disk");
    let _ = held.read_to_end(&mut Vec::new()).await;
}

/// The port at which another host waits for VMs.
async fn port_of_another_host(agent: &dyn HostAgent) {
    let waits = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = waits.local_addr().expect("its address");
    done(agent.examine_migration_port(port).await, "a port that somebody waits at");
}

/// The VM is off, its disks are made and its key is there.
pub async fn off(agent: &dyn HostAgent, session: &Session) {
    port_of_another_host(agent).await;
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let ask = |change| agent.examine_change(vm, change);
    let before = session.now(agent).await;
    done(start(agent, vm).await, "a start");
    refused(start(agent, VmId::new()).await, ErrorCode::NotFound, "a start of an unknown VM");
    let drive =
        VmChange::Start { first: Some(BootDevice::Cdrom), discard_memory: false, generation: None };
    refused(ask(drive).await, ErrorCode::InvalidRequest, "a start from a drive that is not there");
    let new = another(session);
    done(ask(VmChange::AddDisk { disk: Box::new(new.clone()) }).await, "another disk");
    let odd = Box::new(DiskSpec { size: 1, ..new.clone() });
    refused(ask(VmChange::AddDisk { disk: odd }).await, ErrorCode::InvalidRequest, "an odd size");
    done(ask(VmChange::RemoveDisk { disk }).await, "a disk less");
    let strange = ask(VmChange::RemoveDisk { disk: new.disk }).await;
    refused(strange, ErrorCode::NotFound, "an unknown disk less");
    done(ask(VmChange::GrowDisk { disk, size: 2 * DISK_SIZE }).await, "a longer disk");
    let shrunk = VmChange::GrowDisk { disk, size: DISK_SIZE - 4096 };
    refused(ask(shrunk).await, ErrorCode::InvalidRequest, "a shorter disk");
    // What it is connected to is looked at when the VM starts.
    let card = another_card(missing_bridge());
    done(ask(VmChange::AddNic { nic: card.clone() }).await, "another card");
    let namesake = NicSpec { name: nics::card().name, ..card };
    let named = ask(VmChange::AddNic { nic: namesake }).await;
    refused(named, ErrorCode::InvalidRequest, "another card of the same name");
    assert_eq!(session.now(agent).await, before, "a question has changed something");

    let held = exposed(agent, session).await;
    let removed = (ask(VmChange::RemoveDisk { disk }).await, agent.delete_disk(vm, disk).await);
    alike(removed, ErrorCode::InUse, "removing a disk that is exposed");
    let_go(held).await;

    let mut full = session.spec.clone();
    full.disk_at_mut(0).expect("two disks").allocation = Allocation::Preallocated;
    done(agent.register_vm(full).await, "registering a preallocated disk");
    let size = DISK_SIZE_MAX;
    let (asked, grown) =
        (ask(VmChange::GrowDisk { disk, size }).await, agent.grow_disk(vm, disk, size).await);
    for answer in [asked, grown] {
        refused(answer, ErrorCode::NoSpace, "a disk that has no room");
    }
    misplaced(agent, session).await;
    done(agent.register_vm(session.spec.clone()).await, "as before");
}

/// A disk is not where it should be when the VM is started.
async fn misplaced(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    let mut elsewhere = session.spec.clone();
    elsewhere.disk_at_mut(1).expect("two disks").datastore =
        DatastoreSpec { datastore: DatastoreId::new(), ..session.place.clone() };
    done(agent.register_vm(elsewhere).await, "registering a disk elsewhere");
    let asked = start(agent, vm).await.expect_err("a disk is not there");
    assert_eq!(asked.code, ErrorCode::WrongState, "{asked}");
    done(agent.power_on(vm).await, "starting");
    let ended = session.wait(agent, "its end", |state| state.power == Power::Off).await;
    let stopped = ended.stopped.expect("why");
    assert_eq!((stopped.reason, stopped.detail), (StopReason::FailedToStart, asked.detail));
}

/// Asks about the growth of the first disk, and has it grow.
async fn grown(
    agent: &dyn HostAgent,
    session: &Session,
) -> (Result<(), Problem>, Result<(), Problem>) {
    let (vm, disk, size) = (session.vm(), session.disk(0).disk, DISK_SIZE + (1 << 20));
    let asked = agent.examine_change(vm, VmChange::GrowDisk { disk, size }).await;
    (asked, agent.grow_disk(vm, disk, size).await)
}

/// The VM runs.
pub async fn running(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let ask = |change| agent.examine_change(vm, change);
    let add = || ask(VmChange::AddDisk { disk: Box::new(another(session)) });
    done(start(agent, vm).await, "a start of one that runs");
    done(add().await, "another disk");
    let second = session.disk(1).disk;
    done(ask(VmChange::RemoveDisk { disk: second }).await, "the second disk less");
    let without = VmSpec { devices: session.spec.devices[1..].to_vec(), ..session.spec.clone() };
    let removed = (ask(VmChange::RemoveDisk { disk }).await, agent.register_vm(without).await);
    alike(removed, ErrorCode::WrongState, "removing the first disk");
    done(agent.register_vm(session.spec.clone()).await, "as before");

    let held = exposed(agent, session).await;
    alike(grown(agent, session).await, ErrorCode::InUse, "growing a disk that is exposed");
    refused(add().await, ErrorCode::InUse, "another disk beside one that is exposed");
    let_go(held).await;
    let hold = Exposing::Hold { writable: false };
    let held = agent.expose_disk(vm, session.disk(1).disk, hold).await;
    let held = done(held, "exposing the other disk");
    let longer = ask(VmChange::GrowDisk { disk, size: 2 * DISK_SIZE }).await;
    done(longer, "growing a disk beside one that is exposed");
    let_go(held).await;
    let now = session.now(agent).await.started_with.expect("it runs");
    assert_eq!(now.disks.len(), 2, "a question has changed something");
    cards(agent, session).await;
}

/// The VM runs, and gets no other card: one could be had, and others not. Its own could go, and be plugged out.
async fn cards(agent: &dyn HostAgent, session: &Session) {
    let vm = session.vm();
    let ask = |change| agent.examine_change(vm, change);
    let before = session.now(agent).await.nics;
    let [own] = &before[..] else { panic!("one card: {before:?}") };
    let (own, taken) = (own.nic, own.forwards.first().expect("a forwarded port").host_port);
    let free = another_card(forwarding("tcp:80"));
    done(ask(VmChange::AddNic { nic: free }).await, "another card");
    let missing_tap = NicBackend::Tap { tap: "missing0".to_owned() };
    for (backend, code, what) in [
        (missing_bridge(), ErrorCode::WrongState, "a card on a bridge that is not there"),
        (missing_tap, ErrorCode::WrongState, "a card on a tap that is not there"),
        (forwarding(&format!("tcp:{taken}:80")), ErrorCode::InUse, "a port that is taken"),
    ] {
        let nic = another_card(backend);
        let asked = ask(VmChange::AddNic { nic: nic.clone() }).await;
        let mut with = session.spec.clone();
        with.devices.push(Device::Nic(nic));
        alike((asked, agent.register_vm(with).await), code, what);
    }
    done(agent.register_vm(session.spec.clone()).await, "as before");
    done(ask(VmChange::SetLink { nic: own, link: NicLink::Down }).await, "a card plugged out");
    done(ask(VmChange::RemoveNic { nic: own }).await, "a card less");
    let strange = ask(VmChange::RemoveNic { nic: NicId::new() }).await;
    refused(strange, ErrorCode::NotFound, "an unknown card less");
    assert_eq!(session.now(agent).await.nics, before, "a question has changed something");
}
