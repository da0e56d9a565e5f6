//! Restricts the process once everything it needs is open, so that an attacker who controls it can do little.
//!
//! ```text
//!  Opening: files, sockets, keys, rings
//!      └── enter ──> Confined: capabilities dropped, limits set, Landlock, system calls filtered
//!                       └── a system call that is not allowed ──> said on standard error, ended by SIGSYS
//! ```
//! Each step needs system calls that a later one forbids, so the order matters: the filter of system calls
//! comes last. Landlock covers the calling thread and the threads it starts, so all of this happens before
//! there are others. The filter of system calls does not see the operations of a ring (io_uring); a ring is
//! restricted where it is made ([`crate::storage::rings`]), and no further one can be made; a spare one gets a file later.
//!
//! The reasons, and the remaining risks, are in docs/decisions/019.

mod capabilities;
mod files;
mod limits;
pub mod system_calls;

use std::io;

use vmseal_api::filter::{Confinement, FilterConfig};

use crate::storage::rings;

pub use files::confine as confine_files;
pub use system_calls::confine as confine_system_calls;

/// Why a process cannot be confined, and so must not serve.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// Capabilities.
    #[error("capabilities cannot be dropped: {0}")]
    Capabilities(#[source] io::Error),
    /// Limits.
    #[error("the limit {limit} cannot be set: {error}")]
    Limit {
        /// Its name.
        limit: &'static str,
        /// Why.
        error: io::Error,
    },
    /// The filter of system calls.
    #[error(
        "system calls cannot be filtered (seccomp): {0}; a kernel with CONFIG_SECCOMP_FILTER is needed"
    )]
    SystemCalls(#[from] system_calls::SystemCallsError),
}

/// Confines the process. Call it when everything in the configuration is open, and before
/// there is a second thread.
///
/// # Errors
/// [`ConfinementError`]. A kernel without Landlock is no error: the result says so.
pub fn enter(config: &FilterConfig) -> Result<Confinement, ConfinementError> {
    capabilities::drop_all_but_lock().map_err(ConfinementError::Capabilities)?;
    let memory_bytes = limits::memory(config);
    limits::set(memory_bytes, runs_alone(config))?;
    let files = files::confine();
    rings::seal();
    system_calls::confine()?;
    Ok(Confinement { files, memory_bytes })
}

/// Whether no other process runs as this user, so that limits that are counted per user apply to this
/// process alone.
fn runs_alone(config: &FilterConfig) -> bool {
    let own = nix::unistd::geteuid();
    !own.is_root() && config.control_uid.is_some_and(|agent| agent != own.as_raw())
}
