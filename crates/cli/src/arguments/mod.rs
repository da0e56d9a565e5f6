//! The whole command line as types, one module per noun.

mod agent;
mod backup;
mod bitmap;
mod cdrom;
mod console;
mod datastore;
mod disk;
mod doctor;
mod dump;
mod events;
mod global;
mod guest;
mod hardware;
mod host;
mod image;
mod init;
mod kmip;
mod lab;
mod launch;
mod listen;
mod migration_encryption;
mod nic;
mod passphrase;
mod policy;
mod prove;
mod provider;
mod remote;
mod server;
mod shell;
mod snapshot;
mod task;
mod vm;
mod wait;

use clap::{Parser, Subcommand};
use vmseal_api::model;

pub use self::agent::{Accelerator, Agent, AgentCommand, JoinAgent, RunAgent};
pub use self::backup::Backup;
pub use self::bitmap::Bitmap;
pub use self::cdrom::{BootDevice, Cdrom};
pub use self::console::{Console, Escape};
pub use self::datastore::{Adopt, Datastore};
pub use self::disk::{Disk, ExportFormat, Expose};
pub use self::doctor::Doctor;
pub use self::dump::{Dump, DumpFormat, TakeDump};
pub use self::events::Events;
pub use self::global::{Columns, Global, List, Name, Output, Show};
pub use self::guest::{Guest, Vnc};
pub use self::hardware::HardwareOptions;
pub use self::host::Host;
pub use self::image::{BuildImage, Image, System};
pub use self::init::{Init, Places};
pub use self::kmip::{Certificate, Kmip, ServerOf};
pub use self::lab::{Ceph, CephDown, CephPool, Lab};
pub use self::launch::{FirstBoot, Launch, Ssh};
pub use self::nic::{Link, Nic};
pub use self::passphrase::Passphrase;
pub use self::policy::{ANY_DOMAIN, OnStall, Policy, SetPolicy};
pub use self::prove::Prove;
pub use self::provider::Provider;
pub use self::remote::Remote;
pub use self::server::{LEVELS_HELP, Login, RunServer, Server, ServerCommand};
pub use self::shell::{Completion, Man, Shell};
pub use self::snapshot::Snapshot;
pub use self::task::Task;
pub use self::vm::{Import, OnOff, SetVm, Top, TopOrder, Vm};
pub use self::wait::{DryRun, Wait};

/// vmseal encrypts virtual machines on QEMU/KVM by policy.
///
/// Run `vmseal server` on one machine, `vmseal agent` on every machine that runs guests, and the other
/// commands from anywhere.
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
    /// Set this machine up to run encrypted VMs: server, agent, datastore, keys with a backup, policy
    ///
    /// Each step says what was done, or that it was there already: a second run repairs what is missing and changes
    /// nothing else. Give the same options again. Where systemd runs, server and agent are its services; else they run
    /// in this terminal until Ctrl-C.
    Init(Init),
    /// Run the control plane on this machine; or change its log level
    Server(Server),
    /// Run this machine as a host; or join it to a server first
    Agent(Agent),
    /// Save the address and the access token of a server
    Login(Login),
    /// Hosts: machines that run guests
    #[command(subcommand, visible_alias = "hosts")]
    Host(Host),
    /// Datastores: places for disks
    #[command(subcommand, visible_alias = "datastores")]
    Datastore(Datastore),
    /// Key providers
    #[command(subcommand, visible_alias = "providers")]
    Provider(Provider),
    /// Storage policies: what is encrypted, with whose keys
    #[command(subcommand, visible_alias = "policies")]
    Policy(Policy),
    /// Other control planes, which VMs can go to while they run
    #[command(subcommand, visible_alias = "remotes")]
    Remote(Remote),
    /// Virtual machines
    #[command(subcommand, visible_alias = "vms")]
    Vm(Vm),
    /// Virtual disks
    #[command(subcommand, visible_alias = "disks")]
    Disk(Disk),
    /// Network cards
    #[command(subcommand, visible_alias = "nics")]
    Nic(Nic),
    /// Snapshots of virtual machines
    #[command(subcommand, visible_alias = "snapshots")]
    Snapshot(Snapshot),
    /// Backups of virtual machines, full and incremental, encrypted as their disks are
    #[command(subcommand, visible_alias = "backups")]
    Backup(Backup),
    /// Core dumps of virtual machines; 'vmseal vm dump' writes them
    #[command(subcommand, visible_alias = "dumps")]
    Dump(Dump),
    /// Images of systems on this machine, to fill disks from
    #[command(subcommand, visible_alias = "images")]
    Image(Image),
    /// Tasks: what the server does and has done
    #[command(subcommand, visible_alias = "tasks")]
    Task(Task),
    /// Events, oldest first; every use of a key is one
    Events(Events),
    /// Alarms: what needs attention now
    Alarms(List<model::Alarm>),
    /// Check this host for problems
    Doctor(Doctor),
    /// Print a completion script for a shell
    Completion(Completion),
    /// Write the manual pages to a directory
    #[command(hide = true)]
    Man(Man),
    /// Measure what encryption costs on this machine
    #[command(subcommand)]
    Lab(Lab),
}
