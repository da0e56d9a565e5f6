//! What is in the CD-ROM drive of a VM that runs: a file of its host, which its guest has open. The other host opens the file of the same
//! path, which must be the same.

use vmseal_api::host::HostAgent;
use vmseal_api::host::version::MEASURE_MEDIUM;
use vmseal_api::problem::{ErrorCode, Problem};

use crate::services::Services;
use crate::store::hosts::Host;
use crate::store::vms::Vm;
use crate::store::{Write, vms};

/// Refuses a host that does not have the file.
pub(super) async fn require_same(
    services: &Services,
    vm: &Vm,
    host: &Host,
    agent: &dyn HostAgent,
) -> Result<(), String> {
    let Some(path) = vm.hardware.medium() else { return Ok(()) };
    let (file, name) = (path.display(), &host.name);
    let refuse = |why: String, or: String| {
        format!(
            "the VM has {file} in its CD-ROM drive, and {why}. Eject it first (vmseal vm cdrom eject {}), or {or}",
            vm.name
        )
    };
    for (id, of) in [(vm.host, &vm.host_name), (host.id, name)] {
        if !services.hosts.view(id).has(MEASURE_MEDIUM) {
            let why = format!("the agent of host '{of}' cannot say whether both hosts have it");
            return Err(refuse(why, "upgrade vmseal there".to_owned()));
        }
    }
    let place = || format!("place the same file at {file} on host '{name}'");
    let source = services.hosts.connected(vm.host).map_err(|problem| problem.detail)?;
    let here = source.measure_medium(vm.id, path.to_owned()).await.map_err(|problem| {
        let why = format!("on host '{}' it cannot be compared: {}", vm.host_name, problem.detail);
        refuse(why, format!("insert it again (vmseal vm cdrom insert {} {file})", vm.name))
    })?;
    let there = agent.measure_medium(vm.id, path.to_owned()).await.map_err(|problem| {
        refuse(format!("host '{name}' does not have it: {}", problem.detail), place())
    })?;
    if here == there {
        return Ok(());
    }
    let how = match (here.bytes, there.bytes) {
        (one, other) if one == other => "with other content".to_owned(),
        (one, other) => format!("of {other} bytes instead of {one}"),
    };
    Err(refuse(format!("host '{name}' has another file there, {how}"), place()))
}

/// Refuses a VM in whose drive something else was put since the hosts were compared. From the task on nothing is.
pub(in crate::services) async fn require_medium_kept(
    write: &mut Write<'_>,
    vm: &Vm,
) -> Result<(), Problem> {
    let now = vms::get(write, vm.id).await?;
    let now = now.ok_or_else(|| Problem::not_found("VM", &vm.name))?;
    if now.hardware.medium() == vm.hardware.medium() {
        return Ok(());
    }
    let detail = format!(
        "what is in the CD-ROM drive of VM '{}' was changed meanwhile: begin again",
        vm.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}

/// Refuses a VM that has a medium in its drive: another control plane is not asked for its file.
pub(super) fn require_none(vm: &Vm) -> Result<(), Problem> {
    let Some(path) = vm.hardware.medium() else { return Ok(()) };
    let detail = format!(
        "VM '{1}' runs with {0} in its CD-ROM drive, which is a file of its host: to go to another control plane, eject it first (vmseal vm cdrom eject {1})",
        path.display(),
        vm.name
    );
    Err(Problem::new(ErrorCode::WrongState, detail))
}
