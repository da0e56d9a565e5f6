//! A long way between two networks of this machine: what goes into the device at one end comes out of the one at the other end, later
//! and in the same order. Linux has netem for that, which not every kernel has; here a program does it, for packets of up to 64 KiB,
//! as the kernel would give them to a card. It holds back nothing else: how fast a line is is its ends' to say, as it is a card's.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::time::TimeSpec;

const TUN: &str = "/dev/net/tun";
/// Packets of IP, with nothing before them but what a card is told of checksums and segments (`IFF_TUN`, `IFF_NO_PI` and
/// `IFF_VNET_HDR` of linux/if_tun.h).
const KIND: u16 = 0x0001 | 0x1000 | 0x4000;
/// Checksums and segments of TCP, by IPv4 and IPv6, are not made before: packets go to the other end as large as they are
/// (`TUN_F_CSUM`, `TUN_F_TSO4` and `TUN_F_TSO6`).
const OFFLOADS: i32 = 1 | 2 | 4;
/// The longest packet with what is before it, in bytes.
const PACKET_MAX: usize = (64 << 10) + 64;
/// How many packets are taken before it is looked what is due.
const AT_ONCE: usize = 64;
/// The longest name of a device.
const NAME_MAX: usize = 15;

nix::ioctl_write_ptr_bad!(
    /// `TUNSETIFF`: the name and the kind of a device.
    set_interface,
    0x4004_54ca,
    Request
);
nix::ioctl_write_int_bad!(
    /// `TUNSETOFFLOAD`: what its user does in place of the kernel.
    set_offloads,
    0x4004_54d0
);

/// `struct ifreq` as this call takes it: a name and flags.
#[repr(C)]
struct Request {
    name: [u8; NAME_MAX + 1],
    flags: u16,
    rest: [u8; 22],
}

/// An end: a device in the network of the thread that makes it. It goes with this.
#[derive(Debug)]
pub(super) struct Device(File);

impl Device {
    /// Makes one of this name.
    pub fn new(name: &str) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(OFlag::O_NONBLOCK.bits());
        let file = options.open(TUN)?;
        let mut request = Request { name: [0; NAME_MAX + 1], flags: KIND, rest: [0; 22] };
        for (to, byte) in request.name.iter_mut().take(NAME_MAX).zip(name.bytes()) {
            *to = byte;
        }
        // SAFETY: the kernel reads and writes no more than an ifreq, of which `Request` has the size; it is not used after the call.
        unsafe { set_interface(file.as_raw_fd(), &raw const request)? };
        // SAFETY: no pointer is passed.
        unsafe { set_offloads(file.as_raw_fd(), OFFLOADS)? };
        Ok(Self(file))
    }
}

/// The way. What is under way is lost when this is dropped.
#[derive(Debug)]
pub(super) struct Delay {
    /// Of one direction, in nanoseconds.
    one_way: Arc<AtomicU64>,
    end: Arc<EventFd>,
    threads: Vec<JoinHandle<io::Result<()>>>,
}

impl Delay {
    /// Joins two devices that are up.
    pub fn between(here: Device, there: Device) -> io::Result<Self> {
        let end = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK)?;
        let (one_way, end) = (Arc::default(), Arc::new(end));
        let mut this = Self { one_way, end, threads: Vec::new() };
        let (here, there) = (Arc::new(here.0), Arc::new(there.0));
        for (from, to) in [(Arc::clone(&here), Arc::clone(&there)), (there, here)] {
            let (one_way, end) = (Arc::clone(&this.one_way), Arc::clone(&this.end));
            let carry = move || carry(&from, &to, &one_way, &end);
            this.threads.push(std::thread::Builder::new().name("line".to_owned()).spawn(carry)?);
        }
        Ok(this)
    }

    /// What it takes there and back from now on.
    pub fn set(&self, round_trip: Duration) {
        let one_way = u64::try_from(round_trip.as_nanos() / 2).unwrap_or(u64::MAX);
        self.one_way.store(one_way, Ordering::Relaxed);
    }

    /// Whether it goes on in both directions.
    pub fn goes_on(&self) -> bool {
        !self.threads.iter().any(JoinHandle::is_finished)
    }
}

impl Drop for Delay {
    fn drop(&mut self) {
        // It cannot overflow: it is written once.
        let _ = self.end.write(1);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Carries packets in one direction until it is to end.
fn carry(from: &File, to: &File, one_way: &AtomicU64, end: &EventFd) -> io::Result<()> {
    let mut buffer = vec![0; PACKET_MAX];
    let mut waiting: VecDeque<(Instant, Box<[u8]>)> = VecDeque::new();
    loop {
        let now = Instant::now();
        while let Some((_, packet)) = waiting.pop_front_if(|(due, _)| *due <= now) {
            // What the other end does not take is lost, as on any line.
            let _ = (&*to).write(&packet);
        }
        let next = waiting.front();
        let wait = next.map(|(due, _)| TimeSpec::from(due.saturating_duration_since(now)));
        let mut ready = [from.as_fd(), end.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        match ppoll(&mut ready, wait, None) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        if ready[1].any().unwrap_or(true) {
            return Ok(());
        }
        for _ in 0..AT_ONCE {
            match (&*from).read(&mut buffer) {
                Ok(length) => {
                    let due =
                        Instant::now() + Duration::from_nanos(one_way.load(Ordering::Relaxed));
                    waiting.push_back((due, buffer[..length].into()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::process::Command;

    use super::*;
    use crate::network::Network;

    fn ip(arguments: &str) -> io::Result<()> {
        let status = Command::new("ip").args(arguments.split(' ')).status()?;
        assert!(status.success(), "ip {arguments}");
        Ok(())
    }

    fn end(address: &'static str) -> io::Result<(Network, Device)> {
        let network = Network::new()?;
        let device = network.within(|| {
            let device = Device::new("line")?;
            ip(&format!("addr add {address} dev line"))?;
            ip("link set line up")?;
            Ok(device)
        })?;
        Ok((network, device))
    }

    /// As root alone.
    #[test]
    fn bytes_come_through_late_and_whole() {
        let (here, near) = match end("10.98.0.1/30") {
            Ok(end) => end,
            Err(error) => {
                // Not by a macro, whose output the harness hides when a test passes.
                let message = format!("skipped: no network can be made: {error}\n");
                return io::Write::write_all(&mut io::stderr(), message.as_bytes()).unwrap();
            }
        };
        let (there, far) = end("10.98.0.2/30").unwrap();
        let delay = Delay::between(near, far).unwrap();
        let round_trip = Duration::from_millis(60);
        delay.set(round_trip);
        let listener = there.within(|| TcpListener::bind("10.98.0.2:7")).unwrap();
        let bytes: Vec<u8> = (0..4 << 20).map(|at: u32| (at % 251) as u8).collect();
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| {
                let (mut stream, mut all) = (listener.accept().unwrap().0, Vec::new());
                stream.read_to_end(&mut all).unwrap();
                all
            });
            let begun = Instant::now();
            let mut stream = here.within(|| TcpStream::connect("10.98.0.2:7")).unwrap();
            let took = begun.elapsed();
            assert!(took >= round_trip, "connected after {took:?}");
            stream.write_all(&bytes).unwrap();
            drop(stream);
            assert!(receiving.join().unwrap() == bytes);
        });
        assert!(delay.goes_on());
    }
}
