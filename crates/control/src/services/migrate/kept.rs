//! The room that is taken by what a VM has beside its disks as they are, as its host's agent says.

use vmseal_api::host::version::MEASURE_KEPT;
use vmseal_api::host::{KeptRoom, PlacedDisk};
use vmseal_api::problem::Problem;

use crate::services::Services;
use crate::store::disks::Disk;
use crate::store::vms::Vm;

/// That of these disks; none where the agent is of an earlier version, and does not say it.
pub(super) async fn of(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
) -> Result<Option<KeptRoom>, Problem> {
    if !services.hosts.view(vm.host).has(MEASURE_KEPT) {
        return Ok(None);
    }
    let made = disks.iter().filter(|disk| disk.facts.is_some() && !disk.detached);
    let place = |disk: &Disk| PlacedDisk { disk: disk.id, datastore: disk.datastore.clone() };
    let agent = services.hosts.connected(vm.host)?;
    agent.measure_kept(vm.id, made.map(place).collect()).await.map(Some)
}
