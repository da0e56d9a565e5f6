//! Disks that linked clones stood on, and that use their copies: the clones have kept the former files, and nothing is shared any more.

use vmseal_api::host::DiskState;

use super::{concerns, copy_of};
use crate::operation::Operation;
use crate::store::disks::Disk;

/// Whether a disk, as it was on record, is seen to use its copy. One that differs from the disk in its data key alone does not show: its
/// clones, and what it stood on, then stay on record until the same is begun again, which copies all of these disks.
pub(super) fn has_pivoted(operation: &Operation, before: &Disk, seen: &DiskState) -> bool {
    let shows = !matches!(operation, Operation::DeepRecryptVm { .. });
    let seen = std::slice::from_ref(seen);
    shows && concerns(operation, before) && copy_of(seen, before, operation).is_some()
}

/// What an event says of linked clones that stood on the disks.
pub(super) fn told(clones: &[String]) -> String {
    match clones {
        [] => String::new(),
        clones => format!("; linked clones {} keep what they shared", clones.join(", ")),
    }
}
