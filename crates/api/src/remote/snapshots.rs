//! Snapshots that go with their VM to another control plane.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::id::{DiskId, SnapshotId};

/// What a server says of itself (`GET /api/v1/about`) that takes VMs of other control planes with their snapshots.
pub const ARRIVING_SNAPSHOTS: &str = "arrivals-snapshots";

/// A snapshot of a VM that arrives. Its files come with the disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SnapshotOfArrival {
    /// Its id, which it keeps: its files are named by it.
    pub id: SnapshotId,
    /// Its name, unique within the VM.
    pub name: String,
    /// What it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// The one that it was taken after; none for the first of its tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SnapshotId>,
    /// When it was asked for.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created: Timestamp,
    /// Whether the guest's file systems were frozen, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// Whether what the VM's disks hold now began with this one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub current: bool,
    /// Whether it keeps the guest's memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub memory: bool,
    /// The generation of that memory, where it is known: the one that a revert expects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_generation: Option<u64>,
    /// The disks that it keeps, all of them the VM's.
    pub disks: Vec<DiskId>,
}
