//! Adopting the VMs of a datastore into an inventory that does not have them.

use serde::{Deserialize, Serialize};

use crate::host::Power;
use crate::id::{TaskId, VmId};

/// Which VMs of a datastore to adopt, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AdoptVms {
    /// The VMs, by the names in their descriptors or by their ids; none for all.
    #[serde(default)]
    pub vms: Vec<String>,
    /// New names for VMs whose names are taken here.
    #[serde(default)]
    pub rename: Vec<Rename>,
    /// The policy that they get, by name or id; by default the one of the name that the descriptor says.
    #[serde(default)]
    pub policy: Option<String>,
    /// Virtual processors of VMs whose descriptors do not say how many.
    #[serde(default)]
    pub vcpus: Option<u32>,
    /// Memory of VMs whose descriptors do not say how much, in bytes.
    #[serde(default)]
    pub memory: Option<u64>,
    /// Adopt encrypted VMs also where their descriptors are not authenticated: names, sizes, roles of disks and network
    /// cards are then whatever somebody wrote to the datastore.
    #[serde(default)]
    pub unauthenticated: bool,
    /// Keep these VMs, which the inventory has, as it has them: what is newer in their descriptors is given up, and these are written
    /// again. For VMs that are named, after the server was restored from a backup.
    #[serde(default)]
    pub discard_newer: bool,
}

/// A new name of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Rename {
    /// The VM, by the name in its descriptor or by its id.
    pub vm: String,
    /// Its new name.
    pub name: String,
}

/// What becomes of the VMs of a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Adoption {
    /// The datastore, by name.
    pub datastore: String,
    /// The VMs, in the order of their ids.
    pub vms: Vec<AdoptedVm>,
    /// Why the list is incomplete; none when it is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
}

/// A VM of a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AdoptedVm {
    /// Its id.
    pub vm: VmId,
    /// The name that it gets, or has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What becomes of it.
    pub status: AdoptStatus,
    /// How many disks it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disks: Option<usize>,
    /// The id of its key; none where nothing of it is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// The policy that it gets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Whether its host runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Power>,
    /// The task that adopts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskId>,
    /// What an operator should know.
    pub detail: String,
    /// How the VM on the datastore is newer than the inventory has it, a sentence each: the inventory was restored from an
    /// older backup. Of a VM that is possible or begun it is what it gets, and what is not taken.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub newer: Vec<String>,
    /// What its descriptor says otherwise than the inventory, a sentence each, and it does not get: name, size, policy, what users say of
    /// it, and snapshots. After the inventory was restored from a backup, that was changed since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub differs: Vec<String>,
    /// What it loses if it is adopted as things are, a sentence each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// What becomes of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum AdoptStatus {
    /// The inventory has it already.
    Known,
    /// It cannot be adopted as things are.
    Refused,
    /// It would be adopted, or get what it has on the datastore and not in the inventory: nothing that is known stands against
    /// it.
    Possible,
    /// A task adopts it, or what is newer of it.
    Begun,
}
