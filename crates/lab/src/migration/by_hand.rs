//! QEMU's own migration between two QEMUs that are started by hand, with the same guest: in the clear and by TLS, with one stream for all
//! and with several for memory.

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
/// QEMU's usual limit of the time in which a guest stands still, as vmseal's migrations have it.
const DOWNTIME_MILLISECONDS: u64 = 300;
/// A key for TLS 1.3, of 256 bits; with it GnuTLS takes AES-128-GCM.
const KEY: &str = "qemu:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff\n";

/// How it migrates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct How {
    /// By TLS; else in the clear.
    tls: bool,
    /// So many streams for memory (`multifd`) beside the one for the rest; none is one for all.
    channels: Option<u32>,
}

impl How {
    /// The system of this name.
    pub fn of(system: &str) -> Option<Self> {
        let (name, channels) = match system.rsplit_once("-multifd-") {
            Some((name, channels)) => (name, Some(channels.parse::<u32>().ok()?)),
            None => (system, None),
        };
        match (name, channels) {
            ("qemu-tcp", None) | ("qemu", Some(_)) => Some(Self { tls: false, channels }),
            ("qemu-tls", _) => Some(Self { tls: true, channels }),
            _ => None,
        }
    }

    fn capabilities(self) -> Value {
        let on = |name: &str| json!({"capability": name, "state": true});
        let multifd = self.channels.map(|_| on("multifd"));
        // As vmseal has it: a guest that changes memory faster than it can be sent is slowed down.
        let all: Vec<Value> =
            [on("events"), on("auto-converge")].into_iter().chain(multifd).collect();
        json!({ "capabilities": all })
    }

    fn parameters(self) -> Value {
        let mut all = json!({"max-bandwidth": BANDWIDTH, "downtime-limit": DOWNTIME_MILLISECONDS});
        if let Some(channels) = self.channels {
            all["multifd-channels"] = json!(channels);
        }
        if self.tls {
            all["tls-creds"] = json!("tls");
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
    if how.tls {
        all.extend(["-object".to_owned(), tls]);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::definition::MIGRATION_SYSTEMS;

    #[test]
    fn each_way_has_what_it_needs() {
        let how = |system: &str| How::of(system).unwrap();
        let (tcp, tls) = (how("qemu-tcp"), how("qemu-tls"));
        let has = |how: How, text: &str| {
            let (capabilities, parameters) = (how.capabilities(), how.parameters());
            format!("{capabilities} {parameters}").contains(text)
        };
        for (channels, clear, sealed) in [
            (1, how("qemu-multifd-1"), how("qemu-tls-multifd-1")),
            (4, how("qemu-multifd-4"), how("qemu-tls-multifd-4")),
        ] {
            let streams = format!("\"multifd-channels\":{channels}");
            for how in [clear, sealed] {
                assert!(has(how, "\"multifd\"") && has(how, &streams), "{how:?}");
            }
            assert!(!has(clear, "tls") && has(sealed, "\"tls-creds\":\"tls\""));
        }
        assert!(!has(tcp, "multifd") && !has(tls, "multifd"));
        assert!(has(tls, "\"tls-creds\":\"tls\"") && !has(tcp, "tls"));
        let guest = Guest { size_mib: 1, changes_mib: 0, repeats: 1 };
        let of = |end, how| {
            arguments(end, how, guest, Path::new("/d"), "tcg", Path::new("/h")).join(" ")
        };
        assert!(of(End::Destination, tls).contains("-incoming defer"));
        assert!(of(End::Destination, tls).contains("endpoint=server"));
        assert!(of(End::Source, tls).ends_with("endpoint=client,username=qemu"));
        assert!(!of(End::Source, tcp).contains("tls"));
        assert!(!of(End::Source, tcp).contains("-incoming"));
    }

    #[test]
    fn every_system_by_hand_is_a_way_of_its_own() {
        let by_hand = MIGRATION_SYSTEMS.iter().filter(|system| system.starts_with("qemu"));
        let ways: Vec<How> =
            by_hand.map(|system| How::of(system).unwrap_or_else(|| panic!("{system}"))).collect();
        for (at, way) in ways.iter().enumerate() {
            assert!(!ways[..at].contains(way), "{way:?} has two names");
        }
        let mut others = MIGRATION_SYSTEMS.iter().filter(|system| !system.starts_with("qemu"));
        assert!(others.all(|system| How::of(system).is_none()));
        for unknown in ["qemu", "qemu-multifd", "qemu-multifd-x", "qemu-tcp-multifd-2"] {
            assert_eq!(How::of(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn the_time_of_an_event_is_read() {
        let event = json!({"timestamp": {"seconds": 7, "microseconds": 250_000}});
        assert_eq!(time_of(&event), Some(Duration::from_millis(7250)));
        assert_eq!(time_of(&json!({})), None);
    }
}
