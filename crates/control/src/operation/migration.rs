//! What tasks note of themselves that give a VM, or a clone, another host.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use vmseal_api::host::ArrivingCopy;
use vmseal_api::id::DiskId;

/// The name of the step that checks.
pub(crate) const CHECK: &str = "check";

/// The name of the commit step of a migration, within a control plane and to another one.
pub(crate) const SWITCH: &str = "switch";

/// What the check of a migration has found, and the steps after it need: its output.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CheckedMigration {
    pub(crate) disks: Vec<DiskId>,
    pub(crate) generation: u64,
    /// The disks that the destination gets copies of, and where.
    #[serde(default)]
    pub(crate) copies: Vec<ArrivingCopy>,
    /// The same disks, and where they are at the source; earlier versions did not note it.
    #[serde(default)]
    pub(crate) former: Vec<ArrivingCopy>,
    /// When the migration began; earlier versions did not note it.
    #[serde(default)]
    pub(crate) began: Option<Timestamp>,
}

/// The same of the disks of a clone that another host gets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CheckedClone {
    /// The generation of the placement at the destination.
    pub(crate) generation: u64,
    /// All disks, and where the destination gets them.
    pub(crate) copies: Vec<ArrivingCopy>,
    /// The same disks, and where they are at the source.
    pub(crate) former: Vec<ArrivingCopy>,
}
