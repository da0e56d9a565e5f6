//! How a server and an agent of different versions of vmseal agree.
//!
//! ```text
//! server                                         agent
//!    │ GET /v1/host   (answered to every version)  │
//!    │◄────── description: contract {min, max} ────┤
//!    ├── every request: vmseal-contract: MIN-MAX ─►│  both take the highest version that both speak;
//!    │                                             │  where there is none, either refuses (`unsupported`)
//! ```
//! A reader ignores fields of an answer that it does not know, and reads unknown kinds (of notices, jobs,
//! states) as `unknown`. An agent either executes a request as a whole or refuses it: it refuses unknown
//! fields, devices and jobs. A newer server uses only what the agreed version has, or what is among the
//! agent's features.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::problem::{ErrorCode, Problem};

/// The versions that this vmseal speaks. Version 1 had separate calls for making and exporting disks, and was
/// never released.
pub const CONTRACT: ContractRange = ContractRange { min: 2, max: 2 };

/// The features of this agent beyond the first version of the contract that it speaks.
pub const FEATURES: [&str; 90] = [
    "job-create",
    "job-export",
    NICS,
    CLOUD_INIT,
    GUEST_CONTROL,
    SET_RUNNING,
    GROW_DISK,
    DESCRIPTORS,
    USAGE,
    HARDWARE,
    SCREEN_AND_GUEST,
    TPM,
    CDROM,
    MIRROR,
    MOVE,
    SNAPSHOTS,
    COPIES,
    CLOUD_INIT_COPIES,
    PROVE,
    SUSPEND,
    DUMP,
    RUNNING_KEY,
    SNAPSHOT_EXPORT,
    MEMORY_SNAPSHOTS,
    BACKUP,
    TRACKED_BACKUP,
    WHOLE_BACKUP,
    RESTORE_AS,
    MIRROR_LAYERS,
    MIRROR_MEMORY,
    MIRROR_BESIDE,
    MIRROR_PARENTS,
    MIRROR_AS_IT_IS,
    MIRROR_TPM,
    PACE,
    PACE_OF_WORK,
    PACE_OF_PROOFS,
    LINKED_CLONES,
    IN_PLACE,
    PANIC,
    MIGRATE,
    MIGRATE_ENCRYPTED,
    SHARED_DATASTORES,
    RBD_DATASTORES,
    CREATE_POOLS,
    FAILURE_DOMAINS,
    DATA_CHUNKS,
    POOL_COMPRESSION,
    POOL_KEYS,
    REMOUNT_POOLS,
    TRY_POOL_KEYS,
    MIGRATE_DISKS,
    MIGRATE_RATE,
    MIGRATE_STATE,
    MIGRATE_SNAPSHOTS,
    MIGRATE_COMPRESSED,
    MIGRATE_APART,
    MIGRATE_APART_SNAPSHOTS,
    MIGRATE_AT_REST,
    MIGRATE_SUSPENDED,
    MIGRATE_TPM_AT_REST,
    MEASURE_KEPT,
    EXAMINE_CHANGE,
    EXAMINE_NIC_CHANGE,
    MEMORY_GENERATION,
    CANCEL_START,
    REPLICA_SNAPSHOTS,
    SHARE_DATA_KEYS,
    MIRROR_REPLICAS,
    IMAGE_LAYOUTS,
    GROW_REPLICA,
    BACKUP_SUSPENDED,
    EXPOSE_KEPT,
    MEASURE_MEDIUM,
    SUSPENDED_SNAPSHOTS,
    PAUSED_SNAPSHOTS,
    ABOUT,
    TAKE_VARIABLES,
    MIGRATE_SHARED_TPM,
    MIGRATE_REPLICAS,
    FENCE_VMS,
    POOL_WAYS,
    STALLS,
    COMPARE_RESTORED,
    WAKEUP,
    TAKE_TPM_STATE,
    SURVEY_MEMORIES,
    PACE_OF_REMOVALS,
    EXAMINE_MIGRATION_PORT,
    TREATMENT,
];

/// The feature of agents that give VMs network cards.
pub const NICS: &str = "nics";

/// The feature of agents that make disks for cloud-init.
pub const CLOUD_INIT: &str = "cloud-init";

/// The feature of agents that pause, unpause and reset guests.
pub const GUEST_CONTROL: &str = "guest-control";

/// The feature of agents that wake guests which are suspended to RAM (ACPI S3), and say whether they are.
pub const WAKEUP: &str = "wakeup";

/// The feature of agents that write a core dump of a guest that panics, restart it, or leave it as it is, as its VM says.
pub const PANIC: &str = "panic";

/// The feature of agents to which a VM may be registered anew while it runs: what can change then is changed, and the
/// rest at its next start.
pub const SET_RUNNING: &str = "set-running";

/// The feature of agents that make disks longer.
pub const GROW_DISK: &str = "grow-disk";

/// The feature of agents that make disks longer which have replicas.
pub const GROW_REPLICA: &str = "grow-replica";

/// The feature of agents that survey datastores, and describe VMs there so that another inventory can adopt them.
pub const DESCRIPTORS: &str = "descriptors";

/// The feature of agents that tell what VMs use.
pub const USAGE: &str = "usage";

/// The feature of agents that give VMs another firmware, processor model or memory than the usual.
pub const HARDWARE: &str = "hardware";

/// The feature of agents that connect to screens of VMs and to the agents in their guests.
pub const SCREEN_AND_GUEST: &str = "screen-and-guest";

/// The feature of agents that give VMs a TPM.
pub const TPM: &str = "tpm";

/// The feature of agents that give VMs a CD-ROM drive, and start them from what they are told.
pub const CDROM: &str = "cdrom";

/// The feature of agents that copy disks and use the copies in their place, and that take a key for a VM that runs and has
/// none of its disks encrypted.
pub const MIRROR: &str = "job-mirror";

/// The feature of agents that copy disks to other datastores, and say on which one a disk is.
pub const MOVE: &str = "job-mirror-to-datastore";

/// The feature of agents that keep what disks hold as snapshots.
pub const SNAPSHOTS: &str = "job-snapshot";

/// The feature of agents that fill new disks from those of other VMs.
pub const COPIES: &str = "disk-copies";

/// The feature of agents that make a disk for cloud-init from that of another VM, with meta-data that names the new one.
pub const CLOUD_INIT_COPIES: &str = "cloud-init-copies";

/// The feature of agents that make disks which stand on what a snapshot of another VM keeps.
pub const LINKED_CLONES: &str = "linked-clones";

/// The feature of agents that read the files of VMs, and report whether they are encrypted.
pub const PROVE: &str = "job-prove";

/// The feature of agents that save the memory of guests to files, and have them go on from these.
pub const SUSPEND: &str = "suspend";

/// The feature of agents that number the memory of guests which they save, and have a guest go on only from the number that is expected.
pub const MEMORY_GENERATION: &str = "memory-generation";

/// The feature of agents that write core dumps.
pub const DUMP: &str = "job-dump";

/// The feature of agents that change the keys of a VM's disks while it runs.
pub const RUNNING_KEY: &str = "running-key";

/// The feature of agents that take snapshots of disks which have replicas, and restore these from backups.
pub const REPLICA_SNAPSHOTS: &str = "replica-snapshots";

/// The feature of agents that write what a snapshot keeps to a file.
pub const SNAPSHOT_EXPORT: &str = "snapshot-export";

/// The feature of agents that expose what a snapshot keeps, and ciphertext.
pub const EXPOSE_KEPT: &str = "expose-kept";

/// The feature of agents whose snapshots keep memory.
pub const MEMORY_SNAPSHOTS: &str = "snapshot-memory";

/// The feature of agents that take snapshots of VMs which are suspended, revert these and delete snapshots of them.
pub const SUSPENDED_SNAPSHOTS: &str = "snapshot-suspended";

/// The feature of agents whose snapshots keep the memory of guests which are paused.
pub const PAUSED_SNAPSHOTS: &str = "snapshot-paused";

/// The feature of agents that back VMs up.
pub const BACKUP: &str = "job-backup";

/// The feature of agents that note what guests change after a backup.
pub const TRACKED_BACKUP: &str = "tracked-backup";

/// The feature of agents whose backups have what a TPM keeps, and the disk for cloud-init.
pub const WHOLE_BACKUP: &str = "backup-beside";

/// The feature of agents that back up VMs which are suspended.
pub const BACKUP_SUSPENDED: &str = "backup-suspended";

/// The feature of agents that restore a backup of one VM as the disks of another.
pub const RESTORE_AS: &str = "restore-as";

/// The feature of agents that mark disks whose data keys other VMs get, and what they restore of such disks.
pub const SHARE_DATA_KEYS: &str = "share-data-keys";

/// The feature of agents that copy disks with their snapshots.
pub const MIRROR_LAYERS: &str = "job-mirror-layers";

/// The feature of agents that copy the memory which snapshots keep, with the disk that it is beside.
pub const MIRROR_MEMORY: &str = "job-mirror-memory";

/// The feature of agents that copy all that is beside a disk with it: the memory of a VM that is suspended, and core dumps. They refuse to
/// forget a key that any of it is under.
pub const MIRROR_BESIDE: &str = "job-mirror-beside";

/// The feature of agents that copy disks which linked clones stand on, and leave to those what they share.
pub const MIRROR_PARENTS: &str = "job-mirror-parents";

/// The feature of agents that copy the first disk of a VM in the clear to the clear, on the datastore where it is: what is beside it is sealed
/// then, or in the clear.
pub const MIRROR_AS_IT_IS: &str = "job-mirror-as-it-is";

/// The feature of agents that copy disks which have replicas, and make others of the copies.
pub const MIRROR_REPLICAS: &str = "job-mirror-replicas";

/// The feature of agents that copy what the TPM of a VM at rest keeps, with the disk that has its key.
pub const MIRROR_TPM: &str = "job-mirror-tpm";

/// The feature of agents that encrypt, decrypt and re-encrypt disks in the files that they have.
pub const IN_PLACE: &str = "job-convert";

/// The feature of agents that copy disks at a pace that is given, and may change.
pub const PACE: &str = "job-mirror-pace";

/// The feature of agents that can slow and pause what makes, reads and merges disks without a guest.
pub const PACE_OF_WORK: &str = "job-pace";

/// The feature of agents that can slow and pause the reading for a proof.
pub const PACE_OF_PROOFS: &str = "job-prove-pace";

/// The feature of agents that can slow and pause the overwriting of former images.
pub const PACE_OF_REMOVALS: &str = "job-drop-sources-pace";

/// The feature of agents that send running VMs to other hosts and receive them.
pub const MIGRATE: &str = "job-migrate";

/// The feature of agents that encrypt what they send VMs with.
pub const MIGRATE_ENCRYPTED: &str = "job-migrate-encrypted";

/// The feature of agents that send the disks of running VMs, too, to hosts that do not have their datastores.
pub const MIGRATE_DISKS: &str = "job-migrate-disks";

/// The rate of a [`super::SendJob`] that is put again is changed while it sends.
pub const MIGRATE_RATE: &str = "job-migrate-rate";

/// The feature of agents that send with these disks what a guest's firmware and its TPM keep.
pub const MIGRATE_STATE: &str = "job-migrate-state";

/// The feature of agents that send with these disks their snapshots, and what linked clones' disks stand on.
pub const MIGRATE_SNAPSHOTS: &str = "job-migrate-snapshots";

/// The feature of agents that compress what they send a guest's memory with, and read what was compressed.
pub const MIGRATE_COMPRESSED: &str = "job-migrate-compressed";

/// The feature of agents that copy disks to a host that has another key of the VM.
pub const MIGRATE_APART: &str = "job-migrate-apart";

/// The feature of agents that send to such a host the memory which snapshots keep, and put what comes under the key there.
pub const MIGRATE_APART_SNAPSHOTS: &str = "job-migrate-apart-snapshots";

/// The feature of agents that send the disks of VMs which are off to other hosts, and keep those that they receive.
pub const MIGRATE_AT_REST: &str = "job-migrate-at-rest";

/// The feature of agents that send and receive the memory of VMs which are suspended with these disks.
pub const MIGRATE_SUSPENDED: &str = "job-migrate-suspended";

/// The feature of agents that send and receive what the TPM of a VM keeps which is off or suspended, between hosts that have different keys
/// of the VM.
pub const MIGRATE_TPM_AT_REST: &str = "job-migrate-tpm-at-rest";

/// The feature of agents that leave what the TPM of a VM keeps which runs on the datastore that both hosts have.
pub const MIGRATE_SHARED_TPM: &str = "job-migrate-shared-tpm";

/// The feature of agents that send running VMs whose disks have replicas, and go on with these where they receive such VMs. Another one
/// refuses to send them, and copies nothing to the replicas of one that it receives until that is started again.
pub const MIGRATE_REPLICAS: &str = "job-migrate-replicas";

/// The feature of agents that say how much room is taken by what snapshots keep ([`super::KeptRoom`]).
pub const MEASURE_KEPT: &str = "measure-kept";

/// The feature of agents that measure media of CD-ROM drives ([`super::MediumFacts`]).
pub const MEASURE_MEDIUM: &str = "measure-medium";

/// The feature of agents that say whether a change of a VM ([`super::VmChange`]) could be made now.
pub const EXAMINE_CHANGE: &str = "examine-change";

/// The feature of agents that say so of changes of network cards, too.
pub const EXAMINE_NIC_CHANGE: &str = "examine-nic-change";

/// The feature of agents that say whether the descriptors of a VM know more of it than an inventory that was restored
/// ([`super::VmChange::Restored`]).
pub const COMPARE_RESTORED: &str = "compare-restored";

/// The feature of agents that work with a datastore which other hosts use, too.
pub const SHARED_DATASTORES: &str = "shared-datastores";

/// The feature of agents that mount pools of Ceph.
pub const RBD_DATASTORES: &str = "rbd-datastores";

/// The feature of agents that make pools of Ceph.
pub const CREATE_POOLS: &str = "create-pools";

/// The feature of agents that make pools whose copies are kept apart on what they are told.
pub const FAILURE_DOMAINS: &str = "failure-domains";

/// The feature of agents that make erasure-coded pools of as many data chunks as they are told.
pub const DATA_CHUNKS: &str = "data-chunks";

/// The feature of agents that make pools whose data is compressed as they are told.
pub const POOL_COMPRESSION: &str = "pool-compression";

/// The feature of agents that take the keys of pools of Ceph from the server.
pub const POOL_KEYS: &str = "pool-keys";

/// The feature of agents that have another process serve a pool of Ceph, and say which key its mount uses.
pub const REMOUNT_POOLS: &str = "remount-pools";

/// The feature of agents that try a key of a pool of Ceph which they do not hold.
pub const TRY_POOL_KEYS: &str = "try-pool-keys";

/// The feature of agents that mount a pool of Ceph by the latest way that they were told, say by which one it is mounted, and try others.
pub const POOL_WAYS: &str = "pool-ways";

/// The feature of agents that have requests of a disk fail which storage does not answer, where its limits say so.
pub const STALLS: &str = "stalls";

/// The feature of agents that cut images in pools of Ceph into objects as a VM's policy asks.
pub const IMAGE_LAYOUTS: &str = "image-layouts";

/// The feature of agents that put what users say of a VM into its descriptors.
pub const ABOUT: &str = "about-vms";

/// The feature of agents that put into descriptors also how a VM is migrated and drained, whether it is a template, and what was said of
/// its snapshots.
pub const TREATMENT: &str = "about-vms-treatment";

/// The feature of agents that fill the disk with a firmware's variables from a file of the host's.
pub const TAKE_VARIABLES: &str = "take-uefi-variables";

/// The feature of agents that have the TPM of a new VM keep what is in a file of the host's.
pub const TAKE_TPM_STATE: &str = "take-tpm-state";

/// The feature of agents that end a start and leave a guest alone that runs already.
pub const CANCEL_START: &str = "cancel-start";

/// The feature of agents that take the disks of VMs on pools of Ceph from hosts that do not answer.
pub const FENCE_VMS: &str = "fence-vms";

/// The feature of agents whose surveys of datastores tell which memory snapshots keep there, and which of its files cannot be used.
pub const SURVEY_MEMORIES: &str = "survey-memories";

/// The feature of agents that see whether they can connect to the port at which another host waits for VMs.
pub const EXAMINE_MIGRATION_PORT: &str = "examine-migration-port";

/// The header with a server's versions, as `MIN-MAX`.
pub const CONTRACT_HEADER: &str = "vmseal-contract";

/// The versions of the contract that one side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(from = "Written")]
pub struct ContractRange {
    /// The oldest.
    pub min: u32,
    /// The newest.
    pub max: u32,
}

/// Version 1 sent its number alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    One(u32),
    Range { min: u32, max: u32 },
}

impl From<Written> for ContractRange {
    fn from(written: Written) -> Self {
        match written {
            Written::One(version) => Self { min: version, max: version },
            Written::Range { min, max } => Self { min, max },
        }
    }
}

impl ContractRange {
    /// The highest version that both speak; none where there is none.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u32> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }

    /// The highest version that both speak. `other` is called `name` in the error.
    ///
    /// # Errors
    /// `unsupported`: there is none. The error says which side must be upgraded.
    pub fn agree(self, other: Self, name: &str) -> Result<u32, Problem> {
        self.common(other).ok_or_else(|| {
            let older = if other.max < self.min { name } else { "this side" };
            let what = format!(
                "{name} speaks {other} of the contract between server and agent, and this side (vmseal {}) speaks {self}: upgrade {older}",
                env!("CARGO_PKG_VERSION")
            );
            Problem::new(ErrorCode::Unsupported, what)
        })
    }

    /// The value of [`CONTRACT_HEADER`].
    #[must_use]
    pub fn to_header(self) -> String {
        format!("{}-{}", self.min, self.max)
    }
}

impl fmt::Display for ContractRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.min == self.max {
            return write!(f, "version {}", self.max);
        }
        write!(f, "versions {} to {}", self.min, self.max)
    }
}

/// The header is not `MIN-MAX`.
#[derive(Debug, thiserror::Error)]
#[error("'{0}' is not a range of versions of the form MIN-MAX")]
pub struct NotARange(String);

impl FromStr for ContractRange {
    type Err = NotARange;

    fn from_str(text: &str) -> Result<Self, NotARange> {
        let numbers = text.split_once('-').and_then(|(min, max)| {
            let (min, max) = (min.parse().ok()?, max.parse().ok()?);
            (min <= max).then_some(Self { min, max })
        });
        // The text comes from the other side.
        numbers.ok_or_else(|| NotARange(text.chars().take(40).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn range(min: u32, max: u32) -> ContractRange {
        ContractRange { min, max }
    }

    #[test]
    fn the_highest_common_version_is_taken() {
        assert_eq!(range(2, 4).common(range(1, 3)), Some(3));
        assert_eq!(range(2, 4).common(range(3, 9)), Some(4));
        assert_eq!(range(2, 2).common(range(2, 2)), Some(2));
        assert_eq!(range(2, 3).common(range(4, 5)), None);
        assert_eq!(range(4, 5).common(range(1, 3)), None);
    }

    #[test]
    fn the_older_side_is_named_where_ranges_do_not_meet() {
        let older = range(2, 3).agree(range(1, 1), "host 'a'").unwrap_err();
        assert_eq!(older.code, ErrorCode::Unsupported);
        assert!(older.detail.contains("host 'a' speaks version 1 "), "{older}");
        assert!(older.detail.ends_with("upgrade host 'a'"), "{older}");
        let newer = range(2, 3).agree(range(4, 5), "host 'a'").unwrap_err();
        assert!(newer.detail.contains("versions 4 to 5"), "{newer}");
        assert!(newer.detail.ends_with("upgrade this side"), "{newer}");
    }

    #[test]
    fn ranges_are_written_and_read() {
        for written in [range(1, 1), range(2, 7)] {
            assert_eq!(written.to_header().parse::<ContractRange>().unwrap(), written);
            let json = serde_json::to_string(&written).unwrap();
            assert_eq!(serde_json::from_str::<ContractRange>(&json).unwrap(), written);
        }
        // The form of the version before this one.
        assert_eq!(serde_json::from_str::<ContractRange>("1").unwrap(), range(1, 1));
        for wrong in ["", "1", "2-1", "a-b", "-1", "1-2-3"] {
            assert!(wrong.parse::<ContractRange>().is_err(), "{wrong}");
        }
    }
}
