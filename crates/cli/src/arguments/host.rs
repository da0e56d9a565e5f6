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
    /// Show what a host's agent logs, or change it for agent and filters until the agent's process ends
    #[command(after_help = LEVELS_HELP)]
    LogLevel {
        /// The host's name or id
        name: String,
        /// The new levels
        #[arg(value_name = "LEVEL|TARGET=LEVEL,...")]
        levels: Option<Levels>,
    },
    /// Change where a host's agent is called
    Set {
        /// The host's name or id
        name: String,
        /// Where its agent listens, as the server reaches it (see `vmseal agent --listen`)
        #[arg(long, value_name = "HOST:PORT")]
        address: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Make a token with which one machine may join, once, within 15 minutes
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
