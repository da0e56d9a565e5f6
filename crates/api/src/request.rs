//! The request bodies of the REST API. Unknown fields are refused, so that a misspelt option is an error and
//! not a silent default.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::boot::{BootDevice, Cdrom};
pub use crate::cloud_init::CloudInit;
use crate::drain::OnDrain;
use crate::dump::DumpFormat;
use crate::hardware::{Hardware, OnCrash};
use crate::host::{ContractRange, DatastoreLocation};
pub use crate::limits::{
    DESCRIPTION_MAX, DISK_SIZE_MAX, LABEL_MAX, LABELS_MAX, MEMORY_MAX, MEMORY_MIN, MEMORY_UNIT,
    VCPUS_MAX,
};
use crate::migration::MigrationEncryption;
use crate::osd_encryption::StatedOsds;
use crate::passphrase::SealedPassphrase;

mod devices;
mod policies;

pub use devices::{AddBitmap, AddDisk, CreateDisk, CreateNic, ExportDisk, ResizeDisk, SetNic};
pub use policies::{AddPolicy, SetPolicy};

/// The longest request body that the REST API accepts, in bytes.
pub const BODY_MAX: usize = 256 * 1024;

/// The most disks of a VM; the filter's limit.
pub const DISKS_MAX: usize = crate::filter::DISKS_MAX;

/// The smallest disk, in bytes.
pub const DISK_SIZE_MIN: u64 = 1 << 20;

/// Changes what a process logs, until it ends.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetLogLevel {
    /// Directives, separated by commas: a level (off, error, warn, info, debug, trace), or TARGET=LEVEL for
    /// crates and modules whose names begin so.
    pub levels: String,
}

/// The default port of an agent.
pub const AGENT_PORT: u16 = 8444;

/// The maximum length of an agent's address, in bytes: a DNS name and a port.
pub const ADDRESS_MAX: usize = 253 + 6;

/// What an agent's address is within [`ADDRESS_MAX`], as a regular expression of ECMA 262. That there is such a port and, in brackets, such an
/// address of IPv6, is not said.
pub const ADDRESS_PATTERN: &str = r"^([A-Za-z0-9.-]+|\[+[0-9A-Fa-f:.]+\]+):[+]?0*[1-9][0-9]{0,4}$";

/// A machine joins as a host. The only request that a join token, not a user, authorizes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct JoinHost {
    /// The one-time token, as `POST /api/v1/hosts/tokens` gave it.
    pub token: String,
    /// The name to be known by.
    pub name: String,
    /// Where the agent will listen (`host:port`); none for the address from which the server sees the request
    /// come, with port 8444.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// A PKCS#10 certificate request (PEM) for the agent's key, which never leaves the host.
    pub certificate_request: String,
    /// The versions of the contract between server and agent that the agent speaks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub contract: Option<ContractRange>,
}

/// What a machine that joined receives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Joined {
    /// The host's certificate (PEM).
    pub certificate: String,
    /// The certificate of the control plane's CA (PEM): the only one the agent trusts.
    pub authority: String,
    /// The host's id.
    pub host: crate::id::HostId,
    /// Where the server will call its agent (`host:port`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
}

/// Changes a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ChangeHost {
    /// Where its agent is called from now on (`host:port`).
    pub address: String,
}

/// Empties a host before maintenance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DrainHost {
    /// How many VMs are sent at a time, at most 16; none is 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel: Option<u32>,
    /// Whether the guests of VMs that cannot be moved are shut down.
    #[serde(default)]
    pub stop_others: bool,
    /// The highest rate at which each VM is sent, in bytes a second; 0, as none, is no limit. At least 1 MiB otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Compresses the memory of VMs before it is encrypted, where that gets it there sooner. How long what is sent becomes tells
    /// who watches the network something of what is in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compress: bool,
}

/// Has VMs placed on a host again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UndrainHost {
    /// Whether the tasks that move or stop its VMs are cancelled.
    #[serde(default)]
    pub cancel: bool,
}

/// Adds a datastore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddDatastore {
    /// Its name.
    pub name: String,
    /// The host that it belongs to, by name or id.
    pub host: String,
    /// Where it is.
    pub location: DatastoreLocation,
    /// The directory is a datastore of an inventory that is lost, with VMs in it: keep its id, so that its VMs can be
    /// adopted. Not needed where it holds no VM.
    #[serde(default)]
    pub existing: bool,
    /// The key of a pool's user, for the server to hold, where its location names no keyring: base64, sealed for `key of
    /// datastore NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<SealedPassphrase>,
    /// What is stated of the OSDs of a pool's cluster: whether they are encrypted. None, as `ask`, has the cluster asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub osd_encryption: Option<StatedOsds>,
    /// The policy, by name or id, for whose disks the pools are made that are not there: with its redundancy, in place of that of
    /// `location.pool.create`, which then names `compression` alone. It must name the failures that disks survive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create_for_policy: Option<String>,
}

/// Shares a datastore with another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ShareDatastore {
    /// The host, by name or id.
    pub host: String,
    /// Where it is on that host; none means the same place as on the host that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub location: Option<DatastoreLocation>,
}

/// Adds a key provider: a native one, or one over KMIP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddProvider {
    /// Its name.
    pub name: String,
    /// The passphrase that seals its key-derivation key, or its client key, from now on; none takes the one that the
    /// server was given as credential `vmseal-provider-NAME`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SealedPassphrase>,
    /// A backup to restore, base64, in place of making a new key; its passphrase is `backup_passphrase`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<String>,
    /// The backup's passphrase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_passphrase: Option<SealedPassphrase>,
    /// The servers of a KMIP provider; none adds a native one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kmip: Option<crate::kmip::AddKmip>,
}

/// Unlocks a provider, or names the passphrase of a backup to be written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct GivePassphrase {
    /// The passphrase.
    pub passphrase: SealedPassphrase,
}

/// Changes a provider's passphrase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ChangePassphrase {
    /// The one that it has; none takes the server's credential.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old: Option<SealedPassphrase>,
    /// The one that it gets.
    pub new: SealedPassphrase,
}

/// A provider's backup, sealed by its own passphrase.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Backup {
    /// The sealed file, base64.
    pub backup: String,
}

/// Verifies a backup: it must open and hold the provider's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct VerifyBackup {
    /// The sealed file, base64.
    pub backup: String,
    /// Its passphrase.
    pub passphrase: SealedPassphrase,
}

/// Makes a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateVm {
    /// Its name.
    pub name: String,
    /// The policy, by name or id.
    pub policy: String,
    /// Virtual processors.
    #[serde(default = "one")]
    pub vcpus: u32,
    /// Memory in bytes, a multiple of 1 MiB.
    pub memory: u64,
    /// The disks, in boot order; all on datastores of one host.
    pub disks: Vec<CreateDisk>,
    /// The host, by name or id, where the datastores are shared by several; none means one that answers, with the most
    /// memory left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// What it is for, at most 4096 bytes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Whether it is started after its host has rebooted, once its key is there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub autostart: bool,
    /// Whether its memory and disks are encrypted while it migrates to another host. Those of a VM with a key always are.
    #[serde(default, skip_serializing_if = "MigrationEncryption::is_usual")]
    pub migration_encryption: MigrationEncryption,
    /// The network cards, in the order in which the guest finds them; none where nothing is said.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<CreateNic>,
    /// What its machine is; where nothing is said, what every VM has.
    #[serde(default, skip_serializing_if = "Hardware::is_usual")]
    pub hardware: Hardware,
    /// What cloud-init in the guest is told at its first boot. It becomes a disk of its own, named `cloud-init`,
    /// on the datastore of the first disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// A file on the host, by absolute path, whose variables of UEFI the VM begins with; none is what the host's firmware begins
    /// with. It is raw, of OVMF's "4M" build (528 KiB), and has keys of secure boot if the VM's firmware is that with secure boot,
    /// and else none.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uefi_variables: Option<PathBuf>,
    /// A file on the host, by absolute path, with what the VM's TPM keeps from the beginning; none is a new, empty TPM. It is what
    /// swtpm keeps of a TPM 2.0, not encrypted: its file `tpm2-00.permall`, or what `swtpm_ioctl --save permanent` writes. The VM's
    /// hardware has a TPM.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm_state: Option<PathBuf>,
}

/// Changes a VM. What is not given stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetVm {
    /// Its name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Virtual processors; of a VM that runs, at its next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// Memory in bytes, a multiple of 1 MiB; of a VM that runs, at its next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// What it is for, at most 4096 bytes; an empty text removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Labels to set, by key; a label without a value is removed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, Option<String>>,
    /// Its CD-ROM drive. A VM gets one while it is off; what is in it may change at any time, and takes effect at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cdrom: Option<Cdrom>,
    /// What its firmware starts from, in this order; of a VM that runs, at its next start. An empty list is the usual
    /// order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<Vec<BootDevice>>,
    /// What its host does when its guest panics; of a VM that runs, at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_crash: Option<OnCrash>,
    /// The format of the core dumps that its host writes then; of a VM that runs, at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crash_dump_format: Option<DumpFormat>,
    /// Whether it is started after its host has rebooted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autostart: Option<bool>,
    /// Whether its memory and disks are encrypted while it migrates to another host. Those of a VM with a key always are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub migration_encryption: Option<MigrationEncryption>,
    /// What happens to it while it runs when its host is emptied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_drain: Option<OnDrain>,
    /// Whether it is a template, which is cloned, and neither started nor changed. A VM that becomes one is off.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<bool>,
    /// Another policy, by name or id, that asks nothing else of disks and keys: their encryption, provider, allocation
    /// and replicas are the same. Its limits and caches become those of the VM's disks, and a processor model that it names that of the
    /// VM, which is off then and has no snapshot with memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}

/// Reboots a VM: its guest shuts down, and is started again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RebootVm {
    /// How long the guest may take to shut down, in seconds, before the task fails and the guest runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

fn one() -> u32 {
    1
}

/// Clones a VM.
#[derive(Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CloneVm {
    /// The clone's name.
    pub name: String,
    /// The snapshot whose disks are copied, by name or id; none means what the disks hold now. Of a VM that runs or is suspended the
    /// task takes a snapshot then, and drops it at its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The host that it is for, by name or id; none means the host of the other VM, which makes it in any case. On another host it has
    /// its disks where both have their datastores, or else they are sent there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The datastore of its host that all of its disks are on, by name or id. Without it each is on the datastore of the disk
    /// that it is a copy of; on another host that lacks one of these, on one that both hosts have, or on that of the other host with
    /// the most free room. What a linked clone shares stays where it is: its data disks are on that datastore already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Whether the clone stands on what the snapshot, which is named then, keeps, instead of having a copy: it shares the data and
    /// the data key (DEK) of its disks with the other VM, under a key-encryption key (KEK) of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub linked: bool,
    /// What cloud-init in the clone reads at its next boot, which counts as its first one. Without it that is what the other VM's
    /// reads, with an instance id and a host name of the clone's; where that reads nothing, the guest is as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// Whether the file systems of a guest that runs are frozen for the instant of the snapshot that the task takes, if its agent
    /// answers.
    #[serde(default = "yes", skip_serializing_if = "is_yes")]
    #[cfg_attr(feature = "openapi", schema(default = true))]
    pub quiesce: bool,
    /// The highest rate at which each disk is copied, in bytes a second; 0, as none, is no limit. At least 1 MiB
    /// otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

/// Takes a snapshot of a VM, off, running or suspended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TakeSnapshot {
    /// Its name; none means the first of `snapshot-1`, `snapshot-2`, … that is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// What it is, at most 4096 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Whether the guest's file systems are frozen for a moment, if its agent answers; else the snapshot is as after a power
    /// cut.
    #[serde(default = "yes")]
    pub quiesce: bool,
    /// Whether the memory of the guest, which runs, is paused or suspended, is kept, too.
    #[serde(default)]
    pub memory: bool,
}

/// Reverts a VM to a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RevertSnapshot {
    /// Whether its guest runs afterwards, and goes on where it was if the snapshot keeps its memory. The power of a VM that runs is cut
    /// first.
    #[serde(default)]
    pub running: bool,
    /// Gives the saved memory of a suspended VM up: it is lost, as far as no snapshot keeps it. Where one does, this need not be said.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discard_memory: bool,
}

impl Default for TakeSnapshot {
    fn default() -> Self {
        Self { name: None, description: None, quiesce: yes(), memory: false }
    }
}

fn yes() -> bool {
    true
}

/// What earlier servers do not know is left out where it asks for nothing.
fn is_yes(asked: &bool) -> bool {
    *asked
}

/// Backs up a VM, which may run or be suspended, to a directory of its host. The saved memory of one that is suspended is not in the backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateBackup {
    /// Its name; none means the first of `backup-1`, `backup-2`, … that is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The absolute path of the directory of backups on the VM's host; none means that of its last backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub directory: Option<PathBuf>,
    /// Whether all of each disk is copied. Else what has changed since the last backup in the directory, if there is one.
    #[serde(default)]
    pub full: bool,
    /// Whether the guest's file systems are frozen for the instant of the backup, if its agent answers.
    #[serde(default = "yes")]
    #[cfg_attr(feature = "openapi", schema(default = true))]
    pub quiesce: bool,
    /// The highest rate at which each disk is read, in bytes a second; 0, as none, is no limit. At least 1 MiB
    /// otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

impl Default for CreateBackup {
    fn default() -> Self {
        Self { name: None, directory: None, full: false, quiesce: true, rate: None }
    }
}

/// Writes a core dump of a VM's guest, which stands still meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TakeDump {
    /// Its name; none means the first of `dump-1`, `dump-2`, … that is free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its format.
    #[serde(default)]
    pub format: DumpFormat,
    /// The absolute path of a file on the host that it is decrypted to as well; nothing is there yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub decrypt_to: Option<PathBuf>,
}

/// Decrypts a core dump to a file of the VM's host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DecryptDump {
    /// The file's absolute path on the host; nothing is there yet.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub to: PathBuf,
}

/// Has a VM's files read and reports whether they are encrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ProveVm {
    /// Whether every byte is read; else a sample of each file.
    #[serde(default)]
    pub all: bool,
    /// What decides which parts of a file are in the sample; none means a random number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seed: Option<u32>,
}

/// Encrypts a VM, off or running.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EncryptVm {
    /// Its policy after that, by name or id: one that encrypts and asks nothing else of it; none means the only such one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// The provider of its key, by name or id; none means the policy's. A VM that has a key keeps it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// The highest rate at which each disk is copied, in bytes a second; 0, as none, is no limit. At
    /// least 1 MiB otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Converts each disk in its own file, where there is no room for a copy: the VM is off, and cannot start before the end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
    /// The disks, by name or id; none means all. Others stay as they are. What is the VM's and no disk of its guest's is
    /// encrypted in any case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<String>,
}

/// Decrypts a VM, off or running; or, with `disks`, some disks of one that stays encrypted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DecryptVm {
    /// Its policy after that, by name or id: one that does not encrypt and asks nothing else of it; none means the only
    /// such one. Not with `disks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// The highest rate at which each disk is copied, in bytes a second; 0, as none, is no limit. At
    /// least 1 MiB otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// Converts each disk in its own file, where there is no room for a copy: the VM is off, and cannot start before the end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
    /// The disks, by name or id; none means all. With some, also with every one, the VM keeps its key and its policy.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<String>,
}

/// Moves disks of a VM, off or running, to another datastore of its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveVm {
    /// The datastore, by name or id.
    pub datastore: String,
    /// The disks, by name or id; none means all, but that of a TPM only of a VM that is off or suspended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<String>,
    /// The highest rate at which each disk is copied, in bytes a second; 0, as none, is no limit. At
    /// least 1 MiB otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
}

/// Moves a VM to another host. While it runs, disks on datastores that the host does not have are copied; a VM that is off or suspended
/// goes only to a host that has all of its datastores.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MigrateVm {
    /// The host, by name or id; none means the one with the most free memory of those that can take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The control plane that the host belongs to, by name or id; none means this one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remote: Option<String>,
    /// The policy that the VM gets at the other control plane, by name or id; none means the one of the same name.
    /// Only with `remote`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
    /// The datastore of that host, by name or id, for copies of disks on datastores that it does not have; none means the one with the
    /// most free room. Only for a VM that runs, or goes to another control plane.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// The highest rate at which memory and disks are sent together, in bytes a second; 0, as none, is no limit. At least 1 MiB
    /// otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// The longest that the guest is to stand still while the rest of its memory is sent, in milliseconds; none means 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub downtime_milliseconds: Option<u32>,
    /// Compresses the memory of a running VM before it is encrypted, where that gets it there sooner. How long what is sent becomes
    /// tells who watches the network something of what is in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compress: bool,
}

/// Gives a VM whose host does not answer to another host that has all of its disks, which are on pools of Ceph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EvacuateVm {
    /// The host, by name or id; none means the one with the most free memory of those that can take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Leaves it off there; otherwise it is started if it ran when its host was last heard.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_start: bool,
}

/// Gives a VM that is off another KEK; or, with `deep`, the disks of a VM new data keys.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RecryptVm {
    /// The provider of the new key, by name or id; none means the one that the VM's key is of. Not with `deep`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provider: Option<String>,
    /// Encrypts all data again, with new data keys under the KEK that the VM has. The VM may run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deep: bool,
    /// The highest rate at which each disk is copied, in bytes a second; only with `deep`. 0, as none, is no limit. At
    /// least 1 MiB otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<u64>,
    /// With `deep`: encrypts each disk in its own file, where there is no room for a copy: the VM is off, and cannot start before the end.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_place: bool,
    /// With `deep`: the disks, by name or id; none means all, but that of a TPM only of a VM that is off or suspended, and not in place.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<String>,
}

/// Changes a task that copies disks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetTask {
    /// The highest rate at which each disk is copied from now on, in bytes a second; 0 is no limit. At
    /// least 1 MiB otherwise.
    pub rate: u64,
}

/// Restores a backup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RestoreBackup {
    /// Another name for a VM that was deleted and is made again; without it, it has the name that it had. Not
    /// with `new_vm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The name of a new VM that is made of the backup, beside the one that was backed up and whatever that is: with an id, a key,
    /// network addresses and a TPM of its own. Its disks keep the data keys (DEKs) that are in the backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_vm: Option<String>,
    /// Another host that has the backup's directory, by name or id, for a VM that was deleted or is new; without it, the one that has
    /// read the backup before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// A datastore of that host, by name or id, for all disks of such a VM; without it, they are where they were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Another policy for such a VM, by name or id, which encrypts if the backup is encrypted; without it, the one that the VM had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<String>,
}

/// Starts a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StartVm {
    /// What its firmware tries first this time, and not when the guest is reset or reboots.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_once: Option<BootDevice>,
    /// Gives the saved memory of a suspended VM up: it boots from its disks, which are as a power cut would have left them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub discard_memory: bool,
}

/// Has the guest of a suspended VM go on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ResumeVm {
    /// Takes the memory that is there, also where it is not the one that was saved last: for disks that were put back with it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_memory: bool,
}

/// Stops a VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct StopVm {
    /// Cut the power instead of asking the guest to shut down.
    #[serde(default)]
    pub force: bool,
    /// How long the guest may take to shut down, in seconds, before the task fails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u32>,
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json, to_value};

    use super::*;

    /// A server of an earlier version refuses what it does not know, and is asked for nothing that a new VM has there anyway.
    #[test]
    fn a_new_vm_asks_earlier_servers_for_nothing_that_is_usual() {
        let usual =
            json!({ "name": "web", "policy": "plain", "vcpus": 1, "memory": 1 << 25, "disks": [] });
        let asked: CreateVm = from_value(usual.clone()).unwrap();
        assert_eq!(asked.migration_encryption, MigrationEncryption::Opportunistic);
        assert_eq!(to_value(&asked).unwrap(), usual);
        for mode in [MigrationEncryption::Disabled, MigrationEncryption::Required] {
            let other = CreateVm { migration_encryption: mode, ..asked.clone() };
            let sent = to_value(&other).unwrap();
            assert_eq!(sent["migration_encryption"], mode.name());
            assert_eq!(from_value::<CreateVm>(sent).unwrap(), other);
        }
        let mut unknown = usual;
        unknown["of_a_later_version"] = json!(true);
        assert!(from_value::<CreateVm>(unknown).is_err(), "it is ignored");
    }
}
