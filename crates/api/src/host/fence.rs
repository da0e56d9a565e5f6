//! Keeping other hosts from the disks of a VM.

use serde::{Deserialize, Serialize};

use super::vm::VmSpec;

/// Has a host keep all others from the disks of a VM that it is to get from one that does not answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fence {
    /// The VM, as it is to be registered there. It need not be known.
    pub vm: VmSpec,
    /// The generation of its placement there.
    pub generation: u64,
}
