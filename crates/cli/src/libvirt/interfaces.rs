//! The network interfaces of a libvirt domain (<https://libvirt.org/formatdomain.html#network-interfaces>): which
//! become network cards, and what of them stays behind.

use roxmltree::Node;
use vmseal_api::nic::{MacAddress, NicBackend, NicLink, NicModel};
use vmseal_api::request::CreateNic;

use super::forwards;
use super::networks::{self, Networks};

/// Elements of an interface that are read, or say nothing that a VM does not have of its own.
const KNOWN: [&str; 8] = ["mac", "source", "model", "link", "target", "alias", "address", "boot"];

/// Elements that are left behind, and what that means.
const LEFT: [(&str, &str); 6] = [
    ("filterref", "its filter: the guest may send frames with any address"),
    ("bandwidth", "its limits"),
    ("vlan", "its VLAN: give it a bridge of that VLAN"),
    ("mtu", "its MTU: it is the bridge's"),
    ("port", "its isolation from other ports"),
    ("virtualport", "its virtual port"),
];

/// The cards, in the order of the domain, connected as `mapped` says.
///
/// # Errors
/// `mapped` has what no card of the domain is on.
pub fn nics(
    devices: Node<'_, '_>,
    mapped: &Networks,
    warnings: &mut Vec<String>,
) -> anyhow::Result<Vec<CreateNic>> {
    mapped.check(devices)?;
    let interfaces = devices.children().filter(|child| child.has_tag_name("interface"));
    Ok(interfaces.filter_map(|interface| nic(interface, mapped, warnings)).collect())
}

fn nic(
    interface: Node<'_, '_>,
    mapped: &Networks,
    warnings: &mut Vec<String>,
) -> Option<CreateNic> {
    let child = |name: &str| interface.children().find(|child| child.has_tag_name(name));
    let of = |name: &str, attribute: &str| child(name)?.attribute(attribute);
    let mac = of("mac", "address");
    let called = mac.map_or_else(String::new, |mac| format!(" {mac}"));
    let kind = interface.attribute("type").unwrap_or_default();
    let Some(backend) = mapped.get(interface).or_else(|| backend(kind, &of)) else {
        let on = match (kind, of("source", "network")) {
            ("network", Some(network)) => format!("libvirt's network '{network}'"),
            _ => format!("type '{kind}'"),
        };
        let instead = networks::option_for(interface).map_or_else(
            || {
                let mac = mac.map_or_else(String::new, |mac| format!(",mac={mac}"));
                format!("give it with --nic, such as bridge=NAME{mac}")
            },
            |option| format!("say what it is to be connected to: {option}"),
        );
        warnings.push(format!("the network card{called} ({on}): {instead}"));
        return None;
    };
    let mut left = |what: String| warnings.push(format!("of the network card{called}: {what}"));
    let (of_user, by_passt) = (is_user(kind, &of), of("backend", "type") == Some("passt"));
    let backend = match of_user {
        true => NicBackend::User { forwards: forwards::read(interface, &mut left) },
        false => backend,
    };
    if of_user && by_passt {
        left("its backend, passt: the guest does not have the host's addresses, but one of a network that QEMU makes up (10.0.2.0/24)".to_owned());
    }
    if let Some(device) = of("source", "dev").filter(|_| of_user) {
        left(format!("the host's interface '{device}', by which the guest reached out"));
    }
    let model = match of("model", "type") {
        Some("virtio") => NicModel::Virtio,
        Some("e1000e") => NicModel::E1000e,
        other => {
            let other = other.unwrap_or("none");
            left(format!("its model, {other}: it will be an e1000e, and has another name there"));
            NicModel::E1000e
        }
    };
    let address = mac.and_then(|mac| mac.parse::<MacAddress>().ok());
    if mac.is_some() && address.is_none() {
        left("its address, which is none".to_owned());
    }
    for element in interface.children().filter(Node::is_element) {
        let name = element.tag_name().name();
        let read = KNOWN.contains(&name)
            || of_user && (name == "portForward" || name == "backend" && by_passt);
        if !read {
            let known = LEFT.iter().find(|(left, _)| *left == name);
            left(known.map_or_else(|| format!("<{name}>"), |(_, what)| (*what).to_owned()));
        }
    }
    let link = match of("link", "state") {
        Some("down") => NicLink::Down,
        _ => NicLink::Up,
    };
    Some(CreateNic { name: None, mac: address, model, backend, link })
}

/// Whether its guest reaches out through a program of the host's, and is reached at forwarded ports alone. With passt, that program and
/// QEMU may share the guest's memory (`vhostuser`).
fn is_user<'a>(kind: &str, of: &impl Fn(&str, &str) -> Option<&'a str>) -> bool {
    kind == "user" || kind == "vhostuser" && of("backend", "type") == Some("passt")
}

/// What it is connected to; none where there is nothing like it.
fn backend<'a>(kind: &str, of: &impl Fn(&str, &str) -> Option<&'a str>) -> Option<NicBackend> {
    if of("virtualport", "type").is_some() {
        // Of Open vSwitch and others: no bridge of Linux.
        return None;
    }
    match kind {
        _ if is_user(kind, of) => Some(NicBackend::User { forwards: Vec::new() }),
        // A domain that runs says which bridge its network is.
        "bridge" | "network" => {
            Some(NicBackend::Bridge { bridge: of("source", "bridge")?.to_owned() })
        }
        "ethernet" if of("target", "managed") == Some("no") => {
            Some(NicBackend::Tap { tap: of("target", "dev")?.to_owned() })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    fn read(interface: &str) -> (Vec<CreateNic>, String) {
        read_mapped(interface, &Networks::default())
    }

    fn read_mapped(interface: &str, mapped: &Networks) -> (Vec<CreateNic>, String) {
        let text = format!("<devices>{interface}</devices>");
        let document = Document::parse(&text).unwrap();
        let mut warnings = Vec::new();
        let nics = nics(document.root_element(), mapped, &mut warnings).unwrap();
        (nics, warnings.join("\n"))
    }

    #[test]
    fn interfaces_become_cards_where_there_is_something_like_them() {
        let (nics, said) = read(
            "<interface type='bridge'><mac address='52:54:00:12:34:56'/><source bridge='br0'/>
             <model type='virtio'/><link state='down'/><alias name='net0'/></interface>
             <interface type='user'><model type='e1000e'/></interface>
             <interface type='ethernet'><target dev='tap0' managed='no'/><model type='virtio'/></interface>
             <interface type='network'><source network='default' bridge='virbr0'/><model type='virtio'/></interface>",
        );
        assert_eq!(said, "");
        let shown: Vec<_> = nics.iter().map(|nic| nic.backend.to_string()).collect();
        assert_eq!(shown, ["bridge br0", "user", "tap tap0", "bridge virbr0"]);
        assert_eq!(nics[0].mac.unwrap().to_string(), "52:54:00:12:34:56");
        assert_eq!((nics[0].link, nics[1].link), (NicLink::Down, NicLink::Up));
        assert_eq!((nics[0].model, nics[1].model), (NicModel::Virtio, NicModel::E1000e));
    }

    #[test]
    fn forwarded_ports_of_passt_lead_into_the_guest_again() {
        for kind in ["user", "vhostuser"] {
            let (nics, said) = read(&format!(
                "<interface type='{kind}'><mac address='52:54:00:12:34:56'/><backend type='passt'/>
                 <portForward proto='tcp' address='127.0.0.1'><range start='2222' to='22'/></portForward>
                 <portForward proto='udp'><range start='5000' end='5001'/></portForward>
                 <model type='virtio'/></interface>",
            ));
            let forwards: Vec<_> =
                nics[0].backend.forwards().iter().map(ToString::to_string).collect();
            let expected =
                ["tcp:127.0.0.1:2222:22", "udp:0.0.0.0:5000:5000", "udp:0.0.0.0:5001:5001"];
            assert_eq!(forwards, expected, "{kind}");
            // The guest has another address than it had.
            assert!(said.contains("its backend, passt") && said.lines().count() == 1, "{said}");
        }
    }

    #[test]
    fn a_card_is_connected_to_what_its_network_was_said_to_become() {
        let of = |text: &str| vec![text.to_owned()];
        let mapped = Networks::parse(&of("default:bridge=virbr0"), &of("ovs:br1")).unwrap();
        let default = "<interface type='network'><mac address='52:54:00:12:34:56'/><source network='default'/><model type='virtio'/></interface>";
        let ovs = "<interface type='bridge'><source bridge='ovs'/><virtualport type='openvswitch'/><model type='virtio'/></interface>";
        let (nics, said) = read_mapped(&(default.to_owned() + ovs), &mapped);
        let shown: Vec<_> = nics.iter().map(|nic| nic.backend.to_string()).collect();
        assert_eq!(shown, ["bridge virbr0", "bridge br1"]);
        assert_eq!(nics[0].mac.unwrap().to_string(), "52:54:00:12:34:56");
        // All that is lost is the switch's port.
        assert_eq!(said, "of the network card: its virtual port");
        // Also where a domain that runs names the network's bridge.
        let runs = default.replace("network='default'", "network='default' bridge='other'");
        let (nics, said) = read_mapped(&(runs + ovs), &mapped);
        assert_eq!(nics[0].backend.to_string(), "bridge virbr0", "{said}");
        // The others are as they were.
        let other = default.replace("'default'", "'lab'");
        let (nics, said) = read_mapped(&(default.to_owned() + ovs + &other), &mapped);
        assert!(nics.len() == 2 && said.contains("--network lab:bridge=NAME"), "{said}");
    }

    #[test]
    fn what_stays_behind_is_said() {
        for (interface, count, told) in [
            (
                "<interface type='network'><source network='default'/></interface>",
                0,
                "(libvirt's network 'default'): say what it is to be connected to: --network default:bridge=NAME, or --network default:user",
            ),
            (
                "<interface type='direct'><mac address='52:54:00:00:00:01'/></interface>",
                0,
                "mac=52:54:00:00:00:01",
            ),
            (
                "<interface type='bridge'><source bridge='b'/><virtualport type='openvswitch'/></interface>",
                0,
                "(type 'bridge'): say what it is to be connected to: --bridge b:NAME",
            ),
            ("<interface type='user'><model type='rtl8139'/></interface>", 1, "its model, rtl8139"),
            (
                "<interface type='user'><model type='virtio'/><filterref filter='f'/></interface>",
                1,
                "any address",
            ),
            ("<interface type='user'><model type='virtio'/><tune/></interface>", 1, "<tune>"),
            (
                "<interface type='user'><model type='virtio'/><backend tap='/dev/net/tun'/></interface>",
                1,
                "<backend>",
            ),
            (
                "<interface type='bridge'><source bridge='b'/><model type='virtio'/><portForward proto='tcp'/></interface>",
                1,
                "<portForward>",
            ),
            (
                "<interface type='user'><source dev='eth0'/><model type='virtio'/></interface>",
                1,
                "the host's interface 'eth0'",
            ),
            (
                "<interface type='user'><backend type='passt'/><model type='virtio'/></interface>",
                1,
                "its backend, passt",
            ),
            (
                "<interface type='user'><model type='virtio'/><portForward proto='tcp'/></interface>",
                1,
                "its forwarded ports (tcp of all addresses): they were all ports",
            ),
            ("<interface type='vhostuser'><source path='/s'/></interface>", 0, "type 'vhostuser'"),
        ] {
            let (nics, said) = read(interface);
            assert_eq!(nics.len(), count, "{interface}");
            assert!(said.contains(told), "{interface}: {said}");
        }
    }
}
