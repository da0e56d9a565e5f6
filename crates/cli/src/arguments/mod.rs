//! What can be typed: the whole command line as types, one module per noun.

mod agent;
mod bitmap;
mod console;
mod datastore;
mod disk;
mod doctor;
mod events;
mod global;
mod host;
mod kmip;
mod lab;
mod policy;
mod provider;
mod server;
mod shell;
mod task;
mod vm;
mod wait;

use clap::{Parser, Subcommand};
use vmseal_api::model;

pub use self::agent::{Accelerator, Agent, AgentCommand, JoinAgent, RunAgent};
pub use self::bitmap::Bitmap;
pub use self::console::{Console, Escape};
pub use self::datastore::Datastore;
pub use self::disk::{Disk, ExportFormat, Expose};
pub use self::doctor::Doctor;
pub use self::events::Events;
pub use self::global::{Columns, Global, List, Name, Output, Show};
pub use self::host::Host;
pub use self::kmip::{Certificate, Kmip, ServerOf};
pub use self::lab::Lab;
pub use self::policy::Policy;
pub use self::provider::{Passphrase, Provider};
pub use self::server::{LEVELS_HELP, Login, RunServer, Server, ServerCommand};
pub use self::shell::{Completion, Man, Shell};
pub use self::task::Task;
pub use self::vm::{Import, Vm};
pub use self::wait::{DryRun, Wait};

/// vmseal encrypts virtual machines on QEMU/KVM by policy.
///
/// Run `vmseal server` on the machine that decides, `vmseal agent` on every machine that runs guests,
/// and the other commands from anywhere.
#[derive(Parser)]
#[command(name = "vmseal", version = env!("VMSEAL_VERSION"), max_term_width = 100)]
pub struct Arguments {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Subcommand)]
pub enum Command {
    /// Run the control plane on this machine, until it is told to end; or change what it logs
    Server(Server),
    /// Run this machine as a host, until it is told to end; or join it to a server first
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
    /// Virtual disks
    #[command(subcommand, visible_alias = "disks")]
    Disk(Disk),
    /// What the server is doing and has done; its restart does not end a task
    #[command(subcommand, visible_alias = "tasks")]
    Task(Task),
    /// What happened, oldest first; every use of a key is in it
    Events(Events),
    /// What needs an operator now
    Alarms(List<model::Alarm>),
    /// Look at this machine and say what to mend, before or after it has become a host
    Doctor(Doctor),
    /// Print the script by which a shell completes this program's command lines
    Completion(Completion),
    /// Write the manual pages to a directory
    #[command(hide = true)]
    Man(Man),
    /// Measure what encryption costs on this machine
    #[command(subcommand)]
    Lab(Lab),
}
