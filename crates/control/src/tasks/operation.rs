//! The operations and their steps.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{KeyReference, SealedKey};
use vmseal_api::id::{DiskId, ProviderId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;
use vmseal_api::transfer::ExportFormat;

use super::run::{Run, StepError};
use super::{create_vm, delete_vm, export_disk, recrypt_vm, start_vm, stop_vm};

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
}

/// A part of an operation. Doing and undoing may both be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The names and ids are taken; this is done with the request.
    Reserve,
    /// Has the provider make the KEK.
    MakeKey,
    /// Makes the VM known to its host.
    Register,
    /// Gives the host the KEK.
    DeliverKey,
    /// Makes the disks, and pins what is known of them.
    CreateDisks,
    /// Tells the host what is pinned; from here on the VM is whole.
    Finish,
    /// Sees that the host knows the VM and has its key.
    Prepare,
    /// Starts it.
    PowerOn,
    /// Stops it.
    PowerOff,
    /// Writes a disk to a file that has no name yet.
    WriteExport,
    /// Gives the file its name.
    NameExport,
    /// Sees that all disks open with the KEK that the VM has.
    CheckKey,
    /// Has the provider make another KEK.
    MakeNewKey,
    /// Lets the disks open with the new KEK, too.
    AddNewKey,
    /// Gives the VM the new KEK in the inventory.
    SwitchKey,
    /// Gives the host the new KEK.
    DeliverNewKey,
    /// Leaves the new KEK as the only one that opens the disks.
    DropOldKey,
    /// Has the old KEK destroyed.
    DestroyOldKey,
    /// The VM is marked as being deleted; this is done with the request.
    Mark,
    /// Removes the disks.
    DeleteDisks,
    /// Has the host forget the VM.
    Forget,
    /// Has the provider destroy the KEK.
    DestroyKey,
    /// Removes the rows.
    RemoveRows,
}

impl Operation {
    /// Its name.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::CreateVm { .. } => "vm.create",
            Self::StartVm { .. } => "vm.start",
            Self::StopVm { .. } => "vm.stop",
            Self::ExportDisk { .. } => "disk.export",
            Self::RecryptVm { .. } => "vm.recrypt",
            Self::DeleteVm { .. } => "vm.delete",
        }
    }

    /// Which VM it is about.
    #[must_use]
    pub fn vm(&self) -> VmId {
        match self {
            Self::CreateVm { vm }
            | Self::StartVm { vm }
            | Self::StopVm { vm, .. }
            | Self::ExportDisk { vm, .. }
            | Self::RecryptVm { vm, .. }
            | Self::DeleteVm { vm, .. } => *vm,
        }
    }

    /// Whether it can be stopped half-way; what has been deleted is not coming back.
    #[must_use]
    pub fn can_be_cancelled(&self) -> bool {
        !matches!(self, Self::DeleteVm { .. })
    }

    /// Its steps, in order.
    #[must_use]
    pub fn steps(&self) -> &'static [Step] {
        match self {
            Self::CreateVm { .. } => &[
                Step::Reserve,
                Step::MakeKey,
                Step::Register,
                Step::DeliverKey,
                Step::CreateDisks,
                Step::Finish,
            ],
            Self::StartVm { .. } => &[Step::Prepare, Step::PowerOn],
            Self::StopVm { .. } => &[Step::PowerOff],
            // Without a key, and without asking for one.
            Self::ExportDisk { format: ExportFormat::Sealed, .. } => {
                &[Step::WriteExport, Step::NameExport]
            }
            Self::ExportDisk { .. } => &[Step::Prepare, Step::WriteExport, Step::NameExport],
            Self::RecryptVm { .. } => &[
                Step::CheckKey,
                Step::MakeNewKey,
                Step::AddNewKey,
                Step::SwitchKey,
                Step::DeliverNewKey,
                Step::DropOldKey,
                Step::DestroyOldKey,
            ],
            Self::DeleteVm { .. } => {
                &[Step::Mark, Step::DeleteDisks, Step::Forget, Step::DestroyKey, Step::RemoveRows]
            }
        }
    }
}

impl Step {
    /// Its name, for people.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve the names",
            Self::MakeKey => "make the key",
            Self::Register => "register on the host",
            Self::DeliverKey => "deliver the key",
            Self::CreateDisks => "create the disks",
            Self::Finish => "finish",
            Self::Prepare => "register and deliver the key",
            Self::PowerOn => "power on",
            Self::PowerOff => "power off",
            Self::WriteExport => "write the file",
            Self::NameExport => "give the file its name",
            Self::CheckKey => "open every disk with the key that it has",
            Self::MakeNewKey => "make the new key",
            Self::AddNewKey => "add the new key to the disks",
            Self::SwitchKey => "give the VM the new key",
            Self::DeliverNewKey => "deliver the new key",
            Self::DropOldKey => "remove the old key from the disks",
            Self::DestroyOldKey => "destroy the old key",
            Self::Mark => "mark as being deleted",
            Self::DeleteDisks => "delete the disks",
            Self::Forget => "unregister from the host",
            Self::DestroyKey => "destroy the key",
            Self::RemoveRows => "remove from the inventory",
        }
    }

    /// Whether it is nothing for a VM without a key.
    #[must_use]
    pub fn is_of_key(self) -> bool {
        matches!(self, Self::MakeKey | Self::DeliverKey | Self::DestroyKey)
    }

    /// Whether a host may have hours of work with it, which is not given up because the host is away for a
    /// while: what it has done is there when it is back.
    #[must_use]
    pub fn waits_for_its_host(self) -> bool {
        matches!(self, Self::CreateDisks | Self::WriteExport)
    }

    /// Does it.
    pub(super) async fn forward(self, run: &Run<'_>) -> Result<(), StepError> {
        match self {
            // Both were written together with the task.
            Self::Reserve | Self::Mark => Ok(()),
            Self::MakeKey => create_vm::make_key(run).await,
            Self::Register => create_vm::register(run).await,
            Self::DeliverKey => create_vm::deliver_key(run).await,
            Self::CreateDisks => create_vm::create_disks(run).await,
            Self::Finish => create_vm::finish(run).await,
            Self::Prepare => start_vm::prepare(run).await,
            Self::PowerOn => start_vm::power_on(run).await,
            Self::PowerOff => stop_vm::power_off(run).await,
            Self::WriteExport => export_disk::write(run).await,
            Self::NameExport => export_disk::name(run).await,
            Self::CheckKey => recrypt_vm::check(run).await,
            Self::MakeNewKey => recrypt_vm::make_key(run).await,
            Self::AddNewKey => recrypt_vm::add_new(run).await,
            Self::SwitchKey => recrypt_vm::switch(run).await,
            Self::DeliverNewKey => recrypt_vm::deliver(run).await,
            Self::DropOldKey => recrypt_vm::drop_old(run).await,
            Self::DestroyOldKey => recrypt_vm::destroy_old(run).await,
            Self::DeleteDisks => delete_vm::delete_disks(run).await,
            Self::Forget => delete_vm::forget(run).await,
            Self::DestroyKey => delete_vm::destroy_keys(run).await,
            Self::RemoveRows => delete_vm::remove_rows(run).await,
        }
    }

    /// Undoes it, as far as it was done. `cause` is why.
    pub(super) async fn back(self, run: &Run<'_>, cause: &Problem) -> Result<(), StepError> {
        match self {
            Self::Reserve => create_vm::remove_rows(run).await,
            Self::MakeKey => create_vm::unmake_key(run).await,
            Self::Register => delete_vm::forget(run).await,
            Self::CreateDisks => create_vm::delete_disks(run).await,
            Self::Finish => create_vm::unfinish(run).await,
            // What was registered stays registered, and forgetting a VM forgets its key.
            Self::DeliverKey | Self::Prepare | Self::CheckKey | Self::DeliverNewKey => Ok(()),
            Self::PowerOn => start_vm::power_off(run).await,
            Self::PowerOff => stop_vm::see_what_is(run).await,
            Self::WriteExport => export_disk::drop_unnamed(run).await,
            Self::NameExport => export_disk::unname(run, cause).await,
            Self::MakeNewKey => recrypt_vm::unmake_key(run).await,
            Self::AddNewKey => recrypt_vm::drop_new(run).await,
            Self::SwitchKey => recrypt_vm::switch_back(run).await,
            Self::DropOldKey => recrypt_vm::add_old(run).await,
            Self::DestroyOldKey => recrypt_vm::is_old_there(run, cause).await,
            Self::Mark => delete_vm::unmark(run).await,
            Self::DeleteDisks => delete_vm::are_disks_whole(run, cause).await,
            Self::Forget | Self::DestroyKey | Self::RemoveRows => {
                Err(delete_vm::partly_deleted(run, cause))
            }
        }
    }
}
