//! Disks that linked clones stood on, and that use their copies: the clones have kept the former files, and nothing is shared any more.

use vmseal_api::host::DiskState;

use super::{concerns, copy_of};
use crate::operation::Operation;
use crate::store::disks::Disk;

/// What is known of disks that a task has copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pivoted {
    /// All of them use their copies.
    All,
    /// Some of them may.
    AsFound,
}

impl Pivoted {
    /// Whether a disk, as it was on record, certainly uses its copy. A copy that differs from the disk in its data key alone does not show: the
    /// clones then stay on record until the same is begun again, which copies all of these disks.
    pub(super) fn is_certain(self, operation: &Operation, before: &Disk, seen: &DiskState) -> bool {
        let shows = !matches!(operation, Operation::DeepRecryptVm { .. });
        let seen = std::slice::from_ref(seen);
        self == Self::All
            || (shows && concerns(operation, before) && copy_of(seen, before, operation).is_some())
    }
}

/// What an event says of linked clones that stood on the disks.
pub(super) fn told(clones: &[String]) -> String {
    match clones {
        [] => String::new(),
        clones => format!("; linked clones {} keep what they shared", clones.join(", ")),
    }
}
