//! VMs that were given to other hosts while their host did not answer, or that were on their way to this one when it was given up: when it
//! answers again, it ends and forgets them.
//!
//! | on this host the VM | what is done |
//! |---|---|
//! | is on its way to or from another one | its processes end, and it is unregistered |
//! | runs, or is anything else but off | its power is cut: its guest goes on elsewhere. What an evacuated one still writes the cluster has refused since |
//! | is off, or suspended | it is unregistered |
//! | was given up as the destination of a migration, and has copies for that | these are removed before ([`super::copies`]) |
//! | is not known any more | its row is removed |
//!
//! This holds for VMs that the inventory says were taken from the host, and for no others.

use vmseal_api::host::{HostAgent, Power, PowerOff, VmState};
use vmseal_api::id::{DiskId, HostId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};

use super::{copies, is_silence, left};
use crate::locks::Locks;
use crate::store::disks::Disk;
use crate::store::events::NewEvent;
use crate::store::{Store, StoreError, disks, evacuations, placements, vms};

/// Has a host end and forget a VM that was evacuated from it, whatever task has the VM elsewhere.
///
/// # Errors
/// The host does not answer, or the inventory's.
pub(super) async fn end(
    store: &Store,
    agent: &dyn HostAgent,
    locks: &Locks<VmId>,
    (name, host, seen): (&str, HostId, &VmState),
) -> Result<(), Problem> {
    let _unchanged = locks.lock(seen.vm).await;
    let mut read = store.read().await?;
    // It may have come back meanwhile.
    if placements::owner(&mut read, seen.vm).await? == Some(host)
        || !evacuations::of_host(&mut read, host).await?.contains(&seen.vm)
    {
        return Ok(());
    }
    let disks = disks::of_vm(&mut read, seen.vm).await?;
    let copied = copies::of_given_up(&mut read, &disks, (host, seen)).await?;
    drop(read);
    match forget_at(agent, (&disks, &copied), seen).await {
        Err(problem) if is_silence(&problem) => return Err(problem),
        Err(problem) => {
            tracing::warn!(vm = %seen.vm, host = name, %problem, "what is left of a VM that was evacuated stays");
            return Ok(());
        }
        Ok(()) => {}
    }
    Ok(forgotten(store, (name, host), seen.vm).await?)
}

async fn forget_at(
    agent: &dyn HostAgent,
    (disks, copied): (&[Disk], &[DiskId]),
    seen: &VmState,
) -> Result<(), Problem> {
    let known = |answer: Result<(), Problem>| match answer {
        Err(problem) if problem.code == ErrorCode::NotFound => Ok(()),
        other => other,
    };
    match seen.power {
        Power::Off | Power::Suspended => {}
        Power::Migrating => {
            let disks = disks.iter().map(|disk| disk.id).collect();
            left::end_processes(agent, seen.vm, disks).await?;
        }
        _ => known(agent.power_off(seen.vm, PowerOff::Force).await)?,
    }
    known(left::forget(agent, seen.vm, copied).await)
}

/// A host that answers has nothing of these VMs.
///
/// # Errors
/// [`StoreError`].
pub(super) async fn forget(
    store: &Store,
    host: (&str, HostId),
    vms: Vec<VmId>,
) -> Result<(), StoreError> {
    for vm in vms {
        forgotten(store, host, vm).await?;
    }
    Ok(())
}

/// Records, and tells, that a host has nothing of a VM any more.
async fn forgotten(
    store: &Store,
    (name, host): (&str, HostId),
    vm: VmId,
) -> Result<(), StoreError> {
    let mut write = store.write().await?;
    if !evacuations::of_host(&mut write, host).await?.contains(&vm) {
        return Ok(());
    }
    evacuations::remove(&mut write, vm, host).await?;
    let known = vms::get(&mut write, vm).await?;
    let target = known.as_ref().map_or_else(|| vm.to_string(), |vm| vm.name.clone());
    let now = known.map_or_else(String::new, |vm| format!("; it is on host '{}'", vm.host_name));
    let detail = format!("by host '{name}', which answers again{now}");
    let (kind, actor) = ("vm.forgotten", crate::SELF);
    write.event(NewEvent { kind, actor, target: &target, detail: &detail }).await?;
    write.commit().await
}
