//! Which tasks change the devices of a VM.

use super::Operation;

impl Operation {
    /// Whether it adds, removes or changes disks or network cards of its VM. Its host then knows of some, to make, plug out or delete
    /// them, that the inventory does not have, and would forget those if anybody else told it of the VM as the inventory has it.
    #[must_use]
    pub fn changes_devices(&self) -> bool {
        matches!(
            self,
            Self::AddDisk { .. }
                | Self::RemoveDisk { .. }
                | Self::GrowDisk { .. }
                | Self::AddTpm { .. }
                | Self::RemoveTpm { .. }
                | Self::AddNic { .. }
                | Self::RemoveNic { .. }
                | Self::RestoreBackup { .. }
                | Self::DeleteVm { .. }
                | Self::AdoptVm { .. }
                // It may be one of these.
                | Self::Unreadable { .. }
        )
    }
}
