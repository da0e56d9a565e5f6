//! Giving VMs that are off or suspended to other hosts: those that have all of their datastores. Nothing is copied.

use vmseal_api::datastore::DatastoreCondition;
use vmseal_api::host::{DatastoreSpec, Power};
use vmseal_api::model::{Plan, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::MigrateVm;
use vmseal_api::size::Size;

use super::{
    Candidates, Fit, Promised, cannot_go, examine, free_memory, key, others, same_machine,
    takes_vms,
};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::services::caller::Caller;
use crate::services::vms::{begin, word};
use crate::services::{Outcome, Services, hosts};
use crate::store::disks::Disk;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::store::{datastores, nics};

/// Gives a VM to another host: to the one that was named, or to one with the most free memory.
pub(super) async fn migrate(
    services: &Services,
    caller: &Caller,
    (vm, disks, power): (&Vm, &[Disk], Power),
    request: MigrateVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    if request.datastore.is_some() {
        let detail = format!(
            "VM '{}' is {}: its disks stay where they are. A datastore is named for copies of the disks of a VM that runs",
            vm.name,
            word(power)
        );
        let problem = Problem::new(ErrorCode::WrongState, detail);
        return Err(Problem { field: Some("datastore".to_owned()), ..problem });
    }
    let (fit, refused) = match &request.host {
        Some(host) => {
            let host = hosts::find(services, host).await?;
            let name = host.name.clone();
            let fit = fits(services, vm, disks, power, host).await;
            (fit.map_err(|why| cannot_go(vm, &name, &why))?, Vec::new())
        }
        None => {
            let mut candidates = Candidates::default();
            for host in others(services, vm).await? {
                let name = host.name.clone();
                candidates.add(&name, fits(services, vm, disks, power, host).await, None);
            }
            candidates.best(vm)?
        }
    };
    // As its start does: with a key that may not encrypt anything new, it could not be started there.
    key::require(services, vm, Purpose::Encrypt).await?;
    let write = services.store.write().await?;
    let operation = Operation::ChangeHost { vm: vm.id, from: vm.host, to: fit.host.id };
    Ok(match begin(services, write, operation, vm, caller, dry_run).await? {
        Outcome::Planned(plan) => {
            let mut plan = explained(plan, vm, power, &fit);
            plan.warnings.extend(refused);
            Outcome::Planned(plan)
        }
        done => done,
    })
}

/// A plan with what was chosen, and what to know of it.
fn explained(mut plan: Plan, vm: &Vm, power: Power, fit: &Fit) -> Plan {
    let chosen = format!(
        "choose host '{}'; the VM is {}, so nothing is sent, and its disks stay where they are",
        fit.host.name,
        word(power)
    );
    plan.steps.insert(0, chosen);
    if fit.free < vm.memory {
        plan.warnings.push(format!(
            "host '{}' has {} of memory free, and the VM needs {} when it is started",
            fit.host.name,
            Size(fit.free),
            Size(vm.memory)
        ));
    }
    plan
}

/// How a VM can go to a host, or why not.
async fn fits(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    power: Power,
    host: Host,
) -> Result<Fit, String> {
    let failed = |problem: Problem| problem.detail;
    let there = takes_vms(services, vm, &host)?;
    if power == Power::Suspended {
        let here = services.hosts.view(vm.host).description.clone();
        let here = here.ok_or("the host of the VM is not known well enough")?;
        same_machine(&vm.hardware, &here, &there)?;
    }
    let agent = services.hosts.connected(host.id).map_err(failed)?;
    for (place, name) in places(services, vm, disks, power, &host).await? {
        match agent.measure_datastore(place).await.map_err(failed)? {
            DatastoreCondition::Available { .. } => {}
            DatastoreCondition::WrongMark { detail }
            | DatastoreCondition::Unavailable { detail } => {
                return Err(format!("datastore '{name}' is not there: {detail}"));
            }
        }
    }
    let mut read = services.store.read().await.map_err(|error| failed(error.into()))?;
    let nics = nics::of_vm(&mut read, vm.id).await.map_err(|error| failed(error.into()))?;
    let promised = Promised::read(&mut read).await.map_err(|error| failed(error.into()))?;
    let free = free_memory(services, &mut read, host.id, &promised).await;
    let free = free.map_err(|error| failed(error.into()))?.unwrap_or(there.memory);
    drop(read);
    examine(&*agent, vm.id, nics.iter(), (&vm.hardware, vm.memory)).await?;
    let (downtime_milliseconds, copies) = (None, None);
    Ok(Fit { host, free, encrypted: true, downtime_milliseconds, copies, compresses: false })
}

/// Where a host has the datastores that the VM's disks and their replicas are on, with their names; or which one it does not have,
/// and what can be done.
async fn places(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    power: Power,
    host: &Host,
) -> Result<Vec<(DatastoreSpec, String)>, String> {
    let failed = |problem: Problem| problem.detail;
    let mut read = services.store.read().await.map_err(|error| failed(error.into()))?;
    let there = datastores::of_host(&mut read, host.id).await;
    let there = there.map_err(|error| failed(error.into()))?;
    let mut places: Vec<(DatastoreSpec, String)> = Vec::new();
    for disk in disks {
        for (id, name) in disk.datastores() {
            let known = there.iter().find(|it| it.id == id).and_then(|it| it.spec_on(host.id));
            let Some(place) = known else {
                let (disk, vm, host) = (&disk.name, &vm.name, &host.name);
                let or = match power {
                    Power::Suspended => "resume the VM and migrate it while it runs".to_owned(),
                    _ => format!(
                        "move its disks to one that both hosts have (vmseal vm move {vm} --datastore NAME), or start the VM and migrate it while it runs"
                    ),
                };
                return Err(format!(
                    "it does not have datastore '{name}', which disk '{disk}' is on, and the disks of a VM that does not run are not copied. Share the datastore (vmseal datastore share {name} --host {host}), or {or}"
                ));
            };
            if places.iter().all(|(known, _)| known.datastore != id) {
                places.push((place, name.to_owned()));
            }
        }
    }
    Ok(places)
}
