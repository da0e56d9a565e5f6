//! What making, filling and exporting disks need from the host.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vmseal_api::host::{Allocation, DiskSpec};
use vmseal_api::problem::{ErrorCode, Problem};

use crate::process::run_dir::ProcessDir;
use crate::process::users::Users;
use crate::storage::gate::Gate;
use crate::storage::transfer::TransferDirectories;

/// The host's part of an import or export.
#[derive(Clone)]
pub struct DiskBuilder {
    /// The filter program.
    pub filter: Arc<File>,
    /// The users that it may run as.
    pub users: Users,
    /// The directory of its sockets and logs.
    pub directory: ProcessDir,
    /// Where images may be read from.
    pub transfer: TransferDirectories,
    /// The pace that it goes at.
    pub gate: Arc<Gate>,
}

impl DiskBuilder {
    /// The same of work that rests while a guest runs, which may start or stop meanwhile.
    #[must_use]
    pub fn beside(self, guest_runs: &Arc<AtomicBool>) -> Self {
        let gate = Arc::new(Gate::beside(self.gate.pace(), Arc::clone(guest_runs)));
        Self { gate, ..self }
    }
}

/// A defect, or an error without a code of its own.
pub fn internal(error: impl std::fmt::Display) -> Problem {
    Problem::new(ErrorCode::Internal, error.to_string())
}

/// Whether all of a disk's room is allocated when it is made.
#[must_use]
pub fn is_preallocated(disk: &DiskSpec) -> bool {
    disk.allocation == Allocation::Preallocated
}

/// No user is left for another process.
#[must_use]
pub fn too_many() -> Problem {
    let what = "too many VMs and imports run on this host: stop some, or wait for imports to end";
    Problem::new(ErrorCode::LimitExceeded, what)
}
