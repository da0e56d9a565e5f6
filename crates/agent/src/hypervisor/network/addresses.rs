//! The addresses of a guest's cards: those at which the host has exchanged packets with it, and those that it says it has.
//! A guest can have its host see any address, and can say any: they are shown, and nothing is decided by them.

use std::net::IpAddr;

use vmseal_api::host::{NicState, VmSpec};
use vmseal_api::nic::MacAddress;

use super::neighbours;

/// The most addresses of a card that are shown: a card has few, and a guest could have any number shown otherwise.
pub const ADDRESSES_MAX: usize = 16;

/// An address that a guest says a card of its has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    pub card: MacAddress,
    pub address: IpAddr,
}

/// The cards whose guest others may reach at an address of its own. Nobody does in the network that QEMU makes up.
#[must_use]
pub fn cards(spec: &VmSpec, states: &[NicState]) -> Vec<MacAddress> {
    states.iter().filter_map(|state| card(spec, state)).collect()
}

fn card(spec: &VmSpec, state: &NicState) -> Option<MacAddress> {
    state.interface.as_ref()?;
    spec.nics().find(|nic| nic.nic == state.nic).map(|nic| nic.mac)
}

/// Notes the addresses of the cards of a VM that runs.
pub fn note(spec: &VmSpec, states: &mut [NicState], said: &[Said]) {
    let mut table = None;
    for state in states {
        let Some(mac) = card(spec, state) else { continue };
        let seen = neighbours::addresses(table.get_or_insert_with(neighbours::table), mac);
        let said = said.iter().filter(|said| said.card == mac).map(|said| said.address);
        state.addresses = merged(seen, said);
    }
}

/// First those that the host has seen: they are reached from here.
fn merged(seen: Vec<IpAddr>, said: impl Iterator<Item = IpAddr>) -> Vec<IpAddr> {
    let mut all = seen;
    for address in said {
        if !all.contains(&address) {
            all.push(address);
        }
    }
    if !all.iter().copied().all(is_link_local) {
        all.retain(|address| !is_link_local(*address));
    }
    all.truncate(ADDRESSES_MAX);
    all
}

/// Whether it is one of its link alone, as machines give themselves.
#[must_use]
pub fn is_link_local(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    }
}

/// Whether a machine can be reached by it from another one. Who connects to what stands for none reaches itself, or a group.
#[must_use]
pub fn is_a_machines(address: IpAddr) -> bool {
    match address {
        // 0/8 is this machine, and what begins with 224 or more are groups, or is reserved.
        IpAddr::V4(address) => !matches!(address.octets(), [0 | 127 | 224..=255, ..]),
        IpAddr::V6(address) => match address.segments() {
            // No address, loopback, and addresses of IPv4 in the form of IPv6.
            [0, 0, 0, 0, 0, _, _, _] => false,
            _ => !address.is_multicast(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &[&str]) -> Vec<IpAddr> {
        text.iter().map(|address| address.parse().unwrap()).collect()
    }

    #[test]
    fn what_is_seen_comes_first_and_nothing_twice() {
        let merge = |seen: &[&str], said: &[&str]| merged(all(seen), all(said).into_iter());
        let found = merge(&["10.0.0.9"], &["10.0.0.5", "10.0.0.9", "fd00::5"]);
        assert_eq!(found, all(&["10.0.0.9", "10.0.0.5", "fd00::5"]));
        // Those of the link where there is nothing else.
        let local = ["169.254.1.2", "fe80::1"];
        assert_eq!(merge(&[], &local), all(&local));
        assert_eq!(merge(&["10.0.0.9"], &local), all(&["10.0.0.9"]));
        assert_eq!(merge(&local[..1], &["fd00::5"]), all(&["fd00::5"]));
        let many = (0..255).map(|last| IpAddr::from([10, 0, 0, last]));
        assert_eq!(merged(all(&["10.9.9.9"]), many).len(), ADDRESSES_MAX);
    }

    #[test]
    fn addresses_that_reach_no_other_machine_are_told() {
        for address in all(&["10.0.0.1", "192.0.2.1", "169.254.1.1", "2001:db8::1", "fe80::1"]) {
            assert!(is_a_machines(address), "{address}");
        }
        let none = [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::127.0.0.1",
            "::ffff:127.0.0.1",
            "ff02::1",
        ];
        for address in all(&none) {
            assert!(!is_a_machines(address), "{address}");
        }
    }
}
