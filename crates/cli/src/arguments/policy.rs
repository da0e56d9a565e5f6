//! `vmseal policy`.

use clap::Subcommand;
use vmseal_api::model;

use super::{DryRun, List, Show};
use crate::size::parse_size;

#[derive(Subcommand)]
pub enum Policy {
    /// List the policies
    #[command(visible_alias = "ls")]
    List(List<model::Policy>),
    /// Show one policy
    Show(Show),
    /// Create a policy: encryption, key provider, allocation, limits, cache, replication
    Create {
        /// The new policy's name
        name: String,
        /// Encrypt the VMs that have this policy
        #[arg(long, required_unless_present = "plain")]
        encrypt: bool,
        /// Do not encrypt the VMs that have this policy
        #[arg(long, conflicts_with_all = ["encrypt", "provider"])]
        plain: bool,
        /// The key provider [default: the default provider at the time a VM is created]
        #[arg(long)]
        provider: Option<String>,
        /// Allocate disk space as it is written (default)
        #[arg(long, conflicts_with = "preallocate")]
        thin: bool,
        /// Allocate all disk space when a disk is created
        #[arg(long)]
        preallocate: bool,
        /// IOPS limit per disk
        #[arg(long, value_name = "REQUESTS")]
        iops: Option<u64>,
        /// Bandwidth limit per disk, in bytes per second, such as 200MiB
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        bandwidth: Option<u64>,
        /// Read cache per disk, in locked memory of the host: a multiple of 1MiB, at most 256MiB for all disks of a
        /// VM
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        cache: Option<u64>,
        /// Replicate each disk, asynchronously, to this datastore of the VM's host; the metrics and the alarm
        /// `replica-behind` say how far it is behind
        #[arg(long, value_name = "DATASTORE")]
        replicate_to: Option<String>,
        /// Replication bandwidth limit per disk, in bytes per second, at least 1MiB [default: 100MiB]
        #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "replicate_to")]
        replicate_rate: Option<u64>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Delete a policy that no VM uses
    #[command(visible_alias = "rm")]
    Delete {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}
