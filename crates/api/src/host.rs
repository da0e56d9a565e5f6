//! The contract between the server and a host's agent.
//!
//! The server calls, the agent answers; an agent never asks for a key, and no request of an agent
//! names a key id. Every call may be repeated: a call that finds its work done already answers as if it
//! had done it. Long work (making a disk, starting a VM) is begun by a call and followed in
//! [`HostState`], which the server reads by long poll.
//!
//! A KEK crosses as a [`SealedKey`]: encrypted to a key pair that the agent makes in locked memory at
//! its start, so that neither side's HTTP and TLS buffers ever hold it.
//!
//! ```text
//! GET    /v1/host                          describe
//! GET    /v1/state?incarnation=I&after=N&wait_seconds=S  state, at once if it is newer than N of I
//! POST   /v1/datastores                    probe_datastore
//! POST   /v1/datastores/examine            examine_datastore
//! POST   /v1/datastores/examine-disk       examine_disk
//! POST   /v1/datastores/measure            measure_datastore
//! POST   /v1/datastores/scan               scan_datastore
//! GET    /v1/metrics                       metrics (OpenMetrics text)
//! GET    /v1/log-level                     log_level
//! PUT    /v1/log-level                     set_log_level
//! PUT    /v1/vms/{vm}                      register_vm
//! DELETE /v1/vms/{vm}                      unregister_vm
//! PUT    /v1/vms/{vm}/key                  offer_key
//! POST   /v1/vms/{vm}/key/check            check_key
//! POST   /v1/vms/{vm}/key/add              add_key
//! POST   /v1/vms/{vm}/key/drop-others      drop_other_keys
//! PUT    /v1/vms/{vm}/disks/{disk}         create_disk
//! DELETE /v1/vms/{vm}/disks/{disk}         delete_disk
//! POST   /v1/vms/{vm}/disks/{disk}/export  export_disk
//! GET    /v1/vms/{vm}/disks/{disk}/expose?connect=B&writable=B  expose_disk (WebSocket, binary frames)
//! GET    /v1/vms/{vm}/disks/{disk}/bitmaps bitmaps
//! POST   /v1/vms/{vm}/disks/{disk}/bitmaps change_bitmap (body: name and change)
//! GET    /v1/vms/{vm}/disks/{disk}/replica replica
//! POST   /v1/vms/{vm}/power-on             power_on
//! POST   /v1/vms/{vm}/power-off            power_off
//! GET    /v1/vms/{vm}/console              console (WebSocket, binary frames)
//! ```
//!
//! A request's body is the JSON of the argument that is not in the path (for `create_disk` an
//! [`ImageSource`] or `null`; none for power-on and DELETE); an answer's is the JSON of the result, with
//! 204 and no body where there is none. `incarnation` and `after` come together or not at all.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use crate::accelerator::{Accelerator, AcceleratorKind};
use crate::id::{DatastoreId, DiskId, Incarnation, ProviderId, TaskId, VmId};
use crate::problem::Problem;
use crate::replica::ReplicaPlace;
use crate::transfer::{ExportFormat, ImageFormat};

/// The version of this contract; the server refuses an agent of another version.
pub const VERSION: u32 = 1;

/// The longest that [`HostAgent::state`] waits for news; below the usual idle time-outs of TCP middleboxes.
pub const STATE_WAIT_MAX: Duration = Duration::from_secs(25);

/// The longest that a guest may be given to shut down, in seconds: databases flush for minutes, not hours.
pub const SHUTDOWN_SECONDS_MAX: u32 = 3600;

/// The longest request body between server and agent, in bytes; a VM with the most disks fits well within.
pub const BODY_MAX: usize = 1024 * 1024;

/// What a host is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HostDescription {
    /// [`VERSION`] of the agent.
    pub contract: u32,
    /// The version of vmseal that the agent is.
    pub vmseal: String,
    /// The life of the agent process that answers; with a new one all keys are gone.
    pub incarnation: Incarnation,
    /// What the machine calls itself.
    pub hostname: String,
    /// The public half of the key pair that KEKs are sealed to (X25519, 32 bytes, base64).
    pub key_box: String,
    /// How guests are run here, found by running one.
    pub accelerator: Accelerator,
    /// QEMU's version.
    pub qemu: String,
    /// Logical processors.
    pub cpus: u32,
    /// Memory, in bytes.
    pub memory: u64,
    /// Whether the processor has AES instructions.
    pub aes_hardware: bool,
    /// Where the sockets of the disks of running VMs are, each at `vms/VM/diskN.sock` in it, in boot order.
    pub run_dir: String,
    /// The directories that images may be imported from and exported to.
    #[serde(default)]
    pub transfer_directories: Vec<String>,
    /// What could not be protected on this host as it should be (swap in the clear, memory not lockable).
    pub weaknesses: Vec<String>,
}

/// A place for disks, as an agent needs to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DatastoreSpec {
    /// Which datastore; written into it at the first use, so that another (or an unmounted) one is noticed.
    pub datastore: DatastoreId,
    /// Where it is.
    pub location: DatastoreLocation,
}

/// Where a datastore is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum DatastoreLocation {
    /// A directory that belongs to one host.
    Dir {
        /// Its absolute path on the host.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        path: PathBuf,
    },
}

/// Room in a datastore, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DatastoreUsage {
    /// In all.
    pub capacity: u64,
    /// Free for the agent.
    pub free: u64,
}

/// Which key of which provider, and how to know that it is the right one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct KeyReference {
    /// The provider.
    pub provider: ProviderId,
    /// The key's id at the provider.
    pub key_id: String,
    /// The check value: 128 bits derived from the key, in hexadecimal.
    pub check: String,
}

/// A KEK, encrypted to an agent's key box (HPKE base mode, X25519, HKDF-SHA256, AES-256-GCM; the info
/// string is [`key_info`]).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SealedKey {
    /// The key box it is sealed to; an agent that has restarted since answers `wrong-state`.
    pub key_box: String,
    /// The sealed box, base64.
    pub sealed: String,
}

/// Another KEK for a VM's disks, beside the one that it is registered with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherKey {
    /// The one that it is registered with.
    pub beside: KeyReference,
    /// The other one.
    pub key: KeyReference,
    /// The other KEK, sealed as [`key_info`] of `key` has it.
    pub sealed: SealedKey,
}

/// What a KEK is bound to when it is sealed for an agent: it cannot be offered as another VM's or as
/// another key.
#[must_use]
pub fn key_info(vm: VmId, key: &KeyReference) -> Vec<u8> {
    format!("vmseal kek v1\0{vm}\0{}\0{}\0{}", key.provider, key.check, key.key_id).into_bytes()
}

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
    /// Its KEK; none when nothing of it is encrypted.
    pub key: Option<KeyReference>,
    /// Its disks, in boot order.
    pub disks: Vec<DiskSpec>,
}

/// A disk as a host opens it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Which disk.
    pub disk: DiskId,
    /// Its name within the VM.
    pub name: String,
    /// Where it is kept.
    pub datastore: DatastoreSpec,
    /// What the guest sees as its size, in bytes; a multiple of 4096.
    pub size: u64,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// Whether its room is taken when it is made.
    #[serde(default)]
    pub allocation: Allocation,
    /// What its guest may use of it.
    #[serde(default)]
    pub limits: DiskLimits,
    /// What its filter keeps of it in memory, in bytes ([`crate::filter::check_caches`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<u64>,
    /// Where a second copy of it is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<ReplicaPlace>,
    /// What the inventory knows of the finished disk; none until it has been made.
    pub facts: Option<DiskFacts>,
}

/// When a disk takes room on its datastore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Allocation {
    /// As it is written to; what the guest discards is given back.
    #[default]
    Thin,
    /// All of it when it is made; a discard gives nothing back.
    Preallocated,
}

/// The least bandwidth that a disk can be limited to, in bytes a second: one request of 64 KiB each second. A
/// guest that boots from less is taken for one that hangs.
pub const BANDWIDTH_MIN: u64 = 64 * 1024;

/// The highest limit, of either kind: more than any datastore gives.
pub const LIMIT_MAX: u64 = 1 << 40;

/// What a guest may use of a disk; none means that it is not limited. After a pause, a tenth of a second's
/// worth goes at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DiskLimits {
    /// Requests a second, from 1 to [`LIMIT_MAX`]; flushes do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes read and written a second, from [`BANDWIDTH_MIN`] to [`LIMIT_MAX`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
}

impl DiskLimits {
    /// Checks the ranges.
    ///
    /// # Errors
    /// The field that is out of range, and what it may be.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let outside =
            |value: Option<u64>, least| value.is_some_and(|it| !(least..=LIMIT_MAX).contains(&it));
        if outside(self.iops, 1) {
            return Err((
                "limits.iops",
                format!("must be from 1 to {LIMIT_MAX} requests a second"),
            ));
        }
        if outside(self.bandwidth, BANDWIDTH_MIN) {
            let what = format!("must be from {BANDWIDTH_MIN} to {LIMIT_MAX} bytes a second");
            return Err(("limits.bandwidth", what));
        }
        Ok(())
    }
}

/// What the inventory pins of a disk: opening it compares the datastore with this.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "format", rename_all = "snake_case", deny_unknown_fields)]
pub enum DiskFacts {
    /// A raw image in the clear.
    Raw,
    /// LUKS2 as docs/formats/disk.md has it.
    Luks2 {
        /// The version of the `vmseal` token.
        version: u32,
        /// dm-crypt's name of the cipher.
        cipher: String,
        /// Length of the volume key in bits.
        key_bits: u32,
        /// The encryption unit in bytes.
        sector_size: u32,
        /// Where the data segment begins, in bytes.
        data_offset: u64,
    },
}

/// An image on the host to fill a new disk from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSource {
    /// Its absolute path on the host; a regular file whose disk is not longer than the new one.
    pub path: PathBuf,
    /// What it is; never guessed.
    pub format: ImageFormat,
}

/// A disk that is not made yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewDisk {
    /// What it is to be.
    pub disk: DiskSpec,
    /// What it is to be filled from.
    pub source: Option<ImageSource>,
}

/// What to do about an export. A file is whole before it has its name: written and flushed beside it
/// first, and renamed in a step of its own, so that whoever asked knows for certain how far it is.
///
/// ```text
/// Begin ─► Writing ─► Written ─ Finish ─► the file has its name
///             └──────────┴───── Drop ───► nothing is left
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportStep {
    /// To see whether it could be begun. Nothing is.
    Check,
    /// To write it; follow [`ExportState`].
    Begin,
    /// To give the file its name. One that has it already is left as it is.
    Finish,
    /// To stop writing, and to remove what has been written and has no name yet.
    Drop,
}

/// An export of a disk of a VM that is off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportSpec {
    /// Which one: the server's task.
    pub export: TaskId,
    /// The file's absolute path on the host; nothing is there yet.
    pub to: PathBuf,
    /// What is written.
    pub format: ExportFormat,
    /// The passphrase of a LUKS2 file, sealed to the agent's key box ([`export_info`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SealedKey>,
}

/// What a passphrase of an export is bound to when it is sealed for an agent.
#[must_use]
pub fn export_info(vm: VmId, disk: DiskId) -> Vec<u8> {
    format!("vmseal export passphrase v1\0{vm}\0{disk}").into_bytes()
}

/// How an export stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportState {
    /// Which one.
    pub export: TaskId,
    /// Of which disk.
    pub disk: DiskId,
    /// What is so.
    pub phase: ExportPhase,
}

/// What is so of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ExportPhase {
    /// It is being written.
    Writing {
        /// Bytes of the disk dealt with.
        done: u64,
        /// Bytes of the disk.
        total: u64,
    },
    /// It is whole and flushed, and has no name yet.
    Written,
    /// It could not be written; what had been is removed.
    Failed {
        /// Why.
        problem: Problem,
    },
}

/// How a host stands. The server compares it with what it wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostState {
    /// The life of the agent.
    pub incarnation: Incarnation,
    /// Grows with every change within one incarnation.
    pub version: u64,
    /// The registered VMs, and those found running.
    pub vms: Vec<VmState>,
}

/// How a VM stands on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmState {
    /// Which VM.
    pub vm: VmId,
    /// Whether it runs.
    pub power: Power,
    /// Whether its key is there.
    pub key: KeyState,
    /// Why it last stopped, or could not start; none until then.
    pub stopped: Option<Stopped>,
    /// Its last end that nobody wished for ([`StopReason::is_death`]), until it runs again: an alarm. The
    /// host keeps it across restarts of the agent.
    #[serde(default)]
    pub died: Option<Stopped>,
    /// Its disks, as far as this agent has made or opened them.
    pub disks: Vec<DiskState>,
    /// What needs an operator's eye and does not stop the VM.
    pub notices: Vec<Notice>,
    /// The last export of each disk, as far as this agent has been asked for one.
    #[serde(default)]
    pub exports: Vec<ExportState>,
    /// The id of the request that it was last started or stopped for; none when it did so of itself.
    #[serde(default)]
    pub request_id: Option<String>,
}

/// Whether a VM runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Power {
    /// No process of it lives.
    Off,
    /// Its processes are being started.
    Starting,
    /// The guest runs.
    Running,
    /// It has been asked to stop.
    Stopping,
}

/// Whether a VM's KEK is on its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum KeyState {
    /// Nothing of the VM is encrypted.
    NotNeeded,
    /// It is there, and it is the right one.
    Held,
    /// It is not there: the VM is locked.
    Missing,
}

/// Why a VM stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stopped {
    /// When.
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at: Timestamp,
    /// Why.
    pub reason: StopReason,
    /// The same for people, with what to do where something is to be done.
    pub detail: String,
}

/// The kinds of end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum StopReason {
    /// The guest powered itself off, by its own or an operator's wish.
    GuestShutdown,
    /// An operator cut the power.
    PoweredOff,
    /// The guest's firmware or kernel asked QEMU to end in an abnormal way.
    GuestPanicked,
    /// The filter process died; the VM was stopped so that it writes nothing it believes written.
    FilterDied,
    /// QEMU died.
    QemuDied,
    /// It could not be started.
    FailedToStart,
    /// The agent restarted and found the VM half-started or gone.
    FoundDead,
}

impl StopReason {
    /// Whether it is the death of a VM's process, as against an end that the guest or an operator made.
    #[must_use]
    pub fn is_death(self) -> bool {
        match self {
            Self::FilterDied | Self::QemuDied | Self::FoundDead => true,
            Self::GuestShutdown | Self::PoweredOff | Self::GuestPanicked | Self::FailedToStart => {
                false
            }
        }
    }
}

/// How a disk stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskState {
    /// Which disk.
    pub disk: DiskId,
    /// What is so.
    pub phase: DiskPhase,
}

/// What is so of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum DiskPhase {
    /// It is being made.
    Creating {
        /// Bytes of the source image dealt with.
        done: u64,
        /// Bytes of the source image; 0 without one.
        total: u64,
    },
    /// It is whole.
    Ready {
        /// What the inventory is to pin.
        facts: DiskFacts,
    },
    /// It could not be made; what had been made is removed.
    Failed {
        /// Why.
        problem: Problem,
    },
}

/// Something that an operator should see.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// What kind.
    pub code: NoticeCode,
    /// Which disk, where it is about one.
    pub disk: Option<DiskId>,
    /// What happened and what to do.
    pub detail: String,
}

/// The kinds of notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum NoticeCode {
    /// One copy of a disk's header is damaged; the other one serves.
    HeaderCopyDamaged,
    /// The name of a disk's image leads to another file than the VM uses, or to none.
    ImageExchanged,
    /// A disk answers errors.
    DiskErrors,
    /// A disk's second copy is not kept up, or cannot be.
    ReplicaBehind,
    /// The VM's filter process died; its guest waits for another one.
    DisksDown,
    /// The VM's filter process died and another one serves its disks; nothing is lost.
    FilterRestarted,
    /// The VM runs, and the agent that was started meanwhile cannot take it over.
    NotAdopted,
}

/// How to power off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "snake_case", deny_unknown_fields)]
pub enum PowerOff {
    /// The ACPI power button; the call answers at once, and the guest may take its time or refuse.
    Shutdown {
        /// How long it counts as stopping; then it is taken to run on. At most [`SHUTDOWN_SECONDS_MAX`].
        seconds: u32,
    },
    /// The plug: answers when the processes are gone.
    Force,
}

#[cfg(feature = "client")]
pub use crate::console::{ConsoleClaim, ConsoleStream};
#[cfg(feature = "client")]
pub use crate::expose::Exposing;
#[cfg(feature = "client")]
pub use service::HostAgent;

#[cfg(feature = "client")]
mod service {
    use super::*;
    use crate::datastore::{DatastoreCondition, DatastoreContents};
    use crate::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
    use crate::model::LogLevel;
    use async_trait::async_trait;

    /// What an agent does; the real host, the simulated one and the HTTPS client are behind this trait.
    #[async_trait]
    pub trait HostAgent: crate::client::ShowsCertificate + Send + Sync {
        /// What this host is.
        async fn describe(&self) -> Result<HostDescription, Problem>;

        /// How it stands: when newer than `after` (none of another incarnation), or after `wait` (≤ [`STATE_WAIT_MAX`]).
        async fn state(
            &self,
            after: Option<(Incarnation, u64)>,
            wait: Duration,
        ) -> Result<HostState, Problem>;

        /// Makes the datastore known: marks it with its id at the first use, and measures it.
        ///
        /// # Errors
        /// `key-mismatch` is never answered; `wrong-state` when the place carries another datastore's mark.
        async fn probe_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem>;

        /// Answers as [`HostAgent::probe_datastore`] would, and changes nothing.
        ///
        /// # Errors
        /// Those of [`HostAgent::probe_datastore`].
        async fn examine_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem>;

        /// Looks whether a disk could be made: its datastore, its image, and the room that it needs at once. No
        /// VM and no key are needed, and nothing is changed.
        ///
        /// # Errors
        /// What [`HostAgent::create_disk`] would end with.
        async fn examine_disk(&self, disk: NewDisk) -> Result<(), Problem>;

        /// How a datastore stands. Nothing is written to it; half-made disks that nobody goes on with are
        /// removed from it now and then.
        async fn measure_datastore(
            &self,
            spec: DatastoreSpec,
        ) -> Result<DatastoreCondition, Problem>;

        /// Looks at what is on a datastore. Nothing is changed on it.
        ///
        /// # Errors
        /// `wrong-state` when the place does not carry the datastore's mark.
        async fn scan_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreContents, Problem>;

        /// What agent and filters have measured, as OpenMetrics text.
        async fn metrics(&self) -> Result<String, Problem>;

        /// What the agent logs.
        async fn log_level(&self) -> Result<LogLevel, Problem>;

        /// Has the agent and the filters of its VMs log this, those that start later too, until the agent ends.
        ///
        /// # Errors
        /// `invalid-request` for what are no levels: nothing is changed.
        async fn set_log_level(&self, levels: String) -> Result<LogLevel, Problem>;

        /// Makes a VM known, or replaces what is known of one that is off.
        async fn register_vm(&self, spec: VmSpec) -> Result<(), Problem>;

        /// Forgets a VM that is off, and its key.
        async fn unregister_vm(&self, vm: VmId) -> Result<(), Problem>;

        /// Gives the host a VM's KEK; it is compared with the check value of the registered key
        /// reference.
        ///
        /// # Errors
        /// `key-mismatch` for another key; `wrong-state` when it is sealed to an earlier incarnation.
        async fn offer_key(&self, vm: VmId, key: SealedKey) -> Result<(), Problem>;

        /// Sees that every encrypted disk of a VM that is off is there and opens with the KEK that the VM is
        /// registered with, which has to be `key`. Nothing is written.
        ///
        /// # Errors
        /// `wrong-state` while the VM is not off, or registered with another key; `locked` without the
        /// KEK; what opening a disk refuses.
        async fn check_key(&self, vm: VmId, key: KeyReference) -> Result<(), Problem>;

        /// Lets every encrypted disk of a VM that is off open with another KEK, too: on the datastore, and
        /// read back from it, when this answers. A third one that an earlier attempt left is dropped.
        /// Nothing is written unless all disks open with the registered KEK.
        ///
        /// # Errors
        /// As [`HostAgent::check_key`]; `key-mismatch` when the other key is not what its reference says;
        /// `wrong-state` when it is sealed to an earlier incarnation.
        async fn add_key(&self, vm: VmId, other: OtherKey) -> Result<(), Problem>;

        /// Leaves the registered KEK, which has to be `keep`, as the only one that opens the encrypted disks
        /// of a VM that is off. Nothing is written unless all of them open with it.
        ///
        /// # Errors
        /// As [`HostAgent::check_key`].
        async fn drop_other_keys(&self, vm: VmId, keep: KeyReference) -> Result<(), Problem>;

        /// Begins to make a disk of a registered VM, filled from `source` where one is given; follow
        /// [`DiskState`]. A disk that is there and whole becomes `Ready` without being touched.
        ///
        /// # Errors
        /// `locked` when the disk is to be encrypted and the KEK is not there.
        async fn create_disk(
            &self,
            vm: VmId,
            disk: DiskId,
            source: Option<ImageSource>,
        ) -> Result<(), Problem>;

        /// Removes a disk's file, made or half-made; works without the key.
        ///
        /// # Errors
        /// `in-use` while the VM runs or the file is locked.
        async fn delete_disk(&self, vm: VmId, disk: DiskId) -> Result<(), Problem>;

        /// Takes a step of an export; each may be repeated.
        ///
        /// # Errors
        /// `in-use` while the VM is not off; `locked` without the KEK; `already-exists` when the file is
        /// there; `wrong-state` when the passphrase is sealed to an earlier incarnation. To drop: `already-exists`
        /// when it has its name, or when that cannot be told any more;
        /// `not-found` when there is nothing without a name.
        async fn export_disk(
            &self,
            vm: VmId,
            disk: DiskId,
            step: ExportStep,
            spec: ExportSpec,
        ) -> Result<(), Problem>;

        /// Exposes a disk over NBD to whoever has the stream, or opens a connection to one that is exposed.
        /// A disk of a VM that is off is served by a filter of its own, and the VM does not start meanwhile;
        /// one that is in use is read beside the guest.
        ///
        /// # Errors
        /// To hold: `in-use` while it is exposed or exported, and to change it while the VM is not off;
        /// `locked` without the KEK; `wrong-state` before it is made. To connect: `wrong-state` while it is
        /// not exposed.
        async fn expose_disk(
            &self,
            vm: VmId,
            disk: DiskId,
            what: Exposing,
        ) -> Result<ConsoleStream, Problem>;

        /// The dirty bitmaps of a disk in use. They end with the filter that serves it: with the VM, and
        /// when another filter takes its place.
        ///
        /// # Errors
        /// `wrong-state` while the VM does not run, or waits for a filter.
        async fn bitmaps(&self, vm: VmId, disk: DiskId) -> Result<Vec<BitmapStatus>, Problem>;

        /// Starts, clears or removes one of them; gives those that there are then. To repeat it is not to do
        /// it once: one that is started again is refused, and one that is cleared again forgets more.
        ///
        /// # Errors
        /// As [`HostAgent::bitmaps`], and those of [`crate::bitmap::BitmapError`].
        async fn change_bitmap(
            &self,
            vm: VmId,
            disk: DiskId,
            name: String,
            change: BitmapChange,
        ) -> Result<Vec<BitmapStatus>, Problem>;

        /// How the replica of a disk in use stands.
        ///
        /// # Errors
        /// `wrong-state` as [`HostAgent::bitmaps`], and where the disk has none or is served without it.
        async fn replica(&self, vm: VmId, disk: DiskId) -> Result<ReplicaStatus, Problem>;

        /// Begins to start a registered VM; follow [`VmState`].
        ///
        /// # Errors
        /// `locked` without its KEK; `wrong-state` while it is stopping.
        async fn power_on(&self, vm: VmId) -> Result<(), Problem>;

        /// Stops a VM; one that is off stays off.
        async fn power_off(&self, vm: VmId, how: PowerOff) -> Result<(), Problem>;

        /// The guest's serial console, which one client has at a time. Who loses it to another one reads
        /// [`crate::console::is_taken_over`].
        ///
        /// # Errors
        /// `wrong-state` while the VM does not run; `in-use` while a client has it that it is not to be
        /// taken over from.
        async fn console(&self, vm: VmId, claim: ConsoleClaim) -> Result<ConsoleStream, Problem>;
    }
}
