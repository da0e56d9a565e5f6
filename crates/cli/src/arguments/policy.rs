//! `vmseal policy`.

use clap::Subcommand;
use vmseal_api::model;

use super::{DryRun, List, Show};

#[derive(Subcommand)]
pub enum Policy {
    /// List the policies
    #[command(visible_alias = "ls")]
    List(List<model::Policy>),
    /// Show one policy
    Show(Show),
    /// Add a policy
    Add {
        /// Its name
        name: String,
        /// Encrypt what it is applied to
        #[arg(long, required_unless_present = "plain")]
        encrypt: bool,
        /// Leave what it is applied to in the clear
        #[arg(long, conflicts_with_all = ["encrypt", "provider"])]
        plain: bool,
        /// The provider of the keys; else the default one
        #[arg(long)]
        provider: Option<String>,
        /// Disks take room as they are written to; the default
        #[arg(long, conflicts_with = "preallocate")]
        thin: bool,
        /// Disks take all of their room when they are made, and keep it
        #[arg(long)]
        preallocate: bool,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a policy that no VM uses
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
