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

/// The newest report on a VM, or the kept one that has this digest or was made by the task with this id.
pub async fn kept(
    services: &Services,
    caller: &Caller,
    vm: &str,
    wanted: Option<&str>,
) -> Result<Proof, Problem> {
    caller.require(Privilege::Read)?;
    let (vm, _) = find(services, vm).await?;
    let mut read = services.store.read().await?;
    let known = match wanted {
        None => proofs::newest(&mut read, vm.id).await?,
        Some(wanted) => proofs::find(&mut read, vm.id, wanted).await?,
    };
    let Some(signed) = known else {
        let name = &vm.name;
        let detail = match wanted {
            None => format!("VM '{name}' has no proof yet: make one (vmseal vm prove {name})"),
            Some(wanted) => format!(
                "no proof of VM '{name}' that is kept has the digest '{wanted}' or is of a task with this id; the newest {} are kept, and their events have their digests (vmseal events --kind vm.proved)",
                proofs::PROOFS_MAX
            ),
        };
        return Err(Problem::new(ErrorCode::NotFound, detail));
    };
    let report = signed
        .read()
        .map_err(|error| Problem::new(ErrorCode::Internal, format!("the report: {error}")))?;
    Ok(Proof { report, digest: proofs::digest_of(&signed), signed })
}
