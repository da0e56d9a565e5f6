//! The record of a running VM, as the file `run.json` holds it. It is all that a later agent has to adopt the
//! VM, and that agent may be of another version. So the file has a version and types of its own, which change
//! only together with it. docs/formats/run-record.md describes it.
//!
//! Older versions are read; the newest is written. [`Unreadable`] says why a record cannot be read; the
//! caller then leaves the VM alone.

use std::net::Ipv4Addr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use vmseal_api::host::{
    Allocation, DatastoreLocation, DatastoreSpec, Device, DiskFacts, DiskLimits, DiskRole,
    DiskSpec, KeyReference, NicSpec, NicState, VmSpec,
};
use vmseal_api::id::{DatastoreId, DiskId, NicId, ProviderId, VmId};
use vmseal_api::nic::{MacAddress, NicBackend, NicLink, NicModel, PortForward, Protocol};
use vmseal_api::replica::ReplicaPlace;

/// The version that is written.
pub const VERSION: u32 = 4;

/// The oldest version that is read.
const OLDEST: u32 = 1;

/// The longest record, in bytes: a VM with the most disks, all with long paths, fits well within.
pub const LENGTH_MAX: u64 = 1 << 20;

/// The longest text from an unreadable record that is shown, in characters.
const SHOWN_MAX: usize = 40;

/// What is on record of a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The boot of the kernel in which its processes live.
    pub boot: String,
    /// What it was started as.
    pub spec: VmSpec,
    /// The number of its pair of users.
    pub slot: u32,
    /// How far it got.
    pub phase: Phase,
    /// Its network cards, once the guest runs: what they are connected to.
    pub nics: Vec<NicState>,
}

/// How far a VM's start got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its processes are being started; the guest has not run.
    Starting,
    /// The guest runs, or is about to.
    Running,
}

/// Why a record cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    /// There is no record.
    #[error("is missing")]
    Missing,
    /// The file system.
    #[error("cannot be read: {0}")]
    File(#[from] std::io::Error),
    /// It does not match its version.
    #[error("is damaged: {0}")]
    Damaged(String),
    /// Its version is unknown to this agent.
    #[error(
        "has version {version}{}, and this agent (vmseal {}) reads versions {OLDEST} to {VERSION}",
        written_by(.writer.as_deref()),
        env!("CARGO_PKG_VERSION")
    )]
    Version {
        /// Its version.
        version: u64,
        /// The version of vmseal that wrote it, if the record has it.
        writer: Option<String>,
    },
}

fn written_by(writer: Option<&str>) -> String {
    writer.map_or_else(String::new, |writer| {
        let shown: String = writer.chars().filter(|c| !c.is_control()).take(SHOWN_MAX).collect();
        format!(" (written by vmseal {shown})")
    })
}

/// The beginning of records of all versions, also future ones.
#[derive(Deserialize)]
struct Head {
    version: u64,
    #[serde(default)]
    written_by: Option<serde_json::Value>,
}

/// Version 1: the specification is called `spec`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Version1 {
    #[serde(rename = "version")]
    _version: u32,
    boot: String,
    spec: VmOfDisks,
    slot: u32,
    phase: Phase,
}

/// Version 2: names the version of vmseal that wrote it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Version2 {
    #[serde(rename = "version")]
    _version: u32,
    #[serde(rename = "written_by")]
    _written_by: String,
    boot: String,
    slot: u32,
    phase: Phase,
    vm: VmOfDisks,
}

/// Version 3: a VM has devices, of which disks are one kind.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Version3 {
    #[serde(rename = "version")]
    _version: u32,
    #[serde(rename = "written_by")]
    _written_by: String,
    boot: String,
    slot: u32,
    phase: Phase,
    vm: Vm,
}

/// Version 4: disks have roles; devices are network cards, too, and what was chosen for them is on record.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Version4 {
    version: u32,
    written_by: String,
    boot: String,
    slot: u32,
    phase: Phase,
    vm: Vm,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    nics: Vec<NicInUse>,
}

/// A VM, in records of VMs that run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vm {
    vm: VmId,
    name: String,
    vcpus: u32,
    memory: u64,
    key: Option<Key>,
    devices: Vec<StoredDevice>,
}

/// A VM's device. A kind unknown to this agent makes the record unreadable: the VM is left running.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "device", rename_all = "snake_case")]
enum StoredDevice {
    Disk(Disk),
    Nic(Nic),
}

/// A VM with disks only, in records of VMs that died and in older records of running VMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct VmOfDisks {
    vm: VmId,
    name: String,
    vcpus: u32,
    memory: u64,
    key: Option<Key>,
    disks: Vec<Disk>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Key {
    provider: ProviderId,
    key_id: String,
    check: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Disk {
    disk: DiskId,
    name: String,
    datastore: Datastore,
    size: u64,
    encrypted: bool,
    #[serde(default, skip_serializing_if = "Role::is_data")]
    role: Role,
    #[serde(default)]
    allocation: Room,
    #[serde(default)]
    limits: Limits,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cache: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replica: Option<Replica>,
    facts: Option<Facts>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Datastore {
    datastore: DatastoreId,
    location: Location,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Location {
    Dir { path: PathBuf },
}

/// Since version 4; what older ones have is data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    #[default]
    Data,
    CloudInit,
}

impl Role {
    fn is_data(&self) -> bool {
        *self == Self::Data
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Room {
    #[default]
    Thin,
    Preallocated,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    iops: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bandwidth: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Replica {
    datastore: Datastore,
    bytes_per_second: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "format", rename_all = "snake_case", deny_unknown_fields)]
enum Facts {
    Raw,
    Luks2 { version: u32, cipher: String, key_bits: u32, sector_size: u32, data_offset: u64 },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nic {
    nic: NicId,
    name: String,
    mac: MacAddress,
    model: Model,
    backend: Backend,
    link: Link,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Model {
    Virtio,
    E1000e,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Link {
    Up,
    Down,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Backend {
    User { forwards: Vec<Forward> },
    Tap { tap: String },
    Bridge { bridge: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Forward {
    protocol: Transport,
    host_address: Ipv4Addr,
    host_port: u16,
    guest_port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Transport {
    Tcp,
    Udp,
}

/// What a network card is connected to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NicInUse {
    nic: NicId,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    forwards: Vec<Forward>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
}

impl Record {
    /// Reads a record of any known version.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn parse(text: &[u8]) -> Result<Self, Unreadable> {
        let damaged = |error: serde_json::Error| Unreadable::Damaged(error.to_string());
        let head: Head = serde_json::from_slice(text).map_err(damaged)?;
        match head.version {
            1 => {
                let record: Version1 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                Ok(Self { boot, spec: record.spec.into(), slot, phase, nics: Vec::new() })
            }
            2 => {
                let record: Version2 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                Ok(Self { boot, spec: record.vm.into(), slot, phase, nics: Vec::new() })
            }
            3 => {
                let record: Version3 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                Ok(Self { boot, spec: record.vm.into(), slot, phase, nics: Vec::new() })
            }
            4 => {
                let record: Version4 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                let nics = record.nics.into_iter().map(NicState::from).collect();
                Ok(Self { boot, spec: record.vm.into(), slot, phase, nics })
            }
            version => {
                let writer = head.written_by.as_ref().and_then(serde_json::Value::as_str);
                Err(Unreadable::Version { version, writer: writer.map(str::to_owned) })
            }
        }
    }

    /// The record in the written version.
    ///
    /// # Errors
    /// A path that is not UTF-8.
    pub fn to_text(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec_pretty(&Version4 {
            version: VERSION,
            written_by: env!("CARGO_PKG_VERSION").to_owned(),
            boot: self.boot.clone(),
            slot: self.slot,
            phase: self.phase,
            vm: (&self.spec).into(),
            nics: self.nics.iter().map(NicInUse::from).collect(),
        })
    }
}

impl From<&VmSpec> for Vm {
    fn from(spec: &VmSpec) -> Self {
        let VmSpec { vm, name, vcpus, memory, key, devices } = spec;
        let devices = devices.iter().map(|device| match device {
            Device::Disk(disk) => StoredDevice::Disk(disk.into()),
            Device::Nic(nic) => StoredDevice::Nic(nic.into()),
        });
        Self {
            vm: *vm,
            name: name.clone(),
            vcpus: *vcpus,
            memory: *memory,
            key: key.as_ref().map(Key::from),
            devices: devices.collect(),
        }
    }
}

impl From<Vm> for VmSpec {
    fn from(Vm { vm, name, vcpus, memory, key, devices }: Vm) -> Self {
        let devices = devices.into_iter().map(|device| match device {
            StoredDevice::Disk(disk) => Device::Disk(disk.into()),
            StoredDevice::Nic(nic) => Device::Nic(nic.into()),
        });
        Self { vm, name, vcpus, memory, key: key.map(Key::into), devices: devices.collect() }
    }
}

impl From<&VmSpec> for VmOfDisks {
    fn from(spec: &VmSpec) -> Self {
        Self {
            vm: spec.vm,
            name: spec.name.clone(),
            vcpus: spec.vcpus,
            memory: spec.memory,
            key: spec.key.as_ref().map(Key::from),
            disks: spec.disks().map(Disk::from).collect(),
        }
    }
}

impl From<VmOfDisks> for VmSpec {
    fn from(VmOfDisks { vm, name, vcpus, memory, key, disks }: VmOfDisks) -> Self {
        let devices = disks.into_iter().map(|disk| Device::Disk(disk.into())).collect();
        Self { vm, name, vcpus, memory, key: key.map(Key::into), devices }
    }
}

impl From<&KeyReference> for Key {
    fn from(KeyReference { provider, key_id, check }: &KeyReference) -> Self {
        Self { provider: *provider, key_id: key_id.clone(), check: check.clone() }
    }
}

impl From<Key> for KeyReference {
    fn from(Key { provider, key_id, check }: Key) -> Self {
        Self { provider, key_id, check }
    }
}

impl From<&DiskSpec> for Disk {
    fn from(spec: &DiskSpec) -> Self {
        let DiskSpec {
            disk,
            name,
            datastore,
            size,
            encrypted,
            role,
            allocation,
            limits: DiskLimits { iops, bandwidth },
            cache,
            replica,
            facts,
        } = spec;
        Self {
            disk: *disk,
            name: name.clone(),
            datastore: datastore.into(),
            size: *size,
            encrypted: *encrypted,
            role: match role {
                DiskRole::Data => Role::Data,
                DiskRole::CloudInit => Role::CloudInit,
            },
            allocation: match allocation {
                Allocation::Thin => Room::Thin,
                Allocation::Preallocated => Room::Preallocated,
            },
            limits: Limits { iops: *iops, bandwidth: *bandwidth },
            cache: *cache,
            replica: replica.as_ref().map(|ReplicaPlace { datastore, bytes_per_second }| Replica {
                datastore: datastore.into(),
                bytes_per_second: *bytes_per_second,
            }),
            facts: facts.clone().map(Facts::from),
        }
    }
}

impl From<Disk> for DiskSpec {
    fn from(disk: Disk) -> Self {
        let Limits { iops, bandwidth } = disk.limits;
        Self {
            disk: disk.disk,
            name: disk.name,
            datastore: disk.datastore.into(),
            size: disk.size,
            encrypted: disk.encrypted,
            role: match disk.role {
                Role::Data => DiskRole::Data,
                Role::CloudInit => DiskRole::CloudInit,
            },
            allocation: match disk.allocation {
                Room::Thin => Allocation::Thin,
                Room::Preallocated => Allocation::Preallocated,
            },
            limits: DiskLimits { iops, bandwidth },
            cache: disk.cache,
            replica: disk.replica.map(|Replica { datastore, bytes_per_second }| ReplicaPlace {
                datastore: datastore.into(),
                bytes_per_second,
            }),
            facts: disk.facts.map(DiskFacts::from),
        }
    }
}

impl From<&NicSpec> for Nic {
    fn from(NicSpec { nic, name, mac, model, backend, link }: &NicSpec) -> Self {
        Self {
            nic: *nic,
            name: name.clone(),
            mac: *mac,
            model: match model {
                NicModel::Virtio => Model::Virtio,
                NicModel::E1000e => Model::E1000e,
            },
            backend: match backend {
                NicBackend::User { forwards } => {
                    Backend::User { forwards: forwards.iter().map(Forward::from).collect() }
                }
                NicBackend::Tap { tap } => Backend::Tap { tap: tap.clone() },
                NicBackend::Bridge { bridge } => Backend::Bridge { bridge: bridge.clone() },
            },
            link: match link {
                NicLink::Up => Link::Up,
                NicLink::Down => Link::Down,
            },
        }
    }
}

impl From<Nic> for NicSpec {
    fn from(Nic { nic, name, mac, model, backend, link }: Nic) -> Self {
        Self {
            nic,
            name,
            mac,
            model: match model {
                Model::Virtio => NicModel::Virtio,
                Model::E1000e => NicModel::E1000e,
            },
            backend: match backend {
                Backend::User { forwards } => NicBackend::User {
                    forwards: forwards.into_iter().map(PortForward::from).collect(),
                },
                Backend::Tap { tap } => NicBackend::Tap { tap },
                Backend::Bridge { bridge } => NicBackend::Bridge { bridge },
            },
            link: match link {
                Link::Up => NicLink::Up,
                Link::Down => NicLink::Down,
            },
        }
    }
}

impl From<&PortForward> for Forward {
    fn from(forward: &PortForward) -> Self {
        let PortForward { protocol, host_address, host_port, guest_port } = forward;
        let protocol = match protocol {
            Protocol::Tcp => Transport::Tcp,
            Protocol::Udp => Transport::Udp,
        };
        let (host_address, host_port, guest_port) = (*host_address, *host_port, *guest_port);
        Self { protocol, host_address, host_port, guest_port }
    }
}

impl From<Forward> for PortForward {
    fn from(Forward { protocol, host_address, host_port, guest_port }: Forward) -> Self {
        let protocol = match protocol {
            Transport::Tcp => Protocol::Tcp,
            Transport::Udp => Protocol::Udp,
        };
        Self { protocol, host_address, host_port, guest_port }
    }
}

impl From<&NicState> for NicInUse {
    fn from(NicState { nic, forwards, interface, addresses: _ }: &NicState) -> Self {
        let forwards = forwards.iter().map(Forward::from).collect();
        Self { nic: *nic, forwards, interface: interface.clone() }
    }
}

impl From<NicInUse> for NicState {
    fn from(NicInUse { nic, forwards, interface }: NicInUse) -> Self {
        let forwards = forwards.into_iter().map(PortForward::from).collect();
        Self { nic, forwards, interface, addresses: Vec::new() }
    }
}

impl From<&DatastoreSpec> for Datastore {
    fn from(DatastoreSpec { datastore, location }: &DatastoreSpec) -> Self {
        let location = match location {
            DatastoreLocation::Dir { path } => Location::Dir { path: path.clone() },
        };
        Self { datastore: *datastore, location }
    }
}

impl From<Datastore> for DatastoreSpec {
    fn from(Datastore { datastore, location }: Datastore) -> Self {
        let location = match location {
            Location::Dir { path } => DatastoreLocation::Dir { path },
        };
        Self { datastore, location }
    }
}

impl From<DiskFacts> for Facts {
    fn from(facts: DiskFacts) -> Self {
        match facts {
            DiskFacts::Raw => Self::Raw,
            DiskFacts::Luks2 { version, cipher, key_bits, sector_size, data_offset } => {
                Self::Luks2 { version, cipher, key_bits, sector_size, data_offset }
            }
        }
    }
}

impl From<Facts> for DiskFacts {
    fn from(facts: Facts) -> Self {
        match facts {
            Facts::Raw => Self::Raw,
            Facts::Luks2 { version, cipher, key_bits, sector_size, data_offset } => {
                Self::Luks2 { version, cipher, key_bits, sector_size, data_offset }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOLDEN_1: &str = include_str!("../../tests/golden/run-record-1.json");
    const GOLDEN_2: &str = include_str!("../../tests/golden/run-record-2.json");
    const GOLDEN_3: &str = include_str!("../../tests/golden/run-record-3.json");
    const GOLDEN_4: &str = include_str!("../../tests/golden/run-record-4.json");

    #[test]
    fn golden_records_of_all_versions_are_read_and_the_newest_is_written() {
        let first = Record::parse(GOLDEN_1.as_bytes()).unwrap();
        let second = Record::parse(GOLDEN_2.as_bytes()).unwrap();
        assert_eq!(first, second);
        assert_eq!(first, Record::parse(GOLDEN_3.as_bytes()).unwrap());
        assert_eq!((first.slot, first.phase), (3, Phase::Running));
        let disks: Vec<_> = first.spec.disks().collect();
        assert_eq!(
            (disks.len(), disks[1].limits.iops, disks[1].cache),
            (2, Some(500), Some(1 << 20))
        );
        assert_eq!(disks[1].replica.as_ref().unwrap().bytes_per_second, 104_857_600);
        assert!(matches!(disks[0].facts, Some(DiskFacts::Luks2 { key_bits: 512, .. })));
        assert!(first.nics.is_empty());
        let fourth = Record::parse(GOLDEN_4.as_bytes()).unwrap();
        let roles: Vec<_> = fourth.spec.disks().map(|disk| disk.role).collect();
        assert_eq!(roles, [DiskRole::Data, DiskRole::Data, DiskRole::CloudInit]);
        assert!(fourth.spec.disks().take(2).eq(first.spec.disks()));
        let nics: Vec<_> = fourth.spec.nics().collect();
        assert_eq!((nics.len(), nics[1].model, nics[1].link), (3, NicModel::E1000e, NicLink::Down));
        assert_eq!(fourth.nics[0].forwards[0].host_port, 61_022);
        assert_eq!(fourth.nics[1].interface.as_deref(), Some("vmseal0"));
        let written = String::from_utf8(fourth.to_text().unwrap()).unwrap();
        let this = format!("\"written_by\": \"{}\"", env!("CARGO_PKG_VERSION"));
        assert_eq!(written, GOLDEN_4.trim_end().replace("\"written_by\": \"0.1.0\"", &this));
    }

    #[test]
    fn a_record_from_before_disks_had_limits_is_read() {
        let mut old: serde_json::Value = serde_json::from_str(GOLDEN_1).unwrap();
        for field in ["limits", "cache", "replica", "allocation"] {
            old["spec"]["disks"][1].as_object_mut().unwrap().remove(field);
        }
        let record = Record::parse(old.to_string().as_bytes()).unwrap();
        let disk = record.spec.disk_at(1).unwrap();
        assert_eq!((disk.limits, disk.cache), (DiskLimits::default(), None));
    }

    #[test]
    fn what_cannot_be_read_says_why() {
        let why = |text: &str| Record::parse(text.as_bytes()).unwrap_err().to_string();
        let newer = GOLDEN_4.replacen("\"version\": 4", "\"version\": 5", 1);
        let newer = newer.replace("\"written_by\": \"0.1.0\"", "\"written_by\": \"9.0\"");
        let told = why(&newer);
        assert!(told.starts_with("has version 5 (written by vmseal 9.0)"), "{told}");
        assert!(told.contains("reads versions 1 to 4"), "{told}");
        // The version is reported, whatever else a newer record holds.
        assert!(why(r#"{"version": 9, "written_by": 7, "vm": []}"#).starts_with("has version 9,"));
        assert!(why(r#"{"version": 0}"#).starts_with("has version 0,"));
        for damaged in ["", "{", "[]", "null", r#"{"version": "4"}"#, r#"{"version": 4}"#] {
            assert!(why(damaged).starts_with("is damaged: "), "{damaged}");
        }
        let more = GOLDEN_4.replacen("\"slot\"", "\"more\": 1, \"slot\"", 1);
        assert!(why(&more).contains("more"), "an unknown field is accepted");
        let device = GOLDEN_4.replacen("\"device\": \"disk\"", "\"device\": \"tpm\"", 1);
        assert!(why(&device).contains("unknown variant `tpm`"), "{}", why(&device));
    }
}
