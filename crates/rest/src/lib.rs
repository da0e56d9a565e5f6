//! HTTP above the control plane: the REST API, and the process that serves it over TLS.
//!
//! | module | what |
//! |---|---|
//! | [`routes`] | one handler for each operation: what is sent becomes a call of [`vmseal_control::services`] |
//! | `request` | what comes with a request: who asks, body, query, names |
//! | `answer`, `problem` | what goes back |
//! | `trace` | ids, log lines and metrics of requests |
//! | `connections` | who may have how many connections |
//! | [`server`] | the process |

mod answer;
mod connections;
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
