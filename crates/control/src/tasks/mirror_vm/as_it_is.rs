//! The first disk of a VM where it stays in the clear while the VM gets its key or gives it up ([`super`]).
//!
//! The memory that snapshots keep, that of a suspended VM, and core dumps are beside the first disk, and belong to the VM:
//! they are under its key while it has one, and in the clear otherwise. They follow a copy of that disk. So where there are any
//! the disk is copied as it is, in the clear to the clear, and they are sealed, or not, when the copy is used.

use vmseal_api::host::{Power, VmState};
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};

use super::{concerns, copied, stays_encrypted};
use crate::operation::Operation;
use crate::store::disks::Disk;
use crate::store::vms::Vm;
use crate::store::{dumps, snapshots};
use crate::tasks::run::{Run, StepError, state_of};

/// The first disk, which the host has what is beside it with, of a VM that gets or gives up its key by an operation that leaves that
/// disk in the clear.
pub(crate) fn first_left(operation: &Operation, vm: &Vm, known: &[Disk]) -> Option<DiskId> {
    let changes_key = match operation {
        // Where an attempt before has made the key, the policy is given with the disks.
        Operation::EncryptVm { policy, provider, .. } => provider.is_some() || *policy != vm.policy,
        // Also where an attempt before has given the policy, and a core dump under the key keeps that from being given up.
        operation => operation.gives_up_key() && vm.key.is_some(),
    };
    // The key of a VM with a TPM comes and goes with that.
    if !changes_key || operation.is_in_place() || known.iter().any(stays_encrypted) {
        return None;
    }
    let first = known.iter().find(|disk| disk.facts.is_some() && !disk.detached)?;
    (!first.encrypted && !concerns(operation, first)).then_some(first.id)
}

/// That disk, where there is something beside it.
pub(super) async fn copied_so(
    run: &Run<'_>,
    vm: &Vm,
    known: &[Disk],
    seen: Option<&VmState>,
) -> Result<Option<DiskId>, StepError> {
    let Some(first) = first_left(&run.task.operation, vm, known) else { return Ok(None) };
    let mut read = run.store().read().await?;
    let suspended = seen.is_some_and(|seen| seen.power == Power::Suspended);
    let has_dumps = !dumps::of_vm(&mut read, vm.id).await?.is_empty();
    let with_memory = snapshots::of_vm(&mut read, vm.id).await?.iter().any(|it| it.memory);
    Ok((suspended || has_dumps || with_memory).then_some(first))
}

/// Refuses to go on where the guest of a VM that has just got its key has panicked since it was settled that the disk is not copied:
/// the core dump would stay in the clear, and the VM's key opens no such file.
pub(super) async fn require_none_came(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let operation = &run.task.operation;
    let first = first_left(operation, &vm, &run.disks().await?);
    let Some(first) = first.filter(|_| !operation.gives_up_key()) else { return Ok(()) };
    if copied(run)?.contains(&first) {
        return Ok(());
    }
    let state = run.host_state(vm.host, None).await?;
    let dumps = state_of(&state, vm.id).map_or(&[][..], |seen| &seen.panic_dumps);
    if dumps.iter().all(|dump| dump.encrypted) {
        return Ok(());
    }
    let detail = format!(
        "the guest of VM '{}' has panicked meanwhile, and its core dump is in the clear: begin again, which encrypts it as well",
        vm.name
    );
    Err(StepError::Final(Problem::new(ErrorCode::WrongState, detail)))
}
