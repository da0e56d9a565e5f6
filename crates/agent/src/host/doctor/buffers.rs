//! Whether the kernel lets connections between hosts have as much under way as long lines take: migrations leave the sizes of buffers to it
//! (`migration::transport::socket`).

use std::time::Duration;

use vmseal_api::size::Measured;

use super::Finding;

/// The line that is asked for: 1 Gb/s, in bytes a second, and the longest round trip over which VMs are usually migrated while they run.
const BANDWIDTH: u64 = 125_000_000;
const ROUND_TRIP: Duration = Duration::from_millis(150);

/// Another line that is told of: one between towns.
const SHORTER: Duration = Duration::from_millis(10);

/// What is advised, in bytes: 2 Gb/s over 200 ms, with what the kernel counts beside the data (docs/migration.md).
const ADVISED: u64 = 64 << 20;

/// A file with that, which the package and `scripts/install` put there and nothing reads. The latter has it below its own prefix.
const EXAMPLE: &str = "/usr/share/doc/vmseal/examples/60-vmseal-migration.conf";

/// The most that the kernel holds of a connection that sends and of one that receives, with what it holds at least and to begin with.
const SENT: &str = "net.ipv4.tcp_wmem";
const RECEIVED: &str = "net.ipv4.tcp_rmem";

/// Whether migrations over a long line are kept slow by this host.
pub fn connections() -> Finding {
    let read = |name: &str| {
        let path = format!("/proc/sys/{}", name.replace('.', "/"));
        std::fs::read_to_string(path).unwrap_or_default()
    };
    judge(&read(SENT), &read(RECEIVED))
}

fn judge(sent: &str, received: &str) -> Finding {
    const CHECK: &str = "connection-buffers";
    let (Some(send), Some(receive)) = (sizes(sent), sizes(received)) else {
        let found =
            format!("the kernel does not say how large they may become ({SENT}, {RECEIVED})");
        return Finding::warning(CHECK, found, &remedy([4096, 16384, 0], [4096, 131_072, 0]));
    };
    let under_way = send[2].min(receive[2]);
    let needed = carried(BANDWIDTH, ROUND_TRIP);
    let line = |round_trip: Duration| {
        let megabits = u128::from(under_way) * 8 / 1000 / round_trip.as_millis().max(1);
        format!("{megabits} Mb/s over a round trip of {} ms", round_trip.as_millis())
    };
    let found = format!(
        "a migration can have {} under way: at most {}, {}",
        Measured(under_way),
        line(ROUND_TRIP),
        line(SHORTER)
    );
    if under_way >= needed {
        return Finding::ok(CHECK, found);
    }
    let enough = format!("{found}; 1 Gb/s over the longer one takes {}", Measured(needed));
    Finding::warning(CHECK, enough, &remedy(send, receive))
}

/// What a line has under way.
fn carried(bandwidth: u64, round_trip: Duration) -> u64 {
    let milliseconds = u64::try_from(round_trip.as_millis()).unwrap_or(u64::MAX);
    bandwidth.saturating_mul(milliseconds) / 1000
}

/// The least, the first and the most, in bytes.
fn sizes(value: &str) -> Option<[u64; 3]> {
    let sizes: Result<Vec<u64>, _> = value.split_whitespace().map(str::parse).collect();
    sizes.ok()?.try_into().ok()
}

/// What is larger than advised stays; the least and the first stay.
fn remedy(send: [u64; 3], receive: [u64; 3]) -> String {
    let set = |name: &str, [least, first, most]: [u64; 3]| {
        format!("sysctl -w {name}='{least} {first} {}'", most.max(ADVISED))
    };
    format!(
        "nothing to do where hosts are near each other; else on both hosts: {} && {}, and the same in /etc/sysctl.d/60-vmseal-migration.conf (an example: {EXAMPLE})",
        set(SENT, send),
        set(RECEIVED, receive)
    )
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    #[test]
    fn what_a_long_line_takes_is_compared_with_both_buffers() {
        let advised = "4096 16384 67108864";
        assert_eq!(judge(advised, "4096\t131072\t67108864\n").result, Verdict::Ok);
        assert_eq!(judge("4096 16384 18750000", advised).result, Verdict::Ok);
        for (sent, received) in [
            ("4096 16384 18749999", advised),
            (advised, "4096 131072 6291456"),
            ("", advised),
            (advised, "4096 131072"),
        ] {
            assert_eq!(judge(sent, received).result, Verdict::Warning, "{sent} {received}");
        }
        assert_eq!(connections().check, "connection-buffers");
    }

    #[test]
    fn the_remedy_changes_what_is_too_small_alone() {
        let judged = judge("4096 16384 4194304", "4096 131072 134217728");
        assert!(judged.found.contains("223 Mb/s over a round trip of 150 ms"), "{}", judged.found);
        let remedy = judged.remedy.unwrap();
        for command in [
            "sysctl -w net.ipv4.tcp_wmem='4096 16384 67108864'",
            "sysctl -w net.ipv4.tcp_rmem='4096 131072 134217728'",
        ] {
            assert!(remedy.contains(command), "{remedy}");
        }
        assert!(remedy.ends_with(&format!("(an example: {EXAMPLE})")), "{remedy}");
    }

    #[test]
    fn the_example_has_what_is_advised() {
        let example = include_str!("../../../../../packaging/sysctl/60-vmseal-migration.conf");
        let of = |name: &str| {
            let set =
                |line: &str| line.strip_prefix(name)?.trim().strip_prefix('=').map(str::to_owned);
            example.lines().find_map(set).unwrap_or_else(|| panic!("{name} is not set"))
        };
        let (sent, received) = (of(SENT), of(RECEIVED));
        assert_eq!(judge(&sent, &received).result, Verdict::Ok);
        for value in [sent, received] {
            assert_eq!(sizes(&value).unwrap()[2], ADVISED, "{value}");
        }
    }
}
