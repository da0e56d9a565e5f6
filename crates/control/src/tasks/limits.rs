//! Concurrency limits: work on each host, calls of each key provider.
//!
//! Copies last hours, and people wait for short work. So each has permits of its own on a host, and neither waits for the other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;
use vmseal_api::host::{Allocation, DatastoreLocation};
use vmseal_api::model::{Waiting, WaitingOn};

use super::step::Limit;
use crate::operation::Operation;
use crate::store::disks::Disk;

/// Tasks that copy, read or overwrite whole disks on one host: more at a time slow down each other and the guests.
pub const HOST_COPIES: usize = 4;

/// Tasks that fill new disks on one host, from an image or with zeroes: as heavy as copies, but somebody waits for most of them, as an
/// image is small. So they do not wait for copies.
pub const HOST_FILLS: usize = 4;

/// Tasks with short work on one host: each is over within seconds or minutes, so that those behind it need not wait long. Each busies a
/// processor or the storage meanwhile.
pub const HOST_SHORT_WORK: usize = 8;

/// Calls of one key provider: enough to keep a KMS busy, and few enough to leave capacity for other tasks of the
/// server and other clients of the KMS.
pub const PROVIDER_CALLS: usize = 16;

/// What counts together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Share {
    Copies,
    Fills,
    ShortWork,
    ProviderCalls,
}

impl Share {
    /// What a step of this kind counts as. `disks` are those of the task's VM.
    pub(super) fn of(limit: Limit, operation: &Operation, disks: &[Disk]) -> Self {
        match (limit, operation) {
            (Limit::Provider, _) => Self::ProviderCalls,
            (Limit::Copy, _) | (Limit::Proof, Operation::ProveVm { all: true, .. }) => Self::Copies,
            // A linked clone shares the files of a snapshot.
            (Limit::NewDisks, Operation::CreateVm { copies: Some(copies), .. })
                if copies.linked.is_empty() =>
            {
                Self::Copies
            }
            (Limit::NewDisks, _) if disks.iter().any(is_to_be_filled) => Self::Fills,
            (Limit::NewDisks | Limit::Proof | Limit::Short, _) => Self::ShortWork,
        }
    }

    fn permits(self) -> usize {
        match self {
            Self::Copies => HOST_COPIES,
            Self::Fills => HOST_FILLS,
            Self::ShortWork => HOST_SHORT_WORK,
            Self::ProviderCalls => PROVIDER_CALLS,
        }
    }

    /// What a task shows that waits for a permit of the host or the provider of this name.
    pub(super) fn awaited(self, name: String) -> Waiting {
        let what = match self {
            Self::Copies => format!("copy or read disks on host '{name}'"),
            Self::Fills => format!("fill new disks on host '{name}'"),
            Self::ShortWork => format!("do short work on host '{name}'"),
            Self::ProviderCalls => format!("use key provider '{name}'"),
        };
        let detail = format!("{} tasks {what}, as many as may at a time", self.permits());
        Waiting { on: WaitingOn::Turn, name, detail }
    }
}

/// Whether a disk that is not made yet is written whole: from an image, or to get its room in a pool of Ceph. Those of the
/// machine itself, such as for its UEFI variables, are small, whatever they are made of.
fn is_to_be_filled(disk: &Disk) -> bool {
    let is_in_pool = matches!(disk.datastore.location, DatastoreLocation::Rbd { .. });
    let is_preallocated = disk.allocation == Allocation::Preallocated;
    let is_written = disk.image.is_some() || (is_in_pool && is_preallocated);
    disk.facts.is_none() && disk.role.is_data() && is_written
}

/// The permits of hosts and providers.
#[derive(Default)]
pub(super) struct Limits(Mutex<HashMap<(Share, Uuid), Arc<Semaphore>>>);

impl Limits {
    /// The permits of a host or a provider.
    pub(super) fn of(&self, share: Share, whose: Uuid) -> Arc<Semaphore> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let permits = known
            .entry((share, whose))
            .or_insert_with(|| Arc::new(Semaphore::new(share.permits())));
        Arc::clone(permits)
    }
}

/// Takes a permit if one is left.
pub(super) fn try_take(permits: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    Arc::clone(permits).try_acquire_owned().ok()
}
