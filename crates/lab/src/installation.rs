//! A whole vmseal to measure: a server and an agent of their own on a loopback address, driven by the program `vmseal` as
//! an operator does. All of it ends with the value, the guests too.

use std::fs::{self, Permissions};
use std::io::{self, Read};
use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use vmseal_api::datastore::RbdPool;

use crate::ceph::mount;
use crate::children;
use crate::network::Network;
use crate::outcome::OperationError;
use crate::stop::{self, Left};

const SERVER_PORT: u16 = 8443;
/// The first host's; each further one has the next.
const AGENT_PORT: u16 = 8444;
/// The first host, and those that may be added.
pub const HERE: &str = "here";
pub const THERE: &str = "there";
pub const ELSEWHERE: &str = "elsewhere";
/// The datastore that the first host has from the beginning.
pub const LOCAL: &str = "local";
/// The first user id of the first host's guests, and how many each host has.
const UIDS: u32 = 2_000_000;
const UIDS_EACH: u32 = 100_000;

/// How long server and agent may take until they answer.
const START: Duration = Duration::from_secs(60);
/// How long server and agents are waited for once they are killed.
const ENDED: Duration = Duration::from_secs(2);
/// How much of a log an error quotes, in bytes.
const QUOTED: usize = 1500;

/// The passphrase of the installation's key provider; with it goes all that it protects.
const PASSPHRASE: &str = "of an installation that is measured and thrown away";

/// The datastore that each host has alone.
pub fn own_datastore(host: &str) -> &'static str {
    if host == HERE { "near" } else { "far" }
}

/// Where a second host is that is not in the network of the first one.
#[derive(Debug)]
pub struct Place {
    /// Its network.
    pub network: Network,
    /// Where the server reaches it.
    pub address: Ipv4Addr,
    /// Where the first host sends VMs to it.
    pub receives_at: Ipv4Addr,
}

/// A server, an agent or two, and all that they keep.
#[derive(Debug)]
pub struct Installation {
    program: PathBuf,
    address: Ipv4Addr,
    /// Where the first host receives VMs.
    receives_at: Ipv4Addr,
    server: Option<Child>,
    agents: Vec<Child>,
    /// Where agents keep what runs.
    runs: Vec<PathBuf>,
    /// Where an agent has mounted pools; each is left where this process ends before it has ended it.
    mounted: Vec<(PathBuf, Left)>,
    /// Sockets and state; short, as the names of sockets may not be long.
    home: TempDir,
    store: TempDir,
}

impl Installation {
    /// Starts one whose datastore is below `directory`: with a host `here`, a datastore `local`, and the policies
    /// `encrypted` and `plain`.
    pub fn start(program: &Path, directory: &Path) -> Result<Self, OperationError> {
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = Ipv4Addr::new(127, high | 0x80, low, 77);
        Self::start_at(address, address, program, directory)
    }

    /// The same at an address of this thread's network, with a host that receives VMs at another one.
    pub fn start_at(
        address: Ipv4Addr,
        receives_at: Ipv4Addr,
        program: &Path,
        directory: &Path,
    ) -> Result<Self, OperationError> {
        let file = |path: &Path, source| OperationError::File { path: path.into(), source };
        let directory = directory.canonicalize().map_err(|source| file(directory, source))?;
        let made = |place: &Path| -> Result<TempDir, OperationError> {
            let made = tempfile::Builder::new().prefix("vmseal-lab-").tempdir_in(place);
            let made = made.map_err(|source| file(place, source))?;
            // Guests and filters run as users of their own.
            let permissions = Permissions::from_mode(0o711);
            fs::set_permissions(made.path(), permissions).map_err(|source| file(place, source))?;
            Ok(made)
        };
        let mut this = Self {
            program: program.to_owned(),
            address,
            receives_at,
            server: None,
            agents: Vec::new(),
            runs: Vec::new(),
            mounted: Vec::new(),
            home: made(&std::env::temp_dir())?,
            store: made(&directory)?,
        };
        this.start_server()?;
        this.start_agent(HERE, None, &[])?;
        this.add_resources()?;
        Ok(this)
    }

    /// Adds a further host on this machine that has the datastore, too; in the network of this thread, or elsewhere, with these options
    /// of its agent.
    pub fn add_host(
        &mut self,
        host: &str,
        place: Option<&Place>,
        options: &[&str],
    ) -> Result<(), OperationError> {
        self.start_agent(host, place, options)?;
        let store = self.datastore().display().to_string();
        self.vmseal(&["datastore", "share", LOCAL, "--host", host, "--path", &store])?;
        Ok(())
    }

    /// Gives each of both hosts a datastore that the other one does not have.
    pub fn add_own_datastores(&self) -> Result<(), OperationError> {
        for host in [HERE, THERE] {
            let name = own_datastore(host);
            let path = self.store().join(name);
            let made = fs::create_dir(&path);
            made.map_err(|source| OperationError::File { path: path.clone(), source })?;
            let path = path.display().to_string();
            self.vmseal(&["datastore", "add", name, "--host", host, "--path", &path])?;
        }
        Ok(())
    }

    /// Gives the first host a datastore that is a pool of a Ceph cluster; its agent mounts it.
    pub fn add_pool(&mut self, name: &'static str, pool: &RbdPool) -> Result<(), OperationError> {
        let path = self.path(name);
        let text = path.display().to_string();
        let keyring = pool.keyring.as_ref().map(|file| file.display().to_string());
        let keyring: Vec<_> =
            keyring.iter().flat_map(|file| ["--keyring", file.as_str()]).collect();
        // One that is mounted and not added is unmounted, too.
        let left = Left::new(format!("the mount of a pool: umount -l {text}"));
        self.mounted.push((path, left));
        let place = ["datastore", "add", name, "--host", HERE, "--path", &text];
        let cluster = ["--pool", &pool.pool, "--monitors", &pool.monitors];
        let user = ["--user", &pool.user];
        let messenger = ["--messenger", pool.messenger.name()];
        self.vmseal(&[&place[..], &cluster, &user, &keyring[..], &messenger].concat())?;
        Ok(())
    }

    /// What runs guests of the first host: guests by hand run under the same.
    pub fn accelerator(&self) -> Result<String, OperationError> {
        let host = self.json(&["host", "show", HERE])?;
        let found = host["description"]["accelerator"]["kind"].as_str().map(str::to_owned);
        found.ok_or_else(|| OperationError::Answer { what: format!("host show {HERE}") })
    }

    /// The agents, and the processes of guests that live.
    pub fn processes(&self) -> Vec<i32> {
        let agents = self.agents.iter().map(|agent| agent.id().cast_signed());
        agents.chain(self.runs.iter().flat_map(|run| on_record(run))).collect()
    }

    /// The agent of a host, and the processes of its guests that live.
    pub fn processes_of(&self, host: &str) -> Vec<i32> {
        let run = self.run(host);
        let Some(at) = self.runs.iter().position(|it| *it == run) else { return Vec::new() };
        let agent = self.agents.get(at).map(|agent| agent.id().cast_signed());
        agent.into_iter().chain(on_record(&run)).collect()
    }

    /// Where the agent of a host keeps what runs.
    fn run(&self, host: &str) -> PathBuf {
        self.path(&format!("run-{host}"))
    }

    fn datastore(&self) -> PathBuf {
        self.store().join("datastore")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Where images for disks can be put.
    pub fn store(&self) -> &Path {
        self.store.path()
    }

    fn write(&self, name: &str, content: &str) -> Result<String, OperationError> {
        let path = self.path(name);
        let failed = |source| OperationError::File { path: path.clone(), source };
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(failed)?;
            fs::set_permissions(parent, Permissions::from_mode(0o711)).map_err(failed)?;
        }
        fs::write(&path, content).map_err(failed)?;
        fs::set_permissions(&path, Permissions::from_mode(0o400)).map_err(failed)?;
        Ok(path.display().to_string())
    }

    fn url(&self) -> String {
        format!("https://{}:{SERVER_PORT}", self.address)
    }

    /// A command that talks to this server.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .env("VMSEAL_SERVER", self.url())
            .env("VMSEAL_CA", self.path("server/ca.pem"))
            .env("VMSEAL_TOKEN_FILE", self.path("server/admin.token"))
            .env("HOME", self.home.path());
        command
    }

    /// Runs a command that must succeed; what it prints.
    pub fn vmseal(&self, arguments: &[&str]) -> Result<String, OperationError> {
        stop::check()?;
        let output =
            stop::output(&mut self.command(arguments)).map_err(|source| self.program(source))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(OperationError::Command {
            what: arguments.join(" "),
            said: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        })
    }

    /// What a command prints as JSON.
    pub fn json(&self, arguments: &[&str]) -> Result<Value, OperationError> {
        let printed = self.vmseal(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&printed)
            .map_err(|_| OperationError::Answer { what: arguments.join(" ") })
    }

    fn program(&self, source: io::Error) -> OperationError {
        OperationError::Program { program: self.program.clone(), source }
    }

    fn spawn(
        &self,
        mut command: Command,
        log: &str,
        network: Option<&Network>,
    ) -> Result<Child, OperationError> {
        let path = self.path(log);
        let failed = |source| OperationError::File { path: path.clone(), source };
        let output = fs::File::options().create(true).append(true).open(&path).map_err(failed)?;
        let errors = output.try_clone().map_err(failed)?;
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        let spawned = match network {
            Some(network) => network.within(|| command.spawn()),
            None => command.spawn(),
        };
        spawned.map_err(|source| self.program(source))
    }

    fn start_server(&mut self) -> Result<(), OperationError> {
        self.write("credentials/vmseal-provider-keys", PASSPHRASE)?;
        let mut command = self.command(&["server", "--data-dir"]);
        command
            .arg(self.path("server"))
            .args(["--listen", &format!("{}:{SERVER_PORT}", self.address)])
            .args(["--name", &self.address.to_string()])
            .env("RUST_LOG", "info")
            .env("CREDENTIALS_DIRECTORY", self.path("credentials"));
        self.server = Some(self.spawn(command, "server.log", None)?);
        self.wait("the server answers", "server.log", |this| this.vmseal(&["host", "list"]).is_ok())
    }

    fn start_agent(
        &mut self,
        host: &str,
        place: Option<&Place>,
        more: &[&str],
    ) -> Result<(), OperationError> {
        // There are three at most.
        let number = self.agents.len();
        let (port, uids) = (AGENT_PORT + number as u16, UIDS + number as u32 * UIDS_EACH);
        let token = self.vmseal(&["host", "token"])?;
        let token = self.write(&format!("{host}.token"), &token)?;
        let state = self.path(&format!("agent-{host}")).display().to_string();
        // Hosts in one network have one address.
        let own = (self.address, self.receives_at);
        let (at, receives_at) = place.map_or(own, |place| (place.address, place.receives_at));
        let (url, address) = (self.url(), format!("{at}:{port}"));
        let join = ["agent", "join", "--to", &url, "--name", host, "--join-token-file", &token];
        self.vmseal(&[&join[..], &["--address", &address, "--state-dir", &state]].concat())?;
        let (run, log) = (self.run(host), format!("agent-{host}.log"));
        let mut command = self.command(&["agent", "--state-dir", &state, "--run-dir"]);
        command.arg(&run).args(["--transfer-directory"]).arg(self.store());
        command.args(["--migration-listen", &format!("{receives_at}:0")]);
        command.args(["--uid-base", &uids.to_string()]).args(more);
        command.env("RUST_LOG", "info");
        self.agents.push(self.spawn(command, &log, place.map(|place| &place.network))?);
        self.runs.push(run);
        self.wait("the host is connected", &log, |this| {
            let shown = this.json(&["host", "show", host]);
            shown.is_ok_and(|shown| shown["connection"] == "connected")
        })
    }

    fn add_resources(&self) -> Result<(), OperationError> {
        let store = self.datastore();
        let failed = |source| OperationError::File { path: store.clone(), source };
        fs::create_dir(&store).map_err(failed)?;
        let store = store.display().to_string();
        self.vmseal(&["datastore", "add", LOCAL, "--host", HERE, "--path", &store])?;
        let passphrase = self.write("passphrase", PASSPHRASE)?;
        let backup = self.path("keys.backup").display().to_string();
        let given = ["--passphrase-file", &passphrase];
        self.vmseal(&[&["provider", "add", "keys"], &given[..]].concat())?;
        self.vmseal(&[&["provider", "backup", "keys", "--to", &backup], &given[..]].concat())?;
        self.vmseal(&[&["provider", "verify", "keys", "--from", &backup], &given[..]].concat())?;
        self.vmseal(&["provider", "default", "keys"])?;
        self.vmseal(&["policy", "create", "encrypted", "--encrypt"])?;
        self.vmseal(&["policy", "create", "plain", "--plain"])?;
        Ok(())
    }

    fn wait(
        &self,
        what: &'static str,
        log: &str,
        so: impl Fn(&Self) -> bool,
    ) -> Result<(), OperationError> {
        let begun = Instant::now();
        while !so(self) {
            stop::check()?;
            if begun.elapsed() > START {
                let log = end_of(&self.path(log));
                return Err(OperationError::Never { what, log });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        let mut own: Vec<&mut Child> = self.agents.iter_mut().chain(&mut self.server).collect();
        for child in &mut own {
            // One that has ended is not there any more.
            let _ = child.kill();
        }
        // They start nothing more once they have ended. One that waits for a pool ends only when nothing serves that any more.
        for child in &mut own {
            children::ended_within(child, ENDED);
        }
        // Guests and filters outlive an agent.
        self.runs.iter().flat_map(|run| on_record(run)).for_each(children::kill_hard);
        // What serves a pool outlives it, too; and nothing of the pool goes with the directory that it is mounted in.
        self.mounted.iter().for_each(|(place, _)| mount::end(place));
        own.into_iter().for_each(children::end);
    }
}

fn end_of(path: &Path) -> String {
    let mut text = Vec::new();
    let _ = fs::File::open(path).and_then(|mut file| file.read_to_end(&mut text));
    String::from_utf8_lossy(&text[text.len().saturating_sub(QUOTED)..]).into_owned()
}

/// The living processes of which the agent keeps a record, `*.process`, below `directory`: a copy of their
/// `/proc/PID/stat`. Process id and start time name a process for good.
fn on_record(directory: &Path) -> Vec<i32> {
    let (mut found, mut todo) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = todo.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "process") {
                found.extend(fs::read_to_string(path).ok().as_deref().and_then(living));
            }
        }
    }
    found
}

fn living(stat: &str) -> Option<i32> {
    let pid: i32 = stat.split(' ').next()?.parse().ok()?;
    let now = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    (start_time(&now)? == start_time(stat)?).then_some(pid)
}

/// Field 22; the second one, in parentheses, may hold spaces.
fn start_time(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_processes_that_live_are_found_by_their_records() {
        let directory = tempfile::tempdir().unwrap();
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        let other = own.replacen(&format!(" {} ", start_time(&own).unwrap()), " 1 ", 1);
        fs::create_dir(directory.path().join("vms")).unwrap();
        fs::write(directory.path().join("vms/a.process"), &own).unwrap();
        fs::write(directory.path().join("vms/b.process"), other).unwrap();
        fs::write(directory.path().join("c.other"), &own).unwrap();
        assert_eq!(on_record(directory.path()), [std::process::id().cast_signed()]);
    }
}
