//! Key bytes in locked memory, and the operations on them: derivation, wrapping, authentication, sealing to a
//! public key and under a passphrase, keys of Ceph users, hardening of the process that holds them.
//!
//! No I/O other than memory, no async. Formats are described in docs/formats/.

mod bytes;
pub mod cephx;
pub mod derive;
pub mod digest;
mod hpke;
mod locked_file;
pub mod mac;
mod memory;
pub mod passphrase;
pub mod passphrase_rule;
mod pbkdf2;
pub mod process;
pub mod sealed_box;
mod stripes;
pub mod wrap;
pub mod xts;

pub use bytes::{DEK_LEN, KEK_LEN, SecretBytes};
pub use locked_file::LockedFile;
pub use memory::{Backing, MemoryError, SECRET_LEN_MAX, SecretFd};
pub use pbkdf2::pbkdf2_sha256;
pub use stripes::Stripes;

/// The bytes of a test vector.
#[cfg(test)]
fn hex(digits: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}
