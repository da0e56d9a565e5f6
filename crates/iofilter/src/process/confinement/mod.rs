//! What the process can no longer do once everything it needs is open, whoever controls it then.
//!
//! ```text
//!  Opening: files, sockets, keys, rings
//!     └── enter ──> Confined, for good: capabilities dropped, limits set, Landlock, system calls filtered
//!                      └── a system call that is on no list ──> said on standard error, ended by SIGSYS
//! ```
//! Each step makes the next one's tools needless, so their order matters: the filter of system calls
//! comes last. Landlock holds for the calling thread and those that it starts, so all of it happens
//! before there are others. What a ring (io_uring) may do passes by that filter; it is restricted where
//! it is made ([`crate::storage::uring`]), and no further one can be made.
//!
//! The reasons, and what is left, are in docs/decisions/019.

mod capabilities;
mod files;
mod limits;
pub mod system_calls;

use std::io;

use vmseal_api::filter::{Confinement, FilterConfig};

pub use files::confine as confine_files;
pub use system_calls::confine as confine_system_calls;

/// Why a process cannot be confined, and must not serve.
#[derive(Debug, thiserror::Error)]
pub enum ConfinementError {
    /// Capabilities.
    #[error("capabilities cannot be dropped: {0}")]
    Capabilities(#[source] io::Error),
    /// Limits.
    #[error("the limit {limit} cannot be set: {error}")]
    Limit {
        /// Which.
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

/// Confines the process. To be called when everything that the configuration names is open, and before
/// there is a second thread.
///
/// # Errors
/// [`ConfinementError`]. A kernel without Landlock is none: the answer says so.
pub fn enter(config: &FilterConfig) -> Result<Confinement, ConfinementError> {
    capabilities::drop_all_but_lock().map_err(ConfinementError::Capabilities)?;
    let memory_bytes = limits::memory(config);
    limits::set(memory_bytes, runs_alone(config))?;
    let files = files::confine();
    system_calls::confine()?;
    Ok(Confinement { files, memory_bytes })
}

/// Whether the process runs as a user that no other process has, so that what is counted by user is its
/// own.
fn runs_alone(config: &FilterConfig) -> bool {
    let own = nix::unistd::geteuid();
    !own.is_root() && config.control_uid.is_some_and(|agent| agent != own.as_raw())
}
