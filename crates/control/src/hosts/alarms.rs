//! The alarms of a host: a pure function of the host's state and the inventory.

use std::collections::{BTreeMap, HashMap};

use vmseal_api::host::version::RUNNING_KEY;
use vmseal_api::host::{
    HostDescription, HostState, KeyState, NoticeCode, Power, StopReason, Stopped, VmState,
};
use vmseal_api::id::{DiskId, VmId};
use vmseal_api::model::Lifecycle;
use vmseal_api::problem::Problem;

use crate::store::alarms::RaisedAlarm;
use crate::store::vms::Vm;

/// A host does not answer.
#[must_use]
pub fn disconnected(host: &str, why: &Problem) -> RaisedAlarm {
    RaisedAlarm {
        code: "host-disconnected",
        target: host.to_owned(),
        detail: format!("{why}. Its VMs are shown as last known; check that its agent runs"),
        reason: None,
    }
}

/// The alarms of a host that answers. `disks` has the names of its VMs' disks; `failures` says why keys could not
/// be delivered.
#[must_use]
pub fn of_host(
    host: &str,
    description: &HostDescription,
    state: &HostState,
    vms: &[Vm],
    disks: &HashMap<DiskId, String>,
    failures: &HashMap<VmId, Problem>,
) -> Vec<RaisedAlarm> {
    let mut raised = Vec::new();
    if !description.weaknesses.is_empty() {
        let detail = description.weaknesses.join("; ");
        raised.push(RaisedAlarm {
            code: "host-weakness",
            target: host.to_owned(),
            detail,
            reason: None,
        });
    }
    for seen in &state.vms {
        match vms.iter().find(|vm| vm.id == seen.vm) {
            Some(vm) if vm.lifecycle == Lifecycle::Ready => {
                raised.extend(of_vm(vm, seen, disks, failures.get(&vm.id)));
            }
            Some(_) => {}
            None if seen.power == Power::Off => {}
            None => raised.push(RaisedAlarm {
                code: "vm-unknown",
                target: seen.vm.to_string(),
                detail: format!(
                    "host '{host}' runs a VM that the inventory does not have: was an old inventory restored? It runs on; vmseal datastore adopt takes it in"
                ),
                reason: None,
            }),
        }
    }
    raised
}

/// The alarms about VMs whose key no provider has any more, for these reasons, while the host still holds it.
#[must_use]
pub fn last_copies(
    host: &str,
    description: &HostDescription,
    vms: &[Vm],
    lost: &HashMap<VmId, Problem>,
) -> Vec<RaisedAlarm> {
    let while_running = description.features.iter().any(|feature| feature == RUNNING_KEY);
    let of = |vm: &Vm| {
        let why = lost.get(&vm.id)?;
        let name = &vm.name;
        let now = match while_running {
            true => format!(
                "Give the VM another key now, also while it runs (vmseal vm recrypt {name})"
            ),
            // An upgrade, which lets it do so while it runs, ends the agent.
            false => format!(
                "Stop the guest (vmseal vm stop {name}) and give the VM another key now (vmseal vm recrypt {name}); do not upgrade the agent before"
            ),
        };
        let detail = format!(
            "{why}. Host '{host}' holds the last copy of the key, in the memory of its agent: do not restart the agent or the host. {now}"
        );
        let (code, target) = ("key-on-host-only", name.clone());
        Some(RaisedAlarm { code, target, detail, reason: why.reason })
    };
    vms.iter().filter_map(of).collect()
}

/// The alarm about a VM of which its descriptors know more than the inventory, or may do.
#[must_use]
pub fn older(vm: &Vm, why: &Problem) -> RaisedAlarm {
    RaisedAlarm {
        code: "inventory-older",
        target: vm.name.clone(),
        detail: why.detail.clone(),
        reason: None,
    }
}

fn of_vm(
    vm: &Vm,
    seen: &VmState,
    disks: &HashMap<DiskId, String>,
    failure: Option<&Problem>,
) -> Vec<RaisedAlarm> {
    let alarm =
        |code, detail: String| RaisedAlarm { code, target: vm.name.clone(), detail, reason: None };
    let mut raised = Vec::new();
    if seen.key == KeyState::Missing {
        let why = match failure {
            Some(problem) => problem.to_string(),
            None => "its key is being delivered".to_owned(),
        };
        let running = if seen.power == Power::Off { "" } else { "; it goes on running" };
        let locked = alarm("vm-locked", format!("its key is not on its host: {why}{running}"));
        raised.push(RaisedAlarm { reason: failure.and_then(|problem| problem.reason), ..locked });
    }
    if let Some(died) = &seen.died {
        let code = match died.reason {
            StopReason::FilterDied => "filter-died",
            StopReason::QemuDied => "qemu-died",
            _ => "vm-found-dead",
        };
        raised.push(alarm(code, died.detail.clone()));
    }
    // An end that nobody asked for, although no process of ours died: until the VM is started again.
    let panicked = |it: &&Stopped| it.reason == StopReason::GuestPanicked;
    if let Some(stopped) = seen.stopped.as_ref().filter(panicked)
        && seen.power == Power::Off
    {
        raised.push(alarm("guest-panicked", stopped.detail.clone()));
    }
    for (code, notice) in [
        ("header-copy-damaged", NoticeCode::HeaderCopyDamaged),
        ("image-exchanged", NoticeCode::ImageExchanged),
        ("disk-errors", NoticeCode::DiskErrors),
        ("disk-stalled", NoticeCode::DiskStalled),
        ("replica-behind", NoticeCode::ReplicaBehind),
        ("disks-down", NoticeCode::DisksDown),
        ("filter-restarted", NoticeCode::FilterRestarted),
        ("tpm-died", NoticeCode::TpmDied),
        ("guest-panicked", NoticeCode::GuestPanicked),
        ("guest-frozen", NoticeCode::GuestFrozen),
        ("vm-not-adopted", NoticeCode::NotAdopted),
        ("key-differs", NoticeCode::KeyDiffers),
    ] {
        // One for each disk, so that a second one raises an alarm too.
        let mut told: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for notice in seen.notices.iter().filter(|known| known.code == notice) {
            let disk = notice.disk.and_then(|disk| disks.get(&disk));
            let target = disk.map_or_else(|| vm.name.clone(), |disk| format!("{}/{disk}", vm.name));
            told.entry(target).or_default().push(&notice.detail);
        }
        raised.extend(
            told.into_iter()
                .map(|(target, told)| RaisedAlarm { target, ..alarm(code, told.join("; ")) }),
        );
    }
    raised
}

#[cfg(test)]
mod tests {
    use vmseal_api::host::Notice;
    use vmseal_api::id::{HostId, PolicyId};

    use super::*;

    #[test]
    fn each_disk_has_an_alarm_of_its_own() {
        let vm = Vm {
            id: VmId::new(),
            name: "web".to_owned(),
            description: String::new(),
            labels: Default::default(),
            autostart: false,
            migration_encryption: Default::default(),
            on_drain: Default::default(),
            template: false,
            host: HostId::new(),
            host_name: "here".to_owned(),
            policy: PolicyId::new(),
            policy_name: "p".to_owned(),
            vcpus: 1,
            memory: 1 << 30,
            hardware: Default::default(),
            provider: None,
            key: None,
            lifecycle: Lifecycle::Ready,
            seen_power: None,
            seen_stopped: None,
        };
        let disks: HashMap<_, _> =
            ["root", "data"].map(|name| (DiskId::new(), name.to_owned())).into();
        let notice = |disk: Option<DiskId>, detail: &str| Notice {
            code: NoticeCode::HeaderCopyDamaged,
            disk,
            detail: detail.to_owned(),
        };
        let mut notices: Vec<_> = disks.iter().map(|(id, name)| notice(Some(*id), name)).collect();
        notices.push(notice(None, "one"));
        notices.push(notice(None, "two"));
        let seen = VmState { notices, ..VmState::new(vm.id, Power::Running, KeyState::NotNeeded) };
        let raised = of_vm(&vm, &seen, &disks, None);
        let told: Vec<_> =
            raised.iter().map(|it| (it.code, it.target.as_str(), it.detail.as_str())).collect();
        let code = "header-copy-damaged";
        assert_eq!(
            told,
            [(code, "web", "one; two"), (code, "web/data", "data"), (code, "web/root", "root")]
        );
        for (code, expected) in
            [(NoticeCode::KeyDiffers, "key-differs"), (NoticeCode::GuestFrozen, "guest-frozen")]
        {
            let notices = vec![Notice { code, ..notice(None, "it stays") }];
            let raised = of_vm(&vm, &VmState { notices, ..seen.clone() }, &disks, None);
            let told: Vec<_> = raised.iter().map(|it| (it.code, it.target.as_str())).collect();
            assert_eq!(told, [(expected, "web")]);
        }
        for (reason, power, expected) in [
            (StopReason::GuestPanicked, Power::Off, &["guest-panicked"][..]),
            (StopReason::GuestPanicked, Power::Running, &[]),
            (StopReason::GuestShutdown, Power::Off, &[]),
        ] {
            let (at, detail) = (jiff::Timestamp::UNIX_EPOCH, "so".to_owned());
            let stopped = Some(Stopped { at, reason, detail });
            let seen = VmState { power, stopped, notices: Vec::new(), ..seen.clone() };
            let raised = of_vm(&vm, &seen, &disks, None);
            let codes: Vec<_> = raised.iter().map(|it| it.code).collect();
            assert_eq!(codes, expected, "{reason:?} {power:?}");
        }
    }
}
