//! Ports of the host that lead into guests: which are free, and which of them a VM has where it does not say.

use std::fs;
use std::io;
use std::net::{SocketAddrV4, TcpListener, UdpSocket};

use vmseal_api::host::NicSpec;
use vmseal_api::id::VmId;
use vmseal_api::nic::{PortForward, Protocol};
use vmseal_api::problem::{ErrorCode, Problem};

/// The ports that are chosen from: above those that Linux gives connections of its own.
const FIRST: u16 = 61_000;
const COUNT: u32 = 65_536 - FIRST as u32;

/// The first port that is not for root alone.
const UNPRIVILEGED: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";

/// The ports of one VM. They are held against each other until it is dropped, right before QEMU takes them.
pub struct Chosen {
    vm: VmId,
    own_user: bool,
    held: Vec<Held>,
}

/// Keeps a port.
enum Held {
    Tcp { _listener: TcpListener },
    Udp { _socket: UdpSocket },
}

impl Chosen {
    pub fn new(vm: VmId, own_user: bool) -> Self {
        Self { vm, own_user, held: Vec::new() }
    }

    /// The forwarded ports of a card, each with a port of the host that is free. Where the VM does not say which,
    /// it is the one `before`, where that is free.
    ///
    /// # Errors
    /// `in-use`, or another refusal with the port.
    pub fn choose(
        &mut self,
        nic: &NicSpec,
        before: &[PortForward],
    ) -> Result<Vec<PortForward>, Problem> {
        let forwards = nic.backend.forwards().iter().enumerate();
        forwards
            .map(|(index, wanted)| {
                let port = match wanted.host_port {
                    0 => self.any(nic, index, wanted, before)?,
                    port => self.this(nic, wanted, port)?,
                };
                Ok(PortForward { host_port: port, ..wanted.clone() })
            })
            .collect()
    }

    fn any(
        &mut self,
        nic: &NicSpec,
        index: usize,
        wanted: &PortForward,
        before: &[PortForward],
    ) -> Result<u16, Problem> {
        let same = |it: &&PortForward| PortForward { host_port: 0, ..(*it).clone() } == *wanted;
        let last = before.get(index).filter(same).map(|it| it.host_port);
        let ports = last.into_iter().chain((0..COUNT).map(|step| port(self.vm, nic, index, step)));
        for port in ports {
            match bind(wanted, port) {
                Ok(held) => {
                    self.held.push(held);
                    return Ok(port);
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(refused(nic, wanted, port, &error)),
            }
        }
        let what = format!(
            "network card '{}': no port of {} is free on the host for port {} of the guest",
            nic.name, wanted.host_address, wanted.guest_port
        );
        Err(Problem::new(ErrorCode::InUse, what))
    }

    fn this(&mut self, nic: &NicSpec, wanted: &PortForward, port: u16) -> Result<u16, Problem> {
        if self.own_user && port < unprivileged() {
            return Err(privileged(nic, port));
        }
        self.held.push(bind(wanted, port).map_err(|error| refused(nic, wanted, port, &error))?);
        Ok(port)
    }
}

/// The ports that are chosen where none is taken.
pub fn preferred(vm: VmId, nic: &NicSpec) -> Vec<PortForward> {
    let forwards = nic.backend.forwards().iter().enumerate();
    let chosen = forwards.map(|(index, wanted)| match wanted.host_port {
        0 => PortForward { host_port: port(vm, nic, index, 0), ..wanted.clone() },
        _ => wanted.clone(),
    });
    chosen.collect()
}

/// Where to look first, and then: the same for the same VM always, and another for another one.
fn port(vm: VmId, nic: &NicSpec, index: usize, step: u32) -> u16 {
    let bytes = vm.0.as_bytes().iter().chain(nic.nic.0.as_bytes()).copied();
    // FNV-1a: it only has to spread.
    let hash = bytes
        .fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let index = u32::try_from(index).unwrap_or(0);
    let offset = (hash % COUNT + index + step) % COUNT;
    FIRST + u16::try_from(offset).unwrap_or(0)
}

fn unprivileged() -> u16 {
    let text = fs::read_to_string(UNPRIVILEGED).unwrap_or_default();
    text.trim().parse().unwrap_or(1024)
}

fn bind(forward: &PortForward, port: u16) -> io::Result<Held> {
    let at = SocketAddrV4::new(forward.host_address, port);
    Ok(match forward.protocol {
        Protocol::Tcp => Held::Tcp { _listener: TcpListener::bind(at)? },
        Protocol::Udp => Held::Udp { _socket: UdpSocket::bind(at)? },
    })
}

fn privileged(nic: &NicSpec, port: u16) -> Problem {
    let what = format!(
        "network card '{}': port {port} of the host is for root alone, and QEMU runs as another user: forward a port from {} on",
        nic.name,
        unprivileged()
    );
    Problem::new(ErrorCode::WrongState, what)
}

fn refused(nic: &NicSpec, forward: &PortForward, port: u16, error: &io::Error) -> Problem {
    let (name, address, protocol) = (&nic.name, forward.host_address, forward.protocol.name());
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            let what = format!(
                "network card '{name}': {protocol} port {port} of {address} is in use on the host by another VM or program: forward another one, or end what has it (ss -lnp)"
            );
            Problem::new(ErrorCode::InUse, what)
        }
        io::ErrorKind::AddrNotAvailable => {
            let what = format!(
                "network card '{name}': the host has no address {address}: forward a port of one that it has, or of 0.0.0.0 for all"
            );
            Problem::new(ErrorCode::WrongState, what)
        }
        io::ErrorKind::PermissionDenied => privileged(nic, port),
        _ => {
            let what = format!(
                "network card '{name}': {protocol} port {port} of {address} cannot be forwarded: {error}"
            );
            Problem::new(ErrorCode::WrongState, what)
        }
    }
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::NicId;
    use vmseal_api::nic::NicBackend;

    use super::*;

    fn nic(forwards: &[&str]) -> NicSpec {
        let forwards = forwards.iter().map(|it| it.parse().unwrap()).collect();
        NicSpec {
            nic: NicId::new(),
            name: "nic0".to_owned(),
            mac: "52:54:00:00:00:01".parse().unwrap(),
            model: Default::default(),
            backend: NicBackend::User { forwards },
            link: Default::default(),
        }
    }

    #[test]
    fn free_ports_are_the_same_again_as_long_as_they_are_free() {
        let (vm, nic) = (VmId::new(), nic(&["tcp:22", "tcp:80", "udp:53"]));
        let choose = |before: &[PortForward]| Chosen::new(vm, true).choose(&nic, before).unwrap();
        let first = choose(&[]);
        assert!(first.iter().all(|it| it.host_port >= FIRST), "{first:?}");
        assert_ne!(first[0].host_port, first[1].host_port);
        assert_eq!(choose(&[]), first);
        let taken = TcpListener::bind((first[0].host_address, first[0].host_port)).unwrap();
        let second = choose(&first);
        assert_ne!(second[0].host_port, first[0].host_port);
        assert_eq!(second[2], first[2]);
        drop(taken);
        assert_eq!(choose(&second)[0], second[0], "what it has is kept");
    }

    #[test]
    fn ports_that_cannot_be_had_are_refused_by_name() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let choose = |forward: &str| {
            let nic = nic(&[forward]);
            Chosen::new(VmId::new(), true).choose(&nic, &[]).unwrap_err()
        };
        let problem = choose(&format!("tcp:{port}:22"));
        assert_eq!(problem.code, ErrorCode::InUse);
        assert!(problem.detail.contains(&format!("tcp port {port} of 127.0.0.1")), "{problem}");
        let problem = choose("tcp:192.0.2.1:5000:22");
        assert!(problem.detail.contains("no address 192.0.2.1"), "{problem}");
        if unprivileged() > 80 {
            assert!(choose("tcp:80:80").detail.contains("port 80"));
        }
    }
}
