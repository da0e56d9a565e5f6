//! `vmseal host`.

use clap::Subcommand;

use super::Name;

#[derive(Subcommand)]
pub enum Host {
    /// List the hosts
    #[command(visible_alias = "ls")]
    List,
    /// Show one host
    Show(Name),
    /// Make a one-time token that lets a machine join
    Token,
    /// Remove a host that has no VMs
    #[command(visible_alias = "rm")]
    Remove(Name),
}
