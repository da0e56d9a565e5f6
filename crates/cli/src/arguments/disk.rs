//! `vmseal disk`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::vm::CopyRate;
use super::{Bitmap, DryRun, List, Passphrase, Wait};
use crate::rows::VmDisk;
use crate::size::parse_size;

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
        /// Stay, and print a line for every change until it is removed
        #[arg(short, long)]
        watch: bool,
    },
    /// Add a disk to a VM, also while it runs: its guest gets it at once, with a short pause of its disks
    Add {
        /// The VM's name or id
        vm: String,
        /// The disk: `size=SIZE,name=NAME[,datastore=NAME][,image=FILE,format=raw|qcow2][,encrypted=yes|no]`, as for `vm
        /// create` [default datastore: that of the VM's first disk]
        #[arg(long, value_name = "OPTIONS")]
        disk: String,
        /// Fill it from an image that is said to be raw even if it begins as an image of another format does
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Remove a disk of a VM, with its data
    ///
    /// Of a VM that runs, a disk that its guest can let go, which excludes the VM's first one and the one for cloud-init.
    /// Unmount it in the guest first.
    #[command(visible_alias = "rm")]
    Remove {
        /// The VM's name or id
        vm: String,
        /// The disk's name within the VM, or its id
        disk: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Make a disk longer, also while its VM runs: its guest sees it, with a short pause of its disks
    ///
    /// Partitions and file systems in the guest are grown there. A disk never shrinks.
    Resize {
        /// The VM's name or id
        vm: String,
        /// The disk's name within the VM, or its id
        disk: String,
        /// Its new size, such as 40G (powers of 1024)
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: u64,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Export a disk of a VM that is off, or a snapshot of one that runs, to a file on its host
    ///
    /// The disk `uefi-variables` is exported as any other; a raw file is what `vm import --nvram` and libvirt take. The disk `tpm`
    /// holds nothing: in its place, what the TPM keeps is exported, as raw alone, which is what `vm import --tpm-state` and
    /// libvirt's swtpm take (tpm2-00.permall).
    Export {
        /// The VM's name or id
        vm: String,
        /// The disk's name within the VM, or its id
        disk: String,
        /// The file's absolute path on the VM's host; it must not exist
        #[arg(long, value_name = "FILE")]
        to: PathBuf,
        /// The file's format: `luks2` opens with a passphrase (cryptsetup open); `raw` and `qcow2` are plaintext
        /// and need --plaintext; `sealed` copies the ciphertext, needs no key now, and the VM's key to open
        #[arg(long, value_enum)]
        format: ExportFormat,
        /// Export what the disk held when this snapshot was taken, by its name; the VM may run
        #[arg(long, value_name = "NAME")]
        snapshot: Option<String>,
        /// Allow a plaintext file
        #[arg(long)]
        plaintext: bool,
        #[command(flatten)]
        passphrase: Passphrase,
        #[command(flatten)]
        rate: CopyRate,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Expose a disk as a local NBD socket, read-only, until Ctrl-C: for nbdcopy, qemu-img and backups
    ///
    /// Anyone who may open the socket reads plaintext, unless --sealed is given. A VM that is off cannot be started meanwhile.
    /// The disk of a running VM is read while its guest writes, which gives no point-in-time copy; --snapshot gives one. The
    /// exposure ends when a running VM stops. The address for tools is printed.
    Expose(Expose),
    /// Dirty bitmaps of a running VM's disk, for incremental backups
    ///
    /// A bitmap is in a file on the VM's host. It survives a restart of filter, agent or guest, growth of the disk while
    /// the VM runs, and a stop of the VM unless something else writes to the disk. A lost bitmap is not listed any more:
    /// make a full backup then, and add a new one.
    #[command(subcommand)]
    Bitmap(Bitmap),
    /// Show how far a disk's replica is behind
    ///
    /// Its VM must be running: nothing is copied otherwise. `dirty` is how much is not copied yet; the replica has
    /// everything written up to `lag` ago. A policy decides whether disks have replicas (`vmseal policy create
    /// --replicate-to`).
    Replica {
        /// The VM's name or id; it must be running
        vm: String,
        /// The disk's name within the VM, or its id
        disk: String,
        /// Stay, and print a line whenever it has changed, until its VM stops
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
    /// The path of the socket to create; only you may open it
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
    /// Expose what the disk held when this snapshot was taken, by its name; the VM may run. The snapshot cannot be
    /// deleted meanwhile
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<String>,
    /// Expose the ciphertext, as `disk export --format sealed` writes it: needs no key now, and the VM's key to open.
    /// While the VM runs, with --snapshot
    #[arg(long)]
    pub sealed: bool,
    /// Allow tools to write to the disk; its VM must be off
    #[arg(long, conflicts_with_all = ["snapshot", "sealed"])]
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
