//! HTTP above the control plane: the REST API, and the process that serves it over TLS.
//!
//! | module | what |
//! |---|---|
//! | [`routes`] | one handler for each operation, which calls [`vmseal_control::services`] |
//! | `request` | the parts of a request: user, body, query, names |
//! | `answer`, `problem` | answers |
//! | `document` | limits and errors in the API document |
//! | `trace` | ids, log lines and metrics of requests |
//! | `connections` | limits of connections |
//! | [`server`] | the process |

mod answer;
mod connections;
mod document;
mod problem;
mod request;
pub mod routes;
pub mod server;
#[cfg(test)]
mod server_tests;
#[cfg(test)]
mod tests;
mod trace;

pub use server::{Server, ServerError, ServerOptions, serve};
