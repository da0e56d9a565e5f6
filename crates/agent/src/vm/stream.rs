//! Streams between QEMU and its agent: pipes, of which QEMU gets one end.

use std::os::fd::{AsFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde_json::json;
use vmseal_api::id::TaskId;
use vmseal_api::problem::Problem;

use super::internal;
use crate::hypervisor::qmp::{Qmp, QmpError};

/// How many bytes QEMU may write before they are sealed: the most that the kernel gives anybody.
const PIPE_SIZE: i32 = 1 << 20;

/// A pipe: the reading end and the writing end.
pub fn pipe() -> Result<(OwnedFd, OwnedFd), Problem> {
    let (reading, writing) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(internal)?;
    if let Err(error) = fcntl(&writing, FcntlArg::F_SETPIPE_SZ(PIPE_SIZE)) {
        tracing::debug!(%error, "a pipe keeps its usual size");
    }
    Ok((reading, writing))
}

/// Passes a descriptor to QEMU, and returns its name there; nobody else keeps it.
pub async fn pass(qmp: &Qmp, purpose: &str, fd: OwnedFd) -> Result<String, QmpError> {
    let name = format!("{purpose}-{}", TaskId::new());
    qmp.pass_descriptor(&name, fd.as_fd()).await?;
    Ok(name)
}

/// Takes back a descriptor that QEMU has not used, so that the other end of its pipe sees the end.
pub async fn take_back(qmp: &Qmp, name: &str) {
    // One that QEMU has used, or a QEMU that is gone, has closed it.
    let _ = qmp.execute("closefd", json!({"fdname": name})).await;
}
