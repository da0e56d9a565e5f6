//! What a host finds on a datastore, for a server that has lost its inventory.

use serde::{Deserialize, Serialize};

use super::descriptor::VmDescriptor;
use super::disk::DiskFacts;
use super::state::DiskState;
use crate::datastore::HeaderRole;
use crate::id::{DatastoreId, DiskId, ProviderId, SnapshotId, VmId};

/// What a host finds at the place of a datastore, whatever mark it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DatastoreSurvey {
    /// The datastore that its mark names; none without a mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mark: Option<DatastoreId>,
    /// The homes of VMs, in the order of their ids.
    pub vms: Vec<FoundVm>,
    /// Why the list is incomplete; none when it is complete.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
}

/// The home of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundVm {
    /// The VM that its directory is called by.
    pub vm: VmId,
    /// Its descriptor, as it was found.
    pub descriptor: FoundDescriptor,
    /// The memory that snapshots of the descriptor's keep here, as far as its files are whole. Not authenticated. Agents without the feature
    /// [`SURVEY_MEMORIES`](super::version::SURVEY_MEMORIES) do not tell.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub memories: Vec<KeptMemory>,
    /// Files here that have the names of these snapshots' memories, and cannot be read or are no such memories: it is not known whether
    /// these snapshots keep memory.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unusable_memories: Vec<UnusableMemory>,
}

/// The memory that a snapshot keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptMemory {
    /// The snapshot, as the file is called.
    pub snapshot: SnapshotId,
    /// Which of the VM's memories it is, as the file's header says; 0 where nobody has counted it.
    pub generation: u64,
}

/// A file that is called as the memory of a snapshot, and cannot be taken for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnusableMemory {
    /// The snapshot, as the file is called.
    pub snapshot: SnapshotId,
    /// Which file it is, and why, for people.
    pub detail: String,
}

/// A disk of a VM whose descriptor is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderDisk {
    /// The disk, as its file is called.
    pub disk: DiskId,
    /// Its size, by the length of its file.
    pub size: u64,
    /// The facts that the host would pin of it: LUKS2 where it has a header.
    pub facts: DiskFacts,
    /// What its header says that it is for.
    #[serde(default, skip_serializing_if = "HeaderRole::is_data")]
    pub role: HeaderRole,
}

/// A descriptor as a host finds it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum FoundDescriptor {
    /// It can be read.
    Read {
        /// What it says. Not authenticated.
        descriptor: Box<VmDescriptor>,
        /// The facts that the host would pin of those disks of which it says none.
        made: Vec<DiskState>,
    },
    /// It is missing; this is what the images beside its place say. Nothing of it is authenticated.
    Missing {
        /// The images, in the order of their ids, which is that in which disks are made.
        images: Vec<HeaderDisk>,
        /// The provider and the id of the key that all headers name; none where none is encrypted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<(ProviderId, String)>,
    },
    /// It cannot be used.
    Unusable {
        /// Why.
        detail: String,
    },
}
