//! Which changes of a VM's power are made beside another task that has the VM (docs/decisions/312).
//!
//! | the task | stop | start, reboot | why |
//! |---|---|---|---|
//! | copies disks and uses the copies, not in their files | yes | yes | a copy goes on with the guest or without |
//! | reads files for a proof, reads a backup, merges layers | yes | yes | the same |
//! | backs up, exports, clones | yes | no | hosts start no VM while its disks are exported |
//! | any other | no | no | it needs the power as it is, or changes it |

use vmseal_api::id::VmId;

use super::Operation;

/// A change of a VM's power.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerChange {
    /// The VM is off afterwards.
    Stop,
    /// The VM runs afterwards.
    Start,
}

use PowerChange::{Start, Stop};

/// Hosts do both beside the task's job.
const BOTH: &[PowerChange] = &[Stop, Start];

/// Hosts refuse to start the VM beside the task's job.
const STOP: &[PowerChange] = &[Stop];

impl Operation {
    /// The change of its VM's power, if it does nothing else.
    #[must_use]
    pub fn power_change(&self) -> Option<PowerChange> {
        match self {
            Self::StopVm { .. } => Some(Stop),
            Self::StartVm { .. } | Self::AutostartVm { .. } | Self::RebootVm { .. } => Some(Start),
            _ => None,
        }
    }

    /// The VM whose power other tasks may change while it is at work, and how.
    #[must_use]
    pub fn leaves_power(&self) -> Option<(VmId, &'static [PowerChange])> {
        if self.is_in_place() {
            return None;
        }
        match self {
            Self::EncryptVm { vm, .. }
            | Self::DecryptVm { vm, .. }
            | Self::DeepRecryptVm { vm, .. }
            | Self::MoveVm { vm, .. }
            | Self::ProveVm { vm, .. }
            | Self::VerifyBackup { vm, .. }
            | Self::DeleteSnapshot { vm, .. } => Some((*vm, BOTH)),
            Self::BackUpVm { vm, .. } | Self::ExportDisk { vm, .. } => Some((*vm, STOP)),
            Self::CreateVm { copies: Some(copies), .. } => Some((copies.vm, STOP)),
            _ => None,
        }
    }

    /// Whether another task may change the power of this VM so while it is at work.
    #[must_use]
    pub fn leaves(&self, vm: VmId, change: PowerChange) -> bool {
        self.leaves_power().is_some_and(|(of, left)| of == vm && left.contains(&change))
    }
}
