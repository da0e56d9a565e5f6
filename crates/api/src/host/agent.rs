//! The calls of the server to an agent.

use std::time::Duration;

use async_trait::async_trait;

use super::description::HostDescription;
use super::disk::NewDisk;
use super::job::{JobSpec, JobStatus};
use super::key::{KeyReference, OtherKey, SealedKey};
use super::state::{HostState, StateChange};
use super::vm::{PowerOff, VmSpec};
use crate::console::{ConsoleClaim, ConsoleStream};
use crate::datastore::{DatastoreCondition, DatastoreContents, DatastoreSpec, DatastoreUsage};
use crate::expose::Exposing;
use crate::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
use crate::id::{DiskId, Incarnation, TaskId, VmId};
use crate::log_level::LogLevel;
use crate::nic::NicSpec;
use crate::problem::{ErrorCode, Problem};

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

    /// Checks whether a disk could be made: its datastore, its image, and the room that it needs at once. No
    /// VM and no key are needed, and nothing is changed.
    ///
    /// # Errors
    /// The error that a [`CreateJob`](super::CreateJob) would end with.
    async fn examine_disk(&self, disk: NewDisk) -> Result<(), Problem>;

    /// The condition of a datastore. Nothing is written to it; abandoned half-made disks are removed from it
    /// now and then.
    async fn measure_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreCondition, Problem>;

    /// Sees whether a network card of a VM that is off could be connected now. The VM need not be known, and nothing
    /// is changed.
    ///
    /// # Errors
    /// `wrong-state` with what the host lacks; `in-use` for a forwarded port that somebody has.
    async fn examine_nic(&self, vm: VmId, nic: NicSpec) -> Result<(), Problem>;

    /// Scans a datastore. Nothing is changed on it.
    ///
    /// # Errors
    /// `wrong-state` when the place does not carry the datastore's mark.
    async fn scan_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreContents, Problem>;

    /// The metrics of the agent and its filters, as OpenMetrics text.
    async fn metrics(&self) -> Result<String, Problem>;

    /// The agent's log levels.
    async fn log_level(&self) -> Result<LogLevel, Problem>;

    /// Changes the log levels of the agent and of its VMs' filters, also of those that start later, until the
    /// agent ends.
    ///
    /// # Errors
    /// `invalid-request` for invalid levels: nothing is changed.
    async fn set_log_level(&self, levels: String) -> Result<LogLevel, Problem>;

    /// Registers a VM, or replaces the specification of one that is off.
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

    /// Checks whether a job could be put now. Nothing is begun.
    ///
    /// # Errors
    /// Those of [`HostAgent::put_job`].
    async fn examine_job(&self, vm: VmId, spec: JobSpec) -> Result<(), Problem>;

    /// Begins a job of a registered VM, or continues it; follow [`JobStatus`].
    ///
    /// # Errors
    /// `conflict` when the task has a job with another spec; `in-use` while the VM is not off, or another job or
    /// an exposure has a disk; `locked` without the KEK that a disk needs; `unsupported` for a kind that the
    /// agent does not know. To export: `wrong-state` before the disk is made, or when the passphrase is sealed to
    /// an earlier incarnation; `already-exists` when the file is there.
    async fn put_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem>;

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

    /// Exposes a disk over NBD to the client that has the stream, or opens a connection to an exposed one. A
    /// disk of a VM that is off is served by its own filter, and the VM does not start meanwhile; a disk in
    /// use is read beside the guest.
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

    /// The dirty bitmaps of a disk in use. They are lost when the filter that serves it ends: with the VM,
    /// and when another filter replaces it.
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

    /// Begins to start a registered VM; follow [`VmState`].
    ///
    /// # Errors
    /// `locked` without its KEK; `wrong-state` while it is stopping.
    async fn power_on(&self, vm: VmId) -> Result<(), Problem>;

    /// Stops a VM; one that is off stays off.
    async fn power_off(&self, vm: VmId, how: PowerOff) -> Result<(), Problem>;

    /// The guest's serial console, which one client has at a time. A client that loses it to another one
    /// reads [`crate::console::is_taken_over`].
    ///
    /// # Errors
    /// `wrong-state` while the VM does not run; `in-use` while another client has it and it may not be taken
    /// over.
    async fn console(&self, vm: VmId, claim: ConsoleClaim) -> Result<ConsoleStream, Problem>;
}
