//! The control plane: inventory, policies, key providers, hosts, tasks, and the services of the API. HTTP is in
//! another crate.
//!
//! | module | what |
//! |---|---|
//! | [`setup`] | the data directory; the CA; the server's certificate |
//! | [`store`] | the inventory |
//! | [`providers`] | key providers |
//! | [`hosts`] | joining, one monitor per host, key delivery, alarms |
//! | [`remotes`] | other control planes |
//! | [`operation`], [`tasks`] | durable tasks |
//! | `task_alarms` | alarms about tasks that need an operator |
//! | `compliance` | whether the storage of VMs is as their policies require |
//! | `stalls` | which agents have requests fail that storage does not answer |
//! | [`backup`] | backups of the server itself |
//! | [`retention`] | the deletion of old events |
//! | [`services`] | one function for each operation, with its caller and its privilege |
//! | [`control_plane`] | starts and stops all of it |
//! | `locks` | one lock for each key |
//! | [`metrics`] | the server's metrics |

mod backoff;
pub mod backup;
mod compliance;
pub mod control_plane;
pub mod hosts;
mod locks;
pub mod metrics;
pub mod operation;
pub mod providers;
pub mod remotes;
pub mod retention;
pub mod services;
pub mod setup;
mod stalls;
pub mod store;
mod task_alarms;
pub mod tasks;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, missing_docs)] // a test that cannot go on ends
pub mod testing;

use aws_lc_rs::digest::{SHA256, digest};
use vmseal_api::problem::{ErrorCode, Problem};

/// The actor of work that no user asked for.
pub const SELF: &str = "vmseal";

/// An internal error: its details go to the log only, and the answer points there.
fn internal(error: &(dyn std::error::Error + '_)) -> Problem {
    tracing::error!(error = %error, "internal error");
    Problem::new(ErrorCode::Internal, "an internal error; the server's log says which")
}

/// SHA-256 in hexadecimal.
fn sha256_hex(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
