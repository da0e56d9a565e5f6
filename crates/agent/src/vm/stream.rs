//! Streams between QEMU and its agent: pipes and sockets, of which QEMU gets one end.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use serde_json::{Value, json};
use tokio::time::sleep;
use vmseal_api::id::TaskId;
use vmseal_api::problem::Problem;

use super::internal;
use crate::hypervisor::qmp::{Qmp, QmpError};

/// How many bytes QEMU may write before they are sealed: the most that the kernel gives anybody.
const PIPE_SIZE: i32 = 1 << 20;

/// The pause between questions about a stream: the guest may stand still while its end is not noticed.
const ASK_INTERVAL: Duration = Duration::from_millis(10);

/// The pause between questions for the times of a stream that is complete: the guest stands still.
const TIMES_INTERVAL: Duration = Duration::from_millis(1);

/// How long QEMU is asked for the times of a stream that is complete. It takes a moment to measure them, and more where the
/// machine is busy; a guest should not stand still for longer to have a figure.
const TIMES_TIMEOUT: Duration = Duration::from_millis(300);

/// As fast as it can, in bytes a second: QEMU's usual limit is for networks.
pub const BANDWIDTH_MAX: u64 = 1 << 40;

/// A pipe: the reading end and the writing end.
pub fn pipe() -> Result<(OwnedFd, OwnedFd), Problem> {
    let (reading, writing) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(internal)?;
    if let Err(error) = fcntl(&writing, FcntlArg::F_SETPIPE_SZ(PIPE_SIZE)) {
        tracing::debug!(%error, "a pipe keeps its usual size");
    }
    Ok((reading, writing))
}

/// Two connected sockets: one for QEMU, and one for this process.
///
/// # Errors
/// Those of the kernel.
pub fn sockets() -> Result<(OwnedFd, UnixStream), Problem> {
    let (theirs, ours) = UnixStream::pair().map_err(internal)?;
    Ok((OwnedFd::from(theirs), ours))
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

/// Waits until QEMU has written or loaded its whole stream. `tell` is given what QEMU says of it each time. `silence` is how long it
/// may answer nothing.
///
/// # Errors
/// `internal`: QEMU's, and that the stream failed.
pub async fn completed(
    qmp: &Qmp,
    silence: Duration,
    mut tell: impl FnMut(&Value),
) -> Result<(), Problem> {
    let mut complete_since = None;
    loop {
        let state = qmp.execute_within("query-migrate", Value::Null, silence).await;
        let state = state.map_err(internal)?;
        tell(&state);
        if !is_complete(&state)? {
            sleep(ASK_INTERVAL).await;
            continue;
        }
        let since = complete_since.get_or_insert_with(Instant::now);
        if has_times(&state) || since.elapsed() >= TIMES_TIMEOUT {
            return Ok(());
        }
        sleep(TIMES_INTERVAL).await;
    }
}

/// Whether a stream that is complete has its times: QEMU says that it is complete a moment before it has measured how long that took.
/// Who loads one has none.
fn has_times(state: &Value) -> bool {
    state["total-time"] != 0
}

fn is_complete(state: &Value) -> Result<bool, Problem> {
    match state["status"].as_str().unwrap_or_default() {
        "completed" => Ok(true),
        "failed" | "cancelled" => {
            let why = state["error-desc"].as_str().unwrap_or("it does not say why");
            Err(internal(format!("QEMU has not moved the guest's memory: {why}")))
        }
        _ => Ok(false),
    }
}

/// Has QEMU give up a stream that it may be writing, so that its guest can go on.
///
/// # Errors
/// QEMU's.
pub async fn give_up(qmp: &Qmp) -> Result<(), QmpError> {
    loop {
        let state = qmp.execute("query-migrate", Value::Null).await?;
        match state["status"].as_str() {
            Some("setup" | "active" | "device" | "pre-switchover") => {
                qmp.execute("migrate_cancel", Value::Null).await?;
            }
            Some("cancelling") => {}
            _ => return Ok(()),
        }
        sleep(ASK_INTERVAL).await;
    }
}

/// Whether QEMU writes a stream, or has written one and its guest has not gone on since.
///
/// # Errors
/// QEMU's.
pub async fn is_under_way(qmp: &Qmp) -> Result<bool, QmpError> {
    if stands_still(&qmp.execute("query-status", Value::Null).await?) {
        return Ok(true);
    }
    let state = qmp.execute("query-migrate", Value::Null).await?;
    let status = state["status"].as_str();
    Ok(matches!(status, Some("setup" | "active" | "device" | "pre-switchover" | "cancelling")))
}

/// Whether QEMU has stopped its guest to write the rest of a stream.
#[must_use]
pub fn stands_still(state: &Value) -> bool {
    matches!(state["status"].as_str(), Some("finish-migrate" | "postmigrate"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_stands_still_when_qemu_has_stopped_it_to_send_it() {
        for (status, still) in [
            ("running", false),
            ("paused", false),
            ("guest-panicked", false),
            ("finish-migrate", true),
            ("postmigrate", true),
        ] {
            assert_eq!(stands_still(&json!({"status": status})), still, "{status}");
        }
        assert!(!stands_still(&json!({})));
    }

    #[test]
    fn a_stream_is_complete_when_qemu_says_so() {
        for status in ["setup", "active", "pre-switchover", "device", "a newer one"] {
            assert!(!is_complete(&json!({"status": status})).unwrap(), "{status}");
        }
        assert!(is_complete(&json!({"status": "completed"})).unwrap());
        for (state, has) in [
            (json!({"status": "completed", "total-time": 0, "downtime": 0}), false),
            (json!({"status": "completed", "total-time": 900, "downtime": 12}), true),
            (json!({"status": "completed"}), true),
        ] {
            assert_eq!(has_times(&state), has, "{state}");
        }
        for status in ["failed", "cancelled"] {
            let failed = is_complete(&json!({"status": status, "error-desc": "no space"}));
            assert!(failed.unwrap_err().detail.ends_with("no space"), "{status}");
        }
    }
}
