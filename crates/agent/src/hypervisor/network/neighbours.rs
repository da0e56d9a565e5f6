//! Which addresses guests have, as far as the host has exchanged packets with them: the kernel's table of neighbours.

use std::fs;
use std::net::IpAddr;

use vmseal_api::nic::MacAddress;

/// The table of IPv4's neighbours (proc(5)).
const TABLE: &str = "/proc/net/arp";

/// An entry that is known to be so (ATF_COM of linux/if_arp.h).
const COMPLETE: u32 = 0x2;

/// The table as it is now.
pub fn table() -> String {
    fs::read_to_string(TABLE).unwrap_or_default()
}

/// The addresses that a table has for a card, in order.
pub fn addresses(table: &str, mac: MacAddress) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut columns = line.split_whitespace();
            let (address, _kind) = (columns.next()?, columns.next()?);
            let flags = columns.next()?.strip_prefix("0x")?;
            let complete = u32::from_str_radix(flags, 16).ok()? & COMPLETE != 0;
            let of = columns.next()?.parse::<MacAddress>().ok()?;
            (complete && of == mac).then(|| address.parse().ok()).flatten()
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_card_that_are_known() {
        let table = "IP address       HW type     Flags       HW address            Mask     Device\n\
                     10.0.0.2         0x1         0x2         52:54:00:12:34:56     *        br0\n\
                     10.0.0.3         0x1         0x0         52:54:00:12:34:56     *        br0\n\
                     10.0.0.1         0x1         0x6         52:54:00:12:34:56     *        br0\n\
                     10.0.0.4         0x1         0x2         52:54:00:12:34:57     *        br0\nrest\n";
        let found = addresses(table, "52:54:00:12:34:56".parse().unwrap());
        assert_eq!(found, ["10.0.0.1", "10.0.0.2"].map(|it| it.parse::<IpAddr>().unwrap()));
    }
}
