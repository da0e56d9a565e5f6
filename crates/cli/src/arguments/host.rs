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
    /// Make a one-time token that lets a machine join
    Token,
    /// Remove a host that has no VMs
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
