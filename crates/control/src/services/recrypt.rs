//! Recryption: another KEK for a VM (shallow), or new data keys for its disks (deep, [`super::mirror`]).

use vmseal_api::host::Power;
use vmseal_api::host::version::RUNNING_KEY;
use vmseal_api::model::Task;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request::RecryptVm;

use super::caller::{Caller, Privilege};
use super::features;
use super::providers::usable;
use super::vm_key::require_available;
use super::vms::{begin, find, power, require_ready, word};
use super::{Outcome, Services};
use crate::hosts::keys::Purpose;
use crate::operation::Operation;
use crate::store::{providers, vms};

/// Gives a VM another key-encryption key, of its provider or another one, and destroys the old one. It may run. The
/// data of its disks is not rewritten. With `deep` the data is encrypted again, and the key-encryption key stays.
pub async fn recrypt(
    services: &Services,
    caller: &Caller,
    name: &str,
    request: RecryptVm,
    dry_run: bool,
) -> Result<Outcome<Task>, Problem> {
    caller.require(Privilege::Recrypt)?;
    if request.deep {
        if request.provider.is_some() {
            let detail = "is not given with `deep`, which keeps the key-encryption key: recrypt the VM again without it";
            return Err(Problem::invalid("provider", detail));
        }
        return super::mirror::recrypt_deep(services, caller, name, &request, dry_run).await;
    }
    if request.rate.is_some() {
        let detail = "is given with `deep` only: without it no disk is copied";
        return Err(Problem::invalid("rate", detail));
    }
    if request.in_place {
        let detail = "is given with `deep` only: without it no data is rewritten";
        return Err(Problem::invalid("in_place", detail));
    }
    if !request.disks.is_empty() {
        let detail = "are given with `deep` only: without it the VM gets another key, which is that of all its disks";
        return Err(Problem::invalid("disks", detail));
    }
    let (vm, _) = find(services, name).await?;
    require_ready(&vm)?;
    let power = power(services, &vm).await?.unwrap_or(Power::Off);
    match power {
        Power::Off | Power::Suspended => {}
        Power::Running | Power::Paused => {
            features::require(services, &vm, RUNNING_KEY, "change the key of a VM that runs")?;
        }
        other => {
            let detail =
                format!("VM '{}' is {}: wait until it is off, or runs", vm.name, word(other));
            return Err(Problem::new(ErrorCode::WrongState, detail));
        }
    }
    let mut write = services.store.write().await?;
    // Read again: a task may have ended since.
    let vm = vms::get(&mut write, vm.id).await?.ok_or_else(|| Problem::not_found("VM", name))?;
    let Some(old) = vm.key.clone() else {
        let detail = format!("VM '{}' has no key: nothing of it is encrypted", vm.name);
        return Err(Problem::new(ErrorCode::WrongState, detail));
    };
    let wanted = request.provider.unwrap_or_else(|| old.provider.to_string());
    let provider = providers::find(&mut write, &wanted).await?.ok_or_else(|| Problem {
        field: Some("provider".to_owned()),
        ..Problem::not_found("provider", &wanted)
    })?;
    let provider = usable(services, provider)?.id;
    let operation = Operation::RecryptVm { vm: vm.id, old, provider };
    let begun = begin(services, write, operation, &vm, caller, dry_run).await?;
    if dry_run {
        require_available(services, &vm, Purpose::Open).await?;
    }
    Ok(begun)
}
