//! A QEMU that is started by hand, with its monitor: what guests of vmseal are compared with.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, IoSlice, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};

use crate::children;
use crate::outcome::OperationError;
use crate::stop::{self, LOOK_EVERY, Stopped};

const QEMU: &str = "qemu-system-x86_64";
/// How long a QEMU may take to listen, and to say what is waited for while it migrates.
const START: Duration = Duration::from_secs(30);
const ANSWER: Duration = Duration::from_secs(600);
/// As vmseal has it: no limit of the rate at which memory is written or sent.
pub const BANDWIDTH: u64 = 100_000_000_000;
/// Has it wait for a migration.
pub const INCOMING: [&str; 2] = ["-incoming", "defer"];

/// The machine of vmseal's guests as far as it matters to their memory, with a disk.
pub fn machine(memory_mib: u64, accelerator: &str, drive: &str) -> Vec<String> {
    let machine = format!("q35,accel={accelerator},memory-backend=ram,graphics=off,vmport=off");
    let ram = format!("memory-backend-memfd,id=ram,size={memory_mib}M,share=on");
    let (drive, memory) = (format!("{drive},if=none,id=disk"), format!("{memory_mib}M"));
    let processor = if accelerator == "kvm" { "host" } else { "max" };
    let mut all: Vec<&str> = vec!["-no-user-config", "-nodefaults", "-display", "none"];
    all.extend(["-name", "debug-threads=on", "-machine", &machine, "-cpu", processor]);
    all.extend(["-smp", "1", "-m", &memory, "-object", &ram, "-drive", &drive]);
    all.extend(["-device", "virtio-blk-pci,drive=disk,disable-legacy=on", "-device", "VGA"]);
    all.into_iter().map(str::to_owned).collect()
}

/// Where the process of one of this name is recorded.
pub fn record(home: &Path, name: &str) -> PathBuf {
    home.join(name).with_extension("pid")
}

/// A QEMU with its monitor. It ends with this.
#[derive(Debug)]
pub struct Qemu {
    child: Child,
    monitor: BufReader<UnixStream>,
    /// Events that came before they were asked for.
    events: Vec<Value>,
}

impl Drop for Qemu {
    fn drop(&mut self) {
        children::end(&mut self.child);
    }
}

impl Qemu {
    /// Starts one whose socket, and the record of whose process, are in a directory under this name.
    pub fn start(home: &Path, name: &str, arguments: &[String]) -> Result<Self, OperationError> {
        let socket = home.join(name);
        let mut command = Command::new(QEMU);
        command.args(arguments);
        command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let started = command.spawn();
        let mut child = started
            .map_err(|source| OperationError::Program { program: PathBuf::from(QEMU), source })?;
        let recorded = fs::write(record(home, name), child.id().to_string());
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

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    /// What it said when this was done.
    pub fn failed(&self, what: &str, said: &Value) -> OperationError {
        OperationError::Command { what: format!("{QEMU}: {what}"), said: said.to_string() }
    }

    fn read(&mut self) -> Result<Value, OperationError> {
        let (begun, mut line) = (Instant::now(), Vec::new());
        let read = loop {
            match self.monitor.read_until(b'\n', &mut line) {
                // What has come of the line is kept.
                Err(error) if is_late(&error) && begun.elapsed() < ANSWER => stop::check()?,
                read => break read,
            }
        };
        let said = match read {
            Err(error) => error.to_string(),
            Ok(_) if line.is_empty() => "it has ended".to_owned(),
            Ok(_) => match serde_json::from_slice(&line) {
                Ok(value) => return Ok(value),
                Err(_) => String::from_utf8_lossy(&line).into_owned(),
            },
        };
        Err(OperationError::Command { what: format!("{QEMU}: its monitor"), said })
    }

    /// Executes a command that must succeed; its answer.
    pub fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, OperationError> {
        let line = format!("{}\n", json!({"execute": command, "arguments": arguments}));
        let written = self.monitor.get_mut().write_all(line.as_bytes());
        written.map_err(|source| self.failed(command, &Value::String(source.to_string())))?;
        self.answer(command)
    }

    /// Gives it a file, which it knows by this name from now on.
    pub fn give(&mut self, name: &str, file: &File) -> Result<(), OperationError> {
        let command = "getfd";
        let line = format!("{}\n", json!({"execute": command, "arguments": {"fdname": name}}));
        let (line, numbers) = ([IoSlice::new(line.as_bytes())], [file.as_raw_fd()]);
        let rights = [ControlMessage::ScmRights(&numbers)];
        let socket = self.monitor.get_ref().as_raw_fd();
        // A line is as short as this: it is sent whole.
        let sent = sendmsg::<()>(socket, &line, &rights, MsgFlags::MSG_NOSIGNAL, None);
        sent.map_err(|error| self.failed(command, &Value::String(error.to_string())))?;
        self.answer(command).map(drop)
    }

    /// What it answers to a command.
    fn answer(&mut self, command: &str) -> Result<Value, OperationError> {
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
    pub fn event(&mut self, name: &str) -> Result<Value, OperationError> {
        let begun = Instant::now();
        loop {
            // There are others all the time.
            if stop::asked() || begun.elapsed() > ANSWER {
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

    /// Waits until it has written or read a whole migration, of which it tells by events.
    pub fn migrated(&mut self) -> Result<(), OperationError> {
        loop {
            let said = self.event("MIGRATION")?;
            match said["data"]["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => return Err(self.failed("migrate", &said)),
                _ => {}
            }
        }
    }

    /// Ends it; it has written everything then.
    pub fn quit(mut self) -> Result<(), OperationError> {
        self.ask("quit", json!({}))?;
        let ended = self.child.wait();
        let failed = |source: io::Error| self.failed("quit", &Value::String(source.to_string()));
        ended.map(drop).map_err(failed)
    }
}

/// Whether nothing has come within the time of a socket.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}

fn connect(socket: &Path, child: &mut Child) -> io::Result<BufReader<UnixStream>> {
    let begun = Instant::now();
    loop {
        match UnixStream::connect(socket) {
            Ok(stream) => {
                stream.set_read_timeout(Some(LOOK_EVERY))?;
                return Ok(BufReader::new(stream));
            }
            Err(error) if begun.elapsed() > START || child.try_wait()?.is_some() => {
                return Err(error);
            }
            Err(_) if stop::asked() => return Err(io::Error::other(Stopped)),
            Err(_) => std::thread::sleep(Duration::from_millis(2)),
        }
    }
}
