//! `vmseal server` and `vmseal login`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use vmseal_log::Levels;

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Server {
    #[command(subcommand)]
    pub command: Option<ServerCommand>,
    #[command(flatten)]
    pub run: RunServer,
}

#[derive(Subcommand)]
pub enum ServerCommand {
    /// Show or change the server's log level, until it restarts
    #[command(after_help = LEVELS_HELP)]
    LogLevel {
        /// The new levels
        #[arg(value_name = "LEVEL|TARGET=LEVEL,...")]
        levels: Option<Levels>,
    },
    /// Write a backup of the server to a local file while it runs: inventory, authority, sealed provider files
    ///
    /// The backup is encrypted under a passphrase of its own. vmseal reads the file back to check it. Whoever has the file
    /// and its passphrase can act as this server; keys of VMs still need the providers' passphrases, or the KMS.
    Backup {
        /// The file to write; it must not exist
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Make a server's data directory on this machine from a backup; then start the server with it
    Restore {
        /// The file with the backup
        #[arg(value_name = "FILE")]
        from: PathBuf,
        /// The directory to restore into: empty, or not there yet
        #[arg(
            long,
            visible_alias = "dir",
            value_name = "DIR",
            default_value = "/var/lib/vmseal/server"
        )]
        data_dir: PathBuf,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        dry_run: DryRun,
    },
}

/// How levels are written.
pub const LEVELS_HELP: &str = "LEVEL is off, error, warn, info, debug or trace. TARGET=LEVEL is for the crates \
and modules whose names begin with TARGET: info,vmseal_agent=debug. Libraries log at info at most.";

use super::listen::parse_address;
use super::{DryRun, Passphrase};

#[derive(Args)]
pub struct RunServer {
    /// The directory of the server's database, certificates and sealed keys; created at the first start
    #[arg(long, value_name = "DIR", default_value = "/var/lib/vmseal/server")]
    pub data_dir: PathBuf,
    /// The address and port to listen on
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:8443", value_parser = parse_address)]
    pub listen: SocketAddr,
    /// A name or address of the server, for its certificate; may be repeated
    #[arg(long = "name", value_name = "NAME", default_value = "localhost")]
    pub names: Vec<String>,
    /// How many days events are kept
    #[arg(long, value_name = "DAYS", default_value_t = vmseal_control::retention::DAYS,
        value_parser = clap::value_parser!(u32).range(1..=36_500))]
    pub keep_events: u32,
    /// The process that started this one: it ends when that one does
    #[arg(long, value_name = "PID", hide = true)]
    pub parent: Option<i32>,
    /// For tests: each step of a task is held, before and after it is done, until its file in this directory is removed
    #[arg(long, value_name = "DIR", hide = true)]
    pub hold_steps: Option<PathBuf>,
}

#[derive(Args)]
pub struct Login {
    /// Do not test the connection first
    #[arg(long)]
    pub no_check: bool,
    #[command(flatten)]
    pub dry_run: DryRun,
}
