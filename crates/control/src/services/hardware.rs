//! The machine of a new VM: takes what the user asks for, and checks whether the host has it.

use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::time::timeout;
use vmseal_api::boot::{BootDevice, NO_DRIVE};
use vmseal_api::hardware::{
    Firmware, Hardware, TPM_DISK, TPM_DISK_SIZE, VARIABLES_DISK, VARIABLES_SIZE,
};
use vmseal_api::host::version::{CDROM, HARDWARE, PANIC, TAKE_TPM_STATE, TAKE_VARIABLES, TPM};
use vmseal_api::host::{Allocation, DiskLimits, DiskRole, ImageSource, NicSpec};
use vmseal_api::id::{DiskId, HostId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::CreateVm;
use vmseal_api::transfer::ImageFormat;

use super::Services;
use crate::store::disks::Disk;
use crate::store::policies::Policy;
use crate::store::{Part, hosts, vms};

/// How long a host may take to say whether it has a processor model: nothing depends on it yet.
const HOST_TIMEOUT: Duration = Duration::from_secs(4);

/// Checks what can be checked without the host.
pub(super) fn check(hardware: &Hardware, memory: u64) -> Result<(), Problem> {
    let field = |name: &str| format!("hardware.{name}");
    hardware.check(memory).map_err(|(name, what)| Problem::invalid(field(name), what))
}

/// Checks that a VM of this policy may have a TPM: what the TPM keeps is never in the clear.
pub(super) fn check_tpm(hardware: &Hardware, policy: &Policy) -> Result<(), Problem> {
    if !hardware.tpm || policy.encryption {
        return Ok(());
    }
    let detail = format!(
        "needs a policy that encrypts, as a TPM keeps keys, and policy '{}' does not",
        policy.name
    );
    Err(Problem::invalid("hardware.tpm", detail))
}

/// Checks that a VM that starts from the network has a network card.
pub(super) fn check_network_boot(order: &[BootDevice], cards: usize) -> Result<(), String> {
    if cards == 0 && order.contains(&BootDevice::Network) {
        return Err("has 'network', and the VM has no network card".to_owned());
    }
    Ok(())
}

/// Checks that a VM may be started from such a device first.
pub(super) async fn check_boot_once(
    services: &Services,
    vm: &vms::Vm,
    nics: &[NicSpec],
    first: BootDevice,
) -> Result<(), Problem> {
    let field = "boot_once";
    if first == BootDevice::Cdrom && vm.hardware.cdrom.is_none() {
        return Err(Problem::invalid(field, NO_DRIVE));
    }
    check_network_boot(&[first], nics.len()).map_err(|what| Problem::invalid(field, what))?;
    let description = services.hosts.connected(vm.host)?.describe().await?;
    if description.features.iter().any(|feature| feature == CDROM) {
        return Ok(());
    }
    Err(no_drives(&vm.host_name, &description.vmseal, field))
}

fn no_drives(host: &str, version: &str, field: &str) -> Problem {
    let detail = format!(
        "host '{host}' runs vmseal {version}, which gives VMs no CD-ROM drive and starts them from their disks alone: upgrade it"
    );
    Problem { field: Some(field.to_owned()), ..Problem::new(ErrorCode::Unsupported, detail) }
}

/// Checks that a VM with this firmware may begin with the variables of a file.
pub(super) fn check_variables(file: Option<&Path>, firmware: Firmware) -> Result<(), Problem> {
    let Some(file) = file else { return Ok(()) };
    if !firmware.has_variables() {
        let detail = "is for a VM with UEFI, and a BIOS has no variables: leave it out, or choose the firmware uefi";
        return Err(Problem::invalid("uefi_variables", detail));
    }
    if !file.is_absolute() {
        return Err(Problem::invalid("uefi_variables", "must be an absolute path"));
    }
    Ok(())
}

/// Checks that a VM of this machine may have a TPM that keeps what is in a file.
pub(super) fn check_tpm_state(file: Option<&Path>, hardware: &Hardware) -> Result<(), Problem> {
    let Some(file) = file else { return Ok(()) };
    if !hardware.tpm {
        let detail =
            "is for a VM with a TPM, and this one has none: leave it out, or give the VM a TPM";
        return Err(Problem::invalid("tpm_state", detail));
    }
    if !file.is_absolute() {
        return Err(Problem::invalid("tpm_state", "must be an absolute path"));
    }
    Ok(())
}

/// Refuses to take variables, or what a TPM keeps, from files of the host whose agent does not know how: it would refuse the disk.
pub(super) async fn require_taking(
    services: &Services,
    (host, host_name): (HostId, &str),
    request: &CreateVm,
) -> Result<(), Problem> {
    let asked = [
        (
            &request.uefi_variables,
            TAKE_VARIABLES,
            "uefi_variables",
            "begins with new variables in any case",
        ),
        (
            &request.tpm_state,
            TAKE_TPM_STATE,
            "tpm_state",
            "gives a new VM an empty TPM in any case",
        ),
    ];
    if asked.iter().all(|(file, ..)| file.is_none()) {
        return Ok(());
    }
    let description = services.hosts.connected(host)?.describe().await?;
    let lacks = |wanted: &str| !description.features.iter().any(|feature| feature == wanted);
    let mut asked = asked.into_iter();
    let unknown = asked.find(|(file, wanted, ..)| file.is_some() && lacks(wanted));
    let Some((_, _, field, instead)) = unknown else { return Ok(()) };
    let detail = format!(
        "host '{host_name}' runs vmseal {}, which {instead}: upgrade it",
        description.vmseal
    );
    let field = Some(field.to_owned());
    Err(Problem { field, ..Problem::new(ErrorCode::Unsupported, detail) })
}

/// The disk for the variables of a firmware that has any, with what a file of the host has where one is named. It is `encrypted`
/// as its VM is, also where the first disk is in the clear.
pub(super) fn variables(
    firmware: Firmware,
    others: &[Disk],
    encrypted: bool,
    file: Option<&Path>,
) -> Option<Disk> {
    let first = others.first().filter(|_| firmware.has_variables())?;
    let disk = beside(first, VARIABLES_DISK, VARIABLES_SIZE, DiskRole::UefiVariables);
    Some(Disk { encrypted, image: file.map(taken_from), ..disk })
}

/// The disk for the key of a TPM, which keeps what a file of the host has where one is named.
pub(super) fn tpm(hardware: &Hardware, others: &[Disk], file: Option<&Path>) -> Option<Disk> {
    let first = others.first().filter(|_| hardware.tpm)?;
    let disk = beside(first, TPM_DISK, TPM_DISK_SIZE, DiskRole::Tpm);
    // What a TPM keeps is encrypted in any case; the VM's first disk may be in the clear.
    Some(Disk { encrypted: true, image: file.map(taken_from), ..disk })
}

fn taken_from(file: &Path) -> ImageSource {
    ImageSource { path: file.to_owned(), format: ImageFormat::Raw, force: false }
}

/// A disk of the machine's own, on the datastore of the VM's first disk. It is small, and written seldom: nothing of it
/// is cached, replicated or limited.
fn beside(first: &Disk, name: &str, size: u64, role: DiskRole) -> Disk {
    Disk {
        id: DiskId::new(),
        name: name.to_owned(),
        size,
        role,
        allocation: Allocation::Thin,
        limits: DiskLimits::default(),
        cache: None,
        replica: None,
        image: None,
        facts: None,
        detached: false,
        deleting: false,
        ..first.clone()
    }
}

/// Asks the host whether it has what the machine needs, where that is not what every host has, with so much memory where the host is
/// to have huge pages for all of it.
pub(super) async fn examine(
    services: &Services,
    host: HostId,
    host_name: &str,
    hardware: &Hardware,
    memory: Option<u64>,
) -> Result<(), Problem> {
    if hardware.is_usual() {
        return Ok(());
    }
    // Asked now: what the monitor has may be of an agent that is gone.
    let agent = services.hosts.connected(host)?;
    let description = agent.describe().await?;
    if !description.features.iter().any(|feature| feature == HARDWARE) {
        let detail = format!(
            "host '{host_name}' runs vmseal {}, which gives VMs a BIOS, its own processor model and usual memory alone: upgrade it",
            description.vmseal
        );
        let field = Some("hardware".to_owned());
        return Err(Problem { field, ..Problem::new(ErrorCode::Unsupported, detail) });
    }
    if hardware.tpm && !description.features.iter().any(|feature| feature == TPM) {
        let detail = format!(
            "host '{host_name}' runs vmseal {}, which gives VMs no TPM: upgrade it",
            description.vmseal
        );
        let field = Some("hardware.tpm".to_owned());
        return Err(Problem { field, ..Problem::new(ErrorCode::Unsupported, detail) });
    }
    let boots = hardware.cdrom.is_some() || !hardware.boot.is_empty();
    if boots && !description.features.iter().any(|feature| feature == CDROM) {
        let field = if hardware.cdrom.is_some() { "hardware.cdrom" } else { "hardware.boot" };
        return Err(no_drives(host_name, &description.vmseal, field));
    }
    let of_crash = !hardware.on_crash.is_usual() || hardware.crash_dump_format.is_some();
    if of_crash && !description.features.iter().any(|feature| feature == PANIC) {
        let detail = format!(
            "host '{host_name}' runs vmseal {}, which stops a VM when its guest panics, and does nothing else: upgrade it",
            description.vmseal
        );
        let field = Some("hardware.on_crash".to_owned());
        return Err(Problem { field, ..Problem::new(ErrorCode::Unsupported, detail) });
    }
    agent.examine_hardware(hardware.clone(), memory).await.map_err(|problem| Problem {
        field: problem.field.map(|field| format!("hardware.{field}")),
        ..problem
    })
}

/// What the hosts that answer say of a processor model that they do not have. It is no error: a policy is also for hosts
/// that are away, and for ones that come later.
pub(super) async fn warn_of_model(
    services: &Services,
    model: Option<&str>,
) -> Result<Vec<String>, Problem> {
    let Some(model) = model else { return Ok(Vec::new()) };
    let hardware = Hardware { cpu_model: Some(model.to_owned()), ..Hardware::default() };
    let known = hosts::list(&mut *services.store.read().await?, &Part::all()).await?;
    let asked = known.iter().map(async |host| {
        let asked = examine(services, host.id, &host.name, &hardware, None);
        let problem = timeout(HOST_TIMEOUT, asked).await.ok()?.err()?;
        (problem.code == ErrorCode::Unsupported)
            .then(|| format!("host '{}' cannot run VMs of it: {}", host.name, problem.detail))
    });
    Ok(join_all(asked).await.into_iter().flatten().collect())
}
