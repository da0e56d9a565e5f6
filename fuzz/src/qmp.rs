//! What QEMU's monitor says to the agent, from its greeting on. Nobody waits for an answer that cannot
//! come any more, and what is sent to QEMU is QMP.

use std::ffi::OsStr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use vmseal_agent::hypervisor::qmp::Qmp;

use crate::INPUT_MAX;

/// The most lines. More events than the client keeps, before an answer, make it wait for the answer as
/// long as for any; which is right, and would only be slow here.
const LINES_MAX: usize = 200;

struct Monitor {
    runtime: Runtime,
    listener: UnixListener,
    /// The listener's, as tokio takes an abstract name.
    path: PathBuf,
}

impl Monitor {
    fn new() -> Self {
        let thread = std::thread::current().id();
        let name = format!("vmseal-fuzz-qmp-{}-{thread:?}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let listener = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let listener = runtime.block_on(async { UnixListener::from_std(listener).unwrap() });
        let path = PathBuf::from(OsStr::from_bytes(format!("\0{name}").as_bytes()));
        Self { runtime, listener, path }
    }
}

thread_local! {
    static MONITOR: Monitor = Monitor::new();
}

/// The client's side; whether QEMU was understood.
async fn client(path: &Path) -> bool {
    let Ok((qmp, mut events)) = Qmp::connect(path).await else { return false };
    let listening = async { while events.recv().await.is_some() {} };
    let _ = tokio::join!(qmp.execute("query-status", Value::Null), listening);
    true
}

/// QEMU's side; what it was sent.
async fn qemu(listener: &UnixListener, data: &[u8]) -> Vec<u8> {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut sent = Vec::new();
    // The client may have gone already.
    let _ = stream.write_all(data).await;
    let _ = stream.shutdown().await;
    let _ = stream.read_to_end(&mut sent).await;
    sent
}

/// See the module.
pub fn run(data: &[u8]) {
    let data = &data[..data.len().min(INPUT_MAX)];
    let lines = data.split_inclusive(|&byte| byte == b'\n').take(LINES_MAX);
    let data = &data[..lines.map(<[u8]>::len).sum()];
    let (understood, sent) = MONITOR.with(|Monitor { runtime, listener, path }| {
        runtime.block_on(async { tokio::join!(client(path), qemu(listener, data)) })
    });
    let commands = serde_json::Deserializer::from_slice(&sent).into_iter::<Value>();
    let names: Vec<Value> = commands.map(|command| command.unwrap()["execute"].take()).collect();
    assert!(names.is_empty() || names[0] == "qmp_capabilities", "{names:?}");
    assert!(!understood || data.windows(5).any(|part| part == b"\"QMP\""));
}
