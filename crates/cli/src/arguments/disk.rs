//! `vmseal disk`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Bitmap, DryRun, List, Passphrase, Wait};
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
    /// Make a disk a local NBD socket, read-only, until Ctrl-C: for nbdcopy, qemu-img and backups
    ///
    /// The disk is in the clear to whoever may open the socket. Its VM does not start meanwhile; the disk of
    /// one that runs can be read while its guest goes on, and is then not of one instant. What is printed is
    /// the address for tools.
    Expose(Expose),
    /// Dirty bitmaps of a disk in use: what has changed since when, for incremental backups
    ///
    /// A bitmap lives in the memory of the filter process that serves the disk of a running VM. All are gone when
    /// the VM stops, and when its filter dies and another one takes its place (alarm `filter-restarted`); they
    /// stay while the guest reboots, and while agent or server restart. One that is gone is not told of any more,
    /// and nothing is called clean that may have changed: make a full backup then, and start again.
    #[command(subcommand)]
    Bitmap(Bitmap),
    /// Show how far a disk's replica is behind, now
    ///
    /// Its VM has to run: nothing is copied otherwise. `dirty` is how much the replica may not have; what was done on
    /// the disk `lag` ago, and before, is in it. A disk has a replica where its policy has it (`vmseal policy add
    /// --replicate-to`).
    Replica {
        /// The VM's name or id; it has to run
        vm: String,
        /// The disk's name within the VM, or its id
        disk: String,
        /// Print a line for it, and one for what is different each second, until its VM stops
        #[arg(short, long)]
        watch: bool,
    },
}

/// How a disk is exposed.
#[derive(Args)]
pub struct Expose {
    /// The VM's name or id
    pub vm: String,
    /// The disk's name within the VM, or its id
    pub disk: String,
    /// The path of the socket to make, for you alone
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Allow tools to change the disk; its VM has to be off
    #[arg(long)]
    pub writable: bool,
}

/// What a disk is exported as.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    Raw,
    Qcow2,
    Luks2,
    Sealed,
}
