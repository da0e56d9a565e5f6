//! What tasks hold, so that no two of them work on the same thing.

use vmseal_api::id::{BackupId, VmId};

/// A resource that a task holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// A VM with its disks and keys.
    Vm(VmId),
    /// The power alone of a VM that another task has ([`super::Operation::leaves_power`]).
    Power(VmId),
    /// A backup, whatever becomes of its VM.
    Backup(BackupId),
}

impl Claim {
    /// Its kind and id, as in the inventory.
    #[must_use]
    pub fn stored(&self) -> (&'static str, String) {
        match self {
            Self::Vm(vm) => ("vm", vm.to_string()),
            Self::Power(vm) => ("vm-power", vm.to_string()),
            Self::Backup(backup) => ("backup", backup.to_string()),
        }
    }
}
