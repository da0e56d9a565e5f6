//! What tells one medium of a CD-ROM drive from another.

use serde::{Deserialize, Serialize};

/// What is known of a medium without reading all of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MediumFacts {
    /// Its size, in bytes.
    pub bytes: u64,
    /// SHA-256 of its first and its last MiB, in hexadecimal digits.
    pub ends: String,
}
