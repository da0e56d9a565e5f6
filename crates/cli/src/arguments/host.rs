//! `vmseal host`.

use clap::Subcommand;
use vmseal_api::model;

use super::{DryRun, List, Show};

#[derive(Subcommand)]
pub enum Host {
    /// List the hosts
    #[command(visible_alias = "ls")]
    List(List<model::Host>),
    /// Show one host
    Show(Show),
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
