//! The steps of each operation, and the position of a task in them.

use vmseal_api::model::TaskState;
use vmseal_api::problem::Problem;

use super::mirror_vm::in_place;
use super::step::Step;
use super::{
    add_disk, adopt_vm, backups, change_host, change_nics, clone_vm, create_vm, delete_vm, dumps,
    evacuate_vm, export_disk, grow_disk, migrate_vm, mirror_vm, prove_vm, reboot_vm, receive_vm,
    recrypt_vm, remove_disk, snapshots, start_vm, stop_vm, suspend_vm,
};
use crate::operation::Operation;
use crate::store::tasks::Task;

/// The steps of an operation, in order.
pub(crate) fn of(operation: &Operation) -> &'static [&'static dyn Step] {
    match operation {
        Operation::CreateVm { copies: Some(copies), .. } => clone_vm::steps(copies),
        Operation::CreateVm { .. } => create_vm::STEPS,
        Operation::StartVm { .. } => start_vm::STEPS,
        Operation::AutostartVm { .. } => start_vm::AUTOSTART,
        Operation::StopVm { .. } => stop_vm::STEPS,
        Operation::SuspendVm { .. } => suspend_vm::STEPS,
        Operation::RebootVm { .. } => reboot_vm::STEPS,
        Operation::AddDisk { .. } | Operation::AddTpm { .. } => add_disk::STEPS,
        Operation::RemoveDisk { .. } | Operation::RemoveTpm { .. } => remove_disk::STEPS,
        Operation::GrowDisk { .. } => grow_disk::STEPS,
        Operation::TakeSnapshot { .. } => snapshots::TAKE,
        Operation::RevertSnapshot { running: true, .. } => snapshots::REVERT_RUNNING,
        Operation::RevertSnapshot { .. } => snapshots::REVERT,
        Operation::DeleteSnapshot { .. } => snapshots::DELETE,
        Operation::ProveVm { .. } => prove_vm::STEPS,
        Operation::DumpVm { to: None, .. } => dumps::DUMP,
        Operation::DumpVm { to: Some(_), .. } => dumps::DUMP_AND_DECRYPT,
        Operation::DecryptDump { .. } => dumps::DECRYPT,
        Operation::DeleteDump { .. } => dumps::DELETE,
        Operation::BackUpVm { .. } => backups::CREATE,
        Operation::VerifyBackup { .. } => backups::VERIFY,
        Operation::RestoreBackup { .. } => backups::RESTORE,
        Operation::RestoreDeletedVm { .. } => backups::RESTORE_DELETED,
        Operation::RestoreNewVm { .. } => backups::RESTORE_NEW,
        Operation::DeleteBackup { .. } => backups::DELETE,
        Operation::AddNic { .. } => change_nics::ADD,
        Operation::RemoveNic { .. } => change_nics::REMOVE,
        Operation::ExportDisk { format, .. } => export_disk::steps(*format),
        Operation::RecryptVm { .. } => recrypt_vm::STEPS,
        Operation::EncryptVm { provider: Some(_), in_place: true, .. } => in_place::ENCRYPT,
        Operation::EncryptVm { provider: None, in_place: true, .. } => {
            in_place::ENCRYPT_WITH_ITS_KEY
        }
        Operation::DecryptVm { in_place: true, disks, .. } => match disks.is_empty() {
            true => in_place::DECRYPT,
            false => in_place::DECRYPT_DISKS,
        },
        Operation::DeepRecryptVm { in_place: true, .. } => in_place::DEEP_RECRYPT,
        Operation::EncryptVm { provider: Some(_), .. } => mirror_vm::ENCRYPT,
        Operation::EncryptVm { provider: None, .. } => mirror_vm::ENCRYPT_WITH_ITS_KEY,
        Operation::DecryptVm { disks, .. } => match disks.is_empty() {
            true => mirror_vm::DECRYPT,
            false => mirror_vm::DECRYPT_DISKS,
        },
        Operation::DeepRecryptVm { .. } => mirror_vm::DEEP_RECRYPT,
        Operation::MoveVm { .. } => mirror_vm::MOVE,
        Operation::MigrateVm { .. } => migrate_vm::STEPS,
        Operation::MigrateAway { .. } => migrate_vm::away::STEPS,
        Operation::ReceiveVm { .. } => receive_vm::STEPS,
        Operation::ChangeHost { .. } => change_host::STEPS,
        Operation::EvacuateVm { starts: true, .. } => evacuate_vm::STEPS,
        Operation::EvacuateVm { starts: false, .. } => evacuate_vm::AT_REST,
        Operation::DeleteVm { .. } => delete_vm::STEPS,
        Operation::AdoptVm { .. } => adopt_vm::STEPS,
        Operation::Unreadable { .. } => &[],
    }
}

/// The problem, with the remedy, of a failure after the commit step because of `cause`.
pub(super) fn unfinished(
    operation: &Operation,
    step: &dyn Step,
    target: &str,
    cause: &Problem,
) -> Problem {
    match operation {
        Operation::RecryptVm { .. } => recrypt_vm::unfinished(target, cause),
        converts if converts.is_in_place() => in_place::unfinished(converts, target, cause),
        mirrors if mirrors.mirrors_disks() => mirror_vm::unfinished(mirrors, target, cause),
        Operation::RemoveDisk { .. } | Operation::RemoveTpm { .. } => {
            remove_disk::unfinished(operation, target, cause)
        }
        Operation::GrowDisk { .. } => grow_disk::unfinished(target, cause),
        Operation::CreateVm { copies: Some(copies), .. } => {
            clone_vm::unfinished(copies, step, target, cause)
        }
        Operation::MigrateVm { .. } => migrate_vm::unfinished(target, cause),
        Operation::MigrateAway { .. } => migrate_vm::away::unfinished(target, cause),
        Operation::ChangeHost { .. } => change_host::unfinished(target, cause),
        Operation::EvacuateVm { .. } => evacuate_vm::unfinished(target, cause),
        Operation::TakeSnapshot { .. }
        | Operation::RevertSnapshot { .. }
        | Operation::DeleteSnapshot { .. } => snapshots::unfinished(operation, target, cause),
        Operation::DumpVm { .. } | Operation::DeleteDump { .. } => {
            dumps::unfinished(operation, target, cause)
        }
        Operation::BackUpVm { .. }
        | Operation::RestoreBackup { .. }
        | Operation::RestoreDeletedVm { .. }
        | Operation::RestoreNewVm { .. }
        | Operation::DeleteBackup { .. } => backups::unfinished(operation, target, cause),
        _ => delete_vm::unfinished(target, cause),
    }
}

/// What a task may have left that could not be undone, for people.
pub(super) fn may_be_left(operation: &Operation) -> Option<String> {
    match operation {
        Operation::CreateVm { copies: Some(copies), .. } => clone_vm::may_be_left(copies),
        _ => None,
    }
}

/// The title of the step that a task is at, or failed at.
pub(crate) fn title(task: &Task) -> &str {
    let name = match (&task.failed_step, task.ended) {
        (Some(failed), Some(_)) => failed,
        _ => &task.step,
    };
    let known = of(&task.operation).iter().find(|step| step.name() == name);
    known.map_or(name, |step| step.title())
}

/// Whether a task has come to its commit step, or is past it.
pub(super) fn is_committing(task: &Task) -> bool {
    let mut until = of(&task.operation).iter().rev().skip_while(|step| step.name() != task.step);
    until.any(|step| step.commits())
}

/// Whether a task is past its commit step.
pub(super) fn is_committed(task: &Task) -> bool {
    let before = of(&task.operation).iter().take_while(|step| step.name() != task.step);
    task.state != TaskState::RollingBack && before.into_iter().any(|step| step.commits())
}
