//! What a process logs.

use serde::{Deserialize, Serialize};

use crate::id::VmId;

/// What a process logs, until it ends or is told otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LogLevel {
    /// Directives, separated by commas, as they are set: a level, or TARGET=LEVEL.
    pub levels: String,
    /// The running VMs whose filters were told, and did not answer: they log as before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub silent: Vec<VmId>,
}
