//! Where a host is reached that VMs are sent to.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use tokio::net::lookup_host;
use tokio::time::timeout;
use vmseal_api::problem::{ErrorCode, Problem};

/// How long a name may take to be resolved: the usual resolver asks each of two name servers twice, 5 s each.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(20);

/// Where another host connects to, to send a VM to the host of this name, whose agent `listens` there and is called at `agent`.
///
/// An agent that listens at all of its addresses is reached at the one that the server calls it at. If that is a name, the server
/// resolves it for each attempt: an agent is told an address.
///
/// # Errors
/// `unreachable`: the name is not resolved; `wrong-state`: no other host reaches the agent at any of the addresses.
pub(crate) async fn reachable(
    listens: SocketAddr,
    host: &str,
    agent: &str,
) -> Result<SocketAddr, Problem> {
    if !listens.ip().is_unspecified() {
        return Ok(listens);
    }
    let called = agent.rsplit_once(':').map_or(agent, |(called, _)| called);
    let bare = called.trim_start_matches('[').trim_end_matches(']');
    let found = match bare.parse::<IpAddr>() {
        Ok(ip) => vec![ip],
        Err(_) => resolved(host, bare).await?,
    };
    match best(listens.ip(), &found) {
        Some(ip) => Ok(SocketAddr::new(ip, listens.port())),
        None => Err(not_heard(listens, host, bare, &found)),
    }
}

/// The addresses of a host's name, in the resolver's order. Loopback addresses are left out: another host would connect to itself.
async fn resolved(host: &str, name: &str) -> Result<Vec<IpAddr>, Problem> {
    let failed = |why: &dyn std::fmt::Display| {
        let detail = format!(
            "'{name}', the address of host '{host}', is not resolved by the server: {why}. The VM cannot be sent there without it"
        );
        Problem::new(ErrorCode::Unreachable, detail)
    };
    // The port is that of no service: only the addresses are looked at.
    let found = match timeout(RESOLVE_TIMEOUT, lookup_host((name, 0))).await {
        Ok(Ok(found)) => found.map(|address| address.ip().to_canonical()).collect::<Vec<_>>(),
        Ok(Err(error)) => return Err(failed(&error)),
        Err(_) => return Err(failed(&"it takes too long")),
    };
    let of_others = |ip: &IpAddr| !ip.is_loopback() && !ip.is_unspecified();
    let usable: Vec<IpAddr> = found.iter().copied().filter(of_others).collect();
    if usable.is_empty() && !found.is_empty() {
        let detail = format!(
            "'{name}', the address of host '{host}', is for the server {}, where no other host reaches it: start its agent with --migration-listen and an address of its own, or correct the name on the server's machine (/etc/hosts)",
            listed(&found)
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    Ok(usable)
}

/// The first address at which an agent is heard that listens at all addresses of this kind. All of IPv6 includes all of IPv4, unless an
/// operator of that machine has changed it (`net.ipv6.bindv6only`).
fn best(any: IpAddr, found: &[IpAddr]) -> Option<IpAddr> {
    let first = |of_kind: fn(&IpAddr) -> bool| found.iter().copied().find(of_kind);
    match any {
        IpAddr::V4(_) => first(IpAddr::is_ipv4),
        IpAddr::V6(_) => first(IpAddr::is_ipv6).or_else(|| first(IpAddr::is_ipv4)),
    }
}

fn not_heard(listens: SocketAddr, host: &str, name: &str, found: &[IpAddr]) -> Problem {
    let known = match found {
        [] => "has no address".to_owned(),
        found => format!("is {}", listed(found)),
    };
    let detail = format!(
        "host '{host}' waits for VMs at {listens}, and '{name}', where the server calls its agent, {known}: start the agent with --migration-listen '[::]:{}' or an address of its own",
        listens.port()
    );
    Problem::new(ErrorCode::WrongState, detail)
}

fn listed(found: &[IpAddr]) -> String {
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    found.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[tokio::test]
    async fn an_agent_that_waits_at_all_addresses_is_reached_at_the_one_that_is_known() {
        for (listens, agent, expected) in [
            ("10.0.0.1:7444", "10.0.0.9:7443", "10.0.0.1:7444"),
            ("10.0.0.1:7444", "rack.invalid:7443", "10.0.0.1:7444"),
            ("0.0.0.0:7444", "10.0.0.9:7443", "10.0.0.9:7444"),
            ("[::]:7444", "[fd00::1]:7443", "[fd00::1]:7444"),
            ("[::]:7444", "10.0.0.9:7443", "10.0.0.9:7444"),
            // All on one machine.
            ("0.0.0.0:7444", "127.0.0.1:7443", "127.0.0.1:7444"),
        ] {
            let reached = reachable(at(listens), "rack", agent).await.unwrap();
            assert_eq!(reached, at(expected), "{listens} {agent}");
        }
        let refused = reachable(at("0.0.0.0:7444"), "rack", "[fd00::1]:7443").await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState);
        assert!(refused.detail.contains("fd00::1") && refused.detail.contains("[::]:7444"));
    }

    /// The resolver takes an address in fewer than four parts for a name, and asks nobody for it.
    #[tokio::test]
    async fn a_name_is_resolved_and_keeps_the_port_of_the_agent() {
        for listens in ["0.0.0.0:7444", "[::]:7444"] {
            let reached = reachable(at(listens), "rack", "192.0.513:7443").await.unwrap();
            assert_eq!(reached, at("192.0.2.1:7444"), "{listens}");
        }
    }

    #[tokio::test]
    async fn a_name_that_is_the_servers_own_machine_or_nothing_is_refused() {
        let refused = reachable(at("0.0.0.0:7444"), "rack", "localhost:7443").await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
        assert!(refused.detail.contains("'rack'") && refused.detail.contains("127.0.0.1"));
        // Longer than a part of a name may be, so nobody is asked for it.
        let long = "a".repeat(64);
        let agent = format!("{long}:7443");
        let refused = reachable(at("0.0.0.0:7444"), "rack", &agent).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unreachable, "{refused}");
        assert!(refused.detail.contains(&long), "{refused}");
    }

    #[test]
    fn the_first_address_is_taken_at_which_the_agent_hears() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let both = ["fd00::1", "10.0.0.9", "fd00::2", "10.0.0.10"].map(ip);
        assert_eq!(best(ip("0.0.0.0"), &both), Some(ip("10.0.0.9")));
        assert_eq!(best(ip("::"), &both), Some(ip("fd00::1")));
        assert_eq!(best(ip("::"), &both[1..2]), Some(ip("10.0.0.9")));
        assert_eq!(best(ip("0.0.0.0"), &both[..1]), None);
        assert_eq!(best(ip("::"), &[]), None);
    }
}
