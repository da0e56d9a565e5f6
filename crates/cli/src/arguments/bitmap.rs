//! `vmseal disk bitmap`.

use clap::{Args, Subcommand};
use vmseal_api::filter::BitmapStatus;

use super::{DryRun, List};

#[derive(Subcommand)]
pub enum Bitmap {
    /// List the dirty bitmaps of a disk, since when they count, and how much has changed
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        of: DiskInUse,
        #[command(flatten)]
        how: List<BitmapStatus>,
    },
    /// Start a dirty bitmap: what the guest changes from now on is in it
    ///
    /// NBD clients see it as `qemu:dirty-bitmap:NAME` (`vmseal disk expose`). A name that is taken is refused, so
    /// that nobody takes a new bitmap for the old one that a backup rests on. A disk has four at most.
    Add {
        #[command(flatten)]
        of: DiskInUse,
        /// The new bitmap's name: letters, digits, dots, dashes and underscores
        #[arg(value_name = "NAME")]
        bitmap: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Forget what a dirty bitmap has noted, and go on noting
    ///
    /// What changes while a backup is read from a running guest is lost with it: for a chain of backups start
    /// another bitmap before each, and remove the old one afterwards.
    Clear {
        #[command(flatten)]
        of: DiskInUse,
        /// The bitmap's name
        #[arg(value_name = "NAME")]
        bitmap: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a dirty bitmap
    #[command(visible_alias = "rm")]
    Remove {
        #[command(flatten)]
        of: DiskInUse,
        /// The bitmap's name
        #[arg(value_name = "NAME")]
        bitmap: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}

/// A disk of a VM that runs.
#[derive(Args)]
pub struct DiskInUse {
    /// The VM's name or id; it has to run
    vm: String,
    /// The disk's name within the VM, or its id
    disk: String,
}

impl DiskInUse {
    /// Where its bitmaps are in the API.
    pub fn bitmaps(&self) -> String {
        format!("vms/{}/disks/{}/bitmaps", self.vm, self.disk)
    }
}
