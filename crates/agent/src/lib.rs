//! The host: runs VMs for a control plane.
//!
//! ```text
//!  server ── HTTPS, client certificate ──► http ─► HostAgent ─┬─ host ─► vm (one task per VM)
//!                                                             │            ├─ QEMU       (qmp, console)
//!                                                             │            └─ vmseal-filter (control)
//!                                                             └─ simulated: the same rules, no processes
//! ```
//! | module | subject |
//! |---|---|
//! | [`host`] | the real host behind [`vmseal_api::host::HostAgent`]; joining, being called, the doctor |
//! | `vm` | the state machine of a VM and its owner; start, watch, end, adopt; the VMs of the host |
//! | `storage` | datastores and what is on them: disks, homes, replicas, images, exports |
//! | `filter` | `vmseal-filter`: its configuration, its control socket, what it measures and logs |
//! | [`hypervisor`] | QEMU: its command line, QMP, the serial console, what accelerates it here |
//! | [`process`] | processes that outlive the agent, on record, under users of their own; what this machine is |
//! | [`migration`] | what goes from host to host when a VM moves |
//! | `mounts` | what is mounted where, and who serves it |
//! | `timed` | calls on file systems that may hang |
//! | `keys` | KEKs: in locked memory, checked against what the inventory means |
//! | `rules` | what may be done with a VM when |
//! | `signer` | the key that reports are signed with |
//! | [`simulated`] | a simulated host with failure injection, for tests of the control plane |
//! | `contract` | the suite that both hosts pass (feature `contract-suite`) |

#[cfg(any(test, feature = "contract-suite"))]
pub mod contract;
mod filter;
pub mod host;
pub mod hypervisor;
mod jobs;
mod keys;
pub mod migration;
mod mounts;
pub mod process;
mod rules;
mod signer;
pub mod simulated;
#[cfg(test)]
mod skipped;
mod storage;
mod timed;
mod vm;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

pub use host::join::{JoinError, JoinOptions, JoinedAs, join};
pub use host::{AgentOptions, RealHost};
pub use hypervisor::accelerator::Choice as AcceleratorChoice;
pub use hypervisor::firmware::DIRECTORY as FIRMWARE_DIRECTORY;
pub use hypervisor::tpm::PROGRAM as SWTPM;
pub use vm::{DISK_STALL, FILTER_RESTART_TIMEOUT};

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// It has no identity, or a damaged one.
    #[error(transparent)]
    Identity(#[from] host::identity::IdentityError),
    /// It did not start.
    #[error(transparent)]
    Start(#[from] host::StartError),
    /// It could not listen.
    #[error(transparent)]
    Listen(#[from] host::http::ListenError),
    /// Its listening socket failed.
    #[error("the listening socket: {0}")]
    Serve(#[from] std::io::Error),
}

/// Runs this machine as a host until `shutdown`. VMs run on when it ends; the next agent adopts them. It listens
/// at `listen` where that is given, else at the address that it joined with.
///
/// # Errors
/// [`AgentError`].
pub async fn run(
    state_dir: PathBuf,
    listen: Option<String>,
    mut options: AgentOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), AgentError> {
    let mut identity = host::identity::Identity::load(&state_dir)?;
    identity.address = listen.unwrap_or(identity.address);
    options.migration_listen.get_or_insert_with(|| migration_address(&identity.address));
    let host = RealHost::start(options).await?;
    host.signs_as(&identity)?;
    let endpoint = host::http::Endpoint::bind(&identity).await?;
    tracing::info!(host = %identity.host, address = %endpoint.address(), "serving");
    endpoint.serve(Arc::new(host), shutdown).await?;
    Ok(())
}

/// The usual port at which running VMs of other hosts are received.
const MIGRATION_PORT: u16 = 8446;

/// Where running VMs of other hosts are received, unless an operator says otherwise: at the address of the agent.
fn migration_address(agent: &str) -> SocketAddr {
    let any = IpAddr::from(Ipv4Addr::UNSPECIFIED);
    let ip = agent.parse::<SocketAddr>().map_or(any, |address| address.ip());
    SocketAddr::new(ip, MIGRATION_PORT)
}
