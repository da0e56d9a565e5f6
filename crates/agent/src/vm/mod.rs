//! A VM on this host. One task owns its state, its key and its processes.
//!
//! ```text
//!            power on              all connected, guest goes
//!    Off ───────────────► Starting ────────────────────────► Running ◄───────────┐
//!     ▲                      │ failed, or force                 │ shutdown asked │ the guest
//!     │◄─────────────────────┘                                  ▼                │ ignored it
//!     │◄─────────────────────────────── force, QEMU ended ─── Stopping ──────────┘
//!     │◄─────────────────────────────── force, QEMU ended ─── Running
//! ```
//! A guest whose memory is being saved, or is saved, is suspending or suspended: see [`suspend`]. When it is started, it goes on.
//!
//! When a filter ends, the guest waits for another one ([`service`]); after too many, the VM is stopped. A VM
//! that died is on record until its guest runs again ([`crate::process::died`]). A running VM that a
//! starting agent cannot take over has no owner until it can be: see [`left_running`].
//!
//! Everything that happens reaches the owner as an event and is applied by it alone; after each event it
//! publishes the state for the server. The VM is `Off` only when no process is left and the run directory is
//! gone.

mod adopt;
mod arriving;
mod arriving_disks;
mod arriving_keys;
mod arriving_parts;
mod arriving_server;
mod asleep;
mod bitmap_files;
mod convergence;
mod converting;
mod departing_disks;
mod departing_parts;
mod disks_meter;
mod dumping;
mod exposed;
mod guest_addresses;
mod images;
mod kept_bitmaps;
mod lacking;
mod left_running;
mod merging;
mod migration;
mod mirroring;
mod owner;
mod panicking;
mod placing;
mod proving;
mod queues;
mod receiving;
mod reconnect;
mod report;
mod running;
mod sealing_meter;
mod sending;
mod sending_at_rest;
mod serve;
mod service;
mod stalled;
mod standstill;
mod start;
pub(crate) mod state_store;
mod stream;
mod suspend;
mod thawing;
mod to_copy;
mod tpm;
mod tree_copying;
pub mod usage;
pub(crate) mod vms;
mod workers;

use std::fs::File;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use vmseal_api::boot::BootDevice;
use vmseal_api::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
use vmseal_api::host::{
    Accelerator, ConsoleClaim, ConsoleStream, CopyOf, Exposing, GuestControl, JobSpec, JobStatus,
    KeyReference, PowerOff, SealedKey, Stopped, VmChange, VmSpec,
};
use vmseal_api::id::{DiskId, DumpId, TaskId, VmId};
use vmseal_api::pace::CopyPace;
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id::{self, RequestId};

use crate::hypervisor::firmware::FirmwareFiles;
use crate::hypervisor::guest_agent::GuestAgent;
use crate::hypervisor::qemu::Qemu;
use crate::hypervisor::tpm::Swtpm;
use crate::keys::KeyBox;
use crate::migration::transport::Listener;
use crate::process::died::DiedVms;
use crate::process::run_dir::{ProcessDir, RunDir};
use crate::process::users::Users;
use crate::signer::Signer;
use crate::storage::builder::DiskBuilder;
use crate::storage::cloning::Lent;
use crate::storage::gate::Gate;
use crate::storage::transfer::TransferDirectories;
use crate::vm::state_store::StateStore;

pub use adopt::adopt;
pub(crate) use arriving_disks::give_up as give_up_copies;
pub use bitmap_files::BitmapFiles;
use left_running::LeftRunning;
use receiving::Receiving;
pub(crate) use receiving::expect;
use running::Running;
pub use service::FILTER_RESTART_TIMEOUT;
pub use stalled::DISK_STALL;
pub use suspend::is_suspended;

/// Calls that may wait for a VM's owner.
const CALLS_MAX: usize = 32;

/// What the owners of a host's VMs share.
pub struct Shared {
    /// The state that the server reads.
    pub states: StateStore,
    /// The key pair that keys are sealed to.
    pub key_box: KeyBox,
    /// The directory of processes and records.
    pub run_dir: RunDir,
    /// The records of VMs that died.
    pub died: DiedVms,
    /// The dirty bitmaps of VMs that are off.
    pub bitmaps: BitmapFiles,
    /// The users that processes run as.
    pub users: Users,
    /// Where images may be imported from and exported to.
    pub transfer: TransferDirectories,
    /// The filter program.
    pub filter: Arc<File>,
    /// QEMU.
    pub qemu: Qemu,
    /// The firmware of guests that start by UEFI.
    pub firmware: FirmwareFiles,
    /// The program that emulates the TPM of a VM.
    pub swtpm: Swtpm,
    /// How guests are accelerated.
    pub accelerator: Accelerator,
    /// How long starting another filter is retried before the VM is stopped.
    pub filter_restart_timeout: Duration,
    /// How long a request of a guest may wait for storage before that is reported.
    pub disk_stall: Duration,
    /// The key that reports are signed with, once it is known; none for a host that has not joined.
    pub signer: OnceLock<Signer>,
    /// Where other hosts connect to send VMs; none where this one receives none.
    pub migrations: Option<Listener>,
    /// Whether the memory of VMs that come is placed by this agent, where that can be.
    pub place_memory: bool,
}

impl Shared {
    /// What a filter for no guest needs, in this directory.
    fn builder(&self, directory: ProcessDir) -> DiskBuilder {
        let (filter, users) = (self.filter.clone(), self.users.clone());
        let gate = Arc::new(Gate::new(CopyPace::default()));
        DiskBuilder { filter, users, directory, transfer: self.transfer.clone(), gate }
    }
}

type Reply<T> = oneshot::Sender<Result<T, Problem>>;

/// A call to a VM's owner.
pub enum Call {
    /// Replace the specification.
    Register(VmSpec, Reply<()>),
    /// Unregister the VM; the owner ends.
    Unregister(Reply<()>),
    /// Accept the KEK.
    OfferKey(SealedKey, Reply<()>),
    /// Check or change the keys of its disks; the key is the one that it is registered with.
    ChangeKeys(KeyReference, Box<Change>, Reply<()>),
    /// Remove a disk.
    DeleteDisk(DiskId, Reply<()>),
    /// Check whether a job could begin.
    ExamineJob(JobSpec, Reply<()>),
    /// Check whether it could be changed so.
    ExamineChange(VmChange, Reply<()>),
    /// Begin a task's job, or continue it, with the disks of other VMs that it reads.
    PutJob(TaskId, JobSpec, Vec<Lent>, Reply<()>),
    /// Lend a disk to the owner of another VM, to be read.
    Lend(CopyOf, Reply<Lent>),
    /// Get the status of a task's job.
    Job(TaskId, Reply<JobStatus>),
    /// Have a task's job go on at another pace.
    SetPace(TaskId, CopyPace, Reply<()>),
    /// Commit a task's job.
    CommitJob(TaskId, JobSpec, Reply<()>),
    /// Cancel a task's job.
    CancelJob(TaskId, JobSpec, Reply<()>),
    /// Start the VM, by its boot order or from such a device first; memory that is saved must be of this generation.
    PowerOn(Option<BootDevice>, Option<u64>, Reply<()>),
    /// Save the memory of its guest as of this generation, and stop it.
    Suspend(Option<u64>, Reply<()>),
    /// Give the saved memory of its guest up.
    DiscardMemory(Reply<()>),
    /// Remove a core dump of its guest.
    DiscardDump(DumpId, Reply<()>),
    /// Stop it.
    PowerOff(PowerOff, Reply<()>),
    /// Pause, unpause or reset the guest.
    ControlGuest(GuestControl, Reply<()>),
    /// Make the image of a disk longer.
    GrowDisk(DiskId, u64, Reply<()>),
    /// Open the console.
    Console(ConsoleClaim, Reply<ConsoleStream>),
    /// Connect to the screen.
    Screen(Reply<ConsoleStream>),
    /// Get the way to the agent in the guest.
    Guest(Reply<GuestAgent>),
    /// Expose a disk, or connect to an exposed one.
    Expose(DiskId, Exposing, Reply<ConsoleStream>),
    /// List the dirty bitmaps of a disk, after changing one as asked.
    Bitmaps(DiskId, Option<(String, BitmapChange)>, Reply<Vec<BitmapStatus>>),
    /// Get the status of a disk's replica.
    Replica(DiskId, Reply<ReplicaStatus>),
}

/// A change of the keys that open a VM's disks.
pub enum Change {
    /// None: the keys are only checked.
    None,
    /// Add this one.
    Add(KeyReference, SealedKey),
    /// Remove all but the registered one.
    DropOthers,
    /// None, but others get the data keys of these disks.
    Share(Vec<DiskId>),
}

impl Change {
    /// What is logged when it is done.
    fn done(&self) -> &'static str {
        match self {
            Self::None => "the key opens all disks",
            Self::Add(..) => "another key opens all disks, too",
            Self::DropOthers => "no other key opens a disk any more",
            Self::Share(_) => "disks are marked, as others may have their data keys",
        }
    }

    /// The disks whose data keys others get.
    fn shared(&self) -> Vec<DiskId> {
        match self {
            Self::Share(disks) => disks.clone(),
            Self::None | Self::Add(..) | Self::DropOthers => Vec::new(),
        }
    }
}

/// A handle of a VM's owner.
#[derive(Clone)]
pub struct Vm(mpsc::Sender<Request>);

/// A call, and the request that it is made for.
type Request = (Option<RequestId>, Call);

/// The initial state of a VM under this agent.
pub enum Initial {
    /// Off, never seen before.
    New,
    /// Off: it ended, died, or was found dead.
    Stopped(Stopped),
    /// Off, and the memory of its guest is saved.
    Suspended,
    /// Running since before the agent's start.
    Alive(Box<Running>),
    /// Running, and this agent cannot manage it.
    LeftRunning(Box<LeftRunning>),
    /// On its way from another host.
    Receiving(Box<Receiving>),
}

impl Vm {
    /// Starts the owner of a VM.
    #[must_use]
    pub fn own(shared: Arc<Shared>, spec: VmSpec, initial: Initial) -> Self {
        let (sender, calls) = mpsc::channel(CALLS_MAX);
        // Published before the handle is returned: a caller that has the handle sees the state.
        if let Initial::LeftRunning(left) = initial {
            left.publish();
            tokio::spawn(left.run(calls));
            return Self(sender);
        }
        if let Initial::Receiving(receiving) = initial {
            receiving.publish();
            tokio::spawn(receiving.run(calls));
            return Self(sender);
        }
        let owner = owner::Owner::new(shared, spec, initial);
        owner.publish();
        tokio::spawn(owner.run(calls));
        Self(sender)
    }

    /// A handle of an owner that a test plays.
    #[cfg(test)]
    pub(crate) fn unheard() -> (Self, mpsc::Receiver<Request>) {
        let (sender, calls) = mpsc::channel(CALLS_MAX);
        (Self(sender), calls)
    }

    /// Sends a call and waits for the answer.
    ///
    /// # Errors
    /// Those of the owner; `not-found` when the VM has just been unregistered.
    pub async fn ask<T>(
        &self,
        vm: VmId,
        call: impl FnOnce(Reply<T>) -> Call,
    ) -> Result<T, Problem> {
        let (reply, answer) = oneshot::channel();
        let asked = (request_id::current(), call(reply));
        self.0.send(asked).await.map_err(|_| crate::rules::unknown(vm))?;
        answer.await.map_err(|_| crate::rules::unknown(vm))?
    }
}

/// The remedy for a VM that died.
fn remedy(vm: &str) -> String {
    format!("Its disks are as a power cut leaves them: start it again (vmseal vm start {vm})")
}

fn internal(error: impl std::fmt::Display) -> Problem {
    Problem::new(ErrorCode::Internal, error.to_string())
}
