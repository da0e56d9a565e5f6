//! `vmseal nic`.

use clap::{Subcommand, ValueEnum};

use super::{DryRun, List, Wait};
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
    /// Add a network card to a VM, also while it runs
    Add {
        /// The VM's name or id
        vm: String,
        /// The card: `user[,forward=tcp:HOST-PORT:GUEST-PORT]`, `bridge=BRIDGE` or `tap=TAP`, each with
        /// `[,mac=ADDRESS][,model=virtio|e1000e][,name=NAME][,link=up|down]`, as for `vm create`
        #[arg(long, value_name = "OPTIONS")]
        nic: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Remove a network card of a VM, also while it runs: its guest must let it go
    #[command(visible_alias = "rm")]
    Remove {
        /// The VM's name or id
        vm: String,
        /// The card's name within the VM, or its id
        nic: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
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
