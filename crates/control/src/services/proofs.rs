//! Proofs that VMs are encrypted: their hosts read the files, and sign what they have found.

use vmseal_api::host::version::PROVE;
use vmseal_api::model::{Proof, Task};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::ProveVm;

use super::caller::{Caller, Privilege};
use super::vms::{begin, find, require_ready};
use super::{Outcome, Services, features};
use crate::operation::Operation;
use crate::store::proofs;

/// Has the host of a VM read the VM's files and report whether they are encrypted.
pub async fn prove(
    services: &Services,
    caller: &Caller,
    vm: &str,
    request: ProveVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, _) = find(services, vm).await?;
    require_ready(&vm)?;
    features::require(services, &vm, PROVE, "prove what is encrypted")?;
    let mut write = services.store.write().await?;
    let disks = crate::store::disks::of_vm(&mut write, vm.id).await?;
    if !disks.iter().any(|disk| disk.facts.is_some() && !disk.detached) {
        let detail =
            format!("VM '{}' has no disks that are made: there is nothing to read", vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    }
    let seed = request.seed.unwrap_or_else(|| uuid::Uuid::new_v4().as_fields().0);
    let seed = u64::from(seed);
    let operation = Operation::ProveVm { vm: vm.id, all: request.all, seed };
    begin(services, write, operation, &vm, caller, dry_run).await
}

/// The last report on a VM.
pub async fn last(services: &Services, caller: &Caller, vm: &str) -> Result<Proof, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, _) = find(services, vm).await?;
    let known = proofs::of_vm(&mut *services.store.read().await?, vm.id).await?;
    let Some(signed) = known else {
        let detail = format!("VM '{0}' has no proof yet: make one (vmseal vm prove {0})", vm.name);
        return Err(Problem::new(ErrorCode::NotFound, detail));
    };
    let report = signed
        .read()
        .map_err(|error| Problem::new(ErrorCode::Internal, format!("the report: {error}")))?;
    Ok(Proof { report, signed })
}
