//! `vmseal datastore`.

use std::path::PathBuf;

use clap::Subcommand;
use vmseal_api::model;

use super::{DryRun, List, Name, Show};

#[derive(Subcommand)]
pub enum Datastore {
    /// List the datastores
    #[command(visible_alias = "ls")]
    List(List<model::Datastore>),
    /// Show one datastore
    Show(Show),
    /// Add a directory of a host
    Add {
        /// Its name
        name: String,
        /// The host
        #[arg(long)]
        host: String,
        /// The directory's absolute path on the host
        #[arg(long)]
        path: PathBuf,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Look at what is on a datastore: disks of no VM, missing and half-made ones. Changes nothing
    Scan(Name),
    /// Remove a datastore that holds no disk
    #[command(visible_alias = "rm")]
    Remove {
        /// Its name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
