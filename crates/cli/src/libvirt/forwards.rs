//! The ports that are forwarded to a network card (<https://libvirt.org/formatdomain.html#userspace-connection-using-passt>). libvirt has
//! them with the backend passt alone:
//!
//! ```text
//! <portForward proto='tcp' address='192.0.2.1'>      at one address of the host, or at all of them
//!   <range start='5000' end='5020' to='6000'/>       5000 to 5020 of the host are 6000 to 6020 of the guest
//!   <range start='5010' end='5015' exclude='yes'/>   but these are not forwarded
//! </portForward>
//! ```

use std::net::Ipv4Addr;

use roxmltree::Node;
use vmseal_api::nic::{FORWARDS_MAX, PortForward, Protocol};

/// The first port of the host that is not for root alone, as Linux has it unless it is told otherwise: QEMU is not root.
const UNPRIVILEGED: u16 = 1024;

/// Ports of the host, and the guest's port that the first of them leads to.
struct Range {
    start: u16,
    end: u16,
    to: u16,
    exclude: bool,
}

/// Those of an interface that a card can have; the others are told to `left`.
pub fn read(interface: Node<'_, '_>, left: &mut impl FnMut(String)) -> Vec<PortForward> {
    let mut forwards = Vec::new();
    for node in interface.children().filter(|child| child.has_tag_name("portForward")) {
        let protocol = node.attribute("proto").unwrap_or("no protocol");
        let address = node.attribute("address").unwrap_or("all addresses");
        let mut left = |why: String| {
            left(format!("its forwarded ports ({protocol} of {address}): {why}"));
        };
        match ports(node) {
            Err(why) => left(why),
            Ok(ports) if forwards.len() + ports.len() > FORWARDS_MAX => {
                left(format!("a card has at most {FORWARDS_MAX} forwarded ports"));
            }
            Ok(mut ports) => {
                let all = ports.len();
                ports.retain(|port| port.host_port >= UNPRIVILEGED);
                if ports.len() < all {
                    left(format!(
                        "the host's ports below {UNPRIVILEGED} are for root alone, and QEMU runs as another user"
                    ));
                }
                forwards.extend(ports);
            }
        }
    }
    forwards
}

/// The ports of an element: one more than a card can have at most.
fn ports(node: Node<'_, '_>) -> Result<Vec<PortForward>, String> {
    let protocol = match node.attribute("proto") {
        Some("tcp") => Protocol::Tcp,
        Some("udp") => Protocol::Udp,
        _ => return Err("those of tcp and udp are forwarded".to_owned()),
    };
    let host_address = match node.attribute("address") {
        None => Ipv4Addr::UNSPECIFIED,
        Some(text) => {
            text.parse::<Ipv4Addr>().map_err(|_| "those of IPv4 are forwarded".to_owned())?
        }
    };
    // Without it they would be open to more than they were.
    if let Some(device) = node.attribute("dev") {
        return Err(format!("they were those of interface '{device}' alone"));
    }
    let ranges = node.children().filter(|child| child.has_tag_name("range"));
    let ranges = ranges.map(range).collect::<Result<Vec<_>, _>>()?;
    let (excluded, ranges): (Vec<_>, Vec<_>) = ranges.into_iter().partition(|it| it.exclude);
    if ranges.is_empty() {
        return Err(
            "they were all ports, or all but some; forwarded are those that are named".to_owned()
        );
    }
    let is_excluded = |port: u16| excluded.iter().any(|it| (it.start..=it.end).contains(&port));
    let mut ports = Vec::new();
    for range in &ranges {
        for host_port in (range.start..=range.end).filter(|port| !is_excluded(*port)) {
            let guest_port = range.to + (host_port - range.start);
            ports.push(PortForward { protocol, host_address, host_port, guest_port });
            if ports.len() > FORWARDS_MAX {
                return Ok(ports);
            }
        }
    }
    Ok(ports)
}

fn range(node: Node<'_, '_>) -> Result<Range, String> {
    let port = |name: &str| {
        let text = node.attribute(name);
        let port = text.map(|text| text.parse::<u16>().ok().filter(|port| *port > 0));
        port.map(|port| port.ok_or_else(|| format!("'{}' is no port", text.unwrap_or_default())))
            .transpose()
    };
    let start = port("start")?.ok_or("a range has no beginning")?;
    let (end, to) = (port("end")?.unwrap_or(start), port("to")?.unwrap_or(start));
    let length = end.checked_sub(start);
    if length.and_then(|length| to.checked_add(length)).is_none() {
        return Err(format!("{start} to {end} are no ports, or do not lead to ports of the guest"));
    }
    Ok(Range { start, end, to, exclude: node.attribute("exclude") == Some("yes") })
}

/// Forwarded ports as elements of an interface.
pub fn lines(forwards: &[PortForward]) -> Vec<String> {
    let element = |forward: &PortForward| {
        let PortForward { protocol, host_address, host_port, guest_port } = forward;
        let protocol = protocol.name();
        [
            format!("      <portForward proto='{protocol}' address='{host_address}'>"),
            format!("        <range start='{host_port}' to='{guest_port}'/>"),
            "      </portForward>".to_owned(),
        ]
    };
    forwards.iter().flat_map(element).collect()
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    fn read_in(inside: &str) -> (Vec<String>, String) {
        let text = format!("<interface>{inside}</interface>");
        let document = Document::parse(&text).unwrap();
        let mut said = Vec::new();
        let forwards = read(document.root_element(), &mut |what: String| said.push(what));
        (forwards.iter().map(ToString::to_string).collect(), said.join("\n"))
    }

    #[test]
    fn ports_and_ranges_become_forwarded_ports() {
        let (forwards, said) = read_in(
            "<portForward proto='tcp'><range start='2022' to='22'/></portForward>
             <portForward proto='udp' address='192.0.2.1'>
               <range start='5000' end='5003' to='6000'/>
               <range start='5001' end='5002' exclude='yes'/>
               <range start='8080' exclude='no'/>
             </portForward>",
        );
        assert_eq!(said, "");
        assert_eq!(
            forwards,
            [
                "tcp:0.0.0.0:2022:22",
                "udp:192.0.2.1:5000:6000",
                "udp:192.0.2.1:5003:6003",
                "udp:192.0.2.1:8080:8080"
            ]
        );
    }

    #[test]
    fn what_cannot_be_forwarded_is_said_and_the_rest_is() {
        let element = |attributes: &str, inside: &str| {
            format!("<portForward {attributes}>{inside}</portForward>")
        };
        let (tcp, one) = ("proto='tcp'", "<range start='2022' to='22'/>");
        let many = format!("<range start='3000' end='{}'/>", 3000 + FORWARDS_MAX);
        for (attributes, inside, told) in [
            ("", one, "(no protocol of all addresses): those of tcp and udp"),
            ("proto='sctp'", one, "(sctp of all addresses)"),
            ("proto='tcp' address='2001:db8::1'", one, "(tcp of 2001:db8::1): those of IPv4"),
            ("proto='tcp' dev='eth0'", one, "of interface 'eth0' alone"),
            (tcp, "", "all ports"),
            (tcp, "<range start='1' end='9' exclude='yes'/>", "all but some"),
            (tcp, many.as_str(), "at most 32"),
            (tcp, "<range start='1' end='65535'/>", "at most 32"),
            (tcp, "<range to='22'/>", "no beginning"),
            (tcp, "<range start='x'/>", "'x' is no port"),
            (tcp, "<range start='0'/>", "'0' is no port"),
            (tcp, "<range start='65536'/>", "'65536' is no port"),
            (tcp, "<range start='3000' end='2000'/>", "3000 to 2000 are no ports"),
            (tcp, "<range start='3000' end='3001' to='65535'/>", "ports of the guest"),
            (tcp, "<range start='1023' to='80'/>", "ports below 1024"),
        ] {
            let udp = element("proto='udp'", "<range start='1024' to='53'/>");
            let (forwards, said) = read_in(&(element(attributes, inside) + &udp));
            assert_eq!(forwards, ["udp:0.0.0.0:1024:53"], "{attributes} {inside}: {said}");
            assert!(said.contains(told) && said.lines().count() == 1, "{told}: {said}");
        }
        // Of a range, those that can be.
        let (forwards, said) = read_in(&element(tcp, "<range start='1023' end='1024' to='80'/>"));
        assert_eq!(forwards, ["tcp:0.0.0.0:1024:81"]);
        assert!(said.contains("below 1024"), "{said}");
        // As many as a card can have.
        let all = element(tcp, &format!("<range start='3000' end='{}'/>", 2999 + FORWARDS_MAX));
        let (forwards, said) = read_in(&(all + &element(tcp, one)));
        assert_eq!(forwards.len(), FORWARDS_MAX);
        assert!(said.contains("at most 32"), "{said}");
    }

    #[test]
    fn what_is_written_is_read_again() {
        let forwards = ["tcp:127.0.0.1:2222:22", "udp:0.0.0.0:5353:53"];
        let parsed: Vec<PortForward> = forwards.iter().map(|it| it.parse().unwrap()).collect();
        let (again, said) = read_in(&lines(&parsed).concat());
        assert_eq!((again, said.as_str()), (forwards.map(str::to_owned).to_vec(), ""));
    }
}
