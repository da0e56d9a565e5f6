//! The operations that tasks carry out: what is stored of each.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{KeyReference, SealedKey};
use vmseal_api::id::{DiskId, ProviderId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::transfer::ExportFormat;

/// What a task does; stored with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum Operation {
    /// Makes a VM whose rows are reserved.
    CreateVm {
        /// Which.
        vm: VmId,
    },
    /// Starts a VM that is off.
    StartVm {
        /// Which.
        vm: VmId,
    },
    /// Stops a VM.
    StopVm {
        /// Which.
        vm: VmId,
        /// Cut the power.
        force: bool,
        /// How long the guest may take, in seconds.
        timeout_seconds: u32,
    },
    /// Writes a disk of a VM that is off to a file of its host.
    ExportDisk {
        /// Whose.
        vm: VmId,
        /// Which.
        disk: DiskId,
        /// The file.
        to: PathBuf,
        /// What is written.
        format: ExportFormat,
        /// The passphrase of a LUKS2 file, sealed to the host's agent: nobody else can open it, and it not
        /// any more when it has restarted.
        passphrase: Option<SealedKey>,
    },
    /// Gives a VM that is off another KEK.
    RecryptVm {
        /// Which.
        vm: VmId,
        /// The key that it has when the task begins.
        old: KeyReference,
        /// Whose the new one is.
        provider: ProviderId,
    },
    /// Removes a VM that is off and marked as being deleted.
    DeleteVm {
        /// Which.
        vm: VmId,
        /// What it was before.
        was: Lifecycle,
    },
    /// What another version of vmseal wrote and this one cannot read: it is left as it is.
    #[serde(skip)]
    Unreadable {
        /// Its name.
        kind: String,
        /// Which VM it is about, where that can be read.
        vm: Option<VmId>,
        /// What cannot be read.
        why: String,
    },
}

impl Operation {
    /// Its name.
    #[must_use]
    pub fn kind(&self) -> &str {
        match self {
            Self::CreateVm { .. } => "vm.create",
            Self::StartVm { .. } => "vm.start",
            Self::StopVm { .. } => "vm.stop",
            Self::ExportDisk { .. } => "disk.export",
            Self::RecryptVm { .. } => "vm.recrypt",
            Self::DeleteVm { .. } => "vm.delete",
            Self::Unreadable { kind, .. } => kind,
        }
    }

    /// Which VM it is about.
    #[must_use]
    pub fn vm(&self) -> Option<VmId> {
        match self {
            Self::CreateVm { vm }
            | Self::StartVm { vm }
            | Self::StopVm { vm, .. }
            | Self::ExportDisk { vm, .. }
            | Self::RecryptVm { vm, .. }
            | Self::DeleteVm { vm, .. } => Some(*vm),
            Self::Unreadable { vm, .. } => *vm,
        }
    }

    /// Whether it can be stopped half-way; what has been deleted is not coming back.
    #[must_use]
    pub fn can_be_cancelled(&self) -> bool {
        !matches!(self, Self::DeleteVm { .. } | Self::Unreadable { .. })
    }

    /// What it holds until it ends: one task has a thing at a time.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        self.vm().map(Claim::Vm).into_iter().collect()
    }
}

/// A thing that a task holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// A VM, with all that belongs to it.
    Vm(VmId),
}

impl Claim {
    /// Its kind and which, as the inventory has them.
    #[must_use]
    pub fn stored(&self) -> (&'static str, String) {
        match self {
            Self::Vm(vm) => ("vm", vm.to_string()),
        }
    }
}
