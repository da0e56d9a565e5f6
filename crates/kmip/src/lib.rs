//! A client of key management servers: KMIP 1.0 to 1.4 (OASIS), TTLV encoding, over mutual TLS.
//!
//! | module | what |
//! |---|---|
//! | [`ttlv`] | the encoding, without I/O: bad input is an error, never a panic or a huge allocation |
//! | [`fields`] | the items of a structure by their tags, and how a response can violate the protocol |
//! | [`message`] | requests and responses that carry operations, without I/O |
//! | [`operation`] | the operations: requests to a server, and its answers |
//! | `client` | connections, TLS, the pool, and [`Client`](client::Client) (feature `client`, on by default) |
//! | `testing` | servers and certificates for tests (feature `testing`) |
//!
//! docs/kmip.md describes what is sent, what a server must support and what is tolerated.

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
