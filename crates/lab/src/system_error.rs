//! Why a system under test cannot be prepared, started or measured.

use std::io;
use std::path::PathBuf;

use crate::ceph::CephError;

/// Why a system could not be prepared or started.
#[derive(Debug, thiserror::Error)]
pub enum SystemError {
    /// A program is missing or cannot be run.
    #[error("{} cannot be run; {advice}", program.display())]
    Program {
        /// The program.
        program: PathBuf,
        /// How to get it.
        advice: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// The server ended, or made no socket in time.
    #[error("{system} does not serve: {what}; its log ends: {log}")]
    NotServing {
        /// Which system.
        system: &'static str,
        /// What happened instead.
        what: String,
        /// The end of its log.
        log: String,
    },
    /// A system with a load generator of its own did not measure.
    #[error("{system} has measured nothing: {what}; it said: {said}")]
    NothingMeasured {
        /// Which system.
        system: &'static str,
        /// What happened instead.
        what: String,
        /// The end of what it said.
        said: String,
    },
    /// An image cannot be made.
    #[error(transparent)]
    Image(#[from] CephError),
    /// What the storage has of a disk cannot be read.
    #[error("what the storage has of the disk of {system} cannot be read")]
    Kept {
        /// Which system.
        system: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A file of the test cannot be made, read or written.
    #[error("{} cannot be used", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Plaintext where ciphertext is expected, or the reverse.
    #[error(
        "{system} left {found} of {sectors} sectors in plaintext in its file, where {expected} are expected"
    )]
    AtRest {
        /// Which system.
        system: &'static str,
        /// Sectors of the file that contain the test's pattern.
        found: u64,
        /// All sectors of the disk.
        sectors: u64,
        /// The expected number.
        expected: u64,
    },
}
