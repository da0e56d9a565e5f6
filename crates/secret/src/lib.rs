//! Key bytes in locked memory, and what is done with them: derivation, wrapping, authentication,
//! sealing to a public key and under a passphrase, hardening of the process that holds them.
//!
//! No I/O other than memory, no async. Formats are described in docs/formats/.

mod bytes;
mod memory;

pub use bytes::{DEK_LEN, KEK_LEN, SecretBytes};
pub use memory::{Backing, MemoryError, SECRET_LEN_MAX};
