//! How much processor time, memory, disk and network each VM has used since it started. These are counters: a rate is the
//! difference of two readings, divided by the time between them.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::id::VmId;

/// What the VMs that run on a host use, as its agent reads it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostUsage {
    /// The VMs that run.
    pub vms: Vec<UsageOnHost>,
    /// Memory that new processes can have without swapping, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_available: Option<u64>,
}

/// What a VM uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageOnHost {
    /// The VM.
    pub vm: VmId,
    /// The counters.
    #[serde(flatten)]
    pub counters: UsageCounters,
}

/// Counters of a VM since its processes started. Those of disks begin again when another filter takes over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UsageCounters {
    /// CPU time of QEMU, its guest included, in nanoseconds.
    pub cpu_nanoseconds: u64,
    /// CPU time of the filter, which encrypts, in nanoseconds.
    pub filter_cpu_nanoseconds: u64,
    /// Memory of QEMU and its guest that is in use, in bytes.
    pub memory_resident: u64,
    /// Reads of all disks.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes of all disks.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Flushes of all disks.
    pub flushes: u64,
    /// Requests that were answered with an error.
    pub errors: u64,
    /// What went over its network cards on bridges and taps, together; none where it has no such card, or its host is of an earlier
    /// version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkCounters>,
}

/// What a guest has received and sent since the interfaces of its network cards were made on the host: for a card on a bridge that is
/// the guest's start, or when the card was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkCounters {
    /// Bytes that the guest has received.
    pub received_bytes: u64,
    /// Packets that it has received.
    pub received_packets: u64,
    /// Bytes that it has sent.
    pub sent_bytes: u64,
    /// Packets that it has sent.
    pub sent_packets: u64,
}

impl NetworkCounters {
    /// Both together.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            received_bytes: self.received_bytes.saturating_add(other.received_bytes),
            received_packets: self.received_packets.saturating_add(other.received_packets),
            sent_bytes: self.sent_bytes.saturating_add(other.sent_bytes),
            sent_packets: self.sent_packets.saturating_add(other.sent_packets),
        }
    }
}

/// What the VMs that run use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Usage {
    /// The VMs, in the order of their names.
    pub vms: Vec<VmUsage>,
    /// Hosts whose figures are missing, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

/// A VM that runs, and what it uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VmUsage {
    /// The VM.
    pub vm: VmId,
    /// Its name.
    pub name: String,
    /// Its host, by name.
    pub host: String,
    /// Virtual processors.
    pub vcpus: u32,
    /// Its memory as the guest sees it, in bytes.
    pub memory: u64,
    /// When the server read the counters.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// The counters.
    #[serde(flatten)]
    pub counters: UsageCounters,
}

/// What of a host its VMs have, and what is left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HostRoom {
    /// VMs that are placed on it.
    pub vms: usize,
    /// Those of them that run.
    pub running: usize,
    /// Virtual processors of those that run.
    pub vcpus_running: u64,
    /// Virtual processors of all of them.
    pub vcpus: u64,
    /// Memory of the guests that run, in bytes.
    pub memory_running: u64,
    /// Memory of all of them, in bytes.
    pub memory: u64,
    /// Memory that is left beside the guests that run, in bytes; none where the host has not described itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_left: Option<u64>,
    /// Its datastores, in the order of their names.
    pub datastores: Vec<DatastoreRoom>,
}

/// The room of a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DatastoreRoom {
    /// Its name.
    pub name: String,
    /// Its room when last measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<crate::datastore::DatastoreUsage>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agents_of_earlier_versions_say_nothing_of_the_network_and_others_all_of_it() {
        let mut used = UsageOnHost { vm: VmId::new(), counters: UsageCounters::default() };
        let earlier = serde_json::to_value(&used).unwrap();
        assert!(earlier.get("network").is_none(), "{earlier}");
        assert_eq!(serde_json::from_value::<UsageOnHost>(earlier).unwrap(), used);
        let one =
            NetworkCounters { received_bytes: 1, sent_packets: u64::MAX, ..Default::default() };
        used.counters.network = Some(one.plus(one));
        let told = serde_json::to_value(&used).unwrap();
        assert_eq!(told["network"]["received_bytes"], 2);
        assert_eq!(told["network"]["sent_packets"], u64::MAX);
        assert_eq!(serde_json::from_value::<UsageOnHost>(told).unwrap(), used);
    }
}
