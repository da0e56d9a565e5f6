//! A client of key management servers: KMIP 1.0 to 1.4 (OASIS), TTLV encoding, over mutual TLS.
//!
//! | module | what |
//! |---|---|
//! | [`ttlv`] | the encoding, without I/O: hostile input is an error, never a panic or an allocation by its word |
//! | [`fields`] | the items of a structure by their tags, and how a response can depart from the protocol |
//! | [`message`] | requests and responses around operations, without I/O |
//! | [`operation`] | what is asked of a server, and its answers |
//! | `client` | connections, TLS, the pool, and [`Client`](client::Client) (feature `client`, on by default) |
//! | `testing` | servers and certificates for tests (feature `testing`) |
//!
//! What is sent, what a server has to support and what is tolerated: docs/kmip.md.

#[cfg(feature = "client")]
pub mod client;
mod enumeration;
pub mod fields;
pub mod message;
pub mod operation;
#[cfg(feature = "testing")]
pub mod testing;
pub mod ttlv;
mod version;

pub use enumeration::{OperationCode, ResultReason, RevocationReason, State};
pub use version::ProtocolVersion;
