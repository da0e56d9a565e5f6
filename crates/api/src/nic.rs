//! Network cards of VMs: what users ask for, what the inventory has, and what an agent is told.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::id::NicId;

/// The most network cards of a VM: the functions of the PCI slot that has them.
pub const NICS_MAX: usize = 8;

/// The most ports that are forwarded to one network card.
pub const FORWARDS_MAX: usize = 32;

/// The longest name of a network interface of Linux, in bytes (IFNAMSIZ without its end mark).
pub const INTERFACE_NAME_MAX: usize = 15;

/// The addresses of network cards, as a regular expression of ECMA 262: none of a group, and none of [`MACS_REFUSED`].
pub const MAC_PATTERN: &str =
    "^[0-9A-Fa-f][02468ACEace]((:[0-9A-Fa-f]{2}){5}|(-[0-9A-Fa-f]{2}){5})$";

/// What stands for no address.
pub const MACS_REFUSED: [&str; 2] = ["00:00:00:00:00:00", "00-00-00-00-00-00"];

/// The address of a network card (EUI-48).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[cfg_attr(feature = "openapi", schema(value_type = String))]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress([u8; 6]);

/// The first half of the addresses that a control plane makes up.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct MacPrefix([u8; 3]);

/// Why a text is no address of a network card, or none that a card can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MacError {
    /// It is of another form.
    #[error("'{0}' is no MAC address such as 52:54:00:12:34:56")]
    Form(String),
    /// It is the address of a group, as a card's never is.
    #[error("{0} is a multicast address; the second digit of a card's address is even")]
    Multicast(MacAddress),
    /// It stands for none.
    #[error("{0} is not the address of a card")]
    Zero(MacAddress),
}

impl MacAddress {
    /// Its bytes.
    #[must_use]
    pub fn bytes(self) -> [u8; 6] {
        self.0
    }

    /// Whether a card may have it.
    ///
    /// # Errors
    /// [`MacError`].
    pub fn check(self) -> Result<(), MacError> {
        match self.0 {
            [first, ..] if first & 1 == 1 => Err(MacError::Multicast(self)),
            [0, 0, 0, 0, 0, 0] => Err(MacError::Zero(self)),
            _ => Ok(()),
        }
    }
}

impl MacPrefix {
    /// A prefix out of random bytes: of locally administered addresses of cards.
    #[must_use]
    pub fn from_random([first, second, third]: [u8; 3]) -> Self {
        Self([first & 0xfc | 0x02, second, third])
    }

    /// The address with this second half.
    #[must_use]
    pub fn address(self, [fourth, fifth, sixth]: [u8; 3]) -> MacAddress {
        let [first, second, third] = self.0;
        MacAddress([first, second, third, fourth, fifth, sixth])
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MacAddress({self})")
    }
}

impl fmt::Display for MacPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}")
    }
}

impl fmt::Debug for MacPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MacPrefix({self})")
    }
}

/// Pairs of hexadecimal digits with colons, or dashes, between them.
fn pairs<const N: usize>(text: &str) -> Option<[u8; N]> {
    let mark = if text.contains('-') { '-' } else { ':' };
    let mut parts = text.split(mark);
    let mut bytes = [0; N];
    for byte in &mut bytes {
        let part = parts.next()?;
        let digits = part.len() == 2 && part.bytes().all(|digit| digit.is_ascii_hexdigit());
        *byte = digits.then(|| u8::from_str_radix(part, 16).ok()).flatten()?;
    }
    parts.next().is_none().then_some(bytes)
}

impl FromStr for MacAddress {
    type Err = MacError;
    fn from_str(text: &str) -> Result<Self, MacError> {
        pairs(text).map(Self).ok_or_else(|| MacError::Form(text.to_owned()))
    }
}

impl FromStr for MacPrefix {
    type Err = MacError;
    fn from_str(text: &str) -> Result<Self, MacError> {
        pairs(text).map(Self).ok_or_else(|| MacError::Form(text.to_owned()))
    }
}

impl TryFrom<String> for MacAddress {
    type Error = MacError;
    fn try_from(text: String) -> Result<Self, MacError> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(address: MacAddress) -> Self {
        address.to_string()
    }
}

/// What a network card is to its guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NicModel {
    /// A virtio card: the fastest, for every guest with a driver.
    #[default]
    Virtio,
    /// An Intel 82574L, which guests without a virtio driver know.
    E1000e,
}

impl NicModel {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Virtio, Self::E1000e];

    /// What it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::E1000e => "e1000e",
        }
    }
}

/// Whether a card's cable is plugged in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NicLink {
    /// It is.
    #[default]
    Up,
    /// The guest sees a card without a carrier.
    Down,
}

impl NicLink {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Up, Self::Down];

    /// What it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Down => "down",
        }
    }
}

/// What a network card is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum NicBackend {
    /// A private network of the card that QEMU makes up: the guest reaches out through the host, and is reached at
    /// forwarded ports alone. The host needs nothing.
    User {
        /// Ports of the host that lead into the guest.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        forwards: Vec<PortForward>,
    },
    /// A tap that is there.
    Tap {
        /// Its name.
        tap: String,
    },
    /// A bridge that is there, by a tap of its own that lives as long as the guest runs.
    Bridge {
        /// Its name.
        bridge: String,
    },
}

/// The protocols whose ports can be forwarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// What it is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// A port of the host that leads to one of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PortForward {
    /// Of which protocol.
    pub protocol: Protocol,
    /// The address of the host at which it is; `0.0.0.0` is all of them.
    #[serde(default = "loopback")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = Ipv4))]
    pub host_address: Ipv4Addr,
    /// The port of the host; 0 is a free one, which the host chooses and keeps for the VM.
    #[serde(default)]
    pub host_port: u16,
    /// The port of the guest.
    pub guest_port: u16,
}

fn loopback() -> Ipv4Addr {
    Ipv4Addr::LOCALHOST
}

impl PortForward {
    /// Whether both want the same port of the host.
    #[must_use]
    pub fn collides(&self, other: &Self) -> bool {
        let all = self.host_address.is_unspecified() || other.host_address.is_unspecified();
        self.host_port != 0
            && (self.protocol, self.host_port) == (other.protocol, other.host_port)
            && (all || self.host_address == other.host_address)
    }
}

impl fmt::Display for PortForward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { protocol, host_address, host_port, guest_port } = self;
        write!(f, "{}:{host_address}:{host_port}:{guest_port}", protocol.name())
    }
}

impl FromStr for PortForward {
    type Err = String;
    /// `PROTOCOL:[[ADDRESS:]PORT:]GUEST-PORT`.
    fn from_str(text: &str) -> Result<Self, String> {
        let form = || {
            format!(
                "'{text}' is no forwarded port such as tcp:2222:22, tcp:0.0.0.0:2222:22, or tcp:22 for any free port of the host"
            )
        };
        let port = |text: &str| text.parse::<u16>().map_err(|_| form());
        let address = |text: &str| text.parse::<Ipv4Addr>().map_err(|_| form());
        let parts: Vec<_> = text.split(':').collect();
        let (protocol, host_address, host_port, guest_port) = match parts[..] {
            [protocol, guest] => (protocol, loopback(), 0, port(guest)?),
            [protocol, host, guest] => (protocol, loopback(), port(host)?, port(guest)?),
            [protocol, at, host, guest] => (protocol, address(at)?, port(host)?, port(guest)?),
            _ => return Err(form()),
        };
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return Err(form()),
        };
        Ok(Self { protocol, host_address, host_port, guest_port })
    }
}

impl NicBackend {
    /// The ports that lead into the guest.
    #[must_use]
    pub fn forwards(&self) -> &[PortForward] {
        match self {
            Self::User { forwards } => forwards,
            Self::Tap { .. } | Self::Bridge { .. } => &[],
        }
    }

    fn check(&self) -> Result<(), (String, String)> {
        match self {
            Self::User { forwards } if forwards.len() > FORWARDS_MAX => {
                let what = format!("a card has at most {FORWARDS_MAX} forwarded ports");
                Err(("backend.forwards".to_owned(), what))
            }
            Self::User { forwards } => match forwards.iter().position(|it| it.guest_port == 0) {
                Some(at) => Err((
                    format!("backend.forwards[{at}].guest_port"),
                    "must be 1 to 65535".to_owned(),
                )),
                None => Ok(()),
            },
            Self::Tap { tap } => {
                check_interface_name(tap).map_err(|what| ("backend.tap".to_owned(), what))
            }
            Self::Bridge { bridge } => {
                check_interface_name(bridge).map_err(|what| ("backend.bridge".to_owned(), what))
            }
        }
    }
}

impl fmt::Display for NicBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User { .. } => f.write_str("user"),
            Self::Tap { tap } => write!(f, "tap {tap}"),
            Self::Bridge { bridge } => write!(f, "bridge {bridge}"),
        }
    }
}

/// What [`check_interface_name`] accepts, but for [`INTERFACE_NAMES_REFUSED`], as a regular expression of ECMA 262.
pub const INTERFACE_NAME_PATTERN: &str = r"^[!#-$&-.0-9;-\[\]-~]+$";

/// What Linux takes for directories, and not for names.
pub const INTERFACE_NAMES_REFUSED: [&str; 2] = [".", ".."];

/// Whether Linux lets a network interface be called so.
///
/// # Errors
/// What it may be.
pub fn check_interface_name(name: &str) -> Result<(), String> {
    if name.is_empty() || name.len() > INTERFACE_NAME_MAX {
        return Err(format!(
            "'{name}' cannot be the name of an interface: it must have 1 to {INTERFACE_NAME_MAX} characters"
        ));
    }
    // A percent sign would make the kernel number it.
    let may = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | ':' | '%' | '"' | '\\');
    if !name.chars().all(may) || INTERFACE_NAMES_REFUSED.contains(&name) {
        return Err(format!("'{name}' cannot be the name of an interface of Linux"));
    }
    Ok(())
}

/// A network card as an agent is told of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NicSpec {
    /// Which card.
    pub nic: NicId,
    /// Its name within the VM, for people.
    pub name: String,
    /// Its address.
    pub mac: MacAddress,
    /// What it is to the guest.
    pub model: NicModel,
    /// What it is connected to.
    pub backend: NicBackend,
    /// Whether it is plugged in.
    #[serde(default)]
    pub link: NicLink,
}

/// How a card of a VM that runs stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NicState {
    /// Which card.
    pub nic: NicId,
    /// The ports that lead into the guest, with those that were chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forwards: Vec<PortForward>,
    /// The interface of the host that the guest's frames come out of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The guest's addresses, as far as the host has seen them or the guest's agent says them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
    /// Whether it is plugged in, as its agent has last had QEMU do; not said by an agent of an earlier vmseal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<NicLink>,
}

/// A card as [`check_nics`] looks at it.
#[derive(Clone, Copy, Debug)]
pub struct NicToCheck<'a> {
    /// Its name within the VM.
    pub name: &'a str,
    /// Its address; none where one is to be made up.
    pub mac: Option<MacAddress>,
    /// What it is connected to.
    pub backend: &'a NicBackend,
}

/// Checks the network cards of a VM together.
///
/// # Errors
/// The field that is wrong, below `nics`, and what it may be.
pub fn check_nics(nics: &[NicToCheck<'_>]) -> Result<(), (String, String)> {
    if nics.len() > NICS_MAX {
        return Err(("nics".to_owned(), format!("a VM has at most {NICS_MAX} network cards")));
    }
    let mut forwards: Vec<&PortForward> = Vec::new();
    for (index, nic) in nics.iter().enumerate() {
        let field = |name: &str| format!("nics[{index}].{name}");
        crate::id::check_name(nic.name).map_err(|error| (field("name"), error.to_string()))?;
        if let Some(mac) = nic.mac {
            mac.check().map_err(|error| (field("mac"), error.to_string()))?;
        }
        nic.backend.check().map_err(|(name, what)| (field(&name), what))?;
        let before = &nics[..index];
        if before.iter().any(|other| other.name == nic.name) {
            let what = format!("'{}' is the name of another network card of this VM", nic.name);
            return Err((field("name"), what));
        }
        if let Some(mac) = nic.mac.filter(|mac| before.iter().any(|it| it.mac == Some(*mac))) {
            return Err((field("mac"), format!("{mac} is another card's of this VM")));
        }
        if let NicBackend::Tap { tap } = nic.backend
            && before.iter().any(|it| it.backend == nic.backend)
        {
            return Err((field("backend.tap"), format!("'{tap}' is another card's of this VM")));
        }
        for (at, forward) in nic.backend.forwards().iter().enumerate() {
            if forwards.iter().any(|other| other.collides(forward)) {
                let what = format!("{} is forwarded twice", forward.host_port);
                return Err((field(&format!("backend.forwards[{at}].host_port")), what));
            }
            forwards.push(forward);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_cards_are_read_written_and_checked() {
        for text in ["52:54:00:12:34:56", "52-54-00-12-34-56", "52:54:00:12:34:56"] {
            let mac: MacAddress = text.parse().unwrap();
            assert_eq!((mac.to_string(), mac.check()), ("52:54:00:12:34:56".to_owned(), Ok(())));
        }
        assert_eq!(
            "AA:bb:CC:00:00:01".parse::<MacAddress>().unwrap().to_string(),
            "aa:bb:cc:00:00:01"
        );
        for bad in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:5",
            "52:54:00:12:34:56:78",
            "52:54-00:12:34:56",
            "+1:54:00:12:34:56",
        ] {
            assert!(matches!(bad.parse::<MacAddress>(), Err(MacError::Form(_))), "{bad}");
        }
        let check = |text: &str| text.parse::<MacAddress>().unwrap().check();
        assert!(matches!(check("01:00:5e:00:00:01"), Err(MacError::Multicast(_))));
        assert!(matches!(check("ff:ff:ff:ff:ff:ff"), Err(MacError::Multicast(_))));
        assert!(matches!(check("00:00:00:00:00:00"), Err(MacError::Zero(_))));
        let json = serde_json::to_string(&"52:54:00:12:34:56".parse::<MacAddress>().unwrap());
        assert_eq!(json.unwrap(), "\"52:54:00:12:34:56\"");
        assert!(serde_json::from_str::<MacAddress>("\"x\"").is_err());
    }

    #[test]
    fn made_up_addresses_are_locally_administered_ones_of_cards() {
        for first in 0..=255 {
            let prefix = MacPrefix::from_random([first, 2, 3]);
            let mac = prefix.address([4, 5, 6]);
            assert_eq!(mac.check(), Ok(()));
            assert_eq!(mac.bytes()[0] & 0x03, 0x02, "{mac}");
            assert!(mac.to_string().starts_with(&prefix.to_string()));
            assert_eq!(prefix.to_string().parse(), Ok(prefix));
        }
    }

    #[test]
    fn forwarded_ports_are_read_and_written() {
        for (text, whole) in [
            ("tcp:22", "tcp:127.0.0.1:0:22"),
            ("udp:5353:53", "udp:127.0.0.1:5353:53"),
            ("tcp:0.0.0.0:8080:80", "tcp:0.0.0.0:8080:80"),
        ] {
            assert_eq!(text.parse::<PortForward>().unwrap().to_string(), whole);
        }
        for bad in
            ["", "22", "sctp:22", "tcp:", "tcp:65536", "tcp:x:22", "tcp:1:2:3", "tcp:::1:2:3"]
        {
            assert!(bad.parse::<PortForward>().unwrap_err().contains("tcp:2222:22"), "{bad}");
        }
    }

    #[test]
    fn cards_are_checked_one_by_one_and_together() {
        let user = |forwards: &[&str]| NicBackend::User {
            forwards: forwards.iter().map(|it| it.parse().unwrap()).collect(),
        };
        let tap = |tap: &str| NicBackend::Tap { tap: tap.to_owned() };
        let bridge = |bridge: &str| NicBackend::Bridge { bridge: bridge.to_owned() };
        let check = |cards: &[(&str, &str, NicBackend)]| {
            let nics: Vec<_> = cards
                .iter()
                .map(|(name, mac, backend)| NicToCheck { name, mac: mac.parse().ok(), backend })
                .collect();
            check_nics(&nics).map_err(|(field, _)| field)
        };
        let (one, two) = ("02:00:00:00:00:01", "02:00:00:00:00:02");
        let two_users = [("a", one, user(&["tcp:1:1"])), ("b", two, user(&["udp:1:1", "tcp:9"]))];
        assert_eq!(check(&two_users), Ok(()));
        assert_eq!(check(&[("a", "", bridge("br0")), ("b", "", bridge("br0"))]), Ok(()));
        let field = |cards: &[_]| check(cards).unwrap_err();
        assert_eq!(field(&[("a", one, tap("t")), ("a", two, tap("u"))]), "nics[1].name");
        assert_eq!(field(&[("a", one, tap("t")), ("b", one, tap("u"))]), "nics[1].mac");
        assert_eq!(field(&[("a", one, tap("t")), ("b", two, tap("t"))]), "nics[1].backend.tap");
        assert_eq!(field(&[("a b", one, tap("t"))]), "nics[0].name");
        assert_eq!(field(&[("a", "01:00:00:00:00:00", tap("t"))]), "nics[0].mac");
        for name in ["", "sixteen-letters-", "a b", "a/b", "a:b", "..", "tap%d"] {
            assert_eq!(field(&[("a", one, bridge(name))]), "nics[0].backend.bridge", "{name}");
        }
        let twice = [("a", one, user(&["tcp:0.0.0.0:80:80"])), ("b", two, user(&["tcp:80:80"]))];
        assert_eq!(field(&twice), "nics[1].backend.forwards[0].host_port");
        assert_eq!(
            field(&[("a", one, user(&["tcp:0"]))]),
            "nics[0].backend.forwards[0].guest_port"
        );
        let many = vec!["tcp:1"; FORWARDS_MAX + 1];
        assert_eq!(field(&[("a", one, user(&many))]), "nics[0].backend.forwards");
        let cards: Vec<_> = (0..=NICS_MAX).map(|_| ("a", "", user(&[]))).collect();
        assert_eq!(field(&cards), "nics");
    }
}
