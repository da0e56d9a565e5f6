//! The resources as rows.

use std::cmp::Ordering;
use std::path::Path;

use serde::Serialize;
use vmseal_agent::host::doctor::Finding;
use vmseal_api::boot::BootDevice;
use vmseal_api::datastore::DatastoreHost;
use vmseal_api::drain::PlannedVm;
use vmseal_api::dump::DumpFormat;
use vmseal_api::filter::{BitmapStatus, ReplicaStatus};
use vmseal_api::host::{DatastoreLocation, DiskLimits, HostDescription};
use vmseal_api::log_level::LogLevel;
use vmseal_api::model::{
    Alarm, Datastore, Disk, Dump, Event, Host, JoinToken, Nic, Plan, Policy, Provider, Snapshot,
    Task, TaskState, Vm, VmBackup,
};
use vmseal_api::nic::PortForward;
use vmseal_api::remote::Remote;
use vmseal_lab::catalogue::Listed;

use super::column::{Cell, Column, Row, more, usual};
use super::{disk_format, word};
use crate::images::Image;

fn described(host: &Host, cell: fn(&HostDescription) -> Cell) -> Cell {
    host.description.as_ref().map_or(Cell::Nothing, cell)
}

impl Row for Host {
    const PLURAL: &'static str = "hosts";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("connection", |it| word(&it.connection).into()),
        usual("maintenance", |it| word(&it.maintenance).into()),
        usual("address", |it| (&it.address).into()),
        usual("accelerator", |it| described(it, |host| word(&host.accelerator.kind).into())),
        usual("cpus", |it| described(it, |host| Cell::Number(host.cpus.into()))),
        usual("memory", |it| described(it, |host| Cell::Bytes(host.memory))),
        more("id", |it| it.id.to_string().into()),
        more("hostname", |it| described(it, |host| (&host.hostname).into())),
        more("qemu", |it| described(it, |host| (&host.qemu).into())),
        more("vmseal", |it| described(it, |host| (&host.vmseal).into())),
        more("aes-hardware", |it| described(it, |host| Cell::YesNo(host.aes_hardware))),
        more("weaknesses", |it| described(it, |host| Cell::Number(host.weaknesses.len() as u64))),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

/// Where a datastore is: one place, or those of its hosts where they differ.
fn locations(datastore: &Datastore) -> String {
    let place = |on: &DatastoreHost| match &on.location {
        DatastoreLocation::Dir { path } => format!("dir:{}", path.display()),
        DatastoreLocation::Rbd { pool, .. } => match &pool.namespace {
            Some(namespace) => format!("rbd:{}/{namespace}", pool.pool),
            None => format!("rbd:{}", pool.pool),
        },
    };
    let mut places: Vec<_> = datastore.hosts.iter().map(place).collect();
    places.dedup();
    places.join(",")
}

impl Row for Datastore {
    const PLURAL: &'static str = "datastores";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("host", |it| {
            let names: Vec<_> = it.hosts.iter().map(|on| on.host.as_str()).collect();
            names.join(",").into()
        }),
        usual("location", |it| locations(it).into()),
        usual("free", |it| it.usage.map_or(Cell::Nothing, |usage| Cell::Bytes(usage.free))),
        usual("capacity", |it| it.usage.map_or(Cell::Nothing, |usage| Cell::Bytes(usage.capacity))),
        more("id", |it| it.id.to_string().into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl Row for Provider {
    const PLURAL: &'static str = "key providers";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("kind", |it| word(&it.kind).into()),
        usual("default", |it| Cell::YesNo(it.default)),
        usual("status", |it| word(&it.status).into()),
        more("id", |it| it.id.to_string().into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl Row for Snapshot {
    const PLURAL: &'static str = "snapshots";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("current", |it| Cell::YesNo(it.current)),
        usual("parent", |it| it.parent.clone().into()),
        usual("created", |it| Cell::Time(it.created)),
        usual("state", |it| word(&it.state).into()),
        usual("quiesced", |it| it.quiesced.map_or(Cell::Nothing, Cell::YesNo)),
        usual("memory", |it| Cell::YesNo(it.memory)),
        more("id", |it| it.id.to_string().into()),
        more("vm", |it| (&it.vm).into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.id.cmp(&other.id)
    }
}

impl Row for VmBackup {
    const PLURAL: &'static str = "backups";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("vm", |it| (&it.vm).into()),
        usual("created", |it| Cell::Time(it.created)),
        usual("state", |it| word(&it.state).into()),
        usual("parent", |it| it.parent.clone().into()),
        usual("size", |it| it.bytes.map_or(Cell::Nothing, Cell::Bytes)),
        usual("verified", |it| match &it.verification_failed {
            Some(failed) => format!("failed at {:.0}: {}", failed.at, failed.why).into(),
            None => it.verified.map_or(Cell::Nothing, Cell::Time),
        }),
        more("read", |it| it.read_bytes.map_or(Cell::Nothing, Cell::Bytes)),
        more("quiesced", |it| it.quiesced.map_or(Cell::Nothing, Cell::YesNo)),
        more("encrypted", super::backup::encrypted),
        more("vm-deleted", |it| Cell::YesNo(it.vm_deleted)),
        more("host", |it| (&it.host).into()),
        more("directory", |it| it.directory.display().to_string().into()),
        more("id", |it| it.id.to_string().into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.id.cmp(&other.id)
    }
}

impl Row for Dump {
    const PLURAL: &'static str = "core dumps";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("format", |it| it.format.name().into()),
        usual("reason", |it| it.reason.name().into()),
        usual("created", |it| Cell::Time(it.created)),
        usual("file", |it| it.bytes.map_or(Cell::Nothing, Cell::Bytes)),
        usual("encrypted", |it| Cell::YesNo(it.encrypted)),
        more("id", |it| it.id.to_string().into()),
        more("vm", |it| (&it.vm).into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.id.cmp(&other.id)
    }
}

impl Row for Remote {
    const PLURAL: &'static str = "remotes";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("url", |it| (&it.url).into()),
        usual("fingerprint", |it| (&it.fingerprint).into()),
        more("id", |it| it.id.to_string().into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl Row for Policy {
    const PLURAL: &'static str = "policies";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("encryption", |it| Cell::YesNo(it.encryption)),
        usual("provider", |it| match (&it.provider, it.encryption) {
            (Some(provider), _) => provider.into(),
            (None, true) => "(default)".into(),
            (None, false) => Cell::Nothing,
        }),
        usual("allocation", |it| word(&it.allocation).into()),
        more("iops", |it| it.limits.iops.map_or(Cell::Nothing, Cell::Number)),
        more("bandwidth", |it| it.limits.bandwidth.map_or(Cell::Nothing, Cell::Bytes)),
        more("on-stall", |it| on_stall(it.limits).into()),
        more("cache", |it| it.cache.map_or(Cell::Nothing, Cell::Bytes)),
        more("replica", |it| it.replica.as_ref().map(|it| it.datastore.clone()).into()),
        more("cpu-model", |it| it.cpu_model.clone().into()),
        more("downtime", |it| it.downtime_milliseconds.map(|it| format!("{it} ms")).into()),
        more("failures", |it| match it.redundancy.is_nothing() {
            true => Cell::Nothing,
            false => it.redundancy.to_string().into(),
        }),
        more("objects", |it| match it.image_layout.is_usual() {
            true => Cell::Nothing,
            false => it.image_layout.to_string().into(),
        }),
        more("messenger", |it| it.messenger.map(|it| it.name().to_owned()).into()),
        more("osd-encryption", |it| it.osd_encryption.map(|it| it.name().to_owned()).into()),
        more("id", |it| it.id.to_string().into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

impl Row for Vm {
    const PLURAL: &'static str = "VMs";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("power", |it| it.power.as_ref().map(word).into()),
        usual("key", |it| it.key_state.as_ref().map(word).into()),
        usual("policy", |it| (&it.policy).into()),
        usual("host", |it| (&it.host).into()),
        usual("vcpus", |it| Cell::Number(it.vcpus.into())),
        usual("memory", |it| Cell::Bytes(it.memory)),
        usual("lifecycle", |it| word(&it.lifecycle).into()),
        more("id", |it| it.id.to_string().into()),
        more("firmware", |it| word(&it.hardware.firmware).into()),
        more("cpu-model", |it| it.hardware.cpu_model.clone().into()),
        more("memory-backing", |it| word(&it.hardware.memory_backing).into()),
        more("tpm", |it| Cell::YesNo(it.hardware.tpm)),
        more("cdrom", |it| {
            let shown = |path: &Path| path.display().to_string();
            let empty = || it.hardware.cdrom.as_ref().map(|_| "empty".to_owned());
            it.hardware.medium().map(shown).or_else(empty).into()
        }),
        more("boot", |it| {
            let order = it.hardware.boot_order();
            Some(order.into_iter().map(BootDevice::name).collect::<Vec<_>>().join(",")).into()
        }),
        more("on-crash", |it| it.hardware.on_crash.name().into()),
        more("crash-dump-format", |it| it.hardware.crash_dump_format.map(DumpFormat::name).into()),
        more("provider", |it| it.provider.clone().into()),
        more("provider-id", |it| it.key.as_ref().map(|key| key.provider.to_string()).into()),
        more("key-id", |it| it.key.as_ref().map(|key| key.key_id.to_string()).into()),
        more("disks", |it| Cell::Number(it.disks.len() as u64)),
        more("disks-in-the-clear", |it| all(it.disks_in_the_clear.iter().cloned())),
        more("compliance", |it| compliance(it).into()),
        more("size", |it| Cell::Bytes(it.disks.iter().map(|disk| disk.size).sum())),
        more("nics", |it| Cell::Number(it.nics.len() as u64)),
        more("addresses", |it| {
            all(it.nics.iter().flat_map(|nic| &nic.addresses).map(ToString::to_string))
        }),
        more("description", |it| it.description.clone().into()),
        more("labels", |it| all(it.labels.iter().map(|(key, value)| format!("{key}={value}")))),
        more("autostart", |it| Cell::YesNo(it.autostart)),
        more("migration-encryption", |it| it.migration_encryption.name().into()),
        more("on-drain", |it| it.on_drain.name().into()),
        more("template", |it| Cell::YesNo(it.template)),
        more("linked", |it| {
            it.linked.as_ref().map(|to| format!("{}, snapshot {}", to.vm, to.snapshot)).into()
        }),
        more("clones", |it| all(it.clones.iter().cloned())),
        more("suspended-to-ram", |it| Cell::YesNo(it.suspended_to_ram)),
        more("at-next-start", |it| all(it.at_next_start.iter().cloned())),
        more("stopped", |it| it.stopped.as_ref().map(|stopped| word(&stopped.reason)).into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.name.cmp(&other.name)
    }
}

/// Whether the storage of a VM is as its policy requires, and what is not.
fn compliance(vm: &Vm) -> Option<String> {
    let compliance = vm.compliance.as_ref()?;
    if compliance.compliant {
        return Some("compliant".to_owned());
    }
    let lacking: Vec<_> = compliance.lacking().iter().map(word).collect();
    Some(format!("not compliant: {}", lacking.join(", ")))
}

/// A disk, with the VM that it belongs to.
#[derive(Clone, PartialEq, Serialize)]
pub struct VmDisk {
    /// The VM's name.
    pub vm: String,
    /// The disk.
    #[serde(flatten)]
    pub disk: Disk,
}

impl Row for VmDisk {
    const PLURAL: &'static str = "disks";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("vm", |it| (&it.vm).into()),
        usual("name", |it| (&it.disk.name).into()),
        usual("size", |it| Cell::Bytes(it.disk.size)),
        usual("datastore", |it| (&it.disk.datastore).into()),
        usual("format", |it| disk_format(&it.disk).into()),
        usual("encrypted-at", |it| it.disk.encrypted_at.map(|at| at.to_string()).into()),
        more("id", |it| it.disk.id.to_string().into()),
        more("role", |it| word(&it.disk.role).into()),
        more("encrypted", |it| Cell::YesNo(it.disk.encrypted)),
        more("allocation", |it| word(&it.disk.allocation).into()),
        more("iops", |it| it.disk.limits.iops.map_or(Cell::Nothing, Cell::Number)),
        more("bandwidth", |it| it.disk.limits.bandwidth.map_or(Cell::Nothing, Cell::Bytes)),
        more("on-stall", |it| on_stall(it.disk.limits).into()),
        more("cache", |it| it.disk.cache.map_or(Cell::Nothing, Cell::Bytes)),
        more("replica", |it| it.disk.replica.as_ref().map(|it| it.datastore.clone()).into()),
        more("objects", |it| objects(&it.disk).into()),
    ];
    fn identity(&self) -> String {
        self.disk.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.vm.cmp(&other.vm)
    }
}

/// What becomes of requests that storage does not answer; nothing where they wait.
fn on_stall(limits: DiskLimits) -> Option<String> {
    limits.stall_timeout.map(|seconds| format!("error after {seconds} s"))
}

/// How the image of a disk in a pool of Ceph is cut into objects, and how its policy would have it.
fn objects(disk: &Disk) -> Option<String> {
    let now = disk.image_layout?;
    Some(match disk.wanted_image_layout {
        None => now.to_string(),
        Some(wanted) => format!("{now} (its policy asks for {wanted}, from its next copy on)"),
    })
}

/// A network card, with the VM that it belongs to.
#[derive(Clone, PartialEq, Serialize)]
pub struct VmNic {
    /// The VM's name.
    pub vm: String,
    /// The card.
    #[serde(flatten)]
    pub nic: Nic,
}

/// What there is of a card, in one cell.
fn all(items: impl Iterator<Item = String>) -> Cell {
    items.reduce(|all, next| format!("{all} {next}")).into()
}

/// A forwarded port; `any` is one that the host chooses when the VM starts.
fn forwarded(port: &PortForward) -> String {
    let PortForward { protocol, host_address, host_port, guest_port } = port;
    match host_port {
        0 => format!("{}:{host_address}:any:{guest_port}", protocol.name()),
        _ => port.to_string(),
    }
}

impl Row for VmNic {
    const PLURAL: &'static str = "network cards";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("vm", |it| (&it.vm).into()),
        usual("name", |it| (&it.nic.name).into()),
        usual("mac", |it| it.nic.mac.to_string().into()),
        usual("backend", |it| it.nic.backend.to_string().into()),
        usual("link", |it| it.nic.link.name().into()),
        usual("addresses", |it| all(it.nic.addresses.iter().map(ToString::to_string))),
        usual("forwards", |it| all(it.nic.ports().iter().map(forwarded))),
        more("model", |it| it.nic.model.name().into()),
        more("interface", |it| it.nic.interface.clone().into()),
        more("id", |it| it.nic.id.to_string().into()),
    ];
    fn identity(&self) -> String {
        self.nic.id.to_string()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.vm.cmp(&other.vm)
    }
}

impl Row for Image {
    const PLURAL: &'static str = "images";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("format", |it| it.format.name().into()),
        usual("size", |it| it.size.map_or(Cell::Nothing, Cell::Bytes)),
        usual("allocated", |it| Cell::Bytes(it.allocated)),
        usual("modified", |it| it.modified.map_or(Cell::Nothing, Cell::Time)),
        usual("path", |it| it.path.display().to_string().into()),
    ];
    fn identity(&self) -> String {
        self.path.display().to_string()
    }
}

impl Row for Listed {
    const PLURAL: &'static str = "experiments";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("id", |it| (&it.id).into()),
        usual("subject", |it| it.subject.into()),
        usual("title", |it| (&it.title).into()),
    ];
    fn identity(&self) -> String {
        self.id.clone()
    }
}

impl Row for BitmapStatus {
    const PLURAL: &'static str = "bitmaps";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("name", |it| (&it.name).into()),
        usual("since", |it| Cell::Time(it.since)),
        usual("dirty", |it| Cell::Bytes(it.dirty_bytes)),
        more("granularity", |it| Cell::Bytes(it.granularity)),
    ];
    fn identity(&self) -> String {
        self.name.clone()
    }
    fn order(&self, other: &Self) -> Ordering {
        self.since.cmp(&other.since)
    }
}

/// The status of a disk's replica, with its VM, disk and datastore.
#[derive(Clone, PartialEq, Serialize)]
pub struct DiskReplica {
    /// The VM's name.
    pub vm: String,
    /// The disk's name within the VM.
    pub disk: String,
    /// The name of the replica's datastore.
    pub datastore: Option<String>,
    /// The status that the filter reports.
    #[serde(flatten)]
    pub status: ReplicaStatus,
}

impl Row for DiskReplica {
    const PLURAL: &'static str = "replicas";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("vm", |it| (&it.vm).into()),
        usual("disk", |it| (&it.disk).into()),
        usual("datastore", |it| it.datastore.clone().into()),
        usual("dirty", |it| Cell::Bytes(it.status.dirty_bytes)),
        usual("lag", |it| Cell::Lag(it.status.lag_milliseconds)),
        usual("last-error", |it| it.status.last_error.clone().into()),
    ];
    fn identity(&self) -> String {
        format!("{} {}", self.vm, self.disk)
    }
}

impl Row for Task {
    const PLURAL: &'static str = "tasks";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("id", |it| it.id.to_string().into()),
        usual("kind", |it| (&it.kind).into()),
        usual("target", |it| (&it.target).into()),
        usual("state", |it| word(&it.state).into()),
        usual("step", |it| match it.state {
            TaskState::Done => Cell::Nothing,
            _ => it.at().into(),
        }),
        usual("created", |it| Cell::Time(it.created)),
        more("ended", |it| it.ended.map_or(Cell::Nothing, Cell::Time)),
        more("percent", |it| it.percent.map_or(Cell::Nothing, |it| Cell::Number(it.into()))),
        more("speed", |it| it.bytes_per_second.map_or(Cell::Nothing, Cell::Bytes)),
        more("left", |it| it.seconds_left.map_or(Cell::Nothing, Cell::Seconds)),
        more("rate", |it| it.rate.map_or(Cell::Nothing, Cell::Bytes)),
        more("request-id", |it| it.request_id.clone().into()),
        more("problem", |it| it.problem.as_ref().map(ToString::to_string).into()),
    ];
    fn identity(&self) -> String {
        self.id.to_string()
    }
}

impl Row for Event {
    const PLURAL: &'static str = "events";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("at", |it| Cell::Time(it.at)),
        usual("kind", |it| (&it.kind).into()),
        usual("target", |it| (&it.target).into()),
        usual("actor", |it| (&it.actor).into()),
        usual("detail", |it| (&it.detail).into()),
        more("request-id", |it| it.request_id.clone().into()),
        more("sequence", |it| Cell::Number(it.sequence.unsigned_abs())),
    ];
    fn identity(&self) -> String {
        self.sequence.to_string()
    }
}

impl Row for Alarm {
    const PLURAL: &'static str = "alarms";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("alarm", |it| (&it.code).into()),
        usual("target", |it| (&it.target).into()),
        usual("since", |it| Cell::Time(it.since)),
        usual("detail", |it| (&it.detail).into()),
    ];
    fn identity(&self) -> String {
        format!("{} {}", self.code, self.target)
    }
}

impl Row for Finding {
    const PLURAL: &'static str = "findings";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("check", |it| (&it.check).into()),
        usual("result", |it| word(&it.result).into()),
        usual("found", |it| (&it.found).into()),
        usual("remedy", |it| it.remedy.clone().into()),
    ];
    fn identity(&self) -> String {
        self.check.clone()
    }
}

impl Row for Plan {
    const PLURAL: &'static str = "plans";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("kind", |it| (&it.kind).into()),
        usual("target", |it| (&it.target).into()),
        usual("steps", |it| it.steps.join("; ").into()),
        usual("warnings", |it| it.warnings.join("; ").into()),
    ];
    fn identity(&self) -> String {
        format!("{} {}", self.kind, self.target)
    }
}

impl Row for PlannedVm {
    const PLURAL: &'static str = "VMs";
    const COLUMNS: &'static [Column<Self>] = &[
        usual("vm", |it| (&it.vm).into()),
        usual("action", |it| match &it.host {
            Some(host) => format!("{} to {host}", word(&it.action)).into(),
            None => word(&it.action).into(),
        }),
        usual("why", |it| (&it.why).into()),
    ];
    fn identity(&self) -> String {
        self.vm.clone()
    }
}

impl Row for LogLevel {
    const PLURAL: &'static str = "log levels";
    const COLUMNS: &'static [Column<Self>] = &[usual("levels", |it| (&it.levels).into())];
    fn identity(&self) -> String {
        self.levels.clone()
    }
}

impl Row for JoinToken {
    const PLURAL: &'static str = "tokens";
    const COLUMNS: &'static [Column<Self>] =
        &[usual("token", |it| (&it.token).into()), usual("expires", |it| Cell::Time(it.expires))];
    fn identity(&self) -> String {
        self.token.clone()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};
    use vmseal_api::nic::NicBackend;

    use super::*;

    #[test]
    fn the_forwarded_ports_of_a_vm_that_is_off_are_those_that_were_asked_for() {
        let forward = |text: &str| text.parse::<PortForward>().unwrap();
        let mut nic: Nic = from_value(json!({
            "id": "00000000-0000-7000-8000-000000000001", "name": "nic0",
            "mac": "52:54:00:12:34:56", "model": "virtio", "backend": { "kind": "user" }, "link": "up",
        }))
        .unwrap();
        let shown = |nic: &Nic| nic.ports().iter().map(forwarded).collect::<Vec<_>>();
        assert_eq!(shown(&nic), [""; 0]);
        let asked = vec![forward("tcp:22"), forward("tcp:34567:80")];
        nic.backend = NicBackend::User { forwards: asked };
        assert_eq!(shown(&nic), ["tcp:127.0.0.1:any:22", "tcp:127.0.0.1:34567:80"]);
        nic.forwards = vec![forward("tcp:61234:22"), forward("tcp:34567:80")];
        assert_eq!(shown(&nic), ["tcp:127.0.0.1:61234:22", "tcp:127.0.0.1:34567:80"]);
    }
}
