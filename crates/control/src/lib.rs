//! The control plane: inventory, policies, key providers, hosts, tasks, and the REST API before them.
//!
//! | module | what |
//! |---|---|
//! | [`initialise`], [`authority`], [`identity`] | the data directory; the CA; the server's certificate |
//! | [`store`] | the inventory |
//! | [`providers`], [`keys`] | where keys come from, and how they get to hosts |
//! | [`hosts`], [`alarms`] | joining, one monitor per host, what stands |
//! | [`tasks`] | durable work |
//! | [`retention`] | how long events are kept |
//! | `locks` | one lock for each of many things |
//! | `connections` | who may have how many connections |
//! | [`metrics`] | what the server measures |
//! | [`http`], [`server`] | the API, and the process |

pub mod alarms;
pub mod authority;
mod backoff;
mod connections;
mod expiry;
mod files;
pub mod hosts;
pub mod http;
pub mod identity;
pub mod initialise;
pub mod keys;
mod locks;
pub mod metrics;
pub mod providers;
pub mod retention;
mod scan;
pub mod server;
#[cfg(test)]
mod server_tests;
pub mod store;
pub mod tasks;
#[cfg(test)]
mod testing;

use aws_lc_rs::digest::{SHA256, digest};
use vmseal_api::problem::{ErrorCode, Problem};

pub use server::{Server, ServerError, ServerOptions, serve};

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
