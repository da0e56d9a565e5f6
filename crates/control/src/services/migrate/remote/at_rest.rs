//! The checks before a VM that is off or suspended goes to another control plane: of the VM, of its host, and of the other control plane.
//! The host sends the VM's disks, what its TPM keeps, and its memory if it is suspended.

use vmseal_api::host::version::{MIGRATE_AT_REST, MIGRATE_SUSPENDED, MIGRATE_TPM_AT_REST};
use vmseal_api::host::{DiskRole, Power};
use vmseal_api::model::About;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::remote::{ARRIVALS_AT_REST, ARRIVALS_SUSPENDED, ARRIVALS_TPM_AT_REST};
use vmseal_api::request::MigrateVm;

use crate::services::vms::require_no_template;
use crate::services::{Services, features};
use crate::store::disks::Disk;
use crate::store::vms::Vm;

/// What goes with the disks of a VM that does not run.
#[derive(Clone, Copy, Debug)]
pub(super) struct With {
    /// The memory of its guest: it is suspended.
    pub memory: bool,
    /// What its TPM keeps.
    pub tpm: bool,
}

impl With {
    pub(super) fn of(disks: &[Disk], rest: Option<Power>) -> Self {
        let tpm = disks.iter().any(|disk| disk.role == DiskRole::Tpm);
        Self { memory: rest == Some(Power::Suspended), tpm }
    }

    /// The command that has such a VM run, and what it does.
    fn run(self) -> &'static str {
        if self.memory { "resume" } else { "start" }
    }
}

/// Refuses what is asked of a guest that runs.
pub(super) fn require_no_guest_of(request: &MigrateVm) -> Result<(), Problem> {
    if request.compress {
        let what = "the VM does not run: its disks are sent, which are not compressed, and neither is a memory that is saved. Leave it out";
        return Err(Problem::invalid("compress", what));
    }
    if request.downtime_milliseconds.is_none() {
        return Ok(());
    }
    let what = "the VM does not run: no guest stands still. Leave it out";
    Err(Problem::invalid("downtime_milliseconds", what))
}

/// Refuses a VM that would leave something behind, or whose host cannot send it.
pub(super) fn require_sendable(services: &Services, vm: &Vm, with: With) -> Result<(), Problem> {
    require_no_template(vm)?;
    features::require(services, vm, MIGRATE_AT_REST, "send VMs that are off")?;
    if with.tpm {
        let what = "send what the TPM of a VM keeps that does not run";
        features::require(services, vm, MIGRATE_TPM_AT_REST, what)?;
    }
    if !with.memory {
        return Ok(());
    }
    if let Some(path) = vm.hardware.medium() {
        // Its guest has the file open; what has the same name there may be another.
        let detail = format!(
            "VM '{1}' is suspended with {0} in its CD-ROM drive, which is a file of its host: eject that first (vmseal vm cdrom eject {1}). Its guest, which has it open, finds the drive empty when it is resumed: to have it let go before, resume it first (vmseal vm resume {1})",
            path.display(),
            vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    features::require(services, vm, MIGRATE_SUSPENDED, "send VMs that are suspended")
}

/// Refuses a control plane of an earlier version.
pub(super) fn require_taken(remote: &str, about: &About, with: With) -> Result<(), Problem> {
    let has = |feature| about.features.iter().any(|it| it == feature);
    let detail = if !has(ARRIVALS_AT_REST) {
        format!(
            "remote '{remote}' runs vmseal {}, which takes VMs of other control planes only while they run: upgrade it, or start the VM first",
            about.vmseal
        )
    } else if with.memory && !has(ARRIVALS_SUSPENDED) {
        format!(
            "remote '{remote}' runs vmseal {}, which takes no VMs that are suspended ({ARRIVALS_SUSPENDED}): upgrade it, or resume the VM first",
            about.vmseal
        )
    } else if with.tpm && !has(ARRIVALS_TPM_AT_REST) {
        format!(
            "remote '{remote}' runs vmseal {}, which takes VMs with a TPM only while they run ({ARRIVALS_TPM_AT_REST}): upgrade it, or {} the VM first",
            about.vmseal,
            with.run()
        )
    } else {
        return Ok(());
    };
    Err(Problem::new(ErrorCode::Unsupported, detail))
}

/// What a plan says of it.
pub(super) fn stays(vm: &Vm, with: With, encrypted: bool) -> String {
    let how = if encrypted { "" } else { " in the clear" };
    let (state, what) = match (with.memory, with.tpm) {
        (false, false) => ("off", "its disks"),
        (false, true) => ("off", "its disks and what its TPM keeps"),
        (true, false) => ("suspended", "its disks and the memory of its guest"),
        (true, true) => ("suspended", "its disks, what its TPM keeps and the memory of its guest"),
    };
    format!(
        "VM '{}' is {state}: {what} are sent{how}, and it is {state} at the other control plane",
        vm.name
    )
}
