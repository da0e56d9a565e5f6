//! Giving VMs to other hosts while their host does not answer: their disks are on pools of Ceph, and the cluster keeps that host from
//! writing there.

use std::sync::Arc;
use std::time::Duration;

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::version::FENCE_VMS;
use vmseal_api::host::{HostDescription, Power};
use vmseal_api::model::Task;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::EvacuateVm;
use vmseal_api::size::Size;

use super::{
    Candidates, Fit, NO_ROOM, Promised, cannot_go, examine, free_memory, key, others, require_room,
    same_machine, takes_vms,
};
use crate::hosts::keys::Purpose;
use crate::hosts::osds;
use crate::hosts::{may_fence, mounted};
use crate::operation::Operation;
use crate::services::caller::{Caller, Privilege};
use crate::services::vms::{begin, find, require_ready};
use crate::services::{Outcome, Services, hosts};
use crate::store::disks::Disk;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::store::{datastores, nics, policies};

/// For how long a host must not have answered: an agent that restarts is back within seconds, and the cluster takes a client for dead after
/// half a minute.
pub const SILENCE_MIN: Duration = Duration::from_secs(60);

/// What is said of each evacuation.
const FENCED: &str = "nobody knows whether the guest runs on its host: the cluster keeps that host from the VM's disks from now on, and a guest that runs there is cut off from them. What the guest had not flushed is lost, as at a power cut";

/// What is said of other VMs.
const OTHERS: &str = "if that host is alive, its other VMs on the same pools stand still for some seconds, as when vmseal-rbd dies there";

/// What is said beside a policy that keeps a VM from being started.
const OR_STAYS_OFF: &str = ". Or evacuate the VM without starting it (--no-start)";

/// Gives a VM whose host does not answer to another host.
pub async fn evacuate(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: EvacuateVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    evacuate_after(services, caller, name, request, (SILENCE_MIN, dry_run)).await
}

/// The same where its host has not answered for so long.
pub(crate) async fn evacuate_after(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: EvacuateVm,
    (silence, dry_run): (Duration, bool),
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, disks) = find(services, name).await?;
    require_ready(&vm)?;
    if vm.key.is_some() {
        caller.require(Privilege::Migrate)?;
    }
    require_silent(services, &vm, silence)?;
    let pools = pools(services, &vm, &disks).await?;
    let (of, wanted) = ((&vm, disks.as_slice(), pools.as_slice()), Wanted::of(&vm, &request));
    if wanted.starts {
        require_osds(services, &vm, &disks).await?;
    }
    let (fit, refused) = match &request.host {
        Some(host) => {
            let host = hosts::find(services, host).await?;
            let name = host.name.clone();
            let fit = fits(services, of, wanted, host).await;
            (fit.map_err(|why| cannot_go(&vm, &name, &why))?, Vec::new())
        }
        None => {
            let mut candidates = Candidates::default();
            for host in others(services, &vm).await? {
                let name = host.name.clone();
                candidates.add(&name, fits(services, of, wanted, host).await, None);
            }
            candidates.best(&vm)?
        }
    };
    // As its start does: with a key that may not encrypt anything new, it could not be started there.
    key::require(services, &vm, Purpose::Encrypt).await?;
    let mut write = services.store.write().await?;
    if wanted.starts {
        require_room(services, &mut write, &vm, &fit.host).await?;
    }
    let (from, to) = (vm.host, fit.host.id);
    let operation = Operation::EvacuateVm { vm: vm.id, from, to, starts: wanted.starts };
    Ok(match begin(services, write, operation, &vm, caller, dry_run).await? {
        Outcome::Planned(mut plan) => {
            plan.steps.insert(0, wanted.explained(&fit.host));
            plan.warnings.extend([FENCED.to_owned(), OTHERS.to_owned()]);
            plan.warnings.extend(wanted.little_room(&vm, &fit));
            plan.warnings.extend(earlier_agent(services, &vm).await?);
            plan.warnings.extend(refused);
            Outcome::Planned(plan)
        }
        done => done,
    })
}

/// What the VM's host has said of itself; a server that has restarted knows what it has recorded.
async fn description(
    services: &Services,
    vm: &Vm,
) -> Result<Option<Arc<HostDescription>>, Problem> {
    if let Some(known) = services.hosts.view(vm.host).description.clone() {
        return Ok(Some(known));
    }
    Ok(hosts::find(services, &vm.host.to_string()).await?.description.map(Arc::new))
}

/// That the agent of the VM's host does not look whether the VM has been given to another one.
async fn earlier_agent(services: &Services, vm: &Vm) -> Result<Option<String>, Problem> {
    let known = description(services, vm).await?;
    let looks = |host: Arc<HostDescription>| host.features.iter().any(|known| known == FENCE_VMS);
    Ok(known.is_some_and(|host| !looks(host)).then(|| {
        format!(
            "the agent of host '{}' is of an earlier version, and does not look whether its VMs have been given to others: if that host is alive, its guest may have its disks again while the VM is off on the other host. Switch that host off first",
            vm.host_name
        )
    }))
}

/// What is to become of a VM at the other host.
#[derive(Clone, Copy)]
struct Wanted {
    /// Whether its memory is saved, as far as its host has said.
    suspended: bool,
    starts: bool,
}

impl Wanted {
    fn of(vm: &Vm, request: &EvacuateVm) -> Self {
        let suspended = vm.seen_power == Some(Power::Suspended);
        let off = suspended || matches!(vm.seen_power, None | Some(Power::Off));
        Self { suspended, starts: !off && !request.no_start }
    }

    fn explained(self, host: &Host) -> String {
        let then = match self {
            Self { starts: true, .. } => {
                "the VM is started there, as it ran when its host was last heard"
            }
            Self { suspended: true, .. } => "the VM stays suspended",
            _ => "the VM is not started there",
        };
        format!("choose host '{}', which has all of the VM's pools; {then}", host.name)
    }

    /// That there may be no room when somebody starts it.
    fn little_room(self, vm: &Vm, fit: &Fit) -> Option<String> {
        (!self.starts && fit.free < vm.memory).then(|| {
            format!(
                "host '{}' has {} of memory free, and the VM needs {} when it is started",
                fit.host.name,
                Size(fit.free),
                Size(vm.memory)
            )
        })
    }
}

/// Refuses a VM whose host answers, or has done so a moment ago.
fn require_silent(services: &Services, vm: &Vm, silence: Duration) -> Result<(), Problem> {
    let detail = match services.hosts.view(vm.host).silence() {
        Some(now) if now >= silence => return Ok(()),
        Some(now) => format!(
            "host '{}' of VM '{}' has not answered for {} s: an agent that restarts is back soon. VMs are evacuated after {} s",
            vm.host_name,
            vm.name,
            now.as_secs(),
            silence.as_secs()
        ),
        None => format!(
            "host '{}' of VM '{}' answers: the VM is not evacuated but moved (vmseal vm migrate {}, vmseal host drain {})",
            vm.host_name, vm.name, vm.name, vm.host_name
        ),
    };
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// The datastores that the VM's disks and their replicas are on, each once, with a disk that is there. All are pools.
async fn pools(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
) -> Result<Vec<(datastores::Datastore, String)>, Problem> {
    let mut read = services.store.read().await?;
    let mut pools: Vec<(datastores::Datastore, String)> = Vec::new();
    for disk in disks {
        for (id, name) in disk.datastores() {
            if pools.iter().any(|(known, _)| known.id == id) {
                continue;
            }
            let known = datastores::find(&mut read, &id.to_string()).await?;
            let known = known.ok_or_else(|| Problem::not_found("datastore", name))?;
            if known.hosts.iter().any(|on| on.location.pool().is_none()) {
                let detail = format!(
                    "disk '{}' of VM '{}' is on datastore '{name}', a directory: nothing keeps host '{}' from writing there if it is alive, so the VM stays. Wait for that host, or restore the VM from a backup as another one (vmseal backup restore --as)",
                    disk.name, vm.name, vm.host_name
                );
                return Err(Problem::new(ErrorCode::WrongState, detail));
            }
            pools.push((known, disk.name.clone()));
        }
    }
    Ok(pools)
}

/// Whether a VM can go to a host; or why not.
async fn fits(
    services: &Services,
    (vm, disks, pools): (&Vm, &[Disk], &[(datastores::Datastore, String)]),
    wanted: Wanted,
    host: Host,
) -> Result<Fit, String> {
    let failed = |problem: Problem| problem.detail;
    let there = takes_vms(services, vm, &host)?;
    if !services.hosts.view(host.id).has(FENCE_VMS) {
        return Err("its agent cannot take disks from other hosts: upgrade vmseal there".to_owned());
    }
    if wanted.suspended {
        let here = description(services, vm).await.map_err(failed)?;
        let here = here.ok_or("the host of the VM is not known well enough")?;
        same_machine(&vm.hardware, &here, &there)?;
    }
    let agent = services.hosts.connected(host.id).map_err(failed)?;
    for (pool, disk) in pools {
        let on = place(pool, disk, &host)?;
        let condition = agent.measure_datastore(pool.spec(on)).await.map_err(failed)?;
        if let Some(why) = may_fence::lacking(pool, on, &condition) {
            return Err(why);
        }
        match condition {
            DatastoreCondition::Available { .. } => {}
            DatastoreCondition::WrongMark { detail }
            | DatastoreCondition::Unavailable { detail } => {
                return Err(format!("datastore '{}' is not there: {detail}", pool.name));
            }
        }
    }
    if wanted.starts {
        // The VM would be there, and not start.
        let allowed = mounted::require_messenger_at(&services.store, &*agent, vm, host.id, disks);
        allowed.await.map_err(|problem| format!("{}{OR_STAYS_OFF}", problem.detail))?;
    }
    let mut read = services.store.read().await.map_err(|error| failed(error.into()))?;
    let nics = nics::of_vm(&mut read, vm.id).await.map_err(|error| failed(error.into()))?;
    let promised = Promised::read(&mut read).await.map_err(|error| failed(error.into()))?;
    let free = free_memory(services, &mut read, host.id, &promised).await;
    let free = free.map_err(|error| failed(error.into()))?.unwrap_or(there.memory);
    drop(read);
    if wanted.starts && free < vm.memory {
        return Err(NO_ROOM.to_owned());
    }
    examine(&*agent, vm.id, nics.iter(), (&vm.hardware, vm.memory)).await?;
    let (downtime_milliseconds, copies) = (None, None);
    Ok(Fit { host, free, encrypted: true, downtime_milliseconds, copies, compresses: false })
}

/// Refuses a VM that would not start on any host, as its OSDs are not encrypted as its policy asks.
async fn require_osds(services: &Services, vm: &Vm, disks: &[Disk]) -> Result<(), Problem> {
    let mut read = services.store.read().await?;
    let policy = policies::find(&mut read, &vm.policy.to_string()).await?;
    let Some(policy) = policy else { return Ok(()) };
    osds::require(&mut read, &policy, disks).await.map_err(|problem| {
        let detail = format!("{}{OR_STAYS_OFF}", problem.detail);
        Problem { detail, ..problem }
    })
}

/// Where a host has a pool that a disk is on.
fn place<'a>(
    pool: &'a datastores::Datastore,
    disk: &str,
    host: &Host,
) -> Result<&'a datastores::OnHost, String> {
    pool.on(host.id).ok_or_else(|| {
        format!(
            "it does not have datastore '{}', which disk '{disk}' is on: share that with it, where another host that has it answers (vmseal datastore share {} --host {})",
            pool.name, pool.name, host.name
        )
    })
}
