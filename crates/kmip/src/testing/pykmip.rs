//! A real server: PyKMIP, as a child process on a free loopback port.

use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use tempfile::TempDir;

use super::certificates::{Authority, Issued, Validity, put};
use crate::client::Endpoint;

/// How long a server may take to listen: Python loads a lot, and the machine may be busy.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// How often another port is tried: another process may take a free one first.
const ATTEMPTS: usize = 5;

/// What PyKMIP logs when it listens.
const LISTENING: &str = "Starting connection service";

/// A PyKMIP server with its own database of keys; removed when dropped.
pub struct PyKmip {
    child: Child,
    port: u16,
    directory: TempDir,
}

impl PyKmip {
    /// A server for 127.0.0.1 and `localhost`; `authority` signs its certificate and those of its clients.
    #[must_use]
    pub fn start(authority: &Authority) -> Self {
        let certificate = authority.server(&["127.0.0.1", "localhost"], Validity::Now);
        Self::start_with(&certificate, authority)
    }

    /// A server with a certificate, which accepts the clients of an authority.
    #[must_use]
    pub fn start_with(certificate: &Issued, clients: &Authority) -> Self {
        let directory = TempDir::with_prefix("vmseal-pykmip-").expect("a temporary directory");
        certificate.write(directory.path(), "server");
        put(directory.path(), "clients.pem", clients.certificate());
        std::fs::create_dir(directory.path().join("policies")).expect("a temporary directory");
        for _ in 0..ATTEMPTS {
            let port = free_port();
            if let Some(child) = launch(directory.path(), port) {
                return Self { child, port, directory };
            }
        }
        panic!("PyKMIP does not start; its log:\n{}", log(directory.path()));
    }

    /// The port that it listens on, and keeps.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Where it listens.
    #[must_use]
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::new("127.0.0.1", self.port).expect("an address")
    }

    /// Kills it, whatever it is doing. Its keys stay.
    pub fn kill(&mut self) {
        end(&mut self.child);
    }

    /// Kills it, and starts it again with its keys, on its port.
    pub fn restart(&mut self) {
        self.kill();
        self.child = launch(self.directory.path(), self.port)
            .unwrap_or_else(|| panic!("PyKMIP does not start again:\n{}", self.log()));
    }

    /// Suspends its process: it neither answers nor closes anything until [`PyKmip::resume`].
    pub fn freeze(&self) {
        signal(&self.child, Signal::SIGSTOP);
    }

    /// Resumes its process.
    pub fn resume(&self) {
        signal(&self.child, Signal::SIGCONT);
    }

    /// Its log since it was started.
    #[must_use]
    pub fn log(&self) -> String {
        log(self.directory.path())
    }
}

impl Drop for PyKmip {
    fn drop(&mut self) {
        self.kill();
    }
}

fn signal(child: &Child, signal: Signal) {
    let group = Pid::from_raw(child.id().try_into().expect("a process id"));
    killpg(group, signal).expect("the group of a child that has not been waited for");
}

/// Kills the group, as PyKMIP has a second process in it.
fn end(child: &mut Child) {
    if matches!(child.try_wait(), Ok(None)) {
        signal(child, Signal::SIGKILL);
        child.wait().expect("a child that was killed");
    }
}

fn log(directory: &Path) -> String {
    ["server.log", "output"]
        .map(|name| std::fs::read_to_string(directory.join(name)).unwrap_or_default())
        .concat()
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// Python with PyKMIP, as scripts/pykmip-environment makes it.
fn python() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let python = root.join(".cache/pykmip/bin/python");
    assert!(
        python.exists(),
        "PyKMIP is not installed ({} is missing): run scripts/pykmip-environment",
        python.display()
    );
    python
}

/// Starts a server and waits until it listens; `None` if it exits instead.
fn launch(directory: &Path, port: u16) -> Option<Child> {
    let path = |name: &str| directory.join(name).display().to_string();
    let configuration = format!(
        "[server]\nhostname=127.0.0.1\nport={port}\ncertificate_path={}\nkey_path={}\nca_path={}\n\
         auth_suite=TLS1.2\npolicy_path={}\nenable_tls_client_auth=True\ndatabase_path={}\n",
        path("server.pem"),
        path("server.key"),
        path("clients.pem"),
        path("policies"),
        path("keys.db"),
    );
    put(directory, "server.conf", &configuration);
    put(directory, "server.log", "");
    let output = std::fs::File::create(directory.join("output")).expect("a file");
    let mut child = Command::new(python())
        .args(["-c", include_str!("pykmip_server.py")])
        .args([path("server.conf"), path("server.log"), path("")])
        .env("TMPDIR", directory)
        .stdin(Stdio::piped()) // closed when this process ends, however it does
        .stdout(Stdio::null())
        .stderr(output)
        .process_group(0)
        .spawn()
        .expect("Python starts");
    let begun = Instant::now();
    while begun.elapsed() < START_TIMEOUT {
        if !matches!(child.try_wait(), Ok(None)) {
            return None;
        }
        // Read its log: another process that took the port would accept a connection too.
        if log(directory).contains(LISTENING) {
            return Some(child);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    end(&mut child);
    panic!("PyKMIP did not listen within {START_TIMEOUT:?}; its log:\n{}", log(directory));
}
