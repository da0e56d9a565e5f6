//! The description of a host, and the versions of this contract that it speaks.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::version::ContractRange;
use crate::accelerator::Accelerator;
use crate::id::Incarnation;

/// What a host is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HostDescription {
    /// The versions of the contract that the agent speaks.
    pub contract: ContractRange,
    /// What the agent can do that not every agent of these versions can, by name.
    #[serde(default)]
    pub features: Vec<String>,
    /// The version of vmseal that the agent is.
    pub vmseal: String,
    /// The life of the agent process that answers; with a new one all keys are gone.
    pub incarnation: Incarnation,
    /// The boot of the machine's kernel: another one after each reboot. None from an agent that does not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// What the machine calls itself.
    pub hostname: String,
    /// The public half of the key pair that KEKs are sealed to (X25519, 32 bytes, base64).
    pub key_box: String,
    /// How guests are run here, found by running one.
    pub accelerator: Accelerator,
    /// QEMU's version.
    pub qemu: String,
    /// Logical processors.
    pub cpus: u32,
    /// Memory, in bytes.
    pub memory: u64,
    /// Whether the processor has AES instructions.
    pub aes_hardware: bool,
    /// Where the sockets of the disks of running VMs are, each at `vms/VM/diskN.sock` in it, in boot order.
    pub run_dir: String,
    /// The directories that images may be imported from and exported to.
    #[serde(default)]
    pub transfer_directories: Vec<String>,
    /// Where the agent waits for VMs that other hosts send; none where it receives none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub migration_address: Option<SocketAddr>,
    /// What could not be protected on this host as it should be (swap in the clear, memory not lockable).
    pub weaknesses: Vec<String>,
}
