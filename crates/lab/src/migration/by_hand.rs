//! QEMU's own migration between two QEMUs that are started by hand, with the same guest: in the clear, by several streams, by TLS.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::guest::Guest;
use super::meter;
use super::moved::Moved;
use crate::outcome::OperationError;

const QEMU: &str = "qemu-system-x86_64";
/// Where the destination listens, in the network of the line.
const ADDRESS: Ipv4Addr = Ipv4Addr::LOCALHOST;
const PORT: u16 = 4444;
/// The streams of `multifd`: one for each core of a small machine.
const CHANNELS: u32 = 2;
/// The limits of vmseal's migrations: none of the rate, and QEMU's usual one of the time in which a guest stands still.
const BANDWIDTH: u64 = 100_000_000_000;
const DOWNTIME_MILLISECONDS: u64 = 300;
/// How long a QEMU may take to listen, and to say what is waited for while it migrates.
const START: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_secs(600);
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
    let start = |end: End| Qemu::start(end, how, guest, disk, accelerator, home);
    let mut source = start(End::Source)?;
    guest.until_filled(source.pid())?;
    let from = source.pid();
    let processes = || std::iter::once(from).chain(End::Destination.recorded(home)).collect();
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
    loop {
        let ended = source.event("MIGRATION")?;
        match ended["data"]["status"].as_str() {
            Some("completed") => break,
            Some("failed" | "cancelled") => return Err(source.failed("migrate", &ended)),
            _ => {}
        }
    }
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

    fn record(self, home: &Path) -> PathBuf {
        home.join(self.name()).with_extension("pid")
    }

    /// Its process, once it is there.
    fn recorded(self, home: &Path) -> Option<i32> {
        fs::read_to_string(self.record(home)).ok()?.trim().parse().ok()
    }
}

/// A QEMU with its monitor. It ends with this.
struct Qemu {
    child: Child,
    monitor: BufReader<UnixStream>,
    /// Events that came before they were asked for.
    events: Vec<Value>,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        // One that has ended is not there any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    fn start(
        end: End,
        how: How,
        guest: Guest,
        disk: &Path,
        accelerator: &str,
        home: &Path,
    ) -> Result<Self, OperationError> {
        let socket = home.join(end.name());
        let mut command = Command::new(QEMU);
        command.args(arguments(end, how, guest, disk, accelerator, home));
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started = command.spawn();
        let mut child = started
            .map_err(|source| OperationError::Program { program: PathBuf::from(QEMU), source })?;
        let recorded = fs::write(end.record(home), child.id().to_string());
        let monitor = recorded.and_then(|()| connect(&socket, &mut child));
        match monitor {
            Ok(monitor) => {
                let mut this = Self { child, monitor, events: Vec::new() };
                this.read()?; // its greeting
                this.ask("qmp_capabilities", json!({}))?;
                Ok(this)
            }
            Err(source) => {
                let _ = child.kill();
                let said = child.wait_with_output().map(|output| output.stderr).unwrap_or_default();
                let said = String::from_utf8_lossy(&said).trim().to_owned();
                Err(OperationError::Command {
                    what: QEMU.to_owned(),
                    said: format!("{source}: {said}"),
                })
            }
        }
    }

    fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    fn failed(&self, what: &str, said: &Value) -> OperationError {
        OperationError::Command { what: format!("{QEMU}: {what}"), said: said.to_string() }
    }

    fn read(&mut self) -> Result<Value, OperationError> {
        let mut line = String::new();
        let read = self.monitor.read_line(&mut line);
        let said = match read {
            Ok(0) => "it has ended".to_owned(),
            Err(error) => error.to_string(),
            Ok(_) => match serde_json::from_str(&line) {
                Ok(value) => return Ok(value),
                Err(_) => line,
            },
        };
        Err(OperationError::Command { what: format!("{QEMU}: its monitor"), said })
    }

    /// Executes a command that must succeed; its answer.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, OperationError> {
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        let written = self.monitor.get_mut().write_all(line.as_bytes());
        written.map_err(|source| self.failed(command, &Value::String(source.to_string())))?;
        loop {
            let mut said = self.read()?;
            if said.get("event").is_some() {
                self.events.push(said);
            } else if said.get("return").is_some() {
                return Ok(said["return"].take());
            } else {
                return Err(self.failed(command, &said["error"]["desc"]));
            }
        }
    }

    /// The next event of this name, which may have come before; one of a migration that has failed is an error.
    fn event(&mut self, name: &str) -> Result<Value, OperationError> {
        let begun = Instant::now();
        loop {
            // There are others all the time.
            if begun.elapsed() > ANSWER {
                let log = format!("{:?}", self.events.last());
                return Err(OperationError::Never {
                    what: "a QEMU says that it has migrated",
                    log,
                });
            }
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return Ok(self.events.remove(at));
            }
            let said = self.read()?;
            if said["data"]["status"] == "failed" {
                return Err(self.failed("migrate", &said));
            }
            self.events.push(said);
        }
    }
}

fn connect(socket: &Path, child: &mut Child) -> io::Result<BufReader<UnixStream>> {
    let begun = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => {
                stream.set_read_timeout(Some(ANSWER))?;
                return Ok(BufReader::new(stream));
            }
            Err(error) if begun.elapsed() > START || child.try_wait()?.is_some() => {
                return Err(error);
            }
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}

/// The machine of vmseal's guests as far as it matters here.
fn arguments(
    end: End,
    how: How,
    guest: Guest,
    disk: &Path,
    accelerator: &str,
    home: &Path,
) -> Vec<String> {
    let memory = guest.memory_mib();
    let machine = format!("q35,accel={accelerator},memory-backend=ram,graphics=off,vmport=off");
    let ram = format!("memory-backend-memfd,id=ram,size={memory}M,share=on");
    let drive = format!("file={},format=raw,if=none,id=disk", disk.display());
    let memory = format!("{memory}M");
    let processor = if accelerator == "kvm" { "host" } else { "max" };
    let mut all: Vec<&str> = vec!["-no-user-config", "-nodefaults", "-display", "none"];
    all.extend(["-name", "debug-threads=on", "-machine", &machine, "-cpu", processor]);
    all.extend(["-smp", "1", "-m", &memory, "-object", &ram, "-drive", &drive]);
    all.extend(["-device", "virtio-blk-pci,drive=disk,disable-legacy=on", "-device", "VGA"]);
    if end == End::Destination {
        all.extend(["-incoming", "defer"]);
    }
    let role = if end == End::Source { "client,username=qemu" } else { "server" };
    let tls = format!("tls-creds-psk,id=tls,dir={},endpoint={role}", home.display());
    if how == How::Tls {
        all.extend(["-object", &tls]);
    }
    all.into_iter().map(str::to_owned).collect()
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
