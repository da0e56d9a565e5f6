//! The calls of the server to an agent.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;

use super::change::VmChange;
use super::description::HostDescription;
use super::disk::NewDisk;
use super::fence::Fence;
use super::job::{JobSpec, JobStatus};
use super::kept::{KeptRoom, PlacedDisk};
use super::key::{KeyReference, OtherKey, PoolKey, Remount, SealedKey, ShareDataKeys};
use super::medium::MediumFacts;
use super::state::{HostState, StateChange};
use super::survey::DatastoreSurvey;
use super::vm::{GuestControl, PowerOff, VmSpec};
use crate::boot::BootDevice;
use crate::console::{ConsoleClaim, ConsoleStream};
use crate::datastore::{
    DatastoreCondition, DatastoreContents, DatastoreLocation, DatastoreSpec, DatastoreUsage,
    Sharing,
};
use crate::expose::Exposing;
use crate::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
use crate::guest::{GuestAnswer, GuestCommand};
use crate::hardware::Hardware;
use crate::host::backup::{BackupManifest, BackupPlace};
use crate::id::{DiskId, DumpId, Incarnation, TaskId, VmId};
use crate::log_level::LogLevel;
use crate::nic::NicSpec;
use crate::pace::CopyPace;
use crate::problem::{ErrorCode, Problem};
use crate::usage::HostUsage;

/// A peer that may have presented a certificate: an agent behind TLS.
pub trait ShowsCertificate {
    /// The certificate (DER) of its last connection; none before the first one.
    fn certificate(&self) -> Option<Vec<u8>> {
        None
    }
}

/// The calls to an agent; the real host, the simulated one and the HTTPS client implement them.
#[async_trait]
pub trait HostAgent: ShowsCertificate + Send + Sync {
    /// Describes the host.
    async fn describe(&self) -> Result<HostDescription, Problem>;

    /// The changes since generation `after`, as soon as there are any, at the latest after `wait` (≤
    /// [`STATE_WAIT_MAX`](super::STATE_WAIT_MAX)): the VMs that changed and those that are gone. The full
    /// state where `after` is none, of another incarnation, or too old.
    async fn state(
        &self,
        after: Option<(Incarnation, u64)>,
        wait: Duration,
    ) -> Result<StateChange, Problem>;

    /// The full state of the host.
    ///
    /// # Errors
    /// Those of [`HostAgent::state`].
    async fn state_now(&self) -> Result<HostState, Problem> {
        self.state_after(None, Duration::ZERO).await
    }

    /// The state of the host, as soon as it is not `last`, at the latest after `wait`.
    ///
    /// # Errors
    /// Those of [`HostAgent::state`]; `internal` when the agent returns changes since another state.
    async fn state_after(
        &self,
        last: Option<&HostState>,
        wait: Duration,
    ) -> Result<HostState, Problem> {
        let change = self.state(last.map(HostState::known), wait).await?;
        HostState::changed(last, change).ok_or_else(|| {
            let what = "the agent returned changes since a state that it was not asked about";
            Problem::new(ErrorCode::Internal, what)
        })
    }

    /// Makes the datastore known: marks it with its id at the first use, and measures it.
    ///
    /// # Errors
    /// `key-mismatch` is never answered; `wrong-state` when the place carries another datastore's mark.
    async fn probe_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem>;

    /// Like [`HostAgent::probe_datastore`], without changing anything.
    ///
    /// # Errors
    /// Those of [`HostAgent::probe_datastore`].
    async fn examine_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreUsage, Problem>;

    /// Takes a step of the check whether two hosts can share a datastore ([`Sharing`]), or marks it as shared. Agents
    /// without the feature [`SHARED_DATASTORES`](super::version::SHARED_DATASTORES) do not know it.
    ///
    /// # Errors
    /// `wrong-state` when the place does not carry the datastore's mark, or its files are not those of the other host, or
    /// the lock is not held any more; `unsupported` where locks do not reach other hosts.
    async fn share_datastore(&self, sharing: Sharing) -> Result<(), Problem>;

    /// Gives the host the key of a pool that it mounts, or has it forget it. It is held until the agent ends; a pool that is mounted
    /// stays so. Agents without the feature [`POOL_KEYS`](super::version::POOL_KEYS) do not know it.
    ///
    /// # Errors
    /// `wrong-state` when it is sealed to an earlier incarnation; `invalid-request` when it is for another mount, or no key.
    async fn offer_pool_key(&self, offered: PoolKey) -> Result<(), Problem>;

    /// Has another process serve a pool that is mounted, after the cluster has taken the key that it is to use. Guests with disks there stand
    /// still for a second or two. With a key in the request only that is tried, whatever the mount uses. Returns the fingerprint of the key
    /// that the mount uses, where what serves it says that, and none where another one was tried. Agents without the
    /// feature [`REMOUNT_POOLS`](super::version::REMOUNT_POOLS) do not know it.
    ///
    /// # Errors
    /// `unreachable` where the cluster refuses the key or does not answer, `timed-out` where the process does not: the pool stays mounted as
    /// it is. `wrong-state` for a directory, or where the process does not say which one it is. An error after the process has ended: the pool is mounted when it is needed next.
    async fn remount_datastore(&self, remount: Remount) -> Result<Option<String>, Problem>;

    /// Takes the disks of a VM, on pools of Ceph, from a host that does not answer, before they are opened here: the lease of the VM's disks is
    /// taken, and then the cluster takes nothing any more from processes of other hosts that have one of its images open to be written. It
    /// may be done again, also while the VM runs here. Agents without the feature [`FENCE_VMS`](super::version::FENCE_VMS) do not know it.
    ///
    /// # Errors
    /// `wrong-state` where a disk is on a directory; `conflict` where a later placement has the lease; `unsupported` where a `vmseal-rbd` of
    /// an earlier version serves the pool; those of the cluster.
    async fn fence_vm(&self, fence: Fence) -> Result<(), Problem>;

    /// Checks whether a disk could be made: its datastore, its image, and the room that it needs at once. No
    /// VM and no key are needed, and nothing is changed.
    ///
    /// # Errors
    /// The error that a [`CreateJob`](super::CreateJob) would end with.
    async fn examine_disk(&self, disk: NewDisk) -> Result<(), Problem>;

    /// The condition of a datastore. Nothing is written to it; abandoned half-made disks are removed from it
    /// now and then.
    async fn measure_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreCondition, Problem>;

    /// Measures what these disks of a VM take beside what they are now: what snapshots keep of them, and saved memory beside them. The VM
    /// need not be known, and nothing is changed. Agents without the feature [`MEASURE_KEPT`](super::version::MEASURE_KEPT) do not know it.
    ///
    /// # Errors
    /// `damaged`; those of the file systems.
    async fn measure_kept(&self, vm: VmId, disks: Vec<PlacedDisk>) -> Result<KeptRoom, Problem>;

    /// Measures a file as a medium of a VM's CD-ROM drive, so that it can be compared with the file of this path on another host. The VM
    /// need not be known. Where its guest runs here, it must have this file open. Agents without the feature
    /// [`MEASURE_MEDIUM`](super::version::MEASURE_MEDIUM) do not know it.
    ///
    /// # Errors
    /// `invalid-request`: the file is not there, or no medium; `wrong-state`: the guest has another file open, which had this path before.
    async fn measure_medium(&self, vm: VmId, path: PathBuf) -> Result<MediumFacts, Problem>;

    /// Sees whether a network card of a VM that is off could be connected now. The VM need not be known, and nothing
    /// is changed.
    ///
    /// # Errors
    /// `wrong-state` with what the host lacks; `in-use` for a forwarded port that somebody has.
    async fn examine_nic(&self, vm: VmId, nic: NicSpec) -> Result<(), Problem>;

    /// Checks that this host has what a VM's machine needs: its firmware, the processor's model, huge pages for all of its memory,
    /// whether they are free now or not. How much memory that is may be unknown: then one page is enough. The VM need not be known,
    /// and nothing is changed.
    ///
    /// # Errors
    /// `unsupported` with what the host lacks, and the package that has it.
    async fn examine_hardware(
        &self,
        hardware: Hardware,
        memory: Option<u64>,
    ) -> Result<(), Problem>;

    /// Sees whether this host can connect to the port at which another one waits for VMs. The connection is closed without a word. Agents
    /// without the feature [`EXAMINE_MIGRATION_PORT`](super::version::EXAMINE_MIGRATION_PORT) do not know it.
    ///
    /// # Errors
    /// `wrong-state` with why it cannot.
    async fn examine_migration_port(&self, to: SocketAddr) -> Result<(), Problem>;

    /// Scans a datastore. Nothing is changed on it.
    ///
    /// # Errors
    /// `wrong-state` when the place does not carry the datastore's mark.
    async fn scan_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreContents, Problem>;

    /// The mark at a place, whatever it is, and the descriptors of the VMs there. Nothing is changed.
    ///
    /// # Errors
    /// `invalid-request` without the directory; those of the file system.
    async fn survey_datastore(
        &self,
        location: DatastoreLocation,
    ) -> Result<DatastoreSurvey, Problem>;

    /// The metrics of the agent and its filters, as OpenMetrics text.
    async fn metrics(&self) -> Result<String, Problem>;

    /// What the VMs that run use.
    async fn usage(&self) -> Result<HostUsage, Problem>;

    /// The agent's log levels.
    async fn log_level(&self) -> Result<LogLevel, Problem>;

    /// Changes the log levels of the agent and of its VMs' filters, also of those that start later, until the
    /// agent ends.
    ///
    /// # Errors
    /// `invalid-request` for invalid levels: nothing is changed.
    async fn set_log_level(&self, levels: String) -> Result<LogLevel, Problem>;

    /// Registers a VM, or replaces its specification. Of a VM that runs, its name and the links of its network cards
    /// change at once; processors, memory, and limits and caches of disks at its next start. A network card or a disk
    /// that is made (it has facts) is plugged in if it is new, and out if it is gone, or has no facts any more.
    ///
    /// # Errors
    /// `wrong-state` while it is not off, where anything else differs, or what was there at its start is gone: nothing
    /// is changed. `timed-out` while the guest does not let a device go: it may be asked again. `limit-exceeded`
    /// without a free place for a device; `in-use` for a disk while one is exposed or has dirty bitmaps; `locked`.
    async fn register_vm(&self, spec: VmSpec) -> Result<(), Problem>;

    /// Unregisters a VM that is off; its key is dropped.
    async fn unregister_vm(&self, vm: VmId) -> Result<(), Problem>;

    /// Gives the host a VM's KEK, which is compared with the check value of the registered key reference.
    ///
    /// # Errors
    /// `key-mismatch` for another key; `wrong-state` when it is sealed to an earlier incarnation.
    async fn offer_key(&self, vm: VmId, key: SealedKey) -> Result<(), Problem>;

    /// Checks that every encrypted disk of a VM that is off is there and opens with the VM's registered KEK,
    /// which must be `key`. Nothing is written.
    ///
    /// # Errors
    /// `wrong-state` while the VM is not off, or registered with another key; `locked` without the
    /// KEK; the errors of opening a disk.
    async fn check_key(&self, vm: VmId, key: KeyReference) -> Result<(), Problem>;

    /// Adds another KEK to every encrypted disk of a VM that is off. When this returns it is on the datastore
    /// and has been read back. A third one that an earlier attempt left is removed. Nothing is written unless
    /// all disks open with the registered KEK.
    ///
    /// # Errors
    /// As [`HostAgent::check_key`]; `key-mismatch` when the other key is not what its reference says;
    /// `wrong-state` when it is sealed to an earlier incarnation.
    async fn add_key(&self, vm: VmId, other: OtherKey) -> Result<(), Problem>;

    /// Removes all KEKs but the registered one, which must be `keep`, from the encrypted disks of a VM that
    /// is off. Nothing is written unless all of them open with it.
    ///
    /// # Errors
    /// As [`HostAgent::check_key`].
    async fn drop_other_keys(&self, vm: VmId, keep: KeyReference) -> Result<(), Problem>;

    /// Marks disks whose data keys (DEKs) another VM gets, in their headers. What a guest reads of them goes through buffers of its
    /// filter from then on, which is replaced if it runs. Agents without the feature
    /// [`SHARE_DATA_KEYS`](super::version::SHARE_DATA_KEYS) do not know it.
    ///
    /// # Errors
    /// As [`HostAgent::check_key`]; `in-use` while a disk opens with another key, too; `timed-out` while the filter is being
    /// replaced: it may be asked again.
    async fn share_data_keys(&self, vm: VmId, shared: ShareDataKeys) -> Result<(), Problem>;

    /// Checks whether a job could be put now. Nothing is begun.
    ///
    /// # Errors
    /// Those of [`HostAgent::put_job`].
    async fn examine_job(&self, vm: VmId, spec: JobSpec) -> Result<(), Problem>;

    /// Checks whether a change of a registered VM could be made now. Nothing is changed, and no guest is asked whether it
    /// lets a device go. Agents without the change's [feature](VmChange::feature) do not know it.
    ///
    /// # Errors
    /// The error that the change would end with.
    async fn examine_change(&self, vm: VmId, change: VmChange) -> Result<(), Problem>;

    /// Begins a job of a registered VM, or continues it; follow [`JobStatus`].
    ///
    /// # Errors
    /// `conflict` when the task has a job with another spec; `in-use` while the VM is not off, or another job or
    /// an exposure has a disk; `locked` without the KEK that a disk needs; `unsupported` for a kind that the
    /// agent does not know. To export: `wrong-state` before the disk is made, or when the passphrase is sealed to
    /// an earlier incarnation; `already-exists` when the file is there.
    async fn put_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem>;

    /// Has a job that makes, reads, merges or overwrites disks without a guest go on at this pace ([`super::JobKind::has_work_pace`]). A job begins as
    /// fast as it can; an agent that has restarted does not know the pace any more.
    ///
    /// # Errors
    /// `not-found` when no such job is at work; `unsupported` for a job of another kind; `invalid-request` for a rate that is
    /// too low.
    async fn set_pace(&self, vm: VmId, task: TaskId, pace: CopyPace) -> Result<(), Problem>;

    /// The status of a job.
    ///
    /// # Errors
    /// `not-found`: this agent does not know the job; an earlier one may have.
    async fn job(&self, vm: VmId, task: TaskId) -> Result<JobStatus, Problem>;

    /// Commits a job that is ready for it: gives an exported file its name. Committing it again does nothing.
    /// The spec is the one that the job was put with, for an agent that has restarted since.
    ///
    /// # Errors
    /// `conflict`; `wrong-state` while it is in progress; `not-found` when there is nothing to commit;
    /// `already-exists` when another file has the name.
    async fn commit_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem>;

    /// Cancels a job, and removes what it has made and not committed; disks that it has completed stay.
    ///
    /// # Errors
    /// `conflict`; for an export `already-exists` when the file has its name, or when that is unknown, and
    /// `not-found` when there is no uncommitted file.
    async fn cancel_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem>;

    /// Removes a disk's file, made or half-made; works without the key. A job that makes it is cancelled.
    ///
    /// # Errors
    /// `in-use` while the VM runs or the file is locked.
    async fn delete_disk(&self, vm: VmId, disk: DiskId) -> Result<(), Problem>;

    /// Makes a disk `size` bytes long; one that is, stays so. A guest that runs sees it, with a pause.
    ///
    /// # Errors
    /// `invalid-request` for a size that it cannot get, a smaller one among them; `in-use` while it is exposed, exported
    /// or has dirty bitmaps; `locked`; `no-space`; `wrong-state` before it is made, and with a replica.
    async fn grow_disk(&self, vm: VmId, disk: DiskId, size: u64) -> Result<(), Problem>;

    /// Exposes a disk over NBD to the client that has the stream, or opens a connection to an exposed one. A
    /// disk of a VM that is off is served by its own filter, and the VM does not start meanwhile; a disk in
    /// use is read beside the guest. What a snapshot keeps has a filter of its own in any case: its exposure, too, ends
    /// when a guest that runs ends, so that it does not keep the guest from starting again.
    ///
    /// # Errors
    /// To hold: `in-use` while it is exposed or exported, and to change it while the VM is not off;
    /// `locked` without the KEK, where that is needed; `wrong-state` before it is made, and for the ciphertext of
    /// a disk that a guest has; `not-found` without the snapshot; `invalid-request` for the ciphertext of a disk in the
    /// clear. To connect: `wrong-state` while it is not exposed.
    async fn expose_disk(
        &self,
        vm: VmId,
        disk: DiskId,
        what: Exposing,
    ) -> Result<ConsoleStream, Problem>;

    /// The dirty bitmaps of a disk in use. They survive a restart of filter, agent or guest, and a stop of the
    /// VM unless something else writes to the disk.
    ///
    /// # Errors
    /// `wrong-state` while the VM does not run, or waits for a filter.
    async fn bitmaps(&self, vm: VmId, disk: DiskId) -> Result<Vec<BitmapStatus>, Problem>;

    /// Starts, clears or removes one of them; returns the bitmaps after that. Do not repeat it: a second
    /// start is refused, and a second clear drops more changes.
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

    /// The status of the replica of a disk in use.
    ///
    /// # Errors
    /// `wrong-state` as [`HostAgent::bitmaps`], and where the disk has none or is served without it.
    async fn replica(&self, vm: VmId, disk: DiskId) -> Result<ReplicaStatus, Problem>;

    /// Begins to start a registered VM; follow [`VmState`]. A suspended one goes on where it was; where that fails, it stays suspended.
    ///
    /// # Errors
    /// `damaged` where the saved memory of a suspended one does not open;
    /// `locked` without its KEK; `wrong-state` while it is stopping.
    async fn power_on(&self, vm: VmId) -> Result<(), Problem>;

    /// Like [`HostAgent::power_on`], and the firmware tries such a device first, until the guest is reset or reboots.
    ///
    /// # Errors
    /// Those of [`HostAgent::power_on`]; `invalid-request` where the VM has no such device.
    async fn power_on_from(&self, vm: VmId, first: BootDevice) -> Result<(), Problem>;

    /// Like [`HostAgent::power_on`], and where the VM is suspended, its saved memory must be of this generation. Agents without the
    /// feature [`MEMORY_GENERATION`](super::version::MEMORY_GENERATION) do not know it.
    ///
    /// # Errors
    /// Those of [`HostAgent::power_on`]; `damaged` where the saved memory is of another generation.
    async fn power_on_with(&self, vm: VmId, generation: u64) -> Result<(), Problem>;

    /// Begins to suspend a VM: the memory of its guest is saved beside its disks, and its processes end. Follow [`VmState`]: it is
    /// suspending, and then suspended; or it runs on, and `not_suspended` says why. One that is suspended stays so.
    ///
    /// # Errors
    /// `wrong-state` while it does not run; `locked` without its KEK; `in-use` while a disk is copied or exposed.
    async fn suspend(&self, vm: VmId) -> Result<(), Problem>;

    /// Like [`HostAgent::suspend`], and the memory that is saved is of this generation. What is being saved, or is saved, keeps the
    /// generation that it has. Agents without the feature [`MEMORY_GENERATION`](super::version::MEMORY_GENERATION) do not know it.
    ///
    /// # Errors
    /// Those of [`HostAgent::suspend`].
    async fn suspend_as(&self, vm: VmId, generation: u64) -> Result<(), Problem>;

    /// Removes the saved memory of a suspended VM, which then is off. One that is not suspended stays as it is.
    ///
    /// # Errors
    /// Those of the file system.
    async fn discard_memory(&self, vm: VmId) -> Result<(), Problem>;

    /// Removes a core dump of a VM, also while it runs and without its key. One that is not there is as asked.
    ///
    /// # Errors
    /// Those of the file system.
    async fn discard_dump(&self, vm: VmId, dump: DumpId) -> Result<(), Problem>;

    /// The manifest of a backup, of a VM that need not be registered. Whether it is authentic is not checked.
    ///
    /// # Errors
    /// `not-found`, `damaged`, `invalid-request`.
    async fn read_backup(&self, place: BackupPlace) -> Result<BackupManifest, Problem>;

    /// Removes a backup, whether it is whole or not, of a VM that need not be registered. One that is not there is as asked.
    ///
    /// # Errors
    /// `invalid-request`; those of the file system.
    async fn discard_backup(&self, place: BackupPlace) -> Result<(), Problem>;

    /// Stops a VM; one that is off stays off.
    ///
    /// # Errors
    /// `wrong-state` where it is suspended: [`HostAgent::discard_memory`] gives its memory up.
    async fn power_off(&self, vm: VmId, how: PowerOff) -> Result<(), Problem>;

    /// Pauses, unpauses, resets or wakes a guest; the answer comes when it is done.
    ///
    /// # Errors
    /// `wrong-state` while it does not run; of a guest that is to be woken also while it is paused or awake, and `timed-out` where it is
    /// not known whether it has woken.
    async fn control_guest(&self, vm: VmId, what: GuestControl) -> Result<(), Problem>;

    /// A new connection to the guest's screen, which speaks VNC (RFC 6143); several clients share the screen.
    ///
    /// # Errors
    /// `wrong-state` while the VM does not run; `unsupported` for one that an earlier agent started without a screen.
    async fn screen(&self, vm: VmId) -> Result<ConsoleStream, Problem>;

    /// Asks the agent in the guest (QEMU's guest agent). Do not repeat it: a program runs twice then.
    ///
    /// # Errors
    /// `wrong-state` while the VM does not run, and for what the guest refuses; `unreachable` where none answers;
    /// `limit-exceeded` for a program that does not end in time and for too long an answer; `in-use` while it executes
    /// another command; `unsupported` for a VM that an earlier agent started.
    async fn guest(&self, vm: VmId, command: GuestCommand) -> Result<GuestAnswer, Problem>;

    /// The guest's serial console, which one client has at a time. A client that loses it to another one
    /// reads [`crate::console::is_taken_over`].
    ///
    /// # Errors
    /// `wrong-state` while the VM does not run; `in-use` while another client has it and it may not be taken
    /// over.
    async fn console(&self, vm: VmId, claim: ConsoleClaim) -> Result<ConsoleStream, Problem>;
}
