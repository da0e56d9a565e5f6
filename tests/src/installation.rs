//! A complete vmseal on this machine: a server and an agent of their own, on a loopback address of their
//! own, in a directory of their own.

use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use tempfile::TempDir;

use crate::as_user::as_user;
use crate::guest::{Console, counter_disk};
use crate::process::{Process, kill_hard, using};
use crate::terminal::at_terminal;
use crate::{eventually, program};

const SERVER_PORT: u16 = 8443;
const AGENT_PORT: u16 = 8444;

/// The first user id of the guests of further hosts, beside those of the first one.
const OTHER_UIDS: u32 = 2_100_000;

/// How many user ids a host may use.
const UIDS_EACH: u32 = 12_288;

/// The most detailed log levels, for libraries too as far as they are allowed.
pub const LOUDEST: &str =
    "trace,tungstenite=trace,tokio_tungstenite=trace,hyper=trace,rustls=trace,sqlx=trace";

/// The passphrase of the native provider in every test.
pub const PASSPHRASE: &str = "correct horse battery staple";

/// The size of the counting guest's disk; small, so that whole images can be searched.
pub const DISK_SIZE: u64 = 8 << 20;

/// The file that identifies a datastore.
const DATASTORE_MARK: &str = "vmseal-datastore.json";

/// A server, an agent, and a directory with all that they keep.
pub struct Installation {
    directory: TempDir,
    address: Ipv4Addr,
    server: Option<Process>,
    agent: Option<Process>,
    /// Further hosts on this machine.
    others: Vec<OtherHost>,
    /// Whether a starting server is given the provider's passphrase.
    unlocks: bool,
    /// Where a starting server holds each step of a task.
    held_steps: Option<PathBuf>,
    /// What server and agent log from their start on.
    levels: &'static str,
    /// What runs the guests: the same for every test, as the probe has a test of its own.
    accelerator: &'static str,
    /// Where agents that are started receive VMs of other hosts.
    receives_at: IpAddr,
    /// The file with the id of the machine's boot that agents find; none for what it is.
    boot: Option<PathBuf>,
}

/// Has a program find another boot of the machine, in a mount namespace of its own: the first argument is the file with its id.
const OF_ANOTHER_BOOT: &str = "mount --bind \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";

/// A further host: an agent with a state directory, sockets and user ids of its own.
struct OtherHost {
    name: String,
    number: u16,
    agent: Option<Process>,
}

/// Every installation of this process gets an address of its own, so that ports never collide.
#[must_use]
pub fn next_address() -> Ipv4Addr {
    static NEXT: AtomicU16 = AtomicU16::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let [more, last] = NEXT.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    Ipv4Addr::new(127, high | 0x80, low ^ more, last)
}

impl Installation {
    /// A server and a joined host named `here`, with a datastore `local`, a usable default provider
    /// `keys`, and the policies `encrypted` and `plain`.
    pub fn new() -> anyhow::Result<Self> {
        Self::logging("info")
    }

    /// The same, with a server and an agent that log this.
    pub fn logging(levels: &'static str) -> anyhow::Result<Self> {
        Self::made(levels, "tcg")
    }

    /// The same as [`Installation::new`], but that guests run under KVM where that works.
    pub fn probing() -> anyhow::Result<Self> {
        Self::made("info", "auto")
    }

    fn made(levels: &'static str, accelerator: &'static str) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new().prefix("vmseal-test-").tempdir()?;
        std::fs::set_permissions(directory.path(), Permissions::from_mode(0o711))?;
        let address = next_address();
        let mut this = Self {
            directory,
            address,
            receives_at: address.into(),
            boot: None,
            server: None,
            agent: None,
            others: Vec::new(),
            unlocks: true,
            held_steps: None,
            levels,
            accelerator,
        };
        this.start_server()?;
        this.join("here", AGENT_PORT, "agent")?;
        this.start_agent()?;
        this.add_resources()?;
        Ok(this)
    }

    fn join(&self, host: &str, port: u16, state: &str) -> anyhow::Result<()> {
        self.join_as(host, port, state, &[])
    }

    fn join_as(&self, host: &str, port: u16, state: &str, more: &[&str]) -> anyhow::Result<()> {
        let token = self.path("join.token");
        std::fs::write(&token, self.vmseal(&["host", "token"])?)?;
        let state = self.path(state);
        let (url, address) = (self.url(), format!("{}:{port}", self.address));
        let join = [
            "agent",
            "join",
            "--to",
            &url,
            "--name",
            host,
            "--join-token-file",
            text(&token)?,
            "--address",
            &address,
            "--state-dir",
            text(&state)?,
        ];
        self.vmseal(&[&join[..], more].concat())?;
        Ok(())
    }

    /// Whether the disk of a VM that is off holds this text, so many MiB from its beginning, as `vmseal disk export` reads it:
    /// what takes seconds if a guest that starts for it has to say so.
    pub fn disk_has(&self, vm: &str, disk: &str, mib: u32, wanted: &str) -> anyhow::Result<bool> {
        let to = self.path("exported");
        let export = ["disk", "export", vm, disk, "--format", "raw", "--plaintext", "--to"];
        self.vmseal(&[&export[..], &[text(&to)?]].concat())?;
        let content = std::fs::read(&to)?;
        std::fs::remove_file(&to)?;
        Ok(content.get((mib as usize) << 20..).is_some_and(|it| it.starts_with(wanted.as_bytes())))
    }

    /// Another host on this machine, with an agent, sockets and user ids of its own; `run-HOST` below
    /// [`Installation::path`] is where its VMs run.
    pub fn add_host(&mut self, host: &str) -> anyhow::Result<()> {
        let number = u16::try_from(self.others.len())? + 1;
        self.join(host, AGENT_PORT + number, &format!("agent-{host}"))?;
        self.others.push(OtherHost { name: host.to_owned(), number, agent: None });
        self.start_agent_of(host)
    }

    /// Has agents that are started from now on receive VMs of other hosts at this address.
    pub fn receive_at(&mut self, address: impl Into<IpAddr>) {
        self.receives_at = address.into();
    }

    /// The address of server and agents.
    #[must_use]
    pub fn address(&self) -> Ipv4Addr {
        self.address
    }

    fn other(&mut self, host: &str) -> anyhow::Result<&mut OtherHost> {
        let found = self.others.iter_mut().find(|other| other.name == host);
        found.with_context(|| format!("no host '{host}' was added"))
    }

    /// Starts the agent of a host that was added, and waits until the server has it connected.
    pub fn start_agent_of(&mut self, host: &str) -> anyhow::Result<()> {
        let number = self.other(host)?.number;
        let (state, run) = (format!("agent-{host}"), format!("run-{host}"));
        let mut command = self.agent_command(&state, &run)?;
        command.args(["--uid-base", &(OTHER_UIDS + u32::from(number) * UIDS_EACH).to_string()]);
        let log = self.path(&format!("{state}.log"));
        let mut agent = Process::start(&mut command, &log)?;
        eventually(&format!("host {host} is connected"), || {
            let shown = self.json(&["host", "show", host]).ok()?;
            (shown["connection"] == "connected" || agent.ended()).then_some(())
        })?;
        ensure!(!agent.ended(), "the agent of {host} ended: {}", tail(&log));
        self.other(host)?.agent = Some(agent);
        Ok(())
    }

    /// Kills the agent of a host that was added as a power cut would, and waits until the server has noticed; guests and
    /// filters go on.
    pub fn kill_agent_of(&mut self, host: &str) -> anyhow::Result<()> {
        self.other(host)?.agent.take().into_iter().for_each(Process::kill);
        eventually(&format!("host {host} is disconnected"), || {
            let shown = self.json(&["host", "show", host]).ok()?;
            (shown["connection"] == "disconnected").then_some(())
        })
    }

    fn agent_command(&self, state: &str, run: &str) -> anyhow::Result<Command> {
        let program = program("vmseal")?;
        let mut command = match &self.boot {
            None => Command::new(program),
            Some(boot) => {
                let mut command = Command::new("unshare");
                command.args(["--mount", "sh", "-c", OF_ANOTHER_BOOT]).arg(boot).arg(program);
                command
            }
        };
        command
            .arg("agent")
            .arg("--state-dir")
            .arg(self.path(state))
            .arg("--run-dir")
            .arg(self.path(run))
            // What a host may read and write is tested elsewhere: guests' images are where they are built.
            .args(["--transfer-directory", "/"])
            .args(["--accelerator", self.accelerator])
            .args(["--migration-listen", &SocketAddr::new(self.receives_at, 0).to_string()])
            .env("RUST_LOG", self.levels);
        Ok(command)
    }

    fn add_resources(&self) -> anyhow::Result<()> {
        let store = self.path("datastore");
        std::fs::create_dir(&store)?;
        self.vmseal(&["datastore", "add", "local", "--host", "here", "--path", text(&store)?])?;
        let passphrase = self.path("passphrase");
        std::fs::write(&passphrase, PASSPHRASE)?;
        let given = ["--passphrase-file", text(&passphrase)?];
        let backup = self.path("keys.backup");
        self.vmseal(&[&["provider", "add", "keys"], &given[..]].concat())?;
        self.vmseal(
            &[&["provider", "backup", "keys", "--to", text(&backup)?], &given[..]].concat(),
        )?;
        self.vmseal(
            &[&["provider", "verify", "keys", "--from", text(&backup)?], &given[..]].concat(),
        )?;
        self.vmseal(&["provider", "default", "keys"])?;
        self.vmseal(&["policy", "create", "encrypted", "--encrypt"])?;
        self.vmseal(&["policy", "create", "plain", "--plain"])?;
        Ok(())
    }

    /// A path in the installation's directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The server's address.
    #[must_use]
    pub fn url(&self) -> String {
        format!("https://{}:{SERVER_PORT}", self.address)
    }

    /// A command that will talk to this server.
    pub fn command(&self) -> anyhow::Result<Command> {
        let mut command = Command::new(program("vmseal")?);
        command
            .env("VMSEAL_SERVER", self.url())
            .env("VMSEAL_CA", self.path("server/ca.pem"))
            .env("VMSEAL_TOKEN_FILE", self.path("server/admin.token"))
            .env("HOME", self.directory.path());
        Ok(command)
    }

    /// Runs a vmseal command, which may fail.
    pub fn try_vmseal(&self, arguments: &[&str]) -> anyhow::Result<Output> {
        Ok(self.command()?.args(arguments).output()?)
    }

    /// Runs a vmseal command that must succeed; gives what it prints.
    pub fn vmseal(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.try_vmseal(arguments)?;
        ensure!(
            output.status.success(),
            "`vmseal {}` failed: {}\nthe server's log ends:\n{}\nthe agent's log ends:\n{}",
            arguments.join(" "),
            String::from_utf8_lossy(&output.stderr),
            tail(&self.path("server.log")),
            tail(&self.path("agent.log")),
        );
        Ok(String::from_utf8(output.stdout)?)
    }

    /// Runs a vmseal command that must fail; gives what it says on standard error.
    pub fn refused(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let output = self.try_vmseal(arguments)?;
        if output.status.success() {
            bail!("`vmseal {}` succeeded and should not have", arguments.join(" "));
        }
        Ok(String::from_utf8(output.stderr)?)
    }

    /// Runs a command at a terminal of its own, at which somebody types this.
    pub fn answered(&self, arguments: &[&str], answer: &str) -> anyhow::Result<Output> {
        let (mut command, _terminal) = at_terminal(self.command()?.args(arguments), answer)?;
        Ok(command.output()?)
    }

    /// What a vmseal command prints as JSON.
    pub fn json(&self, arguments: &[&str]) -> anyhow::Result<Value> {
        let printed = self.vmseal(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&printed).with_context(|| format!("not JSON: {printed}"))
    }

    /// Starts the server, and waits until it answers.
    pub fn start_server(&mut self) -> anyhow::Result<()> {
        let mut command = Command::new(program("vmseal")?);
        command
            .arg("server")
            .arg("--data-dir")
            .arg(self.path("server"))
            .arg("--listen")
            .arg(format!("{}:{SERVER_PORT}", self.address))
            .arg("--name")
            .arg(self.address.to_string())
            .env("RUST_LOG", self.levels)
            .env("CREDENTIALS_DIRECTORY", self.credentials()?);
        if let Some(directory) = &self.held_steps {
            command.arg("--hold-steps").arg(directory);
        }
        let mut server = Process::start(&mut command, &self.path("server.log"))?;
        eventually("the server answers", || {
            let answered = self.try_vmseal(&["host", "list"]).is_ok_and(|o| o.status.success());
            (answered || server.ended()).then_some(())
        })?;
        ensure!(!server.ended(), "the server ended: {}", tail(&self.path("server.log")));
        self.server = Some(server);
        Ok(())
    }

    /// A credentials directory as systemd makes it, with the provider's passphrase: a server that
    /// restarts unlocks its provider by itself.
    fn credentials(&self) -> anyhow::Result<PathBuf> {
        let directory = self.path("credentials");
        std::fs::create_dir_all(&directory)?;
        std::fs::set_permissions(&directory, Permissions::from_mode(0o700))?;
        let file = directory.join("vmseal-provider-keys");
        let _ = std::fs::remove_file(&file);
        if !self.unlocks {
            return Ok(directory);
        }
        std::fs::write(&file, PASSPHRASE)?;
        std::fs::set_permissions(&file, Permissions::from_mode(0o400))?;
        Ok(directory)
    }

    /// Starts the server again; it holds each step of a task, before and after it is done, until a file named after the task is
    /// removed from the directory that is returned ([`crate::held_steps`]).
    pub fn hold_steps(&mut self) -> anyhow::Result<PathBuf> {
        let directory = self.path("held-steps");
        std::fs::create_dir(&directory)?;
        self.held_steps = Some(directory.clone());
        self.kill_server();
        self.start_server()?;
        Ok(directory)
    }

    /// From its next start the server is not given the provider's passphrase: its provider stays sealed.
    pub fn withhold_passphrase(&mut self) {
        self.unlocks = false;
    }

    /// Starts the agent, and waits until the server has it connected.
    pub fn start_agent(&mut self) -> anyhow::Result<()> {
        self.start_agent_with(&[])
    }

    /// The same, with more options.
    pub fn start_agent_with(&mut self, more: &[&str]) -> anyhow::Result<()> {
        let mut command = self.agent_command("agent", "run")?;
        command.args(more);
        self.start_agent_by(&mut command)
    }

    /// The same by a user who is not root ([`as_user`]); whether there can be one. No VM runs that another agent has started.
    pub fn start_agent_as_user(&mut self) -> anyhow::Result<bool> {
        let Some(mut command) = as_user(&self.agent_command("agent", "run")?) else {
            return Ok(false);
        };
        self.start_agent_by(&mut command)?;
        Ok(true)
    }

    fn start_agent_by(&mut self, command: &mut Command) -> anyhow::Result<()> {
        let mut agent = Process::start(command, &self.path("agent.log"))?;
        self.wait_connected(&mut agent)?;
        self.agent = Some(agent);
        Ok(())
    }

    fn wait_connected(&self, agent: &mut Process) -> anyhow::Result<()> {
        eventually("the host is connected", || {
            let host = self.json(&["host", "show", "here"]).ok()?;
            let connected = host["connection"] == "connected";
            (connected || agent.ended()).then_some(())
        })?;
        ensure!(!agent.ended(), "the agent ended: {}", tail(&self.path("agent.log")));
        Ok(())
    }

    /// Kills the server as a power cut would.
    pub fn kill_server(&mut self) {
        self.server.take().into_iter().for_each(Process::kill);
    }

    /// Loses the server for good: its process and its directory.
    pub fn lose_server(&mut self) -> anyhow::Result<()> {
        self.kill_server();
        Ok(std::fs::remove_dir_all(self.path("server"))?)
    }

    /// Has the host join this server in place of the one that it had joined. Its guests run on.
    pub fn join_again(&mut self) -> anyhow::Result<()> {
        self.kill_agent();
        self.join_as("here", AGENT_PORT, "agent", &["--replace"])?;
        self.start_agent()
    }

    /// Kills the agent as a power cut would; guests and filters go on.
    pub fn kill_agent(&mut self) {
        self.agent.take().into_iter().for_each(Process::kill);
    }

    /// Waits until server and agent have ended of themselves, and tells how.
    pub fn wait_for_ends(&mut self) -> anyhow::Result<Vec<ExitStatus>> {
        self.server.take().into_iter().chain(self.agent.take()).map(Process::wait).collect()
    }

    /// The process id of the server, if it runs.
    #[must_use]
    pub fn server_process(&self) -> Option<i32> {
        self.server.as_ref().map(Process::id)
    }

    /// The process id of the agent of a host, if it runs.
    #[must_use]
    pub fn agent_process(&self, host: &str) -> Option<i32> {
        let other = self.others.iter().find(|other| other.name == host);
        other.map_or(&self.agent, |other| &other.agent).as_ref().map(Process::id)
    }

    /// The machine of the first host reboots: all that ran for guests has ended, and its agent finds another boot. It needs root.
    pub fn reboot_host(&mut self) -> anyhow::Result<()> {
        self.kill_agent();
        self.all_guest_processes().into_iter().for_each(kill_hard);
        let boot = self.path("boot-id");
        std::fs::write(&boot, format!("{}\n", uuid::Uuid::new_v4()))?;
        self.boot = Some(boot);
        self.start_agent()
    }

    /// Process ids of server and agents, as far as they run.
    #[must_use]
    pub fn own_processes(&self) -> Vec<i32> {
        let others = self.others.iter().filter_map(|other| other.agent.as_ref());
        self.server.iter().chain(&self.agent).chain(others).map(Process::id).collect()
    }

    /// Process ids of a VM whose program is `name` (`vmseal-filter`, `qemu-system-x86_64`).
    #[must_use]
    pub fn guest_processes(&self, name: &str) -> Vec<i32> {
        self.processes_below(&self.path("run"), name)
    }

    /// The same on a host that was added.
    #[must_use]
    pub fn guest_processes_on(&self, host: &str, name: &str) -> Vec<i32> {
        self.processes_below(&self.path(&format!("run-{host}")), name)
    }

    fn processes_below(&self, directory: &Path, name: &str) -> Vec<i32> {
        let mut found = using(directory);
        found.retain(|pid| {
            let ours = self.own_processes().contains(pid);
            let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
            !ours && exe.is_ok_and(|exe| exe.file_name().is_some_and(|file| file == name))
        });
        found
    }

    /// Process ids of everything that runs for guests, whatever program it is.
    #[must_use]
    pub fn all_guest_processes(&self) -> Vec<i32> {
        let own = self.own_processes();
        using(&self.path("run")).into_iter().filter(|pid| !own.contains(pid)).collect()
    }

    /// Process ids of one VM whose program is `name`.
    pub fn processes_of(&self, vm: &str, name: &str) -> anyhow::Result<Vec<i32>> {
        let shown = self.vm(vm)?;
        let directory = self.path("run/vms").join(shown["id"].as_str().context("no id")?);
        Ok(self.processes_below(&directory, name))
    }

    /// The raw disk of the counting guest.
    pub fn counter_image(&self) -> anyhow::Result<PathBuf> {
        let image = self.path("counter.raw");
        if !image.exists() {
            counter_disk(&image, DISK_SIZE)?;
        }
        Ok(image)
    }

    /// Makes a VM whose only disk holds the counting guest.
    pub fn create_counter(&self, vm: &str, policy: &str) -> anyhow::Result<()> {
        let disk = format!("datastore=local,format=raw,image={}", text(&self.counter_image()?)?);
        self.vmseal(&create(vm, policy, &disk))?;
        Ok(())
    }

    /// Boots the counting guest; gives its number.
    pub fn boot_counter(&self, vm: &str) -> anyhow::Result<u32> {
        self.vmseal(&["vm", "start", vm])?;
        self.console(vm)?.next_count()
    }

    /// The alarms about a VM and its disks, or another resource.
    pub fn alarms(&self, target: &str) -> anyhow::Result<Vec<Value>> {
        let mut alarms = self.json(&["alarms"])?;
        let alarms = alarms.as_array_mut().context("no list")?;
        let about = |alarm: &Value| {
            let of = alarm["target"].as_str().unwrap_or_default();
            of == target || of.strip_prefix(target).is_some_and(|disk| disk.starts_with('/'))
        };
        Ok(alarms.drain(..).filter(about).collect())
    }

    /// Whether the host says that it has a weakness of this kind.
    pub fn weakness(&self, text: &str) -> anyhow::Result<bool> {
        let host = self.json(&["host", "show", "here"])?;
        let all = host["description"]["weaknesses"].as_array().context("no weaknesses")?;
        Ok(all.iter().any(|weakness| weakness.as_str().is_some_and(|said| said.contains(text))))
    }

    /// Waits for an alarm of this kind about a VM or another resource; gives its detail.
    pub fn wait_alarm(&self, target: &str, code: &str) -> anyhow::Result<String> {
        eventually(&format!("an alarm {code} about {target}"), || {
            let alarms = self.alarms(target).ok()?;
            let alarm = alarms.iter().find(|alarm| alarm["code"] == code)?;
            alarm["detail"].as_str().map(str::to_owned)
        })
    }

    /// Waits until there is no alarm of this kind about it.
    pub fn wait_no_alarm(&self, target: &str, code: &str) -> anyhow::Result<()> {
        eventually(&format!("no alarm {code} about {target}"), || {
            let alarms = self.alarms(target).ok()?;
            (!alarms.iter().any(|alarm| alarm["code"] == code)).then_some(())
        })
    }

    /// Waits until the server has heard from every host: one that has just begun may end a task before that, and does not know then
    /// what VMs do.
    pub fn wait_hosts(&self) -> anyhow::Result<()> {
        eventually("all hosts are connected", || {
            let hosts = self.json(&["host", "list"]).ok()?;
            let is_connected = |host: &Value| host["connection"] == "connected";
            hosts.as_array()?.iter().all(is_connected).then_some(())
        })
    }

    /// The same, and until the server works on nothing.
    pub fn wait_rest(&self) -> anyhow::Result<()> {
        self.wait_hosts()?;
        eventually("all tasks have ended", || {
            let tasks = self.json(&["task", "list"]).ok()?;
            tasks.as_array()?.iter().all(|task| !task["ended"].is_null()).then_some(())
        })
    }

    /// Waits until the server has the host connected.
    pub fn wait_host(&mut self) -> anyhow::Result<()> {
        let mut agent = self.agent.take().context("no agent runs")?;
        let connected = self.wait_connected(&mut agent);
        self.agent = Some(agent);
        connected
    }

    /// The files in a datastore besides its mark, at any depth.
    pub fn datastore_entries(&self, directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let (mut found, mut todo) = (Vec::new(), vec![directory.to_owned()]);
        while let Some(directory) = todo.pop() {
            for entry in std::fs::read_dir(&directory)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    todo.push(entry.path());
                }
                if entry.file_name() != DATASTORE_MARK {
                    found.push(entry.path());
                }
            }
        }
        Ok(found)
    }

    /// A VM's serial console, even if the server has not noticed the end of an earlier one.
    pub fn console(&self, vm: &str) -> anyhow::Result<Console> {
        Console::open(self.command()?.args(["vm", "console", vm, "--force"]))
    }

    /// `vm vnc` of a VM, and the address at which it shows the screen.
    ///
    /// # Errors
    /// It does not start, or says nothing.
    pub fn screen(&self, vm: &str) -> anyhow::Result<(Child, String)> {
        let mut command = self.command()?;
        let mut shown = command.args(["vm", "vnc", vm]).stdout(Stdio::piped()).spawn()?;
        let mut address = String::new();
        let said = shown.stdout.take().context("its output is a pipe")?;
        BufReader::new(said).read_line(&mut address)?;
        Ok((shown, address.trim().to_owned()))
    }

    /// A VM as `vm show` has it.
    pub fn vm(&self, vm: &str) -> anyhow::Result<Value> {
        self.json(&["vm", "show", vm])
    }

    /// The directory of a VM where its first disk is: in the datastore `local`, or in one at [`Self::path`] of its name.
    pub fn home(&self, vm: &str) -> anyhow::Result<PathBuf> {
        let shown = self.vm(vm)?;
        let place = match shown["disks"][0]["datastore"].as_str().context("it has no disk")? {
            "local" => self.path("datastore"),
            other => self.path(other),
        };
        Ok(place.join(shown["id"].as_str().context("it has no id")?))
    }

    /// What is in the directory of a VM where its first disk is.
    pub fn home_files(&self, vm: &str) -> anyhow::Result<Vec<PathBuf>> {
        std::fs::read_dir(self.home(vm)?)?.map(|entry| Ok(entry?.path())).collect()
    }

    /// Waits until a VM's `power` has this value.
    pub fn wait_power(&self, vm: &str, power: &str) -> anyhow::Result<Value> {
        eventually(&format!("{vm} is {power}"), || {
            self.vm(vm).ok().filter(|shown| shown["power"] == power)
        })
    }

    /// Waits until a VM is made and no task works on anything: one that has made a VM refuses others for a while longer.
    pub fn wait_made(&self, vm: &str) -> anyhow::Result<Value> {
        eventually(&format!("{vm} is made, and no task runs"), || {
            let tasks = self.json(&["task", "list"]).ok()?;
            let ended = tasks.as_array()?.iter().all(|task| !task["ended"].is_null());
            let made = self.vm(vm).ok().filter(|vm| vm["lifecycle"] == "ready");
            made.filter(|_| ended)
        })
    }

    /// The files of a VM's disks on the datastore.
    pub fn images(&self, vm: &str) -> anyhow::Result<Vec<PathBuf>> {
        let shown = self.vm(vm)?;
        let directory = self.path("datastore").join(shown["id"].as_str().context("no id")?);
        let disks = shown["disks"].as_array().context("no disks")?;
        disks
            .iter()
            .map(
                |disk| Ok(directory.join(format!("{}.raw", disk["id"].as_str().context("no id")?))),
            )
            .collect()
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the server's log ends:\n{}", tail(&self.path("server.log")));
            let entries = std::fs::read_dir(self.directory.path()).into_iter().flatten().flatten();
            for log in entries.filter(|it| is_log_of_agent(&it.file_name().to_string_lossy())) {
                let name = log.file_name();
                eprintln!("{} ends:\n{}", name.to_string_lossy(), tail(&log.path()));
            }
        }
        self.kill_agent();
        self.others.drain(..).filter_map(|other| other.agent).for_each(Process::kill);
        self.kill_server();
        // The directories of sockets, of every host.
        let entries = std::fs::read_dir(self.directory.path()).into_iter().flatten().flatten();
        for run in entries.filter(|it| it.file_name().to_string_lossy().starts_with("run")) {
            using(&run.path()).into_iter().for_each(kill_hard);
        }
    }
}

/// The command that makes a small VM with one disk.
#[must_use]
pub fn create<'a>(vm: &'a str, policy: &'a str, disk: &'a str) -> [&'a str; 9] {
    ["vm", "create", vm, "--policy", policy, "--memory", "32MiB", "--disk", disk]
}

/// A path as text; the tests' own are.
pub fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().context("a path that is not UTF-8")
}

fn is_log_of_agent(name: &str) -> bool {
    name.starts_with("agent") && name.ends_with(".log")
}

/// The end of a log.
fn tail(log: &Path) -> String {
    let content = std::fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = content.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}
