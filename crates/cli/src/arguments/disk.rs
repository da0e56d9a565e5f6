//! `vmseal disk`.

use std::path::PathBuf;

use clap::{Subcommand, ValueEnum};

use super::{DryRun, List, Passphrase, Wait};
use crate::print::VmDisk;

#[derive(Subcommand)]
pub enum Disk {
    /// List the disks of all VMs, or of one
    #[command(visible_alias = "ls")]
    List {
        /// The VM's name or id
        vm: Option<String>,
        #[command(flatten)]
        how: List<VmDisk>,
    },
    /// Show one disk
    Show {
        /// The VM's name or id
        vm: String,
        /// The disk's name within the VM, or its id
        disk: String,
        /// Print a line for it, and one for every change until it is removed
        #[arg(short, long)]
        watch: bool,
    },
    /// Write a disk of a VM that is off to a file on its host
    Export {
        /// The VM's name or id
        vm: String,
        /// The disk's name within the VM, or its id
        disk: String,
        /// The file's absolute path on the VM's host; it must not exist
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// What to write: `luks2` opens with a passphrase (cryptsetup open), `raw` and `qcow2` are in the
        /// clear and need --plaintext, `sealed` is the ciphertext as it lies in the datastore: it is taken
        /// without a key and opens with the VM's alone
        #[arg(long, value_enum)]
        format: ExportFormat,
        /// Allow a file that whoever has it can read
        #[arg(long)]
        plaintext: bool,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
}

/// What a disk is exported as.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    Raw,
    Qcow2,
    Luks2,
    Sealed,
}
