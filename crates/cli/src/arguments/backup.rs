//! `vmseal backup`.

use std::path::PathBuf;

use clap::Subcommand;
use vmseal_api::model;

use super::vm::CopyRate;
use super::{DryRun, List, Wait};

#[derive(Subcommand)]
pub enum Backup {
    /// List backups, oldest first: those of a VM, or of all VMs, also of deleted ones
    ///
    /// `parent` is the backup that an incremental one needs.
    #[command(visible_alias = "ls")]
    List {
        /// The VM's name or id
        vm: Option<String>,
        #[command(flatten)]
        how: List<model::VmBackup>,
    },
    /// Show a backup
    Show {
        /// The VM's name or id
        vm: String,
        /// The backup's name, or its id
        backup: String,
        /// Stay, and print a line for every change until it is removed
        #[arg(short, long)]
        watch: bool,
    },
    /// Back up a VM, also while it runs or is suspended, to a directory of its host
    ///
    /// All disks are of one instant; the guest sees a short pause. Its file systems are frozen for that instant if the guest
    /// agent answers (`quiesced`). Encrypted disks are copied as ciphertext, and open with the VM's key alone. What has
    /// changed since the VM's last backup in the directory is copied, or all of it if there is none. What a TPM keeps is of the
    /// same instant, and is copied as it is encrypted.
    ///
    /// A VM that is suspended stays so, and is resumed as before. Its disks are backed up as they were when it was suspended; the saved
    /// memory of its guest is not in the backup, and what is restored from it starts as after a power cut.
    #[command(visible_alias = "take")]
    Create {
        /// The VM's name or id
        vm: String,
        /// The backup's name; by default the first of backup-1, backup-2 and so on that is free
        name: Option<String>,
        /// The directory, as an absolute path on the host, in one of the agent's --transfer-directory; by default that of the VM's last backup
        #[arg(long, value_name = "DIR")]
        to: Option<PathBuf>,
        /// Copy all of each disk
        #[arg(long)]
        full: bool,
        /// Do not freeze the guest's file systems
        #[arg(long)]
        no_quiesce: bool,
        #[command(flatten)]
        rate: CopyRate,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Read all of a backup, and check that it is as it was written and that its key opens it
    ///
    /// No guest is started, and nothing is written.
    Verify {
        /// The VM's name or id
        vm: String,
        /// The backup's name, or its id
        backup: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Restore a backup: as a new VM (--as), into the disks of a VM that is off, or as the VM that was deleted
    ///
    /// With --as the VM that was backed up stays as it is, whatever that is: running, with snapshots, encrypted or decrypted since, or
    /// deleted. The new one has an id, a key, network addresses and a TPM of its own. Its disks keep the data keys that are in the
    /// backup: `vmseal vm recrypt NAME --deep` gives it others.
    ///
    /// Without it, what the disks hold now is lost: back the VM up before, if in doubt. A VM that was deleted is made again with its
    /// id, name, TPM, disks and network cards. Nothing is encrypted anew in either case.
    Restore {
        /// The VM's name or id
        vm: String,
        /// The backup's name, or its id
        backup: String,
        /// The name of a new VM that is made of the backup
        #[arg(long = "as", value_name = "NAME", conflicts_with = "name")]
        new_vm: Option<String>,
        /// Another name for a deleted VM that is made again
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// Another host that has the backup's directory, for a new or deleted VM [default: the one that `backup show` names]
        #[arg(long, value_name = "HOST")]
        host: Option<String>,
        /// A datastore of that host for all disks of a new or deleted VM [default: those where the disks were]
        #[arg(long, value_name = "DATASTORE")]
        datastore: Option<String>,
        /// A policy for a new or deleted VM, which encrypts if the backup is encrypted [default: the one that the VM had]
        #[arg(long, value_name = "NAME")]
        policy: Option<String>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Delete a backup that no other one needs
    ///
    /// A key that was kept for it alone is destroyed.
    #[command(visible_alias = "rm")]
    Delete {
        /// The VM's name or id
        vm: String,
        /// The backup's name, or its id
        backup: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
}
