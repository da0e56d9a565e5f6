//! `vmseal init`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use super::listen::parse_address;
use super::{Accelerator, DryRun};

#[derive(Args)]
pub struct Init {
    /// Ask nothing: without --passphrase-file a passphrase is generated
    #[arg(short, long)]
    pub yes: bool,
    /// The file with the passphrase of the keys and of their backup, without its final newline [default: ask]
    #[arg(long, value_name = "FILE")]
    pub passphrase_file: Option<PathBuf>,
    /// Do not keep the passphrase on this machine: after each start of the server, `vmseal provider unlock keys` asks
    /// for it
    #[arg(long)]
    pub no_keep_passphrase: bool,
    /// The file for the backup of the keys [default: `vmseal-keys.backup` in the home directory]
    #[arg(long, value_name = "FILE")]
    pub backup: Option<PathBuf>,
    /// The directory for disks; it is made if it is missing
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/datastore")]
    pub datastore: PathBuf,
    /// The address and port of the server
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8443", value_parser = parse_address)]
    pub listen: SocketAddr,
    /// The address and port of the agent
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8444", value_parser = parse_address)]
    pub agent_listen: SocketAddr,
    /// The name of this machine as a host [default: its host name]
    #[arg(long, value_name = "NAME")]
    pub host: Option<String>,
    /// Run server and agent in this terminal until Ctrl-C, without systemd
    #[arg(long)]
    pub foreground: bool,
    #[command(flatten)]
    pub places: Places,
    #[command(flatten)]
    pub dry_run: DryRun,
}

/// Where things are, and what runs guests. Units have their own.
#[derive(Args)]
pub struct Places {
    /// The directory of the server's database, certificates and sealed keys
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/server", help_heading = FOREGROUND)]
    pub data_dir: PathBuf,
    /// The directory of the agent's certificate and key
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/agent", help_heading = FOREGROUND)]
    pub state_dir: PathBuf,
    /// The directory of sockets and process ids of running VMs
    #[arg(long, value_name = "DIR", default_value = "/run/vmseal", help_heading = FOREGROUND)]
    pub run_dir: PathBuf,
    /// The directory of the kept passphrase
    #[arg(long, value_name = "DIR", default_value = "/etc/vmseal", help_heading = FOREGROUND)]
    pub config_dir: PathBuf,
    /// The directory of the logs of server and agent
    #[arg(long, value_name = "DIR", default_value = "/var/log/vmseal", help_heading = FOREGROUND)]
    pub log_dir: PathBuf,
    /// How to run guests: `kvm`, `tcg` (emulation, slow), or `auto`
    #[arg(long, value_enum, default_value_t, help_heading = FOREGROUND)]
    pub accelerator: Accelerator,
    /// The QEMU program
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64", help_heading = FOREGROUND)]
    pub qemu: PathBuf,
    /// The filter program [default: vmseal-filter beside this program]
    #[arg(long, value_name = "FILE", help_heading = FOREGROUND)]
    pub filter: Option<PathBuf>,
}

/// What only holds where no units have places of their own.
const FOREGROUND: &str = "Without systemd";
