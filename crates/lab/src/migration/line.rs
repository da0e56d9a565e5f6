//! The line between the hosts, of which is counted what goes over it, and which is as slow and as long as it is to be: a network of its
//! own, whose loopback it is; or a second network for the other host, and a device at either end.
//!
//! ```text
//!  server, host `here`, clients                                          host `there`
//!  [ line 10.98.0.1 ] ────────── token bucket, delay, token bucket ────────── [ line 10.98.0.2 ]
//!  [ guests 10.77.0.1, a bridge ] ───────────── a cable ───────────── [ guests 10.77.0.2, a bridge ]
//! ```

use std::fs;
use std::io;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::delay::{Delay, Device};
use crate::installation::Place;
use crate::network::Network;
use crate::outcome::OperationError;

/// How much a line may send at once after it was quiet, and how much waits for it, in bytes: some of the largest packets.
const BURST: u64 = 512 << 10;
const QUEUE: u64 = 4 << 20;

/// The device at either end of a long line, and its addresses.
const LINE: &str = "line";
const HERE: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 1);
const THERE: Ipv4Addr = Ipv4Addr::new(10, 98, 0, 2);

/// How much of a connection may be under way, in bytes: more than a line of 2 Gb/s holds in 200 ms. What hosts have unless they are told
/// otherwise is 4 MiB, which is 200 Mb/s at 150 ms (docs/migration.md).
const UNDER_WAY: u64 = 64 << 20;
/// What the kernel may hold of a connection: at least, to begin with, and at most.
const BUFFERS: [&str; 2] = ["/proc/sys/net/ipv4/tcp_rmem", "/proc/sys/net/ipv4/tcp_wmem"];

/// How many packets wait for the program that carries them: in a line's queue there are fewer, also of the smallest.
const PACKETS: &str = "10000";

/// The bridge that guests' cards are on, in both networks; the addresses at which the server, its clients and the second host are on it;
/// and what joins the two.
pub(super) const BRIDGE: &str = "guests";
const SERVER: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const AGENT: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const CABLE: [&str; 2] = ["cable-here", "cable-there"];

/// A network of its own for this thread and all that it starts; the former one again when this is dropped.
#[derive(Debug)]
pub(super) struct Line {
    former: Network,
    far: Option<Far>,
}

/// The network of the second host, and the way there.
#[derive(Debug)]
struct Far {
    network: Network,
    delay: Delay,
}

impl Line {
    /// Makes one that is long or is not; else says why there is none.
    pub fn new(long: bool) -> Result<Self, String> {
        let no = |why: &dyn std::fmt::Display| format!("a network of its own takes root: {why}");
        let former = Network::here().map_err(|error| no(&error))?;
        Network::new().and_then(|network| network.enter()).map_err(|error| no(&error))?;
        let mut line = Self { former, far: None };
        run("ip", &["link", "set", "lo", "up"]).map_err(|error| error.to_string())?;
        let no = |error: OperationError| format!("the line cannot be made: {error}");
        bridge(SERVER).map_err(no)?;
        if long {
            line.far = Some(Far::new().map_err(no)?);
        }
        Ok(line)
    }

    /// Lets so many megabits through in a second, 0 is all; and has what goes over it take so long there and back.
    pub fn set(&self, mbit: u64, round_trip: Duration) -> Result<(), OperationError> {
        let Some(far) = &self.far else { return limit("lo", mbit) };
        far.delay.set(round_trip);
        limit(LINE, mbit)?;
        within(&far.network, || limit(LINE, mbit))
    }

    /// Where the second host is, if it has a network of its own; and the addresses at which server and first host are then, and at which
    /// that host receives VMs.
    pub fn places(&self) -> Result<Option<([Ipv4Addr; 2], Place)>, OperationError> {
        let Some(far) = &self.far else { return Ok(None) };
        let network = far.network.try_clone().map_err(network)?;
        Ok(Some(([SERVER, HERE], Place { network, address: AGENT, receives_at: THERE })))
    }

    /// Whether it still carries what it is given.
    pub fn goes_on(&self) -> bool {
        self.far.as_ref().is_none_or(|far| far.delay.goes_on())
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // It was in it before.
        let _ = self.former.enter();
    }
}

impl Far {
    /// From the network of this thread on, which has its bridge.
    fn new() -> Result<Self, OperationError> {
        let far = Network::new().map_err(network)?;
        let near = end(HERE)?;
        let distant = within(&far, || {
            run("ip", &["link", "set", "lo", "up"])?;
            end(THERE)
        })?;
        let delay = Delay::between(near, distant).map_err(network)?;
        let [near, distant] = CABLE;
        run("ip", &["link", "add", near, "type", "veth", "peer", "name", distant])?;
        // By the descriptor of this process: the other network has no name.
        let holder = format!("/proc/{}/fd/{}", std::process::id(), far.descriptor());
        run("ip", &["link", "set", distant, "netns", &holder])?;
        plug(near)?;
        within(&far, || {
            bridge(AGENT)?;
            plug(distant)
        })?;
        Ok(Self { network: far, delay })
    }
}

/// An end of the line, which is up.
fn end(address: Ipv4Addr) -> Result<Device, OperationError> {
    let device = Device::new(LINE).map_err(network)?;
    for path in BUFFERS {
        // As much to begin with as ever.
        let value = fs::read_to_string(path).and_then(|now| {
            let most = UNDER_WAY.to_string();
            let first = now.split_whitespace().take(2).collect::<Vec<_>>().join(" ");
            fs::write(path, format!("{first} {most}"))
        });
        value.map_err(|source| OperationError::File { path: path.into(), source })?;
    }
    run("ip", &["addr", "add", &format!("{address}/30"), "dev", LINE])?;
    // It waits for the token bucket, not for the program that carries it.
    run("ip", &["link", "set", LINE, "txqueuelen", PACKETS, "up"])?;
    Ok(device)
}

fn bridge(address: Ipv4Addr) -> Result<(), OperationError> {
    run("ip", &["link", "add", BRIDGE, "type", "bridge"])?;
    run("ip", &["addr", "add", &format!("{address}/24"), "dev", BRIDGE])?;
    run("ip", &["link", "set", BRIDGE, "up"])
}

/// Puts an end of the cable on the bridge.
fn plug(device: &str) -> Result<(), OperationError> {
    run("ip", &["link", "set", device, "master", BRIDGE])?;
    run("ip", &["link", "set", device, "up"])
}

fn limit(device: &str, mbit: u64) -> Result<(), OperationError> {
    if mbit == 0 {
        // There may be no limit.
        let _ = run("tc", &["qdisc", "delete", "dev", device, "root"]);
        return Ok(());
    }
    let (rate, burst, queue) = (format!("{mbit}mbit"), BURST.to_string(), QUEUE.to_string());
    let limit = ["rate", &rate, "burst", &burst, "limit", &queue];
    run("tc", &[&["qdisc", "replace", "dev", device, "root", "tbf"][..], &limit].concat())
}

fn network(source: io::Error) -> OperationError {
    OperationError::File { path: PathBuf::from("/dev/net/tun"), source }
}

/// Does something in another network.
fn within<T: Send>(
    there: &Network,
    work: impl FnOnce() -> Result<T, OperationError> + Send,
) -> Result<T, OperationError> {
    there.within(|| Ok(work())).map_err(network)?
}

fn run(program: &str, arguments: &[&str]) -> Result<(), OperationError> {
    let output = Command::new(program).args(arguments).output();
    let output = output
        .map_err(|source| OperationError::Program { program: PathBuf::from(program), source })?;
    if output.status.success() {
        return Ok(());
    }
    let what = format!("{program} {}", arguments.join(" "));
    Err(OperationError::Command {
        what,
        said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// The bytes that have gone over the line of this thread, in both directions.
pub(super) fn sent() -> Option<u64> {
    counted(&fs::read_to_string("/proc/thread-self/net/dev").ok()?)
}

/// By proc(5): `lo: ` and eight numbers of what was received, then those of what was sent. A loopback receives what it has sent.
fn counted(devices: &str) -> Option<u64> {
    let numbers = |device: &str| {
        let of =
            |line: &str| line.trim().strip_prefix(device)?.strip_prefix(':').map(str::to_owned);
        let line = devices.lines().find_map(of)?;
        let number = |at| line.split_whitespace().nth(at)?.parse::<u64>().ok();
        Some((number(0)?, number(8)?))
    };
    match numbers(LINE) {
        Some((received, sent)) => Some(received + sent),
        None => numbers("lo").map(|(_, sent)| sent),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sent_over_the_line_is_found() {
        let devices = "Inter-|   Receive      |  Transmit\n face |bytes ...\n  eth0: 1 2 3 4 5 6 7 8 99 1\n    lo: 11 2 0 0 0 0 0 0 12 2 0 0 0 0 0 0\n";
        assert_eq!(counted(devices), Some(12));
        assert_eq!(counted("eth0: 1 2 3 4 5 6 7 8 99 1\n"), None);
        // A loopback beside a line is not the line.
        let both = format!("{devices}  line: 30 2 0 0 0 0 0 0 400 2 0 0 0 0 0 0\n");
        assert_eq!(counted(&both), Some(430));
    }
}
