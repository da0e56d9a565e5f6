//! A change of a VM that its host may be asked about before it is asked for.

use serde::{Deserialize, Serialize};

use super::disk::DiskSpec;
use super::version::{COMPARE_RESTORED, EXAMINE_CHANGE, EXAMINE_NIC_CHANGE};
use super::vm::VmSpec;
use crate::boot::BootDevice;
use crate::id::{DiskId, NicId};
use crate::nic::{NicLink, NicSpec};

/// A change of a VM, which is registered unless it says otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case", deny_unknown_fields)]
pub enum VmChange {
    /// Another disk is made, and the VM registered with it: a guest that runs gets it. Its image and its room are asked
    /// about with `examine_disk`.
    AddDisk {
        /// The disk, which is not made yet.
        disk: Box<DiskSpec>,
    },
    /// The VM is registered without a disk, which a guest that runs lets go, and the disk is deleted.
    RemoveDisk {
        /// Which.
        disk: DiskId,
    },
    /// A disk is made longer, as `grow_disk` does.
    GrowDisk {
        /// Which.
        disk: DiskId,
        /// Its new size, in bytes.
        size: u64,
    },
    /// The VM is started, as `power_on` does. Its network cards are asked about with `examine_nic`, and what its machine
    /// is with `examine_hardware`.
    Start {
        /// What its firmware tries first this time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        first: Option<BootDevice>,
        /// Whether memory that is saved is given up before.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        discard_memory: bool,
        /// The generation that its saved memory must be of, as with `power_on_with`; none does not ask for one. Agents without the
        /// feature [`MEMORY_GENERATION`](super::version::MEMORY_GENERATION) do not know it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        generation: Option<u64>,
    },
    /// The VM is registered with another network card: a guest that runs gets it, on what the host connects it to. What that
    /// lacks for a VM that is off is asked about with `examine_nic`.
    AddNic {
        /// The card.
        nic: NicSpec,
    },
    /// The VM is registered without a network card, which a guest that runs lets go.
    RemoveNic {
        /// Which.
        nic: NicId,
    },
    /// The VM is registered with a network card that is plugged in or out.
    SetLink {
        /// Which.
        nic: NicId,
        /// Whether it is plugged in then.
        link: NicLink,
    },
    /// The VM is registered as an inventory has it that was restored from a backup. Refused with `wrong-state` where a descriptor on its
    /// datastores that has a MAC, under whatever key, has disks, sizes of disks or snapshots that this lacks, or other network cards, and where one
    /// cannot be looked at. The host need not know the VM.
    Restored {
        /// The VM.
        spec: Box<VmSpec>,
    },
}

impl VmChange {
    /// The feature of agents that can be asked about it.
    #[must_use]
    pub fn feature(&self) -> &'static str {
        match self {
            Self::AddDisk { .. }
            | Self::RemoveDisk { .. }
            | Self::GrowDisk { .. }
            | Self::Start { .. } => EXAMINE_CHANGE,
            Self::AddNic { .. } | Self::RemoveNic { .. } | Self::SetLink { .. } => {
                EXAMINE_NIC_CHANGE
            }
            Self::Restored { .. } => COMPARE_RESTORED,
        }
    }
}
