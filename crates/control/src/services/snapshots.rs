//! Snapshots of VMs: taken while a VM runs, is off or suspended, reverted to, deleted at any time.

use jiff::Timestamp;
use vmseal_api::host::version::{
    MEMORY_SNAPSHOTS, PAUSED_SNAPSHOTS, REPLICA_SNAPSHOTS, SNAPSHOTS, SUSPENDED_SNAPSHOTS,
};
use vmseal_api::host::{DiskRole, Power};
use vmseal_api::id::{DiskId, SnapshotId};
use vmseal_api::limits::SNAPSHOTS_MAX;
use vmseal_api::model::{self, Page, SnapshotState, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::{DESCRIPTION_MAX, RevertSnapshot, TakeSnapshot};

use super::caller::{Caller, Privilege};
use super::vm_key::require_available;
use super::vms::{
    begin, find, find_ready, new_name, power, require_active_host, require_no_clones,
    require_no_template, word,
};
use super::{Outcome, PageRequest, Services, features, saved_memory};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::Write;
use crate::store::disks::Disk;
use crate::store::memory_generations;
use crate::store::snapshots::{self, Snapshot};
use crate::store::vms::Vm;
use crate::tasks::snapshots::check_droppable;

/// What an agent of an earlier version cannot do.
pub(super) const OF_REPLICATED: &str = "take snapshots of disks that have replicas";

/// What agents without [`SUSPENDED_SNAPSHOTS`] cannot do.
const OF_SUSPENDED: &str = "take snapshots of VMs that are suspended, or revert these";

/// What agents without [`PAUSED_SNAPSHOTS`] cannot do.
const OF_PAUSED: &str = "take snapshots with memory of VMs that are paused";

fn shown(vm: &Vm, disks: &[Disk], all: &[Snapshot], snapshot: &Snapshot) -> model::Snapshot {
    let name = |id: &SnapshotId| all.iter().find(|it| it.id == *id).map(|it| it.name.clone());
    let disk = |id: &DiskId| disks.iter().find(|disk| disk.id == *id).map(|disk| disk.name.clone());
    model::Snapshot {
        id: snapshot.id,
        name: snapshot.name.clone(),
        vm: vm.name.clone(),
        description: snapshot.description.clone(),
        parent: snapshot.parent.as_ref().and_then(name),
        created: snapshot.created,
        state: snapshot.state,
        current: snapshot.current,
        quiesced: snapshot.quiesced,
        memory: snapshot.memory,
        disks: snapshot.disks.iter().filter_map(disk).collect(),
    }
}

/// The snapshot that a request names, if it names one.
///
/// # Errors
/// `not-found`; `wrong-state` while it is being taken or deleted.
pub(super) async fn chosen(
    write: &mut Write<'_>,
    vm: &Vm,
    name: Option<&str>,
) -> Result<Option<Snapshot>, Problem> {
    let Some(name) = name else { return Ok(None) };
    let found = snapshots::find(write, vm.id, name).await?;
    match found {
        Some(snapshot) if snapshot.state == SnapshotState::Ready => Ok(Some(snapshot)),
        Some(_) => {
            let detail = format!("snapshot '{name}' of VM '{}' is not complete", vm.name);
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
        None => Err(Problem {
            field: Some("snapshot".to_owned()),
            ..Problem::new(
                ErrorCode::NotFound,
                format!("VM '{}' has no snapshot '{name}'", vm.name),
            )
        }),
    }
}

/// Lists the snapshots of a VM, oldest first.
pub async fn list(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: PageRequest,
) -> Result<Page<model::Snapshot>, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, disks) = find(services, vm).await?;
    let all = snapshots::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let part = request.part();
    let after = all.iter().filter(|known| known.id.to_string() > part.after);
    let items: Vec<_> = after
        .take(part.limit as usize)
        .map(|snapshot| shown(&vm, &disks, &all, snapshot))
        .collect();
    Ok(super::page_of(items, part.limit, |last| last.id.to_string()))
}

/// Shows a snapshot.
pub async fn show(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
) -> Result<model::Snapshot, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, disks) = find(services, vm).await?;
    let all = snapshots::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let snapshot = one(&vm, &all, name)?;
    Ok(shown(&vm, &disks, &all, snapshot))
}

fn one<'a>(vm: &Vm, all: &'a [Snapshot], name: &str) -> Result<&'a Snapshot, Problem> {
    let found = all.iter().find(|known| known.name == name || known.id.to_string() == name);
    found.ok_or_else(|| {
        let detail = format!("VM '{}' has no snapshot '{name}'", vm.name);
        Problem::new(ErrorCode::NotFound, detail)
    })
}

/// Refuses while the power of a VM changes; the host refuses, too. Returns what it is; none where its host does not know it.
pub(super) async fn require_power(
    services: &Services,
    vm: &Vm,
    fine: &[Power],
    remedy: &str,
) -> Result<Option<Power>, Problem> {
    match power(services, vm).await? {
        None => Ok(None),
        Some(now) if fine.contains(&now) => Ok(Some(now)),
        Some(now) => {
            if now == Power::Suspended {
                return Err(saved_memory::refusal(vm));
            }
            let detail = format!("VM '{}' is {}: {remedy}", vm.name, word(now));
            Err(Problem::new(ErrorCode::WrongState, detail))
        }
    }
}

/// Takes a snapshot of all disks of a VM, at one instant.
pub async fn take(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: TakeSnapshot,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let description = request.description.clone().unwrap_or_default();
    if description.len() > DESCRIPTION_MAX {
        let detail = format!("is longer than {DESCRIPTION_MAX} bytes");
        return Err(Problem::invalid("description", detail));
    }
    let (vm, _) = find_ready(services, vm, SNAPSHOTS, "take snapshots").await?;
    let now = if request.memory {
        features::require(services, &vm, MEMORY_SNAPSHOTS, "take snapshots with memory")?;
        let remedy =
            "only a VM that runs, is paused or suspended has memory that a snapshot can keep";
        let fine = [Power::Running, Power::Paused, Power::Suspended];
        let now = require_power(services, &vm, &fine, remedy).await?;
        if now == Some(Power::Paused) {
            features::require(services, &vm, PAUSED_SNAPSHOTS, OF_PAUSED)?;
        }
        now
    } else {
        let remedy = "snapshots are taken while it runs, is paused, off or suspended";
        let fine = [Power::Off, Power::Running, Power::Paused, Power::Suspended];
        require_power(services, &vm, &fine, remedy).await?
    };
    if now == Some(Power::Suspended) {
        features::require(services, &vm, SUSPENDED_SNAPSHOTS, OF_SUSPENDED)?;
    }
    let mut write = services.store.write().await?;
    let disks = crate::store::disks::of_vm(&mut write, vm.id).await?;
    let kept = keepable(services, &vm, &disks, OF_REPLICATED)?;
    let known = snapshots::of_vm(&mut write, vm.id).await?;
    if known.len() >= SNAPSHOTS_MAX {
        let detail = format!("VM '{}' has {SNAPSHOTS_MAX} snapshots: delete one first", vm.name);
        return Err(Problem::new(ErrorCode::LimitExceeded, detail));
    }
    let name = new_name(request.name, "snapshot", known.iter().map(|it| it.name.as_str()))?;
    let snapshot = Snapshot {
        id: SnapshotId::new(),
        vm: vm.id,
        name,
        description,
        parent: known.iter().find(|known| known.current).map(|known| known.id),
        created: Timestamp::now(),
        state: SnapshotState::Taking,
        quiesced: None,
        current: false,
        memory: request.memory,
        disks: kept,
    };
    snapshots::insert(&mut write, &snapshot).await?;
    let (vm_id, snapshot, quiesce) = (vm.id, snapshot.id, request.quiesce);
    let operation = Operation::TakeSnapshot { vm: vm_id, snapshot, quiesce };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// The disks that a snapshot keeps: those of the guest and of its firmware. What cloud-init reads does not change, and what
/// a TPM keeps is not taken back.
///
/// # Errors
/// `unsupported` where a disk has a replica, and the agent of the VM's host is too old to keep such disks. `cannot` says what it cannot do.
pub(super) fn keepable(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    cannot: &str,
) -> Result<Vec<DiskId>, Problem> {
    let kept = |disk: &&Disk| {
        matches!(disk.role, DiskRole::Data | DiskRole::UefiVariables) && !disk.detached
    };
    if disks.iter().filter(kept).any(|disk| disk.replica.is_some()) {
        features::require(services, vm, REPLICA_SNAPSHOTS, cannot)?;
    }
    Ok(disks.iter().filter(kept).map(|disk| disk.id).collect())
}

/// Checks that a VM may be reverted as it is now; returns whether it is suspended.
async fn may_be_reverted(
    services: &Services,
    caller: &Caller,
    vm: &Vm,
    running: bool,
) -> Result<bool, Problem> {
    let now = if running {
        caller.require(Privilege::VmPower)?;
        let remedy = "wait until it is off, or runs";
        let fine = [Power::Off, Power::Running, Power::Paused, Power::Suspended];
        let now = require_power(services, vm, &fine, remedy).await?;
        // Its power is not cut where it could not start again.
        require_available(services, vm, Purpose::Encrypt).await?;
        require_active_host(services, vm).await?;
        now
    } else {
        let remedy = format!(
            "stop it first (vmseal vm stop {}), or have its power cut and its guest run afterwards (--running)",
            vm.name
        );
        require_power(services, vm, &[Power::Off, Power::Suspended], &remedy).await?
    };
    let suspended = now == Some(Power::Suspended);
    if suspended {
        features::require(services, vm, SUSPENDED_SNAPSHOTS, OF_SUSPENDED)?;
    }
    Ok(suspended)
}

/// Has the disks of a VM hold what they held when a snapshot was taken: of one that is off or suspended, or of any, which runs afterwards.
pub async fn revert(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
    request: RevertSnapshot,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let RevertSnapshot { running, discard_memory } = request;
    let (vm, _) = find_ready(services, vm, SNAPSHOTS, "take snapshots").await?;
    require_no_template(&vm)?;
    let suspended = may_be_reverted(services, caller, &vm, running).await?;
    let mut write = services.store.write().await?;
    let all = snapshots::of_vm(&mut write, vm.id).await?;
    let snapshot = one(&vm, &all, name)?;
    if snapshot.state != SnapshotState::Ready {
        let detail = format!(
            "snapshot '{}' of VM '{}' is {}, and cannot be reverted to",
            snapshot.name,
            vm.name,
            match snapshot.state {
                SnapshotState::Deleting => "being deleted",
                SnapshotState::Taking | SnapshotState::Ready => "not complete yet",
            }
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let kept = suspended && memory_generations::is_kept(&mut write, vm.id).await?;
    if suspended && !kept && !discard_memory {
        return Err(saved_memory::refusal_of_revert(&vm, &snapshot.name, running));
    }
    let (id, discard_memory) = (snapshot.id, discard_memory || kept);
    let operation = Operation::RevertSnapshot { vm: vm.id, snapshot: id, running, discard_memory };
    let mut begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    if let (Outcome::Planned(plan), true) = (&mut begun, suspended && !kept) {
        plan.warnings.push(format!(
            "VM '{}' is suspended, and the saved memory of its guest will be lost",
            vm.name
        ));
    }
    Ok(begun)
}

/// Deletes a snapshot; what the VM's disks hold, and other snapshots, stay as they are.
pub async fn delete(
    services: &Services,
    caller: &Caller,
    vm: &str,
    name: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, _) = find_ready(services, vm, SNAPSHOTS, "take snapshots").await?;
    check_host_drops(services, &vm, name).await?;
    let mut write = services.store.write().await?;
    let all = snapshots::of_vm(&mut write, vm.id).await?;
    let snapshot = one(&vm, &all, name)?;
    require_no_clones(&mut write, &vm, Some(snapshot)).await?;
    let operation = Operation::DeleteSnapshot { vm: vm.id, snapshot: snapshot.id };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Checks what the host would refuse: clones that are linked to a later snapshot stand on this one, too. No transaction is held
/// during that call.
async fn check_host_drops(services: &Services, vm: &Vm, name: &str) -> Result<(), Problem> {
    let mut read = services.store.read().await?;
    let all = snapshots::of_vm(&mut read, vm.id).await?;
    let snapshot = one(vm, &all, name)?;
    require_no_clones(&mut read, vm, Some(snapshot)).await?;
    drop(read);
    // The task waits for a host that is away, and asks again.
    let Ok(agent) = services.hosts.connected(vm.host) else { return Ok(()) };
    check_droppable(&*agent, vm, snapshot).await
}

/// Refuses to take what a guest may have whose memory a snapshot keeps: it goes on with all that it had alone, and another one is not that. A
/// network card is no such thing: one of the same address takes its place.
pub(super) async fn require_no_memory(
    from: &mut sqlx::SqliteConnection,
    vm: &Vm,
    what: &str,
) -> Result<(), Problem> {
    let kept = snapshots::of_vm(from, vm.id).await?.into_iter().find(|it| it.memory);
    let Some(snapshot) = kept else { return Ok(()) };
    let detail = format!(
        "snapshot '{0}' of VM '{1}' keeps memory, whose guest would not go on without {what}: delete the snapshot first (vmseal snapshot delete {1} {0})",
        snapshot.name, vm.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Refuses what cannot be done to disks that snapshots keep.
pub(super) async fn require_none(services: &Services, vm: &Vm, what: &str) -> Result<(), Problem> {
    let known = snapshots::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let Some(first) = known.first() else { return Ok(()) };
    let detail = format!(
        "VM '{0}' has snapshots, '{1}' for one, and {what}: delete them first (vmseal snapshot list {0}, vmseal snapshot delete {0} {1})",
        vm.name, first.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}
