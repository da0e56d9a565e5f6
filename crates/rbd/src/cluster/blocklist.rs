//! Addresses that the cluster takes nothing from any more.

use std::io;

use serde_json::json;
use vmseal_api::fencing::Fencing;

use super::{Cluster, Pool};

/// How long an address stays on the blocklist: a week. The cluster's own hour is too short: who hangs for longer, and then goes on, would
/// have the cluster take what it had under way.
const SECONDS: f64 = 7.0 * 24.0 * 3600.0;

/// What is no address, and looks like one to the rights of `profile rbd` (`^[^/]+/[0-9]+$`).
const NO_ADDRESS: &str = "vmseal/0";

impl Cluster {
    /// Whether the user may put addresses on the blocklist. The monitors are asked to put something there that is no address: they look at the
    /// user's rights first, and refuse it for itself after that (OSDMonitor). So nothing changes in the cluster.
    #[must_use]
    pub fn may_put_on_blocklist(&self) -> Fencing {
        judge(self.command(&command(NO_ADDRESS)).err().as_ref())
    }
}

/// What it makes how the monitors have refused what is no address.
fn judge(refused: Option<&io::Error>) -> Fencing {
    match refused.map(io::Error::raw_os_error) {
        Some(Some(libc::EACCES | libc::EPERM)) => Fencing::NotAllowed,
        Some(Some(libc::EINVAL)) => Fencing::Allowed,
        other => {
            tracing::debug!(
                ?other,
                "the monitors do not say whether hosts may be put on the blocklist"
            );
            Fencing::Unknown
        }
    }
}

impl Pool {
    /// Puts the address of a process on the cluster's blocklist. librbd does so, too, when it breaks a lock, for the cluster's hour: its own
    /// option for the time does not work, as librados 16.2 sends the number as text, which the monitors refuse. An address that is on the list
    /// keeps its time.
    ///
    /// # Errors
    /// The monitors'.
    pub fn put_on_blocklist(&self, address: &str) -> io::Result<()> {
        self.cluster.command(&command(address)).map(drop)
    }
}

fn command(address: &str) -> String {
    let command = json!({
        "prefix": "osd blocklist", "blocklistop": "add", "addr": address, "expire": SECONDS,
    });
    command.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_a_number() {
        let expected = r#"{"addr":"127.0.0.1:0/7","blocklistop":"add","expire":604800.0,"prefix":"osd blocklist"}"#;
        assert_eq!(command("127.0.0.1:0/7"), expected);
    }

    #[test]
    fn only_who_is_let_through_has_the_address_refused() {
        let judged = |number| judge(Some(&io::Error::from_raw_os_error(number)));
        assert_eq!(judged(libc::EINVAL), Fencing::Allowed);
        assert_eq!(judged(libc::EACCES), Fencing::NotAllowed);
        assert_eq!(judged(libc::EPERM), Fencing::NotAllowed);
        assert_eq!(judged(libc::ETIMEDOUT), Fencing::Unknown);
        assert_eq!(judge(None), Fencing::Unknown);
    }

    /// As `profile rbd` asks for it, and nobody's address.
    #[test]
    fn what_is_no_address_has_the_form_of_one() {
        let (host, nonce) = NO_ADDRESS.split_once('/').unwrap();
        assert!(!host.is_empty() && nonce.parse::<u32>().is_ok());
        assert!(host.parse::<std::net::IpAddr>().is_err());
        assert!(host.parse::<std::net::SocketAddr>().is_err());
    }
}
