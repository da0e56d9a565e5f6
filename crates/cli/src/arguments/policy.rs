//! `vmseal policy`.

use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use vmseal_api::datastore::Messenger;
use vmseal_api::failure_domain::FailureDomain;
use vmseal_api::host::{STALL_TIMEOUT, STALL_TIMEOUT_MAX, STALL_TIMEOUT_MIN};
use vmseal_api::model;
use vmseal_api::osd_encryption::AskedOsds;
use vmseal_api::redundancy::Redundancy;

use super::wait::duration;
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
        /// Encrypt the VMs that have this policy; storage that deduplicates or compresses gains nothing on their disks
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
        /// When a datastore does not answer, have guests wait (`wait`), or requests of the disk fail (`error`) after 60s or the time given,
        /// 5s to 1h, until it has answered all that it was given [default: wait]
        #[arg(long, value_name = "wait|error[,DURATION]", value_parser = on_stall)]
        on_stall: Option<OnStall>,
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
        /// The processor model of its VMs: `host`, or a name that QEMU on the host knows [default: each VM's own choice]
        #[arg(long, value_name = "MODEL")]
        cpu_model: Option<String>,
        /// How long guests may stand still when their VMs move to another host, such as 100ms, unless the command says so [default: 300ms]
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        downtime: Option<Duration>,
        /// Start VMs whose disks are in pools of Ceph only where connections to these are encrypted (`secure`) [default: any]
        #[arg(long, value_name = "MODE", value_parser = messenger)]
        messenger: Option<Messenger>,
        /// Start VMs whose disks are in pools of Ceph only where the clusters' OSDs are known to be encrypted (`required`) [default: any]
        #[arg(long, value_name = "required|any")]
        osd_encryption: Option<AskedOsds>,
        /// Make disks only in pools of Ceph that outlive so many failures, such as 1 or 1,mirroring or 2,erasure-coding
        #[arg(long, value_name = "NUMBER[,LAYOUT]")]
        failures_to_tolerate: Option<Redundancy>,
        /// Make disks only in pools of Ceph whose erasure coding has so many data chunks (k), 2 to 32 [default: any]
        #[arg(long, value_name = "NUMBER", requires = "failures_to_tolerate")]
        data_chunks: Option<u32>,
        /// Make disks only in pools of Ceph that keep copies apart on this, or on what is larger: each in another host, rack, room.
        /// What --failures-to-tolerate counts is then at least that large
        #[arg(long, value_name = "DOMAIN", value_parser = failure_domain())]
        failure_domain: Option<FailureDomain>,
        /// Cut images in pools of Ceph into objects of this size: a power of two, 4KiB to 32MiB [default: the cluster's, 4MiB]
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        object_size: Option<u64>,
        /// Stripe such images: so much in one object before the next one follows, such as 64KiB
        #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "stripe_count")]
        stripe_unit: Option<u64>,
        /// How many objects stripes go around, 2 to 256
        #[arg(long, value_name = "NUMBER", requires = "stripe_unit")]
        stripe_count: Option<u32>,
        #[command(flatten)]
        dry_run: DryRun,
    },
    /// Change a policy; --dry-run lists the VMs that have it, and what each would need
    ///
    /// Limits and cache become those of the VMs' disks, at the next start of each. Keys, allocation, replicas and objects
    /// stay as they were made. Encryption does not change while VMs have the policy.
    Set(SetPolicy),
    /// Delete a policy that no VM uses
    #[command(visible_alias = "rm")]
    Delete {
        /// Name or id
        name: String,
        #[command(flatten)]
        dry_run: DryRun,
    },
}

/// What a policy asks of connections to Ceph: `any` is nothing.
fn messenger(text: &str) -> Result<Messenger, String> {
    match text {
        "secure" => Ok(Messenger::Secure),
        "any" => Ok(Messenger::Crc),
        _ => Err("it is 'secure' or 'any'".to_owned()),
    }
}

/// After how many seconds without an answer of the datastore requests fail; none: guests wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnStall(pub Option<u32>);

fn on_stall(text: &str) -> Result<OnStall, String> {
    let time = match text.split_once(',') {
        None if text == "wait" => return Ok(OnStall(None)),
        None if text == "error" => return Ok(OnStall(Some(STALL_TIMEOUT))),
        Some(("error", time)) => duration(time)?,
        _ => return Err("it is 'wait', 'error', or 'error,2m'".to_owned()),
    };
    let seconds = u32::try_from(time.as_secs()).ok().filter(|_| time.subsec_nanos() == 0);
    seconds
        .filter(|seconds| (STALL_TIMEOUT_MIN..=STALL_TIMEOUT_MAX).contains(seconds))
        .map(|seconds| OnStall(Some(seconds)))
        .ok_or_else(|| {
            format!("the time must be {STALL_TIMEOUT_MIN} to {STALL_TIMEOUT_MAX} whole seconds")
        })
}

/// What stands for any failure domain.
pub const ANY_DOMAIN: &str = "any";

fn failure_domain() -> impl TypedValueParser<Value = FailureDomain> {
    let names = PossibleValuesParser::new(FailureDomain::ALL.map(FailureDomain::name));
    names.try_map(|name| name.parse::<FailureDomain>())
}

fn failure_domain_or_any() -> PossibleValuesParser {
    let names = FailureDomain::ALL.map(FailureDomain::name);
    PossibleValuesParser::new([ANY_DOMAIN].into_iter().chain(names))
}

/// What is changed of a policy; what is not given stays.
#[derive(Args)]
#[group(id = "change", required = true, multiple = true)]
pub struct SetPolicy {
    /// Name or id
    #[arg(group = "which")]
    pub policy: String,
    /// Another name
    #[arg(long, value_name = "NAME", group = "change")]
    pub name: Option<String>,
    /// Encrypt the VMs that get this policy
    #[arg(long, group = "change")]
    pub encrypt: bool,
    /// Do not encrypt the VMs that get this policy
    #[arg(long, group = "change", conflicts_with_all = ["encrypt", "provider"])]
    pub plain: bool,
    /// The key provider of VMs that are created; `default` is the default one at that time
    #[arg(long, group = "change")]
    pub provider: Option<String>,
    /// Allocate the space of disks that are created as it is written
    #[arg(long, group = "change", conflicts_with = "preallocate")]
    pub thin: bool,
    /// Allocate all space when a disk is created
    #[arg(long, group = "change")]
    pub preallocate: bool,
    /// IOPS limit per disk; 0 is none
    #[arg(long, value_name = "REQUESTS", group = "change")]
    pub iops: Option<u64>,
    /// Bandwidth limit per disk, in bytes per second, such as 200MiB; 0 is none
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "change")]
    pub bandwidth: Option<u64>,
    /// When a datastore does not answer, have guests wait (`wait`), or requests of the disk fail (`error`) after 60s or the time given
    #[arg(long, value_name = "wait|error[,DURATION]", value_parser = on_stall, group = "change")]
    pub on_stall: Option<OnStall>,
    /// Read cache per disk; 0 is none
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "change")]
    pub cache: Option<u64>,
    /// Replicate each disk of VMs that are created to this datastore of the VM's host
    #[arg(long, value_name = "DATASTORE", group = "change")]
    pub replicate_to: Option<String>,
    /// Replication bandwidth limit per disk, in bytes per second, at least 1MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "change")]
    pub replicate_rate: Option<u64>,
    /// Do not replicate the disks of VMs that are created
    #[arg(long, group = "change", conflicts_with_all = ["replicate_to", "replicate_rate"])]
    pub no_replica: bool,
    /// The processor model of VMs that are created; `any` leaves it to each. Not while VMs have another one
    #[arg(long, value_name = "MODEL", group = "change")]
    pub cpu_model: Option<String>,
    /// How long guests may stand still when their VMs move to another host, such as 100ms; 0s is the usual 300ms
    #[arg(long, value_name = "DURATION", value_parser = duration, group = "change")]
    pub downtime: Option<Duration>,
    /// Start VMs whose disks are in pools of Ceph only where connections to these are encrypted (`secure`), or over `any`
    #[arg(long, value_name = "MODE", value_parser = messenger, group = "change")]
    pub messenger: Option<Messenger>,
    /// Start VMs whose disks are in pools of Ceph only where the clusters' OSDs are known to be encrypted (`required`), or on `any`
    #[arg(long, value_name = "required|any", group = "change")]
    pub osd_encryption: Option<AskedOsds>,
    /// Make disks only in pools of Ceph that outlive so many failures, such as 1 or 2,erasure-coding; 0 is anywhere
    #[arg(long, value_name = "NUMBER[,LAYOUT]", group = "change")]
    pub failures_to_tolerate: Option<Redundancy>,
    /// Make disks only in pools of Ceph whose erasure coding has so many data chunks (k); 0 leaves it to the pool
    #[arg(long, value_name = "NUMBER", group = "change")]
    pub data_chunks: Option<u32>,
    /// Make disks only in pools of Ceph that keep copies apart on this, or on what is larger; `any` leaves it to the pool
    #[arg(long, value_name = "DOMAIN", value_parser = failure_domain_or_any(), group = "change")]
    pub failure_domain: Option<String>,
    /// Cut images in pools of Ceph that are made from now on into objects of this size; 0 is the cluster's
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "change")]
    pub object_size: Option<u64>,
    /// Stripe such images: so much in one object before the next one follows; 0 is no stripes
    #[arg(long, value_name = "SIZE", value_parser = parse_size, group = "change")]
    pub stripe_unit: Option<u64>,
    /// How many objects stripes go around; 0 is no stripes
    #[arg(long, value_name = "NUMBER", group = "change")]
    pub stripe_count: Option<u32>,
    #[command(flatten)]
    pub dry_run: DryRun,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_stalls_waits_or_fails_after_a_time_within_limits() {
        for (text, expected) in [
            ("wait", Some(None)),
            ("error", Some(Some(60))),
            ("error,5", Some(Some(5))),
            ("error,1h", Some(Some(3600))),
            ("error,4s", None),
            ("error,2h", None),
            ("error,5500ms", None),
            ("error,", None),
            ("wait,5s", None),
            ("report", None),
        ] {
            let parsed = on_stall(text).ok().map(|OnStall(seconds)| seconds);
            assert_eq!(parsed, expected, "{text}");
        }
    }
}
