//! What a migration within a control plane notes of itself.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use vmseal_api::host::ArrivingCopy;
use vmseal_api::id::DiskId;

/// The name of the first step.
pub(crate) const CHECK: &str = "check";

/// What the first step of a migration has found, and those after it need: its output.
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
