//! Addresses that the cluster takes nothing from any more.

use std::io;

use serde_json::json;

use super::Pool;

/// How long an address stays on the blocklist: a week. The cluster's own hour is too short: who hangs for longer, and then goes on, would
/// have the cluster take what it had under way.
const SECONDS: f64 = 7.0 * 24.0 * 3600.0;

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
}
