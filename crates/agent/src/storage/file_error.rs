//! What a host says of a file that the file system refuses.

use std::io;
use std::path::Path;

use vmseal_api::problem::{ErrorCode, Problem};

/// That a file cannot be `what`: `no-space` where it is full, or `internal`.
pub(crate) fn failed(path: &Path, what: &str, error: &io::Error) -> Problem {
    let code = match error.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => ErrorCode::NoSpace,
        _ => ErrorCode::Internal,
    };
    Problem::new(code, format!("{} cannot be {what}: {error}", path.display()))
}
