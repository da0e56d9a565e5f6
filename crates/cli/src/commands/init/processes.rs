//! Server and agent: as systemd's services, or as children in the foreground.

use std::collections::VecDeque;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid, User};
use tokio::signal::unix::{SignalKind, signal};
use vmseal_api::atomic_file::{self, PUBLIC};

use super::super::processes::beside_this_program;
use super::{PROVIDER, keys};
use crate::arguments;
use crate::exit::{Ended, Exit};
use crate::print;

/// systemd runs where this is, as sd_booted(3) has it.
const BOOTED: &str = "/run/systemd/system";

/// Where units are that this machine's administrator, programs built here, and packages have.
const UNIT_DIRECTORIES: [&str; 4] = [
    "/etc/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// The file that has the server's user, as systemd-sysusers finds it in the directories beside those of the units.
const SYSUSERS: &str = "vmseal.conf";

const SERVER_UNIT: &str = "vmseal-server.service";
const AGENT_UNIT: &str = "vmseal-agent.service";

/// How long a child may take to end once it is told to.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// How often children are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How often a child that ends is started again within so long. One that ends more often does not come to run, and what is wrong
/// is in its log. The start of one that fails may take some seconds.
const RESTARTS_MAX: usize = 5;
const RESTARTS_WITHIN: Duration = Duration::from_secs(60);

/// How much of a log's end is shown, in bytes.
const TAIL: usize = 2000;

/// Who runs server and agent.
pub(super) enum Processes {
    Units(Units),
    Children(Children),
}

/// systemd's services.
pub(super) struct Units {
    /// Where settings of the machine's own are.
    etc: PathBuf,
    systemctl: PathBuf,
    listen: String,
    name: String,
    kept: PathBuf,
}

/// Children of this process, which end when it does.
pub(super) struct Children {
    start: Start,
    server: Role,
    agent: Role,
}

/// How children are started.
struct Start {
    program: PathBuf,
    credentials: PathBuf,
    log_dir: PathBuf,
}

/// Server or agent.
struct Role {
    name: &'static str,
    arguments: Vec<String>,
    child: Option<Child>,
    /// When it was started again, as far as that counts.
    restarts: VecDeque<Instant>,
}

impl Processes {
    /// Units where systemd runs, unless the foreground is wanted.
    pub(super) fn of_this_machine(options: &arguments::Init) -> anyhow::Result<Self> {
        if options.foreground || !Path::new(BOOTED).exists() {
            return Ok(Self::Children(Children::new(options)?));
        }
        refuse_places(options)?;
        for unit in [SERVER_UNIT, AGENT_UNIT] {
            let mut files = UNIT_DIRECTORIES.iter().map(|it| Path::new(it).join(unit));
            let Some(file) = files.find(|file| file.exists()) else {
                let message = format!(
                    "there is no unit {unit}: install vmseal with its units (the package, or make install), or give --foreground"
                );
                return Err(Ended::new(Exit::Failed, message).into());
            };
            require_user(unit, &file)?;
        }
        Ok(Self::Units(Units {
            etc: PathBuf::from(UNIT_DIRECTORIES[0]),
            systemctl: PathBuf::from("systemctl"),
            listen: options.listen.to_string(),
            name: options.listen.ip().to_string(),
            kept: keys::kept_in(&options.places.config_dir),
        }))
    }

    pub(super) fn are_children(&self) -> bool {
        matches!(self, Self::Children(_))
    }

    /// How they are run, for people.
    pub(super) fn how(&self) -> &'static str {
        match self {
            Self::Units(_) => "as a service",
            Self::Children(_) => "in the foreground",
        }
    }

    pub(super) fn where_logs_are(&self) -> String {
        match self {
            Self::Units(_) => format!("see journalctl -u {SERVER_UNIT} -u {AGENT_UNIT}"),
            Self::Children(children) => {
                format!("see the logs in {}", children.start.log_dir.display())
            }
        }
    }

    /// What has to be done about the server, beside that it runs.
    pub(super) fn server_to_do(&self) -> anyhow::Result<Option<String>> {
        match self {
            Self::Units(units) => units.to_do(SERVER_UNIT),
            Self::Children(_) => Ok(None),
        }
    }

    /// The same of the agent.
    pub(super) fn agent_to_do(&self) -> anyhow::Result<Option<String>> {
        match self {
            Self::Units(units) => units.to_do(AGENT_UNIT),
            Self::Children(_) => Ok(None),
        }
    }

    pub(super) async fn start_server(&mut self, runs: bool) -> anyhow::Result<()> {
        match self {
            Self::Units(units) => {
                units.settle()?;
                units.start(SERVER_UNIT, runs).await
            }
            Self::Children(_) if runs => Ok(()),
            Self::Children(children) => {
                children.server.child = Some(children.start.spawn(&children.server)?);
                Ok(())
            }
        }
    }

    pub(super) async fn start_agent(&mut self, runs: bool) -> anyhow::Result<()> {
        match self {
            Self::Units(units) => units.start(AGENT_UNIT, runs).await,
            Self::Children(_) if runs => Ok(()),
            Self::Children(children) => {
                children.agent.child = Some(children.start.spawn(&children.agent)?);
                Ok(())
            }
        }
    }

    /// Makes the units' settings what they are to be.
    pub(super) fn settle(&self) -> anyhow::Result<()> {
        match self {
            Self::Units(units) => units.settle(),
            Self::Children(_) => Ok(()),
        }
    }

    /// Fails if the server was started here and has ended.
    pub(super) fn check_server(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Units(units) => units.check(SERVER_UNIT),
            Self::Children(children) => children.server.check(&children.start),
        }
    }

    /// The same of the agent.
    pub(super) fn check_agent(&mut self) -> anyhow::Result<()> {
        match self {
            Self::Units(units) => units.check(AGENT_UNIT),
            Self::Children(children) => children.agent.check(&children.start),
        }
    }

    /// Ends what was started here: the agent first, whose last words the server takes. Services go on.
    pub(super) async fn stop(&mut self) {
        let Self::Children(children) = self else { return };
        for role in [&mut children.agent, &mut children.server] {
            let Some(mut child) = role.child.take() else { continue };
            let _ = kill(Pid::from_raw(child.id().cast_signed()), Signal::SIGTERM);
            let begun = tokio::time::Instant::now();
            while matches!(child.try_wait(), Ok(None)) {
                if begun.elapsed() > END_TIMEOUT {
                    let _ = child.kill();
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
    }

    /// Stays with what runs in the foreground until somebody ends it. What ends by itself is started again.
    pub(super) async fn stay(mut self) -> anyhow::Result<()> {
        let Self::Children(children) = &mut self else { return Ok(()) };
        if children.server.child.is_none() && children.agent.child.is_none() {
            return Ok(());
        }
        let (mut terminate, mut interrupt) =
            (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
        print::words(&format!(
            "Server and agent run here until Ctrl-C (their logs: {}): go on in another terminal. Guests go on running after that, and `vmseal init` takes them up again.",
            children.start.log_dir.display()
        ))?;
        let ended = loop {
            tokio::select! {
                _ = terminate.recv() => break Ok(()),
                _ = interrupt.recv() => break Ok(()),
                () = tokio::time::sleep(LOOK_EVERY) => {}
            }
            let run = children.server.keep_running(&children.start);
            let run = run.and_then(|()| children.agent.keep_running(&children.start));
            if run.is_err() {
                break run;
            }
        };
        self.stop().await;
        ended
    }
}

/// Units have places of their own.
fn refuse_places(options: &arguments::Init) -> anyhow::Result<()> {
    use clap::Args;
    let command = arguments::Places::augment_args(clap::Command::new("init"));
    let usual = command.try_get_matches_from(["init"])?;
    let usual: arguments::Places = clap::FromArgMatches::from_arg_matches(&usual)?;
    let given = &options.places;
    let same = usual.data_dir == given.data_dir
        && usual.state_dir == given.state_dir
        && usual.run_dir == given.run_dir
        && usual.config_dir == given.config_dir
        && usual.log_dir == given.log_dir
        && usual.accelerator == given.accelerator
        && usual.qemu == given.qemu
        && usual.filter == given.filter;
    if same {
        return Ok(());
    }
    let message = "the options under 'Without systemd' need --foreground: units have places and programs of their own (systemctl edit vmseal-agent)";
    Err(Ended::new(Exit::Usage, message).into())
}

/// Refuses a unit that runs as a user that does not exist: it would be set up and enabled, and its start would fail.
fn require_user(unit: &str, file: &Path) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(file);
    let text = text.with_context(|| format!("cannot read {}", file.display()))?;
    let Some(user) = user_of(&text) else { return Ok(()) };
    let found = match user.parse::<u32>() {
        Ok(id) => User::from_uid(Uid::from_raw(id)),
        Err(_) => User::from_name(user),
    };
    let found = found.with_context(|| format!("cannot look up the user '{user}' of {unit}"))?;
    if found.is_some() {
        return Ok(());
    }
    let message = format!(
        "{unit} runs as the user '{user}', which does not exist: make it (as root: systemd-sysusers {SYSUSERS}) and give this command again, or give --foreground"
    );
    Err(Ended::new(Exit::Failed, message).into())
}

/// The user that a unit's file names; none where it names none, and the unit runs as root. Drop-ins are not read: whatever they say, the
/// server's unit gives its directory to the user that its own file names.
fn user_of(unit: &str) -> Option<&str> {
    let named = unit.lines().rev().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == "User").then_some(value.trim())
    });
    // An empty one takes back those before it.
    named.filter(|user| !user.is_empty())
}

impl Units {
    fn drop_in(&self) -> PathBuf {
        self.etc.join(format!("{SERVER_UNIT}.d")).join("init.conf")
    }

    /// What the server's unit is to have beyond its own settings.
    fn settings(&self) -> String {
        let mut text = "# Written by vmseal init; `systemctl edit vmseal-server` makes settings of your own.\n[Service]\n".to_owned();
        text += &format!("Environment=VMSEAL_LISTEN={} VMSEAL_NAME={}\n", self.listen, self.name);
        if self.kept.exists() {
            text += &format!("LoadCredential=vmseal-provider-{PROVIDER}:{}\n", self.kept.display());
        }
        text
    }

    fn has_settings(&self) -> bool {
        std::fs::read_to_string(self.drop_in()).is_ok_and(|text| text == self.settings())
    }

    fn settle(&self) -> anyhow::Result<()> {
        if self.has_settings() {
            return Ok(());
        }
        let file = self.drop_in();
        let directory = file.parent().context("a drop-in is in a directory")?;
        std::fs::create_dir_all(directory)
            .and_then(|()| atomic_file::write(&file, self.settings().as_bytes(), PUBLIC))
            .with_context(|| format!("cannot write {}", file.display()))?;
        self.call(&["daemon-reload"])
    }

    fn to_do(&self, unit: &str) -> anyhow::Result<Option<String>> {
        if unit == SERVER_UNIT && !self.has_settings() {
            return Ok(Some(format!(
                "set it up in {}, enable it, and start it",
                self.drop_in().display()
            )));
        }
        let mut asked = Command::new(&self.systemctl);
        asked.args(["is-enabled", "--quiet", unit]).stdin(Stdio::null()).stderr(Stdio::null());
        let enabled = asked.status().context("systemctl cannot be run")?;
        Ok((!enabled.success()).then(|| format!("enable {unit}, and start it")))
    }

    /// Has a unit start with the machine, and now.
    async fn start(&self, unit: &str, runs: bool) -> anyhow::Result<()> {
        self.call(&["enable", unit])?;
        if runs {
            return Ok(());
        }
        // One that failed too often would not be started again.
        let _ = self.call(&["reset-failed", unit]);
        self.call(&["restart", unit])
    }

    fn check(&self, unit: &str) -> anyhow::Result<()> {
        let mut asked = Command::new(&self.systemctl);
        asked.args(["is-failed", "--quiet", unit]).stdin(Stdio::null()).stderr(Stdio::null());
        let failed = asked.status().context("systemctl cannot be run")?.success();
        ensure!(!failed, "{unit} has failed: see journalctl -u {unit}");
        Ok(())
    }

    fn call(&self, arguments: &[&str]) -> anyhow::Result<()> {
        let called = Command::new(&self.systemctl).args(arguments).stdin(Stdio::null()).output();
        let called = called.context("systemctl cannot be run")?;
        ensure!(
            called.status.success(),
            "systemctl {} failed: {}",
            arguments.join(" "),
            String::from_utf8_lossy(&called.stderr).trim()
        );
        Ok(())
    }
}

impl Children {
    fn new(options: &arguments::Init) -> anyhow::Result<Self> {
        let places = &options.places;
        let own = std::process::id().to_string();
        let text = |path: &Path| -> anyhow::Result<String> {
            Ok(path
                .to_str()
                .with_context(|| format!("{} is not UTF-8", path.display()))?
                .to_owned())
        };
        let server_arguments = vec![
            "server".to_owned(),
            format!("--data-dir={}", text(&places.data_dir)?),
            format!("--listen={}", options.listen),
            format!("--name={}", options.listen.ip()),
            format!("--parent={own}"),
        ];
        let filter = match &places.filter {
            Some(filter) => filter.clone(),
            None => beside_this_program("vmseal-filter")?,
        };
        let accelerator = clap::ValueEnum::to_possible_value(&places.accelerator);
        let accelerator = accelerator.context("an accelerator has a name")?;
        let agent_arguments = vec![
            "agent".to_owned(),
            format!("--state-dir={}", text(&places.state_dir)?),
            format!("--run-dir={}", text(&places.run_dir)?),
            format!("--accelerator={}", accelerator.get_name()),
            format!("--qemu={}", text(&places.qemu)?),
            format!("--filter={}", text(&filter)?),
            format!("--parent={own}"),
        ];
        let start = Start {
            program: std::env::current_exe().context("where is this program?")?,
            credentials: keys::credentials_in(&places.config_dir),
            log_dir: places.log_dir.clone(),
        };
        let server = Role::new("server", server_arguments);
        Ok(Self { start, server, agent: Role::new("agent", agent_arguments) })
    }
}

impl Start {
    fn log(&self, role: &Role) -> PathBuf {
        self.log_dir.join(format!("{}.log", role.name))
    }

    fn spawn(&self, role: &Role) -> anyhow::Result<Child> {
        let log = self.log(role);
        let output = std::fs::File::options().create(true).append(true).open(&log);
        let output = output.with_context(|| format!("cannot write {}", log.display()))?;
        Command::new(&self.program)
            .args(&role.arguments)
            .env("CREDENTIALS_DIRECTORY", &self.credentials)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            // A Ctrl-C at the terminal is for this process, which ends them in order.
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start the {}", role.name))
    }
}

impl Role {
    fn new(name: &'static str, arguments: Vec<String>) -> Self {
        Self { name, arguments, child: None, restarts: VecDeque::new() }
    }

    /// How it has ended, if it was started here and has.
    fn has_ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        let Some(running) = &mut self.child else { return Ok(None) };
        let ended = running.try_wait()?;
        if ended.is_some() {
            self.child = None;
        }
        Ok(ended)
    }

    /// Fails if it was started here and has ended.
    fn check(&mut self, start: &Start) -> anyhow::Result<()> {
        match self.has_ended()? {
            Some(status) => Err(self.told(start, status)),
            None => Ok(()),
        }
    }

    /// Starts it again if it was started here and has ended, in whatever way.
    fn keep_running(&mut self, start: &Start) -> anyhow::Result<()> {
        let Some(status) = self.has_ended()? else { return Ok(()) };
        if !self.may_restart(Instant::now()) {
            let seconds = RESTARTS_WITHIN.as_secs();
            let often = format!(
                "the {} was started again {RESTARTS_MAX} times within {seconds} seconds",
                self.name
            );
            return Err(self.told(start, status).context(often));
        }
        self.child = Some(start.spawn(self)?);
        let log = start.log(self);
        print::words(&format!(
            "The {} has ended ({status}) and is started again; its log is {}.",
            self.name,
            log.display()
        ))
    }

    /// Whether it may be started again now, which counts from then on.
    fn may_restart(&mut self, now: Instant) -> bool {
        self.restarts.retain(|then| now.duration_since(*then) < RESTARTS_WITHIN);
        let may = self.restarts.len() < RESTARTS_MAX;
        if may {
            self.restarts.push_back(now);
        }
        may
    }

    /// That it has ended, and how its log ends.
    fn told(&self, start: &Start, status: ExitStatus) -> anyhow::Error {
        let log = start.log(self);
        let text = std::fs::read(&log).unwrap_or_default();
        let tail = String::from_utf8_lossy(&text[text.len().saturating_sub(TAIL)..]).into_owned();
        anyhow::anyhow!(
            "the {} has ended ({status}); its log, {}, ends:\n{}",
            self.name,
            log.display(),
            tail.trim_end()
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A systemd that writes down what it is told, and knows what is enabled.
    fn systemd(directory: &Path) -> Units {
        let systemctl = directory.join("systemctl");
        let script = format!(
            "#!/bin/sh\ncd {}\ncase $1 in is-enabled) test -e enabled-$3; exit;; enable) touch enabled-$2;; esac\necho \"$*\" >> calls\n",
            directory.display()
        );
        std::fs::write(&systemctl, script).unwrap();
        std::fs::set_permissions(&systemctl, PermissionsExt::from_mode(0o700)).unwrap();
        Units {
            etc: directory.join("etc"),
            systemctl,
            listen: "192.0.2.1:8443".to_owned(),
            name: "192.0.2.1".to_owned(),
            kept: directory.join("kept"),
        }
    }

    #[tokio::test]
    async fn units_are_set_up_once_and_again_when_the_passphrase_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let units = systemd(directory.path());
        let mut processes = Processes::Units(units);
        assert!(processes.server_to_do().unwrap().is_some());
        processes.start_server(false).await.unwrap();
        assert_eq!(processes.server_to_do().unwrap(), None);
        assert!(processes.agent_to_do().unwrap().is_some());
        processes.start_agent(false).await.unwrap();
        assert_eq!(processes.agent_to_do().unwrap(), None);
        let calls = || std::fs::read_to_string(directory.path().join("calls")).unwrap();
        assert_eq!(
            calls(),
            "daemon-reload\nenable vmseal-server.service\nreset-failed vmseal-server.service\n\
             restart vmseal-server.service\nenable vmseal-agent.service\n\
             reset-failed vmseal-agent.service\nrestart vmseal-agent.service\n"
        );
        // A file that the unit names has to be there when it starts.
        let file = directory.path().join("etc/vmseal-server.service.d/init.conf");
        let settings = || std::fs::read_to_string(&file).unwrap();
        assert!(settings().contains("VMSEAL_LISTEN=192.0.2.1:8443"), "{}", settings());
        assert!(!settings().contains("LoadCredential"));
        std::fs::write(directory.path().join("kept"), "").unwrap();
        assert!(processes.server_to_do().unwrap().is_some());
        processes.settle().unwrap();
        let kept = directory.path().join("kept").display().to_string();
        assert!(settings().contains(&format!("LoadCredential=vmseal-provider-keys:{kept}\n")));
        // What runs is not restarted for it.
        let told = calls().lines().count();
        processes.settle().unwrap();
        processes.start_server(true).await.unwrap();
        assert_eq!(
            calls().lines().skip(told).collect::<Vec<_>>(),
            ["enable vmseal-server.service"]
        );
    }

    #[test]
    fn a_unit_whose_user_is_missing_is_refused_with_what_makes_the_user() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join(SERVER_UNIT);
        let refused = |settings: &str| {
            std::fs::write(&file, format!("[Service]\n{settings}\nRestart=on-failure\n")).unwrap();
            let refused = require_user(SERVER_UNIT, &file).err();
            refused.map(|error| (error.to_string(), Exit::of(&error)))
        };
        for settings in
            ["", "#User=no-such-user", "User=root", "User=0", "User=no-such-user\nUser="]
        {
            assert_eq!(refused(settings), None, "{settings}");
        }
        for settings in ["User=no-such-user", "User = no-such-user", "User=root\nUser=no-such-user"]
        {
            let (said, exit) = refused(settings).unwrap();
            assert_eq!(exit, Exit::Failed, "{said}");
            for told in
                [SERVER_UNIT, "'no-such-user'", "systemd-sysusers vmseal.conf", "--foreground"]
            {
                assert!(said.contains(told), "{said}");
            }
        }
        std::fs::remove_file(&file).unwrap();
        let error = require_user(SERVER_UNIT, &file).unwrap_err();
        assert!(error.to_string().contains(&file.display().to_string()), "{error}");
    }

    #[test]
    fn the_user_of_the_servers_unit_is_the_one_that_sysusers_makes() {
        let shipped = |name: &str| {
            let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../systemd");
            std::fs::read_to_string(directory.join(name)).unwrap()
        };
        let unit = shipped(SERVER_UNIT);
        let made = format!("u {} ", user_of(&unit).unwrap());
        assert!(shipped("vmseal.sysusers").lines().any(|line| line.starts_with(&made)), "{made}");
        assert_eq!(user_of(&shipped(AGENT_UNIT)), None);
    }

    /// A program that ends at once, and writes down that it ran.
    #[tokio::test]
    async fn what_ends_is_started_again_and_what_ends_again_and_again_is_given_up() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("vmseal");
        std::fs::write(&program, "#!/bin/sh\necho $1 runs; exit 3\n").unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).unwrap();
        let at = || directory.path().to_owned();
        let start = Start { program, credentials: at(), log_dir: at() };
        let mut role = Role::new("agent", vec!["agent".to_owned()]);
        role.keep_running(&start).unwrap();
        assert!(role.child.is_none(), "what was not started here was started");
        role.child = Some(start.spawn(&role).unwrap());
        let error = loop {
            role.child.as_mut().unwrap().wait().unwrap();
            if let Err(error) = role.keep_running(&start) {
                break format!("{error:#}");
            }
        };
        let runs = std::fs::read_to_string(directory.path().join("agent.log")).unwrap();
        assert_eq!(runs.lines().count(), 1 + RESTARTS_MAX);
        assert!(error.contains("5 times") && error.contains("agent runs"), "{error}");
        // Those of a while ago do not count.
        assert!(!role.may_restart(Instant::now()));
        assert!(role.may_restart(Instant::now() + RESTARTS_WITHIN));
    }
}
