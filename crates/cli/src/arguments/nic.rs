//! `vmseal nic`.

use clap::{Subcommand, ValueEnum};

use super::{DryRun, List};
use crate::rows::VmNic;

#[derive(Subcommand)]
pub enum Nic {
    /// List the network cards of all VMs, or of one
    #[command(visible_alias = "ls")]
    List {
        /// The VM's name or id
        vm: Option<String>,
        #[command(flatten)]
        how: List<VmNic>,
    },
    /// Change a network card, also while its VM runs
    Set {
        /// The VM's name or id
        vm: String,
        /// The card's name within the VM, or its id
        nic: String,
        /// Plug it in, or pull its cable
        #[arg(long, value_enum)]
        link: Link,
        #[command(flatten)]
        dry_run: DryRun,
    },
}

/// Whether a card is plugged in.
#[derive(Clone, Copy, ValueEnum)]
pub enum Link {
    Up,
    Down,
}
