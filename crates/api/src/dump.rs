//! Core dumps of VMs: what the memory of a guest held at one instant.

use serde::{Deserialize, Serialize};

/// The format of a core dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DumpFormat {
    /// An ELF core file, as long as the guest's memory: for gdb and crash.
    #[default]
    Elf,
    /// A compressed dump in the flattened format of makedumpfile: for crash.
    Kdump,
}

impl DumpFormat {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Elf => "elf",
            Self::Kdump => "kdump",
        }
    }
}
