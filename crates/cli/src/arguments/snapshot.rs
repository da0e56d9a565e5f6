//! `vmseal snapshot`.

use clap::Subcommand;
use vmseal_api::model;

use super::{DryRun, List, Wait};

#[derive(Subcommand)]
pub enum Snapshot {
    /// List the snapshots of a VM, oldest first
    ///
    /// `parent` is the snapshot that a snapshot was taken after: they form a tree. What the VM's disks hold now began
    /// with the `current` one.
    #[command(visible_alias = "ls")]
    List {
        /// The VM's name or id
        vm: String,
        #[command(flatten)]
        how: List<model::Snapshot>,
    },
    /// Show a snapshot
    Show {
        /// The VM's name or id
        vm: String,
        /// The snapshot's name, or its id
        snapshot: String,
        /// Stay, and print a line for every change until it is removed
        #[arg(short, long)]
        watch: bool,
    },
    /// Keep what the disks of a VM hold now, also while it runs or is suspended
    ///
    /// All disks are kept at one instant; the guest sees a short pause. Its file systems are frozen meanwhile if the
    /// guest agent answers (`quiesced`); else the snapshot is as after a power cut. With `--memory` the guest's
    /// memory is kept, with the state of its TPM; without, neither is. Disks of an encrypted VM stay ciphertext, under the key that
    /// they have.
    #[command(visible_alias = "take")]
    Create {
        /// The VM's name or id
        vm: String,
        /// The snapshot's name; by default the first of snapshot-1, snapshot-2 and so on that is free
        name: Option<String>,
        /// What it is
        #[arg(long, value_name = "TEXT")]
        description: Option<String>,
        /// Do not freeze the guest's file systems
        #[arg(long)]
        no_quiesce: bool,
        /// Keep the guest's memory, too: a guest that runs stands still while that is saved, and goes on; one that is paused stays
        /// paused; that of a suspended VM is saved already
        #[arg(long)]
        memory: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Have the disks of a VM hold what a snapshot keeps
    ///
    /// The VM is off, and stays so, unless --running is given. A snapshot with memory leaves it suspended: `vmseal vm resume` has its
    /// guest go on where it was then; one that was paused is paused again. A VM that is suspended loses its saved memory: unless a
    /// snapshot keeps that, too, --discard-memory is needed.
    ///
    /// What they hold now is lost, as far as no other snapshot keeps it: take one before, if in doubt.
    Revert {
        /// The VM's name or id
        vm: String,
        /// The snapshot's name, or its id
        snapshot: String,
        /// Have the guest run afterwards, and go on where it was if the snapshot keeps its memory; the power of a VM that runs is cut
        /// first
        #[arg(long)]
        running: bool,
        /// Give the saved memory of a suspended VM up
        #[arg(long)]
        discard_memory: bool,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Delete a snapshot, also while its VM runs or is suspended
    ///
    /// The VM's disks and its other snapshots stay as they are. What nothing needs apart any more is merged; the guest
    /// goes on meanwhile, and sees a short pause at the end.
    #[command(visible_alias = "rm")]
    Delete {
        /// The VM's name or id
        vm: String,
        /// The snapshot's name, or its id
        snapshot: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
}
