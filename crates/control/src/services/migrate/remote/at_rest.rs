//! The checks before a VM that is off or suspended goes to another control plane: of the VM, of its host, and of the other control plane.
//! The host sends the VM's disks, and its memory if it is suspended.

use vmseal_api::host::DiskRole;
use vmseal_api::host::version::{MIGRATE_AT_REST, MIGRATE_SUSPENDED};
use vmseal_api::model::About;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{ARRIVALS_AT_REST, ARRIVALS_SUSPENDED};
use vmseal_api::request::MigrateVm;

use crate::services::vms::require_no_template;
use crate::services::{Services, features};
use crate::store::disks::Disk;
use crate::store::vms::Vm;

/// Refuses what is asked of a guest that runs.
pub(super) fn require_no_guest_of(request: &MigrateVm) -> Result<(), Problem> {
    if request.downtime_milliseconds.is_none() {
        return Ok(());
    }
    let what = "the VM does not run: no guest stands still. Leave it out";
    Err(Problem::invalid("downtime_milliseconds", what))
}

/// Refuses a VM that would leave something behind, or whose host cannot send it.
pub(super) fn require_sendable(
    services: &Services,
    vm: &Vm,
    disks: &[Disk],
    suspended: bool,
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
    let word = if suspended { "resume" } else { "start" };
    if disks.iter().any(|disk| disk.role == DiskRole::Tpm) {
        return refuse(format!(
            "has a TPM, and what that keeps goes to another control plane only while the VM runs: {word} it first (vmseal vm {word} {})",
            vm.name
        ));
    }
    features::require(services, vm, MIGRATE_AT_REST, "send VMs that are off")?;
    if !suspended {
        return Ok(());
    }
    if let Some(path) = vm.hardware.medium() {
        // Its guest has the file open; what has the same name there may be another.
        return refuse(format!(
            "is suspended with {} in its CD-ROM drive, which is a file of its host: resume it, and eject that first (vmseal vm resume {1}, vmseal vm cdrom eject {1})",
            path.display(),
            vm.name
        ));
    }
    features::require(services, vm, MIGRATE_SUSPENDED, "send VMs that are suspended")
}

/// Refuses a control plane of an earlier version.
pub(super) fn require_taken(remote: &str, about: &About, suspended: bool) -> Result<(), Problem> {
    let has = |feature| about.features.iter().any(|it| it == feature);
    let detail = if !has(ARRIVALS_AT_REST) {
        format!(
            "remote '{remote}' runs vmseal {}, which takes VMs of other control planes only while they run: upgrade it, or start the VM first",
            about.vmseal
        )
    } else if suspended && !has(ARRIVALS_SUSPENDED) {
        format!(
            "remote '{remote}' runs vmseal {}, which takes no VMs that are suspended ({ARRIVALS_SUSPENDED}): upgrade it, or resume the VM first",
            about.vmseal
        )
    } else {
        return Ok(());
    };
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// What a plan says of it.
pub(super) fn stays(vm: &Vm, suspended: bool, encrypted: bool) -> String {
    let how = if encrypted { "" } else { " in the clear" };
    let name = &vm.name;
    if suspended {
        return format!(
            "VM '{name}' is suspended: its disks and the memory of its guest are sent{how}, and it is suspended at the other control plane"
        );
    }
    format!("VM '{name}' is off: its disks are sent{how}, and it is off at the other control plane")
}
