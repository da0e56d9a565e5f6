//! TPMs that VMs get after they are made, and lose. The VM is off: a guest finds its TPM when it boots.

use vmseal_api::hardware::{Hardware, TPM_DISK};
use vmseal_api::host::{DiskRole, Power};
use vmseal_api::model::Task;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::DISKS_MAX;

use super::caller::{Caller, Privilege};
use super::hardware;
use super::snapshots;
use super::vms::{begin, find, power, require_no_template, require_ready};
use super::{Outcome, Services};
use crate::operation::Operation;
use crate::store::disks::{self, Disk};
use crate::store::policies;
use crate::store::vms::Vm;

/// Gives a VM a TPM, which is new: it keeps nothing yet.
pub async fn add(
    services: &Services,
    caller: &Caller,
    vm: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, _) = find(services, vm).await?;
    require_ready(&vm)?;
    require_no_template(&vm)?;
    caller.require(Privilege::EncryptNew)?;
    // No transaction is held during a call to a host.
    require_off(services, &vm).await?;
    let asked = Hardware { tpm: true, ..Hardware::default() };
    let examined = hardware::examine(services, vm.host, &vm.host_name, &asked, None).await;
    examined.map_err(|problem| Problem { field: None, ..problem })?;
    let mut write = services.store.write().await?;
    let known = disks::of_vm(&mut write, vm.id).await?;
    check_disks(&vm, &known)?;
    let policy = policies::find(&mut write, &vm.policy.to_string()).await?;
    let policy = policy.ok_or_else(|| Problem::not_found("policy", &vm.policy_name))?;
    hardware::check_tpm(&asked, &policy).map_err(|problem| {
        let detail = format!("a TPM for VM '{}' {}", vm.name, problem.detail);
        Problem::new(ErrorCode::WrongState, detail)
    })?;
    if vm.key.is_none() {
        let detail = format!(
            "VM '{0}' has no key, and what a TPM keeps is encrypted: encrypt the VM first (vmseal vm encrypt {0})",
            vm.name
        );
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let data: Vec<Disk> = known.into_iter().filter(|disk| disk.role.is_data()).collect();
    let made = hardware::tpm(&asked, &data, None).ok_or_else(|| {
        let detail = format!("VM '{0}' has no disk, and a TPM keeps its data beside one: add a disk first (vmseal disk add {0})", vm.name);
        Problem::new(ErrorCode::WrongState, detail)
    })?;
    let disk = Disk { detached: true, ..made };
    let position = disks::next_position(&mut write, vm.id).await?;
    disks::insert(&mut write, vm.id, position, &disk).await?;
    let operation = Operation::AddTpm { vm: vm.id, disk: disk.id };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// Takes its TPM from a VM, and destroys what the TPM keeps.
pub async fn remove(
    services: &Services,
    caller: &Caller,
    vm: &str,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::VmConfigure)?;
    let (vm, _) = find(services, vm).await?;
    require_ready(&vm)?;
    require_no_template(&vm)?;
    require_off(services, &vm).await?;
    let mut write = services.store.write().await?;
    let known = disks::of_vm(&mut write, vm.id).await?;
    let Some(disk) = known.iter().find(|disk| disk.role == DiskRole::Tpm) else {
        let detail = format!("VM '{}' has no TPM", vm.name);
        return Err(Problem::new(ErrorCode::NotFound, detail));
    };
    // An interrupted removal goes on.
    if !disk.detached {
        snapshots::require_no_memory(&mut write, &vm, "its TPM").await?;
    }
    let operation = Operation::RemoveTpm { vm: vm.id, disk: disk.id };
    begin(services, write, operation, &vm, caller, dry_run).await
}

async fn require_off(services: &Services, vm: &Vm) -> Result<(), Problem> {
    if power(services, vm).await?.is_none_or(|power| power == Power::Off) {
        return Ok(());
    }
    let detail = format!(
        "VM '{0}' is not off, and a TPM is added or removed only while its VM is off: stop it first (vmseal vm stop {0})",
        vm.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Whether the disk of a TPM's key can be added to these.
fn check_disks(vm: &Vm, known: &[Disk]) -> Result<(), Problem> {
    let wrong = |detail: String| Err(Problem::new(ErrorCode::WrongState, detail));
    match known.iter().find(|disk| disk.role == DiskRole::Tpm) {
        Some(disk) if disk.detached => {
            return wrong(format!(
                "what the last TPM of VM '{0}' kept is not removed yet: remove it again (vmseal vm set {0} --tpm off)",
                vm.name
            ));
        }
        Some(_) => {
            let detail = format!("VM '{}' has a TPM", vm.name);
            return Err(Problem::new(ErrorCode::AlreadyExists, detail));
        }
        None => {}
    }
    if known.iter().any(|disk| disk.name == TPM_DISK) {
        return wrong(format!(
            "VM '{}' has a disk '{TPM_DISK}', which is the name of the disk with a TPM's key",
            vm.name
        ));
    }
    if known.len() >= DISKS_MAX {
        let detail = format!(
            "VM '{}' has {} disks, a TPM needs one more, and a VM has at most {DISKS_MAX}: remove a disk first (vmseal disk remove)",
            vm.name,
            known.len()
        );
        return Err(Problem::new(ErrorCode::LimitExceeded, detail));
    }
    Ok(())
}
