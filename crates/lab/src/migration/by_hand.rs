//! QEMU's own migration between two QEMUs that are started by hand, with the same guest: in the clear, by several streams, by TLS.

use std::fs::{self, Permissions};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::guest::Guest;
use super::meter::{self, Ends};
use super::moved::Moved;
use crate::outcome::OperationError;
use crate::qemu::{self, BANDWIDTH, Qemu};

/// Where the destination listens, in the network of the line.
const ADDRESS: Ipv4Addr = Ipv4Addr::LOCALHOST;
const PORT: u16 = 4444;
/// The streams of `multifd`: one for each core of a small machine.
const CHANNELS: u32 = 2;
/// QEMU's usual limit of the time in which a guest stands still, as vmseal's migrations have it.
const DOWNTIME_MILLISECONDS: u64 = 300;
/// A key for TLS 1.3, of 256 bits; with it GnuTLS takes AES-128-GCM.
const KEY: &str = "qemu:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\n";

/// How it migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// One stream.
    Tcp,
    /// Several.
    Multifd,
    /// One by TLS.
    Tls,
}

impl How {
    /// The system of this name.
    pub fn of(system: &str) -> Option<Self> {
        match system {
            "qemu-tcp" => Some(Self::Tcp),
            "qemu-multifd" => Some(Self::Multifd),
            "qemu-tls" => Some(Self::Tls),
            _ => None,
        }
    }

    fn capabilities(self) -> Value {
        let on = |name: &str| json!({"capability": name, "state": true});
        let multifd = (self == Self::Multifd).then(|| on("multifd"));
        // As vmseal has it: a guest that changes memory faster than it can be sent is slowed down.
        let all: Vec<Value> =
            [on("events"), on("auto-converge")].into_iter().chain(multifd).collect();
        json!({ "capabilities": all })
    }

    fn parameters(self) -> Value {
        let mut all = json!({"max-bandwidth": BANDWIDTH, "downtime-limit": DOWNTIME_MILLISECONDS});
        match self {
            Self::Tcp => {}
            Self::Multifd => all["multifd-channels"] = json!(CHANNELS),
            Self::Tls => all["tls-creds"] = json!("tls"),
        }
        all
    }
}

/// Starts a guest from this disk under this accelerator, and migrates it when its memory is full.
pub(super) fn migrate(
    how: How,
    guest: Guest,
    disk: &Path,
    accelerator: &str,
) -> Result<Moved, OperationError> {
    let home = tempfile::tempdir();
    let home =
        home.map_err(|source| OperationError::File { path: std::env::temp_dir(), source })?;
    let home = home.path();
    let keys = home.join("keys.psk");
    let written = fs::write(&keys, KEY)
        .and_then(|()| fs::set_permissions(&keys, Permissions::from_mode(0o600)));
    written.map_err(|source| OperationError::File { path: keys, source })?;
    let start = |end: End| start(end, how, guest, disk, accelerator, home);
    let mut source = start(End::Source)?;
    guest.until_filled(source.pid())?;
    let from = source.pid();
    let processes = || Ends {
        source: vec![from],
        destination: End::Destination.recorded(home).into_iter().collect(),
    };
    let begun = Instant::now();
    let (went, spent) = meter::watched(processes, || {
        let mut destination = start(End::Destination)?;
        send(how, &mut source, &mut destination)
    });
    let (sent, gap) = went?;
    Ok(Moved { seconds: begun.elapsed().as_secs_f64(), sent, gap, spent, served: None })
}

/// From here on until the guest goes on: what was sent of its memory, in bytes, and how long it stood still.
fn send(
    how: How,
    source: &mut Qemu,
    destination: &mut Qemu,
) -> Result<(u64, Duration), OperationError> {
    for end in [&mut *destination, &mut *source] {
        end.ask("migrate-set-capabilities", how.capabilities())?;
        end.ask("migrate-set-parameters", how.parameters())?;
    }
    let uri = format!("tcp:{ADDRESS}:{PORT}");
    destination.ask("migrate-incoming", json!({ "uri": uri }))?;
    source.ask("migrate", json!({ "uri": uri }))?;
    let stopped = source.event("STOP")?;
    let resumed = destination.event("RESUME")?;
    source.migrated()?;
    let went = source.ask("query-migrate", json!({}))?;
    let sent = went["ram"]["transferred"].as_u64();
    let sent = sent.ok_or_else(|| source.failed("query-migrate", &went))?;
    match (time_of(&stopped), time_of(&resumed)) {
        (Some(from), Some(to)) => Ok((sent, to.saturating_sub(from))),
        _ => Err(source.failed("an event without its time", &stopped)),
    }
}

/// When an event was, since 1970: both QEMUs go by the clock of this machine.
fn time_of(event: &Value) -> Option<Duration> {
    let part = |name: &str| event["timestamp"][name].as_u64();
    Some(Duration::from_secs(part("seconds")?) + Duration::from_micros(part("microseconds")?))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Source,
    Destination,
}

impl End {
    fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Destination => "destination",
        }
    }

    /// Its process, once it is there.
    fn recorded(self, home: &Path) -> Option<i32> {
        fs::read_to_string(qemu::record(home, self.name())).ok()?.trim().parse().ok()
    }
}

/// Starts an end of the migration.
fn start(
    end: End,
    how: How,
    guest: Guest,
    disk: &Path,
    accelerator: &str,
    home: &Path,
) -> Result<Qemu, OperationError> {
    Qemu::start(home, end.name(), &arguments(end, how, guest, disk, accelerator, home))
}

fn arguments(
    end: End,
    how: How,
    guest: Guest,
    disk: &Path,
    accelerator: &str,
    home: &Path,
) -> Vec<String> {
    let drive = format!("file={},format=raw", disk.display());
    let mut all = qemu::machine(guest.memory_mib(), accelerator, &drive);
    if end == End::Destination {
        all.extend(qemu::INCOMING.map(str::to_owned));
    }
    let role = if end == End::Source { "client,username=qemu" } else { "server" };
    let tls = format!("tls-creds-psk,id=tls,dir={},endpoint={role}", home.display());
    if how == How::Tls {
        all.extend(["-object".to_owned(), tls]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_has_what_it_needs() {
        let of = |how: How| (how.capabilities().to_string(), how.parameters().to_string());
        let has = |how, text: &str| {
            let (capabilities, parameters) = of(how);
            capabilities.contains(text) || parameters.contains(text)
        };
        assert!(has(How::Multifd, "\"multifd\"") && has(How::Multifd, "\"multifd-channels\":2"));
        assert!(!has(How::Tcp, "multifd") && !has(How::Tls, "multifd"));
        assert!(has(How::Tls, "\"tls-creds\":\"tls\"") && !has(How::Tcp, "tls"));
        let guest = Guest { size_mib: 1, changes_mib: 0, repeats: 1 };
        let of = |end, how| {
            arguments(end, how, guest, Path::new("/d"), "tcg", Path::new("/h")).join(" ")
        };
        assert!(of(End::Destination, How::Tls).contains("-incoming defer"));
        assert!(of(End::Destination, How::Tls).contains("endpoint=server"));
        assert!(of(End::Source, How::Tls).ends_with("endpoint=client,username=qemu"));
        assert!(!of(End::Source, How::Tcp).contains("tls"));
        assert!(!of(End::Source, How::Tcp).contains("-incoming"));
    }

    #[test]
    fn the_time_of_an_event_is_read() {
        let event = json!({"timestamp": {"seconds": 7, "microseconds": 250_000}});
        assert_eq!(time_of(&event), Some(Duration::from_millis(7250)));
        assert_eq!(time_of(&json!({})), None);
    }
}
