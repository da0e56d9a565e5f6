//! What a guest's agent says of its network interfaces, the answer to `guest-network-get-interfaces`:
//!
//! ```text
//! [{"name": "eth0", "hardware-address": "52:54:00:12:34:56",
//!   "ip-addresses": [{"ip-address-type": "ipv4", "ip-address": "192.0.2.7", "prefix": 24}, ...], ...}, ...]
//! ```
//! All of it is the guest's word. What has another form is left out, and the rest is taken.

use std::net::IpAddr;

use serde_json::Value;
use vmseal_api::nic::MacAddress;

use crate::hypervisor::network::addresses::{ADDRESSES_MAX, Said, is_a_machines, is_link_local};

/// The addresses that it says these cards have: of each those of IPv4, those of IPv6, and those of the link. Interfaces that
/// are none of the VM's cards, such as bridges for containers, are in nobody's reach.
pub fn addresses(answer: &Value, cards: &[MacAddress]) -> Vec<Said> {
    let all: Vec<Said> = elements(answer).flat_map(|interface| of(interface, cards)).collect();
    let of_card = |card: &MacAddress| {
        let mut of_card: Vec<Said> =
            all.iter().filter(|said| said.card == *card).copied().collect();
        of_card.sort_unstable_by_key(|said| (is_link_local(said.address), said.address));
        of_card.dedup();
        of_card.truncate(ADDRESSES_MAX);
        of_card
    };
    cards.iter().flat_map(of_card).collect()
}

/// The addresses of an interface; none where it is no such card.
fn of(interface: &Value, cards: &[MacAddress]) -> Vec<Said> {
    let mac = interface["hardware-address"].as_str().and_then(|mac| mac.parse::<MacAddress>().ok());
    let Some(card) = mac.filter(|mac| cards.contains(mac)) else { return Vec::new() };
    let addresses = elements(&interface["ip-addresses"]);
    let parsed = addresses.filter_map(|it| it["ip-address"].as_str()?.parse::<IpAddr>().ok());
    parsed.filter(|it| is_a_machines(*it)).map(|address| Said { card, address }).collect()
}

/// The elements of an array; none of anything else.
fn elements(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn card(last: u8) -> MacAddress {
        format!("52:54:00:00:00:{last:02x}").parse().unwrap()
    }

    fn shown(answer: &Value, cards: &[MacAddress]) -> Vec<String> {
        let said = addresses(answer, cards);
        said.iter().map(|said| format!("{} {}", said.card, said.address)).collect()
    }

    fn interface(mac: &str, addresses: &[&str]) -> Value {
        let addresses = addresses.iter().map(|it| json!({"ip-address": it, "prefix": 24}));
        json!({"name": "x", "hardware-address": mac, "ip-addresses": addresses.collect::<Vec<_>>()})
    }

    #[test]
    fn addresses_are_those_of_the_vms_cards_by_use() {
        let answer = json!([
            interface("00:00:00:00:00:00", &["127.0.0.1", "::1"]),
            interface("52:54:00:00:00:01", &["fe80::1", "fd00::7", "10.0.0.7", "169.254.0.1"]),
            interface("02:42:00:00:00:01", &["172.17.0.1"]),
            // A bridge has the address of the card that is its port.
            interface("52:54:00:00:00:01", &["10.0.0.2", "10.0.0.7"]),
            interface("52:54:00:00:00:02", &["10.0.1.7"]),
        ]);
        let first = ["10.0.0.2", "10.0.0.7", "fd00::7", "169.254.0.1", "fe80::1"];
        let mut expected = first.map(|it| format!("52:54:00:00:00:01 {it}")).to_vec();
        assert_eq!(shown(&answer, &[card(1)]), expected);
        expected.push("52:54:00:00:00:02 10.0.1.7".to_owned());
        assert_eq!(shown(&answer, &[card(1), card(2)]), expected);
        assert_eq!(shown(&answer, &[]), [""; 0]);
    }

    #[test]
    fn what_has_another_form_is_left_out() {
        let mac = "52:54:00:00:00:01";
        for nothing in [json!(null), json!({}), json!("x"), json!(7), json!([null, 1, "x", [[]]])] {
            assert_eq!(shown(&nothing, &[card(1)]), [""; 0], "{nothing}");
        }
        let answer = json!([
            {"hardware-address": mac},
            {"hardware-address": mac, "ip-addresses": "10.0.0.1"},
            {"hardware-address": [mac], "ip-addresses": [{"ip-address": "10.0.0.2"}]},
            {"hardware-address": mac, "ip-addresses": [
                "10.0.0.3", null, {"ip-address": 7}, {"ip-address": "10.0.0.400"},
                {"ip-address": "fe80::1%eth0"}, {"ip-address": "10.0.0.4/24"}, {"ip-address": "a; rm"},
                {"ip-address": "10.0.0.5"},
            ]},
        ]);
        assert_eq!(shown(&answer, &[card(1)]), ["52:54:00:00:00:01 10.0.0.5"]);
    }

    #[test]
    fn a_guest_that_says_thousands_of_addresses_has_few_shown_of_each_card() {
        let many: Vec<_> = (0..5000).map(|it| format!("10.0.{}.{}", it / 250, it % 250)).collect();
        let many: Vec<_> = many.iter().map(String::as_str).collect();
        let interfaces = [1, 1, 2].map(|last| interface(&card(last).to_string(), &many));
        let said = addresses(&json!(interfaces), &[card(1), card(2)]);
        assert_eq!(said.len(), 2 * ADDRESSES_MAX);
    }

    fn anything() -> impl Strategy<Value = Value> {
        let text = prop_oneof!["[0-9a-f:.]{0,12}", Just("52:54:00:00:00:01".to_owned())];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<i64>().prop_map(Value::from),
            text.prop_map(Value::from)
        ];
        leaf.prop_recursive(5, 64, 6, |inner| {
            let key = prop_oneof![
                Just("hardware-address".to_owned()),
                Just("ip-addresses".to_owned()),
                Just("ip-address".to_owned()),
            ];
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((key, inner), 0..4)
                    .prop_map(|fields| Value::Object(fields.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_answer_says_an_address_of_another_card(answer in anything()) {
            for said in addresses(&answer, &[card(1)]) {
                prop_assert!(said.card == card(1) && is_a_machines(said.address));
            }
        }
    }
}
