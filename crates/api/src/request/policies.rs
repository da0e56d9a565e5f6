//! Requests about storage policies.

use serde::{Deserialize, Serialize};

use crate::datastore::Messenger;
use crate::host::{Allocation, DiskLimits};
use crate::image_layout::ImageLayout;
use crate::model::Replication;
use crate::osd_encryption::AskedOsds;
use crate::redundancy::Redundancy;

/// Adds a storage policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddPolicy {
    /// Its name.
    pub name: String,
    /// Whether what it is applied to is encrypted.
    pub encryption: bool,
    /// The provider of the keys, by name or id; none means the default one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// When its disks take room.
    #[serde(default)]
    pub allocation: Allocation,
    /// What guests may use of each of its disks.
    #[serde(default)]
    pub limits: DiskLimits,
    /// What filters keep in memory of each of its disks, in bytes: a multiple of 1 MiB, and at most 256 MiB for all disks
    /// of a VM. None is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// Where a second copy of each of its disks is kept. None is nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<Replication>,
    /// The processor model of VMs that have it: `host`, or a name that QEMU knows. None leaves it to each VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// The longest that guests of its VMs are to stand still while the rest of their memory is sent to another host, in milliseconds, from
    /// 10 to 60000; none means 300. A migration may be asked for with another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_milliseconds: Option<u32>,
    /// How data must go between hosts and Ceph clusters for VMs that have it: with `secure` they start only where all of their
    /// disks are in pools with that messenger. None asks for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messenger: Option<Messenger>,
    /// What the OSDs of Ceph clusters must be for VMs that have it: with `required` they start only where all of their disks in pools are on
    /// encrypted OSDs. None, as `any`, asks for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osd_encryption: Option<AskedOsds>,
    /// What failures its disks must outlive. With one, disks are made in pools of Ceph that do, and nowhere else.
    #[serde(default)]
    pub redundancy: Redundancy,
    /// How images of its disks in pools of Ceph are cut into objects. In a directory it means nothing.
    #[serde(default)]
    pub image_layout: ImageLayout,
}

/// Changes a policy. What is not given stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetPolicy {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether what it is applied to is encrypted; not while VMs have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encryption: Option<bool>,
    /// The provider of the keys, by name or id; an empty text is the default one. VMs keep the keys that they have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// When disks that are made from now on take room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<Allocation>,
    /// Requests a second that guests may have of each disk; 0 is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes a second that guests may have of each disk; 0 is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// After how many seconds without an answer of storage requests of each disk fail; 0: they wait without end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_timeout: Option<u32>,
    /// What filters keep in memory of each disk, in bytes; 0 is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// The datastore where a second copy of each disk that is made from now on is kept; an empty text is nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicate_to: Option<String>,
    /// Bytes a second that may be copied there of each disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicate_rate: Option<u64>,
    /// The processor model of VMs that have it; an empty text leaves it to each VM. Not while VMs have another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_model: Option<String>,
    /// The longest that guests of its VMs are to stand still while the rest of their memory is sent to another host, in milliseconds; 0 is
    /// the usual limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_milliseconds: Option<u32>,
    /// How data must go between hosts and Ceph clusters for VMs that have it; `crc` asks for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub messenger: Option<Messenger>,
    /// What the OSDs of Ceph clusters must be for VMs that have it; `any` asks for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osd_encryption: Option<AskedOsds>,
    /// What failures disks that are made from now on must outlive; 0 failures and no layout ask for nothing. The failure domain stays where
    /// none is in it, and so do the data chunks of erasure coding where that stays the layout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redundancy: Option<Redundancy>,
    /// How many data chunks (`k`) pools of disks that are made from now on have; 0 leaves it to the pool. The policy's layout must be
    /// `erasure_coding`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_chunks: Option<u32>,
    /// On what copies of disks that are made from now on are kept apart at least, such as `rack`; an empty text leaves it to the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure_domain: Option<String>,
    /// The size of the objects of images that are made from now on, in bytes; 0 is the cluster's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub object_size: Option<u64>,
    /// How much of such an image is in one object before the next one follows, in bytes; 0 is no stripes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_unit: Option<u64>,
    /// How many objects the units go around; 0 is no stripes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stripe_count: Option<u32>,
}
