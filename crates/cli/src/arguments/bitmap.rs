//! `vmseal disk bitmap`.

use clap::{Args, Subcommand};
use vmseal_api::filter::BitmapStatus;

use super::{DryRun, List};

#[derive(Subcommand)]
pub enum Bitmap {
    /// List the dirty bitmaps of a disk
    #[command(visible_alias = "ls")]
    List {
        #[command(flatten)]
        of: DiskInUse,
        #[command(flatten)]
        how: List<BitmapStatus>,
    },
    /// Add a dirty bitmap, which records what the guest changes from now on
    ///
    /// NBD clients see it as `qemu:dirty-bitmap:NAME` (`vmseal disk expose`). The name must be
    /// new. A disk has at most four bitmaps.
    Add {
        #[command(flatten)]
        of: DiskInUse,
        /// The new bitmap's name: letters, digits, dots, dashes and underscores
        #[arg(value_name = "NAME")]
        bitmap: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Clear a dirty bitmap, which goes on recording
    ///
    /// Changes made while a backup is being read are cleared as well: for a chain of backups add a new bitmap
    /// before each, and remove the old one afterwards.
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
    /// The VM's name or id; it must be running
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
