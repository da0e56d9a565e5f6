//! QEMU: its command line, and starting it.
//!
//! QEMU opens none of our files by path. Monitor, console, the console's log and the sockets for the disks'
//! filters are inherited descriptors, so that it can run as a user who may open none of them.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Stdio;

use vmseal_api::boot::BootDevice;
use vmseal_api::hardware::MemoryBacking;
use vmseal_api::host::{AcceleratorKind, Attachment, NicSpec, VmSpec};
use vmseal_api::id::{DiskId, NicId};
use vmseal_api::nic::{NicModel, PortForward};
use vmseal_api::problem::{ErrorCode, Problem};

use super::boot::{self, Order};
use super::cdrom;
use super::firmware::OpenFirmware;
use super::guest_agent;
use super::network::{Card, OpenTap};
use super::tpm;
use crate::process::live::{DiskInUse, Live};
use crate::process::ports::PORTS;
use crate::process::run_dir::ProcessDir;
use crate::process::{self, Launch, Process, User};

/// The name of the process in its directory.
pub const NAME: &str = "qemu";

/// The name of the monitor's socket.
pub const MONITOR: &str = "qmp";

/// The name of the console's socket and log.
pub const CONSOLE: &str = "console";

/// The block of the guest's memory, as QEMU has it in a migration: the name of the object.
pub const MEMORY_BLOCK: &str = "ram";

/// The additional memory of a machine that is emulated, in bytes: so that its size is no multiple of 256 KiB. With memory of
/// such a size QEMU 7.2 loses writes of an emulated guest that moves to another host (docs/decisions/216).
pub const EMULATED_PADDING: u64 = 8 << 10;

/// The PCI slot of the ports that devices are plugged into, its functions ([`crate::process::ports`]): the last one that disks on the root bus do not reach.
const PORTS_SLOT: &str = "1e";

/// The PCI slot of what every guest has; the first one that QEMU gives by itself.
const OWN_SLOT: &str = "01";

/// The ROMs by which network cards are started from.
const ROMS: [&str; 2] = ["efi-virtio.rom", "efi-e1000e.rom"];

/// What QEMU's system-call filter refuses.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// What is opened for a QEMU before it starts.
#[derive(Clone, Copy)]
pub struct Given<'a> {
    /// The listening sockets for the filter, one for each disk that the guest sees, in order. QEMU listens and the
    /// filter connects, because only then does QEMU continue with another filter after one has died.
    pub disks: &'a [UnixListener],
    /// The network cards.
    pub cards: &'a [Card],
    /// The firmware, where it is not QEMU's own.
    pub firmware: Option<&'a OpenFirmware>,
    /// The socket by which its TPM is controlled, where it has one.
    pub tpm: Option<&'a UnixStream>,
    /// What is in its CD-ROM drive, where there is something.
    pub medium: Option<&'a File>,
    /// What the firmware tries first this time.
    pub boot_once: Option<BootDevice>,
    /// How it is to have its devices.
    pub live: &'a Live,
    /// The type of the machine whose memory it waits for; none for a guest that boots.
    pub machine: Option<&'a str>,
}

/// The QEMU of this host.
#[derive(Debug)]
pub struct Qemu {
    path: PathBuf,
    program: File,
    version: String,
    cpu_models: Vec<String>,
    /// Where it looks for ROMs of devices.
    data: Vec<PathBuf>,
}

impl Qemu {
    /// Finds it and asks for its version.
    ///
    /// # Errors
    /// It is not there or does not run.
    pub fn find(name: &Path) -> io::Result<Self> {
        let path = process::find_program(name);
        let told = |error: io::Error| {
            let message = format!(
                "{}: {error}. Install Debian's qemu-system-x86 or give --qemu",
                path.display()
            );
            io::Error::new(error.kind(), message)
        };
        let program = process::open_program(&path).map_err(told)?;
        let output = std::process::Command::new(&path)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .map_err(told)?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().next().unwrap_or_default();
        let version = line.strip_prefix("QEMU emulator version ").unwrap_or(line).to_owned();
        let models = std::process::Command::new(&path)
            .args(["-cpu", "help"])
            .stdin(Stdio::null())
            .output()
            .map_err(told)?;
        let cpu_models = cpu_models(&String::from_utf8_lossy(&models.stdout));
        let data = std::process::Command::new(&path)
            .args(["-L", "help"])
            .stdin(Stdio::null())
            .output()
            .map_err(told)?;
        let data = String::from_utf8_lossy(&data.stdout).lines().map(PathBuf::from).collect();
        Ok(Self { path, program, version, cpu_models, data })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The version that it reports.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The models of processors that it knows.
    #[must_use]
    pub fn cpu_models(&self) -> &[String] {
        &self.cpu_models
    }

    /// Checks that network cards can be started from.
    ///
    /// # Errors
    /// `unsupported`, with the package that has their ROMs.
    pub fn check_network_boot(&self) -> Result<(), Problem> {
        let missing = ROMS.iter().find(|rom| !self.data.iter().any(|at| at.join(rom).exists()));
        let Some(rom) = missing else { return Ok(()) };
        let what = format!(
            "guests start from the network by {rom}, which QEMU does not find on this host: install Debian's package ipxe-qemu there"
        );
        Err(Problem::new(ErrorCode::Unsupported, what))
    }

    /// Checks that a VM can be started, from another device first or not, or goes on here, with ROMs of its network cards or not.
    ///
    /// # Errors
    /// Those of [`Qemu::check_network_boot`].
    pub fn check_start(
        &self,
        spec: &VmSpec,
        (once, roms): (Option<BootDevice>, bool),
    ) -> Result<(), Problem> {
        match roms || Order::of(spec, once).has(BootDevice::Network) {
            true => self.check_network_boot(),
            false => Ok(()),
        }
    }

    /// Starts it for a VM, with the guest paused.
    ///
    /// # Errors
    /// As making the sockets and starting the process.
    pub fn start(
        &self,
        spec: &VmSpec,
        accelerator: AcceleratorKind,
        directory: &ProcessDir,
        given: Given<'_>,
        user: Option<u32>,
    ) -> io::Result<Process> {
        let Given { disks, cards, firmware, tpm, medium, .. } = given;
        let (monitor, console) = (directory.listen(MONITOR)?, directory.listen(CONSOLE)?);
        let guest = directory.listen(guest_agent::SOCKET)?;
        let console_log = directory.log(CONSOLE)?;
        let descriptors = Descriptors {
            monitor: monitor.as_raw_fd(),
            console: console.as_raw_fd(),
            guest: guest.as_raw_fd(),
            console_log: console_log.as_raw_fd(),
            tpm: tpm.map(AsRawFd::as_raw_fd),
            disks: disks.iter().map(AsRawFd::as_raw_fd).collect(),
            cards: cards.iter().map(CardDescriptors::of).collect(),
        };
        let own = [monitor.as_fd(), console.as_fd(), console_log.as_fd(), guest.as_fd()];
        process::launch(Launch {
            program: &self.program,
            name: "qemu-system-x86_64",
            arguments: arguments(spec, accelerator, &descriptors, &given),
            keep: own
                .into_iter()
                .chain(disks.iter().map(AsFd::as_fd))
                .chain(tpm.map(AsFd::as_fd))
                .chain(medium.map(AsFd::as_fd))
                .chain(firmware.into_iter().flat_map(OpenFirmware::descriptors))
                .chain(cards.iter().flat_map(|card| &card.tap).flat_map(descriptors_of))
                .collect(),
            input: Stdio::null(),
            log: directory.log(NAME)?,
            user: user.map(|id| User { id, group: kvm_group(accelerator) }),
            locks_memory: false,
            record: &directory.process(NAME),
        })
    }
}

/// The names in QEMU's list of processor models: `x86 NAME  DESCRIPTION` in each line.
fn cpu_models(list: &str) -> Vec<String> {
    let name = |line: &str| Some(line.strip_prefix("x86 ")?.split_whitespace().next()?.to_owned());
    list.lines().filter_map(name).collect()
}

/// The group that may open /dev/kvm, where it is needed.
fn kvm_group(accelerator: AcceleratorKind) -> Option<u32> {
    match accelerator {
        AcceleratorKind::Kvm => Path::new("/dev/kvm").metadata().ok().map(|device| device.gid()),
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => None,
    }
}

/// The numbers that descriptors have in QEMU.
struct Descriptors {
    monitor: RawFd,
    console: RawFd,
    guest: RawFd,
    console_log: RawFd,
    tpm: Option<RawFd>,
    disks: Vec<RawFd>,
    cards: Vec<CardDescriptors>,
}

/// What QEMU is told of a network card that the VM's specification does not say.
struct CardDescriptors {
    /// The ports of the host that lead into the guest.
    forwards: Vec<PortForward>,
    /// The tap's queues; none for QEMU's own network stack.
    queues: Vec<RawFd>,
    /// The kernel's virtio-net, for as many queues; none where QEMU does its work.
    vhost: Vec<RawFd>,
    /// The longest frame, where it is not Ethernet's.
    mtu: Option<u32>,
}

impl CardDescriptors {
    fn of(card: &Card) -> Self {
        let numbers = |descriptors: &mut dyn Iterator<Item = BorrowedFd<'_>>| {
            descriptors.map(|it| it.as_raw_fd()).collect()
        };
        Self {
            forwards: card.state.forwards.clone(),
            queues: card.tap.as_ref().map_or_else(Vec::new, |tap| numbers(&mut tap.queues())),
            vhost: card.tap.as_ref().map_or_else(Vec::new, |tap| numbers(&mut tap.vhost())),
            mtu: card.tap.as_ref().and_then(OpenTap::mtu),
        }
    }
}

fn descriptors_of(tap: &OpenTap) -> impl Iterator<Item = BorrowedFd<'_>> {
    tap.queues().chain(tap.vhost())
}

/// How QEMU's monitor knows a network card.
#[must_use]
pub fn card_id(nic: NicId) -> String {
    format!("nic-{nic}")
}

/// The arguments of a port. The ports are functions of one slot that nothing else has. All of them are there from the
/// start, as QEMU plugs a device into a running guest only where a port is free.
fn port(number: u32) -> String {
    format!(
        "pcie-root-port,id={},bus=pcie.0,addr={PORTS_SLOT}.{number},multifunction=on,chassis={}",
        port_id(number),
        number + 1
    )
}

/// How QEMU's monitor knows a disk in a port.
#[must_use]
pub fn disk_device(disk: DiskId) -> String {
    format!("disk-{disk}")
}

/// How QEMU's monitor knows a port.
#[must_use]
pub fn port_id(number: u32) -> String {
    format!("port{number}")
}

/// How QEMU's monitor knows what a network card is connected to.
#[must_use]
pub fn network_id(nic: NicId) -> String {
    format!("net-{nic}")
}

/// How QEMU's monitor knows the connection of a disk's socket of this number to its filter.
#[must_use]
pub fn chardev_id(socket: u32) -> String {
    format!("disk{socket}")
}

/// A forwarded port, as QEMU reads it.
#[must_use]
pub fn forward(of: &PortForward) -> String {
    let PortForward { protocol, host_address, host_port, guest_port } = of;
    format!("{}:{host_address}:{host_port}-:{guest_port}", protocol.name())
}

/// The driver of a network card.
#[must_use]
pub fn driver(model: NicModel) -> &'static str {
    match model {
        NicModel::Virtio => "virtio-net-pci",
        NicModel::E1000e => "e1000e",
    }
}

/// The arguments of a network card in a port: what it is connected to, and the card. A port of its own lets
/// the guest name it as on a machine, and keeps its name when disks are added.
fn card(
    port: u32,
    nic: &NicSpec,
    card: &CardDescriptors,
    (order, roms): (&Order, bool),
) -> [String; 2] {
    let (id, mac) = (card_id(nic.nic), nic.mac);
    let list =
        |numbers: &[RawFd]| numbers.iter().map(RawFd::to_string).collect::<Vec<_>>().join(":");
    let mut network = match &card.queues[..] {
        [] => format!("user,id=net-{}", nic.nic),
        queues => format!("tap,id=net-{},fds={}", nic.nic, list(queues)),
    };
    for wanted in &card.forwards {
        network += &format!(",hostfwd={}", forward(wanted));
    }
    if !card.vhost.is_empty() {
        network += &format!(",vhost=on,vhostfds={}", list(&card.vhost));
    }
    let mut model = driver(nic.model).to_owned();
    if nic.model == NicModel::Virtio {
        model += ",disable-legacy=on";
    }
    let mut device =
        format!("{model},id={id},netdev=net-{},bus={},mac={mac}", nic.nic, port_id(port));
    // Without a ROM where guests start from disks: the ROM is in a package of its own.
    device += &match order.has(BootDevice::Network) {
        true => order.option(BootDevice::Network, port as usize),
        // The guest was started from the network once, and QEMU loads the ROM with its memory.
        false if roms => String::new(),
        false => ",romfile=".to_owned(),
    };
    if nic.model == NicModel::Virtio {
        if let several @ 2.. = card.queues.len() {
            // One for each queue of each direction, one for control, one for configuration.
            device += &format!(",mq=on,vectors={}", 2 * several + 2);
        }
        if let Some(mtu) = card.mtu {
            device += &format!(",host_mtu={mtu}");
        }
    }
    [network, device]
}

/// The additional memory of a machine that starts.
#[must_use]
pub fn memory_padding(spec: &VmSpec, accelerator: AcceleratorKind) -> u64 {
    match (accelerator, spec.hardware.memory_backing) {
        (AcceleratorKind::Tcg | AcceleratorKind::Unknown, MemoryBacking::Pages) => EMULATED_PADDING,
        // Of huge pages there is no part.
        (_, MemoryBacking::Hugepages) | (AcceleratorKind::Kvm, _) => 0,
    }
}

/// The size of a machine's memory, as QEMU takes it.
fn memory_size(spec: &VmSpec, live: &Live) -> String {
    match live.memory_padding {
        0 => format!("{}M", spec.memory >> 20),
        padding => format!("{}K", (spec.memory + padding) >> 10),
    }
}

fn arguments(
    spec: &VmSpec,
    accelerator: AcceleratorKind,
    descriptors: &Descriptors,
    given: &Given<'_>,
) -> Vec<OsString> {
    let (firmware, order) = (given.firmware, Order::of(spec, given.boot_once));
    let (accel, cpu) = match accelerator {
        AcceleratorKind::Kvm => ("kvm", "host"),
        // No agent chooses what it does not know.
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => ("tcg", "max"),
    };
    let cpu = spec.hardware.cpu_model.as_deref().unwrap_or(cpu);
    let memory = memory_size(spec, given.live);
    let mut arguments: Vec<String> = Vec::new();
    let mut option = |name: &str, value: String| {
        arguments.push(name.to_owned());
        if !value.is_empty() {
            arguments.push(value);
        }
    };
    let flag = String::new;
    option("-no-user-config", flag());
    option("-nodefaults", flag());
    option("-S", flag());
    option("-name", format!("guest={0},process=vm-{0},debug-threads=on", spec.name));
    option("-uuid", spec.vm.to_string());
    option("-sandbox", SANDBOX.to_owned());
    option("-msg", "timestamp=on".to_owned());
    // dump-guest-core also marks the memory MADV_DONTDUMP; graphics=off shows firmware on the console.
    let machine =
        format!("memory-backend={MEMORY_BLOCK},dump-guest-core=off,graphics=off,vmport=off");
    let flash = firmware.map_or("", OpenFirmware::machine);
    let kind = given.machine.unwrap_or("q35");
    option("-machine", format!("{kind},accel={accel},{machine}{flash}"));
    if given.machine.is_some() {
        option("-incoming", "defer".to_owned());
    }
    option("-cpu", cpu.to_owned());
    option("-smp", format!("{}", spec.vcpus));
    option("-m", memory.clone());
    let huge = match spec.hardware.memory_backing {
        MemoryBacking::Pages => "",
        // All at once: a guest that touches a page which the host no longer has is killed.
        MemoryBacking::Hugepages => ",hugetlb=on,hugetlbsize=2M,prealloc=on",
    };
    option(
        "-object",
        format!("memory-backend-memfd,id={MEMORY_BLOCK},size={memory},share=on{huge}"),
    );
    option("-display", "none".to_owned());
    option("-rtc", "base=utc".to_owned());
    option("-boot", "strict=on".to_owned());
    option("-chardev", format!("socket,id=monitor,fd={},server=on,wait=off", descriptors.monitor));
    option("-mon", "chardev=monitor,mode=control".to_owned());
    option("-add-fd", format!("fd={},set=1", descriptors.console_log));
    option(
        "-chardev",
        format!(
            "socket,id=console,fd={},server=on,wait=off,logfile=/dev/fdset/1,logappend=on",
            descriptors.console
        ),
    );
    option("-device", "isa-serial,chardev=console".to_owned());
    option("-device", "pvpanic".to_owned());
    option("-object", "rng-builtin,id=random".to_owned());
    // What every guest has is in one slot, so that disks have those that they always had.
    let slot = format!("bus=pcie.0,addr={OWN_SLOT}");
    let random = format!("virtio-rng-pci,rng=random,{slot}.0,multifunction=on,disable-legacy=on");
    option("-device", random);
    option("-device", format!("virtio-serial-pci,id=ports,{slot}.1,disable-legacy=on"));
    option(
        "-chardev",
        format!("socket,id={},fd={},server=on,wait=off", guest_agent::CHARDEV, descriptors.guest),
    );
    option(
        "-device",
        format!(
            "virtserialport,bus=ports.0,chardev={},name={}",
            guest_agent::CHARDEV,
            guest_agent::PORT
        ),
    );
    option("-device", format!("VGA,{slot}.2"));
    // It listens nowhere: clients are passed to it as descriptors.
    option("-vnc", "none".to_owned());
    for [name, value] in firmware.into_iter().flat_map(|it| it.options(spec)) {
        option(&name, value);
    }
    for [name, value] in descriptors.tpm.into_iter().flat_map(tpm::options) {
        option(&name, value);
    }
    let seen = spec.disks().filter(|disk| disk.role.attachment() == Attachment::Disk);
    let seen = seen.filter_map(|disk| Some((disk, *given.live.disk(disk.disk)?)));
    let mut plugged = Vec::new();
    for (index, (fd, (disk, how))) in descriptors.disks.iter().zip(seen).enumerate() {
        let DiskInUse { socket, queues, port, .. } = how;
        option("-chardev", format!("socket,id=disk{socket},fd={fd},server=on,wait=off"));
        let (id, boot) = match port {
            None => (boot::disk_id(index), order.option_of_disk(index, disk)),
            Some(port) => {
                let boot = order.option_of_disk(index, disk);
                (disk_device(disk.disk), format!("{boot},bus={}", port_id(port)))
            }
        };
        let device = format!(
            "vhost-user-blk-pci,id={id},chardev=disk{socket},num-queues={queues}{boot},disable-legacy=on"
        );
        match port {
            None => option("-device", device),
            // Its port has to be there first.
            Some(_) => plugged.push(device),
        }
    }
    if spec.hardware.cdrom.is_some() {
        let boot = order.option(BootDevice::Cdrom, 0);
        for [name, value] in cdrom::options(given.medium, &boot) {
            option(&name, value);
        }
    }
    for number in 0..PORTS {
        option("-device", port(number));
    }
    for (index, (nic, descriptors)) in (0..).zip(spec.nics().zip(&descriptors.cards)) {
        let port = given.live.nic_ports.get(&nic.nic).copied().unwrap_or(index);
        let [network, device] = card(port, nic, descriptors, (&order, given.live.card_roms));
        option("-netdev", network);
        option("-device", device);
    }
    for device in plugged {
        option("-device", device);
    }
    arguments.into_iter().map(OsString::from).collect()
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device, DiskSpec};
    use vmseal_api::id::{DatastoreId, VmId};
    use vmseal_api::nic::NicBackend;

    use super::*;
    use crate::process::live::queues;

    fn disk(index: usize) -> DiskSpec {
        let location = DatastoreLocation::Dir { path: "/d".into() };
        DiskSpec {
            disk: format!("0190b5a0-0000-7000-8000-0000000001{index:02}").parse().unwrap(),
            name: format!("disk{index}"),
            datastore: DatastoreSpec { datastore: DatastoreId::new(), location },
            size: 1 << 30,
            encrypted: false,
            allocation: Default::default(),
            role: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            facts: None,
        }
    }

    fn spec(vcpus: u32, disks: usize) -> VmSpec {
        VmSpec {
            vm: "0190b5a0-0000-7000-8000-000000000001".parse::<VmId>().unwrap(),
            name: "web1".to_owned(),
            vcpus,
            memory: 512 << 20,
            policy: None,
            key: None,
            hardware: Default::default(),
            devices: (0..disks).map(|index| Device::Disk(disk(index))).collect(),
            snapshots: Vec::new(),
            images: None,
            about: None,
        }
    }

    /// A card of each kind.
    fn with_cards(mut spec: VmSpec) -> VmSpec {
        let cards = [
            (NicModel::Virtio, NicBackend::User { forwards: vec!["tcp:22".parse().unwrap()] }),
            (NicModel::Virtio, NicBackend::Bridge { bridge: "br0".to_owned() }),
            (NicModel::E1000e, NicBackend::Tap { tap: "tap0".to_owned() }),
        ];
        for (index, (model, backend)) in cards.into_iter().enumerate() {
            spec.devices.push(Device::Nic(NicSpec {
                nic: format!("0190b5a0-0000-7000-8000-00000000001{index}").parse().unwrap(),
                name: format!("nic{index}"),
                mac: format!("52:54:00:00:00:0{index}").parse().unwrap(),
                model,
                backend,
                link: Default::default(),
            }));
        }
        spec
    }

    fn cards() -> Vec<CardDescriptors> {
        let none =
            || CardDescriptors { forwards: vec![], queues: vec![], vhost: vec![], mtu: None };
        let forwards = vec!["tcp:2222:22".parse().unwrap(), "udp:0.0.0.0:53:53".parse().unwrap()];
        vec![
            CardDescriptors { forwards, ..none() },
            CardDescriptors {
                queues: vec![15, 16],
                vhost: vec![17, 18],
                mtu: Some(9000),
                ..none()
            },
            CardDescriptors { queues: vec![19], ..none() },
        ]
    }

    fn descriptors() -> Descriptors {
        Descriptors {
            monitor: 10,
            console: 11,
            console_log: 12,
            tpm: Some(21),
            guest: 20,
            disks: vec![13, 14],
            cards: cards(),
        }
    }

    /// The arguments, each on a line of its own.
    fn line(
        of: &VmSpec,
        accelerator: AcceleratorKind,
        descriptors: &Descriptors,
        live: &Live,
    ) -> String {
        let given = Given {
            disks: &[],
            cards: &[],
            firmware: None,
            tpm: None,
            medium: None,
            boot_once: None,
            live,
            machine: None,
        };
        let arguments = arguments(of, accelerator, descriptors, &given);
        let arguments = arguments.iter().map(|argument| argument.to_str().unwrap());
        arguments.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_command_line_is_the_golden_one() {
        let of = with_cards(spec(2, 2));
        let live = Live::at_start(&of);
        let line_of = |of: &VmSpec, accelerator| line(of, accelerator, &descriptors(), &live);
        let line = |accelerator| line_of(&of, accelerator);
        let golden = include_str!("../../tests/golden/qemu-arguments.txt");
        assert_eq!(line(AcceleratorKind::Tcg), golden.trim_end());
        let kvm =
            golden.trim_end().replace("accel=tcg", "accel=kvm").replace("\nmax\n", "\nhost\n");
        assert_eq!(line(AcceleratorKind::Kvm), kvm);
        // A model by name is in its place, however guests are run.
        let mut named = of.clone();
        named.hardware.cpu_model = Some("EPYC-Milan".to_owned());
        for (kind, golden, usual) in [
            (AcceleratorKind::Tcg, golden.trim_end(), "max"),
            (AcceleratorKind::Kvm, kvm.as_str(), "host"),
        ] {
            let usual = format!("\n-cpu\n{usual}\n");
            assert_eq!(golden.matches(&usual).count(), 1, "{golden}");
            assert_eq!(line_of(&named, kind), golden.replace(&usual, "\n-cpu\nEPYC-Milan\n"));
        }
    }

    /// It was saved, or comes from a host, where each disk of its start was on the root bus.
    #[test]
    fn a_guest_that_an_earlier_version_has_started_keeps_the_places_of_its_disks() {
        let of = with_cards(spec(2, 2));
        let live = Live { spare_ports: true, ..Live::of_earlier_record(&of, Vec::new()) };
        let earlier = line(&of, AcceleratorKind::Tcg, &descriptors(), &live);
        let second = "vhost-user-blk-pci,id=first-disk1,chardev=disk1,num-queues=2,bootindex=2,disable-legacy=on";
        assert!(earlier.contains(second) && !earlier.contains("bus=port4"), "{earlier}");
        let now = line(&of, AcceleratorKind::Tcg, &descriptors(), &Live::at_start(&of));
        let ports = |line: &str| line.matches("pcie-root-port").count();
        assert_eq!(ports(&earlier), ports(&now), "its machine is another one");
    }

    /// It was started from the network once: QEMU takes no memory that has a ROM which its own card lacks.
    #[test]
    fn a_guest_that_is_loaded_has_the_roms_that_its_cards_had() {
        let of = with_cards(spec(2, 2));
        let with = |card_roms| {
            let live = Live { card_roms, ..Live::at_start(&of) };
            line(&of, AcceleratorKind::Tcg, &descriptors(), &live)
        };
        let (without, with) = (with(false), with(true));
        assert_eq!(without.matches(",romfile=").count(), 3, "{without}");
        assert_eq!(without.replace(",romfile=", ""), with);
    }

    #[test]
    fn the_memory_of_an_emulated_machine_is_no_multiple_of_what_qemu_has_a_short_cut_for() {
        let mut of = spec(1, 1);
        let with = |of: &VmSpec, kind| Live {
            memory_padding: memory_padding(of, kind),
            ..Live::at_start(of)
        };
        let live = with(&of, AcceleratorKind::Tcg);
        assert_eq!(memory_size(&of, &live), "524296K");
        assert_ne!((of.memory + live.memory_padding) % (256 << 10), 0);
        assert_eq!(memory_size(&of, &with(&of, AcceleratorKind::Kvm)), "512M");
        of.hardware.memory_backing = MemoryBacking::Hugepages;
        assert_eq!(memory_size(&of, &with(&of, AcceleratorKind::Tcg)), "512M");
    }

    #[test]
    fn queues_follow_the_processors_within_what_a_filter_serves() {
        for (vcpus, disks, expected) in [(1, 1, 1), (2, 1, 2), (255, 1, 4), (255, 28, 2), (4, 0, 4)]
        {
            assert_eq!(queues(&spec(vcpus, disks)), expected, "{vcpus} CPUs, {disks} disks");
        }
    }

    #[test]
    fn the_installed_qemu_is_found_and_a_missing_one_is_an_error() {
        let qemu = Qemu::find(Path::new("qemu-system-x86_64")).unwrap();
        assert!(qemu.version().starts_with(char::is_numeric), "{}", qemu.version());
        let error = Qemu::find(Path::new("/no/such/qemu")).unwrap_err();
        assert!(error.to_string().contains("qemu-system-x86"), "{error}");
    }
}
