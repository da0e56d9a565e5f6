//! A guest that sleeps: it has gone into ACPI S3, and its processors stand still until something wakes it, as an alarm of its clock.
//!
//! QEMU before 9.0 does not stop such a guest, though it answers that it has: the guest goes on as soon as it is woken. It has it go on by
//! itself when it is to send its memory, and leaves it standing still when it is reset (tried with 7.2, docs/decisions/293).

use serde_json::Value;
use vmseal_api::host::VmSpec;
use vmseal_api::problem::Problem;

use super::internal;
use crate::hypervisor::plug;
use crate::hypervisor::qmp::{Qmp, QmpError};
use crate::rules;

/// QEMU's status of a guest that sleeps.
const ASLEEP: &str = "suspended";

/// The first version of QEMU that stops a guest that sleeps, and saves it as it is.
const KEPT_ASLEEP_SINCE: u64 = 9;

/// Whether a guest sleeps of which QEMU says this. One that QEMU has stopped does not, whatever it did before.
pub fn sleeps(status: &Value) -> bool {
    status["status"] == ASLEEP
}

/// Whether the guest sleeps.
///
/// # Errors
/// QEMU's.
pub async fn is_asleep(qmp: &Qmp) -> Result<bool, QmpError> {
    Ok(sleeps(&qmp.execute("query-status", Value::Null).await?))
}

/// Checks that QEMU, which was asked to stop the guest, has done so. `what` says what is not done otherwise.
///
/// # Errors
/// `wrong-state`; `internal`: QEMU's.
pub async fn require_stopped(qmp: &Qmp, spec: &VmSpec, what: &str) -> Result<(), Problem> {
    match is_asleep(qmp).await.map_err(internal)? {
        true => Err(rules::sleeps(spec, what)),
        false => Ok(()),
    }
}

/// Checks that the guest is awake, or that QEMU keeps one that sleeps as it is. `what` says what is not done otherwise.
///
/// # Errors
/// As [`require_stopped`].
pub async fn require_awake(qmp: &Qmp, spec: &VmSpec, what: &str) -> Result<(), Problem> {
    if plug::is_at_least(qmp, KEPT_ASLEEP_SINCE).await.map_err(internal)? {
        return Ok(());
    }
    require_stopped(qmp, spec, what).await
}

/// Whether a guest that has fallen asleep while its memory is sent may be sent: it runs again, or QEMU sends it as it is. One that does not
/// run was asleep when the rest of its memory was sent, or may have been.
///
/// # Errors
/// QEMU's.
pub async fn may_be_sent(qmp: &Qmp) -> Result<bool, QmpError> {
    let status = qmp.execute("query-status", Value::Null).await?;
    Ok(status["running"] == Value::Bool(true) || plug::is_at_least(qmp, KEPT_ASLEEP_SINCE).await?)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::time::Duration;

    use serde_json::json;
    use tokio::sync::mpsc;
    use tokio::time::{sleep, timeout};
    use vmseal_api::problem::ErrorCode;

    use super::*;
    use crate::hypervisor::qmp::Event;
    use crate::process::run_dir::tests::spec;
    use crate::vm::panicking;

    /// How long the firmware may take to start the guest: emulated, on a machine that runs other tests.
    const BOOTS_WITHIN: Duration = Duration::from_secs(120);

    /// The boot sector of a guest that sleeps at once: mov dx, 0x604; mov ax, 0x2400; out dx, ax; then it halts. It is the port of ACPI's
    /// PM1a control block of q35, and there SLP_EN with QEMU's number of S3.
    const SLEEPER: [u8; 10] = [0xba, 0x04, 0x06, 0xb8, 0x00, 0x24, 0xef, 0xf4, 0xeb, 0xfd];

    /// The size of its disk: firmware starts from none of a few sectors.
    const DISK_SIZE: u64 = 10 << 20;

    /// QEMU, killed when dropped.
    struct Qemu(Child);

    impl Drop for Qemu {
        fn drop(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    async fn start(directory: &Path) -> (Qemu, Qmp, mpsc::Receiver<Event>) {
        let (disk, socket) = (directory.join("disk"), directory.join("qmp"));
        let mut sector = [0; 512];
        sector[..SLEEPER.len()].copy_from_slice(&SLEEPER);
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        std::fs::write(&disk, sector).unwrap();
        std::fs::File::options().write(true).open(&disk).unwrap().set_len(DISK_SIZE).unwrap();
        let child = Command::new("qemu-system-x86_64")
            .args(["-S", "-machine", "q35,accel=tcg", "-m", "64", "-nodefaults"])
            .args(["-display", "none"])
            .args(["-drive", &format!("file={},format=raw,if=virtio", disk.display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", socket.display())])
            .stdin(Stdio::null())
            .spawn()
            .expect("qemu-system-x86_64 is installed (scripts/prerequisites)");
        let qemu = Qemu(child);
        for _ in 0..300 {
            match Qmp::connect(&socket).await {
                Ok((qmp, events)) => return (qemu, qmp, events),
                Err(QmpError::Io(_)) => sleep(Duration::from_millis(100)).await,
                Err(error) => panic!("{error}"),
            }
        }
        panic!("QEMU has not opened its monitor");
    }

    async fn falls_asleep(events: &mut mpsc::Receiver<Event>) {
        let asleep = async {
            while let Some(event) = events.recv().await {
                if event == Event::GuestAsleep {
                    return;
                }
            }
            panic!("QEMU has ended");
        };
        timeout(BOOTS_WITHIN, asleep).await.expect("the guest does not fall asleep");
    }

    #[tokio::test]
    async fn a_guest_that_sleeps_is_not_taken_for_one_that_is_stopped_and_boots_when_it_is_reset() {
        let directory = tempfile::tempdir().unwrap();
        let (_guard, qmp, mut events) = start(directory.path()).await;
        let spec = spec();
        assert!(!is_asleep(&qmp).await.unwrap());
        require_awake(&qmp, &spec, "is not sent").await.unwrap();
        qmp.execute("cont", Value::Null).await.unwrap();
        falls_asleep(&mut events).await;
        assert!(is_asleep(&qmp).await.unwrap());
        let keeps = plug::is_at_least(&qmp, KEPT_ASLEEP_SINCE).await.unwrap();
        assert_eq!(require_awake(&qmp, &spec, "is not sent").await.is_ok(), keeps);
        assert_eq!(may_be_sent(&qmp).await.unwrap(), keeps);
        // It boots again.
        panicking::restart(&qmp).await.unwrap();
        falls_asleep(&mut events).await;
        qmp.execute("stop", Value::Null).await.unwrap();
        let stopped = require_stopped(&qmp, &spec, "is not paused").await;
        assert_eq!(stopped.is_ok(), keeps);
        if let Err(refused) = stopped {
            assert_eq!(refused.code, ErrorCode::WrongState, "{refused}");
            for part in ["is not paused", "sleeps", "vmseal vm reset guest"] {
                assert!(refused.detail.contains(part), "{part}: {refused}");
            }
        }
    }

    #[test]
    fn a_guest_that_qemu_has_stopped_does_not_sleep() {
        for (status, expected) in [
            (json!({"running": false, "status": "suspended"}), true),
            (json!({"running": false, "status": "paused"}), false),
            (json!({"running": true, "status": "running"}), false),
            (json!({}), false),
        ] {
            assert_eq!(sleeps(&status), expected, "{status}");
        }
    }
}
