//! What a request would do.

use serde::{Deserialize, Serialize};

use crate::drain::PlannedVm;

/// What a request would do that is only tried (`dry_run=true`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Plan {
    /// What it would do (`vm.create`, `policy.delete`, …).
    pub kind: String,
    /// The resource that it is about, by name.
    pub target: String,
    /// What would be done, in order, for people.
    pub steps: Vec<String>,
    /// What would be done, and may turn out to be too much.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// What would happen to each VM of a host that is emptied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vms: Vec<PlannedVm>,
}
