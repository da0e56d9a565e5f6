//! Core dumps of VMs: what the memory of a guest held at one instant.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::id::DumpId;

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

/// Why a core dump was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DumpReason {
    /// Somebody asked for it.
    #[default]
    Request,
    /// The guest panicked.
    Panic,
}

impl DumpReason {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Request => "request",
            Self::Panic => "panic",
        }
    }
}

/// A core dump that a host has written by itself, as its guest panicked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PanicDump {
    /// Its id.
    pub dump: DumpId,
    /// Its format.
    pub format: DumpFormat,
    /// When it was whole.
    pub created: Timestamp,
    /// The length of its file, in bytes.
    pub bytes: u64,
    /// Whether it is encrypted.
    pub encrypted: bool,
}

/// A panic of a guest that was restarted, or left as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Panic {
    /// When.
    pub at: Timestamp,
    /// Whether the guest was restarted.
    pub restarted: bool,
    /// What was done, for people.
    pub detail: String,
}
