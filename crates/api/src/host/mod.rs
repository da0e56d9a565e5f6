//! The contract between the server and a host's agent.
//!
//! The server calls, the agent answers; an agent never asks for a key, and no request of an agent names a key
//! id. Every call may be repeated: a call that finds its work done already answers as if it had done it. Long
//! work on disks is a job of a task ([`JobSpec`]): it is put, followed in [`JobStatus`], and then committed
//! or cancelled. Starting a VM is also begun by a call, and followed in [`VmState`], which the server reads
//! by long poll.
//!
//! A KEK is sent as a [`SealedKey`]: encrypted to a key pair that the agent makes in locked memory at its
//! start, so that the HTTP and TLS buffers of either side never hold it.
//!
//! ```text
//! GET    /v1/host                          describe
//! GET    /v1/state?incarnation=I&after=N&wait_seconds=S  state: the VMs that changed since generation N of I
//! POST   /v1/datastores                    probe_datastore
//! POST   /v1/datastores/examine            examine_datastore
//! POST   /v1/datastores/examine-disk       examine_disk
//! POST   /v1/datastores/measure            measure_datastore
//! POST   /v1/datastores/share              share_datastore
//! PUT    /v1/datastores/key                offer_pool_key
//! POST   /v1/datastores/remount            remount_datastore
//! POST   /v1/datastores/scan               scan_datastore
//! POST   /v1/datastores/survey             survey_datastore
//! GET    /v1/metrics                       metrics (OpenMetrics text)
//! GET    /v1/usage                         usage
//! GET    /v1/log-level                     log_level
//! PUT    /v1/log-level                     set_log_level
//! POST   /v1/hardware/examine[?memory=N]   examine_hardware
//! POST   /v1/migrations/examine-port       examine_migration_port
//! POST   /v1/fence                         fence_vm
//! PUT    /v1/vms/{vm}                      register_vm
//! DELETE /v1/vms/{vm}                      unregister_vm
//! PUT    /v1/vms/{vm}/key                  offer_key
//! POST   /v1/vms/{vm}/key/check            check_key
//! POST   /v1/vms/{vm}/key/add              add_key
//! POST   /v1/vms/{vm}/key/drop-others      drop_other_keys
//! POST   /v1/vms/{vm}/key/share            share_data_keys
//! POST   /v1/vms/{vm}/measure-kept         measure_kept
//! POST   /v1/vms/{vm}/measure-medium       measure_medium
//! POST   /v1/vms/{vm}/examine-nic          examine_nic
//! POST   /v1/vms/{vm}/examine-job          examine_job
//! POST   /v1/vms/{vm}/examine-change       examine_change
//! PUT    /v1/vms/{vm}/jobs/{task}          put_job
//! GET    /v1/vms/{vm}/jobs/{task}          job
//! PUT    /v1/vms/{vm}/jobs/{task}/pace     set_pace
//! POST   /v1/vms/{vm}/jobs/{task}/commit   commit_job
//! POST   /v1/vms/{vm}/jobs/{task}/cancel   cancel_job
//! DELETE /v1/vms/{vm}/disks/{disk}         delete_disk
//! POST   /v1/vms/{vm}/disks/{disk}/grow    grow_disk
//! GET    /v1/vms/{vm}/disks/{disk}/expose?connect=B&writable=B[&snapshot=ID][&sealed=B]  expose_disk (WebSocket, binary frames)
//! GET    /v1/vms/{vm}/disks/{disk}/bitmaps bitmaps
//! POST   /v1/vms/{vm}/disks/{disk}/bitmaps change_bitmap (body: name and change)
//! GET    /v1/vms/{vm}/disks/{disk}/replica replica
//! POST   /v1/vms/{vm}/power-on             power_on
//! POST   /v1/vms/{vm}/power-on-from        power_on_from
//! POST   /v1/vms/{vm}/power-on-with        power_on_with
//! POST   /v1/vms/{vm}/power-off            power_off
//! POST   /v1/vms/{vm}/suspend              suspend
//! POST   /v1/vms/{vm}/suspend-as           suspend_as
//! DELETE /v1/vms/{vm}/memory               discard_memory
//! DELETE /v1/vms/{vm}/dumps/{dump}         discard_dump
//! POST   /v1/backups/read                  read_backup
//! POST   /v1/backups/discard               discard_backup
//! POST   /v1/vms/{vm}/control              control_guest
//! GET    /v1/vms/{vm}/screen               screen (WebSocket, binary frames)
//! POST   /v1/vms/{vm}/guest                guest
//! GET    /v1/vms/{vm}/console              console (WebSocket, binary frames)
//! ```
//!
//! A request's body is the JSON of the argument that is not in the path (none for power-on and DELETE); an
//! answer's body is the JSON of the result, or empty with status 204. `incarnation` and `after` are given
//! together or not at all.
//!
//! Server and agent may be of different versions of vmseal: [`version`] says how they agree on a version of
//! this contract, and how an older one handles values that it does not know.

pub mod about;
#[cfg(feature = "client")]
mod agent;
pub mod backup;
mod change;
mod description;
pub mod descriptor;
mod disk;
mod fence;
mod job;
mod kept;
mod key;
mod medium;
mod migration;
pub mod proof;
mod state;
pub mod survey;
pub mod version;
mod vm;

use std::time::Duration;

pub use self::about::AboutVm;
pub use self::change::VmChange;
pub use self::description::HostDescription;
pub use self::disk::{
    Allocation, Attachment, BANDWIDTH_MIN, DiskFacts, DiskLimits, DiskRole, DiskSpec, HEADER_AREA,
    IN_PLACE_ROOM, ImageSource, NewDisk, STALL_TIMEOUT, STALL_TIMEOUT_MAX, STALL_TIMEOUT_MIN,
};
pub use self::fence::Fence;
pub use self::job::{
    BackupJob, BackupKey, ConvertJob, CopyOf, CreateJob, DecryptDumpJob, DiskToConvert,
    DiskToCreate, DiskToMirror, DropSnapshotJob, DropSourcesJob, DumpJob, ExportJob, JobKind,
    JobProgress, JobSpec, JobState, JobStatus, LAYERS_MAX, MirrorJob, ProveJob, RestoreBackupJob,
    RestoredFrom, RevertJob, SnapshotJob, Tracked, VerifyBackupJob, export_info,
};
pub use self::kept::{CopyRoom, KeptOfDisk, KeptRoom, PlacedDisk};
pub use self::key::{
    KeyReference, OtherKey, PoolKey, Remount, SealedKey, ShareDataKeys, key_info, pool_key_info,
};
pub use self::medium::MediumFacts;
pub use self::migration::{
    Arrival, ArrivingCopies, ArrivingCopy, Departure, DisksSent, MIGRATION_KEY_LEN,
    MigrationProgress, MigrationSession, ReceiveJob, SealingWork, SendJob, migration_info,
};
pub use self::state::{
    DiskSettings, DiskState, HostState, KeyState, Notice, NoticeCode, Power, StartedWith,
    StateChange, StopReason, Stopped, VmState,
};
pub use self::version::ContractRange;
pub use self::vm::{Device, GuestControl, PowerOff, SHUTDOWN_SECONDS_MAX, SnapshotSpec, VmSpec};
pub use crate::accelerator::{Accelerator, AcceleratorKind};
pub use crate::datastore::{
    DatastoreLocation, DatastoreSpec, DatastoreUsage, LIMIT_MAX, Sharing, SharingStep,
};
pub use crate::nic::{NicSpec, NicState};

#[cfg(feature = "client")]
pub use self::agent::{HostAgent, ShowsCertificate};
#[cfg(feature = "client")]
pub use crate::console::{ConsoleClaim, ConsoleStream};
#[cfg(feature = "client")]
pub use crate::expose::Exposing;

/// The longest that [`HostAgent::state`] waits for changes; below the usual idle time-outs of TCP
/// middleboxes.
pub const STATE_WAIT_MAX: Duration = Duration::from_secs(25);

/// The longest request body between server and agent, in bytes; a VM with the most disks fits well within.
pub const BODY_MAX: usize = 1024 * 1024;
