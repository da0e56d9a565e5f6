//! The control plane: inventory, policies, key providers, hosts, tasks, and the services that the API offers.
//! HTTP is above it, in a crate of its own.
//!
//! | module | what |
//! |---|---|
//! | [`setup`] | the data directory; the CA; the server's certificate |
//! | [`store`] | the inventory |
//! | [`providers`] | where keys come from |
//! | [`hosts`] | joining, one monitor per host, how keys get there, alarms |
//! | [`operation`], [`tasks`] | durable work |
//! | [`retention`] | how long events are kept |
//! | [`services`] | one function for each operation, with its caller and its privilege |
//! | [`control_plane`] | all of it, at work |
//! | `locks` | one lock for each of many things |
//! | [`metrics`] | what the server measures |

mod backoff;
pub mod control_plane;
pub mod hosts;
mod locks;
pub mod metrics;
pub mod operation;
pub mod providers;
pub mod retention;
pub mod services;
pub mod setup;
pub mod store;
pub mod tasks;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, missing_docs)] // a test that cannot go on ends
pub mod testing;

use aws_lc_rs::digest::{SHA256, digest};
use vmseal_api::problem::{ErrorCode, Problem};

/// Who acts where no user does.
pub const SELF: &str = "vmseal";

/// An error that is nobody's business but the operator's: it is logged, and the user is told that.
fn internal(error: &(dyn std::error::Error + '_)) -> Problem {
    tracing::error!(error = %error, "internal error");
    Problem::new(ErrorCode::Internal, "an internal error; the server's log says which")
}

/// SHA-256 in hexadecimal.
fn sha256_hex(bytes: &[u8]) -> String {
    digest(&SHA256, bytes).as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}
