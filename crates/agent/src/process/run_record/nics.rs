//! A VM's network cards, as the record of a running VM has them.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{NicSpec, NicState};
use vmseal_api::id::NicId;
use vmseal_api::nic::{MacAddress, NicBackend, NicLink, NicModel, PortForward, Protocol};

/// A network card of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    nic: NicId,
    name: String,
    mac: MacAddress,
    model: Model,
    backend: Backend,
    link: Link,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Model {
    Virtio,
    E1000e,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Link {
    Up,
    Down,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Backend {
    User { forwards: Vec<Forward> },
    Tap { tap: String },
    Bridge { bridge: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Forward {
    protocol: Transport,
    host_address: Ipv4Addr,
    host_port: u16,
    guest_port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Transport {
    Tcp,
    Udp,
}

/// What a network card is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicInUse {
    nic: NicId,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    forwards: Vec<Forward>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
}

impl From<&NicSpec> for Nic {
    fn from(NicSpec { nic, name, mac, model, backend, link }: &NicSpec) -> Self {
        Self {
            nic: *nic,
            name: name.clone(),
            mac: *mac,
            model: match model {
                NicModel::Virtio => Model::Virtio,
                NicModel::E1000e => Model::E1000e,
            },
            backend: match backend {
                NicBackend::User { forwards } => {
                    Backend::User { forwards: forwards.iter().map(Forward::from).collect() }
                }
                NicBackend::Tap { tap } => Backend::Tap { tap: tap.clone() },
                NicBackend::Bridge { bridge } => Backend::Bridge { bridge: bridge.clone() },
            },
            link: match link {
                NicLink::Up => Link::Up,
                NicLink::Down => Link::Down,
            },
        }
    }
}

impl From<Nic> for NicSpec {
    fn from(Nic { nic, name, mac, model, backend, link }: Nic) -> Self {
        Self {
            nic,
            name,
            mac,
            model: match model {
                Model::Virtio => NicModel::Virtio,
                Model::E1000e => NicModel::E1000e,
            },
            backend: match backend {
                Backend::User { forwards } => NicBackend::User {
                    forwards: forwards.into_iter().map(PortForward::from).collect(),
                },
                Backend::Tap { tap } => NicBackend::Tap { tap },
                Backend::Bridge { bridge } => NicBackend::Bridge { bridge },
            },
            link: match link {
                Link::Up => NicLink::Up,
                Link::Down => NicLink::Down,
            },
        }
    }
}

impl From<&PortForward> for Forward {
    fn from(forward: &PortForward) -> Self {
        let PortForward { protocol, host_address, host_port, guest_port } = forward;
        let protocol = match protocol {
            Protocol::Tcp => Transport::Tcp,
            Protocol::Udp => Transport::Udp,
        };
        let (host_address, host_port, guest_port) = (*host_address, *host_port, *guest_port);
        Self { protocol, host_address, host_port, guest_port }
    }
}

impl From<Forward> for PortForward {
    fn from(Forward { protocol, host_address, host_port, guest_port }: Forward) -> Self {
        let protocol = match protocol {
            Transport::Tcp => Protocol::Tcp,
            Transport::Udp => Protocol::Udp,
        };
        Self { protocol, host_address, host_port, guest_port }
    }
}

impl From<&NicState> for NicInUse {
    fn from(state: &NicState) -> Self {
        // Whether it is plugged in is in the specification, and an agent that adopts the VM has QEMU do it again.
        let NicState { nic, forwards, interface, addresses: _, link: _ } = state;
        let forwards = forwards.iter().map(Forward::from).collect();
        Self { nic: *nic, forwards, interface: interface.clone() }
    }
}

impl From<NicInUse> for NicState {
    fn from(NicInUse { nic, forwards, interface }: NicInUse) -> Self {
        let forwards = forwards.into_iter().map(PortForward::from).collect();
        Self { nic, forwards, interface, addresses: Vec::new(), link: None }
    }
}
