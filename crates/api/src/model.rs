//! The resources of the REST API, as the server shows them.

mod task;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::compliance::Compliance;
use crate::datastore::{DatastoreHost, Messenger};
use crate::drain::{Drain, Maintenance, OnDrain};
use crate::dump::{DumpFormat, DumpReason};
use crate::hardware::Hardware;
use crate::host::backup::BackupContents;
use crate::host::proof::{ProofReport, SignedReport};
use crate::host::{
    Allocation, DatastoreUsage, DiskFacts, DiskLimits, DiskRole, HostDescription, KeyReference,
    KeyState, Power, Stopped,
};
use crate::id::{
    BackupId, DatastoreId, DiskId, DumpId, HostId, NicId, PolicyId, ProviderId, SnapshotId, VmId,
};
use crate::image_layout::ImageLayout;
use crate::key_fault::KeyFault;
use crate::kmip::KmipDetails;
use crate::nic::{MacAddress, NicBackend, NicLink, NicModel, PortForward};
use crate::osd_encryption::{AskedOsds, EncryptionPlace, OsdFacts};
pub use crate::plan::Plan;
use crate::redundancy::{PoolFacts, Redundancy};
use crate::replica::REPLICA_RATE;
use crate::usage::HostRoom;

pub use self::task::{Task, TaskState, Waiting, WaitingOn};

/// A list, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Page<T> {
    /// The resources.
    pub items: Vec<T>,
    /// Pass this as `after` to get what follows; none at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// The server itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct About {
    /// The version of vmseal that the server is.
    pub vmseal: String,
    /// The public key that passphrases for this server are sealed to (X25519, 32 bytes, base64); a new
    /// one with every start.
    pub passphrase_box: String,
    /// What it can do that not every server of this API can, by name.
    #[serde(default)]
    pub features: Vec<String>,
}

/// A machine with an agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Host {
    /// Its id.
    pub id: HostId,
    /// Its name.
    pub name: String,
    /// Where its agent listens (`host:port`).
    pub address: String,
    /// Whether it answers.
    pub connection: Connection,
    /// Whether VMs are placed on it.
    #[serde(default)]
    pub maintenance: Maintenance,
    /// How far it is emptied, while it is not active.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
    /// What it was when it last answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<HostDescription>,
    /// What its VMs have of it, and what is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub room: Option<HostRoom>,
}

/// Whether a host answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Connection {
    /// It answers, and all its VMs are registered.
    Connected,
    /// It does not answer: what is shown of its VMs is what was last known.
    Disconnected,
}

/// A token that lets one machine join as a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JoinToken {
    /// The token: shown once, valid once. It carries the fingerprint of the server's CA, so that the
    /// joining host knows whom it joins.
    pub token: String,
    /// Until when it is valid.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub expires: Timestamp,
}

/// A place where disks are kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Datastore {
    /// Its id.
    pub id: DatastoreId,
    /// Its name.
    pub name: String,
    /// The hosts that have it, in the order of their names: one, or several that share it.
    pub hosts: Vec<DatastoreHost>,
    /// Its room when last measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<DatastoreUsage>,
    /// Which key of a pool's user the server holds, by its fingerprint; none where it holds none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// How the cluster keeps what is stored in a pool of Ceph: the pool of names and headers, and that of data where it is another one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pools: Vec<PoolFacts>,
    /// Whether the OSDs of a pool's cluster are encrypted; none of a directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osd_encryption: Option<OsdFacts>,
}

/// A datastore whose key was changed, or how hosts get to it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RekeyedDatastore {
    /// The datastore.
    #[serde(flatten)]
    pub datastore: Datastore,
    /// What is not known of the key: that it was not tried, since the agents of the hosts are of an earlier version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A key provider.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Provider {
    /// Its id.
    pub id: ProviderId,
    /// Its name.
    pub name: String,
    /// What kind it is.
    pub kind: ProviderKind,
    /// Whether policies that name none use it.
    pub default: bool,
    /// Whether it can be used.
    pub status: ProviderStatus,
    /// What it is made of, where it is a KMIP provider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kmip: Option<KmipDetails>,
}

/// The kinds of key provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProviderKind {
    /// The embedded one: keys derived from a key-derivation key that a passphrase seals.
    Native,
    /// A key management system, reached over KMIP.
    Kmip,
}

/// Whether a provider can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ProviderStatus {
    /// It makes and gives keys.
    Normal,
    /// Its passphrase has not been given since the server's start (`vmseal provider unlock`).
    Sealed,
    /// Its backup has not been written and verified yet (`vmseal provider backup`, `verify`): it makes no keys.
    NeedsBackup,
    /// No server's certificate has been trusted yet (`vmseal provider trust`).
    NeedsTrust,
    /// It has no client certificate yet (`vmseal provider certificate`).
    NeedsCertificate,
    /// None of its servers has been tried since its passphrase was given: in some seconds one has.
    Untried,
    /// It makes and gives keys, but some of its servers could not be used when last tried; `kmip` and the alarms say
    /// why.
    Degraded,
    /// None of its servers could be used when last tried; `kmip` and the alarms say why.
    Failing,
}

/// A storage policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Policy {
    /// Its id.
    pub id: PolicyId,
    /// Its name.
    pub name: String,
    /// Whether what it is applied to is encrypted.
    pub encryption: bool,
    /// The provider of the keys; none means the default one at the time a VM is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// When its disks take room.
    #[serde(default)]
    pub allocation: Allocation,
    /// What guests may use of each of its disks.
    #[serde(default)]
    pub limits: DiskLimits,
    /// What filters keep in memory of each of its disks, in bytes; none is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// Where a second copy of each of its disks is kept; none is nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<Replication>,
    /// The processor model of VMs that have it: `host`, or a name that QEMU knows; none leaves it to each VM.
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
    /// encrypted OSDs. None asks for nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osd_encryption: Option<AskedOsds>,
    /// What failures its disks must outlive. With one, disks are made in pools of Ceph that do, and nowhere else.
    #[serde(default, skip_serializing_if = "Redundancy::is_nothing")]
    pub redundancy: Redundancy,
    /// How images of its disks in pools of Ceph are cut into objects. In a directory it means nothing.
    #[serde(default, skip_serializing_if = "ImageLayout::is_usual")]
    pub image_layout: ImageLayout,
}

/// Where second copies of disks are kept: ciphertext as the disk is, and later than it by a lag that is stated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Replication {
    /// The datastore. A policy names one that the host of the VM is to have, other than that of the disk.
    pub datastore: String,
    /// How fast each disk is copied at most, in bytes a second: from 1 MiB to 1 TiB.
    #[serde(default = "replica_rate")]
    pub bytes_per_second: u64,
}

fn replica_rate() -> u64 {
    REPLICA_RATE
}

/// A virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Vm {
    /// Its id.
    pub id: VmId,
    /// Its name.
    pub name: String,
    /// What it is for, in its users' words.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Its labels, by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Whether it is started after its host has rebooted.
    #[serde(default)]
    pub autostart: bool,
    /// Whether what it is sent with to another host is encrypted.
    #[serde(default)]
    pub migration_encryption: crate::migration::MigrationEncryption,
    /// What happens to it while it runs when its host is emptied.
    #[serde(default)]
    pub on_drain: OnDrain,
    /// Whether it is a template: it is cloned, and neither started nor changed.
    #[serde(default)]
    pub template: bool,
    /// What it stands on, of a linked clone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linked: Option<LinkedTo>,
    /// The linked clones that stand on its snapshots, by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub clones: Vec<String>,
    /// The host that it is on.
    pub host: String,
    /// Its policy.
    pub policy: String,
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// What its machine is.
    #[serde(default)]
    pub hardware: Hardware,
    /// Its KEK; none when nothing of it is encrypted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyReference>,
    /// The name of the KEK's provider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Its disks, in boot order.
    pub disks: Vec<Disk>,
    /// The disks that are in the clear though its policy encrypts, by name: they were decrypted alone, or not encrypted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks_in_the_clear: Vec<String>,
    /// Whether its storage is as its policy requires; none where the server is of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compliance: Option<Compliance>,
    /// Its network cards, in the order in which the guest finds them.
    #[serde(default)]
    pub nics: Vec<Nic>,
    /// How far it is made.
    pub lifecycle: Lifecycle,
    /// Whether it runs; none while its host does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<Power>,
    /// Whether its guest is suspended to RAM (ACPI S3), as by `systemctl suspend`, while the VM runs. Not said where its agent is older.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub suspended_to_ram: bool,
    /// What was changed and takes effect at its next start, by name of field (`vcpus`, `memory`, `limits`, `cache`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub at_next_start: Vec<String>,
    /// Whether its key is on its host; none while its host does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_state: Option<KeyState>,
    /// Why it last stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<Stopped>,
}

/// What a linked clone stands on: it shares the data of that VM's disks, and their data keys (DEK) where they are encrypted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LinkedTo {
    /// The name of the VM that was cloned; it may be gone.
    pub vm: String,
    /// The name of its snapshot.
    pub snapshot: String,
    /// Whether it shares data keys.
    pub shares_data_key: bool,
}

/// How far a VM is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Lifecycle {
    /// A task makes it.
    Creating,
    /// It is whole.
    Ready,
    /// A task removes it.
    Deleting,
}

/// A report on whether a VM is encrypted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Proof {
    /// What it says.
    pub report: ProofReport,
    /// The SHA-256 of the text that is signed, in hexadecimal: what names the report, also in the event `vm.proved`.
    // Servers of earlier versions do not send it.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub digest: String,
    /// The same as the VM's host has signed it.
    pub signed: SignedReport,
}

/// A snapshot of a VM: what its disks held at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Its name, unique within the VM.
    pub name: String,
    /// Its VM, by name.
    pub vm: String,
    /// What it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// The snapshot that it was taken after, by name; none for the first of its tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// When it was asked for.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created: Timestamp,
    /// How it stands.
    pub state: SnapshotState,
    /// Whether it is the one that the VM's disks were last taken or reverted to.
    pub current: bool,
    /// Whether the guest's file systems were frozen when it was taken; none where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// Whether it keeps the guest's memory: the VM is suspended with it after a revert.
    #[serde(default)]
    pub memory: bool,
    /// The disks that it keeps, by name.
    pub disks: Vec<String>,
}

/// How a snapshot stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotState {
    /// A task takes it.
    Taking,
    /// It is complete.
    Ready,
    /// It is given up, and a task merges its layers.
    Deleting,
}

/// A backup of a VM: what its disks held at one instant, in a directory of a host, encrypted as they are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VmBackup {
    /// Its id, which is the name of its directory.
    pub id: BackupId,
    /// Its name, unique within the VM.
    pub name: String,
    /// Its VM, by name.
    pub vm: String,
    /// The VM's id, which is the name of the directory of its backups.
    pub vm_id: VmId,
    /// Whether the VM is deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub vm_deleted: bool,
    /// The instant that the disks are of.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created: Timestamp,
    /// How it stands.
    pub state: BackupState,
    /// The host that it is on, by name.
    pub host: String,
    /// The directory of backups on that host.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub directory: PathBuf,
    /// The backup that it needs, by name, as it has only what has changed since; none for a full one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The room of its files, in bytes; none while it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// How much of the disks was read for it, in bytes, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<u64>,
    /// Whether the guest's file systems were frozen at that instant, where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// When it was last found to be whole and to open with its key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub verified: Option<Timestamp>,
    /// Its last verification, where that failed and none has succeeded since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verification_failed: Option<FailedVerification>,
    /// The key that opens what is encrypted of it; none where the VM had none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<KeyReference>,
    /// What is in it; none while it is made, and where an earlier vmseal has made it and its host does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contents: Option<BackupContents>,
}

/// A verification of a backup that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FailedVerification {
    /// When.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// Why, for people.
    pub why: String,
}

/// How a backup stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum BackupState {
    /// A task makes it.
    Creating,
    /// It is whole.
    Ready,
    /// It is removed, or is to be removed again.
    Deleting,
}

/// A core dump of a VM: what the memory of its guest held at one instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Dump {
    /// Its id.
    pub id: DumpId,
    /// Its name, unique within the VM.
    pub name: String,
    /// Its VM, by name.
    pub vm: String,
    /// Its format.
    pub format: DumpFormat,
    /// Why it was written.
    #[serde(default)]
    pub reason: DumpReason,
    /// When it was asked for, or was whole where its host wrote it by itself.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created: Timestamp,
    /// The length of its file; none while a task makes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Whether it is encrypted: that of a VM without a key is not.
    pub encrypted: bool,
}

/// Whether a disk is in its VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DiskAttachment {
    /// It is.
    #[default]
    Attached,
    /// The VM runs without it, and gets it when it is started next.
    AtNextStart,
    /// It is not: it is being added or removed, or a task that did so has failed.
    Detached,
}

impl DiskAttachment {
    /// Whether it is in its VM.
    #[must_use]
    pub fn is_attached(&self) -> bool {
        *self == Self::Attached
    }
}

/// A virtual disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Disk {
    /// Its id.
    pub id: DiskId,
    /// Its name within the VM.
    pub name: String,
    /// The datastore.
    pub datastore: String,
    /// Size in bytes as the guest sees it.
    pub size: u64,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// What it is for.
    #[serde(default)]
    pub role: DiskRole,
    /// When it takes room.
    #[serde(default)]
    pub allocation: Allocation,
    /// What its guest may use of it.
    #[serde(default)]
    pub limits: DiskLimits,
    /// What its filter keeps of it in memory, in bytes; none is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// Where its second copy is kept; none is nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<Replication>,
    /// What the inventory pins of it; none until it is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub facts: Option<DiskFacts>,
    /// Whether it is in its VM.
    #[serde(default, skip_serializing_if = "DiskAttachment::is_attached")]
    pub attachment: DiskAttachment,
    /// How its image was cut into objects when it was made; none where it is in a directory, or that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_layout: Option<ImageLayout>,
    /// How its policy would have it, where that is otherwise: it gets that when its image is made anew, as in a move.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted_image_layout: Option<ImageLayout>,
    /// Where it is encrypted; none of servers of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted_at: Option<EncryptionPlace>,
}

/// A network card.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Nic {
    /// Its id.
    pub id: NicId,
    /// Its name within the VM.
    pub name: String,
    /// Its address.
    pub mac: MacAddress,
    /// What it is to the guest.
    pub model: NicModel,
    /// What it is connected to, as it was asked for.
    pub backend: NicBackend,
    /// Whether it is plugged in.
    pub link: NicLink,
    /// The ports of the host that lead into the guest now, with those that the host chose; empty while the VM does
    /// not run.
    #[serde(default)]
    pub forwards: Vec<PortForward>,
    /// The interface of the host that the guest's frames come out of now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The guest's addresses, as far as its host has seen them or its agent says them; a guest can say any.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub addresses: Vec<IpAddr>,
}

impl Nic {
    /// The ports of the host that lead into the guest: those in force, else those that were asked for, of which port 0 is one that is
    /// chosen when the VM starts.
    #[must_use]
    pub fn ports(&self) -> &[PortForward] {
        match &self.forwards[..] {
            [] => self.backend.forwards(),
            in_force => in_force,
        }
    }
}

/// Something that happened; never changed, kept in order. Every use of a key is one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    /// Its place in the order.
    pub sequence: i64,
    /// When.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// What kind (`key.created`, `key.delivered`, `vm.started`, …).
    pub kind: String,
    /// Who asked for it: a user, or `vmseal` itself.
    pub actor: String,
    /// The resource, by name.
    pub target: String,
    /// What happened, for people; ids, never secrets.
    pub detail: String,
    /// The id of the request that caused it, where one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// What has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ChangeKind {
    /// A host, or its connection.
    Host,
    /// A datastore, or its room.
    Datastore,
    /// A key provider, or its status.
    Provider,
    /// A policy.
    Policy,
    /// A VM or one of its disks, or their state.
    Vm,
    /// A task, or its progress.
    Task,
    /// Something happened.
    Event,
    /// An alarm.
    Alarm,
}

impl ChangeKind {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::Host,
        Self::Datastore,
        Self::Provider,
        Self::Policy,
        Self::Vm,
        Self::Task,
        Self::Event,
        Self::Alarm,
    ];
}

/// The largest change number that there may be: it fits the signed numbers of 64 bits that clients have.
pub const CHANGE_MAX: u64 = i64::MAX as u64;

/// A number that is another one whenever something that the API shows has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Changes {
    /// The number; only whether it is the same says something.
    pub change: u64,
}

/// Something that needs an operator; it goes when its cause goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Alarm {
    /// What kind (`vm-locked`, `filter-died`, `host-disconnected`, …).
    pub code: String,
    /// The resource, by name.
    pub target: String,
    /// Since when.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub since: Timestamp,
    /// What happened and what to do.
    pub detail: String,
    /// Why a key is unavailable, where it is about that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<KeyFault>,
}
