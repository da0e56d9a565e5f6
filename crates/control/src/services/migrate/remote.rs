//! Moving VMs that run, are off or suspended, to hosts of other control planes.

mod at_rest;

mod with_snapshots;

use vmseal_api::dump::PanicDump;
use vmseal_api::host::Power;
use vmseal_api::host::version::{MIGRATE_APART, MIGRATE_DISKS, MIGRATE_ENCRYPTED, MIGRATE_STATE};
use vmseal_api::id::TaskId;
use vmseal_api::migration::MigrationEncryption;
use vmseal_api::model::{About, Plan, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{ARRIVALS_COMPRESSED, ArrivalCheck, ArrivalChecks};
use vmseal_api::request::MigrateVm;

use super::connection::require_port_reached;
use super::{downtime_of, in_the_clear, must_be_encrypted, require_compression};
use crate::operation::Operation;
use crate::remotes::{Wanted, describe, keeps_state};
use crate::services::caller::{Caller, Privilege};
use crate::services::remotes::require_arrivals;
use crate::services::vms::begin_paced;
use crate::services::{Outcome, Services, features};
use crate::store::disks::Disk;
use crate::store::vms::Vm;
use crate::store::{dumps, placements};
use crate::tasks::migrate_vm::left;

/// Moves a VM to another control plane, which is asked first whether it can take it. `rest`: what it is where it does not run.
pub(super) async fn migrate(
    services: &Services,
    caller: &Caller,
    (vm, disks, rest): (&Vm, &[Disk], Option<Power>),
    request: MigrateVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::Migrate)?;
    let pace = crate::services::tasks::pace_of(request.rate)?;
    require_no_replica(vm, disks)?;
    let (is_off, with) = (rest.is_some(), at_rest::With::of(disks, rest));
    let suspended = with.memory;
    if is_off {
        at_rest::require_no_guest_of(&request)?;
    }
    let named = request.remote.as_deref().unwrap_or_default();
    let remote = services.remotes.find(named).await?;
    require_sendable(services, vm, disks).await?;
    require_compression(services, vm, request.compress)?;
    if is_off {
        at_rest::require_sendable(services, vm, with)?;
    }
    let plane = services.remotes.of(&remote)?;
    let about = plane.about().await?;
    require_arrivals(&remote.name, &about)?;
    with_snapshots::require(services, vm, (&remote.name, &about)).await?;
    if is_off {
        at_rest::require_taken(&remote.name, &about, with)?;
    }
    if request.compress {
        require_reads_compressed(&remote.name, &about)?;
    }
    let policy = request.policy.unwrap_or_else(|| vm.policy_name.clone());
    let wanted = Wanted {
        policy: policy.clone(),
        host: request.host.clone(),
        datastore: request.datastore.clone(),
        at_rest: is_off,
        suspended,
        compresses: request.compress,
    };
    let mut read = services.store.read().await?;
    let generation = placements::next_generation(&mut read, vm.id).await?;
    let stays = left::backups_of(&mut read, vm).await?;
    drop(read);
    let mut told = describe(&services.store, &services.hosts, vm, wanted, generation).await?;
    let counted = with_snapshots::kept(services, (vm, disks), &told, &about).await?;
    told.vm.kept = counted.clone().ok().flatten();
    with_snapshots::require_short(&told)?;
    let found = plane.check_arrival(&told).await?;
    require_all(vm, &remote.name, &found)?;
    require_reached(services, vm, &remote.name, &found).await?;
    let encrypted = is_encrypted(services, vm, &found);
    let operation = Operation::MigrateAway {
        vm: vm.id,
        from: vm.host,
        remote: remote.id,
        arrival: TaskId::new(),
        // The task asks for the host and datastore that were checked.
        host: found.host.clone(),
        datastore: found.datastore.clone(),
        policy,
        encrypted,
        downtime_milliseconds: match request.downtime_milliseconds {
            None => downtime_of(services, vm).await?,
            asked => asked,
        },
        at_rest: is_off,
        suspended,
        compresses: request.compress,
    };
    let write = services.store.write().await?;
    Ok(match begin_paced(services, write, operation, vm, caller, (pace, dry_run)).await? {
        Outcome::Planned(plan) => {
            let kept = with_snapshots::told(&told);
            let how = (&*remote.name, &found, &*kept);
            let mut plan = explained(plan, how, encrypted);
            plan.warnings.extend(in_the_clear(vm, encrypted || is_off));
            plan.warnings.extend(counted.err());
            plan.warnings.extend(stays);
            plan.warnings.extend(is_off.then(|| at_rest::stays(vm, with, encrypted)));
            Outcome::Planned(plan)
        }
        done => done,
    })
}

/// Whether what the VM is sent with is encrypted. A server of an earlier version does not say what its host can: then the VM is not
/// sent in the clear where its own host can encrypt, and a host there that cannot ends the migration.
fn is_encrypted(services: &Services, vm: &Vm, found: &ArrivalChecks) -> bool {
    let can = || services.hosts.view(vm.host).has(MIGRATE_ENCRYPTED);
    let asked = vm.migration_encryption != MigrationEncryption::Disabled;
    must_be_encrypted(vm) || asked && can() && found.encrypted != Some(false)
}

/// A plan with what the other control plane has said.
fn explained(
    mut plan: Plan,
    (remote, found, kept): (&str, &ArrivalChecks, &str),
    encrypted: bool,
) -> Plan {
    let encrypted = if encrypted { "encrypted" } else { "not encrypted" };
    let chosen = format!(
        "choose host '{}' of remote '{remote}', with copies of all disks{kept} on its datastore '{}'; all that is sent is {encrypted}",
        found.host.as_deref().unwrap_or_default(),
        found.datastore.as_deref().unwrap_or_default()
    );
    let looked = found.checks.iter().map(ArrivalCheck::to_string);
    plan.steps = looked.chain([chosen]).chain(plan.steps).collect();
    plan
}

/// Refuses a VM that the other control plane cannot take; says what it has looked at.
fn require_all(vm: &Vm, remote: &str, found: &ArrivalChecks) -> Result<(), Problem> {
    if found.host.is_some() && found.datastore.is_some() {
        return Ok(());
    }
    let looked: Vec<_> = found.checks.iter().map(ArrivalCheck::to_string).collect();
    let detail = format!("VM '{}' cannot go to remote '{remote}'. {}", vm.name, looked.join("; "));
    let problem = Problem::new(ErrorCode::WrongState, detail);
    Err(Problem { field: Some("remote".to_owned()), ..problem })
}

/// Refuses a host there whose port is not reached from the VM's host. A server of an earlier version does not say where that is.
async fn require_reached(
    services: &Services,
    vm: &Vm,
    remote: &str,
    found: &ArrivalChecks,
) -> Result<(), Problem> {
    let Some(port) = found.address else { return Ok(()) };
    require_port_reached(services, vm, port).await.map_err(|why| {
        let (name, host) = (&vm.name, found.host.as_deref().unwrap_or_default());
        let detail = format!("VM '{name}' cannot go to host '{host}' of remote '{remote}': {why}");
        let problem = Problem::new(ErrorCode::WrongState, detail);
        Problem { field: Some("remote".to_owned()), ..problem }
    })
}

/// Refuses a control plane of an earlier version, which would not ask its hosts.
fn require_reads_compressed(remote: &str, about: &About) -> Result<(), Problem> {
    if about.features.iter().any(|it| it == ARRIVALS_COMPRESSED) {
        return Ok(());
    }
    let detail = format!(
        "remote '{remote}' runs vmseal {}, which does not know which of its hosts read what is compressed ({ARRIVALS_COMPRESSED}): upgrade it, or leave out --compress",
        about.vmseal
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// Refuses a VM with replicas, whether it runs or not.
pub(super) fn require_no_replica(vm: &Vm, disks: &[Disk]) -> Result<(), Problem> {
    let Some(disk) = disks.iter().find(|disk| disk.replica.is_some()) else { return Ok(()) };
    let tpm = if vm.hardware.tpm { "; its TPM is a new one" } else { "" };
    let detail = format!(
        "VM '{1}' has a replica of its disk '{0}', which would stay behind: a VM with replicas does not go to another control plane. Make another VM of a backup, with a policy without replicas, and send that (vmseal backup create {1} BACKUP --to DIR; vmseal backup restore {1} BACKUP --as NAME --policy POLICY; vmseal vm migrate NAME --remote REMOTE){tpm}",
        disk.name, vm.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Refuses a VM with core dumps: they are beside its first disk, which is deleted here, and under its key, which is destroyed.
async fn require_no_dumps(services: &Services, vm: &Vm) -> Result<(), Problem> {
    let dumps = dumps::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let view = services.hosts.view(vm.host);
    let is_new = |seen: &PanicDump| dumps.iter().all(|dump| dump.id != seen.dump);
    let has_new = view.vm(vm.id).is_some_and(|seen| seen.panic_dumps.iter().any(is_new));
    let name = &vm.name;
    let detail = match dumps.first() {
        Some(first) => {
            let all: Vec<_> = dumps.iter().map(|dump| format!("'{}'", dump.name)).collect();
            let (first, all) = (&first.name, all.join(", "));
            format!(
                "VM '{name}' has core dumps ({all}), which do not go to another control plane: beside its former images they would be in no list, and the key that opens them is destroyed here when it has gone. Decrypt what is needed of each (vmseal dump decrypt {name} {first} --to FILE), and delete all of them first (vmseal dump delete {name} {first})"
            )
        }
        None if has_new => format!(
            "the guest of VM '{name}' has panicked, and its host has just written a core dump, which does not go to another control plane: wait until it is listed (vmseal dump list {name}), decrypt it if it is needed, and delete it first"
        ),
        None => return Ok(()),
    };
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Refuses a VM that would leave something behind, or whose host cannot send all of it.
async fn require_sendable(services: &Services, vm: &Vm, disks: &[Disk]) -> Result<(), Problem> {
    require_no_dumps(services, vm).await?;
    features::require(services, vm, MIGRATE_DISKS, "send disks to other hosts")?;
    if keeps_state(disks.iter().map(|disk| disk.role)) {
        let what = "send what firmware and TPM keep";
        features::require(services, vm, MIGRATE_STATE, what)?;
    }
    if vm.key.is_some() {
        let what = "send VMs to another control plane";
        features::require(services, vm, MIGRATE_APART, what)?;
    }
    Ok(())
}
