//! `vmseal policy`.

use clap::Subcommand;
use vmseal_api::model;

use super::{DryRun, List, Show};
use crate::disk_option::parse_size;

#[derive(Subcommand)]
pub enum Policy {
    /// List the policies
    #[command(visible_alias = "ls")]
    List(List<model::Policy>),
    /// Show one policy
    Show(Show),
    /// Add a policy: whether disks are encrypted, with whose keys, when they take their room, and what guests may use
    Add {
        /// The new policy's name
        name: String,
        /// Encrypt the VMs that have this policy
        #[arg(long, required_unless_present = "plain")]
        encrypt: bool,
        /// Leave the VMs that have this policy in the clear
        #[arg(long, conflicts_with_all = ["encrypt", "provider"])]
        plain: bool,
        /// The provider of the keys; without, the one that is the default when a VM is made
        #[arg(long)]
        provider: Option<String>,
        /// Disks take room on their datastore as they are written to (so it is without --preallocate)
        #[arg(long, conflicts_with = "preallocate")]
        thin: bool,
        /// Disks take all of their room on their datastore when they are made, and keep it
        #[arg(long)]
        preallocate: bool,
        /// Guests get at most so many requests a second from each disk
        #[arg(long, value_name = "REQUESTS")]
        iops: Option<u64>,
        /// Guests read and write at most so many bytes a second on each disk, such as 200MiB
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        bandwidth: Option<u64>,
        /// Keep so much of what guests read of each disk in their hosts' memory, which is locked: multiples of 1MiB, and
        /// 256MiB at most for all disks of a VM
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        cache: Option<u64>,
        /// Keep a second copy of each disk on this datastore of the VM's host, later than the disk; the
        /// host's metrics and the alarm `replica-behind` say how it stands
        #[arg(long, value_name = "DATASTORE")]
        replicate_to: Option<String>,
        /// Copy at most so many bytes a second of each disk, at least 1MiB (100MiB without)
        #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "replicate_to")]
        replicate_rate: Option<u64>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Remove a policy that no VM uses
    #[command(visible_alias = "rm")]
    Remove {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
