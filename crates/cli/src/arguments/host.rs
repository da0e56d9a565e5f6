//! `vmseal host`.

use clap::Subcommand;
use vmseal_api::model;
use vmseal_log::Levels;

use super::{DryRun, LEVELS_HELP, List, Show};

#[derive(Subcommand)]
pub enum Host {
    /// List the hosts
    #[command(visible_alias = "ls")]
    List(List<model::Host>),
    /// Show one host
    Show(Show),
    /// Show or change the log level of a host's agent and filters, until the agent restarts
    #[command(after_help = LEVELS_HELP)]
    LogLevel {
        /// The host's name or id
        name: String,
        /// The new levels
        #[arg(value_name = "LEVEL|TARGET=LEVEL,...")]
        levels: Option<Levels>,
    },
    /// Change the address of a host
    Set {
        /// The host's name or id
        name: String,
        /// The address and port at which the server reaches the agent (see `vmseal agent --listen`)
        #[arg(long, value_name = "HOST:PORT")]
        address: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Create a token with which one machine may join, once, within 15 minutes
    Token {
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a host that has no datastores and no VMs
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
