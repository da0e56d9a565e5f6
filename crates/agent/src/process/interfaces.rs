//! How much guests have received and sent by their network cards, as the kernel counts it at the interfaces of the host. They are read
//! in the network that this process is in: `/sys` shows those of the namespace that it was mounted in.

use std::collections::HashMap;
use std::fs;

use vmseal_api::host::NicState;
use vmseal_api::usage::NetworkCounters;

/// The counters of all interfaces (proc(5)).
const TABLE: &str = "/proc/net/dev";

/// The places of numbers behind an interface's name: first what the host has received there, then what it has sent.
const HOST_RECEIVED_BYTES: usize = 0;
const HOST_RECEIVED_PACKETS: usize = 1;
const HOST_SENT_BYTES: usize = 8;
const HOST_SENT_PACKETS: usize = 9;

/// What the guests behind interfaces have received and sent, by the names of these.
#[derive(Debug)]
pub struct Interfaces(HashMap<String, NetworkCounters>);

impl Interfaces {
    /// As it is now; nothing is known where the kernel does not say it.
    pub fn now() -> Self {
        Self::read(&fs::read_to_string(TABLE).unwrap_or_default())
    }

    fn read(table: &str) -> Self {
        Self(table.lines().filter_map(interface).collect())
    }

    /// What the guest has received and sent by a card; none of a card without an interface on the host (`user`).
    pub fn of(&self, card: &NicState) -> Option<NetworkCounters> {
        self.0.get(card.interface.as_ref()?).copied()
    }

    /// The sum over those cards of a VM of which it is known; none where it is known of none.
    pub fn of_all(&self, cards: &[NicState]) -> Option<NetworkCounters> {
        cards.iter().filter_map(|card| self.of(card)).reduce(NetworkCounters::plus)
    }
}

/// A line of the table. What the host sends at a tap is what the guest receives.
fn interface(line: &str) -> Option<(String, NetworkCounters)> {
    let (name, numbers) = line.split_once(':')?;
    let numbers: Vec<&str> = numbers.split_whitespace().collect();
    let number = |at: usize| numbers.get(at)?.parse::<u64>().ok();
    let counters = NetworkCounters {
        received_bytes: number(HOST_SENT_BYTES)?,
        received_packets: number(HOST_SENT_PACKETS)?,
        sent_bytes: number(HOST_RECEIVED_BYTES)?,
        sent_packets: number(HOST_RECEIVED_PACKETS)?,
    };
    Some((name.trim().to_owned(), counters))
}

#[cfg(test)]
mod tests {
    use vmseal_api::id::NicId;

    use super::*;

    const OF_A_KERNEL: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
vmseal0:    2000      20    3    4    5     6          7         8     9000      90   10   11   12    13      14         15
  lan0: 18446744073709551615 1 0 0 0 0 0 0 1 2 0 0 0 0 0 0
 short:       1       2
";

    fn card(interface: Option<&str>) -> NicState {
        let interface = interface.map(str::to_owned);
        let (forwards, addresses) = (Vec::new(), Vec::new());
        NicState { nic: NicId::new(), forwards, interface, addresses, link: None }
    }

    #[test]
    fn what_the_host_sends_at_an_interface_is_what_the_guest_receives() {
        let interfaces = Interfaces::read(OF_A_KERNEL);
        let told = interfaces.of(&card(Some("vmseal0"))).unwrap();
        assert_eq!((told.received_bytes, told.received_packets), (9000, 90));
        assert_eq!((told.sent_bytes, told.sent_packets), (2000, 20));
        for unknown in [None, Some("vmseal1"), Some("short"), Some("face"), Some("")] {
            assert_eq!(interfaces.of(&card(unknown)), None, "{unknown:?}");
        }
    }

    #[test]
    fn the_cards_of_a_vm_are_added_up_where_they_are_known() {
        let interfaces = Interfaces::read(OF_A_KERNEL);
        let sum = |names: &[Option<&str>]| {
            let cards: Vec<_> = names.iter().map(|name| card(*name)).collect();
            interfaces.of_all(&cards)
        };
        assert_eq!(sum(&[]), None);
        assert_eq!(sum(&[None, Some("gone")]), None, "what is not known is not zero");
        let both = sum(&[Some("vmseal0"), None, Some("lan0")]).unwrap();
        assert_eq!((both.received_bytes, both.received_packets), (9001, 92));
        assert_eq!((both.sent_bytes, both.sent_packets), (u64::MAX, 21));
    }

    #[test]
    fn the_table_of_this_kernel_is_read() {
        assert!(Interfaces::now().of(&card(Some("lo"))).is_some());
    }
}
