//! Measures the network of a guest beside the same guest in a QEMU that is started by hand, with the same devices. Both
//! run all the time, on one bridge in a network namespace of this program, and take turns under load.

#![allow(clippy::print_stdout)] // it is what this program is for

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::sched::{CloneFlags, unshare};
use vmseal_lab::statistics::Interval;
use vmseal_tests::eventually;
use vmseal_tests::installation::Installation;

/// The guests take their addresses from those of their cards (`scripts/build-network-guest`).
const SEALED_CARD: &str = "bridge=br0,mac=52:54:0a:4d:00:0a";
const SEALED: &str = "10.77.0.10";
const BY_HAND_MAC: &str = "52:54:0a:4d:00:0b";
const BY_HAND: &str = "10.77.0.11";

/// What a guest has: as the card of vmseal, a queue for each processor.
const MEMORY: &str = "192M";
const VCPUS: &str = "2";

/// How often each load is measured on each guest. Eight pairs give 95 % bounds that leave out one outlier on each side.
const ROUNDS: usize = 8;

/// How long bytes are counted, and how long they flow before: buffers are full then.
const COUNTED: Duration = Duration::from_secs(2);
const WARM_UP: Duration = Duration::from_millis(500);

/// Requests of one measurement with redis, and its connections.
const REQUESTS: &str = "5000";
const CONNECTIONS: &str = "20";

/// The least ratio that is good enough.
const GOAL: f64 = 0.95;

/// What is measured; more is better.
#[derive(Clone, Copy)]
enum Load {
    ToGuest,
    FromGuest,
    RoundTrips,
    RedisGet,
    RedisSet,
}

impl Load {
    const ALL: [Self; 5] =
        [Self::ToGuest, Self::FromGuest, Self::RoundTrips, Self::RedisGet, Self::RedisSet];

    fn name(self) -> &'static str {
        match self {
            Self::ToGuest => "TCP to the guest, MB/s",
            Self::FromGuest => "TCP from the guest, MB/s",
            Self::RoundTrips => "one byte there and back, 1/s",
            Self::RedisGet => "redis GET, 1/s",
            Self::RedisSet => "redis SET, 1/s",
        }
    }

    /// Measures it once, on the guest at this address.
    fn measure(self, guest: &str) -> anyhow::Result<f64> {
        match self {
            Self::ToGuest => {
                let block = vec![0; 64 << 10];
                rate(connect(guest, 9)?, 1e-6, |stream| Ok(stream.write(&block)?))
            }
            Self::FromGuest => {
                let mut block = vec![0; 64 << 10];
                rate(connect(guest, 19)?, 1e-6, |stream| Ok(stream.read(&mut block)?))
            }
            Self::RoundTrips => rate(connect(guest, 7)?, 1.0, |stream| {
                stream.write_all(b"x")?;
                stream.read_exact(&mut [0])?;
                Ok(1)
            }),
            Self::RedisGet => redis(guest, "get"),
            Self::RedisSet => redis(guest, "set"),
        }
    }
}

fn connect(guest: &str, port: u16) -> anyhow::Result<TcpStream> {
    let stream = eventually(&format!("{guest}:{port} takes connections"), || {
        TcpStream::connect((guest, port)).ok()
    })?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// What `step` counts in a second.
fn rate(
    mut stream: TcpStream,
    unit: f64,
    mut step: impl FnMut(&mut TcpStream) -> anyhow::Result<usize>,
) -> anyhow::Result<f64> {
    let begun = Instant::now();
    while begun.elapsed() < WARM_UP {
        ensure!(step(&mut stream)? > 0, "the guest has ended the connection");
    }
    let (begun, mut counted) = (Instant::now(), 0_usize);
    while begun.elapsed() < COUNTED {
        counted += step(&mut stream)?;
    }
    #[allow(clippy::cast_precision_loss)] // far below 2⁵²
    Ok(counted as f64 * unit / begun.elapsed().as_secs_f64())
}

/// Requests per second, as redis-benchmark counts them.
fn redis(guest: &str, test: &str) -> anyhow::Result<f64> {
    let arguments = ["-h", guest, "--csv", "-t", test, "-n", REQUESTS, "-c", CONNECTIONS];
    let output = Command::new("redis-benchmark")
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .context("install redis-tools")?;
    let text = String::from_utf8(output.stdout)?;
    // "test","rps",... and then the values.
    let line = text.lines().last().context("redis-benchmark said nothing")?;
    let value = line.split(',').nth(1).context("redis-benchmark said no rate")?;
    Ok(value.trim_matches('"').parse()?)
}

fn ip(arguments: &str) -> anyhow::Result<()> {
    let status = Command::new("ip").args(arguments.split(' ')).status()?;
    ensure!(status.success(), "ip {arguments} failed");
    Ok(())
}

fn guest_image() -> anyhow::Result<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/build-network-guest");
    let output = Command::new(script).stderr(Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the guest could not be built");
    Ok(String::from_utf8(output.stdout)?.lines().last().context("no image")?.into())
}

/// A QEMU as one starts it by hand; ended when dropped.
struct ByHand(Child);

impl ByHand {
    /// The same machine, processors, memory and card as vmseal's; a disk without encryption.
    fn start(image: &Path, kvm: bool) -> anyhow::Result<Self> {
        ip("tuntap add peer0 mode tap multi_queue")?;
        ip("link set peer0 master br0 up")?;
        let vhost = if Path::new("/dev/vhost-net").exists() { ",vhost=on" } else { "" };
        let accelerator = if kvm { "-accel kvm -cpu host" } else { "-accel tcg -cpu max" };
        let machine = format!(
            "-machine q35,memory-backend=ram {accelerator} -smp {VCPUS} -m {MEMORY} -nodefaults -display none \
             -object memory-backend-memfd,id=ram,size={MEMORY},share=on \
             -drive file={},format=raw,if=virtio,snapshot=on \
             -netdev tap,id=net,ifname=peer0,script=no,downscript=no,queues={VCPUS}{vhost} \
             -device virtio-net-pci,netdev=net,mac={BY_HAND_MAC},mq=on,vectors=6,disable-legacy=on,romfile=",
            image.display()
        );
        let mut command = Command::new("qemu-system-x86_64");
        Ok(Self(command.args(machine.split_whitespace()).stdin(Stdio::null()).spawn()?))
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() -> anyhow::Result<()> {
    unshare(CloneFlags::CLONE_NEWNET)
        .context("no network namespace can be made: run it as root")?;
    for arguments in [
        "link set lo up",
        "link add br0 type bridge",
        "addr add 10.77.0.1/24 dev br0",
        "link set br0 up",
    ] {
        ip(arguments)?;
    }
    let image = guest_image()?;
    let here = Installation::new()?;
    let disk = format!("datastore=local,format=raw,image={}", image.display());
    here.vmseal(&[
        "vm",
        "create",
        "sealed",
        "--policy",
        "encrypted",
        "--disk",
        &disk,
        "--memory",
        MEMORY,
        "--vcpus",
        VCPUS,
        "--nic",
        SEALED_CARD,
    ])?;
    here.vmseal(&["vm", "start", "sealed"])?;
    let kvm = here.json(&["host", "show", "here"])?["description"]["accelerator"]["kind"] == "kvm";
    let _by_hand = ByHand::start(&image, kvm)?;
    println!("| load | vmseal, encrypted | QEMU by hand | ratio [95 %] | at least {GOAL} |");
    println!("|---|---|---|---|---|");
    for load in Load::ALL {
        // The first ones find cold caches and code that is not translated yet.
        load.measure(SEALED)?;
        load.measure(BY_HAND)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let turns: [(&str, &mut Vec<f64>); 2] = [(SEALED, &mut ours), (BY_HAND, &mut theirs)];
            let measured = |(guest, values): (&str, &mut Vec<f64>)| {
                values.push(load.measure(guest)?);
                anyhow::Ok(())
            };
            if round % 2 == 0 {
                turns.into_iter().try_for_each(measured)?;
            } else {
                turns.into_iter().rev().try_for_each(measured)?;
            }
        }
        let ratio = Interval::of(ours.iter().zip(&theirs).map(|(ours, theirs)| ours / theirs));
        let ratio = ratio.context("nothing was measured")?;
        let verdict = match (ratio.lower, ratio.upper) {
            (Some(lower), _) if lower >= GOAL => "met",
            (_, Some(upper)) if upper < GOAL => "not met",
            _ => "not resolved",
        };
        let median = |values: Vec<f64>| Interval::of(values).map_or(f64::NAN, |it| it.median);
        println!(
            "| {} | {:.0} | {:.0} | {} | {verdict} |",
            load.name(),
            median(ours),
            median(theirs),
            ratio.show(|value| format!("{value:.2}"))
        );
    }
    Ok(())
}
