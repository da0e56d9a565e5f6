//! The panics of guests, as hosts tell of them: each is an event, and the core dumps that hosts have written by themselves become
//! those of the inventory.

use vmseal_api::dump::{DumpReason, Panic, PanicDump};
use vmseal_api::host::VmState;
use vmseal_api::model::Lifecycle;

use crate::store::dumps::{self, Dump};
use crate::store::events::NewEvent;
use crate::store::{Store, StoreError, free_name, panics, vms};

/// Whether a host tells of any.
#[must_use]
pub fn has_any(seen: &VmState) -> bool {
    !seen.panics.is_empty() || !seen.panic_dumps.is_empty()
}

/// Whether all that a host tells is known.
///
/// # Errors
/// [`StoreError`].
pub async fn is_told(store: &Store, seen: &VmState) -> Result<bool, StoreError> {
    let mut read = store.read().await?;
    let known = vms::get(&mut read, seen.vm).await?;
    if known.is_none_or(|vm| vm.lifecycle != Lifecycle::Ready) {
        return Ok(true);
    }
    let told = panics::told(&mut read, seen.vm).await?;
    let rows = dumps::of_vm(&mut read, seen.vm).await?;
    Ok(seen.panics.iter().all(|panic| Some(panic.at) <= told)
        && seen.panic_dumps.iter().all(|dump| rows.iter().any(|row| row.id == dump.dump)))
}

/// Writes the events that are not there yet, and records the core dumps that are not known. The caller has the VM's lock, and its
/// state is newer than that.
///
/// # Errors
/// [`StoreError`].
pub async fn tell(store: &Store, seen: &VmState) -> Result<(), StoreError> {
    let mut write = store.write().await?;
    let Some(vm) = vms::get(&mut write, seen.vm).await? else { return Ok(()) };
    let (actor, target) = (crate::SELF, vm.name.as_str());
    let mut rows = dumps::of_vm(&mut write, vm.id).await?;
    for PanicDump { dump, format, created, bytes, encrypted } in &seen.panic_dumps {
        if rows.iter().any(|row| row.id == *dump) {
            continue;
        }
        let name = free_name("panic", rows.iter().map(|row| row.name.as_str()));
        let how = if *encrypted { "encrypted" } else { "IN THE CLEAR, as the VM had no key" };
        let detail = format!("core dump '{name}' of a guest that panicked, {how}");
        write.event(NewEvent { kind: "vm.dumped", actor, target, detail: &detail }).await?;
        let row = Dump {
            id: *dump,
            vm: vm.id,
            name,
            format: *format,
            reason: DumpReason::Panic,
            created: *created,
            bytes: Some(*bytes),
            encrypted: *encrypted,
        };
        dumps::insert(&mut write, &row).await?;
        rows.push(row);
    }
    let told = panics::told(&mut write, vm.id).await?;
    for Panic { at, detail, .. } in seen.panics.iter().filter(|panic| Some(panic.at) > told) {
        let detail = format!("at {at:.0}: {detail}");
        write.event(NewEvent { kind: "vm.panicked", actor, target, detail: &detail }).await?;
    }
    let last = seen.panics.iter().map(|panic| panic.at).max();
    if let Some(last) = last.filter(|last| Some(*last) > told) {
        panics::set_told(&mut write, vm.id, last).await?;
    }
    write.commit().await
}
