//! A VM on this host. One task owns it: its state, its key, its processes.
//!
//! ```text
//!            power on              all connected, guest goes
//!    Off ───────────────► Starting ────────────────────────► Running ◄───────────┐
//!     ▲                      │ failed, or force                 │ shutdown asked │ the guest did
//!     │◄─────────────────────┘                                  ▼                │ not heed it
//!     │◄─────────────────────────────── force, QEMU ended ─── Stopping ──────────┘
//!     │◄─────────────────────────────── force, QEMU ended ─── Running
//! ```
//! When a filter ends, the guest waits for another one ([`service`]); when too many do, the VM is stopped.
//! A death of the VM goes on record, and stays there until the guest runs again ([`crate::process::deaths`]).
//! A VM that a starting agent cannot take over has no owner until it can: see [`left_running`].
//!
//! Whatever happens comes to the owner as an event and is applied by it alone; after each event it posts
//! what the server is to see. `Off` is entered when no process is left and the run directory is gone.

mod adopt;
pub(crate) mod board;
mod exposed;
mod images;
mod left_running;
mod owner;
mod reconnect;
mod report;
mod running;
mod serve;
mod service;
mod start;
pub(crate) mod vms;
mod workers;

use std::fs::File;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use vmseal_api::filter::{BitmapChange, BitmapStatus, ReplicaStatus};
use vmseal_api::host::{
    Accelerator, ConsoleClaim, ConsoleStream, Exposing, JobSpec, JobStatus, KeyReference, PowerOff,
    SealedKey, Stopped, VmSpec,
};
use vmseal_api::id::{DiskId, TaskId, VmId};
use vmseal_api::problem::{ErrorCode, Problem};
use vmseal_api::request_id::{self, RequestId};

use crate::hypervisor::qemu::Qemu;
use crate::keys::KeyBox;
use crate::process::deaths::Deaths;
use crate::process::run_dir::RunDir;
use crate::process::users::Users;
use crate::storage::transfer::TransferDirectories;
use crate::vm::board::Board;

pub use adopt::adopt;
use left_running::LeftRunning;
use running::Running;

/// Calls that may wait for a VM's owner.
const CALLS_MAX: usize = 32;

/// What the owners of a host's VMs share.
pub struct Shared {
    /// Where they post.
    pub board: Board,
    /// What keys are sealed to.
    pub key_box: KeyBox,
    /// Where processes are on record.
    pub run_dir: RunDir,
    /// Where deaths are.
    pub deaths: Deaths,
    /// Whom processes run as.
    pub users: Users,
    /// Where images may be imported from and exported to.
    pub transfer: TransferDirectories,
    /// The filter program.
    pub filter: Arc<File>,
    /// QEMU.
    pub qemu: Qemu,
    /// How guests are run.
    pub accelerator: Accelerator,
}

type Reply<T> = oneshot::Sender<Result<T, Problem>>;

/// What a VM's owner is asked.
pub enum Call {
    /// To take another specification.
    Register(VmSpec, Reply<()>),
    /// To forget the VM; the owner ends.
    Unregister(Reply<()>),
    /// To take the KEK.
    OfferKey(SealedKey, Reply<()>),
    /// To see to the keys of its disks, which it is registered with this one for.
    ChangeKeys(KeyReference, Box<Change>, Reply<()>),
    /// To remove a disk.
    DeleteDisk(DiskId, Reply<()>),
    /// Whether a job could be put.
    ExamineJob(JobSpec, Reply<()>),
    /// To begin a task's job, or to go on with it.
    PutJob(TaskId, JobSpec, Reply<()>),
    /// How far a task's job is.
    Job(TaskId, Reply<JobStatus>),
    /// To finish a task's job.
    CommitJob(TaskId, JobSpec, Reply<()>),
    /// To stop a task's job.
    CancelJob(TaskId, JobSpec, Reply<()>),
    /// To start.
    PowerOn(Reply<()>),
    /// To stop.
    PowerOff(PowerOff, Reply<()>),
    /// For the console.
    Console(ConsoleClaim, Reply<ConsoleStream>),
    /// To expose a disk, or for a connection to an exposed one.
    Expose(DiskId, Exposing, Reply<ConsoleStream>),
    /// For the dirty bitmaps of a disk, as they are when one is changed as asked.
    Bitmaps(DiskId, Option<(String, BitmapChange)>, Reply<Vec<BitmapStatus>>),
    /// For how the replica of a disk stands.
    Replica(DiskId, Reply<ReplicaStatus>),
}

/// What becomes of the keys that open a VM's disks.
pub enum Change {
    /// They are only tried.
    None,
    /// This one opens them, too.
    Add(KeyReference, SealedKey),
    /// The registered one alone opens them.
    DropOthers,
}

/// The way to a VM's owner.
#[derive(Clone)]
pub struct Vm(mpsc::Sender<Request>);

/// A call, and the request that it is made for.
type Request = (Option<RequestId>, Call);

/// What a VM begins its time with this agent as.
pub enum Initial {
    /// Off, never seen.
    New,
    /// Off: it ended, died, or was found dead.
    Stopped(Stopped),
    /// Running since before the agent's start.
    Alive(Box<Running>),
    /// Running, and not to be managed by this agent.
    LeftRunning(Box<LeftRunning>),
}

impl Vm {
    /// Begins to own a VM.
    #[must_use]
    pub fn own(shared: Arc<Shared>, spec: VmSpec, initial: Initial) -> Self {
        let (sender, calls) = mpsc::channel(CALLS_MAX);
        // Posted before it is known: who knows it sees it.
        if let Initial::LeftRunning(left) = initial {
            left.post();
            tokio::spawn(left.run(calls));
            return Self(sender);
        }
        let owner = owner::Owner::new(shared, spec, initial);
        owner.post();
        tokio::spawn(owner.run(calls));
        Self(sender)
    }

    /// The way to an owner that a test plays.
    #[cfg(test)]
    pub(crate) fn unheard() -> (Self, mpsc::Receiver<Request>) {
        let (sender, calls) = mpsc::channel(CALLS_MAX);
        (Self(sender), calls)
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// As the owner answers; `not-found` when the VM has just been forgotten.
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

/// What to do about a VM that died.
fn remedy(vm: &str) -> String {
    format!("Its disks are as a power cut leaves them: start it again (vmseal vm start {vm})")
}

fn internal(error: impl std::fmt::Display) -> Problem {
    Problem::new(ErrorCode::Internal, error.to_string())
}
