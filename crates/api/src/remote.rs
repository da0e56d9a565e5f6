//! Control planes that this one knows, and VMs that go from one to another, while they run or are off.
//!
//! ```text
//! source's server                                   destination's server
//!    POST arrivals/check  ─ what the VM is ─────────► each check, with its result; nothing is changed
//!    PUT  arrivals/ID     ─ the same ───────────────► Preparing ─► Prepared: names taken, a key of its own made
//!    POST arrivals/ID/session  ─ a sealed key ──────► its host waits for the source's host
//!    POST arrivals/ID/commit   ─────────────────────► Undecided ─► Running, or Cancelled
//!    POST arrivals/ID/cancel   ─────────────────────► Cancelled, unless it runs
//! ```
//! Until the destination has been asked to commit, either side may give up. Then its answer decides.

mod snapshots;

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

pub use self::snapshots::{ARRIVING_SNAPSHOTS, SnapshotOfArrival};
use crate::accelerator::Accelerator;
use crate::drain::OnDrain;
use crate::hardware::Hardware;
use crate::host::{DiskRole, KeptRoom, NicSpec};
use crate::id::{DiskId, MigrationId, RemoteId, TaskId, VmId};
use crate::kmip::Certificate;
use crate::migration::MigrationEncryption;
use crate::passphrase::SealedPassphrase;
use crate::problem::Problem;

/// What a server says of itself (`GET /api/v1/about`) that takes VMs of other control planes.
pub const ARRIVALS: &str = "arrivals";

/// What one says that counts what snapshots keep in the room that it looks for.
pub const ARRIVALS_KEPT: &str = "arrivals-kept";

/// What one says that takes VMs which are off, too.
pub const ARRIVALS_AT_REST: &str = "arrivals-at-rest";

/// What one says that takes VMs which are suspended, with the memory of their guests.
pub const ARRIVALS_SUSPENDED: &str = "arrivals-suspended";

/// What one says that takes VMs with a TPM which are off or suspended, with what the TPM keeps.
pub const ARRIVALS_TPM_AT_REST: &str = "arrivals-tpm-at-rest";

/// What one says that looks for hosts which read memory that is compressed, where it is asked to.
pub const ARRIVALS_COMPRESSED: &str = "arrivals-compressed";

/// Another control plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Remote {
    /// Its id here.
    pub id: RemoteId,
    /// Its name here.
    pub name: String,
    /// Where its server is.
    pub url: String,
    /// SHA-256 of its authority's certificate, which its server is known by.
    pub fingerprint: String,
}

/// Asks which certificate a server shows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct LookAtRemote {
    /// Where the server is: `https://HOST:PORT`.
    pub url: String,
}

/// The certificate of the authority that a server shows. Nobody has vouched for it yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RemoteShown {
    /// The certificate.
    pub certificate: Certificate,
}

/// Adds another control plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddRemote {
    /// Its name here.
    pub name: String,
    /// Where its server is: `https://HOST:PORT`.
    pub url: String,
    /// SHA-256 of its authority's certificate (`AB:CD:…`), which a user has compared.
    pub fingerprint: String,
    /// The access token of a user there, sealed for the name.
    pub token: SealedPassphrase,
}

/// How another control plane answers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RemoteChecked {
    /// The version of vmseal that its server is.
    pub vmseal: String,
    /// Whether it takes VMs of other control planes.
    pub arrivals: bool,
}

/// What a VM is that another control plane is to take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct BeginArrival {
    /// The VM.
    pub vm: ArrivingVm,
    /// Its policy there, by name or id.
    pub policy: String,
    /// The host there, by name or id; none means the one with the most free memory that can take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The datastore of that host, by name or id; none means the one with the most free room.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// The host that it runs on.
    pub source: SourceHost,
    /// The generation that its placement gets: higher than any before.
    pub generation: u64,
    /// Whether it is off, and stays so: its disks alone arrive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_rest: bool,
    /// Of one that is suspended, and stays so: the memory of its guest, which arrives with its disks. It is off otherwise. Only a server
    /// with the feature `arrivals-suspended` takes one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspended: Option<SuspendedMemory>,
    /// Whether the memory of its guest is compressed where that gets it there sooner. Only a server with the feature
    /// `arrivals-compressed` takes that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub compresses: bool,
}

/// The highest generation of a placement, and of a memory: the inventory's numbers are signed.
pub const GENERATION_MAX: u64 = i64::MAX as u64;

/// The memory of a guest whose VM is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SuspendedMemory {
    /// Its generation, which it keeps: the one that a start expects. None where that is not known, and any is taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
}

/// A VM that arrives, as the other control plane has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ArrivingVm {
    /// Its id, which it keeps: its guest knows it.
    pub id: VmId,
    /// Its name.
    pub name: String,
    /// What it is for.
    #[serde(default)]
    pub description: String,
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether it is started after its host has rebooted.
    #[serde(default)]
    pub autostart: bool,
    /// Whether what it is sent with is encrypted, where it has no key.
    #[serde(default)]
    pub migration_encryption: MigrationEncryption,
    /// What happens to it when its host is emptied.
    #[serde(default)]
    pub on_drain: OnDrain,
    /// Whether it has a key.
    pub has_key: bool,
    /// Virtual processors.
    pub vcpus: u32,
    /// Memory, in bytes.
    pub memory: u64,
    /// What its machine is.
    pub hardware: Hardware,
    /// Its disks, in boot order.
    pub disks: Vec<DiskOfArrival>,
    /// Its network cards, in their order.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
    pub nics: Vec<NicSpec>,
    /// Its snapshots. Only a server with the feature `arrivals-snapshots` takes any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotOfArrival>,
    /// The room that is taken where it is by what it has beside its disks as they are; none where that is not known. Only a server
    /// with the feature `arrivals-kept` reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<KeptRoom>,
}

/// A disk of a VM that arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DiskOfArrival {
    /// Its id, which it keeps.
    pub id: DiskId,
    /// Its name.
    pub name: String,
    /// Its size, in bytes.
    pub size: u64,
    /// Whether it is encrypted.
    pub encrypted: bool,
    /// What it is for.
    pub role: DiskRole,
}

/// The host that a VM runs on before it arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SourceHost {
    /// Its name there.
    pub name: String,
    /// The version of vmseal that its agent is.
    pub vmseal: String,
    /// How guests are run.
    pub accelerator: Accelerator,
    /// QEMU's version.
    pub qemu: String,
    /// What its agent can do, by name.
    pub features: Vec<String>,
}

/// One thing that was looked at before a VM may arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ArrivalCheck {
    /// What was looked at.
    pub what: String,
    /// The host there, where it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Whether the VM may arrive as far as this goes.
    pub ok: bool,
    /// What was found.
    pub detail: String,
}

impl std::fmt::Display for ArrivalCheck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let result = if self.ok { "ok" } else { "no" };
        match &self.host {
            Some(host) => write!(f, "{result}: {} of host '{host}': {}", self.what, self.detail),
            None => write!(f, "{result}: {}: {}", self.what, self.detail),
        }
    }
}

/// Whether a VM may arrive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ArrivalChecks {
    /// All that was looked at.
    pub checks: Vec<ArrivalCheck>,
    /// The host that it would get; none where no host can take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// The datastore of its disks there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub datastore: Option<String>,
    /// Where that host waits for VMs; none where no host can take it, and from a server of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub address: Option<SocketAddr>,
    /// Whether what it is sent with is encrypted, as the VM asks for and both agents can; none where no host can take it, and from
    /// a server of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
}

/// How far a VM is that arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ArrivalState {
    /// Its key is made.
    Preparing,
    /// It can be sent.
    Prepared,
    /// Its host was asked to let its guest go, or the arrival is given up; which of both it comes to is not known yet.
    Undecided,
    /// Its guest runs here; where it was off, the VM is here.
    Running,
    /// Its guest does not run here, and never will by this arrival; where it was off, the VM is not here.
    Cancelled,
    /// A state of a newer server that this side does not know.
    #[serde(other)]
    Unknown,
}

/// A VM that arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ArrivalShown {
    /// Its task.
    pub id: TaskId,
    /// How far it is.
    pub state: ArrivalState,
    /// The host that it gets.
    pub host: String,
    /// What its host's agent has written into the guest's memory itself, in bytes; none before the guest runs here, where QEMU has
    /// loaded all of it, and where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placed: Option<u64>,
    /// Why it does not arrive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
}

/// Has the host of an arrival wait for its source: one attempt to send it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ArrivalSession {
    /// The attempt.
    pub migration: MigrationId,
    /// The nonce of the session.
    pub nonce: u64,
    /// The key of the session, sealed for the id of the arrival as passphrases are.
    pub key: SealedPassphrase,
    /// How many connections there are.
    pub streams: u16,
    /// Whether what they carry is encrypted.
    pub encrypted: bool,
}

/// Where the source's host connects to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ArrivalAddress {
    /// The address.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub address: SocketAddr,
}
