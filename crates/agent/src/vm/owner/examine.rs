//! Whether the VM could be changed now: the checks of the change itself, and nothing of it is done.

use vmseal_api::host::{VmChange, VmSpec};
use vmseal_api::problem::Problem;

use super::Owner;
use crate::rules::exclusion::Action;
use crate::rules::find_disk;
use crate::rules::plugging::{with_disk, with_link, with_nic, without_disk, without_nic};
use crate::storage::restored;

impl Owner {
    /// Checks that the VM could be changed so.
    pub(super) async fn examine_change(&mut self, change: VmChange) -> Result<(), Problem> {
        match change {
            VmChange::AddDisk { disk } => {
                let new = with_disk(self.registered(), &disk, self.key())?;
                self.examine_registration(&new).await
            }
            VmChange::RemoveDisk { disk } => {
                let disk = find_disk(self.registered(), disk)?.clone();
                let new = without_disk(self.registered(), &disk);
                self.examine_registration(&new).await?;
                // A guest that runs does not have it any more when it is deleted.
                let mut situation = self.situation();
                situation.unused.push(disk.disk);
                situation.may(Action::DeleteDisk, Some(&disk)).map(drop)
            }
            VmChange::GrowDisk { disk, size } => self.examine_growth(disk, size).await,
            VmChange::Start { first, discard_memory, generation } => {
                self.examine_start(first, discard_memory, generation).await
            }
            VmChange::AddNic { nic } => {
                let new = with_nic(self.registered(), &nic)?;
                self.examine_registration(&new).await
            }
            VmChange::RemoveNic { nic } => {
                let new = without_nic(self.registered(), nic)?;
                self.examine_registration(&new).await
            }
            VmChange::SetLink { nic, link } => {
                let new = with_link(self.registered(), nic, link)?;
                self.examine_registration(&new).await
            }
            VmChange::Restored { spec } => restored::examine(&spec).await,
        }
    }

    async fn examine_registration(&mut self, new: &VmSpec) -> Result<(), Problem> {
        // Repeating the same is always allowed.
        if self.registered() == new {
            return Ok(());
        }
        self.may_register(new)?;
        if !self.has_guest() {
            return Ok(());
        }
        let difference = self.difference(new).await?;
        self.may_plug(&difference).await
    }
}
