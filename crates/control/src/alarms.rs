//! Which alarms stand: a pure function of what a host says and what the inventory wants.

use std::collections::HashMap;

use vmseal_api::host::{
    HostDescription, HostState, KeyState, NoticeCode, Power, StopReason, VmState,
};
use vmseal_api::id::VmId;
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use crate::store::alarms::Standing;
use crate::store::vms::Vm;

/// A host does not answer.
#[must_use]
pub fn disconnected(host: &str, why: &Problem) -> Standing {
    Standing {
        code: "host-disconnected",
        target: host.to_owned(),
        detail: format!("{why}. Its VMs are shown as last known; see that its agent runs"),
        reason: None,
    }
}

/// The alarms of a host that answers. `failures` says why keys could not be delivered.
#[must_use]
pub fn of_host(
    host: &str,
    description: &HostDescription,
    state: &HostState,
    vms: &[Vm],
    failures: &HashMap<VmId, Problem>,
) -> Vec<Standing> {
    let mut standing = Vec::new();
    if !description.weaknesses.is_empty() {
        let detail = description.weaknesses.join("; ");
        standing.push(Standing {
            code: "host-weakness",
            target: host.to_owned(),
            detail,
            reason: None,
        });
    }
    for seen in &state.vms {
        match vms.iter().find(|vm| vm.id == seen.vm) {
            Some(vm) if vm.lifecycle == Lifecycle::Ready => {
                standing.extend(of_vm(vm, seen, failures.get(&vm.id)));
            }
            Some(_) => {}
            None if seen.power == Power::Off => {}
            None => standing.push(Standing {
                code: "vm-unknown",
                target: seen.vm.to_string(),
                detail: format!(
                    "host '{host}' runs a VM that the inventory does not have: was an old inventory restored?"
                ),
                reason: None,
            }),
        }
    }
    standing
}

fn of_vm(vm: &Vm, seen: &VmState, failure: Option<&Problem>) -> Vec<Standing> {
    let alarm =
        |code, detail: String| Standing { code, target: vm.name.clone(), detail, reason: None };
    let mut standing = Vec::new();
    if seen.key == KeyState::Missing {
        let why = match failure {
            Some(problem) => problem.to_string(),
            None => "its key is being delivered".to_owned(),
        };
        let running = if seen.power == Power::Off { "" } else { "; it goes on running" };
        let locked = alarm("vm-locked", format!("its key is not on its host: {why}{running}"));
        standing.push(Standing { reason: failure.and_then(|problem| problem.reason), ..locked });
    }
    if let Some(died) = &seen.died {
        let code = match died.reason {
            StopReason::FilterDied => "filter-died",
            StopReason::QemuDied => "qemu-died",
            _ => "vm-found-dead",
        };
        standing.push(alarm(code, died.detail.clone()));
    }
    for (code, notice) in [
        ("header-copy-damaged", NoticeCode::HeaderCopyDamaged),
        ("disk-errors", NoticeCode::DiskErrors),
        ("replica-behind", NoticeCode::ReplicaBehind),
        ("disks-down", NoticeCode::DisksDown),
        ("filter-restarted", NoticeCode::FilterRestarted),
        ("vm-not-adopted", NoticeCode::NotAdopted),
    ] {
        let told: Vec<_> =
            seen.notices.iter().filter(|n| n.code == notice).map(|n| n.detail.as_str()).collect();
        if !told.is_empty() {
            standing.push(alarm(code, told.join("; ")));
        }
    }
    standing
}
