//! How guests are run on a host.

use serde::{Deserialize, Serialize};

use crate::processor::Processor;

/// How guests are run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Accelerator {
    /// KVM or TCG.
    pub kind: AcceleratorKind,
    /// Why this one: what the probe saw.
    pub reason: String,
    /// The processor that guests of the model `host` get; none with emulation, and where it is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub processor: Option<Processor>,
}

/// KVM or software emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum AcceleratorKind {
    /// Hardware virtualization.
    Kvm,
    /// QEMU's emulation: correct, and 10 to 50 times slower.
    Tcg,
    /// Something that a newer agent says and this side does not know; the reason tells it.
    #[serde(other)]
    Unknown,
}
