//! A VM as a host runs it.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::about::AboutVm;
use super::disk::DiskSpec;
use super::key::KeyReference;
use crate::hardware::Hardware;
use crate::id::{DiskId, NicId, SnapshotId, VmId};
use crate::image_layout::ImageLayout;
use crate::nic::NicSpec;

/// A VM as a host runs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Which VM.
    pub vm: VmId,
    /// Its name, for people: process titles, logs.
    pub name: String,
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory in bytes, a multiple of 1 MiB.
    pub memory: u64,
    /// The name of its policy, for the descriptors on its datastores. Agents without the feature
    /// [`DESCRIPTORS`](super::version::DESCRIPTORS) are not told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// Its KEK; none when nothing of it is encrypted.
    pub key: Option<KeyReference>,
    /// What its machine is.
    #[serde(default, skip_serializing_if = "Hardware::is_usual")]
    pub hardware: Hardware,
    /// Its devices; disks in boot order.
    pub devices: Vec<Device>,
    /// Its snapshots, for the descriptors on its datastores. Agents without the feature
    /// [`SNAPSHOTS`](super::version::SNAPSHOTS) are not told them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotSpec>,
    /// How its images in pools of Ceph are cut into objects that are made from now on; none leaves that as it is. Agents without the
    /// feature [`IMAGE_LAYOUTS`](super::version::IMAGE_LAYOUTS) are not told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images: Option<ImageLayout>,
    /// What its users say of it, for the descriptors on its datastores; none leaves that as it is there. Agents without the feature
    /// [`ABOUT`](super::version::ABOUT) are not told it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub about: Option<AboutVm>,
}

/// A snapshot of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SnapshotSpec {
    /// Which.
    pub snapshot: SnapshotId,
    /// Its name within the VM.
    pub name: String,
    /// The one that it was taken after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<SnapshotId>,
    /// When it was asked for.
    pub created: Timestamp,
    /// Whether the guest's file systems were frozen, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// Whether what the disks hold began with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub current: bool,
    /// The disks that it keeps.
    pub disks: Vec<DiskId>,
    /// What its user said of it. Agents without the feature [`TREATMENT`](super::version::TREATMENT) are not told it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
}

/// A device of a VM. An agent refuses a VM with a device of a kind that it does not know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "device", rename_all = "snake_case")]
pub enum Device {
    /// A disk.
    Disk(DiskSpec),
    /// A network card.
    Nic(NicSpec),
}

impl VmSpec {
    /// The disks, in boot order.
    pub fn disks(&self) -> impl Iterator<Item = &DiskSpec> + Clone {
        self.devices.iter().filter_map(|device| match device {
            Device::Disk(disk) => Some(disk),
            Device::Nic(_) => None,
        })
    }

    /// The disks, in boot order.
    pub fn disks_mut(&mut self) -> impl Iterator<Item = &mut DiskSpec> {
        self.devices.iter_mut().filter_map(|device| match device {
            Device::Disk(disk) => Some(disk),
            Device::Nic(_) => None,
        })
    }

    /// The network cards, in the order in which the guest finds them.
    pub fn nics(&self) -> impl Iterator<Item = &NicSpec> + Clone {
        self.devices.iter().filter_map(|device| match device {
            Device::Nic(nic) => Some(nic),
            Device::Disk(_) => None,
        })
    }

    /// The network card of this id.
    pub fn nic_mut(&mut self, nic: NicId) -> Option<&mut NicSpec> {
        self.devices.iter_mut().find_map(|device| match device {
            Device::Nic(known) if known.nic == nic => Some(known),
            _ => None,
        })
    }

    /// The disk at this place in boot order, from 0.
    #[must_use]
    pub fn disk_at(&self, index: usize) -> Option<&DiskSpec> {
        self.disks().nth(index)
    }

    /// The disk at this place in boot order, from 0.
    pub fn disk_at_mut(&mut self, index: usize) -> Option<&mut DiskSpec> {
        self.disks_mut().nth(index)
    }

    /// The disk of this id.
    #[must_use]
    pub fn disk(&self, disk: DiskId) -> Option<&DiskSpec> {
        self.disks().find(|known| known.disk == disk)
    }
}

/// The longest that a guest may be given to shut down, in seconds: databases flush for minutes, not hours.
pub const SHUTDOWN_SECONDS_MAX: u32 = 3600;

/// What is done to a guest that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GuestControl {
    /// Its processors stand still; one that is paused stays so.
    Pause,
    /// They go on; one that runs goes on.
    Unpause,
    /// The reset button: it boots again without shutting down. Done again, it boots once more.
    Reset,
    /// Woken from ACPI S3 (suspend to RAM). Only for agents with feature [`WAKEUP`](super::version::WAKEUP); `wrong-state` where it is
    /// awake.
    Wakeup,
}

/// How to power off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "snake_case", deny_unknown_fields)]
pub enum PowerOff {
    /// The ACPI power button; the call answers at once, and the guest may take its time or refuse.
    Shutdown {
        /// How long it counts as stopping; after that it counts as running again. At most
        /// [`SHUTDOWN_SECONDS_MAX`].
        seconds: u32,
    },
    /// Cuts the power: answers when the processes are gone.
    Force,
    /// Ends a start that is in progress, as [`PowerOff::Force`] does, and is refused where the guest runs already: one that has gone on
    /// from its saved memory has it nowhere else. Agents without the feature [`CANCEL_START`](super::version::CANCEL_START) do not know it.
    CancelStart,
}
