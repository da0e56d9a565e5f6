//! The contract of [`HostAgent`] as a test suite. The real host, the simulated one, and the HTTPS client with
//! a router behind it pass the same suite.
//!
//! It panics where an agent breaks the contract.

mod backups;
mod bitmaps;
mod cdrom;
mod cloud_init;
mod convert;
mod dumps;
mod examine;
mod exclusion;
mod jobs;
mod keys;
mod mirror;
mod nics;
mod pace;
mod panics;
mod proofs;
mod replicas;
mod running;
mod shared;
mod snapshots;
mod survey;
mod suspended_snapshots;
mod tpm;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};
use vmseal_api::console::is_taken_over;
use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::expose::{HOLD, LET_GO};
use vmseal_api::host::version::{CONTRACT, FEATURES};
use vmseal_api::host::{
    Allocation, ConsoleClaim, DatastoreLocation, DatastoreSpec, Device, DiskSpec, Exposing,
    HostAgent, HostState, ImageSource, KeyState, NewDisk, Notice, NoticeCode, Power, PowerOff,
    SHUTDOWN_SECONDS_MAX, STATE_WAIT_MAX, StopReason, Stopped, VmSpec, VmState,
};
use vmseal_api::id::{DatastoreId, DiskId, Incarnation, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::transfer::ImageFormat;
use vmseal_secret::{KEK_LEN, SecretBytes};

pub use crate::keys::{reference_of, seal_for};
use crate::process::restarts::RESTARTS_MAX;

/// A boot sector that prints [`BANNER`] on the first serial port and then echoes its input:
///
/// ```text
///       cli; xor ax,ax; mov ds,ax; mov ss,ax; mov sp,7c00h; mov si,banner
/// say:  lodsb; test al,al; jz wait; call put; jmp say
/// wait: mov dx,3fdh; in al,dx; pause; test al,1; jz wait
///       mov dx,3f8h; in al,dx; call put; cmp al,PANIC; jne wait
///       mov dx,505h; mov al,1; out dx,al; jmp wait                  it panics
/// put:  mov ah,al; mov dx,3fdh
/// full: in al,dx; test al,20h; jz full; mov dx,3f8h; mov al,ah; out dx,al; ret
/// ```
const BOOT_CODE: [u8; 69] = [
    0xfa, 0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c, 0xbe, 0x45, 0x7c, 0xac, 0x84, 0xc0,
    0x74, 0x05, 0xe8, 0x1f, 0x00, 0xeb, 0xf6, 0xba, 0xfd, 0x03, 0xec, 0xf3, 0x90, 0xa8, 0x01, 0x74,
    0xf6, 0xba, 0xf8, 0x03, 0xec, 0xe8, 0x0c, 0x00, 0x3c, PANIC, 0x75, 0xeb, 0xba, 0x05, 0x05,
    0xb0, 0x01, 0xee, 0xeb, 0xe3, 0x88, 0xc4, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x20, 0x74, 0xfb, 0xba,
    0xf8, 0x03, 0x88, 0xe0, 0xee, 0xc3,
];

/// What the suite's guest is to read to panic.
pub const PANIC: u8 = b'~';

/// The first output of the suite's guest.
pub const BANNER: &str = "vmseal contract guest\r\n";

/// The size of the suite's disks, in bytes.
const DISK_SIZE: u64 = 8 << 20;

/// The longest that a guest may be shown as stopping after it was given 2 seconds.
const STOPPING_MAX: Duration = Duration::from_secs(20);

/// The directories and limits of the suite.
pub struct Fixture {
    /// An empty directory on the agent's host for a datastore.
    pub datastore: PathBuf,
    /// The guest's image, as [`write_guest`] made it.
    pub image: PathBuf,
    /// The timeout of each step.
    pub timeout: Duration,
    /// Kills the filter of a running VM.
    pub kill_filter: Box<dyn Fn(VmId) + Send + Sync>,
}

/// Writes the image of the suite's guest.
///
/// # Errors
/// Those of writing a file.
pub fn write_guest(path: &Path) -> std::io::Result<()> {
    let mut sector = [0; 512];
    sector[..BOOT_CODE.len()].copy_from_slice(&BOOT_CODE);
    let banner = BANNER.as_bytes();
    sector[BOOT_CODE.len()..BOOT_CODE.len() + banner.len()].copy_from_slice(banner);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    write_image(path, &sector)
}

/// Writes a file in another process. A child that a thread of this process forks holds every file that is
/// open for writing here until it executes its program, and an image that is open for writing is refused.
///
/// # Errors
/// Those of starting `tee` and writing to it.
pub fn write_image(path: &Path, contents: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::process::{Command, Stdio};
    let mut tee =
        Command::new("tee").arg(path).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    let written = tee.stdin.take().map_or(Ok(()), |mut input| input.write_all(contents));
    let ended = tee.wait()?;
    written?;
    match ended.success() {
        true => Ok(()),
        false => Err(std::io::Error::other(format!("tee failed: {ended}"))),
    }
}

/// The suite's VM, kept from one run of the agent to the next.
pub struct Session {
    fixture: Fixture,
    place: DatastoreSpec,
    /// Another one, to which disks move.
    second: DatastoreId,
    kek: SecretBytes,
    spec: VmSpec,
    key_box: String,
}

fn refused<T: std::fmt::Debug>(result: Result<T, Problem>, code: ErrorCode, what: &str) {
    match result {
        Err(problem) => assert_eq!(problem.code, code, "{what}: {problem}"),
        Ok(value) => panic!("{what}: answered {value:?} instead of {code:?}"),
    }
}

fn done<T>(result: Result<T, Problem>, what: &str) -> T {
    result.unwrap_or_else(|problem| panic!("{what}: {problem} ({:?})", problem.code))
}

async fn state(agent: &dyn HostAgent) -> HostState {
    done(agent.state_now().await, "state")
}

impl Session {
    fn begin(fixture: Fixture, key_box: String) -> Self {
        let kek = SecretBytes::random(KEK_LEN).expect("locked memory");
        let vm = VmId::new();
        let location = DatastoreLocation::Dir { path: fixture.datastore.clone() };
        let place = DatastoreSpec { datastore: DatastoreId::new(), location };
        let disk = |name: &str, encrypted| DiskSpec {
            disk: DiskId::new(),
            name: name.to_owned(),
            datastore: place.clone(),
            size: DISK_SIZE,
            encrypted,
            allocation: Allocation::Thin,
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        };
        let spec = VmSpec {
            vm,
            name: "contract".to_owned(),
            vcpus: 1,
            memory: 64 << 20,
            policy: None,
            key: Some(reference_of(&kek, vm, "contract-key")),
            hardware: Default::default(),
            devices: vec![
                Device::Disk(disk("system", true)),
                Device::Disk(disk("data", false)),
                Device::Nic(nics::card()),
            ],
            snapshots: Vec::new(),
            images: None,
            about: None,
        };
        Self { fixture, place, second: DatastoreId::new(), kek, spec, key_box }
    }

    fn vm(&self) -> VmId {
        self.spec.vm
    }

    fn disk(&self, index: usize) -> &DiskSpec {
        self.spec.disk_at(index).expect("the suite's VM has two disks")
    }

    async fn seen(&self, agent: &dyn HostAgent) -> Option<VmState> {
        state(agent).await.vms.into_iter().find(|state| state.vm == self.vm())
    }

    async fn now(&self, agent: &dyn HostAgent) -> VmState {
        self.seen(agent).await.expect("the VM is known")
    }

    /// Waits by long poll, as the server does.
    async fn wait(
        &self,
        agent: &dyn HostAgent,
        what: &str,
        wanted: impl Fn(&VmState) -> bool,
    ) -> VmState {
        let give_up = Instant::now() + self.fixture.timeout;
        let mut last = None;
        loop {
            let wait = Duration::from_secs(5);
            let state = done(agent.state_after(last.as_ref(), wait).await, "state");
            let vm = state.vms.iter().find(|state| state.vm == self.vm()).cloned();
            last = Some(state);
            if let Some(vm) = vm.clone().filter(&wanted) {
                return vm;
            }
            assert!(Instant::now() < give_up, "timed out waiting for {what}: {vm:?}");
        }
    }

    async fn power(&self, agent: &dyn HostAgent, power: Power) -> VmState {
        let what = format!("{power:?}");
        self.wait(agent, &what, |state| {
            let failed = power == Power::Running && state.power == Power::Off;
            assert!(
                !failed || state.stopped.is_none(),
                "the VM does not start: {:?}",
                state.stopped
            );
            state.power == power
        })
        .await
    }

    async fn offer(&self, agent: &dyn HostAgent) -> Result<(), Problem> {
        let reference = self.spec.key.as_ref().expect("the VM has a key");
        let sealed = seal_for(&self.key_box, self.vm(), reference, &self.kek);
        agent.offer_key(self.vm(), sealed).await
    }
}

/// The first part: from nothing to a running VM. Every call is repeated, every refusal is provoked.
pub async fn first_run(agent: &dyn HostAgent, fixture: Fixture) -> Session {
    let description = done(agent.describe().await, "describe");
    assert_eq!(
        (description.contract, &*description.features),
        (CONTRACT, &FEATURES.map(str::to_owned)[..])
    );
    assert!(description.cpus > 0 && description.memory > 0);
    assert!(!description.accelerator.reason.is_empty());
    let mut session = Session::begin(fixture, description.key_box);
    unknown_vms(agent, &session).await;
    datastores(agent, &session).await;
    replicas::misplaced(agent, &session).await;
    replicas::given(agent, &mut session).await;
    registration(agent, &session).await;
    keys(agent, &session).await;
    cloud_init::disks(agent, &session).await;
    tpm::disks(agent, &session).await;
    jobs::disks(agent, &mut session).await;
    mirror::disks(agent, &mut session).await;
    convert::disks(agent, &mut session).await;
    snapshots::disks(agent, &mut session).await;
    proofs::disks(agent, &session).await;
    backups::disks(agent, &session).await;
    backups::tpms(agent, &session).await;
    dumps::off(agent, &session).await;
    exclusion::walk(agent, &session).await;
    exposed(agent, &session).await;
    examine::off(agent, &session).await;
    mirror::suspended(agent, &mut session).await;
    backups::suspended(agent, &session).await;
    suspended_snapshots::disk(agent, &session).await;
    suspended_snapshots::paused(agent, &session).await;
    running(agent, &session).await;
    session
}

/// Checks that a connection to an exposed disk speaks NBD.
async fn speaks_nbd(agent: &dyn HostAgent, session: &Session, disk: DiskId) {
    let connected = agent.expose_disk(session.vm(), disk, Exposing::Connect).await;
    let mut greeting = [0; 16];
    let read = done(connected, "a connection").read_exact(&mut greeting).await.map(drop);
    assert!(read.is_ok() && greeting == *b"NBDMAGICIHAVEOPT", "{read:?} {greeting:?}");
}

/// A disk is exposed to one client at a time and nothing else can be done with it. The exposure ends when its
/// client disconnects.
async fn exposed(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let hold = |writable| agent.expose_disk(vm, disk, Exposing::Hold { writable });
    let early = agent.expose_disk(vm, disk, Exposing::Connect).await;
    refused(early.map(drop), ErrorCode::WrongState, "a connection to a disk that is not exposed");
    let unknown = agent.expose_disk(vm, DiskId::new(), Exposing::Hold { writable: false }).await;
    refused(unknown.map(drop), ErrorCode::NotFound, "exposing an unknown disk");
    for writable in [false, true] {
        let mut held = done(hold(writable).await, "exposing a disk");
        speaks_nbd(agent, session, disk).await;
        speaks_nbd(agent, session, disk).await;
        refused(hold(false).await.map(drop), ErrorCode::InUse, "exposing it twice");
        refused(agent.power_on(vm).await, ErrorCode::InUse, "starting while a disk is exposed");
        held.write_all(&[HOLD, HOLD]).await.expect("holding");
        held.write_all(&[LET_GO]).await.expect("releasing the disk");
        let mut wrong = String::new();
        let end = timeout(session.fixture.timeout, held.read_to_string(&mut wrong)).await;
        assert!(end.is_ok() && wrong.is_empty(), "releasing the disk: {wrong:?}");
        let late = agent.expose_disk(vm, disk, Exposing::Connect).await;
        refused(late.map(drop), ErrorCode::WrongState, "a connection to a released disk");
    }
    drop(done(hold(false).await, "exposing a disk"));
    let give_up = Instant::now() + session.fixture.timeout;
    loop {
        match hold(false).await {
            Err(problem) if problem.code == ErrorCode::InUse && Instant::now() < give_up => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            held => {
                let mut held = done(held, "exposing it after the client disconnected");
                held.write_all(&[LET_GO]).await.expect("releasing the disk");
                let _ = held.read_to_end(&mut Vec::new()).await;
                return;
            }
        }
    }
}

async fn unknown_vms(agent: &dyn HostAgent, session: &Session) {
    let (vm, disk) = (session.vm(), session.disk(0).disk);
    let code = ErrorCode::NotFound;
    refused(session.offer(agent).await, code, "a key for an unknown VM");
    refused(session.create(agent, disk, None).await, code, "a disk of an unknown VM");
    refused(agent.delete_disk(vm, disk).await, code, "removing a disk of an unknown VM");
    refused(agent.power_on(vm).await, code, "starting an unknown VM");
    refused(agent.power_off(vm, PowerOff::Force).await, code, "stopping an unknown VM");
    let console = agent.console(vm, ConsoleClaim::IfFree).await;
    refused(console.map(drop), code, "the console of an unknown VM");
    done(agent.unregister_vm(vm).await, "unregistering an unknown VM");
    assert!(session.seen(agent).await.is_none());
}

async fn datastores(agent: &dyn HostAgent, session: &Session) {
    done(agent.examine_datastore(session.place.clone()).await, "examining a new place");
    let condition = done(agent.measure_datastore(session.place.clone()).await, "measuring");
    assert!(
        matches!(condition, DatastoreCondition::WrongMark { .. }),
        "the place is marked: {condition:?}"
    );
    let usage = done(agent.probe_datastore(session.place.clone()).await, "probing");
    assert!(usage.capacity >= usage.free && usage.free > 0);
    done(agent.probe_datastore(session.place.clone()).await, "probing again");
    let other = DatastoreSpec { datastore: DatastoreId::new(), ..session.place.clone() };
    let code = ErrorCode::WrongState;
    refused(agent.probe_datastore(other.clone()).await, code, "another datastore's place");
    refused(agent.examine_datastore(other).await, code, "examining another datastore's place");
    let location = DatastoreLocation::Dir { path: session.fixture.datastore.join("missing") };
    let missing = DatastoreSpec { location, ..session.place.clone() };
    let code = ErrorCode::InvalidRequest;
    refused(agent.probe_datastore(missing.clone()).await, code, "a missing place");
    refused(agent.examine_datastore(missing).await, code, "examining a missing place");

    let new = |datastore: &DatastoreSpec, image: Option<&Path>| NewDisk {
        disk: DiskSpec { datastore: datastore.clone(), ..session.disk(1).clone() },
        source: image.map(|path| ImageSource {
            path: path.to_owned(),
            format: ImageFormat::Raw,
            force: false,
        }),
        firmware: None,
    };
    let disk = new(&session.place, Some(&session.fixture.image));
    done(agent.examine_disk(disk).await, "examining a disk that can be created");
    let disk = new(&session.place, Some(&session.fixture.datastore.join("missing")));
    let code = ErrorCode::InvalidRequest;
    refused(agent.examine_disk(disk).await, code, "examining a disk without its image");
    let other = DatastoreSpec { datastore: DatastoreId::new(), ..session.place.clone() };
    let code = ErrorCode::WrongState;
    refused(agent.examine_disk(new(&other, None)).await, code, "a disk on another datastore");

    let condition = done(agent.measure_datastore(session.place.clone()).await, "measuring");
    let DatastoreCondition::Available { usage, .. } = condition else { panic!("{condition:?}") };
    assert!(usage.capacity >= usage.free && usage.free > 0);
    let other = DatastoreSpec { datastore: DatastoreId::new(), ..session.place.clone() };
    let condition = done(agent.measure_datastore(other.clone()).await, "measuring another's place");
    assert!(matches!(condition, DatastoreCondition::WrongMark { .. }), "{condition:?}");
    let contents = done(agent.scan_datastore(session.place.clone()).await, "scanning");
    assert!(contents.images.is_empty() && contents.incomplete.is_none(), "{contents:?}");
    refused(agent.scan_datastore(other).await, ErrorCode::WrongState, "scanning another's place");
    shared::between_hosts(agent, session).await;
}

async fn registration(agent: &dyn HostAgent, session: &Session) {
    let spec = &session.spec;
    for broken in [
        VmSpec { vcpus: 0, ..spec.clone() },
        VmSpec { memory: 1, ..spec.clone() },
        VmSpec { name: "a,b".to_owned(), ..spec.clone() },
        VmSpec { key: None, ..spec.clone() },
        VmSpec { devices: vec![spec.devices[0].clone(); 2], ..spec.clone() },
        VmSpec { devices: vec![spec.devices[2].clone(); 2], ..spec.clone() },
    ] {
        refused(agent.register_vm(broken).await, ErrorCode::InvalidRequest, "a broken VM");
    }
    assert!(session.seen(agent).await.is_none());
    let before = state(agent).await;
    done(agent.register_vm(spec.clone()).await, "registering");
    let vm = session.now(agent).await;
    assert_eq!((vm.power, vm.key), (Power::Off, KeyState::Missing));
    assert!(vm.stopped.is_none() && vm.disks.is_empty());
    let after = done(agent.state(Some(before.known()), STATE_WAIT_MAX).await, "news");
    assert!(after.generation > before.generation);
    assert_eq!(after.since, Some(before.generation), "all VMs are reported");
    assert_eq!(after.vms, [vm], "the changed VMs are not exactly those reported");
    done(agent.register_vm(spec.clone()).await, "registering again");
    // Without a change the answer comes when the time is over, not before.
    let now = state(agent).await;
    let started = Instant::now();
    let wait = Duration::from_millis(1100);
    let none = done(agent.state(Some(now.known()), wait).await, "no change");
    assert!(none.vms.is_empty() && none.gone.is_empty(), "{none:?}");
    // Over HTTP the time is given in whole seconds.
    assert!(started.elapsed() >= Duration::from_secs(1));
    let larger = VmSpec { memory: 128 << 20, ..spec.clone() };
    done(agent.register_vm(larger).await, "replacing one that is off");
    done(agent.register_vm(spec.clone()).await, "and back");
    let now = state(agent).await;
    done(agent.unregister_vm(spec.vm).await, "forgetting");
    let gone = done(agent.state(Some(now.known()), STATE_WAIT_MAX).await, "news");
    assert_eq!((gone.since, &*gone.gone), (Some(now.generation), &[spec.vm][..]), "{gone:?}");
    let strange = done(agent.state(Some((Incarnation::new(), 1)), STATE_WAIT_MAX).await, "all");
    assert_eq!(strange.since, None, "changes since a state of another agent");
    let later = Some((now.incarnation, now.generation + 1_000_000));
    assert_eq!(done(agent.state(later, Duration::ZERO).await, "all").since, None);
    done(agent.register_vm(spec.clone()).await, "registering once more");
}

async fn keys(agent: &dyn HostAgent, session: &Session) {
    let (vm, spec) = (session.vm(), &session.spec);
    let locked = "without its key";
    let disk = session.disk(0).disk;
    refused(session.create(agent, disk, None).await, ErrorCode::Locked, locked);
    let reference = spec.key.as_ref().expect("the VM has a key");
    let other = SecretBytes::random(KEK_LEN).expect("locked memory");
    let wrong = seal_for(&session.key_box, vm, reference, &other);
    refused(agent.offer_key(vm, wrong).await, ErrorCode::KeyMismatch, "another key");
    let elsewhere = seal_for(&session.key_box, VmId::new(), reference, &session.kek);
    refused(agent.offer_key(vm, elsewhere).await, ErrorCode::KeyMismatch, "another VM's key");
    let stale_box = crate::keys::KeyBox::new().expect("locked memory").public();
    let stale = seal_for(&stale_box, vm, reference, &session.kek);
    refused(agent.offer_key(vm, stale).await, ErrorCode::WrongState, "a key for an earlier agent");
    assert_eq!(session.now(agent).await.key, KeyState::Missing);
    done(session.offer(agent).await, "the key");
    done(session.offer(agent).await, "the key again");
    assert_eq!(session.now(agent).await.key, KeyState::Held);
    let mut changed = spec.clone();
    changed.key = Some(reference_of(&other, vm, "another-key"));
    done(agent.register_vm(changed).await, "registering another key reference");
    assert_eq!(session.now(agent).await.key, KeyState::Missing, "the key of another reference");
    done(agent.register_vm(spec.clone()).await, "and back");
    assert_eq!(session.now(agent).await.key, KeyState::Missing);
    done(session.offer(agent).await, "the key once more");
}

/// Waits for the banner on the console and has a text echoed.
async fn console(agent: &dyn HostAgent, session: &Session) {
    // The agent may not have noticed yet that an earlier client is gone.
    let mut console =
        done(agent.console(session.vm(), ConsoleClaim::TakeOver).await, "the console");
    let mut seen = Vec::new();
    // A new text each time: an earlier echo may be replayed.
    let word = DiskId::new().to_string();
    let mut to_type = Some(word.as_str());
    let talk = async {
        let mut wanted = BANNER;
        loop {
            let text = String::from_utf8_lossy(&seen);
            if let Some((_, after)) = text.rsplit_once(wanted) {
                let Some(next) = to_type.take() else { return };
                seen = after.as_bytes().to_vec();
                wanted = next;
                console.write_all(next.as_bytes()).await.expect("typing");
            }
            let mut chunk = [0; 1024];
            let length = console.read(&mut chunk).await.expect("reading the console");
            assert!(length > 0, "the console ended: {}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&chunk[..length]);
        }
    };
    let outcome = timeout(session.fixture.timeout, talk).await;
    assert!(outcome.is_ok(), "the console shows no guest");
}

/// The screen speaks VNC, and ends with its client alone.
async fn screen(agent: &dyn HostAgent, session: &Session) {
    for _ in 0..2 {
        let mut screen = done(agent.screen(session.vm()).await, "the screen");
        let mut version = [0; 12];
        screen.read_exact(&mut version).await.expect("the screen says nothing");
        assert_eq!(&version, b"RFB 003.008\n");
    }
}

/// A console in use is refused. Its client is told when another one takes it over. Once released, it is free.
async fn one_console_at_a_time(agent: &dyn HostAgent, session: &Session) {
    let (vm, limit) = (session.vm(), session.fixture.timeout);
    let mut first = done(agent.console(vm, ConsoleClaim::TakeOver).await, "the console");
    let second = agent.console(vm, ConsoleClaim::IfFree).await;
    refused(second.map(drop), ErrorCode::InUse, "a console in use");
    let second = done(agent.console(vm, ConsoleClaim::TakeOver).await, "taking it over");
    let end = timeout(limit, first.read_to_end(&mut Vec::new())).await;
    let end = end.expect("the first console does not end").expect_err("the client is not told why");
    assert!(is_taken_over(&end), "{end}");
    drop(second);
    let give_up = Instant::now() + limit;
    while let Err(problem) = agent.console(vm, ConsoleClaim::IfFree).await {
        assert_eq!(problem.code, ErrorCode::InUse, "{problem}");
        assert!(Instant::now() < give_up, "a released console is not free");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn running(agent: &dyn HostAgent, session: &Session) {
    let (vm, spec) = (session.vm(), &session.spec);
    let none = agent.console(vm, ConsoleClaim::TakeOver).await;
    refused(none.map(drop), ErrorCode::WrongState, "a console of a VM that is off");
    done(agent.power_off(vm, PowerOff::Force).await, "stopping one that is off");
    let press = PowerOff::Shutdown { seconds: 2 };
    done(agent.power_off(vm, press).await, "the same, gently");
    done(agent.power_off(vm, PowerOff::CancelStart).await, "cancelling no start");
    nics::examined(agent, session).await;
    done(agent.power_on(vm).await, "starting");
    done(agent.power_on(vm).await, "starting again");
    session.power(agent, Power::Running).await;
    done(agent.power_on(vm).await, "starting one that runs");
    let cancelled = agent.power_off(vm, PowerOff::CancelStart).await;
    refused(cancelled, ErrorCode::WrongState, "cancelling a start that is over");
    assert_eq!(session.now(agent).await.power, Power::Running);
    nics::connected(agent, session).await;
    console(agent, session).await;
    console(agent, session).await;
    one_console_at_a_time(agent, session).await;
    screen(agent, session).await;

    done(agent.register_vm(spec.clone()).await, "registering the same while it runs");
    running::registered_anew(agent, session).await;
    running::controlled(agent, session).await;
    dumps::running(agent, session).await;
    panics::running(agent, session).await;
    survey::of_running(agent, session).await;
    refused(agent.unregister_vm(vm).await, ErrorCode::WrongState, "unregistering while it runs");
    for disk in spec.disks() {
        refused(agent.delete_disk(vm, disk.disk).await, ErrorCode::InUse, "a disk in use");
        let made = session.create(agent, disk.disk, None).await;
        refused(made, ErrorCode::InUse, "making a disk in use");
    }
    let disk = session.disk(0).disk;
    let changed = agent.expose_disk(vm, disk, Exposing::Hold { writable: true }).await;
    refused(changed.map(drop), ErrorCode::InUse, "exposing a disk in use, to be changed");
    bitmaps::changed(agent, session).await;
    replicas::followed(agent, session).await;
    let reading = agent.expose_disk(vm, disk, Exposing::Hold { writable: false }).await;
    let mut beside = done(reading, "exposing a disk in use");
    speaks_nbd(agent, session, disk).await;
    ignored_power_button(agent, session).await;
    let mut held = done(agent.console(vm, ConsoleClaim::TakeOver).await, "the console");
    done(agent.power_off(vm, press).await, "pressing the power button");
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    let vm_state = session.now(agent).await;
    assert_eq!(vm_state.power, Power::Off);
    survey::of_one_that_is_off(agent, session).await;
    refused(agent.bitmaps(vm, disk).await, ErrorCode::WrongState, "bitmaps of a VM that is off");
    replicas::at_rest(agent, session).await;
    assert_eq!(vm_state.stopped.expect("why").reason, StopReason::PoweredOff);
    let end = timeout(session.fixture.timeout, held.read_to_end(&mut Vec::new())).await;
    assert!(end.is_ok(), "the console does not end with the VM");
    let end = timeout(session.fixture.timeout, beside.read_to_end(&mut Vec::new())).await;
    assert!(end.is_ok(), "a disk stays exposed beside a guest that is gone");
    cdrom::drive(agent, session).await;
    done(agent.power_on(vm).await, "starting after forcing it off");
    session.wait(agent, "running", |state| state.power == Power::Running).await;
    console(agent, session).await;
    bitmaps::start(agent, session).await;
}

/// The suite's guest ignores the power button.
async fn ignored_power_button(agent: &dyn HostAgent, session: &Session) {
    let (vm, code) = (session.vm(), ErrorCode::InvalidRequest);
    for seconds in [0, SHUTDOWN_SECONDS_MAX + 1] {
        refused(agent.power_off(vm, PowerOff::Shutdown { seconds }).await, code, "no such time");
    }
    assert_eq!(session.now(agent).await.power, Power::Running);
    let began = Instant::now();
    done(agent.power_off(vm, PowerOff::Shutdown { seconds: 1 }).await, "pressing the power button");
    done(agent.power_off(vm, PowerOff::Shutdown { seconds: 2 }).await, "pressing it again");
    assert_eq!(session.now(agent).await.power, Power::Stopping);
    refused(agent.power_on(vm).await, ErrorCode::WrongState, "starting one that is stopping");
    session.wait(agent, "running on", |state| state.power == Power::Running).await;
    // The later press counts. The VM does not stay `stopping` longer than the given time.
    let waited = began.elapsed();
    assert!((Duration::from_millis(1900)..STOPPING_MAX).contains(&waited), "{waited:?}");
}

/// The second part, with the next run of the agent: the VM still runs and the key is gone. In the end its
/// filter dies.
pub async fn second_run(agent: &dyn HostAgent, mut session: Session) -> (Session, Stopped) {
    let (vm, spec) = (session.vm(), session.spec.clone());
    let found = session.now(agent).await;
    assert_eq!((found.power, found.key), (Power::Running, KeyState::Missing));
    refused(session.offer(agent).await, ErrorCode::WrongState, "a key sealed to the earlier agent");
    session.key_box = done(agent.describe().await, "describe").key_box;
    done(agent.register_vm(spec.clone()).await, "registering one that was found");
    done(session.offer(agent).await, "the key");
    let known = session.now(agent).await;
    assert_eq!((known.power, known.key), (Power::Running, KeyState::Held));
    console(agent, &session).await;
    assert_eq!(bitmaps::named(agent, &session).await, bitmaps::LEFT, "one ended with an agent");
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    done(agent.power_on(vm).await, "starting");
    session.wait(agent, "running", |state| state.power == Power::Running).await;
    console(agent, &session).await;
    assert_eq!(
        bitmaps::named(agent, &session).await,
        bitmaps::LEFT,
        "the bitmap ended with its VM's run"
    );
    let dead = filters_die(agent, &session).await;
    let died = dead.died.expect("an alarm");
    assert_eq!(died.reason, StopReason::FilterDied, "{}", died.detail);
    assert_eq!(dead.stopped.as_ref(), Some(&died));
    (session, died)
}

/// Kills filters until the VM stops. The guest runs on after each but the last.
async fn filters_die(agent: &dyn HostAgent, session: &Session) -> VmState {
    let told = |state: &VmState| {
        let restarted = |notice: &&Notice| notice.code == NoticeCode::FilterRestarted;
        state.notices.iter().find(restarted).map(|notice| notice.detail.clone())
    };
    let mut before = None;
    for death in 1.. {
        (session.fixture.kill_filter)(session.vm());
        let now = session.wait(agent, "another filter, or the VM's end", |state| {
            state.power == Power::Off || told(state).is_some_and(|detail| Some(detail) != before)
        });
        let now = now.await;
        if now.power == Power::Off {
            assert_eq!(death, RESTARTS_MAX + 1, "{:?}", now.stopped);
            return now;
        }
        before = told(&now);
        assert_eq!(now.power, Power::Running);
        if death == 1 {
            assert_eq!(
                bitmaps::named(agent, session).await,
                bitmaps::LEFT,
                "one ended with its filter"
            );
            console(agent, session).await;
        }
    }
    unreachable!("the loop ends by its return")
}

/// The third part, with one more run of the agent: the death is reported until the VM runs again.
pub async fn third_run(agent: &dyn HostAgent, (mut session, died): (Session, Stopped)) {
    let vm = session.vm();
    let spec = session.spec.clone();
    let told = Some(died);
    let found = session.now(agent).await;
    assert_eq!((found.power, found.key), (Power::Off, KeyState::Missing));
    assert_eq!(
        (&found.died, &found.stopped),
        (&told, &told),
        "the death is not reported as before"
    );
    refused(examine::start(agent, vm).await, ErrorCode::Locked, "asking about it");
    refused(agent.power_on(vm).await, ErrorCode::Locked, "starting without the key");
    assert_eq!(session.now(agent).await.died, told, "a start that failed cleared it");
    session.key_box = done(agent.describe().await, "describe").key_box;
    done(agent.register_vm(spec.clone()).await, "registering one that was found dead");
    jobs::locked_exports(agent, &session).await;
    done(session.offer(agent).await, "the key");
    jobs::exports(agent, &session).await;
    done(agent.power_on(vm).await, "starting");
    let runs = session.wait(agent, "running", |state| state.power == Power::Running).await;
    assert_eq!(runs.died, None, "it runs");
    let kept = bitmaps::named(agent, &session).await;
    assert!(kept.is_empty(), "those of a VM that ended without its filter are kept: {kept:?}");
    console(agent, &session).await;
    examine::running(agent, &session).await;
    running::grown(agent, &mut session).await;
    let plugged = running::plugged(agent, &session).await;
    console(agent, &session).await;
    done(agent.power_off(vm, PowerOff::Force).await, "forcing it off");
    assert_eq!(session.now(agent).await.died, None, "a requested stop is reported as a death");
    running::deleted(agent, &session, plugged).await;
    keys::others(agent, &mut session).await;
    let spec = session.spec.clone();

    done(agent.unregister_vm(vm).await, "forgetting");
    done(agent.unregister_vm(vm).await, "unregistering again");
    assert!(session.seen(agent).await.is_none());
    // Removing disks needs no key.
    done(agent.register_vm(spec.clone()).await, "registering to remove");
    refused(agent.power_on(vm).await, ErrorCode::Locked, "starting without the key");
    for disk in spec.disks() {
        done(agent.delete_disk(vm, disk.disk).await, "removing a disk");
    }
    done(agent.unregister_vm(vm).await, "unregistering at last");
    assert!(state(agent).await.vms.is_empty());
}

/// Log levels can be changed. Invalid levels change nothing.
async fn log_levels(agent: &dyn HostAgent) {
    let before = done(agent.log_level().await, "log_level").levels;
    let set = |levels: &str| agent.set_log_level(levels.to_owned());
    assert_eq!(
        done(set("WARN, vmseal_agent=debug").await, "set_log_level").levels,
        "warn,vmseal_agent=debug"
    );
    for wrong in ["", "debg", "info,", "x=y", &"a".repeat(10_000)] {
        refused(set(wrong).await, ErrorCode::InvalidRequest, wrong);
    }
    assert_eq!(done(agent.log_level().await, "log_level").levels, "warn,vmseal_agent=debug");
    assert_eq!(done(set(&before).await, "set_log_level").levels, before);
}

/// Runs all parts, each on a new agent from `next`.
pub async fn all_runs<F, A>(fixture: Fixture, mut next: F)
where
    F: FnMut() -> A,
    A: Future<Output = Arc<dyn HostAgent>>,
{
    let agent = next().await;
    log_levels(&*agent).await;
    let session = first_run(&*agent, fixture).await;
    drop(agent);
    let agent = next().await;
    let session = second_run(&*agent, session).await;
    drop(agent);
    third_run(&*next().await, session).await;
}
