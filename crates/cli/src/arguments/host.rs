//! `vmseal host`.

use clap::Subcommand;
use vmseal_api::model;

use super::{List, Name};

#[derive(Subcommand)]
pub enum Host {
    /// List the hosts
    #[command(visible_alias = "ls")]
    List(List<model::Host>),
    /// Show one host
    Show(Name),
    /// Make a one-time token that lets a machine join
    Token,
    /// Remove a host that has no VMs
    #[command(visible_alias = "rm")]
    Remove(Name),
}
