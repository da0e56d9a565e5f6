//! Starting a VM: start QEMU, open the disks and start the filter meanwhile, connect monitor and console, run the guest.
//!
//! ```text
//!   QEMU    started ──► its own start ──► waits for its disks ────────► has its disks, answers its monitor
//!   filter              disks opened ─► started ─► answers ─► connected ─┘
//! ```
//! Every process is on record before it runs, and the guest runs only when all disks are connected. When a
//! step fails or the start is cancelled, the caller sweeps the run directory and nothing is left: QEMU does not
//! wait for a filter that does not come.

use std::collections::BTreeMap;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use vmseal_api::boot::BootDevice;
use vmseal_api::hardware::Firmware;
use vmseal_api::host::{Attachment, Notice, VmSpec};
use vmseal_api::id::NicId;
use vmseal_api::nic::NicLink;
use vmseal_api::problem::{ErrorCode, Problem};

use super::asleep;
use super::guest_addresses::GuestAddresses;
use super::panicking::{self, PANICKED};
use super::placing;
use super::queues;
use super::running::{QemuEnd, Running};
use super::serve::{self, Memory, Plan, filter, socket, wait_connected};
use super::service::Service;
use super::stream;
use super::thawing::Thawing;
use super::tpm::{self, Tpm};
use super::{Shared, internal};
use crate::filter::log_level;
use crate::filter::metrics;
use crate::filter::{self, Control};
use crate::hypervisor::cdrom;
use crate::hypervisor::console::Console;
use crate::hypervisor::firmware::{self, OpenFirmware};
use crate::hypervisor::guest_agent::{self, GuestAgent};
use crate::hypervisor::hardware;
use crate::hypervisor::network::{self, Card};
use crate::hypervisor::plug;
use crate::hypervisor::qemu::{self, Given};
use crate::hypervisor::qmp::{Event, Qmp};
use crate::hypervisor::usual_order;
use crate::process::Process;
use crate::process::live::Live;
use crate::process::run_dir::ProcessDir;
use crate::process::run_record::{Phase, Record};
use crate::process::users::Slot;
use crate::storage::lease;
use crate::storage::medium;
use crate::timed;

/// QEMU's status of a guest that has not run yet.
const NOT_STARTED: &str = "prelaunch";

/// Starts it as far as that can be cancelled: its guest stands still, and memory that is saved stays so.
pub async fn start(
    shared: &Shared,
    directory: &ProcessDir,
    plan: Arc<Plan>,
    slot: Arc<Slot>,
) -> Result<(Running, Vec<Notice>), Problem> {
    let (running, notices) = boot(shared, directory, plan.clone(), slot).await?;
    // In this order: a VM on record as running that is found dead then has no older death on record.
    shared.died.forget(plan.spec.vm).map_err(internal)?;
    running.write(&plan.spec)?;
    Ok((running, notices))
}

/// Has its guest run. Not to be cancelled: a guest that was stopped in the middle would have lost its saved memory.
pub async fn go_on(plan: &Plan, running: &Running) -> Result<(), Problem> {
    if let Memory::Saved(resume) = &plan.memory {
        resume.use_up().await?;
    }
    if !running.live.paused {
        running.qmp.execute("cont", Value::Null).await.map_err(internal)?;
    }
    if let Memory::Saved(resume) = &plan.memory {
        resume.remove().await;
    }
    Ok(())
}

/// Starts its processes, with the memory that its guest is to have; the guest does not run yet.
pub async fn boot(
    shared: &Shared,
    directory: &ProcessDir,
    plan: Arc<Plan>,
    slot: Arc<Slot>,
) -> Result<(Running, Vec<Notice>), Problem> {
    directory.renew().await.map_err(internal)?;
    let mut live = plan.live.clone();
    // What is loaded says it, and no filter is asked to do anything until the guest goes on.
    live.queues_known = live.paused && !matches!(plan.memory, Memory::New);
    // A memory that was saved, or comes from another host, is that of a machine that is there already.
    if matches!(plan.memory, Memory::New) {
        live.memory_padding = qemu::memory_padding(&plan.spec, shared.accelerator.kind);
        let usually = plan.spec.hardware.boot_order().contains(&BootDevice::Network);
        live.card_roms = plan.boot_once == Some(BootDevice::Network) && !usually;
    }
    if !matches!(plan.memory, Memory::Arriving(_)) {
        let leased = plan.clone();
        let read = spawn_blocking(move || lease::read(&leased.spec));
        live.lease = Some(read.await.map_err(internal)??);
    }
    let phase = match plan.memory {
        Memory::Arriving(_) => Phase::Receiving,
        Memory::New | Memory::Saved(_) => Phase::Starting,
    };
    directory.write(&plan.spec, slot.number(), phase, &live).map_err(internal)?;
    let listeners = plan
        .spec
        .disks()
        .filter(|disk| disk.role.attachment() == Attachment::Disk)
        .filter_map(|disk| live.disk(disk.disk))
        .map(|disk| directory.listen(&socket(disk.socket)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(internal)?;
    let control = Control::of(directory);
    let cards = open_cards(&plan, &slot).await?;
    let (firmware, variables) = open_firmware(shared, directory, &plan, &slot)?.unzip();
    check_machine(shared, &plan.spec, (plan.boot_once, live.card_roms))?;
    let medium = medium::open(&plan.spec.hardware, &shared.transfer).await?;
    let (tpm, tpm_control, tpm_notice) = tpm::start(shared, directory, &plan, &slot).await?;
    let spec = &plan.spec;
    let accelerator = shared.accelerator.kind;
    let qemu = shared
        .qemu
        .start(
            spec,
            accelerator,
            directory,
            Given {
                disks: &listeners,
                cards: &cards,
                firmware: firmware.as_ref(),
                tpm: tpm_control.as_ref(),
                medium: medium.as_ref().filter(|_| !plan.memory.has_other_medium()),
                boot_once: plan.boot_once,
                live: &live,
                machine: plan.memory.machine(),
            },
            slot.qemu(),
        )
        .map_err(|error| internal(format!("QEMU cannot be started: {error}")))?;
    drop(tpm_control);
    // QEMU has their taps now, alone: they are gone when it is.
    live.nics = cards.into_iter().map(|card| card.state).collect();
    metrics::QEMU_STARTED.add();
    // QEMU starts meanwhile. If this fails, that is the reason also where QEMU has ended.
    let (filter, mut notices) = filter(shared, directory, &plan, &slot, variables).await?;
    notices.extend(tpm_notice);
    // Until here: the filter can be connected where QEMU has ended, whose own reason is found next.
    drop(listeners);

    let (console, qmp, events) = connect(directory, &qemu, Some(&filter)).await?;
    // Its monitor answers: it listens at the forwarded ports.
    network::backlog::lengthen(&qemu, &live.nics);
    wait_connected(&control, spec, |_| true).await?;
    for nic in spec.nics().filter(|nic| nic.link == NicLink::Down) {
        set_link(&qmp, nic.nic, NicLink::Down).await?;
    }
    if !spec.hardware.on_crash.is_usual() {
        panicking::tell_qemu(&qmp, spec.hardware.on_crash).await.map_err(internal)?;
    }
    if plan.boot_once.is_some() {
        usual_order::restore(&qmp, spec).await.map_err(internal)?;
    }
    let loaded = match &plan.memory {
        Memory::New => Ok(()),
        Memory::Saved(resume) => resume.load(&qmp).await,
        Memory::Arriving(arriving) => {
            arriving.load(&qmp, placing::placement(shared, &qemu, spec, &live)).await
        }
    };
    if let Err(problem) = loaded {
        // QEMU ends where it cannot load the memory, and its log says why; not where the other host has ended the sending.
        return Err(match problem.code {
            ErrorCode::Internal if !problem.of_other_host => {
                internal(format!("{problem}; QEMU's log: {}", directory.log_ends(qemu::NAME)))
            }
            _ => problem,
        });
    }
    if !matches!(plan.memory, Memory::New) {
        // What is loaded has the links of before: they may have been set since, while the VM was suspended or after its snapshot. Those
        // that are down were set so before, too: QEMU announces cards as soon as it has loaded them.
        set_links(&qmp, spec).await?;
    }
    if plan.memory.has_other_medium() {
        // The guest is told that the medium has changed: it drops what it has cached of the former one.
        cdrom::change(&qmp, medium.as_ref()).await.map_err(internal)?;
    }
    spec.nics().for_each(|nic| live.note_link(nic));
    let running = Running {
        directory: directory.clone(),
        qemu,
        service: Service::Served(filter),
        qmp: Arc::new(qmp),
        events,
        console,
        guest: guest_of(directory, spec),
        addresses: GuestAddresses::default(),
        thawing: Thawing::default(),
        control,
        tpm,
        slot,
        qemu_end: QemuEnd::default(),
        left: false,
        live,
        saving: None,
        sending: None,
        panicked: false,
        asleep: false,
        begun_still: false,
        lost_still: false,
        left_ports: BTreeMap::new(),
        dumping: None,
    };
    Ok((running, notices))
}

/// Checks that the host has what the machine of a VM takes that is about to start: from another device first or not, and with ROMs of its
/// network cards that it was started by before, or not.
fn check_machine(
    shared: &Shared,
    spec: &VmSpec,
    from: (Option<BootDevice>, bool),
) -> Result<(), Problem> {
    hardware::check_memory(&spec.hardware, spec.memory)?;
    shared.qemu.check_start(spec, from)
}

/// Checks what a start takes of the host beside disks and network cards, as [`check_machine`]. Nothing is started.
pub async fn examine(
    shared: &Shared,
    spec: &VmSpec,
    from: (Option<BootDevice>, bool),
) -> Result<(), Problem> {
    drop(shared.firmware.code(spec.hardware.firmware)?);
    check_machine(shared, spec, from)?;
    if let Some(path) = spec.hardware.medium() {
        // What waits here is the owner of the VM.
        let (path, transfer) = (path.to_owned(), shared.transfer.clone());
        let open = move |path: &Path| medium::open_file(path, &transfer).map(drop);
        timed::call(&path.clone(), move || open(&path)).await?;
    }
    if spec.hardware.tpm { shared.swtpm.examine() } else { Ok(()) }
}

/// Opens the network cards. Nothing has been started that a refusal would have to end.
async fn open_cards(plan: &Arc<Plan>, slot: &Slot) -> Result<Vec<Card>, Problem> {
    let (plan, own_user) = (plan.clone(), slot.qemu().is_some());
    let open = move || network::open(&plan.spec, &plan.nics_before, own_user);
    spawn_blocking(open).await.map_err(internal)?
}

/// Opens the firmware, where it is not QEMU's own, and makes the socket of its variables: QEMU connects to it once when
/// it starts, and waits there until the filter answers.
fn open_firmware(
    shared: &Shared,
    directory: &ProcessDir,
    plan: &Plan,
    slot: &Slot,
) -> Result<Option<(OpenFirmware, UnixListener)>, Problem> {
    let firmware = plan.spec.hardware.firmware;
    let Some(code) = shared.firmware.code(firmware)? else { return Ok(None) };
    let sockets = directory.sockets_for_qemu().map_err(internal)?;
    let variables = directory.listen_for_qemu(firmware::SOCKET, slot.qemu()).map_err(internal)?;
    let secure_boot = firmware == Firmware::UefiSecureBoot;
    Ok(Some((OpenFirmware { code, sockets, secure_boot }, variables)))
}

/// The way to the agent in the guest.
fn guest_of(directory: &ProcessDir, spec: &VmSpec) -> GuestAgent {
    GuestAgent::at(&spec.name, directory.socket(guest_agent::SOCKET))
}

/// Plugs the network cards of a VM in or out, as they are to be.
async fn set_links(qmp: &Qmp, spec: &VmSpec) -> Result<(), Problem> {
    for nic in spec.nics() {
        set_link(qmp, nic.nic, nic.link).await?;
    }
    Ok(())
}

/// Plugs a network card in or out.
pub async fn set_link(qmp: &Qmp, nic: NicId, link: NicLink) -> Result<(), Problem> {
    let arguments = json!({"name": qemu::card_id(nic), "up": link == NicLink::Up});
    qmp.execute("set_link", arguments).await.map(drop).map_err(internal)
}

/// Connects console and monitor; returns the output of QEMU or the filter when one of them ends instead.
async fn connect(
    directory: &ProcessDir,
    qemu: &Process,
    filter: Option<&Process>,
) -> Result<(Console, Qmp, tokio::sync::mpsc::Receiver<Event>), Problem> {
    let connecting = async {
        let earlier =
            directory.log_end(qemu::CONSOLE, crate::hypervisor::console::REPLAY_MAX as u64);
        let socket = directory.socket(qemu::CONSOLE);
        let console = Console::connect(&socket, &earlier).await.map_err(internal)?;
        let (qmp, events) =
            Qmp::connect(&directory.socket(qemu::MONITOR)).await.map_err(internal)?;
        Ok::<_, Problem>((console, qmp, events))
    };
    let filter_ended = async {
        match filter {
            Some(filter) => filter.ended().await,
            None => std::future::pending().await,
        }
    };
    // The filter first: QEMU may end because its filter has, and no filter ends because its QEMU has.
    let mut ended = pin!(async {
        tokio::select! {
            biased;
            exit = filter_ended => internal(filter::ended(exit, directory)),
            exit = qemu.ended() => {
                internal(format!("QEMU {exit}, {}", directory.log_ends(qemu::NAME)))
            }
        }
    });
    let connected = tokio::select! {
        biased;
        problem = &mut ended => return Err(problem),
        connected = connecting => connected,
    };
    match connected {
        // The kernel closes the sockets of a process before its end is seen.
        Err(problem) => Err(timeout(filter::END_SEEN_WITHIN, ended).await.unwrap_or(problem)),
        connected => connected,
    }
}

/// Why live processes cannot be connected to.
pub enum NotConnected {
    /// The guest has not run and cannot: nothing is lost when it is ended.
    NeverRan(Problem),
    /// Any other reason.
    Failed(Problem),
}

impl From<Problem> for NotConnected {
    fn from(problem: Problem) -> Self {
        Self::Failed(problem)
    }
}

/// Connects to the processes of a VM that an earlier agent started, and runs its guest if that agent died
/// just before that. A filter that has died meanwhile is replaced later.
pub async fn reconnect(
    directory: &ProcessDir,
    record: &Record,
    qemu: Process,
    filter: Option<Process>,
    slot: Arc<Slot>,
) -> Result<Running, NotConnected> {
    let spec = &record.spec;
    let (console, qmp, events) = connect(directory, &qemu, filter.as_ref()).await?;
    let control = Control::of(directory);
    let filter = match filter {
        // That of a guest that is handed over serves placeholders.
        Some(filter) if record.live.handed_over.is_some() => Some(filter),
        Some(filter) => with_stacks_of_notes(spec, &control, filter, directory).await?,
        None => None,
    };
    if filter.is_some() && !log_level::pass_on(&control).await {
        tracing::info!(vm = %spec.vm, "a filter of an earlier vmseal keeps its log levels");
    }
    let (spec, mut live) = arrived(&qmp, record).await?;
    let spec = &spec;
    // An agent may have ended between putting it on record and doing it.
    set_links(&qmp, spec).await?;
    spec.nics().for_each(|nic| live.note_link(nic));
    // An earlier agent may not have noted it.
    let card_roms = has_card_roms(&qmp, spec).await;
    live.card_roms |= card_roms;
    // An agent may have ended before it did this for a start from another device.
    if let Err(error) = usual_order::restore(&qmp, spec).await {
        tracing::warn!(vm = %spec.vm, %error, "its boot order at a reset may be that of its last start");
    }
    // An earlier agent may not have known of it.
    network::backlog::lengthen(&qemu, &live.nics);
    let tpm = Tpm::adopt(directory, spec).map_err(internal)?;
    if let Err(error) = panicking::tell_qemu(&qmp, spec.hardware.on_crash).await {
        tracing::warn!(vm = %spec.vm, %error, "QEMU may do something else when its guest panics");
    }
    let status = qmp.execute("query-status", Value::Null).await.map_err(internal)?;
    // A stream that was given up, or saving that failed, leaves one so that had panicked before.
    let panicked =
        status["status"] == PANICKED || live.panics.now.is_some() && stream::stands_still(&status);
    if !panicked {
        // An agent may have ended before it noted that the guest boots again.
        live.panics.over();
    }
    if live.paused || panicked {
        // QEMU would flush its disks again, and wait for a filter that may not be there.
        if queues::runs(&status) {
            qmp.execute("stop", Value::Null).await.map_err(internal)?;
            live.queues_known = false;
        }
    } else if live.handed_over.is_some() {
        // Another host may have its guest: only the server knows.
    } else if status["running"] != Value::Bool(true) {
        // Without a filter this is an error where the guest has not run yet, and it is started again. Else the next one follows.
        let never_ran = status["status"] == NOT_STARTED;
        if never_ran || filter.is_some() {
            wait_connected(&control, spec, |disk| live.disk(disk).is_some()).await.map_err(
                |problem| {
                    if never_ran { NotConnected::NeverRan(problem) } else { problem.into() }
                },
            )?;
        }
        // An agent may have ended while it saved the guest's memory.
        stream::give_up(&qmp).await.map_err(internal)?;
        qmp.execute("cont", Value::Null).await.map_err(internal)?;
    }
    // One that was paused by an operator has not.
    let panicked = panicked && (!live.paused || live.panics.now.is_some());
    let lost_still = panicked && filter.is_none();
    let asleep = asleep::is_asleep(&qmp).await.map_err(internal)?;
    let ran = filter.is_some() && queues::taken(&control, spec, &live, &qmp).await;
    Ok(Running {
        directory: directory.clone(),
        qemu,
        service: filter.map_or(Service::Down(None), Service::Served),
        qmp: Arc::new(qmp),
        events,
        console,
        guest: guest_of(directory, spec),
        addresses: GuestAddresses::default(),
        thawing: Thawing::default(),
        control,
        tpm,
        slot,
        qemu_end: QemuEnd::default(),
        left: false,
        panicked,
        asleep,
        begun_still: !ran,
        lost_still,
        live,
        saving: None,
        sending: None,
        left_ports: BTreeMap::new(),
        dumping: None,
    })
}

/// The filter of a VM; it is ended if it does not serve the layers that the notes say, and another one follows.
async fn with_stacks_of_notes(
    spec: &VmSpec,
    control: &Control,
    filter: Process,
    directory: &ProcessDir,
) -> Result<Option<Process>, NotConnected> {
    let status = control.ready(&filter, directory).await.map_err(internal)?;
    let of = spec.clone();
    let has = spawn_blocking(move || serve::has_stacks_of(&of, &status)).await;
    match has.map_err(internal)? {
        Ok(true) => return Ok(Some(filter)),
        Ok(false) => {
            tracing::warn!(vm = %spec.vm, "the filter does not serve the new layers, and is replaced")
        }
        Err(problem) => {
            tracing::warn!(vm = %spec.vm, %problem, "the layers of its disks are not known");
            return Ok(Some(filter));
        }
    }
    if control.shut_down().await.is_err() {
        filter.kill();
    }
    filter.end_within(filter::SHUTDOWN_TIMEOUT).await;
    Ok(None)
}

/// Whether QEMU has ROMs in network cards that its VM's boot order gives none. What does not say it counts as without.
async fn has_card_roms(qmp: &Qmp, spec: &VmSpec) -> bool {
    if spec.hardware.boot_order().contains(&BootDevice::Network) {
        return false;
    }
    for nic in spec.nics() {
        match plug::has_rom(qmp, nic.nic).await {
            Ok(false) => {}
            Ok(true) => return true,
            Err(error) => {
                tracing::warn!(vm = %spec.vm, nic = %nic.nic, %error, "QEMU does not say whether a network card has a ROM");
            }
        }
    }
    false
}

/// The record without the devices that QEMU does not have: an agent ended before it plugged them in, or the guest has
/// let them go since.
async fn arrived(qmp: &Qmp, record: &Record) -> Result<(VmSpec, Live), Problem> {
    let (mut spec, mut live) = (record.spec.clone(), record.live.clone());
    let devices = plug::devices(qmp).await.map_err(internal)?;
    let there = |device: String| devices.contains(&device);
    live.disks.retain(|disk| disk.port.is_none() || there(qemu::disk_device(disk.disk)));
    for nic in live.nics.iter().filter(|nic| !there(plug::nic_device(nic.nic))) {
        // The agent ended before it plugged the card in, or after the guest let it go.
        plug::drop_network(qmp, nic.nic).await;
    }
    live.nics.retain(|nic| there(plug::nic_device(nic.nic)));
    live.nic_ports.retain(|nic, _| there(plug::nic_device(*nic)));
    spec.devices.retain(|device| live.has(device));
    Ok((spec, live))
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;
    use crate::process::run_dir::RunDir;
    use crate::process::run_dir::tests::spec;
    use crate::process::{self, Launch};

    /// A process in place of the one of this name.
    fn shell(directory: &ProcessDir, name: &str, script: &str) -> Process {
        process::launch(Launch {
            program: &process::open_program(Path::new("/bin/sh")).unwrap(),
            name,
            arguments: vec!["-c".into(), script.into()],
            keep: vec![],
            input: Stdio::null(),
            log: directory.log(name).unwrap(),
            user: None,
            locks_memory: false,
            record: &directory.process(name),
        })
        .unwrap()
    }

    #[tokio::test]
    async fn what_ended_first_is_the_reason_and_not_what_could_not_be_connected_then() {
        let root = tempfile::tempdir().unwrap();
        let directory = RunDir::open(root.path()).unwrap().vm(spec().vm);
        directory.renew().await.unwrap();
        let why = async |qemu: &Process, filter: &Process| {
            let connected = connect(&directory, qemu, Some(filter)).await;
            connected.expect_err("there is no monitor").detail
        };
        let filter = shell(&directory, filter::NAME, "exec sleep 60");
        // It may end before or after its console is found to be missing.
        let qemu = shell(&directory, qemu::NAME, "echo no such port; exit 1");
        let said = why(&qemu, &filter).await;
        assert!(said.contains("status 1") && said.contains("no such port"), "{said}");
        filter.kill();
        filter.ended().await;
        let said = why(&qemu, &filter).await;
        assert!(said.contains("the filter process") && !said.contains("port"), "{said}");
        directory.sweep().await.unwrap();
    }
}
