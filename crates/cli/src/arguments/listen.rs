//! Addresses to listen at.

use std::net::SocketAddr;

/// Reads an address and a port. Names are not looked up: one may have several addresses, and another one tomorrow.
pub fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        "it is to be an IP address and a port, such as 192.0.2.10:8443 or [2001:db8::10]:8443"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_address_with_a_port_is_refused_with_one() {
        for (text, taken) in [
            ("127.0.0.1:8443", true),
            ("[::1]:8443", true),
            ("127.0.0.1", false),
            ("host1:8443", false),
        ] {
            match parse_address(text) {
                Ok(_) => assert!(taken, "{text}"),
                Err(why) => assert!(!taken && why.contains("192.0.2.10:8443"), "{text}: {why}"),
            }
        }
    }
}
