//! `vmseal disk expose`: a disk as a local NBD socket, for as long as the command runs.
//!
//! Each connection to the socket is a stream over the server to the disk's host; one more stream keeps the disk
//! exposed. The socket exists while the disk is open. The command removes it unless it is killed; the next one
//! replaces what a killed one left.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use nix::sys::stat::{Mode, umask};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::{interval, timeout};
use vmseal_api::carry::MESSAGE_MAX;
use vmseal_api::client::ServerClient;
use vmseal_api::console::ConsoleStream;
use vmseal_api::expose::{HOLD, HOLD_INTERVAL, LET_GO};
use vmseal_api::host::Exposing;
use vmseal_api::model::{Disk, Vm};

use super::console::EndSignals;
use crate::arguments::Expose;
use crate::exit::{Ended, Exit};
use crate::print;

/// The most connections at a time; more wait. The disk's host serves a few of them at a time.
const CONNECTIONS_MAX: usize = 16;

/// The longest error text that is read, in bytes.
const ERROR_MAX: u64 = 16 * 1024;

/// How long the host may take to flush and free the disk.
const LET_GO_TIMEOUT: Duration = Duration::from_secs(45);

/// The local socket; removed at the end.
struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    /// Whether there is a socket to replace: one that nobody listens on.
    fn check(path: &Path) -> anyhow::Result<bool> {
        let Ok(metadata) = path.symlink_metadata() else { return Ok(false) };
        let used = std::os::unix::net::UnixStream::connect(path).is_ok();
        if used || !metadata.file_type().is_socket() {
            let message = format!("{} exists already: choose another path", path.display());
            return Err(Ended::new(Exit::Usage, message).into());
        }
        Ok(true)
    }

    fn listen(path: &Path) -> anyhow::Result<Self> {
        let cannot = || format!("cannot listen at {}", path.display());
        if Self::check(path)? {
            std::fs::remove_file(path).with_context(cannot)?;
        }
        // No other user can connect, not even for a moment.
        let before = umask(Mode::from_bits_truncate(0o177));
        let listener = UnixListener::bind(path);
        umask(before);
        Ok(Self { path: path.to_owned(), listener: listener.with_context(cannot)? })
    }

    /// The address for tools.
    fn uri(&self) -> anyhow::Result<String> {
        let path = std::path::absolute(&self.path)?;
        let escaped = path.as_os_str().as_encoded_bytes().iter().map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' | b'~' => {
                char::from(*byte).to_string()
            }
            other => format!("%{other:02X}"),
        });
        Ok(format!("nbd+unix:///?socket={}", escaped.collect::<String>()))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Exposes the disk until a signal comes, or the other side ends it.
pub async fn run(
    server: ServerClient,
    vm: &Vm,
    disk: &Disk,
    options: &Expose,
) -> anyhow::Result<()> {
    let mut ends = EndSignals::listen().context("cannot listen for signals")?;
    let snapshot = options.snapshot.as_deref();
    let what = Exposing::of_query(false, options.writable, snapshot, options.sealed)?;
    // Checked before the disk is opened, created after: a tool that sees the socket can connect.
    Socket::check(&options.socket)?;
    let (vm_id, disk_id) = (vm.id.to_string(), disk.id.to_string());
    let mut holder = tokio::select! {
        holder = server.expose(&vm_id, &disk_id, what) => holder?,
        () = ends.any() => return Err(interrupted().into()),
    };
    let socket = match Socket::listen(&options.socket) {
        Ok(socket) => socket,
        Err(error) => {
            // The first error is reported.
            let _ = let_go(&mut holder).await;
            return Err(error);
        }
    };
    print::print(&format!("{}\n", socket.uri()?))?;
    print::say(format_args!(
        "disk '{}' of VM '{}' is exposed {}; Ctrl-C ends it",
        disk.name,
        vm.name,
        described(what)
    ));
    let server = Arc::new(server);
    let connections = accept(&socket.listener, &server, &vm_id, &disk_id);
    tokio::select! {
        failed = connections => return failed,
        lost = hold(&mut holder) => {
            let detail = if lost.is_empty() { "its VM was stopped, or the connection was lost" } else { &lost };
            let message = format!("disk '{}' is no longer exposed: {detail}", disk.name);
            return Err(Ended::new(Exit::NoAnswer, message).into());
        }
        () = ends.any() => {}
    }
    drop(socket);
    let_go(&mut holder).await
}

/// How a disk is exposed, for people.
fn described(what: Exposing<&str>) -> String {
    let kept = match what {
        Exposing::HoldKept { snapshot, .. } => format!(" as snapshot '{snapshot}' keeps it"),
        _ => String::new(),
    };
    let writable = matches!(what, Exposing::Hold { writable: true });
    let how = if writable { "for reading and writing" } else { "read-only" };
    let sealed = if what.is_sealed() { ", as ciphertext" } else { "" };
    format!("{how}{kept}{sealed}")
}

fn interrupted() -> Ended {
    Ended::new(Exit::Interrupted, "interrupted before the disk was exposed")
}

/// Holds the disk; gives the error text once it is no longer held.
async fn hold(holder: &mut ConsoleStream) -> String {
    let mut often = interval(HOLD_INTERVAL);
    let (mut from, mut to) = tokio::io::split(holder);
    let mut words = Vec::new();
    let mut from = (&mut from).take(ERROR_MAX);
    let reading = from.read_to_end(&mut words);
    tokio::pin!(reading);
    loop {
        tokio::select! {
            _ = &mut reading => break,
            _ = often.tick() => {
                // Reading reports an error.
                let _ = to.write_all(&[HOLD]).await;
            }
        }
    }
    String::from_utf8_lossy(&words).into_owned()
}

/// Ends the exposure, and waits until the disk is flushed and free.
async fn let_go(holder: &mut ConsoleStream) -> anyhow::Result<()> {
    let mut words = String::new();
    let ending = async {
        holder.write_all(&[LET_GO]).await?;
        holder.take(ERROR_MAX).read_to_string(&mut words).await
    };
    match timeout(LET_GO_TIMEOUT, ending).await {
        Ok(Ok(_)) if words.is_empty() => Ok(()),
        Ok(Ok(_)) => Err(Ended::new(Exit::Failed, words).into()),
        Ok(Err(_)) | Err(_) => {
            let message = "it is not known whether everything is flushed: the host has not said so";
            Err(Ended::new(Exit::NoAnswer, message).into())
        }
    }
}

/// Accepts connections and forwards each.
async fn accept(
    listener: &UnixListener,
    server: &Arc<ServerClient>,
    vm: &str,
    disk: &str,
) -> anyhow::Result<()> {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let place = places.clone().acquire_owned().await?;
        let (tool, _) = listener.accept().await.context("cannot accept a connection")?;
        let (server, vm, disk) = (Arc::clone(server), vm.to_owned(), disk.to_owned());
        tokio::spawn(async move {
            let _place = place;
            if let Err(problem) = forward(tool, &server, &vm, &disk).await {
                print::say(format_args!("a connection was ended: {problem}"));
            }
        });
    }
}

async fn forward(
    mut tool: UnixStream,
    server: &ServerClient,
    vm: &str,
    disk: &str,
) -> Result<(), vmseal_api::problem::Problem> {
    let mut host = server.expose(vm, disk, Exposing::Connect).await?;
    // The tool sees an error as the end of its connection.
    let _ = copy_bidirectional_with_sizes(&mut tool, &mut host, MESSAGE_MAX, MESSAGE_MAX).await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn the_socket_is_private_replaces_no_file_and_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a b%.sock");
        let socket = Socket::listen(&path).unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let uri = socket.uri().unwrap();
        assert!(
            uri.starts_with("nbd+unix:///?socket=/") && uri.ends_with("/a%20b%25.sock"),
            "{uri}"
        );
        assert!(Socket::listen(&path).is_err(), "it is in use");
        drop(socket);
        assert!(!path.exists());
        // The socket that a killed command leaves. A process that another test starts has the listener for a moment, too.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        while std::os::unix::net::UnixStream::connect(&path).is_ok() {
            tokio::task::yield_now().await;
        }
        drop(Socket::listen(&path).unwrap());
        std::fs::write(&path, "mine").unwrap();
        assert!(Socket::listen(&path).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }

    #[tokio::test]
    async fn errors_are_reported_however_it_ends() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let mut holder: ConsoleStream = Box::new(ours);
        let host = async {
            assert_eq!(theirs.read_u8().await.unwrap(), HOLD);
            theirs.write_all(b"the filter died").await.unwrap();
            drop(theirs);
        };
        let (words, ()) = tokio::join!(hold(&mut holder), host);
        assert_eq!(words, "the filter died");
        for words in ["", "not flushed"] {
            let (ours, mut theirs) = tokio::io::duplex(64);
            let mut holder: ConsoleStream = Box::new(ours);
            let host = async {
                assert_eq!(theirs.read_u8().await.unwrap(), LET_GO);
                theirs.write_all(words.as_bytes()).await.unwrap();
                drop(theirs);
            };
            let (ended, ()) = tokio::join!(let_go(&mut holder), host);
            assert_eq!(ended.is_ok(), words.is_empty());
        }
    }
}
