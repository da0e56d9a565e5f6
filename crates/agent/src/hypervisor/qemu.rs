//! QEMU: its command line, and starting it.
//!
//! QEMU opens none of our files by path. Monitor, console, the console's log and the sockets for the disks'
//! filters are inherited descriptors, so that it can run as a user who may open none of them.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use vmseal_api::host::{AcceleratorKind, DiskRole, NicSpec, VmSpec};
use vmseal_api::id::NicId;
use vmseal_api::nic::{NicModel, PortForward};

use super::network::{Card, OpenTap};
use crate::process::run_dir::ProcessDir;
use crate::process::{self, Launch, Process, User};

/// The name of the process in its directory.
pub const NAME: &str = "qemu";

/// The name of the monitor's socket.
pub const MONITOR: &str = "qmp";

/// The name of the console's socket and log.
pub const CONSOLE: &str = "console";

/// The most request queues of a disk: more gain nothing measurable for one guest.
const QUEUES_MAX: u16 = 4;

/// The most queues of all disks of a VM: what one filter process serves.
const ALL_QUEUES_MAX: usize = 64;

/// The PCI slot of the ports that network cards are plugged into: the last one that disks do not reach.
const CARDS_SLOT: &str = "1e";

/// What QEMU's system-call filter refuses.
const SANDBOX: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// The QEMU of this host.
#[derive(Debug)]
pub struct Qemu {
    path: PathBuf,
    program: File,
    version: String,
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
        Ok(Self { path, program, version })
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

    /// Starts it for a VM, with the guest paused. `cards` are its network cards, opened; `disks` are the listening
    /// sockets for the filters, in order. QEMU listens and the filter connects, because only then does QEMU continue with another filter
    /// after one has died.
    ///
    /// # Errors
    /// As making the sockets and starting the process.
    pub fn start(
        &self,
        spec: &VmSpec,
        accelerator: AcceleratorKind,
        directory: &ProcessDir,
        disks: &[UnixListener],
        cards: &[Card],
        user: Option<u32>,
    ) -> io::Result<Process> {
        let (monitor, console) = (directory.listen(MONITOR)?, directory.listen(CONSOLE)?);
        let console_log = directory.log(CONSOLE)?;
        let descriptors = Descriptors {
            monitor: monitor.as_raw_fd(),
            console: console.as_raw_fd(),
            console_log: console_log.as_raw_fd(),
            disks: disks.iter().map(AsRawFd::as_raw_fd).collect(),
            cards: cards.iter().map(CardDescriptors::of).collect(),
        };
        let own = [monitor.as_fd(), console.as_fd(), console_log.as_fd()];
        process::launch(Launch {
            program: &self.program,
            name: "qemu-system-x86_64",
            arguments: arguments(spec, accelerator, &descriptors),
            keep: own
                .into_iter()
                .chain(disks.iter().map(AsFd::as_fd))
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

/// The group that may open /dev/kvm, where it is needed.
fn kvm_group(accelerator: AcceleratorKind) -> Option<u32> {
    match accelerator {
        AcceleratorKind::Kvm => Path::new("/dev/kvm").metadata().ok().map(|device| device.gid()),
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => None,
    }
}

/// How many queues each disk of a VM has.
#[must_use]
pub fn queues(spec: &VmSpec) -> u16 {
    let share = ALL_QUEUES_MAX / spec.disks().count().max(1);
    let cpus = u16::try_from(spec.vcpus).unwrap_or(u16::MAX);
    cpus.min(QUEUES_MAX).min(u16::try_from(share).unwrap_or(QUEUES_MAX)).max(1)
}

/// The numbers that descriptors have in QEMU.
struct Descriptors {
    monitor: RawFd,
    console: RawFd,
    console_log: RawFd,
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

/// The arguments of a network card, the VM's `index`th: what it is connected to, the port that it is plugged into,
/// and the card. A port of its own lets the guest name it as on a machine, and keeps its name when disks are added.
/// The ports are functions of one slot that nothing else has.
fn card(index: usize, nic: &NicSpec, card: &CardDescriptors) -> [String; 3] {
    let (id, mac) = (card_id(nic.nic), nic.mac);
    let list =
        |numbers: &[RawFd]| numbers.iter().map(RawFd::to_string).collect::<Vec<_>>().join(":");
    let mut network = match &card.queues[..] {
        [] => format!("user,id=net-{}", nic.nic),
        queues => format!("tap,id=net-{},fds={}", nic.nic, list(queues)),
    };
    for PortForward { protocol, host_address, host_port, guest_port } in &card.forwards {
        let protocol = protocol.name();
        network += &format!(",hostfwd={protocol}:{host_address}:{host_port}-:{guest_port}");
    }
    if !card.vhost.is_empty() {
        network += &format!(",vhost=on,vhostfds={}", list(&card.vhost));
    }
    let port = format!(
        "pcie-root-port,id=port{index},bus=pcie.0,addr={CARDS_SLOT}.{index},multifunction=on,chassis={}",
        index + 1
    );
    let model = match nic.model {
        NicModel::Virtio => "virtio-net-pci,disable-legacy=on",
        NicModel::E1000e => "e1000e",
    };
    // Without a ROM: guests start from disks, and the ROM is in a package of its own.
    let mut device =
        format!("{model},id={id},netdev=net-{},bus=port{index},mac={mac},romfile=", nic.nic);
    if nic.model == NicModel::Virtio {
        if let several @ 2.. = card.queues.len() {
            // One for each queue of each direction, one for control, one for configuration.
            device += &format!(",mq=on,vectors={}", 2 * several + 2);
        }
        if let Some(mtu) = card.mtu {
            device += &format!(",host_mtu={mtu}");
        }
    }
    [network, port, device]
}

fn arguments(
    spec: &VmSpec,
    accelerator: AcceleratorKind,
    descriptors: &Descriptors,
) -> Vec<OsString> {
    let (accel, cpu) = match accelerator {
        AcceleratorKind::Kvm => ("kvm", "host"),
        // No agent chooses what it does not know.
        AcceleratorKind::Tcg | AcceleratorKind::Unknown => ("tcg", "max"),
    };
    let megabytes = spec.memory >> 20;
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
    let machine = "memory-backend=ram,dump-guest-core=off,graphics=off,vmport=off";
    option("-machine", format!("q35,accel={accel},{machine}"));
    option("-cpu", cpu.to_owned());
    option("-smp", format!("{}", spec.vcpus));
    option("-m", format!("{megabytes}M"));
    option("-object", format!("memory-backend-memfd,id=ram,size={megabytes}M,share=on"));
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
    option("-device", "virtio-rng-pci,rng=random,disable-legacy=on".to_owned());
    let queues = queues(spec);
    for (index, (fd, disk)) in descriptors.disks.iter().zip(spec.disks()).enumerate() {
        option("-chardev", format!("socket,id=disk{index},fd={fd},server=on,wait=off"));
        // The firmware tries no disk that has no place in the order.
        let boot = match disk.role {
            DiskRole::Data => format!(",bootindex={}", index + 1),
            DiskRole::CloudInit => String::new(),
        };
        option(
            "-device",
            format!(
                "vhost-user-blk-pci,chardev=disk{index},num-queues={queues}{boot},disable-legacy=on"
            ),
        );
    }
    for (index, (nic, descriptors)) in spec.nics().zip(&descriptors.cards).enumerate() {
        let [network, port, device] = card(index, nic, descriptors);
        option("-netdev", network);
        option("-device", port);
        option("-device", device);
    }
    arguments.into_iter().map(OsString::from).collect()
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::{DatastoreLocation, DatastoreSpec, Device, DiskSpec};
    use vmseal_api::id::{DatastoreId, DiskId, VmId};
    use vmseal_api::nic::NicBackend;

    use super::*;

    fn disk(name: &str) -> DiskSpec {
        let location = DatastoreLocation::Dir { path: "/d".into() };
        DiskSpec {
            disk: DiskId::new(),
            name: name.to_owned(),
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
            key: None,
            devices: (0..disks).map(|index| Device::Disk(disk(&format!("disk{index}")))).collect(),
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

    #[test]
    fn the_command_line_is_the_golden_one() {
        let descriptors = Descriptors {
            monitor: 10,
            console: 11,
            console_log: 12,
            disks: vec![13, 14],
            cards: cards(),
        };
        let line = |accelerator| {
            let arguments = arguments(&with_cards(spec(2, 2)), accelerator, &descriptors);
            arguments
                .iter()
                .map(|argument| argument.to_str().unwrap())
                .collect::<Vec<_>>()
                .join("\n")
        };
        let golden = include_str!("../../tests/golden/qemu-arguments.txt");
        assert_eq!(line(AcceleratorKind::Tcg), golden.trim_end());
        let kvm =
            golden.trim_end().replace("accel=tcg", "accel=kvm").replace("\nmax\n", "\nhost\n");
        assert_eq!(line(AcceleratorKind::Kvm), kvm);
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
