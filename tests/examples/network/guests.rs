//! The guests: one of vmseal, and two in QEMUs that are started by hand with the same devices.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::Context;
use vmseal_lab::clock::ProcessClock;
use vmseal_tests::installation::Installation;
use vmseal_tests::network::ip;

use crate::VMSEAL;

/// What a guest has: as the card of vmseal, a queue for each processor.
const MEMORY: &str = "192M";
const VCPUS: &str = "2";

/// The card on QEMU's own network of each guest: the guest takes its address from it (`scripts/build-network-guest`).
const USER_MAC: &str = "52:54:0a:00:02:0f";

/// What guests serve: an echo, a sink, a source, redis.
pub const ECHO: u16 = 7;
pub const SINK: u16 = 9;
pub const SOURCE: u16 = 19;
pub const REDIS: u16 = 6379;
const SERVICES: [u16; 4] = [ECHO, SINK, SOURCE, REDIS];

/// What a guest's card is connected to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Network {
    /// A bridge of the host.
    Bridge,
    /// QEMU's own network stack.
    User,
}

impl Network {
    pub const ALL: [Self; 2] = [Self::Bridge, Self::User];

    pub fn name(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::User => "user",
        }
    }
}

/// A guest, known by its number on the bridge.
#[derive(Clone)]
pub struct Guest {
    /// The name of the system in `bench/goals.toml`.
    pub system: &'static str,
    number: u8,
    /// Those of all its processes.
    pub clocks: Vec<ProcessClock>,
    /// The ports of the host that lead to its [`SERVICES`].
    forwarded: [u16; 4],
}

impl Guest {
    /// Where a service of the guest is reached over a network.
    pub fn service(&self, over: Network, port: u16) -> (String, u16) {
        match over {
            Network::Bridge => (self.address(), port),
            Network::User => {
                let known = SERVICES.into_iter().zip(self.forwarded).find(|(it, _)| *it == port);
                ("127.0.0.1".to_owned(), known.map_or(port, |(_, forwarded)| forwarded))
            }
        }
    }

    fn address(&self) -> String {
        format!("10.77.0.{}", self.number)
    }
}

fn bridge_mac(number: u8) -> String {
    format!("52:54:0a:4d:00:{number:02x}")
}

/// Starts the guest of vmseal, on a bridge `br0` that is there.
pub fn sealed(here: &Installation, image: &Path) -> anyhow::Result<Guest> {
    let mut guest = Guest { system: VMSEAL, number: 10, clocks: vec![], forwarded: [0; 4] };
    let disk = format!("datastore=local,format=raw,image={}", image.display());
    let on_bridge = format!("bridge=br0,mac={}", bridge_mac(guest.number));
    let forwards: String = SERVICES.iter().map(|port| format!(",forward=tcp:{port}")).collect();
    let on_user = format!("user,mac={USER_MAC}{forwards}");
    let create = ["vm", "create", "sealed", "--policy", "encrypted", "--disk", &disk];
    let hardware = ["--memory", MEMORY, "--vcpus", VCPUS, "--nic", &on_bridge, "--nic", &on_user];
    here.vmseal(&[&create[..], &hardware].concat())?;
    here.vmseal(&["vm", "start", "sealed"])?;
    let shown = here.vm("sealed")?;
    let forwards = shown["nics"][1]["forwards"].as_array().context("no forwarded ports")?;
    for (port, slot) in SERVICES.iter().zip(&mut guest.forwarded) {
        let forward = forwards.iter().find(|it| it["guest_port"] == *port);
        let host_port = forward.and_then(|it| it["host_port"].as_u64());
        *slot = host_port.context("a port is not forwarded")?.try_into()?;
    }
    for pid in here.all_guest_processes() {
        guest.clocks.push(ProcessClock::of(pid.try_into()?)?);
    }
    Ok(guest)
}

/// A QEMU as one starts it by hand; ended when dropped.
pub struct ByHand {
    pub guest: Guest,
    qemu: Child,
}

impl ByHand {
    /// The same machine, processors, memory and devices as vmseal's, in the same order; the disk, which a guest does not use after
    /// its boot, without encryption.
    pub fn start(
        system: &'static str,
        number: u8,
        image: &Path,
        accelerator: &str,
    ) -> anyhow::Result<Self> {
        let first = 20_000 + u16::from(number) * 10;
        let forwarded = [first, first + 1, first + 2, first + 3];
        ip(&format!("tuntap add peer{number} mode tap multi_queue"))?;
        ip(&format!("link set peer{number} master br0 up"))?;
        let vhost = if Path::new("/dev/vhost-net").exists() { ",vhost=on" } else { "" };
        let accelerator = match accelerator {
            "kvm" => "-accel kvm -cpu host",
            _ => "-accel tcg -cpu max",
        };
        let forwards = SERVICES.iter().zip(forwarded);
        let forwards: String = forwards
            .map(|(port, on_host)| format!(",hostfwd=tcp:127.0.0.1:{on_host}-:{port}"))
            .collect();
        let machine = format!(
            "-machine q35,memory-backend=ram {accelerator} -smp {VCPUS} -m {MEMORY} -nodefaults -display none \
             -object memory-backend-memfd,id=ram,size={MEMORY},share=on -serial null -device VGA -device pvpanic \
             -object rng-builtin,id=random -device virtio-rng-pci,rng=random,disable-legacy=on \
             -device virtio-serial-pci,disable-legacy=on \
             -drive file={},format=raw,if=virtio,snapshot=on \
             -device pcie-root-port,id=port0,chassis=1 -device pcie-root-port,id=port1,chassis=2 \
             -netdev tap,id=tap,ifname=peer{number},script=no,downscript=no,queues={VCPUS}{vhost} \
             -device virtio-net-pci,netdev=tap,bus=port0,mac={},mq=on,vectors=6,disable-legacy=on,romfile= \
             -netdev user,id=user{forwards} \
             -device virtio-net-pci,netdev=user,bus=port1,mac={USER_MAC},disable-legacy=on,romfile=",
            image.display(),
            bridge_mac(number),
        );
        // In a session of its own, as vmseal's is: the scheduler gives each session an equal share.
        let mut command = Command::new("setsid");
        command.arg("qemu-system-x86_64");
        let qemu = command.args(machine.split_whitespace()).stdin(Stdio::null()).spawn()?;
        let clocks = vec![ProcessClock::of(qemu.id())?];
        Ok(Self { guest: Guest { system, number, clocks, forwarded }, qemu })
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}
