//! A server process: started on a core, watched until it serves, and always stopped.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use vmseal_initiator::{Initiator, InitiatorError, Nbd, VhostUser, Wait};

use super::{Place, SystemError};
use crate::{children, stop};

/// How long a server may take to create its socket. QEMU's key derivation takes about a second.
const START: Duration = Duration::from_secs(30);
/// How long it may then take to listen on it.
const LISTENING: Duration = Duration::from_secs(2);
/// How long it may take to exit by itself.
const STOP: Duration = Duration::from_secs(5);
/// How much of the log an error quotes, in bytes.
const QUOTED: usize = 600;

/// A program, and how to get it.
#[derive(Clone, Debug)]
pub struct Program {
    /// A path, or a name to be looked up in PATH.
    pub path: PathBuf,
    /// What to do if it is missing.
    pub advice: &'static str,
}

impl Program {
    pub(super) fn failed(&self, source: io::Error) -> SystemError {
        SystemError::Program { program: self.path.clone(), advice: self.advice, source }
    }

    /// Why it cannot be run; none if it can.
    #[must_use]
    pub fn obstacle(&self) -> Option<String> {
        let ran = self.command().arg("--version").output();
        let failed = !ran.is_ok_and(|output| output.status.success());
        failed.then(|| format!("{} cannot be run; {}", self.path.display(), self.advice))
    }

    /// As qemu-img: makes an empty layer above an image.
    pub(super) fn make_layer(&self, image: &Path, layer: &Path) -> Result<(), SystemError> {
        let mut command = self.command();
        command.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(image).arg(layer);
        let output = stop::output(&mut command).map_err(|source| self.failed(source))?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        let source = io::Error::other(format!("qemu-img ended with {}: {said}", output.status));
        Err(SystemError::File { path: layer.to_owned(), source })
    }

    pub(super) fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        command.stdin(Stdio::null());
        command
    }
}

/// How a disk is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// To a guest, on shared memory.
    #[serde(rename = "vhost-user-blk")]
    VhostUser,
    /// To a tool, over a unix socket.
    #[serde(rename = "NBD")]
    Nbd,
}

/// A running server. Dropping it ends the process and removes its sockets.
#[derive(Debug)]
pub struct Server {
    child: Child,
    transport: Transport,
    sockets: Vec<PathBuf>,
    misses_notifications: bool,
}

impl Server {
    /// Starts `command` on `core` and waits until it serves the disks at all `places`.
    pub(super) fn start(
        system: &'static str,
        program: &Program,
        mut command: Command,
        core: Option<usize>,
        transport: Transport,
        places: &[Place],
    ) -> Result<Self, SystemError> {
        let sockets: Vec<PathBuf> = places.iter().map(Place::socket).collect();
        let log = places[0].directory.join("log");
        let file_error = |path: &Path| {
            let path = path.to_owned();
            move |source| SystemError::File { path, source }
        };
        for socket in &sockets {
            remove(socket).map_err(file_error(socket))?;
        }
        let output = File::create(&log).map_err(file_error(&log))?;
        command.stdout(Stdio::null()).stderr(output);
        let child = on_core(core, || command.spawn()).map_err(|e| program.failed(e))?;
        let mut server = Self { child, transport, sockets, misses_notifications: false };
        server.until_it_serves().map_err(|what| SystemError::NotServing {
            system,
            what,
            log: last_words(&log),
        })?;
        Ok(server)
    }

    fn until_it_serves(&mut self) -> Result<(), String> {
        let begin = Instant::now();
        while !self.sockets.iter().all(|socket| socket.exists()) {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("it ended with {status}"));
            }
            if begin.elapsed() > START {
                return Err(format!("no socket after {} s", START.as_secs()));
            }
            stop::check().map_err(|stopped| stopped.to_string())?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// The same server, known to miss a notification now and then.
    pub(super) fn that_misses_notifications(self) -> Self {
        let mut server = self;
        server.misses_notifications = true;
        server
    }

    /// A client of one of its disks, for `depth` requests of up to `block` bytes. A socket exists a moment
    /// before its server listens, so a refused connection is retried for a while.
    ///
    /// # Errors
    /// Any [`InitiatorError`] but those of requests.
    ///
    /// # Panics
    /// If there is no such disk.
    pub fn connect(
        &self,
        disk: usize,
        depth: u16,
        block: u32,
        wait: Wait,
    ) -> Result<Box<dyn Initiator>, InitiatorError> {
        let begin = Instant::now();
        loop {
            match self.try_to_connect(disk, depth, block, wait) {
                Err(InitiatorError::Connect { source, .. })
                    if source.kind() == io::ErrorKind::ConnectionRefused
                        && begin.elapsed() < LISTENING =>
                {
                    std::thread::sleep(Duration::from_millis(2));
                }
                result => return result,
            }
        }
    }

    fn try_to_connect(
        &self,
        disk: usize,
        depth: u16,
        block: u32,
        wait: Wait,
    ) -> Result<Box<dyn Initiator>, InitiatorError> {
        let socket = &self.sockets[disk];
        Ok(match self.transport {
            Transport::Nbd => Box::new(Nbd::connect(socket, depth, block, wait)?),
            Transport::VhostUser => {
                let initiator = VhostUser::connect(socket, depth, block, wait)?;
                let misses = self.misses_notifications;
                Box::new(if misses { initiator.renotifying() } else { initiator })
            }
        })
    }

    /// The sockets of its disks.
    #[must_use]
    pub fn sockets(&self) -> &[PathBuf] {
        &self.sockets
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it end by itself, unless it takes too long: what is measured when a signal has asked for the end does not count.
    fn stop(&mut self) {
        if children::ended_within(&mut self.child, Duration::ZERO) {
            return;
        }
        if !stop::asked() {
            // It is a child that nobody has waited for: the number is its own. What fails here is done below.
            let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
            if children::ended_within(&mut self.child, STOP) {
                return;
            }
        }
        children::end(&mut self.child);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
        for socket in &self.sockets {
            let _ = remove(socket);
        }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Runs `spawn` with this thread on `core`; the child and its threads inherit that.
fn on_core<T>(core: Option<usize>, spawn: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let Some(core) = core else { return spawn() };
    let mut only = CpuSet::new();
    only.set(core)?;
    on_cores(&only, spawn)?
}

/// Does something with this thread on these cores; processes that it starts inherit that.
pub(super) fn on_cores<T>(cores: &CpuSet, run: impl FnOnce() -> T) -> io::Result<T> {
    let this = Pid::from_raw(0);
    let before = sched_getaffinity(this)?;
    sched_setaffinity(this, cores)?;
    let done = run();
    sched_setaffinity(this, &before)?;
    Ok(done)
}

pub(super) fn last_words(log: &Path) -> String {
    let bytes = std::fs::read(log).unwrap_or_default();
    let end = &bytes[bytes.len().saturating_sub(QUOTED)..];
    let text = String::from_utf8_lossy(end).trim().to_owned();
    if text.is_empty() { "(none)".to_owned() } else { text }
}
