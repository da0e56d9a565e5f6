//! What a VM may be started from.

use vmseal_api::boot::{BootDevice, NO_DRIVE};
use vmseal_api::host::VmSpec;
use vmseal_api::problem::Problem;

/// Checks that a VM has what its firmware is to try first.
///
/// # Errors
/// `invalid-request`.
pub fn check_once(spec: &VmSpec, first: Option<BootDevice>) -> Result<(), Problem> {
    let what = match first {
        Some(BootDevice::Cdrom) if spec.hardware.cdrom.is_none() => NO_DRIVE,
        Some(BootDevice::Network) if spec.nics().next().is_none() => {
            "has 'network', and the VM has no network card"
        }
        _ => return Ok(()),
    };
    Err(Problem::invalid("boot_once", what))
}
