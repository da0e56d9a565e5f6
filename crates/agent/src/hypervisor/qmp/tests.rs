use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;

use super::*;

/// QEMU without a machine, killed when dropped.
struct Qemu(Child);

impl Drop for Qemu {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

fn socket(directory: &tempfile::TempDir) -> PathBuf {
    directory.path().join("qmp")
}

async fn qemu(directory: &tempfile::TempDir) -> (Qemu, Qmp, mpsc::Receiver<Event>) {
    let path = socket(directory);
    let monitor = format!("unix:{},server=on,wait=off", path.display());
    let child = Command::new("qemu-system-x86_64")
        .args(["-S", "-machine", "none", "-nodefaults", "-display", "none", "-qmp", &monitor])
        .stdin(Stdio::null())
        .spawn()
        .expect("qemu-system-x86_64 is installed (scripts/prerequisites)");
    let guard = Qemu(child);
    for _ in 0..300 {
        match Qmp::connect(&path).await {
            Ok((qmp, events)) => return (guard, qmp, events),
            Err(QmpError::Io(_)) => tokio::time::sleep(Duration::from_millis(100)).await,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("QEMU has not opened its monitor");
}

#[tokio::test]
async fn commands_errors_descriptors_and_events_of_a_real_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let (_guard, qmp, mut events) = qemu(&directory).await;

    let status = qmp.execute("query-status", Value::Null).await.unwrap();
    assert_eq!(status["status"], "prelaunch");
    let refused = qmp.execute("no-such-command", Value::Null).await.unwrap_err();
    assert!(matches!(&refused, QmpError::Refused { class, .. } if class == "CommandNotFound"));

    // The longest answer there is, several at a time.
    let schema = || qmp.execute("query-qmp-schema", Value::Null);
    let (one, two, three) = tokio::join!(schema(), schema(), schema());
    let length = one.unwrap().as_array().unwrap().len();
    assert!(length > 500);
    assert_eq!(two.unwrap().as_array().unwrap().len(), length);
    assert_eq!(three.unwrap().as_array().unwrap().len(), length);

    let file = std::fs::File::open("/dev/null").unwrap();
    let closed = qmp.execute("closefd", json!({"fdname": "null"})).await.unwrap_err();
    assert!(matches!(closed, QmpError::Refused { .. }));
    qmp.pass_descriptor("null", file.as_fd()).await.unwrap();
    qmp.execute("closefd", json!({"fdname": "null"})).await.unwrap();

    qmp.execute("quit", Value::Null).await.unwrap();
    assert_eq!(events.recv().await, Some(Event::Shutdown(ShutdownReason::Host)));
    assert_eq!(events.recv().await, None);
    let after = qmp.execute("query-status", Value::Null).await.unwrap_err();
    assert!(matches!(after, QmpError::Closed | QmpError::Io(_)), "{after}");
}

/// A fake QEMU: greets, reads one line, and sends the given answers.
async fn pretender(directory: &tempfile::TempDir, answers: Vec<Vec<u8>>) {
    let listener = UnixListener::bind(socket(directory)).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"{\"QMP\":{}}\n").await.unwrap();
        let mut request = [0; 512];
        for answer in answers {
            if stream.read(&mut request).await.unwrap() == 0
                || stream.write_all(&answer).await.is_err()
            {
                return;
            }
        }
    });
}

#[tokio::test]
async fn a_monitor_that_closes_ends_the_call() {
    let directory = tempfile::tempdir().unwrap();
    pretender(&directory, vec![b"{\"return\":{},\"id\":1}\n".to_vec()]).await;
    let (qmp, _events) = Qmp::connect(&socket(&directory)).await.unwrap();
    let error = qmp.execute("quit", Value::Null).await.unwrap_err();
    assert!(matches!(error, QmpError::Closed), "{error}");
}

#[tokio::test]
async fn a_line_without_end_and_a_line_that_is_not_json_end_the_connection() {
    for answer in [vec![b'x'; LINE_MAX + 2 * 16 * 1024], b"hello\n".to_vec()] {
        let directory = tempfile::tempdir().unwrap();
        pretender(&directory, vec![answer]).await;
        let error = Qmp::connect(&socket(&directory)).await.unwrap_err();
        assert!(matches!(error, QmpError::Closed), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_monitor_that_is_silent_is_timed_out() {
    let directory = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(socket(&directory)).unwrap();
    let error = Qmp::connect(&socket(&directory)).await.unwrap_err();
    assert!(matches!(error, QmpError::TimedOut { .. }), "{error}");
    drop(listener);
}

#[tokio::test]
async fn a_command_may_take_as_long_as_it_is_allowed() {
    let directory = tempfile::tempdir().unwrap();
    // It answers no more then, and keeps its connection.
    let silence = vec![Vec::new(); 3];
    let answers = [vec![b"{\"return\":{},\"id\":1}\n".to_vec()], silence].concat();
    pretender(&directory, answers).await;
    let (qmp, _events) = Qmp::connect(&socket(&directory)).await.unwrap();
    tokio::time::pause();
    for limit in [COMMAND_TIMEOUT * 4, COMMAND_TIMEOUT / 4] {
        let begun = tokio::time::Instant::now();
        let answer = qmp.execute_within("query-migrate", Value::Null, limit).await;
        let error = answer.unwrap_err();
        assert!(matches!(error, QmpError::TimedOut { seconds, .. } if seconds == limit.as_secs()));
        assert!(begun.elapsed() >= limit && begun.elapsed() < limit + Duration::from_secs(1));
    }
}

#[test]
fn the_reasons_of_an_end_are_distinguished() {
    let event = |reason: &str| {
        let line = format!("{{\"event\":\"SHUTDOWN\",\"data\":{{\"reason\":\"{reason}\"}}}}");
        match wire::parse(line.as_bytes()).unwrap() {
            Incoming::Event(Event::Shutdown(reason)) => reason,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(event("guest-shutdown"), ShutdownReason::Guest);
    assert_eq!(event("guest-panic"), ShutdownReason::Panic);
    assert_eq!(event("host-signal"), ShutdownReason::Host);
    assert_eq!(event("new-thing"), ShutdownReason::Other("new-thing".to_owned()));
}
