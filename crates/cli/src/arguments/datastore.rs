//! `vmseal datastore`.

use std::path::PathBuf;

use clap::{Arg, Subcommand};
use vmseal_api::model;

use super::{DryRun, List, Name, Show};

/// Names are a host's own.
fn of_datastore(arg: Arg) -> Arg {
    arg.help("Name, `HOST:NAME` where hosts share one, or id")
}

#[derive(Subcommand)]
pub enum Datastore {
    /// List the datastores
    #[command(visible_alias = "ls")]
    List(List<model::Datastore>),
    /// Show one datastore
    #[command(mut_arg("name", of_datastore))]
    Show(Show),
    /// Add a directory of a host; the host marks it as this datastore
    Add {
        /// The new datastore's name; another host may have one of the same
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
    /// Say what is on a datastore: disks of VMs, of no VM, missing and half-made ones. Changes nothing
    #[command(mut_arg("name", of_datastore))]
    Scan(Name),
    /// Forget a datastore on which no VM has a disk or a replica; what is in the directory stays
    #[command(visible_alias = "rm")]
    Remove {
        /// Name, `HOST:NAME` where hosts share one, or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
