//! `vmseal agent`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::listen::parse_address;
use super::vm::OnOff;

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
    /// The directory of the agent's certificate and key
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent")]
    pub state_dir: PathBuf,
    /// The directory of sockets and process ids of running VMs; it must be empty after a reboot
    #[arg(long, value_name = "DIR", default_value = "/run/vmseal")]
    pub run_dir: PathBuf,
    /// The address and port to listen on [default: the address this machine joined with]
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// The address and port at which other hosts send running VMs to this one, best of a network of its own; port 0 is any free
    /// one [default: the address to listen on, port 8446]
    #[arg(long, value_name = "IP:PORT", value_parser = parse_address)]
    pub migration_listen: Option<SocketAddr>,
    /// Whether the agent itself writes the memory of VMs that come from other hosts into their guests; `off` has QEMU do that
    #[arg(long, value_enum, default_value_t = OnOff::On)]
    pub place_memory: OnOff,
    /// After how long a request of a guest that its datastore has not ended raises the alarm `disk-stalled`
    #[arg(long, value_name = "SECONDS", default_value_t = vmseal_agent::DISK_STALL.as_secs(), value_parser = clap::value_parser!(u64).range(1..))]
    pub disk_stall: u64,
    /// How to run guests: `kvm`, `tcg` (emulation, slow), or `auto`: KVM if a trial guest runs under it at
    /// start, else TCG
    #[arg(long, value_enum, default_value_t)]
    pub accelerator: Accelerator,
    /// The QEMU program
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// The directory of the UEFI firmware, OVMF
    #[arg(long, value_name = "DIR", default_value = vmseal_agent::FIRMWARE_DIRECTORY)]
    pub firmware_directory: PathBuf,
    /// The program of VMs' TPMs
    #[arg(long, value_name = "FILE", default_value = vmseal_agent::SWTPM)]
    pub swtpm: PathBuf,
    /// The filter program [default: vmseal-filter beside this program]
    #[arg(long, value_name = "FILE")]
    pub filter: Option<PathBuf>,
    /// A directory that images may be imported from and exported to; may be repeated [default: `transfer` in
    /// the state directory, and /var/lib/vmseal/images]
    #[arg(long = "transfer-directory", value_name = "DIR")]
    pub transfer_directories: Vec<PathBuf>,
    /// The first of 12288 user ids for the processes of VMs (as root only)
    #[arg(long, value_name = "UID", default_value_t = 2_000_000)]
    pub uid_base: u32,
    /// The process that started this one: it ends when that one does
    #[arg(long, value_name = "PID", hide = true)]
    pub parent: Option<i32>,
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
    /// The server's address, `https://HOST:PORT`
    #[arg(long = "to", value_name = "URL")]
    pub to: String,
    /// The file with the join token; `-` is standard input
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub join_token_file: PathBuf,
    /// The new host's name
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// The address and port at which the server reaches the agent [default: the address from which this
    /// machine connects to the server, port 8444]
    #[arg(long, value_name = "HOST:PORT")]
    pub address: Option<String>,
    /// The directory of the agent's certificate and key
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent")]
    pub state_dir: PathBuf,
    /// The server that this machine had joined is lost, or the host was removed there: replace its identity. Stop the
    /// agent first; its VMs run on
    #[arg(long)]
    pub replace: bool,
}
