//! `vmseal vm`.

use std::time::Duration;

use bytesize::ByteSize;
use clap::Subcommand;
use vmseal_api::model;

use super::wait::duration;
use super::{Console, DryRun, List, Show, Wait};

#[derive(Subcommand)]
pub enum Vm {
    /// List the VMs
    #[command(visible_alias = "ls")]
    List(List<model::Vm>),
    /// Show one VM
    Show(Show),
    /// Make a VM
    Create {
        /// Its name
        name: String,
        /// The storage policy
        #[arg(long)]
        policy: String,
        /// Virtual processors
        #[arg(long, default_value_t = 1)]
        vcpus: u32,
        /// Memory
        #[arg(long, default_value = "512MiB", value_name = "SIZE")]
        memory: ByteSize,
        /// A disk: `datastore=NAME,size=SIZE[,name=NAME][,image=FILE]`; may be repeated, in boot order.
        /// `image` is a raw image on the host that the disk is filled from; without `size` the disk is
        /// as large as the image is, where the image is on this machine.
        #[arg(long = "disk", value_name = "OPTIONS", required = true)]
        disks: Vec<String>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Power a VM on
    Start {
        /// Its name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Ask a VM's guest to shut down
    Stop {
        /// Its name or id
        name: String,
        /// Cut the power instead
        #[arg(long)]
        force: bool,
        /// How long the guest may take (90s, 5m) before the task fails
        #[arg(long, value_name = "DURATION", value_parser = duration, conflicts_with = "force")]
        grace_period: Option<Duration>,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
    /// Open a VM's serial console; it is taken over from whoever has it
    Console(Console),
    /// Delete a VM that is off, and its disks
    #[command(visible_alias = "rm")]
    Delete {
        /// Its name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
        #[command(flatten)]
        wait: Wait,
    },
}
