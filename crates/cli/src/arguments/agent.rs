//! `vmseal agent`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

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
    /// Where the agent keeps its certificate and key
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent")]
    pub state_dir: PathBuf,
    /// Where sockets and process ids of running VMs are; must not survive a reboot
    #[arg(long, value_name = "DIR", default_value = "/run/vmseal")]
    pub run_dir: PathBuf,
    /// Where to listen; by default at the address that this machine joined with
    #[arg(long, value_name = "HOST:PORT")]
    pub listen: Option<String>,
    /// How to run guests: `kvm`; `tcg`, which is slow and needs nothing; or `auto`, which is KVM where a
    /// guest, tried at the start, really runs under it
    #[arg(long, value_enum, default_value_t)]
    pub accelerator: Accelerator,
    /// The QEMU to run
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64")]
    pub qemu: PathBuf,
    /// The filter to run; by default the vmseal-filter beside this program
    #[arg(long, value_name = "FILE")]
    pub filter: Option<PathBuf>,
    /// A directory that images may be imported from and exported to, with all below it; may be repeated. By
    /// default `transfer` in the state directory, which is made
    #[arg(long = "transfer-directory", value_name = "DIR")]
    pub transfer_directories: Vec<PathBuf>,
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
    /// The server's address, `https://HOST:PORT`
    #[arg(long = "to", value_name = "URL")]
    pub to: String,
    /// The file with the join token; `-` is standard input
    #[arg(long, value_name = "FILE", default_value = "-")]
    pub join_token_file: PathBuf,
    /// The new host's name
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// Where the agent is to listen, as the server reaches it; by default the address from which the server
    /// sees this machine come, with port 8444
    #[arg(long, value_name = "HOST:PORT")]
    pub address: Option<String>,
    /// Where the agent keeps its certificate and key
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent")]
    pub state_dir: PathBuf,
}
