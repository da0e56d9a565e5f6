//! Taps and bridges of Linux, by the calls that netdevice(7) and the kernel's tuntap.rst describe.
//!
//! Interfaces are looked up by call and not in /sys, which shows those of the namespace that it was mounted in.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use libc::{c_int, c_ulong, c_void, ifreq};
use vmseal_api::nic::{INTERFACE_NAME_MAX, MacAddress};

use super::taken;
use crate::process;

/// The device that taps are made of.
const TUN: &str = "/dev/net/tun";

/// The longest frame of Ethernet without its header, in bytes.
pub const ETHERNET_MTU: u32 = 1500;

/// "Tell me about your driver" (linux/ethtool.h).
const ETHTOOL_GDRVINFO: u32 = 3;

/// "Put this interface on that bridge" (linux/sockios.h).
const SIOCBRADDIF: c_ulong = 0x89a2;

/// The drivers of bridges and of taps, as the kernel calls them.
const BRIDGE_DRIVER: &str = "bridge";
const TAP_DRIVER: &str = "tun";

/// What is done for a card on a bridge, for people.
const MAKE: &str = "make a tap";

/// `struct ethtool_drvinfo` (linux/ethtool.h), as far as it is read.
#[repr(C)]
struct DriverInfo {
    command: u32,
    driver: [u8; 32],
    rest: [u8; 160],
}

/// A tap that is open.
#[derive(Debug)]
pub struct Tap {
    /// What the interface is called.
    pub name: String,
    /// A descriptor for each of its queues.
    pub queues: Vec<OwnedFd>,
    /// The longest frame of what it is on, without its header, where that is known.
    pub mtu: Option<u32>,
}

/// Why there is no tap.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The kernel's driver is not there, or not for us.
    #[error(
        "{TUN} cannot be opened ({0}). Load the driver on the host (modprobe tun), or connect the card otherwise (--nic user)"
    )]
    NoTun(io::Error),
    /// No bridge of that name.
    #[error(
        "there is no bridge '{0}' on the host. Make it (ip link add {0} type bridge && ip link set {0} up, or in the host's network configuration), or connect the card otherwise"
    )]
    NoBridge(String),
    /// Something else of that name.
    #[error("'{0}' is no bridge of Linux: an interface of another kind has this name on the host")]
    NotABridge(String),
    /// No tap of that name.
    #[error(
        "there is no tap '{0}' on the host. Make it (ip tuntap add {0} mode tap), or connect the card to a bridge, which needs none"
    )]
    NoTap(String),
    /// Something else of that name.
    #[error("'{0}' is no tap: an interface of another kind has this name on the host")]
    NotATap(String),
    /// Another process has it.
    #[error("tap '{0}' is in use by another VM or program")]
    Busy(String),
    /// The agent may not.
    #[error(
        "the agent may not {0}: it needs the capability CAP_NET_ADMIN, which root has. Without it: --nic user, or a tap made for the agent's user (ip tuntap add NAME mode tap user USER)"
    )]
    Rights(String),
    /// Whatever else the kernel says.
    #[error("the host cannot {0}: {1}")]
    Kernel(String, io::Error),
}

fn failed(what: impl FnOnce() -> String) -> impl FnOnce(io::Error) -> TapError {
    |error| match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => TapError::Rights(what()),
        _ => TapError::Kernel(what(), error),
    }
}

/// Makes a tap on a bridge. It is gone when its descriptors are closed.
///
/// # Errors
/// [`TapError`]: nothing is left.
pub fn on_bridge(
    names: &str,
    bridge: &str,
    queues: u32,
    guest: MacAddress,
) -> Result<Tap, TapError> {
    find_bridge(bridge)?;
    let socket = socket()?;
    let make = || MAKE.to_owned();
    let (name, first) = attach(names, queues > 1).map_err(told(failed(make)))?;
    let mut tap = Tap { name, queues: vec![first], mtu: None };
    for _ in 1..queues {
        let (_, queue) = attach(&tap.name, true).map_err(told(failed(make)))?;
        tap.queues.push(queue);
    }
    let name = tap.name.as_str();
    // A bridge takes the lowest of its ports' addresses, and must not change its own with each guest: the
    // highest of all first bytes that are locally administered.
    let [_, second, third, fourth, fifth, sixth] = guest.bytes();
    let hardware = [0xfe, second, third, fourth, fifth, sixth];
    let mut request = named(name);
    request.ifr_ifru.ifru_hwaddr =
        libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: [0; 14] };
    // SAFETY: the field was set just now; any bytes are an address.
    let data = unsafe { &mut request.ifr_ifru.ifru_hwaddr.sa_data };
    for (to, byte) in data.iter_mut().zip(hardware) {
        *to = byte as libc::c_char;
    }
    ask(&socket, libc::SIOCSIFHWADDR, &mut request)
        .map_err(failed(|| format!("give tap {name} an address")))?;
    let mut request = named(bridge);
    ask(&socket, libc::SIOCGIFMTU, &mut request)
        .map_err(failed(|| format!("ask for the MTU of bridge '{bridge}'")))?;
    // SAFETY: the kernel has set the field.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    let mut request = named(name);
    request.ifr_ifru.ifru_mtu = mtu;
    ask(&socket, libc::SIOCSIFMTU, &mut request)
        .map_err(failed(|| format!("give tap {name} an MTU of {mtu}")))?;
    let index = index(&socket, name).map_err(failed(|| format!("find tap {name}")))?;
    let mut request = named(bridge);
    request.ifr_ifru.ifru_ifindex = index;
    ask(&socket, SIOCBRADDIF, &mut request)
        .map_err(failed(|| format!("put a tap on bridge '{bridge}'")))?;
    set_up(&socket, name).map_err(failed(|| format!("set tap {name} up")))?;
    tap.mtu = u32::try_from(mtu).ok();
    Ok(tap)
}

/// Opens a tap that somebody has made, with as many queues as it takes.
///
/// # Errors
/// [`TapError`].
pub fn open_tap(name: &str, queues: u32) -> Result<Tap, TapError> {
    find_tap(name)?;
    let refused = |error: Attach| match error {
        Attach::Kernel(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            TapError::Busy(name.to_owned())
        }
        error => told(failed(|| format!("open tap '{name}'")))(error),
    };
    let attach_as = |several: bool| attach(name, several).map(|(_, queue)| (queue, several));
    let first = match attach_as(queues > 1) {
        // It was made with one queue, or for several where the card has one.
        Err(Attach::Kernel(error)) if error.raw_os_error() == Some(libc::EINVAL) => {
            attach_as(queues <= 1)
        }
        other => other,
    };
    let (first, several) = first.map_err(refused)?;
    let mut open = vec![first];
    if several {
        for _ in 1..queues {
            open.push(attach(name, true).map_err(refused)?.1);
        }
    }
    let socket = socket()?;
    let mut request = named(name);
    ask(&socket, libc::SIOCGIFMTU, &mut request)
        .map_err(failed(|| format!("ask for the MTU of tap '{name}'")))?;
    // SAFETY: the kernel has set the field.
    let mtu = u32::try_from(unsafe { request.ifr_ifru.ifru_mtu }).ok();
    Ok(Tap { name: name.to_owned(), queues: open, mtu })
}

/// Sees whether a tap could be made on a bridge.
///
/// # Errors
/// [`TapError`].
pub fn examine_bridge(bridge: &str) -> Result<(), TapError> {
    find_bridge(bridge)?;
    match process::can_make_interfaces() {
        true => Ok(()),
        false => Err(TapError::Rights(MAKE.to_owned())),
    }
}

/// Sees whether a tap could be opened, as far as the kernel says without that: not whether it is another user's.
///
/// # Errors
/// [`TapError`].
pub fn examine_tap(tap: &str) -> Result<(), TapError> {
    find_tap(tap)?;
    let index = index(&socket()?, tap).map_err(failed(|| format!("find tap {tap}")))?;
    match taken::is_taken(index) {
        Ok(true) => Err(TapError::Busy(tap.to_owned())),
        Ok(false) => Ok(()),
        Err(error) => {
            // Who opens it will see.
            tracing::debug!(%error, tap, "the kernel cannot be asked whether somebody has it");
            Ok(())
        }
    }
}

fn find_bridge(bridge: &str) -> Result<(), TapError> {
    open_tun()?;
    match driver(bridge)? {
        None => Err(TapError::NoBridge(bridge.to_owned())),
        Some(driver) if driver == BRIDGE_DRIVER => Ok(()),
        Some(_) => Err(TapError::NotABridge(bridge.to_owned())),
    }
}

fn find_tap(tap: &str) -> Result<(), TapError> {
    open_tun()?;
    match driver(tap)? {
        None => Err(TapError::NoTap(tap.to_owned())),
        Some(driver) if driver == TAP_DRIVER => Ok(()),
        Some(_) => Err(TapError::NotATap(tap.to_owned())),
    }
}

/// What drives an interface; none where there is no such interface.
fn driver(name: &str) -> Result<Option<String>, TapError> {
    let socket = socket()?;
    let find = || format!("look at interface '{name}'");
    match index(&socket, name) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => return Ok(None),
        other => other.map_err(failed(find))?,
    };
    let mut info = DriverInfo { command: ETHTOOL_GDRVINFO, driver: [0; 32], rest: [0; 160] };
    let mut request = named(name);
    request.ifr_ifru.ifru_data = (&raw mut info).cast();
    match ask(&socket, libc::SIOCETHTOOL, &mut request) {
        // It has no driver that says what it is.
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Ok(Some(String::new())),
        other => {
            other.map_err(failed(find))?;
            let text = CStr::from_bytes_until_nul(&info.driver).unwrap_or_default();
            Ok(Some(text.to_string_lossy().into_owned()))
        }
    }
}

enum Attach {
    NoTun(TapError),
    Kernel(io::Error),
}

fn told(kernel: impl FnOnce(io::Error) -> TapError) -> impl FnOnce(Attach) -> TapError {
    |error| match error {
        Attach::NoTun(error) => error,
        Attach::Kernel(error) => kernel(error),
    }
}

/// Opens the device that taps are made of.
pub fn open_tun() -> Result<File, TapError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK);
    options.open(TUN).map_err(TapError::NoTun)
}

/// A queue of the tap of this name, which is made where there is none; and its name.
fn attach(name: &str, several: bool) -> Result<(String, OwnedFd), Attach> {
    let tun = open_tun().map_err(Attach::NoTun)?;
    let mut flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    if several {
        flags |= libc::IFF_MULTI_QUEUE;
    }
    let mut request = named(name);
    // The bits of an unsigned short.
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    ask(&tun, libc::TUNSETIFF, &mut request).map_err(Attach::Kernel)?;
    let bytes = request.ifr_name.map(|byte| byte as u8);
    let name = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok((name.to_string_lossy().into_owned(), tun.into()))
}

/// A socket to ask the kernel about interfaces by.
fn socket() -> Result<OwnedFd, TapError> {
    // SAFETY: no pointers are passed.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(failed(|| "make a socket".to_owned())(io::Error::last_os_error()));
    }
    // SAFETY: the call has just made the descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn index(socket: &OwnedFd, name: &str) -> io::Result<c_int> {
    let mut request = named(name);
    ask(socket, libc::SIOCGIFINDEX, &mut request)?;
    // SAFETY: the kernel has set the field.
    Ok(unsafe { request.ifr_ifru.ifru_ifindex })
}

fn set_up(socket: &OwnedFd, name: &str) -> io::Result<()> {
    let mut request = named(name);
    ask(socket, libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: the kernel has set the field.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | libc::IFF_UP as libc::c_short;
    ask(socket, libc::SIOCSIFFLAGS, &mut request)
}

/// A request about an interface. A name that is too long is cut, and names none that there is: names are checked
/// before.
fn named(name: &str) -> ifreq {
    // SAFETY: zeroes are a value of all its fields, in each of the union's readings.
    let mut request: ifreq = unsafe { mem::zeroed() };
    for (to, byte) in request.ifr_name.iter_mut().take(INTERFACE_NAME_MAX).zip(name.bytes()) {
        *to = byte as libc::c_char;
    }
    request
}

/// Calls the kernel with a request that it may answer in.
fn ask(file: &impl AsRawFd, what: c_ulong, request: &mut ifreq) -> io::Result<()> {
    let request: *mut ifreq = request;
    // SAFETY: all calls of this module take a pointer to an ifreq, which outlives the call, as does what it
    // points to (of SIOCETHTOOL alone).
    if unsafe { libc::ioctl(file.as_raw_fd(), what, request.cast::<c_void>()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::sched::{CloneFlags, unshare};

    use super::*;
    use crate::skipped::skipped;

    /// In a network of its own, where there is the right to make one.
    fn in_a_network(test: impl FnOnce() + Send + 'static) {
        let thread = std::thread::spawn(|| match unshare(CloneFlags::CLONE_NEWNET) {
            Ok(()) => test(),
            Err(error) => skipped(format_args!("no network namespace: {error}")),
        });
        thread.join().unwrap();
    }

    fn ip(arguments: &str) {
        let run = std::process::Command::new("ip").args(arguments.split(' ')).output().unwrap();
        assert!(run.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&run.stderr));
    }

    fn links() -> String {
        let run = std::process::Command::new("ip").args(["-o", "link"]).output().unwrap();
        String::from_utf8(run.stdout).unwrap()
    }

    #[test]
    fn a_tap_on_a_bridge_is_there_as_long_as_it_is_open() {
        in_a_network(|| {
            ip("link add br0 type bridge");
            ip("link set br0 mtu 9000 up");
            let mac: MacAddress = "52:54:00:12:34:56".parse().unwrap();
            let tap = on_bridge("vmseal%d", "br0", 2, mac).unwrap();
            assert_eq!((tap.name.as_str(), tap.queues.len(), tap.mtu), ("vmseal0", 2, Some(9000)));
            let shown = links();
            let line = shown.lines().find(|line| line.contains("vmseal0")).unwrap();
            for part in ["UP", "master br0", "mtu 9000", "fe:54:00:12:34:56"] {
                assert!(line.contains(part), "{part}: {line}");
            }
            let other = on_bridge("vmseal%d", "br0", 1, mac).unwrap();
            assert_eq!(other.name, "vmseal1");
            drop((tap, other));
            assert!(!links().contains("vmseal"), "{}", links());
        });
    }

    /// Waits until nobody has the tap. A process that another test starts has the descriptors of this one until it runs its program.
    fn is_let_go(name: &str) {
        let begun = std::time::Instant::now();
        while examine_tap(name).is_err() {
            assert!(begun.elapsed() < std::time::Duration::from_secs(20), "somebody has {name}");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    #[test]
    fn taps_of_others_are_opened_and_stay() {
        in_a_network(|| {
            ip("tuntap add single mode tap");
            ip("tuntap add several mode tap multi_queue");
            for (name, wanted, queues) in
                [("single", 1, 1), ("single", 4, 1), ("several", 1, 1), ("several", 4, 4)]
            {
                let tap = open_tap(name, wanted).unwrap();
                assert_eq!((tap.queues.len(), tap.mtu), (queues, Some(ETHERNET_MTU)), "{name}");
                drop(tap);
                is_let_go(name);
            }
            let held = [open_tap("single", 1).unwrap(), open_tap("several", 2).unwrap()];
            let busy = open_tap("single", 1).unwrap_err();
            assert!(matches!(busy, TapError::Busy(_)), "{busy}");
            let told = examine_tap("single").unwrap_err();
            assert_eq!(told.to_string(), busy.to_string());
            examine_tap("several").unwrap();
            drop(held);
            is_let_go("single");
            examine_tap("single").unwrap();
            open_tap("single", 1).unwrap();
            assert!(links().contains("single") && links().contains("several"));
        });
    }

    #[test]
    fn what_is_missing_or_of_another_kind_is_refused_by_name() {
        in_a_network(|| {
            ip("link add br0 type bridge");
            ip("tuntap add tap0 mode tap");
            let mac: MacAddress = "52:54:00:12:34:56".parse().unwrap();
            let bridge = |name: &str| on_bridge("vmseal%d", name, 1, mac).unwrap_err().to_string();
            assert!(bridge("br1").contains("no bridge 'br1'"), "{}", bridge("br1"));
            assert!(bridge("tap0").contains("'tap0' is no bridge"), "{}", bridge("tap0"));
            assert!(bridge("lo").contains("'lo' is no bridge"), "{}", bridge("lo"));
            let tap = |name: &str| open_tap(name, 1).unwrap_err().to_string();
            assert!(tap("tap1").contains("no tap 'tap1'"), "{}", tap("tap1"));
            assert!(tap("br0").contains("'br0' is no tap"), "{}", tap("br0"));
            assert!(!links().contains("vmseal"), "{}", links());
        });
    }
}
