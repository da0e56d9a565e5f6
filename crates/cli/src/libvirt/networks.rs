//! What networks and bridges of a libvirt domain become on the VM's host: `--network IN:OUT` and `--bridge IN:OUT`, named as
//! virt-v2v has them. vmseal has no networks of its own, so that what a network becomes is a connection as `--nic` has it.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, ensure};
use roxmltree::Node;
use vmseal_api::nic::{NICS_MAX, NicBackend};

use super::node::child;
use crate::exit::{Ended, Exit};
use crate::nic_option;

/// The most of each option: a VM has no more cards, and each has one network or bridge.
const EACH_MAX: usize = NICS_MAX;

/// The option for networks.
const NETWORK: &str = "--network";

/// The option for bridges.
const BRIDGE: &str = "--bridge";

/// Whose name a card's connection has in a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Network,
    Bridge,
}

impl Kind {
    /// That of an interface's type; none of those that are not mapped.
    fn of(interface: Node<'_, '_>) -> Option<Self> {
        match interface.attribute("type")? {
            "network" => Some(Self::Network),
            "bridge" => Some(Self::Bridge),
            _ => None,
        }
    }

    /// The attribute of `<source>` with the name, which is also what people call it.
    fn name(self) -> &'static str {
        match self {
            Self::Network => "network",
            Self::Bridge => "bridge",
        }
    }

    fn option(self) -> &'static str {
        match self {
            Self::Network => NETWORK,
            Self::Bridge => BRIDGE,
        }
    }
}

/// What was asked for, by the names in the domain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Networks {
    networks: BTreeMap<String, NicBackend>,
    bridges: BTreeMap<String, NicBackend>,
}

impl Networks {
    /// Parses the values of both options.
    ///
    /// # Errors
    /// The value that is wrong, and why.
    pub fn parse(networks: &[String], bridges: &[String]) -> anyhow::Result<Self> {
        let bridge = |name: &str| Ok(NicBackend::Bridge { bridge: name.to_owned() });
        Ok(Self {
            networks: parse(NETWORK, networks, nic_option::connection)?,
            bridges: parse(BRIDGE, bridges, bridge)?,
        })
    }

    fn of_kind(&self, kind: Kind) -> &BTreeMap<String, NicBackend> {
        match kind {
            Kind::Network => &self.networks,
            Kind::Bridge => &self.bridges,
        }
    }

    /// What the connection of a card becomes; none where nothing was said of it.
    pub fn get(&self, interface: Node<'_, '_>) -> Option<NicBackend> {
        let kind = Kind::of(interface)?;
        self.of_kind(kind).get(name_in(interface, kind)?).cloned()
    }

    /// Refuses what no card of the domain has: a name that is wrong would leave a card behind.
    ///
    /// # Errors
    /// The option, and what the domain has in its place.
    pub fn check(&self, devices: Node<'_, '_>) -> anyhow::Result<()> {
        for kind in [Kind::Network, Kind::Bridge] {
            let known = names(devices, kind);
            let Some(unknown) = self.of_kind(kind).keys().find(|it| !known.contains(it.as_str()))
            else {
                continue;
            };
            let known: Vec<_> = known.into_iter().map(|name| format!("'{name}'")).collect();
            let instead = match known.as_slice() {
                [] => format!("no card of it is on a {}", kind.name()),
                known => format!("its cards are on {}", known.join(", ")),
            };
            let (option, name) = (kind.option(), kind.name());
            let message =
                format!("{option} {unknown}:…: the domain has no {name} '{unknown}': {instead}");
            return Err(Ended::new(Exit::Usage, message).into());
        }
        Ok(())
    }
}

/// The option that says what the connection of a card becomes, as it is typed; none where there is none for it.
pub fn option_for(interface: Node<'_, '_>) -> Option<String> {
    let kind = Kind::of(interface)?;
    let name = name_in(interface, kind)?;
    Some(match kind {
        Kind::Network => format!("{NETWORK} {name}:bridge=NAME, or {NETWORK} {name}:user"),
        Kind::Bridge => format!("{BRIDGE} {name}:NAME"),
    })
}

/// The names of the networks on which cards of a domain are.
pub fn networks_of(devices: Node<'_, '_>) -> Vec<String> {
    names(devices, Kind::Network).into_iter().map(str::to_owned).collect()
}

fn names<'a>(devices: Node<'a, 'a>, kind: Kind) -> BTreeSet<&'a str> {
    let interfaces = devices.children().filter(|child| child.has_tag_name("interface"));
    let of_kind = interfaces.filter(|interface| Kind::of(*interface) == Some(kind));
    of_kind.filter_map(|interface| name_in(interface, kind)).collect()
}

fn name_in<'a>(interface: Node<'a, 'a>, kind: Kind) -> Option<&'a str> {
    child(interface, "source")?.attribute(kind.name())
}

/// Parses the values of an option whose second parts `out` reads.
fn parse(
    option: &str,
    values: &[String],
    out: impl Fn(&str) -> anyhow::Result<NicBackend>,
) -> anyhow::Result<BTreeMap<String, NicBackend>> {
    let refused = |value: &str, why: anyhow::Error| {
        Ended::new(Exit::Usage, format!("{option} {value}: {why:#}"))
    };
    let mut parsed = BTreeMap::new();
    for value in values {
        let (name, backend) = one(option, value, &out).map_err(|why| refused(value, why))?;
        if parsed.insert(name, backend).is_some() {
            return Err(refused(value, anyhow::anyhow!("its first part was given before")).into());
        }
    }
    if parsed.len() > EACH_MAX {
        let message = format!("{option}: at most {EACH_MAX}, as a VM has no more network cards");
        return Err(Ended::new(Exit::Usage, message).into());
    }
    Ok(parsed)
}

fn one(
    option: &str,
    value: &str,
    out: impl Fn(&str) -> anyhow::Result<NicBackend>,
) -> anyhow::Result<(String, NicBackend)> {
    let form = match option {
        NETWORK => "default:bridge=virbr0 or default:user",
        _ => "br0:br1",
    };
    let (name, becomes) =
        value.split_once(':').with_context(|| format!("it has the form {form}"))?;
    ensure!(!name.is_empty(), "the domain's name is missing: it has the form {form}");
    ensure!(!becomes.is_empty(), "what '{name}' becomes is missing: it has the form {form}");
    Ok((name.to_owned(), out(becomes)?))
}

#[cfg(test)]
mod tests {
    use roxmltree::Document;

    use super::*;

    fn parsed(networks: &[&str], bridges: &[&str]) -> anyhow::Result<Networks> {
        let owned = |of: &[&str]| of.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        Networks::parse(&owned(networks), &owned(bridges))
    }

    #[test]
    fn what_is_typed_is_taken_apart_at_the_first_colon() {
        let networks = ["default:bridge=virbr0", "lab:user,forward=tcp:2222:22", "far:tap=t0"];
        let both = parsed(&networks, &["br0:br1"]).unwrap();
        let shown: Vec<_> = both.networks.iter().map(|(name, it)| format!("{name} {it}")).collect();
        assert_eq!(shown[0], "default bridge virbr0");
        assert_eq!(shown[1], "far tap t0");
        let forwards = both.networks["lab"].forwards();
        assert_eq!(forwards[0].to_string(), "tcp:127.0.0.1:2222:22");
        assert_eq!(both.bridges["br0"], NicBackend::Bridge { bridge: "br1".to_owned() });
        assert_eq!(parsed(&[], &[]).unwrap(), Networks::default());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_option() {
        let many: Vec<String> = (0..=EACH_MAX).map(|number| format!("n{number}:user")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        for (networks, bridges, told) in [
            (&["default"][..], &[][..], "--network default: it has the form default:bridge="),
            (&["default:"], &[], "what 'default' becomes is missing"),
            (&[":user"], &[], "the domain's name is missing"),
            (&["default:virbr0"], &[], "'virbr0' is not user"),
            (&["default:user,mac=52:54:00:00:00:01"], &[], "'mac'"),
            (&["default:user,model=virtio"], &[], "'model'"),
            (&["default:bridge=a,tap=b"], &[], "a connection twice"),
            (&["default:user", "default:bridge=a"], &[], "was given before"),
            (&many[..], &[], "at most 8"),
            (&[], &["br0"], "--bridge br0: it has the form br0:br1"),
            (&[], &["br0:"], "what 'br0' becomes"),
        ] {
            let refused = parsed(networks, bridges).unwrap_err();
            assert_eq!(Exit::of(&refused), Exit::Usage);
            let said = format!("{refused:#}");
            assert!(said.contains(told), "{networks:?} {bridges:?}: {said}");
        }
    }

    #[test]
    fn a_name_that_the_domain_does_not_have_is_refused_with_those_that_it_has() {
        let text = "<devices><interface type='network'><source network='default'/></interface>
                    <interface type='network'><source network='lab'/></interface>
                    <interface type='user'/></devices>";
        let document = Document::parse(text).unwrap();
        let devices = document.root_element();
        assert_eq!(networks_of(devices), ["default", "lab"]);
        parsed(&["lab:user"], &[]).unwrap().check(devices).unwrap();
        for (networks, bridges, told) in [
            (
                &["defualt:user"][..],
                &[][..],
                "no network 'defualt': its cards are on 'default', 'lab'",
            ),
            (&[], &["br0:br1"], "no bridge 'br0': no card of it is on a bridge"),
        ] {
            let refused = parsed(networks, bridges).unwrap().check(devices).unwrap_err();
            assert_eq!(Exit::of(&refused), Exit::Usage);
            assert!(refused.to_string().contains(told), "{refused}");
        }
    }
}
