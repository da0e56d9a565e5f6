//! What the drain of a host would do.

use vmseal_api::drain::PlannedAction::{self, Migrate, Stay, Stop};
use vmseal_api::drain::{OnDrain, PlannedVm};
use vmseal_api::host::Power;
use vmseal_api::problem::Problem;

use super::destination::{self, Until, largest_first};
use super::power;
use crate::hosts::HostView;
use crate::services::Services;
use crate::services::migrate::{Promised, Tried};
use crate::store::drains::Drain;
use crate::store::vms::Vm;

/// What would happen to each VM of a host, in the order in which they would be moved. Each host that is chosen has room for all
/// that would go there.
pub(super) async fn of(
    services: &Services,
    drain: &Drain,
    view: &HostView,
    mut vms: Vec<Vm>,
) -> Result<Vec<PlannedVm>, Problem> {
    let mut promised = Promised::read(&mut *services.store.read().await?).await?;
    let (tried, mut planned) = (Tried::default(), Vec::new());
    largest_first(&mut vms);
    for vm in vms {
        let line = |action: PlannedAction, host: Option<String>, why: &str| PlannedVm {
            vm: vm.name.clone(),
            action,
            host,
            why: why.to_owned(),
        };
        planned.push(match (vm.on_drain, power(view, &vm)) {
            (_, None | Some(Power::Off)) => line(Stay, None, "it is off"),
            (_, Some(Power::Suspended)) => line(Stay, None, "it is suspended"),
            (OnDrain::Leave, _) => line(Stay, None, "on-drain leave: it runs on"),
            (OnDrain::Stop, _) => line(Stop, None, "on-drain stop"),
            (OnDrain::Migrate, _) => {
                match destination::of(services, drain, &vm, (&promised, &tried), None).await {
                    Ok(to) => {
                        promised.add(to.host.id, vm.memory);
                        line(Migrate, Some(to.host.name), "on-drain migrate")
                    }
                    Err(refused) if drain.stop_others && refused.until != Until::Key => {
                        match destination::why_not_stopped(services, &vm, &refused.why).await {
                            Some(why) => line(Stay, None, &why),
                            None => line(Stop, None, &refused.why),
                        }
                    }
                    Err(refused) => line(Stay, None, &refused.why),
                }
            }
        });
    }
    Ok(planned)
}
