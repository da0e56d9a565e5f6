//! What can be typed: the whole command line as types.

use std::net::SocketAddr;
use std::path::PathBuf;

use bytesize::ByteSize;
use clap::{Args, Parser, Subcommand, ValueEnum};

/// vmseal encrypts virtual machines on QEMU/KVM by policy.
///
/// Run `vmseal server` on the machine that decides, `vmseal agent` on every machine that runs guests,
/// and the other commands from anywhere.
#[derive(Parser)]
#[command(version, propagate_version = true, max_term_width = 100)]
pub struct Arguments {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Options of every command.
#[derive(Args, Clone)]
pub struct Global {
    /// The server's address; `vmseal login` saves it
    #[arg(
        long,
        global = true,
        env = "VMSEAL_SERVER",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global"
    )]
    pub server: Option<String>,
    /// The certificate (PEM) of the server's authority
    #[arg(
        long,
        global = true,
        env = "VMSEAL_CA",
        hide_env_values = true,
        value_name = "FILE",
        help_heading = "Global"
    )]
    pub ca: Option<PathBuf>,
    /// The file that holds the access token
    #[arg(
        long,
        global = true,
        env = "VMSEAL_TOKEN_FILE",
        hide_env_values = true,
        value_name = "FILE",
        help_heading = "Global"
    )]
    pub token_file: Option<PathBuf>,
    /// How to print results
    #[arg(short, long, global = true, value_enum, default_value_t, help_heading = "Global")]
    pub output: Output,
}

/// How results are printed.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs: the API's own documents.
    Json,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run the control plane
    Server(RunServer),
    /// Run this machine as a host, or join it to a server
    Agent(Agent),
    /// Save which server to talk to, and as whom
    Login(Login),
    /// Machines that run guests
    #[command(subcommand, visible_alias = "hosts")]
    Host(Host),
    /// Places where disks are kept
    #[command(subcommand, visible_alias = "datastores")]
    Datastore(Datastore),
    /// Where keys come from
    #[command(subcommand, visible_alias = "providers")]
    Provider(Provider),
    /// Storage policies: what is encrypted, with whose keys
    #[command(subcommand, visible_alias = "policies")]
    Policy(Policy),
    /// Virtual machines
    #[command(subcommand, visible_alias = "vms")]
    Vm(Vm),
    /// Durable work of the server
    #[command(subcommand, visible_alias = "tasks")]
    Task(Task),
    /// What happened, oldest first; every use of a key is in it
    Events(Events),
    /// What needs an operator now
    Alarms,
    /// Measure what encryption costs on this machine
    #[command(subcommand)]
    Lab(Lab),
}

#[derive(Args)]
pub struct RunServer {
    /// Where the server keeps its database, certificates and sealed keys; made at the first start
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/server")]
    pub data_dir: PathBuf,
    /// The address to listen on
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8443")]
    pub listen: SocketAddr,
    /// A name or address that clients reach the server by; may be repeated
    #[arg(long = "name", value_name = "NAME", default_value = "localhost")]
    pub names: Vec<String>,
}

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Agent {
    #[command(subcommand)]
    pub command: Option<AgentCommand>,
    #[command(flatten)]
    pub run: RunAgent,
}

#[derive(Subcommand)]
pub enum AgentCommand {
    /// Join this machine to a server, with a token from `vmseal host token`
    Join(JoinAgent),
}

#[derive(Args)]
pub struct RunAgent {
    /// Where the agent keeps its certificate
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent")]
    pub state_dir: PathBuf,
    /// Where sockets and process ids of running VMs are; must not survive a reboot
    #[arg(long, value_name = "DIR", default_value = "/run/vmseal")]
    pub run_dir: PathBuf,
    /// How to run guests; auto uses KVM only where a probe guest really runs under it
    #[arg(long, value_enum, default_value_t)]
    pub accelerator: Accelerator,
    /// The QEMU to run
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// The filter to run; by default the vmseal-filter beside this program
    #[arg(long, value_name = "FILE")]
    pub filter: Option<PathBuf>,
    /// The first of the user ids that guests' processes run under (as root only)
    #[arg(long, value_name = "UID", default_value_t = 2_000_000)]
    pub uid_base: u32,
}

/// The choice of accelerator.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Accelerator {
    #[default]
    Auto,
    Kvm,
    Tcg,
}

#[derive(Args)]
pub struct JoinAgent {
    /// The server to join
    #[arg(long = "to", value_name = "URL")]
    pub to: String,
    /// The file that holds the join token; - reads it from standard input
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub join_token_file: PathBuf,
    /// The name of this host
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// Where the agent will listen, as the server reaches it
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8444")]
    pub address: String,
    /// Where the agent keeps its certificate
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent")]
    pub state_dir: PathBuf,
}

#[derive(Args)]
pub struct Login {
    /// Do not try the connection first
    #[arg(long)]
    pub no_check: bool,
}

#[derive(Subcommand)]
pub enum Host {
    /// List the hosts
    #[command(visible_alias = "ls")]
    List,
    /// Show one host
    Show(Name),
    /// Make a one-time token that lets a machine join
    Token,
    /// Remove a host that has no VMs
    #[command(visible_alias = "rm")]
    Remove(Name),
}

/// A resource by its name or id.
#[derive(Args)]
pub struct Name {
    /// Its name or id
    #[arg(value_name = "NAME")]
    pub name: String,
}

#[derive(Subcommand)]
pub enum Datastore {
    /// List the datastores
    #[command(visible_alias = "ls")]
    List,
    /// Show one datastore
    Show(Name),
    /// Add a directory of a host
    Add {
        /// Its name
        name: String,
        /// The host
        #[arg(long)]
        host: String,
        /// The directory's absolute path on the host
        #[arg(long)]
        path: PathBuf,
    },
    /// Look at what is on a datastore: disks of no VM, missing and half-made ones. Changes nothing
    Scan(Name),
    /// Remove a datastore that holds no disk
    #[command(visible_alias = "rm")]
    Remove(Name),
}

/// A passphrase: from a file, or asked for at the terminal.
#[derive(Args)]
pub struct Passphrase {
    /// Read the passphrase from this file (one trailing newline is dropped); else it is asked for
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
}

#[derive(Subcommand)]
pub enum Provider {
    /// List the key providers
    #[command(visible_alias = "ls")]
    List,
    /// Show one key provider
    Show(Name),
    /// Add a native key provider, new or restored from a backup
    Add {
        /// Its name
        name: String,
        #[command(flatten)]
        passphrase: Passphrase,
        /// Restore this backup instead of making a new key
        #[arg(long, value_name = "FILE")]
        restore: Option<PathBuf>,
        /// Read the backup's passphrase from this file; else it is asked for
        #[arg(long, value_name = "FILE", requires = "restore")]
        backup_passphrase_file: Option<PathBuf>,
    },
    /// Give a provider's passphrase after a start of the server
    Unlock {
        /// Its name or id
        name: String,
        #[command(flatten)]
        passphrase: Passphrase,
    },
    /// Write a backup of a provider, sealed by a passphrase of its own
    Backup {
        /// Its name or id
        name: String,
        /// The file to write; it must not exist
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
    },
    /// Verify a backup: from then on the provider makes keys
    Verify {
        /// Its name or id
        name: String,
        /// The backup
        #[arg(long, value_name = "FILE")]
        from: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
    },
    /// Make a provider the one that policies use which name none
    Default(Name),
    /// Remove a provider that holds no key in use
    #[command(visible_alias = "rm")]
    Remove(Name),
}

#[derive(Subcommand)]
pub enum Policy {
    /// List the policies
    #[command(visible_alias = "ls")]
    List,
    /// Show one policy
    Show(Name),
    /// Add a policy
    Add {
        /// Its name
        name: String,
        /// Encrypt what it is applied to
        #[arg(long, required_unless_present = "plain")]
        encrypt: bool,
        /// Leave what it is applied to in the clear
        #[arg(long, conflicts_with_all = ["encrypt", "provider"])]
        plain: bool,
        /// The provider of the keys; else the default one
        #[arg(long)]
        provider: Option<String>,
        /// Disks take room as they are written to; the default
        #[arg(long, conflicts_with = "preallocate")]
        thin: bool,
        /// Disks take all of their room when they are made, and keep it
        #[arg(long)]
        preallocate: bool,
    },
    /// Remove a policy that no VM uses
    #[command(visible_alias = "rm")]
    Remove(Name),
}

#[derive(Subcommand)]
pub enum Vm {
    /// List the VMs
    #[command(visible_alias = "ls")]
    List,
    /// Show one VM
    Show(Name),
    /// Make a VM
    Create {
        /// Its name
        name: String,
        /// The storage policy
        #[arg(long)]
        policy: String,
        /// Virtual processors
        #[arg(long, default_value_t = 1)]
        vcpus: u32,
        /// Memory
        #[arg(long, default_value = "512MiB", value_name = "SIZE")]
        memory: ByteSize,
        /// A disk: `datastore=NAME,size=SIZE[,name=NAME][,image=FILE]`; may be repeated, in boot order.
        /// `image` is a raw image on the host that the disk is filled from; without `size` the disk is
        /// as large as the image is, where the image is on this machine.
        #[arg(long = "disk", value_name = "OPTIONS", required = true)]
        disks: Vec<String>,
        #[command(flatten)]
        wait: Wait,
    },
    /// Power a VM on
    Start {
        /// Its name or id
        name: String,
        #[command(flatten)]
        wait: Wait,
    },
    /// Ask a VM's guest to shut down
    Stop {
        /// Its name or id
        name: String,
        /// Cut the power instead
        #[arg(long)]
        force: bool,
        /// How long the guest may take, in seconds
        #[arg(long, value_name = "SECONDS", conflicts_with = "force")]
        timeout: Option<u32>,
        #[command(flatten)]
        wait: Wait,
    },
    /// Open a VM's serial console; Ctrl-] leaves it
    Console(Name),
    /// Delete a VM that is off, and its disks
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name or id
        name: String,
        #[command(flatten)]
        wait: Wait,
    },
}

/// Whether to wait for the task's end.
#[derive(Args)]
pub struct Wait {
    /// Print the task and return at once
    #[arg(long)]
    pub no_wait: bool,
}

#[derive(Subcommand)]
pub enum Task {
    /// List the tasks
    #[command(visible_alias = "ls")]
    List,
    /// Show one task
    Show(Name),
    /// Follow a task to its end
    Wait(Name),
    /// Stop a task and undo what it did
    Cancel(Name),
}

#[derive(Args)]
pub struct Events {
    /// Stay and print what happens from now on, too
    #[arg(long, short)]
    pub follow: bool,
}

#[derive(Subcommand)]
pub enum Lab {
    /// Compare disks: vmseal encrypted and plain, and QEMU's storage daemon
    Disk(vmseal_lab::BenchArguments),
}
