//! What is asked of a VM that is off, and of the other control plane, before it goes there. Its disks are sent alone.

use vmseal_api::host::version::MIGRATE_AT_REST;
use vmseal_api::host::{DiskRole, Power};
use vmseal_api::model::About;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::ARRIVALS_AT_REST;
use vmseal_api::request::MigrateVm;

use crate::services::vms::require_no_template;
use crate::services::{Services, features};
use crate::store::disks::Disk;
use crate::store::vms::Vm;

/// Refuses a VM that is suspended: its memory is a file beside its disks, which is not sent.
pub(in crate::services::migrate) fn require_off(vm: &Vm, power: Power) -> Result<(), Problem> {
    if power != Power::Suspended {
        return Ok(());
    }
    let detail = format!(
        "VM '{0}' is suspended: a VM goes to another control plane while it runs or is off. Resume it first (vmseal vm resume {0})",
        vm.name
    );
    let problem = Problem::new(ErrorCode::WrongState, detail);
    Err(Problem { field: Some("remote".to_owned()), ..problem })
}

/// Refuses what is asked of a guest that runs.
pub(super) fn require_no_guest_of(request: &MigrateVm) -> Result<(), Problem> {
    if request.downtime_milliseconds.is_none() {
        return Ok(());
    }
    let what = "the VM is off: no guest stands still. Leave it out";
    Err(Problem::invalid("downtime_milliseconds", what))
}

/// Refuses a VM that would leave something behind, or whose host cannot send it.
pub(super) fn require_sendable(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
) -> Result<(), Problem> {
    require_no_template(vm)?;
    let refuse =
        |what: String| Err(Problem::new(ErrorCode::WrongState, format!("VM '{}' {what}", vm.name)));
    if let Some(disk) = disks.iter().find(|disk| disk.replica.is_some()) {
        return refuse(format!(
            "has a replica of its disk '{0}', which would stay behind: a VM with replicas does not go to another control plane. Clone it with a policy without replicas, and send the clone (vmseal vm clone {1} NAME)",
            disk.name, vm.name
        ));
    }
    if disks.iter().any(|disk| disk.role == DiskRole::Tpm) {
        return refuse(format!(
            "has a TPM, and what that keeps goes to another control plane only while the VM runs: start it first (vmseal vm start {})",
            vm.name
        ));
    }
    features::require(services, vm, MIGRATE_AT_REST, "send VMs that are off")
}

/// Refuses a control plane of an earlier version.
pub(super) fn require_taken(remote: &str, about: &About) -> Result<(), Problem> {
    if about.features.iter().any(|it| it == ARRIVALS_AT_REST) {
        return Ok(());
    }
    let detail = format!(
        "remote '{remote}' runs vmseal {}, which takes VMs of other control planes only while they run: upgrade it, or start the VM first",
        about.vmseal
    );
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// What a plan says of it.
pub(super) fn stays_off(vm: &Vm, encrypted: bool) -> String {
    let how = if encrypted { "" } else { " in the clear" };
    format!(
        "VM '{}' is off: its disks are sent{how}, and it is off at the other control plane",
        vm.name
    )
}
