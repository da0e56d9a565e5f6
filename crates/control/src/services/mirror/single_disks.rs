//! Single disks of a VM that are encrypted or decrypted, while others stay as they are.

use vmseal_api::host::version::MIRROR_AS_IT_IS;
use vmseal_api::id::DiskId;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::DecryptVm;

use super::{Kept, Wanted};
use crate::services::{Services, dumps, features};
use crate::store::disks::Disk;
use crate::store::policies::{self, Policy};
use crate::store::vms::Vm;
use crate::tasks::mirror_vm::as_it_is;

/// The policy of a VM of which some disks are decrypted: the one that it has.
pub(super) async fn kept_policy(
    services: &Services,
    vm: &Vm,
    request: &DecryptVm,
) -> Result<Policy, Problem> {
    if request.policy.is_some() {
        let detail =
            "is not given with `disks`: a VM of which some disks are decrypted keeps its policy";
        return Err(Problem::invalid("policy", detail));
    }
    let mut read = services.store.read().await?;
    let found = policies::find(&mut read, &vm.policy.to_string()).await?;
    found.ok_or_else(|| Problem::not_found("policy", &vm.policy_name))
}

/// Refuses to decrypt alone what is no disk of the guest's: it is as the VM is.
pub(super) fn require_of_guest(vm: &Vm, known: &[Disk], disks: &[DiskId]) -> Result<(), Problem> {
    for (index, id) in disks.iter().enumerate() {
        let Some(disk) = known.iter().find(|disk| disk.id == *id && !disk.role.is_data()) else {
            continue;
        };
        let detail = format!(
            "disk '{}' is that of the machine of VM '{1}' and not of its guest: it is decrypted with the VM alone (vmseal vm decrypt {1})",
            disk.name, vm.name
        );
        let field = Some(format!("disks[{index}]"));
        return Err(Problem { field, ..Problem::new(ErrorCode::WrongState, detail) });
    }
    Ok(())
}

/// The first disk of the VM, where that is copied as it is for what is beside it.
pub(super) async fn copied_as_it_is(
    services: &Services,
    wanted: &Wanted,
    kept: &Kept,
) -> Result<Option<DiskId>, Problem> {
    let Wanted { vm, known, operation, .. } = wanted;
    let Some(first) = as_it_is::first_left(operation, vm, known) else { return Ok(None) };
    let has_dumps = dumps::count(services, vm).await? > 0;
    if !has_dumps && !kept.suspended && kept.with_memory == 0 {
        return Ok(None);
    }
    let cannot = "seal what is beside a disk that stays in the clear, or unseal it";
    features::require(services, vm, MIRROR_AS_IT_IS, cannot)?;
    Ok(Some(first))
}
