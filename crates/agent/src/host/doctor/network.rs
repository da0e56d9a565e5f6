//! Whether the processes can reach each other.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::Finding;
use crate::host::identity::Identity;

/// How long a connection may take.
const TIMEOUT: Duration = Duration::from_secs(3);

/// The server that this host joined, and its own agent.
pub fn of_host(identity: &Identity) -> Vec<Finding> {
    let server = identity.server.trim_start_matches("https://").trim_end_matches('/');
    let server = if server.contains(':') { server.to_owned() } else { format!("{server}:443") };
    vec![
        reached(
            "server",
            &server,
            "check that the server runs and listens there, and that no packet filter is in between",
        ),
        reached(
            "agent",
            &identity.address,
            "start vmseal agent; the server has to reach it at this address",
        ),
    ]
}

fn reached(check: &str, address: &str, remedy: &str) -> Finding {
    let connected = address.to_socket_addrs().and_then(|mut found| {
        let address = found.next().ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        TcpStream::connect_timeout(&address, TIMEOUT)
    });
    match connected {
        Ok(_) => Finding::ok(check, format!("{address} accepts connections")),
        Err(error) => {
            Finding::warning(check, format!("{address} refuses the connection: {error}"), remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn an_address_without_a_listener_is_reported() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        assert_eq!(reached("it", &address, "").result, Verdict::Ok);
        drop(listener);
        assert_eq!(reached("it", &address, "").result, Verdict::Warning);
        assert_eq!(reached("it", "no address", "").result, Verdict::Warning);
    }
}
