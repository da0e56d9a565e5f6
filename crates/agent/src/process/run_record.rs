//! The record of a running VM, as the file `run.json` holds it. It is all that a later agent has to adopt the
//! VM, and that agent may be of another version. So the file has a version and types of its own, which change
//! only together with it. docs/formats/run-record.md describes it.
//!
//! Older versions are read; the newest is written. [`Unreadable`] says why a record cannot be read; the
//! caller then leaves the VM alone.

mod hardware;
mod nics;
mod panics;

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use vmseal_api::datastore::RbdPool;
use vmseal_api::dump::Panic;
use vmseal_api::hardware::Hardware;
use vmseal_api::host::{
    Allocation, DatastoreLocation, DatastoreSpec, Device, DiskFacts, DiskLimits, DiskRole,
    DiskSpec, KeyReference, NicState, VmSpec,
};
use vmseal_api::id::{DatastoreId, DiskId, NicId, ProviderId, VmId};
use vmseal_api::replica::ReplicaPlace;

use self::hardware::StoredHardware;
use self::nics::{Nic, NicInUse};
use self::panics::{StoredPanic, StoredPanicNow};
use super::live::{DiskInUse, Live};
use super::panics::{PanicNow, Panics};

/// The version that is written.
pub const VERSION: u32 = 5;

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
    /// How QEMU has its devices, and whether its guest is paused.
    pub live: Live,
}

/// How far a VM's start got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Its processes are being started; the guest has not run.
    Starting,
    /// It comes from another host: its guest has not run here.
    Receiving,
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
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Version4 {
    #[serde(rename = "version")]
    _version: u32,
    #[serde(rename = "written_by")]
    _written_by: String,
    boot: String,
    slot: u32,
    phase: Phase,
    vm: Vm,
    #[serde(default)]
    nics: Vec<NicInUse>,
}

/// Version 5: the guest may be paused; devices are plugged in and out while it runs; the VM's policy is on record, and
/// what its machine is, where it is not what every VM has; a disk may have the firmware's variables.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Version5 {
    version: u32,
    written_by: String,
    boot: String,
    slot: u32,
    phase: Phase,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    paused: bool,
    /// Whether QEMU knows how far each queue of the disks of the paused guest is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    queues_known: bool,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    spare_ports: bool,
    vm: Vm,
    #[serde(default, skip_serializing_if = "StoredHardware::is_usual")]
    hardware: StoredHardware,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    nics: Vec<NicInUse>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    disks: Vec<StoredDiskInUse>,
    /// The port that each network card is plugged into.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    ports: BTreeMap<NicId, u32>,
    /// The panics of the guest after which it was restarted or left as it is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    panics: Vec<StoredPanic>,
    /// The one that is being handled, or after which it stands still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    panic: Option<StoredPanicNow>,
    /// The generation of the placement that it was received with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    received: Option<u64>,
    /// The generation that its disks had when it was handed over to another host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    handed_over: Option<u64>,
    /// The generation that the lease of its disks had when its guest began to run here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease: Option<u64>,
    /// How much more memory its machine has, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_padding: Option<u64>,
    /// Whether its network cards have ROMs though its boot order has no network.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    card_roms: bool,
    /// Since when the guest's file systems may be frozen for a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    frozen: Option<Timestamp>,
}

/// A VM, in records of VMs that run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Vm {
    vm: VmId,
    name: String,
    vcpus: u32,
    memory: u64,
    /// Since version 5.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    policy: Option<String>,
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
    Rbd { path: PathBuf, pool: Box<RbdPool> },
}

/// Since version 4; what older ones have is data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    #[default]
    Data,
    CloudInit,
    UefiVariables,
    Tpm,
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stall_timeout: Option<u32>,
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

/// How QEMU has a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredDiskInUse {
    disk: DiskId,
    socket: u32,
    queues: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    port: Option<u32>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    grown: bool,
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
                Ok(Self::of_earlier(boot, slot, phase, record.spec.into(), Vec::new()))
            }
            2 => {
                let record: Version2 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                Ok(Self::of_earlier(boot, slot, phase, record.vm.into(), Vec::new()))
            }
            3 => {
                let record: Version3 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                Ok(Self::of_earlier(boot, slot, phase, record.vm.into(), Vec::new()))
            }
            4 => {
                let record: Version4 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                let nics = record.nics.into_iter().map(NicState::from).collect();
                Ok(Self::of_earlier(boot, slot, phase, record.vm.into(), nics))
            }
            5 => {
                let record: Version5 = serde_json::from_slice(text).map_err(damaged)?;
                let (boot, slot, phase) = (record.boot, record.slot, record.phase);
                let live = Live {
                    paused: record.paused,
                    queues_known: record.queues_known,
                    spare_ports: record.spare_ports,
                    nic_ports: record.ports,
                    disks: record.disks.into_iter().map(DiskInUse::from).collect(),
                    nics: record.nics.into_iter().map(NicState::from).collect(),
                    panics: Panics {
                        past: record.panics.into_iter().map(Panic::from).collect(),
                        now: record.panic.map(PanicNow::from),
                    },
                    received: record.received,
                    handed_over: record.handed_over,
                    lease: record.lease,
                    memory_padding: record.memory_padding.unwrap_or(0),
                    card_roms: record.card_roms,
                    frozen: record.frozen,
                };
                let hardware = record.hardware.into();
                let spec = VmSpec { hardware, ..record.vm.into() };
                Ok(Self { boot, spec, slot, phase, live })
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
        let live = &self.live;
        serde_json::to_vec_pretty(&Version5 {
            version: VERSION,
            written_by: env!("CARGO_PKG_VERSION").to_owned(),
            boot: self.boot.clone(),
            slot: self.slot,
            phase: self.phase,
            paused: live.paused,
            queues_known: live.queues_known,
            spare_ports: live.spare_ports,
            vm: (&self.spec).into(),
            hardware: (&self.spec.hardware).into(),
            nics: live.nics.iter().map(NicInUse::from).collect(),
            disks: live.disks.iter().map(StoredDiskInUse::from).collect(),
            ports: live.nic_ports.clone(),
            panics: live.panics.past.iter().map(StoredPanic::from).collect(),
            panic: live.panics.now.as_ref().map(StoredPanicNow::from),
            received: live.received,
            handed_over: live.handed_over,
            lease: live.lease,
            memory_padding: (live.memory_padding > 0).then_some(live.memory_padding),
            card_roms: live.card_roms,
            frozen: live.frozen,
        })
    }

    fn of_earlier(
        boot: String,
        slot: u32,
        phase: Phase,
        spec: VmSpec,
        nics: Vec<NicState>,
    ) -> Self {
        let live = Live::of_earlier_record(&spec, nics);
        Self { boot, spec, slot, phase, live }
    }
}

impl From<&VmSpec> for Vm {
    fn from(spec: &VmSpec) -> Self {
        // What the machine is has a place of its own.
        // The server tells its snapshots again, and how its images are cut into objects. What its users say is in its descriptors.
        let VmSpec {
            vm,
            name,
            vcpus,
            memory,
            policy,
            key,
            hardware: _,
            devices,
            snapshots: _,
            images: _,
            about: _,
        } = spec;
        let devices = devices.iter().map(|device| match device {
            Device::Disk(disk) => StoredDevice::Disk(disk.into()),
            Device::Nic(nic) => StoredDevice::Nic(nic.into()),
        });
        Self {
            vm: *vm,
            name: name.clone(),
            vcpus: *vcpus,
            memory: *memory,
            policy: policy.clone(),
            key: key.as_ref().map(Key::from),
            devices: devices.collect(),
        }
    }
}

impl From<Vm> for VmSpec {
    fn from(Vm { vm, name, vcpus, memory, policy, key, devices }: Vm) -> Self {
        let devices = devices.into_iter().map(|device| match device {
            StoredDevice::Disk(disk) => Device::Disk(disk.into()),
            StoredDevice::Nic(nic) => Device::Nic(nic.into()),
        });
        let (key, hardware, devices) = (key.map(Key::into), Hardware::default(), devices.collect());
        let (snapshots, images, about) = (Vec::new(), None, None);
        Self { vm, name, vcpus, memory, policy, key, hardware, devices, snapshots, images, about }
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
        let (key, hardware) = (key.map(Key::into), Hardware::default());
        let (policy, snapshots, images, about) = (None, Vec::new(), None, None);
        Self { vm, name, vcpus, memory, policy, key, hardware, devices, snapshots, images, about }
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
            limits: DiskLimits { iops, bandwidth, stall_timeout },
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
                DiskRole::UefiVariables => Role::UefiVariables,
                DiskRole::Tpm => Role::Tpm,
            },
            allocation: match allocation {
                Allocation::Thin => Room::Thin,
                Allocation::Preallocated => Room::Preallocated,
            },
            limits: Limits { iops: *iops, bandwidth: *bandwidth, stall_timeout: *stall_timeout },
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
        let Limits { iops, bandwidth, stall_timeout } = disk.limits;
        Self {
            disk: disk.disk,
            name: disk.name,
            datastore: disk.datastore.into(),
            size: disk.size,
            encrypted: disk.encrypted,
            role: match disk.role {
                Role::Data => DiskRole::Data,
                Role::CloudInit => DiskRole::CloudInit,
                Role::UefiVariables => DiskRole::UefiVariables,
                Role::Tpm => DiskRole::Tpm,
            },
            allocation: match disk.allocation {
                Room::Thin => Allocation::Thin,
                Room::Preallocated => Allocation::Preallocated,
            },
            limits: DiskLimits { iops, bandwidth, stall_timeout },
            cache: disk.cache,
            replica: disk.replica.map(|Replica { datastore, bytes_per_second }| ReplicaPlace {
                datastore: datastore.into(),
                bytes_per_second,
            }),
            facts: disk.facts.map(DiskFacts::from),
        }
    }
}

impl From<&DiskInUse> for StoredDiskInUse {
    fn from(&DiskInUse { disk, socket, queues, port, grown }: &DiskInUse) -> Self {
        Self { disk, socket, queues, port, grown }
    }
}

impl From<StoredDiskInUse> for DiskInUse {
    fn from(StoredDiskInUse { disk, socket, queues, port, grown }: StoredDiskInUse) -> Self {
        Self { disk, socket, queues, port, grown }
    }
}

impl From<&DatastoreSpec> for Datastore {
    fn from(DatastoreSpec { datastore, location }: &DatastoreSpec) -> Self {
        let location = match location {
            DatastoreLocation::Dir { path } => Location::Dir { path: path.clone() },
            DatastoreLocation::Rbd { path, pool } => {
                // Which way is the latest, the pool's own note says; agents of earlier versions do not read this field.
                let pool = Box::new(RbdPool { changed: None, ..(**pool).clone() });
                Location::Rbd { path: path.clone(), pool }
            }
        };
        Self { datastore: *datastore, location }
    }
}

impl From<Datastore> for DatastoreSpec {
    fn from(Datastore { datastore, location }: Datastore) -> Self {
        let location = match location {
            Location::Dir { path } => DatastoreLocation::Dir { path },
            Location::Rbd { path, pool } => DatastoreLocation::Rbd { path, pool },
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
mod tests;
