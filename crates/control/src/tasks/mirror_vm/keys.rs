//! The key of a VM that is encrypted or decrypted as it is ([`super`]).
//!
//! | | |
//! |---|---|
//! | made | before anything is encrypted with it; recorded, and the VM's, in one transaction |
//! | destroyed | when no disk of the VM is encrypted in the inventory, and the host has the VM without it |

use vmseal_api::host::{DiskFacts, DiskState};
use vmseal_api::problem::ErrorCode;

use crate::hosts::register_without_key;
use crate::store::events::NewEvent;
use crate::store::{backups, disks, key_requests, keys, vms};
use crate::tasks::run::internal;
use crate::tasks::run::{Run, StepError, register, state_of};

/// Makes the VM's key. The request id is the task's, so a repetition gets the same key.
pub(super) async fn make(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    if vm.key.is_some() {
        return Ok(());
    }
    let Some(provider) = run.task.operation.provider_of_new_key() else {
        return Err(internal("the VM has no key, and the task says of no provider"));
    };
    let task = run.task.id;
    let (key, kek) = run.context.providers.get(provider)?.create_key(vm.id, task.0).await?;
    drop(kek);
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    keys::insert_for_task(&mut write, vm.id, &key, task).await?;
    key_requests::delete(&mut write, provider, task.0).await?;
    vms::set_key(&mut write, vm.id, &key).await?;
    let detail = format!("key '{}' of provider {}", key.key_id, key.provider);
    let (kind, actor) = ("key.created", run.task.actor.as_str());
    write.event(NewEvent { kind, actor, target: &vm.name, detail: &detail }).await?;
    Ok(write.commit().await?)
}

/// Undoes [`make`], even if its outcome is unknown: the VM has no key, on its host neither, and the key is destroyed.
pub(super) async fn unmake(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    let Some(provider) = run.task.operation.provider_of_new_key() else { return Ok(()) };
    let made = keys::of_task(&mut *run.store().read().await?, run.task.id).await?;
    if let Some(made) = &made {
        if is_needed(run).await? {
            return Err(internal("a disk of the VM is encrypted: its key is not destroyed"));
        }
        if vm.key.as_ref() == Some(made) {
            take(run).await?;
        }
        register(run).await?;
    }
    let provider = match run.context.providers.get(provider) {
        // The provider was removed before it could create a key.
        Err(problem) if problem.code == ErrorCode::NotFound && made.is_none() => return Ok(()),
        other => other?,
    };
    if let Some(key) = made {
        provider.destroy_key(vm.id, &vm.name, &key).await?;
    }
    Ok(provider.abandon(run.task.id.0).await?)
}

/// Whether a disk of the VM is encrypted; also one that a task has left which could not add or remove it.
async fn is_needed(run: &Run<'_>) -> Result<bool, StepError> {
    Ok(run.disks().await?.iter().any(|disk| disk.encrypted))
}

/// Records that the VM has no key, if none of its disks is encrypted. Its host is asked first: it refuses while memory or a core dump is under the
/// key, which could have come since the disks were copied.
async fn take(run: &Run<'_>) -> Result<(), StepError> {
    // An agent that has just started knows the key then, and what is under it.
    register(run).await?;
    register_without_key(run.store(), run.hosts(), run.vm_id).await?;
    let _unchanged = run.hosts().lock(run.vm_id).await;
    let mut write = run.store().write().await?;
    let known = disks::of_vm(&mut write, run.vm_id).await?;
    if known.iter().any(|disk| disk.encrypted) {
        return Err(internal("a disk of the VM is encrypted: its key is not taken from it"));
    }
    vms::forget_key(&mut write, run.vm_id).await?;
    Ok(write.commit().await?)
}

/// Takes the key from a VM that needs it no longer, and from its host.
pub(super) async fn forget(run: &Run<'_>) -> Result<(), StepError> {
    if is_needed(run).await? {
        return Ok(());
    }
    let vm = run.vm().await?;
    let state = run.host_state(vm.host, None).await?;
    let encrypted = |seen: &DiskState| matches!(seen.facts, DiskFacts::Luks2 { .. });
    if state_of(&state, vm.id).is_some_and(|seen| seen.disks.iter().any(encrypted)) {
        return Err(internal("the host has an encrypted disk that is not so in the inventory"));
    }
    if vm.key.is_some() {
        take(run).await?;
    }
    register(run).await?;
    let state = run.host_state(vm.host, None).await?;
    run.hosts().until_shown(vm.host, &state).await;
    Ok(())
}

/// Destroys the keys of a VM that has none any more, with those that other tasks have left.
pub(super) async fn destroy(run: &Run<'_>) -> Result<(), StepError> {
    let vm = run.vm().await?;
    if vm.key.is_some() || is_needed(run).await? {
        return Ok(());
    }
    let known = keys::of_vm(&mut *run.store().read().await?, vm.id).await?;
    // Those that backups need go with the last of these.
    let known = backups::not_needed(&mut *run.store().read().await?, vm.id, known).await?;
    for key in &known {
        run.context.providers.get(key.provider)?.destroy_key(vm.id, &vm.name, key).await?;
    }
    Ok(())
}
