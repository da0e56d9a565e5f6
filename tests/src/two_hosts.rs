//! A VM that is on one of two hosts.

use crate::eventually;
use crate::installation::Installation;

/// The first host.
pub const HERE: &str = "here";
/// The host that is added.
pub const THERE: &str = "there";
/// QEMU, as a process.
pub const QEMU: &str = "qemu-system-x86_64";
/// The filter, as a process.
pub const FILTER: &str = "vmseal-filter";

/// The processes of guests on a host.
#[must_use]
pub fn processes(here: &Installation, host: &str, name: &str) -> Vec<i32> {
    match host {
        HERE => here.guest_processes(name),
        other => here.guest_processes_on(other, name),
    }
}

/// The other host.
#[must_use]
pub fn other(host: &str) -> &'static str {
    if host == HERE { THERE } else { HERE }
}

/// The host that the guest of a VM runs on, and no other has a process of it.
///
/// # Errors
/// It does not come to that.
pub fn only_host(here: &Installation, vm: &str) -> anyhow::Result<String> {
    eventually("it runs on one host alone", || {
        let shown = here.vm(vm).ok().filter(|shown| shown["power"] == "running")?;
        let host = shown["host"].as_str()?.to_owned();
        let left = [QEMU, FILTER].iter().flat_map(|it| processes(here, other(&host), it)).count();
        let runs = processes(here, &host, QEMU).len() == 1;
        (runs && left == 0).then_some(host)
    })
}
