//! What VMs use, and what is left of hosts.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::join_all;
use jiff::Timestamp;
use sqlx::SqliteConnection;
use tokio::time::timeout;
use vmseal_api::host::Power;
use vmseal_api::host::version::USAGE;
use vmseal_api::id::HostId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::usage::{DatastoreRoom, HostRoom, HostUsage, Usage, VmUsage};

use super::Services;
use super::caller::{Caller, Privilege};
use crate::hosts::HostView;
use crate::store::hosts::Host;
use crate::store::{Part, StoreError, datastores, hosts, vms};

/// How long a host may take: whoever watches wants the others.
const HOST_TIMEOUT: Duration = Duration::from_secs(4);

/// What the VMs that run use; only one of them, if it is named.
pub async fn of_vms(
    services: &Services,
    caller: &Caller,
    vm: Option<&str>,
) -> Result<Usage, Problem> {
    caller.require(Privilege::Read)?;
    let mut read = services.store.read().await?;
    let known = match vm {
        Some(name) => {
            let found = vms::find(&mut read, name).await?;
            vec![found.ok_or_else(|| Problem::not_found("VM", name))?]
        }
        None => vms::list(&mut read, &Part::all()).await?,
    };
    let mut all = hosts::list(&mut read, &Part::all()).await?;
    drop(read);
    all.retain(|host| known.iter().any(|vm| vm.host == host.id));
    let asked = all.iter().map(|host| async move { (host, of_host(services, host).await) });
    let (mut found, mut missing) = (HashMap::new(), Vec::new());
    for (host, answer) in join_all(asked).await {
        match answer {
            Ok(usage) => {
                let at = Timestamp::now();
                found.extend(usage.vms.into_iter().map(|used| (used.vm, (at, used.counters))));
            }
            Err(problem) => missing.push(format!("{}: {problem}", host.name)),
        }
    }
    let mut used: Vec<_> = known
        .into_iter()
        .filter_map(|vm| {
            let (at, counters) = found.get(&vm.id).copied()?;
            let (vcpus, memory) = (vm.vcpus, vm.memory);
            Some(VmUsage {
                vm: vm.id,
                name: vm.name,
                host: vm.host_name,
                vcpus,
                memory,
                at,
                counters,
            })
        })
        .collect();
    used.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(Usage { vms: used, missing })
}

async fn of_host(services: &Services, host: &Host) -> Result<HostUsage, Problem> {
    let agent = services.hosts.connected(host.id)?;
    let description = services.hosts.view(host.id).description;
    if !description.is_some_and(|it| it.features.iter().any(|feature| feature == USAGE)) {
        let what = "its agent does not tell what VMs use: upgrade vmseal there";
        return Err(Problem::new(ErrorCode::Unsupported, what));
    }
    timeout(HOST_TIMEOUT, agent.usage())
        .await
        .unwrap_or_else(|_| Err(Problem::new(ErrorCode::TimedOut, "it does not answer in time")))
}

/// What is left of a host beside its VMs.
pub(super) async fn room(
    from: &mut SqliteConnection,
    host: HostId,
    view: &HostView,
) -> Result<HostRoom, StoreError> {
    let here = vms::on_host(from, host).await?;
    let runs = |vm: &&vms::Vm| {
        view.vm(vm.id)
            .map_or(vm.seen_power, |seen| Some(seen.power))
            .is_some_and(|power| power != Power::Off)
    };
    let running: Vec<_> = here.iter().filter(runs).collect();
    let memory_running = running.iter().map(|vm| vm.memory).sum();
    let mut stores = datastores::of_host(from, host).await?;
    stores.sort_by(|one, other| one.name.cmp(&other.name));
    let stores = stores.into_iter();
    Ok(HostRoom {
        vms: here.len(),
        running: running.len(),
        vcpus_running: running.iter().map(|vm| u64::from(vm.vcpus)).sum(),
        vcpus: here.iter().map(|vm| u64::from(vm.vcpus)).sum(),
        memory_running,
        memory: here.iter().map(|vm| vm.memory).sum(),
        memory_left: view
            .description
            .as_ref()
            .map(|host| host.memory.saturating_sub(memory_running)),
        datastores: stores.map(|it| DatastoreRoom { name: it.name, usage: it.usage }).collect(),
    })
}
