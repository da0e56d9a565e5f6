//! A guest that sleeps: it has gone into ACPI S3, and its processors stand still until something wakes it, as an alarm of its clock.
//!
//! QEMU before 9.0 does not stop such a guest, though it answers that it has: the guest goes on as soon as it is woken. It has it go on by
//! itself when it is to send its memory, and leaves it standing still when it is reset (tried with 7.2, docs/decisions/293).

use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::time::timeout;
use vmseal_api::host::VmSpec;
use vmseal_api::problem::Problem;

use super::internal;
use crate::hypervisor::plug;
use crate::hypervisor::qmp::{Event, Qmp, QmpError};
use crate::rules;

/// QEMU's status of a guest that sleeps.
const ASLEEP: &str = "suspended";

/// The first version of QEMU that stops a guest that sleeps, and saves it as it is.
const KEPT_ASLEEP_SINCE: u64 = 9;

/// How long QEMU may take to report that it has woken the guest. It stops the processors and resets the machine for that, and waits for
/// nothing that the guest does. The owner of the VM does nothing else meanwhile, so it is half of what a command may take.
const WAKES_WITHIN: Duration = Duration::from_secs(10);

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

/// Wakes the guest: it is awake when QEMU reports that. All that QEMU reports meanwhile is added to `reported`, in its order, and is to be
/// handled.
///
/// # Errors
/// `wrong-state`: the guest is awake. `timed-out`: whether it has woken is not known. `internal`: QEMU's.
pub async fn wake(
    qmp: &Qmp,
    spec: &VmSpec,
    events: &mut mpsc::Receiver<Event>,
    reported: &mut Vec<Event>,
) -> Result<(), Problem> {
    wake_within(qmp, spec, events, reported, WAKES_WITHIN).await
}

async fn wake_within(
    qmp: &Qmp,
    spec: &VmSpec,
    events: &mut mpsc::Receiver<Event>,
    reported: &mut Vec<Event>,
    limit: Duration,
) -> Result<(), Problem> {
    if !is_asleep(qmp).await.map_err(internal)? {
        return Err(rules::not_asleep(spec));
    }
    // The report of an earlier time that it woke, after which it fell asleep again, is not the answer.
    while let Ok(event) = events.try_recv() {
        reported.push(event);
    }
    match qmp.execute("system_wakeup", Value::Null).await {
        Ok(_) => {}
        Err(error @ QmpError::TimedOut { .. }) => {
            return Err(rules::may_be_awake(spec, &error.to_string()));
        }
        Err(error) => {
            // Something else may have woken it in between, as an alarm of its clock.
            let refused = matches!(error, QmpError::Refused { .. });
            return match refused && !is_asleep(qmp).await.map_err(internal)? {
                true => Err(rules::not_asleep(spec)),
                false => Err(internal(error)),
            };
        }
    }
    let woken = async {
        while let Some(event) = events.recv().await {
            let is_awake = event == Event::GuestAwake;
            reported.push(event);
            if is_awake {
                return Ok(());
            }
        }
        Err(internal("QEMU has ended while it was to wake the guest"))
    };
    match timeout(limit, woken).await {
        Ok(woken) => woken,
        Err(_) => {
            let seconds = limit.as_secs();
            let why = format!("QEMU was told to wake it, and has not reported it for {seconds} s");
            Err(rules::may_be_awake(spec, &why))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    use serde_json::json;
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    use tokio::net::UnixListener;
    use tokio::time::sleep;
    use vmseal_api::problem::ErrorCode;

    use super::*;
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
            for part in
                ["is not paused", "sleeps", "vmseal vm wakeup guest", "vmseal vm reset guest"]
            {
                assert!(refused.detail.contains(part), "{part}: {refused}");
            }
        }
    }

    #[tokio::test]
    async fn a_guest_that_sleeps_is_woken_and_one_that_is_awake_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let (_guard, qmp, mut events) = start(directory.path()).await;
        let (spec, mut reported) = (spec(), Vec::new());
        let awake = wake(&qmp, &spec, &mut events, &mut reported).await.unwrap_err();
        assert_eq!(awake.code, ErrorCode::WrongState, "{awake}");
        assert!(awake.detail.contains("is not suspended to RAM"), "{awake}");
        qmp.execute("cont", Value::Null).await.unwrap();
        // It has set no place to wake at: the firmware has it boot, and it sleeps again.
        for _ in 0..2 {
            falls_asleep(&mut events).await;
            assert!(is_asleep(&qmp).await.unwrap());
            reported.clear();
            wake(&qmp, &spec, &mut events, &mut reported).await.unwrap();
            assert_eq!(reported.last(), Some(&Event::GuestAwake), "{reported:?}");
        }
    }

    /// A QEMU whose guest sleeps: it answers each command with the next of these, and says no more.
    async fn pretender(
        directory: &Path,
        answers: Vec<&'static str>,
    ) -> (Qmp, mpsc::Receiver<Event>) {
        let socket = directory.join("pretender");
        let listener = UnixListener::bind(&socket).unwrap();
        tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            let (reader, mut writer) = stream.into_split();
            let mut lines = BufReader::new(reader).lines();
            writer.write_all(b"{\"QMP\":{}}\n").await.unwrap();
            // The first command is the negotiation.
            for (id, answer) in (1..).zip([r#""return":{}"#].into_iter().chain(answers)) {
                if lines.next_line().await.unwrap().is_none() {
                    return;
                }
                let answer = format!("{{\"id\":{id},{answer}}}\n");
                writer.write_all(answer.as_bytes()).await.unwrap();
            }
            // The connection stays until the agent goes.
            let _ = lines.next_line().await;
        });
        Qmp::connect(&socket).await.unwrap()
    }

    const SLEEPS: &str = r#""return":{"running":false,"status":"suspended"}"#;
    const RUNS: &str = r#""return":{"running":true,"status":"running"}"#;
    const REFUSES: &str = r#""error":{"class":"GenericError","desc":"guest is not suspended"}"#;

    #[tokio::test]
    async fn whether_a_guest_has_woken_is_not_known_where_qemu_does_not_report_it() {
        let directory = tempfile::tempdir().unwrap();
        let answers = vec![SLEEPS, r#""return":{}"#];
        let (qmp, mut events) = pretender(directory.path(), answers).await;
        let (spec, mut reported, limit) = (spec(), Vec::new(), Duration::from_secs(1));
        let woken = wake_within(&qmp, &spec, &mut events, &mut reported, limit).await;
        let unknown = woken.unwrap_err();
        assert_eq!(unknown.code, ErrorCode::TimedOut, "{unknown}");
        for part in ["is not known", "for 1 s", "vmseal vm show guest"] {
            assert!(unknown.detail.contains(part), "{part}: {unknown}");
        }
    }

    #[tokio::test]
    async fn a_guest_that_wakes_by_itself_meanwhile_is_awake_and_another_refusal_is_qemus() {
        for (after, expected) in [(RUNS, ErrorCode::WrongState), (SLEEPS, ErrorCode::Internal)] {
            let directory = tempfile::tempdir().unwrap();
            let answers = vec![SLEEPS, REFUSES, after];
            let (qmp, mut events) = pretender(directory.path(), answers).await;
            let refused = wake(&qmp, &spec(), &mut events, &mut Vec::new()).await.unwrap_err();
            assert_eq!(refused.code, expected, "{refused}");
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
