//! Hosts that are emptied before maintenance. A host that is drained gets no VMs; those that run there are moved, stopped or left,
//! as each says.
//!
//! ```text
//!             drain              no VM runs there but those that are left
//!   active ──────────► draining ──────────────────────────────────────────► drained
//!      ▲                │  ▲ │                                                 │
//!      │    undrain     │  └─┘ drain, with other options: what failed is       │
//!      └────────────────┴────  tried again                                ◄────┘
//! ```
//! What has been asked is in the inventory, and the tasks that move and stop the VMs are those of any other request. Between them
//! nothing is kept: `run` looks at the host, and begins what can begin, as often as something changes.

mod destination;
mod look;
mod plan;
mod run;
#[cfg(test)]
mod tests;

use jiff::Timestamp;
use vmseal_api::drain::{DrainState, Maintenance, OnDrain, PARALLEL_DEFAULT, PARALLEL_MAX};
use vmseal_api::host::Power;
use vmseal_api::model::{Host, Plan};
use vmseal_api::problem::Problem;
use vmseal_api::request::{DrainHost, UndrainHost};
use vmseal_api::request_id;

pub use self::run::run;
use super::caller::{Caller, Privilege};
use super::{Outcome, Services, hosts};
use crate::hosts::HostView;
use crate::store::drains::{self, Drain, DrainedVm};
use crate::store::events::NewEvent;
use crate::store::vms::{self, Vm};
use crate::tasks::Engine;

/// Has no more VMs placed on a host, and those that run there moved or stopped. Asked again, what failed is tried again.
pub async fn drain(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: DrainHost,
    dry_run: bool,
) -> Result<Outcome<Host>, Problem> {
    caller.require(Privilege::RegisterHost)?;
    let parallel = request.parallel.unwrap_or(PARALLEL_DEFAULT);
    if !(1..=PARALLEL_MAX).contains(&parallel) {
        return Err(Problem::invalid("parallel", format!("must be 1 to {PARALLEL_MAX}")));
    }
    let pace = super::tasks::pace_of(request.rate)?;
    let host = hosts::find(services, name).await?;
    let view = services.hosts.view(host.id);
    let here = vms::on_host(&mut *services.store.read().await?, host.id).await?;
    let running: Vec<_> = here.iter().filter(|vm| runs(&view, vm)).collect();
    if running.iter().any(|vm| vm.key.is_some() && vm.on_drain == OnDrain::Migrate) {
        caller.require(Privilege::Migrate)?;
    }
    let drain = Drain {
        host: host.id,
        state: Maintenance::Draining,
        actor: caller.name().to_owned(),
        migrate_encrypted: caller.has(Privilege::Migrate),
        parallel,
        stop_others: request.stop_others,
        rate: pace.bytes_per_second,
        compress: request.compress,
        begun: Timestamp::now(),
        request_id: request_id::current(),
    };
    if dry_run {
        let vms = plan::of(services, &drain, &view, here).await?;
        return Ok(Outcome::Planned(Plan { vms, ..planned(&host.name, &drain) }));
    }
    let mut write = services.store.write().await?;
    let before = drains::vms_of(&mut write, host.id).await?;
    drains::begin(&mut write, &drain).await?;
    // A client that asks before the first look finds these VMs listed.
    for vm in running {
        let line = first_line(vm, &before);
        drains::set_vm(&mut write, host.id, &line).await?;
    }
    let (actor, target, detail) = (caller.name(), host.name.as_str(), how(&drain));
    write.event(NewEvent { kind: "host.draining", actor, target, detail: &detail }).await?;
    write.commit().await?;
    let host = hosts::find(services, &host.id.to_string()).await?;
    Ok(Outcome::Done(hosts::shown_whole(services, host).await?))
}

/// What is known of a VM at first: a task of an earlier drain that goes on is one of this drain.
fn first_line(vm: &Vm, before: &[DrainedVm]) -> DrainedVm {
    let goes_on = |line: &&DrainedVm| line.vm == vm.id && line.state == DrainState::UnderWay;
    if let Some(line) = before.iter().find(goes_on) {
        return DrainedVm { attempts: 0, ..line.clone() };
    }
    DrainedVm {
        vm: vm.id,
        name: vm.name.clone(),
        state: DrainState::Waiting,
        attempts: 0,
        task: None,
        detail: String::new(),
    }
}

/// How VMs leave a host, for people.
fn how(drain: &Drain) -> String {
    let others = if drain.stop_others { ", those that cannot be moved are shut down" } else { "" };
    let rate =
        drain.rate.map_or_else(String::new, |rate| format!(", each at most {rate} bytes a second"));
    let how = if drain.compress { ", their memory compressed" } else { "" };
    format!("move VMs away, at most {} at a time{rate}{how}{others}", drain.parallel)
}

fn planned(host: &str, drain: &Drain) -> Plan {
    let steps = vec!["place no more VMs on it".to_owned(), how(drain)];
    Plan { kind: "host.drain".to_owned(), target: host.to_owned(), steps, ..Plan::default() }
}

/// The power of a VM, as its host says, or as it last said.
fn power(view: &HostView, vm: &Vm) -> Option<Power> {
    view.vm(vm.id).map_or(vm.seen_power, |seen| Some(seen.power))
}

fn runs(view: &HostView, vm: &Vm) -> bool {
    power(view, vm).is_some_and(|power| !matches!(power, Power::Off | Power::Suspended))
}

/// Has VMs placed on a host again. Those that were moved or stopped stay so. What moves or stops others goes on, unless that is
/// cancelled, too. A host that is active stays so.
pub async fn undrain(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: UndrainHost,
    dry_run: bool,
) -> Result<Outcome<Host>, Problem> {
    caller.require(Privilege::RegisterHost)?;
    let host = hosts::find(services, name).await?;
    let mut write = services.store.write().await?;
    let known = drains::vms_of(&mut write, host.id).await?;
    if drains::of_host(&mut write, host.id).await?.is_some() {
        drains::end(&mut write, host.id).await?;
        let (kind, actor, target) = ("host.undrained", caller.name(), host.name.as_str());
        write.event(NewEvent { kind, actor, target, detail: "" }).await?;
    }
    let tasks = known.into_iter().filter_map(|vm| vm.task).filter(|_| request.cancel);
    let cancelled = Engine::note_all_cancelled(&mut write, tasks, caller.name()).await?;
    if dry_run {
        let mut steps = vec!["place VMs on it again; none is moved back".to_owned()];
        steps.extend(cancelled.iter().map(|task| {
            format!("cancel {} of VM '{}' (task {})", task.operation.kind(), task.target, task.id)
        }));
        let (kind, target) = ("host.undrain".to_owned(), host.name);
        return Ok(Outcome::Planned(Plan { kind, target, steps, ..Plan::default() }));
    }
    write.commit().await?;
    services.engine.tell_cancelled(&cancelled);
    let host = hosts::find(services, &host.id.to_string()).await?;
    Ok(Outcome::Done(hosts::shown_whole(services, host).await?))
}
