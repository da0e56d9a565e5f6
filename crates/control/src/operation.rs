//! The operations of tasks, in their stored form.

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
    /// Creates a VM whose rows are reserved.
    CreateVm {
        /// The VM.
        vm: VmId,
        /// The documents for cloud-init, packed, and sealed to the current run of the host's agent: nobody else can
        /// open them, nor can the agent after a restart.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cloud_init: Option<SealedKey>,
    },
    /// Starts a VM that is off.
    StartVm {
        /// The VM.
        vm: VmId,
    },
    /// Stops a VM.
    StopVm {
        /// The VM.
        vm: VmId,
        /// Cut the power.
        force: bool,
        /// How long the guest may take, in seconds.
        timeout_seconds: u32,
    },
    /// Writes a disk of a VM that is off to a file of its host.
    ExportDisk {
        /// The VM.
        vm: VmId,
        /// The disk.
        disk: DiskId,
        /// The file.
        to: PathBuf,
        /// The format of the file.
        format: ExportFormat,
        /// The passphrase of a LUKS2 file, sealed to the current run of the host's agent: nobody else can open
        /// it, nor can the agent after a restart.
        passphrase: Option<SealedKey>,
    },
    /// Gives a VM that is off another KEK.
    RecryptVm {
        /// The VM.
        vm: VmId,
        /// Its key when the task begins.
        old: KeyReference,
        /// The provider of the new key.
        provider: ProviderId,
    },
    /// Removes a VM that is off and marked as being deleted.
    DeleteVm {
        /// The VM.
        vm: VmId,
        /// Its lifecycle before.
        was: Lifecycle,
    },
    /// Written by another version of vmseal and unreadable for this one: left unchanged.
    #[serde(skip)]
    Unreadable {
        /// Its name.
        kind: String,
        /// Its VM, if that can be read.
        vm: Option<VmId>,
        /// The unreadable text.
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

    /// Its VM.
    #[must_use]
    pub fn vm(&self) -> Option<VmId> {
        match self {
            Self::CreateVm { vm, .. }
            | Self::StartVm { vm }
            | Self::StopVm { vm, .. }
            | Self::ExportDisk { vm, .. }
            | Self::RecryptVm { vm, .. }
            | Self::DeleteVm { vm, .. } => Some(*vm),
            Self::Unreadable { vm, .. } => *vm,
        }
    }

    /// Whether it can be cancelled; a deletion cannot be undone.
    #[must_use]
    pub fn can_be_cancelled(&self) -> bool {
        !matches!(self, Self::DeleteVm { .. } | Self::Unreadable { .. })
    }

    /// The resource that it holds until it ends: only one task holds a resource at a time.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        self.vm().map(Claim::Vm).into_iter().collect()
    }
}

/// A resource that a task holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// A VM with its disks and keys.
    Vm(VmId),
}

impl Claim {
    /// Its kind and id, as in the inventory.
    #[must_use]
    pub fn stored(&self) -> (&'static str, String) {
        match self {
            Self::Vm(vm) => ("vm", vm.to_string()),
        }
    }
}
