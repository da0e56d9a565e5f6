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
//! | [`host`] | the real host behind [`vmseal_api::host::HostAgent`] |
//! | [`simulated`] | a simulated one with failure injection, for tests of the control plane |
//! | `contract` | the suite that both pass (feature `contract-suite`) |
//! | `vm`, `vms` | the state machine of a VM and its owner; start, watch, end, adopt; the VMs of the host |
//! | `rules` | what may be done when |
//! | `disk`, `home` | making and opening disks; their files, locks, and notes |
//! | `datastore` | marks, room, debris |
//! | `replica` | the second copy of a disk, and who may write to one that has it |
//! | `disk_keys` | changing the keys that open a VM's disks |
//! | `image`, `filling` | what disks are filled from, and the filling, which goes on after a kill |
//! | `export`, `exported` | writing a disk to a file for elsewhere; which file that is, on record |
//! | `transfer` | where images may be read from and written to |
//! | `filter`, `qemu`, [`qmp`], `console` | the two processes of a VM and the ways to them |
//! | `measure`, `contents`, `patience` | how datastores stand; what is on one; file systems that hang |
//! | `metrics`, `log_level` | what agent and filters have measured; what they log |
//! | `process`, `run_dir`, [`run_record`], `users` | processes that outlive the agent, on record, under own users |
//! | `deaths`, `restarts` | deaths that nobody has seen to yet, on record; how many filters a VM may lose |
//! | `keys` | KEKs: in locked memory, checked against what the inventory means |
//! | [`accelerator`], `machine` | what this machine can do, and where it falls short |
//! | [`doctor`] | what an operator has to mend here |
//! | [`join`], `identity`, `tls`, [`http`] | becoming a host, and being called |

pub mod accelerator;
mod atomic_file;
mod board;
mod console;
mod contents;
#[cfg(any(test, feature = "contract-suite"))]
pub mod contract;
mod datastore;
mod deaths;
mod disk;
mod disk_keys;
pub mod doctor;
mod export;
mod exported;
mod filling;
mod filter;
mod home;
pub mod host;
pub mod http;
pub mod identity;
mod image;
pub mod join;
mod keys;
mod locked;
mod log_level;
mod machine;
mod measure;
mod metrics;
mod patience;
mod process;
mod qemu;
pub mod qmp;
mod replica;
mod restarts;
mod rules;
mod run_dir;
pub mod run_record;
pub mod simulated;
pub mod tls;
mod transfer;
mod users;
mod vm;
mod vms;

use std::path::PathBuf;
use std::sync::Arc;

pub use accelerator::Choice as AcceleratorChoice;
pub use host::{AgentOptions, RealHost};
pub use join::{JoinError, JoinOptions, JoinedAs, join};

/// Why an agent ended.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// It has no identity, or a damaged one.
    #[error(transparent)]
    Identity(#[from] identity::IdentityError),
    /// It did not start.
    #[error(transparent)]
    Start(#[from] host::StartError),
    /// It could not listen.
    #[error(transparent)]
    Listen(#[from] http::ListenError),
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
    options: AgentOptions,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> Result<(), AgentError> {
    let mut identity = identity::Identity::load(&state_dir)?;
    identity.address = listen.unwrap_or(identity.address);
    let host = RealHost::start(options).await?;
    let endpoint = http::Endpoint::bind(&identity).await?;
    tracing::info!(host = %identity.host, address = %endpoint.address(), "serving");
    endpoint.serve(Arc::new(host), shutdown).await?;
    Ok(())
}
