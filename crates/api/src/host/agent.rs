//! What an agent does, as the server calls it.

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
use crate::problem::{ErrorCode, Problem};

/// What may have shown a certificate: an agent, where there is TLS in between.
pub trait ShowsCertificate {
    /// The certificate (DER) that it showed at its last connection; none before the first one.
    fn certificate(&self) -> Option<Vec<u8>> {
        None
    }
}

/// What an agent does; the real host, the simulated one and the HTTPS client are behind this trait.
#[async_trait]
pub trait HostAgent: ShowsCertificate + Send + Sync {
    /// What this host is.
    async fn describe(&self) -> Result<HostDescription, Problem>;

    /// What has changed since generation `after`, as soon as anything has, at the latest after `wait`
    /// (≤ [`STATE_WAIT_MAX`](super::STATE_WAIT_MAX)): the VMs that changed and those that are gone. All of it
    /// where `after` is none, of another incarnation, or too old.
    async fn state(
        &self,
        after: Option<(Incarnation, u64)>,
        wait: Duration,
    ) -> Result<StateChange, Problem>;

    /// How the host stands now.
    ///
    /// # Errors
    /// Those of [`HostAgent::state`].
    async fn state_now(&self) -> Result<HostState, Problem> {
        self.state_after(None, Duration::ZERO).await
    }

    /// How the host stands, as soon as that is not `last`, at the latest after `wait`.
    ///
    /// # Errors
    /// Those of [`HostAgent::state`]; `internal` when the agent tells what has changed since another state.
    async fn state_after(
        &self,
        last: Option<&HostState>,
        wait: Duration,
    ) -> Result<HostState, Problem> {
        let change = self.state(last.map(HostState::known), wait).await?;
        HostState::changed(last, change).ok_or_else(|| {
            let what = "the agent told what has changed since a state that it was not asked about";
            Problem::new(ErrorCode::Internal, what)
        })
    }

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
    /// What a [`CreateJob`](super::CreateJob) would end with.
    async fn examine_disk(&self, disk: NewDisk) -> Result<(), Problem>;

    /// How a datastore stands. Nothing is written to it; half-made disks that nobody goes on with are
    /// removed from it now and then.
    async fn measure_datastore(&self, spec: DatastoreSpec) -> Result<DatastoreCondition, Problem>;

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

    /// Sees whether a job could be put now. Nothing is begun.
    ///
    /// # Errors
    /// Those of [`HostAgent::put_job`].
    async fn examine_job(&self, vm: VmId, spec: JobSpec) -> Result<(), Problem>;

    /// Begins a job of a registered VM, or goes on with it; follow [`JobStatus`].
    ///
    /// # Errors
    /// `conflict` when the task has a job with another spec; `in-use` while the VM is not off, or another job or
    /// an exposure has a disk; `locked` without the KEK that a disk needs; `unsupported` for a kind that the
    /// agent does not know. To export: `wrong-state` before the disk is made, or when the passphrase is sealed to
    /// an earlier incarnation; `already-exists` when the file is there.
    async fn put_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem>;

    /// How far a job is.
    ///
    /// # Errors
    /// `not-found`: this agent knows nothing of it; an earlier one may have.
    async fn job(&self, vm: VmId, task: TaskId) -> Result<JobStatus, Problem>;

    /// Finishes a job that is ready for it: gives an exported file its name. One that is done stays so. The
    /// spec is what the job was put with, for an agent that has restarted since.
    ///
    /// # Errors
    /// `conflict`; `wrong-state` while it is at work; `not-found` when there is nothing to be finished;
    /// `already-exists` when something else has the file's name.
    async fn commit_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem>;

    /// Stops a job, and removes what it has made and not committed; disks that a job has made whole stay.
    ///
    /// # Errors
    /// `conflict`; for an export `already-exists` when the file has its name, or when that cannot be told any
    /// more, and `not-found` when there is nothing without a name.
    async fn cancel_job(&self, vm: VmId, task: TaskId, spec: JobSpec) -> Result<(), Problem>;

    /// Removes a disk's file, made or half-made; works without the key. A job that makes it is cancelled.
    ///
    /// # Errors
    /// `in-use` while the VM runs or the file is locked.
    async fn delete_disk(&self, vm: VmId, disk: DiskId) -> Result<(), Problem>;

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
