//! `vmseal datastore`.

use std::path::PathBuf;

use clap::{Arg, Subcommand};
use vmseal_api::model;

use super::{DryRun, List, Name, Show};

/// Names are unique only on their host.
fn of_datastore(arg: Arg) -> Arg {
    arg.help("Name, `HOST:NAME` if several hosts have one of that name, or id")
}

#[derive(Subcommand)]
pub enum Datastore {
    /// List the datastores
    #[command(visible_alias = "ls")]
    List(List<model::Datastore>),
    /// Show one datastore
    #[command(mut_arg("name", of_datastore))]
    Show(Show),
    /// Add a directory of a host as a datastore
    Add {
        /// The new datastore's name, unique on its host
        name: String,
        /// The host's name or id
        #[arg(long)]
        host: String,
        /// The directory's absolute path on the host; it must exist
        #[arg(long, value_name = "DIR")]
        path: PathBuf,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// List the images on a datastore: of VMs, orphaned, missing, incomplete; changes nothing
    #[command(mut_arg("name", of_datastore))]
    Scan(Name),
    /// Remove a datastore that no VM uses; the files in its directory stay
    #[command(visible_alias = "rm")]
    Remove {
        /// Name, `HOST:NAME` if several hosts have one of that name, or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
