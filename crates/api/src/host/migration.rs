//! Moving a running VM from one host to another.
//!
//! ```text
//! destination  put ─► Waiting ─► Running (the source has connected) ─► ReadyToCommit ─ commit ─► the VM runs here
//!                                                                     (its memory is loaded)
//! source       put ─► Running ──────────────────────────────────────► ReadyToCommit ─ commit ─► its processes have ended
//!                     (its guest runs)          (its guest stands still, its disks are free)
//! ```
//! Disks on datastores that the destination does not have are copied meanwhile to datastores that it has, with keys of their own
//! ([`ArrivingCopies`]); the copies are complete when the guest stands still.
//!
//! A VM that is off is sent the same way, without a guest: the states are the same, nothing stands still, and the VM is off at the
//! destination when that is committed. While the source has its job, it starts the VM as little as it does one that is handed over.
//!
//! A host never takes part in a migration that the control plane has not specified, to both hosts alike. Until the
//! destination's job is committed, cancelling it and then the source's has the guest go on where it was. Once the destination
//! has been asked to commit, its answer decides: where the VM runs there, the source's job is committed as well.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::key::SealedKey;
use super::{DatastoreSpec, VmSpec};
use crate::id::{DiskId, MigrationId, VmId};

/// The length of the key of a migration, in bytes.
pub const MIGRATION_KEY_LEN: usize = 32;

/// What both hosts are told of a migration. It is made anew for each attempt, and serves one session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigrationSession {
    /// The attempt.
    pub migration: MigrationId,
    /// The nonce of the session.
    pub nonce: u64,
    /// The key of the session, sealed to this host's key box with [`migration_info`].
    pub key: SealedKey,
    /// How many connections there are: 1 to 64 (docs/formats/migration-wire.md).
    pub streams: u16,
    /// Whether what they carry is encrypted. The connections themselves are authenticated in either case.
    pub encrypted: bool,
    /// Whether the hosts have different keys of the VM, as those of two control planes do: the keys of the copies are wrapped under
    /// one that both derive from the key of the session, not of the VM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub apart: bool,
}

/// The context that the key of a session is sealed with.
#[must_use]
pub fn migration_info(vm: VmId, migration: MigrationId) -> Vec<u8> {
    format!("vmseal migration v1\0{vm}\0{migration}").into_bytes()
}

/// Sends a running VM to another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SendJob {
    /// The disks of the VM, each once.
    pub disks: Vec<DiskId>,
    /// Those of them that the other host gets copies of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub copies: Vec<DiskId>,
    /// How; committing and cancelling do without. The same job with another rate changes that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begin: Option<Box<Departure>>,
}

/// How a VM is sent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Departure {
    /// The session.
    pub session: MigrationSession,
    /// Where the other host waits for it.
    pub to: SocketAddr,
    /// The longest that the guest is to stand still while the rest of its memory is sent, in milliseconds.
    pub downtime_milliseconds: u32,
    /// The highest rate, in bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Whether the guest's memory is compressed where that gets it there sooner. Both hosts have
    /// [`MIGRATE_COMPRESSED`](super::version::MIGRATE_COMPRESSED).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compresses: bool,
    /// Whether the VM is off: its disks are copied, all of them, and nothing else is sent but what its TPM keeps. Both hosts have
    /// [`MIGRATE_AT_REST`](super::version::MIGRATE_AT_REST), and if it has a TPM [`MIGRATE_TPM_AT_REST`](super::version::MIGRATE_TPM_AT_REST).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_rest: bool,
    /// Whether one that is off is suspended: the memory of its guest, which is beside its first disk, is sent with that. Both hosts have
    /// [`MIGRATE_SUSPENDED`](super::version::MIGRATE_SUSPENDED).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
}

impl SendJob {
    /// Whether it begins to send a VM that is off.
    #[must_use]
    pub fn begins_at_rest(&self) -> bool {
        self.begin.as_ref().is_some_and(|departure| departure.at_rest)
    }
}

/// Receives a running VM from another host. It need not be registered, and is when the job is committed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReceiveJob {
    /// The disks of the VM, each once.
    pub disks: Vec<DiskId>,
    /// The copies that are made here of some of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies: Option<ArrivingCopies>,
    /// How; committing and cancelling do without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begin: Option<Box<Arrival>>,
}

/// The copies that a host makes of the disks of a VM that it receives. Cancelling the job removes them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrivingCopies {
    /// The generation of the VM's placement here.
    pub generation: u64,
    /// The disks, each once.
    pub disks: Vec<ArrivingCopy>,
    /// Whether the VM is off: they are all of its disks, nothing else comes but what its TPM keeps, and it is off here when the job is
    /// committed. Both hosts have [`MIGRATE_AT_REST`](super::version::MIGRATE_AT_REST), and if it has a TPM
    /// [`MIGRATE_TPM_AT_REST`](super::version::MIGRATE_TPM_AT_REST).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_rest: bool,
    /// Whether one that is off is suspended: the memory of its guest comes with its first disk, and it is suspended here when the job is
    /// committed. Both hosts have [`MIGRATE_SUSPENDED`](super::version::MIGRATE_SUSPENDED).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended: bool,
}

/// A copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrivingCopy {
    /// The disk.
    pub disk: DiskId,
    /// Where its copy is made.
    pub datastore: DatastoreSpec,
}

/// How a VM is received.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arrival {
    /// The session.
    pub session: MigrationSession,
    /// The VM, as it will be registered here; disks that are copied are on the datastores of their copies, and have no facts yet.
    pub vm: VmSpec,
    /// Its key, sealed with [`super::key_info`]; none where it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<SealedKey>,
    /// The generation of its placement here: higher than any before.
    pub generation: u64,
}

impl ReceiveJob {
    /// Whether it receives a VM that is off.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.copies.as_ref().is_some_and(|copies| copies.at_rest)
    }
}

/// How far a migration is, as its source sees it; and what its destination has of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MigrationProgress {
    /// How often the memory was gone through.
    pub passes: u64,
    /// What is left to send of the memory, in bytes; in phase `disks`, what the copies of disks lack.
    pub remaining: u64,
    /// What has been sent of the memory, in bytes; in phase `disks`, what has been copied of the disks. Their holes do not count.
    pub sent: u64,
    /// How much memory the guest changes, in bytes a second, as QEMU measures it; in phase `disks`, how much the guest writes to the
    /// disks that are copied. Earlier agents do not say the latter.
    pub dirty_rate: u64,
    /// How fast QEMU sends, in bytes a second; in phase `disks`, how fast disks are sent. Earlier agents do not say the latter.
    pub rate: u64,
    /// How long the guest would stand still now, in milliseconds; after the switch-over, how long QEMU says that it did.
    pub downtime_milliseconds: u64,
    /// By how much the guest is slowed down so that it changes less, in percent.
    pub throttle: u64,
    /// Whether QEMU has sent all of it, and the guest stands still. Earlier agents do not say so.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all_sent: bool,
    /// What the threads of the source need that read, seal and send it. Earlier agents do not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealing: Option<SealingWork>,
    /// How long the memory has been sent, in milliseconds, as QEMU measures it. Earlier agents do not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_milliseconds: Option<u64>,
    /// What has been sent of the disks that the destination gets copies of; none if there are none. Earlier agents do not say so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<DisksSent>,
    /// What the destination's agent has written into the guest's memory itself, in bytes. Only the destination says it; none where
    /// QEMU has loaded all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<u64>,
}

/// What the threads of a migration's streams need of the processor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SealingWork {
    /// CPU time up to now, in milliseconds.
    pub cpu_milliseconds: u64,
    /// CPU time of late for each second, in percent: 100 is one core.
    pub cpu_percent: u64,
}

/// What was sent of disks, with the snapshots and memories that are sent with them: what their connections carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DisksSent {
    /// Until the memory followed, in bytes.
    pub bytes: u64,
    /// How long that took, in milliseconds.
    pub milliseconds: u64,
    /// While the memory was sent and the guest stood still, in bytes: what it had changed.
    pub later_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an agent reported before it knew of the fields that are optional.
    const EARLIER: &str = r#"{"passes":1,"remaining":2,"sent":3,"dirty_rate":4,"rate":5,"downtime_milliseconds":6,"throttle":7}"#;

    #[test]
    fn the_progress_of_an_earlier_agent_is_read() {
        let read: MigrationProgress = serde_json::from_str(EARLIER).unwrap();
        assert_eq!(
            (read.all_sent, read.sealing, read.placed, read.throttle),
            (false, None, None, 7)
        );
        assert_eq!((read.memory_milliseconds, read.disks), (None, None));
        assert_eq!(serde_json::to_string(&read).unwrap(), EARLIER, "what it does not know is sent");
    }
}
