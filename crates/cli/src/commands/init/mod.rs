//! `vmseal init`: one machine from nothing to encrypted VMs, step by step.
//!
//! | module | what |
//! |---|---|
//! | [`machine`] | what has to be right with this machine and the options before anything is changed |
//! | [`processes`] | server and agent: as systemd's services, or as children in the foreground |
//! | [`server`] | the server, and the login at it |
//! | [`host`] | this machine as a host: joined, connected, with a datastore |
//! | [`keys`] | the passphrase, the key provider, its backup |
//!
//! [`Init`] owns the steps. Each is first looked at, which changes nothing, and then carried out if there is something
//! to do: a second run, or one after a run that was cut short, goes on where things stand. `--dry-run` only looks.

mod host;
mod keys;
mod machine;
mod processes;
mod server;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use vmseal_api::client::ServerClient;
use vmseal_api::model::{Plan, Policy};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::AddPolicy;
use vmseal_secret::SecretBytes;
use vmseal_secret::process::Hardening;

use self::processes::Processes;
use crate::arguments::{self, Global, Output};
use crate::exit::{Ended, Exit};
use crate::print::{self, plan};

/// The datastore that is made.
const DATASTORE: &str = "local";

/// The key provider that is made.
const PROVIDER: &str = "keys";

/// The policy that is made.
const POLICY: &str = "encrypted";

/// What is done, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Directories,
    Server,
    Login,
    Passphrase,
    Join,
    Agent,
    Datastore,
    Provider,
    Backup,
    Default,
    Policy,
}

const STEPS: [Step; 11] = [
    Step::Directories,
    Step::Server,
    Step::Login,
    Step::Passphrase,
    Step::Join,
    Step::Agent,
    Step::Datastore,
    Step::Provider,
    Step::Backup,
    Step::Default,
    Step::Policy,
];

impl Step {
    /// What it is about.
    fn name(self) -> &'static str {
        match self {
            Self::Directories => "directories",
            Self::Server => "server",
            Self::Login => "login",
            Self::Passphrase => "passphrase",
            Self::Join => "host",
            Self::Agent => "agent",
            Self::Datastore => "datastore",
            Self::Provider => "key provider",
            Self::Backup => "backup",
            Self::Default => "default provider",
            Self::Policy => "policy",
        }
    }
}

/// How a step stands.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    /// There is nothing to do, because of this.
    There(String),
    /// This has to be done.
    ToDo(String),
}

/// A set-up on its way.
struct Init {
    options: arguments::Init,
    /// Where the server is reached.
    url: String,
    /// This machine's name as a host.
    host: String,
    backup: PathBuf,
    processes: Processes,
    /// The server, once it answers.
    server: Option<ServerClient>,
    /// The passphrase, once it is known and as long as it is needed.
    passphrase: Option<SecretBytes>,
}

/// Sets this machine up.
pub async fn run(
    global: Global,
    options: arguments::Init,
    hardening: Hardening,
) -> anyhow::Result<()> {
    if global.output != Output::Table && !options.dry_run.dry_run {
        let message = "init prints its steps as it goes: --output is for --dry-run alone";
        return Err(Ended::new(Exit::Usage, message).into());
    }
    let mut init = Init::new(options)?;
    init.reach_server().await;
    machine::check(&init, hardening).await?;
    if init.options.dry_run.dry_run {
        return init.tell(global.output).await;
    }
    let carried_out = init.carry_out().await;
    if carried_out.is_err() {
        init.processes.stop().await;
        return carried_out
            .context("init has not come to its end; run it again to go on from here");
    }
    init.say_what_is_next()?;
    init.processes.stay().await
}

impl Init {
    fn new(mut options: arguments::Init) -> anyhow::Result<Self> {
        let url = format!("https://{}", options.listen);
        let host = host::name(options.host.as_deref())?;
        let places = &mut options.places;
        for path in [
            &mut options.datastore,
            &mut places.data_dir,
            &mut places.state_dir,
            &mut places.run_dir,
            &mut places.config_dir,
            &mut places.log_dir,
        ] {
            *path = absolute(path)?;
        }
        let backup = match &options.backup {
            Some(file) => absolute(file)?,
            None => {
                let home = std::env::var_os("HOME").map(PathBuf::from);
                let home = home.filter(|home| home.is_absolute());
                home.context("there is no home directory for the backup: give --backup FILE")?
                    .join("vmseal-keys.backup")
            }
        };
        let processes = Processes::of_this_machine(&options)?;
        let (server, passphrase) = (None, None);
        Ok(Self { options, url, host, backup, processes, server, passphrase })
    }

    /// The server, which answers by now.
    fn server(&self) -> anyhow::Result<&ServerClient> {
        self.server.as_ref().context("the server does not answer")
    }

    /// How a step stands; nothing is changed by looking.
    async fn look(&self, step: Step) -> anyhow::Result<Standing> {
        match step {
            Step::Directories => self.look_at_directories(),
            Step::Server => self.look_at_server(),
            Step::Login => self.look_at_login(),
            Step::Passphrase => self.look_at_passphrase().await,
            Step::Join => self.look_at_join(),
            Step::Agent => self.look_at_agent().await,
            Step::Datastore => self.look_at_datastore().await,
            Step::Provider => self.look_at_provider().await,
            Step::Backup => self.look_at_backup().await,
            Step::Default => self.look_at_default().await,
            Step::Policy => self.look_at_policy().await,
        }
    }

    /// Does what a step has to do; gives what came of it.
    async fn act(&mut self, step: Step) -> anyhow::Result<String> {
        match step {
            Step::Directories => self.make_directories(),
            Step::Server => self.start_server().await,
            Step::Login => self.log_in(),
            Step::Passphrase => self.settle_passphrase().await,
            Step::Join => self.join().await,
            Step::Agent => self.start_agent().await,
            Step::Datastore => self.add_datastore().await,
            Step::Provider => self.make_provider_usable().await,
            Step::Backup => self.back_up().await,
            Step::Default => self.make_default().await,
            Step::Policy => self.add_policy().await,
        }
    }

    async fn carry_out(&mut self) -> anyhow::Result<()> {
        for step in STEPS {
            let name = step.name();
            let told = match self.look(step).await.with_context(|| name)? {
                Standing::There(what) => format!("there already: {what}"),
                Standing::ToDo(_) => {
                    let done = self.act(step).await.with_context(|| name)?;
                    // What was done is seen by the next look, or it was not done.
                    let after = self.look(step).await.with_context(|| name)?;
                    ensure!(
                        matches!(after, Standing::There(_)),
                        "{name}: it was done, and is not there: {after:?}"
                    );
                    format!("done: {done}")
                }
            };
            print::words(&format!("{name:<17} {told}"))?;
        }
        Ok(())
    }

    /// `--dry-run`.
    async fn tell(&self, output: Output) -> anyhow::Result<()> {
        let mut steps = Vec::new();
        for step in STEPS {
            let name = step.name();
            if let Standing::ToDo(what) = self.look(step).await.with_context(|| name)? {
                steps.push(format!("{name}: {what}"));
            }
        }
        if steps.is_empty() && output == Output::Table {
            return print::words("nothing is to be done: all is there already");
        }
        let plan =
            Plan { kind: "init".to_owned(), target: self.host.clone(), steps, ..Plan::default() };
        plan::show(output, &plan)
    }

    fn look_at_directories(&self) -> anyhow::Result<Standing> {
        let mut missing = Vec::new();
        for directory in self.directories() {
            if !directory.is_dir() {
                missing.push(directory.display().to_string());
            }
        }
        Ok(match missing.is_empty() {
            true => Standing::There(format!("disks are in {}", self.options.datastore.display())),
            false => Standing::ToDo(format!("make {}", missing.join(", "))),
        })
    }

    /// What is made beforehand; server and agent make their own.
    fn directories(&self) -> Vec<&Path> {
        let mut needed = vec![self.options.datastore.as_path()];
        if !self.options.no_keep_passphrase {
            needed.push(&self.options.places.config_dir);
        }
        if self.processes.are_children() {
            needed.push(&self.options.places.log_dir);
        }
        needed
    }

    fn make_directories(&self) -> anyhow::Result<String> {
        use std::os::unix::fs::DirBuilderExt;
        let mut made = Vec::new();
        for directory in self.directories().into_iter().filter(|it| !it.is_dir()) {
            let mut builder = std::fs::DirBuilder::new();
            builder
                .recursive(true)
                .mode(0o700)
                .create(directory)
                .with_context(|| format!("cannot make {}", directory.display()))?;
            made.push(directory.display().to_string());
        }
        Ok(made.join(", "))
    }

    async fn look_at_policy(&self) -> anyhow::Result<Standing> {
        let make = Standing::ToDo(format!("add the policy '{POLICY}': disks are encrypted"));
        let Some(server) = &self.server else { return Ok(make) };
        match found::<Policy>(server, &format!("policies/{POLICY}")).await? {
            None => Ok(make),
            Some(policy) if policy.encryption => {
                Ok(Standing::There(format!("'{POLICY}' encrypts disks")))
            }
            Some(_) => Err(Ended::new(
                Exit::Conflict,
                format!("there is a policy '{POLICY}' that does not encrypt: delete it (vmseal policy delete {POLICY})"),
            )
            .into()),
        }
    }

    async fn add_policy(&self) -> anyhow::Result<String> {
        let request = AddPolicy {
            name: POLICY.to_owned(),
            encryption: true,
            provider: None,
            allocation: Default::default(),
            limits: Default::default(),
            cache: None,
            replica: None,
            cpu_model: None,
            downtime_milliseconds: None,
            messenger: None,
            osd_encryption: None,
            redundancy: Default::default(),
            image_layout: Default::default(),
        };
        let policy: Policy = self.server()?.post("policies", &request).await?;
        Ok(format!("'{}' encrypts disks with keys of the default provider", policy.name))
    }

    fn say_what_is_next(&self) -> anyhow::Result<()> {
        print::words("")?;
        if self.backup.exists() {
            let kept = keys::kept_in(&self.options.places.config_dir);
            let passphrase = match kept.exists() {
                true => format!(", and the passphrase in {} to another place", kept.display()),
                false => " (its passphrase is known to you alone)".to_owned(),
            };
            print::words(&format!(
                "Now copy {} off this machine{passphrase}:\nwith both, the keys survive the loss of this machine; without them, all encrypted data is lost with it.",
                self.backup.display()
            ).replace('\n', " "))?;
        }
        if !self.is_logged_in() {
            let data = &self.options.places.data_dir;
            print::words(&format!(
                "You are logged in at another server: vmseal --server {} --ca {} --token-file {} login changes that",
                self.url,
                data.join("ca.pem").display(),
                data.join("admin.token").display()
            ))?;
        }
        print::words("Next: vmseal vm launch web1 --image debian --ssh-key ~/.ssh/id_ed25519.pub")
    }
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("where is {}?", path.display()))
}

/// A resource, if there is one.
async fn found<T: serde::de::DeserializeOwned>(
    server: &ServerClient,
    path: &str,
) -> Result<Option<T>, Problem> {
    match server.get(path).await {
        Ok(it) => Ok(Some(it)),
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}
